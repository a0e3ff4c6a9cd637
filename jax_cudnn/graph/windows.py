# SPDX-License-Identifier: Apache-2.0
"""Counts the windows that fit along an axis: the size of a convolution's output."""


def dilated(size: int, dilation: int) -> int:
    """Return the size of an axis with zeros put between its elements."""
    return (size - 1) * dilation + 1 if size else 0


def window_count(
    size: int,
    window: int,
    *,
    stride: int,
    padding: tuple[int, int],
    size_dilation: int,
    window_dilation: int,
) -> int:
    """Return how many windows an axis holds; padding may be negative and then cuts."""
    room = dilated(size, size_dilation) + sum(padding)
    room -= dilated(window, window_dilation)
    return room // stride + 1 if room >= 0 else 0
