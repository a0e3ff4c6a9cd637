# SPDX-License-Identifier: Apache-2.0
"""Choices, and programs whose times are given, for tests of whole programs' tuning."""

from collections.abc import Callable, Sequence
from typing import Any

from jax_cudnn.choices import Choice, Key, Trial
from jax_cudnn.tuning import NotRunError
from jax_cudnn.tuning.in_context import Chosen


def key_of(name: str) -> Key:
    """Return the key of a graph on an H200."""
    return Key(device="NVIDIA H200", cudnn=91900, graph=name)


def choice_of(op: str, cudnn_us: float = 10.0, xla_us: float = 11.0) -> Choice:
    """Return the choice of the implementation that is faster."""
    winner: Any = "cudnn" if cudnn_us <= xla_us else "xla"
    return Choice(
        op=op,
        operands="",
        implementation=winner,
        plan='{"engine":1}',
        cudnn_us=cudnn_us,
        xla_us=xla_us,
    )


class Made:
    """Programs whose times a function of the choices tells."""

    def __init__(self, cost: Callable[[Chosen], float], fails: str = "") -> None:
        self.cost, self.fails = cost, fails
        self.compiled: list[Chosen] = []

    def compile(self, trials: Sequence[Trial]) -> list[int | NotRunError]:
        return list(map(self._compile, trials))

    def _compile(self, trial: Trial) -> int | NotRunError:
        who = {each and each.implementation for each in trial.choices.values()}
        if self.fails and who == {self.fails}:
            return NotRunError(f"{self.fails} does not run")
        self.compiled.append(trial.choices)
        return len(self.compiled) - 1

    def times(self, numbers: Sequence[int]) -> list[float]:
        return [self.cost(self.compiled[number]) for number in numbers]


def who_runs(chosen: Chosen) -> list[str | None]:
    """Return which implementation runs each operation."""
    return [choice and choice.implementation for choice in chosen.values()]
