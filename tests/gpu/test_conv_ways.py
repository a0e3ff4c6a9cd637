# SPDX-License-Identifier: Apache-2.0
"""Are convolutions right on a GPU, in every way of rewriting them?

Those of few channels, and depthwise ones.

Each way is run by each of cuDNN's plans.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import plans
from jax_cudnn.graph import Graph
from jax_cudnn.legalize import conv_pairs, legalize
from tests.fused_functions import normal
from tests.gpu.pinned import judge_every_plan
from tests.legal_ways import kernels_of

pytestmark = pytest.mark.gpu


def _parts(
    shapes: Sequence[tuple[int, ...]], dtype: Any, **options: Any
) -> dict[str, Graph]:
    """Return the kernels of a convolution and its gradients, by their kinds."""
    letters = "DHW"[-(len(shapes[0]) - 2) :]
    activation = options.pop("activation", None)

    def layer(x: Any, w: Any, *bias: Any) -> jax.Array:
        return jax_cudnn.conv(
            x,
            w,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            bias=bias[0] if bias else None,
            activation=activation,
            **options,
        )

    return kernels_of(layer, *(jax.ShapeDtypeStruct(x, dtype) for x in shapes))


def _judge(parts: dict[str, Graph], told: str, kinds: Sequence[str]) -> None:
    for kind in kinds:
        ways = legalize(parts[kind], None).candidates
        assert any(told in note for way in ways for note in way.notes)
        judge_every_plan(parts[kind])


# f32 is multiplied in TF32: `test_values_and_gradients` has it.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("images", "window", "steps", "padding"),
    [
        ((2, 16, 16, 3), (4, 4), (4, 4), "VALID"),
        ((3, 19, 17, 1), (6, 4), (3, 2), [(0, 1), (2, -1)]),
        ((2, 10, 9, 12, 1), (2, 2, 2), (2, 2, 2), "SAME"),
    ],
)
def test_patches(
    images: tuple[int, ...],
    window: tuple[int, ...],
    steps: tuple[int, ...],
    padding: Any,
    dtype: str,
) -> None:
    shapes = [images, (*window, images[-1], 24)]
    parts = _parts(shapes, dtype, window_strides=steps, padding=padding)
    _judge(parts, "is channels of", ("conv_fprop", "conv_dgrad", "conv_wgrad"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(
    ("images", "window", "steps"),
    [
        ((4, 20, 22, 3), (7, 7), (2, 2)),
        ((2, 17, 15, 1), (3, 3), (1, 1)),
        ((2, 6, 7, 9, 1), (3, 3, 3), (1, 1, 1)),
    ],
)
def test_rows(
    images: tuple[int, ...],
    window: tuple[int, ...],
    steps: tuple[int, ...],
    activation: Any,
    dtype: str,
) -> None:
    shapes: list[tuple[int, ...]] = [images, (*window, images[-1], 8)]
    shapes += [(8,)] if activation else []
    parts = _parts(
        shapes, dtype, window_strides=steps, padding="SAME", activation=activation
    )
    _judge(parts, "windows read along the last axis", ("conv_fprop", "conv_wgrad"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("images", "window", "steps", "outer"),
    [
        ((4, 20, 22, 3), (3, 3), (2, 2), 32),
        ((2, 17, 15, 1), (5, 4), (1, 1), 24),
        ((2, 6, 7, 9, 1), (3, 3, 3), (1, 1, 1), 28),
        ((3, 70, 1), (9,), (1,), 16),
    ],
)
def test_windows(
    images: tuple[int, ...],
    window: tuple[int, ...],
    steps: tuple[int, ...],
    outer: int,
    dtype: str,
) -> None:
    shapes = [images, (*window, images[-1], outer)]
    parts = _parts(shapes, dtype, window_strides=steps, padding="SAME")
    _judge(parts, "all that a window reads", ("conv_wgrad",))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("images", "window", "outer"),
    [
        ((4, 13, 24, 32), (3, 3), 32),
        ((2, 10, 12, 16), (5, 5), 8),
        ((2, 6, 9, 16, 24), (3, 3, 3), 32),
    ],
)
def test_places_in_pairs(
    images: tuple[int, ...],
    window: tuple[int, ...],
    outer: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conv_pairs, "_WORK", 1)
    monkeypatch.setattr(conv_pairs, "_LEAST", 8)
    shapes = [images, (*window, images[-1], outer)]
    _judge(_parts(shapes, dtype, padding="SAME"), "in pairs", ("conv_wgrad",))


_DEPTHWISE = {
    "windows of 3": ((2, 13, 14, 24), (3, 3), {"padding": "SAME"}),
    "windows of 7": ((2, 13, 14, 24), (7, 7), {"padding": "VALID"}),
    "steps of 2": (
        (2, 18, 17, 24),
        (5, 5),
        {"padding": "SAME", "window_strides": (2, 2)},
    ),
    "holes": ((2, 15, 14, 24), (3, 3), {"padding": "SAME", "rhs_dilation": (2, 2)}),
    "unequal": ((2, 13, 14, 24), (2, 5), {"padding": "SAME"}),
    "large": ((2, 20, 19, 24), (9, 9), {"padding": "SAME"}),
    "causal": ((3, 70, 32), (4,), {"padding": ((3, 0),)}),
    "one axis": ((3, 70, 32), (31,), {"padding": "SAME"}),
    "one axis, holes": ((3, 70, 32), (3,), {"padding": "SAME", "rhs_dilation": (4,)}),
    "three axes": ((2, 7, 8, 9, 16), (3, 3, 3), {"padding": "SAME"}),
}
_KINDS = ("conv_fprop", "conv_dgrad", "conv_wgrad")


@pytest.mark.parametrize(
    ("name", "dtype", "activation"),
    [
        *((name, "bfloat16", None) for name in _DEPTHWISE),
        ("windows of 3", "float16", None),
        ("causal", "float16", None),
        ("holes", "float16", None),
        ("windows of 7", "bfloat16", "silu"),
        ("causal", "bfloat16", "silu"),
    ],
)
def test_depthwise(name: str, dtype: str, activation: Any) -> None:
    images, window, options = _DEPTHWISE[name]
    channels = images[-1]
    shapes: list[tuple[int, ...]] = [images, (*window, 1, channels)]
    shapes += [(channels,)] if activation else []
    parts = _parts(
        shapes, dtype, feature_group_count=channels, activation=activation, **options
    )
    for kind in ("conv_fprop",) if activation else _KINDS:
        is_few = (name, kind) == ("three axes", "conv_wgrad")
        judge_every_plan(parts[kind], fewest=1 if is_few else 2)


def _dense(
    x: np.ndarray, w: np.ndarray, cotangent: np.ndarray, options: dict[str, Any]
) -> tuple[np.ndarray, ...]:
    """Return a depthwise convolution and its gradients, an element of w at a time.

    XLA's own on a CPU multiplies other channels by zeros, and so spreads NaN.
    """
    window, sizes = w.shape[:-2], x.shape[1:-1]
    steps = options["window_strides"]
    holes = options.get("rhs_dilation", (1,) * len(window))
    padding = options["padding"]
    if isinstance(padding, str):
        reach = [
            hole * (size - 1) + 1 for hole, size in zip(holes, window, strict=True)
        ]
        padding = jax.lax.padtype_to_pads(sizes, reach, steps, padding)
    padded = np.pad(x, ((0, 0), *padding, (0, 0)))
    counts, taps = cotangent.shape[1:-1], [*np.ndindex(*window)]
    result, by_x, by_w = np.zeros_like(cotangent), np.zeros_like(padded), []
    for tap in taps:
        seen = tuple(
            slice(hole * i, hole * i + step * (count - 1) + 1, step)
            for hole, i, step, count in zip(holes, tap, steps, counts, strict=True)
        )
        filters = w[(*tap, 0)]
        result += padded[:, *seen] * filters
        by_x[:, *seen] += cotangent * filters
        axes = tuple(range(cotangent.ndim - 1))
        by_w.append(np.sum(padded[:, *seen] * cotangent, axes))
    inner = tuple(
        slice(low, low + size) for (low, _), size in zip(padding, sizes, strict=True)
    )
    return result, by_x[:, *inner], np.reshape(by_w, w.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", _DEPTHWISE)
def test_depthwise_by_auto(name: str, dtype: str) -> None:
    """As a user calls it, beside a dense one in f64, also with a NaN in x."""
    images, window, options = _DEPTHWISE[name]
    channels, letters = images[-1], "DHW"[-(len(images) - 2) :]
    options = {"window_strides": (1,) * len(window), **options}
    x, w = normal(0, *images).astype(dtype), normal(1, *window, 1, channels)
    w = w.astype(dtype)

    def layer(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.conv(
            x,
            w,
            **options,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            feature_group_count=channels,
        )

    def all_of_it(cotangent: Any, x: Any, w: Any) -> Any:
        result, pullback = jax.vjp(layer, x, w)
        return result, *pullback(cotangent)

    cotangent = normal(2, *jax.eval_shape(layer, x, w).shape).astype(dtype)
    calls = plans.inspect(all_of_it, cotangent, x, w).calls
    # A NaN then is in all channels of a group.
    is_merged = any("are merged" in why for call in calls for why in call.reasons)
    place = (1, *(size // 2 for size in images[1:-1]), 3)
    bound = {"float32": 1e-3, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
    for given in (x, x.at[place].set(jnp.nan)):
        found = jax.jit(all_of_it)(cotangent, given, w)
        a, b, c = (np.asarray(each, np.float64) for each in (given, w, cotangent))
        truth = _dense(a, b, c, options)
        for got, want in zip(found, truth, strict=True):
            got = np.asarray(got, np.float64)
            if not is_merged:
                np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            keep = ~np.isnan(got)
            assert not np.isnan(want[keep]).any()
            error = np.linalg.norm(got[keep] - want[keep])
            assert error < bound * np.linalg.norm(want[keep])


def _plain(x: Any, w: Any, step: int) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x,
        w,
        (step, step),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest",
    )


def _ours(x: Any, w: Any, step: int) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax_cudnn.conv(x, w, (step, step), "SAME", dimension_numbers=numbers)


def _relative(found: Any, truth: Any) -> float:
    error = found.astype(jnp.float32) - truth
    return float(jnp.linalg.norm(error) / jnp.linalg.norm(truth))


# By the rounding of operands to TF32, and of results.
@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 4e-3), ("float16", 5e-4)]
)
@pytest.mark.parametrize(
    ("channels", "window", "step"), [(3, 7, 2), (3, 4, 4), (1, 3, 1)]
)
def test_values_and_gradients(
    channels: int, window: int, step: int, dtype: str, bound: float
) -> None:
    """As a user calls it, beside JAX's own in f32."""
    operands = normal(0, 8, 32, 32, channels), normal(1, window, window, channels, 16)
    narrow = [each.astype(dtype) for each in operands]
    wide = [each.astype(jnp.float32) for each in narrow]
    cotangent = normal(
        2, *jax.eval_shape(lambda x, w: _ours(x, w, step), *narrow).shape
    )

    def both(layer: Any, operands: Any) -> Any:
        result, pullback = jax.vjp(lambda x, w: layer(x, w, step), *operands)
        given = cotangent.astype(dtype).astype(result.dtype)
        return result, *pullback(given)

    found = jax.jit(lambda *xs: both(_ours, xs))(*narrow)
    truth = jax.jit(lambda *xs: both(_plain, xs))(*wide)
    for x, y in zip(found, truth, strict=True):
        assert _relative(x, y) < bound


@pytest.mark.parametrize(("window", "step"), [(7, 2), (4, 4), (3, 1)])
def test_nan_is_where_it_belongs(window: int, step: int) -> None:
    x = normal(0, 8, 32, 32, 3).at[1, 5, 7, 2].set(jnp.nan).astype(jnp.bfloat16)
    w = normal(1, window, window, 3, 16).astype(jnp.bfloat16)
    found = jax.jit(lambda x, w: _ours(x, w, step))(x, w)
    truth = jax.jit(lambda x, w: _plain(x, w, step))(
        *(each.astype(jnp.float32) for each in (x, w))
    )
    assert jnp.isnan(truth).any()
    assert (jnp.isnan(found) == jnp.isnan(truth)).all()
