# SPDX-License-Identifier: Apache-2.0
"""Tests traced activations against the functions, with special values and at random."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_cudnn import matmul
from tests.activations.given import Function, by_bias, by_scale, remarks_on
from tests.common import compiling

pytestmark = pytest.mark.once

# --- every primitive that is traced, at special values --------------------------------

_SPECIAL = np.array(
    [
        *(np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1.2e-38, -1.2e-38),
        *(1e-20, -1e-20, 1e-3, -1e-3, 0.25, 0.5, -0.5, 1, -1, 1.5, 2, -2, 3, -3),
        *(6, -6, 10.5, -10.5, 88.8, -88.8, 104, -104, 1e10, -1e10, 1e20, -1e20),
        *(np.finfo(np.float32).max, np.finfo(np.float32).min),
    ],
    np.float32,
)

_PRIMITIVES: dict[str, Function] = {
    "abs": jnp.abs,
    "add": lambda x: x + 1.5,
    "add-itself": lambda x: x + x,
    "and": lambda x: jnp.where((x > -1) & (x < 1), x, 2 * x),
    "ceil": jnp.ceil,
    "clip": lambda x: jnp.clip(x, -1, 0.5),
    "copy": lambda x: jnp.array(x, copy=True) * 2,
    "cos": jnp.cos,
    "div": lambda x: x / 3.0,
    "div-number": lambda x: 6.0 / x,
    "div-itself": lambda x: x / (x + 1.0),
    "div-one": lambda x: 1.0 / x,
    "eq": lambda x: jnp.where(x == 0, 2.0, x),
    "erf": lambda x: lax.erf(x),
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "floor": lambda x: jnp.floor(x) + x * 0.5,
    "ge": lambda x: jnp.where(x >= 0, x, 0.25 * x),
    "gt": lambda x: jnp.where(x > 0.5, x, 0.25 * x),
    "integer-pow-0": lambda x: x**0 + x,
    "integer-pow-2": lambda x: x**2,
    "integer-pow-3": lambda x: x**3,
    "integer-pow-7": lambda x: x**7,
    "integer-pow-minus-1": lambda x: x**-1,
    "integer-pow-minus-2": lambda x: x**-2,
    "integer-pow-minus-3": lambda x: x**-3,
    "jit": jax.jit(lambda x: jnp.sin(x) * x),
    "le": lambda x: jnp.where(x <= 0, x * x, x),
    "log": jnp.log,
    "log-of-max": lambda x: jnp.log(jnp.maximum(x, 0.0)),
    "logistic": lambda x: lax.logistic(x) + 0.0,
    "lt": lambda x: jnp.where(x < 0, x * x, x),
    "max": lambda x: jnp.maximum(x, 0.5),
    "max-itself": lambda x: jnp.maximum(x, -x),
    "max-minus-zero": lambda x: jnp.maximum(x, -0.0) + x * (-0.0),
    "min": lambda x: jnp.minimum(0.5, x),
    "min-zero": lambda x: jnp.minimum(x, 0.0),
    "mul": lambda x: x * 3.0,
    "mul-itself": lambda x: x * x,
    "ne": lambda x: jnp.where(x != x, 1.0, x),
    "neg": lambda x: -x,
    "not": lambda x: jnp.where(~(x > 0), x, 3 * x),
    "or": lambda x: jnp.where((x < -1) | (x > 1), x, 2 * x),
    "pow": lambda x: x**1.5,
    "pow-half": lambda x: x**0.5,
    "pow-minus-half": lambda x: x**-0.5,
    "pow-of-itself": lambda x: x ** (x + 1),
    "pow-of-two": lambda x: 2.0**x,
    "pow-of-zero": lambda x: jnp.float32(0) ** x,
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "rsqrt": lambda x: lax.rsqrt(x),
    "sign": jnp.sign,
    "sign-times-itself": lambda x: jnp.sign(x) * x,
    "sin": jnp.sin,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "sub": lambda x: x - 1.5,
    "sub-from": lambda x: 1.5 - x,
    "tan": jnp.tan,
    "tanh": lambda x: jnp.tanh(x) + 0.0,
    "to-bool": lambda x: jnp.where(x.astype(bool), x, 3.0),
    # JAX's functions, within another one.
    "hard-swish": lambda x: jax.nn.hard_swish(x),
    "hard-tanh": lambda x: jax.nn.hard_tanh(x),
    "log-sigmoid": lambda x: jax.nn.log_sigmoid(x),
    "logaddexp": lambda x: jnp.logaddexp(x, 0.0),
    "mish": lambda x: jax.nn.mish(x),
    "quick-gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": lambda x: jax.nn.relu(x),
    "relu6": lambda x: jax.nn.relu6(x),
    "soft-sign": lambda x: jax.nn.soft_sign(x),
    "softplus": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "sparse-plus": lambda x: jax.nn.sparse_plus(x),
    "squared-max": lambda x: jnp.square(jnp.maximum(x, 0)),
    "squared-relu": lambda x: jnp.square(jax.nn.relu(x)),
    "squareplus": lambda x: jax.nn.squareplus(x),
    # JAX's functions, known by identity.
    "known-elu": jax.nn.elu,
    "known-gelu": jax.nn.gelu,
    "known-gelu-exact": functools.partial(jax.nn.gelu, approximate=False),
    "known-leaky-relu": jax.nn.leaky_relu,
    "known-relu": jax.nn.relu,
    "known-relu6": jax.nn.relu6,
    "known-selu": jax.nn.selu,
    "known-sigmoid": jax.nn.sigmoid,
    "known-silu": jax.nn.silu,
    "known-softplus": jax.nn.softplus,
    "known-tanh": jnp.tanh,
}
# JAX's gradient of a square is 2x, which overflows; with a cotangent of 0 that is NaN.
# Ours is that of a product.
_DOUBLES_ITS_ARGUMENT = ("sparse-plus", "squareplus")


def _derivatives(f: Function, x: jax.Array) -> dict[str, jax.Array]:
    one = jnp.ones_like(x)

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(f(x)))(x)

    first, second = jax.jvp(gradient, (x,), (one,))
    return {"gradient": first, "jvp": jax.jvp(f, (x,), (one,))[1], "second": second}


def test_special_values_are_those_of_the_function() -> None:
    x = jnp.asarray(_SPECIAL)

    @jax.jit
    def values(x: jax.Array) -> Any:
        return [(by_scale(f)(x), f(x)) for f in _PRIMITIVES.values()]

    for (name, f), (got, want) in zip(_PRIMITIVES.items(), values(x), strict=True):
        assert not remarks_on(by_scale(f), x), name
        # 4 roundings; below the smallest normal number any.
        np.testing.assert_allclose(got, want, rtol=5e-7, atol=2e-38, err_msg=name)
        zeros = np.asarray(want) == 0
        np.testing.assert_array_equal(
            np.signbit(np.asarray(got)[zeros]),
            np.signbit(np.asarray(want)[zeros]),
            name,
        )


@pytest.mark.parametrize("part", range(4))
def test_derivatives_at_special_values_are_those_of_the_function(part: int) -> None:
    x = jnp.asarray(_SPECIAL)
    chosen = list(_PRIMITIVES.items())[part::4]

    @functools.partial(jax.jit, compiler_options=compiling.BY_DEFAULT)
    def derivatives(x: jax.Array) -> Any:
        return [
            (_derivatives(by_bias(f), x), _derivatives(lambda x, f=f: f(x + 0.0), x))
            for _, f in chosen
        ]

    for (name, _), (got, want) in zip(chosen, derivatives(x), strict=True):
        for kind in want:
            where = np.ones(x.shape, bool)
            if name in _DOUBLES_ITS_ARGUMENT:
                where = ~(np.abs(_SPECIAL) > 1.7e38)
            if name == "known-leaky-relu":
                # Told from the sign of the result, which these have not.
                where = ~((_SPECIAL < 0) & (_SPECIAL > -1.2e-36))
            if kind == "second":
                # Infinities of both signs meet in either order.
                where &= np.isfinite(_SPECIAL) & (np.abs(_SPECIAL) < 1e30)
            np.testing.assert_allclose(
                np.asarray(got[kind])[where],
                np.asarray(want[kind])[where],
                rtol=1e-5,
                atol=1e-6 if kind == "second" else 1e-7,
                err_msg=f"{kind} of {name}",
            )


# --- random programs ------------------------------------------------------------------


@jax.custom_jvp
def _own_jvp(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


_own_jvp.defjvps(lambda g, _, x: 0.3 * g * x)


@jax.custom_jvp
def _straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(4 * x) / 4


_straight_through.defjvps(lambda g, _, x: g)


@jax.custom_vjp
def _own_vjp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * (2 + jnp.cos(x)),))


def _while(x: jax.Array) -> jax.Array:
    return lax.while_loop(
        lambda state: state[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1]) + x), (0, x)
    )[1]


_Arguments = tuple[jax.Array, jax.Array, jax.Array]
# Operations of a value, the activation's argument, a captured number and array.
_TRACED: dict[str, Callable[..., jax.Array]] = {
    "abs": lambda y, *_: jnp.abs(y),
    "add": lambda y, x, *_: y + x,
    "clip": lambda y, *_: jnp.clip(y, -0.7, 0.4),
    "div": lambda y, x, *_: x / (1.5 + jnp.abs(y)),
    "erf": lambda y, *_: lax.erf(y),
    "exp": lambda y, *_: jnp.exp(-jnp.abs(y)),
    "floor": lambda y, *_: y - 0.5 * jnp.floor(y),
    "hard-swish": lambda y, *_: jax.nn.hard_swish(y),
    "integer-pow": lambda y, *_: 0.1 * y**3,
    "jit": lambda y, x, *_: jax.jit(lambda y, x: jnp.minimum(y, x))(y, x),
    "log": lambda y, *_: jnp.log(1 + jnp.square(y)),
    "max": lambda y, x, *_: jnp.maximum(y, x),
    "mish": lambda y, *_: jax.nn.mish(y),
    "number": lambda y, *_: y * np.float64(0.7) + jnp.exp(jnp.asarray(0.1, y.dtype)),
    "pow": lambda y, *_: (1 + jnp.abs(y)) ** 0.7,
    "pow-of": lambda y, *_: 1.5 ** jnp.sin(y),
    "relu": lambda y, *_: jax.nn.relu(y),
    "remat": lambda y, x, *_: jax.checkpoint(lambda y: jnp.cos(y) * y)(y),
    "rsqrt": lambda y, *_: y * lax.rsqrt(1 + y * y),
    "sigmoid": lambda y, x, *_: x * jax.nn.sigmoid(y),
    "sign": lambda y, *_: jnp.sign(y) * y,
    "softplus": lambda y, *_: jax.nn.softplus(y),
    "sqrt": lambda y, *_: jnp.sqrt(jnp.abs(y) + 0.1),
    "tanh": lambda y, *_: jnp.tanh(y),
    "where": lambda y, x, *_: jnp.where((y > 0.2) | (x < -1), y, 0.3 * x),
}
_OUTSIDE: dict[str, Callable[..., jax.Array]] = {
    "array": lambda y, _, __, array: y * array,
    "cast-bf16": lambda y, *_: y.astype(jnp.bfloat16).astype(y.dtype),
    "cast-f16-overflow": lambda y, *_: jnp.tanh(
        (y * 4e4).astype(jnp.float16).astype(y.dtype) * 1e-5
    ),
    "cast-int": lambda y, *_: y * y.astype(jnp.int32).astype(y.dtype),
    "clamp": lambda y, *_: lax.clamp(jnp.asarray(-1.0, y.dtype), y, 0.5 + 0 * y),
    "cond": lambda y, *_: lax.cond(y.size > 0, jnp.sin, jnp.cos, y),
    "cumsum": lambda y, *_: jnp.cumsum(y, axis=-1),
    "custom-jvp": lambda y, *_: _own_jvp(y),
    "erfc": lambda y, *_: lax.erfc(y),
    "expm1": lambda y, *_: jnp.expm1(-jnp.abs(y)),
    "fake-quant": lambda y, *_: _straight_through(y),
    "fori": lambda y, x, *_: lax.fori_loop(0, 3, lambda i, z: jnp.sin(z) + x, y),
    "infinity": lambda y, *_: jnp.exp(jnp.where(y > 1, -jnp.inf, y)),
    "log1p": lambda y, *_: jnp.log1p(jnp.square(y)),
    "random": lambda y, *_: y * jax.random.uniform(jax.random.key(3), y.shape, y.dtype),
    "reduce-precision": lambda y, *_: lax.reduce_precision(y, 8, 3),
    "reverse": lambda y, *_: y[..., ::-1],
    "scan": lambda y, x, *_: lax.scan(
        lambda z, _: (jnp.cos(z) * x, None), y, None, length=3
    )[0],
    "softmax": lambda y, *_: jax.nn.softmax(y),
    "stop-gradient": lambda y, x, *_: x + lax.stop_gradient(y),
    "traced-number": lambda y, _, number, __: y * number,
}
# Forward mode has no rule for them, in plain JAX as little.
_REVERSE_ONLY = {
    "custom-vjp": lambda y, *_: _own_vjp(y),
}
_FORWARD_ONLY = {
    "while": lambda y, *_: _while(y),
}


def _program(names: tuple[str, ...]) -> Callable[..., jax.Array]:
    table = {**_TRACED, **_OUTSIDE, **_REVERSE_ONLY, **_FORWARD_ONLY}

    def run(x: jax.Array, number: jax.Array, array: jax.Array) -> jax.Array:
        y = x
        for name in names:
            y = table[name](y, x, number, array)
        return y

    return run


def _draw_programs(seed: int) -> list[tuple[str, ...]]:
    """Draw chains of operations: some that are traced, and one round each other one."""
    rng = np.random.default_rng(seed)

    def chain(*within: str) -> tuple[str, ...]:
        names = [str(n) for n in rng.choice(list(_TRACED), size=rng.integers(1, 5))]
        at = int(rng.integers(len(names) + 1))
        return (*names[:at], *within, *names[at:])

    return [*(chain() for _ in range(6)), *map(chain, _OUTSIDE)]


def _as_activation(program: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def call(x: jax.Array, number: jax.Array, array: jax.Array) -> jax.Array:
        return matmul(
            x,
            jnp.eye(x.shape[-1], dtype=x.dtype),
            activation=lambda y: program(y, number, array),
        )

    return call


def _arguments() -> _Arguments:
    rng = np.random.default_rng(7)
    x, array = rng.standard_normal((2, 3, 4, 5))
    return jnp.asarray(x), jnp.asarray(0.8), jnp.asarray(array[0, :1])


def _every_derivative(f: Callable[..., jax.Array], args: _Arguments, mode: str) -> Any:
    weights = jnp.cos(jnp.arange(20.0)).reshape(4, 5)

    def loss(*args: jax.Array) -> jax.Array:
        return jnp.sum(f(*args) * weights)

    x, number, array = args
    first = (x[0], number, array)
    found = {}
    if mode != "forward":
        found["gradient"] = jax.grad(loss, (0, 1, 2))(*first)
        values_and_gradients = jax.value_and_grad(loss, (0, 1, 2))
        found["per-example"] = jax.vmap(values_and_gradients, (0, None, None))(*args)
    if mode != "reverse":
        tangents = (jnp.sin(x[1]), jnp.asarray(0.3), jnp.cos(array))
        found["jvp"] = jax.jvp(f, first, tangents)
    return found


def _assert_programs_agree(programs: list[tuple[str, ...]], mode: str = "both") -> None:
    args = _arguments()

    @jax.jit
    def both(args: _Arguments) -> Any:
        return [
            (
                _every_derivative(_as_activation(_program(names)), args, mode),
                _every_derivative(_program(names), args, mode),
            )
            for names in programs
        ]

    first = (args[0][0], *args[1:])
    for names, (got, want) in zip(programs, both(args), strict=True):
        for kind in want:
            jax.tree.map(
                functools.partial(
                    np.testing.assert_allclose,
                    rtol=1e-9,
                    atol=1e-9,
                    err_msg=f"{kind} of {names}",
                ),
                got[kind],
                want[kind],
            )
        # As arguments, so that the number and the array are traced.
        said = remarks_on(_as_activation(_program(names)), *first)
        assert bool(said) == (not set(names) <= set(_TRACED)), (names, said)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("part", range(2))
def test_random_programs_are_what_jax_makes_of_them(part: int) -> None:
    _assert_programs_agree(_draw_programs(0)[part::2])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("mode", "table"), [("reverse", _REVERSE_ONLY), ("forward", _FORWARD_ONLY)]
)
def test_what_jax_differentiates_one_way_we_do_that_way(mode: str, table: Any) -> None:
    _assert_programs_agree([(name, "tanh") for name in table], mode)
