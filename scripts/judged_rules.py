# SPDX-License-Identifier: Apache-2.0
"""Judges how well measured kernels tell of others, which "auto" runs untuned.

How well this does is judged in blocks of kernels, each by the others, without those
that were measured right before and after its block: these may be of the same call.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.products.fusion_cells import CELLS
from jax_cudnn import choices
from jax_cudnn.calibration.rules import (
    TOGETHER,
    Rules,
    blocks,
    of_rows,
    preference_for,
    rules_of,
)
from jax_cudnn.graph import label
from jax_cudnn.lowering import traced_program
from jax_cudnn.policy.nearest import Kernel, Measured
from jax_cudnn.policy.products.kernels import kernel_of
from jax_cudnn.policy.tables import tables_for


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A kernel, and whether cuDNN runs it by what is known of the others.

    ``best_ratio`` is with the fastest of the engines' first plans.
    """

    kernel: Kernel
    ratio: float
    best_ratio: float
    is_cudnns: bool


def of_cells(rules: Rules) -> Iterator[tuple[Kernel, float]]:
    """Yield the kernels of the fusion benchmarks, by the times of shipped choices.

    These do not say what other kernels would take, so none may go before the first. Nor
    do they say which engine comes first: few are of one that gives way to another.
    """
    for kernel, op, ratio in _cells():
        if preference_for(kernel, op, rules.preferred) is None:
            yield kernel, ratio


@functools.cache
def _cells() -> Sequence[tuple[Kernel, str, float]]:
    times = {key.graph: choice for key, choice in choices.shipped().items()}
    found: dict[str, tuple[Kernel, str, float]] = {}
    for cell in CELLS:
        for part in _parts_of(cell):
            digest = choices.digest_of(part)
            choice, kernel = times.get(digest), kernel_of(part, tables_for(None))
            if choice is None or digest in found or kernel is None:
                continue
            if choice.cudnn_us and choice.xla_us and choice.first_ratio:
                ratio = choice.cudnn_us * choice.first_ratio / choice.xla_us
                found[digest] = kernel, label(part), round(ratio, 3)
    return [*found.values()]


def _parts_of(cell: Any) -> Iterator[Any]:
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cell.operands]

    def with_gradients(*operands: Any) -> Any:
        result, pullback = jax.vjp(cell.ours, *operands)
        return pullback(result)

    for function in (cell.ours, with_gradients):
        for graph in traced_program(function, *types).graphs:
            yield from graph.parts


def judged(
    rows: Sequence[Mapping[str, Any]], slow: Mapping[str, Sequence[int]], cudnn: int
) -> Iterator[Judged]:
    """Judge the kernels of rows in blocks, each by the others."""
    for block, others in blocks(rows, beside=TOGETHER):
        rules = rules_of(others, slow, cudnn)
        known = Measured([*of_rows(others, rules), *of_cells(rules)])
        for row in block:
            best = row["ratio"] * min(row["engines"].values())
            for kernel, ratio in of_rows([row], rules):
                engine = next(iter(kernel.engines))
                verdicts = known.verdict(kernel), known.verdict(kernel, engine)
                is_cudnns = all(each is None or each.is_faster for each in verdicts)
                yield Judged(
                    kernel=kernel,
                    ratio=ratio,
                    best_ratio=min(ratio, best),
                    is_cudnns=is_cudnns,
                )
