# SPDX-License-Identifier: Apache-2.0
"""Decides which attention calls only Flax can compute, and passes them to Flax."""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import FrozenDict

from jax_cudnn.config import Implementation
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.flax.decoding import Sequences
from jax_cudnn.ops.attention.score_mod import ScoreMod
from jax_cudnn.ops.attention.visibility.masks import Causal, Mask, sorted_arguments
from jax_cudnn.ops.attention.visibility.predicates import Overrun, Tokens
from jax_cudnn.ops.common.arguments import (
    check_integers,
    clipped,
    describe,
    known_values,
    options,
)

_log = logging.getLogger("jax_cudnn")

_EINSUMS = (
    "einsum_dot_general",
    "qk_attn_weights_einsum",
    "attn_weights_value_einsum",
)
# Of values, for dropout that heads share: see `_drops_with_xla`.
_MOST_COLUMNS = 120
_ADVICE = (
    'Pass implementation="auto" or "xla" to make_attention_fn to let Flax\'s own '
    "attention compute it."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The arguments of a Flax layer's attention besides query, key and value.

    ``dropout_rate`` is 0 where dropout is not in effect. ``visibility`` is a mask for
    all batch axes merged into one, which applies in addition to the other ones.
    ``sequences`` says the same as `mask`, `visibility` and causality together, where
    `cached_sdpa` can do it. ``options``, ``sinks`` and ``score_mod`` are as in `sdpa`.
    The rest is as in `AttentionFn.__call__`.
    """

    bias: jax.Array | None
    mask: jax.Array | None
    is_causal: bool
    broadcast_dropout: bool
    dropout_rng: jax.Array | None
    dropout_rate: float
    precision: Any
    module: Any
    force_fp32_for_softmax: bool
    einsum_dot_general: Callable[..., jax.Array] | None
    qk_attn_weights_einsum: Callable[..., jax.Array] | None
    attn_weights_value_einsum: Callable[..., jax.Array] | None
    visibility: Mask | None = None
    sequences: Sequences | None = None
    options: Mapping[str, Any] = FrozenDict()
    sinks: jax.Array | None = None
    score_mod: ScoreMod | None = None

    @property
    def beyond_flax(self) -> tuple[str, ...]:
        """The arguments of the call that Flax's own attention lacks."""
        given = {"sinks": self.sinks, "score_mod": self.score_mod, **self.options}
        return tuple(
            name for name, x in given.items() if x is not None and name != "scale"
        )


def reasons_for_flax(
    request: Request, value: jax.Array, implementation: Implementation
) -> tuple[str, ...]:
    """Return why Flax must compute this attention; empty where `sdpa` can."""
    reasons: list[str] = []
    dtype = value.dtype
    if _drops_with_xla(request, value, implementation):
        reasons.append(
            f"dropout of the same attention weights in all batch entries and heads is "
            f"active (dropout_rate={request.dropout_rate}, broadcast_dropout=True, "
            f"deterministic=False), and is XLA's for {dtype} operands, head size "
            f'{value.shape[-1]} and implementation="{implementation}"'
        )
    if request.module is not None:
        reasons.append("the attention weights are asked for (sow_weights=True)")
    for name in _EINSUMS:
        if getattr(request, name) is not None:
            reasons.append(f"{name} replaces a product inside the attention")
    if not _is_met(request.precision, dtype):
        reasons.append(f"precision={request.precision!r} is asked for {dtype} operands")
    return tuple(reasons)


def _drops_with_xla(
    request: Request, value: jax.Array, implementation: Implementation
) -> bool:
    """Whether XLA drops weights that all heads share: Flax asks it for one attention.

    `sdpa` would ask it for two (flax/shared_dropout.py). With more columns of values
    cuDNN is slower: the gradient of a log-sum-exp adds 8 to them, and its kernels for
    more than 128 took 1.6 times as long as Flax's attention on an H100 (9.19).
    """
    if not (request.dropout_rate > 0 and request.broadcast_dropout):
        return False
    if request.beyond_flax:
        return False
    asked = options("attention_fn", implementation, None).implementation
    is_faster = (
        value.dtype in (jnp.bfloat16, jnp.float16) and value.shape[-1] <= _MOST_COLUMNS
    )
    return asked == "xla" or (asked == "auto" and not is_faster)


def _is_met(precision: Any, dtype: jnp.dtype) -> bool:
    """Whether the products in `sdpa` have at least this precision."""
    if precision is None:
        return True
    if isinstance(precision, tuple | list):
        return all(_is_met(each, dtype) for each in precision)
    try:
        level = jax.lax.Precision(precision)
    except ValueError:  # an algorithm preset: asks for particular arithmetic
        return False
    # Products of 16-bit floats are exact in f32, in which they are summed.
    return dtype != jnp.float32 or level == jax.lax.Precision.DEFAULT


def attend_with_flax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    request: Request,
    reasons: tuple[str, ...],
    implementation: Implementation,
) -> jax.Array:
    """Run Flax's own attention, or raise UnsupportedError if cuDNN was asked for."""
    if implementation == "cudnn":
        raise UnsupportedError(
            "attention_fn: cuDNN cannot run this attention:", reasons, _ADVICE
        )
    if names := request.beyond_flax:
        raise ValueError(
            f"attention_fn: {'; '.join(reasons)}. Flax's own attention computes this, "
            f"and has no {names[0]}. Leave one of the two out."
        )
    if implementation == "auto":
        _say_once(reasons)
    q, request = _in_words_of_flax(q, k, request)
    if isinstance(request.module, nnx.Module):
        _refuse_linen_options(request)
        return _by_nnx(q, k, v, request)
    return _by_linen(q, k, v, request)


def _in_words_of_flax(
    q: jax.Array, k: jax.Array, request: Request
) -> tuple[jax.Array, Request]:
    """Write the scale into the query, and the masks that Flax lacks as arrays."""
    if (scale := request.options.get("scale")) is not None:
        # Flax divides by the root of the head size.
        factor = scale * math.sqrt(q.shape[-1])
        q = q * jnp.asarray(factor, q.dtype)
    if request.visibility is None:
        return q, request
    s, t = q.shape[-3], k.shape[-3]
    visibility = request.visibility
    given = (visibility & Causal() if request.is_causal else visibility).arguments(s, t)
    bias = given.get("bias")
    overrun: Overrun | None = sorted_arguments(visibility, s, t).get("overrun")
    if overrun is not None:
        is_lost = overrun.lost(Tokens(s))[:, None, :, None]
        own = jnp.where(is_lost, jnp.nan, 0).astype((q if bias is None else bias).dtype)
        bias = own if bias is None else bias + own
    mask, bias = (
        None if x is None else _unfold_batch(x, q.shape[:-3])
        for x in (_dense(given, s, t), bias)
    )
    if request.mask is not None:
        own = _rank_of_scores(as_bools(request.mask), q)
        mask = own if mask is None else mask & own
    if request.bias is not None:
        own = _rank_of_scores(request.bias, q)
        wide = np.promote_types(own.dtype, np.float32)
        bias = own if bias is None else own.astype(wide) + bias.astype(wide)
    is_causal = request.is_causal or given.get("is_causal", False)
    return q, replace(
        request, mask=mask, bias=bias, is_causal=is_causal, visibility=None
    )


def _dense(given: dict[str, Any], s: int, t: int) -> jax.Array | None:
    """Return window, lengths and mask of a mask's arguments as one array."""
    rows = jnp.arange(s, dtype=jnp.int32).reshape(1, 1, s, 1)
    columns = jnp.arange(t, dtype=jnp.int32).reshape(1, 1, 1, t)
    conditions: list[jax.Array] = []
    if "local_window_size" in given:
        left, right = given["local_window_size"]
        conditions += [columns >= rows - left, columns <= rows + right]
    for name, numbers in (
        ("query_seq_lengths", rows),
        ("key_value_seq_lengths", columns),
    ):
        if name in given:
            lengths = clipped(check_integers("sdpa", name, given[name]), numbers.size)
            conditions.append(numbers < jnp.reshape(lengths, (-1, 1, 1, 1)))
    if "mask" in given:
        conditions.append(given["mask"])
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def _unfold_batch(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Return what has one batch axis with the batch axes of the operands."""
    own = batch if x.shape[0] != 1 else (1,) * len(batch)
    return jnp.reshape(x, (*own, *x.shape[1:]))


def _rank_of_scores(x: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.reshape(x, (1,) * (q.ndim - x.ndim) + x.shape)


def _refuse_linen_options(request: Request) -> None:
    """Refuse options that nnx's attention lacks; nnx's own layer never passes any."""
    names = [n for n in (*_EINSUMS, "force_fp32_for_softmax") if getattr(request, n)]
    if names:
        raise ValueError(
            f"attention_fn: {', '.join(names)} was passed together with the nnx module "
            f"{type(request.module).__name__}. Only linen's attention takes it. Leave "
            "it out, or pass module=None."
        )


@functools.lru_cache(maxsize=256)
def _say_once(reasons: tuple[str, ...]) -> None:
    _log.info("attention_fn: Flax's own attention runs: %s", "; ".join(reasons))


def _by_nnx(q: jax.Array, k: jax.Array, v: jax.Array, request: Request) -> jax.Array:
    """Run nnx's attention, which can sow into nnx modules."""
    return nnx.dot_product_attention(
        q,
        k,
        v,
        request.bias,
        _visible(q, k, request),
        broadcast_dropout=request.broadcast_dropout,
        dropout_rng=request.dropout_rng,
        dropout_rate=request.dropout_rate,
        precision=request.precision,
        module=request.module,
    )


def _by_linen(q: jax.Array, k: jax.Array, v: jax.Array, request: Request) -> jax.Array:
    """Run linen's attention, which takes all other options, but not GQA or causality.

    nnx's attention would not do here: without a module to sow into, it ignores
    `precision`.
    """
    group = q.shape[-2] // max(k.shape[-2], 1)
    if group > 1:
        k, v = jnp.repeat(k, group, axis=-2), jnp.repeat(v, group, axis=-2)
    return linen.dot_product_attention(
        q,
        k,
        v,
        request.bias,
        _visible(q, k, request),
        broadcast_dropout=request.broadcast_dropout,
        dropout_rng=request.dropout_rng,
        dropout_rate=request.dropout_rate,
        precision=request.precision,
        module=request.module,
        force_fp32_for_softmax=request.force_fp32_for_softmax,
        einsum_dot_general=request.einsum_dot_general,
        qk_attn_weights_einsum=request.qk_attn_weights_einsum,
        attn_weights_value_einsum=request.attn_weights_value_einsum,
    )


def as_bools(mask: jax.Array) -> jax.Array:
    """Return a mask of numbers as bools; refuse one that is meant to be added.

    Added masks are 0 where a query sees a key, and below 0 elsewhere: the opposite of
    Flax's. Arrays that are traced or on a GPU are not looked at.
    """
    if mask.dtype == jnp.bool_:
        return mask
    numbers = known_values(mask)
    if (
        numbers is not None
        and numbers.size
        and numbers.min() < 0
        and numbers.max() <= 0
    ):
        raise ValueError(
            f"attention_fn: mask is {describe(mask)} with numbers from "
            f"{numbers.min()} to {numbers.max()}. In Flax, 0 masks a key, and any "
            "other number does not. This looks like a mask that is added to the "
            "scores, with 0 for visible keys. Pass mask == 0."
        )
    # Strict promotion compares no bool with 0.
    return mask != 0


def _visible(q: jax.Array, k: jax.Array, request: Request) -> jax.Array | None:
    """Return the mask combined with the causal mask, as Flax's functions take it."""
    mask = None if request.mask is None else as_bools(request.mask)
    if not request.is_causal:
        return mask
    s, t = q.shape[-3], k.shape[-3]
    rows = jnp.arange(s, dtype=jnp.int32)[:, None]
    causal = jnp.arange(t, dtype=jnp.int32)[None, :] <= rows
    if mask is None:
        return causal
    # Ranks are made equal first: jax_numpy_rank_promotion may be set to "raise".
    rank = max(mask.ndim, 2)
    mask = jnp.expand_dims(mask, tuple(range(rank - mask.ndim)))
    return jnp.logical_and(mask, jnp.expand_dims(causal, tuple(range(rank - 2))))
