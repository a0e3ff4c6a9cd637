# SPDX-License-Identifier: Apache-2.0
"""Refuses a score_mod that reads an array beyond its end.

JAX reads the last element there, without a word: slopes for 4 heads would serve 6. So
the indices that a traced function computes from its positions are computed here, in
NumPy, while the call is traced. No array is looked at. What follows from a read beyond
an end is garbage, unless the function selects something else in its place. A call is
refused if a score that some query sees is garbage for certain.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_cudnn.lowering import equation_place, inner_jaxprs
from jax_cudnn.ops.common.arguments import describe


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of a call: their sizes, and what is known of the hidden ones.

    A size that is no int, for a symbolic one, is not known. Where arrays hide keys,
    ``is_hidden`` says so: any position of a query and a key may be hidden then.
    """

    sizes: tuple[Any, Any, Any, Any]
    is_causal: bool
    window: tuple[int, ...]
    is_hidden: bool


def check_reads(closed: Any, scores: Scores) -> None:
    """Raise ValueError if a traced score_mod reads an array beyond its end."""
    b, h, s, t = (x if isinstance(x, int) else None for x in scores.sizes)
    if 0 in (b, h, s, t) or not _reads_arrays(closed.jaxpr):
        return
    queries, keys = _pairs(s, t)
    batch, heads = (None if x is None else np.arange(x, dtype=np.int32) for x in (b, h))
    places = [
        None if x is None else np.expand_dims(x, axes)
        for x, axes in (
            *((batch, (1, 2)), (heads, (0, 2))),
            *((queries, (0, 1)), (keys, (0, 1))),
        )
    ]
    interpreter = _Interpreter()
    (score,) = interpreter.run(
        closed.jaxpr, [_Value()] * len(closed.consts), [_Value(), *map(_Value, places)]
    )
    is_wrong = score.garbage
    if is_wrong.shape[2] > 1:  # It depends on the query or the key.
        if scores.is_hidden or queries is None or keys is None:
            return
        is_wrong = is_wrong & _seen(scores, queries, keys)
    if not is_wrong.any():
        return
    for read in interpreter.reads:
        if (is_wrong & read.garbage).any():
            raise _refusal(read, is_wrong & read.garbage, places, (b, h, s, t))


def _pairs(s: int | None, t: int | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return pairs of a query and a key, with all distances and all of both.

    These are the pairs of the first or last query, or of the first or last key.
    """
    # With 3 queries and 2 keys, these are (0, 0), (0, 1), (0, 0), (1, 0), (2, 0), ...
    # The distances key - query are -2 to 1, as they are for all 6 pairs.
    if s is None or t is None:
        return None, None
    rows, columns = np.arange(s, dtype=np.int32), np.arange(t, dtype=np.int32)
    queries = [np.zeros_like(columns), rows, np.full_like(columns, s - 1), rows]
    keys = [columns, np.zeros_like(rows), columns, np.full_like(rows, t - 1)]
    return np.concatenate(queries), np.concatenate(keys)


def _seen(scores: Scores, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    distance = keys.astype(np.int64) - queries
    seen = np.ones(distance.shape, bool)
    if scores.is_causal:
        seen &= distance <= 0
    if scores.window:
        left, right = scores.window
        seen &= (distance >= -left) & (distance <= right)
    return seen


class _Read(NamedTuple):
    """A read beyond the end of an array, and for which scores it is one."""

    array: Any
    axis: int
    index: np.ndarray
    garbage: np.ndarray
    place: str


def _refusal(
    read: _Read, is_wrong: np.ndarray, places: Sequence[Any], sizes: Sequence[Any]
) -> ValueError:
    where = np.argwhere(is_wrong)[0]
    index = read.index[tuple(np.minimum(where, np.array(read.index.shape) - 1))]
    names = (("batch entry", 0), ("head", 1), ("query", 2), ("key", 2))
    shown = [
        f"{name} {int(np.ravel(place)[where[axis]])} of {size}"
        for (name, axis), place, size in zip(names, places, sizes, strict=True)
        if is_wrong.shape[axis] > 1
    ]
    at = f" ({read.place})" if read.place else ""
    return ValueError(
        f"sdpa: score_mod reads {describe(read.array)} at index {int(index)} of axis "
        f"{read.axis}, for {', '.join(shown) or 'every score'}{at}. That is beyond its "
        "end, where JAX reads the nearest element. Pass an array with an element for "
        "each index. If the nearest one is meant, clip the index (jnp.clip), or use "
        'jnp.take(..., mode="clip"): x.at[i].get(mode="clip") cannot be distinguished '
        "from x[i]."
    )


def _reads_arrays(jaxpr: Any) -> bool:
    """Whether a program, or one that it calls, reads elements of arrays."""
    return any(
        equation.primitive.name in ("gather", "dynamic_slice")
        or any(map(_reads_arrays, inner_jaxprs(equation.params)))
        for equation in jaxpr.eqns
    )


# --- the values of a function ---------------------------------------------------------

_NONE = np.zeros((1, 1, 1), bool)
# Larger arrays of indices are not computed.
_MOST = 2**20


class _Value(NamedTuple):
    """The known elements of a value, for all scores.

    Scores have three axes: batch entries, heads, and pairs of a query and a key. The
    axes are 1 where nothing depends on them. The value's own axes follow in ``known``.
    Scores for which all of the value is garbage are marked.
    """

    known: np.ndarray | None = None
    garbage: np.ndarray = _NONE


class _Interpreter:
    """Follows a jaxpr, and notes the reads beyond the ends of arrays."""

    def __init__(self) -> None:
        self.reads: list[_Read] = []

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[_Value],
        args: Sequence[_Value],
        around: str = "",
    ) -> list[_Value]:
        """Return the results of a jaxpr that is nested in an equation `around`."""
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> _Value:
            return _literal(atom) if hasattr(atom, "val") else values[atom]

        for equation in jaxpr.eqns:
            operands = [read(x) for x in equation.invars]
            results = self._results(equation, operands, around)
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _results(
        self, equation: Any, operands: Sequence[_Value], around: str
    ) -> Sequence[_Value]:
        name = equation.primitive.name
        place = equation_place(equation) or around
        if name in _CALLS:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            program = getattr(inner, "jaxpr", inner)
            consts = [_Value()] * len(getattr(inner, "consts", ()))
            return self.run(program, consts, operands, place)
        if name == "dynamic_slice":
            return [self._sliced(equation, operands, place)]
        if name == "gather":
            return [self._gathered(equation, operands, place)]
        if len(equation.outvars) != 1:
            return [_Value()] * len(equation.outvars)
        if name == "select_n":
            return [_selected(*operands)]
        known = _computed(equation, operands)
        return [_Value(known, _spread(equation, operands))]

    def _sliced(self, equation: Any, operands: Sequence[_Value], place: str) -> _Value:
        indices = operands[1:]
        sizes = equation.params["slice_sizes"]
        garbage = _either(*(x.garbage for x in operands))
        for axis, (index, size) in enumerate(zip(indices, sizes, strict=True)):
            found = self._note(equation, axis, index.known, size, place)
            garbage = _either(garbage, found)
        return _Value(None, garbage)

    def _gathered(
        self, equation: Any, operands: Sequence[_Value], place: str
    ) -> _Value:
        array, index = operands
        garbage = _either(array.garbage, index.garbage)
        numbers = equation.params["dimension_numbers"]
        # The other modes say what is meant by an index beyond the end.
        is_trusted = equation.params["mode"] == _TRUSTED
        if index.known is None or not is_trusted:
            return _Value(None, garbage)
        for i, axis in enumerate(numbers.start_index_map):
            own = index.known[..., i]
            size = equation.params["slice_sizes"][axis]
            garbage = _either(garbage, self._note(equation, axis, own, size, place))
        return _Value(None, garbage)

    def _note(
        self,
        equation: Any,
        axis: int,
        index: np.ndarray | None,
        size: int,
        place: str,
    ) -> np.ndarray:
        """Return for which scores an index is beyond the end of an axis."""
        array = equation.invars[0].aval
        count = array.shape[axis]
        if index is None or not isinstance(count, int):
            return _NONE
        # Several elements may be read at once: all of them have to be beyond the end.
        several = np.reshape(index, (*index.shape[:3], -1))
        garbage = np.all((several < 0) | (several > count - size), axis=3)
        if not garbage.any() or not several.size:
            return _NONE
        self.reads.append(_Read(array, axis, several[..., 0], garbage, place))
        return garbage


_TRUSTED = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
# Primitives that compute what the jaxpr inside them computes.
_CALLS = (
    *("checkpoint", "closed_call", "core_call", "jit", "pjit", "remat2"),
    *("custom_jvp_call", "custom_vjp_call"),
)


def _either(*given: np.ndarray) -> np.ndarray:
    """Return what is garbage of any; masks that mark nothing stay small."""
    marked = [x for x in given if x.any()]
    found = _NONE
    for each in marked:
        found = found | each
    return found


def _literal(atom: Any) -> _Value:
    number = np.asarray(atom.val)
    return _Value(np.reshape(number, (1, 1, 1, *number.shape)))


def _selected(predicate: _Value, *cases: _Value) -> _Value:
    """Return one of the cases; what is not selected is no garbage."""
    which = predicate.known
    if which is None:
        garbage = cases[0].garbage
        for case in cases[1:]:
            garbage = garbage & case.garbage
        return _Value(None, _either(predicate.garbage, garbage))
    own = tuple(range(3, which.ndim))
    # Garbage is where all cases are that are selected for some element.
    garbage = np.ones((1, 1, 1), bool)
    for number, case in enumerate(cases):
        garbage = garbage & (case.garbage | ~np.any(which == number, axis=own))
    known = None
    if all(case.known is not None for case in cases):
        chosen, *given = _aligned([which, *(case.known for case in cases)])
        if _size(chosen, *given) <= _MOST:
            known = np.choose(chosen.astype(np.intp), given)
    return _Value(known, _either(predicate.garbage, garbage))


def _aligned(arrays: Sequence[Any]) -> list[np.ndarray]:
    """Give numbers beside arrays the axes of these."""
    rank = max(x.ndim for x in arrays)
    return [np.expand_dims(x, tuple(range(x.ndim, rank))) for x in arrays]


def _size(*arrays: Any) -> int:
    return math.prod(np.broadcast_shapes(*(x.shape for x in arrays)))


def _computed(equation: Any, operands: Sequence[_Value]) -> np.ndarray | None:
    """Return the result of an equation of known integers; None for any other."""
    given = [x.known for x in operands]
    name = equation.primitive.name
    aval = equation.outvars[0].aval
    if name in _SHAPED and all(x is not None for x in given):
        return _SHAPED[name](equation.params, *given)
    rule = _EXACT.get(name)
    if rule is None or any(x is None or x.dtype.kind not in "iub" for x in given):
        return None
    given = _aligned(given)
    if _size(*given) > _MOST:
        return None
    with np.errstate(over="ignore"):
        result = rule(equation.params, *given)
    return None if result is None else result.astype(aval.dtype)


def _spread(equation: Any, operands: Sequence[_Value]) -> np.ndarray:
    """Return for which scores a result is garbage since an operand is."""
    name = equation.primitive.name
    if name == "concatenate":
        found = operands[0].garbage
        for each in operands[1:]:
            found = found & each.garbage
        return found
    if name not in _SPREADING:
        return _NONE
    found = _either(*(x.garbage for x in operands))
    if name in _ABSORBING and found.any():
        # What is multiplied by 0, say, no longer matters.
        for each in operands:
            if each.known is not None and each.known.ndim == 3:
                found = found & (each.known != _ABSORBING[name](each.known.dtype))
    return found


def _truth(dtype: Any) -> Any:
    return dtype.type(-1) if dtype.kind in "iu" else True


# The number that decides the result alone, by the dtype.
_ABSORBING: dict[str, Callable[[Any], Any]] = {
    "mul": lambda dtype: dtype.type(0),
    "and": lambda dtype: dtype.type(0),
    "or": _truth,
}


def _quotient(_: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Round towards 0, as XLA does."""
    if not y.all():
        return None
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def _remainder(_: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    return np.fmod(x, y) if y.all() else None


def _of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args: function(*args)


# Of integers and truth values. Floats are not computed: rounding might differ.
_EXACT: dict[str, Callable[..., Any]] = {
    "abs": _of(np.abs),
    "add": _of(np.add),
    "and": _of(np.bitwise_and),
    "clamp": lambda _, low, x, high: np.minimum(np.maximum(x, low), high),
    "div": _quotient,
    "eq": _of(np.equal),
    "ge": _of(np.greater_equal),
    "gt": _of(np.greater),
    "integer_pow": lambda params, x: x ** params["y"] if params["y"] >= 0 else None,
    "le": _of(np.less_equal),
    "lt": _of(np.less),
    "max": _of(np.maximum),
    "min": _of(np.minimum),
    "mul": _of(np.multiply),
    "ne": _of(np.not_equal),
    "neg": _of(np.negative),
    "not": _of(np.invert),
    "or": _of(np.bitwise_or),
    "rem": _remainder,
    "shift_right_arithmetic": lambda _, x, y: (
        np.right_shift(x, y) if np.all((y >= 0) & (y < 31)) else None
    ),
    "sign": _of(np.sign),
    "square": _of(np.square),
    "sub": _of(np.subtract),
    "xor": _of(np.bitwise_xor),
}


def _broadcast(params: Any, x: np.ndarray, *_: Any) -> np.ndarray | None:
    shape = params["shape"]
    if not all(isinstance(size, int) for size in shape):
        return None
    own = [1] * len(shape)
    for size, axis in zip(x.shape[3:], params["broadcast_dimensions"], strict=True):
        own[axis] = size
    return np.broadcast_to(np.reshape(x, (*x.shape[:3], *own)), (*x.shape[:3], *shape))


def _squeezed(params: Any, x: np.ndarray) -> np.ndarray:
    return np.squeeze(x, tuple(3 + axis for axis in params["dimensions"]))


def _reshaped(params: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    return np.reshape(x, (*x.shape[:3], *params["new_sizes"]))


def _concatenated(params: Any, *parts: np.ndarray) -> np.ndarray | None:
    leading = np.broadcast_shapes(*(x.shape[:3] for x in parts))
    whole = [np.broadcast_to(x, (*leading, *x.shape[3:])) for x in parts]
    if sum(x.size for x in whole) > _MOST:
        return None
    return np.concatenate(whole, axis=3 + params["dimension"])


def _iota(params: Any) -> np.ndarray | None:
    shape, axis = params["shape"], params["dimension"]
    if not all(isinstance(size, int) for size in shape):
        return None
    own = [size if i == axis else 1 for i, size in enumerate(shape)]
    numbers = np.reshape(np.arange(shape[axis], dtype=params["dtype"]), own)
    return np.broadcast_to(numbers, shape)[None, None, None]


# Of numbers of all dtypes, which they leave as they are, or convert.
_SHAPED: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "copy": lambda _, x: x,
    "iota": _iota,
    "reshape": _reshaped,
    "squeeze": _squeezed,
    "stop_gradient": lambda _, x: x,
}

# Those of which a result is garbage if an operand is.
_SPREADING = frozenset(
    (
        *_EXACT,
        *_SHAPED,
        *("atan2", "cbrt", "ceil", "cos", "cosh", "erf", "erf_inv", "erfc", "exp"),
        *("exp2", "expm1", "floor", "log", "log1p", "logistic", "pow", "reduce_max"),
        *("reduce_min", "reduce_sum", "round", "rsqrt", "sin", "sinh", "slice"),
        *("sqrt", "tan", "tanh", "transpose"),
    )
)
