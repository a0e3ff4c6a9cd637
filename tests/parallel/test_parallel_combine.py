# SPDX-License-Identifier: Apache-2.0
"""Tests that `combine` makes the whole of parts, and that tokens are ordered."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from jax_cudnn import sdpa
from jax_cudnn.parallel import (
    combine,
    from_striped,
    from_zigzag,
    to_striped,
    to_zigzag,
)
from jax_cudnn.parallel.order import all_positions
from tests.attention.shared.small import assert_close, small_operands
from tests.conftest import Draw

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def _numpy_combine(o1: Any, l1: Any, o2: Any, l2: Any) -> tuple[Any, Any]:
    """The definition, in float64."""
    o1, l1, o2, l2 = (np.asarray(x, np.float64) for x in (o1, l1, o2, l2))
    lse = np.logaddexp(l1, l2)
    is_empty = np.isneginf(lse)
    safe = np.where(is_empty, 0, lse)
    w1, w2 = (np.exp(x - safe)[..., None] for x in (l1, l2))
    return w1 * o1 + w2 * o2, lse


_INFINITE = [(False, False), (True, False), (False, True), (True, True)]


def _parts(draw: Draw, dtype: Any = jnp.float64) -> list[jax.Array]:
    """Draw outputs, 0 beside -inf, and log-sum-exps of which some are -inf."""
    o1, o2 = draw("bshe", dtype), draw("bshe", dtype)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    l1, l2 = 3 * draw("bsh", wide), 3 * draw("bsh", wide)
    for row, (first, second) in enumerate(_INFINITE):
        if first:
            o1, l1 = o1.at[:, row].set(0), l1.at[:, row].set(-jnp.inf)
        if second:
            o2, l2 = o2.at[:, row].set(0), l2.at[:, row].set(-jnp.inf)
    return [o1, l1, o2, l2]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shift", [0.0, 700.0, -1e6])
def test_the_definition_holds(shift: float, draw: Draw) -> None:
    o1, l1, o2, l2 = _parts(draw)
    parts = (o1, l1 + shift, o2, l2 + shift)
    output, lse = combine(*parts)
    want, want_lse = _numpy_combine(*parts)
    np.testing.assert_allclose(output, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12)
    np.testing.assert_array_equal(output[:, 3], 0)
    np.testing.assert_array_equal(lse[:, 3], -np.inf)


@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_finite_differences(draw: Draw) -> None:
    finite = [x[:, :1] for x in _parts(draw)]
    check_grads(combine, tuple(finite), order=2, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("x64")
def test_gradients_are_the_formula_s_and_0_where_there_is_no_key(draw: Draw) -> None:
    o1, l1, o2, l2 = _parts(draw)
    pull, pull_lse = draw("bshe", jnp.float64), draw("bsh", jnp.float64)
    (output, lse), transpose = jax.vjp(combine, o1, l1, o2, l2)
    got = transpose((pull, pull_lse))
    for part, log, grad, grad_log in ((o1, l1, *got[:2]), (o2, l2, *got[2:])):
        weight = np.exp(log - np.where(np.isneginf(lse), 0, lse))
        want = weight * (((part - output) * pull).sum(-1) + pull_lse)
        np.testing.assert_allclose(grad, weight[..., None] * pull, rtol=1e-9)
        np.testing.assert_allclose(grad_log, want, rtol=1e-9, atol=1e-12)
    moved = (o1, jnp.ones_like(l1), o2, -jnp.ones_like(l2))
    _, tangents = jax.jvp(combine, (o1, l1, o2, l2), moved)
    assert all(np.isfinite(x).all() for x in tangents)


@pytest.mark.usefixtures("x64")
def test_what_is_beside_no_key_is_not_read(draw: Draw) -> None:
    o1, l1, o2, l2 = _parts(draw)
    poisoned = jnp.where(jnp.isneginf(l1)[..., None], jnp.nan, o1)

    def total(o1: jax.Array, l1: jax.Array) -> jax.Array:
        return jnp.sum(combine(o1, l1, o2, l2)[0])

    assert_close(combine(poisoned, l1, o2, l2), combine(o1, l1, o2, l2))
    got = jax.grad(total, argnums=(0, 1))(poisoned, l1)
    assert_close(got, jax.grad(total, argnums=(0, 1))(o1, l1))


@pytest.mark.usefixtures("x64")
def test_parts_of_the_keys_make_the_whole_with_its_gradients(draw: Draw) -> None:
    query, key, value, _ = small_operands(draw, t=7)
    mask = draw("b1st", s=3, t=7) > -1

    def whole(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return sdpa(query, key, value, mask=mask, return_residual=True)

    def parts(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        found = [
            sdpa(query, key[:, x], value[:, x], mask=mask[..., x], return_residual=True)
            for x in (slice(0, 2), slice(2, 6), slice(6, 7))
        ]
        return functools.reduce(lambda one, two: combine(*one, *two), found)

    def loss(function: Any, *operands: jax.Array) -> Any:
        output, lse = function(*operands)
        seen = jnp.where(jnp.isneginf(lse), 0, lse)
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(seen)), (output, lse)

    def run(function: Any) -> Any:
        gradient = jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True)
        return gradient(function, query, key, value)

    assert_close(run(parts), run(whole))


def test_sums_are_f32_and_16_bit_outputs_are_rounded_once(draw: Draw) -> None:
    o1, l1, o2, l2 = _parts(draw, jnp.bfloat16)
    exact, lse = _numpy_combine(o1, l1, o2, l2)
    output, got = combine(o1, l1, o2, l2)
    assert (output.dtype, got.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(got, lse, rtol=1e-6)
    # Half a unit in the last place, of the 8 bits that there are.
    allowed = 2.0**-8 * np.abs(exact) + 1e-6
    assert (np.abs(np.asarray(output, np.float64) - exact) <= allowed).all()
    # Beside f32 it stays f32, so that many parts are rounded once.
    assert combine(o1.astype(jnp.float32), l1, o2, l2)[0].dtype == jnp.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"output_2": jnp.zeros((2, 4))},
            ValueError,
            r"^combine: output_1 is f32\[2,3\] and output_2 f32\[2,4\]\. Outputs must",
        ),
        (
            {"lse_1": jnp.zeros((2, 3))},
            ValueError,
            r"^combine: output_1 is f32\[2,3\] and lse_1 f32\[2,3\]\. Outputs must",
        ),
        (
            {"lse_2": jnp.zeros(2, jnp.int32)},
            TypeError,
            r"^combine: lse_2 is i32\[2\]\. Supported dtypes are bf16, f16, f32, f64",
        ),
        ({"output_1": None}, TypeError, "^combine: output_1 is None"),
    ],
)
def test_wrong_parts_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    parts = {
        "output_1": jnp.zeros((2, 3)),
        "lse_1": jnp.zeros(2),
        "output_2": jnp.zeros((2, 3)),
        "lse_2": jnp.zeros(2),
    }
    with pytest.raises(error, match=message):
        combine(**{**parts, **change})


# --- order ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_zigzag_order_gives_each_device_an_early_and_a_late_chunk(count: int) -> None:
    x = np.arange(2 * 6 * count * 5).reshape(2, 6 * count, 5)
    got = to_zigzag(x, count)
    chunks = np.split(x, 2 * count, axis=1)
    want = [
        chunks[i] for device in range(count) for i in (device, 2 * count - 1 - device)
    ]
    np.testing.assert_array_equal(got, np.concatenate(want, axis=1))
    np.testing.assert_array_equal(from_zigzag(got, count), x)
    positions = to_zigzag(np.arange(6 * count), count, axis=-1)
    np.testing.assert_array_equal(all_positions(count, 6, "zigzag"), positions)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_striped_order_deals_tokens_out_to_the_devices(count: int) -> None:
    x = np.arange(2 * 5 * count * 3).reshape(2, 5 * count, 3)
    got = to_striped(x, count)
    want = [x[:, device::count] for device in range(count)]
    np.testing.assert_array_equal(got, np.concatenate(want, axis=1))
    np.testing.assert_array_equal(from_striped(got, count), x)
    positions = to_striped(np.arange(5 * count), count, axis=-1)
    np.testing.assert_array_equal(all_positions(count, 5, "striped"), positions)


@pytest.mark.parametrize(
    ("to", "back"), [(to_zigzag, from_zigzag), (to_striped, from_striped)]
)
def test_orders_have_gradients_and_vmap(draw: Draw, to: Any, back: Any) -> None:
    x = draw("bsd", s=8)
    got = jax.vmap(functools.partial(to, count=2, axis=0))(x)
    np.testing.assert_array_equal(got, to(x, 2))
    gradient = jax.grad(lambda y: jnp.sum(to(y, 2) * x))(x)
    np.testing.assert_array_equal(gradient, back(x, 2))


@pytest.mark.parametrize(
    ("to", "back"), [(to_zigzag, from_zigzag), (to_striped, from_striped)]
)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_orders_keep_explicit_shardings(to: Any, back: Any, is_jitted: bool) -> None:
    shape = (2, 2)
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh(shape, ("b", "s"), (AxisType.Explicit,) * 2, devices=devices)
    sharding = NamedSharding(mesh, PartitionSpec("b", "s", None))
    x = np.arange(2 * 8 * 3).reshape(2, 8, 3)
    wrap = jax.jit if is_jitted else lambda f: f
    got = wrap(lambda x: to(x, 2))(jax.device_put(x, sharding))
    assert jax.typeof(got).sharding.spec == sharding.spec
    np.testing.assert_array_equal(got, to(x, 2))
    again = wrap(lambda x: back(x, 2))(got)
    assert jax.typeof(again).sharding.spec == sharding.spec
    np.testing.assert_array_equal(again, x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (jnp.zeros((2, 6, 3)), 2),
            r"x is f32\[2,6,3\]\. Axis 1 has 6 tokens, not a multiple of .* = 4",
        ),
        ((jnp.zeros(8), 2, 1), r"x is f32\[8\], which has no axis 1"),
        ((jnp.zeros(8), 0, 0), "count=0 is no number of devices"),
        ((jnp.zeros(8), True, 0), "count=True is no number of devices"),
    ],
)
@pytest.mark.parametrize("function", [to_zigzag, from_zigzag])
def test_what_cannot_be_ordered_is_refused(
    function: Any, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
        function(*arguments)
    with pytest.raises(TypeError, match=f"^{function.__name__}: axis is str"):
        function(jnp.zeros(8), 2, "0")
