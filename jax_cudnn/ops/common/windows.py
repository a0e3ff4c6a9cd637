# SPDX-License-Identifier: Apache-2.0
"""Checks a pooling's arguments and reads them as windows over an array's axes."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jax_cudnn.graph.windows import window_count
from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.reference.windows import cut

_PADDINGS = ("SAME", "SAME_LOWER", "VALID")
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """The windows over an array's spatial axes, and which axes these are.

    ``letters`` name the axes, N for all ``batch_axes`` batch axes. What belongs to
    windows has an entry for each spatial axis, in the order of the array's.
    """

    letters: str
    batch_axes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pairs

    @property
    def axes(self) -> list[int]:
        """The places of the spatial axes in the array."""
        written_out = self.letters.replace("N", "N" * self.batch_axes)
        return [i for i, letter in enumerate(written_out) if letter not in "NC"]

    @property
    def order(self) -> tuple[int, ...]:
        """The logical axis, of (n, c, *y), at each place of the array."""
        spatial = [letter for letter in self.letters if letter not in "NC"]
        return tuple(map(["N", "C", *spatial].index, self.letters))

    def merged_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape with one axis in place of all batch axes."""
        first = self.letters.index("N")
        last = first + self.batch_axes
        return (*shape[:first], math.prod(shape[first:last]), *shape[last:])

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an array of that shape when it is pooled."""
        sizes = list(shape)
        for i, axis in enumerate(self.axes):
            sizes[axis] = window_count(
                shape[axis],
                self.shape[i],
                stride=self.strides[i],
                padding=self.padding[i],
                size_dilation=1,
                window_dilation=1,
            )
        return tuple(sizes)

    def reduce(self, operands: Any, initial: Any, combine: Callable[..., Any]) -> Any:
        """Return `jax.lax.reduce_window` of one array or of several."""
        return self.apply(
            operands,
            lambda operands, *window: jax.lax.reduce_window(
                operands, initial, combine, *window
            ),
        )

    def apply(self, operands: Any, function: Callable[..., Any]) -> Any:
        """Return a function of one array or of several and of windows of all axes.

        These are given by shape, strides and padding, which is not negative.
        """
        rank = jax.tree.leaves(operands)[0].ndim
        shape, strides, padding = [1] * rank, [1] * rank, [(0, 0)] * rank
        for i, axis in enumerate(self.axes):
            shape[axis] = self.shape[i]
            strides[axis] = self.strides[i]
            padding[axis] = self.padding[i]
        operands = jax.tree.map(lambda x: cut(x, padding)[0], operands)
        left = tuple((max(low, 0), max(high, 0)) for low, high in padding)
        return function(operands, tuple(shape), tuple(strides), left)

    def spatial_last(self, x: jax.Array) -> jax.Array:
        """Return an array with its spatial axes moved to the end."""
        return jnp.moveaxis(x, self.axes, range(-len(self.axes), 0))

    def spatial_back(self, x: jax.Array) -> jax.Array:
        """Undo `spatial_last`."""
        return jnp.moveaxis(x, range(-len(self.axes), 0), self.axes)


def windows_of(
    op: str,
    x: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: str | Sequence[tuple[int, int]],
    dimension_numbers: str | None,
) -> Windows:
    """Return the windows over an array, or raise for what does not fit it."""
    shape = _sizes(op, "window_shape", window_shape)
    count = len(shape)
    steps = (1,) * count if strides is None else _sizes(op, "strides", strides)
    if len(steps) != count:
        raise ValueError(
            f"{op}: strides={strides!r} has {len(steps)} entries, but "
            f"window_shape={window_shape!r} has {count}. Both must have one for each "
            "spatial axis."
        )
    letters = _letters(op, dimension_numbers, count)
    batch_axes = x.ndim - count - 1
    if batch_axes < 0:
        raise ValueError(
            f"{op}: inputs is {describe(x)}, of rank {x.ndim}, and window_shape="
            f"{window_shape!r} has {count} entries. Beside these axes inputs must have "
            "one of channels. Add an axis, or pass a shorter window."
        )
    windows = Windows(
        letters=letters,
        batch_axes=batch_axes,
        shape=shape,
        strides=steps,
        padding=((0, 0),) * count,
    )
    sizes = [x.shape[axis] for axis in windows.axes]
    pads = _padding(op, padding, sizes, shape, steps)
    return Windows(
        letters=letters, batch_axes=batch_axes, shape=shape, strides=steps, padding=pads
    )


def _sizes(op: str, name: str, value: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, value))
    except TypeError:
        sizes = (0,)
    if min(sizes, default=1) < 1:
        raise ValueError(
            f"{op}: {name}={value!r} is not a sequence of ints above 0, one for each "
            f"spatial axis. Pass for example {meant_sizes(value, 2, default=2)}."
        )
    return sizes


def meant_sizes(value: Any, count: int, *, default: int) -> tuple[int, ...]:
    """Return what may be meant by sizes that are refused: an int is one for each axis.

    So it is in other libraries.
    """
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return ((value if is_size else default),) * count


def refuse_pads(op: str, padding: Any, count: int) -> NoReturn:
    """Raise ValueError for a padding that is no (low, high) pair for each axis.

    An int for all axes, or one for each, is what other libraries take.
    """
    given = (padding,) * count if isinstance(padding, int) else padding
    is_each = isinstance(given, tuple | list) and len(given) == count
    if is_each and all(isinstance(size, int) for size in given):
        pairs = tuple((int(size), int(size)) for size in given)
    else:
        pairs = ((1, 1),) * count
    raise ValueError(
        f"{op}: padding={padding!r} is not a (low, high) pair of ints for each of the "
        f"{count} spatial axes. Pass for example {pairs}."
    )


def _letters(op: str, dimension_numbers: str | None, count: int) -> str:
    if dimension_numbers is None:
        # Any letters will do for the spatial axes.
        spatial = [chr(i) for i in range(ord("a"), ord("a") + count)]
        return "".join(("N", *spatial, "C"))
    letters = dimension_numbers
    is_text = isinstance(letters, str)
    if not is_text or not len(set(letters)) == len(letters) == count + 2:
        is_valid = False
    else:
        is_valid = {"N", "C"} <= set(letters)
    if not is_valid:
        space = "DHW"[-count:] if 1 <= count <= 3 else "..."
        raise ValueError(
            f"{op}: dimension_numbers={dimension_numbers!r} does not name batch, "
            f"channels and {count} spatial axes by a letter each. Pass for example "
            f"'N{space}C' or 'NC{space}'."
        )
    return letters


def _padding(
    op: str,
    padding: str | Sequence[tuple[int, int]],
    sizes: Sequence[int],
    shape: Sequence[int],
    strides: Sequence[int],
) -> Pairs:
    if isinstance(padding, str):
        if padding.upper() not in _PADDINGS:
            raise ValueError(
                f"{op}: padding={padding!r} is not one of "
                f"{', '.join(map(repr, _PADDINGS))}. Pass one of them, or a (low, "
                "high) pair for each spatial axis."
            )
        pairs = jax.lax.padtype_to_pads(sizes, shape, strides, padding.upper())
        return tuple((low, high) for low, high in pairs)
    try:
        pairs = [(operator.index(low), operator.index(high)) for low, high in padding]
    except (TypeError, ValueError):
        pairs = None
    if pairs is None or len(pairs) != len(shape):
        refuse_pads(op, padding, len(shape))
    for (low, high), size in zip(pairs, sizes, strict=True):
        if isinstance(size, int) and min(low, 0) + min(high, 0) + size < 0:
            raise ValueError(
                f"{op}: padding={padding!r} cuts more than the {size} elements of a "
                "spatial axis. Pass less negative numbers."
            )
    return tuple(pairs)
