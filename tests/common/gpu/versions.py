# SPDX-License-Identifier: Apache-2.0
"""Leaves out tests of what the cuDNN that is loaded is too old for."""

import pytest

from jax_cudnn import native
from jax_cudnn.graph import version_text

# What a refusal says where the loaded version is wrong (docs/known_bugs.md).
REFUSED_BY_VERSION = "Use cuDNN 9."


def needs_cudnn(version: int, what: str) -> None:
    """Skip the test, or all that a fixture is for, where cuDNN is older than that."""
    loaded = native.cudnn_version()
    if loaded.version < version:
        pytest.skip(
            f"cuDNN {loaded.version_text}: {what} is run with cuDNN "
            f"{version_text(version)} and newer"
        )
