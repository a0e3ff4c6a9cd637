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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.page import Data, Page, Row, gpu_of, table
from benchmarks.harness.program import run_benchmark
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


class _Case(NamedTuple):
    """A model, and whether it is a small one."""

    model: Model
    small: bool

    def __str__(self) -> str:
        return self.model.name


def _cases(*, small: bool) -> list[_Case]:
    return [_Case(model, small) for model in _models(small=small)]


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
    flags = ["--work", name, contender, *(["--small"] if small else [])]
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


def _measure(cases: Sequence[_Case]) -> Iterator[Row]:
    """Yield a row for each contender of each model."""
    for model, small in cases:
        plain = 0.0
        for contender in _KITS:
            took = _ask(model.name, contender, small=small)
            plain = plain or took["total_s"]
            ratio = round(took["total_s"] / plain, 3)
            is_near = ratio <= _RATIO or took["total_s"] <= plain + _MORE_S
            yield {
                "model": model.name,
                "size": model.size,
                "contender": contender,
                **took,
                "ratio": ratio,
                "meets_goal": "ended" not in took and is_near,
            }


# --- the page -------------------------------------------------------------------------


def _lines(data: Data) -> list[str]:
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
    return lines


def _cells(row: dict[str, Any]) -> list[str]:
    named = [row["model"], row["size"], gpu_of(row), row["contender"]]
    ratio = f"{row['ratio']:.2f}"
    if "ended" in row:
        return [*named, f"over {_LONGEST_S}", ratio, "", "", "", ""]
    parts = (f"{row[name]:.1f}" for name in ("trace_s", "lower_s", "compile_s"))
    return [*named, f"{row['total_s']:.1f}", ratio, *parts, f"{row['characters']:,}"]


markdown = Page(
    name="compile_times",
    title="How long training steps take to compile",
    comment="How long the training steps of models take to compile.",
    names_gpus=True,
    lines=_lines,
)


def main() -> None:
    """Compile the models and write the page, or do one as another process asks."""
    if "--work" in sys.argv:
        made = argparse.ArgumentParser()
        made.add_argument("--work", nargs=2)
        made.add_argument("--small", action="store_true")
        options = made.parse_args()
        print(json.dumps(work(*options.work, small=options.small)))
        return
    # The processes need the GPU's memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    cores = len(os.sched_getaffinity(0))  # XLA compiles on all that it may use.
    run_benchmark(
        __doc__,
        _cases,
        _measure,
        markdown,
        keeps="any GPU",
        keys=["model", "contender"],
        order=[(x.name, kit) for x in _models(small=False) for kit in _KITS],
        versions={**environment(), "CPU cores": str(cores)},
    )


if __name__ == "__main__":
    main()
