# SPDX-License-Identifier: Apache-2.0
"""nnx's layers on cuDNN: `Conv` and `Linear` with bias, residual and activation.

Also `CausalConv1D`, which nnx has as a setting of its `Conv`.

`MultiHeadAttention` is in nnx_attention.py, the norms in nnx_norms.py, f8 in nnx_f8.py
and nnx_to_f8.py.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype
from jax.typing import ArrayLike

from jax_cudnn import keywords as _keywords
from jax_cudnn.config import Implementation, Options
from jax_cudnn.flax.f8_products import OP as _F8_OP
from jax_cudnn.flax.fusion import (
    FusedProduct,
    call_with,
    causal_convolution,
    fold_residual,
    refuse_replacements,
)
from jax_cudnn.flax.moe.nnx import MixtureOfExperts, SelectionBias
from jax_cudnn.flax.nnx_attention import MultiHeadAttention
from jax_cudnn.flax.nnx_f8 import F8DotGeneral, F8Einsum, F8State
from jax_cudnn.flax.nnx_norms import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
)
from jax_cudnn.flax.nnx_to_f8 import F8Layer, F8Report, to_f8
from jax_cudnn.ops.common.activations import Activation
from jax_cudnn.ops.common.arguments import as_operand
from jax_cudnn.ops.common.f8_recipes import Recipe
from jax_cudnn.ops.products.causal_conv1d import CausalActivation
from jax_cudnn.ops.products.conv import conv
from jax_cudnn.ops.products.dot_general import dot_general

__all__ = [
    "BatchNorm",
    "CausalConv1D",
    "Conv",
    "F8DotGeneral",
    "F8Einsum",
    "F8Layer",
    "F8Report",
    "F8State",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "Linear",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "RMSNorm",
    "SelectionBias",
    "to_f8",
]


_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()


class Conv(nnx.Conv):
    r"""`flax.nnx.Conv`, in one kernel with bias, residual and activation.

    .. math::

        \mathrm{output} = \mathrm{activation}(x * \mathrm{kernel} + \mathrm{bias}
            + \mathrm{residual})

    A subclass of nnx's layer with the same parameters, so that nnx's checkpoints load
    and nnx's own code works out padding, dilation, masks, batch axes and dtypes. Sums,
    and the values computed from them, are kept in f32 (f64 for f64) and rounded once.

    Args:
      in_features: as in `flax.nnx.Conv`, like the next three.
      out_features: see there.
      kernel_size: see there.
      strides: see there.
      activation: as in `jax_cudnn.conv`: a name such as "relu", or a function
        of one array. Default None: none.
      implementation: "auto" (default), "cudnn" or "xla", as in `jax_cudnn.conv`.
      rngs: as in `flax.nnx.Conv`.
      **options: all other keyword arguments of the installed `flax.nnx.Conv` but
        `conv_general_dilated`: padding, input_dilation, kernel_dilation,
        feature_group_count, use_bias, mask, dtype, param_dtype, precision, ...

    Raises:
      ValueError: an unknown `implementation`; `conv_general_dilated` is given.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import Conv
      >>> layer = Conv(16, 16, (3, 3), activation="relu", rngs=nnx.Rngs(0))
      >>> x = jnp.ones((2, 8, 8, 16))
      >>> layer(x, residual=x).shape
      (2, 8, 8, 16)
    """

    # The other options are not spelled out: they are those of the installed Flax, and
    # new versions of Flax add some.
    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        activation: Activation | None = None,
        implementation: Implementation = "auto",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        refuse_replacements(
            "Conv", [n for n in ("conv_general_dilated",) if n in options]
        )
        Options(implementation=implementation)  # refuses unknown names
        super().__init__(
            in_features, out_features, kernel_size, strides, rngs=rngs, **options
        )
        self.activation: Activation | None = activation
        self.implementation: Implementation = implementation

    def __call__(
        self,
        inputs: jax.Array,
        out_sharding: Any = None,
        *,
        residual: ArrayLike | None = None,
    ) -> jax.Array:
        r"""Return the activation of the sum of convolution, bias and residual.

        Args:
          inputs: (..., \*y, c), with any number of batch axes, spatial axes y and c in
            channels.
          out_sharding: how the result is to be sharded, as there.
          residual: floats that broadcast to the result, added in f32 within the kernel,
            before the activation. Default None: nothing added.

        Returns:
          (..., \*y, o), of the dtype in which nnx's layer returns it.

        Raises:
          ValueError: an unknown activation; a residual that does not broadcast.
          TypeError: dtypes that `jax_cudnn.conv` does not take.
          UnsupportedError: as `jax_cudnn.conv`.
          LibraryError: as `jax_cudnn.conv`.
        """
        inputs = as_operand("Conv", "inputs", inputs)
        space = len(self.kernel_size) + 1
        fused = FusedProduct(
            layer="Conv",
            product=conv,
            activation=self.activation,
            residual=fold_residual("Conv", residual, inputs.shape, space),
            implementation=self.implementation,
        )
        return _call(
            nnx.Conv, self, inputs, out_sharding, "conv_general_dilated", fused
        )


class CausalConv1D(nnx.Module):
    r"""A causal convolution of each channel over time, with bias and activation.

    It is `flax.nnx.Conv` with `padding="CAUSAL"` and a group for each channel, followed
    by the activation, as one call of `jax_cudnn.causal_conv1d`. The parameters are
    those of nnx's layer, so that its checkpoints load: the kernel is (K, 1, c) and the
    bias (c,).

    Args:
      features: the channels c.
      kernel_size: the taps K.
      activation: as in `jax_cudnn.causal_conv1d`. Default "silu".
      use_bias: whether to add a bias. Default True.
      dtype: in which to compute. Default None: that of inputs and parameters together.
      param_dtype: that of the parameters. Default f32.
      kernel_init: makes the kernel. Default: as in `flax.nnx.Conv`.
      bias_init: makes the bias. Default: zeros.
      implementation: "auto" (default), "cudnn" or "xla", as in
        `jax_cudnn.causal_conv1d`.
      rngs: as in `flax.nnx.Conv`.

    Raises:
      ValueError: an unknown `implementation`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import CausalConv1D
      >>> layer = CausalConv1D(16, 4, rngs=nnx.Rngs(0))
      >>> y, state = layer(jnp.ones((2, 9, 16)), return_state=True)
      >>> layer(jnp.ones((2, 1, 16)), initial_state=state).shape
      (2, 1, 16)
    """

    def __init__(
        self,
        features: int,
        kernel_size: int,
        *,
        activation: CausalActivation = "silu",
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = _KERNEL_INIT,
        bias_init: Any = _BIAS_INIT,
        implementation: Implementation = "auto",
        rngs: nnx.Rngs,
    ) -> None:
        Options(implementation=implementation)  # refuses unknown names
        shape = (kernel_size, 1, features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        bias = bias_init(rngs.params(), (features,), param_dtype) if use_bias else None
        self.bias = nnx.data(None if bias is None else nnx.Param(bias))
        self.dtype = dtype
        self.activation: CausalActivation = activation
        self.implementation: Implementation = implementation

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_state: ArrayLike | None = None,
        return_state: bool = False,
        segment_ids: ArrayLike | None = None,
    ) -> Any:
        """Return the convolution of all steps, and with `return_state` the state.

        Args:
          inputs: (..., s, c), with any number of batch axes, steps s and channels c.
          initial_state: (..., K - 1, c), the steps before the first one, of the dtype
            in which the layer computes. Default None: zeros.
          return_state: whether to return the last K - 1 steps, too. Default False.
          segment_ids: (..., s) integers, the document of each step. Default None: one.

        Returns:
          (..., s, c), of the dtype in which nnx's layer returns it; with `return_state`
          a pair of this and the state.

        Raises:
          ValueError, TypeError: as `jax_cudnn.causal_conv1d`.
          UnsupportedError, LibraryError: likewise.
        """
        inputs = as_operand("CausalConv1D", "inputs", inputs)
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = promote_dtype(
            inputs, self.kernel[...], bias, dtype=self.dtype
        )
        return causal_convolution(
            self,
            (x, kernel, bias),
            initial_state=initial_state,
            return_state=return_state,
            segment_ids=segment_ids,
        )


class Linear(nnx.Linear):
    r"""`flax.nnx.Linear`, in one kernel with bias, residual and activation.

    .. math::

        \mathrm{output} = \mathrm{activation}(x\, \mathrm{kernel} + \mathrm{bias}
            + \mathrm{residual})

    A subclass of nnx's layer with the same parameters. Sums, and the values
    computed from them, are kept in f32 (f64 for f64) and rounded once.

    Args:
      in_features: as in `flax.nnx.Linear`.
      out_features: as in `flax.nnx.Linear`.
      activation: as in `jax_cudnn.conv`. Default None: none.
      recipe: `f8.Delayed()` or another recipe of f8: the layer's three matmuls run in
        f8, by an :class:`F8DotGeneral` in the attribute `dot_general`. A residual is
        added after the kernel then. Default None: no f8.
      implementation: "auto" (default), "cudnn" or "xla", as in `jax_cudnn.matmul`.
      rngs: as in `flax.nnx.Linear`.
      **options: all other keyword arguments of the installed `flax.nnx.Linear` but
        `dot_general`: use_bias, dtype, param_dtype, precision, kernel_init, ...

    Raises:
      ValueError: an unknown `implementation`; `dot_general` is given.
      TypeError: a `recipe` that is none.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import Linear
      >>> layer = Linear(8, 16, activation="gelu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((5, 3, 8))).shape
      (5, 3, 16)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation | None = None,
        recipe: Recipe | None = None,
        implementation: Implementation = "auto",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        refuse_replacements("Linear", [n for n in ("dot_general",) if n in options])
        Options(implementation=implementation)  # refuses unknown names
        if recipe is not None:
            options["dot_general"] = F8DotGeneral(recipe, implementation)
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.activation: Activation | None = activation
        self.implementation: Implementation = implementation

    def __call__(
        self,
        inputs: jax.Array,
        out_sharding: Any = None,
        *,
        residual: ArrayLike | None = None,
    ) -> jax.Array:
        """Return the activation of the sum of product, bias and residual.

        Args:
          inputs: (..., c), with c in features.
          out_sharding: how the result is to be sharded, as there.
          residual: floats that broadcast to the result, added in f32 within the kernel,
            before the activation. Default None: nothing added.

        Returns:
          (..., o), of the dtype in which nnx's layer returns it.

        Raises:
          ValueError: an unknown activation; a residual that does not broadcast.
          TypeError: dtypes that `jax_cudnn.matmul` does not take.
          UnsupportedError: as `jax_cudnn.matmul`.
          LibraryError: as `jax_cudnn.matmul`.
        """
        inputs = as_operand("Linear", "inputs", inputs)
        f8 = self.dot_general if isinstance(self.dot_general, F8DotGeneral) else None
        fused = FusedProduct(
            layer="Linear",
            product=dot_general if f8 is None else f8.fused,
            op=None if f8 is None else _F8_OP,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )
        return _call(nnx.Linear, self, inputs, out_sharding, "dot_general", fused)


def _call(
    flax_class: type,
    layer: Conv | Linear,
    inputs: jax.Array,
    out_sharding: object,
    name: str,
    fused: FusedProduct,
) -> jax.Array:
    """Run nnx's layer with `fused` as its attribute `name`."""
    bias = None if layer.bias is None else layer.bias[...]

    def promote_dtype(arrays: tuple[Any, ...], **options: Any) -> tuple[Any, ...]:
        x, kernel, _ = arrays
        x, kernel, fused.bias = layer.promote_dtype((x, kernel, bias), **options)
        return x, kernel, None

    changes: dict[str, Any] = {"bias": None, "use_bias": False}
    changes |= {"promote_dtype": promote_dtype, name: fused}
    return call_with(flax_class, layer, inputs, out_sharding, **changes)


_keywords.hint_on(globals(), __all__)
