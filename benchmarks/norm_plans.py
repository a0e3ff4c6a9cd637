# SPDX-License-Identifier: Apache-2.0
"""Finds for which rows cuDNN's norms are faster than XLA's code, on one GPU.

    python -m benchmarks.norm_plans --out docs/benchmarks

tunes norms of many widths and numbers of rows, forward and backward, and writes
norm_plans.json and norm_plans.md there: for each, the time of XLA's code, of cuDNN's
best plan and of its first one, with their engines. Operands are drawn by the tuner.
"""

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jax_cudnn
from benchmarks.records import write_records
from benchmarks.report import environment, versions_text
from jax_cudnn import plans

_DATA, _PAGE = "norm_plans.json", "norm_plans.md"
_ROWS = (2048, 32768)
_WIDTHS = (
    256,
    512,
    768,
    1000,
    1024,
    1280,
    1536,
    1600,
    2048,
    2560,
    3072,
    4096,
    5120,
    8192,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A norm of rows, with a scale of a dtype, and a bias where the norm has one."""

    norm: str
    rows: int
    width: int
    dtype: str = "bfloat16"
    scale: str = "bfloat16"

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """Return rows, cotangent and parameters."""
        x = jax.ShapeDtypeStruct((self.rows, self.width), self.dtype)
        parameter = jax.ShapeDtypeStruct((self.width,), self.scale)
        return [x, x, *[parameter] * (1 + (self.norm == "layer_norm"))]

    def run(self, x: Any, cotangent: Any, *parameters: Any) -> Any:
        """Return the norm and its gradients."""
        norm = getattr(jax_cudnn, self.norm)
        output, pullback = jax.vjp(norm, x, *parameters)
        return output, pullback(cotangent)


def cells(*, small: bool) -> Iterator[list[Cell]]:
    """Return the cells, those that are tuned together in a list."""
    widths = (64, 96) if small else _WIDTHS
    for width in widths:
        kinds = itertools.product(
            ("layer_norm", "rms_norm"),
            (16,) if small else _ROWS,
            ("bfloat16", "float32"),
        )
        yield [
            Cell(norm=norm, rows=rows, width=width, scale=scale)
            for norm, rows, scale in kinds
        ]


def measure(group: Sequence[Cell]) -> list[dict[str, Any]]:
    """Tune the norms of some cells; return a row for each kernel."""
    operands = [cell.operands() for cell in group]

    def all_of(operands: Any) -> Any:
        return [cell.run(*given) for cell, given in zip(group, operands, strict=True)]

    tuning = plans.autotune(all_of, operands, whole_program=False)
    return [_row(choice) for choice in tuning.choices.values()]


def _row(choice: plans.Choice) -> dict[str, Any]:
    ratio = None
    if choice.cudnn_us is not None and choice.xla_us:
        ratio = round(choice.cudnn_us / choice.xla_us, 3)
    return {
        "op": choice.op,
        "operands": choice.operands,
        "xla_us": choice.xla_us,
        "cudnn_us": choice.cudnn_us,
        "ratio": ratio,
        "first_ratio": choice.first_ratio,
        "engine": json.loads(choice.plan)["engine"] if choice.plan else None,
        "implementation": choice.implementation,
    }


def markdown(rows: Sequence[dict[str, Any]], versions: dict[str, str]) -> str:
    """Return the report as a table, a line a kernel."""
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- For which rows cuDNN's norms are faster than XLA's code. -->",
        "",
        "# Norms of rows, by width",
        "",
        "Printed by `python -m benchmarks.norm_plans`; do not edit. "
        f"{versions_text(versions)}.",
        "",
        "Microseconds as `plans.autotune` measured them. `first / best` is the time of",
        "cuDNN's first plan over that of its best one, whose engine is named.",
        "",
        "| op | operands | XLA | cuDNN | cuDNN / XLA | first / best | engine |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    names = ("op", "operands", "xla_us", "cudnn_us", "ratio", "first_ratio", "engine")
    for row in rows:
        cells = ("-" if row[name] is None else str(row[name]) for name in names)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all cells and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--only", default="", help="a regular expression of widths")
    parser.add_argument("--small", action="store_true", help="few sizes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    versions = environment()
    rows: list[dict[str, Any]] = []
    for group in cells(small=options.small):
        if not re.search(options.only, str(group[0].width)):
            continue
        rows += measure(group)
        print(group[0].width, len(rows), flush=True)
        # Each time, so that a run that is cut off leaves what it measured.
        write_records(options.out / _DATA, {"environment": versions, "rows": rows})
        (options.out / _PAGE).write_text(markdown(rows, versions))


if __name__ == "__main__":
    main()
