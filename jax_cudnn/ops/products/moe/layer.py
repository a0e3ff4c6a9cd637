# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.moe.layer`: a mixture of experts on one device, or over a mesh."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.ops.common.activations import Activation
from jax_cudnn.ops.common.arguments import (
    Precision,
    as_operand,
    check_flag,
    check_number,
    options,
)
from jax_cudnn.ops.common.f8_recipes import Recipe, check_recipe
from jax_cudnn.ops.common.meshes import AxisName, check_names, mesh_of
from jax_cudnn.ops.products.moe.call import OP, Settings, run
from jax_cudnn.ops.products.moe.experts import ExpertOptions
from jax_cudnn.ops.products.moe.routing import Rule, Scores
from jax_cudnn.ops.products.moe.sharded import run_sharded
from jax_cudnn.ops.products.moe.states import (
    LayerState,
    check_layer_state,
    following_state,
)


def layer(
    x: ArrayLike,
    router_w: ArrayLike,
    gate_w: ArrayLike | None,
    up_w: ArrayLike,
    down_w: ArrayLike,
    *,
    top_k: int,
    gate_bias: ArrayLike | None = None,
    up_bias: ArrayLike | None = None,
    down_bias: ArrayLike | None = None,
    shared_gate_w: ArrayLike | None = None,
    shared_up_w: ArrayLike | None = None,
    shared_down_w: ArrayLike | None = None,
    selection_bias: ArrayLike | None = None,
    scores: Scores = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    groups: tuple[int, int] | None = None,
    activation: Activation | None = "silu",
    capacity_factor: float | None = None,
    expert_axis: AxisName | None = None,
    batch_axis: AxisName | None = None,
    tensor_axis: AxisName | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    recipe: Recipe | None = None,
    state: LayerState | None = None,
    return_state: bool = False,
    precision: Precision = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> Any:
    r"""Return a mixture of experts: each token's weighted sum of its experts' MLPs.

    With the weights and experts of :func:`jax_cudnn.moe.router`,

    .. math::

        \mathrm{output}_t = \sum_{k} \mathrm{weights}_{tk} \,
            \mathrm{MLP}_{e(t,k)}(x_t) + \mathrm{MLP}_\mathrm{shared}(x_t)
        \qquad
        \mathrm{MLP}_e(x) = \big(\mathrm{activation}(x \, \mathrm{gate\_w}_e)
            \odot x \, \mathrm{up\_w}_e\big) \, \mathrm{down\_w}_e

    Each of the three products adds its bias, if there is one. Without `gate_w`, an MLP
    is activation(x up_w) down_w. Rows are sorted by expert, so each of the matmuls is
    one :func:`jax_cudnn.ragged_dot` over all experts. Its results are rounded to the
    dtype of the operands. The weighted sum is kept in f32 (f64 for f64) and rounded
    once.

    A token's result depends on that token only, except for the scales of `f8.Current`
    and `f8.NVFP4`, which depend on all tokens of a device. NaN and infinities of one
    token reach the auxiliary losses, but no other token. All of JAX's transformations
    apply.

    Axis letters: t tokens (any number of axes), d width, e experts, f hidden width.

    Args:
      x: (..., d) floats.
      router_w: (d, e), also f32 beside narrower operands.
      gate_w: (e, d, f), or None for MLPs without a gate.
      up_w: (e, d, f).
      down_w: (e, f, d).
      top_k: how many experts a token has.
      gate_bias: (e, f). Default None: none.
      up_bias: (e, f). Default None: none.
      down_bias: (e, d). Default None: none.
      shared_gate_w: (d, g), of an MLP that all tokens go through. Default None: none.
      shared_up_w: (d, g); it goes with `shared_down_w`. Several shared experts are one
        of their widths together.
      shared_down_w: (g, d).
      selection_bias: as for :func:`jax_cudnn.moe.router`, like the next four.
      scores: see there.
      normalize: see there.
      scale: see there.
      groups: see there.
      activation: of the gate, or of the only hidden layer; as for
        :func:`jax_cudnn.conv`. Default "silu" (SwiGLU).
      capacity_factor: each expert takes at most capacity_factor * top_k * t / e rows,
        rounded up. First choices go before second ones, and earlier tokens before
        later ones. What an expert does not take adds 0 to its token. Default None: no
        limit (dropless).
      expert_axis: the mesh axis, or several, over which experts are divided, and
        tokens too. Default None: each device has all experts.
      batch_axis: further mesh axes over which tokens are divided. Default None: none.
      tensor_axis: the mesh axis, or several, over which f and g are divided. Default
        None: none.
      mesh: of whole arrays, with these axes. Default None: that of
        :func:`jax.set_mesh`.
      recipe: one of :func:`jax_cudnn.f8.dense`, such as `f8.Current()`: the products of
        all MLPs run in f8, as those of :func:`jax_cudnn.f8.ragged_dot` and
        :func:`jax_cudnn.f8.dense`. The router stays as it is. Default None: in the
        operands' dtype.
      state: for `f8.Delayed`, of :func:`layer_state`. The gradient by it is the state
        of the next step, as for :func:`jax_cudnn.f8.dense`. Default None.
      return_state: whether to return the next state as well, as far as it is known
        without the cotangents. Default False.
      precision: as for :func:`jax_cudnn.matmul`. Products in f8 have none.
      implementation: "auto", "cudnn" or "xla", of the experts' products, as for
        :func:`jax_cudnn.ragged_dot`. With "xla", the router's is XLA's, too.
      plan: likewise.

    Returns:
      A pair of the result (..., d) and an :class:`Auxiliary`; with `return_state` also
      the next state, as a third.

    Raises:
      ValueError: shapes that do not fit, or that the devices do not divide; axes that
        are not those of the mesh; a `capacity_factor` that is not positive; and as
        :func:`jax_cudnn.moe.router`.
      TypeError: operands that are no floats, dtypes that JAX does not promote; no
        recipe, a state where there is none or none where there must be, operands of
        other dtypes than bf16, f16 and f32 beside a recipe; and as
        :func:`jax_cudnn.moe.router`.
      UnsupportedError, LibraryError: as :func:`jax_cudnn.ragged_dot`.

    Notes:
      Over several devices, name the axes. Outside of :func:`jax.shard_map`, arrays are
      whole, and the first axis of `x` is divided over batch_axis and expert_axis.
      Inside of it, arguments and results are one device's parts. Without names,
      :func:`jax.jit` gathers the tokens on each device.

      A device sends each row to the device that has its expert, and gets the result
      back: by :func:`jax.lax.ragged_all_to_all` on NVIDIA GPUs, else by
      :func:`jax.lax.all_to_all` of padded blocks, with the same numbers. With n devices
      along expert_axis and r rows on each, a device allocates n r rows, or with a
      capacity as many as its experts take. Padded blocks need another n r rows. The
      capacity counts the tokens along expert_axis; each index along batch_axis has its
      own capacity. Losses are over all tokens. With `f8.Current` and `f8.NVFP4`, each
      device has its own scales. The gradient by `state` is the sum over the devices,
      and `return_state` gives their largest.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn import moe
      >>> shapes = (6, 8), (8, 4), (4, 8, 16), (4, 8, 16), (4, 16, 8)
      >>> x, router, gate, up, down = (jnp.ones(shape) for shape in shapes)
      >>> y, auxiliary = moe.layer(x, router, gate, up, down, top_k=2)
      >>> y.shape, auxiliary.load.shape
      ((6, 8), (4,))
    """
    settings = Settings(
        rule=Rule.of(
            OP,
            top_k=top_k,
            scores=scores,
            normalize=normalize,
            scale=scale,
            groups=groups,
        ),
        how=ExpertOptions(
            activation=activation,
            precision=precision,
            implementation=implementation,
            plan=plan,
            recipe=None if recipe is None else check_recipe(OP, recipe),
        ),
        capacity_factor=None
        if capacity_factor is None
        else check_number(OP, "capacity_factor", capacity_factor),
        expert=check_names(OP, "expert_axis", expert_axis),
        batch=check_names(OP, "batch_axis", batch_axis),
        tensor=check_names(OP, "tensor_axis", tensor_axis),
    )
    options(OP, implementation, plan, precision)
    given = {
        "x": x,
        "router_w": router_w,
        "gate_w": gate_w,
        "up_w": up_w,
        "down_w": down_w,
        "gate_bias": gate_bias,
        "up_bias": up_bias,
        "down_bias": down_bias,
        "shared_gate_w": shared_gate_w,
        "shared_up_w": shared_up_w,
        "shared_down_w": shared_down_w,
        "selection_bias": selection_bias,
    }
    arrays = {
        name: as_operand(OP, name, value)  # type: ignore[arg-type]
        for name, value in given.items()
        if value is not None or name in _REQUIRED
    }
    states = check_layer_state(OP, recipe, state, arrays)
    is_divided = settings.expert or settings.batch or settings.tensor
    if not is_divided and mesh is not None:
        raise ValueError(
            f"{OP}: mesh is given, and no axis of it. Name those that divide arrays as "
            "expert_axis, batch_axis and tensor_axis, or leave mesh out."
        )
    if not is_divided or settings.is_inside():
        y, auxiliary, found = run(settings, arrays, states)
    else:
        y, auxiliary, found = run_sharded(mesh_of(OP, mesh), settings, arrays, states)
    if not check_flag(OP, "return_state", return_state):
        return y, auxiliary
    return y, auxiliary, None if state is None else following_state(state, found)


_REQUIRED = frozenset({"x", "router_w", "up_w", "down_w"})
