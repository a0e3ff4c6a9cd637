# SPDX-License-Identifier: Apache-2.0
"""Writes a user's function as pointwise steps of a graph, if it consists of such steps.

Each equation of the function's jaxpr must be written with its exact meaning, including
its derivatives and NaN. If one cannot be, the function as a whole is not written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.lowering import (
    CustomCall,
    equation_place,
    gathered,
    is_known_array,
    same_function,
)
from jax_cudnn.ops.common.score_independent import (
    External,
    ScoreIndependent,
    evaluate,
    indices,
)

Function = Callable[[jax.Array], jax.Array]


class UntraceableError(Exception):
    """Says what a function does that a graph cannot hold: "it uses 'cumsum'"."""


class Step(NamedTuple):
    """A pointwise node over earlier values and numbers.

    An int is the position of a value: 0 is the function's argument, and i the result of
    the i-th step. A float is a number that is the same for all elements. Of a function
    of scores, an argument may be a value that does not depend on the score.
    """

    mode: str
    arguments: tuple[int | float | External, ...]


# cuDNN plans graphs of up to 250 operations, but the time for planning grows with the
# square of their number: 80 operations take 13 seconds (9.27, for an H200).
MOST_STEPS = 64


def steps_of(closed: Any) -> tuple[Step, ...]:
    """Return the steps of a traced function of one array of floats.

    The last step gives the function's result. Without any step, the result is the
    argument.

    Raises:
      UntraceableError: not every equation can be written with its exact meaning.
    """
    (dtype,) = (aval.dtype for aval in closed.in_avals)
    tracer = _Tracer(dtype)
    (result,) = tracer.run(closed.jaxpr, closed.consts, [StepResult(0)])
    if not isinstance(result, StepResult):
        raise UntraceableError("it does not depend on its argument")
    # Steps after the result, if there are any, are unused.
    steps = tracer.steps[: result.position]
    check_count(steps)
    return tuple(steps)


def steps_of_scores(closed: Any, numbers: Sequence[int | jax.Array]) -> list[Step]:
    """Return the steps of a traced function of a score and its four indices.

    The last step gives the function's result. ``numbers`` are the sizes of (b, h, s,
    t), or the indices along these.

    Raises:
      UntraceableError: not every equation that depends on the score can be written.
    """
    tracer = _Tracer(closed.in_avals[0].dtype, takes_outside=True)
    args = [StepResult(0), *indices(numbers)]
    (result,) = tracer.run(closed.jaxpr, closed.consts, args)
    if not isinstance(result, StepResult):
        raise UntraceableError("it does not depend on the score")
    return tracer.steps[: result.position]


def write_equation(
    jaxpr: Any,
    equation: Any,
    args: Sequence["_Value"],
    steps: list[Step],
    dtype: np.dtype,
) -> "_Value":
    """Write an equation of one result as steps, after those that there are.

    Its operands are what earlier steps made, numbers, and values beside them, none of
    which are truth values. Its floats are all of that dtype.

    Raises:
      UntraceableError: it cannot be written with its exact meaning. Steps that were
        added are of no use then.
    """
    tracer = _Tracer(dtype, steps=steps)
    (result,) = _Equation(tracer, jaxpr, (equation,), list(args)).results()
    return result


def check_count(steps: Sequence[Any]) -> None:
    """Raise UntraceableError if there are more steps than a kernel is given."""
    if len(steps) > MOST_STEPS:
        raise UntraceableError(
            f"it has {len(steps)} operations, and a kernel is given {MOST_STEPS}"
        )


class StepResult(NamedTuple):
    """A value of the argument's shape: floats, or truth values.

    Its position is 0 for the argument, and i for what the i-th step made.
    """

    position: int
    is_bool: bool = False


# The values of a jaxpr's variables: tensors, or known numbers of rank 0, in their own
# dtype, that are the same for all elements. In a function of scores, also what does not
# depend on the score.
_Value = StepResult | np.ndarray | External


class _Tracer:
    """Writes a jaxpr as steps."""

    def __init__(
        self,
        dtype: np.dtype,
        *,
        takes_outside: bool = False,
        steps: list[Step] | None = None,
    ) -> None:
        self.steps: list[Step] = [] if steps is None else steps
        self.dtype = dtype
        self.takes_outside = takes_outside

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: list[_Value],
        around: tuple[Any, ...] = (),
    ) -> list[Any]:
        """Return the results of a jaxpr that is nested in the equations `around`."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, args, strict=True))
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = self._captured(const, variable.aval)

        def read(atom: Any) -> _Value:
            is_literal = hasattr(atom, "val")
            return _number(atom.val, atom.aval) if is_literal else values[atom]

        for equation in jaxpr.eqns:
            operands = [read(x) for x in equation.invars]
            written = _Equation(self, jaxpr, (equation, *around), operands)
            values |= dict(zip(equation.outvars, written.results(), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _captured(self, value: Any, aval: Any) -> _Value:
        if self.takes_outside and not (is_known_array(value, aval) and not aval.shape):
            # It is read at indices, where JAX asks how the result is sharded.
            return ScoreIndependent(array=gathered(jnp.asarray(value)))
        return _number(value, aval)

    def emit(self, mode: str, *arguments: int | float | External) -> int:
        """Add a step, and return its position."""
        self.steps.append(Step(mode, arguments))
        return len(self.steps)

    def holds(self, aval: Any) -> bool:
        """Whether an activation's nodes can have values of that dtype."""
        return aval.dtype in (self.dtype, np.bool_)


def _number(value: Any, aval: Any) -> np.ndarray:
    """Return a captured value as a number of rank 0, in its own dtype."""
    text = aval.str_short()
    if not is_known_array(value, aval):
        raise UntraceableError(
            f"it uses {text}, a value besides its argument that is not known yet"
        )
    if not (jnp.issubdtype(aval.dtype, np.number) or aval.dtype == np.bool_):
        raise UntraceableError(f"it uses {text}, which is no number")
    if np.size(value) != 1:
        raise UntraceableError(f"it uses an array besides its argument, {text}")
    return np.asarray(value).reshape(()).astype(aval.dtype)


class _Equation:
    """Writes one equation as steps."""

    def __init__(
        self,
        tracer: _Tracer,
        jaxpr: Any,
        equations: tuple[Any, ...],
        args: list[_Value],
    ) -> None:
        self._tracer = tracer
        self._jaxpr = jaxpr
        # The equation itself and the equations it is nested in, from the inside out.
        self._equations = equations
        self._equation = equation = equations[0]
        self._name: str = equation.primitive.name
        self._args = args
        self.dtype = tracer.dtype
        self.params: Mapping[str, Any] = equation.params

    def results(self) -> Sequence[_Value]:
        """Write the equation, and return its results."""
        is_known = not any(isinstance(x, StepResult) for x in self._args)
        if self._tracer.takes_outside and is_known and not self._is_of_numbers():
            args: list[Any] = self._args
            return evaluate(self._jaxpr, self._equation, args)
        if self._name in _CALLS or (is_known and self._name == "custom_jvp_call"):
            inner = next(filter(None, map(self.params.get, ("jaxpr", "call_jaxpr"))))
            is_closed = hasattr(inner, "jaxpr")
            return self._tracer.run(
                inner.jaxpr if is_closed else inner,
                inner.consts if is_closed else (),
                self._args,
                self._equations,
            )
        if self._name == "custom_jvp_call":
            return [self._with_own_derivative()]
        if self._name not in (*_WRITE, *_RESHAPE):
            self.refuse(f"uses {self._name!r}, which graphs have no node for")
        # Such parameters ask for another computation than the plain one.
        if any(self.params.get(name) is not None for name in _PLAIN):
            self.refuse(f"uses {self._name!r} with options")
        (output,) = (variable.aval for variable in self._equation.outvars)
        if is_known:
            return [self._folded(output)]
        if not self._tracer.holds(output):
            self.refuse(f"computes in {output.dtype}")
        if self._name in _RESHAPE:
            if output.shape != self._equation.invars[0].aval.shape:
                self.refuse("changes the shape of an array")
            return self._args
        takes_bool = self._name in _OF_BOOLS
        if not takes_bool and not all(map(self._is_float, self._equation.invars)):
            self.refuse(f"uses {self._name!r} of values that are not floats")
        written = _WRITE[self._name](self, *self._args)
        if isinstance(written, int):
            written = StepResult(written, is_bool=output.dtype == np.bool_)
        return [written]

    def _is_of_numbers(self) -> bool:
        """Whether it can be computed once, as a number."""
        is_known = all(isinstance(x, np.ndarray) for x in self._args)
        return is_known and bool(self._args) and self._name in _WRITE

    def __call__(self, mode: str, *args: _Value | int | float) -> int:
        """Add a step over values and numbers."""
        return self._tracer.emit(mode, *map(self._argument, args))

    def refuse(self, what: str) -> NoReturn:
        """Raise UntraceableError, with the location in the user's code."""
        place = next(filter(None, map(equation_place, self._equations)), "")
        raise UntraceableError(f"it {what}" + (f" ({place})" if place else ""))

    def _is_float(self, atom: Any) -> bool:
        return jnp.issubdtype(atom.aval.dtype, jnp.floating)

    def _argument(self, value: _Value | int | float) -> int | float | External:
        if isinstance(value, int | External):
            return value
        if isinstance(value, StepResult):
            return value.position
        number = float(value)
        if number == -math.inf and self._tracer.takes_outside:
            return number  # Hides a key.
        if not math.isfinite(number):
            self.refuse(f"uses the number {number}, and cuDNN takes finite ones")
        # Graphs do not distinguish -0.0 from 0.0, as Python's == does not.
        is_minus_zero = number == 0 and math.copysign(1, number) < 0
        return self._tracer.emit("neg", 0.0) if is_minus_zero else number

    def _folded(self, output: Any) -> np.ndarray:
        """Compute an equation of known numbers only, once for all elements."""
        if self._name in _RESHAPE:
            return np.asarray(self._args[0])
        with jax.ensure_compile_time_eval():
            operands = (jnp.asarray(x, x.dtype) for x in map(np.asarray, self._args))
            result = self._equation.primitive.bind(*operands, **self.params)
        return np.asarray(result, output.dtype)

    def _with_own_derivative(self) -> _Value:
        """Write a function with a derivative rule of its own, if it is one of JAX's.

        Nodes are differentiated by the rules of nodes. Any other such function would
        have another gradient here than where JAX differentiates it.
        """
        like = jax.ShapeDtypeStruct(self._equation.outvars[0].aval.shape, self.dtype)
        call = CustomCall(self._jaxpr, self._equation)
        for function, mode in _OWN_DERIVATIVES.items():
            if any(isinstance(x, External) for x in self._args):
                break
            if same_function(_custom_call(jax.make_jaxpr(function)(like)), call):
                (x,) = (x for x in self._args if isinstance(x, StepResult))
                return StepResult(self(mode, x))
        self.refuse(
            "uses a function with a derivative rule of its own (jax.custom_jvp), which "
            "a graph cannot keep"
        )


def _custom_call(closed: Any) -> CustomCall:
    """Return the one call with a derivative rule in the jaxpr of a JAX function."""
    jaxpr = getattr(closed, "jaxpr", closed)
    (equation,) = jaxpr.eqns
    if equation.primitive.name == "custom_jvp_call":
        return CustomCall(jaxpr, equation)
    return _custom_call(equation.params["jaxpr"])


# Primitives that compute what the jaxpr inside them computes. (The other parameters of
# `jit` and `remat` say where and when it runs, not what it computes.)
_CALLS = ("checkpoint", "closed_call", "core_call", "jit", "pjit", "remat2")
# Primitives that leave a tensor unchanged if they keep its shape, and that leave every
# number unchanged.
_RESHAPE = ("broadcast_in_dim", "copy", "copy_p", "reshape")
# Primitives that take truth values.
_OF_BOOLS = ("and", "convert_element_type", "not", "or", "select_n")
# Parameters that are None when a primitive computes just what its name says.
_PLAIN = ("accuracy", "dimensions", "out_dtype", "sharding")
# JAX's functions that have a derivative rule of their own, and the mode of each.
_OWN_DERIVATIVES: dict[Function, str] = {
    jax.nn.relu: "relu",
    jax.nn.relu6: "relu6",
    jax.nn.softplus: "softplus",  # jnp.logaddexp(x, 0)
}


# --- primitives -----------------------------------------------------------------------

_Write = Callable[..., _Value | int]


def _mode(mode: str) -> _Write:
    return lambda apply, *args: apply(mode, *args)


# cuDNN wants the tensor that is not broadcast as the first operand.
def _either_way(mode: str, swapped: str) -> _Write:
    def write(apply: _Equation, x: _Value, y: _Value) -> int:
        is_small = not isinstance(x, StepResult)
        return apply(swapped, y, x) if is_small else apply(mode, x, y)

    return write


def _sub(apply: _Equation, x: _Value, y: _Value) -> int:
    if not isinstance(x, StepResult):
        return apply("add", apply("neg", y), x)
    return apply("sub", x, y)


def _div(apply: _Equation, x: _Value, y: _Value) -> int:
    if isinstance(x, StepResult):
        return apply("div", x, y)
    if isinstance(x, np.ndarray) and x == 1:
        return apply("reciprocal", y)
    # Write the number in full shape, by a select with equal branches. (x times 1/y is
    # no substitute: 1/y may be 0 or infinite where x/y is not.)
    return apply("div", apply("select", x, x, apply("eq", y, y)), y)


def _integer_pow(apply: _Equation, x: StepResult) -> _Value | int:
    exponent = apply.params["y"]
    if exponent == 0:
        return np.ones((), apply.dtype)  # also of NaN
    # Take the reciprocal first: its powers and their derivatives overflow and underflow
    # where the whole and its derivatives do.
    power: StepResult | int = apply("reciprocal", x) if exponent < 0 else x.position
    result: int | None = None
    rest = abs(exponent)
    while rest:
        if rest & 1:
            result = power if result is None else apply("mul", result, power)
        rest >>= 1
        if rest:
            power = apply("mul", power, power)
    assert result is not None
    return result


def _exp2(apply: _Equation, x: StepResult) -> int:
    # This is how JAX lowers exp2.
    return apply("exp", apply("mul", x, float(apply.dtype.type(np.log(2)))))


def _sign(apply: _Equation, x: StepResult) -> int:
    # floor keeps 0 and NaN as they are, and its derivative is 0.
    rest = apply("select", -1.0, apply("floor", x), apply("lt", x, 0.0))
    return apply("select", 1.0, rest, apply("gt", x, 0.0))


def _select_n(apply: _Equation, which: _Value, *cases: _Value) -> _Value | int:
    if isinstance(which, np.ndarray):
        return cases[int(which)]
    if isinstance(which, External) and which.dtype != np.bool_:
        apply.refuse("selects by an index")
    if any(x.is_bool if isinstance(x, StepResult) else x.dtype == bool for x in cases):
        apply.refuse("selects among truth values")
    return apply("select", cases[1], cases[0], which)


def _convert(apply: _Equation, x: StepResult) -> _Value | int:
    """Convert between truth values and floats of the one dtype."""
    if x.is_bool:
        is_same = apply.params["new_dtype"] == np.bool_
        return x if is_same else apply("select", 1.0, 0.0, x)
    return apply("ne", x, 0.0) if apply.params["new_dtype"] == np.bool_ else x


def _logical(apply: _Equation, x: _Value) -> int | float | ScoreIndependent:
    """Return a truth value as 1 or 0; operands here are never integers."""
    if isinstance(x, np.ndarray):
        return float(x)
    if isinstance(x, ScoreIndependent):
        return ScoreIndependent(array=x.array.astype(apply.dtype), letters=x.letters)
    return apply("select", 1.0, 0.0, x)


def _both(mode: str) -> _Write:
    """Combine two truth values: apply the mode to 1s and 0s, and compare with 1/2."""

    def write(apply: _Equation, x: _Value, y: _Value) -> int:
        first, second = _logical(apply, x), _logical(apply, y)
        if not isinstance(first, int):
            first, second = second, first
        return apply("gt", apply(mode, first, second), 0.5)

    return write


# Each entry writes one of JAX's primitives as nodes with the same value, the same rules
# of differentiation (graph/pointwise.py) and the same answer for NaN, infinities and 0.
# Some primitives are missing for lack of such nodes. cuDNN has no form of log1p, expm1
# and erfc that keeps the digits near 0. The gradient of clamp at the bounds is 0.
_WRITE: dict[str, _Write] = {
    "abs": _mode("abs"),
    "add": _either_way("add", "add"),
    "add_any": _either_way("add", "add"),  # of cotangents, in traced gradients
    "and": _both("mul"),
    "ceil": _mode("ceil"),
    "convert_element_type": _convert,
    "cos": _mode("cos"),
    "div": _div,
    "eq": _either_way("eq", "eq"),
    "erf": _mode("erf"),
    "exp": _mode("exp"),
    "exp2": _exp2,
    "floor": _mode("floor"),
    "ge": _either_way("ge", "le"),
    "gt": _either_way("gt", "lt"),
    "integer_pow": _integer_pow,
    "le": _either_way("le", "ge"),
    "log": _mode("log"),
    "logistic": _mode("sigmoid"),
    "lt": _either_way("lt", "gt"),
    "max": _either_way("max", "max"),
    "min": _either_way("min", "min"),
    "mul": _either_way("mul", "mul"),
    "ne": _either_way("ne", "ne"),
    "neg": _mode("neg"),
    "not": lambda apply, x: apply("lt", _logical(apply, x), 0.5),
    "or": _both("max"),
    "pow": _mode("pow"),
    "rsqrt": _mode("rsqrt"),
    "select_n": _select_n,
    "sign": _sign,
    "sin": _mode("sin"),
    "sqrt": _mode("sqrt"),
    "square": lambda apply, x: apply("mul", x, x),
    "sub": _sub,
    "tan": _mode("tan"),
    "tanh": _mode("tanh"),
}
