# SPDX-License-Identifier: Apache-2.0
"""Rewrites causal convolutions for cuDNN; letters and roles as in node_kinds.json.

There are two ways. cuDNN's functions have a bias always, some numbers of taps, and give
all gradients, those of weights and bias in the dtype of the sums. They are in no graph
API: ffi/plans/causal_conv.cc calls them. The other way is a depthwise convolution, for
other taps, older cuDNNs, and gradients that are to be the same in every run. Of the
gradients it gives x's, and XLA computes those of weights and bias.

No rewrite has segments. So XLA runs a convolution within segments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import (
    CausalConvAttributes,
    ConvAttributes,
    Graph,
    GraphWriter,
    Node,
    Target,
    Tensor,
)
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.rules import accumulator
from jax_cudnn.graph.walks import graph_of
from jax_cudnn.legalize.common.editor import Env, GraphEditor, by_role
from jax_cudnn.legalize.common.legalization import (
    XLA_ADVICE,
    After,
    Arrays,
    Legalization,
    Rewrite,
    around,
)
from jax_cudnn.legalize.products import fusion
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import evaluate, to_logical, to_stored
from jax_cudnn.reference.products.causal_conv1d import argument_gradient

# The names of rewrites.
FUNCTION, CONVOLUTION = "function", "depthwise convolution"
# cudnn_subquadratic_ops.h, cudnnCausalConv1dForward: kernelSize.
TAPS = (*range(2, 9), 16, 32, 64, 128, 256)
# cudnnCausalConv1dNwhForward and Backward refuse more (seen with cuDNN 9.28.1: they
# return CUDNN_STATUS_BAD_PARAM, before they look for a GPU).
_MOST_TAPS_CHANNELS_LAST = 128
_SEGMENTS = "segment_ids: cuDNN's causal convolution has no segments"
# Where the axes (b, s, c) are in an array of a convolution, (n, c, y).
_PLACES = (0, 2, 1)


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a graph of one causal convolution or its gradient."""
    (node,) = graph.nodes
    roles = roles_in(graph, node)
    if "segment_ids" in roles:
        return Legalization(reasons=(_SEGMENTS,), advice=XLA_ADVICE)
    reasons: list[str] = []
    rewrites: list[Rewrite] = []
    taps = roles["w"].dims[0]
    if taps in TAPS:
        rewrites.append(_function(graph).named(FUNCTION))
    else:
        reasons.append(
            f"{taps} taps: cuDNN's function has {TAPS[0]} to 8, "
            f"{', '.join(map(str, TAPS[7:-1]))} or {TAPS[-1]}"
        )
    if node.kind == "causal_conv1d":
        rewrites += _convolution(graph, target)
    elif "grad_x" in roles:
        rewrites += _convolution_of_gradient(graph, target)
    if any(tensor.dtype == "f64" for tensor in graph.tensors):
        reasons.append("f64: cuDNN's convolutions take bf16, f16 and f32")
    return Legalization(
        candidates=tuple(rewrites),
        reasons=() if rewrites else tuple(reasons),
        advice=XLA_ADVICE,
    )


# --- by cuDNN's function --------------------------------------------------------------


def _function(graph: Graph) -> Rewrite:
    editor = GraphEditor.by_role(graph)
    x = editor.tensors["x"]
    taps = editor.tensors["w"].dims[0]
    is_last = x.order != (0, 2, 1) and taps <= _MOST_TAPS_CHANNELS_LAST
    order, order_of_w = ((0, 1, 2), (0, 1)) if is_last else ((0, 2, 1), (1, 0))
    if "bias" not in editor.tensors:
        _put_bias(editor, x)
    if "grad_output" in editor.tensors:
        _put_gradients(editor, x, order_of_w)
    orders = {
        "w": order_of_w,
        "grad_w": order_of_w,
        "bias": (0, 1),
        "grad_bias": (0, 1),
    }
    for name, tensor in list(editor.tensors.items()):
        wanted = orders.get(name, order)
        if tensor.order != wanted:
            editor.reorder(name, wanted)
            editor.notes.append(f"{name} is transposed: the function has one layout")
    return editor.finish()


def _put_bias(editor: GraphEditor, x: Tensor) -> None:
    bias = Tensor(name="bias", dtype=x.dtype, dims=(1, x.dims[2]), order=(0, 1))

    def step(env: Env) -> None:
        env["bias"] = jnp.zeros(bias.dims, jax_dtype(bias.dtype))

    editor.before.append(step)
    editor.put_operand(bias)


def _put_gradients(editor: GraphEditor, x: Tensor, order_of_w: tuple[int, ...]) -> None:
    """Ask for all gradients, those of weights and bias in the dtype of the sums."""
    sums = accumulator(x.dtype)
    models = {
        "grad_x": x,
        "grad_w": replace(editor.tensors["w"], dtype=sums, order=order_of_w),
        "grad_bias": replace(editor.tensors["bias"], dtype=sums, order=(0, 1)),
    }
    for name, model in models.items():
        if name not in editor.tensors:
            editor.put_result(replace(model, name=name))
        elif editor.tensors[name].dtype != model.dtype:
            editor.convert(name, model.dtype)


# --- as a depthwise convolution -------------------------------------------------------


def _convolution(graph: Graph, target: Target | None) -> list[Rewrite]:
    """Return the rewrites that run a convolution, bias and activation in one kernel."""
    (node,) = graph.nodes
    roles = roles_in(graph, node)
    writer = GraphWriter("f32")
    for role in ("x", "w", "bias"):
        if role in roles:
            writer.input(_as_operand(role, roles[role]))
    x = writer["x"]
    value = writer.node(
        "conv_fprop",
        {"x": "x", "w": "w"},
        _window(roles["w"]),
        dims=x.dims,
        order=x.order,
    )
    if "bias" in roles:
        value = writer.pointwise("add", value, "bias")
    attributes = node.attributes
    assert isinstance(attributes, CausalConvAttributes)
    if attributes.activation != "identity":
        value = writer.pointwise(attributes.activation, value)
    output = _as_operand("output", roles["output"])
    written = writer.finish([writer.result(value, output)])

    def given(operands: Sequence[jax.Array]) -> list[jax.Array]:
        arrays = by_role(graph, operands)
        return [_reshaped(written.tensor(n), arrays[n]) for n in written.inputs]

    def results(_: Sequence[jax.Array], made: Sequence[jax.Array]) -> Arrays:
        return tuple(x.reshape(roles["output"].stored_shape) for x in made)

    return _composed(written, given, results, target, "a depthwise convolution")


def _convolution_of_gradient(graph: Graph, target: Target | None) -> list[Rewrite]:
    """Return the rewrites that compute x's gradient by cuDNN and the others by XLA."""
    (node,) = graph.nodes
    roles = roles_in(graph, node)
    writer = GraphWriter("f32")
    cotangent = replace(roles["grad_output"], dtype=roles["x"].dtype)
    grad = writer[writer.input(_as_operand("grad_output", cotangent))]
    writer.input(_as_operand("w", roles["w"]))
    value = writer.node(
        "conv_dgrad",
        {"grad_output": "grad_output", "w": "w"},
        _window(roles["w"]),
        output="grad_x",
        dims=grad.dims,
        order=grad.order,
    )
    gradient = _as_operand("grad_x", roles["grad_x"])
    written = writer.finish([writer.result(value, gradient)])
    others = {role: name for role, name in node.outputs if role != "grad_x"}

    def given(operands: Sequence[jax.Array]) -> list[jax.Array]:
        arrays = by_role(graph, operands)
        logical = {role: to_logical(roles[role], x) for role, x in arrays.items()}
        moved = argument_gradient(node.attributes, logical)
        arrays["grad_output"] = to_stored(
            roles["grad_output"], moved.astype(jax_dtype(cotangent.dtype))
        )
        return [_reshaped(written.tensor(n), arrays[n]) for n in written.inputs]

    def results(operands: Sequence[jax.Array], made: Sequence[jax.Array]) -> Arrays:
        found = {roles["grad_x"].name: made[0].reshape(roles["grad_x"].stored_shape)}
        if others:
            rest = _gradients_of(graph, others)
            found |= dict(zip(rest.outputs, evaluate(rest, operands), strict=True))
        return tuple(found[name] for name in graph.outputs)

    note = "the gradient of a depthwise convolution; those of w and bias are XLA's"
    return _composed(written, given, results, target, note)


def _gradients_of(graph: Graph, outputs: Mapping[str, str]) -> Graph:
    """Return the graph of some of a gradient's results."""
    (node,) = graph.nodes
    some = Node.make(node.kind, dict(node.inputs), outputs, node.attributes)
    names = [name for name in graph.outputs if name in outputs.values()]
    return graph_of(graph.tensors, [some], names, graph.inputs)


def _composed(
    written: Graph,
    given: Callable[[Sequence[jax.Array]], list[jax.Array]],
    results: After,
    target: Target | None,
    note: str,
) -> list[Rewrite]:
    """Return the rewrites that run what was written in place of a graph.

    ``given`` makes its operands, and ``results`` what the graph gives of its results.
    """
    return [
        replace(
            around(rewrite, given, results),
            notes=(f"it is {note}", *rewrite.notes),
            problem=written,
        ).named(CONVOLUTION)
        for rewrite in fusion.legalize(written, target).candidates
    ]


def _as_operand(role: str, tensor: Tensor) -> Tensor:
    """Return a tensor as a convolution has it: (n, c, y), (o, 1, f) or (1, c, 1)."""
    if len(tensor.dims) == 3:
        dims = tuple(tensor.dims[axis] for axis in _PLACES)
        order = tuple(_PLACES[axis] for axis in tensor.order)
    elif role == "bias":
        dims, order = (1, tensor.dims[1], 1), (0, 1, 2)
    else:
        taps, channels = tensor.dims
        dims = (channels, 1, taps)
        order = (0, 1, 2) if tensor.order == (1, 0) else (2, 1, 0)
    return Tensor(name=role, dtype=tensor.dtype, dims=dims, order=order)


def _window(w: Tensor) -> ConvAttributes:
    return ConvAttributes(
        window_strides=(1,),
        padding_low=(w.dims[0] - 1,),
        padding_high=(0,),
        lhs_dilation=(1,),
        rhs_dilation=(1,),
    )


def _reshaped(tensor: Tensor, x: jax.Array) -> jax.Array:
    """Return an array with the axes of size 1 that a convolution's tensor has."""
    return x.reshape(tensor.stored_shape)
