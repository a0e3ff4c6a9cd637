# SPDX-License-Identifier: Apache-2.0
"""Tests the norms against NumPy in float64. Flax's are in tests/flax."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from tests.common import drawn
from tests.norms.calls import CALLS, Call, operands
from tests.norms.problems import truth

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_EACH = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)

_WITH_A_MEAN = {name: call for name, call in CALLS.items() if call.is_centred}
_CENTRED = pytest.mark.parametrize("call", _WITH_A_MEAN.values(), ids=_WITH_A_MEAN)
# A rounding of a value of the output's size, and of the f32 arithmetic before.
_TOLERANCE = {"float32": 3e-6, "bfloat16": 5e-3, "float16": 7e-4, "float64": 1e-12}


def _assert_close(got: Any, want: Any, dtype: str) -> None:
    assert str(got.dtype) == dtype
    got, want = np.asarray(got, np.float64), np.asarray(want)
    assert got.shape == want.shape
    scale = max(1.0, float(np.max(np.abs(want), initial=0)))
    np.testing.assert_allclose(got, want, rtol=0, atol=_TOLERANCE[dtype] * scale)


@_EACH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_output_and_statistics_are_numpys(call: Call, dtype: str) -> None:
    x, scale, bias = operands(call, dtype=dtype)
    for factors in ((scale, bias), (scale, None), (None, bias), (None, None)):
        want = call.truth(x, *factors)
        output, *statistics = call.run(x, *factors, return_statistics=True)
        _assert_close(output, want["output"], dtype)
        names = ["mean", "rstd"] if call.is_centred else ["rstd"]
        for name, got in zip(names, statistics, strict=True):
            _assert_close(got, want[name], "float32")
        alone = call.run(x, *factors)
        _assert_close(alone, want["output"], dtype)
        # Rows have their moments by another formula where these are results.
        is_of_rows = "layer_norm" in repr(call.function)
        assert is_of_rows or jnp.array_equal(alone, output)


@_EACH
def test_double_precision(call: Call) -> None:
    with jax.enable_x64(True):
        x, scale, bias = operands(call, dtype=np.float64)
        want = call.truth(x, scale, bias)
        output, *statistics = call.run(x, scale, bias, return_statistics=True)
        _assert_close(output, want["output"], "float64")
        _assert_close(statistics[-1], want["rstd"], "float64")


@_EACH
def test_factors_may_be_wider_than_x(call: Call) -> None:
    x, scale, bias = operands(call)
    narrow = x.astype(jnp.bfloat16)
    want = call.truth(narrow, scale, bias)["output"]
    _assert_close(call.run(narrow, scale, bias), want, "bfloat16")
    wide = call.run(narrow, scale, bias, preferred_element_type=jnp.float32)
    _assert_close(wide, want, "float32")
    short = call.run(x, scale.astype(jnp.float16), preferred_element_type=jnp.float16)
    want = call.truth(x, scale.astype(jnp.float16))["output"]
    _assert_close(short, want, "float16")


@_EACH
def test_a_residual_is_added_before_and_the_sum_returned(call: Call) -> None:
    x, scale, bias = operands(call)
    other = operands(call, 1)[0]
    output, total = call.run(x, scale, bias, residual=other)
    assert jnp.array_equal(total, x + other)
    # XLA may order the sums otherwise where it fuses them with the addition.
    np.testing.assert_allclose(
        output, call.run(total, scale, bias), rtol=2e-6, atol=2e-6
    )
    both = call.run(x, scale, bias, residual=other, return_statistics=True)
    assert len(both) == 3 + call.is_centred
    # The sum has the dtype to which both promote, and is rounded to it.
    narrow = x.astype(jnp.bfloat16)
    output, total = call.run(narrow, scale, bias, residual=other)
    assert (output.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)


@_EACH
def test_an_activation_follows(call: Call) -> None:
    x, scale, bias = operands(call)
    plain = call.run(x, scale, bias)
    for activation, function in (
        ("silu", jax.nn.silu),
        (jax.nn.relu, jax.nn.relu),
        (lambda y: jnp.sin(y) * 2, lambda y: jnp.sin(y) * 2),
    ):
        got = call.run(x, scale, bias, activation=activation)
        np.testing.assert_allclose(got, function(plain), rtol=1e-6, atol=1e-6)
    narrow = call.run(x.astype(jnp.bfloat16), scale, bias, activation="gelu")
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "silu", "softplus"])
def test_activations_in_bf16_are_exact_where_they_cancel(activation: str) -> None:
    shift = jnp.linspace(-4, 4, 64, dtype=jnp.bfloat16)
    zeros, ones = jnp.zeros((1, 64), jnp.bfloat16), jnp.ones(64, jnp.bfloat16)

    def run(shift: jax.Array) -> jax.Array:
        x, scale = (y.astype(shift.dtype) for y in (zeros, ones))
        return jax_cudnn.layer_norm(x, scale, shift, activation=activation)[0]

    def slopes(shift: jax.Array) -> jax.Array:
        return jax.grad(lambda shift: run(shift).astype(jnp.float32).sum())(shift)

    # silu is computed in bf16, as in plain JAX, and so is its gradient.
    for function in (run,) if activation == "silu" else (run, slopes):
        narrow, wide = function(shift), function(shift.astype(jnp.float32))
        error = jnp.abs(narrow.astype(jnp.float32) - wide)
        assert jnp.all(error <= 2.0**-6 * jnp.maximum(jnp.abs(wide), 1e-3))


@_EACH
@pytest.mark.parametrize("implementation", ["xla", "cudnn", "auto"])
def test_every_implementation_is_the_reference_on_a_cpu(
    call: Call, implementation: str
) -> None:
    x, scale, bias = operands(call)
    got = call.run(x, scale, bias, implementation=implementation)
    assert jnp.array_equal(got, call.run(x, scale, bias))


# --- the ends of what there is --------------------------------------------------------


@_EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_with_its_statistics(call: Call, bad: float) -> None:
    x, scale, bias = operands(call)
    x = x.at[(0,) * x.ndim].set(bad)
    with np.errstate(invalid="ignore"):
        want = call.truth(x, scale, bias)["output"]
    got = np.asarray(call.run(x, scale, bias))
    assert np.isnan(got).any()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@_CENTRED
def test_constant_rows_give_the_bias(call: Call) -> None:
    x, scale, bias = operands(call)
    x = jnp.full_like(x, 5.25)
    want = call.truth(x, scale, bias)["output"]
    # The mean is rounded: by 2^-21, times 1 / sqrt(epsilon) and the scale.
    np.testing.assert_allclose(call.run(x, scale, bias), want, atol=1e-4)
    # 0 / 0.
    zeros = jnp.zeros_like(x)
    assert np.isnan(call.run(zeros, scale, bias, epsilon=0)).all()


@_EACH
def test_epsilon_of_0(call: Call) -> None:
    x, scale, bias = operands(call)
    want = call.truth(x, scale, bias, epsilon=0)["output"]
    _assert_close(call.run(x, scale, bias, epsilon=0), want, "float32")


@_CENTRED
@pytest.mark.parametrize("length", [300, 3])
@pytest.mark.parametrize("where", ["everywhere", "first", "all but the first"])
def test_a_large_mean_does_not_cancel(call: Call, length: int, where: str) -> None:
    """E x^2 - (E x)^2 would have no digit left of the variance.

    The first of many positions is far from the others, or no guide to them.
    """
    shape = tuple(
        length if axis in call.normalised else size
        for axis, size in enumerate(call.shape)
    )
    x = np.random.default_rng(0).standard_normal(shape)
    places = np.indices(shape)[list(call.normalised)]
    first = np.all(places == 0, axis=0)
    x += 3e3 * {"everywhere": True, "first": first, "all but the first": ~first}[where]
    x = x.astype(np.float32)
    want = call.truth(x, None, None)["output"]
    np.testing.assert_allclose(call.run(jnp.asarray(x)), want, atol=3e-3)


def test_large_f16_sums_are_kept_in_f32() -> None:
    x = np.random.default_rng(0).standard_normal((4, 4099)) * 2e4
    x = np.clip(x, -6e4, 6e4).astype(np.float16)
    for call in (CALLS["layer"], CALLS["rms"]):
        want = truth(x, axes=(1,), epsilon=1e-3, is_centred=call.is_centred)["output"]
        got = np.asarray(call.run(jnp.asarray(x)), np.float64)
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def test_squares_beyond_f32_give_a_rstd_of_0() -> None:
    x = jnp.asarray([[1e20, -1e20, 3e20]], jnp.float32)
    output, rstd = jax_cudnn.rms_norm(x, return_statistics=True)
    assert not rstd.any()
    assert not output.any()


@_EACH
@pytest.mark.parametrize("size", [1e21, 1e36])
def test_gradients_where_squares_are_beyond_f32_are_0(call: Call, size: float) -> None:
    x, scale, bias = operands(call)
    _, pull = jax.vjp(call.run, size * x, scale, bias)
    for factor in (1, 1e4):
        grad_x, grad_scale, grad_bias = pull(factor * jnp.cos(x))
        np.testing.assert_array_equal(grad_x, jnp.zeros_like(x))
        np.testing.assert_array_equal(grad_scale, jnp.zeros_like(scale))
        assert np.isfinite(grad_bias).all()


@_EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "cotangent"])
def test_gradients_of_what_is_not_finite(call: Call, bad: float, where: str) -> None:
    """NaN is what the statistics and the values themselves share with it, no more."""
    x, scale, bias = operands(call)
    cotangent = jnp.cos(x)
    first = (0,) * x.ndim

    def gradients(x: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(call.run, x, scale, bias)[1](cotangent)

    clean = gradients(x, cotangent)
    if where == "x":
        got = gradients(x.at[first].set(bad), cotangent)
    else:
        got = gradients(x, cotangent.at[first].set(bad))
    is_same = call.truth(x.at[first].set(np.nan), scale, bias)["output"]
    is_same = np.isfinite(is_same)
    assert not np.isfinite(got[0][first])
    np.testing.assert_allclose(
        np.asarray(got[0])[is_same], np.asarray(clean[0])[is_same], rtol=1e-5, atol=1e-6
    )


@_EACH
def test_without_elements(call: Call) -> None:
    for axis in range(len(call.shape)):
        shape = list(call.shape)
        shape[axis] = 0
        x = jnp.zeros(shape)
        factors = [jnp.ones([shape[i] for i in call.along])] * 2
        if call.groups and axis in call.along:
            continue  # 0 channels are 3 groups of 0, and that is covered by the next
        output, *statistics = call.run(x, *factors, return_statistics=True)
        assert output.shape == tuple(shape)
        is_normalised = axis in call.normalised
        for each in statistics:
            assert np.isnan(each).all() if is_normalised else each.size == 0
        grads = jax.grad(lambda *a: call.run(*a).sum(), argnums=(0, 1, 2))(x, *factors)
        assert all(not g.any() for g in grads)


def test_single_elements() -> None:
    x = jnp.full((1,), 3.0)
    assert jax_cudnn.layer_norm(x) == 0
    np.testing.assert_allclose(jax_cudnn.rms_norm(x), 1, rtol=1e-6)
    ones = jnp.full((1, 1, 1, 1), 3.0)
    for function in (jax_cudnn.instance_norm, jax_cudnn.batch_norm):
        assert not function(ones).any()
    assert not jax_cudnn.adaptive_layer_norm(ones).any()
    assert not jax_cudnn.group_norm(ones, groups=1).any()


# --- running values of batch norm -----------------------------------------------------


def test_running_values_keep_their_dtypes() -> None:
    x, scale, bias = operands(CALLS["batch"], dtype=jnp.bfloat16)
    mean, var = jnp.zeros(7, jnp.bfloat16), jnp.ones(7, jnp.float32)
    _, *new = jax_cudnn.batch_norm(x, scale, bias, mean, var)
    assert [v.dtype for v in new] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e15])
def test_the_variance_is_kept_over_all_sizes(size: float) -> None:
    x = operands(CALLS["batch"])[0] * np.float32(size)
    _, mean, var = jax_cudnn.batch_norm(
        x, None, None, jnp.zeros(7), jnp.zeros(7), momentum=0.0, epsilon=0
    )
    x = np.asarray(x, np.float64)
    np.testing.assert_allclose(mean, x.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(var, x.var((0, 1)), rtol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-5, 1.0])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-7, 0.0])
def test_a_variance_far_below_epsilon_is_kept(size: float, epsilon: float) -> None:
    x = operands(CALLS["batch"])[0] * np.float32(size)

    def variance(x: jax.Array) -> jax.Array:
        running = jnp.zeros(7), jnp.zeros(7)
        return jax_cudnn.batch_norm(
            x, None, None, *running, momentum=0.0, epsilon=epsilon
        )[2]

    wide = np.asarray(x, np.float64)
    want = wide.var((0, 1))
    np.testing.assert_allclose(variance(x), want, rtol=1e-5)
    (grad,) = jax.vjp(variance, x)[1](jnp.ones(7))
    slope = 2 * (wide - wide.mean((0, 1))) / (wide.size / 7)
    scale = np.abs(slope).max()
    np.testing.assert_allclose(grad, slope, rtol=1e-3, atol=1e-3 * scale)


def test_a_named_axis_shares_statistics() -> None:
    x, scale, bias = operands(CALLS["batch"])
    x = x * jnp.arange(1, 4, dtype=jnp.float32)[:, None, None] + 7
    mean, var = jnp.zeros(7), jnp.ones(7)

    @functools.partial(jax.jit, static_argnames="axis_name")
    def run(x: jax.Array, **options: Any) -> Any:
        return jax_cudnn.batch_norm(
            x, scale, bias, mean, var, return_statistics=True, **options
        )

    whole = run(x)
    each = jax.vmap(lambda x: run(x, axis_name="i"), axis_name="i")(x)
    for got, want in zip(each, whole, strict=True):
        want = jnp.broadcast_to(want, got.shape)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    def gradient(function: Any) -> Any:
        cotangent = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
        return jax.grad(lambda x: jnp.sum(function(x)[0] * cotangent))(x)

    named = jax.vmap(lambda x: run(x, axis_name="i"), axis_name="i")
    np.testing.assert_allclose(gradient(named), gradient(run), atol=1e-5)


def test_groups_of_a_named_axis_share_statistics() -> None:
    x = operands(CALLS["batch"])[0][:2]
    x = jnp.concatenate([x, x * 3 + 1])
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("i",))
    spec = jax.sharding.PartitionSpec("i")

    def run(x: jax.Array) -> jax.Array:
        return jax_cudnn.batch_norm(
            x, axis_name="i", axis_index_groups=[[0, 1], [2, 3]]
        )

    got = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )(x)
    want = jnp.concatenate([jax_cudnn.batch_norm(x[:2]), jax_cudnn.batch_norm(x[2:])])
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "groups", [[[0, 1], [2, 3]], [[3, 0], [1, 2]], [[1], [0, 2, 3]]]
)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_groups_of_a_vmapped_axis_share_statistics(
    groups: Any, is_jitted: bool
) -> None:
    x = drawn.normal(0, (4, 5, 3))

    def each(x: jax.Array) -> jax.Array:
        return jax_cudnn.batch_norm(x, axis_name="i", axis_index_groups=groups)

    def apart(x: jax.Array) -> jax.Array:
        own = [jax_cudnn.batch_norm(x[np.array(group)]) for group in groups]
        return jnp.concatenate(own)[np.argsort(np.concatenate(groups))]

    def with_gradient(function: Any, x: jax.Array) -> Any:
        output, pull = jax.vjp(function, x)
        return output, pull(2 * jnp.sin(x) * output)[0]

    together, whole = (
        functools.partial(with_gradient, function)
        for function in (jax.vmap(each, axis_name="i"), apart)
    )
    together, whole = jax.jit(together) if is_jitted else together, jax.jit(whole)
    # What is not finite stays within its group.
    for given in (x, x.at[3].set(jnp.nan)):
        for got, want, atol in zip(
            together(given), whole(given), (1e-5, 2e-5), strict=True
        ):
            np.testing.assert_allclose(got, want, atol=atol)


@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 4]]])
def test_groups_that_are_no_partition_of_the_axis_are_refused(groups: Any) -> None:
    run = functools.partial(
        jax_cudnn.batch_norm, axis_name="i", axis_index_groups=groups
    )
    message = (
        "does not have each index of axis 'i' once. Pass groups of the indices 0 to 3"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.vmap(run, axis_name="i")(jnp.ones((4, 5, 3)))


# --- symbolic sizes -------------------------------------------------------------------


@_EACH
def test_symbolic_sizes_are_xlas(call: Call) -> None:
    if call.groups or call.function is jax_cudnn.instance_norm:
        axis = 0
    else:
        axis = next((i for i in range(len(call.shape)) if i not in call.along), None)
    if axis is None:
        pytest.skip("all sizes are those of scale and bias")
    symbols = jax.export.symbolic_shape("s")
    shape = [*call.shape]
    shape[axis] = symbols[0]
    x, scale, bias = operands(call)
    exported = jax.export.export(
        jax.jit(call.run), disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS
    )(jax.ShapeDtypeStruct(shape, x.dtype), scale, bias)
    got = exported.call(x, scale, bias)
    np.testing.assert_allclose(got, call.run(x, scale, bias), rtol=1e-5, atol=1e-5)
    with pytest.raises(jax_cudnn.UnsupportedError, match="symbolic dimensions"):
        jax.export.export(jax.jit(lambda *a: call.run(*a, implementation="cudnn")))(
            jax.ShapeDtypeStruct(shape, x.dtype), scale, bias
        )
