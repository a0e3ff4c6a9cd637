# SPDX-License-Identifier: Apache-2.0
"""A fixture for tests that ask whether cuDNN has a plan, not whether "auto" takes it.

What "auto" goes by is asked in tests/policy and in each family's tests.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from jax_cudnn.lowering.decision import forget_decisions
from jax_cudnn.policy import tables

# What rows about small attention go by.
_SIZES = {"scores", "keys"}


@pytest.fixture
def without_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no contraction or small attention to XLA by what was measured of others."""
    found = tuple(
        replace(
            table,
            rows=[row for row in table.rows if not _SIZES & row.when.keys()],
            data={**table.data, "kernels": [], "slow_engines": {}},
        )
        for table in tables.shipped()
    )
    monkeypatch.setattr(tables, "shipped", lambda: found)
    forget_decisions()
    yield
    forget_decisions()
