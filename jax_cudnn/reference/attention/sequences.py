# SPDX-License-Identifier: Apache-2.0
"""Assigns each token of a row to its sequence, where a row holds several.

Letters as in graph/attention/sdpa.py, with n sequences in each of b rows of s queries
and t keys.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.graph.attention.sdpa import SdpaAttributes
from jax_cudnn.graph.spec import Tensor

Operands = Mapping[str, jax.Array]

# Lengths and windows are cut to this, so that int32 holds the sum of both.
FARTHEST = 2**30


def farthest(size: Any) -> Any:
    """Return the length to cut to where positions count from a sequence's true end.

    It is beyond all that an axis of that size holds.
    """
    return max(size, FARTHEST) if isinstance(size, int) else FARTHEST


# What has an axis of queries, and of keys.
ALONG = {
    "query": (
        "query",
        "output",
        "stats",
        "grad_output",
        "grad_stats",
        "grad_max_logit",
    ),
    "key": ("key", "value"),
}


class Spans(NamedTuple):
    """The starts of the sequences of each row, and their numbers of tokens: (b, n)."""

    starts: jax.Array
    lengths: jax.Array


class PackedPositions(NamedTuple):
    """The sequence of each token, or -1, and its number in the sequence: (b, s)."""

    sequence: jax.Array
    number: jax.Array


def is_packed(
    attributes: SdpaAttributes, inputs: Mapping[str, jax.Array] | Mapping[str, Tensor]
) -> bool:
    """Whether rows hold several sequences, or positions count from a sequence's end."""
    if attributes.is_bottom_right or attributes.longest:
        return True
    names = {f"{kind}_{what}" for kind in ALONG for what in ("starts", "offsets")}
    if names.intersection(inputs):
        return True
    found = (inputs.get(f"{kind}_lengths") for kind in ALONG)
    shapes = (
        x.dims if isinstance(x, Tensor) else x.shape for x in found if x is not None
    )
    return any(shape[1] != 1 for shape in shapes)


def spans(attributes: SdpaAttributes, inputs: Operands) -> tuple[Spans, Spans]:
    """Return the sequences of queries and of keys, cut to their rows."""
    return _spans(attributes, inputs, "query"), _spans(attributes, inputs, "key")


def _spans(attributes: SdpaAttributes, inputs: Operands, kind: str) -> Spans:
    b, _, size, _ = inputs[kind].shape
    most = size
    if attributes.longest:
        most = min(size, attributes.longest[kind == "key"])
    lengths = jnp.full((b, 1), most, jnp.int32)
    if f"{kind}_lengths" in inputs:
        lengths = jnp.clip(inputs[f"{kind}_lengths"][:, :, 0, 0], 0, most)
    if f"{kind}_starts" in inputs:
        starts = inputs[f"{kind}_starts"][:, :, 0, 0]
    elif f"{kind}_offsets" in inputs:
        starts = _starts_of_offsets(inputs, kind, lengths.shape[1])
    else:
        starts = jnp.cumsum(lengths, axis=1, dtype=lengths.dtype) - lengths
    starts = jnp.clip(starts, 0, size)
    return Spans(starts=starts, lengths=jnp.minimum(lengths, size - starts))


def _starts_of_offsets(inputs: Operands, kind: str, n: int) -> jax.Array:
    b, heads, size, width = inputs[kind].shape
    offsets = inputs[f"{kind}_offsets"][: b * n, 0, 0, 0]
    tokens = jnp.reshape(offsets // max(heads * width, 1), (b, n))
    return tokens - size * jnp.arange(b, dtype=tokens.dtype)[:, None]


def places(tokens: jax.Array, spans: Spans) -> PackedPositions:
    """Return the place of tokens (s,); where sequences overlap, in the first one."""
    numbers = tokens[None, None] - spans.starts[:, :, None]
    is_inside = (numbers >= 0) & (numbers < spans.lengths[:, :, None])
    n = spans.lengths.shape[1]
    sequences = jnp.arange(n, dtype=jnp.int32)[None, :, None]
    found = jnp.min(jnp.where(is_inside, sequences, n), axis=1)
    # One term of the sum at most.
    is_own = sequences == found[:, None]
    number = jnp.sum(jnp.where(is_own, numbers, 0), axis=1, dtype=numbers.dtype)
    return PackedPositions(sequence=jnp.where(found < n, found, -1), number=number)


def is_inside(size: int, spans: Spans) -> jax.Array:
    """Return, as (b, 1, s, 1), which tokens of a row belong to a sequence."""
    found = places(jnp.arange(size, dtype=jnp.int32), spans)
    return (found.sequence >= 0)[:, None, :, None]


def visible(
    attributes: SdpaAttributes,
    inputs: Operands,
    shape: tuple[int, ...],
    first_row: int | jax.Array = 0,
) -> jax.Array:
    """Return, as (b, 1, s, t), which keys a query sees for its sequence and position.

    The queries are those from `first_row` on.
    """
    queries, keys = spans(attributes, inputs)
    rows = places(first_row + jnp.arange(shape[2], dtype=jnp.int32), queries)
    columns = places(jnp.arange(shape[3], dtype=jnp.int32), keys)
    number = rows.number
    if attributes.is_bottom_right:
        own = jnp.maximum(rows.sequence, 0)
        more = keys.lengths - queries.lengths
        number = number + jnp.take_along_axis(more, own, axis=1)
    row, column = number[:, :, None], columns.number[:, None]
    sequence = rows.sequence[:, :, None]
    is_seen = (sequence == columns.sequence[:, None]) & (sequence >= 0)
    if attributes.is_causal:
        is_seen &= column <= row
    if attributes.window:
        left, right = cut_window(attributes.window)
        is_seen &= (row <= column + left) & (row >= column - right)
    return is_seen[:, None]


def cut_window(window: tuple[int, ...]) -> tuple[int, int]:
    """Return a window cut to what int32 holds beside any row."""
    left, right = (max(-FARTHEST, min(size, FARTHEST)) for size in window)
    return left, right


def without_padding(attributes: SdpaAttributes, inputs: Operands) -> Operands:
    """Return the operands with 0 for all tokens of no sequence, whatever they hold."""
    inside = dict(zip(ALONG, spans(attributes, inputs), strict=True))
    cleaned = dict(inputs)
    for kind, names in ALONG.items():
        is_own = is_inside(inputs[kind].shape[2], inside[kind])
        for name in names:
            if name in inputs:
                x = inputs[name]
                cleaned[name] = jnp.where(is_own, x, jnp.zeros((), x.dtype))
    return cleaned
