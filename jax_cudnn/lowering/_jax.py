# SPDX-License-Identifier: Apache-2.0
"""Every JAX name outside its compatibility promise that the package uses, in one place.

See https://docs.jax.dev/en/latest/api_compatibility.html: `jax.extend` and
`jax.interpreters` may change between releases. Nothing else in the package imports
from them, so a new JAX release is met here.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend import source_info_util
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]  0.12 has one class for both
    Primitive,
    jaxpr_as_fun,
    jaxprs_in_params,
)
from jax.interpreters import ad, batching, mlir

__all__ = [
    "Primitive",
    "align_varying",
    "equation_function",
    "equation_place",
    "explicit_sharding",
    "inner_jaxprs",
    "instantiate_zero",
    "is_known_array",
    "is_linear_input",
    "is_zero",
    "lower_function",
    "output_aval",
    "set_batching",
    "set_jvp",
    "set_lowering",
    "set_transpose",
    "weakly_typed",
    "zero_like",
]


def set_jvp(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Set the forward-mode rule, rule(primals, tangents, **params)."""
    ad.primitive_jvps[primitive] = rule


def set_transpose(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Set the transposition rule, rule(cotangents, *args, **params)."""
    ad.primitive_transposes[primitive] = rule


def set_batching(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Set the batching rule, rule(args, axes, **params); an axis may be None."""
    batching.primitive_batchers[primitive] = rule


def set_lowering(
    primitive: Primitive, rule: Callable[..., Any], platform: str | None = None
) -> None:
    """Set the lowering rule for one platform, or the default for all others."""
    mlir.register_lowering(primitive, rule, platform=platform)


def lower_function(function: Callable[..., Sequence[jax.Array]]) -> Callable[..., Any]:
    """Return a lowering rule that inlines what a function of arrays computes."""
    return mlir.lower_fun(function, multiple_results=True)


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs among an equation's parameters (loop bodies, branches, ...)."""
    return jaxprs_in_params(params)


def is_known_array(value: Any, aval: Any) -> bool:
    """Whether a value that a function captured is an array that can be read now.

    Not so are those that are traced themselves, references to arrays that may change,
    and arrays of which other processes hold a part.
    """
    if isinstance(value, Tracer) or not isinstance(aval, ShapedArray):
        return False
    return getattr(value, "is_fully_addressable", True)


def equation_place(equation: Any) -> str:
    """Return where the user's code made an equation: file, line and function.

    Empty where JAX does not know, or names this package, which is not the user's.
    """
    place = source_info_util.summarize(equation.source_info)
    return "" if place.startswith(_PACKAGE) else place


_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"


def equation_function(jaxpr: Any, equation: Any) -> Callable[..., list[jax.Array]]:
    """Return what one equation of a jaxpr computes from its operands.

    Each operand is taken once, in order of appearance, and literals are not.
    """
    operands = dict.fromkeys(x for x in equation.invars if not hasattr(x, "val"))
    alone = jaxpr.replace(
        constvars=[],
        invars=list(operands),
        outvars=equation.outvars,
        eqns=[equation],
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, []))


def is_zero(tangent: object) -> bool:
    """Whether a tangent or cotangent is symbolically zero."""
    return isinstance(tangent, ad.Zero)


def instantiate_zero(tangent: Any) -> jax.Array:
    """Return the array that a tangent or cotangent stands for."""
    return ad.instantiate_zeros(tangent)


def zero_like(x: object) -> Any:
    """Return the symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def is_linear_input(x: object) -> bool:
    """Whether an argument of a transposition rule is what it is linear in."""
    return ad.is_undefined_primal(x)


def align_varying(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Inside shard_map, mark operands that do not vary over an axis as varying.

    Some other operand does, so that the result will; gradients are summed over the
    axis on the way back.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset[Any]().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(operands, varying, strict=True)
    ]


def weakly_typed(x: jax.Array) -> jax.Array:
    """Return an array whose dtype gives way to that of what it meets."""
    return jax.lax.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )


def explicit_sharding(x: jax.Array) -> str | None:
    """Return the sharding in an array's type, where it names axes of a mesh."""
    spec = jax.typeof(x).sharding.spec
    return str(spec) if any(axes is not None for axes in spec) else None


def output_aval(
    shape: tuple[int, ...], dtype: np.dtype, operands: Sequence[Any]
) -> ShapedArray:
    """Return the type of a result; inside shard_map it varies as the operands do."""
    like = max(
        operands, key=lambda aval: len(aval.manual_axis_type.varying), default=None
    )
    if like is None or like.sharding.mesh.empty:
        return ShapedArray(shape, dtype)
    replicated = jax.sharding.PartitionSpec(*([None] * len(shape)))
    return ShapedArray(
        shape,
        dtype,
        sharding=jax.sharding.NamedSharding(like.sharding.mesh, replicated),
        manual_axis_type=like.manual_axis_type,
    )
