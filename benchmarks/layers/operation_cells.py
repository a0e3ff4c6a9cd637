# SPDX-License-Identifier: Apache-2.0
"""The workloads of operations.py, and each contender's way to compute them.

All numbers are bf16. Images have their channels last, in PyTorch's memory too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from benchmarks.harness import tokamax_side
from benchmarks.harness.contest import BOTH, FORWARD, XLA, Cell, Way
from benchmarks.harness.operands import Operand
from benchmarks.harness.torch_side import installed, torch
from benchmarks.layers import expert_cells
from benchmarks.layers.norms import channels_last, channels_second

F = installed("torch.nn.functional")
_NHWC = ("NHWC", "HWIO", "NHWC")


def cells(*, small: bool) -> list[Cell]:
    """Return the cells, the most important first; small ones are for a CPU."""
    rows = 64 if small else 16384
    width = 16 if small else 4096
    images = (2, 12, 12, 8) if small else (64, 112, 112, 64)
    half = (64, 8, 16, 8) if small else (16384, 64, 2048, 2048)
    return [
        _grouped(rows, 8, width, width),
        _grouped(*half),
        _grouped(*half, is_skewed=True),
        _grouped(*half[:1], half[1] * 2, half[2], half[3] // 2, is_skewed=True),
        _experts(rows, 8, width // 2, width // 2 * 3),
        *expert_cells.cells(small=small, skewed=_skewed, truth=_grouped_truth),
        _gated_mlp(rows // 2, width, 7 * width // 2),
        _block(rows, width // 4, width),
        _reduced("largest of a row", rows * 4, max(8, width // 32), width * 2),
        _reduced("sum of squares of a row", rows, width // 2, width * 2),
        _conv_bn_relu((2, 7, 7, 8) if small else (64, 56, 56, 128)),
        max_pool(images),
        average_pool(images),
        _softmax(rows, width),
    ]


# --- pooling and softmax --------------------------------------------------------------


def _of_images(function: Callable[..., Any]) -> Way | None:
    if torch is None:
        return None
    return Way(
        function=function,
        enter=channels_second,
        cotangents=channels_second,
        outputs=channels_last,
        gradients=channels_last,
    )


def _pool(
    operation: str,
    shape: tuple[int, ...],
    dtype: str,
    ours: Callable[..., Any],
    plain: Callable[..., Any],
    by_torch: Callable[..., Any],
) -> Cell:
    return Cell(
        operation=operation,
        size=_size(shape),
        operands=(Operand(shape, dtype=dtype),),
        rivals={XLA: Way(function=plain)},
        ours=lambda: ours,
        torch=_of_images(by_torch),
    )


def max_pool(shape: tuple[int, ...], dtype: str = "bfloat16") -> Cell:
    """Return pooling of windows that overlap."""
    padding = ((1, 1), (1, 1))

    def ours(x: jax.Array) -> jax.Array:
        return jax_cudnn.max_pool(x, (3, 3), (2, 2), padding)

    def plain(x: jax.Array) -> jax.Array:
        around = ((0, 0), *padding, (0, 0))
        window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, around)

    name = "max pool 3x3/2"
    return _pool(name, shape, dtype, ours, plain, lambda x: F.max_pool2d(x, 3, 2, 1))


def average_pool(shape: tuple[int, ...], dtype: str = "bfloat16") -> Cell:
    """Return pooling of windows side by side."""

    def ours(x: jax.Array) -> jax.Array:
        return jax_cudnn.avg_pool(x, (2, 2), (2, 2))

    def plain(x: jax.Array) -> jax.Array:
        window = (1, 2, 2, 1)
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / 4

    name = "average pool 2x2/2"
    return _pool(name, shape, dtype, ours, plain, lambda x: F.avg_pool2d(x, 2))


def _softmax(rows: int, columns: int) -> Cell:
    """Return softmax along rows, for which jax_cudnn recommends that of JAX."""
    return Cell(
        operation="softmax",
        size=_size((rows, columns)),
        operands=(Operand((rows, columns)),),
        rivals={XLA: Way(function=jax.nn.softmax)},
        ours=None,
        torch=None if torch is None else Way(function=lambda x: F.softmax(x, -1)),
        goals={what: {XLA: 1.0} for what in (FORWARD, BOTH)},
    )


# --- grouped products -----------------------------------------------------------------


def _uneven(rows: int, groups: int) -> np.ndarray:
    """Return sizes of groups that differ, and fill no tiles of 128 rows."""
    equal = rows // groups
    odd = 24 if equal > 128 else 1
    pattern = (equal // 2 + odd, equal + equal // 2 - odd, equal, equal)
    sizes = np.array([pattern[i % 4] for i in range(groups)], np.int32)
    assert sizes.sum() == rows
    return sizes


def _grouped_truth(lhs: Any, rhs: Any, sizes: Any) -> Any:
    """Compute the products group by group: XLA's code takes memory for all at once."""
    ends = jnp.cumsum(sizes)
    places = jnp.arange(lhs.shape[0])[:, None]

    @jax.checkpoint
    def add(total: Any, group: Any) -> Any:
        matrix, start, end = group
        is_in = (places >= start) & (places < end)
        return total + jnp.where(is_in, lhs, 0) @ matrix, None

    none = jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype)
    return jax.lax.scan(add, none, (rhs, ends - sizes, ends))[0]


def _skewed(rows: int, groups: int) -> np.ndarray:
    """Return sizes of groups that fall like 1, 1/2, 1/3, ..., in a random order."""
    shares = 1 / np.arange(1, groups + 1)
    sizes = np.floor(shares / shares.sum() * rows).astype(np.int32)
    sizes[0] += rows - sizes.sum()
    return np.random.default_rng(0).permutation(sizes)


def _grouped(
    rows: int, groups: int, contracted: int, columns: int, *, is_skewed: bool = False
) -> Cell:
    rivals = {XLA: Way(function=jax.lax.ragged_dot)}
    if tokamax_side.tokamax is not None:
        rivals["tokamax"] = Way(
            function=lambda *x: tokamax_side.tokamax.ragged_dot(
                *x, implementation="mosaic"
            )
        )

    def ends(tensors: Sequence[Any]) -> list[Any]:
        lhs, rhs, sizes = tensors
        return [lhs, rhs, sizes.cumsum(0).to(torch.int32)]

    def by_torch(lhs: Any, rhs: Any, ends: Any) -> Any:
        # Public since PyTorch 2.10.
        product = getattr(F, "grouped_mm", None) or torch._grouped_mm
        return product(lhs, rhs, offs=ends)

    return Cell(
        operation=f"ragged_dot, {groups} {'skewed ' if is_skewed else ''}groups",
        size=f"{_size((rows, contracted))}, {_size((contracted, columns))}",
        operands=(
            Operand((rows, contracted)),
            Operand((groups, contracted, columns), contracted**-0.5),
            _skewed(rows, groups) if is_skewed else _uneven(rows, groups),
        ),
        rivals=rivals,
        ours=lambda: lambda *x: jax_cudnn.ragged_dot(*x),
        torch=None if torch is None else Way(function=by_torch, enter=ends),
        truth=_grouped_truth,
        has_products=True,
    )


def _experts(rows: int, groups: int, width: int, hidden: int) -> Cell:
    """The experts of a mixture with SwiGLU: three products in groups, and a gate."""

    def experts(product: Any) -> Callable[..., Any]:
        def run(x: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
            h = jax.nn.silu(product(x, gate, sizes)) * product(x, up, sizes)
            return product(h, down, sizes)

        return run

    def truth(x: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
        return experts(_grouped_truth)(x, gate, up, down, sizes)

    rivals = {XLA: Way(function=experts(jax.lax.ragged_dot))}
    if tokamax_side.tokamax is not None:
        by_tokamax = tokamax_side.tokamax.ragged_dot
        rivals["tokamax"] = Way(
            function=experts(lambda *x: by_tokamax(*x, implementation="mosaic"))
        )

    def ends(tensors: Sequence[Any]) -> list[Any]:
        return [*tensors[:-1], tensors[-1].cumsum(0).to(torch.int32)]

    def by_torch(x: Any, gate: Any, up: Any, down: Any, ends: Any) -> Any:
        product = getattr(F, "grouped_mm", None) or torch._grouped_mm
        h = F.silu(product(x, gate, offs=ends)) * product(x, up, offs=ends)
        return product(h, down, offs=ends)

    return Cell(
        operation=f"SwiGLU experts, {groups} groups",
        size=f"{_size((rows, width))}, hidden {hidden}",
        operands=(
            Operand((rows, width)),
            Operand((groups, width, hidden), width**-0.5),
            Operand((groups, width, hidden), width**-0.5),
            Operand((groups, hidden, width), hidden**-0.5),
            _uneven(rows, groups),
        ),
        rivals=rivals,
        ours=lambda: experts(jax_cudnn.ragged_dot),
        torch=None if torch is None else Way(function=by_torch, enter=ends),
        truth=truth,
        has_products=True,
    )


# --- functions for `fuse` -------------------------------------------------------------


def _fused(
    operation: str,
    size: str,
    operands: tuple[Operand, ...],
    function: Callable[..., Any],
    by_torch: Way | None,
    **options: Any,
) -> Cell:
    rivals = {XLA: Way(function=function), **options.pop("rivals", {})}
    return Cell(
        operation=operation,
        size=size,
        operands=operands,
        rivals=rivals,
        ours=lambda: jax_cudnn.fuse(function),
        torch=by_torch,
        has_products=True,
        **options,
    )


def _conv_bn_relu(shape: tuple[int, ...]) -> Cell:
    """Return a layer of inference, with as many channels after as before."""
    c = shape[-1]

    def layer(x: Any, w: Any, gamma: Any, beta: Any, mean: Any, variance: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=_NHWC)
        scale = gamma * jax.lax.rsqrt(variance + 1e-5)
        return jax.nn.relu((y - mean) * scale + beta)

    def by_torch(x: Any, w: Any, *norm: Any) -> Any:
        gamma, beta, mean, variance = norm
        y = F.conv2d(x, w, padding=1)
        return F.relu(F.batch_norm(y, mean, variance, gamma, beta, eps=1e-5))

    def enter(tensors: Sequence[Any]) -> list[Any]:
        x, w, *norm = tensors
        filters = w.permute(3, 2, 0, 1)
        filters = filters.contiguous(memory_format=torch.channels_last)
        return [*channels_second([x]), filters, *norm]

    factor = Operand((c,))
    way = Way(function=by_torch, enter=enter, outputs=channels_last)
    return _fused(
        "fuse: conv 3x3, batch norm, relu",
        f"{_size(shape)} -> {c}",
        (
            Operand(shape),
            Operand((3, 3, c, c), (9 * c) ** -0.5),
            *(factor, factor, factor),
            Operand((c,), 0.1, 1.0),
        ),
        layer,
        None if torch is None else way,
        has_gradients=False,
    )


def _block(rows: int, width: int, columns: int) -> Cell:
    def block(x: Any, w: Any, b: Any, residual: Any, scale: Any, shift: Any) -> Any:
        h = jax.nn.gelu(x @ w + b, approximate=False) + residual
        wide = h.astype(jnp.float32)
        mean = jnp.mean(wide, -1, keepdims=True)
        variance = jnp.mean(jnp.square(wide - mean), -1, keepdims=True)
        normal = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
        return (normal * scale + shift).astype(h.dtype)

    def by_torch(x: Any, w: Any, b: Any, residual: Any, scale: Any, shift: Any) -> Any:
        h = F.gelu(torch.addmm(b, x, w)) + residual
        return F.layer_norm(h, h.shape[-1:], scale, shift, 1e-5)

    factor = Operand((columns,))
    return _fused(
        "fuse: matmul, bias, gelu, residual, layer norm",
        f"{_size((rows, width))}, {_size((width, columns))}",
        (
            Operand((rows, width)),
            Operand((width, columns), width**-0.5),
            factor,
            Operand((rows, columns)),
            *(factor, factor),
        ),
        block,
        None if torch is None else Way(function=by_torch),
    )


def _reduced(name: str, rows: int, width: int, columns: int) -> Cell:
    """Return what becomes of a product that nobody needs as a whole."""
    is_largest = name.startswith("largest")

    def reduced(x: Any, y: Any) -> Any:
        product = x @ y
        if is_largest:
            return jnp.max(product, 1)
        return jnp.sum(jnp.square(product.astype(jnp.float32)), 1)

    def by_torch(x: Any, y: Any) -> Any:
        product = x @ y
        if is_largest:
            return product.amax(1)
        return product.float().square().sum(1)

    return _fused(
        f"fuse: product, {name}",
        f"{_size((rows, width))}, {_size((width, columns))}",
        (Operand((rows, width)), Operand((width, columns), width**-0.5)),
        reduced,
        None if torch is None else Way(function=by_torch),
        # Of elements that are equal in bf16, any may be the largest.
        has_gradients=not is_largest,
    )


def _gated_mlp(rows: int, width: int, hidden: int) -> Cell:
    def gated_mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def by_torch(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return (F.silu(x @ gate) * (x @ up)) @ down

    rivals: dict[str, Way] = {}
    if tokamax_side.tokamax is not None:
        rivals = {f"tokamax {name}": _of_glu(name) for name in ("mosaic", "triton")}
    return _fused(
        "fuse: gated MLP",
        f"{_size((rows, width))}, {_size((width, hidden))}",
        (
            Operand((rows, width)),
            Operand((width, hidden), width**-0.5),
            Operand((width, hidden), width**-0.5),
            Operand((hidden, width), hidden**-0.5),
        ),
        gated_mlp,
        None if torch is None else Way(function=by_torch),
        rivals=rivals,
    )


def _of_glu(implementation: str) -> Way:
    """Return tokamax's gated linear unit, whose two matrices are one array."""

    def run(x: Any, both: Any, down: Any) -> Any:
        unit = tokamax_side.tokamax.gated_linear_unit(
            x, both, activation=jax.nn.silu, implementation=implementation
        )
        return unit @ down

    def enter(operands: Sequence[Any]) -> list[Any]:
        x, gate, up, down = operands
        return [x, jnp.stack([gate, up], 1), down]

    def gradients(found: Sequence[Any]) -> list[Any]:
        if not found:
            return []
        x, both, down = found
        return [x, both[:, 0], both[:, 1], down]

    return Way(function=run, enter=enter, gradients=gradients)


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
