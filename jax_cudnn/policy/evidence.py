# SPDX-License-Identifier: Apache-2.0
"""Judges a kernel by those that tables have measured, of any family."""

import functools
import math
from collections import Counter

from jax_cudnn.graph import Target
from jax_cudnn.policy.nearest import FAR, LOSS, Kernel, Measured, Verdict, verdict_of
from jax_cudnn.policy.tables import Table, Tables


@functools.lru_cache(maxsize=16)
def kernels(table: Table) -> Measured:
    """Return the kernels that were measured."""
    return Measured(
        (Kernel(name=name, rows=rows, columns=columns, depth=depth), ratio)
        for name, rows, columns, depth, ratio in table.data.get("kernels", ())
    )


def verdict_on(
    kernel: Kernel, tables: Tables, last: Table | None = None
) -> Verdict | None:
    """Judge a kernel by those of the tables, up to a last one if it is given."""
    found: list[tuple[float, float, int]] = []
    for place, table in enumerate(tables.tables):
        more, near = tables.apart[place], kernels(table).near(kernel)
        found += ((apart + more, ratio, place) for apart, ratio in near)
        if table is last:
            break
    # Where rows are the alternative, kernels have to be like this one.
    return verdict_of(found, FAR if last is not None else math.inf)


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
