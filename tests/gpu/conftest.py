# SPDX-License-Identifier: Apache-2.0
"""Lets the GPU report tell tests that ended from those that were cut short."""

import pytest

from tests.without_rules import without_rules

__all__ = ["without_rules"]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Say so in the XML that scripts/gpu_report.py reads."""
    item.user_properties.append(("finished", "yes"))
