# SPDX-License-Identifier: Apache-2.0
"""Measures what `plans.autotune` finds in how many seconds.

    python -m benchmarks.tuning_budgets --out docs/internals/measured

tunes the training steps of some models (benchmarks/models) with several budgets, each
in a process of its own that knows no choices, and times the program beside that by XLA
alone and the untuned one. It writes tuning_budgets.json and tuning_budgets.md there.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks.harness.page import Data, Page, table
from benchmarks.harness.program import run_benchmark
from benchmarks.models.cudnn_kit import CudnnKit
from benchmarks.models.jax_steps import drawn, program
from benchmarks.models.zoo import models
from jax_cudnn import choices, plans
from jax_cudnn.tuning.in_context import ProgramTimes

_BUDGETS = {
    "GPT-2 small": (20.0, 45.0, math.inf),
    "ConvNeXt-T": (45.0, 90.0, math.inf),
}
_PREFIX = "tuned: "
_ALLOCATION = "XLA_PYTHON_CLIENT_PREALLOCATE"

# A model, and seconds.
_Case = tuple[str, float]


def cases(*, small: bool) -> Sequence[_Case]:
    """Return what is tuned, and the seconds for it."""
    return [
        (name, budget)
        for name, budgets in _BUDGETS.items()
        for budget in ((1.0,) if small else budgets)
    ]


def measure(found: Sequence[_Case]) -> Iterator[dict[str, Any]]:
    """Yield a row for each."""
    for name, budget in found:
        asked = [sys.executable, "-m", "benchmarks.tuning_budgets", "--tune", name]
        environment = {k: v for k, v in os.environ.items() if k != _ALLOCATION}
        run = subprocess.run(
            [*asked, str(budget)], env=environment, check=True, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        (line,) = (x for x in run.stdout.splitlines() if x.startswith(_PREFIX))
        seconds = None if budget == math.inf else budget
        yield {
            "model": name,
            "budget_s": seconds,
            "found": json.loads(line.removeprefix(_PREFIX)),
        }


def tune(name: str, budget: float) -> dict[str, Any]:
    """Tune the step of a model, and return what came of it."""
    plans.set_cache(None)
    choices.table().clear()  # those that are shipped, too
    (model,) = (each for each in models(small=False) if each.name == name)
    step, state, batch = program(
        model, CudnnKit(), *drawn(model), rate=0.0, is_training=True
    )
    jax.block_until_ready((state, batch))
    start = time.perf_counter()
    tuning = plans.autotune(step, state, batch, budget_s=budget)
    seconds = time.perf_counter() - start
    times = tuning.program
    if not isinstance(times, ProgramTimes):
        return {"seconds": round(seconds, 1), "told": times}
    return {
        "seconds": round(seconds, 1),
        "left": tuning.left_count,
        "us": times.chosen_us,
        "untuned_us": times.untuned_us,
        "xla_us": times.xla_us,
    }


def _lines(data: Data) -> list[str]:
    return [
        "`plans.autotune(step, ..., budget_s=seconds)` of whole training steps, as in",
        "[Whole models](../../benchmarks/models.md), each in a process of its own. "
        "The program's times",
        "are those that the tuner measures at its end, in turns. Left are the calls",
        "that were not measured, which run as untuned in each version. XLA runs the",
        "others in the last column, but for those that take it over three times as",
        "long.",
        "",
        *table(
            "model | >budget s | >took s | >left | >ms | >of untuned | >of XLA",
            map(_cells, data["rows"]),
        ),
    ]


def _cells(row: dict[str, Any]) -> list[Any]:
    found, budget = row["found"], row["budget_s"]
    told = "no limit" if budget is None else f"{budget:.0f}"
    if "told" in found:
        return [row["model"], told, found["seconds"], "-", "-", found["told"], "-"]
    us = found["us"]
    beside = (found["untuned_us"], found["xla_us"])
    ratios = ("-" if each is None else f"{us / each:.3f}" for each in beside)
    times = found["left"], f"{us / 1e3:.2f}", *ratios
    return [row["model"], told, found["seconds"], *times]


markdown = Page(
    name="tuning_budgets",
    title="Tuning for some seconds",
    comment="What tuning finds in how many seconds.",
    lines=_lines,
)


def main() -> None:
    """Measure, and write the page; or tune one model, for that."""
    if "--tune" not in sys.argv:
        os.environ[_ALLOCATION] = "false"  # The memory is for the other processes.
        run_benchmark(__doc__, cases, measure, markdown)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", nargs=2)
    name, budget = parser.parse_args().tune
    print(_PREFIX + json.dumps(tune(name, float(budget))))


if __name__ == "__main__":
    main()
