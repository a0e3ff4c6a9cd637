# SPDX-License-Identifier: Apache-2.0
"""Tests derivatives and vmap of attention in every nesting, and counts the graphs.

Values are compared with an attention written in jax.numpy, or with the same function
applied without the transformation.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import sdpa
from tests.attention.shared.small import (
    AXES,
    SMALL,
    assert_close,
    attend,
    attention_loss,
    count_kinds,
    small_operands,
    textbook,
    value_and_gradients,
)
from tests.conftest import Draw
from tests.products.shared.fused import graphs

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_NAMES = ("query", "key", "value", "bias")


# --- derivatives ----------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_textbook_attention(draw: Draw) -> None:
    operands = small_operands(draw)
    loss = functools.partial(attention_loss, textbook)
    want = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    assert_close(value_and_gradients(*operands), want(*operands))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("index", range(4), ids=_NAMES)
def test_second_derivatives_agree_in_every_nesting(index: int, draw: Draw) -> None:
    operands = small_operands(draw, b=1, h=2, k=1)

    def loss(function: Any, x: jax.Array) -> jax.Array:
        return attention_loss(function, *operands[:index], x, *operands[index + 1 :])

    want = jax.jit(jax.hessian(functools.partial(loss, textbook)))(operands[index])
    ours = functools.partial(loss, attend)
    for outer, inner in itertools.product((jax.jacfwd, jax.jacrev), repeat=2):
        got = jax.jit(outer(inner(ours)))(operands[index])
        assert_close(got, want)


@pytest.mark.usefixtures("x64")
def test_mixed_second_derivatives_are_symmetric(draw: Draw) -> None:
    operands = small_operands(draw, b=1, h=2, k=1)
    loss = functools.partial(attention_loss, attend)
    blocks = jax.jit(jax.hessian(loss, argnums=(0, 3)))(*operands)
    query, bias = (math.prod(operands[i].shape) for i in (0, 3))
    upper = blocks[0][1].reshape(query, bias)
    lower = blocks[1][0].reshape(bias, query)
    assert np.abs(upper).max() > 1e-3
    assert_close(upper, lower.T)


@pytest.mark.usefixtures("x64")
def test_third_derivatives_exist(draw: Draw) -> None:
    operands = small_operands(draw, b=1, h=2, k=1)

    def along(function: Any) -> jax.Array:
        def loss(step: jax.Array) -> jax.Array:
            return attention_loss(function, operands[0] * step, *operands[1:])

        third = jax.grad(jax.jacfwd(jax.grad(loss)))
        return jax.jit(third)(jnp.ones((), jnp.float64))

    assert_close(along(attend), along(textbook))


@pytest.mark.usefixtures("x64")
def test_jvp_linearize_and_both_transposes_are_one_derivative(draw: Draw) -> None:
    operands, tangents = small_operands(draw), small_operands(draw)
    outputs, along = jax.jvp(attend, operands, tangents)
    assert_close((outputs, along), jax.jvp(textbook, operands, tangents))

    linear_outputs, linear = jax.linearize(attend, *operands)
    assert_close((linear_outputs, linear(*tangents)), (outputs, along))

    cotangents = jax.tree.map(lambda x: draw("", jnp.float64) * jnp.cos(x), outputs)
    _, pullback = jax.vjp(attend, *operands)
    back = pullback(cotangents)
    assert_close(jax.linear_transpose(linear, *operands)(cotangents), back)
    dot = sum(jnp.vdot(x, y) for x, y in zip(along, cotangents, strict=True))
    assert_close(dot, sum(jnp.vdot(x, y) for x, y in zip(tangents, back, strict=True)))


def test_masks_and_lengths_have_no_derivative(draw: Draw) -> None:
    q, k, v, bias = small_operands(draw, jnp.float32)
    mask, lengths = draw("b1st", **SMALL) > 0, jnp.array([2, 5])

    def function(q: jax.Array, mask: jax.Array, lengths: jax.Array) -> jax.Array:
        return sdpa(q, k, v, bias, mask, key_value_seq_lengths=lengths)

    out, pullback = jax.vjp(function, q, mask, lengths)
    gradient, *others = pullback(jnp.ones_like(out))
    assert gradient.dtype == jnp.float32
    assert [x.dtype for x in others] == [jax.dtypes.float0] * 2


def test_the_values_alone_can_be_transposed(draw: Draw) -> None:
    query, key, value = draw("bshd"), draw("btkd"), draw("btke")
    cotangent = draw("bshe")
    (got,) = jax.linear_transpose(lambda v: sdpa(query, key, v), value)(cotangent)
    _, pullback = jax.vjp(lambda v: sdpa(query, key, v), value)
    np.testing.assert_allclose(got, pullback(cotangent)[0], rtol=1e-5, atol=1e-6)


# --- the graphs in a program ----------------------------------------------------------


def test_a_gradient_is_one_forward_and_one_backward_graph(draw: Draw) -> None:
    operands = small_operands(draw, jnp.float32)
    assert count_kinds(value_and_gradients, *operands) == {
        "sdpa": 1,
        "sdpa_backward": 1,
    }
    assert count_kinds(jax.jit(value_and_gradients), *operands) == {
        "sdpa": 1,
        "sdpa_backward": 1,
    }


def test_statistics_are_made_only_where_someone_differentiates(draw: Draw) -> None:
    operands = small_operands(draw, jnp.float32)
    ((forward, _),) = graphs(sdpa, *operands)
    assert forward.outputs == ("output",)
    _, pullback = jax.vjp(sdpa, *operands)
    gradient = jax.grad(lambda *x: jnp.sum(sdpa(*x)))
    (forward, _), (backward, _) = graphs(gradient, *operands)
    assert forward.outputs == ("output", "stats")
    # Their cotangent is known to be zero, so nothing carries it.
    assert "grad_stats" not in backward.inputs
    residuals = {x.shape for x in jax.tree.leaves(pullback)}
    assert residuals == {
        *(x.shape for x in operands),
        sdpa(*operands).shape,
        forward.tensor("stats").stored_shape,
    }


def test_only_gradients_that_are_asked_for_are_computed(draw: Draw) -> None:
    operands = small_operands(draw, jnp.float32)
    for index, outputs in (
        (0, {"grad_query", "grad_key", "grad_value"}),
        (3, {"grad_query", "grad_key", "grad_value", "grad_bias"}),
    ):
        gradient = jax.grad(lambda *x: jnp.sum(sdpa(*x)), argnums=index)
        _, (backward, _) = graphs(gradient, *operands)
        assert set(backward.outputs) == outputs


def test_a_cotangent_of_statistics_alone_reaches_the_backward_graph(
    draw: Draw,
) -> None:
    operands = small_operands(draw, jnp.float32)
    _, (backward, _) = graphs(jax.grad(lambda *x: jnp.sum(attend(*x)[1])), *operands)
    assert {"grad_output", "grad_stats"} <= set(backward.inputs)


def test_forward_mode_adds_one_derivative_and_no_backward_graph(draw: Draw) -> None:
    operands = small_operands(draw, jnp.float32)
    kinds = count_kinds(lambda *x: jax.jvp(attend, x, x), *operands)
    assert kinds == {"sdpa": 1, "sdpa:derivative": 1}


def test_vmap_keeps_the_number_of_graphs(draw: Draw) -> None:
    operands = [jnp.stack([x, x, x]) for x in small_operands(draw, jnp.float32)]
    kinds = count_kinds(jax.vmap(value_and_gradients), *operands)
    assert kinds == {"sdpa": 1, "sdpa_backward": 1}


# --- vmap -----------------------------------------------------------------------------


@functools.cache
def _jitted_gradients() -> Callable[..., Any]:
    return jax.jit(value_and_gradients)


def _loop(operands: list[Any], axes: tuple[int | None, ...]) -> Any:
    """Return value and gradients for each example, one after the other."""
    count = SMALL["n"]
    results = [
        _jitted_gradients()(
            *(
                x if axis is None else jnp.take(x, i, axis=axis)
                for x, axis in zip(operands, axes, strict=True)
            )
        )
        for i in range(count)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "subset",
    [*itertools.product((False, True), repeat=4)][1:],
    ids=lambda subset: "-".join(itertools.compress(_NAMES, subset)),
)
def test_vmap_over_every_subset_of_operands(
    subset: tuple[bool, ...], draw: Draw
) -> None:
    # Another axis for each: first, last, in the middle, first.
    places = (0, -1, 2, 0)
    axes = tuple(p if is_in else None for p, is_in in zip(places, subset, strict=True))
    operands = [
        x
        if axis is None
        else jnp.moveaxis(draw(f"n{letters}", jnp.float64, **SMALL), 0, axis)
        for x, letters, axis in zip(small_operands(draw), AXES, axes, strict=True)
    ]
    got = jax.jit(jax.vmap(value_and_gradients, in_axes=axes))(*operands)
    assert_close(got, _loop(operands, axes))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("axis", [*range(5), -2])
def test_vmap_over_every_axis_of_the_query(axis: int, draw: Draw) -> None:
    operands = small_operands(draw)
    operands[0] = jnp.moveaxis(draw("nbshd", jnp.float64, **SMALL), 0, axis)
    axes = (axis, None, None, None)
    mapped = jax.vmap(attend, in_axes=axes, out_axes=(axis, 0))
    got = jax.jit(mapped)(*operands)
    want = [
        attend(jnp.take(operands[0], i, axis=axis), *operands[1:]) for i in range(3)
    ]
    output, stats = zip(*want, strict=True)
    assert_close(got, (jnp.stack(output, axis=axis), jnp.stack(stats)))


@pytest.mark.usefixtures("x64")
def test_vmap_over_mask_and_lengths(draw: Draw) -> None:
    q, k, v, bias = small_operands(draw)
    masks = draw("nb1st", **SMALL) > -0.5
    lengths = jnp.array([[0, 5], [3, 2], [4, 9]])

    def run(bias: jax.Array, mask: jax.Array, lengths: jax.Array) -> Any:
        return jax.value_and_grad(
            lambda bias: jnp.sum(
                jnp.sin(sdpa(q, k, v, bias, mask, key_value_seq_lengths=lengths))
            )
        )(bias)

    for in_axes in ((None, 0, None), (None, None, 0), (None, 0, 0)):
        args = [
            x if axis == 0 else x[1]
            for x, axis in zip((masks, lengths), in_axes[1:], strict=True)
        ]
        got = jax.jit(jax.vmap(run, in_axes=in_axes))(bias, *args)
        want = []
        for i in range(3):
            mask, length = (
                x[i] if axis == 0 else x
                for x, axis in zip(args, in_axes[1:], strict=True)
            )
            want.append(run(bias, mask, length))
        assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


@pytest.mark.usefixtures("x64")
def test_nested_vmap_is_one_larger_batch(draw: Draw) -> None:
    _, k, v, _ = small_operands(draw)
    queries = draw("nkbshd", jnp.float64, **SMALL)
    biases = draw("n1hst", jnp.float64, **SMALL)
    inner = jax.vmap(attend, in_axes=(0, None, None, None))
    outer = jax.jit(jax.vmap(inner, in_axes=(0, None, None, 0)))
    got = outer(queries, k, v, biases)
    want = [
        [attend(queries[i, j], k, v, biases[i]) for j in range(2)] for i in range(3)
    ]
    for index in range(2):
        rows = [jnp.stack([cell[index] for cell in row]) for row in want]
        assert_close(got[index], jnp.stack(rows))


@pytest.mark.usefixtures("x64")
def test_grad_of_vmap_sums_over_the_examples_of_shared_operands(draw: Draw) -> None:
    operands = small_operands(draw)
    operands[0] = draw("nbshd", jnp.float64, **SMALL)
    axes = (0, None, None, None)

    def total(function: Any, *operands: jax.Array) -> jax.Array:
        mapped = jax.vmap(functools.partial(attention_loss, function), in_axes=axes)
        return jnp.sum(jnp.square(mapped(*operands)))

    got, want = (
        jax.jit(jax.grad(functools.partial(total, f), argnums=(0, 1, 2, 3)))(*operands)
        for f in (attend, textbook)
    )
    assert_close(got, want)


@pytest.mark.usefixtures("x64")
def test_vmap_of_forward_mode_folds_tangents_and_operands(draw: Draw) -> None:
    operands = small_operands(draw)
    tangents = [draw(f"n{letters}", jnp.float64, **SMALL) for letters in AXES]
    queries = draw("nbshd", jnp.float64, **SMALL)

    def along(function: Any, query: jax.Array, *tangents: jax.Array) -> Any:
        return jax.jvp(function, (query, *operands[1:]), tangents)

    for axes in (
        (None, 0, 0, 0, 0),
        (0, 0, None, 0, None),
        (0, None, None, None, None),
    ):
        args = [
            x if axis == 0 else x[0]
            for x, axis in zip((queries, *tangents), axes, strict=True)
        ]
        got, want = (
            jax.jit(jax.vmap(functools.partial(along, f), in_axes=axes))(*args)
            for f in (attend, textbook)
        )
        assert_close(got, want)


def test_vmap_over_no_examples_gives_none(draw: Draw) -> None:
    operands = small_operands(draw, jnp.float32)
    operands[0] = jnp.zeros((0, *operands[0].shape), jnp.float32)
    mapped = jax.vmap(value_and_gradients, in_axes=(0, None, None, None))
    value, gradients = mapped(*operands)
    assert value.shape == (0,)
    assert gradients[1].shape == (0, *operands[1].shape)
