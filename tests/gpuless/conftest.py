# SPDX-License-Identifier: Apache-2.0
"""Marks the gpuless tests, and skips them where something they need is missing."""

from pathlib import Path

import pytest

from tests.gpuless import harness
from tests.without_rules import without_rules

__all__ = ["pytest_collection_modifyitems", "without_rules"]
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook sees the tests of all folders.
    ours = [item for item in items if _HERE in item.path.parents]
    reason = harness.missing() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.gpuless)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"gpuless: {reason}"))
