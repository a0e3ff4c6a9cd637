# SPDX-License-Identifier: Apache-2.0
"""nnx's mixture of experts: `MixtureOfExperts`."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer, zeros
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, Options
from jax_cudnn.flax.moe.common import (
    KERNEL_INIT,
    MATRIX_INIT,
    OPTIONS,
    Sizes,
    initializer_of,
    products_of,
    run,
)
from jax_cudnn.flax.nnx_f8 import F8Holder, F8State
from jax_cudnn.ops.common.activations import Activation
from jax_cudnn.ops.common.arguments import Precision
from jax_cudnn.ops.common.f8_recipes import (
    DenseState,
    Recipe,
    check_recipe,
    dense_state,
)
from jax_cudnn.ops.common.meshes import AxisName
from jax_cudnn.ops.products.moe.routing import Auxiliary, Scores
from jax_cudnn.ops.products.moe.states import States


class SelectionBias(nnx.Variable[jax.Array]):
    """The bias by which a router chooses experts: (num_experts,) f32.

    It is no `nnx.Param`, so optimizers leave it alone. A training loop adds a small
    step where an expert got less than its part, and takes one away where it got more
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    Example:
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import MixtureOfExperts, SelectionBias
      >>> layer = MixtureOfExperts(
      ...     8, 16, 4, 2, use_selection_bias=True, rngs=nnx.Rngs(0))
      >>> nnx.state(layer, SelectionBias).selection_bias.shape
      (4,)
    """


class _ProductState(nnx.Module):
    """What `f8.Delayed` knows of a product's input and weights."""

    def __init__(self, first: DenseState) -> None:
        self.x, self.w = F8State(first.x), F8State(first.w)


class _ProductStates(F8Holder):
    """The states of the products of a layer, by the names of their weights."""

    def __init__(self, names: Iterable[str], first: DenseState) -> None:
        self.names: tuple[str, ...] = tuple(names)
        for name in self.names:
            setattr(self, name, _ProductState(first))
        self.deterministic = False

    def known(self) -> States:
        """Return the states as arrays; cotangents have the scales of their own."""
        variables = {name: getattr(self, name) for name in self.names}
        return {
            name: DenseState(each.x[...], each.w[...], None)
            for name, each in variables.items()
        }

    def note(self, following: States) -> None:
        """Take over the next states, unless the layer only evaluates."""
        if self.deterministic:
            return
        for name in self.names:
            state = following[name]
            assert state is not None
            getattr(self, name).x.set_value(state.x)
            getattr(self, name).w.set_value(state.w)


class MixtureOfExperts(nnx.Module):
    r"""A router and experts' MLPs, by :func:`jax_cudnn.moe.layer`.

    .. math::

        \mathrm{output}_t = \sum_k \mathrm{weights}_{tk} \,
            \mathrm{MLP}_{e(t,k)}(x_t) + \mathrm{MLP}_\mathrm{shared}(x_t)

    The defaults are Mixtral's. docs/moe.md says how its checkpoints and DeepSeek-V3's
    become parameters.

    Args:
      in_features: the width of inputs and results.
      hidden_features: the width of each expert's hidden layer.
      num_experts: how many experts there are.
      top_k: how many of them each token goes to.
      use_gate: whether MLPs are gated (SwiGLU). Default True.
      use_bias: whether the experts' products have biases. Default False.
      use_selection_bias: whether there is a :class:`SelectionBias`. Default False.
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
      recipe: see there. With `f8.Delayed`, the amaxes of a step are noted in the
        forward pass, as by :class:`F8DotGeneral`; `model.eval()` stops that.
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
      rngs: as for nnx's layers.

    Attributes:
      router_w: (in, experts), and likewise for all parameters the names and shapes of
        :func:`jax_cudnn.moe.layer`: gate_w, up_w, down_w, gate_bias, up_bias,
        down_bias, shared_gate_w, shared_up_w, shared_down_w, as far as there are.
      f8_states: with `f8.Delayed`, a module that has an `x` and a `w` by the name of
        each product's weights, which are :class:`F8State`; else None.

    Raises:
      ValueError: sizes below 1, an unknown `implementation`.
      TypeError: no recipe of f8 as `recipe`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import MixtureOfExperts
      >>> layer = MixtureOfExperts(8, 16, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
      >>> y, auxiliary = layer(jnp.ones((2, 5, 8)))
      >>> y.shape, auxiliary.load.shape
      ((2, 5, 8), (4,))
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        top_k: int,
        *,
        use_gate: bool = True,
        use_bias: bool = False,
        use_selection_bias: bool = False,
        shared_features: int = 0,
        activation: Activation | None = "silu",
        scores: Scores = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: tuple[int, int] | None = None,
        capacity_factor: float | None = None,
        expert_axis: AxisName | None = None,
        batch_axis: AxisName | None = None,
        tensor_axis: AxisName | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        recipe: Recipe | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = KERNEL_INIT,
        matrix_init: Initializer = MATRIX_INIT,
        bias_init: Initializer = zeros,
        implementation: Implementation = "auto",
        rngs: nnx.Rngs,
    ) -> None:
        Options(implementation=implementation)  # refuses unknown names
        shapes = Sizes(
            in_features=in_features,
            hidden_features=hidden_features,
            num_experts=num_experts,
            shared_features=shared_features,
            use_gate=use_gate,
            use_bias=use_bias,
        ).parameters()
        self.parameter_names: tuple[str, ...] = tuple(shapes)
        for name, shape in shapes.items():
            init = initializer_of(name, kernel_init, matrix_init, bias_init)
            setattr(self, name, nnx.Param(init(rngs.params(), shape, param_dtype)))
        self.selection_bias: SelectionBias | None = nnx.data(None)
        if use_selection_bias:
            self.selection_bias = SelectionBias(jnp.zeros(num_experts, jnp.float32))
        self.dtype: DTypeLike | None = dtype
        self.top_k: int = top_k
        self.activation: Activation | None = activation
        self.scores: Scores = scores
        self.normalize: bool = normalize
        self.scale: float = scale
        self.groups: tuple[int, int] | None = groups
        self.capacity_factor: float | None = capacity_factor
        self.expert_axis: AxisName | None = expert_axis
        self.batch_axis: AxisName | None = batch_axis
        self.tensor_axis: AxisName | None = tensor_axis
        self.mesh: Mesh | AbstractMesh | None = mesh
        self.recipe: Recipe | None = recipe
        self.f8_states: _ProductStates | None = nnx.data(None)
        if recipe is not None:
            first = dense_state(check_recipe("MixtureOfExperts", recipe))
            if first is not None:
                self.f8_states = _ProductStates(products_of(shapes), first)
        self.precision: Precision = precision
        self.implementation: Implementation = implementation

    def __call__(self, inputs: ArrayLike) -> tuple[jax.Array, Auxiliary]:
        """Return the layer's output, and its auxiliary losses.

        Args:
          inputs: (..., in_features) floats.

        Returns:
          (..., in_features), and a :class:`jax_cudnn.moe.Auxiliary`. Add its losses to
          that of the model: 0.01 is a usual factor of `load_balance_loss`.

        Raises:
          ValueError, TypeError, UnsupportedError, LibraryError: as
            :func:`jax_cudnn.moe.layer`.
        """
        bias = self.selection_bias
        options: dict[str, Any] = {name: getattr(self, name) for name in OPTIONS}
        states = self.f8_states
        y, auxiliary, following = run(
            inputs,
            {name: getattr(self, name)[...] for name in self.parameter_names},
            None if bias is None else bias[...],
            self.dtype,
            {} if states is None else states.known(),
            **options,
        )
        if states is not None:
            states.note(following)
        return y, auxiliary
