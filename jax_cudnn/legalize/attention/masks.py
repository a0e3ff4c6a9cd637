# SPDX-License-Identifier: Apache-2.0
"""Legalises masks, lengths and biases, which hide keys in attention.

Each step edits attention by role; letters as in graph/attention/sdpa.py.
legalize/attention/passes.py says which steps a graph takes.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Tensor
from jax_cudnn.legalize.attention.padding import has_key_count_bug
from jax_cudnn.legalize.attention.passes import (
    attention_pass,
    attributes_of,
    has,
    has_score_mod,
)
from jax_cudnn.legalize.common.editor import Env, GraphEditor
from jax_cudnn.limits.attention import LENGTHS_ARE_COPIED, UNSEEN_KEYS_HAVE_GRADIENTS
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored

# Stands for the log-sum-exp of an attention row whose probabilities are to be 0:
# exp(score - it) is.
DEAD_STATS = 1e30


def where_logical(
    tensor: Tensor, condition: jax.Array, x: jax.Array, fill: float
) -> jax.Array:
    """Return stored `x` where a condition over logical axes holds, else `fill`."""
    return jnp.where(to_stored(tensor, condition), x, jnp.asarray(fill, x.dtype))


def unfolded(x: jax.Array) -> jax.Array:
    """Return x as something that XLA does not know at compile time.

    It would compute for seconds what follows from a large constant, such as a mask that
    a jitted function captured. The barrier is around a number: one around the array
    would have it written to memory where it is made from others.
    """
    known_at_run_time = jax.lax.optimization_barrier(jnp.ones((), bool))
    return jnp.where(known_at_run_time, x, jnp.zeros((), x.dtype))


# --- rows that see no key -------------------------------------------------------------


@attention_pass(when=has("mask", "query_lengths", "key_lengths"))
def hide_dead_rows(editor: GraphEditor) -> None:
    """Give dead rows and hidden positions their defined result: 0, or -inf for stats.

    cuDNN leaves rows past a length as they were or as its version likes, and rows
    without keys as a mean of hidden values. Gradients must flow to neither: a huge
    log-sum-exp makes every probability of the row 0.
    """
    tensors = dict(editor.tensors)
    is_causal = attributes_of(editor).is_causal
    leaves_keys = UNSEEN_KEYS_HAVE_GRADIENTS.is_here(editor.target)

    def before(env: Env) -> None:
        for role, fill in (("stats", DEAD_STATS), ("grad_stats", 0)):
            if role in env:
                is_live = _live_rows(tensors, env, is_causal)
                env[role] = where_logical(tensors[role], is_live, env[role], fill)

    def after(env: Env, results: Env) -> None:
        fills = (("output", 0), ("stats", -jnp.inf), ("max_logit", -jnp.inf))
        for role, fill in fills:
            if role in results:
                is_live = _live_rows(tensors, env, is_causal)
                results[role] = where_logical(
                    tensors[role], is_live, results[role], fill
                )
        for length, sequence in (("query_lengths", "query"), ("key_lengths", "key")):
            if length not in env:
                continue
            positions = _positions(tensors[sequence].dims[2])
            is_inside = positions < to_logical(tensors[length], env[length])
            for role in GRADIENTS_ALONG[sequence]:
                if role in results:
                    results[role] = where_logical(
                        tensors[role], is_inside, results[role], 0
                    )
        if leaves_keys and "query_lengths" in env:
            count = to_logical(tensors["query_lengths"], env["query_lengths"])
            for role in GRADIENTS_ALONG["key"]:
                if role in results:
                    results[role] = where_logical(
                        tensors[role], count > 0, results[role], 0
                    )

    editor.before.append(before)
    editor.after.append(after)


# The gradients along the queries, and along the keys.
GRADIENTS_ALONG = {"query": ("grad_query",), "key": ("grad_key", "grad_value")}


def _positions(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)[None, None, :, None]


def _live_rows(tensors: Mapping[str, Tensor], env: Env, is_causal: bool) -> jax.Array:
    """Return, as (b|1, h|1, s|1, 1), whether a row has a key to see and is in range."""
    is_live = jnp.ones((1, 1, 1, 1), bool)
    if "mask" in env:
        is_visible = _visible(tensors, env, is_causal)
        is_live = jnp.any(is_visible, axis=3, keepdims=True)
    elif "key_lengths" in env:
        is_live = to_logical(tensors["key_lengths"], env["key_lengths"]) > 0
    if "query_lengths" in env:
        lengths = to_logical(tensors["query_lengths"], env["query_lengths"])
        is_live = is_live & (_positions(tensors["query"].dims[2]) < lengths)
    return is_live


def _visible(tensors: Mapping[str, Tensor], env: Env, is_causal: bool) -> jax.Array:
    """Return the mask with what causality and the key lengths hide as well."""
    s, t = tensors["query"].dims[2], tensors["key"].dims[2]
    is_visible = to_logical(tensors["mask"], unfolded(env["mask"]))
    columns = jnp.arange(t, dtype=jnp.int32)[None, None, None, :]
    if is_causal:
        is_visible = is_visible & (columns <= _positions(s))
    if "key_lengths" in env:
        lengths = to_logical(tensors["key_lengths"], env["key_lengths"])
        is_visible = is_visible & (columns < lengths)
    return is_visible


# --- masks, lengths and bias ----------------------------------------------------------


def _has_row_bias(editor: GraphEditor) -> bool:
    return "bias" in editor.tensors and editor.tensors["bias"].dims[3] == 1


@attention_pass(when=_has_row_bias)
def absorb_row_bias(editor: GraphEditor) -> None:
    """Take a bias that is the same for all keys of a row out of the graph.

    It moves the row's log-sum-exp by itself and changes nothing else, unless it is
    -inf and hides the row.
    """
    bias = editor.drop("bias")
    tensors = dict(editor.tensors)

    def row_bias(env: Env, like: Tensor) -> jax.Array:
        return to_logical(bias, env["bias"]).astype(jax_dtype(like.dtype))

    def before(env: Env) -> None:
        if "stats" in env:
            stats = to_logical(tensors["stats"], env["stats"])
            shift = row_bias(env, tensors["stats"])
            is_live = (shift != -jnp.inf) & (stats < DEAD_STATS)
            moved = jnp.where(is_live, stats - shift, DEAD_STATS)
            env["stats"] = to_stored(tensors["stats"], moved)

    def after(env: Env, results: Env) -> None:
        if "output" in results:
            is_live = to_logical(bias, env["bias"]) != -jnp.inf
            results["output"] = where_logical(
                tensors["output"], is_live, results["output"], 0
            )
        for role in _MOVED:
            if role in results:
                shift = row_bias(env, tensors[role])
                results[role] = results[role] + to_stored(tensors[role], shift)

    editor.before.append(before)
    editor.after.append(after)


# What a bias moves that all scores of a row have.
_MOVED = ("stats", "max_logit")


@attention_pass(when=has("bias", "mask"))
def complete_bias(editor: GraphEditor) -> None:
    """Turn mask and bias into one bias with full rows and columns.

    cuDNN plans a bias of size 1 along s or t and gets it wrong: outputs, log-sum-exps
    and all gradients, depending on the pattern (seen with 9.19 on an H200, every
    engine: tests/attention/gpu). Size 1 along b and h is right. The gradient is
    summed back afterwards.

    A hidden key gets -inf, below any bias that a user may give, except in rows that
    would see no key at all: their result is replaced afterwards (hide_dead_rows). Huge
    negative numbers, which cuDNN would take for -inf, are raised where the bias is
    written anyway or shared by all heads; to do so for one bias a head would take a
    tenth of the forward kernel's time.
    """
    tensors = dict(editor.tensors)
    is_causal = attributes_of(editor).is_causal
    given = [tensors[role] for role in ("bias", "mask") if role in tensors]
    query, key = tensors["query"], tensors["key"]
    b, h = (max(tensor.dims[axis] for tensor in given) for axis in (0, 1))
    if "mask" in tensors and "key_lengths" in tensors:
        b = query.dims[0]  # Which rows see no key differs between batch entries.
    dims = (b, h, query.dims[2], key.dims[2])
    bias = tensors.get("bias")
    mask = editor.drop("mask") if "mask" in tensors else None
    is_full = mask is None and bias is not None and bias.dims == dims
    if is_full and (h != 1 or bias is None or bias.dtype == "f16"):
        return
    dtype = query.dtype if bias is None else bias.dtype
    editor.put_operand(Tensor(name="bias", dtype=dtype, dims=dims, order=(0, 1, 2, 3)))

    def before(env: Env) -> None:
        total = jnp.zeros((1, 1, 1, 1), jax_dtype(dtype))
        if bias is not None:
            total = _raised(unfolded(to_logical(bias, env["bias"])))
        if mask is not None:
            is_visible = _visible(tensors, env, is_causal)
            is_live = jnp.any(is_visible, axis=3, keepdims=True)
            hidden = jnp.where(is_live, -jnp.inf, 0).astype(total.dtype)
            is_allowed = to_logical(mask, unfolded(env.pop("mask")))
            total = jnp.where(is_allowed, total, hidden)
        env["bias"] = jnp.broadcast_to(total, dims)

    def after(_: Env, results: Env) -> None:
        for role in _MOVED:
            if bias is not None and role in results:
                results[role] = _lowered(results[role])

    editor.before.append(before)
    editor.after.append(after)
    if "grad_bias" in tensors:
        assert bias is not None
        _sum_bias_gradient(editor, bias, dims)


# cuDNN keeps scores times log2(e) in f32, so that what is below -2.3e38 becomes -inf
# (seen with 9.19 on sm_90). Numbers below this one, finfo.min for one, are moved to
# between it and -2.13e38, in their order.
_HUGE = 2.0**127


def _raised(bias: jax.Array) -> jax.Array:
    if bias.dtype == jnp.float16:
        return bias
    quarter, offset = (jnp.asarray(x, bias.dtype) for x in (0.25, 0.75 * _HUGE))
    return jnp.where(bias < -_HUGE, quarter * bias - offset, bias)


def _lowered(stats: jax.Array) -> jax.Array:
    """Return the log-sum-exp of scores that a bias moves as it was before `_raised`."""
    lowered = jnp.maximum(4 * (stats + 0.75 * _HUGE), jnp.finfo(stats.dtype).min)
    return jnp.where((stats < -_HUGE) & (stats != -jnp.inf), lowered, stats)


def _sum_bias_gradient(
    editor: GraphEditor, bias: Tensor, dims: tuple[int, ...]
) -> None:
    """Have cuDNN compute dbias with larger `dims` and sum it to those of the bias."""
    axes = tuple(
        i for i, (x, y) in enumerate(zip(bias.dims, dims, strict=True)) if x != y
    )
    larger = Tensor(name="grad_bias", dtype=bias.dtype, dims=dims, order=(0, 1, 2, 3))

    def back(total: jax.Array) -> jax.Array:
        if axes:
            total = jnp.sum(total, axis=axes, keepdims=True, dtype=jnp.float32)
        return to_stored(bias, total.astype(jax_dtype(bias.dtype)))

    editor.rearrange("grad_bias", larger, back=back)


# Those of a score_mod become steps.
@attention_pass(when=lambda editor: not has_score_mod(editor))
def complete_lengths(editor: GraphEditor) -> None:
    """Give cuDNN both lengths or none, at least one key, and keys it can handle."""
    put_lengths(editor, least_keys=1)


@attention_pass()
def complete_lengths_of_f8(editor: GraphEditor) -> None:
    """Give cuDNN both lengths or none, and no key where there is none.

    An entry without keys gives 0 (9.19 on an H200). With a key, it would count for the
    amax.
    """
    put_lengths(editor, least_keys=0)


def put_lengths(editor: GraphEditor, *, least_keys: int) -> None:
    """Give cuDNN both lengths, if there are any or a kernel needs them."""
    query, key = editor.tensors["query"], editor.tensors["key"]
    b, s, t = query.dims[0], query.dims[2], key.dims[2]
    roles = ("query_lengths", "key_lengths")
    # Without them, the frontend adds its own.
    is_copied = t % 128 != 0 and LENGTHS_ARE_COPIED.is_here(editor.target)
    needs = is_copied or has_key_count_bug(editor)
    if not needs and not any(role in editor.tensors for role in roles):
        return
    for role in roles:
        editor.put_operand(
            Tensor(name=role, dtype="i32", dims=(b, 1, 1, 1), order=(0, 1, 2, 3))
        )

    def before(env: Env) -> None:
        # Zero keys gave NaN before cuDNN 9.25 (cudnn-frontend issue #943).
        for role, least, full in (
            ("query_lengths", 0, s),
            ("key_lengths", least_keys, t),
        ):
            lengths = jnp.full((b, 1, 1, 1), full, jnp.int32)
            if role in env:
                lengths = jnp.reshape(jnp.clip(env[role], least, full), (b, 1, 1, 1))
            env[role] = lengths

    editor.before.append(before)
