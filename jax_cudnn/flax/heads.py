# SPDX-License-Identifier: Apache-2.0
"""Runs an attention layer, of nnx or of linen, between its projections.

It applies rotary embedding, cache and attention. Parameters and projections are Flax's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from flax.linen.dtypes import promote_dtype as promote_to_common_dtype
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, Options
from jax_cudnn.flax import decoding
from jax_cudnn.flax.attention import attend, check_shapes, scores_like
from jax_cudnn.flax.decoding import Cache
from jax_cudnn.flax.delegate import Request
from jax_cudnn.ops.attention.options import check_layer_options
from jax_cudnn.ops.attention.rotary import Rotary
from jax_cudnn.ops.attention.score_mod import ScoreMod
from jax_cudnn.ops.attention.visibility.bands import bounds_of
from jax_cudnn.ops.attention.visibility.masks import Mask, Window
from jax_cudnn.ops.common.arguments import check_flag
from jax_cudnn.ops.common.callers import on_behalf_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a layer's attention in all of its calls; checked when made.

    ``layer`` is the layer's name in messages. The rest is as in `jax_cudnn.sdpa`, the
    ``options`` among them; those that are not the default are kept.
    """

    layer: str
    implementation: Implementation = "auto"
    options: Mapping[str, Any] = FrozenDict()
    rotary: Rotary | None = None
    score_mod: ScoreMod | None = None

    def __post_init__(self) -> None:
        Options(implementation=self.implementation)  # refuses unknown names
        with on_behalf_of(self.layer, "sdpa"):
            options = check_layer_options(**self.options)
        object.__setattr__(self, "options", FrozenDict(options))
        if not (self.score_mod is None or callable(self.score_mod)):
            raise TypeError(
                f"{self.layer}: score_mod is {self.score_mod!r}. It must be a function "
                "of (score, batch, head, query_index, key_index), such as those of "
                "jax_cudnn.score_mods."
            )
        if not (self.rotary is None or isinstance(self.rotary, Rotary)):
            raise TypeError(
                f"{self.layer}: rotary is {self.rotary!r}. Pass a "
                "jax_cudnn.flax.Rotary, or None for no rotary embedding."
            )


@dataclass(kw_only=True, slots=True)
class Heads:
    """One call's attention, in place of Flax's `attention_fn`.

    ``cache`` is what the call reads; afterwards it is the updated cache.
    ``module`` is the layer itself, into which Flax's attention may sow its weights.
    """

    settings: Settings
    module: Any
    sinks: jax.Array | None
    positions: ArrayLike | None = None
    lengths: ArrayLike | None = None
    cache: Cache | None = None

    # The names are those by which Flax's layers pass their arguments.
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: ArrayLike | Mask | None = None,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        """Return (..., s, h, d), the heads' outputs for the projected operands."""
        settings = self.settings
        layer = settings.layer
        q, k, v = promote_to_common_dtype(query, key, value, dtype=dtype)
        options = dict(settings.options)
        is_causal = check_flag(layer, "is_causal", is_causal)
        is_causal = options.pop("is_causal", False) or is_causal
        with on_behalf_of(layer, "attention_fn"):
            check_shapes(q, k, v, is_causal=False)
        self._check_call(q, k, is_causal=is_causal)
        visibility, mask = (mask, None) if isinstance(mask, Mask) else (None, mask)
        if (size := options.pop("local_window_size", None)) is not None:
            with on_behalf_of(layer, "sdpa"):
                bounds = bounds_of(size, is_causal=is_causal)
            window = Window(*bounds)
            visibility = window if visibility is None else visibility & window
        cache, new, sequences = self.cache, None, None
        score_mod = settings.score_mod
        if cache is None:
            q, k = self._rotated(q, k, None)
        else:
            new = decoding.new_tokens(layer, cache, k, self.lengths)
            if score_mod is not None:
                score_mod = decoding.score_mod_of(score_mod, cache, new)
            elif mask is None:
                sequences = decoding.sequences(visibility, cache, new)
            visibility = decoding.visible(layer, visibility, cache, new)
            is_causal = False  # part of what is visible
            q, k = self._rotated(q, k, new.positions)
            cache = self.cache = decoding.append(cache, k, v, new)
            k, v = (x.astype(k.dtype) for x in (cache.key, cache.value))
        scores = (*q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
        with on_behalf_of(layer, "attention_fn", make_attention_fn=layer):
            request = Request(
                bias=None,
                mask=scores_like("mask", mask, scores),
                is_causal=is_causal,
                broadcast_dropout=broadcast_dropout,
                dropout_rng=dropout_rng,
                dropout_rate=0.0 if deterministic else dropout_rate,
                precision=precision,
                module=None if module is None else self.module,
                force_fp32_for_softmax=force_fp32_for_softmax,
                einsum_dot_general=None,
                qk_attn_weights_einsum=qk_attn_weights_einsum,
                attn_weights_value_einsum=attn_weights_value_einsum,
                visibility=visibility,
                sequences=sequences,
                options=options,
                sinks=self.sinks,
                score_mod=score_mod,
            )
            output = attend(q, k, v, request, settings.implementation)
        if cache is None or new is None:
            return output
        return decoding.nan_without_room(output, cache, new)

    def _check_call(self, q: jax.Array, k: jax.Array, *, is_causal: bool) -> None:
        layer, s, t = self.settings.layer, q.shape[-3], k.shape[-3]
        if self.cache is not None:
            if s != t:
                raise ValueError(
                    f"{layer}: {s} queries and {t} keys are to be added to the cache. "
                    "Their numbers must be equal."
                )
            return
        if self.lengths is not None:
            raise ValueError(
                f"{layer}: input_lengths was passed without decode=True. It says which "
                "tokens are kept in the cache. Hide padding by "
                "mask=jax_cudnn.masks.Lengths(...)."
            )
        if is_causal and s == 1 < t:
            raise ValueError(
                f"{layer}: is_causal=True with one query and {t} keys. The causal mask "
                "is aligned at the top left, so the query would see the first key "
                "only. To add a token to those before it, pass decode=True."
            )

    def _rotated(
        self, q: jax.Array, k: jax.Array, positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys with their rotary embedding, if there is one."""
        layer, rotary, given = self.settings.layer, self.settings.rotary, self.positions
        if rotary is None:
            if given is not None:
                raise ValueError(
                    f"{layer}: input_positions of shape {list(jnp.shape(given))} was "
                    "passed, and the layer has no rotary embedding. Make it with "
                    "rotary=jax_cudnn.flax.Rotary()."
                )
            return q, k
        s, t = q.shape[-3], k.shape[-3]
        if given is not None and s != t:
            raise ValueError(
                f"{layer}: input_positions was passed with {s} queries and {t} keys. "
                "Positions are shared by queries and keys, whose numbers must be equal."
            )
        if given is None:
            given = positions
        with on_behalf_of(layer, "apply_rotary", positions="input_positions"):
            return tuple(  # type: ignore[return-value]
                rotary(
                    x,
                    jnp.arange(size, dtype=jnp.int32) if given is None else given,
                )
                for x, size in ((q, s), (k, t))
            )


def refuse_attention_fn(layer: str) -> None:
    """Raise for another attention, passed to a layer that has its own."""
    raise ValueError(
        f"{layer}: attention_fn was passed. This layer runs jax_cudnn.sdpa. Leave it "
        "out, or pass it to Flax's layer."
    )


def refuse_products(layer: str, given: Sequence[str]) -> None:
    """Raise for a `dot_general`, passed by these names beside a recipe."""
    if given:
        raise ValueError(
            f"{layer}: {', '.join(given)} was passed with recipe. Either decides "
            "how the projections are multiplied. Omit one of them."
        )


def check_heads(layer: str, num_heads: int, num_kv_heads: int) -> None:
    """Raise unless each key head serves equally many query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{layer}: num_heads={num_heads} is not a multiple of num_kv_heads="
            f"{num_kv_heads}. Each key head serves equally many query heads."
        )
