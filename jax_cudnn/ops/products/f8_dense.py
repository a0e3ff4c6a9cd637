# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.f8.dense` and its relatives: layers whose three products run in f8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import export
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.lowering import sharded_as
from jax_cudnn.ops.common.activations import Activation, on_array
from jax_cudnn.ops.common.arguments import (
    check_flag,
    options,
    refused_by_jax,
    struct,
)
from jax_cudnn.ops.common.f8_recipes import (
    Current,
    Delayed,
    DenseState,
    Recipe,
    check_recipe,
    check_state,
    dense_state,
)
from jax_cudnn.ops.products.dot_general import axes_of
from jax_cudnn.ops.products.f8_products import last_and_first, operand, products


def dense(
    x: ArrayLike,
    w: ArrayLike,
    *,
    recipe: Recipe = Current(),  # noqa: B008 (immutable)
    state: DenseState | None = None,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    axes: int = 1,
    w_sharding: object = None,
    return_state: bool = False,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> Any:
    r"""Return a dense layer whose three matmuls, forward and backward, run in f8.

    .. math::

        \mathrm{output} = \mathrm{activation}\big(s_x s_w \, (Q(x / s_x) \cdot
            Q(w / s_w)) + \mathrm{bias}\big)

    Q rounds to f8_e4m3fn (:func:`jax_cudnn.f8.quantize`) and saturates. The gradients
    of x and w multiply the same copies by the cotangent in f8_e5m2, which has a larger
    range. Sums are kept in f32 and rounded once. The gradient of the bias is the sum of
    the cotangent before it is quantized. The derivative treats rounding and saturation
    as the identity.

    With `f8.MXFP8` and `f8.NVFP4`, Q scales and rounds blocks along the contracted
    axis. Each of the three matmuls then quantizes its own copies, and the cotangent is
    in the same format as x and w.

    With `f8.Delayed`, the scales come from earlier steps. Then **the gradient with
    respect to `state` is the state of the next step**, as in Flax's and
    TransformerEngine's linen layers:

    >>> import jax, jax.numpy as jnp
    >>> from jax_cudnn import f8
    >>> recipe = f8.Delayed()
    >>> def loss(w, state, x):
    ...     return f8.dense(x, w, recipe=recipe, state=state).sum()
    >>> w, state, x = jnp.ones((16, 32)), f8.dense_state(recipe), jnp.ones((8, 16))
    >>> grad, state = jax.grad(loss, (0, 1))(w, state, x)

    States may be added up or averaged as gradients are: over the uses of a layer, the
    examples of a vmap, microbatches and devices. A sum of n states makes the newest
    amax too large by a factor of at most n**(1/8), and a mean makes it too small by at
    most the same factor.

    All of JAX's transformations apply. Under jit with a mesh, an amax is over the whole
    array, and operands are gathered as f8 copies. The backward pass keeps the f8
    copies; see :func:`jax_cudnn.checkpoint_policies.f8_saveable`.

    Args:
      x: (..., k); bf16, f16 or f32.
      w: (k, n), of one of these dtypes, which may be another one than x's.
      recipe: `f8.Current()` (default), `f8.Delayed()`, `f8.MXFP8()` or `f8.NVFP4()`.
      state: for `f8.Delayed`, of :func:`dense_state`. Default None.
      bias: broadcasts to the result; (n,) is the usual shape. Differentiable.
      activation: as for :func:`jax_cudnn.matmul`; applied to the rounded sum. Default
        None: none.
      axes: how many axes are summed over: the last of x, and the first of w, as in
        :func:`jax.numpy.tensordot`. Default 1.
      w_sharding: a `NamedSharding`, or a `PartitionSpec` where a mesh is set, in which
        the products read the copy of w, as for `jax.lax.with_sharding_constraint`.
        With `PartitionSpec()`, weights that are divided (FSDP) are gathered as their
        f8 copies, forward and backward. Default None: the partitioner decides.
      return_state: whether to return the next state as well, as far as it is known
        without the cotangent: its `grad` is that of `state`. Default False.
      implementation: "auto" (default), "cudnn" or "xla", as for
        :func:`jax_cudnn.matmul`, for each of the three products. XLA multiplies in f8
        as well.
      plan: which of cuDNN's execution plans may run the products.

    Returns:
      (..., n), of x's dtype; with `return_state` a pair with the next state.

    Raises:
      TypeError: other dtypes, no recipe, a state where there is none or none where
        there must be.
      ValueError: shapes that do not fit.
      UnsupportedError, LibraryError: as :func:`jax_cudnn.matmul`.

    Notes:
      On Hopper, f8 matmuls are fast if rows, k and n are multiples of 16. GPUs before
      sm_89 have no f8 matmuls, and GPUs before sm_100 have none of MXFP8 and NVFP4: XLA
      multiplies the rounded operands in a wider dtype there. From sm_100 on, cuDNN has
      plans for MXFP8 and NVFP4 (9.19 and 9.27), which have not been run.

    Example:
      >>> y = f8.dense(jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 32)))
      >>> y.shape, str(y.dtype)
      ((8, 32), 'bfloat16')
    """
    op = "f8.dense"
    call = options(op, implementation, plan)
    x, w = operand(op, "x", x), operand(op, "w", w)
    known = check_state(op, recipe, state)
    sums = last_and_first(op, x, "w", w, axes)
    (y,), (following,) = products(
        op, x, {"w": w}, {"w": bias}, [known], recipe, sums, call, w_sharding
    )
    y = y if activation is None else on_array(op, activation, y)
    return (y, following) if check_flag(op, "return_state", return_state) else y


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    *,
    recipe: Recipe = Current(),  # noqa: B008 (immutable)
    state: DenseState | None = None,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    rhs_sharding: object = None,
    out_sharding: object = None,
    return_state: bool = False,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> Any:
    """Return a contraction of any axes in f8: :func:`dense`, with `lax`'s numbers.

    It can replace `jax.lax.dot_general` in a layer whose weights are on the right.

    Args:
      lhs: bf16, f16 or f32; x of :func:`dense`.
      rhs: likewise; w of :func:`dense`.
      dimension_numbers: ((lhs contracting, rhs contracting), ((), ())), as for
        :func:`jax.lax.dot_general`. There are no batch axes: each matrix of a batch
        would need a scale of its own.
      recipe: as for :func:`dense`, like all that follow.
      state: see there.
      bias: see there.
      activation: see there.
      rhs_sharding: see `w_sharding` there.
      out_sharding: how the result is to be sharded, as for
        :func:`jax_cudnn.dot_general`. Default None: as the operands imply.
      return_state: see there.
      implementation: see there.
      plan: see there.

    Returns:
      The free axes of lhs and those of rhs, of lhs's dtype.

    Raises:
      TypeError, ValueError, UnsupportedError, LibraryError: as :func:`dense`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import f8
      >>> x, w = jnp.ones((5, 3, 16)), jnp.ones((32, 16))
      >>> f8.dot_general(x, w, (((2,), (1,)), ((), ()))).shape
      (5, 3, 32)
    """
    op = "f8.dot_general"
    call = options(op, implementation, plan)
    x, w = operand(op, "lhs", lhs), operand(op, "rhs", rhs)
    known = check_state(op, recipe, state)
    numbers = axes_of(op, dimension_numbers)
    if any(numbers[1]):
        raise ValueError(
            f"{op}: dimension_numbers={numbers} has batch axes. Each matrix of a batch "
            "needs a scale of its own: use jax.vmap with f8.Current()."
        )
    with refused_by_jax(op, {"lhs": x, "rhs": w}):
        jax.eval_shape(
            lambda x, y: jax.lax.dot_general(x, y, numbers), struct(x), struct(w)
        )
    given = {"rhs": w}, {"rhs": bias}, [known]
    (y,), (following,) = products(op, x, *given, recipe, numbers[0], call, rhs_sharding)
    y = y if activation is None else on_array(op, activation, y)
    y = sharded_as(y, out_sharding)
    return (y, following) if check_flag(op, "return_state", return_state) else y


class GatedMlpState(NamedTuple):
    """The states of the three layers of :func:`gated_mlp`."""

    gate: DenseState
    up: DenseState
    down: DenseState


export.register_namedtuple_serialization(
    GatedMlpState, serialized_name="jax_cudnn.f8.GatedMlpState"
)


def gated_mlp_state(recipe: Recipe) -> GatedMlpState | None:
    """Return the state with which a gated MLP begins; None for a recipe without one.

    Example:
      >>> from jax_cudnn import f8
      >>> f8.gated_mlp_state(f8.Delayed()).down.grad.shape
      (18,)
    """
    one = dense_state(check_recipe("f8.gated_mlp_state", recipe))
    return None if one is None else GatedMlpState(one, one, one)


def gated_mlp(
    x: ArrayLike,
    gate: ArrayLike,
    up: ArrayLike,
    down: ArrayLike,
    *,
    recipe: Recipe = Current(),  # noqa: B008 (immutable)
    state: GatedMlpState | None = None,
    activation: Activation = "silu",
    up_sharding: object = None,
    down_sharding: object = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a gated MLP (SwiGLU, GEGLU, ...) whose nine products run in f8.

    .. math::

        \mathrm{output} = \big(\mathrm{activation}(x \cdot \mathrm{gate}) \odot
            (x \cdot \mathrm{up})\big) \cdot \mathrm{down}

    Each product is a :func:`dense`, and the first two share their copy of x.

    Args:
      x: (..., k); bf16, f16 or f32.
      gate: (k, n).
      up: (k, n).
      down: (n, m).
      recipe: as for :func:`dense`.
      state: for `f8.Delayed`, of :func:`gated_mlp_state`; the gradient by it is the
        next one. Default None.
      activation: as for :func:`dense`. Default "silu".
      up_sharding: the sharding in which the f8 copies of `gate` and `up` are used, as
        `w_sharding` of :func:`dense`. Default None: wherever they are.
      down_sharding: that of `down`.
      implementation: as for :func:`dense`.
      plan: see there.

    Returns:
      (..., m), of x's dtype.

    Raises:
      TypeError, ValueError, UnsupportedError, LibraryError: as :func:`dense`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import f8
      >>> x, w = jnp.ones((8, 16)), jnp.ones((16, 32))
      >>> f8.gated_mlp(x, w, w, w.T).shape
      (8, 16)
    """
    op = "f8.gated_mlp"
    call = options(op, implementation, plan)
    x = operand(op, "x", x)
    weights = {
        name: operand(op, name, w)
        for name, w in (("gate", gate), ("up", up), ("down", down))
    }
    last = {"down": weights.pop("down")}
    if not isinstance(state, Sequence) or not isinstance(recipe, Delayed):
        check_state(op, recipe, state)
        states: list[DenseState | None] = [None] * 3
    else:
        if len(state) != len(GatedMlpState._fields):
            raise TypeError(
                f"{op}: state has {len(state)} parts, not 3. Pass "
                "f8.gated_mlp_state(recipe), and later its gradient."
            )
        first = "f8.gated_mlp_state(recipe)"
        states = [
            check_state(op, recipe, each, name=f"state.{name}", first=first)
            for name, each in zip(GatedMlpState._fields, state, strict=True)
        ]
    for name, w in weights.items():
        sums = last_and_first(op, x, name, w, 1)
    (gated, value), _ = products(
        op, x, weights, {}, states[:2], recipe, sums, call, up_sharding
    )
    hidden = on_array(op, activation, gated) * value
    sums = last_and_first(op, hidden, "down", last["down"], 1)
    (y,), _ = products(
        op, hidden, last, {}, states[2:], recipe, sums, call, down_sharding
    )
    return y
