# SPDX-License-Identifier: Apache-2.0
"""Plans for a GPU by its name, as if it were here."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jax_cudnn.errors import (
    GraphError,
    LibraryError,
    UnsupportedError,
    install_command,
)
from jax_cudnn.graph import Target
from jax_cudnn.native import Candidate, PlanInfo
from jax_cudnn.offline.gpus import GpuDescription, find
from jax_cudnn.offline.process import PlanningProcess, raise_crash
from jax_cudnn.progress import waiting

_INSTALL = (
    "Planning for a GPU that is not here takes a cuDNN. A small one has the engines "
    f"that are compiled when they are planned: {install_command('gpuless')}. The full "
    f"one has all engines: {install_command('cuda13', 'cuda12')}."
)

# The driver's words for a kernel that was compiled for another GPU than it has.
_OTHER_GPU = "no kernel image is available for execution on the device"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedGpu:
    """A GPU that plans are made for and that need not be here."""

    description: GpuDescription
    target: Target
    # Even if there is one of its kind.
    is_here: ClassVar[bool] = False

    def plan(self, graph_json: str, request: str = "") -> PlanInfo:
        """Return the plan of a graph; the first of its candidates that builds.

        Raises:
          GraphError: the graph or the request is malformed.
          UnsupportedError: cuDNN has no plan, with its reasons; or it crashed.
          LibraryError: what planning needs is missing, or this machine's driver does
            not load what was compiled for the other GPU.
        """
        failures: list[str] = []
        for each in self._ask(graph_json, request, build=True):
            if each["is_built"]:
                return PlanInfo(failures=tuple(failures), **_fields(each))
            if why := each["failure"] or each["refusal"]:
                failures.append(f"{each['name']}: {why}")
        if any(_OTHER_GPU in failure for failure in failures):
            raise LibraryError(
                f"This machine's driver does not load kernels for {self.target.name} "
                f"(sm_{self.target.sm_version}), so that their plans cannot be "
                "finished here. Plan for it on a machine without NVIDIA's driver, or "
                "on one with such a GPU."
            )
        pinned = f" with the request {request}" if request else ""
        raise UnsupportedError(
            f"cuDNN has no plan that builds for this graph on {self.target.name}"
            f"{pinned}.",
            failures,
        )

    def candidates(self, graph_json: str, request: str = "") -> tuple[Candidate, ...]:
        """Return cuDNN's candidates for a graph, none of them built.

        Raises what ``plan`` raises.
        """
        listed = self._ask(graph_json, request, build=False)
        return tuple(Candidate(**_fields(each)) for each in listed)

    def _ask(self, graph_json: str, request: str, *, build: bool) -> list[Any]:
        answer = ask(graph_json, self.description, request, build=build)
        if "candidates" in answer:
            return answer["candidates"]
        raise_crash(answer, self.target.name)
        if answer["error"] == "UnsupportedError":
            raise UnsupportedError(
                answer["summary"], answer["reasons"], answer["advice"]
            )
        known = {"GraphError": GraphError, "LibraryError": LibraryError}
        raise known.get(answer["error"], RuntimeError)(answer["message"])


def named_gpu(name: str) -> NamedGpu:
    """Return the GPU of a name, with the cuDNN that is installed here.

    Raises:
      ValueError: no GPU of that name is known.
      LibraryError: cuDNN, or what it needs to plan, is not installed.
    """
    return _named_gpu(find(name))


@functools.cache
def _named_gpu(description: GpuDescription) -> NamedGpu:
    version = greeting()["cudnn_version"]
    return NamedGpu(description=description, target=description.target(version))


def obstacle() -> str | None:
    """Return what keeps plans from being made here for a GPU that is not, or None."""
    try:
        greeting()
    except LibraryError as error:
        return str(error)
    return None


def has_all_engines() -> bool:
    """Return whether the cuDNN that plans has its precompiled engines, too.

    The small wheel, nvidia-cudnn-jit, has only those that are compiled when planned.

    Raises:
      LibraryError: there is no cuDNN to plan with.
    """
    directory = Path(greeting()["cudnn_path"]).parent
    return (directory / "libcudnn_engines_precompiled.so.9").exists()


def greeting() -> dict[str, Any]:
    """Return which cuDNN plans: "cudnn_version", "cudnn_path", and the "driver".

    Raises:
      LibraryError: there is none, with how to install it.
    """
    try:
        return _process().greeting()
    except LibraryError as error:
        raise LibraryError(f"{error}\n{_INSTALL}") from None


def ask(
    graph_json: str, gpu: GpuDescription, request: str = "", *, build: bool
) -> dict[str, Any]:
    """Return the process's answer, as data: "candidates", "error" or "crash".

    Asked once for each graph, GPU and request, unless the answer may be another one the
    next time: a process that died may have been killed for memory.
    """
    try:
        return _ask(graph_json, gpu, request, build)
    except _PassingError as error:
        return error.answer


class _PassingError(Exception):
    """An answer that is not to be kept."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__()
        self.answer = answer


@functools.lru_cache(maxsize=4096)
def _ask(
    graph_json: str, gpu: GpuDescription, request: str, build: bool
) -> dict[str, Any]:
    with waiting("Planning", f"for {gpu.name}"):
        answer = _process().ask(question(graph_json, gpu, request, build=build))
    is_lasting = answer.get("error") in (None, "UnsupportedError", "GraphError")
    if "crash" in answer or not is_lasting:
        raise _PassingError(answer)
    return answer


def question(
    graph_json: str, gpu: GpuDescription, request: str, *, build: bool
) -> dict[str, Any]:
    """Return what is asked of the process: arguments of ``native.plan_offline``."""
    return {
        "graph": graph_json,
        "request": request,
        "target": dataclasses.asdict(gpu.target(greeting()["cudnn_version"])),
        "device_properties": gpu.properties,
        "build": build,
    }


@functools.cache
def _process() -> PlanningProcess:
    return PlanningProcess()


def _fields(candidate: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Candidate, with tuples where JSON has lists."""
    fields = dict(candidate)
    for name in ("behavior_notes", "numeric_notes"):
        fields[name] = tuple(fields[name])
    fields["knobs"] = tuple((name, value) for name, value in fields["knobs"])
    return fields
