# SPDX-License-Identifier: Apache-2.0
"""Plans outside the process: the extension's store on disk, and plan files."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jax_cudnn.graph import Target
from jax_cudnn.native._extension import extension
from jax_cudnn.native.planner import PlanInfo, as_bytes, plan_info


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedPlan:
    """A plan that was read from a plan file, with the graph and request it is for."""

    graph_json: str
    request: str
    plan: PlanInfo


def set_plan_store(directory: Path | None, limit_bytes: int) -> None:
    """Keep plans in a folder from now on, which is made at the first save.

    Args:
        directory: the folder; None to keep no plans on disk.
        limit_bytes: what its files may have together. Above that, those go that were
            not used for longest.
    """
    extension().set_plan_store(*_settings(directory, limit_bytes))


def set_plan_store_source(source: Callable[[], tuple[Path | None, int]]) -> None:
    """Have the extension ask for the arguments of ``set_plan_store`` when it plans.

    ``source`` is called at most once, on any thread, unless ``set_plan_store`` is
    called before; it must not call this module.
    """
    extension().set_plan_store_source(lambda: _settings(*source()))


def _settings(directory: Path | None, limit_bytes: int) -> tuple[bytes, int]:
    return b"" if directory is None else os.fsencode(directory), limit_bytes


def plan_store_files() -> tuple[int, int]:
    """Return how many plans the store has, and their bytes."""
    return extension().plan_store_files()


def clear_plan_store() -> None:
    """Remove the store's files; what cannot be removed stays."""
    extension().clear_plan_store()


def export_plan(graph_json: str, *, request: str = "", device: int = 0) -> bytes:
    """Return the plan of a graph on a CUDA device as a plan file, built if need be.

    Raises:
        UnsupportedError: cuDNN has no plan, or cannot write this one down.
    """
    return extension().export_plan(as_bytes(graph_json), as_bytes(request), device)


def import_plan(data: bytes, *, device: int = 0, keep: bool = False) -> ImportedPlan:
    """Make the plan of a plan file that of its graph and request on a CUDA device.

    A plan that is there already stays. The file holds native code, which will run:
    import only what comes from someone you trust. With ``keep``, the store gets the
    plan, as if it had been built here.

    Raises:
        LibraryError: it was made for another GPU, or with other libraries; names them.
        GraphError: the data are not a whole plan file.
    """
    return _imported(extension().import_plan(data, device, keep))


def export_plan_offline(
    graph_json: str, target: Target, device_properties: str, *, request: str = ""
) -> bytes:
    """Return a plan file for a described device, as ``plan_offline`` describes it."""
    return extension().export_plan_offline(
        graph=as_bytes(graph_json),
        request=as_bytes(request),
        device_properties=as_bytes(device_properties),
        gpu=target.name,
        sm_version=target.sm_version,
        sm_count=target.sm_count,
    )


def import_plan_offline(
    data: bytes, target: Target, device_properties: str
) -> ImportedPlan:
    """Read a plan file for a described device, without keeping its plan."""
    fields = extension().import_plan_offline(
        data=data,
        device_properties=as_bytes(device_properties),
        gpu=target.name,
        sm_version=target.sm_version,
        sm_count=target.sm_count,
    )
    return _imported(fields)


def _imported(fields: dict) -> ImportedPlan:
    return ImportedPlan(
        graph_json=fields["graph"],
        request=fields["request"],
        plan=plan_info(fields["plan"]),
    )
