# SPDX-License-Identifier: Apache-2.0
"""Compares "auto" without tuning with XLA in the cells of the fusion benchmarks.

    python -m benchmarks.untuned_cells --out docs/internals/measured

times each cell of fusion_cells.py as it runs without any choice of the tuner, and as a
user of JAX writes it, and writes untuned_cells.json and untuned_cells.md there. With
`--only resnet50`, it times those whose name has this regular expression, and keeps what
the file has of others that were timed on the same GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.harness.call_times import compare
from benchmarks.harness.page import measured_by, page, spread, table
from benchmarks.harness.program import run_benchmark
from benchmarks.products.fusion import WRAPPERS, abstract_operands, directions_of
from benchmarks.products.fusion_cells import CELLS, Cell, Function
from jax_cudnn import choices, plans
from jax_cudnn.config import Implementation
from jax_cudnn.policy.nearest import LOSS

_FORM = "XLA's form"


@dataclass(frozen=True)
class _Beside:
    """A cell in one direction, by jax_cudnn or as JAX's users write it."""

    cell: Cell
    direction: str
    form: str
    by_xla: Function

    @property
    def title(self) -> str:
        """The cell in a message."""
        return f"{self.cell.key}, {self.direction}"

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Return the operands of `run`; a cotangent comes last."""
        return abstract_operands(self.cell)

    def run(self, implementation: Implementation, *operands: jax.Array) -> Any:
        """Return the result, and all gradients if they are wanted."""
        function = self.by_xla if implementation == "xla" else self.cell.ours
        return WRAPPERS[self.direction](function)(*operands)


def _calls(cells: Sequence[Cell]) -> list[_Beside]:
    return [
        _Beside(cell, direction, form, function)
        for cell in cells
        for direction in directions_of(cell)
        for form, function in cell.xla_forms.items()
    ]


def check(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Time cells without choices and by XLA; yield a row for each form of XLA's."""
    calls = _calls(cells)
    for call, times in zip(calls, compare(calls, ("auto", "xla")), strict=True):
        function = WRAPPERS[call.direction](call.cell.ours)
        report = plans.inspect(function, *call.types())
        yield {
            "cell": call.cell.key,
            "direction": call.direction,
            _FORM: call.form,
            "runs on": ", ".join(each.implementation for each in report.calls),
            **times,
        }


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    rows = [row for row in data["rows"] if "ratio" in row]
    ratios = np.array([row["ratio"] for row in rows])
    over = int((ratios > LOSS).sum())
    timed = {row["cell"] for row in rows}
    missing = [cell.key for cell in CELLS if cell.key not in timed]
    lines = [
        "The convolutions and products of [fusion.md](../../benchmarks/fusion.md) "
        "as they run with",
        '`implementation="auto"`, no choice of the tuner, and the',
        "[rules](rules.md) that are in force now. The ratio is to what a user of JAX",
        "writes, by XLA, in the same run: below 1 is faster. Where users write it in",
        "several ways, each is a row. What takes over 1.05 is timed again, longer.",
        "",
        f"{len(CELLS) - len(missing)} of {len(CELLS)} cells were timed. Of {len(rows)} "
        f"rows, {over} are more than {LOSS - 1:.0%} slower than XLA.",
        *(
            [
                f"The geometric mean is {np.exp(np.log(ratios).mean()):.2f}, the "
                f"largest {ratios.max():.2f}."
            ]
            if rows
            else []
        ),
        "",
        *table(
            "cell | | runs on | >XLA µs | >ratio | range",
            (
                [
                    *(row["cell"], _direction(row, rows), row["runs on"]),
                    *(f"{row['xla_us']:.1f}", f"{row['ratio']:.2f}", spread(row)),
                ]
                for row in rows
            ),
        ),
    ]
    if missing:
        lines += ["", "Not timed:", "", *(f"- {key}" for key in missing)]
    return page(
        data,
        lines,
        title="Cells without tuning",
        comment='The cells of fusion.md with "auto" and no tuning, beside XLA.',
        command=measured_by("untuned_cells"),
    )


def _direction(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return the direction, and XLA's form where the cell has several."""
    forms = {each[_FORM] for each in rows if each["cell"] == row["cell"]}
    return f"{row['direction']}, {row[_FORM]}" if len(forms) > 1 else row["direction"]


def _measured(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    choices.table().clear()  # those that are shipped, too
    yield from check(cells)


def main() -> None:
    """Measure, and write what there is after every row."""
    run_benchmark(
        __doc__,
        lambda *, small: [cell.tiny() for cell in CELLS] if small else CELLS,
        _measured,
        markdown,
        name="untuned_cells",
        keeps="this GPU",
        keys=("cell", "direction", _FORM),
        order=[x.key for cell in CELLS for x in (cell, cell.tiny())],
    )


if __name__ == "__main__":
    main()
