# SPDX-License-Identifier: Apache-2.0
"""Norms, pooling, grouped matmuls and fused functions whose plans can be asked for."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from jax_cudnn import f8
from tests.plans.features import Feature, array

_NORMS = "norms"
_POOLS = "pooling"
_GROUPS = "grouped matmuls"
_IMAGES = (4, 28, 28, 64)
_FIRST = "XLA computes the gradient, whose meaning for equal elements it defines"


def _by_cudnn(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return functools.partial(function, implementation="cudnn", **options)


def _norms() -> Iterator[Feature]:
    rows, features = 512, 1024
    factor = array("float32", features)
    sizes = ("bfloat16", "float16", "float32")
    for name, function, count in (
        ("layer_norm", jax_cudnn.layer_norm, 2),
        ("rms_norm", jax_cudnn.rms_norm, 1),
    ):
        for dtype in sizes:
            yield _norm(
                f"{name}, {dtype}",
                function,
                array(dtype, rows, features),
                *[factor] * count,
            )
        yield _norm(f"{name}, no scale", function, array("bfloat16", rows, features))
        yield _norm(
            f"{name}, 1001 features",
            function,
            array("bfloat16", 77, 1001),
            *[array("float32", 1001)] * count,
        )
        yield _norm(
            f"{name} over two axes",
            _by_axes(function),
            array("bfloat16", 8, 32, 64),
            *[array("float32", 32, 64)] * count,
        )
    for dtype in ("bfloat16", "float32"):
        yield _norm(
            f"adaptive_layer_norm, {dtype}",
            jax_cudnn.adaptive_layer_norm,
            array(dtype, 4, 128, 512),
            *[array("float32", 4, 512)] * 2,
        )
        factors = [array("float32", _IMAGES[-1])] * 2
        yield _norm(
            f"group_norm, 8 groups, {dtype}",
            functools.partial(jax_cudnn.group_norm, groups=8),
            array(dtype, *_IMAGES),
            *factors,
        )
        yield _norm(
            f"instance_norm, {dtype}",
            jax_cudnn.instance_norm,
            array(dtype, *_IMAGES),
            *factors,
        )
        yield _norm(
            f"batch_norm in training, {dtype}",
            jax_cudnn.batch_norm,
            array(dtype, *_IMAGES),
            *factors,
        )
    for name, quantised in (
        ("f8.layer_norm", f8.layer_norm),
        ("f8.rms_norm", f8.rms_norm),
    ):
        yield Feature(
            group=_NORMS,
            name=f"{name}, e4m3",
            call=_quantised(quantised),
            operands=(array("bfloat16", rows, features), factor),
            trained=(),
            why="rounding to f8 has no gradient",
        )


def _by_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function, axis=(1, 2))


def _quantised(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, scale: function(
        x, scale, output_scale=jnp.float32(1), implementation="cudnn"
    )


def _norm(
    name: str, function: Callable[..., Any], *operands: jax.ShapeDtypeStruct
) -> Feature:
    return Feature(
        group=_NORMS,
        name=name,
        call=_by_cudnn(function),
        operands=operands,
        trained=tuple(range(len(operands))),
    )


def _pools() -> Iterator[Feature]:
    around = ((1, 1), (1, 1))
    for dtype in ("bfloat16", "float16", "float32"):
        yield _pool(
            f"avg_pool 3x3/2, {dtype}",
            _by_cudnn(
                jax_cudnn.avg_pool,
                window_shape=(3, 3),
                strides=(2, 2),
                padding=around,
            ),
            array(dtype, *_IMAGES),
        )
        yield _maximum(f"max_pool 3x3/2, {dtype}", array(dtype, *_IMAGES), around)
    volume = array("float16", 2, 8, 8, 8, 16)
    yield _pool(
        "avg_pool 2x2x2/2",
        _by_cudnn(jax_cudnn.avg_pool, window_shape=(2, 2, 2), strides=(2, 2, 2)),
        volume,
    )
    yield _maximum("max_pool 2x2x2/2", volume, "VALID", window=(2, 2, 2))
    line = array("float16", 4, 128, 64)
    yield _pool(
        "avg_pool 2/2, one axis",
        _by_cudnn(jax_cudnn.avg_pool, window_shape=(2,), strides=(2,)),
        line,
    )


def _pool(
    name: str, call: Callable[..., Any], operand: jax.ShapeDtypeStruct
) -> Feature:
    return Feature(
        group=_POOLS, name=name, call=call, operands=(operand,), trained=(0,)
    )


def _maximum(
    name: str,
    operand: jax.ShapeDtypeStruct,
    padding: Any,
    window: tuple[int, ...] = (3, 3),
) -> Feature:
    call = _by_cudnn(
        jax_cudnn.max_pool,
        window_shape=window,
        strides=(2,) * len(window),
        padding=padding,
    )
    return Feature(
        group=_POOLS, name=name, call=call, operands=(operand,), trained=(), why=_FIRST
    )


def _groups() -> Iterator[Feature]:
    sizes = array("int32", 8)
    for dtype in ("bfloat16", "float16", "float32"):
        yield _grouped(
            f"ragged_dot, 8 groups, {dtype}",
            array(dtype, 1024, 256),
            array(dtype, 8, 256, 128),
            sizes,
        )
    yield _grouped(
        "ragged_dot, odd sizes",
        array("bfloat16", 1001, 77),
        array("bfloat16", 3, 77, 131),
        array("int32", 3),
    )


def _grouped(name: str, *operands: jax.ShapeDtypeStruct) -> Feature:
    return Feature(
        group=_GROUPS,
        name=name,
        call=_by_cudnn(jax_cudnn.ragged_dot),
        operands=operands,
        trained=(0, 1),
    )


FEATURES = (*_norms(), *_pools(), *_groups())
assert len({feature.key for feature in FEATURES}) == len(FEATURES)
