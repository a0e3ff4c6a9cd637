# SPDX-License-Identifier: Apache-2.0
"""Tests convolutions of few channels on a GPU, in every way of rewriting them.

Each way is run by each of cuDNN's plans.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.graph import Graph
from jax_cudnn.legalize import legalize
from jax_cudnn.legalize.products import conv_pairs
from tests.common.gpu.pinned import judge_every_plan
from tests.fusing.functions import normal
from tests.products.gpu.conv_parts import conv_parts

pytestmark = pytest.mark.gpu


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
    parts = conv_parts(shapes, dtype, window_strides=steps, padding=padding)
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
    parts = conv_parts(
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
    parts = conv_parts(shapes, dtype, window_strides=steps, padding="SAME")
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
    monkeypatch.setattr(conv_pairs, "_LEAST", 8)
    shapes = [images, (*window, images[-1], outer)]
    _judge(conv_parts(shapes, dtype, padding="SAME"), "in pairs", ("conv_wgrad",))


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
