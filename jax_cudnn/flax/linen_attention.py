# SPDX-License-Identifier: Apache-2.0
"""linen's `MultiHeadDotProductAttention` on `jax_cudnn.sdpa`, with more options.

nnx's layer runs the code that Flax wrote. linen's code has one number of heads for
queries and keys, so what it does around the attention is written here once more.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation
from jax_cudnn.flax.decoding import Cache
from jax_cudnn.flax.heads import (
    Heads,
    Settings,
    check_heads,
    refuse_attention_fn,
    refuse_products,
)
from jax_cudnn.flax.linen_f8 import F8DotGeneral
from jax_cudnn.ops.attention.options import LayerOptions
from jax_cudnn.ops.attention.rotary import Rotary
from jax_cudnn.ops.attention.score_mod import ScoreMod
from jax_cudnn.ops.attention.visibility.bands import WindowSize
from jax_cudnn.ops.attention.visibility.masks import Mask
from jax_cudnn.ops.common.f8_recipes import Recipe


class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):
    r"""`flax.linen.MultiHeadDotProductAttention` on `jax_cudnn.sdpa`.

    .. math::

        \mathrm{output} = \mathrm{out}\big(\mathrm{sdpa}(R(Q), R(K), V)\big)

    with the projections Q, K and V of the inputs, normalised with `normalize_qk`, and
    the rotary embedding R, if there is one. It has the parameters of linen's layer, by
    their names, shapes and initial values, so that checkpoints fit in both directions.
    Without the attributes that are new here, it computes what linen's layer computes.

    Attributes:
      num_kv_heads: how many heads keys and values have; a divisor of `num_heads`. A key
        head serves several query heads without copies (GQA). Default None: `num_heads`.
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
        each by an :class:`F8DotGeneral` of its own; see the guide "f8". Not with
        attributes for a `dot_general`. Default None: as these say.
      ragged_cache: whether `cache_index` is made with one number for each batch entry.
        Default False: one for all.
      implementation: "auto" (default), "cudnn" or "xla", as in `jax_cudnn.sdpa`.
      attention_fn: must not be given. All other attributes are those of
        `flax.linen.MultiHeadDotProductAttention`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax import Rotary
      >>> from jax_cudnn.flax.linen import MultiHeadDotProductAttention
      >>> layer = MultiHeadDotProductAttention(
      ...     num_heads=6, num_kv_heads=2, is_causal=True, rotary=Rotary())
      >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 48)))
      >>> y.shape
      (2, 5, 48)
    """

    num_kv_heads: int | None = None
    is_causal: bool = False
    local_window_size: WindowSize = None
    scale: float | None = None
    rotary: Rotary | None = None
    use_sinks: bool = False
    sinks_init: jax.nn.initializers.Initializer = jax.nn.initializers.zeros
    score_mod: ScoreMod | None = None
    recipe: Recipe | None = None
    ragged_cache: bool = False
    implementation: Implementation = "auto"

    @linen.compact
    def __call__(  # type: ignore[override]
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: jax.Array | None = None,
        mask: ArrayLike | Mask | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        is_causal: bool = False,
        input_positions: ArrayLike | None = None,
        input_lengths: ArrayLike | None = None,
    ) -> jax.Array:
        r"""Return the attention of `inputs_q` over the keys.

        Axis letters: ... any number of batch axes, s query length, t key length, h
        query heads.

        Args:
          inputs_q: (..., s, features).
          inputs_k: (..., t, features). Default None: `inputs_q`.
          inputs_v: (..., t, features). Default None: `inputs_k`.
          inputs_kv: both in one, as in linen's layer, which says that it will be gone.
          mask: an array, bool or numbers, that broadcasts to (..., h, s, t): a query
            sees the keys where it is not 0. Or one of :mod:`jax_cudnn.masks`, whose
            arrays have one batch axis, for all batch axes merged into one.
          deterministic: as in linen's layer, like the next two.
          dropout_rng: see there.
          sow_weights: see there.
          is_causal: whether query s sees keys 0 to s only. Default False: as the layer
            says.
          input_positions: (..., s), the tokens' positions for the rotary embedding, or
            what broadcasts to it. Default None: 0 to s - 1 for queries, 0 to t - 1 for
            keys; after the cached tokens with `decode`.
          input_lengths: with `decode`, integers (...,): tokens at or past their batch
            entry's length are padding, which the cache does not keep. Needs
            `ragged_cache`. Default None: no padding.

        Returns:
          (..., s, out_features). Tokens of padding give what `out` makes of 0. With
          `decode`, batch entries whose tokens find no room in the cache give NaN.

        Raises:
          ValueError: shapes and heads that do not fit; `attention_fn`, an unknown
            `implementation`, or a `recipe` beside a `dot_general` among the attributes;
            `is_causal` with one query and several keys; `input_lengths` without
            `decode`; `input_positions` without a rotary embedding; Prefix or Blocks in
            `mask` with `decode`; sinks together with what only Flax's attention
            computes.
          TypeError: a `recipe`, `rotary`, `scale`, `score_mod`, `local_window_size` or
            flag of another type;
            lengths that are not integers; dtypes that `jax_cudnn.sdpa` does not take.
          UnsupportedError, LibraryError: as `jax_cudnn.flax.attention_fn`.

        Notes:
          With `decode`, the collection "cache" is that of linen's layer: `init` makes
          it, for as many tokens as its inputs have. Later calls add their tokens to it;
          t is its length then. A token sees the cached tokens up to itself, in bands of
          the layer and of `mask` too. A call may bring any number of tokens: a prompt,
          then one token after the other.
        """
        name = type(self).__name__
        inputs_k, inputs_v = _inputs(name, inputs_q, inputs_k, inputs_v, inputs_kv)
        sizes = self._sizes(name, inputs_q.shape[-1])
        product = self._product_cls(name, self.qkv_dot_general_cls)
        inputs = inputs_q, inputs_k, inputs_v
        query, key, value = self._projected(sizes, product, *inputs)
        heads = Heads(
            settings=self._settings(name),
            module=self,
            sinks=self._sinks(),
            positions=input_positions,
            lengths=input_lengths,
        )
        variables = self._cache_variables(key, value) if self.decode else ()
        # While the cache is made, the inputs are there for their shape only.
        if variables:
            heads.cache = Cache(*(variable.value for variable in variables))
        elif self.decode:
            heads.lengths = None
        is_deterministic, dropout_rng = self._dropout(deterministic, dropout_rng)
        attended = heads(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=dropout_rng,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=is_deterministic,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            is_causal=is_causal,
            force_fp32_for_softmax=self.force_fp32_for_softmax,
            qk_attn_weights_einsum=_made(self.qk_attn_weights_einsum_cls),
            attn_weights_value_einsum=_made(self.attn_weights_value_einsum_cls),
        )
        if variables and heads.cache is not None:
            for variable, array in zip(variables, heads.cache, strict=True):
                variable.value = array
        return linen.DenseGeneral(
            features=self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            dot_general=self.out_dot_general,
            dot_general_cls=self._product_cls(name, self.out_dot_general_cls),
            name="out",
        )(attended)

    @linen.nowrap
    def _settings(self, name: str) -> Settings:
        if self.attention_fn is not linen.dot_product_attention:
            refuse_attention_fn(name)
        return Settings(
            layer=name,
            implementation=self.implementation,
            options={
                name: getattr(self, name) for name in LayerOptions.__optional_keys__
            },
            rotary=self.rotary,
            score_mod=self.score_mod,
        )

    @linen.nowrap
    def _sizes(self, name: str, features: int) -> tuple[int, int, int]:
        """Return the numbers of query heads and key heads, and their size."""
        qkv_features = self.qkv_features or features
        if qkv_features % self.num_heads:
            raise ValueError(
                f"{name}: {qkv_features} features of queries and keys (qkv_features) "
                f"are not a multiple of num_heads={self.num_heads}."
            )
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        check_heads(name, self.num_heads, kv_heads)
        return self.num_heads, kv_heads, qkv_features // self.num_heads

    @linen.nowrap
    def _product_cls(self, name: str, given: Any) -> Any:
        """Return what makes the `dot_general` of a projection; None for JAX's."""
        if self.recipe is None:
            return given
        others = (
            *("qkv_dot_general", "qkv_dot_general_cls"),
            *("out_dot_general", "out_dot_general_cls"),
        )
        refuse_products(name, [x for x in others if getattr(self, x) is not None])
        return functools.partial(
            F8DotGeneral, recipe=self.recipe, implementation=self.implementation
        )

    @linen.nowrap
    def _projected(
        self, sizes: tuple[int, int, int], product: Any, *inputs: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return query, key and value, made in linen's order and by linen's names."""
        h, k, d = sizes
        dense = functools.partial(
            linen.DenseGeneral,
            axis=-1,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            use_bias=self.use_bias,
            precision=self.precision,
            dot_general=self.qkv_dot_general,
            dot_general_cls=product,
        )
        query, key, value = (
            dense(features=(n, d), name=name)(x)
            for n, name, x in zip(
                (h, k, k), ("query", "key", "value"), inputs, strict=True
            )
        )
        if self.normalize_qk:
            norm = functools.partial(
                linen.LayerNorm,
                use_bias=False,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
            )
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)
        return query, key, value

    @linen.nowrap
    def _sinks(self) -> jax.Array | None:
        if not self.use_sinks:
            return None
        return self.param("sinks", self.sinks_init, (self.num_heads,), self.param_dtype)

    @linen.nowrap
    def _cache_variables(self, key: jax.Array, value: jax.Array) -> tuple[Any, ...]:
        """Return the cache's variables, or () in the call that makes them."""
        is_made = self.has_variable("cache", "cached_key")
        index_shape = key.shape[:-3] if self.ragged_cache else ()
        variables = (
            self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype),
            self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype),
            self.variable("cache", "cache_index", jnp.zeros, index_shape, jnp.int32),
        )
        return variables if is_made else ()

    @linen.nowrap
    def _dropout(
        self, deterministic: bool | None, dropout_rng: jax.Array | None
    ) -> tuple[bool, jax.Array | None]:
        if not self.dropout_rate > 0.0:
            return True, dropout_rng
        merged = linen.merge_param("deterministic", self.deterministic, deterministic)
        if not merged and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        return merged, dropout_rng


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention`, by the other name that linen has for it."""


def _inputs(
    name: str,
    inputs_q: jax.Array,
    inputs_k: jax.Array | None,
    inputs_v: jax.Array | None,
    inputs_kv: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return what keys and values are made of."""
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError(
                f"{name}: inputs_kv was passed with inputs_k or inputs_v. It stands "
                "for both. Pass inputs_k and inputs_v."
            )
        warnings.warn(
            f"{name}: linen will drop inputs_kv. Pass inputs_k.",
            DeprecationWarning,
            stacklevel=4,
        )
        return inputs_kv, inputs_kv
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError(
                f"{name}: inputs_v was passed without inputs_k. For both the same, "
                "pass inputs_k alone."
            )
        inputs_k = inputs_q
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def _made(maker: Any) -> Any:
    return maker() if maker else None
