# SPDX-License-Identifier: Apache-2.0
"""Translates a user's function of the scores into operands and steps of attention.

The function is traced. What it adds last, and does not depend on the score, is a bias.
Where it selects -inf last, it is a mask. Other operations on the score are steps of the
graph, and the arrays that they read are operands. So JAX's transformations see all that
the function captured.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.graph.attention.score_mod import OPERANDS, Steps, number_text
from jax_cudnn.ops.attention.attend import Operands
from jax_cudnn.ops.attention.reads import Scores, check_reads
from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.ops.common.score_independent import External, ScoreIndependent
from jax_cudnn.ops.common.tracing import (
    Step,
    UntraceableError,
    check_count,
    steps_of_scores,
)

# Of scalars: score, batch, head, query_index and key_index. Returns the new score.
ScoreMod = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

# Those of queries and of keys.
Positions = tuple[jax.Array | None, jax.Array | None]


# How many query heads the call has that traces a function of scores.
_HEADS: ContextVar[Any] = ContextVar("_HEADS", default=None)


def heads_of_call() -> int | None:
    """Return how many query heads the call has; None where no score_mod is traced."""
    heads = _HEADS.get()
    return heads if isinstance(heads, int) else None  # A symbolic size is none.


def check_score_mod(function: ScoreMod, dtype: Any, scores: Scores) -> Any:
    """Return the jaxpr of a function of scores.

    Raises:
      TypeError: it is none.
      ValueError: it reads an array beyond its end.
    """
    if not callable(function):
        raise TypeError(
            f"sdpa: score_mod is {type(function).__name__}. It must be a function of "
            "(score, batch, head, query_index, key_index) that returns the new score."
        )
    try:
        inspect.signature(function).bind(*range(5))
    except TypeError as error:
        raise TypeError(
            f"sdpa: score_mod takes other arguments ({error}). It is called with five: "
            "score, batch, head, query_index, key_index."
        ) from error
    except ValueError:
        pass  # it has no signature to ask
    index = jax.ShapeDtypeStruct((), jnp.int32)
    score = jax.ShapeDtypeStruct((), dtype)
    # JAX caches traces by the identity of the function, and a callable object may have
    # changed since it was traced. A new lambda is never found in that cache.
    trace = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)
    token = _HEADS.set(scores.sizes[1])
    try:
        closed, result = trace(score, index, index, index, index)
    except _UNKNOWN as error:
        raise TypeError(f"{_NEEDS_VALUE} {_remedy(error)}") from error
    finally:
        _HEADS.reset(token)
    is_number = isinstance(result, jax.ShapeDtypeStruct) and result.shape == ()
    if not is_number or not jnp.issubdtype(result.dtype, jnp.floating):
        leaves = ", ".join(describe(x) for x in jax.tree.leaves(result))
        if leaves and not isinstance(result, jax.ShapeDtypeStruct):
            leaves += f" in a {type(result).__name__}"
        raise TypeError(
            f"sdpa: score_mod returns {leaves or 'nothing'} for one score. It must "
            "return one float without axes, the new score. (It is called with scalars.)"
        )
    check_reads(closed, scores)
    return closed


# What JAX raises where Python or NumPy asks for the value of a traced array.
_UNKNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_NEEDS_VALUE = (
    "sdpa: score_mod uses the value of an argument, or of an array that it captures, "
    "which is not known while it is traced: it is called once, for all scores."
)


def _remedy(error: Exception) -> str:
    """Return what to write instead of what asked for a value."""
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return (
            "In place of `if`, `and`, `or`, `not`, `min` and `max`, write "
            "jnp.where(condition, a, b), &, |, ~, jnp.minimum and jnp.maximum."
        )
    if isinstance(error, jax.errors.TracerIntegerConversionError):
        return (
            "To look a number up by an index, write jnp.asarray(numbers)[index]. "
            "A Python loop cannot have a length that depends on it."
        )
    return (
        "In place of float(), int(), math and NumPy, write jax.numpy, and "
        "jnp.asarray(array) for an array of NumPy's."
    )


def on_scores(function: ScoreMod) -> Callable[[jax.Array], jax.Array]:
    """Return the function of all scores (b, h, s, t) that a function of one is."""

    def modified(scores: jax.Array) -> jax.Array:
        mapped: Callable[..., jax.Array] = function
        for axis in reversed(range(4)):
            own = [0 if place == axis else None for place in range(4)]
            mapped = jax.vmap(mapped, in_axes=(0, *own))
        places = (jnp.arange(size, dtype=jnp.int32) for size in scores.shape)
        return mapped(scores, *places).astype(scores.dtype)

    return modified


class Modified(NamedTuple):
    """The operands of attention with a score_mod, and its steps."""

    operands: Operands
    steps: Steps


def with_score_mod(
    closed: Any, operands: Operands, positions: Positions = (None, None)
) -> Modified:
    """Return what a function of scores, given as a jaxpr, means for attention.

    Queries and keys are numbered by their positions; None: from 0 on.

    Raises:
      UntraceableError: the function cannot be written with its exact meaning.
    """
    b, s, h, _ = operands.query_sizes
    rows, columns = positions
    numbers = (
        *(b, h),
        s if rows is None else rows,
        operands.key_count if columns is None else columns,
    )
    steps = steps_of_scores(closed, numbers)
    peeled = _peel(steps)
    writer = _Writer(operands.query.dtype)
    texts = writer.write(peeled.steps)
    given = {
        **writer.operands,
        "bias": _bias(operands, peeled.terms),
        "mask": _mask(operands, peeled.conditions),
    }
    return Modified(operands._replace(**given), texts)


# --- what is a bias or a mask ---------------------------------------------------------


class _Peeled(NamedTuple):
    """Steps, and what follows them: terms with their signs, conditions to be seen."""

    steps: list[Step]
    terms: list[tuple[int, ScoreIndependent | float]]
    conditions: list[tuple[ScoreIndependent, bool]]


def _peel(steps: list[Step]) -> _Peeled:
    # For where(keep, tanh(score) + alibi, -inf), the steps are tanh, add and select.
    # The last two can be a mask and a bias: what is left is the step tanh, the term
    # +alibi, and the condition that `keep` is True.
    peeled = _Peeled(_needed(steps), [], [])
    while peeled.steps:
        mode, arguments = peeled.steps[-1]
        match mode, arguments:
            case (
                ("add" | "sub"),
                (int() as rest, (ScoreIndependent() | float()) as term),
            ):
                peeled.terms.append((1 if mode == "add" else -1, term))
            case "select", (
                int() as rest,
                float() as low,
                ScoreIndependent() as seen,
            ) if low == -jnp.inf:
                peeled.conditions.append((seen, True))
            case "select", (
                float() as low,
                int() as rest,
                ScoreIndependent() as hidden,
            ) if low == -jnp.inf:
                peeled.conditions.append((hidden, False))
            case _:
                break
        peeled = peeled._replace(steps=_needed(peeled.steps[:rest]))
    return peeled


def _needed(steps: list[Step]) -> list[Step]:
    """Return the steps that the last one needs, counted anew."""
    needed = {len(steps)}
    for i in range(len(steps), 0, -1):
        if i in needed:
            needed.update(x for x in steps[i - 1].arguments if isinstance(x, int))
    places = {old: new for new, old in enumerate(sorted(needed | {0}))}
    return [
        Step(
            step.mode,
            tuple(places[x] if isinstance(x, int) else x for x in step.arguments),
        )
        for i, step in enumerate(steps, 1)
        if i in needed
    ]


def _bias(
    operands: Operands, terms: list[tuple[int, ScoreIndependent | float]]
) -> jax.Array | None:
    """Return the bias with the terms; what has few digits alone keeps its dtype."""
    if not terms:
        return operands.bias
    (sign, term), dtype = terms[0], operands.query.dtype
    is_alone = len(terms) == 1 and operands.bias is None and sign > 0
    if is_alone and isinstance(term, ScoreIndependent):
        return _fitting(term, dtype).broadcast()
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    total = jnp.zeros((1, 1, 1, 1), wide)
    if operands.bias is not None:
        total = operands.bias.astype(wide)
    for sign, term in terms:
        value = (
            term.broadcast()
            if isinstance(term, ScoreIndependent)
            else jnp.asarray(term)
        )
        total = total + sign * value.astype(wide)
    return total


def _mask(
    operands: Operands, conditions: list[tuple[ScoreIndependent, bool]]
) -> jax.Array | None:
    mask = operands.mask
    for condition, is_seen in conditions:
        value = condition.broadcast()
        value = value if is_seen else ~value
        mask = value if mask is None else mask & value
    return mask


def _fitting(value: ScoreIndependent, dtype: Any) -> ScoreIndependent:
    """Return what a value was converted from, if kernels take that dtype here."""
    narrow = value.narrow
    return narrow if narrow is not None and narrow.dtype == dtype else value


# --- what are steps -------------------------------------------------------------------


class _Writer:
    """Writes steps as texts, with the arrays that they read by role."""

    def __init__(self, dtype: Any) -> None:
        self.operands: dict[str, jax.Array] = {}
        self._dtype = dtype
        self._roles: dict[int, str] = {}
        self._kept: list[ScoreIndependent] = []
        self._texts: list[str] = []

    def write(self, steps: list[Step]) -> Steps:
        """Return the texts of steps, or raise UntraceableError."""
        words = ["score"]
        for mode, arguments in steps:
            if mode == "log":
                # Kernels compute 0/0 in a row of -inf.
                raise UntraceableError(
                    "it uses 'log', which may mask all keys of a row"
                )
            given = [self._word(x, words) for x in arguments]
            words.append(self._emit(mode, *given))
        check_count(self._texts)
        return tuple(self._texts)

    def _emit(self, mode: str, *words: str) -> str:
        self._texts.append(" ".join((mode, *words)))
        return f"%{len(self._texts) - 1}"

    def _word(self, argument: int | float | External, words: list[str]) -> str:
        if isinstance(argument, int):
            return words[argument]
        if isinstance(argument, External):
            assert isinstance(argument, ScoreIndependent)
            return self._operand(argument)
        if argument == -jnp.inf:
            raise UntraceableError(
                "it goes on after -inf. Select -inf as the last operation, by the "
                "indices alone, or pass a mask"
            )
        return number_text(argument)

    def _operand(self, value: ScoreIndependent) -> str:
        if value.dtype != jnp.bool_:
            return self._role(_fitting(value, self._dtype))
        # A kernel's operations all follow from the scores. The key's position is one
        # that is never NaN.
        role = self._role(value)
        zero = self._emit("mul", "key", "0")
        return self._emit("gt", self._emit("add", zero, role), "0.5")

    def _role(self, value: ScoreIndependent) -> str:
        if id(value) not in self._roles:
            if len(self._roles) == len(OPERANDS):
                raise UntraceableError(
                    f"it reads more than {len(OPERANDS)} arrays in addition to the "
                    "score"
                )
            role = OPERANDS[len(self._roles)]
            self._kept.append(value)  # So that no other gets its id.
            self._roles[id(value)] = role
            array = value.broadcast()
            if array.dtype == jnp.bool_:
                array = array.astype(self._dtype)
            self.operands[role] = array
        return self._roles[id(value)]
