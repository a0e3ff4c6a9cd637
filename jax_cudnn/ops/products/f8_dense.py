# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.f8.dense` and `f8.gated_mlp`: layers whose three products run in f8.

The derivative is written by hand. Forward, f8 copies of inputs and weights are
multiplied; backward, these copies and one of the cotangent. Forward mode and higher
orders differentiate the reference: the product of the rounded operands, where rounding
and saturation count as the identity.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.lowering import linear_call
from jax_cudnn.ops.common.activations import Activation, on_array
from jax_cudnn.ops.common.arguments import as_operand, describe, options
from jax_cudnn.ops.common.f8_recipes import (
    BACKWARD,
    FORWARD,
    SAVED_NAME,
    Current,
    DenseState,
    Recipe,
    check_state,
    dense_state,
    scale_and_next,
)
from jax_cudnn.ops.common.f8_scaling import dequantize, quantize
from jax_cudnn.ops.common.plain import Epilogue
from jax_cudnn.ops.products.dot_general import Numbers, as_product
from jax_cudnn.ops.products.operands import common_dtypes, in_three, run_product
from jax_cudnn.reference.dtypes import dtype_name

Arrays = Sequence[jax.Array]


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
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a dense layer in f8: both of its gradients are f8 products as well.

    .. math::

        \mathrm{output} = \mathrm{activation}\big(s_x s_w \, (Q(x / s_x) \cdot
            Q(w / s_w)) + \mathrm{bias}\big)

    Q rounds to f8_e4m3fn (:func:`jax_cudnn.f8.quantize`) and saturates. The gradients
    by x and w multiply the same copies with the cotangent in f8_e5m2, which reaches
    further. Sums are f32 and are rounded once. The bias's gradient is of the cotangent
    as it came. Rounding and saturation count as the identity.

    With `f8.Delayed`, the scales come from former steps. Then **the gradient by `state`
    is the state of the next step**, as Flax and TransformerEngine have it in linen:

    >>> import jax, jax.numpy as jnp
    >>> from jax_cudnn import f8
    >>> recipe = f8.Delayed()
    >>> def loss(w, state, x):
    ...     return f8.dense(x, w, recipe=recipe, state=state).sum()
    >>> w, state, x = jnp.ones((16, 32)), f8.dense_state(recipe), jnp.ones((8, 16))
    >>> grad, state = jax.grad(loss, (0, 1))(w, state, x)

    States may be added up or averaged as gradients are: by a layer that is used twice,
    by vmap, over microbatches and over devices. The newest amax is then above the
    largest by at most the 8th root of how many there are, or as much below.

    All of JAX's transformations apply. Under jit with a mesh, an amax is that of the
    whole array, and a product's operand is gathered as its f8 copy. What is saved for
    the backward pass is the f8 copies; see
    :func:`jax_cudnn.checkpoint_policies.f8_saveable`.

    Args:
      x: (..., k); bf16, f16 or f32.
      w: (k, n), of one of these dtypes, which may be another one than x's.
      recipe: `f8.Current()` (default) or `f8.Delayed()`.
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
      implementation: "auto" (default), "cudnn" or "xla", as for
        :func:`jax_cudnn.matmul`, for each of the three products. XLA multiplies in f8
        as well.
      plan: which of cuDNN's execution plans may run the products.

    Returns:
      (..., n), of x's dtype.

    Raises:
      TypeError: other dtypes, no recipe, a state where there is none or none where
        there must be.
      ValueError: shapes that do not fit.
      UnsupportedError, LibraryError: as :func:`jax_cudnn.matmul`.

    Notes:
      On Hopper f8 products are fast if rows, k and n are multiples of 16. GPUs before
      sm_89 have no f8 products: XLA multiplies in a wider dtype there, with the same
      meaning.

    Example:
      >>> y = f8.dense(jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 32)))
      >>> y.shape, str(y.dtype)
      ((8, 32), 'bfloat16')
    """
    op = "f8.dense"
    call = options(op, implementation, plan)
    x, w = _operand(op, "x", x), _operand(op, "w", w)
    known = check_state(op, recipe, state)
    (y,) = _products(
        op, x, {"w": w}, {"w": bias}, [known], recipe, axes, call, w_sharding
    )
    return y if activation is None else on_array(op, activation, y)


class GatedMlpState(NamedTuple):
    """The states of the three layers of :func:`gated_mlp`."""

    gate: DenseState
    up: DenseState
    down: DenseState


def gated_mlp_state(recipe: Recipe) -> GatedMlpState | None:
    """Return the state with which a gated MLP begins; None for a recipe without one.

    Example:
      >>> from jax_cudnn import f8
      >>> f8.gated_mlp_state(f8.Delayed()).down.grad.shape
      (18,)
    """
    one = dense_state(recipe)
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
    x = _operand(op, "x", x)
    weights = {
        name: _operand(op, name, w)
        for name, w in (("gate", gate), ("up", up), ("down", down))
    }
    last = {"down": weights.pop("down")}
    if state is None or isinstance(recipe, Current):
        check_state(op, recipe, state)
        states: list[DenseState | None] = [None] * 3
    else:
        if len(state) != len(GatedMlpState._fields):
            raise TypeError(
                f"{op}: state has {len(state)} parts, not 3. Pass "
                "f8.gated_mlp_state(recipe), and later its gradient."
            )
        states = [check_state(op, recipe, each) for each in state]
    gated, value = _products(op, x, weights, {}, states[:2], recipe, 1, call)
    hidden = on_array(op, activation, gated) * value
    (y,) = _products(op, hidden, last, {}, states[2:], recipe, 1, call)
    return y


# --- products -------------------------------------------------------------------------


def _operand(op: str, name: str, value: ArrayLike) -> jax.Array:
    array = as_operand(op, name, value)
    if dtype_name(array.dtype) not in ("bf16", "f16", "f32"):
        raise TypeError(
            f"{op}: {name} is {describe(array)}. Supported dtypes are bf16, f16 and "
            "f32, which are rounded to f8 here. For operands in f8 call "
            "jax_cudnn.matmul with scale_a and scale_b."
        )
    return array


def _products(
    op: str,
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    biases: Mapping[str, ArrayLike | None],
    states: Sequence[DenseState | None],
    recipe: Recipe,
    axes: int,
    call: Options,
    w_sharding: object = None,
) -> list[jax.Array]:
    """Return the products of x with each of some weights, by the same copy of x."""
    for name, w in weights.items():
        _check_shapes(op, x, name, w, axes)
    own, first = jax.lax.stop_gradient(x), states[0]
    x_scale, x_next = scale_and_next(recipe, "x", first and first.x, own, FORWARD)
    x_copy = _copy(own, x_scale)
    found = []
    for (name, w), state in zip(weights.items(), states, strict=True):
        own = jax.lax.stop_gradient(w)
        w_scale, w_next = scale_and_next(recipe, "w", state and state.w, own, FORWARD)
        given = {
            "x": x,
            "w": w,
            "x_copy": x_copy,
            "w_copy": _copy(own, w_scale),
            "x_scale": x_scale,
            "w_scale": w_scale,
        }
        bias = biases.get(name)
        if bias is not None:
            given["bias"] = as_operand(op, "bias", bias).astype(x.dtype)
        if state is not None:
            assert x_next is not None
            assert w_next is not None
            given |= {f"{role}_state": each for role, each in state._asdict().items()}
            given |= {"x_next": x_next, "w_next": w_next}
        product = _Product(
            op=op, recipe=recipe, axes=axes, call=call, w_sharding=w_sharding
        )
        found.append(_run(product, given))
    return found


def _check_shapes(op: str, x: jax.Array, name: str, w: jax.Array, axes: int) -> None:
    is_count = isinstance(axes, int) and not isinstance(axes, bool) and axes >= 1
    if not is_count or axes > min(x.ndim, w.ndim - 1):
        raise ValueError(
            f"{op}: axes={axes!r}, x is {describe(x)} and {name} {describe(w)}. `axes` "
            f"must be an int of 1 or more that x has, and {name} one axis more."
        )
    if x.shape[x.ndim - axes :] != w.shape[:axes]:
        raise ValueError(
            f"{op}: x is {describe(x)} and {name} {describe(w)}. The last axes of x, "
            f"{axes} of them, must be the first of {name}. Transpose or reshape one of "
            "them."
        )


def _copy(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the f8 copy of x as bytes.

    jax.checkpoint rounds floats that a policy saves, and takes e4m3fn for a format with
    infinities: numbers above 240 became NaN (JAX 0.12.0.1).
    """
    stored = jax.lax.bitcast_convert_type(quantize(x, scale, FORWARD), jnp.uint8)
    return checkpoint_name(stored, SAVED_NAME)


def _read(copy: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(copy, FORWARD)


@dataclass(frozen=True, kw_only=True)
class _Product:
    """A product in f8, and its gradients; all operands are given by name.

    ``x_copy`` and ``w_copy`` are the bytes of the operands in f8, ``x_scale`` and
    ``w_scale`` their scales. ``x_state`` and its like are states, ``x_next`` and ``w_next`` those of the
    next step, as far as they are known forward.
    """

    op: str
    recipe: Recipe
    axes: int
    call: Options
    w_sharding: Any

    def forward(self, given: Mapping[str, jax.Array]) -> jax.Array:
        """Return the product by the f8 copies."""
        x, axes = given["x"], self.axes
        sums = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
        return self._multiply(
            self._stored(given, "x"),
            self._stored(given, "w"),
            (sums, ((), ())),
            x.dtype,
            given.get("bias"),
        )

    def reference(self, given: Mapping[str, jax.Array]) -> jax.Array:
        """Return the product of the rounded operands, differentiable by x and w."""
        x, w = self._rounded(given)
        y = jnp.tensordot(x, w, self.axes, preferred_element_type=jnp.float32)
        if (bias := given.get("bias")) is not None:
            y = y + bias.astype(jnp.float32)
        return y.astype(given["x"].dtype)

    def gradients(
        self, given: Mapping[str, jax.Array], grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients, those by the states being the next states."""
        x, w, axes = given["x"], given["w"], self.axes
        state = given.get("grad_state")
        scale, following = scale_and_next(self.recipe, "grad", state, grad, BACKWARD)
        copy = quantize(grad, scale, BACKWARD), scale
        leading = tuple(range(x.ndim - axes))
        columns = tuple(range(grad.ndim))[len(leading) :], tuple(range(w.ndim))[axes:]
        found = {
            "x": self._multiply(
                copy,
                self._stored(given, "w"),
                (columns, ((), ())),
                x.dtype,
            ),
            "w": self._multiply(
                self._stored(given, "x"),
                copy,
                ((leading, leading), ((), ())),
                w.dtype,
            ),
        }
        return found | self._of_states(given, following) | self._of_bias(given, grad)

    def reference_gradients(
        self, given: Mapping[str, jax.Array], grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients by the rounded operands, to be differentiated again."""
        x, w = self._rounded(given)
        stopped, state = jax.lax.stop_gradient(grad), given.get("grad_state")
        scale, following = scale_and_next(self.recipe, "grad", state, stopped, BACKWARD)
        rounded = _stands_for(grad, quantize(stopped, scale, BACKWARD), scale)

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            y = jnp.tensordot(x, w, self.axes, preferred_element_type=jnp.float32)
            return y.astype(rounded.dtype)

        grads = jax.vjp(product, x, w)[1](rounded)
        found = dict(zip(("x", "w"), grads, strict=True))
        return found | self._of_states(given, following) | self._of_bias(given, grad)

    def _rounded(self, given: Mapping[str, jax.Array]) -> list[jax.Array]:
        return [
            _stands_for(given[role], *self._stored(given, role)) for role in ("x", "w")
        ]

    def _stored(
        self, given: Mapping[str, jax.Array], role: str
    ) -> tuple[jax.Array, jax.Array]:
        """Return an operand in f8, laid out as the products read it, and its scale."""
        copy = given[f"{role}_copy"]
        if role == "w" and self.w_sharding is not None:
            # Not before it is saved: what is saved stays divided.
            copy = jax.lax.with_sharding_constraint(copy, self.w_sharding)
        return _read(copy), given[f"{role}_scale"]

    def _of_states(
        self, given: Mapping[str, jax.Array], following: jax.Array | None
    ) -> dict[str, jax.Array]:
        if following is None:
            return {}
        forward = {f"{role}_state": given[f"{role}_next"] for role in ("x", "w")}
        return {**forward, "grad_state": following}

    def _of_bias(
        self, given: Mapping[str, jax.Array], grad: jax.Array
    ) -> dict[str, jax.Array]:
        if (bias := given.get("bias")) is None:
            return {}
        # Added up in f32, over the axes along which the bias is broadcast.
        padded = (1,) * (grad.ndim - bias.ndim) + bias.shape
        over = [i for i, size in enumerate(padded) if size != grad.shape[i]]
        total = grad.astype(jnp.float32).sum(over, keepdims=True)
        return {"bias": total.reshape(bias.shape).astype(bias.dtype)}

    def _multiply(
        self,
        a: tuple[jax.Array, jax.Array],
        b: tuple[jax.Array, jax.Array],
        numbers: Numbers,
        dtype: np.dtype,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        (x, x_scale), (y, y_scale) = a, b
        product = as_product(self.op, x, y, numbers)
        (_, rows, columns), count = (
            product.sizes,
            math.prod(x.shape[axis] for axis in numbers[0][0]),
        )
        scaled = product._replace(
            scale_a=in_three(self.op, "scale_a", x_scale, ((), rows, (count,))),
            scale_b=in_three(self.op, "scale_b", y_scale, ((), (count,), columns)),
        )
        epilogue = Epilogue.of(self.op, bias=bias)
        dtypes = common_dtypes(self.op, x, y)
        return run_product(scaled, dtypes, epilogue, np.dtype(dtype), self.call)


@jax.custom_jvp
def _stands_for(x: jax.Array, copy: jax.Array, scale: jax.Array) -> jax.Array:
    """Return what an f8 copy of x stands for, in x's dtype, with x's derivative."""
    return dequantize(copy, scale, x.dtype)


@_stands_for.defjvp
def _stands_for_jvp(primals: Any, tangents: Any) -> Any:
    return _stands_for(*primals), tangents[0]


# What has a derivative.
_MOVING = ("x", "w", "bias", "x_state", "w_state", "grad_state")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(product: _Product, given: dict[str, jax.Array]) -> jax.Array:
    return product.forward(given)


@functools.partial(_run.defjvp, symbolic_zeros=True)
def _run_jvp(product: _Product, primals: Any, tangents: Any) -> Any:
    (given,), (moved,) = primals, tangents
    y = _again(product, given)
    moving = tuple(
        role
        for role in _MOVING
        if role in moved and not isinstance(moved[role], SymbolicZero)
    )
    if not moving:
        return y, jnp.zeros_like(y)
    derivative = _Derivative(product=product, roles=tuple(given), moving=moving)
    (tangent,) = linear_call(
        derivative, [*given.values()], [y], [moved[role] for role in moving]
    )
    return y, tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _again(product: _Product, given: dict[str, jax.Array]) -> jax.Array:
    """Return the product inside a derivative; its own is the reference's.

    Cotangents of higher orders have other sizes than those that a state knows.
    """
    return product.forward(given)


@_again.defjvp
def _again_jvp(product: _Product, primals: Any, tangents: Any) -> Any:
    _, along = jax.jvp(product.reference, primals, tangents)
    return _again(product, *primals), along


@dataclass(frozen=True, kw_only=True)
class _Derivative:
    """The derivative along the operands that move, and its transpose."""

    product: _Product
    roles: tuple[str, ...]
    moving: tuple[str, ...]

    def tangents(self, primals: Arrays, tangents: Arrays) -> Arrays:
        given = dict(zip(self.roles, primals, strict=True))

        def along(*values: jax.Array) -> jax.Array:
            return self.product.reference(
                given | dict(zip(self.moving, values, strict=True))
            )

        values = tuple(given[role] for role in self.moving)
        return [jax.jvp(along, values, tuple(tangents))[1]]

    def gradients(
        self, primals: Arrays, results: Arrays, cotangents: Sequence[jax.Array | None]
    ) -> Arrays:
        del results
        given = dict(zip(self.roles, primals, strict=True))
        (grad,) = cotangents
        assert grad is not None
        found = _gradients(self.product, given, grad)
        return [found[role] for role in self.moving]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(
    product: _Product, given: dict[str, jax.Array], grad: jax.Array
) -> dict[str, jax.Array]:
    return product.gradients(given, grad)


@_gradients.defjvp
def _gradients_jvp(product: _Product, primals: Any, tangents: Any) -> Any:
    _, along = jax.jvp(product.reference_gradients, primals, tangents)
    return _gradients(product, *primals), along
