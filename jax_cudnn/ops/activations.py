# SPDX-License-Identifier: Apache-2.0
"""Activations as graph nodes: by name, by JAX's function, or traced from any other."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import GraphWriter

ActivationName = Literal[
    "elu",
    "gelu",
    "gelu_exact",
    "leaky_relu",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "softplus",
    "swish",
    "tanh",
]
# A name, or a function of one array made of pointwise operations of JAX.
Activation = ActivationName | Callable[[jax.Array], jax.Array]

# Node mode and alpha of each name.
_NAMED: dict[str, tuple[str, float]] = {
    "elu": ("elu", 1.0),
    "gelu": ("gelu_tanh", 0.0),
    "gelu_exact": ("gelu_erf", 0.0),
    "leaky_relu": ("relu", 0.01),
    "relu": ("relu", 0.0),
    "relu6": ("relu6", 0.0),
    "sigmoid": ("sigmoid", 0.0),
    "silu": ("silu", 0.0),
    "softplus": ("softplus", 0.0),
    "swish": ("silu", 0.0),
    "tanh": ("tanh", 0.0),
}
# JAX's functions, as they are called with one argument.
_KNOWN: dict[Callable[..., Any], str] = {
    jax.nn.elu: "elu",
    jax.nn.gelu: "gelu",
    jax.nn.leaky_relu: "leaky_relu",
    jax.nn.relu: "relu",
    jax.nn.relu6: "relu6",
    jax.nn.sigmoid: "sigmoid",
    jax.nn.silu: "silu",
    jax.nn.softplus: "softplus",
    jax.nn.tanh: "tanh",
    jnp.tanh: "tanh",
    jax.lax.tanh: "tanh",
    jax.lax.logistic: "sigmoid",
}
# And the other way round, for arrays.
_FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    **{name: function for function, name in _KNOWN.items()},
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "swish": jax.nn.swish,
}
assert set(_FUNCTIONS) == set(_NAMED)


def on_array(op: str, activation: Activation, x: jax.Array) -> jax.Array:
    """Return an activation of an array, which no graph has."""
    _check(op, activation)
    function = _FUNCTIONS[activation] if isinstance(activation, str) else activation
    return function(x)


def _check(op: str, activation: object) -> None:
    """Raise ValueError or TypeError unless it is a known name or a function."""
    if isinstance(activation, str):
        if activation not in _NAMED:
            raise ValueError(
                f"{op}: activation={activation!r} is not one of "
                f"{', '.join(map(repr, _NAMED))}. A function of one array made of "
                "pointwise operations works as well."
            )
    elif not callable(activation):
        raise TypeError(
            f"{op}: activation is {type(activation).__name__}. A name or a function is "
            "supported. Pass a name such as 'relu', or a function of one array."
        )


def apply(writer: GraphWriter, op: str, activation: Activation, x: str) -> str:
    """Add an activation of the tensor `x` to a graph, and return the result's name."""
    _check(op, activation)
    if isinstance(activation, str):
        mode, alpha = _NAMED[activation]
        return writer.pointwise(mode, x, alpha=alpha)
    try:
        name = _KNOWN.get(activation)
    except TypeError:  # not hashable
        name = None
    if name is not None:
        return apply(writer, op, name, x)  # type: ignore[arg-type]
    return _trace(writer, op, activation, x)


def _trace(
    writer: GraphWriter, op: str, function: Callable[[jax.Array], jax.Array], x: str
) -> str:
    """Write the pointwise operations of a function down as nodes."""
    dtype = jnp.float64 if writer.accumulator == "f64" else jnp.float32
    like = jax.ShapeDtypeStruct(writer[x].dims, dtype)
    closed: Any = jax.make_jaxpr(function)(like)
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in closed.out_avals]
    if is_float != [True] or closed.out_avals[0].shape != like.shape:
        given = closed.in_avals[0].str_short()
        found = ", ".join(x.str_short() for x in closed.out_avals) or "nothing"
        raise ValueError(
            f"{op}: activation returns {found} for {given}. It must return one array "
            "of floats of the same shape. Apply the function to the result instead."
        )
    value = _Tracer(writer, op).run(closed.jaxpr, closed.consts, [x])[0]
    if not isinstance(value, str):
        raise ValueError(
            f"{op}: activation is {value} everywhere. A function that depends on its "
            "argument is supported. Pass None for no activation."
        )
    return value


# A traced value: a tensor's name, or a number that is the same everywhere.
_Value = str | float


class _Tracer:
    """Writes a jaxpr of pointwise equations into a graph."""

    def __init__(self, writer: GraphWriter, op: str) -> None:
        self._writer = writer
        self._op = op

    def run(self, jaxpr: Any, consts: Any, args: list[_Value]) -> list[_Value]:
        """Return the jaxpr's results."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, args, strict=True))
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = self._number(const)

        def read(atom: Any) -> _Value:
            return self._number(atom.val) if hasattr(atom, "val") else values[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [read(x) for x in equation.invars])
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _number(self, value: Any) -> float:
        try:
            if np.size(value) == 1:
                return float(np.asarray(value).reshape(()))
        except jax.errors.TracerArrayConversionError:
            pass
        raise ValueError(
            f"{self._op}: activation uses an array that it does not get as its "
            f"argument, {jax.typeof(value).str_short()}. Only numbers that are known "
            "when the program is traced can be part of it. Pass it as scale, bias or "
            "residual, or apply the function to the result."
        )

    def _equation(self, equation: Any, args: list[_Value]) -> list[_Value]:
        name = equation.primitive.name
        inner = next(filter(None, map(equation.params.get, _INNER)), None)
        if inner is not None:
            if name.startswith("custom_"):
                return [self._with_own_derivative(equation, args)]
            is_closed = hasattr(inner, "jaxpr")
            consts = inner.consts if is_closed else ()
            return self.run(inner.jaxpr if is_closed else inner, consts, args)
        if all(isinstance(x, float) for x in args):
            with jax.ensure_compile_time_eval():
                operands = (
                    jnp.asarray(x, variable.aval.dtype)
                    for x, variable in zip(args, equation.invars, strict=True)
                )
                if name == "broadcast_in_dim":
                    return [args[0]]
                result = equation.primitive.bind(*operands, **equation.params)
            return [self._number(result)]
        # A tensor has all of the argument's axes already.
        is_same = name in _SAME and equation.outvars[0].aval == equation.invars[0].aval
        if name not in _WRITE and not is_same:
            raise ValueError(
                f"{self._op}: activation uses {name!r}, which is not a pointwise "
                f"operation that graphs have. They have {', '.join(_TAKEN)}. "
                "Apply the function to the result instead."
            )
        if is_same:
            return [args[0]]
        return [_WRITE[name](_Apply(self._writer, self._op), equation.params, *args)]

    def _with_own_derivative(self, equation: Any, args: list[_Value]) -> _Value:
        """Write a function whose derivative is a rule of its own, if it is JAX's.

        Nodes are differentiated by the rules of nodes, so that any other would have
        another gradient here than where JAX differentiates it.
        """
        avals = [variable.aval for variable in equation.invars]
        for function, write in _OWN_DERIVATIVES.items():
            if write.arity != len(avals):
                continue
            (known,) = jax.make_jaxpr(function)(*avals).eqns
            if str(_call_jaxpr(known)) == str(_call_jaxpr(equation)):
                return write.write(_Apply(self._writer, self._op), *args)
        raise ValueError(
            f"{self._op}: activation uses a function with a derivative rule of its own "
            "(jax.custom_jvp or jax.custom_vjp). A graph cannot keep the rule. Apply "
            "the function to the result instead."
        )


# Where primitives that call a function keep it.
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _call_jaxpr(equation: Any) -> Any:
    found = next(filter(None, map(equation.params.get, _INNER)), None)
    return getattr(found, "jaxpr", found)


class _Apply:
    """Adds a pointwise node over tensors and numbers."""

    def __init__(self, writer: GraphWriter, op: str) -> None:
        self._writer = writer
        self._op = op

    def __call__(self, mode: str, *args: _Value) -> str:
        rank = next(len(self._writer[x].dims) for x in args if isinstance(x, str))
        names = (x if isinstance(x, str) else self._constant(x, rank) for x in args)
        return self._writer.pointwise(mode, *names)

    def _constant(self, value: float, rank: int) -> str:
        if not math.isfinite(value):
            raise ValueError(
                f"{self._op}: activation uses the number {value}. cuDNN takes finite "
                "ones. Replace it, or apply the function to the result instead."
            )
        return self._writer.constant(value, rank)

    def refuse(self, what: str) -> NoReturn:
        """Raise ValueError for what graphs have no node for."""
        raise ValueError(
            f"{self._op}: activation {what}, which cuDNN's nodes cannot. They compute "
            "in floats and differentiate all that they compute. Apply the function to "
            "the result instead."
        )

    def is_bool(self, x: str) -> bool:
        """Whether a tensor is the result of a comparison."""
        return self._writer[x].dtype == "bool"


_Write = Callable[..., _Value]


def _mode(mode: str) -> _Write:
    return lambda apply, _, *args: apply(mode, *args)


# cuDNN wants the tensor that is not broadcast to be the first.
def _either_way(mode: str, swapped: str) -> _Write:
    def write(apply: _Apply, _: object, x: _Value, y: _Value) -> str:
        return apply(swapped, y, x) if isinstance(x, float) else apply(mode, x, y)

    return write


def _integer_pow(apply: _Apply, params: Mapping[str, Any], x: str) -> str:
    exponent = params["y"]
    result, power, rest = None, x, abs(exponent)
    while rest:
        if rest & 1:
            result = power if result is None else apply("mul", result, power)
        rest >>= 1
        if rest:
            power = apply("mul", power, power)
    if result is None:
        return apply("add", apply("mul", x, 0.0), 1.0)
    return apply("reciprocal", result) if exponent < 0 else result


def _expm1(apply: _Apply, _: object, x: str) -> str:
    # exp(x) - 1 as tanh(x/2) (exp(x) + 1), which keeps its digits near 0.
    half = apply("tanh", apply("mul", x, 0.5))
    return apply("mul", half, apply("add", apply("exp", x), 1.0))


def _sub(apply: _Apply, _: object, x: _Value, y: _Value) -> str:
    return (
        apply("add", apply("neg", y), x) if isinstance(x, float) else apply("sub", x, y)
    )


def _div(apply: _Apply, _: object, x: _Value, y: _Value) -> str:
    if isinstance(x, float):
        return apply("mul", apply("reciprocal", y), x)
    return apply("div", x, y)


def _sign(apply: _Apply, _: object, x: str) -> str:
    negative = apply("select", -1.0, apply("mul", x, 0.0), apply("lt", x, 0.0))
    return apply("select", 1.0, negative, apply("gt", x, 0.0))


def _clamp(apply: _Apply, _: object, low: _Value, x: str, high: _Value) -> str:
    return apply("min", apply("max", x, low), high)


def _select_n(apply: _Apply, _: object, which: _Value, *cases: _Value) -> _Value:
    if isinstance(which, float):
        return cases[int(which)]
    return apply("select", cases[1], cases[0], which)


def _convert(apply: _Apply, params: Mapping[str, Any], x: str) -> str:
    """Convert between comparisons and floats; floats stay in the sums' dtype."""
    dtype = params["new_dtype"]
    if apply.is_bool(x):
        return x if dtype == jnp.bool_ else apply("select", 1.0, 0.0, x)
    if dtype == jnp.bool_:
        return apply("ne", x, 0.0)
    if not jnp.issubdtype(dtype, jnp.floating):
        apply.refuse(f"converts its argument to {dtype}")
    return x


def _logical(apply: _Apply, x: _Value) -> _Value:
    """Return a comparison as 1 or 0; there are no integers that it could be else."""
    return apply("select", 1.0, 0.0, x) if isinstance(x, str) else x


def _both(mode: str) -> _Write:
    """Return how two comparisons combine: 1 or 0 by that mode, compared with 1/2."""

    def write(apply: _Apply, _: object, x: _Value, y: _Value) -> str:
        first, second = _logical(apply, x), _logical(apply, y)
        if isinstance(first, float):
            first, second = second, first
        return apply("gt", apply(mode, first, second), 0.5)

    return write


def _not(apply: _Apply, _: object, x: _Value) -> str:
    return apply("lt", _logical(apply, x), 0.5)


def _stop_gradient(apply: _Apply, _: object, x: str) -> NoReturn:
    del x
    apply.refuse("stops the gradient")


class _Known(NamedTuple):
    """How one of JAX's functions is written, and how many arguments it has."""

    arity: int
    write: Callable[..., _Value]


def _logaddexp(apply: _Apply, x: _Value, y: _Value) -> str:
    if isinstance(x, float):
        x, y = y, x
    if y == 0.0:
        return apply("softplus", x)
    difference = _sub(apply, None, x, y)
    return apply("add", apply("softplus", difference), y)


# JAX's functions that have a derivative rule of their own.
_OWN_DERIVATIVES: dict[Callable[..., Any], _Known] = {
    jax.nn.relu: _Known(1, lambda apply, x: apply("relu", x)),
    jax.nn.relu6: _Known(1, lambda apply, x: apply("relu6", x)),
    jnp.logaddexp: _Known(2, _logaddexp),
}

# Primitives that change nothing about a tensor, where its type is the same after them.
_SAME = ("broadcast_in_dim", "copy", "copy_p", "reshape")
_WRITE: dict[str, _Write] = {
    "abs": _mode("abs"),
    "add": _either_way("add", "add"),
    "and": _both("mul"),
    "ceil": _mode("ceil"),
    "clamp": _clamp,
    "convert_element_type": _convert,
    "cos": _mode("cos"),
    "div": _div,
    "eq": _either_way("eq", "eq"),
    "erf": _mode("erf"),
    "erfc": lambda apply, _, x: apply("add", apply("neg", apply("erf", x)), 1.0),
    "exp": _mode("exp"),
    "exp2": lambda apply, _, x: apply("exp", apply("mul", x, float(np.log(2)))),
    "expm1": _expm1,
    "floor": _mode("floor"),
    "ge": _either_way("ge", "le"),
    "gt": _either_way("gt", "lt"),
    "integer_pow": _integer_pow,
    "le": _either_way("le", "ge"),
    "log": _mode("log"),
    "log1p": lambda apply, _, x: apply("log", apply("add", x, 1.0)),
    "logistic": _mode("sigmoid"),
    "lt": _either_way("lt", "gt"),
    "max": _either_way("max", "max"),
    "min": _either_way("min", "min"),
    "mul": _either_way("mul", "mul"),
    "ne": _either_way("ne", "ne"),
    "neg": _mode("neg"),
    "not": _not,
    "or": _both("max"),
    "pow": _mode("pow"),
    "rsqrt": _mode("rsqrt"),
    "select_n": _select_n,
    "sign": _sign,
    "sin": _mode("sin"),
    "sqrt": _mode("sqrt"),
    "stop_gradient": _stop_gradient,
    "square": lambda apply, _, x: apply("mul", x, x),
    "sub": _sub,
    "tan": _mode("tan"),
    "tanh": _mode("tanh"),
}
# Those that a message names: a graph cannot stop the gradient, and says so itself.
_TAKEN = sorted(_WRITE.keys() - {"stop_gradient"})
