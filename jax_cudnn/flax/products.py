# SPDX-License-Identifier: Apache-2.0
"""`conv_general_dilated` and `dot_general` for Flax's layers, both nnx and linen.

They compute the product alone: Flax adds the bias to what they return. The layers of
flax/nnx.py and flax/linen.py put bias, residual and activation into the same kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, Options
from jax_cudnn.ops.common.arguments import Precision
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.products.conv import conv
from jax_cudnn.ops.products.dot_general import dot_general as fused_dot_general


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvGeneralDilated:
    """A convolution as Flax's layers call it, run by `jax_cudnn.conv`.

    Hashable, and equal where the settings are equal, so that a layer that is built
    again with equal settings is not compiled again.

    Attributes:
      implementation: as in `jax_cudnn.conv`.
    """

    implementation: Implementation = "auto"

    def __post_init__(self) -> None:
        Options(implementation=self.implementation)  # refuses unknown names

    # The names and their order are those of jax.lax.conv_general_dilated.
    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: object = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: Precision = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
    ) -> jax.Array:
        """Return the convolution that `jax.lax.conv_general_dilated` returns.

        Args:
          lhs: the images, in the layout of `dimension_numbers`.
          rhs: the filters, of lhs's dtype.
          window_strides: as in `jax_cudnn.conv`, like all arguments up to
            `preferred_element_type`.
          padding: see there.
          lhs_dilation: see there.
          rhs_dilation: see there.
          dimension_numbers: see there.
          feature_group_count: see there.
          batch_group_count: see there.
          precision: see there.
          preferred_element_type: see there.
          out_sharding: how the result is to be sharded, as there.

        Returns:
          The result, in the layout of `dimension_numbers`.

        Raises:
          ValueError, TypeError, LibraryError: as `jax_cudnn.conv`.
          UnsupportedError: likewise.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from jax_cudnn.flax import conv_general_dilated
          >>> layer = nnx.Conv(
          ...     3, 16, (3, 3), conv_general_dilated=conv_general_dilated,
          ...     rngs=nnx.Rngs(0))
          >>> layer(jnp.ones((2, 8, 8, 3))).shape
          (2, 8, 8, 16)
        """
        with on_behalf_of("conv_general_dilated", "conv"):
            return conv(
                lhs,
                rhs,
                window_strides,
                padding,
                lhs_dilation,
                rhs_dilation,
                dimension_numbers,
                feature_group_count,
                batch_group_count,
                precision,
                preferred_element_type,
                out_sharding,
                implementation=self.implementation,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DotGeneral:
    """A contraction as Flax's layers call it, run by `jax_cudnn.dot_general`.

    Hashable, and equal where the settings are equal, like `ConvGeneralDilated`.

    Attributes:
      implementation: as in `jax_cudnn.dot_general`.
    """

    implementation: Implementation = "auto"

    def __post_init__(self) -> None:
        Options(implementation=self.implementation)  # refuses unknown names

    # The names and their order are those of jax.lax.dot_general.
    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: tuple[
            tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
        ],
        precision: Precision = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
    ) -> jax.Array:
        """Return the contraction that `jax.lax.dot_general` returns.

        Args:
          lhs: an array.
          rhs: an array.
          dimension_numbers: as in `jax_cudnn.dot_general`, like the next two.
          precision: see there.
          preferred_element_type: see there.
          out_sharding: how the result is to be sharded, as there.

        Returns:
          The batch axes, the free axes of lhs, and those of rhs, in this order.

        Raises:
          ValueError, TypeError, LibraryError: as `jax_cudnn.dot_general`.
          UnsupportedError: likewise.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from jax_cudnn.flax import dot_general
          >>> layer = nnx.Linear(8, 16, dot_general=dot_general, rngs=nnx.Rngs(0))
          >>> layer(jnp.ones((5, 3, 8))).shape
          (5, 3, 16)
        """
        return fused_dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding,
            implementation=self.implementation,
        )


conv_general_dilated = ConvGeneralDilated()
dot_general = DotGeneral()


def make_conv_general_dilated(
    *, implementation: Implementation = "auto"
) -> ConvGeneralDilated:
    """Return a `conv_general_dilated` with a setting other than the default.

    There is no activation to set: Flax adds the bias to the result, and an activation
    has to come after the bias. `jax_cudnn.flax.nnx.Conv` and `linen.Conv` have an
    activation.

    Args:
      implementation: as in `jax_cudnn.conv`. Default "auto".

    Returns:
      A `ConvGeneralDilated`, for the argument `conv_general_dilated` of `Conv`. This
      function itself, or a `functools.partial` of it, serves as linen's
      `conv_general_dilated_cls`.

    Raises:
      ValueError: an unknown `implementation`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jax_cudnn.flax import make_conv_general_dilated
      >>> layer = nn.Conv(
      ...     16, (3, 3),
      ...     conv_general_dilated=make_conv_general_dilated(implementation="xla"))
      >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))
      >>> y.shape
      (2, 8, 8, 16)
    """
    return ConvGeneralDilated(implementation=implementation)


def make_dot_general(*, implementation: Implementation = "auto") -> DotGeneral:
    """Return a `dot_general` with a setting other than the default.

    Args:
      implementation: as in `jax_cudnn.dot_general`. Default "auto".

    Returns:
      A `DotGeneral`, for the argument `dot_general` of Flax's dense layers. This
      function itself, or a `functools.partial` of it, serves as `dot_general_cls`.

    Raises:
      ValueError: an unknown `implementation`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jax_cudnn.flax import make_dot_general
      >>> layer = nn.Dense(16, dot_general=make_dot_general(implementation="xla"))
      >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((5, 3, 8)))
      >>> y.shape
      (5, 3, 16)
    """
    return DotGeneral(implementation=implementation)
