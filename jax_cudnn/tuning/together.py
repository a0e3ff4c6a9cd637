# SPDX-License-Identifier: Apache-2.0
"""Compiles on all cores at once, and in part while the GPU is timed.

XLA and cuDNN compile outside of Python's lock, and one thread times the GPU. The
follow-up of a task (`WithFollowUp`) runs in a second thread, one after another. A task
that uses neither the GPU nor much of this process (`Background`) runs while the GPU is
timed.

For example, two works that each need two results. The first tasks of both run at the
same time, and then the second tasks of both:

>>> def work(x):
...     (compiled,) = yield [lambda: x + 1]  # stands for a compilation
...     (loaded,) = yield [lambda: compiled * 2]
...     return loaded
>>> list(in_stages([work(1), work(10)]))
[4, 22]
"""

import functools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

_log = logging.getLogger("jax_cudnn")

_T = TypeVar("_T")
Task = Callable[[], Any]


@dataclass(frozen=True)
class WithFollowUp:
    """A task, and a follow-up that takes its result while other tasks run."""

    task: Task
    after: Callable[[Any], Any]

    def __call__(self) -> Any:
        """Run the task, and then its follow-up."""
        return self.after(self.task())


@dataclass(frozen=True)
class Background:
    """A task that runs beside others, and what follows it when nothing is timed.

    ``after`` takes a function that returns the task's result or raises its exception.
    """

    task: Task
    after: Callable[[Callable[[], Any]], Any]


# A generator. It yields the tasks whose results it needs next, and is sent these.
Work = Generator[Sequence[Task | Background], list[Any], _T]

# More than that many programs at a time would need much of the host's memory.
_MOST_THREADS = 16


def workers() -> int:
    """Return how many tasks run at once."""
    return min(_MOST_THREADS, os.cpu_count() or 1)


def together(tasks: Sequence[Callable[[], _T]]) -> list[_T]:
    """Run the tasks at the same time, and return their results in order.

    The time of each is logged.
    """
    is_double = jax.config.read("jax_enable_x64")
    start = time.monotonic()
    spent: defaultdict[str, list[float]] = defaultdict(list)

    def timed(name: str, task: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        with jax.enable_x64(is_double):  # which holds for a thread
            result = task()
        spent[name].append(time.monotonic() - begun)
        return result

    with ThreadPoolExecutor(workers()) as pool, ThreadPoolExecutor(1) as one:

        def run(task: Callable[[], Any]) -> Any:
            if not isinstance(task, WithFollowUp):
                return timed(_name(task), task)
            after = functools.partial(task.after, timed(_name(task.task), task.task))
            return one.submit(timed, _name(after), after)

        # Of three compilations, the third may have to run once on the GPU. It begins
        # first, so that its run may be over when the other two are compiled.
        # Tasks with a follow-up come first: follow-ups run one after another.
        order = sorted(
            range(len(tasks)), key=lambda i: not isinstance(tasks[i], WithFollowUp)
        )
        try:
            ran = pool.map(run, [tasks[i] for i in order])
            found = dict(zip(order, ran, strict=True))
            results = [
                x.result() if isinstance(x := found[i], Future) else x
                for i in range(len(tasks))
            ]
        except BaseException:
            for each in (pool, one):
                each.shutdown(wait=False, cancel_futures=True)
            raise
    shares = ", ".join(
        f"{len(each)} x {name} {sum(each):.1f} s, the longest {max(each):.1f}"
        for name, each in sorted(spent.items())
    )
    _log.debug("at once, in %.1f s: %s", time.monotonic() - start, shares)
    return results


def _name(task: Callable[[], Any]) -> str:
    while (function := getattr(task, "func", None)) is not None:
        task = function
    return getattr(task, "__qualname__", type(task).__name__).rpartition(".")[2]


def in_stages(works: Sequence[Work[_T]]) -> Iterator[_T]:
    """Yield what the works return, in their order.

    Their tasks run together. Between these, one work after another goes on. Tasks in
    the background begin as soon as a work yields them.
    """
    background = ThreadPoolExecutor(workers())

    def begun(tasks: Sequence[Task | Background]) -> list[Task]:
        return [
            functools.partial(each.after, background.submit(each.task).result)
            if isinstance(each, Background)
            else each
            for each in tasks
        ]

    # Works 0 and 1 are generators. `asked` has the tasks that each one has yielded:
    # they run together, and each work is sent its own results and yields its next
    # tasks. If work 1 ends first, its result waits in `returned` for that of work 0.
    try:
        asked = {i: begun(next(work)) for i, work in enumerate(works)}
        returned: dict[int, _T] = {}
        yielded = 0
        while asked:
            found = iter(together([task for tasks in asked.values() for task in tasks]))
            answers = {i: [next(found) for _ in tasks] for i, tasks in asked.items()}
            asked = {}
            for i, answer in answers.items():
                try:
                    asked[i] = begun(works[i].send(answer))
                except StopIteration as end:
                    returned[i] = end.value
                while yielded in returned:
                    yield returned.pop(yielded)
                    yielded += 1
    finally:
        background.shutdown(wait=False, cancel_futures=True)
