# SPDX-License-Identifier: Apache-2.0
"""Groups of dtypes, and how shapes broadcast."""

from jax_cudnn.graph.spec import DTypeName

F8 = ("f8_e4m3fn", "f8_e5m2")
EIGHT_BIT = ("i8", "u8", *F8)
FLOATS = (*F8, "bf16", "f16", "f32", "f64")


def accumulator(*dtypes: DTypeName) -> DTypeName:
    """Return the dtype in which sums over these dtypes are kept."""
    if "f64" in dtypes:
        return "f64"
    return "i32" if all(dtype in ("i8", "u8") for dtype in dtypes) else "f32"


def narrow_dtype(*dtypes: DTypeName) -> DTypeName | None:
    """Return the operands' 16-bit dtype if all others have 8 bits, otherwise None."""
    wide: set[DTypeName] = {x for x in dtypes if x not in EIGHT_BIT}
    return wide.pop() if wide in ({"bf16"}, {"f16"}) else None


def broadcasts_to(dims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether each of `dims` is 1 or the entry of `shape` at its place."""
    return len(dims) == len(shape) and all(
        dim in (1, full) for dim, full in zip(dims, shape, strict=True)
    )


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims that shapes of one rank broadcast to, if they do."""
    return tuple(
        next((size for size in sizes if size != 1), 1)
        for sizes in zip(*shapes, strict=True)
    )
