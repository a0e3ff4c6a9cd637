# SPDX-License-Identifier: Apache-2.0
"""Tests that `plans` finds the calls of every kind of callable."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import choices, native, plans
from jax_cudnn.choices import Choice
from jax_cudnn.graph import label
from jax_cudnn.lowering import decision, devices, traced_graphs
from jax_cudnn.native import CacheStats, LibraryInfo, PlanInfo
from jax_cudnn.plans import shipping, tuning
from jax_cudnn.tuning import Programs
from tests.common.planner import H200, made_plan

_X = jax.ShapeDtypeStruct((6, 16), jnp.bfloat16)
_W = jax.ShapeDtypeStruct((16, 40), jnp.bfloat16)
_Q = jax.ShapeDtypeStruct((2, 5, 3, 8), jnp.bfloat16)


def _ops(function: Any, *args: Any, **kwargs: Any) -> list[str]:
    return [label(graph) for graph, _, _ in traced_graphs(function, *args, **kwargs)]


# --- arguments that are no arrays -----------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True, np.True_])
def test_a_flag_stays_a_flag(is_causal: bool) -> None:
    ((graph, _, _),) = traced_graphs(jax_cudnn.sdpa, _Q, _Q, _Q, is_causal=is_causal)
    assert graph.nodes[0].attributes.is_causal is bool(is_causal)


def test_names_types_and_numbers_stay_what_they_are() -> None:
    options = {"activation": "gelu", "preferred_element_type": np.float32}
    ((graph, _, _),) = traced_graphs(
        jax_cudnn.matmul, _X, _W, scale_b=0.5, plan=plans.PlanOptions(), **options
    )
    assert label(graph) == "matmul+mul+gelu_tanh"
    assert graph.output_tensors[0].dtype == "f32"
    assert [tensor.name for tensor in graph.input_tensors] == ["a", "b"]
    ((graph, _, _),) = traced_graphs(jax_cudnn.sdpa, _Q, _Q, _Q, scale=np.float32(0.5))
    assert graph.nodes[0].attributes.scale == 0.5


def test_arguments_by_position_and_in_trees_are_told_apart_by_leaf() -> None:
    def function(given: dict[str, Any], activation: str, *, bias: Any) -> jax.Array:
        return jax_cudnn.matmul(
            *given["operands"], bias=bias, activation=activation, precision=None
        )

    given = {"operands": (_X, _W), "name": "left out", "none": None}
    assert _ops(function, given, "relu", bias=None) == ["matmul+relu"]
    bias = np.ones(40, np.float32)
    assert _ops(function, given, "relu", bias=bias) == ["matmul+add+relu"]


def test_results_may_be_more_than_arrays() -> None:
    def function(x: Any, w: Any) -> Any:
        return {"y": jax_cudnn.matmul(x, w), "name": "layer", "count": 3, "none": None}

    assert _ops(function, _X, _W) == ["matmul"]


# --- what can be called ---------------------------------------------------------------


class _Layer:
    """Calls in every way that an object has."""

    # Not what `trace` is of a jitted function.
    def trace(self) -> None:
        raise AssertionError

    def __init__(self, activation: str) -> None:
        self.activation = activation

    def __call__(self, x: Any, w: Any) -> jax.Array:
        return jax_cudnn.matmul(x, w, activation=self.activation)

    def plain(self, x: Any, w: Any, activation: str) -> jax.Array:
        return jax_cudnn.matmul(x, w, activation=activation)

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x: Any, w: Any) -> jax.Array:
        return self(x, w)

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def static(self, x: Any, w: Any, activation: str) -> jax.Array:
        return jax_cudnn.matmul(x, w, activation=activation)

    @staticmethod
    def bare(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.matmul(x, w, activation="relu")

    @classmethod
    def made(cls, x: Any, w: Any) -> jax.Array:
        return cls("relu")(x, w)


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def twice(x: Any, w: Any) -> Any:
        return function(x, w), function(jnp.sin(x), w)

    return twice


def test_methods_and_callable_objects() -> None:
    layer = _Layer("relu")
    for function in (layer, layer.jitted, layer.bare, layer.made):
        assert _ops(function, _X, _W) == ["matmul+relu"], function
    for function in (layer.plain, layer.static):
        assert _ops(function, _X, _W, "relu") == ["matmul+relu"], function
    assert _ops(_Layer.jitted, layer, _X, _W) == ["matmul+relu"]


def test_partials_of_anything() -> None:
    layer = _Layer("relu")
    static = jax.jit(jax_cudnn.matmul, static_argnames=("activation", "plan"))
    for function in (
        functools.partial(jax_cudnn.matmul, _X, activation="relu"),
        functools.partial(functools.partial(static, _X), activation="relu"),
        functools.partial(layer.jitted, _X),
        functools.partial(layer.plain, _X, activation="relu"),
        jax.tree_util.Partial(jax_cudnn.matmul, _X, activation="relu"),
    ):
        assert _ops(function, _W) == ["matmul+relu"], function
    changed = functools.partial(static, _X, activation="tanh")
    assert _ops(changed, _W, activation="relu") == ["matmul+relu"]


def test_jitted_functions_by_their_own_rules() -> None:
    donating = jax.jit(
        jax_cudnn.matmul, static_argnames="activation", donate_argnames="a"
    )
    x = jnp.ones(_X.shape, _X.dtype)
    assert _ops(donating, x, _W, activation="relu") == ["matmul+relu"]
    assert not x.is_deleted()
    with pytest.raises(TypeError, match="str"):
        _ops(jax.jit(jax_cudnn.matmul), x, _W, activation="relu")


def test_what_is_wrapped_around_a_jitted_function_is_seen() -> None:
    assert _ops(_decorated(jax.jit(jax_cudnn.matmul)), _X, _W) == ["matmul", "matmul"]
    batched = jax.ShapeDtypeStruct((7, *_X.shape), _X.dtype)
    each = jax.vmap(jax.jit(jax_cudnn.matmul), (0, None))
    ((graph, _, _),) = traced_graphs(each, batched, _W)
    assert graph.input_tensors[0].dims == (1, 42, 16)


# --- flax -----------------------------------------------------------------------------

_MODES = ({"graph": True}, {"graph": True, "graph_updates": False}, {"graph": False})
_STEP = ["matmul+add+relu", "relu_grad+add+matmul"]


@dataclass
class _Training:
    """A model with state (batch statistics, an optimizer), and its step."""

    model: Any
    optimizer: Any
    step: Callable[..., Any]


@pytest.fixture
def training() -> Iterator[_Training]:
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    optax = pytest.importorskip("optax", reason="optax is not installed")
    from jax_cudnn.flax.nnx import Linear

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.linear = Linear(16, 40, activation="relu", rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(40, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(self.linear(x))

        @nnx.jit
        def jitted(self, x: jax.Array) -> jax.Array:
            return self(x)

    def step(model: Any, optimizer: Any, x: jax.Array, *, rate: float = 1.0) -> Any:
        def loss(model: Any) -> jax.Array:
            return jnp.sum(model(x)) * rate

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    model = Model()
    yield _Training(
        model=model,
        optimizer=nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param),
        step=step,
    )
    # Tracing changed nothing, and left nothing of its own behind.
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert not isinstance(leaf, jax.core.Tracer)
    model.jitted(jnp.ones((6, 16)))


@pytest.mark.parametrize("mode", _MODES, ids=str)
def test_a_jitted_step_of_nnx(training: _Training, mode: dict[str, bool]) -> None:
    from flax import nnx

    step = nnx.jit(training.step, **mode)
    x = jnp.ones((6, 16))
    operands = (training.model, training.optimizer, x)
    before = jax.tree.map(np.array, nnx.state(training.model))
    assert _ops(step, *operands) == _STEP
    assert _ops(step.trace(*operands)) == _STEP
    assert _ops(functools.partial(step, *operands[:2]), x) == _STEP
    assert _ops(lambda *operands: step(*operands), *operands) == _STEP
    after = nnx.state(training.model)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    step(*operands)
    static = nnx.jit(training.step, static_argnames="rate", **mode)
    assert _ops(static, *operands, rate=0.5) == _STEP


def test_modules_of_nnx_without_jit(training: _Training) -> None:
    from flax import nnx

    x = jnp.ones((6, 16))
    model, optimizer = training.model, training.optimizer
    assert _ops(training.step, model, optimizer, x, rate=0.5) == _STEP
    for function in (model, model.jitted, model.__call__):
        assert _ops(function, x) == _STEP[:1], function
    shapes = nnx.eval_shape(lambda: type(model)())
    assert _ops(nnx.jit(lambda model, x: model(x)), shapes, x) == _STEP[:1]
    bound = nnx.jit_partial(training.step, model, optimizer, graph=False)
    assert _ops(bound, x) == _STEP


def test_programs_of_nnx_are_those_of_jax(training: _Training) -> None:
    from flax import nnx

    x = jnp.ones((6, 16))
    for mode in _MODES:
        traced = nnx.jit(lambda model, x: model(x), **mode).trace(training.model, x)
        assert [call.op for call in plans.inspect(traced).calls] == _STEP[:1]
        lowered = traced.lower(lowering_platforms=("cuda",))
        assert [call.op for call in plans.inspect(lowered).calls] == _STEP[:1]
        for program in (traced, lowered):
            with pytest.raises(TypeError, match="takes no further arguments; 1 were"):
                plans.inspect(program, x)
        compiled = traced.lower().compile()
        for use in (plans.inspect, plans.explain):
            with pytest.raises(TypeError, match=r"Compiled: .* no longer names its"):
                use(compiled)


# --- all of plans ---------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Put a stand-in for an H200 in place; yields the operations that were timed."""
    measured: list[str] = []
    table = choices.ChoiceTable()

    def measure(part: Any, *_: Any) -> Choice:
        measured.append(label(part))
        return Choice(
            op="",
            operands="",
            implementation="cudnn",
            plan="",
            cudnn_us=1.0,
            xla_us=2.0,
        )

    def plan(text: str, *, request: str = "", device: int = 0) -> PlanInfo:
        return made_plan(request)

    for module in (devices, shipping, tuning):
        monkeypatch.setattr(module, "local_target", lambda: (0, H200))
    for name, answer in (
        ("plan", plan),
        ("export_plan", lambda text, **_: text.encode()),
        ("cache_stats", lambda: CacheStats(entries=0, builds=0, hits=0)),
        ("cudnn_version", lambda: LibraryInfo(version=91900, cuda_major=13, path="")),
    ):
        monkeypatch.setattr(native, name, answer)
    monkeypatch.setattr(tuning, "local_device", lambda: jax.devices("cpu")[0])
    monkeypatch.setattr(shipping, "local_ordinals", lambda: [0])
    monkeypatch.setattr(
        tuning,
        "measure_each",
        lambda parts, *_: (measure(part) for part, _ in parts),
    )
    # Whole programs do run, on the CPU, whose times say nothing: none is faster.
    monkeypatch.setattr(Programs, "times", lambda _, numbers: [1.0] * len(numbers))
    monkeypatch.setattr(choices, "table", lambda: table)
    monkeypatch.setattr(choices, "remember", lambda _: None)
    decision.forget_decisions()
    yield measured
    decision.forget_decisions()


def test_all_of_plans_takes_a_jitted_step_of_nnx(
    training: _Training, gpu: list[str], tmp_path: Path
) -> None:
    from flax import nnx

    x = jnp.ones((6, 16))
    step = nnx.jit(training.step, static_argnames="rate")
    operands = (training.model, training.optimizer, x)
    for program, args, options in (
        (step, operands, {"rate": 0.5}),
        (step.trace(*operands), (), {}),
    ):
        for told in (plans.inspect, plans.explain):
            found = {call.op for call in told(program, *args, **options).calls}
            assert "matmul+add+relu" in found, told
        count = plans.warmup(program, *args, **options).plans
        assert count >= 2
        assert plans.save(tmp_path / "p", program, *args, **options).plans == count
        tuned = plans.autotune(program, *args, progress=False, **options)
        assert "matmul+add+relu" in gpu
        assert "the whole program, in microseconds: " in str(tuned)
        gpu.clear()
