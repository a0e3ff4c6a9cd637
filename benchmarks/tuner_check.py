# SPDX-License-Identifier: Apache-2.0
"""Checks what `plans.autotune` picks against a second timing of all plans.

    python -m benchmarks.tuner_check [--cells REGEX] [--out docs/internals/measured]

For each contraction of the cells (benchmarks/fusion_cells.py, forward and gradients):
the tuner's plan against the best of all of cuDNN's candidates for the same way of
writing the graph, both from a second measurement of every candidate that knows nothing
of the first. The report is written after every graph.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fusion import abstract_operands, run_all_directions
from benchmarks.fusion_cells import CELLS
from benchmarks.records import write_records
from benchmarks.report import environment, versions_text
from jax_cudnn import choices, plans
from jax_cudnn.graph import is_anchor, label
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.decision import rewritten_as
from jax_cudnn.lowering.devices import local_target
from jax_cudnn.tuning import measure
from jax_cudnn.tuning.candidate_times import time_candidates_of

_CELLS = (
    r"conv 3x3 \(64,56,56,64->64\)\+bias\+silu|groups 32 .*relu|3x3x3|"
    r"matmul \(16384,1024,4096\)\+bias\+gelu|depthwise 7x7 \(64,14|matmul \(12544,384"
)
"""The cells that are checked by default: one of each kind."""


def check(pattern: str) -> Iterator[dict[str, Any]]:
    """Yield for each contraction the tuner's plan and the best one, timed again."""
    local = local_target()
    assert local is not None, "needs a GPU"
    target = local[1]
    seen = set()
    for cell in CELLS:
        if not re.search(pattern, cell.key):
            continue
        found = traced_graphs(
            lambda arrays, cell=cell: run_all_directions(cell, arrays),
            abstract_operands(cell),
        )
        for traced in found:
            for part in traced.parts:
                if not any(map(is_anchor, part.nodes)) or part in seen:
                    continue
                seen.add(part)
                choice = measure(part, traced.options, target)
                if not choice.plan:
                    continue
                rewrite = rewritten_as(
                    part, legalize(part, target), target, choice.rewritten
                )
                assert rewrite is not None, "it was measured just now"
                again = time_candidates_of(part, rewrite)
                times = {
                    each.candidate.request: each.time.median_us
                    for each in again
                    if each.time is not None
                }
                best = min(times, key=times.__getitem__)
                # One that does not run again is as slow as can be.
                picked = times.get(choice.plan, float("inf"))
                yield {
                    "cell": cell.key,
                    "op": label(part),
                    "operands": choice.operands,
                    "candidates": len(times),
                    "first_us": next(iter(times.values())),
                    "picked_us": picked,
                    "best_us": times[best],
                    "ratio": picked / times[best],
                }


def page(rows: list[dict[str, Any]], versions: dict[str, str], command: str) -> str:
    """Return the report as Markdown."""
    ratios = [row["ratio"] for row in rows]
    within = sum(ratio <= 1.03 for ratio in ratios)
    lines = [
        "# The tuner's picks, timed again",
        "",
        f"Printed by `{command}`; do not edit. {versions_text(versions)}.",
        "",
        "Every candidate plan of a graph was timed once more after tuning, by the "
        "device's events on operands that rotate past the cache. The tuner's pick over "
        f"the best of that second round: within 3 % for {within} of {len(rows)} "
        f"graphs, median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}.",
        "",
        "| cell | graph | plans | first, µs | picked, µs | best, µs | picked / best |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row['cell']} | {row['op']} {row['operands']} | {row['candidates']} | "
            f"{row['first_us']:.1f} | {row['picked_us']:.1f} | {row['best_us']:.1f} | "
            f"{row['ratio']:.3f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Check, and write both forms of the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default=_CELLS)
    parser.add_argument("--out", type=Path, default=Path("docs/internals/measured"))
    options = parser.parse_args()
    plans.set_cache(None)
    choices.table().clear()
    rows, versions = list[dict[str, Any]](), environment()
    command = "python -m benchmarks.tuner_check"
    if options.cells != _CELLS:
        command += f" --cells '{options.cells}'"
    options.out.mkdir(parents=True, exist_ok=True)
    for row in check(options.cells):
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
        data = {"versions": versions, "rows": rows}
        write_records(options.out / "tuner_check.json", data)
        (options.out / "tuner_check.md").write_text(page(rows, versions, command))


if __name__ == "__main__":
    main()
