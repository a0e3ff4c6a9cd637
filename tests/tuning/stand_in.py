# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a GPU, on which a part is measured without one."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import UnsupportedError, matmul, native
from jax_cudnn.choices import Choice
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.native import Candidate, PlanInfo
from jax_cudnn.reference.interpreter import evaluate
from jax_cudnn.tuning import contest, measure, races
from jax_cudnn.tuning.stopwatch import Measurement
from tests.common.drawn_operands import draw_arrays
from tests.common.planner import H200, PIN, made_plan


def pin(engine: int) -> str:
    return PIN.replace("4", str(engine))


@dataclass(kw_only=True)
class Gpu:
    """Stands for a GPU whose plans take as many µs as their engines' numbers."""

    engines: tuple[int, ...] = (30, 20, 10)
    wrong: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    xla_us: float = 1000.0
    free_bytes: int = 1600
    ran: list[float] = field(default_factory=lambda: [])

    def candidates(
        self, text: str, *, request: str, device: int
    ) -> tuple[Candidate, ...]:
        del text, request
        assert device == 3
        if not self.engines:
            raise UnsupportedError("no candidate")
        return tuple(made_plan(pin(engine)) for engine in self.engines)

    def plan(self, text: str, *, request: str, device: int) -> PlanInfo:
        del text
        assert device == 3
        return made_plan(request)

    def run(
        self, step: PartDecision, operands: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        assert step.plan is not None
        assert (step.plan.request, step.target) == (step.request, H200)
        if step.plan.engine in self.broken:
            raise jax.errors.JaxRuntimeError("out of memory")
        results = evaluate(step.part, operands)
        return [1.2 * x if step.plan.engine in self.wrong else x for x in results]


class Stopwatch:
    def __init__(self, graph: Graph, sets: Any, device: Any, results: Any):
        assert device.local_hardware_id == 3
        for arrays, tensors in (
            (sets[0], graph.input_tensors),
            (results[0], graph.output_tensors),
        ):
            assert [x.shape for x in arrays] == [t.stored_shape for t in tensors]

    def time(self, plan: PlanInfo, **options: Any) -> Measurement:
        assert options["samples"] > 0
        return Measurement.of([float(plan.engine)])


class Sets:
    size = 100

    def __init__(self, graph: Graph, device: Any):
        assert device.local_hardware_id == 3
        self.graph = graph
        self.types = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.draw()[0]]]

    def compile(self) -> None:
        pass

    def draw(self) -> list[list[jax.Array]]:
        return [draw_arrays(self.graph)]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Measure on a stand-in; a program takes as long as its plan, or XLA."""
    gpu = Gpu()
    device = SimpleNamespace(local_hardware_id=3, platform="gpu")
    ran = gpu.ran

    def run_cudnn(step: PartDecision, *operands: jax.Array) -> Sequence[jax.Array]:
        assert step.plan is not None
        ran.append(float(step.plan.engine))
        return gpu.run(step, operands)

    def run_xla(*args: Any) -> Sequence[jax.Array]:
        ran.append(gpu.xla_us)
        return evaluate(args[0], args[1])

    def compile_over_sets(function: Callable[..., Any], types: Any) -> Any:
        # Traced anew, and so added to what ran.
        jax.eval_shape(lambda *xs: function(*xs), *types[0])
        us = ran[-1]
        return lambda sets: us

    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    # One thread after the other, and all of them on the CPU.
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(jax, "default_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(native, "candidates", gpu.candidates)
    monkeypatch.setattr(native, "plan", gpu.plan)
    monkeypatch.setattr(races, "PlanStopwatch", Stopwatch)
    monkeypatch.setattr(contest, "OperandSets", Sets)
    monkeypatch.setattr(contest, "needed_bytes", lambda _: 300)
    monkeypatch.setattr(contest, "free_bytes", lambda _: gpu.free_bytes)
    monkeypatch.setattr(contest, "run_cudnn", run_cudnn)
    monkeypatch.setattr(contest, "run_xla", run_xla)
    monkeypatch.setattr(contest, "compile_over_sets", compile_over_sets)
    monkeypatch.setattr(
        contest, "time_calls", lambda call, count, samples: Measurement.of([call()])
    )
    return gpu


def measured(deadline: float = float("inf"), max_plans: int | None = None) -> Choice:
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    ((part, options, _),) = traced_graphs(matmul, x, w)
    return measure(part, options, H200, deadline, max_plans)
