# SPDX-License-Identifier: Apache-2.0
"""Joins a mask with the other arguments that hide keys or change scores."""

import functools
import operator
from typing import Any, NamedTuple

from jax.typing import ArrayLike

from jax_cudnn.ops.attention.visibility.bands import WindowSize, bounds_of
from jax_cudnn.ops.attention.visibility.masks import (
    Additive,
    Causal,
    Lengths,
    Mask,
    Where,
    Window,
    sorted_arguments,
    sorted_sentences,
)
from jax_cudnn.ops.attention.visibility.packing import Packed
from jax_cudnn.ops.attention.visibility.sentences import Overrun, Sentence


class Hiding(NamedTuple):
    """The arguments that hide keys or move scores, by their names."""

    bias: ArrayLike | None = None
    mask: Any = None
    is_causal: bool = False
    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    local_window_size: WindowSize = None
    packed: Packed | None = None
    is_bottom_right: bool = False
    # What no argument stands for.
    sentences: tuple[Sentence, ...] = ()
    overrun: Overrun | None = None


def joined(mask: Mask, beside: Hiding, s: int, t: int) -> Hiding:
    """Return the arguments that a mask and others beside it stand for."""
    return Hiding(**sorted_arguments(_all(mask, beside), s, t))


def joined_sentences(mask: Mask, beside: Hiding, s: int, t: int) -> Hiding:
    """Return the same, with no array for sentences that are none."""
    given, sentences = sorted_sentences(_all(mask, beside), s, t)
    return Hiding(**given, sentences=tuple(sentences))


def _all(mask: Mask, beside: Hiding) -> Mask:
    left, right = bounds_of(beside.local_window_size, is_causal=beside.is_causal)
    parts: list[Mask] = [Causal()] if beside.is_causal else []
    parts += [] if left is right is None else [Window(left, right)]
    parts += [Additive(beside.bias)] if beside.bias is not None else []
    parts += [Where(beside.mask)] if beside.mask is not None else []
    parts += [Lengths(beside.query_seq_lengths, beside.key_value_seq_lengths)]
    return functools.reduce(operator.and_, parts, mask)
