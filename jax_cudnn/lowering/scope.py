# SPDX-License-Identifier: Apache-2.0
"""The settings in force where a call is traced; part of jit's cache key.

A call's own arguments go before them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jax_cudnn.choices import Trial
from jax_cudnn.config import (
    Implementation,
    MatmulPrecision,
    Options,
    PlanOptions,
    ReduceDtype,
    check_plan,
)
from jax_cudnn.graph import Graph


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Settings for the calls that are traced and compiled inside a `with` block.

    ``tuner`` is told of each graph before it is decided who runs it. ``trial`` has
    choices that go before all others. ``record`` names the record (partitioned.py) that
    programs lowered here write instead of planning.
    """

    implementation: Implementation = "auto"
    plan: PlanOptions = field(default_factory=PlanOptions)
    device: str | None = None
    reduce_dtype: ReduceDtype = "f32"
    tuner: Callable[[Graph, Options], None] | None = None
    trial: Trial | None = None
    record: str = ""


_scope = jax.make_user_context(Scope())


def scope() -> Scope:
    """Return the scope that a call is traced in."""
    return _scope.value


def is_tuning() -> bool:
    """Whether programs are traced to measure what runs them fastest."""
    return scope().tuner is not None


def scoped(**changes: Any) -> AbstractContextManager[None]:
    """Return a context with some fields of the present scope replaced."""
    return _scope(replace(scope(), **changes))


def call_options(
    implementation: Implementation | None,
    plan: PlanOptions | None,
    matmul_precision: MatmulPrecision,
) -> Options:
    """Return a call's options: its own arguments, else what its scope says."""
    around = scope()
    if plan is not None:
        check_plan(plan)
    return Options(
        implementation=around.implementation
        if implementation in (None, "auto")
        else implementation,
        matmul_precision=matmul_precision,
        plan=around.plan if plan is None else plan,
        device=around.device,
        reduce_dtype=around.reduce_dtype,
    )
