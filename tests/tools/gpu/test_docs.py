# SPDX-License-Identifier: Apache-2.0
"""Runs the snippets of the guides on a GPU, including those that need one."""

from pathlib import Path

import pytest

from jax_cudnn import native
from tests.tools.snippets import DOCS, GUIDES, run, snippets

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", GUIDES)
def test_snippets_run(name: str, tmp_path: Path) -> None:
    page = DOCS / name
    for snippet, outcome in zip(
        snippets(page), run(page, tmp_path, "cuda,cpu"), strict=True
    ):
        where = f"{name}, line {snippet.line}"
        if snippet.cudnn_version > native.cudnn_version().version:
            continue
        assert not outcome.error, f"{where}\n{outcome.error}"
        # What the page shows is a CPU's answer; only that there is one is the same.
        if snippet.output is not None:
            assert outcome.output, where
