# SPDX-License-Identifier: Apache-2.0
"""Tests `jax_cudnn.max_pool` and `avg_pool` against their formulas and Flax.

The other sides are NumPy in float64, one window at a time (tests/pooling/windows.py),
Flax and `jax.lax.reduce_window`.
"""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn import UnsupportedError
from tests.common.devices import mesh_of
from tests.conftest import Draw
from tests.pooling.windows import Pooled, pooled
from tests.products.shared.fused import graphs, loss, nodes, stacked

pytestmark = [pytest.mark.once, pytest.mark.sampled]

KINDS = ("max", "avg", "avg_exclude")
# Space, window, strides and padding; no two sizes of one are equal.
CASES: dict[str, tuple[Any, ...]] = {
    "line": ((11,), (3,), (2,), "SAME"),
    "line_uneven": ((11,), (4,), None, [(3, 1)]),
    "plane": ((7, 9), (3, 2), (2, 3), "VALID"),
    "plane_same": ((7, 10), (3, 4), (2, 3), "SAME"),
    "plane_lower": ((7, 10), (3, 4), (2, 3), "SAME_LOWER"),
    "plane_uneven": ((5, 8), (3, 2), (1, 2), [(2, 0), (0, 1)]),
    "cut": ((7, 9), (3, 2), (2, 1), [(-1, 2), (1, -2)]),
    "gaps": ((7, 9), (1, 2), (3, 4), "VALID"),
    "volume": ((4, 6, 5), (2, 3, 1), (1, 2, 3), [(1, 0), (1, 2), (0, 0)]),
}


def pool(kind: str, x: Any, *args: Any, **options: Any) -> Any:
    """Call the public function of a kind."""
    if kind == "max":
        return jax_cudnn.max_pool(x, *args, **options)
    is_full = kind == "avg"
    return jax_cudnn.avg_pool(x, *args, count_include_pad=is_full, **options)


def flax_pool(kind: str, x: Any, *args: Any) -> Any:
    if kind == "max":
        return nn.max_pool(x, *args)
    return nn.avg_pool(x, *args, count_include_pad=kind == "avg")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_each_window(
    name: str, kind: str, x64: None
) -> None:
    space, *args = CASES[name]
    x = np.random.default_rng(3).standard_normal((2, *space, 3))
    output, back = jax.vjp(lambda x: pool(kind, x, *args), jnp.asarray(x))
    cotangent = np.random.default_rng(4).standard_normal(output.shape)
    want = pooled(x, kind, *args, cotangent=cotangent)
    np.testing.assert_allclose(output, want.output, rtol=1e-12)
    (grad,) = back(jnp.asarray(cotangent))
    np.testing.assert_allclose(grad, want.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_dtype_of_the_inputs_and_sums_are_wide(
    kind: str, dtype: Any
) -> None:
    x = jnp.asarray(
        np.asarray(np.random.default_rng(1).standard_normal((3, 40, 2)), dtype)
    )
    output, back = jax.vjp(lambda x: pool(kind, x, (31,), (3,), "SAME"), x)
    weights = jnp.asarray(np.asarray(np.cos(np.arange(output.size)), dtype)).reshape(
        output.shape
    )
    want = pooled(x, kind, (31,), (3,), "SAME", cotangent=weights)
    unit = float(jnp.finfo(dtype).eps) / 2
    (grad,) = back(weights)
    assert output.dtype == grad.dtype == dtype
    # f32 results carry the rounding errors of up to 31 terms in f32.
    extra = 31 * 2.0**-24
    error = np.abs(np.asarray(output, np.float64) - want.output)
    assert np.all(error <= unit * np.abs(want.output) + extra)
    # XLA adds up the gradient of a maximum in the dtype of the inputs: a rounding for
    # each of the 11 windows that an element may be in.
    most = pooled(x, kind, (31,), (3,), "SAME", cotangent=jnp.abs(weights)).grad
    bound = 11 * unit * most if kind == "max" else unit * np.abs(want.grad) + extra
    assert np.all(np.abs(np.asarray(grad, np.float64) - want.grad) <= bound)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["line", "plane", "plane_same", "gaps", "volume"])
def test_flax_is_replaced(name: str, kind: str) -> None:
    """No case cuts: JAX cannot differentiate that in Flax."""
    space, window, strides, padding = CASES[name]
    x = jnp.asarray(
        np.asarray(np.random.default_rng(5).standard_normal((2, *space, 3)), "f4")
    )
    args = (window, strides, padding)

    def results(function: Any) -> Any:
        return jax.value_and_grad(functools.partial(loss, function))(x)

    with jax.numpy_dtype_promotion("standard"):  # Flax divides by an int32.
        wanted = results(lambda x: flax_pool(kind, x, *args))
    for got, want in zip(results(lambda x: pool(kind, x, *args)), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    if kind == "max":
        np.testing.assert_array_equal(pool(kind, x, *args), flax_pool(kind, x, *args))


def test_reduce_window_is_replaced(draw: Draw) -> None:
    x = draw("bstd")
    got = jax_cudnn.max_pool(x, (3, 2), (2, 1), dimension_numbers="NCHW")
    want = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 1, 3, 2), (1, 1, 2, 1), "VALID"
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["NCHW", "HNWC", "CHWN", "HWCN"])
def test_layouts_are_transpositions(layout: str, kind: str) -> None:
    x = jnp.asarray(
        np.asarray(np.random.default_rng(6).standard_normal((2, 7, 9, 3)), "f4")
    )
    args = ((3, 2), (2, 3), ((1, 0), (0, 1)))
    there = ["NHWC".index(letter) for letter in layout]
    back = [layout.index(letter) for letter in "NHWC"]
    got = pool(kind, jnp.transpose(x, there), *args, dimension_numbers=layout)
    np.testing.assert_allclose(
        jnp.transpose(got, back), pool(kind, x, *args), rtol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_there_may_be_any_number_of_batch_axes(batch: Any, kind: str) -> None:
    x = np.random.default_rng(7).standard_normal((*batch, 5, 6, 4)).astype("f4")
    got = pool(kind, jnp.asarray(x), (2, 3), (1, 2), "SAME")
    want = pooled(x, kind, (2, 3), (1, 2), "SAME").output
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    first = jnp.moveaxis(jnp.asarray(x), -1, len(batch))
    got = pool(kind, first, (2, 3), (1, 2), "SAME", dimension_numbers="NCHW")
    want = np.moveaxis(want, -1, len(batch))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_results(kind: str) -> None:
    x = jnp.ones((2, 3, 5, 4))
    output, back = jax.vjp(lambda x: pool(kind, x, (4, 2)), x)
    assert output.shape == (2, 0, 4, 4)
    np.testing.assert_array_equal(back(output)[0], jnp.zeros_like(x))
    assert pool(kind, jnp.ones((2, 0, 5, 4)), (1, 2)).shape == (2, 0, 4, 4)
    assert pool(kind, jnp.ones((2, 3, 5, 0)), (1, 2)).shape == (2, 3, 4, 0)


# --- special numbers ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinities_stay_in_their_windows(kind: str) -> None:
    x = np.random.default_rng(8).standard_normal((2, 9, 3)).astype("f4")
    x[0, 2, 1], x[0, 6, 0], x[1, 3, 2] = np.nan, np.inf, -np.inf
    got = pool(kind, jnp.asarray(x), (2,), None, "SAME")
    want = pooled(x, kind, (2,), None, "SAME").output
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("padding", [[(0, 0)], [(1, 0)], [(2, 1)]], ids=str)
@pytest.mark.parametrize("low", [np.nan, -np.inf], ids=str)
@pytest.mark.parametrize("size", [2, 40])
def test_derivatives_are_those_of_the_index(
    size: int, low: float, padding: Any, x64: None
) -> None:
    rng = np.random.default_rng(size)
    x = np.where(rng.random((2, 64, 3)) < 0.5, low, rng.integers(0, 3, (2, 64, 3)))
    x[0, :, 0] = -np.inf
    args = ((size,), (1,), padding)

    def function(x: Any, **options: Any) -> jax.Array:
        found = jax_cudnn.max_pool(x, *args, **options)
        return found[0] if options else found

    want, where = jax_cudnn.max_pool(x, *args, return_indices=True)
    output, back = jax.vjp(function, x)
    np.testing.assert_array_equal(output, want)
    weights = rng.standard_normal(output.shape)
    grad = np.zeros_like(x)
    for n, z, c in np.argwhere(np.asarray(where) >= 0):
        grad[n, where[n, z, c], c] += weights[n, z, c]
    np.testing.assert_allclose(back(weights)[0], grad, atol=1e-12)
    moved = rng.standard_normal(x.shape)
    picked = np.take_along_axis(moved, np.maximum(where, 0), 1)
    picked = np.where(np.asarray(where) >= 0, picked, 0)
    np.testing.assert_allclose(jax.jvp(function, (x,), (moved,))[1], picked, atol=1e-12)


def test_windows_of_padding_alone() -> None:
    x = jnp.ones((1, 3, 2))
    pads = [(4, 0)]
    assert jnp.isneginf(jax_cudnn.max_pool(x, (2,), None, pads)[0, :3]).all()
    full = jax_cudnn.avg_pool(x, (2,), None, pads)
    np.testing.assert_array_equal(full[0, :, 0], [0, 0, 0, 0.5, 1, 1])
    other = jax_cudnn.avg_pool(x, (2,), None, pads, count_include_pad=False)
    assert jnp.isnan(other[0, :3]).all()
    np.testing.assert_array_equal(other[0, 3:], jnp.ones((3, 2)))


def test_the_first_of_equal_elements_gets_the_gradient() -> None:
    x = np.random.default_rng(9).integers(0, 3, (2, 7, 8, 3)).astype("f4")
    args = ((3, 2), (2, 1), ((1, 1), (0, 1)))
    output, back = jax.vjp(lambda x: jax_cudnn.max_pool(x, *args), jnp.asarray(x))
    cotangent = np.random.default_rng(10).standard_normal(output.shape).astype("f4")
    want = pooled(x, "max", *args, cotangent=cotangent)
    (grad,) = back(jnp.asarray(cotangent))
    np.testing.assert_allclose(grad, want.grad, rtol=1e-5, atol=1e-6)


# --- indices --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_indices_are_the_first_of_the_largest(name: str) -> None:
    space, *args = CASES[name]
    x = np.random.default_rng(11).integers(-2, 2, (2, *space, 3)).astype("f4")
    x[x == -2] = -np.inf
    x[0, ..., 1][x[0, ..., 1] == 1] = np.nan

    def both(x: Any) -> Any:
        return jax_cudnn.max_pool(x, *args, return_indices=True)

    (output, indices), back = jax.vjp(both, jnp.asarray(x))
    weights = np.random.default_rng(2).standard_normal(output.shape).astype("f4")
    want: Pooled = pooled(x, "max", *args, cotangent=weights)
    np.testing.assert_array_equal(output, want.output)
    np.testing.assert_array_equal(indices, want.indices)
    assert indices.dtype == jnp.int32
    zero = np.zeros(indices.shape, jax.dtypes.float0)
    (grad,) = back((jnp.asarray(weights), zero))
    np.testing.assert_allclose(grad, want.grad, rtol=1e-5, atol=1e-6)


def test_indices_in_other_layouts_under_vmap_and_without_elements() -> None:
    x = jnp.asarray(
        np.asarray(np.random.default_rng(12).standard_normal((4, 2, 3, 7, 5)), "f4")
    )
    function = functools.partial(
        jax_cudnn.max_pool,
        window_shape=(3, 2),
        padding=((3, 0), (0, 0)),
        dimension_numbers="NCHW",
        return_indices=True,
    )
    output, indices = jax.vmap(function)(x)
    want = pooled(jnp.moveaxis(x, 2, -1), "max", (3, 2), None, ((3, 0), (0, 0)))
    np.testing.assert_array_equal(output, np.moveaxis(want.output, -1, 2))
    np.testing.assert_array_equal(indices, np.moveaxis(want.indices, -1, 2))
    assert (indices[:, :, :, 0] == -1).all()
    empty = jax_cudnn.max_pool(
        jnp.ones((2, 0, 3)), (2,), None, [(2, 1)], return_indices=True
    )
    np.testing.assert_array_equal(empty[1], jnp.full((2, 2, 3), -1))
    assert jnp.isneginf(empty[0]).all()


# --- what no graph holds --------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "float8_e4m3fn"])
def test_other_dtypes_are_pooled_by_xla(dtype: str) -> None:
    x = jnp.asarray(
        np.asarray(np.random.default_rng(13).integers(0, 8, (2, 7, 3)), dtype)
    )
    got = jax_cudnn.max_pool(x, (3,), (2,), "SAME")
    assert got.dtype == x.dtype
    want = pooled(x.astype("f4"), "max", (3,), (2,), "SAME").output
    np.testing.assert_array_equal(np.asarray(got, np.float64), want)
    mean = jax_cudnn.avg_pool(x, (2,), (2,))
    is_integer = dtype.endswith(("int8", "int32"))
    assert mean.dtype == (jnp.float32 if is_integer else x.dtype)
    want = pooled(x.astype("f4"), "avg", (2,), (2,)).output
    np.testing.assert_array_equal(np.asarray(mean, np.float64), want)


def test_integers_in_padding_alone_are_the_least() -> None:
    got = jax_cudnn.max_pool(jnp.full((1, 2, 1), -5, jnp.int8), (1,), None, [(1, 0)])
    np.testing.assert_array_equal(got[0, :, 0], [-128, -5, -5])


def test_complex_averages_and_four_spatial_axes() -> None:
    x = np.random.default_rng(14).standard_normal((2, 4, 3, 4, 3, 2)).astype("f4")
    for kind in KINDS:
        got = pool(kind, jnp.asarray(x), (2, 1, 3, 2), None, "SAME")
        want = pooled(x, kind, (2, 1, 3, 2), None, "SAME").output
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    mean = jax_cudnn.avg_pool(jnp.asarray(x[0, 0, 0] + 1j), (2,))
    np.testing.assert_allclose(mean.imag, 1)


def test_symbolic_sizes() -> None:
    shape = jax.export.symbolic_shape("b, 6, 3")
    exported = jax.export.export(
        jax.jit(lambda x: jax_cudnn.max_pool(x, (2,), (2,), "SAME"))
    )(jax.ShapeDtypeStruct(shape, jnp.float32))
    x = jnp.arange(36, dtype=jnp.float32).reshape(2, 6, 3)
    np.testing.assert_array_equal(exported.call(x), jax_cudnn.max_pool(x, (2,), (2,)))


# --- transformations ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_agree_with_finite_differences(kind: str, x64: None) -> None:
    # Distinct elements, so that steps change no maximum.
    x = np.random.default_rng(15).permutation(2 * 5 * 4 * 3).reshape(2, 5, 4, 3) / 7.0
    function = functools.partial(
        pool, kind, window_shape=(3, 2), strides=(2, 1), padding="SAME"
    )
    check_grads(lambda x: jnp.sin(function(x)), (jnp.asarray(x),), order=2)


def test_the_gradient_of_an_average_is_one_more_graph(draw: Draw) -> None:
    x = draw("bstd")
    found = graphs(jax.grad(lambda x: jax_cudnn.avg_pool(x, (2, 2)).sum()), x)
    kinds = [[*nodes(graph)] for graph, _ in found]
    assert kinds == [["avg_pool"], ["avg_pool_backward"]]


@pytest.mark.parametrize("kind", KINDS)
def test_examples_fold_into_the_images(kind: str, draw: Draw) -> None:
    x = draw("bstd", b=3)
    function = functools.partial(
        pool, kind, window_shape=(2, 3), strides=(1, 2), padding="SAME"
    )
    for axis in (0, 1, 3):
        batch = jnp.stack([x, 2 * x, x - 1], axis=axis)
        got = jax.jit(jax.vmap(function, in_axes=axis))(batch)
        want = stacked(function, (batch,), (axis,))
        np.testing.assert_allclose(got, want, rtol=1e-6)
        (only,) = graphs(jax.vmap(function, in_axes=axis), batch)
        assert only[0].input_tensors[0].dims[0] == 9


@pytest.mark.parametrize("kind", KINDS)
def test_any_of_operand_and_cotangent_may_have_examples(kind: str) -> None:
    rng = np.random.default_rng(16)
    x = jnp.asarray(np.asarray(rng.standard_normal((4, 2, 7, 3)), "f4"))

    def gradient(x: Any, cotangent: Any) -> Any:
        output, back = jax.vjp(lambda x: pool(kind, x, (3,), (2,), "SAME"), x)
        return output, back(cotangent)[0]

    cotangent = jnp.asarray(np.asarray(rng.standard_normal((4, 2, 4, 3)), "f4"))
    for axes in itertools.product((0, None), repeat=2):
        if axes == (None, None):
            continue
        given = (
            x if axes[0] == 0 else x[0],
            cotangent if axes[1] == 0 else cotangent[0],
        )
        got = jax.jit(jax.vmap(gradient, in_axes=axes))(*given)
        for mine, theirs in zip(got, stacked(gradient, given, axes), strict=True):
            want = jnp.broadcast_to(theirs, mine.shape)
            np.testing.assert_allclose(mine, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [(3, 2), (7, 6)])
def test_each_device_pools_its_images_inside_shard_map(
    kind: str, window: tuple[int, ...], draw: Draw
) -> None:
    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(pool(kind, x, window) ** 2))(x)

    x, spec = draw("nhwc", n=4, h=9, w=8, c=3), jax.sharding.PartitionSpec("i")
    mesh = mesh_of(i=2)
    found = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=spec))(
        x
    )
    np.testing.assert_allclose(found, gradient(x), rtol=1e-6, atol=1e-6)


def test_weak_types_stay_weak() -> None:
    x = jax.lax.full((2, 4, 3), 1.0)
    weak = jnp.zeros((2, 4, 3)) * 0 + x
    assert jax_cudnn.max_pool(weak, (2,)).weak_type == weak.weak_type


# --- messages -------------------------------------------------------------------------

_X = np.zeros((2, 5, 6, 3), np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_shape": 2}, "window_shape=2 is not a sequence of ints above 0"),
        ({"window_shape": (2, 0)}, r"window_shape=\(2, 0\) is not a sequence of ints"),
        ({"strides": (1, -1)}, r"strides=\(1, -1\) is not a sequence of ints above 0"),
        ({"strides": (1,)}, r"strides=\(1,\) has 1 entries, but window_shape=\(2, 3\)"),
        ({"window_shape": (2,) * 4}, "inputs is f32.2,5,6,3., of rank 4, and window_s"),
        ({"padding": "same_upper"}, "padding='same_upper' is not one of 'SAME', 'SAM"),
        ({"padding": [(1, 1)]}, r"padding=\[\(1, 1\)\] is not a \(low, high\) pair of"),
        ({"padding": (1, 1)}, r"padding=\(1, 1\) is not a \(low, high\) pair of ints"),
        ({"padding": [(-3, -3), (0, 0)]}, "cuts more than the 5 elements of a spatial"),
        ({"dimension_numbers": "NHC"}, "dimension_numbers='NHC' does not name batch, "),
        ({"dimension_numbers": "NHHC"}, "Pass for example 'NHWC' or 'NCHW'"),
        ({"dimension_numbers": ("NHWC",)}, "does not name batch, channels and 2 spat"),
    ],
)
@pytest.mark.parametrize("op", ["max_pool", "avg_pool"])
def test_what_does_not_fit_is_refused(op: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{op}: .*{message}"):
        getattr(jax_cudnn, op)(_X, **{"window_shape": (2, 3), **options})


def test_dtypes_that_cannot_be_pooled_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^max_pool: inputs is complex64\[2,5,6,3\]. "):
        jax_cudnn.max_pool(_X.astype(np.complex64), (2, 2))
    with pytest.raises(
        TypeError, match=r"^avg_pool: inputs is bool.*must hold numbers"
    ):
        jax_cudnn.avg_pool(_X > 0, (2, 2))
    with pytest.raises(TypeError, match=r"^max_pool: inputs is None"):
        jax_cudnn.max_pool(None, (2, 2))  # type: ignore[arg-type]


def test_flags_must_be_known() -> None:
    with pytest.raises(TypeError, match=r"^avg_pool: count_include_pad is int"):
        jax_cudnn.avg_pool(_X, (2, 2), count_include_pad=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^max_pool: return_indices is str"):
        jax_cudnn.max_pool(_X, (2, 2), return_indices="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_indices": True}, "return_indices is True. Which of several equal"),
        ({"window_shape": ()}, r"window_shape is \(\). cuDNN's pooling has one to"),
    ],
)
def test_cudnn_is_not_asked_for_what_it_lacks(options: Any, message: str) -> None:
    options = {"window_shape": (2, 2), "implementation": "cudnn", **options}
    with pytest.raises(UnsupportedError, match=rf"^max_pool: {message}"):
        jax_cudnn.max_pool(_X, **options)
    with pytest.raises(
        UnsupportedError, match=r"^avg_pool: inputs is i32.*Graphs pool"
    ):
        jax_cudnn.avg_pool(_X.astype(np.int32), (2, 2), implementation="cudnn")
