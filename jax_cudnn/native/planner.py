# SPDX-License-Identifier: Apache-2.0
"""Asking cuDNN for plans, with typed answers; all of it opens cuDNN on first use.

What a caller asks of a plan is a text, the ``request``: that of a candidate, which pins
it; a filter of candidates (``config.PlanOptions`` writes one, see
``ffi/candidates/plan_request.h``); preferences, by which one of them is tried before
the others (``jax_cudnn/policy`` has them); or "" for the first that builds.

Every function raises ``GraphError`` for a malformed graph or request,
``UnsupportedError`` where cuDNN has no plan, with cuDNN's reasons, and ``LibraryError``
where a library, the driver or the device is missing.
"""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_cudnn.graph import Target
from jax_cudnn.native._extension import extension
from jax_cudnn.native.library import cudnn_version

# The engine of the plans that are cuBLASLt's: none of cuDNN's has this number.
CUBLASLT_ENGINE = 1000
# The engine of cuDNN's functions for causal convolutions, which are in no graph API.
CAUSAL_CONV_ENGINE = 1001


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One engine with its knobs, as cuDNN lists it for a graph.

    ``knobs`` are (name, value) pairs sorted by name. ``request`` asks for this very
    candidate when passed to ``plan``. Where this version of the frontend cannot name
    one of the knobs, it asks for the candidate's place among those of the engine; it is
    empty in other lists than cuDNN's first choices. ``variant`` counts the ways of
    writing the graph.
    ``workspace_bytes`` and ``build_ms`` are known where ``is_built``; ``failure`` says
    why a candidate that was tried did not build, ``refusal`` why what was asked for
    does not allow it: such a one is not built.
    """

    name: str
    engine: int
    knobs: tuple[tuple[str, int], ...]
    variant: int
    request: str
    behavior_notes: tuple[str, ...]
    numeric_notes: tuple[str, ...]
    is_built: bool
    workspace_bytes: int
    build_ms: float
    failure: str
    refusal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInfo(Candidate):
    """The plan that a graph runs with, and why those before it do not run it."""

    failures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStats:
    """The process's plan cache: entries, plans asked of cuDNN, requests answered.

    ``disk_hits`` and ``disk_misses`` count plans that were looked for on disk,
    ``disk_writes`` those that were kept there; ``disk_failures`` what went wrong, a
    damaged file or a full disk, ``disk_last_failure`` being the last such reason.
    """

    entries: int
    builds: int
    hits: int
    disk_hits: int = 0
    disk_misses: int = 0
    disk_writes: int = 0
    disk_failures: int = 0
    disk_last_failure: str = ""


def is_by_place(request: str) -> bool:
    """Whether a request pins a plan by its place among those of an engine.

    cuDNN may list others where the GPU is not there.
    """
    return '"nth":' in request


@functools.lru_cache(maxsize=4096)
def has_cublaslt_plan(graph_json: str) -> bool:
    """Whether cuBLASLt computes a graph as one kernel, with an epilogue of its own.

    Which ones these are is said in ``ffi/blas/blas_problem.h``. Whether it has a
    kernel for the sizes is known where the GPU is.
    """
    return bool(extension().has_blas_product(as_bytes(graph_json)))


def cublaslt_request(knobs: Mapping[str, int]) -> str:
    """Return the request for the first of cuBLASLt's plans that has all these knobs."""
    pin = {"engine": CUBLASLT_ENGINE, "knobs": dict(knobs), "variant": 0}
    return json.dumps(pin, sort_keys=True, separators=(",", ":"))


def cublaslt_preference(wanted: Sequence[Mapping[str, int]]) -> str:
    """Return the request by which plans of cuBLASLt are tried before cuDNN's.

    They are named by knobs, one after another. Elsewhere cuBLASLt may have none.
    """
    plans = [
        {"engine": CUBLASLT_ENGINE, "knobs": dict(knobs)}
        if knobs
        else {"engine": CUBLASLT_ENGINE}
        for knobs in wanted
    ]
    preferred = [{"first_engine": CUBLASLT_ENGINE, "wanted": plans}]
    return json.dumps({"preferred": preferred}, sort_keys=True, separators=(",", ":"))


def is_cublaslts(request: str) -> bool:
    """Whether a request pins a plan of cuBLASLt's, which is made where the GPU is."""
    return f'"engine":{CUBLASLT_ENGINE},' in request


def plan(graph_json: str, *, request: str = "", device: int = 0) -> PlanInfo:
    """Return the plan of a graph on a CUDA device; built once, then cached.

    Args:
        graph_json: canonical text of the graph.
        request: a pin, a filter (``ffi/candidates/plan_request.h``), or "".
        device: CUDA ordinal of the device.
    """
    fields = extension().plan(as_bytes(graph_json), as_bytes(request), device)
    return plan_info(fields)


def plan_info(fields: dict[str, Any]) -> PlanInfo:
    """Return what the extension says of a plan, typed."""
    failures = tuple(fields.pop("failures"))
    return PlanInfo(failures=failures, **_candidate_fields(fields))


def candidates(
    graph_json: str, *, request: str = "", device: int = 0
) -> tuple[Candidate, ...]:
    """Return cuDNN's candidates for a graph on a CUDA device, best guess first.

    None of them is built: some may fail to, when it comes to it. Those that the request
    does not allow say why in ``refusal``; ``UnsupportedError`` where it allows none.
    """
    listed = extension().list_candidates(
        as_bytes(graph_json), as_bytes(request), device
    )
    return tuple(Candidate(**_candidate_fields(fields)) for fields in listed)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchBuffers:
    """Device addresses of the operands and results of one launch."""

    operands: tuple[int, ...]
    results: tuple[int, ...]


def time_plan(
    graph_json: str,
    sets: Sequence[LaunchBuffers],
    *,
    workspace: int,
    request: str = "",
    device: int = 0,
    launches: int = 10,
    samples: int = 5,
) -> tuple[float, ...]:
    """Return microseconds a launch of a plan, one number per sample.

    Launches on a stream of its own, taking the sets of buffers in turn, and measures
    with the device's events.

    Args:
        graph_json: canonical text of the graph.
        sets: the memory to work in, which must be alive and of the right sizes.
        workspace: device address of the plan's scratch memory.
        request: a pin, or "" for the first that builds.
        device: CUDA ordinal of the device.
        launches: launches between two events.
        samples: measurements.
    """
    times = extension().time_plan(
        graph=as_bytes(graph_json),
        request=as_bytes(request),
        device=device,
        sets=[(list(each.operands), list(each.results)) for each in sets],
        workspace=workspace,
        launches=launches,
        samples=samples,
    )
    return tuple(times)


def plan_offline(
    graph_json: str,
    target: Target,
    device_properties: str,
    *,
    request: str = "",
    build: bool = True,
) -> tuple[Candidate, ...]:
    """Return the candidates for a described device, which need not be there.

    Args:
        graph_json: canonical text of the graph.
        target: the device; its ``sm_version`` and ``sm_count`` count.
        device_properties: cuDNN's JSON description of it, as from
            ``device_properties``.
        request: a pin lists only its candidate; a filter marks those that it does not
            allow with their ``refusal``.
        build: try the candidates that are allowed in order until one builds.
    """
    listed = extension().plan_offline(
        graph=as_bytes(graph_json),
        request=as_bytes(request),
        device_properties=as_bytes(device_properties),
        sm_version=target.sm_version,
        sm_count=target.sm_count,
        build=build,
    )
    return tuple(Candidate(**_candidate_fields(fields)) for fields in listed)


@functools.cache
def device_target(device: int = 0) -> Target:
    """Return name, compute capability and size of a CUDA device, with cuDNN's version.

    Raises:
        LibraryError: there is no driver, no device or no cuDNN.
    """
    info = extension().device_info(device)
    return Target(cudnn_version=cudnn_version().version, **info)


def device_properties(device: int = 0) -> str:
    """Return cuDNN's JSON description of a CUDA device, for ``plan_offline``."""
    return extension().device_properties(device)


def cache_stats() -> CacheStats:
    """Return the counters of the process's plan cache."""
    fields = extension().cache_stats()
    # A path is in it, in whatever bytes.
    reason = os.fsdecode(fields.pop("disk_last_failure"))
    return CacheStats(**fields, disk_last_failure=reason)


def clear_cache() -> None:
    """Forget all plans; those that compiled programs hold stay alive."""
    extension().clear_cache()


def as_bytes(text: str) -> bytes:
    """Return text as the extension takes it."""
    # The reader refuses what is not UTF-8, surrogates included, as a malformed graph.
    return text.encode("utf-8", "surrogatepass")


def _candidate_fields(fields: dict[str, Any]) -> dict[str, Any]:
    for name in ("behavior_notes", "numeric_notes"):
        fields[name] = tuple(fields[name])
    fields["knobs"] = tuple(sorted(fields["knobs"].items()))
    return fields
