# SPDX-License-Identifier: Apache-2.0
"""Compares the first plans of cuDNN's lists of candidates, A and B.

    python -m benchmarks.candidate_lists --out docs/internals/measured

times the first plan of each list, for the convolutions in random calls on one GPU, and
writes candidate_lists.json and candidate_lists.md there. What a list takes to be made
is timed, too. `--minutes 2` is the most that it may take.
"""

import argparse
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.records import write_records
from benchmarks.report import environment, versions_text
from jax_cudnn import native
from jax_cudnn.calibration.calls import drawn_call
from jax_cudnn.calibration.choosing import parts_of
from jax_cudnn.config import PlanOptions
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, Target, label, operand_text, to_json
from jax_cudnn.lowering.devices import local_device, local_target
from jax_cudnn.policy import ranked
from jax_cudnn.policy.products import kernels
from jax_cudnn.policy.tables import tables_for
from jax_cudnn.tuning.stopwatch import OperandSets, PlanStopwatch
from jax_cudnn.tuning.together import together

_DATA, _PAGE = "candidate_lists.json", "candidate_lists.md"
_REQUESTS = {
    "A": PlanOptions(heuristic_modes=("A", "FALLBACK")).to_request(),
    "B": PlanOptions(heuristic_modes=("B", "FALLBACK")).to_request(),
}
# Random calls that no rule and no judgement of rules is about.
_NUMBERS = range(3000, 5000)
_AT_ONCE = 32


class _Kernel:
    """A kernel with the first plan of each list that builds."""

    def __init__(self, part: Graph, target: Target) -> None:
        self.part = part
        self.rewrite = ranked(part, target)[0].rewrite
        self.plans: dict[str, native.PlanInfo] = {}
        self.listed_ms: dict[str, float] = {}
        self._device = local_device()
        self._sets = OperandSets(part, self._device)

    def prepare(self) -> None:
        """Build plans and compile what draws operands; may run in a thread."""
        text, ordinal = to_json(self.rewrite.graph), self._device.local_hardware_id
        for name, request in _REQUESTS.items():
            start = time.perf_counter()
            native.candidates(text, request=request, device=ordinal)
            self.listed_ms[name] = (time.perf_counter() - start) * 1e3
            # The first that builds.
            self.plans[name] = native.plan(text, request=request, device=ordinal)
        self._sets.compile()

    def times(self) -> dict[str, float]:
        """Return the microseconds of each list's first plan."""
        sets = [list(jax.jit(self.rewrite.before)(each)) for each in self._sets.draw()]
        stopwatch = PlanStopwatch(self.rewrite.graph, sets, self._device)
        by_name: dict[str, float] = {}
        for plan in self.plans.values():
            if plan.name not in by_name:
                by_name[plan.name] = stopwatch.time(plan, samples=5).median_us
        return {name: by_name[plan.name] for name, plan in self.plans.items()}


def measure(parts: Sequence[Graph], minutes: float) -> list[dict[str, Any]]:
    """Return a row for each kernel, until the time is over."""
    local = local_target()
    assert local is not None
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    for first in range(0, len(parts), _AT_ONCE):
        if time.monotonic() - start > minutes * 60:
            break
        found = [_Kernel(part, local[1]) for part in parts[first : first + _AT_ONCE]]
        together([functools.partial(_unless_refused, each) for each in found])
        for kernel in found:
            if len(kernel.plans) < len(_REQUESTS):
                continue
            times = kernel.times()
            rows.append(
                {
                    "class": kernels.class_of(kernel.part, tables_for(None)),
                    "operands": operand_text(kernel.part),
                    **{f"{name}_us": round(us, 2) for name, us in times.items()},
                    **{
                        f"{name}_listed_ms": round(ms, 2)
                        for name, ms in kernel.listed_ms.items()
                    },
                }
            )
    return rows


def _unless_refused(kernel: _Kernel) -> None:
    try:
        kernel.prepare()
    except UnsupportedError as error:
        print(f"  left out: {str(error)[:200]}", flush=True)


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    by_class: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in data["rows"]:
        by_class[row["class"]].append(row)
    by_class["all"] = data["rows"]
    listed = {
        name: statistics.median(row[f"{name}_listed_ms"] for row in data["rows"])
        for name in _REQUESTS
    }
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- The first plans of cuDNN's lists A and B, for convolutions. -->",
        "",
        "# cuDNN's lists of candidates",
        "",
        "Printed by `python -m benchmarks.candidate_lists --out "
        "docs/internals/measured`; do "
        f"not edit. {versions_text(data['environment'])}.",
        "",
        "The time of the first plan of list B over that of list A, for convolutions in",
        "random calls: the geometric mean, the lowest and the highest. And in how many",
        f"one is faster by more than 10 %. A list takes {listed['A']:.0f} ms (A) and",
        f"{listed['B']:.0f} ms (B), where all cores make lists at once.",
        "",
        "| kernels | number | B / A | lowest | highest | B is faster | A is faster |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, rows in sorted(by_class.items()):
        ratios = [row["B_us"] / row["A_us"] for row in rows]
        lines.append(
            f"| {name} | {len(rows)} | {statistics.geometric_mean(ratios):.2f} "
            f"| {min(ratios):.2f} | {max(ratios):.2f} "
            f"| {sum(ratio < 1 / 1.1 for ratio in ratios)} "
            f"| {sum(ratio > 1.1 for ratio in ratios)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the table."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--minutes", type=float, default=2.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    calls = (call for call in map(drawn_call, _NUMBERS) if "conv" in call.title)
    # Of fused ones, both lists begin alike.
    parts = dict.fromkeys(part for call in calls for part in parts_of(call))
    alone = [
        part
        for part in parts
        if len(part.nodes) == 1 and kernels.class_of(part, tables_for(None))
    ]
    rows = measure([part for part in alone if "conv" in label(part)], options.minutes)
    data: dict[str, Any] = {"environment": environment(), "rows": rows}
    write_records(options.out / _DATA, data)
    (options.out / _PAGE).write_text(markdown(data))
    print(markdown(data))


if __name__ == "__main__":
    main()
