# SPDX-License-Identifier: Apache-2.0
"""linen's products in f8: `F8DotGeneral`, with its state among the variables."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, Options
from jax_cudnn.flax.f8_products import OP, Numbers, f8_product
from jax_cudnn.ops.common.activations import Activation
from jax_cudnn.ops.common.arguments import Precision
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.f8_recipes import (
    Delayed,
    DenseState,
    Recipe,
    check_recipe,
    dense_state,
)


class F8DotGeneral(linen.Module):
    r"""A contraction whose three matmuls run in f8, as linen's `dot_general_cls`.

    .. math::

        \mathrm{output} = s_x s_w \, (Q(\mathrm{lhs} / s_x) \cdot
            Q(\mathrm{rhs} / s_w))

    It runs :func:`jax_cudnn.f8.dot_general`: forward and in both gradients. lhs is the
    layer's input, rhs its weights. With `f8.Delayed`, the scales of all three tensors
    come from former steps. The state is in the collection "_overwrite_with_gradient",
    as that of Flax's own f8: **the gradient by it is the state of the next step**.
    `flax.training.train_state.TrainState` takes it as that. Parameters are those of the
    layer without f8.

    Attributes:
      recipe: `f8.Delayed()` (default), or one without a state: `f8.Current()`,
        `f8.MXFP8()` or `f8.NVFP4()`.
      implementation: "auto" (default), "cudnn" or "xla", as for
        :func:`jax_cudnn.matmul`.
      rhs_sharding: how the matmuls read the f8 copy of the weights, as for
        :func:`jax_cudnn.f8.dot_general`. `PartitionSpec()` gathers weights that are
        divided (FSDP) as their copies. Default None: the partitioner decides.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jax_cudnn import f8
      >>> from jax_cudnn.flax.linen import F8DotGeneral
      >>> product = functools.partial(F8DotGeneral, recipe=f8.Delayed(history=4))
      >>> layer = nn.Dense(32, dot_general_cls=product)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((8, 16)))
      >>> jax.tree.map(jnp.shape, variables["_overwrite_with_gradient"])
      {'F8DotGeneral_0': {'grad_state': (6,), 'w_state': (6,), 'x_state': (6,)}}
    """

    recipe: Recipe = Delayed()
    implementation: Implementation = "auto"
    rhs_sharding: Any = None

    def setup(self) -> None:
        """Make the state, or find it among the variables."""
        check_recipe("F8DotGeneral", self.recipe)
        Options(implementation=self.implementation)  # refuses unknown names
        first = dense_state(self.recipe)
        if first is not None:
            names = ("x_state", "w_state", "grad_state")
            variables = (state_variable(self, name, first.x) for name in names)
            self.x_state, self.w_state, self.grad_state = variables

    # The names and their order are those of jax.lax.dot_general.
    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: Numbers,
        precision: Precision = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
    ) -> jax.Array:
        """Return the contraction that `jax.lax.dot_general` returns, in f8.

        Args:
          lhs: bf16, f16 or f32.
          rhs: likewise.
          dimension_numbers: as in :func:`jax_cudnn.f8.dot_general`; no batch axes.
          precision: has no meaning for f8.
          preferred_element_type: of the result. Default None: lhs's dtype.
          out_sharding: how the result is to be sharded, as in `jax.lax.dot_general`.

        Returns:
          The free axes of lhs and those of rhs.

        Raises:
          ValueError: there is no state among the variables.
          TypeError, ValueError, UnsupportedError, LibraryError: as
            :func:`jax_cudnn.f8.dot_general`.
        """
        with on_behalf_of("F8DotGeneral", OP):
            return self.fused()(
                lhs,
                rhs,
                dimension_numbers,
                precision=precision,
                preferred_element_type=preferred_element_type,
                out_sharding=out_sharding,
            )

    def fused(self) -> Callable[..., jax.Array]:
        """Return the product with all that a layer adds to it, as a function."""
        state = None
        if isinstance(self.recipe, Delayed):
            variables = self.x_state, self.w_state, self.grad_state
            state = DenseState(*(variable.value for variable in variables))

        def product(
            lhs: ArrayLike,
            rhs: ArrayLike,
            dimension_numbers: Numbers,
            *,
            precision: Precision = None,
            preferred_element_type: DTypeLike | None = None,
            out_sharding: object = None,
            bias: ArrayLike | None = None,
            residual: ArrayLike | None = None,
            activation: Activation | None = None,
            implementation: Implementation = self.implementation,
        ) -> jax.Array:
            del precision
            y, _ = f8_product(
                lhs,
                rhs,
                dimension_numbers,
                recipe=self.recipe,
                state=state,
                implementation=implementation,
                rhs_sharding=self.rhs_sharding,
                preferred_element_type=preferred_element_type,
                out_sharding=out_sharding,
                bias=bias,
                residual=residual,
                activation=activation,
            )
            return y

        return product


def state_variable(
    module: linen.Module, name: str, first: jax.Array
) -> linen.Variable[jax.Array]:
    """Return the variable of a state of f8; raise ValueError where there is none."""
    where = OVERWRITE_WITH_GRADIENT
    if not (module.has_variable(where, name) or module.is_mutable_collection(where)):
        path = "/".join(module.path) or "the layer"
        raise ValueError(
            f"{type(module).__name__}: {path} has no {name}. Pass the collection "
            f"{where!r} of `init`, or of the last step, to `apply` with 'params'. Or "
            "use f8.Current(), which has no state."
        )
    return module.variable(where, name, jnp.zeros_like, first)
