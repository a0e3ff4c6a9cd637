# SPDX-License-Identifier: Apache-2.0
"""Is `jax_cudnn.conv` lax's convolution with an epilogue, through every transformation?

The other side of each comparison is `jax.lax.conv_general_dilated` with its epilogue in
jax.numpy, in float64.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.test_util import check_grads

from jax_cudnn import EXPORT_SAFETY_CHECKS, conv
from jax_cudnn.legalize import partition
from tests.conftest import Draw
from tests.fused import (
    assert_close,
    contractions,
    gradients,
    graphs,
    loss,
    nodes,
    stacked,
    subsets,
)

_NHWC = ("NHWC", "HWIO", "NHWC")
_ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def plain(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: Any = None,
    residual: Any = None,
    scale: Any = None,
    activation: Any = None,
    **options: Any,
) -> jax.Array:
    """Return lax's convolution and what follows it."""
    rank = x.ndim
    options = {"window_strides": (1,) * (rank - 2), "padding": "VALID", **options}
    result = lax.conv_general_dilated(x, w, **options)
    numbers = options.get("dimension_numbers")
    channel = lax.conv_dimension_numbers(x.shape, w.shape, numbers).out_spec[1]

    def along_channels(value: Any) -> Any:
        if value.ndim != 1:
            return value.reshape((1,) * (rank - value.ndim) + value.shape)
        shape = [1] * rank
        shape[channel] = value.size
        return value.reshape(shape)

    if scale is not None:
        result = result * (along_channels(scale) if hasattr(scale, "ndim") else scale)
    for term in (bias, residual):
        if term is not None:
            result = result + along_channels(term)
    return result if activation is None else _ACTIVATIONS[activation](result)


# --- values and gradients on drawn problems -------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A convolution: shapes of its operands and its options."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    extra: tuple[tuple[str, tuple[int, ...]], ...]
    options: tuple[tuple[str, Any], ...]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rank = draw(st.sampled_from([1, 2, 2, 3]))
    letters = "XYZ"[:rank]
    lhs, rhs, out = (
        "".join(draw(st.permutations(base + letters))) for base in ("NC", "OI", "NC")
    )
    groups, batch_groups = draw(
        st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2)])
    )

    def sizes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    n, c, o = (draw(st.integers(1, 3)) for _ in range(3))
    n, o = n * batch_groups, o * batch_groups * groups
    space, window = sizes(2, 7 - rank), sizes(1, 3)
    by_letter = dict(zip(letters, space, strict=True))
    strides, holes = sizes(1, 3), sizes(1, 2)
    padding: Any = draw(st.sampled_from(["SAME", "SAME_LOWER", "VALID", None, None]))
    spread = (1,) * rank
    if padding is None:
        spread = sizes(1, 3)
        padding = tuple(zip(sizes(-2, 3), sizes(-2, 3), strict=True))
        # lax refuses padding that cuts more than there is. Its axes are those of rhs.
        own = [by_letter[letter] for letter in rhs if letter in letters]
        assume(
            all(
                (own[i] - 1) * spread[i] + 1 + sum(padding[i]) >= 0 for i in range(rank)
            )
        )
    windows = dict(zip(letters, window, strict=True))
    x = tuple({"N": n, "C": c * groups, **by_letter}[letter] for letter in lhs)
    w = tuple({"O": o, "I": c, **windows}[letter] for letter in rhs)
    options = {
        "window_strides": strides,
        "padding": padding,
        "lhs_dilation": spread,
        "rhs_dilation": holes,
        "dimension_numbers": (lhs, rhs, out),
        "feature_group_count": groups,
        "batch_group_count": batch_groups,
    }
    shape = jax.eval_shape(
        functools.partial(lax.conv_general_dilated, **options),
        jax.ShapeDtypeStruct(x, jnp.float32),
        jax.ShapeDtypeStruct(w, jnp.float32),
    ).shape
    # XLA has no gradient of a convolution whose window finds no place.
    assume(0 not in shape)
    some = tuple(size if draw(st.booleans()) else 1 for size in shape)
    extra = {
        "bias": draw(st.sampled_from([None, (o,), (), some])),
        "residual": draw(st.sampled_from([None, shape, some, some[1:]])),
        "scale": draw(st.sampled_from([None, (o,), ()])),
    }
    options["activation"] = draw(st.sampled_from([None, *_ACTIVATIONS]))
    return Problem(
        x,
        w,
        tuple((k, v) for k, v in extra.items() if v is not None),
        tuple(options.items()),
    )


@pytest.mark.usefixtures("x64")
@settings(max_examples=24)
@given(problems())
def test_value_and_gradients_are_lax_s(problem: Problem) -> None:
    rng = np.random.default_rng(5)
    names = [name for name, _ in problem.extra]
    shapes = (problem.x, problem.w, *(shape for _, shape in problem.extra))
    operands = [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]

    def run(function: Any, *operands: jax.Array) -> Any:
        extra = dict(zip(names, operands[2:], strict=True))
        return function(*operands[:2], **extra, **dict(problem.options))

    @jax.jit
    def both(*operands: jax.Array) -> Any:
        argnums = range(len(operands))
        return [
            (
                run(function, *operands),
                gradients(functools.partial(run, function), argnums)(*operands),
            )
            for function in (conv, plain)
        ]

    assert_close(*both(*operands))


def test_defaults_are_those_of_a_plain_convolution(draw: Draw) -> None:
    x, w = draw("bshd"), jnp.ones((7, 5, 3, 2), jnp.float32)
    assert_close(conv(x, w), lax.conv(x, w, (1, 1), "VALID"), 1e-4)
    jaxprs = {
        str(jax.make_jaxpr(f)(x, w))
        for f in (conv, functools.partial(conv, implementation=None, padding="valid"))
    }
    assert len(jaxprs) == 1


@pytest.mark.usefixtures("x64")
def test_numbers_are_exact_in_the_dtype_of_the_sums(draw: Draw) -> None:
    x, w = draw("bshd", jnp.float64), jnp.ones((7, 5, 3, 2), jnp.float64)
    got = conv(x, w, scale=0.1, bias=0.7, residual=3)
    assert_close(got, plain(x, w) * 0.1 + 0.7 + 3)


def test_a_call_is_one_graph_with_one_contraction(draw: Draw) -> None:
    x, w = draw("bshd"), jnp.ones((7, 5, 3, 2), jnp.float32)
    fused = functools.partial(conv, bias=jnp.ones(7), residual=1.0, scale=2.0)
    ((graph, _),) = graphs(functools.partial(fused, activation="gelu"), x, w)
    assert nodes(graph) == {
        "conv_fprop": 1,
        "constant": 1,
        "mul": 1,
        "add": 2,
        "gelu_tanh": 1,
    }
    assert [t.dtype for t in graph.tensors if t.name not in graph.inputs] == ["f32"] * 6
    assert graph.outputs == ("output",)


def test_channels_last_is_read_in_place(draw: Draw) -> None:
    x, w = draw("bshd"), jnp.ones((3, 3, 11, 7), jnp.float32)
    ((graph, _),) = graphs(
        functools.partial(conv, dimension_numbers=_NHWC, bias=jnp.ones(7)), x, w
    )
    assert graph.tensor("x").dims == (2, 11, 5, 6)
    assert graph.tensor("x").order == (0, 2, 3, 1)
    assert graph.tensor("w").dims == (7, 11, 3, 3)
    assert graph.tensor("w").order == (2, 3, 1, 0)
    assert graph.tensor("bias").dims == (1, 7, 1, 1)
    assert graph.tensor("output").stored_shape == (2, 3, 4, 7)


# --- dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_16_bit_results_are_rounded_once(dtype: Any, draw: Draw) -> None:
    x, w = draw("bshd", dtype), draw("kb", dtype, k=7 * 3 * 2, b=5).reshape(7, 5, 3, 2)
    extra = {"bias": draw("k", dtype, k=7), "scale": draw("k", k=7)}
    extra["residual"] = draw("bkst", dtype, k=7, s=4, t=10)
    run = functools.partial(conv, activation="gelu")

    @jax.jit
    def both(x: Any, w: Any, extra: Any) -> Any:
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), (x, w, extra))
        return run(x, w, **extra), run(*wide[:2], **wide[2]).astype(dtype)

    got, want = both(x, w, extra)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


def test_the_result_s_dtype_can_be_chosen(draw: Draw) -> None:
    x = draw("bshd", jnp.bfloat16)
    w = jnp.ones((7, 5, 3, 2), jnp.bfloat16)
    got = conv(x, w, preferred_element_type=jnp.float32, bias=jnp.ones(7))
    wide = (each.astype(jnp.float32) for each in (x, w))
    assert_close(got, conv(*wide, bias=jnp.ones(7)), 1e-6)
    got = conv(x, w, preferred_element_type=jnp.float8_e4m3fn, scale=0.01)
    assert got.dtype == jnp.float8_e4m3fn


def test_8_bit_integers_are_summed_exactly() -> None:
    rng = np.random.default_rng(3)
    for dtype, low, high in ((jnp.int8, -128, 128), (jnp.uint8, 0, 256)):
        x = rng.integers(low, high, (2, 3, 5, 7))
        w = rng.integers(low, high, (5, 3, 2, 3))
        exact = lax.conv(*(jnp.asarray(v, jnp.int32) for v in (x, w)), (1, 1), "SAME")
        run = functools.partial(
            conv, jnp.asarray(x, dtype), jnp.asarray(w, dtype), padding="SAME"
        )
        np.testing.assert_array_equal(run(preferred_element_type=jnp.int32), exact)
        scale = jnp.arange(1.0, 6.0, dtype=jnp.float32)
        got = run(
            preferred_element_type=jnp.bfloat16,
            scale=scale,
            bias=0.5,
            activation="relu",
        )
        want = jax.nn.relu(exact.astype(jnp.float32) * scale[:, None, None][None] + 0.5)
        np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=str)
def test_8_bit_floats_are_summed_in_f32(dtype: Any, draw: Draw) -> None:
    x, w = draw("bshd", dtype), jnp.ones((7, 5, 3, 2), dtype)
    got = conv(x, w, preferred_element_type=jnp.float32, scale=0.5)
    want = plain(x.astype(jnp.float32), w.astype(jnp.float32), scale=0.5)
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize(
    "precision", ["highest", lax.Precision.HIGHEST, ("highest",) * 2]
)
def test_precision_reaches_the_products(precision: Any, draw: Draw) -> None:
    x, w = draw("bshd"), jnp.ones((7, 5, 3, 2), jnp.float32)
    run = jax.jit(functools.partial(conv, precision=precision))
    assert "precision HIGHEST" in run.lower(x, w).as_text().replace(
        "#stablehlo<precision HIGHEST>", "precision HIGHEST"
    )


# --- empty and smallest ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ((0, 3, 5, 4), (7, 3, 2, 3)),
        ((2, 0, 5, 4), (7, 0, 2, 3)),
        ((2, 3, 5, 4), (0, 3, 2, 3)),
        ((2, 3, 0, 4), (7, 3, 2, 3)),
        ((2, 3, 1, 4), (7, 3, 3, 3)),
        ((1, 1, 1, 1), (1, 1, 1, 1)),
    ],
    ids=["images", "channels", "out-channels", "space", "no-room", "ones"],
)
def test_empty_and_smallest_sizes(
    x: tuple[int, ...], w: tuple[int, ...], draw: Draw
) -> None:
    def run(function: Any, x: Any, w: Any, bias: Any) -> jax.Array:
        return function(x, w, bias=bias, activation="silu", residual=bias.sum())

    operands = jnp.ones(x), jnp.ones(w), jnp.ones(w[0])
    value, got = gradients(functools.partial(run, conv), (0, 1, 2))(*operands)
    assert_close(value, loss(functools.partial(run, plain), *operands), 1e-5)
    if conv(*operands[:2]).size:
        want = gradients(functools.partial(run, plain), (0, 1, 2))(*operands)
        assert_close((value, got), want, 1e-5)
    else:
        # XLA has no gradient of these; it is 0.
        assert_close(got, tuple(map(jnp.zeros_like, operands)), 0)


# --- gradients ------------------------------------------------------------------------

# In the graph; conv takes the first two by position here.
_NAMES = ("x", "w", "bias", "residual", "scale")


def _operands(draw: Draw, dtype: Any = jnp.float64, count: int = 0) -> list[jax.Array]:
    """Draw x, w, bias, residual and scale in NHWC, each with `count` examples."""
    more = "n" if count else ""
    sizes = {"n": count, "b": 2, "s": 5, "t": 4, "d": 3, "e": 7, "k": 2}
    axes = ("bstd", "kkde", "e", "bste", "e")
    return [draw(more + each, dtype, **sizes) for each in axes]


def _fused(*operands: jax.Array, function: Any = conv, **options: Any) -> jax.Array:
    options = {"dimension_numbers": _NHWC, "padding": "SAME", **options}
    extra = dict(zip(_NAMES[2:], operands[2:], strict=False))
    return function(*operands[:2], **extra, **options)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_of_every_subset_of_operands(activation: Any, draw: Draw) -> None:
    operands = _operands(draw)
    run = functools.partial(_fused, activation=activation)
    want = jax.jit(gradients(functools.partial(run, function=plain), range(5)))
    value, full = want(*operands)

    @jax.jit
    def every(*operands: jax.Array) -> Any:
        return [gradients(run, subset)(*operands)[1] for subset in subsets(5)]

    # One compile for each activation; the graphs of all subsets are looked at.
    found = every(*operands) if activation == "gelu" else []
    for subset, got in itertools.zip_longest(subsets(5), found):
        if got is not None:
            assert_close(got, tuple(full[i] for i in subset))
        _, (backward, _) = graphs(gradients(run, subset), *operands)
        wanted = {f"grad_{_NAMES[i]}" for i in subset}
        assert set(backward.outputs) == wanted
        kinds = {"grad_x": "conv_dgrad", "grad_w": "conv_wgrad"}
        assert contractions(backward) == sorted(
            kinds[name] for name in wanted if name in kinds
        )
    assert_close(jax.jit(gradients(run, range(5)))(*operands), (value, full))


@pytest.mark.parametrize(
    ("activation", "operands", "saved", "read"),
    [
        (None, 3, 0, {"x", "w", "grad_output"}),
        ("relu", 3, 0, {"x", "w", "grad_output", "output"}),
        ("gelu", 3, 1, {"x", "w", "grad_output", "saved_add_1"}),
        (jax.nn.mish, 3, 1, {"x", "w", "grad_output", "saved_add_1"}),
    ],
)
def test_no_more_is_saved_than_the_gradient_reads(
    activation: Any, operands: int, saved: int, read: set[str], draw: Draw
) -> None:
    args = _operands(draw, jnp.bfloat16)[:operands]
    run = functools.partial(_fused, activation=activation)
    (forward, _), (backward, _) = graphs(gradients(run, range(operands)), *args)
    assert len(forward.outputs) == 1 + saved
    assert set(backward.inputs) == read
    assert [t.dtype for t in forward.output_tensors] == ["bf16"] * (1 + saved)
    ((alone, _),) = graphs(run, *args)
    assert alone.outputs == ("output",)
    # What a pullback holds: the operands that are read, and the result only if it is.
    _, pullback = jax.vjp(run, *args)
    held = jax.tree.leaves(pullback)
    assert sum(x.shape == (2, 5, 4, 7) for x in held) == saved + ("output" in read)


def test_the_gradient_of_a_scale_reads_the_sums_before_it(draw: Draw) -> None:
    x, w, *_, scale = _operands(draw, jnp.bfloat16)

    def run(scale: jax.Array) -> jax.Array:
        return _fused(x, w, scale=scale)

    (forward, _), (backward, _) = graphs(gradients(run, (0,)), scale)
    assert forward.outputs == ("output", "saved_conv_fprop_0")
    assert set(backward.inputs) == {"grad_output", "saved_conv_fprop_0"}
    assert contractions(backward) == []


def test_an_8_bit_result_saves_in_16_bits(draw: Draw) -> None:
    x, w = (1000 * jnp.ones_like(each) for each in _operands(draw, jnp.bfloat16)[:2])

    def run(x: jax.Array) -> jax.Array:
        result = conv(
            x,
            w,
            dimension_numbers=_NHWC,
            activation=lambda x: jnp.tanh(1e-8 * x),
            preferred_element_type=jnp.float8_e4m3fn,
        )
        return jnp.sum(result.astype(jnp.float32))

    assert np.isfinite(np.asarray(jax.grad(run)(x), np.float32)).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "gelu", "window_strides": (2, 1)},
        {"activation": jax.nn.mish, "rhs_dilation": (2, 1)},
        {"padding": ((-1, 2), (3, 0)), "lhs_dilation": (1, 2)},
    ],
)
def test_two_orders_of_both_modes_are_derivatives(options: Any, draw: Draw) -> None:
    x, w, bias, _, scale = _operands(draw)
    args = x[:1, :3, :3], w[..., :2], bias[:2], scale[:2]

    def run(x: Any, w: Any, bias: Any, scale: Any) -> jax.Array:
        return _fused(x, w, bias=bias, scale=scale, **options)

    check_grads(jax.jit(run), args, order=2, modes=("fwd", "rev"))


@pytest.mark.usefixtures("x64")
def test_hessian_jacfwd_and_linearize_are_lax_s(draw: Draw) -> None:
    x, w, bias, *_ = _operands(draw)
    args = x[:1, :2, :3], w[..., :2], bias[:2]

    def every(function: Any) -> Any:
        run = functools.partial(_fused, function=function, activation="gelu")
        value, linear = jax.linearize(run, *args)
        return (
            jax.hessian(functools.partial(loss, run), argnums=(0, 2))(*args),
            jax.jacfwd(run, argnums=1)(*args),
            jax.jacrev(jax.jacrev(functools.partial(loss, run), argnums=1))(*args),
            value,
            linear(*args),
            jax.jvp(run, args, args)[1],
        )

    assert_close(
        jax.jit(every, static_argnums=0)(conv), jax.jit(every, static_argnums=0)(plain)
    )


@pytest.mark.usefixtures("x64")
def test_a_linear_call_can_be_transposed(draw: Draw) -> None:
    x, w, *_ = _operands(draw)
    ct = draw("bste", jnp.float64, b=2, s=5, t=4, e=7)
    for i, args in ((0, (x,)), (1, (w,))):
        results = []
        for function in (conv, plain):

            def run(moving: Any, i: int = i, function: Any = function) -> jax.Array:
                pair = (moving, w) if i == 0 else (x, moving)
                return _fused(*pair, function=function)

            results.append(jax.linear_transpose(run, *args)(ct))
        assert_close(*results)


# --- vmap -----------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_vmap_over_every_subset_of_operands(draw: Draw) -> None:
    single, many = _operands(draw), _operands(draw, count=3)
    places = (0, -1, 1, 2, 0)
    run = gradients(functools.partial(_fused, activation="gelu"), range(5))
    one = jax.jit(run)

    def pick(subset: tuple[int, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        axes = tuple(places[i] if i in subset else None for i in range(5))
        args = [
            single[i] if axis is None else jnp.moveaxis(many[i], 0, axis)
            for i, axis in enumerate(axes)
        ]
        return args, axes

    chosen = [s for s in subsets(5) if len(s) in (1, 2, 5)]

    @jax.jit
    def every(cases: list[list[Any]]) -> Any:
        return [
            jax.vmap(run, in_axes=pick(subset)[1])(*args)
            for subset, args in zip(chosen, cases, strict=True)
        ]

    cases = [pick(subset)[0] for subset in chosen]
    for subset, args, got in zip(chosen, cases, every(cases), strict=True):
        assert_close(got, stacked(one, args, pick(subset)[1]))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=str)
def test_vmap_with_sizes_of_1_and_a_shared_cotangent(dtype: Any, draw: Draw) -> None:
    # One image, one channel out, and a cotangent that is rounded before it is used.
    x, w = draw("bstd", dtype, b=1, t=4, d=3), draw("nkkde", dtype, n=3, k=2, d=3, e=1)
    ct = draw("bste", jnp.float64, b=1, s=5, t=4, e=1)

    def pull(x: Any, w: Any, ct: Any) -> Any:
        run = functools.partial(_fused, preferred_element_type=jnp.float64)
        return jax.vjp(run, x, w)[1](ct)

    for axes, args in (
        ((None, 0, None), (x, w, ct)),
        ((0, None, None), (jnp.stack([x, -x]), w[0], ct)),
        ((None, None, 0), (x, w[0], jnp.stack([ct, -ct]))),
    ):
        got = jax.jit(jax.vmap(pull, in_axes=axes))(*args)
        assert_close(got, stacked(jax.jit(pull), args, axes), 1e-5)


def test_vmap_over_images_shares_the_filters(draw: Draw) -> None:
    x, w, bias, *_ = _operands(draw, jnp.float32)
    xs = jnp.stack([x] * 3)
    run = functools.partial(_fused, activation="relu")
    ((graph, _),) = graphs(jax.vmap(run, in_axes=(0, None, None)), xs, w, bias)
    assert graph.tensor("x").dims == (6, 3, 5, 4)
    assert graph.tensor("w").dims == (7, 3, 2, 2)
    assert graph.tensor("bias").dims == (1, 7, 1, 1)
    # The gradient of the images alone still shares them.
    gradient = jax.vmap(gradients(run, (0,)), in_axes=(0, None, None))
    _, (graph, _) = graphs(gradient, xs, w, bias)
    assert graph.tensor("grad_x").dims == (6, 3, 5, 4)
    assert graph.tensor("w").dims == (7, 3, 2, 2)
    # Each example's gradient of the filters is a group.
    gradient = jax.vmap(gradients(run, (1,)), in_axes=(0, None, None))
    _, (graph, _) = graphs(gradient, xs, w, bias)
    assert graph.tensor("grad_w").dims == (21, 3, 2, 2)
    assert graph.tensor("x").dims == (2, 9, 5, 4)


def test_vmap_over_the_bias_of_one_image_convolves_it_once(draw: Draw) -> None:
    x, w, bias, *_ = _operands(draw, jnp.float32)
    x, biases = x[:1], jnp.stack([bias, -bias, 2 * bias])
    run = functools.partial(_fused, activation="gelu")
    mapped = jax.vmap(run, in_axes=(None, None, 0))
    ((graph, _),) = graphs(mapped, x, w, biases)
    product, rest = partition(graph)
    assert nodes(product) == {"conv_fprop": 1}
    assert product.tensor("x").dims == (1, 3, 5, 4)
    assert nodes(rest) == {"add": 1, "gelu_tanh": 1}
    want = stacked(run, (x, w, biases), (None, None, 0))
    assert_close(mapped(x, w, biases), want, 1e-5)


def test_vmap_over_filters_makes_groups(draw: Draw) -> None:
    x, w, bias, *_ = _operands(draw, jnp.float32)
    ws, biases = jnp.stack([w] * 3), jnp.stack([bias] * 3)
    run = functools.partial(_fused, activation="relu")
    for axes, args in (
        ((None, 0, 0), (x, ws, biases)),
        ((None, 0, None), (x, ws, bias)),
    ):
        ((graph, _),) = graphs(jax.vmap(run, in_axes=axes), *args)
        assert graph.tensor("x").dims == (2, 9, 5, 4)
        assert graph.tensor("w").dims == (21, 3, 2, 2)
        assert graph.tensor("bias").dims == (1, 21, 1, 1)
    gradient = jax.vmap(gradients(run, (0, 1, 2)), in_axes=(None, 0, 0))
    found = [contractions(graph) for graph, _ in graphs(gradient, x, ws, biases)]
    assert found == [["conv_fprop"], ["conv_dgrad", "conv_wgrad"]]


@pytest.mark.usefixtures("x64")
def test_nested_vmap_and_vmap_of_forward_mode(draw: Draw) -> None:
    bias = _operands(draw)[2]
    xs = draw("nbstd", jnp.float64, n=3, t=4, d=3)
    ws = draw("nkkde", jnp.float64, n=2, k=2, d=3, e=7)
    run = functools.partial(_fused, activation="gelu")

    def along(x: Any, w: Any) -> Any:
        return jax.jvp(run, (x, w, bias), (x, w, bias))

    def nested(function: Any) -> Any:
        inner = jax.vmap(function, in_axes=(0, None))
        return jax.jit(jax.vmap(inner, in_axes=(None, 0)))(xs, ws)

    once = jax.jit(along)
    want = [stacked(once, (xs, each), (0, None)) for each in ws]
    assert_close(nested(along), jax.tree.map(lambda *x: jnp.stack(x), *want))
    assert_close(nested(lambda x, w: run(x, w, bias)), jnp.stack([v for v, _ in want]))


def test_vmap_over_no_examples_gives_none(draw: Draw) -> None:
    x, w, bias, *_ = _operands(draw, jnp.float32)
    run = jax.vmap(gradients(_fused, (0, 1)), in_axes=(0, None, None))
    value, (grad_x, grad_w) = run(jnp.zeros((0, *x.shape)), w, bias)
    assert value.shape == (0,)
    assert grad_x.shape == (0, *x.shape)
    assert grad_w.shape == (0, *w.shape)


# --- other transformations ------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_scan_and_remat_match_the_unrolled_loop(draw: Draw) -> None:
    x, _, bias, *_ = _operands(draw)
    ws = draw("nkkdd", jnp.float64, n=3, k=2, d=3)

    def total(body: Any, loop: Any) -> Any:
        def run(x: Any, ws: Any, bias: Any) -> jax.Array:
            return loop(lambda x, w: (body(x, w, bias), None), x, ws)[0]

        return jax.jit(gradients(run, (0, 1, 2)))(x, ws, bias[:3])

    def unrolled(body: Any, x: Any, ws: Any) -> Any:
        for w in ws:
            x, _ = body(x, w)
        return x, None

    fused = functools.partial(_fused, activation="gelu")
    want = total(functools.partial(fused, function=plain), unrolled)
    assert_close(total(fused, lax.scan), want)
    assert_close(total(jax.checkpoint(fused), lax.scan), want)


@pytest.mark.parametrize(("names", "count"), [(True, 1), (False, 2)])
def test_remat_keeps_named_results(names: bool, count: int, draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)[:3]
    kept = ("cudnn_conv_fprop_output", "cudnn_conv_fprop_saved_add_1")
    policy = jax.checkpoint_policies.save_only_these_names(*(kept if names else ()))
    run = jax.checkpoint(functools.partial(_fused, activation="gelu"), policy=policy)
    found = [contractions(g) for g, _ in graphs(gradients(run, (0, 1)), *operands)]
    assert found.count(["conv_fprop"]) == count


def test_an_exported_gradient_runs_on_the_cpu(draw: Draw) -> None:
    operands = _operands(draw, jnp.bfloat16)[:3]
    gradient = jax.jit(gradients(functools.partial(_fused, activation="gelu"), (0, 1)))
    exported = jax.export.export(
        gradient, platforms=("cpu",), disabled_checks=EXPORT_SAFETY_CHECKS
    )(*operands)
    assert_close(exported.call(*operands), gradient(*operands), 0)


def test_jit_traces_once(draw: Draw) -> None:
    traces: list[int] = []

    @jax.jit
    def function(*operands: jax.Array) -> Any:
        traces.append(1)
        return _fused(*operands)

    operands = _operands(draw, jnp.float32)[:3]
    for _ in range(2):
        function(*operands)
    assert len(traces) == 1
    assert math.isfinite(float(loss(function, *operands)))
