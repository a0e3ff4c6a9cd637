# SPDX-License-Identifier: Apache-2.0
"""Checks attention's arguments and returns them as graphs have them."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.graph.rules import broadcasts_to
from jax_cudnn.ops.attention.attend import Operands
from jax_cudnn.ops.attention.layouts import Layout, axes_in_words, sizes_in
from jax_cudnn.ops.attention.visibility.masks import refuse_mask_data
from jax_cudnn.ops.attention.visibility.packing import Packed, packing
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_dtype,
    check_integers,
    clipped,
    describe,
    in_front,
)
from jax_cudnn.reference.dtypes import dtype_name


def check_scale(scale: float | None, d: int, dtype: np.dtype) -> float:
    """Return the scale as cuDNN gets it: a double that is exact in f32, unless f64."""
    if scale is None:
        value = 1.0 / math.sqrt(d) if d else 1.0
    else:
        is_odd = isinstance(scale, bool | np.bool_ | str | bytes)
        is_odd = is_odd or np.iscomplexobj(scale)
        if is_odd or np.ndim(scale) != 0:
            raise _not_a_number(scale)
        try:
            value = float(scale)
        except (TypeError, ValueError):  # A traced value is one of its causes.
            raise _not_a_number(scale) from None
        except OverflowError:
            value = math.inf
    if dtype != np.float64:
        with np.errstate(over="ignore"):
            value = float(np.float32(value))
    if not math.isfinite(value):
        raise ValueError(f"sdpa: scale={scale} is not finite. Pass a finite number.")
    return value


def _not_a_number(scale: object) -> TypeError:
    return TypeError(
        f"sdpa: scale is {type(scale).__name__}. It must be a number known when the "
        "program is traced, since it is part of it. Multiply query by a traced scale."
    )


def _check_dtypes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    check_dtype(
        "sdpa", "query", q, advice="Convert query, key and value to one of them."
    )
    check_one_dtype("sdpa", q, key=k, value=v)


def check_one_dtype(op: str, q: jax.Array, **others: jax.Array) -> None:
    """Raise TypeError unless keys and values have the dtype of the queries."""
    for name, x in others.items():
        if x.dtype != q.dtype:
            raise TypeError(
                f"{op}: {name} is {describe(x)} but query is {describe(q)}. All three "
                f"must have one dtype. Convert {name} to {dtype_name(q.dtype)}."
            )


def as_typed(name: str, x: ArrayLike) -> jax.Array:
    """Return an operand as an array, or what stands for the type of one as it is."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x  # type: ignore[return-value]
    return as_operand("sdpa", name, x)


def canonicalize(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    *,
    shards: int = 1,
    packed: Packed | None = None,
    layout: Layout = "bshd",
    check_dtypes: Callable[[jax.Array, jax.Array, jax.Array], None] = _check_dtypes,
) -> tuple[Operands, bool]:
    """Check the operands together and give each its batch axis and dtype.

    Queries and keys may be one of several equal shards of their sequences. The keys of
    bias and mask, and the lengths, are those of the whole sequences.
    """
    q, k, v = (
        as_typed(name, x)
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    check_dtypes(q, k, v)
    has_batch = _check_ranks(q, k, v, layout)
    if not has_batch:
        q, k, v = (jnp.expand_dims(x, layout.index("b")) for x in (q, k, v))
    _check_shapes(q, k, v, layout)
    b, s, h, _ = sizes_in(layout, q)
    t = sizes_in(layout, k)[1] * shards
    scores = (b, h, s, t)
    lengths = functools.partial(check_lengths, "sdpa", "batch entry")
    operands = Operands(
        query=q,
        key=k,
        value=v,
        bias=_check_bias(bias, scores, q.dtype),
        mask=_check_mask(mask, scores),
        query_lengths=None
        if query_seq_lengths is None
        else lengths("query_seq_lengths", query_seq_lengths, b, s * shards),
        key_lengths=None
        if key_value_seq_lengths is None
        else lengths("key_value_seq_lengths", key_value_seq_lengths, b, t),
        layout=layout,
    )
    if packed is not None:
        of_rows = (operands.query_lengths, operands.key_lengths)
        operands = operands._replace(**packing(packed, (b, s, t), of_rows))
    return operands, has_batch


def _check_ranks(q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> bool:
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        advice = "Use jax.vmap or reshape for more batch axes."
        if q.ndim == 2:
            place = ":, None, :" if layout.index("s") < layout.index("h") else "None"
            advice = f"For a single head insert its axis: query[{place}]."
        raise ValueError(
            f"sdpa: {_shapes(q, k, v)}. All three must be ({axes_in_words(layout)}) or "
            f"all ({axes_in_words(layout, with_batch=False)}). {advice}"
        )
    return q.ndim == 4


def _shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> str:
    return f"query is {describe(q)}, key {describe(k)}, value {describe(v)}"


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> None:
    shapes = _shapes(q, k, v)
    if layout != "bshd":
        shapes += f", each ({axes_in_words(layout)})"
    of_query, of_key, of_value = (sizes_in(layout, x) for x in (q, k, v))
    if not of_query[0] == of_key[0] == of_value[0]:
        raise ValueError(
            f"sdpa: batch sizes differ: {shapes}. They must be equal. Broadcast, or "
            "use jax.vmap with in_axes=None for the shared operand."
        )
    if of_key[1] != of_value[1]:
        raise ValueError(
            f"sdpa: key has length {of_key[1]} but value {of_value[1]}: {shapes}. They "
            "must be equal."
        )
    if of_query[3] != of_key[3]:
        raise ValueError(
            f"sdpa: query has head size {of_query[3]} but key {of_key[3]}: {shapes}. "
            "They must be equal; value's may differ."
        )
    if of_key[2] != of_value[2]:
        raise ValueError(
            f"sdpa: key has {of_key[2]} heads but value {of_value[2]}: {shapes}. They "
            "must be equal."
        )
    check_groups("sdpa", of_query[2], of_key[2], shapes, "key and value")


def check_groups(op: str, h: int, heads: int, shapes: str, names: str) -> None:
    """Raise ValueError unless each key head serves as many query heads.

    ``shapes`` and ``names`` are those of the operands, in words.
    """
    if (heads == 0) != (h == 0) or (heads and h % heads):
        raise ValueError(
            f"{op}: {h} query heads are not a multiple of {heads} key heads: {shapes}. "
            f"Repeat the heads of {names}, or change the number of query heads."
        )


def _check_bias(
    bias: ArrayLike | None, scores: tuple[int, ...], dtype: np.dtype
) -> jax.Array | None:
    if bias is None:
        return None
    array = as_operand("sdpa", "bias", bias)
    if jnp.issubdtype(array.dtype, jnp.integer):
        # Added to the scores, whose dtype it takes on.
        array = array.astype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    advice = "Convert it to the dtype of query."
    if array.dtype == jnp.bool_:
        advice = "Pass a boolean array as mask instead."
    check_dtype("sdpa", "bias", array, also=" and integers", advice=advice)
    return _check_scores_like("bias", array, scores)


def _check_mask(mask: ArrayLike | None, scores: tuple[int, ...]) -> jax.Array | None:
    if mask is None:
        return None
    refuse_mask_data("sdpa", mask)
    array = as_operand("sdpa", "mask", mask)
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"sdpa: mask is {describe(array)}. It must be bool, True where a query "
            "may see a key. Pass an additive mask as bias, or convert with mask != 0."
        )
    return _check_scores_like("mask", array, scores)


def _check_scores_like(
    name: str, array: jax.Array, scores: tuple[int, ...]
) -> jax.Array:
    padded = in_front(array.shape, 4)
    if not broadcasts_to(padded, scores):
        raise ValueError(
            f"sdpa: {name} is {describe(array)}, which does not broadcast to (batch, "
            f"heads, query length, key length) = {list(scores)}. Each of its axes must "
            f"be 1 or the full size.{axes_hint(name, array.shape, scores)}"
        )
    return jnp.reshape(array, padded)


def axes_hint(name: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> str:
    """Return what to do with a mask or bias that does not broadcast.

    Of the scores (*batch axes, h, s, t); axes are added in front, as in NumPy.
    """
    *batch, h, s, t = scores
    index = {
        (*batch, t): ", None, None, :",
        (*batch, s, t): ", None, :, :",
        (*batch, h, t): ", :, None, :",
        (h, t): "None, :, None, :",
    }.get(shape)
    if index is None:
        return " Insert, expand or slice axes."
    if index.startswith(","):
        index = ", ".join([":"] * len(batch)) + index
    return f" Its axes are taken to be the last ones. Pass {name}[{index}]."


def check_lengths(
    op: str, owner: str, name: str, lengths: ArrayLike, b: int, size: int
) -> jax.Array:
    """Return the lengths of their owners as i32 (b, 1, 1, 1), cut to a size."""
    array = check_integers(op, name, lengths)
    if array.shape != (b,):
        raise ValueError(
            f"{op}: {name} is {describe(array)}. It must have one length per {owner}, "
            f"shape [{b}]."
        )
    return jnp.reshape(clipped(array, size), (b, 1, 1, 1))
