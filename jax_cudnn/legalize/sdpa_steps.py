# SPDX-License-Identifier: Apache-2.0
"""The steps that turn attention into what cuDNN takes; letters as in graph/sdpa.py.

Each step edits a ``Rewrite``: the tensors that cuDNN sees, and the array work before
and after the call. legalize/sdpa.py says which steps a graph takes.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import SdpaAttributes, Target, Tensor
from jax_cudnn.legalize.rewrite import (
    DEAD_STATS,
    Env,
    Rewrite,
    pad_axis,
    unfolded,
    where_logical,
)
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored

# cuDNN takes head sizes in multiples of 8 for 16-bit types (cudnn-frontend 1.28,
# scaled_dot_product_flash_attention.h, "hidden_dim should be multiple of 8").
_HEAD_MULTIPLE = 8

# --- layout ---------------------------------------------------------------------------


def keep_layout(rewrite: Rewrite) -> None:
    """Bring the last axis to the end of storage, where cuDNN wants stride 1."""
    for table in (rewrite.inputs, rewrite.outputs):
        for role, tensor in table.items():
            if tensor.order[-1] != 3 and role not in _HANDLED_HERE:
                _restore(rewrite, table, role, tensor)


# Operands that cuDNN does not see as they are.
_HANDLED_HERE = ("mask", "query_lengths", "key_lengths")


def _restore(
    rewrite: Rewrite, table: dict[str, Tensor], role: str, tensor: Tensor
) -> None:
    order = (*(axis for axis in tensor.order if axis != 3), 3)
    table[role] = replace(tensor, order=order)
    there = tuple(tensor.order.index(axis) for axis in order)
    back = tuple(order.index(axis) for axis in tensor.order)
    if table is rewrite.inputs:

        def before(env: Env) -> None:
            env[role] = jnp.transpose(env[role], there)

        rewrite.before.append(before)
    else:

        def after(_: Env, results: Env) -> None:
            results[role] = jnp.transpose(results[role], back)

        rewrite.after.append(after)


def _attributes(rewrite: Rewrite) -> SdpaAttributes:
    assert isinstance(rewrite.attributes, SdpaAttributes)
    return rewrite.attributes


# --- rows that see no key -------------------------------------------------------------


def hide_dead_rows(rewrite: Rewrite) -> None:
    """Give dead rows and hidden positions their defined result: 0, or -inf for stats.

    cuDNN leaves rows past a length as they were or as its version likes, and rows
    without keys as a mean of hidden values. Gradients must flow to neither: a huge
    log-sum-exp makes every probability of the row 0.
    """
    original = dict(rewrite.inputs)
    if not {"mask", "query_lengths", "key_lengths"} & set(original):
        return
    outputs = dict(rewrite.outputs)

    def before(env: Env) -> None:
        for role, fill in (("stats", DEAD_STATS), ("grad_stats", 0)):
            if role in env:
                is_live = _live_rows(rewrite, original, env)
                env[role] = where_logical(original[role], is_live, env[role], fill)

    def after(env: Env, results: Env) -> None:
        for role, fill in (("output", 0), ("stats", -jnp.inf)):
            if role in results:
                is_live = _live_rows(rewrite, original, env)
                results[role] = where_logical(
                    outputs[role], is_live, results[role], fill
                )
        for length, sequence in (("query_lengths", "query"), ("key_lengths", "key")):
            if length not in env:
                continue
            positions = _positions(original[sequence].dims[2])
            is_inside = positions < to_logical(original[length], env[length])
            for role in _GRADIENTS_ALONG[sequence]:
                if role in results:
                    results[role] = where_logical(
                        outputs[role], is_inside, results[role], 0
                    )

    rewrite.before.append(before)
    rewrite.after.append(after)


_GRADIENTS_ALONG = {"query": ("grad_query",), "key": ("grad_key", "grad_value")}


def _positions(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)[None, None, :, None]


def _live_rows(rewrite: Rewrite, tensors: Mapping[str, Tensor], env: Env) -> jax.Array:
    """Return, as (b|1, h|1, s|1, 1), whether a row has a key to see and is in range."""
    is_live = jnp.ones((1, 1, 1, 1), bool)
    if "mask" in env:
        is_visible = _visible(rewrite, tensors, env)
        is_live = jnp.any(is_visible, axis=3, keepdims=True)
    elif "key_lengths" in env:
        is_live = to_logical(tensors["key_lengths"], env["key_lengths"]) > 0
    if "query_lengths" in env:
        lengths = to_logical(tensors["query_lengths"], env["query_lengths"])
        is_live = is_live & (_positions(tensors["query"].dims[2]) < lengths)
    return is_live


def _visible(rewrite: Rewrite, tensors: Mapping[str, Tensor], env: Env) -> jax.Array:
    """Return the mask with what causality and the key lengths hide as well."""
    s, t = tensors["query"].dims[2], tensors["key"].dims[2]
    is_visible = to_logical(tensors["mask"], unfolded(env["mask"]))
    columns = jnp.arange(t, dtype=jnp.int32)[None, None, None, :]
    if _attributes(rewrite).is_causal:
        is_visible = is_visible & (columns <= _positions(s))
    if "key_lengths" in env:
        lengths = to_logical(tensors["key_lengths"], env["key_lengths"])
        is_visible = is_visible & (columns < lengths)
    return is_visible


# --- masks, lengths and bias ----------------------------------------------------------


def absorb_row_bias(rewrite: Rewrite) -> None:
    """Take a bias that is the same for all keys of a row out of the graph.

    It moves the row's log-sum-exp by itself and changes nothing else, unless it is
    -inf and hides the row.
    """
    if "bias" not in rewrite.inputs or rewrite.inputs["bias"].dims[3] != 1:
        return
    original = dict(rewrite.inputs)
    outputs = dict(rewrite.outputs)
    bias = rewrite.inputs.pop("bias")

    def row_bias(env: Env, like: Tensor) -> jax.Array:
        return to_logical(bias, env["bias"]).astype(jax_dtype(like.dtype))

    def before(env: Env) -> None:
        if "stats" in env:
            stats = to_logical(original["stats"], env["stats"])
            shift = row_bias(env, original["stats"])
            is_live = (shift != -jnp.inf) & (stats < DEAD_STATS)
            moved = jnp.where(is_live, stats - shift, DEAD_STATS)
            env["stats"] = to_stored(original["stats"], moved)

    def after(env: Env, results: Env) -> None:
        if "output" in results:
            is_live = to_logical(bias, env["bias"]) != -jnp.inf
            results["output"] = where_logical(
                outputs["output"], is_live, results["output"], 0
            )
        if "stats" in results:
            shift = row_bias(env, outputs["stats"])
            results["stats"] = results["stats"] + to_stored(outputs["stats"], shift)

    rewrite.before.append(before)
    rewrite.after.append(after)


def complete_bias(rewrite: Rewrite) -> None:
    """Turn mask and bias into one bias with full rows and columns.

    cuDNN plans a bias of size 1 along s or t and gets it wrong: outputs, log-sum-exps
    and all gradients, depending on the pattern (seen with 9.19 on an H200, every
    engine; tests/gpu has the cases). Size 1 along b and h is right. The gradient is
    summed back afterwards.

    A hidden key gets -inf, below any bias that a user may give, except in rows that
    would see no key at all: their result is replaced afterwards (hide_dead_rows). Huge
    negative numbers, which cuDNN would take for -inf, are raised where the bias is
    written anyway or shared by all heads; to do so for one bias a head would take a
    tenth of the forward kernel's time.
    """
    given = [rewrite.inputs[r] for r in ("bias", "mask") if r in rewrite.inputs]
    if not given:
        return
    original = dict(rewrite.inputs)
    query, key = original["query"], original["key"]
    b, h = (max(tensor.dims[axis] for tensor in given) for axis in (0, 1))
    if "mask" in original and "key_lengths" in original:
        b = query.dims[0]  # Which rows see no key differs between batch entries.
    dims = (b, h, query.dims[2], key.dims[2])
    bias, mask = rewrite.inputs.get("bias"), rewrite.inputs.pop("mask", None)
    is_full = mask is None and bias is not None and bias.dims == dims
    if is_full and (h != 1 or bias is None or bias.dtype == "f16"):
        return
    dtype = query.dtype if bias is None else bias.dtype
    rewrite.inputs["bias"] = Tensor(
        name="bias", dtype=dtype, dims=dims, order=(0, 1, 2, 3)
    )

    def before(env: Env) -> None:
        total = jnp.zeros((1, 1, 1, 1), jax_dtype(dtype))
        if bias is not None:
            total = _raised(unfolded(to_logical(bias, env["bias"])))
        if mask is not None:
            is_visible = _visible(rewrite, original, env)
            is_live = jnp.any(is_visible, axis=3, keepdims=True)
            hidden = jnp.where(is_live, -jnp.inf, 0).astype(total.dtype)
            is_allowed = to_logical(mask, unfolded(env.pop("mask")))
            total = jnp.where(is_allowed, total, hidden)
        env["bias"] = jnp.broadcast_to(total, dims)

    def after(_: Env, results: Env) -> None:
        if bias is not None and "stats" in results:
            results["stats"] = _lowered(results["stats"])

    rewrite.before.append(before)
    rewrite.after.append(after)
    if "grad_bias" in rewrite.outputs:
        assert bias is not None
        _sum_bias_gradient(rewrite, bias, dims)


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


def _sum_bias_gradient(rewrite: Rewrite, bias: Tensor, dims: tuple[int, ...]) -> None:
    """Have cuDNN compute dbias with larger `dims` and sum it to those of the bias."""
    axes = tuple(
        i for i, (x, y) in enumerate(zip(bias.dims, dims, strict=True)) if x != y
    )
    rewrite.outputs["grad_bias"] = Tensor(
        name="grad_bias", dtype=bias.dtype, dims=dims, order=(0, 1, 2, 3)
    )

    def after(_: Env, results: Env) -> None:
        total = results["grad_bias"]
        if axes:
            total = jnp.sum(total, axis=axes, keepdims=True, dtype=jnp.float32)
        results["grad_bias"] = to_stored(bias, total.astype(jax_dtype(bias.dtype)))

    rewrite.after.append(after)


def complete_lengths(rewrite: Rewrite, target: Target | None) -> None:
    """Give cuDNN both lengths or none, at least one key, and keys it can handle."""
    query, key = rewrite.inputs["query"], rewrite.inputs["key"]
    b, s, t = query.dims[0], query.dims[2], key.dims[2]
    given = {r for r in ("query_lengths", "key_lengths") if r in rewrite.inputs}
    needs = _needs_lengths(t, target) or _has_key_count_bug(rewrite)
    if not given and not needs:
        return
    for role in ("query_lengths", "key_lengths"):
        rewrite.inputs[role] = Tensor(
            name=role, dtype="i32", dims=(b, 1, 1, 1), order=(0, 1, 2, 3)
        )

    def before(env: Env) -> None:
        # Zero keys gave NaN before cuDNN 9.25 (cudnn-frontend issue #943).
        for role, least, full in (("query_lengths", 0, s), ("key_lengths", 1, t)):
            lengths = jnp.full((b, 1, 1, 1), full, jnp.int32)
            if role in env:
                lengths = jnp.reshape(jnp.clip(env[role], least, full), (b, 1, 1, 1))
            env[role] = lengths

    rewrite.before.append(before)


def _needs_lengths(t: int, target: Target | None) -> bool:
    """Whether the frontend would otherwise add lengths of its own.

    Up to cuDNN 9.15.0 it does so for t % 128 != 0 and copies them from host memory at
    each launch, which a captured command buffer must not do (cudnn-frontend,
    scaled_dot_product_flash_attention.h, "workaround padding mask").
    """
    return target is not None and target.cudnn_version <= 91500 and t % 128 != 0


# --- scale ----------------------------------------------------------------------------


def make_scale_positive(rewrite: Rewrite) -> None:
    """Move the sign of the scale, or 0, into the query.

    cuDNN gives NaN for a scale that is not positive: it scales hidden scores of -inf
    like all others (seen with 9.19 on an H200).
    """
    attributes = _attributes(rewrite)
    scale = attributes.scale
    if scale > 0:
        return
    factor = -1.0 if scale < 0 else 0.0
    rewrite.attributes = replace(attributes, scale=-scale if factor else 1.0)

    def before(env: Env) -> None:
        env["query"] = env["query"] * jnp.asarray(factor, env["query"].dtype)

    def after(_: Env, results: Env) -> None:
        if "grad_query" in results:
            gradient = results["grad_query"]
            results["grad_query"] = gradient * jnp.asarray(factor, gradient.dtype)

    rewrite.before.append(before)
    rewrite.after.append(after)


# --- padding --------------------------------------------------------------------------


def pad_head(rewrite: Rewrite, roles: tuple[str, ...], extra: int) -> int:
    """Pad the last axis of the roles, gradients included, by at least `extra`.

    Returns the old size. Zero columns add nothing to products and get no gradient
    that anyone reads.
    """
    roles = tuple({*roles, *(f"grad_{role}" for role in roles)})
    present = rewrite.roles
    size = next(present[role].dims[3] for role in roles if role in present)
    padded = -(-(size + extra) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    if padded != size:
        pad_axis(rewrite, roles, 3, size, padded)
    return size


def pad_key_count(rewrite: Rewrite) -> None:
    """Add 64 keys, hidden by the lengths, where cuDNN's gradient would give NaN."""
    if not _has_key_count_bug(rewrite):
        return
    t = rewrite.inputs["key"].dims[2]
    pad_axis(rewrite, ("key", "value", "grad_key", "grad_value"), 2, t, t + 64)
    pad_axis(rewrite, ("bias", "grad_bias"), 3, t, t + 64)


def _has_key_count_bug(rewrite: Rewrite) -> bool:
    """Whether rows of log-sum-exp below -88.7 may get NaN gradients for this key count.

    For t % 128 == 64: seen on an H200 with 9.19, reported for sm_90 from 9.20 until
    9.26 (pytorch issue #196678, cudnn-frontend pull request #628). Other versions and
    architectures are taken to have it too until one was shown not to.
    """
    t = rewrite.inputs["key"].dims[2]
    return rewrite.node.kind == "sdpa_backward" and t % 128 == 64


def pad_single_query(rewrite: Rewrite) -> None:
    """Give a one-row gradient a second row of zeros, which adds nothing to any sum.

    cuDNN's gradient refuses s = t = 1, and crashes or gives NaN for s = 1 in some
    versions (cudnn-frontend issues #1071 and #1072).
    """
    if rewrite.inputs["query"].dims[2] == 1:
        pad_axis(rewrite, _ALONG_ROWS, 2, 1, 2)


_ALONG_ROWS = (
    "query",
    "bias",
    "output",
    "stats",
    "grad_output",
    "grad_stats",
    "grad_query",
    "grad_bias",
)


# --- the cotangent of the log-sum-exp -------------------------------------------------


# High, middle and low parts of an f32 in 16-bit floats.
STATS_COLUMNS = 3


def carry_grad_stats(rewrite: Rewrite) -> None:
    """Pass the cotangent g of the log-sum-exp in three spare columns of the values.

    cuDNN computes dS = P (dO V^T - rowsum(O dO)); wanted is g added in the bracket.
    With columns O = -g, dO = 1, V = 0 the row sum becomes rowsum(O dO) - g and nothing
    else changes, apart from columns of dV that are cut off. Three columns hold g split
    into high, middle and low parts, so that rounding to 16 bits loses nothing. A power
    of two moves from O to dO, so that f16 holds parts of any size.
    """
    stats = rewrite.inputs.pop("grad_stats")
    size = pad_head(rewrite, ("value", "output"), STATS_COLUMNS)
    output = rewrite.inputs["output"]
    grad_output = rewrite.inputs["grad_output"]

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

    rewrite.before.append(before)


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
