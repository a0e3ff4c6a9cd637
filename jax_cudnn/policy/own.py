# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the calibration files of this machine's GPUs in the cache folder.

``plans.calibrate`` writes a file for each GPU and version of cuDNN. It is a table for
the policy (tables.py), with the measured rows from which its entries were derived.
"""

import functools
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jax_cudnn import cache
from jax_cudnn.errors import GraphError, LibraryError
from jax_cudnn.graph import Target, version_text
from jax_cudnn.policy.own_form import SCHEMA, check

_log = logging.getLogger("jax_cudnn")

# What a change of makes measurements older than they are.
_DEPENDS_ON = ("cuDNN", "JAX", "driver")
_FOLDER = "calibration"
_REMEDY = " Delete it, and run `jax-cudnn calibrate` again."


@dataclass(frozen=True, eq=False)
class File:
    """A file that was read: where it is, and its data."""

    path: Path
    data: Mapping[str, Any]

    def is_of(self, gpu: str, cudnn: int) -> bool:
        """Whether it has kernels of a GPU with a cuDNN, such as 919."""
        same = (self.data["gpu"], self.data["cudnn"]) == (gpu, cudnn)
        return same and bool(self.data["kernels"])

    def changes(self, cudnn_version: int) -> tuple[str, ...]:
        """Return what kernels were measured with that is not here.

        Such as "JAX 0.11.2, here 0.12.0 (400 kernels)".
        """
        now = environment(cudnn_version)
        shown = Counter(
            change for row in self.data["measured"] for change in changes_of(row, now)
        )
        return tuple(f"{change} ({count} kernels)" for change, count in shown.items())


def folder() -> Path | None:
    """Return where the files are; None where nothing is kept on disk."""
    directory = cache.settings().directory
    return None if directory is None else directory / _FOLDER


def path_of(target: Target) -> Path | None:
    """Return the file of a GPU and a version of cuDNN, whether it is there or not."""
    place = folder()
    name = re.sub("[^a-z0-9]+", "-", target.name.lower()).strip("-")
    cudnn = target.cudnn_version // 100
    return None if place is None else place / f"{name}-cudnn{cudnn}-{SCHEMA}.json"


def read(path: Path, *, remedy: str = _REMEDY) -> File:
    """Read a file.

    Raises:
      GraphError: it is no calibration. The message names it and says what to do.
      LibraryError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        check(data)
    except OSError as error:
        raise LibraryError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise GraphError(f"{path} is not a calibration: {error}.{remedy}") from error
    return File(path, data)


@functools.cache
def files() -> tuple[File, ...]:
    """Return the files that are there. One that cannot be read is warned about."""
    found, broken = read_all()
    for shown in broken:
        _log.warning("what was calibrated is not used: %s", shown)
    return tuple(found)


def read_all(*, remedy: str = _REMEDY) -> tuple[list[File], tuple[str, ...]]:
    """Return the files that are there, and what is wrong with those that are broken."""
    found: list[File] = []
    broken: list[str] = []
    for path in paths():
        try:
            found.append(read(path, remedy=remedy))
        except (GraphError, LibraryError) as error:
            broken.append(str(error))
    return found, tuple(broken)


def paths() -> list[Path]:
    """Return where there are files."""
    place = folder()
    return [] if place is None else sorted(place.glob(f"*-{SCHEMA}.json"))


def forget() -> None:
    """Read the files again when they are next asked for."""
    files.cache_clear()


def changes_of(row: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """Return what differs from where a row was measured; what is not told does not."""
    then = row["with"]
    return [
        f"{name} {then[name]}, here {now[name]}"
        for name in _DEPENDS_ON
        if then.get(name) and now[name] and then[name] != now[name]
    ]


def environment(cudnn_version: int) -> dict[str, str]:
    """Return the versions that times depend on, "" for what is not told."""
    return {
        "cuDNN": version_text(cudnn_version),
        "JAX": metadata.version("jax"),
        "driver": _driver(),
    }


def _driver() -> str:
    """Return the version of the driver's kernel module."""
    try:
        text = Path("/sys/module/nvidia/version").read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""
    return text.strip()
