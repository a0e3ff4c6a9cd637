# SPDX-License-Identifier: Apache-2.0
"""Finds the choices that make a whole program fastest, XLA's fusions included.

The winners of single kernels need not win together. XLA computes the operands of a call
within its own code for it, and not within cuDNN's; what a norm gains may be lost on the
arrays that have to be written for it. So the program itself is timed: untuned, by XLA
alone, by cuDNN alone, and with the kernels' winners. From the fastest of these, the
calls of each operation change over, but for those that have nothing to gain. All that
gain do so together, if that gains more. What came of it is then timed beside the others
once more, and the fastest is taken.

Compiling a program takes longer than running it, so programs are compiled together, and
few of them. That by XLA alone says how much XLA spares by what it fuses: it takes so
much less than its calls alone would have it. An operation whose calls lose more than
that by going to XLA is left as it is. That is a guess: what one operation spares,
another one may lose. So is one whose calls take next to nothing. Where programs take
long to compile, so are all but the few whose calls take longest. By cuDNN nothing is
fused with what is around a call: where its calls alone lose far too much, the program
by cuDNN alone is not tried.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jax_cudnn.choices import Choice, Key, Trial
from jax_cudnn.tuning import NotRunError

# None where a part is as if it had not been measured.
Chosen = Mapping[Key, Choice | None]

# A program has to be faster by this share to be taken in place of another.
_TIE = 0.005
# An operation may lose so much more than XLA spares, as a share of the program's time.
# One whose calls take less than that is left as it is.
_SLACK = 0.01
# cuDNN's calls may take so much more than the winners, as a share of the winners' time.
_MOST_LOST = 0.1
# Calls change over to XLA where it takes no more than so many times as long alone: it
# fuses what is around a call. Others fuse nothing, and have to be about as fast alone.
_NEAR = 3.0
_AS_FAST = 1.05
_MOST_OPERATIONS = 6
# Where programs take long to compile and to run first, fewer operations change over, so
# that these take about so many seconds: the last ones seldom gain. Two do in any case.
_SECONDS = 30.0
_FEWEST_OPERATIONS = 2
_XLA_ALONE = "XLA alone"
_XLA_WHERE_NEAR = f"XLA but for calls that take it over {_NEAR:.0f} times as long"


class _Programs(Protocol):
    def compile(self, trials: Sequence[Trial]) -> list[int | NotRunError]: ...
    def times(self, numbers: list[int]) -> list[float]: ...


@dataclass(frozen=True, kw_only=True)
class ProgramTimes:
    """Microseconds of a whole program: medians of rounds, with contenders in turns.

    ``chosen_us`` is with the choices that were made. Those beside it are None where the
    choices are the same as others', or the program could not run. So is ``cudnn_us``
    where cuDNN's calls alone take far longer. ``is_xla_alone`` says whether XLA ran all
    calls for ``xla_us``, those too that take it far longer, and ``is_all`` whether all
    of them were measured: others ran as before.
    """

    chosen_us: float
    untuned_us: float | None = None
    xla_us: float | None = None
    cudnn_us: float | None = None
    kernels_us: float | None = None
    is_xla_alone: bool = True
    is_all: bool = True

    @property
    def _by_xla(self) -> str:
        """The name of the program that took ``xla_us``."""
        if not self.is_all:
            return "XLA where calls were measured"
        return _XLA_ALONE if self.is_xla_alone else _XLA_WHERE_NEAR

    def __str__(self) -> str:
        others = {
            "untuned": self.untuned_us,
            self._by_xla: self.xla_us,
            "cuDNN alone": self.cudnn_us,
            "each kernel's winner": self.kernels_us,
        }
        shown = [f"{name} {us:.1f}" for name, us in others.items() if us is not None]
        beside = f" ({', '.join(shown)})" if shown else ""
        return f"the whole program, in microseconds: {self.chosen_us:.1f}{beside}"


def settle(
    programs: _Programs,
    found: Mapping[Key, Choice],
    before: Chosen,
    *,
    runs: Mapping[Key, int] | None,
    deadline: float,
    say: Callable[[str], None],
    is_all: bool = True,
) -> tuple[Chosen, ProgramTimes]:
    """Return the choices that make the program fastest, and its times.

    ``found`` are the winners of single kernels, ``before`` what was chosen until then.
    ``runs`` says how many times the program runs each; None if that is not known.
    Parts that were not measured stay as before; ``is_all`` says that there are none.

    Raises:
      NotRunError: the program does not run with the kernels' winners.
    """
    start = time.monotonic()
    # For example, cuDNN won convolutions and norms alone. The program takes 100 us with
    # these winners, which is also "cudnn", 104 untuned and 98 by XLA, which fuses norms
    # with what is around them. From that, convolutions change back to cuDNN, which
    # takes 95 us, and norms, which takes 99. So XLA keeps the norms. All are timed once
    # more, in turns.
    contest = _Contest(programs, found, runs, say)
    named: dict[str, Chosen] = {
        "kernels": dict(found),
        "untuned": {**dict.fromkeys(found), **before},
        "xla": {key: _by_xla(choice) for key, choice in found.items()},
        "cudnn": {key: _by_cudnn(choice) for key, choice in found.items()},
    }
    if contest.loses_far(named["cudnn"]):
        del named["cudnn"]
    entered: dict[str, Chosen] = {}
    for name, chosen in named.items():
        if chosen not in entered.values():
            entered[name] = chosen
    if time.monotonic() > deadline:
        entered = {"kernels": entered["kernels"]}
    numbers: dict[str, int] = {}
    compiled = contest.enter([*entered.values()])
    for name, number in zip(entered, compiled, strict=True):
        if isinstance(number, int):
            numbers[name] = number
        elif name == "kernels":
            raise number
    took = dict(zip(numbers, contest.times(list(numbers.values())), strict=True))
    best = min(took, key=lambda name: took[name])
    if took["kernels"] <= took[best] * (1 + _TIE):
        best = "kernels"
    chosen, us = numbers[best], took[best]
    spared_us = contest.spared_us(named["xla"], numbers, took)
    # Changing operations over takes about as long as what was done until now.
    now = time.monotonic()
    improved = chosen
    if now + (now - start) <= deadline:
        improved = contest.improved(chosen, us, spared_us, deadline)
    if improved != chosen:
        # Its gains were measured two by two, at other times: once more, all in turns.
        us, *again = contest.times([improved, *numbers.values()])
        took = dict(zip(numbers, again, strict=True))
        chosen, best = improved, min(took, key=lambda name: took[name])
        if took[best] < us * (1 - _TIE):
            chosen, us = numbers[best], took[best]
    shown = {f"{name}_us": round(each, 1) for name, each in took.items()}
    is_xla_alone = all(map(_is_near, found.values()))
    times = ProgramTimes(
        chosen_us=round(us, 1),
        is_xla_alone=is_xla_alone and is_all,
        is_all=is_all,
        **shown,
    )
    return contest.chosen(chosen), times


def _by_xla(choice: Choice) -> Choice:
    if choice.xla_us is None or not _is_near(choice):
        return choice
    return replace(choice, implementation="xla")


def _is_near(choice: Choice) -> bool:
    """Whether XLA may win in a program: the more it fuses, the less it takes."""
    times = choice.times_us
    return choice.xla_us is None or choice.xla_us <= _NEAR * min(times.values())


def _alone_us(choice: Choice | None) -> float | None:
    """Return the time of a choice's call by itself, None where it is not known."""
    return None if choice is None else choice.times_us.get(choice.implementation)


def _by_cudnn(choice: Choice) -> Choice:
    if choice.plan:
        return replace(choice, implementation="cudnn")
    return choice.without_contenders()


class _Contest:
    """Programs with their choices; each is compiled once."""

    def __init__(
        self,
        programs: _Programs,
        found: Mapping[Key, Choice],
        runs: Mapping[Key, int] | None,
        say: Callable[[str], None],
    ) -> None:
        self._programs = programs
        self._found = found
        self._runs = runs
        self._say = say
        self._chosen: dict[int, Chosen] = {}
        self._seconds_each = 0.0

    def enter(self, entries: Sequence[Chosen]) -> list[int | NotRunError]:
        """Compile the program with each of these; return its numbers, or why not."""
        start = time.monotonic()
        numbers = self._programs.compile([Trial(dict(chosen)) for chosen in entries])
        if entries:
            self._seconds_each = (time.monotonic() - start) / len(entries)
        for number, chosen in zip(numbers, entries, strict=True):
            if isinstance(number, int):
                self._chosen[number] = chosen
        return numbers

    def times(self, numbers: list[int]) -> list[float]:
        """Time programs, in turns."""
        return self._programs.times(numbers)

    def chosen(self, number: int) -> Chosen:
        """Return the choices of a program."""
        return self._chosen[number]

    def loses_far(self, by_cudnn: Chosen) -> bool:
        """Whether calls alone take far longer by cuDNN than by the kernels' winners."""
        lost_us = self._lost_us(self._found, by_cudnn, to="cudnn")
        return lost_us > _MOST_LOST * self._sum_us(self._found, self._found)

    def spared_us(
        self, by_xla: Chosen, numbers: Mapping[str, int], took: Mapping[str, float]
    ) -> float:
        """Return how much faster XLA's program is than its calls say, from 0 on.

        They say how much longer it takes than the program with the kernels' winners.
        """
        for name, number in numbers.items():
            if self._chosen[number] == by_xla:
                longer = took[name] - took["kernels"]
                lost_us = self._lost_us(self._found, by_xla, to="xla")
                return max(0.0, lost_us - longer)
        return math.inf  # It does not run.

    def _sum_us(self, chosen: Chosen, keys: Iterable[Key]) -> float:
        """Return how long calls take alone, all together; inf if that is not known."""
        if self._runs is None:
            return math.inf
        total = 0.0
        for key in keys:
            us = _alone_us(chosen[key])
            total += math.inf if us is None else self._runs[key] * us
        return total

    def _lost_us(self, old: Chosen, new: Chosen, *, to: str) -> float:
        """Return how much longer the calls take alone that another implementation gets.

        It is minus infinity where that is not known.
        """
        # A call that takes 10 us by cuDNN and 14 us by XLA, and runs 3 times, loses 12
        # us.
        moved = [
            key
            for key in self._found
            if key in new and ((x := new[key]) is None or x.implementation == to)
        ]
        before, after = self._sum_us(old, moved), self._sum_us(new, moved)
        return -math.inf if math.inf in (before, after) else after - before

    def improved(self, best: int, us: float, spared_us: float, deadline: float) -> int:
        """Change operations over: the one that gains most, or all that gain.

        ``us`` is the time of the best program. Operations stay whose calls take next to
        nothing of it, or lose much more than ``spared_us`` by going to XLA.
        """
        old, slack_us = self._chosen[best], _SLACK * us
        every = {op: self._changed(keys, old) for op, keys in self._operations()}
        changes = {
            op: change
            for op, change in every.items()
            if change
            and self._sum_us(old, change) > slack_us
            and self._lost_us(old, change, to="xla") <= spared_us + slack_us
        }
        changes = dict(itertools.islice(changes.items(), self._most_operations()))
        entered = self.enter([{**old, **change} for change in changes.values()])
        rivals = {
            op: rival
            for op, rival in zip(changes, entered, strict=True)
            if isinstance(rival, int)
        }
        if time.monotonic() > deadline:
            return best
        gains = self._gains(best, rivals)
        gaining = {op: rivals[op] for op, gain in gains.items() if gain > _TIE}
        if not gaining:
            return best
        best = gaining[max(gaining, key=lambda op: gains[op])]
        if len(gaining) > 1 and time.monotonic() <= deadline:
            every_gain = {k: x for op in gaining for k, x in changes[op].items()}
            (rival,) = self.enter([{**old, **every_gain}])
            if isinstance(rival, int):
                together = ", ".join(gaining)
                if self._gains(best, {together: rival})[together] > 0:
                    best = rival
        return best

    def _gains(self, best: int, rivals: Mapping[str, int]) -> dict[str, float]:
        """Return the share of the best program's time that each of its rivals saves."""
        if not rivals:
            return {}
        before_us, *after = self.times([best, *rivals.values()])
        for op, us in zip(rivals, after, strict=True):
            self._say(
                f"the whole program with {op} changed over: {us:.1f} µs, else "
                f"{before_us:.1f}"
            )
        return {op: 1 - us / before_us for op, us in zip(rivals, after, strict=True)}

    def _most_operations(self) -> int:
        """Return how many operations change over, by what a program took so far."""
        fitting = _SECONDS / max(self._seconds_each, _SECONDS / _MOST_OPERATIONS)
        return max(_FEWEST_OPERATIONS, int(fitting))

    def _operations(self) -> Iterator[tuple[str, list[Key]]]:
        """Yield operations that may change over, those that take longest first."""
        groups: dict[str, list[Key]] = {}
        weight: dict[str, float] = {}
        for key, choice in self._found.items():
            times = sorted(choice.times_us.values())
            if len(times) > 1 and times[1] <= _NEAR * times[0]:
                groups.setdefault(choice.op, []).append(key)
                runs = 1 if self._runs is None else self._runs[key]
                weight[choice.op] = weight.get(choice.op, 0.0) + runs * times[0]
        for op in sorted(groups, key=lambda op: -weight[op]):
            yield op, groups[op]

    def _changed(self, keys: Sequence[Key], old: Chosen) -> dict[Key, Choice]:
        """Return the calls of an operation that may gain by changing over."""
        found: dict[Key, Choice] = {}
        for key in keys:
            before, after = old[key], self._other(key, old[key])
            times = after.times_us
            is_as_fast = (
                before is None
                or times[after.implementation]
                <= times.get(before.implementation, math.inf) * _AS_FAST
            )
            if after.implementation == "xla" or is_as_fast:
                found[key] = after
        return found

    def _other(self, key: Key, choice: Choice | None) -> Choice:
        """Return the choice of the next fastest implementation; the winner for none."""
        found = self._found[key]
        if choice is None:
            return found
        times = found.times_us
        others = (name for name in times if name != choice.implementation)
        return replace(found, implementation=min(others, key=lambda name: times[name]))
