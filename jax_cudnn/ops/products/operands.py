# SPDX-License-Identifier: Apache-2.0
"""Products of two matrices: their dtypes, and their graph with what follows it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.config import Options
from jax_cudnn.graph import MatmulAttributes
from jax_cudnn.graph.rules import broadcast, broadcasts_to
from jax_cudnn.ops.common.arguments import (
    FLOATS,
    as_array,
    check_dtype,
    describe,
    each_described,
    graph_dtype,
    in_front,
    sums_dtype,
    why_partial,
    why_symbolic,
    why_without_graph,
)
from jax_cudnn.ops.common.fusion import Fusion, Operand, StartedGraph, in_groups
from jax_cudnn.ops.common.plain import Epilogue
from jax_cudnn.reference.dtypes import dtype_name

_EIGHT_BIT = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
# Batch, rows and columns, as arrays of rank 3 mostly have them.
PLAIN = (0, 1, 2)

# --- dtypes ---------------------------------------------------------------------------


class Dtypes(NamedTuple):
    """The dtypes of a product.

    Both operands are converted to ``operands``; None is for 8 bits, which stay as they
    are. ``result`` is what comes out by default. ``has_graph`` is whether two operands
    of 8 bits go together.
    """

    operands: np.dtype | None
    result: np.dtype
    has_graph: bool = True

    def why_plain(self, result: np.dtype, **given: jax.Array) -> str:
        """Return why no graph has the product, in sentences; "" if one has."""
        if reason := why_symbolic(**given) or why_partial(**given):
            return reason
        if not self.has_graph:
            return (
                f"{each_described(**given)}. Two operands of 8 bits must both be i8, "
                "both u8, or both floats in a graph."
            )
        if self.operands is None:
            return why_without_graph(result, **given)
        if graph_dtype(result, dtype_name(self.operands)):
            return ""
        return why_without_graph(result, **given)


def common_dtypes(
    op: str, a: jax.Array, b: jax.Array, result: np.dtype | None = None
) -> Dtypes:
    """Return in which dtypes two operands are multiplied, as JAX promotes them.

    A ``result`` that is given is lax's, for which promotion is neither strict nor
    impossible.
    """
    dtypes = (a.dtype, b.dtype)
    narrow = [str(dtype) in _EIGHT_BIT for dtype in dtypes]
    floats = [dtype_name(dtype) in FLOATS for dtype in dtypes]
    if all(narrow):
        kinds = [str(dtype).partition("_")[0].rstrip("0123456789") for dtype in dtypes]
        if dtypes[0] == dtypes[1] or kinds == ["float", "float"]:
            return Dtypes(operands=None, result=result or dtypes[0])
    for is_narrow, is_float, dtype in zip(
        narrow, floats[::-1], dtypes[::-1], strict=True
    ):
        if is_narrow and is_float:
            # Also for f8, which JAX does not promote.
            return Dtypes(operands=dtype, result=result or dtype)
    dtype = _promoted(op, a, b) if result is None else _promoted_by_lax(a, b, result)
    return Dtypes(operands=dtype, result=result or dtype, has_graph=not all(narrow))


def _promoted_by_lax(a: jax.Array, b: jax.Array, result: np.dtype) -> np.dtype:
    try:
        with jax.numpy_dtype_promotion("standard"):
            return jnp.promote_types(a.dtype, b.dtype)
    except ValueError:  # f8 beside a complex operand
        return result


def _promoted(op: str, a: jax.Array, b: jax.Array) -> np.dtype:
    try:
        return jnp.result_type(a, b)
    except ValueError:  # JAX has an exception of its own, which is one.
        raise TypeError(
            f"{op}: a is {describe(a)} and b {describe(b)}. They must have one dtype, "
            "unless one of them has 8 bits or JAX promotes them "
            "(jax_numpy_dtype_promotion is 'strict'). Convert one of them."
        ) from None


# --- the graph ------------------------------------------------------------------------

# Sizes of the axes that make up batch, rows and columns of a matrix.
Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Product(NamedTuple):
    """A product of two matrices, with the sizes of the axes of its result.

    ``dropped`` are those of size 1 that the caller, whose operand is a vector, has not.
    """

    op: str
    a: Operand
    b: Operand
    sizes: Sizes
    scale_a: Operand | float | None = None
    scale_b: Operand | float | None = None
    dropped: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the caller's result."""
        full = tuple(size for group in self.sizes for size in group)
        return _without(full, self.dropped)


def run_product(
    product: Product,
    dtypes: Dtypes,
    epilogue: Epilogue,
    dtype: np.dtype,
    call: Options,
    out_sharding: object = None,
) -> jax.Array:
    """Return the product with what follows it, in a dtype that a graph can give."""
    fusion, value, rounded = begin_product(product, dtypes, dtype)
    sums = fusion.writer.accumulator

    def operand(name: str, given: jax.Array | float) -> str:
        return fusion.operand(name, _term(product, name, as_array(given, sums)))

    factor = epilogue.scale_out
    if isinstance(factor, int | float):
        factor = float(factor)
    elif factor is not None:
        factor = _term(product, "scale_out", factor)
    output = fusion.run(
        fusion.followed(value, epilogue, operand),
        epilogue.activation,
        shape=product.shape,
        factor=factor,
        gate=epilogue.gate,
        dtype=rounded,
        order=PLAIN,
        options=call,
        out_sharding=out_sharding,
    ).astype(dtype)
    return jnp.reshape(output, product.shape)


def begin_product(
    product: Product, dtypes: Dtypes, dtype: np.dtype, *, is_rounded: bool = False
) -> StartedGraph:
    """Begin the graph of a product with a result of that dtype.

    The sums are rounded to this dtype at once, or only where the graph's result is.
    """
    op, wide = product.op, dtypes.operands
    a, b = (_converted(each, wide) for each in (product.a, product.b))
    scales = ((product.scale_a, 2), (product.scale_b, 1))
    if wide is None and any(
        isinstance(scale, Operand) and scale.size(axis) != 1 for scale, axis in scales
    ):
        # What such a scale gives has no 8 bits.
        wide = np.dtype(np.float32)
    names = [dtype_name(each.array.dtype) for each in (a, b)]
    rounded = graph_dtype(dtype, *names)
    if wide is not None:
        names = [dtype_name(wide)]
    assert rounded is not None, "why_plain has looked"
    sums = sums_dtype(rounded, *names)
    fusion = Fusion(op, sums)
    writer = fusion.writer
    sides = {"a": fusion.operand("a", a), "b": fusion.operand("b", b)}
    factors: list[str | float] = []
    for role, axis, scale in (("a", 2, product.scale_a), ("b", 1, product.scale_b)):
        if isinstance(scale, int | float):
            factors.append(scale)
        elif scale is not None:
            name = fusion.operand(f"scale_{role}", scale)
            if scale.size(axis) == 1:
                # The same along the sum: multiplied once, after it.
                factors.append(name)
            else:
                sides[role] = fusion.scaled(sides[role], [name])
        if wide is not None:
            sides[role] = writer.cast(sides[role], dtype_name(wide))  # type: ignore[arg-type]
    first, second = (writer[name].dims for name in sides.values())
    value = writer.node(
        "matmul",
        sides,
        MatmulAttributes(),
        dims=(*broadcast(first[:1], second[:1]), first[1], second[2]),
        order=PLAIN,
        dtype=rounded if is_rounded else sums,
    )
    return StartedGraph(fusion, fusion.scaled(value, factors), rounded)


def _converted(matrix: Operand, dtype: np.dtype | None) -> Operand:
    """Return an operand in a dtype; 8 bits stay for the kernel to convert."""
    own = matrix.array.dtype
    # No np.dtype is looked for in a tuple with None, which NumPy takes for f64.
    if dtype is None or dtype == own or str(own) in _EIGHT_BIT:
        return matrix
    return matrix._replace(array=matrix.array.astype(dtype))


def _term(product: Product, name: str, array: jax.Array) -> Operand:
    """Return an operand of the epilogue, whose array broadcasts to the result."""
    op, sizes, dropped = product.op, product.sizes, product.dropped
    check_dtype(op, name, array)
    full = tuple(size for group in sizes for size in group)
    term = in_three(op, name, undropped(op, name, array, full, dropped), sizes)
    return term._replace(array=jnp.squeeze(term.array, dropped))


# --- operands with the axes of batch, rows and columns --------------------------------


def undropped(
    op: str,
    name: str,
    array: jax.Array,
    full: tuple[int, ...],
    dropped: tuple[int, ...] = (),
) -> jax.Array:
    """Return an array with the axes of a result, 1 where it broadcasts.

    It has to broadcast to the result without the axes that are dropped.
    """
    padded = padded_shape(op, name, array, _without(full, dropped))
    return jnp.expand_dims(jnp.reshape(array, padded), dropped)


def _without(full: tuple[int, ...], dropped: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes without the axes that are dropped, counted from the end."""
    return tuple(size for i, size in enumerate(full, -len(full)) if i not in dropped)


def in_three(
    op: str, name: str, array: jax.Array, sizes: Sizes, keep: tuple[int, ...] = ()
) -> Operand:
    """Return an array as a matrix, given the sizes of its batch, rows and columns.

    Each of the three is 1 where the array broadcasts along it. The groups in `keep`
    take the array's own sizes, and are broadcast if need be.
    """
    full = tuple(size for group in sizes for size in group)
    padded = padded_shape(op, name, array, full)
    return in_groups(jnp.reshape(array, padded), sizes, PLAIN, keep)


def padded_shape(
    op: str, name: str, array: jax.Array, full: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the array's shape with leading 1s, or raise ValueError."""
    padded = in_front(array.shape, len(full))
    if not broadcasts_to(padded, full):
        raise ValueError(
            f"{op}: {name} is {describe(array)}, which does not broadcast to "
            f"[{', '.join(map(str, full))}]. Each of its axes must be 1 or that size. "
            "Reshape it."
        )
    return padded
