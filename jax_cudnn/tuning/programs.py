# SPDX-License-Identifier: Apache-2.0
"""Times a whole program with one set of choices or another.

The program is a traced one. Each contender is compiled anew and runs on the same
operands. Floats are drawn. Integers and booleans are copies of the caller's, where
there are any: sizes of groups and lengths of sequences say how much work there is.
Nothing of the caller's is run or donated.
"""

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced

from jax_cudnn.choices import Trial
from jax_cudnn.errors import GraphError, LibraryError, UnsupportedError
from jax_cudnn.lowering import (
    constants_as_operands,
    is_array_aval,
    is_known_array,
    scoped,
)
from jax_cudnn.tuning.drawing import tables, taken
from jax_cudnn.tuning.memory import free_bytes, needed_bytes
from jax_cudnn.tuning.together import together

_log = logging.getLogger("jax_cudnn")

_ROUNDS = 7
_ROUND_US = 30_000.0
# After a few rounds, those that are this much slower than the fastest run no more.
_LOOK_ROUNDS = 3
_HOPELESS = 1.03


class NotRunError(Exception):
    """A program that cannot be run on drawn operands; the text says why."""


class Programs:
    """A traced program, to be compiled and timed with several sets of choices."""

    def __init__(
        self, program: Traced, device: Any, arrays: Sequence[Any] = ()
    ) -> None:
        """Take a program, and what it was traced with, as far as known.

        Raises:
          NotRunError: the program takes what cannot be drawn.
        """
        self._function, avals = constants_as_operands(program.jaxpr)
        for aval in avals:
            if not is_array_aval(aval):
                raise NotRunError(f"it takes {aval}, which is no array")
        self._avals = avals
        self._device = device
        self._calls: list[Callable[[], Any]] = []
        self._ahead: list[tuple[Trial, jax.stages.Compiled]] = []
        # How long the one ahead took; inf until it is there, and where it fails.
        self.compilation_s = math.inf
        constants = program.jaxpr.consts
        self._known = [*constants, *(arrays or [None] * (len(avals) - len(constants)))]

    @functools.cached_property
    def _operands(self) -> list[jax.Array]:
        """The operands, drawn: they take memory from when a program runs first."""
        with jax.default_device(self._device), _out_of_memory_is("its operands"):
            operands = [
                _operand(aval, i, array, self._device)
                for i, (aval, array) in enumerate(
                    zip(self._avals, self._known, strict=True)
                )
            ]
            return jax.block_until_ready(operands)

    def compile_ahead(self, trial: Trial) -> None:
        """Compile the program with choices that `compile` will be asked for.

        XLA tunes the program's own kernels, and remembers what it finds: versions that
        are compiled after another one take much less than those beside it.
        """
        start = time.monotonic()
        try:
            compiled = self._compiled(trial)
        except (GraphError, LibraryError, UnsupportedError) as error:
            _log.debug("the program is not compiled ahead: %s", error)
            return
        # What fails beside others may not fail alone.
        if not isinstance(compiled, NotRunError):
            self._ahead.append((trial, compiled))
            self.compilation_s = time.monotonic() - start

    def compile(self, trials: Sequence[Trial]) -> "list[int | NotRunError]":
        """Compile the program with each set of choices, all of them at once.

        Returns the numbers of the programs, or why one does not compile or run.
        """
        tasks = [functools.partial(self._compiled_once, trial) for trial in trials]
        return [self._number(each) for each in together(tasks)]

    def _compiled_once(self, trial: Trial) -> "jax.stages.Compiled | NotRunError":
        for ahead, compiled in self._ahead:
            if ahead.choices == trial.choices:
                return compiled
        return self._compiled(trial)

    def _compiled(self, trial: Trial) -> "jax.stages.Compiled | NotRunError":
        function = self._function
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self._avals]

        def program(*operands: jax.Array) -> list[jax.Array]:
            return function(*operands)

        try:
            with (
                scoped(tuner=None, trial=trial),
                jax.default_device(self._device),
                _out_of_memory_is("a compilation"),
            ):
                return jax.jit(program).lower(*types).compile()
        except NotRunError as error:
            return error

    def _number(
        self, program: "jax.stages.Compiled | NotRunError"
    ) -> "int | NotRunError":
        if isinstance(program, NotRunError):
            return program
        try:
            operands = self._operands
            # XLA would wait for memory, ten seconds long.
            needed, free = needed_bytes(program), free_bytes(self._device)
            if needed > free:
                raise NotRunError(
                    f"a run needs {needed / 2**30:.1f} GiB of memory, and "
                    f"{free / 2**30:.1f} GiB are free"
                )
            with _out_of_memory_is("a run"):
                jax.block_until_ready(program(*operands))
        except NotRunError as error:
            return error
        self._calls.append(lambda: program(*operands))
        return len(self._calls) - 1

    def times(self, numbers: Sequence[int]) -> list[float]:
        """Return the median microseconds of each of these programs, run in turns.

        Those that are far behind after the first rounds take no part in the others.
        """
        calls = [self._calls[number] for number in numbers]
        counts = [
            max(1, math.ceil(_ROUND_US / max(_run(call, 1), 1.0))) for call in calls
        ]
        samples: list[list[float]] = [[] for _ in calls]
        running = list(range(len(calls)))
        for turn in range(_ROUNDS):
            if turn == _LOOK_ROUNDS:
                best = min(map(statistics.median, samples))
                running = [
                    i
                    for i in running
                    if statistics.median(samples[i]) < best * _HOPELESS
                ]
                if len(running) == 1:
                    break  # The others are far behind.
            # Each is first now and then, so that none has the colder GPU.
            first = turn % len(running)
            for i in (*running[first:], *running[:first]):
                samples[i].append(_run(calls[i], counts[i]))
        return [statistics.median(each) for each in samples]


def _run(call: Callable[[], Any], count: int) -> float:
    result = None
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count * 1e6


@contextmanager
def _out_of_memory_is(what: str) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first = str(error).partition("\n")[0]
        raise NotRunError(f"{what} failed: {first}") from error


def _operand(aval: Any, number: int, array: Any, device: Any) -> jax.Array:
    """Return an array for an operand.

    Floats are from 0 to 1: second moments are not negative. Keys are 0, and so is what
    only its shape is known of: indices of 0 are inside of any array.
    """
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        uniform = tables(device).uniform
        return _uniform(uniform, np.uint32(number), aval.shape, dtype)
    if _is_count(array) and is_known_array(array, aval):
        return jax.device_put(jnp.asarray(array, dtype), device)
    return jnp.zeros(aval.shape, dtype)


def _is_count(array: Any) -> bool:
    """Whether it is integers or booleans that can be read."""
    if isinstance(array, jax.Array):
        if array.is_deleted():
            return False
    elif not isinstance(array, int | np.integer | np.bool_ | np.ndarray):
        return False
    dtype = jnp.result_type(array)
    return jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_


@functools.partial(jax.jit, static_argnums=(2, 3))
def _uniform(
    table: jax.Array, number: jax.Array, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    # One program for each shape.
    return taken(table, number, shape).astype(dtype)
