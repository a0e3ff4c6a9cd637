# SPDX-License-Identifier: Apache-2.0
"""`plans.autotune`: times every plan of a function's cuDNN calls, and XLA's code.

`plans.autotuning` does so for whatever is compiled inside a `with` block.
"""

import functools
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.stages import Traced

from jax_cudnn import choices
from jax_cudnn.choices import Choice, Key, Trial
from jax_cudnn.columns import Block, Heading, Page, Table, Text
from jax_cudnn.config import Options
from jax_cudnn.errors import GraphError, LibraryError
from jax_cudnn.graph import Graph, is_anchor, kind_named, label, operand_text
from jax_cudnn.lowering import TracedGraph, TracedProgram, scoped, traced_program
from jax_cudnn.lowering.decision import decide_part, precision_refusal
from jax_cudnn.lowering.devices import gpu_for, local_device, local_target
from jax_cudnn.plans.calls import contenders_text
from jax_cudnn.progress import followed, is_shown
from jax_cudnn.tuning import (
    NotRunError,
    OutOfTimeError,
    Programs,
    expected_bytes,
    measure_each,
)
from jax_cudnn.tuning.in_context import ProgramTimes, settle

_log = logging.getLogger("jax_cudnn")

# A part, the request that says which plans are allowed, and whether sums in f32 are to
# have all their digits.
_New = tuple[Graph, str, bool]
_NO_PROGRAM = "the whole program was not measured"
# Building plans takes most of the time. Of 99 graphs of GPT-2, a Llama and ConvNeXt on
# an H200 (cuDNN 9.19), 92 have their best plan among these, and all one within 2.1 %.
_MAX_PLANS = 10
# Timing the whole program takes about so many times as long as compiling it once. This
# share of the budget is kept for it at most, and until that is known.
_PROGRAM_COMPILATIONS = 2.0
_PROGRAM_SHARE = 0.5


@dataclass(kw_only=True, repr=False)
class Tuning(Page):
    """The measurements of a tuning; ``str(tuning)`` is a table.

    ``left_count`` is the number of calls that were not measured, for lack of time.
    ``program`` has the times of the whole program, or says why there are none.
    """

    device: str
    choices: dict[Key, Choice] = field(default_factory=lambda: {})
    left_count: int = 0
    program: ProgramTimes | str = _NO_PROGRAM

    def _blocks(self) -> Iterator[Block]:
        names = ("op", "operands", "first / best", "cuDNN", "XLA", "others", "chosen")
        rows = [
            (
                choice.op,
                choice.operands,
                "-" if choice.first_ratio is None else f"{choice.first_ratio:.2f}",
                _text(choice.cudnn_us),
                _text(choice.xla_us),
                contenders_text(choice.contenders_us) or "-",
                choice.implementation,
            )
            for choice in self.choices.values()
        ]
        if not any(choice.contenders_us for choice in self.choices.values()):
            names, rows = _without_others(names), list(map(_without_others, rows))
        yield Heading(f"microseconds a call on {self.device}")
        yield Table(names, tuple(rows))
        if self.left_count:
            yield Text(f"not measured, for lack of time: {self.left_count}")
        yield Text(str(self.program))

    def save(self, path: str | Path, made: str = "plans.autotune") -> None:
        """Write a choices file, for ``plans.load_choices``."""
        said = f"{made}, JAX {jax.__version__}; {self.program}"
        choices.write(Path(path), self.choices, said)


def _without_others(cells: tuple[str, ...]) -> tuple[str, ...]:
    return (*cells[:-2], cells[-1])


def _text(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.1f}"


def autotune(
    function: Callable[..., Any] | Traced,
    *args: Any,
    budget_s: float = math.inf,
    max_plans: int | None = _MAX_PLANS,
    progress: bool = True,
    whole_program: bool = True,
    **kwargs: Any,
) -> Tuning:
    """Measure which plan is fastest for each cuDNN call of a function, and use it.

    For each convolution, matmul, attention, norm and pooling that
    ``function(*args, **kwargs)`` passes to cuDNN, gradients included if the function
    takes them, this times cuDNN's plans that the call's ``PlanOptions`` allow, and
    XLA's code. The fastest becomes the choice of this process and, by the cache folder
    (``plans.set_cache``), of later processes. Functions that are compiled afterwards
    use the choices; with ``implementation="auto"``, a choice may be XLA. Functions that
    were compiled before keep their plans. Kernels are timed on random operands of the
    same shapes, in memory of their own.

    XLA also fuses operations around a call, so at the end versions of the whole program
    are timed: with the choices, untuned, with XLA alone, and with cuDNN alone. Starting
    from the fastest, the calls of one operation at a time are moved between cuDNN and
    XLA. So the program is at least as fast as untuned, and as XLA alone if all calls
    were measured. docs/plans_reference.md says which versions and moves are left out.

    The whole program is timed on a second set of operands, which takes as much memory
    as the first. Floats are drawn from 0 to 1. Integers and booleans, which may be
    sizes of groups or lengths of sequences, are copies of the arguments, or 0 where
    only their shapes are passed. No argument is donated. If the memory is missing, or a
    program is divided among several devices, the kernels' choices stay, and the
    ``Tuning`` says so.

    Args:
      function: the function to trace, without running it; may be jitted, or
        ``jitted.trace(...)`` and no arguments. A program that was traced before has no
        norms that ``jax_cudnn.fuse`` could find.
      *args: as for ``plans.inspect``: arrays or shapes, and anything else that the
        function takes.
      budget_s: about how many seconds to spend. The calls that should take longest, by
        their sizes, are measured first. A call that is not measured keeps the plan that
        it had, and the ``Tuning`` counts such calls. Twice the time that the whole
        program takes to compile is reserved for timing it, and at most half of the
        budget. A compilation that has begun is finished. Default: no limit.
      max_plans: how many of cuDNN's plans to time of each rewrite of a call, in cuDNN's
        order. The first plan of each engine is always timed, and others only of engines
        whose first plan takes at most 1.5 times as long as the fastest of that rewrite.
        Default 10. None times all plans of all engines, which takes longer and seldom
        finds a faster one.
      progress: whether to show progress on stderr, if that is a terminal. Default
        True. ``JAX_CUDNN_PROGRESS=off`` turns it off everywhere.
      whole_program: whether to time the whole program at the end. Default True. The
        program is compiled up to four times, then once for each operation that may
        move, and a last time with the moves that save time. Up to six operations may
        move, fewer if their programs would take over 30 seconds, but at least two.
      **kwargs: as ``*args``.

    Returns:
      A ``Tuning``; its ``save`` writes a file that ``plans.load_choices`` reads.

    Raises:
      LibraryError: there is no NVIDIA GPU or no cuDNN here.
      GraphError: ``max_plans`` is below 1, or ``budget_s`` is nan.
    """
    tuner = _Tuner(budget_s=budget_s, max_plans=max_plans, progress=progress)
    try:
        with scoped(tuner=_all_at_once):
            traced = traced_program(function, *args, **kwargs)
        if whole_program:
            tuner.tune_program(traced)
        else:
            tuner.take(_parts(traced.graphs), runs=tuner.runs(traced))
    finally:
        tuner.finish()
    return tuner.tuning


def _all_at_once(graph: Graph, options: Options) -> None:
    """Measure nothing yet: `autotune` does when it has all graphs of a program.

    Where this is the tuner, functions are traced with all that could be cuDNN's.
    """
    del graph, options


@contextmanager
def autotuning(
    *,
    budget_s: float = math.inf,
    max_plans: int | None = _MAX_PLANS,
    progress: bool = True,
) -> Generator[Tuning]:
    """Measure which plans are fastest, for functions compiled inside a `with` block.

    This measures as ``plans.autotune`` does, when XLA compiles a function and asks for
    plans. Nothing else has to be changed in a training script. A call that already has
    a choice, for example from an earlier run, is not measured again, unless that
    choice's plan is gone or not allowed. Outside the block the functions are compiled
    again, with the same choices and no measuring.

    Args:
      budget_s: seconds to spend in the block. Default: no limit.
      max_plans: as for ``plans.autotune``.
      progress: whether to show progress on stderr, where that is a terminal. Default
        True. ``JAX_CUDNN_PROGRESS=off`` turns it off everywhere.

    Yields:
      A ``Tuning`` that fills as functions are compiled.

    Raises:
      LibraryError: there is no NVIDIA GPU or no cuDNN here.
      GraphError: ``max_plans`` is below 1, or ``budget_s`` is nan.

    Example:
      >>> with plans.autotuning() as tuning:  # doctest: +SKIP
      ...     state = train_step(state, batch)
      >>> tuning.save("choices.json")  # doctest: +SKIP
    """
    tuner = _Tuner(budget_s=budget_s, max_plans=max_plans, progress=progress)

    def before_deciding(graph: Graph, options: Options) -> None:
        if options.device is None:
            traced = TracedGraph(graph, options, is_linear=False)
            tuner.take(_parts([traced]), repeat=False)

    try:
        with scoped(tuner=before_deciding):
            yield tuner.tuning
    finally:
        tuner.finish()


def load_choices(path: str | Path) -> int:
    """Use a choices file from now on, and return how many choices it has.

    Entries for other GPUs and other versions of cuDNN are kept and have no effect.

    Raises:
      GraphError: the file is not a choices file.
    """
    loaded = choices.read(Path(path))
    choices.table().add(loaded)
    return len(loaded)


class _Tuner:
    """Measures parts, each once, while there is time."""

    def __init__(
        self, *, budget_s: float, max_plans: int | None, progress: bool
    ) -> None:
        if max_plans is not None and max_plans < 1:
            raise GraphError(
                f"max_plans is {max_plans}. Pass a number of plans from 1 on, or None "
                "to time all of them."
            )
        if math.isnan(budget_s):
            raise GraphError(
                "budget_s is nan. Pass a number of seconds, or math.inf for no limit."
            )
        local = local_target()
        if local is None:
            raise LibraryError(
                "Tuning needs an NVIDIA GPU; JAX sees none here. Tune on the machine "
                "that is to run the program, save the choices, and load them here."
            )
        self._target = local[1]
        self._start = time.monotonic()
        self._budget_s, self._deadline = budget_s, self._start + budget_s
        self._max_plans = max_plans
        self._progress = progress
        self._seen: set[_New] = set()
        self._before: dict[Key, Choice | None] = {}
        self.tuning = Tuning(device=self._target.name)

    def take(
        self,
        parts: Iterable[tuple[Graph, Options]],
        *,
        repeat: bool = True,
        runs: Mapping[Key, int] | None = None,
        programs: Programs | None = None,
    ) -> None:
        """Measure those of the parts that are new, and use what is found at once.

        Without ``repeat``, those that run by a choice from before are not new. ``runs``
        says how many times a program runs each: those that take it longest come first.
        Where there are ``programs``, time is kept for them, and the whole program is
        compiled meanwhile as it is untuned.
        """
        new: dict[_New, Options] = {}
        for part, options in parts:
            key = (part, options.plan.to_request(), options.exact_dtypes)
            is_new = key not in self._seen and key not in new
            if is_new and (repeat or not self._is_settled(part, options)):
                new[key] = options
        self._seen.update(new)

        def taken(each: _New) -> float:
            part, allowed, _ = each
            key = self._key(part, allowed)
            return (runs or {}).get(key, 1) * expected_bytes(part)

        order = sorted(new, key=taken, reverse=True)
        for part, allowed, _ in order:
            before = choices.table().get(part, self._target, allowed)
            self._before.setdefault(self._key(part, allowed), before)
        beside: list[Callable[[], Any]] = []
        if programs is not None:
            untuned = Trial(dict(self._before))
            beside.append(functools.partial(programs.compile_ahead, untuned))
        measured = measure_each(
            [(each[0], new[each]) for each in order],
            self._target,
            self._deadline,
            self._max_plans,
            functools.partial(self._kernels_until, programs),
            beside,
        )
        for i, (part, allowed, _) in enumerate(self._followed(order)):
            try:
                choice = next(measured)
            except OutOfTimeError:
                left = len(order) - i
                self.tuning.left_count += left
                self._show(f"out of time: {left} calls are left as they were")
                break
            key = self._key(part, allowed)
            found = {key: choice}
            self.tuning.choices.update(found)
            choices.table().add(found)
            self._show(
                f"{choice.op} {choice.operands}: "
                f"cuDNN {_text(choice.cudnn_us)} µs, XLA {_text(choice.xla_us)} µs"
                + "".join(f", {name} {us:.1f} µs" for name, us in choice.contenders_us)
            )

    def _kernels_until(self, programs: Programs | None) -> float:
        """Return when kernels should be done, so that there is time for programs."""
        if programs is None or self._deadline == math.inf:
            return self._deadline
        most_s = max(0.0, _PROGRAM_SHARE * self._budget_s)
        expected_s = _PROGRAM_COMPILATIONS * programs.compilation_s
        return self._deadline - min(most_s, expected_s)

    def _key(self, part: Graph, allowed: str) -> Key:
        return choices.key_of(part, self._target, allowed)

    def _is_settled(self, part: Graph, options: Options) -> bool:
        """Whether a part has a choice that is in force.

        One whose plan is gone, or is not allowed, is not.
        """
        choice = choices.table().get(part, self._target, options.plan.to_request())
        if choice is None or not choice.plan:
            return choice is not None
        if choice.implementation == "xla" and not any(map(is_anchor, part.nodes)):
            return True  # cuDNN runs sums alone only where that was faster.
        return decide_part(part, gpu_for(options), options).why == "tuned"

    def tune_program(self, traced: TracedProgram) -> None:
        """Measure all parts of a program, and then the program."""
        runs = self.runs(traced)
        try:
            if traced.is_divided:
                raise NotRunError("it is divided among devices")
            programs = Programs(traced.program, local_device(), traced.arrays)
        except NotRunError as error:
            self.take(_parts(traced.graphs), runs=runs)
            self.tuning.program = f"{_NO_PROGRAM}: {error}"
            return
        self.take(_parts(traced.graphs), runs=runs, programs=programs)
        self._settle(programs, runs)

    def _settle(self, programs: Programs, runs: Mapping[Key, int] | None) -> None:
        """Time the whole program, and use what makes that fastest."""
        tuning = self.tuning
        if not self._seen:
            tuning.program = f"{_NO_PROGRAM}: it has no such calls"
            return
        if not tuning.choices or time.monotonic() > self._deadline:
            tuning.program = f"{_NO_PROGRAM}, for lack of time"
            return
        try:
            chosen, times = settle(
                programs,
                tuning.choices,
                self._before,
                is_all=not tuning.left_count,
                runs=runs,
                deadline=self._deadline,
                say=self._show,
            )
        except NotRunError as error:
            tuning.program = f"{_NO_PROGRAM}: {error}"
        else:
            tuning.program = times
            measured = {key: chosen[key] for key in tuning.choices}
            choices.table().forget(key for key, x in measured.items() if x is None)
            tuning.choices = {key: x for key, x in measured.items() if x is not None}
            choices.table().add(tuning.choices)
        self._show(str(tuning.program))

    def runs(self, traced: TracedProgram) -> dict[Key, int] | None:
        """Return how many times a program runs each part; None if that is not known."""
        counted: Counter[Key] = Counter()
        for graph, runs in traced.counted():
            for part, options in _parts([graph]):
                if runs is None:
                    return None
                counted[self._key(part, options.plan.to_request())] += runs
        return counted

    def finish(self) -> None:
        """Keep what was found for other processes."""
        choices.remember(self.tuning.choices)

    def _followed(self, new: Collection[_New]) -> Iterable[_New]:
        if not self._progress:
            return new
        return followed(
            new,
            "Tuning",
            count=len(new),
            name=lambda each: f"{label(each[0])}({operand_text(each[0])})",
        )

    def _show(self, line: str) -> None:
        seconds = time.monotonic() - self._start
        _log.info("tuned after %.1f s: %s", seconds, line)
        if self._progress and is_shown():
            print(f"{seconds:6.1f} s {line}", file=sys.stderr, flush=True)


def _parts(found: list[TracedGraph]) -> Iterator[tuple[Graph, Options]]:
    for traced in found:
        if traced.decided_without_cudnn() is not None:
            continue
        options = traced.options
        for part in traced.parts:
            has_sums = any(kind_named(node.kind).row.is_sum for node in part.nodes)
            is_worth_it = has_sums or any(map(is_anchor, part.nodes))
            # Where cuDNN's precision is not enough, XLA runs it, whatever is faster.
            if is_worth_it and precision_refusal(part, options) is None:
                yield part, options
