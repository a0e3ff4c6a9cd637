# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.f8.sdpa`: checks the arguments of f8 attention and builds its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Options
from jax_cudnn.graph import SdpaAttributes, sdpa_f8_graph, sdpa_f8_output
from jax_cudnn.graph.rules import F8
from jax_cudnn.lowering import run_graph
from jax_cudnn.ops.attention.attend import Operands, by_rows, logical, sdpa_tensors
from jax_cudnn.ops.attention.layouts import Layout, check_layout, order_of
from jax_cudnn.ops.attention.operands import canonicalize
from jax_cudnn.ops.attention.options import AttentionCall, F8Options, TokenCounts
from jax_cudnn.ops.common.arguments import (
    check_flag,
    describe,
    why_symbolic,
)
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.f8_scaling import check_tensor_scale, undifferentiated
from jax_cudnn.ops.common.plain import check_implementation
from jax_cudnn.ops.common.signatures import takes
from jax_cudnn.reference.attention.f8 import attention
from jax_cudnn.reference.dtypes import dtype_name

_RESULTS = (*F8, "bf16", "f16")
# The largest powers of two in each dtype: weights exp(S - max) are at most 1.
_WEIGHT_SCALES = {"f8_e4m3fn": 2.0**8, "f8_e5m2": 2.0**15}


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    query_scale: ArrayLike,
    key_scale: ArrayLike,
    value_scale: ArrayLike,
    output_scale: ArrayLike | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    layout: Layout = ...,
    return_residual: Literal[False] = ...,
    return_amax: Literal[False] = ...,
    **options: Unpack[F8Options],
) -> jax.Array: ...


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    query_scale: ArrayLike,
    key_scale: ArrayLike,
    value_scale: ArrayLike,
    output_scale: ArrayLike | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    layout: Layout = ...,
    return_residual: Literal[True],
    return_amax: Literal[False] = ...,
    **options: Unpack[F8Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    query_scale: ArrayLike,
    key_scale: ArrayLike,
    value_scale: ArrayLike,
    output_scale: ArrayLike | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    layout: Layout = ...,
    return_residual: bool = ...,
    return_amax: Literal[True],
    **options: Unpack[F8Options],
) -> tuple[jax.Array, ...]: ...


@takes(AttentionCall, F8Options)
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    query_scale: ArrayLike,
    key_scale: ArrayLike,
    value_scale: ArrayLike,
    output_scale: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    layout: Layout = "bshd",
    return_residual: bool = False,
    return_amax: bool = False,
    **options: Unpack[F8Options],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Return attention with f8 operands, through cuDNN on Hopper GPUs and newer.

    The value of an element is the stored number times its tensor's scale, as in
    `jax.nn.scaled_matmul`; TransformerEngine calls this scale `scale_inv`. With the
    stored Q, K and V, and R rounding to their dtype,

    .. math::

        S_{st} &= \mathrm{scale} \cdot \mathrm{query\_scale} \cdot
            \mathrm{key\_scale} \sum_d Q_{sd} K_{td}, \qquad
            E_{st} = e^{S_{st} - \max_t S_{st}} \\
        O_{se} &= \mathrm{value\_scale} \cdot
            \frac{\sum_t R(c E_{st}) V_{te}}{c \sum_t E_{st}}, \qquad
            \mathrm{result} = O / \mathrm{output\_scale}

    where c is the largest power of two in the dtype, and the sums over t
    include only keys that query s may see, as in :func:`jax_cudnn.sdpa`. Sums are kept
    in f32. Rounding to f8 saturates: it gives the largest number of the dtype instead
    of NaN or inf. Rows that see no key, or are past their length, give 0.

    Not differentiable: see :func:`jax_cudnn.f8.quantized_sdpa`. All of JAX's
    other transformations apply.

    Axis letters: b batch, s query length, t key length, h query heads, k key heads,
    d head size, e value head size.

    Args:
      query: (b, s, h, d) or (s, h, d); f8_e4m3fn or f8_e5m2.
      key: (b, t, k, d) or (t, k, d), of query's dtype; h is a multiple of k.
      value: (b, t, k, e) or (t, k, e), of query's dtype.
      query_scale: a number above 0, or an array of shape (), f32: one for the tensor.
        It may be traced, as all four scales. One that is not above 0 gives NaN.
      key_scale: likewise, of key.
      value_scale: likewise, of value.
      output_scale: the scale of a result in f8. Default None: value_scale. With this
        nothing saturates except by rounding, since an output is a mean of values. A
        smaller scale preserves more of small outputs.
      preferred_element_type: dtype of the result: f8_e4m3fn, f8_e5m2, bf16 or f16.
        Default None: query's. In bf16 and f16, the result is O itself.
      layout: the order of the axes of query, key, value and the output, as in
        :func:`jax_cudnn.sdpa`: "bshd" (default), "bhsd" or "sbhd".
      **options: as in :class:`AttentionCall`.
      return_residual: whether to return the log-sum-exp of the scores. Default False.
      return_amax: whether to return max|O|, for delayed scaling. Default False.

    Returns:
      (b, s, h, e) or (s, h, e), or as `layout` says. With `return_residual` a tuple
      that has the log-sum-exp next, f32, (b, s, h) or (s, h) in each layout, -inf for
      rows that see no key. With `return_amax`, the last of the tuple is max|O|, an f32
      scalar: before the result is divided by output_scale and saturates, over all
      devices, and without NaN.

    Raises:
      TypeError: operands that are not f8 or differ in dtype, a scale that is not a
        scalar of real numbers, a result dtype other than these, and differentiation.
      ValueError: shapes that do not fit, an `output_scale` with a 16-bit result.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here.

    Notes:
      cuDNN runs it on sm_90 (Hopper) and newer, from 9.1 on except for 9.10.0, without
      bias or mask. On sm_90 the result has to be f8, and d and e are at most 256; on
      sm_100 they are at most 128, or 192 and 128 from 9.19 on, and the result may be
      bf16 or f16 from 9.13 on (cudnn-frontend 1.28, sdpa_support_surface.h). Head
      sizes that are not multiples of 16 are padded. A single query is run as two equal
      ones, since 9.19 has no plan for one.

      On sm_90, "auto" runs XLA for a 16-bit result and "cudnn" raises: converted from
      f8, the result would have 3 bits of mantissa.
      Hopper's f8 tensor cores accumulate in fewer bits than f32: on an H200 (9.19),
      with scores of standard deviation 8.4, log-sum-exps had errors of up to 0.015.

      XLA computes in bf16. Keys past their length must not be inf or NaN.

      The examples of a vmap are folded into the batch if they share the scales and no
      amax is returned. Otherwise each example is a call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn import f8
      >>> x = f8.quantize_current(jax.random.normal(jax.random.key(0), (2, 5, 4, 16)))
      >>> scales = dict.fromkeys(("query_scale", "key_scale", "value_scale"), x.scale)
      >>> output = f8.sdpa(x.values, x.values, x.values, **scales)
      >>> output.shape, str(output.dtype)
      ((2, 5, 4, 16), 'float8_e4m3fn')
    """
    given = AttentionCall(**options)
    call = given.options(_OP)
    layout = check_layout(_OP, layout)
    canonical, has_batch = f8_operands(
        _OP, (query, key, value), given, layout, _check_dtypes
    )
    operands = canonical.given
    dtype = _result_dtype(preferred_element_type, operands["query"])
    if output_scale is not None and dtype.itemsize != 1:
        raise ValueError(
            f"{_OP}: output_scale with a result in {dtype_name(dtype)}, which has no "
            "scale. Leave it out, or ask for a result in f8."
        )
    for role in ("query", "key", "value"):
        operands[role] = undifferentiated(_OP, role, _ADVICE, operands[role])
    scales = {
        "query_scale": query_scale,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "output_scale": value_scale if output_scale is None else output_scale,
    }
    if dtype.itemsize != 1:
        scales["output_scale"] = 1
    attributes = f8_attributes(_OP, given, canonical)
    with_lse = check_flag(_OP, "return_residual", return_residual)
    with_amax = check_flag(_OP, "return_amax", return_amax)
    output, *others = attend_f8(
        operands,
        {name: _scale(name, value) for name, value in scales.items()},
        attributes,
        call,
        dtype,
        layout=layout,
        with_lse=with_lse,
        with_amax=with_amax,
    )
    results = [output if has_batch else jnp.squeeze(output, layout.index("b"))]
    if with_lse:
        lse = by_rows(others.pop(0))
        results.append(lse if has_batch else lse[0])
    if with_amax:
        results.append(jnp.reshape(others.pop(0), ()))
    return tuple(results) if len(results) > 1 else results[0]


_OP = "f8.sdpa"
_ADVICE = (
    "Call f8.quantized_sdpa, whose operands are bf16 or f16, or apply "
    "jax.lax.stop_gradient to the operands and scales."
)


def _scale(name: str, value: ArrayLike) -> jax.Array:
    scale = check_tensor_scale(_OP, name, value)
    return undifferentiated(_OP, name, _ADVICE, scale)


def f8_operands(
    op: str,
    tokens: tuple[ArrayLike, ArrayLike, ArrayLike],
    given: AttentionCall,
    layout: Layout,
    check_dtypes: Callable[[jax.Array, jax.Array, jax.Array], None],
) -> tuple[Operands, bool]:
    """Return a call's operands with a batch axis, and whether they had one."""
    lengths = given.query_seq_lengths, given.key_value_seq_lengths
    with on_behalf_of(op, "sdpa"):
        return canonicalize(
            *tokens, None, None, *lengths, layout=layout, check_dtypes=check_dtypes
        )


def f8_attributes(op: str, given: AttentionCall, operands: Operands) -> SdpaAttributes:
    """Return a call's attributes; scores are scaled in f32."""
    _, s, _, d = operands.query_sizes
    counts = TokenCounts(s, operands.key_count)
    with on_behalf_of(op, "sdpa"):
        checked = given.attributes(
            given.visibility("sdpa"), counts, d, np.dtype(np.float32)
        )
    return SdpaAttributes(**checked.common())


def attend_f8(
    stored: Mapping[str, jax.Array],
    scales: Mapping[str, jax.Array],
    attributes: SdpaAttributes,
    call: Options,
    dtype: np.dtype,
    *,
    layout: Layout = "bshd",
    with_lse: bool = False,
    with_amax: bool = False,
) -> Sequence[jax.Array]:
    """Return the output in the layout; log-sum-exp (b, h, s, 1) and amax if asked for.

    Args:
      stored: the operands by role, with a batch axis.
      scales: "query_scale" and so on, "output_scale" among them.
      attributes: those of attention.
      call: how to run it.
      dtype: of the output.
      layout: that of query, key, value and output.
      with_lse: whether to return the log-sum-exp.
      with_amax: whether to return the amax, (1, 1, 1, 1).
    """
    weight_scale = _WEIGHT_SCALES[str(dtype_name(stored["query"].dtype))]
    numbers = {
        "descale_query": scales["query_scale"],
        "descale_key": scales["key_scale"],
        "descale_value": scales["value_scale"],
        "descale_probabilities": jnp.float32(1 / weight_scale),
        "scale_probabilities": jnp.float32(weight_scale),
        "scale_output": 1 / scales["output_scale"],
    }
    given = {
        **stored,
        **{role: jnp.reshape(x, (1, 1, 1, 1)) for role, x in numbers.items()},
    }
    if reason := why_symbolic(**given):
        check_implementation(_OP, reason, call)
        roles = ["output"] + ["stats"] * with_lse + ["amax_output"] * with_amax
        return _plain(attributes, given, dtype, roles, layout)
    tensors = sdpa_tensors(given, layout)
    output = sdpa_f8_output(
        tensors,
        attributes=attributes,
        dtype=dtype_name(dtype),  # type: ignore[arg-type]
        order=order_of(layout),
    )
    graph = sdpa_f8_graph(
        tensors,
        attributes=attributes,
        output=output,
        with_stats=with_lse,
        with_amax=with_amax,
    )
    return run_graph(graph, list(given.values()), call)


def _plain(
    attributes: SdpaAttributes,
    operands: Mapping[str, jax.Array],
    dtype: np.dtype,
    roles: Sequence[str],
    layout: Layout,
) -> list[jax.Array]:
    """Return the results in these roles by the reference, for shapes graphs lack."""
    results = dict(attention(attributes, logical(operands, layout), dtype))
    results["output"] = jnp.transpose(results["output"], order_of(layout))
    return [results[role] for role in roles]


# --- checks ---------------------------------------------------------------------------


def _check_dtypes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("query", q), ("key", k), ("value", v)):
        if dtype_name(x.dtype) not in F8:
            raise TypeError(
                f"{_OP}: {name} is {describe(x)}. Supported dtypes are "
                f"{', '.join(F8)}. Convert it with f8.quantize, or call "
                "f8.quantized_sdpa, which does."
            )
        if x.dtype != q.dtype:
            raise TypeError(
                f"{_OP}: {name} is {describe(x)} but query is {describe(q)}. cuDNN "
                f"takes one dtype. Quantize {name} to {dtype_name(q.dtype)}."
            )


def _result_dtype(preferred: DTypeLike | None, query: jax.Array) -> np.dtype:
    try:
        dtype = query.dtype if preferred is None else np.dtype(preferred)
    except TypeError:
        dtype = None
    if dtype is None or dtype_name(dtype) not in _RESULTS:
        shown = repr(preferred) if dtype is None else str(dtype)
        raise TypeError(
            f"{_OP}: preferred_element_type={shown} is not one of "
            f"{', '.join(_RESULTS)}. Convert the result instead."
        )
    return dtype
