# SPDX-License-Identifier: Apache-2.0
"""Gives functions a gradient of their own that composes with JAX's transformations.

For functions of several graphs and collectives. Forward mode evaluates the derivative,
reverse mode the transpose. JAX's own ``linear_call`` has no vmap and no second order.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.sharding.array_types import typed_like

Arrays = Sequence[jax.Array]


class LinearFunction(Protocol):
    """The derivative of a function at some primals; hashable, and equal to its equals.

    ``primals`` are arrays that it may read as it likes, ``results`` are what the
    function makes of them, ``tangents`` those of the primals that move.
    """

    def tangents(self, primals: Arrays, tangents: Arrays) -> Arrays:
        """Return the tangents of the results: linear in `tangents`."""
        ...

    def gradients(
        self, primals: Arrays, results: Arrays, cotangents: Sequence[jax.Array | None]
    ) -> Arrays:
        """Return the cotangents of `tangents`, given those of the results.

        This is the transpose. None stands for a cotangent that is zero; not all are.
        """
        ...


linear_call_p = _jax.Primitive("cudnn_linear_call")
linear_call_p.multiple_results = True


def linear_call(
    function: LinearFunction, primals: Arrays, results: Arrays, tangents: Arrays
) -> list[jax.Array]:
    """Return the tangents of the results, of the results' shapes and dtypes."""
    operands = _jax.align_varying([*primals, *results, *tangents])
    counts = (len(primals), len(results))
    return linear_call_p.bind(*operands, function=function, counts=counts)


def _split(args: Sequence[Any], counts: tuple[int, int]) -> tuple[list[Any], ...]:
    first, last = counts[0], sum(counts)
    return list(args[:first]), list(args[first:last]), list(args[last:])


def _apply(
    *args: jax.Array, function: LinearFunction, counts: tuple[int, int]
) -> list[jax.Array]:
    primals, _, tangents = _split(args, counts)
    return list(function.tangents(primals, tangents))


def _avals(*args: Any, function: LinearFunction, counts: tuple[int, int]) -> list[Any]:
    del function
    _, results, _ = _split(args, counts)
    return [_jax.output_aval(x.shape, x.dtype, args, x.sharding.spec) for x in results]


def with_values(
    operands: Sequence[Any], places: Sequence[int], values: Sequence[jax.Array]
) -> list[Any]:
    """Return operands with other values at some places."""
    found = list(operands)
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return found


def jvp_where_nonzero(
    function: Callable[..., Sequence[jax.Array]],
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """Return `jax.jvp` of a function along the tangents that are not zero."""
    moving = [
        i
        for i, tangent in enumerate(tangents)
        if not (_jax.is_zero(tangent) or isinstance(tangent, SymbolicZero))
    ]
    return jax.jvp(
        lambda *values: function(*with_values(primals, moving, values)),
        tuple(primals[i] for i in moving),
        tuple(tangents[i] for i in moving),
    )


def _jvp(
    primals: Arrays, tangents: Sequence[Any], **params: Any
) -> tuple[Arrays, Arrays]:
    function = functools.partial(_apply, **params)
    return jvp_where_nonzero(function, primals, tangents)


def _transpose(
    cotangents: Sequence[Any],
    *args: Any,
    function: LinearFunction,
    counts: tuple[int, int],
) -> list[Any]:
    primals, results, tangents = _split(args, counts)
    assert all(_jax.is_linear_input(x) for x in tangents)
    if all(_jax.is_zero(ct) for ct in cotangents):
        gradients: Arrays = [_jax.zero_like(x.aval) for x in tangents]
    else:
        given = [None if _jax.is_zero(ct) else ct for ct in cotangents]
        gradients = [
            typed_like(gradient, x.aval)
            for gradient, x in zip(
                function.gradients(primals, results, given), tangents, strict=True
            )
        ]
    return [None] * sum(counts) + list(gradients)


@dataclass(frozen=True)
class _OfExamples:
    """A linear function of many examples, the first axis of all its arrays."""

    function: LinearFunction

    def tangents(self, primals: Arrays, tangents: Arrays) -> Arrays:
        return jax.vmap(self.function.tangents)(primals, tangents)

    def gradients(
        self, primals: Arrays, results: Arrays, cotangents: Sequence[jax.Array | None]
    ) -> Arrays:
        return jax.vmap(self.function.gradients)(primals, results, cotangents)


def _batch(
    args: Arrays,
    axes: Sequence[int | None],
    *,
    function: LinearFunction,
    counts: tuple[int, int],
) -> tuple[list[jax.Array], list[int]]:
    count = next(
        x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None
    )
    # An operand that examples share gets a gradient from each.
    examples = [
        jnp.broadcast_to(x, (count, *x.shape))
        if axis is None
        else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args, axes, strict=True)
    ]
    primals, results, tangents = _split(examples, counts)
    out = linear_call(_OfExamples(function), primals, results, tangents)
    return out, [0] * len(out)


linear_call_p.def_impl(_apply)
linear_call_p.def_abstract_eval(_avals)
_jax.set_jvp(linear_call_p, _jvp)
_jax.set_transpose(linear_call_p, _transpose)
_jax.set_batching(linear_call_p, _batch)
_jax.set_lowering(linear_call_p, _jax.lower_function(_apply))


# --- functions whose derivatives are those of others ----------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def with_derivative_of(
    meaning: Callable[..., Any], compute: Callable[..., Any], *args: Any
) -> Any:
    """Return `compute(*args)`, whose derivatives of all orders are those of `meaning`.

    For example, `compute` multiplies rounded copies, and `meaning` their sources.
    """
    del meaning
    return compute(*args)


@functools.partial(with_derivative_of.defjvp, symbolic_zeros=True)
def _meaning_jvp(
    meaning: Callable[..., Any],
    compute: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[Any, Any]:
    arrays, tree = jax.tree.flatten(primals)

    def function(*arrays: jax.Array) -> Any:
        return meaning(*jax.tree.unflatten(tree, arrays))

    _, along = jvp_where_nonzero(function, arrays, jax.tree.leaves(tangents))
    return with_derivative_of(meaning, compute, *primals), along


# --- functions of named operands ------------------------------------------------------


class WithGradient(Protocol):
    """A function of named operands whose gradient is written by hand.

    Hashable, and equal to its equals.
    """

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The operands that have a gradient."""
        ...

    def forward(self, given: Mapping[str, jax.Array]) -> Arrays:
        """Return the results."""
        ...

    def again(self, given: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Return the results inside a derivative, as remat policies know them.

        Their own derivative is that of higher orders.
        """
        ...

    def gradients(
        self,
        given: Mapping[str, jax.Array],
        results: Arrays,
        cotangents: Sequence[jax.Array | None],
        wanted: tuple[str, ...],
    ) -> Mapping[str, jax.Array]:
        """Return the gradients that are wanted, and maybe others."""
        ...


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def run_with_gradient(
    function: WithGradient, given: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """Return the function's results, differentiable in both modes and any order."""
    return tuple(function.forward(given))


@functools.partial(run_with_gradient.defjvp, symbolic_zeros=True)
def _with_gradient_jvp(
    function: WithGradient,
    primals: tuple[dict[str, jax.Array]],
    tangents: tuple[dict[str, Any]],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    (given,), (moved,) = primals, tangents
    results = function.again(given)
    moving = tuple(
        role
        for role in function.differentiable
        if role in moved and not isinstance(moved[role], SymbolicZero)
    )
    if not moving:
        return results, tuple(map(jnp.zeros_like, results))
    derivative = _Derivative(function=function, roles=tuple(given), moving=moving)
    along = [moved[role] for role in moving]
    return results, tuple(linear_call(derivative, [*given.values()], results, along))


@dataclass(frozen=True, kw_only=True)
class _Derivative:
    """The derivative along the operands that move, and its transpose."""

    function: WithGradient
    roles: tuple[str, ...]
    moving: tuple[str, ...]

    def tangents(self, primals: Arrays, tangents: Arrays) -> Arrays:
        given = dict(zip(self.roles, primals, strict=True))

        def along(*values: jax.Array) -> tuple[jax.Array, ...]:
            moved = dict(zip(self.moving, values, strict=True))
            return tuple(self.function.forward(given | moved))

        values = tuple(given[role] for role in self.moving)
        return jax.jvp(along, values, tuple(tangents))[1]

    def gradients(
        self, primals: Arrays, results: Arrays, cotangents: Sequence[jax.Array | None]
    ) -> Arrays:
        given = dict(zip(self.roles, primals, strict=True))
        found = self.function.gradients(given, results, cotangents, self.moving)
        return [found[role] for role in self.moving]
