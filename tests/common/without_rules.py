# SPDX-License-Identifier: Apache-2.0
"""A fixture for tests that ask whether cuDNN has a plan, not whether "auto" takes it.

What "auto" goes by is asked in tests/policy and in each family's tests.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from jax_cudnn.lowering.decision import forget_decisions
from jax_cudnn.policy import tables
from jax_cudnn.policy.ranking import UNLIKE_ALL


def _decides_by_size(row: tables.Row) -> bool:
    """Whether a row is about small attention, or what is like nothing measured."""
    return bool({"scores", "keys"} & row.when.keys()) or row.of.endswith(UNLIKE_ALL)


@pytest.fixture
def without_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no contraction or small attention to XLA by what was measured of others."""
    found = tuple(
        replace(
            table,
            rows=[row for row in table.rows if not _decides_by_size(row)],
            data={**table.data, "kernels": [], "slow_engines": {}},
        )
        for table in tables.shipped()
    )
    monkeypatch.setattr(tables, "shipped", lambda: found)
    forget_decisions()
    yield
    forget_decisions()
