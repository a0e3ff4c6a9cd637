# SPDX-License-Identifier: Apache-2.0
"""Pads attention's axes to sizes that cuDNN takes, and uses the padding for cotangents.

Each step edits attention by role; letters as in graph/attention/sdpa.py.
legalize/attention/passes.py says which steps a graph takes.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Tensor
from jax_cudnn.graph.attention.score_mod import OPERANDS
from jax_cudnn.legalize.attention.passes import (
    attention_pass,
    attributes_of,
    has,
    has_score_mod,
)
from jax_cudnn.legalize.common.editor import Env, GraphEditor
from jax_cudnn.legalize.common.layout import rounded_up
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored

# cuDNN takes head sizes in multiples of 8 for 16-bit types (cudnn-frontend 1.28,
# scaled_dot_product_flash_attention.h, "hidden_dim should be multiple of 8").
_HEAD_MULTIPLE = 8


# The frontend sizes the workspace of a gradient with several sequences in a row by the
# tokens of a row, and not by sequences times the longest one, for head sizes in
# multiples of 16 only (cudnn-frontend 1.28, scaled_dot_product_flash_attention.h,
# "max_total_seq_len"). f8 takes no others (sdpa_support_surface.h, "should be multiple
# of 16").
WIDE_MULTIPLE = 16


@attention_pass()
def pad_heads(editor: GraphEditor, multiple: int = _HEAD_MULTIPLE) -> None:
    """Pad both head sizes to a multiple that cuDNN takes."""
    pad_head(editor, ("query", "key"), multiple=multiple)
    pad_head(editor, ("value", "output"), multiple=multiple)


@attention_pass()
def pad_heads_by_16(editor: GraphEditor) -> None:
    """Pad both head sizes to multiples of 16."""
    pad_heads(editor, WIDE_MULTIPLE)


def pad_head(
    editor: GraphEditor,
    roles: tuple[str, ...],
    extra: int = 0,
    *,
    multiple: int = _HEAD_MULTIPLE,
) -> int:
    """Pad the last axis of the roles, gradients included, by at least `extra`.

    Returns the old size. Zero columns add nothing to products and get no gradient
    that anyone reads.
    """
    size = editor.tensors[roles[0]].dims[3]
    padded = rounded_up(size + extra, multiple)
    if padded != size:
        _pad(editor, (*roles, *(f"grad_{role}" for role in roles)), 3, padded)
    return size


def _pad(
    editor: GraphEditor,
    roles: Iterable[str],
    axis: int,
    size: int,
    old: int | None = None,
) -> None:
    """Pad an axis of the roles that are there, or of those that have the `old` size."""
    for role in roles:
        if role not in editor.tensors:
            continue
        if old in (None, editor.tensors[role].dims[axis]):
            editor.pad(role, {axis: size})


def pad_keys(editor: GraphEditor, count: int) -> None:
    """Add keys up to a count; they are hidden elsewhere."""
    t = editor.tensors["key"].dims[2]
    _pad(editor, ("key", "value", "grad_key", "grad_value"), 2, count)
    _pad(editor, ("bias", "dropout_mask", "grad_bias"), 3, count, old=t)
    # Of one key, a column may be for all keys. It is, unless rows are written out.
    read = [editor.tensors[role] for role in OPERANDS if role in editor.tensors]
    columns = [x.name for x in read if t > 1 or x.dims[2] > 1]
    _pad(editor, columns, 3, count, old=t)


def has_key_count_bug(editor: GraphEditor) -> bool:
    """Whether rows of log-sum-exp below -88.7 may get NaN gradients for this key count.

    For t % 128 == 64: seen on an H200 with 9.19, reported for sm_90 from 9.20 until
    9.26 (pytorch issue #196678, cudnn-frontend pull request #628). Other versions and
    architectures are taken to have it too until one was shown not to.
    """
    t = editor.tensors["key"].dims[2]
    return editor.main.kind == "sdpa_backward" and t % 128 == 64


@attention_pass(
    when=lambda editor: has_key_count_bug(editor) and not has_score_mod(editor)
)
def pad_key_count(editor: GraphEditor) -> None:
    """Add 64 keys, hidden by the lengths, where cuDNN's gradient would give NaN."""
    pad_keys(editor, editor.tensors["key"].dims[2] + 64)


def _has_single_query(editor: GraphEditor) -> bool:
    attributes = attributes_of(editor)
    is_plain = not (attributes.score_mod or attributes.dropout)
    if editor.main.kind == "sdpa" and is_plain:
        return False
    return editor.tensors["query"].dims[2] == 1


@attention_pass(when=_has_single_query)
def pad_single_query(editor: GraphEditor) -> None:
    """Give a single query a second row of zeros, which adds nothing to any sum.

    cuDNN's gradient refuses s = t = 1, and crashes or gives NaN for s = 1 in some
    versions (cudnn-frontend issues #1071 and #1072). Its kernels for one query were
    wrong with a score_mod beside lengths, and with dropout beside a bias (9.19 on an
    H200, random problems 630 and 623). Dropout's numbers stay: they are drawn for
    tiles of 16 queries.
    """
    _pad(editor, _ALONG_ROWS, 2, 2)


_ALONG_ROWS = (
    "query",
    "bias",
    "dropout_mask",
    "output",
    "stats",
    "max_logit",
    "grad_output",
    "grad_stats",
    "grad_query",
    "grad_bias",
)


# --- the cotangent of the log-sum-exp -------------------------------------------------


# High, middle and low parts of an f32 in 16-bit floats.
STATS_COLUMNS = 3


@attention_pass(when=has("grad_stats"))
def carry_grad_stats(editor: GraphEditor, multiple: int = _HEAD_MULTIPLE) -> None:
    """Pass the cotangent g of the log-sum-exp in three spare columns of the values.

    cuDNN computes dS = P (dO V^T - rowsum(O dO)); wanted is g added in the bracket.
    With columns O = -g, dO = 1, V = 0 the row sum becomes rowsum(O dO) - g and nothing
    else changes, apart from columns of dV that are cut off. Three columns hold g split
    into high, middle and low parts, so that rounding to 16 bits loses nothing. A power
    of two moves from O to dO, so that f16 holds parts of any size.
    """
    stats = editor.drop("grad_stats")
    size = pad_head(editor, ("value", "output"), STATS_COLUMNS, multiple=multiple)
    output, grad_output = (editor.tensors[r] for r in ("output", "grad_output"))

    def before(env: Env) -> None:
        remainder = to_logical(stats, env.pop("grad_stats"))
        unit = _power_of_two(remainder)
        remainder = remainder / unit
        parts: list[jax.Array] = []
        for _ in range(STATS_COLUMNS):
            part = remainder.astype(jax_dtype(output.dtype))
            parts.append(part)
            remainder = remainder - part.astype(remainder.dtype)
        env["output"] = _set_columns(
            output, env["output"], -jnp.concatenate(parts, axis=3), size
        )
        units = jnp.broadcast_to(
            unit.astype(jax_dtype(grad_output.dtype)),
            (*grad_output.dims[:3], STATS_COLUMNS),
        )
        env["grad_output"] = _set_columns(grad_output, env["grad_output"], units, size)

    editor.before.append(before)


@attention_pass(when=has("grad_stats"))
def carry_grad_stats_by_16(editor: GraphEditor) -> None:
    """Pass the cotangent of the log-sum-exp in values of a multiple of 16 columns."""
    carry_grad_stats(editor, WIDE_MULTIPLE)


def _power_of_two(x: jax.Array) -> jax.Array:
    """Return the power of two near the largest |x| that f16 can hold, or 1 for none."""
    largest = jnp.max(jnp.abs(x))
    exponent = jnp.frexp(largest)[1]
    exponent = jnp.where(jnp.isfinite(largest) & (largest > 0), exponent, 0)
    return jnp.ldexp(jnp.ones((), x.dtype), jnp.clip(exponent, -14, 15))


def _set_columns(
    tensor: Tensor, x: jax.Array, columns: jax.Array, start: int
) -> jax.Array:
    indices: list[int] = [0] * len(tensor.dims)
    indices[tensor.order.index(3)] = start
    return jax.lax.dynamic_update_slice(x, to_stored(tensor, columns), indices)
