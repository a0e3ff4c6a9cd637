# SPDX-License-Identifier: Apache-2.0
"""Every JAX name outside its compatibility promise that the package uses, in one place.

See https://docs.jax.dev/en/latest/api_compatibility.html: `jax.extend` and
`jax.interpreters` may change between releases. Nothing else in the package imports
from them, so a new JAX release is met here.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer, min_dim
from jax.extend import source_info_util
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]  0.12 has one class for both
    Primitive,
    jaxpr_as_fun,
    jaxprs_in_params,
)
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AxisType
from jaxlib import xla_client

from jax_cudnn.errors import UnsupportedError

__all__ = [
    "Groups",
    "Primitive",
    "ShapedArray",
    "align_varying",
    "constants_as_operands",
    "custom_call",
    "equation_function",
    "equation_name",
    "equation_place",
    "exchange_in_groups",
    "hlo_sharding",
    "inner_jaxprs",
    "inner_runs",
    "instantiate_zero",
    "is_array_aval",
    "is_known_array",
    "is_linear_input",
    "is_on_host",
    "is_zero",
    "lower_function",
    "max_over_groups",
    "min_dim",
    "output_aval",
    "packed",
    "partitioned_region",
    "register_partitioner",
    "scatter_sum_over_groups",
    "set_batching",
    "set_jvp",
    "set_lowering",
    "set_saving",
    "set_transpose",
    "sum_over_groups",
    "vary_over",
    "weakly_typed",
    "without_mesh",
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


def set_saving(
    primitive: Primitive,
    rule: Callable[[Callable[..., Any], Sequence[bool], Sequence[bool], Any], Any],
) -> None:
    """Set the rule by which `jax.checkpoint` saves results or computes them again.

    rule(policy, unknown, available, equation) returns the equation of the forward pass,
    that of the backward pass (either may be None), for each result whether it is
    unknown before the backward pass, and whether it is available in it, and the
    variables to save. The two sequences say the same of the operands.
    """
    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def lower_function(function: Callable[..., Sequence[jax.Array]]) -> Callable[..., Any]:
    """Return a lowering rule that inlines what a function of arrays computes."""
    return mlir.lower_fun(function, multiple_results=True)


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs among an equation's parameters (loop bodies, branches, ...)."""
    return jaxprs_in_params(params)


def inner_runs(equation: Any) -> int | None:
    """Return how many times an equation runs its jaxprs; None if it does not say."""
    name = equation.primitive.name
    if name == "scan":
        return equation.params["length"]
    return 1 if name in _RUN_ONCE else None


# Primitives that run their jaxpr once: jit (pjit in JAX 0.10), remat, and functions
# with derivatives of their own.
_RUN_ONCE = {
    *("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2", "shard_map"),
}


def is_known_array(value: Any, aval: Any) -> bool:
    """Whether a value that a function captured is an array that can be read now.

    Not so are those that are traced themselves, references to arrays that may change,
    and arrays of which other processes hold a part.
    """
    if isinstance(value, Tracer) or not isinstance(aval, ShapedArray):
        return False
    return getattr(value, "is_fully_addressable", True)


def is_on_host(*given: Any) -> bool:
    """Whether all numbers can be looked at without a copy from an accelerator.

    Those of NumPy and Python can, and those of JAX's arrays on CPUs; traced ones not.
    """
    return all(map(_is_on_host, jax.tree.leaves(given)))


def _is_on_host(x: Any) -> bool:
    if isinstance(x, Tracer):
        return False
    if not isinstance(x, jax.Array):
        return True
    is_cpu = all(device.platform == "cpu" for device in x.devices())
    return is_cpu and x.is_fully_addressable


def equation_place(equation: Any) -> str:
    """Return where the user's code made an equation: file, line and function.

    Empty where JAX does not know, or names this package, which is not the user's.
    """
    place = source_info_util.summarize(equation.source_info)
    return "" if place.startswith(_PACKAGE) else place


_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"


def equation_name(equation: Any) -> str:
    """Return what an equation is called: a user's function, or else its primitive."""
    called = equation.params.get("call_jaxpr")
    program = getattr(called, "jaxpr", called)
    name = getattr(getattr(program, "debug_info", None), "func_name", None)
    return name if isinstance(name, str) else equation.primitive.name


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
    function = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def run(*args: jax.Array) -> list[jax.Array]:
        if any(jax.typeof(x).manual_axis_type.varying for x in args):
            return _run_varying(alone, args)
        return function(*args)

    return run


def _run_varying(jaxpr: Any, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a jaxpr that was traced outside of shard_map on operands that vary in it.

    All operands of an equation vary alike, literals too, or JAX refuses them. What a
    call returns would have the types that its jaxpr was traced with, so functions that
    are jitted are inlined, and other calls are refused.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))

    def value(x: Any) -> Any:
        return jnp.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else values[x]

    for equation in jaxpr.eqns:
        primitive, params = equation.primitive, equation.params
        given = align_varying([value(x) for x in equation.invars])
        if primitive.name in ("jit", "pjit"):
            inner = params["jaxpr"]
            constants = inner.jaxpr.replace(
                constvars=[], invars=[*inner.jaxpr.constvars, *inner.jaxpr.invars]
            )
            results = _run_varying(constants, [*inner.consts, *given])
        elif next(inner_jaxprs(params), None) is not None:
            raise UnsupportedError(
                f"{primitive.name} cannot be part of a function of positions that "
                "differ between devices, inside of jax.shard_map. Compute an array "
                "with it before, and index that."
            )
        else:
            found = primitive.bind(*given, **primitive.get_bind_params(params))
            results = found if primitive.multiple_results else [found]
        values |= zip(equation.outvars, results, strict=True)
    return [value(x) for x in jaxpr.outvars]


def constants_as_operands(closed: Any) -> tuple[Callable[..., list[jax.Array]], Any]:
    """Return what a closed jaxpr computes from its constants and operands, and avals.

    The avals are those of both, in this order.
    """
    jaxpr = closed.jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    function = jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars), []))
    return function, [x.aval for x in invars]


def is_array_aval(aval: object) -> bool:
    """Whether it describes an array, and not a reference or a token."""
    return isinstance(aval, ShapedArray)


def is_zero(tangent: object) -> bool:
    """Whether a tangent or cotangent is symbolically zero."""
    return isinstance(tangent, ad.Zero)


def instantiate_zero(tangent: Any) -> jax.Array:
    """Return the array that a tangent or cotangent stands for."""
    return ad.instantiate_zeros(tangent)


def zero_like(x: Any) -> Any:
    """Return the symbolic zero tangent of a value, or of a type."""
    return ad.Zero((x if is_array_aval(x) else jax.typeof(x)).to_tangent_aval())


def is_linear_input(x: object) -> bool:
    """Whether an argument of a transposition rule is what it is linear in."""
    return ad.is_undefined_primal(x)


def align_varying(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Inside shard_map, mark operands that do not vary over an axis as varying.

    Some other operand does, so that the result will; gradients are summed over the
    axis on the way back.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = sorted(frozenset[Any]().union(*varying))
    return [vary_over(x, union) for x in operands]


def vary_over(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Inside shard_map, mark an array as varying over axes, as `pmax` wants it."""
    own = jax.typeof(x).manual_axis_type.varying
    missing = tuple(name for name in axes if name not in own)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def weakly_typed(x: jax.Array) -> jax.Array:
    """Return an array whose dtype gives way to that of what it meets."""
    return jax.lax.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )


def output_aval(
    shape: tuple[int, ...],
    dtype: np.dtype,
    operands: Sequence[Any],
    spec: jax.sharding.PartitionSpec | None = None,
) -> ShapedArray:
    """Return the type of a result; inside shard_map it varies as the operands do.

    `spec` says how it is sharded where the types of operands say so.
    """

    def knows(aval: Any) -> tuple[bool, int]:
        """Whether an operand is on a mesh, and along how many axes it varies."""
        return not aval.sharding.mesh.empty, len(aval.manual_axis_type.varying)

    like = max(operands, key=knows, default=None)
    if like is None or like.sharding.mesh.empty:
        return ShapedArray(shape, dtype)
    if spec is None:
        spec = jax.sharding.PartitionSpec(*([None] * len(shape)))
    return ShapedArray(
        shape,
        dtype,
        sharding=jax.sharding.NamedSharding(like.sharding.mesh, spec),
        manual_axis_type=like.manual_axis_type,
    )


# --- XLA's partitioner ----------------------------------------------------------------

# What XLA calls to divide a custom call: its operands' shapes and shardings, the
# result's, and the call's text. It returns a program and the shardings to use.
Partition = Callable[[Any, Any, Any, Any, bytes], tuple[bytes, list[Any], Any]]
# Likewise, without the result's sharding, which it returns.
Infer = Callable[[Any, Any, Any, bytes], Any]
# Which devices send to each other, as XLA counts partitions.
Groups = tuple[tuple[int, ...], ...]


def register_partitioner(name: str, *, partition: Partition, infer: Infer) -> bool:
    """Register who divides the custom calls of that name; False where JAX cannot.

    GPUs are JAX's plugins, which are told of partitioners by themselves.
    """
    try:
        from jax._src.xla_bridge import register_plugin_callbacks
    except ImportError:
        return False
    used = ("register_custom_call_partitioner", "OpSharding", "HloSharding")
    if not all(hasattr(xla_client, each) for each in used):
        return False
    register = xla_client.register_custom_call_partitioner
    settings = {
        "name": name,
        "prop_user_sharding": lambda sharding, _shape, _config: sharding,
        "partition": partition,
        "infer_sharding_from_operands": infer,
        "can_side_effecting_have_replicated_sharding": True,
    }
    register(**settings)
    register_plugin_callbacks(functools.partial(register, **settings))
    return True


def partitioned_region(ctx: Any) -> Literal["automatic", "partly manual"] | None:
    """Return how XLA divides the program that is lowered; None where it does not.

    It does not within `shard_map` over all axes, nor for a single device.
    """
    around = ctx.module_context.axis_context
    if isinstance(around, mlir.SPMDAxisContext):
        manual = set(around.manual_axes)
        for aval in ctx.avals_in:
            # JAX 0.10 names the axes of the innermost shard_map only.
            mesh = aval.sharding.mesh
            kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
            manual |= {name for name, kind in kinds if kind == AxisType.Manual}
        divided = {name for name, size in around.mesh.shape.items() if size > 1}
        return "partly manual" if divided - manual else None
    if isinstance(around, mlir.ShardingContext):
        return "automatic" if around.num_devices > 1 else None
    return None


def custom_call(
    ctx: Any,
    operands: Sequence[Any],
    *,
    target: str,
    config: str,
    sharding_rule: str,
) -> Sequence[Any]:
    """Emit a custom call that XLA's partitioner divides, and return its results."""
    types = [
        ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
        for aval in ctx.avals_out
    ]
    call = stablehlo.CustomCallOp(
        types,
        list(operands),
        call_target_name=ir.StringAttr.get(target),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(config),
        operand_layouts=None,
        result_layouts=None,
    )
    call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(sharding_rule)
    return call.results


def sum_over_groups(ctx: Any, x: Any, *, groups: Groups) -> Sequence[Any]:
    """Lower a sum over the devices of each group; devices as XLA counts partitions."""
    operation: Any = stablehlo
    reduce = operation.AllReduceOp([x.type], [x], **_among(groups))
    return _combining(reduce, ctx, operation.AddOp)


def max_over_groups(ctx: Any, x: Any, *, groups: Groups) -> Sequence[Any]:
    """Lower a maximum over the devices of each group, which is NaN where one is."""
    operation: Any = stablehlo
    reduce = operation.AllReduceOp([x.type], [x], **_among(groups))
    return _combining(reduce, ctx, operation.MaxOp)


def scatter_sum_over_groups(
    ctx: Any, x: Any, *, groups: Groups, axis: int
) -> Sequence[Any]:
    """Lower such a sum, of which each device keeps its own part of an axis."""
    operation: Any = stablehlo
    (aval,) = ctx.avals_out
    part = ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
    reduce = operation.ReduceScatterOp(part, x, axis, **_among(groups))
    return _combining(reduce, ctx, operation.AddOp)


def exchange_in_groups(ctx: Any, x: Any, *, groups: Groups, axis: int) -> Sequence[Any]:
    """Lower an exchange: a device gives each one of its group the part of that one."""
    operation: Any = stablehlo
    settings = _among(groups)
    del settings["use_global_device_ids"]
    return operation.AllToAllOp([x], axis, axis, len(groups[0]), **settings).results


def _among(groups: Groups) -> dict[str, Any]:
    # Its type is not the same in all versions of JAX.
    attribute: Any = ir.DenseIntElementsAttr
    rows = np.ascontiguousarray(np.array(groups, np.int64))
    return {
        "replica_groups": attribute.get(rows),
        "channel_handle": stablehlo.ChannelHandle.get(1, mlir.DEVICE_TO_DEVICE_TYPE),
        "use_global_device_ids": True,
    }


def _combining(reduce: Any, ctx: Any, combine: Any) -> Sequence[Any]:
    """Return the results of a reduction over devices, by an operation of two."""
    operation: Any = stablehlo
    (aval,) = ctx.avals_out
    scalar = ir.RankedTensorType.get([], mlir.dtype_to_ir_type(aval.dtype))
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        operation.ReturnOp([combine(*block.arguments)])
    return reduce.results


def packed(shape: Any, shardings: list[Any]) -> Any:
    """Return the sharding of results, a tuple's where their shape is one."""
    if not shape.is_tuple():
        return shardings[0]
    return xla_client.HloSharding.tuple_sharding(shape, shardings)


def hlo_sharding(axes: list[list[tuple[int, tuple[int, ...]]]], devices: int) -> Any:
    """Return a sharding by the cuts of each axis: (count, each device's part)."""
    counts = [math.prod(count for count, _ in cuts) for cuts in axes]
    if math.prod(counts) == 1:
        return xla_client.HloSharding.replicate()
    parts = [np.zeros(devices, np.int64) for _ in axes]
    for i, cuts in enumerate(axes):
        for count, own in cuts:
            parts[i] = parts[i] * count + np.array(own)
    copies = devices // math.prod(counts)
    sharding = xla_client.OpSharding()
    sharding.type = xla_client.OpSharding.Type.OTHER
    sharding.tile_assignment_dimensions = counts + ([copies] if copies > 1 else [])
    sharding.replicate_on_last_tile_dim = copies > 1
    # Devices with the same parts stay in order.
    sharding.tile_assignment_devices = [int(d) for d in np.lexsort(parts[::-1])]
    return xla_client.HloSharding.from_proto(sharding)


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Forget the mesh of the code that XLA interrupts to have a call divided."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
