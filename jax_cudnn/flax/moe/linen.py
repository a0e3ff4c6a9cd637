# SPDX-License-Identifier: Apache-2.0
"""linen's mixture of experts: `MixtureOfExperts`."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.nn.initializers import Initializer, zeros
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, Options
from jax_cudnn.flax.linen_f8 import state_variable
from jax_cudnn.flax.moe.common import (
    KERNEL_INIT,
    MATRIX_INIT,
    OPTIONS,
    Sizes,
    initializer_of,
    products_of,
    run,
)
from jax_cudnn.ops.common.activations import Activation
from jax_cudnn.ops.common.arguments import Precision, as_operand
from jax_cudnn.ops.common.f8_recipes import (
    DenseState,
    Recipe,
    check_recipe,
    dense_state,
)
from jax_cudnn.ops.common.meshes import AxisName
from jax_cudnn.ops.products.moe.routing import Auxiliary, Scores
from jax_cudnn.ops.products.moe.states import States


class MixtureOfExperts(linen.Module):
    r"""A router and experts' MLPs, by :func:`jax_cudnn.moe.layer`.

    .. math::

        \mathrm{output}_t = \sum_k \mathrm{weights}_{tk} \,
            \mathrm{MLP}_{e(t,k)}(x_t) + \mathrm{MLP}_\mathrm{shared}(x_t)

    The defaults are Mixtral's. docs/moe.md says how its checkpoints and DeepSeek-V3's
    become parameters. They have the names and shapes of :func:`jax_cudnn.moe.layer`.

    Attributes:
      hidden_features: the width of each expert's hidden layer.
      num_experts: how many experts there are.
      top_k: how many of them each token goes to.
      use_gate: whether MLPs are gated (SwiGLU). Default True.
      use_bias: whether the experts' products have biases. Default False.
      use_selection_bias: whether there is a variable "selection_bias" (num_experts,) in
        the collection "selection_bias", by which experts are chosen. It has no
        gradient. Default False.
      shared_features: the hidden width of an MLP that all tokens go through, without
        biases. Default 0: none.
      activation: as for :func:`jax_cudnn.moe.layer`, like all down to `recipe`.
      scores: see there.
      normalize: see there.
      scale: see there.
      groups: see there.
      capacity_factor: see there.
      expert_axis: see there.
      batch_axis: see there.
      tensor_axis: see there.
      mesh: see there.
      recipe: see there. With `f8.Delayed`, each product has a state in the collection
        "_overwrite_with_gradient", as that of :class:`F8DotGeneral`: the gradient by it
        is the state of the next step.
      dtype: in which the experts compute. Default None: the promoted dtype of inputs
        and parameters. The router computes in f32.
      param_dtype: of the parameters. Default f32.
      precision: as for :func:`jax_cudnn.matmul`.
      kernel_init: of the experts' matrices, (experts, in, out). Default lecun_normal of
        each.
      matrix_init: of the router's matrix, and of the shared MLP's. Default
        lecun_normal.
      bias_init: of the biases. Default zeros.
      implementation: "auto" (default), "cudnn" or "xla".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn.flax.linen import MixtureOfExperts
      >>> layer = MixtureOfExperts(16, num_experts=4, top_k=2)
      >>> (y, auxiliary), variables = layer.init_with_output(
      ...     jax.random.key(0), jnp.ones((2, 5, 8)))
      >>> y.shape, variables["params"]["up_w"].shape
      ((2, 5, 8), (4, 8, 16))
    """

    hidden_features: int
    num_experts: int
    top_k: int
    use_gate: bool = True
    use_bias: bool = False
    use_selection_bias: bool = False
    shared_features: int = 0
    activation: Activation | None = "silu"
    scores: Scores = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: tuple[int, int] | None = None
    capacity_factor: float | None = None
    expert_axis: AxisName | None = None
    batch_axis: AxisName | None = None
    tensor_axis: AxisName | None = None
    mesh: Mesh | AbstractMesh | None = None
    recipe: Recipe | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: Precision = None
    kernel_init: Initializer = KERNEL_INIT
    matrix_init: Initializer = MATRIX_INIT
    bias_init: Initializer = zeros
    implementation: Implementation = "auto"

    @linen.compact
    def __call__(self, inputs: ArrayLike) -> tuple[jax.Array, Auxiliary]:
        """Return the layer's output, and its auxiliary losses.

        Args:
          inputs: (..., width) floats.

        Returns:
          (..., width), and a :class:`jax_cudnn.moe.Auxiliary`. Add its losses to that
          of the model: 0.01 is a usual factor of `load_balance_loss`.

        Raises:
          ValueError: sizes below 1, an unknown `implementation`; there is no state
            among the variables; and as :func:`jax_cudnn.moe.layer`.
          TypeError, UnsupportedError, LibraryError: as :func:`jax_cudnn.moe.layer`.
        """
        Options(implementation=self.implementation)  # refuses unknown names
        x = as_operand("MixtureOfExperts", "inputs", inputs)
        shapes = Sizes(
            in_features=x.shape[-1],
            hidden_features=self.hidden_features,
            num_experts=self.num_experts,
            shared_features=self.shared_features,
            use_gate=self.use_gate,
            use_bias=self.use_bias,
        ).parameters()
        inits = (self.kernel_init, self.matrix_init, self.bias_init)
        parameters = {
            name: self.param(
                name, initializer_of(name, *inits), shape, self.param_dtype
            )
            for name, shape in shapes.items()
        }
        bias = None
        if self.use_selection_bias:
            bias = self.variable(
                "selection_bias", "selection_bias", jnp.zeros, self.num_experts
            ).value
        options: dict[str, Any] = {name: getattr(self, name) for name in OPTIONS}
        states = self._states(shapes)
        y, auxiliary, _ = run(x, parameters, bias, self.dtype, states, **options)
        return y, auxiliary

    @linen.nowrap
    def _states(self, parameters: Iterable[str]) -> States:
        """Return the states of f8 by the names of weights; none but with `Delayed`."""
        if self.recipe is None:
            return {}
        first = dense_state(check_recipe("MixtureOfExperts", self.recipe))
        if first is None:
            return {}
        return {
            name: DenseState(
                *(
                    state_variable(self, f"{name}_{role}_state", first.x).value
                    for role in ("x", "w", "grad")
                )
            )
            for name in products_of(parameters)
        }
