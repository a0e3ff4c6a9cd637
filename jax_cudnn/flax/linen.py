# SPDX-License-Identifier: Apache-2.0
"""linen's layers on cuDNN: `Conv` and `Dense` with bias, residual and activation.

Also `CausalConv1D`, which linen has as a setting of its `Conv`.

`MultiHeadDotProductAttention` is in linen_attention.py, the norms in linen_norms.py, f8
in linen_f8.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import promote_dtype
from jax.typing import ArrayLike

from jax_cudnn import keywords as _keywords
from jax_cudnn.config import Implementation
from jax_cudnn.flax.f8_products import OP as _F8_OP
from jax_cudnn.flax.fusion import (
    FusedProduct,
    call_with,
    causal_convolution,
    fold_residual,
    refuse_replacements,
)
from jax_cudnn.flax.linen_attention import (
    MultiHeadAttention,
    MultiHeadDotProductAttention,
)
from jax_cudnn.flax.linen_f8 import F8DotGeneral
from jax_cudnn.flax.linen_norms import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
)
from jax_cudnn.flax.moe.linen import MixtureOfExperts
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
    "Dense",
    "F8DotGeneral",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "RMSNorm",
]


class Conv(linen.Conv):
    r"""`flax.linen.Conv`, in one kernel with bias, residual and activation.

    .. math::

        \mathrm{output} = \mathrm{activation}(x * \mathrm{kernel} + \mathrm{bias}
            + \mathrm{residual})

    A subclass of linen's layer with the same parameters, so that linen's checkpoints
    load and linen's own code works out padding, dilation, masks, batch axes and dtypes.
    Sums, and the values computed from them, are kept in f32 (f64 for f64) and rounded
    once.

    Attributes:
      activation: as in `jax_cudnn.conv`: a name such as "relu", or a function
        of one array. Default None: none.
      implementation: "auto" (default), "cudnn" or "xla", as in `jax_cudnn.conv`.
      conv_general_dilated: must be None, and so must `conv_general_dilated_cls`. All
        other attributes are those of `flax.linen.Conv`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax.linen import Conv
      >>> x = jnp.ones((2, 8, 8, 16))
      >>> layer = Conv(16, (3, 3), activation="relu")
      >>> y, _ = layer.init_with_output(jax.random.key(0), x, residual=x)
      >>> y.shape
      (2, 8, 8, 16)
    """

    activation: Activation | None = None
    implementation: Implementation = "auto"

    @linen.compact
    def __call__(
        self, inputs: jax.Array, *, residual: ArrayLike | None = None
    ) -> jax.Array:
        r"""Return the activation of the sum of convolution, bias and residual.

        Args:
          inputs: (..., \*y, c), with any number of batch axes, spatial axes y and c in
            channels.
          residual: floats that broadcast to the result, added in f32 within the kernel,
            before the activation. Default None: nothing added.

        Returns:
          (..., \*y, o), of the dtype in which linen's layer returns it.

        Raises:
          ValueError: an unknown activation or `implementation`; a residual that does
            not broadcast; another convolution among the attributes.
          TypeError: dtypes that `jax_cudnn.conv` does not take.
          UnsupportedError, LibraryError: as `jax_cudnn.conv`.
        """
        inputs = as_operand("Conv", "inputs", inputs)
        size = self.kernel_size
        space = (1 if isinstance(size, int) else len(size)) + 1
        fused = FusedProduct(
            layer="Conv",
            product=conv,
            activation=self.activation,
            residual=fold_residual("Conv", residual, inputs.shape, space),
            implementation=self.implementation,
        )
        return _call(linen.Conv, self, inputs, "conv_general_dilated", fused)


class CausalConv1D(linen.Module):
    r"""A causal convolution of each channel over time, with bias and activation.

    It is `flax.linen.Conv` with `padding="CAUSAL"` and a group for each channel,
    followed by the activation, as one call of `jax_cudnn.causal_conv1d`. The parameters
    are those of linen's layer, so that its checkpoints load: the kernel is (K, 1, c)
    and the bias (c,).

    Attributes:
      kernel_size: the taps K.
      activation: as in `jax_cudnn.causal_conv1d`. Default "silu".
      use_bias: whether to add a bias. Default True.
      dtype: in which to compute. Default None: that of inputs and parameters together.
      param_dtype: that of the parameters. Default f32.
      kernel_init: makes the kernel. Default: as in `flax.linen.Conv`.
      bias_init: makes the bias. Default: zeros.
      implementation: "auto" (default), "cudnn" or "xla", as in
        `jax_cudnn.causal_conv1d`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax.linen import CausalConv1D
      >>> x = jnp.ones((2, 9, 16))
      >>> layer = CausalConv1D(4)
      >>> y, _ = layer.init_with_output(jax.random.key(0), x)
      >>> y.shape
      (2, 9, 16)
    """

    kernel_size: int
    activation: CausalActivation = "silu"
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = linen.initializers.lecun_normal()
    bias_init: Any = linen.initializers.zeros_init()
    implementation: Implementation = "auto"

    @linen.compact
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
          (..., s, c), of the dtype in which the layer computes; with `return_state` a
          pair of this and the state.

        Raises:
          ValueError, TypeError: as `jax_cudnn.causal_conv1d`.
          UnsupportedError, LibraryError: likewise.
        """
        inputs = as_operand("CausalConv1D", "inputs", inputs)
        channels = inputs.shape[-1]
        shape = (self.kernel_size, 1, channels)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (channels,), self.param_dtype)
        x, kernel, bias = promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return causal_convolution(
            self,
            (x, kernel, bias),
            initial_state=initial_state,
            return_state=return_state,
            segment_ids=segment_ids,
        )


class Dense(linen.Dense):
    r"""`flax.linen.Dense`, in one kernel with bias, residual and activation.

    .. math::

        \mathrm{output} = \mathrm{activation}(x\, \mathrm{kernel} + \mathrm{bias}
            + \mathrm{residual})

    A subclass of linen's layer with the same parameters. Sums, and the values
    computed from them, are kept in f32 (f64 for f64) and rounded once.

    Attributes:
      activation: as in `jax_cudnn.conv`. Default None: none.
      implementation: "auto" (default), "cudnn" or "xla", as in `jax_cudnn.matmul`.
      recipe: `f8.Delayed()` or another recipe of f8: the layer's three matmuls run in
        f8, by an :class:`F8DotGeneral`, whose state is one more collection of
        variables. A residual is added after the kernel then. Default None: no f8.
      dot_general: must be None, and so must `dot_general_cls`. All other attributes are
        those of `flax.linen.Dense`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax.linen import Dense
      >>> layer = Dense(16, activation="gelu")
      >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((5, 3, 8)))
      >>> y.shape
      (5, 3, 16)
    """

    activation: Activation | None = None
    implementation: Implementation = "auto"
    recipe: Recipe | None = None

    @linen.compact
    def __call__(
        self, inputs: jax.Array, *, residual: ArrayLike | None = None
    ) -> jax.Array:
        """Return the activation of the sum of product, bias and residual.

        Args:
          inputs: (..., c), with c in features.
          residual: floats that broadcast to the result, added in f32 within the kernel,
            before the activation. Default None: nothing added.

        Returns:
          (..., o), of the dtype in which linen's layer returns it.

        Raises:
          ValueError: an unknown activation or `implementation`; a residual that does
            not broadcast; another product among the attributes.
          TypeError: dtypes that `jax_cudnn.matmul` does not take; a `recipe` that is
            none.
          UnsupportedError, LibraryError: as `jax_cudnn.matmul`.
        """
        inputs = as_operand("Dense", "inputs", inputs)
        product, op = dot_general, None
        if self.recipe is not None:
            product, op = F8DotGeneral(self.recipe, self.implementation).fused(), _F8_OP
        fused = FusedProduct(
            layer="Dense",
            product=product,
            op=op,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )
        return _call(linen.Dense, self, inputs, "dot_general", fused)


def _call(
    flax_class: type,
    layer: Conv | Dense,
    inputs: jax.Array,
    name: str,
    fused: FusedProduct,
) -> jax.Array:
    """Run linen's layer with `fused` as its attribute `name`."""
    replacements = [name, f"{name}_cls"]
    refuse_replacements(
        fused.layer, [n for n in replacements if getattr(layer, n) is not None]
    )

    def promote_dtype(x: Any, kernel: Any, _: None, **options: Any) -> tuple[Any, ...]:
        # The bias is made here, after the kernel, in linen's order: each parameter
        # takes the next of the layer's random keys.
        bias = None
        if layer.use_bias:
            shape = (layer.features,)
            bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
        x, kernel, fused.bias = layer.promote_dtype(x, kernel, bias, **options)
        return x, kernel, None

    changes: dict[str, Any] = {"use_bias": False, "promote_dtype": promote_dtype}
    changes[name] = fused
    return call_with(flax_class, layer, inputs, **changes)


_keywords.hint_on(globals(), __all__)
