# SPDX-License-Identifier: Apache-2.0
"""Made-up tables that decide before those of the package, for tests."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from jax_cudnn.graph import Target
from jax_cudnn.lowering.decision import forget_decisions
from jax_cudnn.policy import tables
from jax_cudnn.policy.tables import Table


@contextmanager
def decided_by(
    target: Target,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    orders: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Table]:
    """Have rows and orders decide for a target, before what was measured."""
    first, cudnn = tables.shipped(), target.cudnn_version // 100
    made = Table.of(
        {"sm_version": target.sm_version, "cudnn": cudnn}
        | {"rows": [*rows], "orders": [*orders]}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "shipped", lambda: (made, *first))
        forget_decisions()
        jax.clear_caches()
        yield made
    forget_decisions()
    jax.clear_caches()
