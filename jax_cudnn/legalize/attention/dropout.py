# SPDX-License-Identifier: Apache-2.0
"""Tells a kernel of attention which probabilities dropout keeps.

Either it draws them itself, from one seed and one offset, or it reads a mask that XLA
writes. Each step edits attention by role; letters as in graph/attention/sdpa.py.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Tensor
from jax_cudnn.legalize.attention.passes import Edit, attributes_of
from jax_cudnn.legalize.common.editor import Env, GraphEditor
from jax_cudnn.limits.attention import DROPOUT_NOT_COMPARED
from jax_cudnn.reference.attention.dropout import kept
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical

# A kernel divides by 1 - rate - 2^-16. Up to this rate that is within half an ulp of
# f16 of 1 - rate.
_HIGHEST_RATE = 1 - 2.0**-5
_PLAIN = (0, 1, 2, 3)


def dropout_steps(editor: GraphEditor) -> list[Edit]:
    """Return the ways to dropout that a kernel has, the best first."""
    if "dropout_mask" in editor.tensors:
        return [_lessen_delta]
    if "dropout_seed" not in editor.tensors:
        return [_keep_all]
    return [_draw, _give_mask] if _draws_alike(editor) else [_give_mask]


def _keep_all(_: GraphEditor) -> None:
    """Leave a graph without dropout as it is."""


def _lessen_delta(editor: GraphEditor) -> None:
    """Make up for a factor in the gradient of a kernel that is given a mask.

    Of the gradient, dS = P (M dP - rowsum(O dO)) with M the mask divided by 1 - rate,
    cuDNN computes P (M dP - rowsum(O dO) / (1 - rate)) (9.19 on an H200). So it is
    given the output, and the cotangent of the log-sum-exp, times 1 - rate.
    """
    factor = 1 - attributes_of(editor).dropout

    def lessen(x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) * factor).astype(x.dtype)

    for role in ("output", "grad_stats"):
        if role in editor.inputs:
            editor.rearrange(role, editor.tensors[role], lessen)


def _draws_alike(editor: GraphEditor) -> bool:
    """Whether a kernel that draws for itself draws what the reference does.

    A kernel counts its offsets over the heads that it has, batch entry by batch entry,
    and has one seed: these are entries of one call, and not of several examples.
    """
    attributes = attributes_of(editor)
    b, h, _, _ = editor.tensors["query"].dims
    return (
        not DROPOUT_NOT_COMPARED.is_here(editor.target)
        and attributes.dropout <= _HIGHEST_RATE
        and (b == 1 or h == attributes.dropout_heads)
        and (attributes.dropout_batch or b) % max(b, 1) == 0
    )


def _draw(editor: GraphEditor) -> None:
    """Give the kernel the seed, and the offset of its first batch entry and head."""
    _forget_counts(editor)
    names = ("dropout_seed", "dropout_offset")
    for name in names:
        editor.drop(name)
        one = Tensor(name=name, dtype="i32", dims=(1, 1, 1, 1), order=_PLAIN)
        editor.put_operand(one)
    editor.before.append(
        lambda env: env.update({name: env[name][:1, :1] for name in names})
    )


def _give_mask(editor: GraphEditor) -> None:
    """Give the kernel an array that is 1 where a probability is kept, and 0 elsewhere.

    It has the operands' dtype: cuDNN 9.19 has no forward plan for bytes, and crashes
    when it plans with bool.
    """
    rate = attributes_of(editor).dropout
    _forget_counts(editor)
    seed, offset = (editor.drop(f"dropout_{x}") for x in ("seed", "offset"))
    query, key = editor.tensors["query"], editor.tensors["key"]
    dims = (*query.dims[:3], key.dims[2])
    mask = Tensor(name="dropout_mask", dtype=query.dtype, dims=dims, order=_PLAIN)
    editor.put_operand(mask)
    editor.notes.append(
        f"which probabilities dropout keeps is written by XLA, {mask.dtype}"
        f"{list(dims)}; its memory grows with s*t"
    )

    def before(env: Env) -> None:
        is_kept: jax.Array = kept(
            rate,
            to_logical(seed, env.pop("dropout_seed")),
            to_logical(offset, env.pop("dropout_offset")),
            (dims[2], dims[3]),
        )
        # Batch entries with the same seed and offsets share what is kept.
        is_kept = jnp.broadcast_to(is_kept, dims)
        env["dropout_mask"] = is_kept.astype(jax_dtype(mask.dtype))

    editor.before.append(before)
    _lessen_delta(editor)


def _forget_counts(editor: GraphEditor) -> None:
    attributes = replace(attributes_of(editor), dropout_heads=0, dropout_batch=0)
    editor.set_attributes(attributes)
