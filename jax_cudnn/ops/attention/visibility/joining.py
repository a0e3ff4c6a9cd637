# SPDX-License-Identifier: Apache-2.0
"""Combines a mask with the other arguments that mask keys or change scores."""

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
    sorted_predicates,
)
from jax_cudnn.ops.attention.visibility.packing import Packed
from jax_cudnn.ops.attention.visibility.predicates import Overrun, Predicate


class Visibility(NamedTuple):
    """The arguments that mask keys or change scores, by their names."""

    bias: ArrayLike | None = None
    mask: Any = None
    is_causal: bool = False
    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    local_window_size: WindowSize = None
    packed: Packed | None = None
    is_bottom_right: bool = False
    # Those that no argument expresses.
    predicates: tuple[Predicate, ...] = ()
    overrun: Overrun | None = None


def joined(mask: Mask, beside: Visibility, s: int, t: int) -> Visibility:
    """Return the arguments that express a mask and other arguments together."""
    return Visibility(**sorted_arguments(_all(mask, beside), s, t))


def joined_predicates(mask: Mask, beside: Visibility, s: int, t: int) -> Visibility:
    """Return the same, with predicates that are no arrays kept as predicates."""
    given, predicates = sorted_predicates(_all(mask, beside), s, t)
    return Visibility(**given, predicates=tuple(predicates))


def _all(mask: Mask, beside: Visibility) -> Mask:
    left, right = bounds_of(beside.local_window_size, is_causal=beside.is_causal)
    parts: list[Mask] = [Causal()] if beside.is_causal else []
    parts += [] if left is right is None else [Window(left, right)]
    parts += [Additive(beside.bias)] if beside.bias is not None else []
    parts += [Where(beside.mask)] if beside.mask is not None else []
    parts += [Lengths(beside.query_seq_lengths, beside.key_value_seq_lengths)]
    return functools.reduce(operator.and_, parts, mask)
