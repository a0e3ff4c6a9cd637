# SPDX-License-Identifier: Apache-2.0
"""Tests that activations passed as functions keep their meaning, fused or not."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jax_cudnn import conv, dot_general, gated_matmul, matmul, plans
from jax_cudnn.flax import nnx as our_nnx
from jax_cudnn.graph import GraphWriter, Tensor, derivative_of
from jax_cudnn.legalize import legalize
from tests.activations.given import Function, by_bias, remarks_on
from tests.products.shared.fused import assert_close, graphs, nodes

pytestmark = pytest.mark.sampled

# --- whose function it is -------------------------------------------------------------


def _like_relu(rule: Callable[..., Any]) -> Function:
    """Return a function with the value of jax.nn.relu, equation by equation."""

    @jax.custom_jvp
    @jax.jit
    def relu(x: jax.Array) -> jax.Array:
        return jnp.maximum(x, 0)

    relu.defjvps(rule)
    return relu


def _second(f: Function) -> Function:
    return jax.vmap(jax.grad(jax.grad(f)))


@pytest.mark.parametrize(
    "rule",
    [
        lambda g, ans, x: 3 * g,
        lambda g, ans, x: lax.select(x >= 0, g, lax.full_like(g, 0)),
        lambda g, ans, x: lax.select(x > 0, g * x, lax.full_like(g, 0)),
    ],
)
def test_a_rule_of_the_users_is_not_taken_for_jax_s(rule: Any) -> None:
    function = _like_relu(rule)
    x = jnp.asarray([-2.0, 0.0, 3.0])

    def inside(x: jax.Array) -> jax.Array:
        return function(x) + 0.0

    for f in (function, inside):
        got, want = (jax.grad(lambda x, f=f: jnp.sum(f(x)))(x) for f in (by_bias(f), f))
        assert_close(got, want, 1e-6)
        (remark,) = remarks_on(by_bias(f), x)
        assert "derivative rule of its own (jax.custom_jvp)" in remark
    vmapped = jax.vmap(lambda x: by_bias(function)(x[None])[0])
    assert_close(_second(lambda x: vmapped(x[None])[0])(x), _second(function)(x), 1e-6)


def test_a_rule_within_the_users_rule_is_not_taken_for_jax_s() -> None:
    # Its own rule computes what that of jax.nn.relu does, by way of another function.
    other = _like_relu(lambda g, ans, x: 3 * g)
    relu = _like_relu(lambda g, ans, x: g)

    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (g,) = primals, tangents
        return other(x), lax.select(x > 0, g, lax.full_like(g, 0))

    relu.defjvp(rule)
    assert remarks_on(by_bias(lambda x: relu(x) + 0.0), jnp.ones(3))
    relu.defjvps(lambda g, ans, x: lax.select(x > 0, g, lax.full_like(g, 0)))
    assert not remarks_on(by_bias(lambda x: relu(x) + 0.0), jnp.ones(3))


class _Scaled:
    """A callable that may change, and that is equal to anything."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.factor

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(jax.nn.relu)


def test_a_callable_is_what_it_is_when_it_is_called() -> None:
    x, one = jnp.full((3, 1), -2.0), jnp.ones((1, 1))
    function = _Scaled(2.0)
    assert_close(matmul(x, one, activation=function), 2 * x)
    function.factor = 5.0
    assert_close(matmul(x, one, activation=function), 5 * x)
    found = graphs(lambda x: matmul(x, one, activation=function), x)
    assert len(found) == 1
    assert nodes(found[0][0])["mul"] == 1


# --- long chains ----------------------------------------------------------------------


def _chain(count: int) -> Function:
    def function(x: jax.Array) -> jax.Array:
        for i in range(count):
            x = x * (1 + 0.01 * (-1) ** i)
        return x

    return function


@pytest.mark.parametrize("count", [64, 65, 400])
def test_a_chain_of_any_length_has_its_gradient(count: int) -> None:
    x, f = jnp.asarray([0.5, -2.0]), _chain(count)
    got = jax.value_and_grad(lambda x: jnp.sum(by_bias(f)(x)))(x)
    assert_close(got, jax.value_and_grad(lambda x: jnp.sum(f(x)))(x), 1e-4)
    remarks = remarks_on(by_bias(f), x)
    if count == 64:
        assert not remarks
    else:
        assert remarks[0].endswith(
            f"it has {count} operations, and a kernel is given 64"
        )


def test_the_gradient_of_a_long_graph_is_written_without_recursion() -> None:
    writer = GraphWriter("f32")
    x = value = writer.input(Tensor(name="x", dtype="f32", dims=(3, 5), order=(0, 1)))
    for _ in range(600):
        value = writer.pointwise("tanh", writer.pointwise("exp", value))
    output = writer.result(
        value, Tensor(name="output", dtype="f32", dims=(3, 5), order=(0, 1))
    )
    graph = writer.finish([output])
    derivative = derivative_of(graph)
    assert derivative is not None
    backward = derivative.backward(graph, (True,), (True,))
    assert backward is not None
    assert set(backward.graph.inputs) == {x, "grad_output"}


# --- behind the kernel ----------------------------------------------------------------


def _log1p(x: jax.Array) -> jax.Array:
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def test_it_gets_the_sums_and_is_rounded_once() -> None:
    rng = np.random.default_rng(0)
    a, b, bias, scale = (
        jnp.asarray(np.asarray(rng.standard_normal(shape), jnp.bfloat16))
        for shape in ((7, 64), (64, 5), (5,), (7, 5))
    )
    seen = []

    def function(x: jax.Array) -> jax.Array:
        seen.append((x.shape, str(x.dtype)))
        return _log1p(x)

    got = matmul(a, b, bias=bias, scale_out=scale, activation=function)
    wide = [np.asarray(x, np.float64) for x in (a, b, bias, scale)]
    sums = wide[0] @ wide[1] + wide[2]
    want = np.sign(sums) * np.log1p(np.abs(sums)) * wide[3]
    assert got.dtype == jnp.bfloat16
    assert_close(got, jnp.asarray(want, jnp.bfloat16), 0)
    assert set(seen) == {((7, 5), "float32")}


def test_integers_reach_it_as_f32() -> None:
    a, b = jnp.full((3, 4), 5, jnp.int8), jnp.full((4, 2), 7, jnp.int8)
    options: dict[str, Any] = {"activation": _log1p, "scale_a": 0.5}
    got = matmul(a, b, preferred_element_type=jnp.float16, **options)
    assert_close(got, jnp.full((3, 2), np.log1p(70.0), jnp.float16), 1e-3)


@pytest.mark.parametrize("function", [lambda x: jnp.cumsum(x, axis=-1), _log1p])
def test_it_sees_the_result_as_the_caller_does(function: Function) -> None:
    rng = np.random.default_rng(1)
    x, w, bias = (
        jnp.asarray(np.asarray(rng.standard_normal(s), jnp.float32))
        for s in ((2, 3, 5, 6), (4, 3, 2, 3), (4,))
    )
    plain = lax.conv(x, w, (1, 1), "VALID") + bias[:, None, None][None]
    assert_close(conv(x, w, bias=bias, activation=function), function(plain), 1e-5)

    a, b, v = (
        jnp.asarray(np.asarray(rng.standard_normal(s), jnp.float32))
        for s in ((2, 3, 5, 6), (3, 6, 4), (6,))
    )
    b = b[None]
    assert_close(matmul(a, b, activation=function), function(a @ b), 1e-5)
    assert_close(matmul(a, v, activation=function), function(jnp.matmul(a, v)), 1e-5)
    assert_close(matmul(v, b, activation=function), function(jnp.matmul(v, b)), 1e-5)
    numbers = (((3,), (2,)), ((1,), (1,)))
    want = function(lax.dot_general(a, b, numbers))
    assert_close(dot_general(a, b, numbers, activation=function), want, 1e-5)
    gate = jnp.ones((6, 4))
    assert_close(
        gated_matmul(a, gate, gate, activation=function),
        function(a @ gate[None, None]) * (a @ gate[None, None]),
        1e-4,
    )


def test_it_may_capture_what_it_learns() -> None:
    rng = np.random.default_rng(2)
    x, w = (
        jnp.asarray(np.asarray(rng.standard_normal(s), jnp.float32))
        for s in ((5, 3), (3, 4))
    )
    slopes = jnp.asarray([0.1, 0.2, 0.3, 0.4])

    def prelu(y: jax.Array, slopes: jax.Array) -> jax.Array:
        return jnp.where(y > 0, y, y * slopes[None])

    def ours(w: jax.Array, slopes: jax.Array) -> jax.Array:
        return jnp.sum(matmul(x, w, activation=lambda y: prelu(y, slopes)) ** 2)

    def plain(w: jax.Array, slopes: jax.Array) -> jax.Array:
        return jnp.sum(prelu(x @ w, slopes) ** 2)

    for jitted in (lambda f: f, jax.jit):
        got, want = (
            jitted(jax.value_and_grad(f, (0, 1)))(w, slopes) for f in (ours, plain)
        )
        assert_close(got, want, 1e-4)
    many = jnp.stack([slopes, 2 * slopes])
    got, want = (jax.vmap(jax.grad(f, 1), (None, 0))(w, many) for f in (ours, plain))
    assert_close(got, want, 1e-4)


class _Slopes(nnx.Module):
    """An activation with a parameter for each column."""

    def __init__(self) -> None:
        self.slope = nnx.Param(jnp.full((4,), 0.3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * self.slope[...][None]


def test_a_layer_s_activation_may_have_parameters() -> None:
    layer = our_nnx.Linear(3, 4, activation=_Slopes(), rngs=nnx.Rngs(0))
    x = jnp.cos(jnp.arange(15.0)).reshape(5, 3)

    @nnx.jit
    def gradient(layer: our_nnx.Linear, x: jax.Array) -> Any:
        return nnx.grad(lambda layer: jnp.sum(layer(x)))(layer)

    got = gradient(layer, x).activation.slope[...]
    sums = x @ layer.kernel[...] + layer.bias[...][None]
    assert_close(got, jnp.sum(jnp.tanh(sums), axis=0), 1e-5)


def test_it_may_look_at_its_argument_where_there_is_one() -> None:
    def function(x: jax.Array) -> jax.Array:
        return x if float(x[0, 0]) > 0 else -x

    x = jnp.asarray([[-2.0]])
    assert_close(
        matmul(x, jnp.ones((1, 3)), activation=function), jnp.full((1, 3), 2.0)
    )
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x: matmul(x, jnp.ones((1, 3)), activation=function))(x)


def test_an_error_of_the_function_is_its_own() -> None:
    def function(x: jax.Array) -> jax.Array:
        raise KeyError("mine")

    with pytest.raises(KeyError, match=r"^'mine'$"):
        matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), activation=function)


def test_its_effects_take_place_once() -> None:
    seen: list[int] = []

    def function(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: seen.append(x.size), x)
        return x

    matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), activation=function)
    jax.effects_barrier()
    assert seen == [8]


# --- what is said of it ---------------------------------------------------------------


def _cumsum(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, axis=0)


def _loss(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(matmul(a, b, activation=_cumsum))


_A = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
_B = jax.ShapeDtypeStruct((16, 24), jnp.bfloat16)


def test_inspect_says_what_is_not_in_the_kernel_and_where_it_is() -> None:
    forward, *gradients = plans.inspect(jax.grad(_loss, (0, 1)), _A, _B).calls
    assert re.fullmatch(
        r"the activation _cumsum follows the kernel as JAX code: it uses 'cumsum', "
        r"which graphs have no node for \(.*test_activation_functions\.py:\d+:\d+ "
        r"\(_cumsum\)\)",
        forward.reasons[-1],
    )
    assert gradients
    for call in gradients:
        assert not any("activation" in reason for reason in call.reasons)


def test_the_graph_is_that_of_the_call_without_it() -> None:
    # So that choices that were measured for that are this one's as well.
    def with_it(a: Any, b: Any) -> jax.Array:
        return matmul(a, b, activation=_cumsum)

    def without(a: Any, b: Any) -> jax.Array:
        return matmul(a, b, preferred_element_type=jnp.float32)

    assert graphs(with_it, _A, _B) == graphs(without, _A, _B)


# --- the gradient's graph -------------------------------------------------------------


def test_the_cotangent_is_rounded_where_it_leaves_the_activation() -> None:
    def loss(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        y = matmul(a, b, bias=bias, activation=lambda x: x * jnp.tanh(x + 1) + 0.5)
        return jnp.sum(y.astype(jnp.float32))

    bias = jax.ShapeDtypeStruct((24,), jnp.bfloat16)
    _, (backward, _) = graphs(jax.grad(loss, (0, 1, 2)), _A, _B, bias)
    rounded = [
        name
        for node in backward.nodes
        if getattr(node.attributes, "mode", "") == "identity"
        for _, name in node.outputs
        if backward.tensor(name).dtype == "bf16"
    ]
    assert len(rounded) == 1


def test_cudnn_is_not_asked_for_more_operations_than_it_takes() -> None:
    tensor = Tensor(name="x", dtype="f32", dims=(1, 8, 16), order=(0, 1, 2))
    writer = GraphWriter("f32")
    value = writer.input(tensor)
    for _ in range(250):
        value = writer.pointwise("tanh", value)
    total = writer.reduce_to(value, (1, 1, 16))
    final = replace(tensor, name="output", dims=(1, 1, 16))
    graph = writer.finish([writer.result(total, final)])
    assert legalize(graph, None).reasons == (
        "251 operations: cuDNN takes 250 in one graph",
    )
