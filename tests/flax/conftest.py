# SPDX-License-Identifier: Apache-2.0
"""What is logged where Flax's own attention runs."""

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that lists what was said since the test began."""
    from jax_cudnn.flax import delegate

    delegate._say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="jax_cudnn")
    return lambda: [record.getMessage() for record in caplog.records]
