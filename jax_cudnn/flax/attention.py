# SPDX-License-Identifier: Apache-2.0
"""`attention_fn` for Flax's multi-head attention layers, both nnx and linen.

Translates Flax's conventions into calls of `sdpa`. What `sdpa` does not compute (sown
weights, ...) goes to flax/delegate.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype as promote_to_common_dtype
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, Options
from jax_cudnn.flax.delegate import (
    Request,
    as_bools,
    attend_with_flax,
    reasons_for_flax,
)
from jax_cudnn.flax.shared_dropout import drop_alike
from jax_cudnn.ops.attention.caches.cached_sdpa import cached_sdpa
from jax_cudnn.ops.attention.dropout import check_rate
from jax_cudnn.ops.attention.operands import axes_hint, check_groups
from jax_cudnn.ops.attention.sdpa import sdpa
from jax_cudnn.ops.attention.visibility.masks import Where
from jax_cudnn.ops.common.arguments import as_operand
from jax_cudnn.ops.common.callers import on_behalf_of

Einsum = Callable[..., jax.Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFn:
    """Attention as Flax's layers call it, run by `jax_cudnn.sdpa`.

    Hashable, and equal where the settings are equal, so that a layer that is built
    again with equal settings is not compiled again.

    Attributes:
      implementation: as in `jax_cudnn.sdpa`.
      is_causal: whether every call is causal. This is for linen, whose layers have no
        such argument; nnx's layers take `is_causal` in each call.
    """

    implementation: Implementation = "auto"
    is_causal: bool = False

    def __post_init__(self) -> None:
        Options(implementation=self.implementation)  # refuses unknown names
        if not isinstance(self.is_causal, bool):
            raise TypeError(
                f"make_attention_fn: is_causal is {self.is_causal!r}. It must be True "
                "or False, since it is part of the compiled program."
            )

    # The names and their order are Flax's. nnx passes everything by keyword. linen
    # passes only the keywords that it finds in this signature, so an option whose name
    # is missing here would be ignored silently.
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        *,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Einsum | None = None,
        qk_attn_weights_einsum: Einsum | None = None,
        attn_weights_value_einsum: Einsum | None = None,
        input_positions: ArrayLike | None = None,
    ) -> jax.Array:
        r"""Return the attention of each query over the keys that it may see.

        .. math::

            O_{se} = \sum_t \mathrm{softmax}_t \Big( \frac{1}{\sqrt d} \sum_d Q_{sd}
            K_{td} + \mathrm{bias}_{st} \Big) V_{te}

        over the keys t that `mask` allows, with t <= s if causal. Scores, softmax and
        sums are kept in f32 (f64 for f64 operands).

        Axis letters: ... any number of batch axes, s query length, t key length, h
        query heads, k key heads, d head size, e value head size.

        Args:
          query: (..., s, h, d).
          key: (..., t, k, d), where k divides h.
          value: (..., t, k, e).
          bias: numbers that broadcast to (..., h, s, t), added to the scaled scores.
            Default None: nothing added.
          mask: bool or numbers that broadcast to (..., h, s, t); a query sees the keys
            where the mask is not 0. Default None: all keys.
          broadcast_dropout: whether all batch entries and heads drop the same weights,
            those that Flax drops with this key. Default True, as in Flax. `sdpa` then
            runs twice, for 16-bit operands with up to 120 columns of values. Flax
            computes the attention for others, and with `implementation="xla"`.
          dropout_rng: the random key for dropout.
          dropout_rate: the share of weights that is dropped, unless `deterministic`.
            With `broadcast_dropout=False`, `sdpa` drops them: of the same key, others
            than Flax would drop. Default 0.
          deterministic: whether dropout is off. Default False.
          dtype: what query, key and value are converted to. Default None: the dtype
            they promote to together.
          precision: precision of the products, as in `jax.lax.dot_general`. For bf16,
            f16 and f64 operands, no precision up to the highest makes a difference.
            Flax computes the attention for f32 operands with a value other than the
            default, and for any algorithm preset.
          module: a Flax module that is to be given the attention weights (`sow`). If
            it is given, Flax computes the attention, since a fused kernel has no
            weights to give. Default None.
          promote_dtype: nnx's replacement of the conversion to `dtype`; takes a tuple
            of arrays and `dtype`, and returns a tuple.
          is_causal: whether query s sees keys 0 to s only. Default False.
          force_fp32_for_softmax: linen's switch. The softmax is in f32 either way. If
            set, the result is f32 too, as linen's is.
          einsum_dot_general: replaces the products in linen's attention. If it is
            given, Flax computes the attention. The same holds for the next two.
          qk_attn_weights_einsum: see `einsum_dot_general`.
          attn_weights_value_einsum: see `einsum_dot_general`.
          input_positions: refused; see Raises.

        Returns:
          (..., s, h, e), of the dtype that query, key and value were converted to.

        Raises:
          ValueError: shapes that do not fit; a dropout rate outside of [0, 1), or above
            0 without a key; a causal call with one query and several keys;
            `input_positions`, which only a rotary embedding can use; an nnx `module`
            together with one of linen's options.
          TypeError: dtypes that `jax_cudnn.sdpa` does not take.
          UnsupportedError: `implementation="cudnn"` and the call asks for something
            that only Flax computes, or (when compiled for a GPU) cuDNN has no plan.

        Notes:
          A query that sees no key gives 0 here, where Flax gives the mean of all
          values. Calls that Flax computes give Flax's result in this case too.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from flax import nnx
          >>> from jax_cudnn.flax import attention_fn
          >>> layer = nnx.MultiHeadAttention(
          ...     num_heads=4, in_features=24, attention_fn=attention_fn, decode=False,
          ...     rngs=nnx.Rngs(0))
          >>> layer(jnp.ones((2, 5, 24)), is_causal=True).shape
          (2, 5, 24)
        """
        _refuse_positions(input_positions)
        q, k, v = _promote((query, key, value), dtype, promote_dtype)
        is_causal = self.is_causal or is_causal
        check_shapes(q, k, v, is_causal=is_causal)
        scores = (*q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
        request = Request(
            bias=scores_like("bias", bias, scores),
            mask=scores_like("mask", mask, scores),
            is_causal=is_causal,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=dropout_rng,
            dropout_rate=0.0 if deterministic else dropout_rate,
            precision=precision,
            module=module,
            force_fp32_for_softmax=force_fp32_for_softmax,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        return attend(q, k, v, request, self.implementation)


attention_fn = AttentionFn()


def make_attention_fn(
    *, implementation: Implementation = "auto", is_causal: bool = False
) -> AttentionFn:
    """Return an `attention_fn` with settings other than the defaults.

    Args:
      implementation: as in `jax_cudnn.sdpa`. "auto" (default): cuDNN where it has a
        plan, XLA elsewhere, and Flax for what only Flax computes (the logger
        "jax_cudnn" says so once at INFO in the last two cases). "cudnn": raises in
        these two cases. "xla": never cuDNN.
      is_causal: whether every call is causal. This is the way to a causal kernel from
        linen, whose layers can only pass a mask. Default False: as each call says. Not
        for `decode=True`, where the layer's own mask masks later keys.

    Returns:
      An `AttentionFn`, for the `attention_fn` argument of Flax's attention layers.

    Raises:
      ValueError: an unknown `implementation`.
      TypeError: an `is_causal` that is not True or False.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jax_cudnn.flax import make_attention_fn
      >>> layer = nn.MultiHeadDotProductAttention(
      ...     num_heads=4, attention_fn=make_attention_fn(is_causal=True))
      >>> output, _ = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 24)))
      >>> output.shape
      (2, 5, 24)
    """
    return AttentionFn(implementation=implementation, is_causal=is_causal)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    request: Request,
    implementation: Implementation,
) -> jax.Array:
    """Return the attention by `sdpa`, or by Flax where only Flax computes it."""
    _check_dropout(request)
    if reasons := reasons_for_flax(request, v, implementation):
        return attend_with_flax(q, k, v, request, reasons, implementation)
    batch = q.shape[:-3]
    folded = (
        _fold_batch(q, len(batch)),
        _fold_batch(k, len(batch)),
        _fold_batch(v, len(batch)),
    )
    if request.sequences is not None and not request.dropout_rate:
        with on_behalf_of("attention_fn", "cached_sdpa"):
            output = cached_sdpa(
                *folded,
                **request.sequences._asdict(),
                **request.options,
                sinks=request.sinks,
                implementation=implementation,
            )
    else:
        scores = (*batch, q.shape[-2], q.shape[-3], k.shape[-3])
        with on_behalf_of("attention_fn", "sdpa"):
            output = _attend(*folded, request, scores, implementation)
    output = jnp.reshape(output, (*q.shape[:-1], v.shape[-1]))
    return output.astype(jnp.float32) if request.force_fp32_for_softmax else output


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    request: Request,
    scores: tuple[int, ...],
    implementation: Implementation,
) -> jax.Array:
    """Call `sdpa`, given operands whose batch axes are one; ``scores`` has all."""
    mask = None if request.mask is None else as_bools(request.mask)
    mask = _fold_scores_like(mask, scores)
    if request.visibility is not None:
        mask = request.visibility if mask is None else request.visibility & Where(mask)
    attention = functools.partial(
        sdpa,
        bias=_fold_scores_like(request.bias, scores),
        is_causal=request.is_causal,
        score_mod=request.score_mod,
        implementation=implementation,
        **request.options,
    )
    if not request.dropout_rate:
        return attention(q, k, v, mask=mask, sinks=request.sinks)
    assert request.dropout_rng is not None
    if request.broadcast_dropout:
        return drop_alike(
            attention, (q, k, v), mask, request.sinks,
            rate=request.dropout_rate, rng=request.dropout_rng,
        )  # fmt: skip
    return attention(
        q, k, v, mask=mask, sinks=request.sinks,
        dropout_rate=request.dropout_rate, dropout_key=request.dropout_rng,
    )  # fmt: skip


def _fold_batch(x: jax.Array, rank: int) -> jax.Array:
    """Merge the first `rank` axes into one."""
    return jnp.reshape(x, (math.prod(x.shape[:rank]), *x.shape[rank:]))


def scores_like(
    name: str, value: ArrayLike | None, scores: tuple[int, ...]
) -> jax.Array | None:
    """Return a bias or a mask as an array, or raise where it does not broadcast."""
    if value is None:
        return None
    x = as_operand("attention_fn", name, value)
    shape = (1,) * (len(scores) - x.ndim) + x.shape
    if len(shape) != len(scores) or any(
        size not in (1, full) for size, full in zip(shape, scores, strict=True)
    ):
        raise ValueError(
            f"attention_fn: {name} has shape {list(x.shape)}, which does not broadcast "
            f"to (batch axes, heads, query length, key length) = {list(scores)}. Each "
            f"of its axes must be 1 or the full size."
            f"{axes_hint(name, x.shape, scores)}"
        )
    return x


def _fold_scores_like(x: jax.Array | None, scores: tuple[int, ...]) -> jax.Array | None:
    """Merge the batch axes of a bias or mask; its other axes of size 1 are kept."""
    if x is None:
        return None
    rank = len(scores) - 3
    shape = (1,) * (len(scores) - x.ndim) + x.shape
    x = jnp.reshape(x, shape)
    if shape[:rank] != (1,) * rank:
        x = jnp.broadcast_to(x, (*scores[:rank], *shape[rank:]))
    return _fold_batch(x, rank)


def _promote(
    arrays: tuple[ArrayLike, ...],
    dtype: DTypeLike | None,
    promote_dtype: Callable[..., Any] | None,
) -> tuple[jax.Array, ...]:
    """Convert query, key and value to one dtype, in the way the calling layer asks."""
    arrays = tuple(
        as_operand("attention_fn", name, x)
        for name, x in zip(("query", "key", "value"), arrays, strict=True)
    )
    if promote_dtype is not None:
        return tuple(promote_dtype(arrays, dtype=dtype))
    return tuple(promote_to_common_dtype(*arrays, dtype=dtype))


def check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> None:
    """Raise for query, key and value that do not fit together."""
    shapes = f"query is {q.shape}, key {k.shape}, value {v.shape}"
    if q.ndim < 3 or not q.ndim == k.ndim == v.ndim:
        raise ValueError(
            f"attention_fn: ranks do not fit: {shapes}. All three must be (batch axes, "
            "length, heads, head size), with the same number of batch axes. Insert the "
            "missing axes."
        )
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"attention_fn: batch axes differ: {shapes}. All axes before the last "
            "three must be equal. Broadcast them first."
        )
    for what, axis, names in (
        ("lengths", -3, ("key", "value")),
        ("numbers of heads", -2, ("key", "value")),
        ("head sizes", -1, ("query", "key")),
    ):
        sizes = [{"query": q, "key": k, "value": v}[name].shape[axis] for name in names]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"attention_fn: {what} of {names[0]} and {names[1]} differ, {sizes[0]} "
                f"and {sizes[1]}: {shapes}. They must be equal."
            )
    check_groups("attention_fn", q.shape[-2], k.shape[-2], shapes, "key and value")
    if is_causal and q.shape[-3] == 1 and k.shape[-3] > 1:
        raise ValueError(
            f"attention_fn: is_causal=True with one query and {k.shape[-3]} keys. The "
            "causal mask is aligned at the top left, so the query would see the first "
            "key only. In a decoding step leave is_causal False (also in "
            "make_attention_fn): the layer's mask over its cache does the work."
        )


def _check_dropout(request: Request) -> None:
    check_rate("attention_fn", request.dropout_rate)
    if request.dropout_rate and request.dropout_rng is None:
        raise ValueError(
            f"attention_fn: dropout_rate is {request.dropout_rate} but dropout_rng is "
            "None. Pass a random key (layers take it from their rngs), or "
            "deterministic=True."
        )


def _refuse_positions(input_positions: ArrayLike | None) -> None:
    if input_positions is not None:
        raise ValueError(
            f"attention_fn: input_positions of shape {jnp.shape(input_positions)} was "
            "passed. There is no rotary embedding here that could use positions. Pass "
            "an attention_fn that rotates query and key and then calls this one "
            "(docs/flax.md shows it)."
        )
