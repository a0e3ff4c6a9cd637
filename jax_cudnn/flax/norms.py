# SPDX-License-Identifier: Apache-2.0
"""Runs the norms of Flax's layers by jax_cudnn's operations, or by Flax's own code.

The layers keep Flax's parameters, dtypes and state. What only Flax has (masks, means
over other axes than those of the scale, sums in 16 bits) is left to Flax's code.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.ops.common.activations import Activation, on_array
from jax_cudnn.ops.common.arguments import as_operand, describe

_log = logging.getLogger("jax_cudnn")

# Those that the operations take.
_DTYPES = ("bfloat16", "float16", "float32", "float64")

Result = jax.Array | tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class Fused:
    """The operations fused into a layer's norm, and how the norm is run."""

    layer: str
    activation: Activation | None
    residual: ArrayLike | None
    implementation: Implementation

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that all of jax_cudnn's norms take for it."""
        return {
            "activation": self.activation,
            "residual": self.residual,
            "implementation": self.implementation,
        }


Axes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayerOperation:
    """Which operation a layer runs, and with which arguments.

    ``arguments`` gets the layer, x, and the reasons why Flax must compute the norm, to
    which it adds. It returns the axes of scale and bias, and the operation's arguments.
    """

    flax_class: type
    operation: Callable[..., Result]
    arguments: Callable[[Any, jax.Array, list[str]], tuple[Axes, dict[str, Any]]]

    def run(
        self,
        layer: Any,
        x: ArrayLike,
        residual: ArrayLike | None,
        mask: object,
        operands: Callable[[jax.Array, Axes], dict[str, Any]],
    ) -> Result:
        """Return a layer's norm; ``operands`` makes the other arguments of x, axes."""
        x, fused, reasons = begin(layer, x, residual, mask)
        axes, options = self.arguments(layer, x, reasons)
        if reasons:
            return by_flax(self.flax_class, layer, x, reasons, fused, mask=mask)
        return self.operation(**operands(x, axes), **options, **fused.options)


def begin(
    layer: Any,
    x: ArrayLike,
    residual: ArrayLike | None,
    mask: object,
    *,
    is_batch: bool = False,
) -> tuple[jax.Array, Fused, list[str]]:
    """Return x, what a layer does beside its norm, and why Flax must compute it.

    The reasons are what jax_cudnn's operations have no argument for.
    """
    name = type(layer).__name__
    Options(implementation=layer.implementation)  # refuses unknown names
    array = as_operand(name, "x", x)
    fused = Fused(
        layer=name,
        activation=layer.activation,
        residual=residual,
        implementation=layer.implementation,
    )
    reasons: list[str] = []
    if mask is not None:
        reasons.append("a mask is given")
    if layer.axis_name is not None and not is_batch:
        reasons.append(f"the statistics are those over axis_name={layer.axis_name!r}")
    if not getattr(layer, "force_float32_reductions", True):
        reasons.append("force_float32_reductions=False")
    if str(array.dtype) not in _DTYPES:
        reasons.append(f"x is {describe(array)}")
    return array, fused, reasons


def of_rows(
    layer: Any, x: jax.Array, reasons: list[str]
) -> tuple[Axes, dict[str, Any]]:
    """Return the axes that a layer norm normalises."""
    rank = x.ndim
    given = as_tuple(layer.reduction_axes), as_tuple(layer.feature_axes)
    reduced, featured = ([axis % max(rank, 1) for axis in axes] for axes in given)
    is_inside = all(-rank <= axis < rank for axes in given for axis in axes)
    if not is_inside or len(set(featured)) != len(featured):
        reasons.append(
            f"feature_axes={layer.feature_axes} and reduction_axes="
            f"{layer.reduction_axes} are not different axes of {rank}"
        )
    if sorted(reduced) != featured:
        reasons.append(
            f"reduction_axes={layer.reduction_axes} and "
            f"feature_axes={layer.feature_axes} are not the same axes in order"
        )
    return tuple(featured), {"axis": tuple(featured)}


def of_groups(
    layer: Any, x: jax.Array, reasons: list[str]
) -> tuple[Axes, dict[str, Any]]:
    """Return the axis of channels, and how many groups they are."""
    del x
    if layer.reduction_axes is not None:
        reasons.append(f"reduction_axes={layer.reduction_axes}")
    return (-1,), {"groups": layer.num_groups}


def of_channels(
    layer: Any, x: jax.Array, reasons: list[str]
) -> tuple[Axes, dict[str, Any]]:
    """Return the axis of channels of an instance norm."""
    channels = as_tuple(layer.feature_axes)
    if len(channels) != 1 or channels[0] % x.ndim == 0:
        reasons.append(f"feature_axes={layer.feature_axes}")
    return channels, {"channel_axis": channels[0] if channels else None}


def as_tuple(axes: Any) -> tuple[int, ...]:
    """Return one axis or several as a tuple."""
    return tuple(axes) if isinstance(axes, Iterable) else (axes,)


def result_dtype(dtype: Any, *arrays: jax.Array | None) -> Any:
    """Return the dtype in which Flax returns a norm of these arrays."""
    if dtype is not None:
        return dtype
    return jnp.result_type(*(x for x in arrays if x is not None))


def by_flax(
    flax_class: type,
    layer: Any,
    x: jax.Array,
    reasons: Sequence[str],
    fused: Fused,
    **arguments: Any,
) -> Result:
    """Run Flax's own code for a norm, with residual and activation around it."""
    if fused.implementation == "cudnn":
        raise UnsupportedError(
            f"{fused.layer}: cuDNN cannot run this norm:",
            reasons,
            'Pass implementation="auto" or "xla" to let Flax\'s own code compute it.',
        )
    if fused.implementation == "auto":
        _say_once(fused.layer, tuple(reasons))
    total = x
    if fused.residual is not None:
        total = x + as_operand(fused.layer, "residual", fused.residual)
    output = _method(flax_class)(layer, total, **arguments)
    if fused.activation is not None:
        output = on_array(fused.layer, fused.activation, output)
    return output if fused.residual is None else (output, total)


def _method(flax_class: type) -> Callable[..., jax.Array]:
    """Return the `__call__` of Flax's class as Flax wrote it.

    Linen's wrapper of it has been passed through already.
    """
    return inspect.unwrap(flax_class.__call__)


@functools.lru_cache(maxsize=256)
def _say_once(layer: str, reasons: tuple[str, ...]) -> None:
    _log.info("%s: Flax's own code runs: %s", layer, "; ".join(reasons))
