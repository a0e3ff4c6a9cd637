# SPDX-License-Identifier: Apache-2.0
"""Runs cells of contest.py, and writes what they take and which goals they meet."""

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.harness import program, torch_side
from benchmarks.harness.checks import reason
from benchmarks.harness.contest import (
    OURS,
    OWN_BOUNDS,
    RIVALS_BOUNDS,
    Cell,
    Settings,
    measure,
)
from benchmarks.harness.page import FINE_RANGE, FINELY_RANGED, Data, Page, gpu_of, table
from benchmarks.harness.records import Table
from benchmarks.harness.tokamax_side import tokamax
from benchmarks.harness.torch_side import torch
from jax_cudnn import choices, plans
from jax_cudnn.choices import Choice, Key

Rows = list[dict[str, Any]]

_SMALL: dict[str, Any] = {"rounds": 2, "round_ms": 1.0, "most_sets": 2}


def main(
    doc: str | None, page: Page, cells: Callable[..., Sequence[Cell]], **more: Any
) -> None:
    """Run cells, which are given whether they are to be ``small``, as options say."""
    options = parser(doc).parse_args()
    run(page, cells(small=options.small), options, **more)


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return the options that all programs of this kind have."""
    made = program.parser(about)
    program.add_cases(made)
    made.add_argument("--list", action="store_true", help="print the cells' names")
    made.add_argument("--no-tuning", action="store_true")
    made.add_argument("--no-torch", action="store_true")
    return made


def run(
    page: Page, cells: Sequence[Cell], options: argparse.Namespace, **more: Any
) -> None:
    """Measure the cells that are asked for, and write the report after each.

    ``more`` has settings that the options do not have. Exits with an error if a
    contender of ours failed or was wrong.
    """
    wanted = program.chosen(cells, options)
    if options.list:
        print("\n".join(cell.name for cell in wanted))
        return
    chosen = settings(options, **more)
    untuned = shipped()
    rows_of_all = Table(
        folder=options.out,
        page=page,
        keys=("operation", "size"),
        order=[(cell.operation, cell.size) for cell in cells],
    )
    if len(wanted) == len(cells):
        rows_of_all.forget()
    start = time.monotonic()
    failed: list[str] = []
    for cell in wanted:
        print(f"[{time.monotonic() - start:5.1f} s] {cell.name}", flush=True)
        measured = _measured(cell, chosen, untuned)
        failed += [_failure(row) for row in measured if _is_our_failure(row)]
        show(measured)
        rows_of_all.add(*measured)
        gc.collect()
        if chosen.with_torch:
            torch_side.forget_compiled()
            torch_side.release_memory()
    print(f"[{time.monotonic() - start:5.1f} s] done")
    if failed:
        sys.exit("failed: " + "; ".join(failed))


def settings(options: argparse.Namespace, **more: Any) -> Settings:
    """Return settings as options and the machine ask for, and those given."""
    has_gpu = jax.default_backend() == "gpu"
    is_there = torch is not None and torch.cuda.is_available() == has_gpu
    with_torch = is_there and not options.no_torch
    if with_torch:
        torch_side.prefer_fast_convolutions()
    if tokamax is not None and has_gpu:
        plans.add_tokamax()
    return Settings(
        with_torch=with_torch,
        with_tuning=has_gpu and not options.no_tuning,
        **{**more, **(_SMALL if options.small else {})},
    )


def shipped() -> dict[Key, Choice]:
    """Return the choices that a user has who tuned nothing; none are left behind."""
    plans.set_cache(None)
    return choices.table().all()


def _measured(cell: Cell, using: Settings, untuned: Mapping[Key, Choice]) -> Rows:
    """Return the rows of a cell, or one that says why there are none."""
    try:
        return measure(cell, using, untuned)
    except Exception as error:
        facts = {"operation": cell.operation, "size": cell.size, "what": ""}
        return [{**facts, "contender": "all", "failure": reason(error)}]


def _is_our_failure(row: dict[str, Any]) -> bool:
    return "failure" in row and row["contender"] in ("all", *OURS)


def _failure(row: dict[str, Any]) -> str:
    names = ("operation", "size", "what", "contender")
    return f"{' '.join(row[name] for name in names)}: {row['failure']}"


def show(rows: Rows) -> None:
    """Print the times of contenders, and whether they meet their goals."""
    for row in rows:
        times = "{median_us:10.1f} µs  " + FINELY_RANGED
        told = row.get("failure") or times.format_map(row)
        print(f"  {row['what']:15s} {row['contender']:16s} {told}  {verdict(row)}")
    sys.stdout.flush()


# --- the page -------------------------------------------------------------------------


def verdict(row: dict[str, Any]) -> str:
    """Return whether a row meets its goal, to two digits; "" where it has none."""
    if "goal" not in row:
        return ""
    limit = f"≤ {row['goal']:.2f}"
    if "failure" in row:
        return f"{limit} failed"
    return f"{limit} {'met' if round(row['ratio'], 2) <= row['goal'] else 'missed'}"


def page_of(about: Sequence[str], *, baseline: str = "", **page: Any) -> Page:
    """Return a page about cells, given what it says of them first, and their rival."""
    to = f"`{baseline}`" if baseline else "the fastest rival"
    return Page(names_gpus=True, lines=functools.partial(_lines, about, to), **page)


def _lines(about: Sequence[str], baseline: str, data: Data) -> list[str]:
    rows = data["rows"]
    return [
        *about,
        "",
        "All contenders of a workload and direction take turns in one run, over",
        "several sets of operands, which together are too large for the GPU's cache.",
        f"Times are medians a call. The ratio is to {baseline}, taken round by",
        "round (median, lowest and highest): below 1 is faster. Rivals are all but",
        f"{', '.join(f'`{name}`' for name in OURS)}. `untuned` is what a user gets who",
        "tuned nothing, and `tuned` what `plans.autotune` found with few plans a call.",
        "",
        "The error is the largest of those of results and gradients, by their norms",
        "and relative to XLA's in f32. A contender has failed whose error is beyond",
        f"{OWN_BOUNDS[0]:g} and {OWN_BOUNDS[1]:g} for results and gradients, and for "
        f"rivals {RIVALS_BOUNDS[0]:g} and {RIVALS_BOUNDS[1]:g}.",
        "A goal is met if the ratio, rounded to two digits, is within it.",
        "",
        *_summary(rows),
        "",
        *table(_COLUMNS, map(_cells, rows)),
    ]


_COLUMNS = "workload | size | GPU | | contender | >µs | >ratio | range | >error | goal"


def _summary(rows: Rows) -> Iterator[str]:
    judged = [row for row in rows if "goal" in row]
    for name in dict.fromkeys(row["contender"] for row in judged):
        own = [row for row in judged if row["contender"] == name]
        missed = [row for row in own if not verdict(row).endswith(" met")]
        told = f"- `{name}` meets {len(own) - len(missed)} of {len(own)} goals."
        if ratios := [row["ratio"] for row in own if "ratio" in row]:
            mean = statistics.geometric_mean(ratios)
            told += f" The geometric mean of its ratios is {mean:.2f}."
        if missed:
            names = "; ".join(f"{_place(row)} {_short(row)}" for row in missed)
            told += f" Missed: {names}."
        yield told
    if failed := [row for row in rows if "failure" in row]:
        yield f"- Contenders that failed, with the reason in the table: {len(failed)}."


def _place(row: dict[str, Any]) -> str:
    return " ".join(filter(None, (row["operation"], row["size"], row["what"])))


def _short(row: dict[str, Any]) -> str:
    return "failed" if "failure" in row else f"{row['ratio']:.2f} > {row['goal']:.2f}"


def _cells(row: dict[str, Any]) -> list[str]:
    facts = [row["operation"], row["size"], gpu_of(row)]
    facts += [row["what"], row["contender"]]
    if "failure" in row:
        told = row["failure"].replace("|", "/")
        facts += ["", "", f"failed: {told}", ""]
    else:
        facts += [f"{row['median_us']:.1f}", f"{row['ratio']:.3f}"]
        # Records of programs that were no contests yet may lack these.
        facts += [FINE_RANGE.format_map(row) if "ratio_low" in row else ""]
        facts += [f"{max(row['errors']):.1e}" if row.get("errors") else ""]
    return [*facts, verdict(row)]
