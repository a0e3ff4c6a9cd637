# SPDX-License-Identifier: Apache-2.0
"""Writes, checks and differentiates functions of attention's scores.

A function is a list of steps, each a text of words with one space between them: the
mode of a pointwise node and what it is applied to. ::

    "div score 30"    "tanh %0"    "mul %1 30"

A word is one of these values, for each query and key:

======================  ================================================================
score                   the scaled score
query, key              the position of the query or key, a float
mod_a, ... mod_d        the operand in that role, which broadcasts to the scores
%0, %1, ...             the result of that step
30, -0.5, ...           a number, written as in a graph's text ("%.17g")
-inf                    hides a key
grad                    in gradient steps, the cotangent of the last step
======================  ================================================================

The last step gives the new score. Gradient steps go on counting where the steps of the
function end, and may read their results.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.pointwise import (
    ARITY,
    COMPARISONS,
    PointwiseAttributes,
    input_cotangent,
)
from jax_cudnn.graph.spec import Node

Steps = tuple[str, ...]

# The roles of operands that steps may read.
OPERANDS = ("mod_a", "mod_b", "mod_c", "mod_d")
_VALUES = ("score", "query", "key")
_RESULT = re.compile(r"%(0|[1-9][0-9]{0,8})")


class Step(NamedTuple):
    """A step's mode and the words that it is applied to."""

    mode: str
    words: tuple[str, ...]


def read_step(text: str) -> Step:
    """Return a step that is known to be well formed."""
    mode, *words = text.split(" ")
    return Step(mode, tuple(words))


def number_text(value: float) -> str:
    """Return how a finite number is written, or -inf."""
    return f"{value + 0.0:.17g}"  # -0.0 equals 0.0, so it is written alike


def result_index(word: str) -> int | None:
    """Return the number of the step whose result a word is, or None."""
    found = _RESULT.fullmatch(word)
    return None if found is None else int(found[1])


def operands_of(steps: Steps) -> tuple[str, ...]:
    """Return the roles of operands that the steps read."""
    words = {word for text in steps for word in read_step(text).words}
    return tuple(role for role in OPERANDS if role in words)


def largest(steps: Steps) -> float:
    """Return a bound of the new scores' magnitude, for any operands; hidden keys aside.

    It is infinite where none is found.
    """
    found: list[float] = []

    def size(word: str) -> float:
        index = result_index(word)
        if index is not None:
            return found[index]
        if not _is_number(word):
            return math.inf
        return 0.0 if word == "-inf" else abs(float(word))

    for mode, words in map(read_step, steps):
        sizes = [size(word) for word in words]
        match mode:
            case "tanh" | "sigmoid" | "erf" | "sin" | "cos":
                found.append(1.0)
            case "abs" | "neg" | "identity":
                found.append(sizes[0])
            case "add" | "sub":
                found.append(sum(sizes))
            case "mul":
                found.append(math.prod(sizes) if 0 not in sizes else math.inf)
            case "div" if _is_number(words[1]) and sizes[1]:
                found.append(sizes[0] / sizes[1])
            case "max" | "min":
                found.append(max(sizes))
            case "select":
                found.append(max(sizes[:2]))
            case _:
                found.append(math.inf)
    return found[-1]


# --- checks ---------------------------------------------------------------------------


def check_score_mod(steps: Steps, gradient: Steps, roles: Mapping[str, Any]) -> None:
    """Raise GraphError unless steps and gradient steps are well formed.

    Its twin is ffi/graph/score_mod.cc. ``roles`` has the roles of the node's operands.
    """
    if gradient and not steps:
        raise GraphError("score_mod_grad without score_mod")
    are_bool: list[bool] = []
    _check_steps("score_mod", steps, _VALUES, roles, are_bool)
    _check_steps("score_mod_grad", gradient, (*_VALUES, "grad"), roles, are_bool)
    for role in OPERANDS:
        if role in roles and role not in operands_of(steps):
            raise GraphError(f"score_mod: it does not read {role}")


def _check_steps(
    name: str,
    steps: Steps,
    values: tuple[str, ...],
    roles: Mapping[str, Any],
    are_bool: list[bool],
) -> None:
    for text in steps:
        where = f"{name}: {text!r}"
        mode, words = read_step(text)
        is_gradient = mode.endswith("_grad")
        if mode not in ARITY or (is_gradient and "grad" not in values):
            raise GraphError(f"{where} has no known mode")
        if len(words) != ARITY[mode]:
            raise GraphError(f"{where} has {len(words)} words, not {ARITY[mode]}")
        for i, word in enumerate(words):
            if not _is_value(word, values, roles, len(are_bool)):
                raise GraphError(f"{where}: no value and no number is {word!r}")
            index = result_index(word)
            wants_bool = mode == "select" and i == 2
            if (index is not None and are_bool[index]) != wants_bool:
                wanted = "a truth value" if wants_bool else "a number"
                raise GraphError(f"{where}: {word!r} is not {wanted}")
        are_bool.append(mode in COMPARISONS)
    if steps and are_bool[-1]:
        raise GraphError(f"{name}: the last step gives a truth value")


def _is_value(
    word: str, values: tuple[str, ...], roles: Mapping[str, Any], count: int
) -> bool:
    if word in values:
        return True
    if word in OPERANDS:
        return word in roles
    index = result_index(word)
    return index < count if index is not None else _is_number(word)


def _is_number(word: str) -> bool:
    try:
        value = float(word)
    except ValueError:
        return False
    is_known = math.isfinite(value) or value == -math.inf
    return is_known and number_text(value) == word


# --- the gradient ---------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def gradient_steps(steps: Steps) -> Steps:
    """Return the steps to the cotangent of the score, of those of a function.

    The rules are those of pointwise nodes.
    """
    writer = _StepWriter(steps)
    follows = {"score"}
    for i, text in enumerate(steps):
        if follows.intersection(read_step(text).words):
            follows.add(f"%{i}")
    cotangents: dict[str, str] = {f"%{len(steps) - 1}": "grad"}
    for i, text in reversed([*enumerate(steps)]):
        if (cotangent := cotangents.get(f"%{i}")) is None:
            continue
        mode, words = read_step(text)
        node = Node.make(
            "pointwise",
            dict(zip("abc", words, strict=False)),
            {"output": f"%{i}"},
            PointwiseAttributes(mode=mode),
        )
        for role, word in zip("abc", words, strict=False):
            if word not in follows:
                continue
            # It uses of a writer what _StepWriter has.
            found = input_cotangent(writer, node, cotangent, role)  # type: ignore[arg-type]
            if found is not None:
                old = cotangents.get(word)
                total = found if old is None else writer.pointwise("add", old, found)
                cotangents[word] = total
    return writer.finish(cotangents.get("score"))


class _NoGraph:
    inputs: tuple[str, ...] = ()


class _StepWriter:
    """Writes the steps of a gradient, where a GradientWriter writes nodes."""

    def __init__(self, steps: Steps) -> None:
        self.graph = _NoGraph()
        self._count = len(steps)
        self._steps = list(steps)
        self._places = {text: f"%{i}" for i, text in enumerate(steps)}

    def pointwise(self, mode: str, *words: str, alpha: float = 0.0) -> str:
        assert alpha == 0
        text = " ".join((mode, *words))
        if text not in self._places:
            self._places[text] = self._emit(text)
        return self._places[text]

    def constant(self, value: float) -> str:
        return number_text(value)

    use: Callable[["_StepWriter", str], str] = lambda _, word: word
    rounded: Callable[["_StepWriter", str], str] = lambda _, word: word
    is_result: Callable[["_StepWriter", str], bool] = lambda _, __: False

    def finish(self, result: str | None) -> Steps:
        """Return the new steps; the last one gives the result, or 0 for None."""
        if result is None:
            self._emit("mul grad 0")
        elif result != f"%{len(self._steps) - 1}" or len(self._steps) == self._count:
            self._emit(f"identity {result}")
        return tuple(self._steps[self._count :])

    def _emit(self, text: str) -> str:
        self._steps.append(text)
        return f"%{len(self._steps) - 1}"
