# SPDX-License-Identifier: Apache-2.0
"""Activations as graph nodes: from a name, a function of JAX, or a traced function.

An activation that cannot be written as nodes is handed back, to be applied to the
graph's result.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import GraphWriter
from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.ops.common.score_independent import External
from jax_cudnn.ops.common.tracing import Step, UntraceableError, steps_of

ActivationName = Literal[
    "elu",
    "gelu",
    "gelu_erf",
    "gelu_exact",
    "gelu_tanh",
    "leaky_relu",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "softplus",
    "swish",
    "tanh",
]
# A name, or a function of one array that returns one of the same shape.
Activation = ActivationName | Callable[[jax.Array], jax.Array]


class Form(NamedTuple):
    """The node that computes an activation, and a number that multiplies its result."""

    mode: str
    alpha: float = 0.0
    factor: float | None = None


_NAMED = {
    "elu": Form("elu", 1.0),
    "gelu": Form("gelu_tanh"),
    "gelu_erf": Form("gelu_erf"),  # as graphs call it, and so reports
    "gelu_exact": Form("gelu_erf"),
    "gelu_tanh": Form("gelu_tanh"),
    "leaky_relu": Form("relu", 0.01),
    "relu": Form("relu"),
    "relu6": Form("relu6"),
    "sigmoid": Form("sigmoid"),
    "silu": Form("silu"),
    "softplus": Form("softplus"),
    "swish": Form("silu"),
    "tanh": Form("tanh"),
}
_gelu_exact = functools.partial(jax.nn.gelu, approximate=False)
# What the names stand for.
_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "gelu_erf": _gelu_exact,
    "gelu_exact": _gelu_exact,
    "gelu_tanh": jax.nn.gelu,
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "swish": jax.nn.swish,
    "tanh": jnp.tanh,
}
assert set(_FUNCTIONS) == set(_NAMED)
# JAX's functions, and the node of each when it is called with one argument.
_KNOWN: tuple[tuple[Callable[..., Any], Form], ...] = (
    *((function, _NAMED[name]) for name, function in _FUNCTIONS.items()),
    (jax.nn.selu, Form("elu", 1.6732632423543772, 1.0507009873554805)),
    (jax.nn.tanh, _NAMED["tanh"]),
    (jax.lax.tanh, _NAMED["tanh"]),
    (jax.lax.logistic, _NAMED["sigmoid"]),
)


def known_forms() -> tuple[tuple[Callable[..., Any], Form], ...]:
    """Return JAX's activations, as functions of one array, and the node of each."""
    return _KNOWN


_INSTEAD = "Apply the function to the result instead."


class Unfused(NamedTuple):
    """A function that is applied to the graph's result, and a remark that says why.

    The function takes the result in the dtype of the sums.
    """

    function: Callable[[jax.Array], jax.Array]
    remark: str


class Fused(NamedTuple):
    """An activation as nodes of a graph: one node's form, or several steps."""

    form: Form | None
    steps: tuple[Step, ...] = ()


def resolve(
    op: str, activation: Activation, like: jax.ShapeDtypeStruct
) -> Fused | Unfused:
    """Return an activation of sums of a shape and dtype, for the kernel if possible.

    A function is traced. If it cannot be written with exactly the same meaning, it is
    returned unfused.
    """
    _check(op, activation)
    if isinstance(activation, str):
        return Fused(_NAMED[activation])
    form = _known_form(activation)
    if form is not None:
        return Fused(form)
    try:
        return Fused(None, _steps(op, activation, like))
    except UntraceableError as reason:
        return Unfused(
            activation,
            f"the activation {_label(activation)} follows the kernel as JAX code: "
            f"{reason}",
        )


def write(writer: GraphWriter, activation: Fused, x: str) -> str:
    """Add an activation of the tensor `x` to a graph, and return the result's name."""
    if activation.form is not None:
        return _write_form(writer, activation.form, x)
    return _write_steps(writer, activation.steps, x)


def on_array(op: str, activation: Activation, x: jax.Array) -> jax.Array:
    """Apply an activation to an array, outside of any graph."""
    _check(op, activation)
    function = _FUNCTIONS[activation] if isinstance(activation, str) else activation
    result = function(x)
    check_result(op, result, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return result


def gate_dtype(own: np.dtype, activation: Activation | None, asked: object) -> object:
    """Return the dtype of a gate whose product has one of its own, as it was asked for.

    Of 8 bits, too little would be left of the gate. An activation of integers has
    integers as results only where it is none, relu, or a function of the caller's.
    """
    of_integers = activation is None or activation in ("relu", "relu6")
    is_rounded = not (of_integers or callable(activation))
    if own.itemsize == 1 or (np.issubdtype(own, np.integer) and is_rounded):
        return jnp.float32
    return asked


def is_weak_after(activation: Activation | None, x: jax.Array) -> bool:
    """Whether an activation leaves an array weakly typed that was so before it."""
    if activation is None:
        return True
    function = _FUNCTIONS[activation] if isinstance(activation, str) else activation
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=True)
    try:
        return jax.eval_shape(lambda x: function(x), like).weak_type
    except Exception:
        # One that takes arrays only whose values are known gives those of its own.
        return False


def _check(op: str, activation: object) -> None:
    """Raise ValueError or TypeError unless `activation` is a known name or function."""
    if isinstance(activation, str):
        if activation not in _NAMED:
            raise ValueError(
                f"{op}: activation={activation!r} is not one of "
                f"{', '.join(map(repr, _NAMED))}. A function of one array that returns "
                "one of the same shape works as well."
            )
    elif not callable(activation):
        raise TypeError(
            f"{op}: activation is {type(activation).__name__}. A name or a function is "
            "supported. Pass a name such as 'relu', or a function of one array."
        )


def _known_form(function: Callable[..., Any]) -> Form | None:
    """Return the form of one of JAX's functions, recognised by object identity."""
    if type(function) is functools.partial and function.func is jax.nn.gelu:
        options = (function.args, function.keywords)
        if options == ((), {"approximate": False}):
            return _NAMED["gelu_exact"]
    return next((form for known, form in _KNOWN if function is known), None)


def _write_form(writer: GraphWriter, form: Form, x: str) -> str:
    value = writer.pointwise(form.mode, x, alpha=form.alpha)
    if form.factor is None:
        return value
    factor = writer.constant(form.factor, len(writer[x].dims))
    return writer.pointwise("mul", value, factor)


def _label(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _steps(
    op: str, function: Callable[[jax.Array], jax.Array], like: jax.ShapeDtypeStruct
) -> tuple[Step, ...]:
    """Return the steps of a function, or raise UntraceableError."""
    failure = None
    try:
        # JAX caches traces by the identity of the function, and a callable object may
        # have changed since it was traced. A new lambda is never found in that cache.
        closed, result = jax.make_jaxpr(lambda x: function(x), return_shape=True)(like)
    except Exception as error:
        # The function may still work on a concrete array. If it does not, it raises
        # again where it is applied, and the user sees that error.
        failure = type(error).__name__
    if failure is not None:
        raise UntraceableError(
            f"it raises {failure} for an array that is not known yet"
        )
    check_result(op, result, like)
    return steps_of(closed)


def check_result(op: str, result: Any, like: Any) -> None:
    """Raise ValueError unless a result is one array of floats of the shape of `like`.

    If `like` is complex, the result may be complex too.
    """
    leaves = jax.tree.leaves(result)
    types: list[Any] = [
        x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in leaves
    ]
    is_one = len(leaves) == 1 and leaves[0] is result
    is_complex = jnp.issubdtype(like.dtype, jnp.complexfloating)
    if not (
        is_one
        and jnp.issubdtype(types[0].dtype, jnp.inexact if is_complex else jnp.floating)
        and types[0].shape == like.shape
    ):
        found = ", ".join(map(describe, types)) or "nothing"
        if types and not is_one:
            found = f"{type(result).__name__} ({found})"
        raise ValueError(
            f"{op}: activation returns {found} for {describe(like)}. It must return "
            f"one array of floats of the same shape. {_INSTEAD}"
        )


def _write_steps(writer: GraphWriter, steps: Sequence[Step], x: str) -> str:
    rank = len(writer[x].dims)
    names = [x]
    for step in steps:
        arguments: list[str] = []
        for each in step.arguments:
            # A function of one array reads nothing beside it.
            assert not isinstance(each, External)
            arguments.append(
                names[each] if isinstance(each, int) else writer.constant(each, rank)
            )
        names.append(writer.pointwise(step.mode, *arguments))
    return names[-1]
