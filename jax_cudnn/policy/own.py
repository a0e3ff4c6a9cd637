# SPDX-License-Identifier: Apache-2.0
"""The files of what was measured on this machine's GPUs, in the cache folder.

``plans.calibrate`` writes a file for each GPU and version of cuDNN. It is a table for
the policy (tables.py), with the measured rows from which its entries were derived.
"""

import functools
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_cudnn import cache
from jax_cudnn.errors import GraphError
from jax_cudnn.graph import Target

_log = logging.getLogger("jax_cudnn")

# The version of the file's form.
SCHEMA = 1
_FOLDER = "calibration"
_REMEDY = "Delete it, or run `jax-cudnn calibrate` again."


@dataclass(frozen=True, eq=False)
class File:
    """A file that was read: where it is, and its data."""

    path: Path
    data: Mapping[str, Any]


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


def read(path: Path) -> File:
    """Read a file.

    Raises:
      GraphError: it is none, which names it and says what to do.
      OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        check(data)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GraphError(f"{path} is not a calibration: {error}. {_REMEDY}") from error
    return File(path, data)


def check(data: Any) -> None:
    """Raise ValueError, KeyError or TypeError where data is not a calibration."""
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']} is not {SCHEMA}")
    for name, kind in _TYPES.items():
        if not isinstance(data[name], kind):
            raise TypeError(f"{name} is {type(data[name]).__name__}")
    for entry in data["kernels"]:
        name, *numbers = entry
        is_positive = all(type(x) in (int, float) and x > 0 for x in numbers)
        if not isinstance(name, str) or len(numbers) != 4 or not is_positive:
            raise ValueError(f"{entry} is no kernel")


_TYPES: dict[str, type] = {
    **{"gpu": str, "sm_version": int, "cudnn": int, "environment": dict},
    **dict.fromkeys(("rows", "orders", "kernels", "measured"), list),
    **{"slow_engines": dict, "preferred": list, "engines": list},
}


@functools.cache
def files() -> tuple[File, ...]:
    """Return the files that are there. One that cannot be read is warned about."""
    found: list[File] = []
    for path in paths():
        try:
            found.append(read(path))
        except (GraphError, OSError) as error:
            _log.warning("what was calibrated is not used: %s", error)
    return tuple(found)


def paths() -> list[Path]:
    """Return where there are files."""
    place = folder()
    return [] if place is None else sorted(place.glob(f"*-{SCHEMA}.json"))


def forget() -> None:
    """Read the files again when they are next asked for."""
    files.cache_clear()
