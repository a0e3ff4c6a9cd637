# SPDX-License-Identifier: Apache-2.0
"""Judges a kernel by those that tables have measured, of any family."""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jax_cudnn.graph import Target
from jax_cudnn.policy.nearest import (
    FAR,
    LOSS,
    Kernel,
    Measured,
    Neighbour,
    Verdict,
    verdict_of,
)
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
    kernel: Kernel, tables: Tables, last: Table | None = None
) -> Verdict | None:
    """Judge a kernel by those of the tables, up to a last one if it is given."""
    # Where rows are the alternative, kernels have to be like this one.
    most_apart = FAR if last is not None else math.inf
    return _verdict(_near(kernel, tables, last), None, most_apart)


def slow_engines(kernel: Kernel, tables: Tables) -> tuple[int, ...]:
    """Return the engines with which the kernels most like one were not faster.

    So they decide on other architectures, too, where nothing nearer was measured. A
    number may mean another engine there, and XLA's code is the safe choice.
    """
    near = _near(kernel, tables)
    every = sorted({engine for _, each, _ in near for engine in each.engines})
    verdicts = ((engine, _verdict(near, engine)) for engine in every)
    return tuple(e for e, found in verdicts if found and not found.is_faster)


_Found = Sequence[tuple[float, Neighbour, int]]


def _near(kernel: Kernel, tables: Tables, last: Table | None = None) -> _Found:
    """Return the kernels near one, by how much their table is away, and its place."""
    found: list[tuple[float, Neighbour, int]] = []
    for place, table in enumerate(tables.tables):
        more = tables.distances[place]
        found += ((more, x, place) for x in kernels(table).neighbours(kernel))
        if table is last:
            break
    return found


def _verdict(
    near: _Found, engine: int | None, most_apart: float = math.inf
) -> Verdict | None:
    def judged() -> Iterator[tuple[float, float, int]]:
        for more, each, place in near:
            distance, ratio = each.by(engine)
            yield distance + more, ratio, place

    return verdict_of(judged(), most_apart)


def described(kernel: Kernel, verdict: Verdict) -> str:
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
    return ", ".join(f"{count} kernels {table}" for table, count in counts.items())
