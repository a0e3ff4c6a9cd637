# SPDX-License-Identifier: Apache-2.0
"""Are docs/attention_support.md and operation_support.md what the pinned cuDNN says?"""

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
def test_the_newest_column_is_what_cudnn_answers(page: Any, gpu: str) -> None:
    newest = json.loads(page.data.read_text())[-1]
    assert newest["cudnn"] == native.version_text(CUDNN)
    assert _SCRIPT.answers(page, gpu) == newest["gpus"][gpu]
