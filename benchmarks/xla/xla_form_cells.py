# SPDX-License-Identifier: Apache-2.0
"""The workloads of xla_forms.py: each by jax_cudnn, and as a user of JAX writes it.

All numbers are bf16 unless said otherwise. Images have their channels last.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from benchmarks.harness.contest import BOTH, BY_XLA, FORWARD, LOSS, XLA, Cell, Way
from benchmarks.harness.contest import Function as Form
from benchmarks.harness.operands import Operand
from benchmarks.layers import norms, operation_cells
from jax_cudnn.policy import nearest

_Shape = tuple[int, ...]

_NARROW, _WIDE = "bfloat16", "float32"
_EPSILON = 1e-5
_NHWC = ("NHWC", "HWIO", "NHWC")


# What any of them may take at most, as a ratio to the fastest plain form.
_GOALS = {what: {BY_XLA: nearest.LOSS} for what in (FORWARD, BOTH, LOSS)}


def _cell(
    *,
    operation: str,
    size: str,
    ours: Form,
    plain: Mapping[str, Form],
    operands: Sequence[Operand | np.ndarray],
) -> Cell:
    """Return an operation of a size; ``plain`` has what a user may write, by name."""
    return Cell(
        operation=operation,
        size=size,
        operands=tuple(operands),
        rivals={name: Way(function=form) for name, form in plain.items()},
        ours=None,
        by_xla=functools.partial(ours, implementation="xla"),
        goals=_GOALS,
    )


def cells(*, small: bool) -> list[Cell]:
    """Return the cells, or small ones, of which each operation has one a dtype."""
    made = [*_norms(small), *_products(small), *_attention(small), *_pools(small)]
    return [*made, *_depthwise(small), *_dilated(small), *_grouped(small)]


def _sizes(
    small: bool, tiny: _Shape, wide: _Shape, *narrow: _Shape
) -> Iterator[tuple[_Shape, str]]:
    """Yield shapes and their dtypes: those in bf16, and one in f32."""
    for shape in (tiny,) if small else narrow:
        yield shape, _NARROW
    yield tiny if small else wide, _WIDE


def _named(operation: str, dtype: str) -> str:
    return operation if dtype == _NARROW else f"{operation} {dtype}"


def _text(shape: _Shape) -> str:
    return " x ".join(map(str, shape))


# --- norms ----------------------------------------------------------------------------


def _norms(small: bool) -> Iterator[Cell]:
    tall = (16384, 4096)
    rows = (8192, 4096), tall, (32768, 768), (2048, 1024)
    images = (32, 28, 28, 256), (64, 56, 56, 256), (128, 28, 28, 512), (32, 14, 14, 256)
    groups = (8, 32, 32, 320), (16, 64, 64, 320), (8, 32, 32, 640), (2, 64, 64, 128)
    kinds = {
        "layer_norm": ((5, 40), rows),
        "rms_norm": ((5, 40), rows),
        "batch_norm": ((2, 3, 3, 8), images),
        "group_norm": ((2, 3, 3, 8), groups),
    }
    for kind, (tiny, shapes) in kinds.items():
        for shape, dtype in _sizes(small, tiny, *shapes):
            yield _norm(kind, shape, dtype, groups=4 if small else 32)
    for kind in ("layer_norm", "rms_norm"):
        shape = (5, 40) if small else tall
        yield _norm(kind, shape, _NARROW, has_residual=True)


def _norm(kind: str, shape: _Shape, dtype: str, **options: Any) -> Cell:
    work = norms.Workload(kind=kind, shape=shape, dtype=dtype, **options)
    cell = norms.cell(work)
    forms = {"means of x and its square": cell.rivals[XLA]}
    if kind == "layer_norm" and not work.has_residual:
        forms["jnp.var"] = Way(function=_by_variance)
    return dataclasses.replace(
        cell,
        rivals=forms,
        ours=None,
        first=None,
        torch=None,
        has_loss=True,
        goals=_GOALS,
    )


def _by_variance(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.var(wide, -1, keepdims=True) + _EPSILON)
    return ((wide - mean) * rstd * scale + bias).astype(x.dtype)


# --- products -------------------------------------------------------------------------


def _products(small: bool) -> Iterator[Cell]:
    tiny, wide = (24, 16, 40), (2048, 1024, 4096)
    shapes = (8192, 2048, 8192), (2048, 1024, 4096), (512, 768, 3072)
    for (m, r, n), dtype in _sizes(small, tiny, wide, *shapes):
        weights = Operand((r, n), r**-0.5, dtype=dtype)
        x = Operand((m, r), dtype=dtype)
        size = f"({m},{r},{n})"
        yield _cell(
            operation=_named("gated_matmul, silu", dtype),
            size=size,
            ours=jax_cudnn.gated_matmul,
            plain={"jnp.matmul": lambda x, g, up: jax.nn.silu(x @ g) * (x @ up)},
            operands=(x, weights, weights),
        )
        yield _cell(
            operation=_named("matmul + bias + gelu", dtype),
            size=size,
            ours=functools.partial(_matmul, activation="gelu"),
            plain={"jnp.matmul": lambda x, w, b: jax.nn.gelu(x @ w + b)},
            operands=(x, weights, Operand((n,), dtype=dtype)),
        )
    tiny, wide = (2, 5, 6, 8, 12), (32, 28, 28, 128, 128)
    shapes = (64, 56, 56, 64, 64), (64, 28, 28, 128, 128), (32, 14, 14, 256, 256)
    for shape, dtype in _sizes(small, tiny, wide, *shapes):
        yield _biased_conv(shape, dtype)


def _matmul(x: Any, w: Any, b: Any, **options: Any) -> Any:
    return jax_cudnn.matmul(x, w, bias=b, **options)


def _biased_conv(shape: _Shape, dtype: str) -> Cell:
    *image, channels, out = shape
    options: dict[str, Any] = {
        "window_strides": (1, 1),
        "padding": ((1, 1), (1, 1)),
        "dimension_numbers": _NHWC,
    }

    def ours(x: Any, w: Any, b: Any, **more: Any) -> Any:
        return jax_cudnn.conv(x, w, bias=b, activation="silu", **options, **more)

    def plain(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.silu(jax.lax.conv_general_dilated(x, w, **options) + b)

    return _cell(
        operation=_named("conv 3x3 + bias + silu", dtype),
        size=f"({','.join(map(str, image))},{channels}->{out})",
        ours=ours,
        plain={"lax.conv": plain},
        operands=(
            Operand((*image, channels), dtype=dtype),
            Operand((3, 3, channels, out), (9 * channels) ** -0.5, dtype=dtype),
            Operand((out,), dtype=dtype),
        ),
    )


def _grouped(small: bool) -> Iterator[Cell]:
    shapes = (
        [(64, 4, 16, 16)] if small else [(8192, 8, 1024, 2048), (2048, 4, 512, 512)]
    )
    for rows, groups, contracted, columns in shapes:
        sizes = np.full(groups, rows // groups, np.int32)
        sizes[0], sizes[-1] = sizes[0] + 3, sizes[-1] - 3
        yield _cell(
            operation=f"ragged_dot, {groups} groups",
            size=f"({rows},{contracted},{columns})",
            ours=jax_cudnn.ragged_dot,
            plain={"lax.ragged_dot": jax.lax.ragged_dot},
            operands=(
                Operand((rows, contracted)),
                Operand((groups, contracted, columns), contracted**-0.5),
                sizes,
            ),
        )


def _depthwise(small: bool) -> Iterator[Cell]:
    """Yield depthwise convolutions: images or sequences, window, step and dilation."""
    sizes = [((32, 1024, 256), 5, 1, 4), ((8, 8192, 1024), 4, 1, 1)]
    sizes += [((128, 56, 56, 144), 3, 1, 1), ((128, 56, 56, 144), 3, 2, 1)]
    sizes += [((128, 28, 28, 240), 5, 1, 1), ((1, 124, 124, 256), 3, 1, 1)]
    if small:
        sizes = [((2, 9, 16), 3, 1, 2), ((2, 6, 5, 16), 3, 2, 1)]
    for shape, window, step, dilation in sizes:
        for dtype in (_NARROW, _WIDE):
            options = {"window_strides": step, "rhs_dilation": dilation}
            yield _convolution("depthwise conv", shape, window, dtype, **options)


def _dilated(small: bool) -> Iterator[Cell]:
    """Yield convolutions with holes: those of WaveNet are causal."""
    sizes = [((4, 8192, 128), 2, 8), ((4, 8192, 128), 2, 512), ((16, 4096, 256), 3, 2)]
    sizes += [((8, 64, 64, 256), 3, 6), ((8, 32, 32, 512), 3, 2)]
    if small:
        sizes = [((2, 12, 16), 2, 4), ((2, 6, 5, 16), 3, 2)]
    for shape, window, dilation in sizes:
        causal = {"padding": [(dilation, 0)]} if window == 2 else {}
        for dtype in (_NARROW, _WIDE):
            options = {"outputs": 256, "rhs_dilation": dilation, **causal}
            yield _convolution("conv", shape, window, dtype, **options)


def _convolution(
    name: str,
    shape: _Shape,
    window: int,
    dtype: str,
    *,
    outputs: int = 0,
    window_strides: int = 1,
    rhs_dilation: int = 1,
    padding: Any = "SAME",
) -> Cell:
    """Return a convolution of equal axes; without ``outputs`` a depthwise one."""
    axes, channels = len(shape) - 2, shape[-1]
    options: dict[str, Any] = {
        "window_strides": (window_strides,) * axes,
        "padding": padding,
        "rhs_dilation": (rhs_dilation,) * axes,
        "dimension_numbers": _NHWC if axes == 2 else ("NWC", "WIO", "NWC"),
        "feature_group_count": 1 if outputs else channels,
    }
    inner = channels if outputs else 1
    filters = (*[window] * axes, inner, outputs or channels)
    more = f", step {window_strides}" if window_strides > 1 else ""
    more += f", dilation {rhs_dilation}" if rhs_dilation > 1 else ""
    return _cell(
        operation=_named(f"{name} {'x'.join([str(window)] * axes)}", dtype),
        size=f"({','.join(map(str, shape))}){more}",
        ours=functools.partial(jax_cudnn.conv, **options),
        plain={"lax.conv": lambda x, w: jax.lax.conv_general_dilated(x, w, **options)},
        operands=(
            Operand(shape, dtype=dtype),
            Operand(filters, (inner * window**axes) ** -0.5, dtype=dtype),
        ),
    )


# --- attention and pooling ------------------------------------------------------------


def _attention(small: bool) -> Iterator[Cell]:
    def plain(*operands: Any) -> Any:
        return jax.nn.dot_product_attention(*operands, implementation="xla")

    cases = (
        (
            "sdpa with a bias",
            (2, 512, 8, 64),
            ((4, 1024, 16, 64), (2, 2048, 8, 128), (8, 256, 12, 64)),
        ),
        (
            "small sdpa",
            (64, 32, 8, 64),
            ((64, 32, 8, 64), (256, 49, 4, 32), (8, 128, 8, 64)),
        ),
    )
    for name, wide, shapes in cases:
        for shape, dtype in _sizes(small, (2, 8, 2, 16), wide, *shapes):
            _, tokens, heads, _ = shape
            arrays = [Operand(shape, dtype=dtype)] * 3
            if "bias" in name:
                arrays.append(Operand((1, heads, tokens, tokens), dtype=dtype))
            yield _cell(
                operation=_named(name, dtype),
                size=_text(shape),
                ours=jax_cudnn.sdpa,
                plain={"jax.nn": plain},
                operands=tuple(arrays),
            )


def _pools(small: bool) -> Iterator[Cell]:
    wide = (32, 28, 28, 256)
    shapes = (64, 112, 112, 64), (64, 56, 56, 64), (32, 28, 28, 256)
    max_pool = functools.partial(
        jax_cudnn.max_pool,
        window_shape=(3, 3),
        strides=(2, 2),
        padding=((1, 1), (1, 1)),
    )
    avg_pool = functools.partial(
        jax_cudnn.avg_pool, window_shape=(2, 2), strides=(2, 2)
    )
    for shape, dtype in _sizes(small, (2, 12, 12, 8), wide, *shapes):
        for cell, ours in (
            (operation_cells.max_pool(shape, dtype), max_pool),
            (operation_cells.average_pool(shape, dtype), avg_pool),
        ):
            yield _cell(
                operation=_named(cell.operation, dtype),
                size=cell.size,
                ours=ours,
                plain={"lax.reduce_window": cell.plain},
                operands=cell.operands,
            )
