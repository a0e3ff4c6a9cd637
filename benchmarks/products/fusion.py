# SPDX-License-Identifier: Apache-2.0
"""Benchmarks jax_cudnn.conv and matmul against XLA and PyTorch, side by side.

    python -m benchmarks.fusion --out docs/benchmarks

writes fusion.json and fusion.md there after every cell. See contest.py for how
contenders are checked and timed. `--only REGEX` chooses cells by "group: name"; the
others in the folder are kept, each with the run that measured it. `--small` tries the
script on a CPU, where times say nothing. `--tune-out FILE` writes what tuning chose in
all cells of the folder, as in jax_cudnn/data.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import shlex
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import contest, contest_report, program, torch_side
from benchmarks.harness.operands import Operand, bytes_of, drawn_sets
from benchmarks.harness.page import Data, Row
from benchmarks.harness.records import Table, locked, renewed
from benchmarks.harness.versions import environment
from benchmarks.products.fusion_cells import CELLS, Cell
from benchmarks.products.fusion_report import (
    BOTH,
    FORWARD,
    TORCH,
    TUNED,
    UNTUNED,
    XLA,
    made_by,
    markdown,
    tuned_choices,
)
from jax_cudnn import choices, plans
from jax_cudnn.lowering.devices import local_target
from jax_cudnn.tuning.stopwatch import call_over_sets, time_calls

_DIRECTIONS = {FORWARD: contest.FORWARD, BOTH: contest.BOTH}
_OTHERS = {contest.UNTUNED: UNTUNED, contest.TUNED: TUNED, contest.EAGER: TORCH}

# As many as `plans.autotune` tries by default.
_PLANS = 10
_TIMES = ("median_us", "ratio", "ratio_low", "ratio_high", "errors")

# Bytes/s and flop/s of a machine.
Rates = tuple[float, float]


def run_cell(cell: Cell, settings: contest.Settings, rates: Rates) -> dict[str, Any]:
    """Time one cell: forward, and forward with gradients where it has them.

    Nothing is chosen before, by this cell or by others that share parts with it.
    """
    start = time.monotonic()
    rows = contest.measure(cell.contest(), settings, {})
    contest_report.show(rows)
    found = choices.table().all()
    results: dict[str, Any] = {}
    for what, direction in _DIRECTIONS.items():
        if own := {x["contender"]: x for x in rows if x["what"] == direction}:
            results[what] = _result(cell, what, own, rates)
    return {
        "cell": cell.key,
        "group": cell.group,
        "name": cell.name,
        "goal": cell.goal,
        "seconds": {"total": round(time.monotonic() - start, 2)},
        "tuning": [
            {**dataclasses.asdict(key), **dataclasses.asdict(choice)}
            for key, choice in found.items()
        ],
        "results": results,
    }


def _result(
    cell: Cell, what: str, rows: Mapping[str, Row], rates: Rates
) -> dict[str, Any]:
    """Return a direction's times, from the rows of its contenders.

    Raises:
      RuntimeError: jax_cudnn failed or was wrong.
    """
    for name in (contest.UNTUNED, contest.TUNED):
        if failure := rows.get(name, {}).get("failure"):
            raise RuntimeError(f"{name} {what}: {failure}")
    forms = dict(zip(cell.contest().rivals, cell.xla_forms, strict=True))
    ran = [name for name in forms if "failure" not in rows[name]]
    best = min(ran, key=lambda name: rows[name]["median_us"])
    contenders = {
        name: {key: rows[of][key] for key in _TIMES}
        for of, name in {best: XLA, **_OTHERS}.items()
        if of in rows and "failure" not in rows[of]
    }
    if TORCH in contenders:
        for row in contenders.values():
            ratio = row["median_us"] / contenders[TORCH]["median_us"]
            row["ratio_to_torch"] = float(f"{ratio:.5g}")
    floor, by = _floor(cell, what, rates)
    return {
        "xla_form": forms[best],
        "torch_failure": rows.get(contest.EAGER, {}).get("failure"),
        "floor_us": round(floor, 2),
        "floor_by": by,
        "calls": _calls(cell, what),
        "contenders": contenders,
    }


def _floor(cell: Cell, what: str, rates: Rates) -> tuple[float, str]:
    """Return the least microseconds that a cell takes, and for which reason.

    No implementation can do without reading or writing each array once, and a second
    time if the backward pass needs it as well. Other arrays that are saved for the
    backward pass are not counted.
    """
    bandwidth, rate = rates
    sizes = [bytes_of([x]) for x in (*cell.operands, Operand(cell.output))]
    moved, flops = sum(sizes), cell.flops
    if what == BOTH:
        # Factors, terms, and the output with its cotangent; a gradient of each factor.
        moved, flops = 2 * moved + sum(sizes[:2]), 3 * flops
    memory, sums = moved / bandwidth * 1e6, flops / rate * 1e6
    return (memory, "memory") if memory > sums else (sums, "flops")


def _calls(cell: Cell, what: str) -> list[dict[str, Any]]:
    """Return who runs the cell's calls, by the choices that are in force."""
    *operands, cotangent = (
        jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype))
        for x in (*cell.operands, Operand(cell.output))
    )
    function = contest.program(cell.ours, _DIRECTIONS[what])
    calls = plans.inspect(function, operands, [cotangent]).calls
    return [dataclasses.asdict(call) for call in calls]


def measured_rates(*, small: bool) -> Rates:
    """Return this machine's bytes/s of a copy and flop/s of a bf16 matmul."""
    elements, size = (2**16, 64) if small else (2**29, 8192)
    x = jnp.ones(elements, jnp.bfloat16)
    copy = call_over_sets(lambda x: -x, [[x], [x]])
    seconds = time_calls(copy, 2, samples=5).median_us / 1e6
    ((a, b),) = drawn_sets([Operand((size, size))] * 2, 1)
    product = call_over_sets(jnp.matmul, [[a, b], [b, a]])
    product_seconds = time_calls(product, 2, samples=5).median_us / 1e6
    return 4 * elements / seconds, 2 * size**3 / product_seconds


def run(options: argparse.Namespace, wanted: Sequence[Cell]) -> Data:
    """Run the cells, writing the report after each; failures do not stop the others."""
    start = time.monotonic()
    settings = contest_report.settings(
        options,
        with_first=False,
        with_compiled=False,
        is_beside_jax=True,
        max_plans=_PLANS,
    )
    rates = measured_rates(small=options.small)
    info: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.fusion", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "environment": environment(),
        "copy_tb_per_s": round(rates[0] / 1e12, 3),
        "matmul_tf_per_s": round(rates[1] / 1e12, 1),
    }
    print(json.dumps(info, indent=1), flush=True)
    data: Data = {"cells": [], "failures": []}
    for full in wanted:
        cell = full.tiny() if options.small else full
        print(f"[{time.monotonic() - start:5.0f} s] {cell.key}", flush=True)
        try:
            data["cells"].append(run_cell(cell, settings, rates))
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            data["failures"].append({"cell": cell.key, "error": text[:2000]})
        gc.collect()
        if settings.with_torch:
            torch_side.release_memory()
        info["seconds"] = round(time.monotonic() - start)
        write(options, info, data)
    return data


def write(options: argparse.Namespace, info: dict[str, Any], data: Data) -> None:
    """Write the report, with the cells of earlier runs, and the tuned choices."""
    table = Table(folder=options.out, page=markdown)
    options.out.mkdir(parents=True, exist_ok=True)
    with locked(options.out):
        every = joined(table.file, info, data)
        table.write(every)
    if options.tune_out is not None:
        options.tune_out.parent.mkdir(parents=True, exist_ok=True)
        choices.write(options.tune_out, tuned_choices(every), made_by(every))


def joined(file: Path, info: dict[str, Any], data: Data) -> Data:
    """Return a run's cells beside those of other runs that a file has."""
    before: Data = {"runs": [], "cells": [], "failures": []}
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
    runs = renewed(before["runs"], [info], ["command", "date", "copy_tb_per_s"])
    number = runs.index(info)
    measured = {cell["cell"]: {**cell, "run": number} for cell in data["cells"]}
    order = [cell.key for full in CELLS for cell in (full, full.tiny())]
    failures = renewed(before["failures"], data["failures"], ["cell"])
    return {
        "runs": runs,
        "cells": renewed(before["cells"], [*measured.values()], ["cell"], order),
        "failures": [each for each in failures if each["cell"] not in measured],
    }


def main() -> None:
    """Run the cells that are asked for."""
    made = contest_report.parser(__doc__)
    made.add_argument("--tune-out", type=Path, help="the choices file to write")
    options = made.parse_args()
    wanted = program.chosen(CELLS, options)
    if options.list:
        print("\n".join(cell.key for cell in wanted))
        return
    if not options.small and local_target() is None:
        sys.exit("benchmarks.fusion needs an NVIDIA GPU; try --small")
    plans.set_cache(None)  # no plans and choices of other runs, and none left behind
    if failed := [each["cell"] for each in run(options, wanted)["failures"]]:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
