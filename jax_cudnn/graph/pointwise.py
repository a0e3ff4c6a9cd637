# SPDX-License-Identifier: Apache-2.0
"""The nodes around a contraction: `pointwise`, `constant` and `reduction`.

They are described in node_kinds.json. `pointwise` computes its ``mode`` of each
element, in f32 (f64 with an f64 tensor); `constant` is one number; `reduction` is the
sum ("add"), the largest ("max") or the smallest ("min") of the elements along the axes
where its output has 1. That of NaN is NaN.

`select` is a where c else b. A mode "x_grad" is the gradient of mode x: a is the
cotangent of its output, b its input.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.description import describe, table
from jax_cudnn.graph.kinds import NodeKind, Roles, register_kind
from jax_cudnn.graph.spec import Attributes, Node

if TYPE_CHECKING:
    from jax_cudnn.graph.writer import GradientWriter

# Activations, which have a gradient mode of their own.
ACTIVATIONS = (
    "elu",
    "gelu_erf",
    "gelu_tanh",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "softplus",
    "tanh",
)
_ROW = table()["pointwise"]
COMPARISONS: tuple[str, ...] = tuple(_ROW["modes_to_bool"])
# Inputs of each mode.
ARITY = describe("pointwise").arity
# Modes that take an `alpha`: the slope of relu below 0 and the scale of elu there.
_WITH_ALPHA: tuple[str, ...] = tuple(_ROW["modes_with_alpha"])
_ROLES = ("a", "b", "c")


@dataclass(frozen=True, kw_only=True, slots=True)
class PointwiseAttributes(Attributes):
    """The function of a pointwise node; ``alpha`` is 0 where the mode takes none."""

    mode: str
    alpha: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantAttributes(Attributes):
    """The value of a constant node."""

    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionAttributes(Attributes):
    """The function of a reduction node: "add", "max" or "min"."""

    mode: str


def copying(source: str, name: str) -> Node:
    """Return a node that makes a tensor of another one, in its own dtype and order."""
    attributes = PointwiseAttributes(mode="identity")
    return Node.make("pointwise", {"a": source}, {"output": name}, attributes)


def is_max_or_min(node: Node) -> bool:
    """Whether a node takes the largest or the smallest of some elements."""
    attributes = node.attributes
    return isinstance(attributes, ReductionAttributes) and attributes.mode != "add"


def _check_pointwise(roles: Roles, attributes: Attributes) -> None:
    """Raise GraphError unless inputs, alpha and bools are those of the mode."""
    assert isinstance(attributes, PointwiseAttributes)
    mode = attributes.mode
    if attributes.alpha != 0 and mode not in _WITH_ALPHA:
        raise GraphError(f"pointwise: {mode} takes no alpha")
    inputs = [role for role in _ROLES if role in roles]
    if inputs != list(_ROLES[: ARITY[mode]]):
        raise GraphError(
            f"pointwise: {mode} takes {ARITY[mode]} inputs, not {', '.join(inputs)}"
        )
    if (roles["output"].dtype == "bool") != (mode in COMPARISONS):
        raise GraphError(f"pointwise: the output of {mode} is {roles['output'].dtype}")
    for role in inputs:
        wants_bool = mode == "select" and role == "c"
        if (roles[role].dtype == "bool") != wants_bool:
            raise GraphError(f"pointwise: {role} of {mode} is {roles[role].dtype}")


# --- derivatives ----------------------------------------------------------------------


def _vjp_pointwise(
    writer: "GradientWriter", node: Node, cotangent: str, role: str
) -> str | None:
    inputs = dict(node.inputs)
    grad = input_cotangent(writer, node, cotangent, role)
    if grad is None:
        return None
    return writer.reduce_to(grad, writer.forward(inputs[role]).dims)


def _is_first_order(attributes: Attributes) -> bool:
    assert isinstance(attributes, PointwiseAttributes)
    return not attributes.mode.endswith("_grad")


def input_cotangent(
    writer: "GradientWriter", node: Node, ct: str, role: str
) -> str | None:
    """Return the cotangent of an input before it is summed where it was broadcast.

    Each rule is that of JAX's primitive, at 0, ties, infinities and NaN as elsewhere: a
    function that is traced has the gradient that JAX gives it.
    """
    attributes = node.attributes
    assert isinstance(attributes, PointwiseAttributes)
    mode = attributes.mode
    names = dict(node.inputs)
    apply, constant = writer.pointwise, writer.constant

    def use(role: str) -> str:
        return writer.use(names[role])

    def result() -> str:
        return writer.use(dict(node.outputs)["output"])

    if mode in ACTIVATIONS:
        x = names["a"]
        output = dict(node.outputs)["output"]
        # The sign of a relu's output is that of its input: one tensor less to keep.
        # (Not that of relu6 and not with a negative slope.)
        if mode == "relu" and attributes.alpha >= 0 and writer.is_result(output):
            x = output
        return apply(f"{mode}_grad", ct, writer.use(x), alpha=attributes.alpha)
    match mode, role:
        case "add", _:
            # Where it leaves the activation, and not between the operations of one.
            is_term = any(name in writer.graph.inputs for name in names.values())
            return writer.rounded(ct) if is_term else ct
        case ("identity", _) | ("sub", "a"):
            return ct
        case ("neg", _) | ("sub", "b"):
            return apply("neg", ct)
        case "exp", _:
            return apply("mul", ct, result())
        case "log", _:
            return apply("div", ct, use("a"))
        case "sqrt", _:
            return apply("div", apply("mul", ct, constant(0.5)), result())
        case "rsqrt", _:
            slope = apply("mul", apply("div", result(), use("a")), constant(-0.5))
            return apply("mul", ct, slope)
        case "reciprocal", _:
            return apply("neg", apply("mul", ct, apply("mul", result(), result())))
        case "sin", _:
            return apply("mul", ct, apply("cos", use("a")))
        case "cos", _:
            return apply("neg", apply("mul", ct, apply("sin", use("a"))))
        case "tan", _:
            square = apply("mul", result(), result())
            return apply("mul", ct, apply("add", square, constant(1.0)))
        case "erf", _:
            square = apply("mul", use("a"), use("a"))
            slope = apply("mul", ct, constant(2 / math.sqrt(math.pi)))
            return apply("mul", slope, apply("exp", apply("neg", square)))
        case "abs", _:
            # 1 at 0.
            is_positive = apply("ge", use("a"), constant(0.0))
            return apply("select", ct, apply("neg", ct), is_positive)
        case "mul", _:
            return apply("mul", ct, use("b" if role == "a" else "a"))
        case "div", "a":
            return apply("div", ct, use("b"))
        case "div", "b":
            # Squared after the division, so that its own derivative at 0 is infinite.
            rest = apply("reciprocal", use("b"))
            rest = apply("mul", rest, rest)
            return apply("mul", apply("neg", apply("mul", ct, use("a"))), rest)
        case (("max" | "min"), _):
            return _grad_of_max_or_min(writer, mode, use(role), use(_other(role)), ct)
        case "pow", "a":
            lower = apply("pow", use("a"), apply("sub", use("b"), constant(1.0)))
            return apply("mul", ct, apply("mul", use("b"), lower))
        case "pow", "b":
            # The logarithm of 0 is taken to be 0.
            is_zero = apply("eq", use("a"), constant(0.0))
            base = apply("select", constant(1.0), use("a"), is_zero)
            return apply("mul", ct, apply("mul", apply("log", base), result()))
        case "select", ("a" | "b"):
            chosen = (ct, constant(0.0)) if role == "a" else (constant(0.0), ct)
            return apply("select", *chosen, use("c"))
        case _:  # Steps, and what only chooses: the gradient is 0.
            return None


def _other(role: str) -> str:
    return "b" if role == "a" else "a"


def _grad_of_max_or_min(
    writer: "GradientWriter", mode: str, own: str, other: str, ct: str
) -> str:
    """Give all to the one that was taken, and half to each of two equal ones."""
    apply, constant = writer.pointwise, writer.constant
    wins = apply("gt" if mode == "max" else "lt", own, other)
    share = apply("select", constant(0.5), constant(0.0), apply("eq", own, other))
    return apply("mul", ct, apply("select", constant(1.0), share, wins))


def _vjp_reduction(writer: "GradientWriter", node: Node, ct: str, role: str) -> str:
    """Give each term of a sum the cotangent, and equal maxima a share of it."""
    assert isinstance(node.attributes, ReductionAttributes)
    apply, one = writer.pointwise, writer.constant(1.0)
    x = writer.use(dict(node.inputs)[role])
    if not is_max_or_min(node):
        # Ones in the shape of x, whatever is in it: a node has no shape of its own.
        return apply("mul", apply("select", one, one, apply("eq", x, x)), ct)
    largest = writer.use(dict(node.outputs)["output"])
    is_it = apply("select", one, writer.constant(0.0), apply("eq", x, largest))
    count = writer.reduce_to(is_it, writer[ct].dims)
    return apply("mul", is_it, apply("div", ct, count))


def _no_vjp(writer: "GradientWriter", node: Node, cotangent: str, role: str) -> None:
    del writer, node, cotangent, role


POINTWISE = register_kind(
    NodeKind(
        row=describe("pointwise"),
        attributes=PointwiseAttributes,
        check=_check_pointwise,
        vjp=_vjp_pointwise,
        has_vjp=_is_first_order,
    )
)
CONSTANT = register_kind(
    NodeKind(row=describe("constant"), attributes=ConstantAttributes, vjp=_no_vjp)
)
REDUCTION = register_kind(
    NodeKind(
        row=describe("reduction"),
        attributes=ReductionAttributes,
        vjp=_vjp_reduction,
    )
)
