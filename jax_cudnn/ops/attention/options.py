# SPDX-License-Identifier: Apache-2.0
"""Defines the options of attention, once for all public functions that take them.

An option is a field of `AttentionCall`, which has its default and its description, and
a keyword of the first of the typed dictionaries below that fits: the functions name
these dictionaries, so type checkers know their keywords. `takes`, of
ops/common/signatures.py, writes the options into a function's signature and docstring.
Options that are part of a graph become its attributes in `AttentionCall.attributes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.graph import AttentionAttributes
from jax_cudnn.ops.attention.operands import check_scale
from jax_cudnn.ops.attention.score_mod import ScoreMod
from jax_cudnn.ops.attention.visibility.bands import WindowSize, bounds_of, check_window
from jax_cudnn.ops.attention.visibility.joining import Visibility
from jax_cudnn.ops.attention.visibility.masks import Mask
from jax_cudnn.ops.common.arguments import check_flag, options


class LayerOptions(TypedDict, total=False):
    """Options that are part of the program, of all functions and of Flax's layers."""

    scale: float | None
    is_causal: bool
    local_window_size: WindowSize


class CommonOptions(LayerOptions, total=False):
    """Options of all functions."""

    query_seq_lengths: ArrayLike | None
    implementation: Implementation | None
    plan: PlanOptions | None


class CachedOptions(CommonOptions, total=False):
    """Options of `cached_sdpa` and `paged_sdpa`."""

    sinks: ArrayLike | None


class F8Options(CommonOptions, total=False):
    """Options of `f8.sdpa` and `f8.quantized_sdpa`."""

    key_value_seq_lengths: ArrayLike | None


class SdpaOptions(CachedOptions, F8Options, total=False):
    """Options of `sdpa` and `qkv_sdpa`, and of both functions in `parallel`."""

    dropout_rate: float
    dropout_key: ArrayLike | None
    score_mod: ScoreMod | None


class TokenCounts(NamedTuple):
    """How many queries and keys a sequence has, or has room for."""

    queries: int
    keys: int


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments of a call of attention besides queries, keys and values.

    What a function lacks has its default here.

    Attributes:
      bias: added to the scaled scores; broadcasts to (b, h, s, t), and missing axes
        are inserted in front; bf16, f16, f32, f64 or integers. Differentiable. Default
        None: nothing added.
      mask: bool, broadcasts to (b, h, s, t); True lets a query see a key. Or one of
        :mod:`jax_cudnn.masks`, which is combined with the other arguments that mask
        keys. With :class:`jax_cudnn.masks.Packed`, rows contain several sequences.
        Default None: every query sees every key.
      scale: a Python number that multiplies the scores. Default None: 1/sqrt(d).
      is_causal: whether query s sees keys 0 to s only. Default False.
      query_seq_lengths: integers (b,); queries at or past their entry's length are
        padding. Default None: s.
      key_value_seq_lengths: integers (b,); keys at or past their entry's length are
        padding. Default None: t. Lengths below 0 count as 0, and lengths above the
        axis's size count as its size.
      local_window_size: (left, right): query s sees keys s - left to s + right only,
        counted from the first query and key, also where s and t differ. An int n means
        (n, n), and None for one of the two is no bound: (None, 3). A negative number
        masks near keys: with (3, -1) a query sees the 3 keys before its own position.
        It is combined with the other arguments that mask keys. Default None: no window.
      sinks: (h,), for each query head the score of one more key, which every query
        sees and whose value is 0. The score is not scaled; bf16, f16, f32 or f64.
        Differentiable. Default None: no such key.
      dropout_rate: the fraction of attention weights that is dropped, a Python number
        from 0 to below 1; it is rounded to a multiple of 2^-16. Default 0: none, and
        the result equals that of a call without dropout, bit by bit. See the notes.
      dropout_key: a key of :func:`jax.random.key`, which alone determines the dropped
        weights. Use another one for each call. Default None, for a rate of 0.
      score_mod: a function of scalars, `score_mod(score, batch, head, query_index,
        key_index)`, that returns the new score. The score is the scaled one in f32 (f64
        for f64 operands), before the bias; the indices are int32. It may capture arrays
        and index them; they get gradients. A read beyond an array's end is refused (see
        the notes). Default None: scores do not change. See also
        :mod:`jax_cudnn.score_mods`.
      implementation: "auto" (default) uses cuDNN where it has a plan and XLA elsewhere
        (the logger "jax_cudnn" says why at INFO); "cudnn" raises where cuDNN has no
        plan; "xla" never touches cuDNN. On platforms other than CUDA, all three run
        XLA. Inside :func:`jax_cudnn.plans.using`, "auto" and None mean the
        implementation that is set there.
      plan: which of cuDNN's execution plans may run the call, a
        :class:`jax_cudnn.plans.PlanOptions`. Default None: the options of
        :func:`jax_cudnn.plans.using`; outside of that scope, every plan.
    """

    bias: ArrayLike | None = None
    mask: ArrayLike | Mask | None = None
    scale: float | None = None
    is_causal: bool = False
    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    local_window_size: WindowSize = None
    sinks: ArrayLike | None = None
    dropout_rate: float = 0.0
    dropout_key: ArrayLike | None = None
    score_mod: ScoreMod | None = None
    implementation: Implementation | None = "auto"
    plan: PlanOptions | None = None

    def options(self, op: str) -> Options:
        """Return how to run the call, completed by the settings in force."""
        return options(op, self.implementation, self.plan)

    def visibility(self, op: str) -> Visibility:
        """Return the arguments that hide keys or move scores."""
        return Visibility(
            bias=self.bias,
            mask=self.mask,
            is_causal=check_flag(op, "is_causal", self.is_causal),
            query_seq_lengths=self.query_seq_lengths,
            key_value_seq_lengths=self.key_value_seq_lengths,
            local_window_size=self.local_window_size,
        )

    def attributes(
        self, visibility: Visibility, counts: TokenCounts, d: int, dtype: np.dtype
    ) -> AttentionAttributes:
        """Return the options that are part of a graph, checked.

        Args:
          visibility: the call's own arguments, or those with its mask included.
          counts: of the whole sequences.
          d: the head size of queries and keys.
          dtype: in which scores are scaled: that of the operands, or f32.
        """
        return AttentionAttributes(
            scale=check_scale(self.scale, d, dtype),
            is_causal=visibility.is_causal,
            window=check_window(
                visibility.local_window_size, *counts, is_causal=visibility.is_causal
            ),
        )


class CachedCall(AttentionCall):
    """The same for attention of the last tokens of sequences to all of their tokens.

    Attributes:
      query_seq_lengths: integers (b,); queries at or past their sequence's length are
        padding. Default None: s, which must then be as many tokens as there is room for
        at most, unless no position matters (`is_causal=False` without a window).
      is_causal: whether a query sees no token after its own. Default True.
      local_window_size: (left, right): the query that is token x sees tokens x - left
        to x + right only. An int n means (n, n), and None for one of the two is no
        bound. It is combined with `is_causal`. Default None: no window.
      sinks: (h,), for each query head the score of one more token, which every query
        sees and whose value is 0, as in :func:`jax_cudnn.sdpa`. Differentiable.
        Default None: no such token.
    """


def check_layer_options(**given: Unpack[LayerOptions]) -> dict[str, Any]:
    """Return the options of a layer in all of its calls that are not the default."""
    call = AttentionCall(**given)
    is_causal = check_flag("sdpa", "is_causal", call.is_causal)
    bounds = bounds_of(call.local_window_size, is_causal=is_causal)
    if call.scale is not None:
        check_scale(call.scale, 1, np.dtype(np.float32))
    window = None if bounds == (None, None) else bounds
    found = {**given, "local_window_size": window}
    plain = AttentionCall()
    return {name: x for name, x in found.items() if x != getattr(plain, name)}
