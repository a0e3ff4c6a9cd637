# SPDX-License-Identifier: Apache-2.0
"""Tests gated convolutions and folded batch norms against their formulas."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_cudnn
from tests.conftest import Draw
from tests.products.shared.fused import assert_close, assert_same, graphs, nodes

pytestmark = pytest.mark.sampled

_SIZES = {"n": 2, "y": 7, "x": 6, "c": 4, "o": 6, "f": 3}
_NHWC = ("NHWC", "HWIO", "NHWC")
_FUNCTIONS: dict[str, Any] = {
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
}


def _plain(x: Any, w: Any, **options: Any) -> jax.Array:
    given: dict[str, Any] = {"window_strides": (1, 1), "padding": "VALID", **options}
    return jax.lax.conv_general_dilated(x, w, **given)


# --- gated convolutions ---------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("up_activation", [None, "tanh", "relu"])
@pytest.mark.parametrize("activation", [None, "silu", "sigmoid", "tanh"])
def test_it_is_the_gate_times_the_convolution(
    draw: Draw, activation: str | None, up_activation: str | None
) -> None:
    x = draw("nyxc", jnp.float64, **_SIZES)
    gate, up = (0.3 * draw("ffco", jnp.float64, **_SIZES) for _ in range(2))
    bias = draw("o", jnp.float64, **_SIZES)
    options: dict[str, Any] = {"padding": ((2, 0), (0, 1))}
    options |= {"dimension_numbers": _NHWC}
    options |= {"window_strides": (2, 1), "rhs_dilation": (1, 2)}

    def gated(*args: Any) -> jax.Array:
        x, gate, up, bias = args
        names: Any = {"activation": activation, "up_activation": up_activation}
        return jax_cudnn.gated_conv(
            x, gate, up, **options, gate_bias=bias, up_bias=-bias, **names
        )

    def plain(*args: Any) -> jax.Array:
        x, gate, up, bias = args
        first = _plain(x, gate, **options) + bias[None, None, None]
        second = _plain(x, up, **options) - bias[None, None, None]
        first = first if activation is None else _FUNCTIONS[activation](first)
        is_alone = up_activation is None
        return first * (second if is_alone else _FUNCTIONS[up_activation](second))

    operands = (x, gate, up, bias)
    assert_same(gated, plain, operands)
    if "relu" not in (activation, up_activation):
        check_grads(gated, operands, 1)
    batched = jax.vmap(gated, (None, 0, 0, None))
    several = [jnp.stack([each, 2 * each]) for each in (gate, up)]
    assert_close(
        batched(x, *several, bias),
        jnp.stack([gated(x, *each, bias) for each in zip(*several, strict=True)]),
    )


def test_it_is_two_kernels() -> None:
    x, w = jnp.ones((2, 9, 8)), jnp.ones((3, 8, 16))

    def gated(*operands: Any) -> jax.Array:
        return jax_cudnn.gated_conv(
            *operands, dimension_numbers="NWC", up_activation="tanh"
        )

    (first, _), (second, _) = graphs(gated, x, w, w)
    assert nodes(first) == {"conv_fprop": 1}
    assert nodes(second) == {"conv_fprop": 1, "sigmoid": 1, "tanh": 1, "mul": 1}


def _cut(x: jax.Array) -> jax.Array:
    """No graph has this: what it gives depends on the places of the elements."""
    return jnp.where(jnp.arange(x.shape[-1]) % 2 == 0, x, 0)


@pytest.mark.parametrize("up_activation", [None, _cut, "silu"])
@pytest.mark.parametrize("activation", [_cut, "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_of_ones_own(
    draw: Draw, activation: Any, up_activation: Any, dtype: str
) -> None:
    x, w = draw("nyxc", dtype, **_SIZES), draw("ffco", dtype, **_SIZES)
    found = jax_cudnn.gated_conv(
        x,
        w,
        2 * w,
        dimension_numbers="NHWC",
        activation=activation,
        up_activation=up_activation,
    )
    wide = [each.astype(jnp.float32) for each in (x, w, 2 * w)]
    gate, up = (_plain(wide[0], w, dimension_numbers=_NHWC) for w in wide[1:])
    gate = jax.nn.silu(gate) if activation == "silu" else _cut(gate)
    if up_activation is not None:
        up = jax.nn.silu(up) if up_activation == "silu" else _cut(up)
    assert found.dtype == dtype
    tolerance = 5e-2 if dtype == "bfloat16" else 1e-5
    scale = float(jnp.max(jnp.abs(gate * up)))
    np.testing.assert_allclose(
        np.asarray(found, np.float32), gate * up, atol=tolerance * scale
    )


def test_integers_are_activated_before_they_are_rounded() -> None:
    x = jnp.full((1, 5, 16), 12, jnp.int8)
    gate, up = jnp.full((3, 16, 8), -4, jnp.int8), jnp.ones((3, 16, 8), jnp.int8)
    found = jax_cudnn.gated_conv(
        x, gate, up, dimension_numbers="NWC", activation="relu"
    )
    assert found.dtype == jnp.int8
    assert not found.any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_the_gate_of_integers_is_no_integer(dtype: str) -> None:
    x = jnp.arange(1, 5).astype(dtype)
    one, ten = jnp.ones((1, 1, 1), dtype), jnp.full((1, 1, 1), 10, dtype)
    found = jax_cudnn.gated_conv(
        x[None, :, None],
        one,
        ten,
        dimension_numbers="NWC",
    )
    want = 10 * np.arange(1, 5) / (1 + np.exp(-np.arange(1.0, 5)))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.ravel(), np.trunc(want))


_X, _W = jnp.ones((2, 9, 8)), jnp.ones((3, 8, 16))


@pytest.mark.parametrize(
    ("kind", "told", "changes"),
    [
        (
            ValueError,
            "gate is f32[3,8,16] and up f32[3,8,8]. Both must have one shape, since "
            "their convolutions are multiplied. Reshape one of them.",
            {"up": _W[..., :8]},
        ),
        (
            ValueError,
            "up_bias is f32[3]. Its shape must be [] or [16], one for each out channel",
            {"up_bias": jnp.ones(3)},
        ),
        (
            TypeError,
            "gate is bf16[3,8,16] but lhs is f32[2,9,8]. Both must have one dtype",
            {"gate": _W.astype(jnp.bfloat16)},
        ),
        (ValueError, "activation='gulu'", {"activation": "gulu"}),
        (ValueError, "up_activation='gulu'", {"up_activation": "gulu"}),
        (
            TypeError,
            "up_activation is int",
            {"up_activation": 3, "activation": None},
        ),
    ],
)
def test_messages_name_its_own_arguments(
    kind: type[Exception], told: str, changes: dict[str, Any]
) -> None:
    given: Any = {"gate": _W, "up": _W, "dimension_numbers": "NWC", **changes}
    with pytest.raises(kind, match=rf"^gated_conv: .*{re.escape(told)}"):
        jax_cudnn.gated_conv(_X, **given)


# --- folded batch norms ---------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", None])
@pytest.mark.parametrize("has_all", [False, True])
def test_folded_it_is_the_convolution_and_the_norm(
    draw: Draw, layout: str | None, *, has_all: bool
) -> None:
    is_last = layout == "NHWC"
    x = draw("nyxc" if is_last else "ncyx", **_SIZES)
    w = draw("ffco" if is_last else "ocff", **_SIZES)
    mean, scale, bias, own = (draw("o", **_SIZES) for _ in range(4))
    var = jnp.abs(scale) + 0.5
    more: Any = {"scale": scale, "bias": bias, "conv_bias": own} if has_all else {}
    folded, shift = jax_cudnn.fold_batch_norm(
        w, mean, var, **more, epsilon=1e-3, dimension_numbers=layout
    )
    assert (folded.shape, folded.dtype, shift.shape) == (w.shape, w.dtype, (6,))
    found = jax_cudnn.conv(x, folded, dimension_numbers=layout, bias=shift)
    numbers = _NHWC if is_last else None
    y = np.asarray(_plain(x, w, dimension_numbers=numbers), np.float64)
    y = y if is_last else np.moveaxis(y, 1, -1)
    mean, var, scale, bias, own = map(np.asarray, (mean, var, scale, bias, own))
    y = y + own if has_all else y
    y = (y - mean) / np.sqrt(var.astype(np.float64) + 1e-3)
    y = y * scale + bias if has_all else y
    found = found if is_last else jnp.moveaxis(found, 1, -1)
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-5)


def test_folded_it_is_what_flax_computes(draw: Draw) -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    rngs = nnx.Rngs(0)
    layer = nnx.Conv(4, 6, (3, 3), padding="SAME", rngs=rngs)
    norm = nnx.BatchNorm(6, use_running_average=True, rngs=rngs)
    norm.mean[...], norm.var[...] = draw("o", **_SIZES), 1 + draw("o", **_SIZES) ** 2
    norm.scale[...], norm.bias[...] = draw("o", **_SIZES), draw("o", **_SIZES)
    x = draw("nyxc", **_SIZES)
    w, bias = jax_cudnn.fold_batch_norm(
        layer.kernel[...],
        norm.mean[...],
        norm.var[...],
        norm.scale[...],
        norm.bias[...],
        conv_bias=layer.bias[...],
        epsilon=norm.epsilon,
        dimension_numbers="NHWC",
    )
    found = jax_cudnn.conv(
        x, w, padding="SAME", dimension_numbers="NHWC", bias=bias, activation="relu"
    )
    wanted = jax.nn.relu(norm(layer(x)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_folding_keeps_the_dtype_of_filters_and_differentiates() -> None:
    w = jnp.ones((3, 8, 16), jnp.bfloat16)
    mean, var = jnp.zeros(16, jnp.bfloat16), jnp.full(16, 3.0)

    def fold(w: Any, mean: Any, var: Any) -> Any:
        return jax_cudnn.fold_batch_norm(w, mean, var, dimension_numbers="NWC")

    folded, bias = jax.jit(fold)(w, mean, var)
    assert (folded.dtype, bias.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(folded, np.float32), 3**-0.5, rtol=4e-3)
    wide = [x.astype(jnp.float32) for x in (w, mean + 0.5, var)]
    check_grads(fold, wide, 1)


@pytest.mark.parametrize(
    ("kind", "told", "changes"),
    [
        (
            ValueError,
            "mean is f32[8], and rhs f32[3,8,16] has 16 out channels. Its shape must "
            "be [16], one number for each. Reshape it, or pass the layout of rhs as "
            "dimension_numbers.",
            {"mean": jnp.ones(8)},
        ),
        (
            TypeError,
            "rhs is i32[3,8,16]. It must be of floats. Convert it.",
            {"rhs": _W.astype(jnp.int32)},
        ),
        (
            TypeError,
            "dimension_numbers='HW' is neither a layout for each of lhs, rhs and the "
            "result, nor one of images",
            {"dimension_numbers": "HW"},
        ),
        (TypeError, "must have len equal", {"dimension_numbers": "NHWC"}),
        (TypeError, "mean is None", {"mean": None}),
        (TypeError, "epsilon is NoneType", {"epsilon": None}),
        (ValueError, "epsilon=-2.0. It must be finite", {"epsilon": -2.0}),
        (
            ValueError,
            "rhs is f32[]. It must be the filters of a convolution",
            {"rhs": jnp.ones(())},
        ),
    ],
)
def test_messages_of_folding(
    kind: type[Exception], told: str, changes: dict[str, Any]
) -> None:
    ones = jnp.ones(16)
    given: Any = {"rhs": _W, "mean": ones, "var": ones, "dimension_numbers": "NWC"}
    with pytest.raises(kind, match=rf"^fold_batch_norm: .*{re.escape(told)}"):
        jax_cudnn.fold_batch_norm(**{**given, **changes})
