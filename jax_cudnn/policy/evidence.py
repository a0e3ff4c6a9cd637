# SPDX-License-Identifier: Apache-2.0
"""Judges a kernel by those that tables have measured, of any family."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax_cudnn.graph import Target
from jax_cudnn.policy.nearest import FAR, LOSS, Kernel, Measured, Verdict, verdict_of
from jax_cudnn.policy.tables import Table, Tables


@functools.lru_cache(maxsize=16)
def kernels(table: Table) -> Measured:
    """Return the kernels that were measured."""
    return Measured(map(_kernel_of, table.data.get("kernels", ())))


def _kernel_of(entry: Sequence[Any]) -> tuple[Kernel, float]:
    name, rows, columns, depth, ratio, *others = entry
    engines = {int(engine): x for each in others for engine, x in each.items()}
    return Kernel(
        name=name, rows=rows, columns=columns, depth=depth, engines=engines
    ), ratio


def verdict_on(
    kernel: Kernel,
    tables: Tables,
    last: Table | None = None,
    engine: int | None = None,
) -> Verdict | None:
    """Judge a kernel by those of the tables, up to a last one if it is given.

    With an engine, it is judged as if that one had cuDNN's first plan.
    """
    found: list[tuple[float, float, int]] = []
    for place, table in enumerate(tables.tables):
        more, near = tables.apart[place], kernels(table).near(kernel, engine)
        found += ((apart + more, ratio, place) for apart, ratio in near)
        if table is last:
            break
    # Where rows are the alternative, kernels have to be like this one.
    return verdict_of(found, FAR if last is not None else math.inf)


def slow_engines(kernel: Kernel, tables: Tables) -> tuple[int, ...]:
    """Return the engines with which the kernels most like one were not faster.

    The number of an engine means the same on all GPUs, as far as it was seen, and what
    was measured elsewhere counts as further away.
    """
    every = {e for table in tables.tables for e in kernels(table).engines(kernel)}
    verdicts = {e: verdict_on(kernel, tables, engine=e) for e in sorted(every)}
    return tuple(e for e, found in verdicts.items() if found and not found.is_faster)


def told(kernel: Kernel, verdict: Verdict) -> str:
    """Say why "auto" leaves a kernel to XLA."""
    return (
        f"cuDNN's first plan may be slower: for {verdict.losses} of the "
        f"{verdict.count} measured kernels most like this one ({kernel.name}) it took "
        f"more than {LOSS} of the time of XLA's code, and {verdict.ratio:.2f} in the "
        "mean; plans.autotune finds the best of both"
    )


def source(verdict: Verdict, tables: Tables, target: Target | None) -> str:
    """Say which tables the kernels are from that judged."""
    counts = Counter(tables.tables[place].source(target) for place in verdict.tables)
    return ", ".join(f"{count} kernels {told}" for told, count in counts.items())
