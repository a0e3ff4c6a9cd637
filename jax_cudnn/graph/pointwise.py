# SPDX-License-Identifier: Apache-2.0
"""The nodes around a contraction: `pointwise`, `constant` and `reduction`.

==========  ==================  =======================================================
kind        roles               meaning
==========  ==================  =======================================================
pointwise   a, b, c -> output   ``mode`` of each element; dims are broadcast; computed
                                in f32 (f64 with an f64 tensor)
constant    -> output           ``value``; all dims are 1, f32 or f64
reduction   input -> output     ``mode`` ("add") over the axes where output has 1
==========  ==================  =======================================================

`select` is a where c else b. A mode "x_grad" is the gradient of mode x: a is the
cotangent of its output, b its input.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.kinds import NodeKind, Roles, register_kind
from jax_cudnn.graph.rules import broadcast, broadcasts_to
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
COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
_UNARY = (
    *ACTIVATIONS,
    *("abs", "ceil", "cos", "erf", "exp", "floor", "identity", "log", "neg"),
    *("reciprocal", "rsqrt", "sin", "sqrt", "tan"),
)
_BINARY = (
    *(f"{name}_grad" for name in ACTIVATIONS),
    *COMPARISONS,
    *("add", "div", "max", "min", "mul", "pow", "sub"),
)
# Inputs of each mode.
ARITY = {
    **dict.fromkeys(_UNARY, 1),
    **dict.fromkeys(_BINARY, 2),
    "select": 3,
}
# Modes that take an `alpha`: the slope of relu below 0 and the scale of elu there.
_WITH_ALPHA = ("elu", "elu_grad", "relu", "relu_grad")
_ROLES = ("a", "b", "c")


@dataclass(frozen=True, kw_only=True, slots=True)
class PointwiseAttributes(Attributes):
    """What a pointwise node computes; ``alpha`` is 0 where the mode takes none."""

    mode: str
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ARITY:
            raise GraphError(f"pointwise: mode {self.mode!r} is not a known one")
        if not math.isfinite(self.alpha):
            raise GraphError(f"pointwise: alpha {self.alpha} is not finite")
        if self.alpha != 0 and self.mode not in _WITH_ALPHA:
            raise GraphError(f"pointwise: {self.mode} takes no alpha")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantAttributes(Attributes):
    """The value of a constant node."""

    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise GraphError(f"constant: value {self.value} is not finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionAttributes(Attributes):
    """What a reduction node computes."""

    mode: str

    def __post_init__(self) -> None:
        if self.mode != "add":
            raise GraphError(f"reduction: mode {self.mode!r} is not a known one")


# --- shape rules ----------------------------------------------------------------------


def _check_pointwise(roles: Roles, attributes: Attributes) -> None:
    assert isinstance(attributes, PointwiseAttributes)
    inputs = [role for role in _ROLES if role in roles]
    if inputs != list(_ROLES[: ARITY[attributes.mode]]):
        raise GraphError(
            f"pointwise: {attributes.mode} takes {ARITY[attributes.mode]} inputs, "
            f"not {', '.join(inputs)}"
        )
    dims = roles["output"].dims
    for role in inputs:
        if not broadcasts_to(roles[role].dims, dims):
            raise GraphError(
                f"pointwise: {role} dims {list(roles[role].dims)} do not broadcast to "
                f"{list(dims)}"
            )
    full = broadcast(*(roles[role].dims for role in inputs))
    if full != dims:
        raise GraphError(
            f"pointwise: output dims {list(dims)} are not those of the inputs, "
            f"{list(full)}"
        )
    makes_bool = attributes.mode in COMPARISONS
    if (roles["output"].dtype == "bool") != makes_bool:
        raise GraphError(
            f"pointwise: the output of {attributes.mode} is {roles['output'].dtype}"
        )
    for role in inputs:
        wants_bool = attributes.mode == "select" and role == "c"
        if (roles[role].dtype == "bool") != wants_bool:
            raise GraphError(
                f"pointwise: {role} of {attributes.mode} is {roles[role].dtype}"
            )


def _check_constant(roles: Roles, attributes: Attributes) -> None:
    del attributes
    output = roles["output"]
    if any(dim != 1 for dim in output.dims):
        raise GraphError(f"constant: dims {list(output.dims)} are not all 1")
    if output.dtype not in ("f32", "f64"):
        raise GraphError(f"constant: output is {output.dtype}, not f32 or f64")


def _check_reduction(roles: Roles, attributes: Attributes) -> None:
    del attributes
    dims, reduced = roles["input"].dims, roles["output"].dims
    if not broadcasts_to(reduced, dims):
        raise GraphError(
            f"reduction: output dims {list(reduced)} are not those of the input, "
            f"{list(dims)}, with some set to 1"
        )
    for role in ("input", "output"):
        if roles[role].dtype == "bool":
            raise GraphError(f"reduction: {role} is bool")


# --- derivatives ----------------------------------------------------------------------


def _vjp_pointwise(
    writer: "GradientWriter", node: Node, cotangent: str, role: str
) -> str | None:
    attributes = node.attributes
    assert isinstance(attributes, PointwiseAttributes)
    inputs = dict(node.inputs)
    grad = _grad_full(writer, attributes, node, cotangent, role)
    if grad is None:
        return None
    return writer.reduce_to(grad, writer.forward(inputs[role]).dims)


def _is_first_order(attributes: Attributes) -> bool:
    assert isinstance(attributes, PointwiseAttributes)
    return not attributes.mode.endswith("_grad")


def _grad_full(
    writer: "GradientWriter",
    attributes: PointwiseAttributes,
    node: Node,
    ct: str,
    role: str,
) -> str | None:
    """Return the cotangent of an input before it is summed where it was broadcast.

    Each rule is that of JAX's primitive, at 0, ties, infinities and NaN as elsewhere: a
    function that is traced has the gradient that JAX gives it.
    """
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
            return _grad_of_extreme(writer, mode, use(role), use(_other(role)), ct)
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


def _grad_of_extreme(
    writer: "GradientWriter", mode: str, own: str, other: str, ct: str
) -> str:
    """Give all to the one that was taken, and half to each of two equal ones."""
    apply, constant = writer.pointwise, writer.constant
    wins = apply("gt" if mode == "max" else "lt", own, other)
    share = apply("select", constant(0.5), constant(0.0), apply("eq", own, other))
    return apply("mul", ct, apply("select", constant(1.0), share, wins))


def _no_vjp(writer: "GradientWriter", node: Node, cotangent: str, role: str) -> None:
    del writer, node, cotangent, role


POINTWISE = register_kind(
    NodeKind(
        name="pointwise",
        attributes=PointwiseAttributes,
        required_inputs=("a",),
        optional_inputs=("b", "c"),
        required_outputs=("output",),
        check=_check_pointwise,
        vjp=_vjp_pointwise,
        has_vjp=_is_first_order,
    )
)

CONSTANT = register_kind(
    NodeKind(
        name="constant",
        attributes=ConstantAttributes,
        required_inputs=(),
        required_outputs=("output",),
        check=_check_constant,
        vjp=_no_vjp,
    )
)

REDUCTION = register_kind(
    NodeKind(
        name="reduction",
        attributes=ReductionAttributes,
        required_inputs=("input",),
        required_outputs=("output",),
        check=_check_reduction,
    )
)
