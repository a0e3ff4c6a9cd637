# SPDX-License-Identifier: Apache-2.0
"""Defines the orders in which arrays store batch, tokens, heads and head size.

The letters of a layout are b batch, s tokens, h heads, d head size. A graph's tensors
have the logical axes (b, h, s, d) and an order in which these are stored.
"""

from typing import Literal, cast, get_args

import jax
import jax.numpy as jnp

# By the names that they have in the field: JAX and FlashAttention store bshd, PyTorch
# bhsd, Megatron sbhd.
Layout = Literal["bshd", "bhsd", "sbhd"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
# Of pages, whose tokens lie side by side or heads apart.
PageLayout = Literal["bshd", "bhsd"]
PAGE_LAYOUTS: tuple[PageLayout, ...] = get_args(PageLayout)
_LOGICAL = "bhsd"


def check_layout(op: str, layout: str, *among: Layout) -> Layout:
    """Return the layout, or raise ValueError for one that there is not.

    It may be any of them, or `among` these.
    """
    known = among or LAYOUTS
    if layout not in known:
        raise ValueError(
            f"{op}: layout={layout!r} is not one of "
            f"{', '.join(map(repr, known))}. Pass the order in which query, key and "
            "value store b batch, s tokens, h heads and d head size."
        )
    return cast("Layout", layout)


def order_of(layout: Layout) -> tuple[int, ...]:
    """Return the order in which (b, h, s, d) are stored."""
    return tuple(map(_LOGICAL.index, layout))


def sizes_in(layout: Layout, x: jax.Array) -> tuple[int, int, int, int]:
    """Return batch size, count of tokens, count of heads and head size of an array."""
    b, s, h, d = (x.shape[layout.index(letter)] for letter in "bshd")
    return b, s, h, d


def axes_in_words(layout: Layout, *, with_batch: bool = True) -> str:
    """Return what the axes of an array are, in words."""
    letters = layout if with_batch else layout.replace("b", "")
    return ", ".join(_WORDS[letter] for letter in letters)


_WORDS = {"b": "batch", "s": "length", "h": "heads", "d": "head size"}


def rows_to(layout: Layout, x: jax.Array) -> jax.Array:
    """Return numbers of rows, (b, s, h), with their axes as a layout has them."""
    axes = tuple("bsh".index(letter) for letter in layout if letter != "d")
    return x if axes == (0, 1, 2) else jnp.transpose(x, axes)
