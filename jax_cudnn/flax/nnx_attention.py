# SPDX-License-Identifier: Apache-2.0
"""nnx's `MultiHeadAttention` on `jax_cudnn.sdpa`, with more than nnx's own has."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation
from jax_cudnn.flax.decoding import Cache
from jax_cudnn.flax.fusion import call_with
from jax_cudnn.flax.heads import (
    Heads,
    Settings,
    check_heads,
    refuse_attention_fn,
    refuse_products,
)
from jax_cudnn.flax.nnx_f8 import F8DotGeneral
from jax_cudnn.ops.attention.options import LayerOptions
from jax_cudnn.ops.attention.rotary import Rotary
from jax_cudnn.ops.attention.score_mod import ScoreMod
from jax_cudnn.ops.attention.visibility.bands import WindowSize
from jax_cudnn.ops.attention.visibility.masks import Mask
from jax_cudnn.ops.common.arguments import check_flag
from jax_cudnn.ops.common.f8_recipes import Recipe

_NAME = "MultiHeadAttention"


class MultiHeadAttention(nnx.MultiHeadAttention):
    r"""`flax.nnx.MultiHeadAttention` on `jax_cudnn.sdpa`.

    .. math::

        \mathrm{output} = \mathrm{out}\big(\mathrm{sdpa}(R(Q), R(K), V)\big)

    with the projections Q, K and V of the inputs, normalised with `normalize_qk`, and
    the rotary embedding R, if there is one. A subclass of nnx's layer with the same
    parameters, so that checkpoints fit in both directions. Without the arguments that
    are new here, it computes what nnx's layer computes.

    Args:
      num_heads: as in `flax.nnx.MultiHeadAttention`, like the next five.
      in_features: see there.
      qkv_features: see there.
      out_features: see there.
      num_kv_heads: see there; a key head serves several query heads without copies.
      in_kv_features: see there.
      is_causal: whether every call is causal, as in `jax_cudnn.sdpa`; a call may say so
        too. Default False.
      local_window_size: as in `jax_cudnn.sdpa`, in every call. Default None.
      scale: as in `jax_cudnn.sdpa`. Default None: 1/sqrt(head size).
      rotary: a :class:`jax_cudnn.flax.Rotary`: queries and keys get their positions by
        rotation. Default None: no rotary embedding.
      use_sinks: whether the layer has one more parameter, `sinks` (num_heads,): for
        each head the score of a key without a value. Default False.
      sinks_init: its initialiser. Default zeros.
      score_mod: a function of each score and its indices, as in `jax_cudnn.sdpa`, for
        one batch axis merged from all; `jax_cudnn.score_mods` has softcap, ALiBi and
        others. Its arrays are no parameters. With a cache, the indices are places in
        the sequence. Default None.
      recipe: `f8.Delayed()` or another recipe of f8: the four projections run in f8,
        each by a :class:`jax_cudnn.flax.nnx.F8DotGeneral` of its own. Default None: no
        f8.
      implementation: "auto" (default), "cudnn" or "xla", as in `jax_cudnn.sdpa`.
      rngs: as in `flax.nnx.MultiHeadAttention`.
      **options: all other keyword arguments of the installed
        `flax.nnx.MultiHeadAttention` but `attention_fn`: dtype, param_dtype, use_bias,
        normalize_qk, dropout_rate, decode, precision, ...

    Raises:
      ValueError: `attention_fn` is given; heads that do not fit; an unknown
        `implementation`; a `scale` that is not finite; a `recipe` with a
        `dot_general`.
      TypeError: a `recipe`, `rotary`, `scale`, `score_mod`, `local_window_size` or flag
        of another type.

    Notes:
      Differences from nnx's layer are those of `attention_fn`: a query that sees no key
      gives 0. Dropout of attention weights, `sow_weights` and `precision` go where they
      go with `attention_fn`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax import Rotary
      >>> from jax_cudnn.flax.nnx import MultiHeadAttention
      >>> layer = MultiHeadAttention(
      ...     num_heads=6, in_features=48, num_kv_heads=2, is_causal=True,
      ...     rotary=Rotary(), decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 48))).shape
      (2, 5, 48)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        is_causal: bool = False,
        local_window_size: WindowSize = None,
        scale: float | None = None,
        rotary: Rotary | None = None,
        use_sinks: bool = False,
        sinks_init: jax.nn.initializers.Initializer = jax.nn.initializers.zeros,
        score_mod: ScoreMod | None = None,
        recipe: Recipe | None = None,
        implementation: Implementation = "auto",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if "attention_fn" in options:
            refuse_attention_fn(_NAME)
        if recipe is not None:
            given = [name for name in options if "dot_general" in name]
            refuse_products(_NAME, given)
        if num_kv_heads is not None:
            check_heads(_NAME, num_heads, num_kv_heads)
        self.settings = Settings(
            layer=_NAME,
            implementation=implementation,
            options=LayerOptions(
                is_causal=is_causal, local_window_size=local_window_size, scale=scale
            ),
            rotary=rotary,
            score_mod=score_mod,
        )
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            rngs=rngs,
            **options,
        )
        if recipe is not None:
            for projection in (self.query, self.key, self.value, self.out):
                product = F8DotGeneral(recipe, implementation)
                projection.dot_general = nnx.data(product)
        # Last, so that all other parameters draw the same random keys as in nnx.
        self.sinks: nnx.Param[jax.Array] | None
        if use_sinks:
            drawn = sinks_init(rngs.params(), (num_heads,), self.param_dtype)
            self.sinks = nnx.Param(drawn)
        else:
            self.sinks = nnx.data(None)

    def __call__(  # type: ignore[override]
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: ArrayLike | Mask | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: ArrayLike | None = None,
        input_lengths: ArrayLike | None = None,
    ) -> jax.Array:
        r"""Return the attention of `inputs_q` over the keys.

        Axis letters: ... any number of batch axes, s query length, t key length, h
        query heads.

        Args:
          inputs_q: (..., s, in_features).
          inputs_k: (..., t, in_kv_features). Default None: `inputs_q`.
          inputs_v: (..., t, in_kv_features). Default None: `inputs_k`.
          mask: an array, bool or numbers, that broadcasts to (..., h, s, t): a query
            sees the keys where it is not 0. Or one of :mod:`jax_cudnn.masks`, whose
            arrays have one batch axis, for all batch axes merged into one.
          deterministic: as in nnx's layer, like the next two.
          rngs: see there.
          sow_weights: see there.
          decode: whether the inputs are the next tokens after those in the cache.
            Default None: the layer's `decode`.
          is_causal: whether query s sees keys 0 to s only. Default False: as the layer
            says.
          out_sharding: as in nnx's layer, like the next one.
          qkv_sharding: see there.
          input_positions: (..., s), the tokens' positions for the rotary embedding, or
            what broadcasts to it. Default None: 0 to s - 1 for queries, 0 to t - 1 for
            keys; after the cached tokens with `decode`.
          input_lengths: with `decode`, integers (...,): tokens at or past their batch
            entry's length are padding, which the cache does not keep. Needs a cache
            made with `ragged=True`. Default None: no padding.

        Returns:
          (..., s, out_features). Tokens of padding give what `out` makes of 0. With
          `decode`, batch entries whose tokens find no room in the cache give NaN.

        Raises:
          ValueError: shapes that do not fit; `decode` without a cache; `is_causal` with
            one query and several keys; `input_lengths` without `decode`;
            `input_positions` without a rotary embedding; Prefix or Blocks in `mask`
            with `decode`; sinks or `score_mod`
            together with what only Flax's attention computes.
          TypeError: lengths that are not integers; dtypes that `jax_cudnn.sdpa` does
            not take.
          UnsupportedError, LibraryError: as `jax_cudnn.flax.attention_fn`.

        Notes:
          With `decode`, t is the length of the cache. A token sees the cached tokens up
          to itself, in bands of the layer and of `mask` too. A call may bring any
          number of tokens: a prompt, then one token after the other.
        """
        decode = self.decode if decode is None else decode
        heads = Heads(
            settings=self.settings,
            module=self,
            sinks=None if self.sinks is None else self.sinks[...],
            positions=input_positions,
            lengths=input_lengths,
            cache=self._cache() if decode else None,
        )
        output = call_with(
            nnx.MultiHeadAttention,
            self,
            inputs_q,
            inputs_k,
            inputs_v,
            keywords={
                "mask": mask,
                "deterministic": deterministic,
                "rngs": rngs,
                "sow_weights": sow_weights,
                # None is refused there.
                "decode": None if decode is None else False,
                "is_causal": check_flag(_NAME, "is_causal", is_causal),
                "out_sharding": out_sharding,
                "qkv_sharding": qkv_sharding,
            },
            attention_fn=heads,
        )
        if decode and heads.cache is not None:
            for variable, value in zip(self._variables(), heads.cache, strict=True):
                variable[...] = value
        return output

    def init_cache(
        self,
        input_shape: tuple[int, ...],
        dtype: DTypeLike = jnp.float32,
        *,
        ragged: bool = False,
    ) -> None:
        """Make an empty cache, or empty the one that is there.

        Args:
          input_shape: (..., t, features), with the most tokens t that the cache is for.
          dtype: of the cached keys and values. Default f32, as in nnx's layer.
          ragged: whether each batch entry has its own number of tokens: `cache_index`
            has the batch axes then. Default False: one number for all.
        """
        super().init_cache(input_shape, dtype)
        if ragged:
            self.cache_index = nnx.Cache(jnp.zeros(input_shape[:-2], jnp.int32))

    def _variables(self) -> tuple[Any, Any, Any]:
        return self.cached_key, self.cached_value, self.cache_index

    def _cache(self) -> Cache:
        variables = self._variables()
        if any(variable is None for variable in variables):
            raise ValueError(
                f"{_NAME}: decode=True, and the layer has no cache. Call "
                "init_cache((batch axes, most tokens, features)) first."
            )
        return Cache(*(variable[...] for variable in variables))
