# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.max_pool` and `avg_pool`: check their arguments and build their graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.graph import AvgPoolAttributes, MaxPoolAttributes, pool_graph
from jax_cudnn.lowering import (
    gathered_along,
    run_graph,
    sharded_where_free,
    weakly_typed,
)
from jax_cudnn.ops.common.arguments import (
    FLOATS,
    as_operand,
    check_flag,
    describe,
    is_weak,
    options,
    strongly_typed,
    tensor,
    why_symbolic,
)
from jax_cudnn.ops.common.plain import check_implementation
from jax_cudnn.ops.common.windows import Windows, windows_of
from jax_cudnn.reference.dtypes import dtype_name
from jax_cudnn.reference.pooling import least, maxima


@overload
def max_pool(
    inputs: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = ...,
    padding: str | Sequence[tuple[int, int]] = ...,
    *,
    dimension_numbers: str | None = ...,
    return_indices: Literal[False] = ...,
    implementation: Implementation | None = ...,
    plan: PlanOptions | None = ...,
) -> jax.Array: ...


@overload
def max_pool(
    inputs: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = ...,
    padding: str | Sequence[tuple[int, int]] = ...,
    *,
    dimension_numbers: str | None = ...,
    return_indices: Literal[True],
    implementation: Implementation | None = ...,
    plan: PlanOptions | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


def max_pool(
    inputs: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    *,
    dimension_numbers: str | None = None,
    return_indices: bool = False,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Return the maximum of each window.

    Takes the arguments of :func:`flax.linen.max_pool` with the same meaning, so that it
    can replace that function. For each example n, channel c and window z,

    .. math::

        \mathrm{output}_{ncz} = \max_{0 \le f < \mathrm{window}}
            \mathrm{inputs}_{n, c, z \cdot \mathrm{strides} + f - \mathrm{low}}

    where elements outside of the inputs are padding, -inf (the least number, for
    dtypes without it). A NaN in a window is its result.

    All of JAX's transformations apply. The gradient is XLA's: a window's cotangent goes
    to the first of its largest elements, in row-major order. Cotangents that meet in an
    element are summed in the dtype of the inputs.

    Axis letters: N any number of batch axes, C channels, y one to three spatial axes.

    Args:
      inputs: (\*N, \*y, C), or another layout by `dimension_numbers`; bf16, f16, f32,
        f64. XLA runs everything else that lax takes: other dtypes, no spatial axis or
        more than three, symbolic dimensions.
      window_shape: how many elements a window has along each spatial axis.
      strides: steps from a window to the next. Default None: 1 along each axis.
      padding: "SAME", "SAME_LOWER", "VALID" or a (low, high) pair per spatial axis,
        which may differ and may be negative. Default "VALID": none.
      dimension_numbers: which axes are what, as a letter each, "NHWC" or "NCHW" for
        example, as in :func:`jax_cudnn.conv`. N means all batch axes, of which
        there may be none; letters that are not N or C are spatial axes, in the order of
        `window_shape`. Default None: channels last.
      return_indices: whether to return also where each maximum is. XLA runs such a
        call: which of several equal elements cuDNN takes is not documented. Default
        False.
      implementation: "auto" (default) uses XLA, unless :func:`jax_cudnn.plans.autotune`
        measured cuDNN to be faster; "cudnn" uses cuDNN, and raises where it has no
        plan; "xla" never touches cuDNN. On platforms other than CUDA, all three run
        XLA. Inside :func:`jax_cudnn.plans.using`, "auto" and None mean the
        implementation that is set there.
      plan: which of cuDNN's execution plans may run the call, a
        :class:`jax_cudnn.plans.PlanOptions`. Default None: the options of
        :func:`jax_cudnn.plans.using`; outside of that scope, every plan.

    Returns:
      The maxima, in the layout and dtype of `inputs`. With `return_indices` also i32 of
      the same shape: the position of the first largest element in its channel's spatial
      axes, flattened in row-major order; -1 where a window has no element. A NaN counts
      as the largest.

    Raises:
      ValueError: windows, strides, padding or dimension numbers that do not fit.
      TypeError: inputs that are no array of real numbers.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised when
        the function is compiled for a GPU), or no graph has such operands, or
        `return_indices` (raised at once).
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      docs/pooling.md lists the supported configurations.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x = jnp.ones((2, 8, 8, 3))
      >>> jax_cudnn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME").shape
      (2, 4, 4, 3)
    """
    call = options("max_pool", implementation, plan)
    x = _operand("max_pool", inputs)
    with_indices = check_flag("max_pool", "return_indices", return_indices)
    windows = windows_of(
        "max_pool", x, window_shape, strides, padding, dimension_numbers
    )
    if with_indices:
        reason = (
            "return_indices is True. Which of several equal elements cuDNN takes is "
            "not documented."
        )
        check_implementation("max_pool", reason, call)
        return _largest_with_indices(windows, x)
    strong = strongly_typed(x)
    if reason := _why_plain(windows, x):
        check_implementation("max_pool", reason, call)
        output = _largest(windows, strong)
    else:
        attributes = MaxPoolAttributes(**_fields(windows))
        output = _pooled(windows, strong, attributes, call)
    return weakly_typed(output) if is_weak(x) else output


def avg_pool(
    inputs: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    count_include_pad: bool = True,
    *,
    dimension_numbers: str | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return the average of each window.

    Takes the arguments of :func:`flax.linen.avg_pool` with the same meaning, so that it
    can replace that function. For each example n, channel c and window z,

    .. math::

        \mathrm{output}_{ncz} = \frac{1}{\mathrm{count}_z}
            \sum_{0 \le f < \mathrm{window}}
            \mathrm{inputs}_{n, c, z \cdot \mathrm{strides} + f - \mathrm{low}}

    where elements outside of the inputs are padding, 0. Sums are kept in f32 (f64 for
    f64) and rounded once, while Flax sums 16-bit inputs in 16 bits.

    All of JAX's transformations apply. First-order reverse mode runs cuDNN's gradient
    kernel where `implementation` says that cuDNN runs; forward mode and higher orders
    run XLA's code.

    Axis letters: N any number of batch axes, C channels, y one to three spatial axes.

    Args:
      inputs: (\*N, \*y, C), or another layout by `dimension_numbers`; bf16, f16, f32,
        f64. XLA runs everything else that lax takes: other dtypes, no spatial axis or
        more than three, symbolic dimensions. Integers are averaged in f32.
      window_shape: how many elements a window has along each spatial axis.
      strides: steps from a window to the next. Default None: 1 along each axis.
      padding: as for :func:`jax_cudnn.max_pool`. Default "VALID": none.
      count_include_pad: whether count is the size of the window, which is the default,
        or how many elements of the inputs are in it. A window without any is then NaN.
      dimension_numbers: as for :func:`jax_cudnn.max_pool`. Default None: channels last.
      implementation: as for :func:`jax_cudnn.max_pool`. Default "auto".
      plan: as for :func:`jax_cudnn.max_pool`. Default None.

    Returns:
      The averages, in the layout and dtype of `inputs`; f32 for integers.

    Raises:
      ValueError: windows, strides, padding or dimension numbers that do not fit.
      TypeError: inputs that are no array of numbers.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised when
        the function is compiled for a GPU), or no graph has such operands (raised at
        once).
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      docs/pooling.md lists the supported configurations.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x = jnp.ones((2, 3, 8, 8))
      >>> jax_cudnn.avg_pool(x, (2, 2), (2, 2), dimension_numbers="NCHW").shape
      (2, 3, 4, 4)
    """
    call = options("avg_pool", implementation, plan)
    x = _operand("avg_pool", inputs)
    counts_padding = check_flag("avg_pool", "count_include_pad", count_include_pad)
    windows = windows_of(
        "avg_pool", x, window_shape, strides, padding, dimension_numbers
    )
    strong = strongly_typed(x)
    if reason := _why_plain(windows, x):
        check_implementation("avg_pool", reason, call)
        output = _average(windows, strong, counts_padding=counts_padding)
    else:
        attributes = AvgPoolAttributes(
            **_fields(windows), count_include_pad=counts_padding
        )
        output = _pooled(windows, strong, attributes, call)
    # As Flax's, which divides by an array where padding does not count.
    is_like_input = counts_padding and output.dtype == x.dtype
    return weakly_typed(output) if is_like_input and is_weak(x) else output


def _operand(op: str, inputs: ArrayLike) -> jax.Array:
    x = as_operand(op, "inputs", inputs)
    is_number = jnp.issubdtype(x.dtype, jnp.number)
    if not is_number or (op == "max_pool" and jnp.iscomplexobj(x)):
        kind = "real numbers" if op == "max_pool" else "numbers"
        raise TypeError(
            f"{op}: inputs is {describe(x)}. It must hold {kind}. Convert it."
        )
    return x


def _why_plain(windows: Windows, x: jax.Array) -> str:
    """Return why no graph can hold the pooling, in sentences; "" if one can."""
    if reason := why_symbolic(inputs=x):
        return reason
    if dtype_name(x.dtype) not in FLOATS:
        return f"inputs is {describe(x)}. Graphs pool {', '.join(FLOATS)}."
    if not 1 <= len(windows.shape) <= 3:
        return (
            f"window_shape is {windows.shape}. cuDNN's pooling has one to three "
            "spatial axes."
        )
    return ""


def _fields(windows: Windows) -> dict[str, tuple[int, ...]]:
    return {
        "window_shape": windows.shape,
        "window_strides": windows.strides,
        "padding_low": tuple(low for low, _ in windows.padding),
        "padding_high": tuple(high for _, high in windows.padding),
    }


def _pooled(
    windows: Windows,
    x: jax.Array,
    attributes: MaxPoolAttributes | AvgPoolAttributes,
    call: Options,
) -> jax.Array:
    graph = pool_graph(
        tensor("x", x, windows.order, windows.merged_shape(x.shape)),
        attributes=attributes,
    )
    (output,) = run_graph(graph, [x], call)
    output = jnp.reshape(output, windows.result_shape(x.shape))
    return sharded_where_free(output, x)


# --- in JAX's own operations ----------------------------------------------------------


def _largest(windows: Windows, x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer) or why_symbolic(inputs=x):
        return windows.reduce(x, least(x.dtype), jax.lax.max)
    return windows.apply(x, maxima)


def _average(windows: Windows, x: jax.Array, *, counts_padding: bool) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.float32)
    # Only floats are left that are as short.
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    sums = windows.reduce(wide, np.zeros((), wide.dtype), jax.lax.add)
    if counts_padding:
        return (sums / math.prod(windows.shape)).astype(x.dtype)
    ones = jnp.ones_like(wide)
    counts = windows.reduce(ones, np.zeros((), wide.dtype), jax.lax.add)
    return (sums / counts).astype(x.dtype)


class _Entry(NamedTuple):
    """A number and its position; -1 for none."""

    value: Any
    index: Any


def _largest_with_indices(
    windows: Windows, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the maxima, picked from x at their indices, and these."""
    axes = windows.axes
    sizes = [x.shape[axis] for axis in axes]
    positions = jnp.arange(math.prod(sizes), dtype=jnp.int32)
    # Spatial axes are in the order of the array, whatever is between them.
    along = [size if i in axes else 1 for i, size in enumerate(x.shape)]
    places = jnp.broadcast_to(jnp.reshape(positions, along), x.shape)
    none = (least(x.dtype), np.asarray(-1, np.int32))
    operands = (jax.lax.stop_gradient(x), places)
    _, indices = windows.reduce(operands, none, _larger)
    given = x
    x, indices = (gathered_along(each, axes) for each in (x, indices))
    last = windows.spatial_last(x)
    flat = jnp.reshape(last, (*last.shape[: -len(sizes)], math.prod(sizes)))
    at = windows.spatial_last(indices)
    chosen = jnp.reshape(at, (*at.shape[: -len(sizes)], -1))
    if flat.shape[-1] == 0:
        picked = jnp.full(chosen.shape, least(x.dtype))
    else:
        picked = jnp.take_along_axis(flat, jnp.maximum(chosen, 0), axis=-1)
        picked = jnp.where(chosen >= 0, picked, least(x.dtype))
    values = windows.spatial_back(jnp.reshape(picked, at.shape))
    return sharded_where_free(values, given), sharded_where_free(indices, given)


def _larger(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, Any]:
    """Return the larger of two entries, the first of equal ones; NaN is the largest."""
    first, second = _Entry(*a), _Entry(*b)
    is_nan = first.value != first.value, second.value != second.value
    is_equal = (first.value == second.value) | (is_nan[0] & is_nan[1])
    is_larger = (second.value > first.value) | (is_nan[1] & ~is_nan[0])
    is_better = is_larger | (is_equal & (second.index < first.index))
    takes = (first.index < 0) | ((second.index >= 0) & is_better)
    return (
        jax.lax.select(takes, second.value, first.value),
        jax.lax.select(takes, second.index, first.index),
    )
