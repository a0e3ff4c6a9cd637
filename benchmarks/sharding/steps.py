# SPDX-License-Identifier: Apache-2.0
"""Steps of the examples' trainers: compiled, taken in turns, with losses compared."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from language.training import Trainer

from benchmarks.harness.timing import Contender
from benchmarks.sharding.several_gpus import counted, sent

PLAIN = "plain JAX"
# Losses of contenders differ by rounding only. After some steps rounding is amplified:
# two runs of plain JAX differ by 1.4 % in the 30th step of the 7B model.
BOUND = 0.02
ALIKE = 10


class Compiled:
    """A trainer's step, with what is known before it runs."""

    def __init__(
        self, trainer: Trainer, tune: Callable[[Any], object] | None = None
    ) -> None:
        self.trainer = trainer
        start = time.monotonic()
        if tune is not None:
            tune(trainer.traced)
        self.tuning_s = time.monotonic() - start
        start = time.monotonic()
        self.step = trainer.step
        self.compile_s = time.monotonic() - start
        memory = self.step.memory_analysis()
        self.bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        kinds = [each.split()[0] for each in sent(self.step.as_text())]
        self.collectives = counted(kinds)


class State:
    """A state, on which one contender or several take steps in turn."""

    def __init__(self, program: Compiled, texts: Sequence[Any]) -> None:
        self._texts = [program.trainer.place(text) for text in texts]
        self._state = program.trainer.initial()
        self._taken = 0

    def step(self, program: Compiled) -> jax.Array:
        """Take a step, and return the loss before it."""
        text = self._texts[self._taken % len(self._texts)]
        self._taken += 1
        self._state, loss = program.step(self._state, text)
        return loss

    def losses(self, program: Compiled) -> list[float]:
        """Take a step on each text, and return the losses."""
        return [float(self.step(program)) for _ in self._texts]

    def contender(self, program: Compiled) -> Contender:
        """Return steps of a program, to be timed."""
        return Contender(call=lambda: self.step(program), wait=jax.block_until_ready)


def check(losses: list[float], others: list[float], *, f8: bool = False) -> float:
    """Return by how much losses differ at most; raise if that is more than rounding.

    The first ones and the mean of all are held to the bound. In f8 a spike of the loss
    may lie a step earlier or later, so of the first ones it is the very first.
    """
    shares = [abs(a - b) / b for a, b in zip(losses, others, strict=True)]
    mean = abs(sum(losses) - sum(others)) / sum(others)
    # Written so that a NaN fails.
    if not all(share <= BOUND for share in (*shares[: 1 if f8 else ALIKE], mean)):
        raise RuntimeError(f"losses {losses} are not those of plain JAX, {others}")
    return max(shares)
