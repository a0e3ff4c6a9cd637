# SPDX-License-Identifier: Apache-2.0
"""Tests docs/attention_support.md and operation_support.md against the pinned cuDNN."""

import json
from typing import Any

import pytest

from jax_cudnn import native
from tests.common.gpuless.harness import CUDNN
from tests.tools.script import load_script

pytestmark = pytest.mark.sampled

_SCRIPT = load_script("plan_support")
_PAGES = pytest.mark.parametrize("page", _SCRIPT.PAGES, ids=lambda page: page.name)


@_PAGES
def test_the_page_is_written_from_its_data(page: Any) -> None:
    assert page.path.read_text() == _SCRIPT.text(
        page, json.loads(page.data.read_text())
    )


@_PAGES
@pytest.mark.parametrize("gpu", _SCRIPT.GPUS)
def test_the_pinned_version_answers_what_the_data_has(page: Any, gpu: str) -> None:
    found = {x["cudnn"]: x for x in json.loads(page.data.read_text())}
    pinned = found[native.version_text(CUDNN)]
    assert _SCRIPT.answers(page, gpu) == pinned["gpus"][gpu]


@_PAGES
def test_the_data_has_every_version(page: Any) -> None:
    told = [x["cudnn"] for x in json.loads(page.data.read_text())]
    assert told == [each.rpartition(".")[0] for each in _SCRIPT.VERSIONS]
