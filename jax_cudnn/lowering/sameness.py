# SPDX-License-Identifier: Apache-2.0
"""Decides whether two functions with custom derivative rules are the same.

JAX keeps no name by which to know the function that a `custom_jvp_call` came from. So
both are compared as programs: what they compute, and what their rules compute.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from jax_cudnn.lowering import _jax

# A rule may call functions with rules of their own, mostly the one that it belongs to.
# The programs of this many derivatives are compared.
_DERIVATIVES = 2


class CustomCall(NamedTuple):
    """A `custom_jvp_call` equation, and the jaxpr that it is in."""

    jaxpr: Any
    equation: Any

    def rule(self) -> Any:
        """Return the program of the value and the derivative."""
        function = _jax.equation_function(self.jaxpr, self.equation)
        operands = dict.fromkeys(x for x in self.equation.invars if not is_literal(x))
        like = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in operands]

        def both(*args: jax.Array) -> Any:
            return jax.jvp(function, args[: len(like)], args[len(like) :])

        return jax.make_jaxpr(both)(*like, *like)


def same_function(
    known: CustomCall, other: CustomCall, derivatives: int = _DERIVATIVES
) -> bool:
    """Whether two calls have the same value and derivatives for the same operands.

    Operands that are numbers in the program have to be the same ones.
    """
    return (
        _same_atoms(known.equation.invars, other.equation.invars)
        and _same_parameters(known.equation, other.equation, derivatives)
        and (
            derivatives == 0
            or _same_program(known.rule(), other.rule(), derivatives - 1)
        )
    )


def same_parameters(known: Any, other: Any) -> bool:
    """Whether two equations of one primitive have the same parameters."""
    return _same_parameters(known, other, _DERIVATIVES)


def _same_program(known: Any, other: Any, derivatives: int) -> bool:
    """Whether two jaxprs have the same equations, one by one."""
    if any(getattr(x, "consts", ()) for x in (known, other)):
        return False  # JAX's own functions capture nothing.
    first, second = (getattr(x, "jaxpr", x) for x in (known, other))
    if len(first.eqns) != len(second.eqns):
        return False
    # The variables of the one that those of the other stand for.
    partners: dict[Any, Any] = {}

    def define(xs: Any, ys: Any) -> bool:
        is_same = _same_atoms(xs, ys)
        if is_same:
            partners.update(zip(xs, ys, strict=True))
        return is_same

    def read(xs: Any, ys: Any) -> bool:
        return _same_atoms(xs, ys) and all(
            is_literal(x) or partners[x] is y for x, y in zip(xs, ys, strict=True)
        )

    def same_equation(x: Any, y: Any) -> bool:
        if x.primitive is not y.primitive:
            return False
        if not read(x.invars, y.invars) or not define(x.outvars, y.outvars):
            return False
        if x.primitive.name == "custom_jvp_call":
            calls = CustomCall(first, x), CustomCall(second, y)
            return same_function(*calls, derivatives)
        return _same_parameters(x, y, derivatives)

    return (
        define([*first.constvars, *first.invars], [*second.constvars, *second.invars])
        and all(map(same_equation, first.eqns, second.eqns))
        and read(first.outvars, second.outvars)
    )


def _same_parameters(known: Any, other: Any, derivatives: int) -> bool:
    first, second = dict(known.params), dict(other.params)
    if known.primitive.name == "custom_jvp_call":
        # The rule, a function that is made anew by each trace.
        first.pop("jvp_jaxpr_fun", None)
        second.pop("jvp_jaxpr_fun", None)
    return first.keys() == second.keys() and all(
        _same_parameter(value, second[name], derivatives)
        for name, value in first.items()
    )


def _same_parameter(known: Any, other: Any, derivatives: int) -> bool:
    if hasattr(known, "eqns") and hasattr(other, "eqns"):
        return _same_program(known, other, derivatives)
    if known is other:
        return True
    # Other than a bool is what arrays answer, which JAX's own functions do not hold.
    return type(known) is type(other) and (known == other) is True


def _same_atoms(xs: Any, ys: Any) -> bool:
    """Whether variables have the same types, and numbers the same bits as well."""
    return len(xs) == len(ys) and all(
        x.aval == y.aval
        and is_literal(x) == is_literal(y)
        and (not is_literal(x) or _bits(x) == _bits(y))
        for x, y in zip(xs, ys, strict=True)
    )


def is_literal(x: Any) -> bool:
    """Whether an operand of an equation is a number in the program."""
    return hasattr(x, "val")


def _bits(literal: Any) -> bytes:
    return np.asarray(literal.val, literal.aval.dtype).tobytes()
