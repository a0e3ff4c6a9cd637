# SPDX-License-Identifier: Apache-2.0
"""Windows: how many keys before and after its own position a query sees.

A window is checked here for all functions that take one. One that no query sees a key
in is refused: it would give zeros, and gradients of 0, without a word.
"""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_cudnn.reference.attention.sequences import FARTHEST

# As the public functions take it: (left, right), or one int for both.
WindowSize = int | tuple[int | None, int | None] | None
# (left, right), with None for a side without a bound.
Bounds = tuple[int | None, int | None]

NO_BOUND = (
    "Pass None for a side without a bound, as in (None, 3) or (3, None); other "
    "libraries write -1 for it."
)


def check_window(
    window: WindowSize, s: int, t: int, *, is_causal: bool
) -> tuple[int, ...]:
    """Return the window of a call as graphs have it: (left, right), or () for none.

    No query has more than `s` keys before its own position, or `t` after it. Where
    these are symbolic, windows are cut to FARTHEST anyway.
    """
    return closed(bounds_of(window, is_causal=is_causal), s, t)


def closed(bounds: Bounds, s: int, t: int) -> tuple[int, ...]:
    """Return bounds with a number for a side that has none; () if both sides do."""
    if bounds == (None, None):
        return ()
    left, right = (
        (size if isinstance(size, int) else FARTHEST) if bound is None else bound
        for bound, size in zip(bounds, (s, t), strict=True)
    )
    return (left, right)


def bounds_of(window: WindowSize, *, is_causal: bool) -> Bounds:
    """Return the bounds of a window argument.

    Raises:
      TypeError: it is no window.
      ValueError: no query sees a key in it, or it does not fit in 63 bits.
    """
    given = window if isinstance(window, Sequence) else (window, window)
    try:
        if len(given) != 2:
            raise TypeError
        left, right = (as_bound(size) for size in given)
    except TypeError:  # A traced value is one of its causes.
        raise TypeError(
            f"sdpa: local_window_size={window!r} is neither an int nor two. Pass "
            "(left, right), ints known when the program is traced, or None for no "
            "bound: how many keys before and after its own position a query sees."
        ) from None
    if not all(-(2**62) <= size < 2**62 for size in (left, right) if size is not None):
        raise ValueError(
            f"sdpa: local_window_size={window!r} does not fit in 63 bits. Pass at most "
            "the length of the sequences."
        )
    if is_empty(left, min(right or 0, 0) if is_causal else right):
        beside = " beside is_causal" if is_causal else ""
        raise ValueError(
            f"sdpa: local_window_size={window!r}{beside} shows no key to any query. A "
            "query at position i sees the keys i - left to i + right"
            f"{', and none after i' if is_causal else ''}. {NO_BOUND}"
        )
    return left, right


def as_bound(size: Any) -> int | None:
    """Return one bound, or raise TypeError for what is neither an int nor None."""
    if size is None:
        return None
    if isinstance(size, bool | np.bool_):
        raise TypeError
    return operator.index(size)


def is_empty(left: Any, right: Any) -> bool:
    """Whether no query sees a key between these bounds, whatever its position.

    Bounds that depend on symbolic lengths are not known to be empty.
    """
    if left is None or right is None:
        return False
    width = left + right
    return isinstance(width, int) and width < 0


def least(bounds: Sequence[int | None]) -> int | None:
    """Return the least of several bounds; None for no bound."""
    return min((bound for bound in bounds if bound is not None), default=None)
