# SPDX-License-Identifier: Apache-2.0
"""Is docs/attention_support.md what the pinned cuDNN answers?"""

import json

import pytest

from jax_cudnn import native
from scripts.attention_support import DATA, GPUS, PAGE, answers, page
from tests.gpuless.harness import CUDNN

_DATA = json.loads(DATA.read_text())


def test_the_page_is_written_from_its_data() -> None:
    assert PAGE.read_text() == page(_DATA)


@pytest.mark.parametrize("gpu", GPUS)
def test_the_newest_column_is_what_cudnn_answers(gpu: str) -> None:
    newest = _DATA[-1]
    assert newest["cudnn"] == native.version_text(CUDNN)
    assert answers(gpu) == newest["gpus"][gpu]
