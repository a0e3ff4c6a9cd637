# SPDX-License-Identifier: Apache-2.0
"""Norms and their gradients in jax.numpy; their formulas are in graph/norms.py.

All is computed in f32 (f64 beside f64). The variance is that of centred values, or of
values that are nearly centred, where one pass over x is to give both moments: the
difference of the means of x^2 and x, squared, would cancel.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.graph.norms import NORMALISED, NormAttributes
from jax_cudnn.graph.spec import Attributes, Tensor
from jax_cudnn.reference.dtypes import jax_dtype, saturated

Operands = Mapping[str, jax.Array]
_Rule = Callable[[Attributes, Operands, Mapping[str, Tensor]], dict[str, jax.Array]]


def forward(kind: str) -> _Rule:
    """Return the rule of a norm."""
    return functools.partial(_forward, NORMALISED[kind], kind != "rms_norm")


def backward(kind: str) -> _Rule:
    """Return the rule of a norm's gradient, given the norm."""
    return functools.partial(_backward, NORMALISED[kind])


def _forward(
    axes: tuple[int, ...],
    is_centred: bool,
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
) -> dict[str, jax.Array]:
    assert isinstance(attributes, NormAttributes)
    results: dict[str, jax.Array] = {}
    terms = [inputs[role] for role in ("x", "residual") if role in inputs]
    if len(terms) > 1:
        results["total"] = functools.reduce(jnp.add, terms)
        inputs = {**inputs, "x": results["total"]}
    wide = _widened(inputs)
    centred = x = wide["x"]
    epsilon = attributes.epsilon
    if is_centred:
        if _is_read_once(x, axes, are_kept="mean" in outputs):
            sample = _sampled(x, axes)
            if len(terms) > 1:
                # It need not wait until all of the sum is in memory.
                both = [_sampled(each, axes) for each in terms]
                sample = functools.reduce(jnp.add, both).astype(x.dtype)
            found = _shifted_moments(sample, x, axes, epsilon)
        else:
            found = _centred_moments(x, axes, epsilon)
        results["mean"], variance = found
        centred = x - results["mean"]
    else:
        variance = _mean_square(x, axes, epsilon)
    rstd = jax.lax.rsqrt(variance + jnp.asarray(epsilon, x.dtype))
    output = centred * rstd
    if "scale" in wide:
        output = output * wide["scale"]
    if "bias" in wide:
        output = output + wide["bias"]
    if "scale_output" in wide:
        output = saturated(
            output * wide["scale_output"], jax_dtype(outputs["output"].dtype)
        )
    return {**results, "rstd": rstd, "output": output}


def _is_read_once(x: jax.Array, axes: tuple[int, ...], *, are_kept: bool) -> bool:
    """Whether values are shifted by a sample, and not centred, for their variance.

    Those of a row are centred if only the norm is a result: XLA keeps the row at hand,
    and computes all in one kernel. If the moments are results, it computes each sum in
    a kernel that reads the rows, so there are to be few.
    """
    if axes == (0,):
        return not _is_shared_out(x, 0)
    if len(axes) == 1 and not are_kept:
        return False
    last = x.ndim - 1
    return isinstance(x.shape[last], int) and not _is_shared_out(x, last)


# One row of so many is of the sample that values are shifted by, and likewise one place
# of so many along the last axis, unless their mean is so large that a difference from
# it might be beyond the range of the dtype.
_ROWS_PER_SAMPLE = 1024
_PLACES_PER_SAMPLE = 1024
# XLA for a GPU needs no kernel of its own for a sum of fewer numbers than a warp has
# threads, unless their count is a power of two.
_FEWEST_PLACES = 24
_LARGEST_SHIFT = 0.25  # of the largest number


def _sampled(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return some rows, or the first places along the last axis.

    These lie side by side in memory.
    """
    if axes == (0,):
        return x[::_ROWS_PER_SAMPLE]
    return x[..., : max(_FEWEST_PLACES, -(-x.shape[-1] // _PLACES_PER_SAMPLE))]


def column_moments(x: jax.Array, epsilon: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """Return the means and the variances of the columns, (1, columns), by one pass.

    Rows whose type says that devices share them out cannot be sampled: there values are
    centred. What the variance is added to is at least ``epsilon``.
    """
    if _is_shared_out(x, 0):
        return _centred_moments(x, (0,), epsilon)
    return _shifted_moments(_sampled(x, (0,)), x, (0,), epsilon)


def _shifted_moments(
    sample: jax.Array, x: jax.Array, axes: tuple[int, ...], epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """Return the means along axes and the variances by one pass, given a sample.

    With k near the mean, both are sums of x - k and its square, which XLA computes
    while it reads x once; centred values take another pass. k is the mean of the
    sample, which is a 1024th of all or more. Whatever is in x, k is within
    sqrt(1024 var) of the mean, as the squares of a sample's distances from the mean are
    no more than those of all. So (mean - k)^2 is 1024 times the variance at most, and
    no more than 10 of f32's 24 bits cancel.
    """
    sampled = jnp.mean(sample, axes, keepdims=True)
    # Infinities and NaN are left to the sums.
    largest = _LARGEST_SHIFT * float(jnp.finfo(x.dtype).max)
    is_near = jnp.abs(sampled) <= jnp.asarray(largest, x.dtype)
    shift = jax.lax.stop_gradient(jnp.where(is_near, sampled, 0))
    moved = x - shift
    (total,) = _sums((moved,), axes)
    count = _count(x, axes)
    offset = total / count
    square = _mean_square(moved, axes, epsilon)
    # Squares beyond the dtype's range leave an infinite variance, not a NaN.
    is_too_large = jnp.isposinf(square) & jnp.isfinite(offset)
    # Not the square of the offset: if that is a single number, XLA of JAX 0.10 squares
    # the total, which may overflow, and then divides.
    squared_offset = total * (offset / count)
    variance = square - jnp.where(is_too_large, 0, squared_offset)
    return shift + offset, jnp.where(variance < 0, 0, variance)


def _centred_moments(
    x: jax.Array, axes: tuple[int, ...], epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """Return the means along some axes, and the variances, by two passes."""
    (total,) = _sums((x,), axes)
    mean = total / _count(x, axes)
    return mean, _mean_square(x - mean, axes, epsilon)


def _mean_square(x: jax.Array, axes: tuple[int, ...], epsilon: float) -> jax.Array:
    """Return the mean of the squares along some axes, to which epsilon is added.

    Values are multiplied by a power of two near 1/sqrt(count) before they are squared.
    So the sum is in range wherever the largest square is, whatever the count, and has
    the same digits. Small squares vanish by this: where epsilon does not hide them all,
    it is done only where the sum of the squares themselves is beyond the range.
    """
    count = _count(x, axes)
    if isinstance(count, float):
        factor = 2.0 ** -((math.frexp(count)[1] + 1) // 2)
        rest = count * factor**2
    else:  # A symbolic size.
        factor, rest = jax.lax.rsqrt(jnp.asarray(count, x.dtype)), 1.0
    scaled = jnp.square(x * jnp.asarray(factor, x.dtype))
    if _hides_what_vanishes(epsilon, count, x.dtype):
        (small,) = _sums((scaled,), axes)
        return small / rest
    total, small = _sums((jnp.square(x), scaled), axes)
    return jnp.where(jnp.isfinite(total), total / count, small / rest)


def _hides_what_vanishes(epsilon: float, count: Any, dtype: Any) -> bool:
    """Whether epsilon is so large that squares which vanish by scaling do not count.

    Each scaled square is off by less than the smallest normal number, and so is their
    mean: by at most 4 times `count` times that, once the factor is taken back.
    """
    info = jnp.finfo(dtype)
    lost = 4 * count * float(info.tiny) if isinstance(count, float) else math.inf
    return lost <= epsilon * float(info.eps)


def _count(x: jax.Array, axes: tuple[int, ...]) -> Any:
    """Return how many elements are along axes, as a float where it is known: it may be
    beyond i32.
    """
    count = math.prod(x.shape[axis] for axis in axes)
    return float(count) if isinstance(count, int) else count


# How many positions of a channel are added up before the rest is, and the fewest for
# which that is done.
_POSITIONS = 128
_MANY_POSITIONS = 1024


def _sums(terms: tuple[jax.Array, ...], axes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Return the sums of some terms along axes, which stay with size 1.

    Those along positions come first, block by block: XLA for a GPU gives each block of
    threads all positions of 32 channels, and would leave most of the GPU idle. What is
    between barriers is one kernel, which reads what the terms are made of once.
    """
    shape = terms[0].shape
    last = len(shape) - 1
    count = shape[last]
    is_image = last in axes and len(shape) == 4 and isinstance(count, int)
    is_long = is_image and count >= _MANY_POSITIONS and count % _POSITIONS == 0
    if not is_long or _is_shared_out(terms[0], last):
        return tuple(jnp.sum(x, axes, keepdims=True) for x in terms)
    blocks = (*shape[:-1], count // _POSITIONS, _POSITIONS)
    parts = tuple(jnp.sum(jnp.reshape(x, blocks), last + 1) for x in terms)
    return tuple(
        jnp.sum(x, axes, keepdims=True) for x in jax.lax.optimization_barrier(parts)
    )


def _is_shared_out(x: jax.Array, axis: int) -> bool:
    """Whether the type of x, on a mesh of explicit axes, divides an axis."""
    sharding: Any = jax.typeof(x).sharding
    return bool(sharding.spec) and sharding.spec[axis] is not None


def _backward(
    axes: tuple[int, ...],
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
) -> dict[str, jax.Array]:
    del attributes
    wide = _widened(inputs)
    grad, rstd = wide["grad_output"], wide["rstd"]
    centred = wide["x"]
    if "mean" in wide:
        # Without the barrier XLA puts the mean, these values and their sums into one
        # kernel for each row, which writes f32 numbers for the next ones to read.
        centred = centred - jax.lax.optimization_barrier(wide["mean"])
    normal = centred * rstd
    asked = [role for role in ("grad_scale", "grad_bias") if role in outputs]
    factors = [outputs[role].dims for role in asked]
    factors += [wide["scale"].shape] if "scale" in wide else []
    # Sums along axes of size 1 of all factors serve their gradients and that of x. They
    # are multiplied by the scale and by rstd afterwards, so that XLA adds them up in
    # the pass over x that computes the variance. Of no elements rstd is NaN, but the
    # sums are 0.
    shared = tuple(i for i in axes if all(dims[i] == 1 for dims in factors))
    shared = () if 0 in grad.shape else shared
    total, along = _sums((grad, grad * centred), shared)

    def normalised(sums: jax.Array) -> jax.Array:
        # Where rstd is 0, the variance is beyond the range of f32; sums may be so too.
        return jnp.where(rstd == 0, 0, sums * rstd)

    terms = {
        "grad_scale": normalised(along) if shared else grad * normal,
        "grad_bias": total,
    }
    results: dict[str, jax.Array] = {}
    for role in asked:
        dims = outputs[role].dims
        summed = tuple(axis for axis, size in enumerate(dims) if size == 1)
        results[role] = jnp.sum(terms[role], summed, keepdims=True)
    if "grad_x" not in outputs:
        return results
    others = tuple(axis for axis in axes if axis not in shared)
    count = _count(grad, axes)
    share = 1 / jnp.asarray(count, grad.dtype)  # infinite where there is nothing

    def scaled(terms: jax.Array) -> jax.Array:
        return terms * wide["scale"] if "scale" in wide else terms

    def mean(sums: jax.Array) -> jax.Array:
        # Divided first, so that there is no kernel for what follows the sum.
        return jnp.sum(scaled(sums) * share, others, keepdims=True)

    moved = scaled(grad) - normal * normalised(mean(along))
    if "mean" in wide:
        moved = moved - mean(total)
    return {**results, "grad_x": _with_statistics(rstd * moved, wide, normal, axes)}


def with_statistics(kind: str, grad_x: jax.Array, inputs: Operands) -> jax.Array:
    """Return a norm's gradient of x with that of its statistics, given the norm."""
    wide = _widened({"grad_x": grad_x, **inputs})
    centred = wide["x"] - wide["mean"] if "mean" in wide else wide["x"]
    normal = centred * wide["rstd"]
    total = _with_statistics(wide["grad_x"], wide, normal, NORMALISED[kind])
    return total.astype(grad_x.dtype)


def _with_statistics(
    grad_x: jax.Array, inputs: Operands, normal: jax.Array, axes: tuple[int, ...]
) -> jax.Array:
    count = _count(normal, axes)
    if "grad_mean" in inputs:
        grad_x = grad_x + inputs["grad_mean"] / count
    if "grad_rstd" in inputs:
        factor = jnp.square(inputs["rstd"]) * inputs["grad_rstd"] / count
        grad_x = grad_x - factor * normal
    return grad_x


def _widened(inputs: Operands) -> dict[str, jax.Array]:
    is_double = any(x.dtype == jnp.float64 for x in inputs.values())
    dtype = jnp.float64 if is_double else jnp.float32
    return {role: x.astype(dtype) for role, x in inputs.items()}
