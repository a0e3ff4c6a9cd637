# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of attention over several devices, and sorts them.

Both functions of this package take the same arguments: of one device's tokens, or of
whole arrays. What differs is a `Layout`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.ops.attention.attend import Operands
from jax_cudnn.ops.attention.dropout import with_dropout
from jax_cudnn.ops.attention.operands import canonicalize
from jax_cudnn.ops.attention.options import AttentionCall, TokenCounts
from jax_cudnn.ops.attention.reads import Scores
from jax_cudnn.ops.attention.score_mod import (
    Positions,
    ScoreMod,
    check_score_mod,
    with_score_mod,
)
from jax_cudnn.ops.attention.sinks import check_sinks
from jax_cudnn.ops.attention.visibility.joining import Visibility, joined_predicates
from jax_cudnn.ops.attention.visibility.masks import Intersection, Mask, Segments
from jax_cudnn.ops.attention.visibility.packing import Packed, longest, packing
from jax_cudnn.ops.attention.visibility.predicates import InSequence, Predicate
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_flag,
    describe,
    why_symbolic,
)
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.meshes import AxisName
from jax_cudnn.ops.common.tracing import UntraceableError
from jax_cudnn.parallel.order import check_order
from jax_cudnn.parallel.problem import Method, Problem, named
from jax_cudnn.parallel.schedule import Order


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a call's arrays over devices, and how these work together.

    The ``count`` devices of ``axis_name`` share a sequence in this ``order``, of which
    an array has one ``shards``th part. ``whole`` makes an array of the whole sequence,
    in its order, of numbers of the tokens (b, tokens). ``positions`` are those of
    queries and keys in bias and mask, given how many a device has.
    """

    axis_name: AxisName
    method: Method
    order: Order
    count: int
    shards: int
    whole: Callable[[jax.Array], jax.Array]
    positions: Callable[[int, int], Positions]


class Checked(NamedTuple):
    """A call's arguments, checked: arrays by name, the rest, and whether of a batch."""

    arrays: dict[str, jax.Array]
    problem: Problem
    has_batch: bool


def check_arguments(
    op: str,
    tokens: Mapping[str, ArrayLike],
    given: AttentionCall,
    layout: Layout,
    *,
    return_residual: bool,
) -> Checked:
    """Return the arguments of one of the functions with these arguments, checked.

    ``tokens`` are query, key and value by these names. All arrays have a batch axis
    then.
    """
    check_order(op, layout.order)
    if layout.order == "striped" and layout.method == "all_gather":
        raise ValueError(
            f"{op}: order='striped' with method='all_gather'. The queries of a device "
            "are no neighbours then, and no kernel has causality between them and the "
            "keys of the whole sequence. Use method='ring' or 'all_to_all', or "
            "order='zigzag'."
        )
    call = given.options(op)
    with on_behalf_of(op, "sdpa"):
        visibility = _visibility(tokens, given, layout)
        operands, has_batch = canonicalize(
            *(tokens["query"], tokens["key"], tokens["value"]),
            *(visibility.bias, visibility.mask),
            *(visibility.query_seq_lengths, visibility.key_value_seq_lengths),
            shards=layout.shards,
        )
        _, s, h, d = operands.query.shape
        counts = TokenCounts(s * layout.shards, operands.key_count * layout.shards)
        checked = given.attributes(visibility, counts, d, operands.query.dtype)
        attributes = SdpaAttributes(**checked.common())
        with_lse = check_flag("sdpa", "return_residual", return_residual)
        if reason := why_symbolic(**operands.given):
            raise ValueError(f"sdpa: {reason} Make the program for one shape.")
        _check_halves(operands, layout)
        if visibility.packed is not None:
            operands, visibility, attributes = _unpacked(
                visibility.packed, operands, visibility, attributes, layout
            )
        operands, attributes = with_dropout(
            "sdpa", operands, attributes, given.dropout_rate, given.dropout_key
        )
        operands, attributes = _with_score_mod(
            given.score_mod, operands, attributes, layout, visibility.predicates
        )
        sinks = check_sinks("sdpa", given.sinks, h)
    arrays = operands.given
    if sinks is not None:
        arrays["sinks"] = sinks
    overrun = () if visibility.overrun is None else (visibility.overrun,)
    structure = None
    if said := (*visibility.predicates, *overrun):
        leaves, structure = jax.tree.flatten(said)
        arrays |= named(leaves)
    problem = Problem(
        axis_name=layout.axis_name,
        count=layout.count,
        order=layout.order,
        method=layout.method,
        call=call,
        attributes=attributes,
        with_lse=with_lse,
        predicates=structure,
    )
    return Checked(arrays=arrays, problem=problem, has_batch=has_batch)


def _visibility(
    tokens: Mapping[str, ArrayLike], given: AttentionCall, layout: Layout
) -> Visibility:
    """Return the arguments that hide keys, those that a mask stands for among them."""
    visibility = given.visibility("sdpa")
    if not isinstance(given.mask, Mask):
        return visibility
    arrays = [as_operand("sdpa", name, tokens[name]) for name in ("query", "key")]
    if not all(x.ndim in (3, 4) for x in arrays):
        return visibility._replace(mask=None)  # They are refused next.
    own = [x.shape[-3] for x in arrays]
    mask = _with_whole_segments(given.mask, own, layout)
    sizes = (size * layout.shards for size in own)
    return joined_predicates(mask, visibility._replace(mask=None), *sizes)


def _with_whole_segments(mask: Mask, own: list[int], layout: Layout) -> Mask:
    """Return a mask whose segments are those of the whole sequence, in its order."""
    if isinstance(mask, Intersection):
        parts = (_with_whole_segments(part, own, layout) for part in mask.parts)
        return Intersection(tuple(parts))
    if not isinstance(mask, Segments):
        return mask
    found: dict[str, jax.Array | None] = {"query": None, "key": None}
    for name, size in zip(found, own, strict=True):
        numbers = getattr(mask, name)
        if numbers is None:
            continue
        array = as_operand("sdpa", f"Segments.{name}", numbers)
        if array.ndim not in (1, 2) or array.shape[-1] != size:
            whose = "of this device " if layout.shards > 1 else ""
            raise ValueError(
                f"sdpa: Segments.{name} is {describe(array)}. It must have one number "
                f"per {name} {whose}in the order of the tokens, shape [{size}] or "
                f"[batch, {size}]."
            )
        found[name] = layout.whole(array if array.ndim == 2 else array[None])
    assert found["query"] is not None
    return Segments(found["query"], found["key"])


def _check_halves(operands: Operands, layout: Layout) -> None:
    if layout.order != "zigzag":
        return
    for name, x in (("query", operands.query), ("key", operands.key)):
        own = x.shape[1] * layout.shards // layout.count
        if own % 2:
            raise ValueError(
                f"sdpa: each device holds {own} tokens of {name}. In zigzag order it "
                "holds two chunks of equal length. Pad the sequence to a multiple of "
                f"2 * {layout.count} tokens, and pass its length."
            )


def _unpacked(
    packed: Packed,
    operands: Operands,
    visibility: Visibility,
    attributes: SdpaAttributes,
    layout: Layout,
) -> tuple[Operands, Visibility, SdpaAttributes]:
    """Return these with the sequences of rows, as lengths with starts or a predicate.

    Where queries and keys have the same sequences, or no position matters, devices can
    cut them to their own tokens. Elsewhere, places count from another token for each
    sequence, on each device. With "all_to_all", devices have whole sequences.
    """
    b = operands.query.shape[0]
    s, t = (x.shape[1] * layout.shards for x in (operands.query, operands.key))
    rows = (operands.query_lengths, operands.key_lengths)
    found = packing(packed, (b, s, t), rows)
    most = longest(packed, s, t)
    for kind, size in zip(("query", "key"), most, strict=False):
        name = f"{kind}_lengths"
        found[name] = jnp.minimum(found[name], jnp.asarray(size, jnp.int32))
    has_band = attributes.is_causal or bool(attributes.window)
    is_movable = packed.has_same_sequences and not visibility.is_bottom_right
    if is_movable or not has_band or layout.method == "all_to_all":
        is_bottom_right = has_band and visibility.is_bottom_right
        attributes = dataclasses.replace(
            attributes, longest=most, is_bottom_right=is_bottom_right
        )
        return operands._replace(**found), visibility, attributes
    left, right = attributes.window or (None, None)
    if attributes.is_causal:
        right = 0 if right is None else min(right, 0)
    bounds = [None if x is None else max(-s - t, min(x, s + t)) for x in (left, right)]
    arrays = {role: x[:, :, 0, 0] for role, x in found.items()}
    predicate = InSequence(
        **arrays,
        left=bounds[0],
        right=bounds[1],
        is_from_end=visibility.is_bottom_right,
    )
    operands = operands._replace(query_lengths=None, key_lengths=None)
    visibility = visibility._replace(predicates=(*visibility.predicates, predicate))
    attributes = dataclasses.replace(attributes, is_causal=False, window=())
    return operands, visibility, attributes


def _with_score_mod(
    function: ScoreMod | None,
    operands: Operands,
    attributes: SdpaAttributes,
    layout: Layout,
    predicates: Sequence[Predicate],
) -> tuple[Operands, SdpaAttributes]:
    """Return operands and attributes with what a function of the scores is made of.

    Its arrays are for all keys, with the rows of the queries at hand.
    """
    if function is None:
        return operands, attributes
    wide = jnp.float64 if operands.query.dtype == jnp.float64 else jnp.float32
    b, s, h, _ = operands.query_sizes
    scores = Scores(
        sizes=(b, h, s * layout.shards, operands.key_count * layout.shards),
        is_causal=attributes.is_causal,
        window=attributes.window,
        is_hidden=operands.may_hide_keys or bool(predicates),
    )
    closed = check_score_mod(function, wide, scores)
    own = (
        x.shape[1] * layout.shards // layout.count
        for x in (operands.query, operands.key)
    )
    try:
        modified = with_score_mod(closed, operands, layout.positions(*own))
    except UntraceableError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise UnsupportedError(
            f"sdpa: score_mod {name} cannot be part of a kernel: {error}. Over several "
            "devices it has to be. Write it with other operations, or use "
            "jax_cudnn.sdpa on one device."
        ) from error
    return modified.operands, dataclasses.replace(attributes, score_mod=modified.steps)
