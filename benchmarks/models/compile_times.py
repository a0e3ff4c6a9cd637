# SPDX-License-Identifier: Apache-2.0
"""Times how long training steps take to compile, beside plain JAX.

    python -m benchmarks.compile_times --out docs/internals/measured

writes compile_times.json and compile_times.md there, after every model. Needs optax
and, for numbers that say anything, an NVIDIA GPU. Each step is traced, lowered and
compiled in a process of its own, with empty caches. It does not run. `--only REGEX`
chooses models; those that the file in the folder has beside them are kept.
"GPT|Llama|ViT|ConvNeXt|ResNet|3-D" and "T5|Swin|SD" are about equal in time. `--small`
tries the script on a CPU.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.page import gpu_of, measured_by, page, table
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from benchmarks.harness.versions import environment
from benchmarks.models.biased import biased, whole_unet
from benchmarks.models.cudnn_kit import CudnnKit
from benchmarks.models.jax_steps import program
from benchmarks.models.plain_kit import PlainKit
from benchmarks.models.zoo import Model, Shape, Weights, models

_KITS = {"plain JAX": PlainKit, "jax_cudnn": CudnnKit}
# The goal: at most this ratio to plain JAX, or so many seconds more.
_RATIO, _MORE_S = 1.2, 2.0
# A process that takes longer is ended, and its time is given as at least this.
_LONGEST_S = 200


def _models(*, small: bool) -> list[Model]:
    every = [*models(small=small), *biased(small=small), whole_unet(small=small)]
    return [model for model in every if model.trains]


# --- in a process of its own ----------------------------------------------------------


class _Blank(Weights):
    """Weights of which the shapes matter: zeros, which take no time to draw."""

    def _drawn(self, shape: Shape, spread: float, mean: float) -> np.ndarray:
        del spread, mean
        return np.zeros(shape, np.float32)


def _program(model: Model, kit: PlainKit) -> tuple[Any, Any]:
    """Return a training step, and the types of its operands."""
    batch = model.batch(np.random.default_rng(1))
    weights = _Blank(kit)
    given = {name: kit.operand(x) for name, x in batch.items()}
    jax.eval_shape(lambda given: model.output(kit, weights, given), given)
    steps: list[Any] = []

    def made() -> Any:
        step, *operands = program(
            model, kit, weights.drawn, weights.kinds, batch, rate=model.rate,
            is_training=True,
        )  # fmt: skip
        steps.append(step)
        return operands

    operands = jax.eval_shape(made)
    return steps[0], operands


def work(name: str, contender: str, *, small: bool) -> dict[str, Any]:
    """Compile the training step of a model."""
    model = next(each for each in _models(small=small) if each.name == name)
    step, operands = _program(model, _KITS[contender]())
    jnp.zeros(8).block_until_ready()  # CUDA has started.
    times = [time.perf_counter()]
    traced = jax.jit(step, donate_argnums=0).trace(*operands)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    steps = ("trace_s", "lower_s", "compile_s")
    took = (later - earlier for earlier, later in itertools.pairwise(times))
    return {
        **{what: round(x, 2) for what, x in zip(steps, took, strict=True)},
        "characters": len(lowered.as_text()),
    }


# --- the samples ----------------------------------------------------------------------


def _ask(name: str, contender: str, *, small: bool) -> dict[str, Any]:
    flags = ["--work", name, "--by", contender, *(["--small"] if small else [])]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.compile_times", *flags],
                capture_output=True, text=True, check=False, timeout=_LONGEST_S,
                env={**os.environ, "CUDA_CACHE_PATH": folder,
                     "JAX_ENABLE_COMPILATION_CACHE": "false"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"ended": True, "total_s": float(_LONGEST_S)}
    if done.returncode:
        raise RuntimeError(f"{name}, {contender}: {done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    total = found["trace_s"] + found["lower_s"] + found["compile_s"]
    return {**found, "total_s": round(total, 2)}


def measure(model: Model, *, small: bool) -> list[dict[str, Any]]:
    """Return a row for each contender of a model."""
    rows = [
        {
            "model": model.name,
            "size": model.size,
            "contender": contender,
            **_ask(model.name, contender, small=small),
        }
        for contender in _KITS
    ]
    plain = rows[0]["total_s"]
    for row in rows:
        row["ratio"] = round(row["total_s"] / plain, 3)
        row["meets_goal"] = "ended" not in row and (
            row["ratio"] <= _RATIO or row["total_s"] <= plain + _MORE_S
        )
        took = f"over {_LONGEST_S}" if "ended" in row else f"{row['total_s']:.1f}"
        print(f"  {row['contender']}: {took} s, {row['ratio']:.2f}", flush=True)
    return rows


# --- the page -------------------------------------------------------------------------


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    ours = [row for row in data["rows"] if row["contender"] != next(iter(_KITS))]
    missed = [row["model"] for row in ours if not row["meets_goal"]]
    lines = [
        "Each training step was traced, lowered and compiled once, untuned, in a",
        "process of its own with empty caches. The seconds are those of all three.",
        "cuDNN's plans are built where a step is lowered. Characters are those of the",
        "lowered program.",
        "",
        *table(
            "model | batch | GPU | contender | >seconds | >ratio | >trace | >lower "
            "| >compile | >characters",
            map(_cells, data["rows"]),
        ),
    ]
    goal = f"at most {_RATIO} of plain JAX's time or {_MORE_S:g} s more"
    verdict = f"missed by {', '.join(missed)}" if missed else "met"
    lines += ["", f"Goal, {goal}: {verdict}."]
    measured = {row["model"] for row in data["rows"]}
    every = [model.name for model in _models(small=False)]
    if missing := [name for name in every if name not in measured]:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    return page(
        data,
        lines,
        title="How long training steps take to compile",
        comment="How long the training steps of models take to compile.",
        command=measured_by("compile_times"),
        names_gpus=True,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    named = [row["model"], row["size"], gpu_of(row), row["contender"]]
    ratio = f"{row['ratio']:.2f}"
    if "ended" in row:
        return [*named, f"over {_LONGEST_S}", ratio, "", "", "", ""]
    parts = (f"{row[name]:.1f}" for name in ("trace_s", "lower_s", "compile_s"))
    return [*named, f"{row['total_s']:.1f}", ratio, *parts, f"{row['characters']:,}"]


def main() -> None:
    """Compile the models and write the page, or do one as another process asks."""
    made = parser(__doc__)
    made.add_argument("--only", default="", help="a regular expression of names")
    made.add_argument("--small", action="store_true", help="try the script on a CPU")
    made.add_argument("--work", metavar="MODEL", help=argparse.SUPPRESS)
    made.add_argument("--by", choices=list(_KITS), help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.work:
        print(json.dumps(work(options.work, options.by, small=options.small)))
        return
    # The processes need the GPU's memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    every = _models(small=options.small)
    cores = len(os.sched_getaffinity(0))  # XLA compiles on all that it may use.
    rows = Table(
        folder=options.out,
        name="compile_times",
        markdown=markdown,
        keys=["model"],
        order=[model.name for model in every],
        versions={**environment(), "CPU cores": str(cores)},
    )
    if not options.only:
        rows.forget()
    for model in every:
        if re.search(options.only, model.name):
            print(model.name, flush=True)
            rows.add(*measure(model, small=options.small))


if __name__ == "__main__":
    main()
