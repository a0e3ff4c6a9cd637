# SPDX-License-Identifier: Apache-2.0
"""Rewrites pointwise nodes that cuDNN computes wrongly or inaccurately.

All of it was found on an H200 or an H100 with cuDNN 9.19
(tests/products/gpu/test_launch_matrix.py and tests/products/gpu/test_fusion_numerics.py
launch what is written here):

* The slope of a leaky relu comes out wrong by a fifth, as if it were a power of two.
* An elu is exp(x) - 1, which is 0 for a small x.
* A softplus is log(1 + exp(x)), which is 0 below -17.
* A maximum or minimum with NaN is the other operand.
* The relu6 of a product, with nothing added to it, is a relu: it has no upper bound.
* A quotient is 0 where the divisor is above 2^126, as that of CUDA's fast division.
* The engines for a convolution, a bias and one of five activations (eng0, eng52, eng53
  and others) are listed, and build, where f32 sums with the bias are a result too. They
  cannot be launched then. An identity in between keeps these engines away.
* One of these, eng0, has a tanh that is NaN above 88 and 0 for a small x.
* A sigmoid is exact to the last digit, and slow: a product takes nearly twice as long
  with one in its kernel, and so it does with the gradients of sigmoid, silu and
  softplus. It is similar for a reciprocal. With an exponential and a quotient they take
  a fraction (docs/internals/measured/epilogues.md). Where nothing is
  multiplied, memory is what takes the time, and these stay cuDNN's.
"""

from collections.abc import Callable, Collection

from jax_cudnn.graph import Graph, GraphWriter, Node, is_anchor
from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.graph.walks import readers


def rewrite_pointwise(graph: Graph) -> Graph:
    """Return the graph with such nodes written as several; names of results stay."""
    is_within = any(map(is_anchor, graph.nodes))
    return _rewritten(graph, _EVERY if is_within else _WRITE)


def _rewritten(graph: Graph, modes: Collection[str]) -> Graph:
    if not any(_is_rewritten(graph, node, modes) for node in graph.nodes):
        return graph
    is_double = any(tensor.dtype == "f64" for tensor in graph.tensors)
    writer = GraphWriter("f64" if is_double else "f32", prefix="legal_")
    names = {tensor.name: writer.input(tensor) for tensor in graph.input_tensors}
    for node in graph.nodes:
        inputs = {role: names[name] for role, name in node.inputs}
        ((_, made),) = node.outputs
        tensor = graph.tensor(made)
        if _is_rewritten(graph, node, modes):
            assert isinstance(node.attributes, PointwiseAttributes)
            operands = [inputs[role] for role in sorted(inputs)]
            if _needs_shield(graph, node):
                operands[-1] = writer.pointwise("identity", operands[-1])
            value = _write(writer, node.attributes, operands)
        else:
            value = writer.copy(node, tensor, names)
        names[made] = writer.result(value, tensor)
    return writer.finish(graph.outputs)


def _is_rewritten(graph: Graph, node: Node, modes: Collection[str]) -> bool:
    attributes = node.attributes
    if not isinstance(attributes, PointwiseAttributes):
        return False
    is_leaky = attributes.mode.startswith("relu") and attributes.alpha != 0
    return is_leaky or attributes.mode in modes or _needs_shield(graph, node)


def _write(
    writer: GraphWriter, attributes: PointwiseAttributes, names: list[str]
) -> str:
    mode, alpha = attributes.mode, attributes.alpha
    if mode in ("relu", "relu_grad") and alpha != 0:
        return _leaky_relu(_PointwiseWriter(writer, names[-1]), names, alpha)
    if mode in _EVERY:
        return _EVERY[mode](_PointwiseWriter(writer, names[-1]), names, alpha)
    return writer.pointwise(mode, *names, alpha=alpha)


# --- what is written in the place of a mode -------------------------------------------


class _PointwiseWriter:
    """Adds pointwise nodes over tensors and numbers."""

    def __init__(self, writer: GraphWriter, like: str) -> None:
        self._writer = writer
        self._order = writer[like].order

    def __call__(self, mode: str, *operands: str | float) -> str:
        return self._writer.pointwise(mode, *map(self._name, operands))

    def _name(self, operand: str | float) -> str:
        if isinstance(operand, str):
            return operand
        return self._writer.constant(operand, order=self._order)

    def is_number(self, name: str) -> bool:
        """Whether a tensor is a constant, and so finite."""
        return self._writer.is_constant(name)


_Write = Callable[[_PointwiseWriter, list[str], float], str]


def _leaky_relu(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    """The relu of x with a slope, or the gradient through it: names end with x."""
    x = names[-1]
    if len(names) == 1:
        slope = apply("mul", apply("relu", apply("neg", x)), alpha)
        return apply("sub", apply("relu", x), slope)
    return apply("mul", names[0], apply("select", 1.0, alpha, apply("ge", x, 0.0)))


def _elu(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    """With exp(y) - 1 as tanh(y/2) (exp(y) + 1), which keeps the digits of a small y.

    y is the lower half of x: comparing and selecting would take longer.
    """
    (x,) = names
    y = _lower_half(apply, x)
    half = apply("tanh", apply("mul", y, 0.5))
    below = apply("mul", half, apply("add", apply("exp", y), 1.0))
    if alpha != 1:
        below = apply("mul", below, alpha)
    return apply("add", apply("relu", x), below)


def _elu_grad(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    cotangent, x = names
    if alpha == 1:
        return apply("mul", cotangent, apply("exp", _lower_half(apply, x)))
    below = apply("mul", cotangent, apply("mul", apply("exp", x), alpha))
    return apply("select", cotangent, below, apply("gt", x, 0.0))


def _lower_half(apply: _PointwiseWriter, x: str) -> str:
    """The minimum of x and 0, and NaN where x is."""
    return apply("neg", apply("relu", apply("neg", x)))


# Below it, e = exp(x) gives softplus as e - e^2/2 to 6e-6, closer than log(1 + e) does.
_SOFTPLUS_TAIL = -5.5


def _softplus(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    del alpha
    (x,) = names
    power = apply("exp", x)
    tail = apply("mul", power, apply("add", apply("mul", power, -0.5), 1.0))
    is_tail = apply("lt", x, _SOFTPLUS_TAIL)
    return apply("select", tail, apply("softplus", x), is_tail)


def _sigmoid_of(apply: _PointwiseWriter, x: str) -> str:
    return apply("div", 1.0, apply("add", apply("exp", apply("neg", x)), 1.0))


def _sigmoid(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    del alpha
    (x,) = names
    return _sigmoid_of(apply, x)


def _sigmoid_grad(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    """With e/(1 + e)^2 for e = exp(-|x|), which keeps the digits of both tails."""
    del alpha
    cotangent, x = names
    power = apply("exp", apply("neg", apply("abs", x)))
    more = apply("add", power, 1.0)
    return apply("mul", cotangent, apply("div", power, apply("mul", more, more)))


def _silu_grad(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    """With s + s (1 - s) x, in an order in which the largest x is not NaN."""
    del alpha
    cotangent, x = names
    s = _sigmoid_of(apply, x)
    rest = apply("mul", apply("mul", s, apply("sub", 1.0, s)), x)
    return apply("mul", cotangent, apply("add", s, rest))


def _softplus_grad(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    del alpha
    cotangent, x = names
    return apply("mul", cotangent, _sigmoid_of(apply, x))


def _relu6(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    del alpha
    positive = apply("relu", *names)
    return apply("select", 6.0, positive, apply("gt", positive, 6.0))


def _max_or_min(comparison: str) -> _Write:
    """Return how the operand for which `comparison` holds is taken; NaN is kept."""

    def write(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
        del alpha
        x, y = names
        if apply.is_number(x):
            x, y = y, x
        # A comparison with NaN is false.
        opposite = "lt" if comparison == "gt" else "gt"
        if apply.is_number(y):
            return apply("select", y, x, apply(opposite, x, y))
        # Neither is the larger one where one of them is NaN, as their sum then is.
        rest = apply("select", y, apply("add", x, y), apply(opposite, x, y))
        return apply("select", x, rest, apply(f"{comparison[0]}e", x, y))

    return write


# A divisor above the first is scaled down by the second, the dividend with it.
_LARGE_DIVISOR = 2.0**96
_SMALL = 2.0**-64


def _div(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    del alpha
    x, y = names
    if apply.is_number(y):
        return apply("div", x, y)
    unit = _unit(apply, y)
    return apply("div", apply("mul", x, unit), apply("mul", y, unit))


def _reciprocal(apply: _PointwiseWriter, names: list[str], alpha: float) -> str:
    del alpha
    (y,) = names
    unit = _unit(apply, y)
    return apply("div", unit, apply("mul", y, unit))


def _unit(apply: _PointwiseWriter, divisor: str) -> str:
    """Return by what to scale a divisor, and what is divided."""
    is_large = apply("gt", apply("abs", divisor), _LARGE_DIVISOR)
    return apply("select", _SMALL, 1.0, is_large)


_WRITE: dict[str, _Write] = {
    "div": _div,
    "elu": _elu,
    "elu_grad": _elu_grad,
    "max": _max_or_min("gt"),
    "min": _max_or_min("lt"),
    "relu6": _relu6,
    "softplus": _softplus,
}
# Right, and slow within the kernel of a contraction.
_FASTER: dict[str, _Write] = {
    "reciprocal": _reciprocal,
    "sigmoid": _sigmoid,
    "sigmoid_grad": _sigmoid_grad,
    "silu_grad": _silu_grad,
    "softplus_grad": _softplus_grad,
}
_EVERY = _WRITE | _FASTER


# --- engines that are kept away -------------------------------------------------------

# The activations that such an engine has, but for elu and sigmoid, which are written as
# others. A relu6 is written as a relu and its bound.
_FUSED = ("relu", "relu6", "tanh")


def _needs_shield(graph: Graph, node: Node) -> bool:
    """Whether an identity has to stand before a convolution's activation."""
    attributes = node.attributes
    if not isinstance(attributes, PointwiseAttributes) or attributes.mode not in _FUSED:
        return False
    if not any(each.kind.startswith("conv") for each in graph.nodes):
        return False
    argument = dict(node.inputs)["a"]
    # Where others read the argument, among them a copy of it that is a result, no such
    # engine is listed, and an identity would do harm: cuDNN 9.19 computes two of one
    # tensor wrongly in 16 bits, and one beside other readers in f32.
    is_fused = attributes.mode == "tanh" or argument in graph.outputs
    return is_fused and readers(graph.nodes, argument) == [node]
