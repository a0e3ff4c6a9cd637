# SPDX-License-Identifier: Apache-2.0
"""Finds for which rows cuDNN's norms are faster than XLA's code, on one GPU.

    python -m benchmarks.norm_plans --out docs/internals/measured

tunes norms of many widths and numbers of rows, forward and backward, and writes
norm_plans.json and norm_plans.md there: for each, the times of XLA's code, of cuDNN's
first plan, and of the best first plan of an engine. Operands are drawn by the tuner.
`--widths 768 4096 --rows 8192` measures these alone.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax

import jax_cudnn
from benchmarks.harness.page import page, table
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from jax_cudnn import plans

_ROWS = (1024, 8192, 32768)
# Those of a group are tuned together.
_WIDTHS = (
    (768, 1024, 2048, 4096),
    (512, 1280, 1600, 3072),
    (256, 384, 5120, 8192),
    (640, 896, 1536, 2560),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A norm of rows, with a scale of a dtype, and a bias where the norm has one.

    With a residual, what computes no statistics is a kernel of its own, too.
    """

    norm: str
    rows: int
    width: int
    has_residual: bool = False
    dtype: str = "bfloat16"
    scale: str = "bfloat16"

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """Return rows, others of their shape, and parameters.

        The others are the cotangent, or the residual, whose sum is then the cotangent.
        """
        x = jax.ShapeDtypeStruct((self.rows, self.width), self.dtype)
        parameter = jax.ShapeDtypeStruct((self.width,), self.scale)
        return [x, x, *[parameter] * (1 + (self.norm == "layer_norm"))]

    def run(self, x: Any, other: Any, *parameters: Any) -> Any:
        """Return the norm and its gradients."""
        norm = getattr(jax_cudnn, self.norm)
        if not self.has_residual:
            output, pullback = jax.vjp(norm, x, *parameters)
            return output, pullback(other)

        def run(x: Any, residual: Any, *parameters: Any) -> Any:
            return norm(x, *parameters, residual=residual)

        results, pullback = jax.vjp(run, x, other, *parameters)
        return run(x, other, *parameters), pullback(results)


def cells(widths: Sequence[int], rows: Sequence[int]) -> list[Cell]:
    """Return the cells of some widths; scales in f32 for one number of rows."""
    norms = ("layer_norm", "rms_norm")
    found = [
        Cell(norm=norm, rows=count, width=width, has_residual=has_residual)
        for width, norm, count, has_residual in itertools.product(
            widths, norms, rows, (False, True)
        )
    ]
    kinds = itertools.product(norms, widths)
    return found + [
        Cell(norm=norm, rows=rows[len(rows) // 2], width=width, scale="float32")
        for norm, width in kinds
    ]


def measure(group: Sequence[Cell]) -> list[dict[str, Any]]:
    """Tune the norms of some cells; return a row for each kernel."""
    operands = [cell.operands() for cell in group]

    def all_of(operands: Any) -> Any:
        return [cell.run(*given) for cell, given in zip(group, operands, strict=True)]

    tuning = plans.autotune(all_of, operands, whole_program=False, max_plans=1)
    return [_row(choice) for choice in tuning.choices.values()]


def _row(choice: plans.Choice) -> dict[str, Any]:
    first_us = None
    if choice.cudnn_us is not None and choice.first_ratio is not None:
        first_us = round(choice.cudnn_us * choice.first_ratio, 2)
    return {
        "op": choice.op,
        "operands": choice.operands,
        "xla_us": choice.xla_us,
        "first_us": first_us,
        "ratio": first_us and choice.xla_us and round(first_us / choice.xla_us, 3),
        "best_us": choice.cudnn_us,
        "engine": json.loads(choice.plan)["engine"] if choice.plan else None,
    }


def markdown(data: dict[str, Any]) -> str:
    """Return the report as a table, a line a kernel."""
    lines = [
        "Microseconds as `plans.autotune` measured them, with the first plan of each",
        "engine. `first` is cuDNN's first plan of all. `best` is the fastest of them,",
        "whose engine is named.",
        "",
        *table(
            "op | operands | >XLA | >first | >first / XLA | >best | >engine",
            (
                ["-" if value is None else value for value in row.values()]
                for row in data["rows"]
            ),
        ),
    ]
    return page(
        data,
        lines,
        title="Norms of rows, by width",
        comment="For which rows cuDNN's norms are faster than XLA's code.",
        command="python -m benchmarks.norm_plans",
    )


def main() -> None:
    """Measure all cells and write the report, after each group."""
    made = parser(__doc__)
    made.add_argument("--small", action="store_true", help="few sizes")
    made.add_argument("--widths", type=int, nargs="+", help="of one group")
    made.add_argument("--rows", type=int, nargs="+", default=_ROWS)
    options = made.parse_args()
    found = Table(
        folder=options.out, name="norm_plans", markdown=markdown, keeps="nothing"
    )
    groups = (options.widths,) if options.widths else _WIDTHS
    for widths in ((64, 96),) if options.small else groups:
        found.add(*measure(cells(widths, (16, 32) if options.small else options.rows)))
        print(widths, flush=True)


if __name__ == "__main__":
    main()
