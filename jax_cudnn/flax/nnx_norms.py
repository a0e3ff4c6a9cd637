# SPDX-License-Identifier: Apache-2.0
"""nnx's norms on cuDNN, with residual and activation.

Each is a subclass of nnx's layer with the same parameters and state, so that nnx's
checkpoints load. Without a residual it returns what nnx's layer returns. With one it
returns the output and the sum of inputs and residual, to which the next layer's
residual is added.
"""

from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options
from jax_cudnn.flax.norms import (
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


class _Norm(nnx.Module):
    """A base class that adds to nnx's norms what is ours; it precedes nnx's class."""

    # The options are not spelled out: they are those of the installed Flax.
    def __init__(
        self,
        *arguments: Any,
        activation: Activation | None = None,
        implementation: Implementation = "auto",
        **options: Any,
    ) -> None:
        Options(implementation=implementation)  # refuses unknown names
        super().__init__(*arguments, **options)
        self.activation: Activation | None = activation
        self.implementation: Implementation = implementation

    def _operands(self: Any, x: jax.Array, *state: jax.Array) -> dict[str, Any]:
        """Return x and the parameters as nnx promotes them, and the result's dtype.

        An x that nnx would only widen is left as it is: kernels widen it. What there is
        of a state is promoted with them.
        """
        scale, bias = (
            None if each is None else each[...]
            for each in (self.scale, getattr(self, "bias", None))
        )
        arrays = (x, *state, scale, bias)
        wide, *_, scale, bias = self.promote_dtype(arrays, dtype=self.dtype)
        dtype = result_dtype(self.dtype, wide, scale, bias)
        narrow = x if x.dtype.itemsize < wide.dtype.itemsize else wide
        return {
            "x": narrow,
            "scale": scale,
            "bias": bias,
            "preferred_element_type": dtype,
            "epsilon": self.epsilon,
        }


class _RowNorm(_Norm):
    """What all but BatchNorm have in common."""

    _operation: ClassVar[LayerOperation]

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        residual: ArrayLike | None = None,
    ) -> Result:
        """Return the norm; with a residual, a tuple of it and the sum.

        Args:
          x: as in nnx's layer.
          mask: as there; Flax's own code computes it.
          residual: added to x before; x's shape. Default None.

        Raises:
          ValueError, TypeError, LibraryError: as the layer's function of jax_cudnn.
          UnsupportedError: `implementation="cudnn"` with what only Flax computes: a
            mask, an `axis_name`, axes that the layer leaves to Flax.
        """
        return self._operation.run(
            self, x, residual, mask, lambda x, _: self._operands(x)
        )


class LayerNorm(_RowNorm, nnx.LayerNorm):
    r"""`flax.nnx.LayerNorm` by :func:`jax_cudnn.layer_norm`.

    .. math::

        \mathrm{output} = \mathrm{activation}(\mathrm{norm}(x + \mathrm{residual}))

    The mean is always subtracted before squaring: `use_fast_variance` has no effect.
    Reduction axes that are not the feature axes are left to Flax.

    Args:
      num_features: as in `flax.nnx.LayerNorm`.
      activation: as in `jax_cudnn.layer_norm`. Default None: none.
      implementation: "auto" (default), "cudnn" or "xla", as there.
      rngs: as in `flax.nnx.LayerNorm`.
      **options: all other keyword arguments of the installed `flax.nnx.LayerNorm`.

    Raises:
      ValueError: an unknown `implementation`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import LayerNorm
      >>> layer = LayerNorm(8, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((5, 3, 8))
      >>> output, total = layer(x, residual=x)
      >>> output.shape
      (5, 3, 8)
    """

    _operation = LayerOperation(
        flax_class=nnx.LayerNorm, operation=layer_norm, arguments=of_rows
    )


class RMSNorm(_RowNorm, nnx.RMSNorm):
    """`flax.nnx.RMSNorm` by :func:`jax_cudnn.rms_norm`.

    Arguments are those of `LayerNorm`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import RMSNorm
      >>> RMSNorm(8, rngs=nnx.Rngs(0))(jnp.ones((5, 3, 8))).shape
      (5, 3, 8)
    """

    _operation = LayerOperation(
        flax_class=nnx.RMSNorm, operation=rms_norm, arguments=of_rows
    )


class GroupNorm(_RowNorm, nnx.GroupNorm):
    """`flax.nnx.GroupNorm` by :func:`jax_cudnn.group_norm`.

    Arguments are those of nnx's layer, and those that `LayerNorm` adds. Other
    `reduction_axes` than all but the first are left to Flax.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import GroupNorm
      >>> layer = GroupNorm(8, 4, activation="silu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 5, 8))).shape
      (2, 5, 5, 8)
    """

    _operation = LayerOperation(
        flax_class=nnx.GroupNorm, operation=group_norm, arguments=of_groups
    )


class InstanceNorm(_RowNorm, nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm` by :func:`jax_cudnn.instance_norm`.

    Arguments are those of nnx's layer, and those that `LayerNorm` adds. Several
    `feature_axes`, and the first axis among them, are left to Flax.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import InstanceNorm
      >>> InstanceNorm(8, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 5, 8))).shape
      (2, 5, 5, 8)
    """

    _operation = LayerOperation(
        flax_class=nnx.InstanceNorm, operation=instance_norm, arguments=of_channels
    )


class BatchNorm(_Norm, nnx.BatchNorm):
    """`flax.nnx.BatchNorm` by :func:`jax_cudnn.batch_norm`.

    Arguments are those of nnx's layer, and those that `LayerNorm` adds. The running
    values are the same state, kept in f32; no gradient flows through them. They are not
    rounded to `dtype` for inference, as nnx does.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import BatchNorm
      >>> layer = BatchNorm(8, activation="relu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 5, 8)), use_running_average=False).shape
      (2, 5, 5, 8)
    """

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
          x: as in nnx's layer.
          use_running_average: as there.
          mask: as there; Flax's own code computes it.
          residual: added to x before; x's shape. Default None.

        Raises:
          ValueError: neither the call nor the layer says `use_running_average`.
          UnsupportedError: `implementation="cudnn"` with a mask, and as
            `jax_cudnn.batch_norm`.
          TypeError, LibraryError: as `jax_cudnn.batch_norm`.
        """
        x, fused, reasons = begin(self, x, residual, mask, is_batch=True)
        channels = as_tuple(self.axis)
        if len(channels) != 1:
            reasons.append(f"axis={self.axis}")
        is_running = self.use_running_average
        if use_running_average is not None:
            is_running = use_running_average
        if reasons or is_running is None:  # of which nnx tells
            reasons = reasons or ["use_running_average is not given"]
            more = {"use_running_average": is_running, "mask": mask}
            return by_flax(nnx.BatchNorm, self, x, reasons, fused, **more)
        results = batch_norm(
            **self._operands(x, self.mean[...], self.var[...]),
            running_mean=self.mean[...],
            running_var=self.var[...],
            use_running_average=is_running,
            channel_axis=channels[0],
            momentum=self.momentum,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            **fused.options,
        )
        if is_running:
            return results
        *results, mean, var = results
        self.mean[...] = jax.lax.stop_gradient(mean)
        self.var[...] = jax.lax.stop_gradient(var)
        return tuple(results) if len(results) > 1 else results[0]
