# SPDX-License-Identifier: Apache-2.0
"""Tests causal convolutions by cuDNN's function on a GPU, against loops in float64."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import UnsupportedError, causal_conv1d, native, plans
from jax_cudnn.legalize.products.causal_conv1d import TAPS
from tests.common.gpu.captured import custom_calls, run_dumped
from tests.common.gpu.versions import needs_cudnn
from tests.products.shared.causal import dense

pytestmark = pytest.mark.gpu

_FUNCTION = plans.PlanOptions(engines=(native.CAUSAL_CONV_ENGINE,))


@pytest.fixture(autouse=True)
def has_the_function() -> None:
    """9.22 brought cuDNN's functions."""
    needs_cudnn(92200, "a causal convolution")


def _operands(
    shape: tuple[int, int, int], taps: int, dtype: Any, seed: int = 0
) -> list[jax.Array]:
    """Return x (b, s, c), w (K, c), bias and a cotangent."""
    rng = np.random.default_rng(seed + taps)
    channels = shape[2]
    return [
        jnp.asarray(rng.standard_normal(each), dtype)
        for each in (shape, (taps, channels), (channels,), shape)
    ]


def _results(
    x: Any,
    w: Any,
    bias: Any,
    cotangent: Any,
    *,
    layout: str = "NWC",
    implementation: Any = "cudnn",
    plan: Any = _FUNCTION,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Return the output and all gradients, in the axes (b, s, c) and (K, c)."""
    named = {"implementation": implementation, "plan": plan, **options}

    def call(x: Any, w: Any, bias: Any) -> jax.Array:
        if layout == "NWC":
            return causal_conv1d(x, w, bias=bias, **named)
        x = jnp.swapaxes(x, 1, 2)
        y = causal_conv1d(x, w.T, bias=bias, dimension_numbers="NCW", **named)
        return jnp.swapaxes(y, 1, 2)

    output, back = jax.vjp(call, x, w, bias)
    return output, *back(cotangent)


def _assert_right(
    got: tuple[jax.Array, ...],
    operands: list[jax.Array],
    activation: str | None = "silu",
) -> None:
    """Compare with float64: one rounding to the dtype, and sums in f32 or f64."""
    x, w, bias, cotangent = operands
    truth = dense(x, w, bias, cotangent=cotangent, activation=activation)
    size = dense(abs(x), abs(w), abs(bias), cotangent=abs(cotangent), activation=None)
    unit = float(jnp.finfo(x.dtype).eps)
    sums = 1e-12 if x.dtype == jnp.float64 else 4e-6
    for name, one, want, most in zip(truth._fields, got, truth, size, strict=True):
        assert one.dtype == x.dtype
        error = np.abs(np.asarray(one, np.float64) - want)
        allowed = unit * np.abs(want) + sums * most + 1e-6 * unit
        assert np.all(error <= allowed), (name, np.max(error / (most + 1e-30)))


_SHAPES = [(2, 37, 24), (3, 130, 17), (1, 1, 8), (2, 3, 40), (5, 64, 1), (1, 1027, 96)]


_DTYPES = ("float32", "bfloat16", "float16")
_LAYOUTS = ("NWC", "NCW")
_ACTIVATIONS = (None, "silu")


def _cases() -> Iterator[tuple[int, str, str, str | None]]:
    """Yield taps, dtype, layout and activation.

    cuDNN compiles a kernel for each, which takes seconds. The usual number of taps has
    all dtypes, layouts and activations. Each other one has both layouts, with dtypes
    and activations in turn.
    """
    for each in itertools.product(_DTYPES, _LAYOUTS, _ACTIVATIONS):
        yield (4, *each)
    for i, taps in enumerate(x for x in TAPS if x != 4):
        for j, layout in enumerate(_LAYOUTS):
            activation = _ACTIVATIONS[(i // 3 + j) % 2]
            yield taps, _DTYPES[(i + j) % 3], layout, activation


@pytest.mark.parametrize(("taps", "dtype", "layout", "activation"), [*_cases()])
def test_values_and_gradients(
    taps: int, dtype: str, layout: str, activation: str | None
) -> None:
    for shape in _SHAPES if taps == 4 else _SHAPES[:3]:
        operands = _operands(shape, taps, dtype)
        run = functools.partial(_results, layout=layout, activation=activation)
        _assert_right(jax.jit(run)(*operands), operands, activation)


@pytest.mark.parametrize("layout", ["NWC", "NCW"])
def test_f64(layout: str) -> None:
    with jax.enable_x64(True):
        operands = _operands((2, 37, 24), 4, jnp.float64)
        run = functools.partial(_results, layout=layout)
        _assert_right(jax.jit(run)(*operands), operands)


def test_who_runs_it() -> None:
    operands = _operands((2, 37, 24), 4, jnp.bfloat16)
    run = functools.partial(_results, plan=None)
    calls = plans.inspect(run, *operands).calls
    found = [each.engine for each in calls if each.op.startswith("causal")]
    assert found == [native.CAUSAL_CONV_ENGINE] * 2


@pytest.mark.parametrize("layout", ["NWC", "NCW"])
def test_without_a_bias_and_with_some_gradients(layout: Any) -> None:
    x, w, _, cotangent = _operands((2, 37, 24), 4, jnp.float32)

    def loss(x: Any, w: Any) -> jax.Array:
        if layout == "NCW":
            x, w = jnp.swapaxes(x, 1, 2), w.T
        options: Any = {"dimension_numbers": layout, "plan": _FUNCTION}
        y = causal_conv1d(x, w, implementation="cudnn", **options)
        y = y if layout == "NWC" else jnp.swapaxes(y, 1, 2)
        return jnp.sum(y * cotangent)

    truth = dense(x, w, cotangent=cotangent)
    for i in (0, 1):
        grad = jax.jit(jax.grad(loss, i))(x, w)
        np.testing.assert_allclose(grad, truth[i + 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("layout", ["NWC", "NCW"])
def test_bad_numbers_stay_with_the_steps_that_read_them(
    layout: str, bad: float
) -> None:
    x, w, bias, cotangent = _operands((2, 70, 24), 4, jnp.bfloat16)
    run = jax.jit(functools.partial(_results, layout=layout))
    clean = [np.asarray(each, np.float32) for each in run(x, w, bias, cotangent)]
    x = x.at[1, 30, 5].set(bad)
    found = [np.asarray(each, np.float32) for each in run(x, w, bias, cotangent)]
    reached = np.zeros(x.shape, bool)
    reached[1, 30:34, 5] = True
    np.testing.assert_array_equal(found[0][~reached], clean[0][~reached])
    assert not np.any(np.isfinite(found[0][reached]) & (found[0][reached] != 0))
    # Steps whose results are bad: their gradient reaches back by K - 1.
    reached[1, 27:34, 5] = True
    np.testing.assert_array_equal(found[1][~reached], clean[1][~reached])
    for got, want in zip(found[2:], clean[2:], strict=True):
        others = np.arange(24) != 5
        np.testing.assert_allclose(
            got[..., others], want[..., others], rtol=3e-2, atol=1e-2
        )


def test_memory_that_holds_nan_is_not_read() -> None:
    """Results are sums of nothing but operands, whatever their memory held."""
    operands = _operands((2, 257, 64), 4, jnp.float32)
    run = jax.jit(_results)
    run(*operands)
    for _ in range(3):
        spoilt = [jnp.full_like(each, jnp.nan) for each in operands]
        jax.block_until_ready(spoilt)
        del spoilt
        _assert_right(run(*operands), operands)


@pytest.mark.parametrize("taps", [4, 9, 30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_depthwise_convolution_takes_what_the_function_does_not(
    taps: int, dtype: str
) -> None:
    """Other taps, and gradients in the same bits in every run."""
    operands = _operands((2, 130, 64), taps, dtype)
    plan = plans.PlanOptions(deterministic=True)
    run = jax.jit(functools.partial(_results, plan=plan))
    found = [run(*operands) for _ in range(4)]
    for again in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, again, found[0])
    x, w, bias, cotangent = operands
    truth = dense(x, w, bias, cotangent=cotangent)
    for got, want in zip(found[0], truth, strict=True):
        most = np.max(np.abs(want))
        # f32 may be multiplied in TF32; 16 bits are rounded once more, within.
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, rtol=2e-2, atol=2e-2 * most
        )


def test_forward_plans_are_deterministic() -> None:
    x, w, bias, _ = _operands((4, 1000, 96), 4, jnp.bfloat16)
    plan = plans.PlanOptions(engines=(native.CAUSAL_CONV_ENGINE,), deterministic=True)
    run = jax.jit(
        lambda x: causal_conv1d(x, w, bias=bias, implementation="cudnn", plan=plan)
    )
    first = np.asarray(run(x))
    for _ in range(4):
        np.testing.assert_array_equal(np.asarray(run(x)), first)
    gradient = jax.jit(jax.grad(lambda x: run(x).astype(jnp.float32).sum()))
    with pytest.raises(UnsupportedError, match="deterministic refuses"):
        gradient(x)


def test_states_and_vmap() -> None:
    x, w, bias, _ = _operands((2, 40, 24), 4, jnp.float32)
    call = functools.partial(causal_conv1d, bias=bias, implementation="cudnn")
    whole, end = jax.jit(functools.partial(call, return_state=True))(x, w)

    @jax.jit
    def pieces(x: Any) -> Any:
        first, state = call(x[:, :25], w, return_state=True)
        rest, state = call(x[:, 25:], w, initial_state=state, return_state=True)
        return jnp.concatenate([first, rest], 1), state

    got, last = pieces(x)
    np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(last, end)
    weights = jnp.stack([w, -w, 2 * w])
    many = jax.jit(jax.vmap(call, (None, 0)))(x, weights)
    for one, each in zip(many, weights, strict=True):
        np.testing.assert_allclose(one, call(x, each), rtol=1e-5, atol=1e-5)


_CAPTURE = """
import jax, jax.numpy as jnp, numpy as np
from jax_cudnn import causal_conv1d

def loss(x, w, b, how):
    for _ in range(3):
        x = causal_conv1d(x, w, bias=b, implementation=how)
    return jnp.sum(x.astype(jnp.float32) ** 2)

@jax.jit
def plain(x, w, b):
    return jax.value_and_grad(loss, (0, 1, 2))(x, w, b, "xla")

@jax.jit
def step(x, w, b):
    return jax.value_and_grad(loss, (0, 1, 2))(x, w, b, "cudnn")

keys = jax.random.split(jax.random.key(0), 3)
x, w, b = (
    jax.random.normal(key, shape)
    for key, shape in zip(keys, ((2, 300, 64), (4, 64), (64,)))
)
want = plain(x, w, b)
# What a replay adds to is cleared in each.
for _ in range(5):
    got = step(x, w, b)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
print("done")
"""


def test_calls_are_inside_a_captured_command_buffer(tmp_path: Any) -> None:
    program = _CAPTURE
    printed = run_dumped(program, tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert printed.strip() == "done"
    inside, outside = custom_calls(tmp_path, "jit_step")
    assert not outside
    # Three calls and their gradients.
    assert len(inside) == 6


def test_the_tuner_compares_it_with_xla(table: Any) -> None:
    operands = _operands((2, 2048, 512), 4, jnp.bfloat16)
    run = functools.partial(_results, implementation="auto", plan=None)
    tuned = plans.autotune(run, *operands, progress=False, whole_program=False)
    assert len(tuned.choices) == 2
    assert table.all() == tuned.choices
    assert all(choice.cudnn_us for choice in tuned.choices.values())
