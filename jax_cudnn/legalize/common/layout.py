# SPDX-License-Identifier: Apache-2.0
"""Layouts for cuDNN's fused engines: channels last, in loads of 16 bytes."""

# Elements that the engines load at once.
ELEMENTS_PER_LOAD = {
    "f64": 2,
    "f32": 4,
    "bf16": 8,
    "f16": 8,
    **dict.fromkeys(("i8", "u8", "f8_e4m3fn", "f8_e5m2"), 16),
}


def channels_last(rank: int) -> tuple[int, ...]:
    """Return the order of axes in which the engines take images."""
    return (0, *range(2, rank), 1)


def rounded_up(size: int, unit: int) -> int:
    """Return the multiple of a unit that a size is padded to."""
    return -(-size // unit) * unit
