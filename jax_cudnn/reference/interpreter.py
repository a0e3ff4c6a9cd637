# SPDX-License-Identifier: Apache-2.0
"""Evaluates a graph with one jax.numpy rule per node kind."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.graph import NORMALISED, DTypeName, Graph, Node, Tensor, kind_named
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.graph.products.conv import TRIPLES, arrays_in, is_short_sum
from jax_cudnn.graph.rules import accumulator, narrow_dtype
from jax_cudnn.reference import norms, pointwise, pooling
from jax_cudnn.reference.attention import cached, f8, qkv
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.products import (
    block_scaled,
    causal_conv1d,
    contraction,
    grouped_matmul,
)

# A rule takes the attributes, the input arrays by role in logical axis order, and the
# output tensors that are asked for. A contraction's rule takes a precision as well. The
# rule returns the outputs in any dtype that holds the result, and the interpreter
# rounds once.
Rule = Callable[..., Mapping[str, Any]]
Keep = Callable[[jax.Array], jax.Array]
# It takes an array, and by the name of ``but`` the axis of the images in it.
AtConv = Callable[..., jax.Array]

RULES: dict[str, Rule] = {
    "avg_pool": pooling.avg_pool,
    "avg_pool_backward": pooling.avg_pool_backward,
    "block_scaled_matmul": block_scaled.forward,
    "causal_conv1d": causal_conv1d.forward,
    "causal_conv1d_backward": causal_conv1d.backward,
    "constant": pointwise.constant,
    "conv_dgrad": contraction.conv_dgrad,
    "conv_fprop": contraction.conv_fprop,
    "conv_wgrad": contraction.conv_wgrad,
    "grouped_matmul": grouped_matmul.forward,
    "grouped_matmul_backward": grouped_matmul.backward,
    "matmul": contraction.matmul,
    "max_pool": pooling.max_pool,
    "pointwise": pointwise.pointwise,
    "reduction": pointwise.reduction,
    "sdpa": qkv.forward,
    "sdpa_backward": qkv.backward,
    "sdpa_cached": cached.forward,
    "sdpa_f8": f8.forward,
    **{kind: norms.forward(kind) for kind in NORMALISED},
    **{f"{kind}_backward": norms.backward(kind) for kind in NORMALISED},
}


def evaluate(
    graph: Graph,
    operands: Sequence[jax.Array],
    *,
    narrow_sums: bool = False,
    kept: Mapping[str, Keep] | None = None,
    at_conv: AtConv | None = None,
    precision: Any = None,
    exact_dtypes: bool = False,
) -> tuple[jax.Array, ...]:
    """Return the graph's results, given its operands as stored arrays.

    With ``narrow_sums``, sums over 16-bit operands, also beside 8-bit weights, are
    rounded to the 16-bit dtype before the operations that follow, as in programs that
    use that dtype throughout. XLA computes this faster, since it keeps no f32 array of
    the sums and recognises what to fuse. The tensors ``kept`` pass through a function
    that changes no value, but what XLA makes of them, and so does what convolutions
    read and give: ``at_conv`` is told the axis of the images, if any. ``precision`` is
    the precision of matmuls and convolutions, as JAX takes it. With ``exact_dtypes``,
    ``narrow_sums`` is for values whose tensors have 16 bits.
    """
    kept = kept or {}
    values = {
        tensor.name: to_logical(tensor, operand)
        for tensor, operand in zip(graph.input_tensors, operands, strict=True)
    }
    for node in graph.nodes:
        results = _evaluate_node(
            graph,
            node,
            values,
            narrow_sums=narrow_sums,
            at_conv=at_conv,
            precision=precision,
            exact_dtypes=exact_dtypes,
        )
        for name in kept.keys() & results.keys():
            results[name] = kept[name](results[name])
        values |= results
    return tuple(to_stored(t, values[t.name]) for t in graph.output_tensors)


def _evaluate_node(
    graph: Graph,
    node: Node,
    values: Mapping[str, jax.Array],
    *,
    narrow_sums: bool,
    at_conv: AtConv | None,
    precision: Any,
    exact_dtypes: bool,
) -> dict[str, jax.Array]:
    rule = RULES[kind_named(node.kind).name]
    inputs = {role: values[name] for role, name in node.inputs}
    outputs = {role: graph.tensor(name) for role, name in node.outputs}
    axes = _images(graph, node) if at_conv and _is_xlas_conv(graph, node) else None

    def passed(arrays: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Return what a convolution reads or gives, by way of ``at_conv``."""
        if at_conv is None or axes is None:
            return arrays
        return {role: at_conv(x, but=axes.get(role)) for role, x in arrays.items()}

    inputs = passed(inputs)
    results = None
    has_wide = any(each.dtype == "f32" for each in outputs.values())
    may_narrow = narrow_sums and not (exact_dtypes and has_wide)
    if rule in _GROUPED:
        asked = outputs
        rule = functools.partial(rule, precision=precision, by_lax=narrow_sums)
    elif rule in _CONTRACTIONS:
        rule = functools.partial(rule, precision=precision)
        dtypes: list[DTypeName] = [graph.tensor(name).dtype for _, name in node.inputs]
        narrow = narrow_dtype(*dtypes) if may_narrow else None
        asked = {
            role: replace(tensor, dtype=_sums_dtype(graph, tensor, dtypes, narrow))
            for role, tensor in outputs.items()
        }
        if any(tensor.dtype == "f64" for tensor in asked.values()):
            inputs = {role: x.astype(jnp.float64) for role, x in inputs.items()}
        elif narrow_sums and node.kind.startswith("conv"):
            if accumulator(*dtypes) == "i32":
                results = _sums_of_integers(rule, node, inputs, asked)
            inputs = {role: _without_f8(x) for role, x in inputs.items()}
    else:
        asked = outputs
        if rule is causal_conv1d.backward:
            rule = functools.partial(rule, narrow=may_narrow)
        results = _narrow_step(node, inputs) if may_narrow else None
    if results is None:
        results = rule(node.attributes, inputs, asked)
    results = passed(results)
    is_held = narrow_sums and _is_widened_for_conv(graph, node)

    def rounded(tensor: Tensor, x: jax.Array) -> jax.Array:
        # Only the conversion to f32 is left out: values that were rounded stay rounded.
        is_widened = x.dtype.itemsize == 2 and tensor.dtype == "f32"
        stays = may_narrow and is_widened and tensor.name not in graph.outputs
        x = x if stays else x.astype(jax_dtype(tensor.dtype))
        return jax.lax.optimization_barrier(x) if is_held else x

    return {tensor.name: rounded(tensor, results[r]) for r, tensor in outputs.items()}


def _is_xlas_conv(graph: Graph, node: Node) -> bool:
    """Whether a node is a convolution that XLA does not get as a sum of products."""
    if node.kind in TRIPLES:
        x, w, _ = arrays_in(graph, node)
        return not is_short_sum(x.dims, w.dims)
    if node.kind in ("causal_conv1d", "causal_conv1d_backward"):
        return causal_conv1d.is_convolution(roles_in(graph, node))
    return False


def _images(graph: Graph, node: Node) -> dict[str, int]:
    """Return the axes of a convolution's images that may be divided, by role.

    Those of groups are none: gradients for filters are sums over images, which XLA gets
    wrong if there are groups.
    """
    if node.kind not in TRIPLES:
        return {}
    x, w, _ = arrays_in(graph, node)
    has_groups = x.dims[1] != w.dims[1]
    images, _, output = TRIPLES[node.kind]
    return {} if has_groups else {images: 0, output: 0}


def _narrow_step(
    node: Node, inputs: Mapping[str, jax.Array]
) -> Mapping[str, jax.Array] | None:
    """Add or apply relu in 16 bits, in the form that XLA fuses with its contractions.

    After a convolution or a matmul, XLA recognises bias, residual and relu only in the
    dtype of the operands.
    """
    attributes = node.attributes
    if not isinstance(attributes, PointwiseAttributes):
        return None
    x = inputs["a"]
    if x.dtype.itemsize != 2 or any(y.dtype != x.dtype for y in inputs.values()):
        return None
    if attributes.mode == "add":
        return {"output": x + inputs["b"]}
    if attributes.mode == "relu" and attributes.alpha == 0:
        return {"output": jnp.maximum(x, jnp.zeros((), x.dtype))}
    return None


def _without_f8(x: jax.Array) -> jax.Array:
    """Return an f8 array exactly in bf16: XLA's GPU convolutions take no f8.

    Without the barrier, XLA would see the conversion and ask cuDNN for an f8
    convolution all the same.
    """
    if x.dtype.itemsize != 1 or not _is_float(x):
        return x
    return jax.lax.optimization_barrier(x.astype(jnp.bfloat16))


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_widened_for_conv(graph: Graph, node: Node) -> bool:
    """Whether a node converts f8 for a convolution, which XLA must not see either.

    The convolution may be in another part of the graph; a matmul and its conversions
    are in the same part.
    """
    return (
        getattr(node.attributes, "mode", None) == "identity"
        and any(graph.tensor(name).dtype.startswith("f8") for _, name in node.inputs)
        and all(each.kind != "matmul" for each in graph.nodes)
    )


def _sums_of_integers(
    rule: Rule,
    node: Node,
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, Tensor],
) -> Mapping[str, jax.Array]:
    """Return a convolution of 8-bit integers, computed in f64, which is as exact.

    XLA's GPU convolutions take no u8, and take i8 with restrictions. Sums in f32 are
    exact up to 2^24 only. The barrier hides the conversion from XLA, as for f8.
    """
    with jax.enable_x64(True):
        wide = {
            role: jax.lax.optimization_barrier(x.astype(jnp.float64))
            for role, x in inputs.items()
        }
        asked = {role: replace(tensor, dtype="f64") for role, tensor in outputs.items()}
        results = rule(node.attributes, wide, asked)
        return {role: x.astype(jnp.int32) for role, x in results.items()}


_CONTRACTIONS = (
    contraction.conv_dgrad,
    contraction.conv_fprop,
    contraction.conv_wgrad,
    contraction.matmul,
)


# These read integers too, and give sums in the dtype that they are asked for in.
_GROUPED = (grouped_matmul.backward, grouped_matmul.forward)


def _sums_dtype(
    graph: Graph, tensor: Tensor, dtypes: Sequence[DTypeName], narrow: DTypeName | None
) -> DTypeName:
    if tensor.dtype == "f64":
        return "f64"
    is_asked_for = tensor.name in graph.outputs and tensor.dtype not in dtypes
    return accumulator(*dtypes) if narrow is None or is_asked_for else narrow


def to_logical(tensor: Tensor, stored: jax.Array) -> jax.Array:
    """Reorder a tensor's stored array to its logical axes."""
    inverse = tuple(tensor.order.index(axis) for axis in range(len(tensor.order)))
    return jnp.transpose(stored, inverse)


def to_stored(tensor: Tensor, logical: jax.Array) -> jax.Array:
    """Reorder an array that broadcasts to logical axes so it broadcasts to storage."""
    return jnp.transpose(logical, tensor.order)
