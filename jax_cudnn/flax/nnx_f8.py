# SPDX-License-Identifier: Apache-2.0
"""nnx's products in f8: `F8DotGeneral` and `F8Einsum`, which hold a layer's state."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
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


class F8State(nnx.Variable[jax.Array]):
    """What `f8.Delayed` knows of a layer's input or weights: a vector of history + 2.

    The type of the variables of :class:`F8DotGeneral`, as a filter for
    `nnx.state` and `nnx.split`. They are no `nnx.Param`: optimizers leave them alone.

    Example:
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import F8DotGeneral, F8State
      >>> layer = nnx.Linear(16, 32, dot_general=F8DotGeneral(), rngs=nnx.Rngs(0))
      >>> nnx.state(layer, F8State).dot_general.x.shape
      (18,)
    """


class F8Holder(nnx.Module):
    """A module with states of f8, which stay as they are where it is `deterministic`.

    By this name `eval` and `train` of a model find it.
    """

    deterministic: bool

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set `deterministic`, for `nnx.view`.

        Args:
          deterministic: whether the states stay as they are. Default None: as before.
        """
        if deterministic is not None:
            self.deterministic = deterministic


class _F8Product(F8Holder):
    """Holds a recipe and a state, and runs products with them."""

    def __init__(
        self,
        recipe: Recipe = Delayed(),  # noqa: B008 (immutable)
        implementation: Implementation = "auto",
        rhs_sharding: Any = None,
    ) -> None:
        check_recipe(type(self).__name__, recipe)
        Options(implementation=implementation)  # refuses unknown names
        self.recipe: Recipe = recipe
        self.implementation: Implementation = implementation
        self.rhs_sharding: Any = rhs_sharding
        self.deterministic = False
        state = dense_state(recipe)
        self.x: F8State | None
        self.w: F8State | None
        if state is None:
            self.x, self.w = nnx.data(None), nnx.data(None)
        else:
            self.x, self.w = F8State(state.x), F8State(state.w)

    def fused(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: Numbers,
        precision: Precision = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: object = None,
        *,
        bias: ArrayLike | None = None,
        residual: ArrayLike | None = None,
        activation: Activation | None = None,
        implementation: Implementation | None = None,
    ) -> jax.Array:
        """Return the product with all that a layer adds to it, and note the amaxes."""
        del precision
        state = None
        if self.x is not None and self.w is not None:
            state = DenseState(self.x[...], self.w[...], None)
        y, following = f8_product(
            lhs,
            rhs,
            dimension_numbers,
            recipe=self.recipe,
            state=state,
            implementation=implementation or self.implementation,
            rhs_sharding=self.rhs_sharding,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            bias=bias,
            residual=residual,
            activation=activation,
        )
        if following is not None and not self.deterministic:
            assert self.x is not None
            assert self.w is not None
            self.x.set_value(following.x)
            self.w.set_value(following.w)
        return y


class F8DotGeneral(_F8Product):
    r"""A contraction whose three matmuls run in f8, for `dot_general` of nnx's layers.

    .. math::

        \mathrm{output} = s_x s_w \, (Q(\mathrm{lhs} / s_x) \cdot
            Q(\mathrm{rhs} / s_w))

    It runs :func:`jax_cudnn.f8.dot_general`: forward and in both gradients. lhs is the
    layer's input, rhs its weights. With `f8.Delayed`, their scales come from former
    steps. The forward pass records the amaxes of a step, as BatchNorm records its
    statistics, so training loops need no change. `model.eval()` stops recording, and
    `model.train()` resumes it. A cotangent is scaled by its own amax, because the
    forward pass does not know it.

    Each layer needs its own instance. :func:`to_f8` makes one for each layer of a
    model.

    Args:
      recipe: `f8.Delayed()` (default), or one without a state: `f8.Current()`,
        `f8.MXFP8()` or `f8.NVFP4()`.
      implementation: "auto" (default), "cudnn" or "xla", as for
        :func:`jax_cudnn.matmul`.
      rhs_sharding: how the matmuls read the f8 copy of the weights, as for
        :func:`jax_cudnn.f8.dot_general`. `PartitionSpec()` gathers weights that are
        divided (FSDP) as their copies. Default None: the partitioner decides.

    Attributes:
      x: the `F8State` of the input, (history + 2,); None but with `f8.Delayed`.
      w: that of the weights.
      deterministic: whether the state stays as it is. Default False.

    Raises:
      TypeError: no recipe.
      ValueError: an unknown `implementation`.

    Notes:
      Each call in training counts as a step of the history: in a layer that is called 4
      times per step, a history of 16 covers 4 steps. As with BatchNorm, `nnx.vmap`
      over a layer that is not mapped itself needs `eval()` or another recipe.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import F8DotGeneral
      >>> layer = nnx.Linear(16, 32, dot_general=F8DotGeneral(), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((8, 16))).shape
      (8, 32)
    """

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
          TypeError, ValueError, UnsupportedError, LibraryError: as
            :func:`jax_cudnn.f8.dot_general`.
        """
        with on_behalf_of("F8DotGeneral", OP):
            return self.fused(
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                out_sharding,
            )


class F8Einsum(_F8Product):
    """`F8DotGeneral` for the argument `einsum_op` of `nnx.Einsum`.

    Args:
      recipe: as for :class:`F8DotGeneral`.
      implementation: see there.
      rhs_sharding: see there.

    Raises:
      TypeError, ValueError: as :class:`F8DotGeneral`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import F8Einsum
      >>> layer = nnx.Einsum(
      ...     "btf,fhd->bthd", (16, 4, 8), einsum_op=F8Einsum(), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 16))).shape
      (2, 5, 4, 8)
    """

    # The names are those by which nnx.Einsum passes its arguments.
    def __call__(
        self,
        einsum_str: str,
        lhs: ArrayLike,
        rhs: ArrayLike,
        *,
        precision: Precision = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: object = None,
    ) -> jax.Array:
        """Return what `jax.numpy.einsum` returns, in f8.

        Args:
          einsum_str: an equation such as "btf,fhd->bthd", or "...f,fh->...h". An axis
            of rhs is either summed over or in the result, and so is one of lhs.
          lhs: bf16, f16 or f32.
          rhs: likewise.
          precision: has no meaning for f8.
          preferred_element_type: of the result. Default None: lhs's dtype.
          out_sharding: how the result is to be sharded, as in `jax.numpy.einsum`.

        Returns:
          The axes that the equation says.

        Raises:
          ValueError: another equation, such as one with batch axes.
          TypeError, UnsupportedError, LibraryError: as
            :func:`jax_cudnn.f8.dot_general`.
        """
        over, order = contraction(einsum_str, jnp.ndim(lhs))
        with on_behalf_of("F8Einsum", OP):
            numbers = over, ((), ())
            wanted = _before_transpose(out_sharding, order)
            y = self.fused(lhs, rhs, numbers, precision, preferred_element_type, wanted)
        return jnp.transpose(y, order)


def _before_transpose(out_sharding: Any, order: tuple[int, ...]) -> Any:
    """Return the sharding of an array whose transpose is to have one."""
    if out_sharding is None:
        return None
    is_named = isinstance(out_sharding, NamedSharding)
    spec = tuple(out_sharding.spec if is_named else out_sharding)
    full = (*spec, *[None] * (len(order) - len(spec)))
    found = PartitionSpec(*(full[order.index(axis)] for axis in range(len(order))))
    return NamedSharding(out_sharding.mesh, found) if is_named else found


def contraction(equation: str, ndim: int) -> tuple[Any, tuple[int, ...]]:
    """Return which axes an equation sums over, and how the result is transposed.

    The first operand has `ndim` axes.
    """
    if reason := why_no_product(equation):
        raise ValueError(
            f"F8Einsum: {equation!r} {reason}. Each axis of an operand must be in the "
            "other operand or in the result. Use jnp.einsum for this layer."
        )
    x, w, out = _axes(equation, ndim)
    if len(x) != ndim:
        raise ValueError(f"F8Einsum: {equation!r} is not for an lhs of {ndim} axes.")
    shared = [axis for axis in x if axis in w]
    over = [x.index(axis) for axis in shared], [w.index(axis) for axis in shared]
    free = [axis for axis in (*x, *w) if axis not in shared]
    return over, tuple(free.index(axis) for axis in out)


def why_no_product(equation: str) -> str | None:
    """Return what keeps an einsum from being one product of two matrices, or None."""
    if "->" not in equation or equation.count(",") != 1:
        return "is not of the form 'lhs,rhs->result'"
    if "..." in equation.partition(",")[2].partition("->")[0]:
        return "has '...' among the axes of the weights"
    x, w, out = _axes(equation, None)
    for axis in dict.fromkeys((*x, *w, *out)):
        name = "..." if axis.isdigit() else axis
        if max(each.count(axis) for each in (x, w, out)) > 1:
            return f"repeats the axis {name}"
        if axis not in x and axis not in w:
            return f"has the axis {name} in the result alone"
        if axis in x and axis in w and axis in out:
            return f"has the batch axis {name}"
        if (axis in x) + (axis in w) + (axis in out) == 1:
            return f"sums over {name}, which is in one operand alone"
    return None


def _axes(equation: str, ndim: int | None) -> list[list[str]]:
    """Return the names of the axes of operands and result; "..." is for digits."""
    operands, _, result = equation.replace(" ", "").partition("->")
    first, _, second = operands.partition(",")
    hidden = 1 if ndim is None else ndim - len(first.replace("...", ""))
    return [
        [*before, *(str(i) for i in range(hidden if dots else 0)), *after]
        for before, dots, after in (
            each.partition("...") for each in (first, second, result)
        )
    ]
