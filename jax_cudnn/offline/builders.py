# SPDX-License-Identifier: Apache-2.0
"""Plans for the GPU that is here, built by several processes at once.

cuDNN compiles a plan under a lock of its process. On 16 cores, 16 threads built plans
5.5 times as fast as one thread, and six processes six times as fast. They see no GPU:
each is told which one it builds for, and writes plan files.
"""

import dataclasses
import functools
import logging
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax_cudnn import native
from jax_cudnn.errors import GraphError, LibraryError, UnsupportedError
from jax_cudnn.graph import Target
from jax_cudnn.native import PlanInfo
from jax_cudnn.offline.process import (
    BACKGROUND_COMMAND,
    PlanningProcess,
    raise_crash,
)

_log = logging.getLogger("jax_cudnn")


class PlanBuilders:
    """Processes that build plans for a GPU; thread-safe.

    What they cannot build is left to this process, which then says why.
    """

    def __init__(
        self, target: Target, ordinal: int, processes: Sequence[PlanningProcess]
    ) -> None:
        """Take the GPU, by its description and CUDA ordinal, and who builds."""
        self._name, self._ordinal = target.name, ordinal
        self._question: dict[str, Any] = {
            "target": dataclasses.asdict(target),
            "device_properties": native.device_properties(ordinal),
        }
        self._idle: queue.SimpleQueue[PlanningProcess] = queue.SimpleQueue()
        for process in processes:
            self._idle.put(process)
        self._asks = self._imports = True

    def plan(self, graph_json: str, request: str) -> PlanInfo:
        """Return the plan of a graph, as ``native.plan`` does.

        Raises:
          UnsupportedError: cuDNN crashed on it; and what ``native.plan`` raises.
        """
        built = functools.partial(self.built_elsewhere, graph_json, request)
        return self.taken(graph_json, request, built)

    def built_elsewhere(self, graph_json: str, request: str) -> bytes | None:
        """Return the plan file that another process wrote; None if none could.

        A plan that is pinned by its place is not asked for: they may list others. Nor
        is one of cuBLASLt's, which they cannot make. This needs neither the GPU nor
        much time of this process.

        Raises:
          UnsupportedError: cuDNN crashed on it.
        """
        is_of_here = native.is_by_place(request) or native.is_cublaslts(request)
        if is_of_here or not (self._asks and self._imports):
            return None
        with tempfile.TemporaryDirectory(prefix="jax_cudnn-") as folder:
            file = Path(folder) / "plan"
            question = {
                **self._question,
                "graph": graph_json,
                "request": request,
                "file": str(file),
            }
            process = self._idle.get()
            try:
                if not self._asks:  # Others found so, or stopped, in the meantime.
                    return None
                answer = process.ask(question)
            except LibraryError as error:
                self._asks = False
                _log.debug("plans are built by this process alone: %s", error)
                return None
            finally:
                self._idle.put(process)
            raise_crash(answer, self._name)
            return file.read_bytes() if "file" in answer else None

    def stop(self) -> None:
        """Ask the processes for no more plans."""
        self._asks = False

    def taken(
        self, graph_json: str, request: str, built: Callable[[], bytes | None]
    ) -> PlanInfo:
        """Return the plan, given what returns or raises as ``built_elsewhere`` does.

        Raises what ``plan`` does.
        """
        data = built()
        if data is not None and self._imports:
            try:
                native.import_plan(data, device=self._ordinal, keep=True)
            except LibraryError as error:
                self._imports = False
                _log.debug("plans of other processes cannot be used: %s", error)
            except (GraphError, UnsupportedError, RuntimeError) as error:
                # Some plans of convolutions (cuDNN 9.19, H200) need more workspace than
                # they were written with.
                _log.debug("a plan of another process cannot be used: %s", error)
        return native.plan(graph_json, request=request, device=self._ordinal)


@contextmanager
def plan_builders(target: Target, ordinal: int, count: int) -> Iterator[PlanBuilders]:
    """Let so many processes build plans for a GPU of this machine, started when asked.

    They end after the block, without anyone waiting.
    """
    processes = _processes(count)
    builders = PlanBuilders(target, ordinal, processes)
    try:
        yield builders
    finally:
        builders.stop()
        for process in processes:
            threading.Thread(target=process.close, daemon=True).start()


@functools.cache
def _processes(count: int) -> tuple[PlanningProcess, ...]:
    return tuple(PlanningProcess(BACKGROUND_COMMAND) for _ in range(count))
