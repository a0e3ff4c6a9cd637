# SPDX-License-Identifier: Apache-2.0
"""Tests attention in each layout, and that kernels read layouts without transposes.

The truth is the same call with (b, s, h, d), and dense attention in float64 NumPy.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn import masks, sdpa
from tests.attention.shared.oracle import numpy_attention, numpy_gradients
from tests.attention.shared.small import SMALL
from tests.conftest import Draw
from tests.products.shared.fused import assert_close, stacked, subsets

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_LAYOUTS = ("bhsd", "sbhd")
_KEY = jax.random.key(3)


def _in(layout: str, x: Any) -> Any:
    """Return (b, s, h, d), or without b, with the axes as the layout has them."""
    letters = "bshd" if x.ndim == 4 else "shd"
    own = [letter for letter in layout if letter in letters]
    return x.transpose([letters.index(letter) for letter in own])


def _operands(draw: Draw, dtype: Any = jnp.float64, **sizes: int) -> list[jax.Array]:
    return [
        draw(axes, dtype, **{**SMALL, **sizes}) for axes in ("bshd", "btkd", "btke")
    ]


def _same_in_each_layout(
    call: Callable[..., Any], operands: list[jax.Array], *others: jax.Array
) -> None:
    """Compare results and gradients of a call with those in (b, s, h, d)."""

    def loss(layout: str, *given: jax.Array) -> tuple[jax.Array, Any]:
        found = call(*given, layout=layout)
        output, *lse = found if isinstance(found, tuple) else (found,)
        weights = jnp.sin(jnp.arange(output.size, dtype=output.dtype))
        # The same weight for the same number.
        plain = weights.reshape(output.transpose(_back(layout, output.ndim)).shape)
        total = jnp.sum(_in(layout, plain) * output)
        return total + sum(jnp.sum(jnp.cos(x)) for x in lse), (output, *lse)

    argnums = tuple(range(1, 1 + len(operands) + len(others)))
    run = jax.jit(jax.value_and_grad(loss, argnums, has_aux=True), static_argnums=0)
    (_, (output, *lse)), gradients = run("bshd", *operands, *others)
    for layout in _LAYOUTS:
        given = [_in(layout, x) for x in operands]
        (_, (got, *got_lse)), got_gradients = run(layout, *given, *others)
        assert_close(got, _in(layout, output))
        assert_close(got_lse, lse)
        want = [_in(layout, x) for x in gradients[: len(operands)]]
        assert_close(list(got_gradients), [*want, *gradients[len(operands) :]])


def _back(layout: str, rank: int) -> list[int]:
    own = [letter for letter in layout if rank == 4 or letter != "b"]
    return [own.index(letter) for letter in "bshd" if letter in own]


# --- values and gradients -------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", ["bshd", *_LAYOUTS])
def test_values_and_gradients_are_those_of_the_definition(
    layout: str, draw: Draw
) -> None:
    operands = _operands(draw)
    mask = draw("b1st", jnp.float32, **SMALL) > -0.5
    lengths = jnp.array([5, 3], jnp.int32)
    bias = draw("1hst", jnp.float64, **SMALL)

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return sdpa(
            q,
            k,
            v,
            bias,
            mask,
            key_value_seq_lengths=lengths,
            layout=layout,  # type: ignore[arg-type]
            return_residual=True,
        )

    given = [_in(layout, x) for x in operands]
    (output, lse), pull = jax.vjp(call, *given, bias)
    rng = np.random.default_rng(0)
    cotangents = rng.standard_normal(output.shape), rng.standard_normal(lse.shape)
    found = pull(tuple(map(jnp.asarray, cotangents)))

    roles = ("query", "key", "value")
    logical = {
        role: np.swapaxes(x, 1, 2) for role, x in zip(roles, operands, strict=True)
    }
    logical |= {"bias": bias, "mask": mask}
    logical["key_lengths"] = lengths[:, None, None, None]
    scale = 1 / math.sqrt(SMALL["d"])
    want = numpy_attention(logical, scale=scale)
    bhsd = cotangents[0].transpose([layout.index(x) for x in "bhsd"])
    gradients = numpy_gradients(
        logical, bhsd, np.swapaxes(cotangents[1], 1, 2)[..., None], scale=scale
    )

    def close(got: Any, want: Any) -> None:
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)

    close(output, _in(layout, np.swapaxes(want["output"], 1, 2)))
    close(lse, np.swapaxes(want["stats"][..., 0], 1, 2))
    for role, x in zip(roles, found, strict=False):
        close(x, _in(layout, np.swapaxes(gradients[role], 1, 2)))
    close(found[3], gradients["bias"])


_ODD = jnp.array([0.5, -1.25, 2.0, 0.25])
_OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (1, 1)},
    "lengths": {"query_seq_lengths": np.array([2, 3]), "is_causal": True},
    "mask": {"mask": np.tri(3, 5, 1, dtype=bool)},
    "mask_data": {"mask": masks.Causal("bottom-right") & masks.Window(2, 3)},
    "packed": {"mask": masks.Packed.from_lengths(np.array([1, 2]), np.array([3, 2]))},
    "dropout": {"dropout_rate": 0.4, "dropout_key": _KEY},
    "sinks": {"sinks": _ODD.astype(jnp.float32)},
    "softcap": {"score_mod": lambda s, *_: 2 * jnp.tanh(s / 2), "is_causal": True},
    "alibi": {"score_mod": lambda s, b, h, q, k: s + _ODD[h] * (k - q).astype(s.dtype)},
    "no_graph": {"score_mod": lambda s, b, h, q, k: jnp.where(q > k, s, jnp.sinh(s))},
    "scale": {"scale": -0.75},
}


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", _OPTIONS)
def test_all_options_mean_the_same(name: str, with_lse: bool, draw: Draw) -> None:
    call = functools.partial(sdpa, **_OPTIONS[name], return_residual=with_lse)
    operands = _operands(draw, jnp.float32)
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        _close_in_f32(call, operands)
    finally:
        jax.config.update("jax_default_matmul_precision", None)


def _close_in_f32(call: Callable[..., Any], operands: list[jax.Array]) -> None:
    def run(layout: str, *given: jax.Array) -> Any:
        found, pull = jax.vjp(functools.partial(call, layout=layout), *given)
        ones = jax.tree.map(jnp.cos, found)
        return found, pull(ones)

    found, gradients = run("bshd", *operands)
    for layout in _LAYOUTS:
        got, got_gradients = run(layout, *(_in(layout, x) for x in operands))
        output, *lse = found if isinstance(found, tuple) else (found,)
        own, *own_lse = got if isinstance(got, tuple) else (got,)
        assert_close(own, _in(layout, output), 1e-5)
        assert_close(own_lse, lse, 1e-5)
        assert_close(list(got_gradients), [_in(layout, x) for x in gradients], 1e-5)


@pytest.mark.usefixtures("x64")
def test_sinks_and_a_bias_have_their_gradients(draw: Draw) -> None:
    operands = _operands(draw)
    sinks, bias = draw("h", jnp.float64, **SMALL), draw("1hst", jnp.float64, **SMALL)

    def call(q: Any, k: Any, v: Any, sinks: Any, *bias: Any, layout: Any) -> Any:
        return sdpa(q, k, v, *bias, sinks=sinks, layout=layout, return_residual=True)

    _same_in_each_layout(call, operands, sinks)
    _same_in_each_layout(call, operands, sinks, bias)


@pytest.mark.usefixtures("x64")
def test_without_a_batch_axis(draw: Draw) -> None:
    operands = [x[0] for x in _operands(draw)]
    _same_in_each_layout(functools.partial(sdpa, return_residual=True), operands)
    _same_in_each_layout(
        functools.partial(sdpa, mask=masks.Causal("bottom-right")), operands
    )


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("empty", "bsht")
def test_sizes_of_zero(empty: str, layout: Any, draw: Draw) -> None:
    sizes = {"h": 0, "k": 0} if empty == "h" else {empty: 0}
    operands = _operands(draw, jnp.float32, **sizes)
    got = sdpa(*(_in(layout, x) for x in operands), layout=layout)
    assert_close(got, _in(layout, sdpa(*operands)))


# --- transformations ------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("batched", subsets(4), ids=str)
def test_vmap_over_any_operands_and_cotangents(
    batched: tuple[int, ...], layout: Any, draw: Draw
) -> None:
    rank = 4
    n, axes = 3, [None] * rank
    shapes = ("bshd", "btkd", "btke", "bshe")
    given = []
    for i, letters in enumerate(shapes):
        x = _in(layout, draw(letters, jnp.float64, **SMALL))
        if i in batched:
            axes[i] = (i * 2 + 1) % (rank + 1)  # type: ignore[call-overload]
            x = jnp.stack([x * (1 + j) for j in range(n)], axis=axes[i])  # type: ignore[arg-type]
        given.append(x)

    def run(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        call = functools.partial(sdpa, is_causal=True, layout=layout)
        output, pull = jax.vjp(call, q, k, v)
        return output, pull(cotangent)

    got = jax.jit(jax.vmap(run, in_axes=tuple(axes)))(*given)
    assert_close(got, stacked(run, given, axes))


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_both_modes_agree_with_finite_differences(layout: Any, draw: Draw) -> None:
    operands = [_in(layout, x) for x in _operands(draw)]
    call = functools.partial(sdpa, is_causal=True, layout=layout, return_residual=True)
    check_grads(call, operands, order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_scan_remat_and_export(layout: Any, draw: Draw) -> None:
    x = _in(layout, draw("bshd", jnp.float32, **SMALL))

    @jax.checkpoint
    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + sdpa(x, x, x, is_causal=True, layout=layout), None

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(step, x, length=2)[0])

    def plain(x: jax.Array) -> jax.Array:
        for _ in range(2):
            y = x.transpose([layout.index(letter) for letter in "bshd"])
            x = x + _in(layout, sdpa(y, y, y, is_causal=True))
        return jnp.sum(x)

    want = jax.grad(plain)(x)
    assert_close(jax.grad(loss)(x), want, 1e-4)
    exported = export.export(jax.jit(jax.grad(loss)))(x)
    assert_close(export.deserialize(exported.serialize()).call(x), want, 1e-4)
    sizes = export.symbolic_shape("a, c, m, 3")
    call = functools.partial(sdpa, layout=layout)
    many = export.export(jax.jit(lambda x: call(x, x, x)))(
        jax.ShapeDtypeStruct(sizes, jnp.float32)
    )
    assert_close(many.call(x), call(x, x, x), 1e-5)


# --- what is compiled -----------------------------------------------------------------


def _lowered(function: Callable[..., Any], *operands: Any) -> str:
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _both_directions(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        *primals, cotangent = operands
        output, pull = jax.vjp(call, *primals)
        return output, pull(cotangent)

    return run


def _transposed(text: str) -> list[int]:
    """Return how many elements each array has that is transposed."""
    shapes = re.findall(r"stablehlo\.transpose .*-> tensor<([\dx]*)x\w+>", text)
    return [math.prod(map(int, shape.split("x"))) for shape in shapes]


_IN_THE_KERNEL: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "lengths": {"key_value_seq_lengths": np.array([3, 5])},
    "dropout": {"dropout_rate": 0.5, "dropout_key": np.array([1, 2], np.uint32)},
    "softcap": {"score_mod": lambda s, *_: 2 * jnp.tanh(s / 2)},
}


@pytest.mark.parametrize("name", _IN_THE_KERNEL)
@pytest.mark.parametrize("layout", ["bshd", *_LAYOUTS])
def test_kernels_take_and_give_arrays_as_they_lie(
    layout: Any, name: str, draw: Draw
) -> None:
    sizes = {**SMALL, "d": 16, "e": 8, "t": 6}
    axes = ("bshd", "btkd", "btke", "bshe")
    operands = [_in(layout, draw(each, jnp.bfloat16, **sizes)) for each in axes]
    call = functools.partial(sdpa, **_IN_THE_KERNEL[name], layout=layout)
    text = _lowered(_both_directions(call), *operands)
    # The operands themselves are the kernels'.
    kernels = re.findall(r"@jax_cudnn\.graph\w*\(([^)]*)\)", text)
    assert len(kernels) == 2
    for each in kernels[: 1 if name == "softcap" else 2]:
        assert {"%arg0", "%arg1", "%arg2"} <= set(each.split(", "))
    assert "%arg3" in kernels[1]
    assert not [each for each in _transposed(text) if each > sizes["b"] * sizes["t"]]


def test_transposing_for_the_call_shows_what_the_test_looks_for(draw: Draw) -> None:
    sizes = {**SMALL, "d": 16, "e": 8}
    operands = [
        _in("bhsd", draw(each, jnp.bfloat16, **sizes))
        for each in ("bshd", "btkd", "btke")
    ]

    def call(*operands: Any) -> Any:
        return sdpa(*(jnp.swapaxes(x, 1, 2) for x in operands))

    assert len(_transposed(_lowered(call, *operands))) == 3


# --- messages -------------------------------------------------------------------------


def test_an_unknown_layout_is_refused(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    for layout in ("bhds", "BHSD", "", None, 3):
        with pytest.raises(
            ValueError,
            match=re.escape(
                f"sdpa: layout={layout!r} is not one of 'bshd', 'bhsd', 'sbhd'. Pass "
                "the order in which query, key and value store b batch, s tokens"
            ),
        ):
            sdpa(*operands, layout=layout)  # type: ignore[call-overload]


def test_messages_name_the_axes_of_the_layout() -> None:
    zeros = jnp.zeros
    with pytest.raises(ValueError, match=r"\(length, batch, heads, head size\) or all"):
        sdpa(*[zeros((4, 3))] * 3, layout="sbhd")
    with pytest.raises(ValueError, match=r"insert its axis: query\[None\]\."):
        sdpa(*[zeros((4, 3))] * 3, layout="bhsd")
    with pytest.raises(
        ValueError,
        match=r"key has length 6 but value 7: .*, each \(batch, heads, length, head",
    ):
        sdpa(
            zeros((2, 4, 5, 3)), zeros((2, 4, 6, 3)), zeros((2, 4, 7, 3)), layout="bhsd"
        )
    with pytest.raises(ValueError, match="batch sizes differ"):
        sdpa(*[zeros((5, n, 4, 3)) for n in (2, 3, 3)], layout="sbhd")
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 key"):
        sdpa(*[zeros((2, n, 5, 3)) for n in (4, 3, 3)], layout="bhsd")
    q = zeros((2, 4, 5, 3))
    with pytest.raises(ValueError, match=r"to \(batch, heads, query.* \[2, 4, 5, 5\]"):
        sdpa(q, q, q, zeros((2, 5, 4, 5)), layout="bhsd")
    assert jax_cudnn.sdpa is sdpa
