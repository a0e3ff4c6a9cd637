# SPDX-License-Identifier: Apache-2.0
"""Matmul, convolution and the convolution's gradients in jax.numpy and jax.lax.

Sums are returned in the dtype of the output tensor that the interpreter asks for. The
interpreter passes the precision, as JAX takes it. Roles and axis letters are those of
graph/products/matmul.py and graph/products/conv.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.graph.products.conv import ConvAttributes
from jax_cudnn.graph.spec import Attributes, Tensor
from jax_cudnn.graph.windows import dilated
from jax_cudnn.reference.dtypes import DTYPES, kept_rounding
from jax_cudnn.reference.products import shifted

Operands = Mapping[str, jax.Array]

# A gradient of more taps is one convolution, which XLA compiles sooner than as many
# matmuls.
_MOST_MATMULS = 27


def matmul(
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
    precision: Any = None,
) -> dict[str, jax.Array]:
    """Return the matrix product of a and b for each batch entry."""
    del attributes
    dtype = outputs["output"].dtype
    sums = jnp.matmul(
        kept_rounding(inputs["a"]),
        kept_rounding(inputs["b"]),
        preferred_element_type=DTYPES[dtype],
        precision=precision,
    )
    return {"output": sums}


def conv_fprop(
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
    precision: Any = None,
) -> dict[str, jax.Array]:
    """Return the convolution of x with w."""
    assert isinstance(attributes, ConvAttributes)
    x, w = inputs["x"], inputs["w"]
    if _has_empty(inputs, outputs):
        return _zeros(outputs)
    if _is_transposed(attributes) and not shifted.applies(x, w, w.shape):
        # XLA takes a convolution by a filter that is flipped last for a gradient, and
        # multiplies by no zeros. It must not see that the filter is flipped twice.
        taps = range(2, w.ndim)
        w = jax.lax.rev(jax.lax.optimization_barrier(jax.lax.rev(w, taps)), taps)
    result = _conv_in_groups(
        x,
        w,
        outputs["output"],
        _natural(x.ndim),
        window_strides=attributes.window_strides,
        padding=_pairs(attributes.padding_low, attributes.padding_high),
        lhs_dilation=attributes.lhs_dilation,
        rhs_dilation=attributes.rhs_dilation,
        groups=_groups(x.shape, w.shape),
        precision=precision,
    )
    return {"output": result}


def conv_dgrad(
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
    precision: Any = None,
) -> dict[str, jax.Array]:
    """Return the gradient of x: the cotangent with w, flipped and transposed.

    This is the form that JAX gives it. XLA knows a gradient of cuDNN's by a filter that
    is flipped last. Others are convolutions of a cotangent with zeros between its rows.
    """
    assert isinstance(attributes, ConvAttributes)
    w, grad = inputs["w"], inputs["grad_output"]
    if _has_empty(inputs, outputs):
        return _zeros(outputs)
    dims = outputs["grad_x"].dims
    groups = _groups(dims, w.shape)
    low: list[int] = []
    high: list[int] = []
    for i, size in enumerate(dims[2:]):
        window = dilated(w.shape[i + 2], attributes.rhs_dilation[i])
        low.append(window - 1 - attributes.padding_low[i])
        grown = dilated(grad.shape[i + 2], attributes.window_strides[i])
        full = dilated(size, attributes.lhs_dilation[i])
        high.append(full + window - 1 - grown - low[i])
    natural = tuple(range(w.ndim))
    result = _conv_in_groups(
        grad,
        jax.lax.rev(_by_output(w, groups), natural[2:]),
        outputs["grad_x"],
        jax.lax.ConvDimensionNumbers(natural, _swapped(w.ndim), natural),
        window_strides=attributes.lhs_dilation,
        padding=_pairs(low, high),
        lhs_dilation=attributes.window_strides,
        rhs_dilation=attributes.rhs_dilation,
        groups=groups,
        precision=precision,
    )
    return {"grad_x": result}


def conv_wgrad(
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
    precision: Any = None,
) -> dict[str, jax.Array]:
    """Return the gradient of w: x with the cotangent, contracted over images."""
    assert isinstance(attributes, ConvAttributes)
    x, grad = inputs["x"], inputs["grad_output"]
    if _has_empty(inputs, outputs):
        return _zeros(outputs)
    dims = outputs["grad_w"].dims
    dtype = DTYPES[outputs["grad_w"].dtype]
    groups = _groups(x.shape, dims)
    windows = shifted.Windows(
        taps=tuple(dims[2:]),
        strides=attributes.window_strides,
        padding=_pairs(attributes.padding_low, attributes.padding_high),
        inner=attributes.lhs_dilation,
        dilation=attributes.rhs_dilation,
    )
    if shifted.applies(x, grad, dims):
        return {"grad_w": shifted.filter_gradient(x, grad, windows).astype(dtype)}
    if windows.has_holes and math.prod(windows.taps) <= _MOST_MATMULS:
        sums = shifted.filter_gradient_by_matmuls(
            x, grad, windows, groups, preferred_element_type=dtype, precision=precision
        )
        return {"grad_w": sums}
    if _is_transposed(attributes):
        return {"grad_w": _wgrad_of_transposed(attributes, x, grad, outputs, precision)}
    high: list[int] = []
    for i, size in enumerate(dims[2:]):
        window = dilated(size, attributes.rhs_dilation[i])
        grown = dilated(grad.shape[i + 2], attributes.window_strides[i])
        full = dilated(x.shape[i + 2], attributes.lhs_dilation[i])
        high.append(window - 1 + grown - full - attributes.padding_low[i])
    swapped = _swapped(x.ndim)
    result = _conv(
        x,
        grad,
        outputs["grad_w"],
        jax.lax.ConvDimensionNumbers(swapped, swapped, swapped),
        window_strides=attributes.rhs_dilation,
        padding=_pairs(attributes.padding_low, high),
        lhs_dilation=attributes.lhs_dilation,
        rhs_dilation=attributes.window_strides,
        batch_group_count=groups,
        precision=precision,
    )
    return {"grad_w": result}


def _is_transposed(attributes: ConvAttributes) -> bool:
    """Whether there are zeros between elements of x, and windows begin at each."""
    has_zeros = any(each > 1 for each in attributes.lhs_dilation)
    return has_zeros and {*attributes.window_strides} == {1}


def _wgrad_of_transposed(
    attributes: ConvAttributes,
    x: jax.Array,
    grad: jax.Array,
    outputs: Mapping[str, Tensor],
    precision: Any,
) -> jax.Array:
    """Return the gradient of a transposed convolution's filter.

    It is that of a strided convolution, whose images are the cotangent and whose
    cotangent is x, flipped and transposed. XLA has a convolution for it, and none for
    images with zeros between their elements.
    """
    tensor = outputs["grad_w"]
    out, _, *taps = tensor.dims
    groups = _groups(x.shape, tensor.dims)
    dims = (x.shape[1], out // groups, *taps)
    found = conv_wgrad(
        attributes.of_other_direction(taps),
        {"x": grad, "grad_output": x},
        {"grad_w": replace(tensor, dims=dims)},
        precision,
    )
    return exchanged(found["grad_w"], groups)


def exchanged(w: jax.Array, groups: int) -> jax.Array:
    """Return filters flipped in space, in and out channels of each group exchanged."""
    out, channels, *window = w.shape
    w = jax.lax.rev(w, range(2, w.ndim))
    w = jnp.reshape(w, (groups, out // groups, channels, *window))
    w = jnp.swapaxes(w, 1, 2)
    return jnp.reshape(w, (groups * channels, out // groups, *window))


def _has_empty(inputs: Operands, outputs: Mapping[str, Tensor]) -> bool:
    """Whether all sums are empty. XLA does not take a window without elements."""
    has_empty_result = any(tensor.is_empty for tensor in outputs.values())
    return has_empty_result or any(x.size == 0 for x in inputs.values())


def _zeros(outputs: Mapping[str, Tensor]) -> dict[str, jax.Array]:
    return {
        role: jnp.zeros(tensor.dims, DTYPES[tensor.dtype])
        for role, tensor in outputs.items()
    }


def _conv_in_groups(
    x: jax.Array,
    w: jax.Array,
    output: Tensor,
    numbers: jax.lax.ConvDimensionNumbers,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    groups: int,
    precision: Any,
) -> jax.Array:
    """Return a convolution, where it is faster as a sum of shifted products."""
    filters = [w.shape[axis] for axis in numbers.rhs_spec]
    windows = shifted.Windows(
        taps=tuple(filters[2:]),
        strides=window_strides,
        padding=padding,
        inner=lhs_dilation,
        dilation=rhs_dilation,
    )
    if shifted.applies(x, w, filters):
        taps = jnp.transpose(w, numbers.rhs_spec)
        sums = shifted.convolved(x, taps, windows, output.order)
        return sums.astype(DTYPES[output.dtype])
    if windows.has_holes and not windows.is_symmetric and {*lhs_dilation} == {1}:
        # XLA would fill the holes of the filter with zeros, and multiply by them.
        x = jax.lax.optimization_barrier(windows.padded(x, range(x.ndim)))
        padding = [(0, 0)] * len(padding)
    return _conv(
        x,
        w,
        output,
        numbers,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_group_count=groups,
        precision=precision,
    )


def _conv(
    x: jax.Array,
    w: jax.Array,
    output: Tensor,
    numbers: jax.lax.ConvDimensionNumbers,
    **options: object,
) -> jax.Array:
    """Return a convolution, with x in the order in which the output is stored.

    ``numbers`` names the axes of the arrays that are given. Without a transpose in
    between, XLA adds up a convolution and another array in one kernel.
    """
    order = output.order
    back = [order.index(axis) for axis in range(len(order))]
    lhs, out = (
        tuple(back[axis] for axis in spec)
        for spec in (numbers.lhs_spec, numbers.out_spec)
    )
    result = jax.lax.conv_general_dilated(
        jnp.transpose(x, order),
        w,
        preferred_element_type=DTYPES[output.dtype],
        dimension_numbers=jax.lax.ConvDimensionNumbers(lhs, numbers.rhs_spec, out),
        **options,  # type: ignore[arg-type]
    )
    return jnp.transpose(result, back)


def _natural(rank: int) -> jax.lax.ConvDimensionNumbers:
    axes = tuple(range(rank))
    return jax.lax.ConvDimensionNumbers(axes, axes, axes)


def _pairs(low: Sequence[int], high: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(low, high, strict=True))


def _groups(x: Sequence[int], w: Sequence[int]) -> int:
    return x[1] // w[1] if w[1] else 1


def _swapped(rank: int) -> tuple[int, ...]:
    """Return the axes of an array, the second one first."""
    return (1, 0, *range(2, rank))


def _by_output(w: jax.Array, groups: int) -> jax.Array:
    """Turn (g o', c', *f) into (o', g c', *f): a group's outputs, all inputs."""
    if groups == 1:
        return w
    out, channels, *window = w.shape
    split = jnp.reshape(w, (groups, out // groups, channels, *window))
    moved = jnp.swapaxes(split, 0, 1)
    return jnp.reshape(moved, (out // groups, groups * channels, *window))
