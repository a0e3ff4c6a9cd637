# SPDX-License-Identifier: Apache-2.0
"""Tests `jax_cudnn.conv` against lax's convolution under all transformations.

The other side of each comparison is `jax.lax.conv_general_dilated` with its epilogue in
jax.numpy, in float64, or the same function without the transformation.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from jax_cudnn import EXPORT_SAFETY_CHECKS, conv
from jax_cudnn.legalize import partition
from tests.conftest import Draw
from tests.products.shared.fused import (
    assert_close,
    contractions,
    gradients,
    graphs,
    loss,
    nodes,
    stacked,
    subsets,
)
from tests.products.shared.plain_conv import plain

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_NHWC = ("NHWC", "HWIO", "NHWC")


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
