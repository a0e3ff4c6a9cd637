# SPDX-License-Identifier: Apache-2.0
"""linen's norms on cuDNN, with residual and activation.

Each is a subclass of linen's layer with the same parameters and state. Without a
residual it returns what linen's layer returns. With one it returns the output and the
sum of inputs and residual.
"""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation
from jax_cudnn.flax.norms import (
    Axes,
    LayerOperation,
    Result,
    as_tuple,
    begin,
    by_flax,
    of_channels,
    of_groups,
    of_rows,
    result_dtype,
)
from jax_cudnn.ops.common.activations import Activation
from jax_cudnn.ops.norms.batch import batch_norm
from jax_cudnn.ops.norms.groups import group_norm, instance_norm
from jax_cudnn.ops.norms.rows import layer_norm, rms_norm

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


def _operands(layer: Any, x: jax.Array, axes: tuple[int, ...]) -> dict[str, Any]:
    """Return x, the parameters, made in linen's order, and the result's dtype."""
    shape = [x.shape[axis] for axis in axes]
    names = {"scale": layer.use_scale, "bias": getattr(layer, "use_bias", False)}
    inits = {name: getattr(layer, f"{name}_init", None) for name in names}
    factors = {
        name: layer.param(name, inits[name], shape, layer.param_dtype)
        for name, is_used in names.items()
        if is_used
    }
    dtype = result_dtype(layer.dtype, x, *factors.values())
    return {
        "x": x,
        **factors,
        "preferred_element_type": dtype,
        "epsilon": layer.epsilon,
    }


class _Norm(linen.Module):
    """What this package adds to all of linen's norms, and a call for all but BatchNorm.

    It precedes linen's class, whose attributes come first nevertheless.
    """

    _operation: ClassVar[LayerOperation]
    activation: Activation | None = None
    implementation: Implementation = "auto"

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: ArrayLike | None = None,
    ) -> Result:
        """Return the norm; with a residual, a tuple of it and the sum.

        Args:
          x: as in linen's layer.
          mask: as there; Flax's own code computes it.
          residual: added to x before; x's shape. Default None.

        Raises:
          ValueError, TypeError, LibraryError: as the layer's function of jax_cudnn.
          UnsupportedError: `implementation="cudnn"` with what only Flax computes: a
            mask, an `axis_name`, axes that the layer leaves to Flax, sums in 16 bits.
        """
        operands = functools.partial(_operands, self)
        return self._operation.run(self, x, residual, mask, operands)


class LayerNorm(_Norm, linen.LayerNorm):
    r"""`flax.linen.LayerNorm` by :func:`jax_cudnn.layer_norm`.

    .. math::

        \mathrm{output} = \mathrm{activation}(\mathrm{norm}(x + \mathrm{residual}))

    The mean is always subtracted before squaring: `use_fast_variance` has no effect.
    Reduction axes that are not the feature axes are left to Flax.

    Attributes:
      activation: as in `jax_cudnn.layer_norm`. Default None: none.
      implementation: "auto" (default), "cudnn" or "xla", as there. All other attributes
        are those of `flax.linen.LayerNorm`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax.linen import LayerNorm
      >>> x = jnp.ones((5, 3, 8))
      >>> (output, total), _ = LayerNorm().init_with_output(
      ...     jax.random.key(0), x, residual=x
      ... )
      >>> output.shape
      (5, 3, 8)
    """

    _operation = LayerOperation(
        flax_class=linen.LayerNorm, operation=layer_norm, arguments=of_rows
    )


class RMSNorm(_Norm, linen.RMSNorm):
    """`flax.linen.RMSNorm` by :func:`jax_cudnn.rms_norm`.

    Attributes are those of linen's layer, and those that `LayerNorm` adds.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax.linen import RMSNorm
      >>> y, _ = RMSNorm().init_with_output(jax.random.key(0), jnp.ones((5, 3, 8)))
      >>> y.shape
      (5, 3, 8)
    """

    _operation = LayerOperation(
        flax_class=linen.RMSNorm, operation=rms_norm, arguments=of_rows
    )


def _of_groups(
    layer: Any, x: jax.Array, reasons: list[str]
) -> tuple[Axes, dict[str, Any]]:
    """Return what `of_groups` does, with the groups that linen makes of a size.

    Flax tells of groups that do not fit.
    """
    axes, _ = of_groups(layer, x, reasons)
    channels, count, size = x.shape[-1], layer.num_groups, layer.group_size
    if size:
        count = None if count else channels // size
    if not count or channels % count or (size and channels % size):
        reasons.append(f"num_groups={layer.num_groups}, group_size={size}")
    if x.ndim == 1:
        reasons.append("x has no batch axis")
    return axes, {"groups": count}


class GroupNorm(_Norm, linen.GroupNorm):
    """`flax.linen.GroupNorm` by :func:`jax_cudnn.group_norm`.

    Attributes are those of linen's layer, and those that `LayerNorm` adds. Other
    `reduction_axes` than all but the first are left to Flax.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax.linen import GroupNorm
      >>> layer = GroupNorm(4, activation="silu")
      >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 5, 8)))
      >>> y.shape
      (2, 5, 5, 8)
    """

    _operation = LayerOperation(
        flax_class=linen.GroupNorm, operation=group_norm, arguments=_of_groups
    )


class InstanceNorm(_Norm, linen.InstanceNorm):
    """`flax.linen.InstanceNorm` by :func:`jax_cudnn.instance_norm`.

    Attributes are those of linen's layer, and those that `LayerNorm` adds. Several
    `feature_axes`, and the first axis among them, are left to Flax.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax.linen import InstanceNorm
      >>> x = jnp.ones((2, 5, 5, 8))
      >>> y, _ = InstanceNorm().init_with_output(jax.random.key(0), x)
      >>> y.shape
      (2, 5, 5, 8)
    """

    _operation = LayerOperation(
        flax_class=linen.InstanceNorm, operation=instance_norm, arguments=of_channels
    )


class BatchNorm(_Norm, linen.BatchNorm):
    """`flax.linen.BatchNorm` by :func:`jax_cudnn.batch_norm`.

    Attributes are those of linen's layer, and those that `LayerNorm` adds. The running
    values are the same variables of the collection "batch_stats".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax.linen import BatchNorm
      >>> layer = BatchNorm(use_running_average=False, activation="relu")
      >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 5, 8)))
      >>> y.shape
      (2, 5, 5, 8)
    """

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        residual: ArrayLike | None = None,
    ) -> Result:
        """Return the norm; with a residual, a tuple of it and the sum.

        Args:
          x: as in linen's layer.
          use_running_average: as there.
          mask: as there; Flax's own code computes it.
          residual: added to x before; x's shape. Default None.

        Raises:
          ValueError, TypeError, LibraryError: as `jax_cudnn.batch_norm`.
          UnsupportedError: `implementation="cudnn"` with a mask, and as
            `jax_cudnn.batch_norm`.
        """
        x, fused, reasons = begin(self, x, residual, mask, is_batch=True)
        channels = as_tuple(self.axis)
        if len(channels) != 1:
            reasons.append(f"axis={self.axis}")
        if reasons:
            more = {"use_running_average": use_running_average, "mask": mask}
            return by_flax(linen.BatchNorm, self, x, reasons, fused, **more)
        is_running = linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        shape = [x.shape[channels[0]]]
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        is_first = self.is_initializing()
        results = batch_norm(
            **_operands(self, x, channels),
            running_mean=mean.value,
            running_var=var.value,
            use_running_average=is_running,
            channel_axis=channels[0],
            momentum=self.momentum,
            axis_name=None if is_first else self.axis_name,
            axis_index_groups=None if is_first else self.axis_index_groups,
            **fused.options,
        )
        if is_running:
            return results
        *results, new_mean, new_var = results
        if not is_first:
            mean.value, var.value = new_mean, new_var
        return tuple(results) if len(results) > 1 else results[0]
