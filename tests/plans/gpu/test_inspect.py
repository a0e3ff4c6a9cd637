# SPDX-License-Identifier: Apache-2.0
"""Tests that `plans.inspect` shows a train step's calls with the plans that run."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import matmul, native, plans
from jax_cudnn.flax import make_attention_fn
from jax_cudnn.graph import from_json, to_json

pytestmark = pytest.mark.gpu

_EXAMPLE = Path(__file__).parents[3] / "examples" / "train_char_transformer.py"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


class TrainStep(NamedTuple):
    """A train step of the demo's transformer, with its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    layers: int


@pytest.fixture(autouse=True, scope="module")
def _as_users_have_it() -> Iterator[None]:
    """Let the demo's model broadcast as it does outside of the tests."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def train_step(_as_users_have_it: None) -> TrainStep:
    """Return a step of the demo's model as it is on a GPU, but for fewer layers."""
    demo = _load(_EXAMPLE)
    settings = replace(demo.ON_GPU, layers=3)
    numbers = np.arange(2000, dtype=np.int32) % 26
    corpus = demo.Corpus(
        alphabet="abcdefghijklmnopqrstuvwxyz", train=numbers, validation=numbers
    )
    model, params = demo.build(corpus, settings, make_attention_fn(), 0)
    text = next(demo.batches(corpus.train, settings, 0))

    def step(params: Any, text: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(model.loss)(params, text)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    return TrainStep(step, (params, text), settings.layers)


def test_a_train_step_has_its_forward_and_backward_calls(train_step: TrainStep) -> None:
    report = plans.inspect(train_step.function, *train_step.arguments)
    assert report.device == native.device_target(0).name
    assert [(call.op, call.direction, call.count) for call in report.calls] == [
        ("sdpa", "forward", train_step.layers),
        ("sdpa_backward", "backward", train_step.layers),
    ]
    for call in report.calls:
        assert call.implementation == "cudnn"
        assert call.plan is not None
        assert call.engine is not None
        # cuDNN's name of a plan begins with its engine: "eng10_k24=7".
        assert call.plan.startswith(f"eng{call.engine}")
        assert call.notes
        assert all(note.isidentifier() for note in call.notes)
        assert call.workspace_bytes is not None
        assert call.why == ("tuned" if call.request else "heuristic")
        assert (call.cudnn_us is not None) == (call.why == "tuned")
        assert call.part is not None
        assert call.graph is not None
        assert str(call.engine) in str(report)
        assert call.notes[0] in str(report)
    data = json.loads(json.dumps(report.to_json()))
    assert [call["engine"] for call in data["calls"]] == [
        c.engine for c in report.calls
    ]


def test_the_plan_is_among_the_candidates(train_step: TrainStep) -> None:
    for call in plans.inspect(train_step.function, *train_step.arguments).calls:
        candidates = call.candidates()
        assert candidates
        assert (call.engine, call.knobs) in [(c.engine, c.knobs) for c in candidates]
        (chosen, *_) = [
            each
            for each in candidates
            if (each.engine, each.knobs) == (call.engine, call.knobs)
        ]
        assert chosen.behavior_notes == call.behavior_notes
        assert chosen.numeric_notes == call.numeric_notes


def test_a_lowered_step_has_the_plans_of_the_traced_one(train_step: TrainStep) -> None:
    jitted = jax.jit(train_step.function)
    traced = plans.inspect(jitted.trace(*train_step.arguments))
    lowered = plans.inspect(jitted.lower(*train_step.arguments))

    def told(report: plans.Report) -> list[plans.Call]:
        # A lowered program knows neither the user's graph nor what was measured.
        forgotten = {
            "part": None,
            "by": "",
            "cudnn_us": None,
            "xla_us": None,
            "first_ratio": None,
        }
        return [
            replace(
                call,
                reasons=(),
                why="pinned" if call.why == "tuned" else call.why,
                **forgotten,
            )
            for call in report.calls
        ]

    assert told(lowered) == told(traced)


def test_what_inspect_planned_is_not_planned_again(train_step: TrainStep) -> None:
    jitted = jax.jit(train_step.function)
    plans.inspect(jitted, *train_step.arguments)
    builds = native.cache_stats().builds
    assert builds > 0
    jax.block_until_ready(jitted(*train_step.arguments))
    plans.inspect(jitted.lower(*train_step.arguments))
    assert native.cache_stats().builds == builds


def test_fused_layers_are_told_from_their_gradients() -> None:
    x, w = jnp.ones((512, 256), jnp.bfloat16), jnp.ones((256, 1024), jnp.bfloat16)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        layer = matmul(x, w, activation="gelu", implementation="cudnn")
        return jnp.sum(layer.astype(jnp.float32))

    calls = plans.inspect(jax.value_and_grad(loss, (0, 1)), x, w).calls
    assert [(call.op, call.direction) for call in calls] == [
        ("matmul+gelu_tanh", "forward"),
        ("gelu_tanh_grad", "backward"),
        ("matmul", "backward"),
        ("matmul", "backward"),
    ]
    assert [call.implementation for call in calls] == ["cudnn", "xla", "cudnn", "cudnn"]
    for call in calls:
        if call.implementation == "cudnn":
            assert call.graph is not None
            assert from_json(to_json(call.graph)) == call.graph
            assert len(call.candidates()) > 1
