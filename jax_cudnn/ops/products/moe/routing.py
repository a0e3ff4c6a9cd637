# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.moe.router`: which experts each token goes to, with which weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation
from jax_cudnn.ops.common.arguments import (
    Precision,
    as_operand,
    check_dtype,
    check_flag,
    check_int,
    check_number,
    describe,
    options,
)
from jax_cudnn.ops.common.meshes import AxisName, check_names, size_along
from jax_cudnn.ops.common.pytrees import as_pytree
from jax_cudnn.ops.products.matmul import matmul
from jax_cudnn.ops.products.moe.permutation import total_counts, wide_dtype

Scores = Literal["softmax", "sigmoid"]


@functools.partial(as_pytree, module="jax_cudnn.moe")
@dataclass(frozen=True)
class Auxiliary:
    """Losses of a mixture of experts, and how tokens are spread over the experts.

    Attributes:
      load_balance_loss: f32 scalar, 1 where all experts get alike, up to e where one
        gets all; :func:`jax_cudnn.moe.router` has the formula.
      z_loss: f32 scalar, the mean square of the log-sum-exp of the logits.
      load: (e,) f32, the fraction of all choices that each expert got, dropped ones
        included. It has no gradient.
      dropped: f32 scalar, the fraction of all choices that was dropped for want of
        capacity. It has no gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import moe
      >>> x, w = jnp.eye(4), jnp.eye(4)
      >>> moe.router(x, w, top_k=1).auxiliary.load
      Array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """

    load_balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array
    dropped: jax.Array


@functools.partial(as_pytree, module="jax_cudnn.moe")
@dataclass(frozen=True)
class Routing:
    """The experts of each token.

    Attributes:
      weights: (..., k) f32 (f64 for f64), what each expert's result is multiplied by.
      experts: (..., k) i32, from 0 to e - 1.
      auxiliary: an :class:`Auxiliary`, in which nothing is dropped.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import moe
      >>> moe.router(jnp.ones((5, 4)), jnp.eye(4), top_k=2).weights.shape
      (5, 2)
    """

    weights: jax.Array
    experts: jax.Array
    auxiliary: Auxiliary


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The arguments of a router that are no arrays."""

    top_k: int
    scores: Scores = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        op: str,
        *,
        top_k: int,
        scores: Scores,
        normalize: bool,
        scale: float,
        groups: Sequence[int] | None,
    ) -> Rule:
        """Return the caller's rule, or raise TypeError for what is of another type."""
        if groups is not None:
            if not isinstance(groups, Sequence) or isinstance(groups, str | bytes):
                raise TypeError(
                    f"{op}: groups={groups!r} is no pair. Pass (count, chosen): how "
                    "many groups the experts form, and of how many a token's are."
                )
            groups = tuple(check_int(op, "groups", each) for each in groups)
        return cls(
            top_k=check_int(op, "top_k", top_k),
            scores=scores,
            normalize=check_flag(op, "normalize", normalize),
            scale=check_number(op, "scale", scale),
            groups=groups,
        )


def router(
    x: ArrayLike,
    router_w: ArrayLike,
    *,
    top_k: int,
    scores: Scores = "softmax",
    selection_bias: ArrayLike | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    groups: tuple[int, int] | None = None,
    axis_name: AxisName | None = None,
    precision: Precision = None,
) -> Routing:
    r"""Return the top k experts of each token, their weights, and auxiliary losses.

    With the logits :math:`z_{te} = \sum_d x_{td} \, \mathrm{router\_w}_{de}` and the
    scores :math:`s = \mathrm{softmax}_e(z)` or :math:`\mathrm{sigmoid}(z)`, token t
    goes to the k experts with the largest :math:`s_{te} + \mathrm{selection\_bias}_e`.
    The bias chooses, and is in no weight:

    .. math::

        \mathrm{weights}_{tk} = \mathrm{scale} \,
            \frac{s_{t,e(t,k)}}{\sum_{k'} s_{t,e(t,k')}}

    Without `normalize`, there is no denominator. Logits, scores and weights are f32
    (f64 for f64). With :math:`f_e` the fraction of the k t choices that are expert e,
    and :math:`p_{te}` the scores divided by their sum over the experts, the losses are

    .. math::

        \mathrm{load\_balance\_loss} = e \sum_e f_e \, \frac{1}{t} \sum_t p_{te}
        \qquad
        \mathrm{z\_loss} = \frac{1}{t} \sum_t \Big(\log \sum_e \exp z_{te}\Big)^2

    The first is the Switch Transformer's (arXiv:2101.03961, equations 4 to 6) for k
    choices, and the second is ST-MoE's (arXiv:2202.08906, equation 5).

    Axis letters: t tokens (any number of axes), d width, e experts, k choices.

    Args:
      x: (..., d) floats.
      router_w: (d, e) floats. It may be of another dtype than `x`: both become f32
        then.
      top_k: k, from 1 to e.
      scores: "softmax" (default; Mixtral) or "sigmoid" (DeepSeek-V3).
      selection_bias: (e,) floats, added to the scores for choosing (DeepSeek-V3's
        balance without a loss). It has no gradient. Default None: 0.
      normalize: whether the weights of a token add up to `scale`. Default True, as in
        Mixtral and DeepSeek-V3. Switch Transformers, with one choice, have False.
      scale: a factor of all weights (DeepSeek's routed_scaling_factor). Default 1.
      groups: (count, chosen): the experts form so many groups of equal size, and each
        token goes to experts of the best groups alone, as many as are chosen. A group
        is as good as the sum of its two largest scores with the bias (DeepSeek-V3's
        n_group and topk_group). Default None: one group.
      axis_name: inside :func:`jax.shard_map`, the mesh axis, or several, over which
        the tokens are divided. Losses and load are those of all tokens then. Default
        None: none.
      precision: as for :func:`jax_cudnn.matmul`.

    Returns:
      A :class:`Routing`.

    Raises:
      ValueError: shapes that do not fit, unknown `scores`, `top_k` or `groups` that
        ask for more experts than there are, a `scale` that is not finite, an
        `axis_name` over which nothing is sharded here.
      TypeError: operands that are no floats; a `top_k` or `groups` that are no ints, a
        `scale` that is no number, a `normalize` that is no bool, an `axis_name` that is
        no name.

    Notes:
      Hugging Face's load_balancing_loss_func is k times this one. NaN and infinities
      in a token reach its own weights, and the losses, but no other token.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn import moe
      >>> x, w = jax.random.normal(jax.random.key(0), (2, 8, 8))
      >>> routing = moe.router(x, w, top_k=2)
      >>> routing.experts.shape, float(routing.weights[0].sum())
      ((8, 2), 1.0)
    """
    op = "moe.router"
    rule = Rule.of(
        op,
        top_k=top_k,
        scores=scores,
        normalize=normalize,
        scale=scale,
        groups=groups,
    )
    tokens = as_operand(op, "x", x)
    matrix = as_operand(op, "router_w", router_w)
    check_router(op, tokens, matrix, rule)
    bias = check_selection_bias(op, selection_bias, matrix.shape[1])
    shape = tokens.shape[:-1]
    tokens = tokens.reshape(math.prod(shape), tokens.shape[-1])
    axes = check_names(op, "axis_name", axis_name)
    if axis_name:
        size_along(op, "axis_name", axis_name)  # raises where there is no such axis
    options(op, None, None, precision)
    found = route(tokens, matrix, bias, rule, axes, precision)
    weights, experts = (
        x.reshape(*shape, top_k) for x in (found.weights, found.experts)
    )
    return replace(found, weights=weights, experts=experts)


def check_router(op: str, x: jax.Array, router_w: jax.Array, rule: Rule) -> None:
    """Raise unless tokens, the router's matrix and its rule go together."""
    for name, operand in (("x", x), ("router_w", router_w)):
        check_dtype(op, name, operand)
    if x.ndim < 1 or router_w.ndim != 2 or x.shape[-1] != router_w.shape[0]:
        raise ValueError(
            f"{op}: x is {describe(x)} and router_w {describe(router_w)}. They must be "
            "(..., width) and (width, experts), of the same width. Transpose router_w "
            "if it is (experts, width)."
        )
    count = router_w.shape[1]
    if not 1 <= rule.top_k <= count:
        raise ValueError(
            f"{op}: top_k={rule.top_k} experts are chosen of {count}. It must be from "
            f"1 to {count}."
        )
    if rule.scores not in get_args(Scores):
        raise ValueError(
            f"{op}: scores={rule.scores!r} is not one of "
            f"{', '.join(map(repr, get_args(Scores)))}."
        )
    if not math.isfinite(rule.scale):
        raise ValueError(f"{op}: scale={rule.scale} is not finite. Pass a number.")
    if rule.groups is not None:
        _check_groups(op, rule.groups, rule.top_k, count)


def _check_groups(op: str, groups: tuple[int, ...], top_k: int, count: int) -> None:
    number, chosen = groups if len(groups) == 2 else (0, 0)
    if number < 1 or count % number or not 1 <= chosen <= number:
        raise ValueError(
            f"{op}: groups={groups!r} for {count} experts. It must be (count, chosen), "
            f"a count that divides {count} and a number of them from 1 to the count."
        )
    if top_k > (eligible := chosen * (count // number)):
        raise ValueError(
            f"{op}: top_k={top_k} experts are chosen of the {eligible} in the groups "
            f"that groups={groups!r} leaves. Choose fewer experts, or more groups."
        )


def check_selection_bias(
    op: str, bias: ArrayLike | None, count: int
) -> jax.Array | None:
    """Return the bias for choosing experts, or raise unless it is (e,)."""
    if bias is None:
        return None
    array = as_operand(op, "selection_bias", bias)
    check_dtype(op, "selection_bias", array)
    if array.shape != (count,):
        raise ValueError(
            f"{op}: selection_bias is {describe(array)}. It must be [{count}], one "
            "number for each expert."
        )
    return array


def route(
    x: jax.Array,
    router_w: jax.Array,
    selection_bias: jax.Array | None,
    rule: Rule,
    axes: tuple[str, ...],
    precision: Precision,
    implementation: Implementation | None = "auto",
) -> Routing:
    """Return the routing of tokens (t, d), checked before."""
    logits = _logits(x, router_w, precision, implementation)
    if rule.scores == "softmax":
        scores = shares = jax.nn.softmax(logits)
    else:
        scores = jax.nn.sigmoid(logits)
        # The smallest logits of all could make every score 0.
        shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + _TINY)
    experts = _choose(jax.lax.stop_gradient(scores), selection_bias, rule)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if rule.normalize:
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + _TINY
    auxiliary = _auxiliary(logits, shares, experts, axes)
    return Routing(weights * rule.scale, experts, auxiliary)


# DeepSeek-V3's own, so that the same parameters give the same numbers.
_TINY = 1e-20


def _logits(
    x: jax.Array,
    router_w: jax.Array,
    precision: Precision,
    implementation: Implementation | None,
) -> jax.Array:
    wide = wide_dtype(x, router_w)
    if x.dtype != router_w.dtype:
        x, router_w = x.astype(wide), router_w.astype(wide)
    return matmul(
        x,
        router_w,
        precision=precision,
        preferred_element_type=wide,
        implementation=implementation,
    )


def _choose(scores: jax.Array, bias: jax.Array | None, rule: Rule) -> jax.Array:
    """Return the experts (t, k) with the largest scores (t, e) and bias."""
    if bias is not None:
        scores += jax.lax.stop_gradient(bias).astype(scores.dtype)[None]
    if rule.groups is not None:
        count, chosen = rule.groups
        by_group = scores.reshape(scores.shape[0], count, scores.shape[1] // count)
        best, _ = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))
        _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), chosen)
        is_kept = jnp.any(
            kept[:, :, None] == jnp.arange(count, dtype=kept.dtype)[None, None], axis=1
        )
        lowest = jnp.asarray(-jnp.inf, scores.dtype)
        scores = jnp.where(is_kept[:, :, None], by_group, lowest).reshape(scores.shape)
    return jax.lax.top_k(scores, rule.top_k)[1].astype(jnp.int32)


def _auxiliary(
    logits: jax.Array, shares: jax.Array, experts: jax.Array, axes: tuple[str, ...]
) -> Auxiliary:
    """Return the losses, means over the tokens of all devices along some axes."""
    count, k = logits.shape[1], experts.shape[1]

    def mean(x: jax.Array, size: int) -> jax.Array:
        """Return a mean over the tokens and devices; 0 without tokens."""
        share = jnp.sum(x, axis=0) / max(size, 1)
        return jax.lax.pmean(share, axes) if axes else share

    chosen = total_counts(experts, count)
    size = logits.shape[0]
    load = mean(chosen[None].astype(shares.dtype), size * k)
    z = mean(jax.nn.logsumexp(logits, axis=-1) ** 2, size)
    balance = count * jnp.sum(load * mean(shares, size))
    return Auxiliary(balance, z, load, jnp.zeros((), load.dtype))
