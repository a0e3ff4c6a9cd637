# SPDX-License-Identifier: Apache-2.0
"""Finds on one GPU from which size on grouped products pay by cuBLASLt.

    python -m benchmarks.small_groups --out docs/internals/measured

times grouped products by cuBLASLt and by XLA's code for `jax_cudnn.ragged_dot`, forward
and with all gradients, and writes small_groups.json and small_groups.md there. From
this table are the bounds from which "auto" takes cuBLASLt (jax_cudnn/data/policy).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from benchmarks.harness.call_times import compare
from benchmarks.harness.page import RANGE, Data, Page, Row, table_of
from benchmarks.harness.program import run_benchmark
from jax_cudnn.config import Implementation


@dataclass(frozen=True)
class _Case:
    """A grouped product in bf16, with random sizes of groups."""

    rows: int
    groups: int
    depth: int
    columns: int
    has_gradients: bool

    @property
    def title(self) -> str:
        """Its sizes, as rows of the page have them."""
        return f"{self.groups} x ({self.depth}, {self.columns})"

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Return rows, matrices and, with gradients, a cotangent."""
        shapes = [(self.rows, self.depth), (self.groups, self.depth, self.columns)]
        if self.has_gradients:
            shapes.append((self.rows, self.columns))
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def run(self, implementation: Implementation, *operands: jax.Array) -> Any:
        """Return the product, and its gradients where they are wanted."""
        random = np.random.default_rng(self.rows + self.groups)
        sizes = random.multinomial(self.rows, np.ones(self.groups) / self.groups)

        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return jax_cudnn.ragged_dot(
                lhs, rhs, jnp.asarray(sizes, jnp.int32), implementation=implementation
            )

        lhs, rhs, *cotangents = operands
        if not cotangents:
            return product(lhs, rhs)
        y, vjp = jax.vjp(product, lhs, rhs)
        return y, vjp(*cotangents)


def _cases(*, small: bool) -> list[_Case]:
    sizes = [
        (256, 8, 256, 256),
        (512, 8, 512, 512),
        (1024, 8, 512, 1024),
        (2048, 8, 1024, 1024),
        (4096, 8, 1024, 2048),
        (256, 64, 1024, 512),
        (512, 32, 2048, 1024),
        (2048, 64, 1024, 1024),
        (4096, 4, 2048, 2048),
        (128, 128, 512, 512),
        (64, 4, 4096, 4096),
        (8192, 16, 1024, 1024),
    ]
    if small:
        sizes = [(16, 4, 8, 16)]
    return [_Case(*each, has) for has in (False, True) for each in sizes]


def _measured(cases: Sequence[_Case]) -> Iterator[Row]:
    # A first plan, where there is one: cuBLASLt's, with cuBLAS 13.4 or newer.
    for case, times in zip(cases, compare(cases, ("cudnn", "xla")), strict=True):
        yield {
            "rows": case.rows,
            "matrices": case.title,
            "what": "with gradients" if case.has_gradients else "forward",
            "work": case.rows * case.depth * case.columns,
            "times": times,
        }


def _lines(data: Data) -> list[str]:
    rows = [
        {**row, **row["times"], "log": math.log2(row["work"])}
        for row in sorted(data["rows"], key=lambda row: (row["what"], row["work"]))
        if "ratio" in row["times"]
    ]
    return [
        "Grouped matmuls in bf16 with random sizes of groups, by cuBLASLt and by",
        "XLA's code for `jax_cudnn.ragged_dot`. The ratio is cuBLASLt's time over",
        "XLA's. Work is the logarithm to base 2 of rows x contraction x columns.",
        "",
        *table_of(
            rows,
            ">rows | matrices | >work | | >XLA µs | >ratio | range",
            "{rows} | {matrices} | {log:.0f} | {what} | {xla_us:.1f} | {ratio:.2f} | "
            + RANGE,
        ),
    ]


markdown = Page(
    name="small_groups",
    title="Small grouped matmuls",
    comment="Small grouped products, by cuBLASLt and by XLA.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, _cases, _measured, markdown)
