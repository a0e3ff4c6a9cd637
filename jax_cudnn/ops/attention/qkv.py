# SPDX-License-Identifier: Apache-2.0
"""Locates queries, keys and values in an array that holds all three."""

from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Tensor
from jax_cudnn.ops.attention.layouts import Layout
from jax_cudnn.ops.common.arguments import check_dtype, describe, tensor

# With an axis of three, by the names of TransformerEngine; or with the heads of all
# three side by side.
QkvLayout = Literal["bs3hd", "bsh3d", "sb3hd", "sbh3d", "b3hsd", "bshd", "sbhd", "bhsd"]
QKV_LAYOUTS: tuple[QkvLayout, ...] = get_args(QkvLayout)
# The letters of qkv's logical axes: batch, parts, heads of a part, tokens, head size.
_LOGICAL = "bphsd"


class Qkv(NamedTuple):
    """An array of queries, keys and values with a batch axis, and how it holds them.

    Without a 3 in the layout, the heads are first ``query_heads`` of queries, then
    ``key_heads`` of keys and as many of values.
    """

    array: jax.Array
    layout: QkvLayout
    query_heads: int
    key_heads: int
    had_batch: bool

    @property
    def part_layout(self) -> Layout:
        """The layout of queries, keys and values on their own."""
        return cast("Layout", self.layout.replace("3", ""))

    def tensor(self) -> Tensor:
        """Return the array's tensor, which has an axis of parts and one of heads."""
        if "3" in self.layout:
            letters = self.layout.replace("3", "p")
            sizes = self.array.shape
        else:
            # Parts of one head each.
            letters = self.layout.replace("h", "ph")
            place = letters.index("h")
            sizes = (*self.array.shape[:place], 1, *self.array.shape[place:])
        order = tuple(map(_LOGICAL.index, letters))
        return tensor("qkv", self.array, order, sizes)

    def apart(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values as arrays of their own."""
        if "3" in self.layout:
            axis = self.layout.index("3")
            query, key, value = (
                jax.lax.index_in_dim(self.array, i, axis, keepdims=False)
                for i in range(3)
            )
            return query, key, value
        axis = self.layout.index("h")
        ends = (self.query_heads, self.query_heads + self.key_heads)
        query, key, value = jnp.split(self.array, ends, axis)
        return query, key, value

    def types(self) -> tuple[Any, Any, Any]:
        """Return shape and dtype of queries, keys and values on their own."""
        sizes = dict(zip(self.layout, self.array.shape, strict=True))

        def with_heads(heads: int) -> jax.ShapeDtypeStruct:
            own = {**sizes, "h": heads}
            shape = tuple(own[letter] for letter in self.part_layout)
            return jax.ShapeDtypeStruct(shape, self.array.dtype)

        of_keys = with_heads(self.key_heads)
        return with_heads(self.query_heads), of_keys, of_keys


def check_qkv(
    op: str, array: jax.Array, layout: str, key_value_heads: int | None
) -> Qkv:
    """Return the array with a batch axis, or raise for one that does not fit."""
    if layout not in QKV_LAYOUTS:
        raise ValueError(
            f"{op}: layout={layout!r} is not one of "
            f"{', '.join(map(repr, QKV_LAYOUTS))}. Pass the order of qkv's axes: b "
            "batch, s tokens, 3 for query, key and value, h heads, d head size."
        )
    found = cast("QkvLayout", layout)
    check_dtype(op, "qkv", array)
    has_batch = array.ndim == len(found)
    if not has_batch and array.ndim != len(found) - 1:
        raise ValueError(
            f"{op}: qkv is {describe(array)}, which has {array.ndim} axes. In the "
            f"layout {found!r} it has {len(found)}, or {len(found) - 1} without b. "
            "Reshape it, or pass the layout that it has."
        )
    own = found if has_batch else found.replace("b", "")
    heads = array.shape[own.index("h")]
    if "3" in found:
        if array.shape[own.index("3")] != 3:
            raise ValueError(
                f"{op}: qkv is {describe(array)}, whose axis {own.index('3')} is not "
                f"3, as the layout {found!r} says. Pass the layout that it has."
            )
        if key_value_heads not in (None, heads):
            raise ValueError(
                f"{op}: key_value_heads={key_value_heads}, but in the layout {found!r} "
                f"there are as many as query heads, {heads}. With fewer, put the heads "
                "of query, key and value side by side, in the layout "
                f"{found.replace('3', '')!r}."
            )
        counts = (heads, heads)
    else:
        count = _check_heads(op, array, found, key_value_heads, heads)
        counts = (heads - 2 * count, count)
    if not has_batch:
        array = jnp.expand_dims(array, found.index("b"))
    return Qkv(array, found, *counts, has_batch)


def _check_heads(
    op: str, array: jax.Array, layout: QkvLayout, count: int | None, heads: int
) -> int:
    if count is None:
        if heads % 3:
            raise ValueError(
                f"{op}: qkv is {describe(array)} in the layout {layout!r}, whose "
                f"{heads} heads are not three times as many. Pass key_value_heads, how "
                "many of them are heads of keys."
            )
        return heads // 3
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(
            f"{op}: key_value_heads is {type(count).__name__}. It must be an int known "
            "when the program is traced: how many heads of qkv are those of keys."
        )
    queries = heads - 2 * count
    if count < 1 or queries < 1 or queries % count:
        raise ValueError(
            f"{op}: qkv is {describe(array)} in the layout {layout!r}. Of its {heads} "
            f"heads, key_value_heads={count} are of keys and as many of values, which "
            f"leaves {queries} for queries. These must be a multiple of "
            "key_value_heads."
        )
    return count
