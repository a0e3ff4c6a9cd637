# SPDX-License-Identifier: Apache-2.0
"""Benchmarks jax_cudnn.conv and matmul against XLA and PyTorch, side by side.

    python -m benchmarks.fusion --group conv --group mlp --out results/a
    python -m benchmarks.fusion --cells 'resnet50|convnext' --out results/b
    python -m benchmarks.fusion --merge results/a/fusion.json results/b/fusion.json \
        --out docs/benchmarks --tune-out jax_cudnn/data/h200-cudnn-9.19.json

Each run writes fusion.json and fusion.md after every cell. Merging puts the cells of
several runs into one report, and writes what tuning chose. The benchmarks need an
NVIDIA GPU (except with --tiny); PyTorch is used where it is installed. Operands are
random. Each contender runs several sets of operands in one program, which together are
too large for the GPU's cache; timing.py says how times are taken. Nothing is timed
before its results were compared with XLA's in f32.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import math
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import contest, torch_side
from benchmarks.harness.checks import check, relative_errors
from benchmarks.harness.contest import program
from benchmarks.harness.operands import Operand, drawn_sets
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, compare
from benchmarks.harness.torch_side import torch
from benchmarks.harness.versions import environment
from benchmarks.products.fusion_cells import CELLS, GROUPS, Cell, Function
from benchmarks.products.fusion_report import (
    BOTH,
    FORWARD,
    TORCH,
    TUNED,
    UNTUNED,
    XLA,
    made_by,
    markdown,
    merged,
    read,
    tuned_choices,
)
from jax_cudnn import choices, plans
from jax_cudnn.choices import Choice, Key
from jax_cudnn.lowering.devices import local_target
from jax_cudnn.tuning.stopwatch import call_over_sets, time_calls

# Sets of operands in turn, so that none is still in the cache: 60 MB on an H200.
_ROTATED_BYTES = 2**27
_MOST_SETS = 8

# The largest relative errors (of norms) of the output and of the gradients.
#
# For jax_cudnn: bf16 rounds to 2^-9, and roundings on the way average out, so 1e-2 has
# room for two or three roundings. XLA's code, which tuning may choose, rounds sums
# before the bias is added. Then some values z move across 0, where the gradient of relu
# jumps. With z of deviation 1 and an error of about 2^-9, this happens to 1 or 2 of
# 1000 values. The relative error is the square root of this share, 0.04.
#
# For the rivals: they may keep sums in bf16 as well, such as those of the bias's
# gradient. A wrong result, with a factor or transposition too many, is off by about 1.
_OWN_BOUNDS = (1e-2, 1e-1)
_RIVALS_BOUNDS = (3e-2, 3e-1)

Arrays = Sequence[Any]
# Operands, and the cotangent of the output.
Set = tuple[list[Any], list[Any]]
_DIRECTIONS = {FORWARD: contest.FORWARD, BOTH: contest.BOTH}


# --- operands -------------------------------------------------------------------------


def draw_sets(cell: Cell) -> list[Set]:
    """Return sets of random operands, each with the output's cotangent."""
    count = math.ceil(_ROTATED_BYTES / cell.bytes(gradients=False))
    drawn = (*cell.operands, Operand(cell.output))
    sets = drawn_sets(drawn, min(_MOST_SETS, max(2, count)))
    return [(operands, [cotangent]) for *operands, cotangent in sets]


# --- tuning ---------------------------------------------------------------------------


class Tuner:
    """Tunes cells; cells that differ only in their epilogue are tuned together.

    Such cells share graphs, for example those of gradients, which are measured once.
    """

    def __init__(self, cells: Sequence[Cell], *, has_gpu: bool) -> None:
        """Take all cells of a run. Without a GPU there is nothing to measure."""
        self._has_gpu = has_gpu
        self._families: dict[Cell, list[Cell]] = {}
        for cell in cells:
            self._families.setdefault(_plain(cell), []).append(cell)
        self._tunings: dict[Cell, plans.Tuning] = {}

    def tune(self, cell: Cell) -> dict[Key, Choice]:
        """Return the choices for the family of a cell."""
        if not self._has_gpu:
            return {}
        family = _plain(cell)
        if family not in self._tunings:
            members = self._families[family]
            arrays = list(map(_types, members))
            tuning = plans.autotune(
                lambda arrays: list(map(_run_all, members, arrays)),
                arrays,
                whole_program=False,  # it is no program, but all cells of a family
            )
            print(tuning, flush=True)
            self._tunings[family] = tuning
        return self._tunings[family].choices


def _plain(cell: Cell) -> Cell:
    return dataclasses.replace(
        cell,
        group="conv",
        activation=None,
        has_bias=True,
        has_residual=False,
        goal=None,
    )


def _types(cell: Cell) -> Set:
    """Return the shapes and dtypes of a cell's operands and of its cotangent."""
    drawn = (*cell.operands, Operand(cell.output))
    *operands, cotangent = (
        jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in drawn
    )
    return operands, [cotangent]


def _directions(cell: Cell) -> list[str]:
    """Return what is timed of a cell: forward, and with gradients if it has them."""
    return list(_DIRECTIONS)[: 1 + cell.has_gradients]


def _run(function: Function, what: str) -> Function:
    """Return a function of operands and cotangents: results, and gradients if asked."""
    return program(function, _DIRECTIONS[what])


def _run_all(cell: Cell, arrays: Set) -> list[Any]:
    """Return jax_cudnn's functions for a cell, forward and with gradients."""
    return [_run(cell.ours, what)(*arrays) for what in _directions(cell)]


# --- one cell -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run cells; ``rates`` are bytes/s and flop/s of this machine."""

    tuner: Tuner
    rates: tuple[float, float]
    with_torch: bool
    rounds: int = 7
    round_ms: float = 20.0


def run_cell(cell: Cell, settings: Settings) -> dict[str, Any]:
    """Time one cell: forward, and forward with gradients where it has them."""
    start = time.monotonic()
    sets = draw_sets(cell)
    directions = _directions(cell)
    seconds: dict[str, float] = {}
    forms = {what: _fastest_form(cell, what, sets) for what in directions}
    truth = _truth(cell, directions[-1], sets[0])

    # Without choices, of this cell or of others that share parts with it.
    choices.table().clear()
    untuned, seconds["build"] = _compiled(cell.ours, directions, sets)
    mark = time.monotonic()
    found = settings.tuner.tune(cell)
    seconds["tune"] = time.monotonic() - mark
    choices.table().add(found)
    tuned: dict[str, Contender] = {}
    if found:
        tuned, seconds["build tuned"] = _compiled(cell.ours, directions, sets)

    results: dict[str, Any] = {}
    for what in directions:
        form, xla = forms[what]
        contenders = {XLA: xla, UNTUNED: untuned[what]}
        contenders |= {TUNED: tuned[what]} if tuned else {}
        errors = {
            name: _check(name, what, _flat(each.call()[0]), truth)
            for name, each in contenders.items()
        }
        torch_failure: str | None = None
        if settings.with_torch:
            try:
                made = _torch_contender(cell, what, sets)
                errors[TORCH] = _check(TORCH, what, _torch_results(cell, made), truth)
                contenders[TORCH] = made
            except Exception as error:
                torch_failure = f"{type(error).__name__}: {error}"[:500]
                print(f"  torch {what} is left out: {torch_failure}", flush=True)
        results[what] = {
            "xla_form": form,
            "torch_failure": torch_failure,
            **_floor(cell, what, settings),
            "calls": [
                dataclasses.asdict(call)
                for call in plans.inspect(_run(cell.ours, what), *sets[0]).calls
            ],
            "contenders": _time(contenders, errors, settings),
        }
        _print_results(what, results[what])
    seconds["total"] = time.monotonic() - start
    return {
        "cell": cell.key,
        "group": cell.group,
        "name": cell.name,
        "goal": cell.goal,
        "sets": len(sets),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "tuning": [
            {**dataclasses.asdict(key), **dataclasses.asdict(choice)}
            for key, choice in found.items()
        ],
        "results": results,
    }


def _contender(function: Function, what: str, sets: Sequence[Set]) -> Contender:
    call = call_over_sets(_run(function, what), list[Any](sets))
    return Contender(call=call, wait=jax.block_until_ready, count=len(sets))


def _flat(results: tuple[Arrays, Arrays]) -> list[Any]:
    return [*results[0], *results[1]]


def _compiled(
    function: Function, directions: Sequence[str], sets: Sequence[Set]
) -> tuple[dict[str, Contender], float]:
    """Return the function's contenders by direction, and the seconds that it took."""
    start = time.monotonic()
    made = {what: _contender(function, what, sets) for what in directions}
    return made, time.monotonic() - start


def _fastest_form(cell: Cell, what: str, sets: Sequence[Set]) -> tuple[str, Contender]:
    """Return XLA's contender, the fastest where users have several ways to write it."""
    made = {name: _contender(form, what, sets) for name, form in cell.xla_forms.items()}
    if len(made) == 1:
        return next(iter(made.items()))
    times = {
        name: time_calls(each.call, len(sets), samples=3).median_us
        for name, each in made.items()
    }
    print(f"  XLA, us: {times}")
    best = min(times, key=lambda name: times[name])
    return best, made[best]


def _torch_contender(cell: Cell, what: str, sets: Sequence[Set]) -> Contender:
    moved: list[tuple[list[Any], Any]] = []
    for arrays in sets:
        tensors = [torch_side.from_jax(x) for x in _flat(arrays)]
        *operands, cotangent = cell.to_torch(tensors)
        for x in operands:
            x.requires_grad_(what == BOTH)
        moved.append((operands, cotangent))

    def one(operands: list[Any], cotangent: Any) -> tuple[Any, ...]:
        output = cell.torch_function(*operands)
        if what == FORWARD:
            return (output,)
        return output, *torch.autograd.grad(output, operands, cotangent)

    return torch_side.contender(lambda: [one(*each) for each in moved], len(moved))


def _torch_results(cell: Cell, made: Contender) -> list[jax.Array]:
    return [torch_side.to_jax(x) for x in cell.from_torch(made.call()[0])]


def _time(
    contenders: dict[str, Contender],
    errors: dict[str, list[float]],
    settings: Settings,
) -> dict[str, Any]:
    timings = compare(
        contenders,
        baseline=XLA,
        rounds=settings.rounds,
        round_ms=settings.round_ms,
        least_calls=2,
    )
    torch_us = timings[TORCH].median_us if TORCH in timings else None
    rows: dict[str, Any] = {}
    for name, timing in timings.items():
        row = dataclasses.asdict(timing)
        row["median_us"] = timing.median_us / contenders[name].count
        if torch_us is not None:
            row["ratio_to_torch"] = timing.median_us / torch_us
        rows[name] = {key: float(f"{value:.5g}") for key, value in row.items()}
        rows[name]["errors"] = errors[name]
    return rows


def _floor(cell: Cell, what: str, settings: Settings) -> dict[str, Any]:
    floor, by = cell.floor_us(*settings.rates, gradients=what == BOTH)
    return {"floor_us": round(floor, 2), "floor_by": by}


def _print_results(what: str, result: dict[str, Any]) -> None:
    for name, row in result["contenders"].items():
        errors = " ".join(f"{error:.1e}" for error in row["errors"])
        print(
            f"  {what:8s} {name:8s} {row['median_us']:10.1f} us  {row['ratio']:6.3f} "
            f"({row['ratio_low']:.3f}-{row['ratio_high']:.3f})  errors {errors}",
            flush=True,
        )
    print(f"  {what:8s} floor    {result['floor_us']:10.1f} us  {result['floor_by']}")


# --- correctness ----------------------------------------------------------------------


def _truth(cell: Cell, what: str, arrays: Set) -> list[jax.Array]:
    """Return XLA's results from the same numbers in f32.

    XLA multiplies in TF32, which holds all bf16 operands exactly.
    """
    form = next(iter(cell.xla_forms.values()))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    return _flat(jax.jit(_run(form, what))(*wide))


def _check(name: str, what: str, found: Arrays, truth: Arrays) -> list[float]:
    """Return the relative errors, of the output and of the gradients."""
    pairs = relative_errors(list(found), list(truth[: len(found)]))
    errors = [float(f"{float(error):.3g}") for error in pairs]
    bounds = _OWN_BOUNDS if name in (TUNED, UNTUNED) else _RIVALS_BOUNDS
    check(errors, *bounds, f"{name} {what}: ")
    return errors


# --- the run --------------------------------------------------------------------------


def measured_rates(*, tiny: bool) -> tuple[float, float]:
    """Return this machine's bytes/s of a copy and flop/s of a bf16 matmul."""
    elements, size = (2**16, 64) if tiny else (2**29, 8192)
    x = jnp.ones(elements, jnp.bfloat16)
    copy = call_over_sets(lambda x: -x, [[x], [x]])
    seconds = time_calls(copy, 2, samples=5).median_us / 1e6
    ((a, b),) = drawn_sets([Operand((size, size))] * 2, 1)
    product = call_over_sets(jnp.matmul, [[a, b], [b, a]])
    product_seconds = time_calls(product, 2, samples=5).median_us / 1e6
    return 4 * elements / seconds, 2 * size**3 / product_seconds


def selected(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells that the options ask for."""
    done = {cell["cell"] for path in options.skip for cell in read(path)["cells"]}
    for cell in CELLS:
        is_wanted = not options.group or cell.group in options.group
        if is_wanted and re.search(options.cells, cell.key) and cell.key not in done:
            yield cell


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cells, writing the report after each; failures do not stop the others."""
    start = time.monotonic()
    has_gpu = not options.tiny and local_target() is not None
    if not has_gpu and not options.tiny:
        sys.exit("benchmarks.fusion needs an NVIDIA GPU; try --tiny")
    with_torch = torch is not None and not options.no_torch
    with_torch &= not options.tiny or options.torch
    if with_torch:
        torch_side.prefer_fast_convolutions()
    settings = Settings(
        tuner=Tuner([*selected(options)], has_gpu=has_gpu),
        rates=measured_rates(tiny=options.tiny),
        with_torch=with_torch,
        **({"rounds": 3, "round_ms": 1.0} if options.tiny else {}),
    )
    info: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.fusion", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "environment": environment(),
        "copy_tb_per_s": round(settings.rates[0] / 1e12, 3),
        "matmul_tf_per_s": round(settings.rates[1] / 1e12, 1),
    }
    print(json.dumps(info, indent=1), flush=True)
    data: dict[str, Any] = {"runs": [info], "cells": [], "failures": []}
    for full in selected(options):
        spent = time.monotonic() - start
        if spent > options.budget_s:
            print(f"not run for lack of time: {full.key}")
            continue
        cell = full.tiny() if options.tiny else full
        print(f"[{spent:5.0f} s] {cell.key}", flush=True)
        try:
            data["cells"].append(run_cell(cell, settings))
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            data["failures"].append({"cell": full.key, "error": text[:2000]})
        gc.collect()
        if with_torch:
            torch_side.release_memory()
        info["seconds"] = round(time.monotonic() - start)
        write(options, data)
    return data


def write(options: argparse.Namespace, data: dict[str, Any]) -> None:
    """Write the report, and the tuned choices where asked for."""
    Table(folder=options.out, page=markdown).write(data)
    if options.tune_out is not None:
        options.tune_out.parent.mkdir(parents=True, exist_ok=True)
        choices.write(options.tune_out, tuned_choices(data), made_by(data))


def main() -> None:
    """Run cells, or merge the reports of several runs."""
    made = parser(__doc__)
    made.add_argument("--tune-out", type=Path, help="the choices file to write")
    made.add_argument("--group", choices=GROUPS, action="append", default=[])
    made.add_argument("--cells", default="", help="regex on 'group: name'")
    made.add_argument("--skip", type=Path, nargs="*", default=[], metavar="JSON",
                        help="reports whose cells are not to be run again")  # fmt: skip
    made.add_argument("--budget-s", type=float, default=math.inf,
                        help="start no cell after so many seconds")  # fmt: skip
    made.add_argument("--list", action="store_true", help="print the cells' names")
    made.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    made.add_argument("--torch", action="store_true", help="PyTorch with --tiny too")
    made.add_argument("--no-torch", action="store_true")
    made.add_argument("--merge", type=Path, nargs="+", metavar="JSON")
    options = made.parse_args()
    plans.set_cache(None)  # no plans and choices of other runs, and none left behind
    if options.list:
        print("\n".join(cell.key for cell in selected(options)))
        return
    if options.merge:
        data = merged(options.merge)
        write(options, data)
    else:
        data = run(options)
    print(markdown(data))
    if data["failures"]:
        sys.exit(f"failed: {[failure['cell'] for failure in data['failures']]}")


if __name__ == "__main__":
    main()
