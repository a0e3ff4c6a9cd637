# SPDX-License-Identifier: Apache-2.0
"""Is docs/attention_support.md what the pinned cuDNN answers?"""

import json

import pytest

from jax_cudnn import native
from tests.gpuless.harness import CUDNN
from tests.script import load_script

pytestmark = pytest.mark.sampled

_SCRIPT = load_script("attention_support")
_DATA = json.loads(_SCRIPT.DATA.read_text())


def test_the_page_is_written_from_its_data() -> None:
    assert _SCRIPT.PAGE.read_text() == _SCRIPT.page(_DATA)


@pytest.mark.parametrize("gpu", _SCRIPT.GPUS)
def test_the_newest_column_is_what_cudnn_answers(gpu: str) -> None:
    newest = _DATA[-1]
    assert newest["cudnn"] == native.version_text(CUDNN)
    assert _SCRIPT.answers(gpu) == newest["gpus"][gpu]
