# SPDX-License-Identifier: Apache-2.0
"""Tests that activations in a graph have JAX's values and derivatives."""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import matmul, plans
from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.ops.common.activations import ActivationName
from tests.products.shared.fused import assert_close, graphs, nodes

_NAMED = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "swish": jax.nn.swish,
    "tanh": jnp.tanh,
}


def _step(x: jax.Array) -> jax.Array:
    return x * (x > 0).astype(x.dtype) + x * (x < 1).astype(bool).astype(x.dtype)


def _constants(x: jax.Array) -> jax.Array:
    shift = jnp.exp(jnp.sin(jnp.asarray(2.0, x.dtype))) // 2
    return 2.0**x + jnp.maximum(0.5, x) * (3 - x) + jnp.where(x > 0.25, shift, 1.0 / x)


def _between(x: jax.Array) -> jax.Array:
    inside = (x > -0.5) & (x < 1)
    return jnp.where(
        inside | (x > 5), x * x, jnp.where(~inside & (x < -2), 0.1 * x, -x)
    )


_TRACED = {
    "between": _between,
    "celu": jax.nn.celu,
    "clip": lambda x: jnp.clip(x, -0.5, 0.7),
    "constants": _constants,
    "gelu-exact": functools.partial(jax.nn.gelu, approximate=False),
    "hard-sigmoid": jax.nn.hard_sigmoid,
    "hard-swish": jax.nn.hard_swish,
    "hard-tanh": jax.nn.hard_tanh,
    "integer-powers": lambda x: x**3 - x**-2 + x**1 + jnp.square(x),
    "jitted": jax.jit(lambda x: jnp.cos(x) + jnp.tan(0.1 * x)),
    "lambda": lambda x: jnp.where(x > 0, x, 0.1 * x) + jnp.floor(x) + jnp.ceil(x),
    "leaky": functools.partial(jax.nn.leaky_relu, negative_slope=0.3),
    "log-sigmoid": jax.nn.log_sigmoid,
    "logaddexp": lambda x: jnp.logaddexp(1.5, x) * jnp.logaddexp(x, 2.0 * x),
    "mish": jax.nn.mish,
    "named-inside": lambda x: (
        jax.nn.relu(x) ** 2 + jax.nn.relu6(2 * x) + jax.nn.silu(x)
    ),
    "roots": lambda x: jnp.sqrt(x * x + 1) + jax.lax.rsqrt(x * x + 2) + abs(x) ** 1.5,
    "selu": jax.nn.selu,
    "sign": lambda x: x * jnp.sign(x) + jnp.log1p(x * x) + jnp.expm1(x) - jnp.exp2(x),
    "soft-sign": jax.nn.soft_sign,
    "sparse-plus": jax.nn.sparse_plus,
    "squareplus": jax.nn.squareplus,
    "step": _step,
}


@pytest.mark.usefixtures("x64")
def test_every_activation_is_jax_s_with_its_gradient() -> None:
    activations = [
        *_NAMED.items(),
        *((f, f) for f in (*_NAMED.values(), *_TRACED.values())),
    ]
    # Nowhere two branches meet; the next test looks there.
    x = jnp.asarray([-30.0, -3.1, -1.3, -0.2, 0.3, 0.9, 1.7, 5.2, 30.0])[:, None]
    one = jnp.ones((1, 1))

    @jax.jit
    def both(x: jax.Array) -> Any:
        def pair(f: Any) -> Any:
            value, pull = jax.vjp(f, x)
            _, along = jax.jvp(f, (x,), (jnp.ones_like(x),))
            return value, pull(jnp.ones_like(x)), along

        ours = [
            pair(lambda x, a=a: matmul(x, one, activation=a)) for a, _ in activations
        ]
        return ours, [pair(f) for _, f in activations]

    for (name, _), got, want in zip(activations, *both(x), strict=True):
        try:
            for ours, theirs in zip(got, want, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
        except AssertionError as error:
            raise AssertionError(f"activation {name}") from error


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "function",
    [
        jax.nn.mish,
        jax.nn.log_sigmoid,
        jnp.abs,
        lambda x: jnp.maximum(x, 0.0),
        *(
            # 0 and the lower slope here; 1/2 and 1 in JAX.
            f
            for name, f in _NAMED.items()
            if name not in ("relu6", "leaky_relu")
        ),
    ],
)
def test_the_gradient_where_branches_meet_is_jax_s(function: Any) -> None:
    zero, one = jnp.zeros((1, 1)), jnp.ones((1, 1))
    got = jax.grad(lambda x: matmul(x, one, activation=function).sum())(zero)
    assert_close(got, jax.grad(lambda x: function(x).sum())(zero))


@pytest.mark.parametrize(
    ("activation", "modes"),
    [
        ("leaky_relu", {"relu": 1}),
        (jax.nn.gelu, {"gelu_tanh": 1}),
        (jax.nn.swish, {"silu": 1}),
        (jnp.tanh, {"tanh": 1}),
        (jax.nn.mish, {"softplus": 1, "tanh": 1, "mul": 1}),
        (lambda x: jax.nn.relu(x), {"relu": 1}),
        (jax.nn.hard_swish, {"constant": 2, "add": 1, "relu6": 1, "div": 1, "mul": 1}),
        # Nothing that is known is computed in the kernel, and a constant is one node.
        (
            lambda x: x * (2.0 + 3.0) - jnp.cos(5.0) * 0 - 5.0,
            {"constant": 2, "mul": 1, "sub": 2},
        ),
    ],
)
def test_an_activation_is_as_few_nodes_as_there_are(
    activation: Any, modes: dict[str, int]
) -> None:
    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    ((graph, _),) = graphs(functools.partial(matmul, activation=activation), a, b)
    found = nodes(graph)
    del found["matmul"]
    assert found == modes


def test_the_tensor_that_is_not_broadcast_comes_first() -> None:
    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    function = functools.partial(matmul, activation=_constants)
    ((graph, _),) = graphs(function, a, b)
    for node in graph.nodes:
        attributes = node.attributes
        if isinstance(attributes, PointwiseAttributes) and attributes.mode in (
            *("add", "mul", "max", "min", "sub", "div", "lt", "gt"),
        ):
            assert graph.tensor(dict(node.inputs)["a"]).dims == (1, 3, 7)


def test_a_function_s_numbers_are_its_own() -> None:
    a, b = -jnp.ones((3, 1)), jnp.ones((1, 5))
    for slope in (0.1, 0.2, jnp.float32(0.3), np.full((1, 1), 4, np.float32)):

        def run(a: jax.Array, slope: Any = slope) -> jax.Array:
            return matmul(a, b, activation=lambda x: jnp.where(x > 0, x, x * slope))

        want = jnp.full((3, 5), -float(np.sum(slope)), jnp.float32)
        assert_close(jax.jit(run)(a), want, 1e-6)


def test_repeated_squares_are_written_in_no_time() -> None:
    def function(x: jax.Array) -> jax.Array:
        for _ in range(30):
            x = x * x * 0.5
        return x

    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    gradient = jax.grad(lambda a: matmul(a, b, activation=function).sum())
    assert len(graphs(gradient, a)) == 2


@pytest.mark.parametrize("name", sorted(_NAMED))
def test_nan_stays_nan(name: Any) -> None:
    x = jnp.full((3, 2), jnp.nan)
    assert jnp.isnan(matmul(x, jnp.ones((2, 5)), activation=name)).all()


def test_the_names_that_reports_print_are_taken() -> None:
    x, w = jnp.ones((3, 5)), jnp.ones((5, 7))
    for name in get_args(ActivationName):
        report = plans.inspect(functools.partial(matmul, activation=name), x, w)
        (call,) = report.calls
        printed = call.op.removeprefix("matmul+")
        assert printed in _NAMED, printed
        again = plans.inspect(functools.partial(matmul, activation=printed), x, w)
        assert again.calls[0].op == call.op
    assert set(get_args(ActivationName)) == set(_NAMED)
