# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.f8.quantized_sdpa`: f8 attention of 16-bit operands, with a gradient.

The forward pass runs in f8 on rounded operands. The derivative is that of `sdpa` at the
rounded operands, with rounding taken for the identity ("straight through"). Scales are
powers of two, so that the rounded operands are exact in 16 bits, and the gradient
kernel computes the probabilities of the forward pass again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Options
from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.lowering import attention_results, run_with_gradient, with_derivative_of
from jax_cudnn.ops.attention.attend import Operands, attend, by_rows, of_rows
from jax_cudnn.ops.attention.f8 import attend_f8, f8_attributes, f8_operands
from jax_cudnn.ops.attention.layouts import Layout, check_layout
from jax_cudnn.ops.attention.operands import check_one_dtype
from jax_cudnn.ops.attention.options import AttentionCall, F8Options
from jax_cudnn.ops.attention.parts import part_gradients
from jax_cudnn.ops.common.arguments import check_flag, describe
from jax_cudnn.ops.common.f8_scaling import (
    amax,
    check_f8,
    check_tensor_scale,
    dequantize,
    quantize,
    scale_from_amax,
    stands_for,
)
from jax_cudnn.ops.common.signatures import takes
from jax_cudnn.reference.dtypes import dtype_name


@overload
def quantized_sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    query_scale: ArrayLike | None = ...,
    key_scale: ArrayLike | None = ...,
    value_scale: ArrayLike | None = ...,
    output_scale: ArrayLike | None = ...,
    dtype: DTypeLike = ...,
    layout: Layout = ...,
    return_residual: Literal[False] = ...,
    **options: Unpack[F8Options],
) -> jax.Array: ...


@overload
def quantized_sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    query_scale: ArrayLike | None = ...,
    key_scale: ArrayLike | None = ...,
    value_scale: ArrayLike | None = ...,
    output_scale: ArrayLike | None = ...,
    dtype: DTypeLike = ...,
    layout: Layout = ...,
    return_residual: Literal[True],
    **options: Unpack[F8Options],
) -> tuple[jax.Array, jax.Array]: ...


@takes(AttentionCall, F8Options)
def quantized_sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    query_scale: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    output_scale: ArrayLike | None = None,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    layout: Layout = "bshd",
    return_residual: bool = False,
    **options: Unpack[F8Options],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Return attention of 16-bit operands, computed in f8, with a 16-bit gradient.

    Query, key and value are quantised (:func:`jax_cudnn.f8.quantize`),
    :func:`jax_cudnn.f8.sdpa` runs, and its f8 result is dequantised.

    Differentiable in query, key and value, in both modes and any order. The derivative
    is the one of :func:`jax_cudnn.sdpa` at the rounded operands. It treats rounding and
    saturation as the identity. First-order reverse mode runs cuDNN's 16-bit backward
    kernel on the rounded operands, the f8 output and the log-sum-exp of the forward
    pass. Scales have no gradient.

    Args:
      query: (b, s, h, d) or (s, h, d); bf16 or f16. Axis letters as in `f8.sdpa`.
      key: (b, t, k, d) or (t, k, d), of query's dtype.
      value: (b, t, k, e) or (t, k, e), of query's dtype.
      query_scale: scale of the tensor in f8, a scalar above 0. It is rounded up to a
        power of two. Default None: from the tensor's amax ("current scaling").
      key_scale: likewise, of key.
      value_scale: likewise, of value.
      output_scale: likewise, of the output in f8. Default None: that of value, with
        which no output saturates.
      dtype: f8_e4m3fn (default) or f8_e5m2.
      layout: the order of the axes of query, key, value and the output: "bshd"
        (default), "bhsd" or "sbhd".
      **options: as in :class:`AttentionCall`.
      return_residual: whether to return the log-sum-exp as well. Default False.

    Returns:
      (b, s, h, e) or (s, h, e), or as `layout` says, of query's dtype. With
      `return_residual`, a pair with the log-sum-exp, (b, s, h) or (s, h) in each
      layout, f32, differentiable.

    Raises:
      TypeError: operands that are not bf16 or f16 or differ in dtype, a dtype other
        than f8_e4m3fn and f8_e5m2.
      ValueError, UnsupportedError: as `f8.sdpa`.

    Notes:
      On sm_90 cuDNN gives the output in f8, with 3 bits of mantissa (2 in e5m2),
      so this is less exact than f8 operands alone would be: see docs/f8.md. The
      gradient's term rowsum(O dO) has the output's rounding error.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn import f8
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 16), jnp.bfloat16)
      >>> grad = jax.grad(lambda q: f8.quantized_sdpa(q, k, v).sum().astype(float))(q)
      >>> str(grad.dtype)
      'bfloat16'
    """
    arguments = AttentionCall(**options)
    call = arguments.options(_OP)
    layout = check_layout(_OP, layout)
    canonical, has_batch = f8_operands(
        _OP, (query, key, value), arguments, layout, _check_dtypes
    )
    f8 = check_f8(_OP, dtype)
    given = canonical.given
    scales: dict[str, jax.Array] = {}
    for role, scale_of in (
        ("query", query_scale),
        ("key", key_scale),
        ("value", value_scale),
    ):
        name = f"{role}_scale"
        scales[name] = _scale(name, scale_of, given[role], f8)
    scales["output_scale"] = scales["value_scale"]
    if output_scale is not None:
        scales["output_scale"] = _given_scale("output_scale", output_scale, f8)
    for role in ("query", "key", "value"):
        scale, x = scales[f"{role}_scale"], jax.lax.stop_gradient(given[role])
        rounded = dequantize(quantize(x, scale, f8), scale, x.dtype)
        given[role] = stands_for(given[role], rounded)
    attention = _Attention(
        attributes=f8_attributes(_OP, arguments, canonical),
        call=call,
        dtype=str(f8),
        layout=layout,
    )
    with_lse = check_flag(_OP, "return_residual", return_residual)
    output, lse = run_with_gradient(attention, {**given, **scales})
    if not has_batch:
        output, lse = jnp.squeeze(output, layout.index("b")), lse[0]
    return (output, lse) if with_lse else output


_OP = "f8.quantized_sdpa"


def _scale(
    name: str, value: ArrayLike | None, x: jax.Array, dtype: np.dtype
) -> jax.Array:
    if value is not None:
        return _given_scale(name, value, dtype)
    return scale_from_amax(amax(jax.lax.stop_gradient(x)), dtype, power_of_2=True)


def _given_scale(name: str, value: ArrayLike, dtype: np.dtype) -> jax.Array:
    scale = jax.lax.stop_gradient(check_tensor_scale(_OP, name, value))
    largest = scale * float(jnp.finfo(dtype).max)
    return scale_from_amax(largest, dtype, power_of_2=True, previous=jnp.nan)


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Attention of operands that f8 holds, forward in f8: see `run_with_gradient`."""

    attributes: SdpaAttributes
    call: Options
    dtype: str
    layout: Layout

    differentiable = ("query", "key", "value")

    def forward(self, given: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Return the output in the layout and log-sum-exp (b, s, h)."""
        return with_derivative_of(self.reference, self.by_copies, dict(given))

    def again(self, given: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Return the results, which the same remat policies keep as those of `sdpa`."""
        return attention_results(run_with_gradient(self, dict(given)))

    def by_copies(self, given: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Return the results of f8 copies of query, key and value."""
        dtype, wide = np.dtype(self.dtype), given["query"].dtype
        scales = {role: x for role, x in given.items() if role.endswith("_scale")}
        stored = {
            role: quantize(x, scales[f"{role}_scale"], dtype)
            if role in self.differentiable
            else x
            for role, x in given.items()
            if role not in scales
        }
        output, stats = attend_f8(
            stored,
            scales,
            self.attributes,
            self.call,
            dtype,
            layout=self.layout,
            with_lse=True,
        )
        return dequantize(output, scales["output_scale"], wide), by_rows(stats)

    def reference(self, given: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Return `sdpa` of the rounded operands, which has the derivatives."""
        operands = Operands.of(given, self.layout)
        output, stats = attend(operands, self.attributes, self.call, with_stats=True)
        return output, by_rows(stats)

    def gradients(
        self,
        given: Mapping[str, jax.Array],
        results: Sequence[jax.Array],
        cotangents: Sequence[jax.Array | None],
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        """Return the gradients of query, key and value, by `sdpa`'s kernel."""
        del wanted
        (output, lse), (grad_output, grad_lse) = results, cotangents
        return part_gradients(
            Operands.of(given, self.layout),
            self.attributes,
            self.call,
            output=output,
            stats=of_rows(lse),
            grad_output=jnp.zeros_like(output) if grad_output is None else grad_output,
            grad_stats=None if grad_lse is None else of_rows(grad_lse),
        )


def _check_dtypes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("query", q), ("key", k), ("value", v)):
        if dtype_name(x.dtype) not in ("bf16", "f16"):
            raise TypeError(
                f"{_OP}: {name} is {describe(x)}. Supported dtypes are bf16, f16, in "
                "which the gradient is computed. Convert query, key and value to one "
                "of them; for operands in f8 call f8.sdpa."
            )
    check_one_dtype(_OP, q, key=k, value=v)
