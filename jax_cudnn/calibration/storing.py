# SPDX-License-Identifier: Apache-2.0
"""Stores measurements as a policy table in the folder of the plan cache."""

import datetime
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax_cudnn
from jax_cudnn import cache
from jax_cudnn.calibration.choosing import name_of
from jax_cudnn.calibration.rules import (
    NO_RULES,
    Rules,
    entries,
    of_rows,
    rules_of,
    slow_engines,
)
from jax_cudnn.errors import LibraryError
from jax_cudnn.graph import Target, version_text
from jax_cudnn.lowering.decision import forget_decisions
from jax_cudnn.policy import own
from jax_cudnn.policy.own_form import SCHEMA
from jax_cudnn.policy.products.kernels import KINDS, is_measured
from jax_cudnn.policy.tables import shipped

# An engine is slow for all kernels of a kind if it was so for this many. The package's
# first table has more kernels, and fewer of them will do.
_FEWEST_OF_ENGINE = 8


def table_of(
    rows: Sequence[Mapping[str, Any]], target: Target, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the table that follows from measured rows, and the rows themselves."""
    # A short run times no kernels of an engine: what they gain is not known.
    products = [
        {name: x for name, x in row.items() if name != "kernels" or x}
        for row in rows
        if has_rules(row)
    ]
    others = [row for row in rows if not has_rules(row)]
    slow = slow_engines(products, fewest=_FEWEST_OF_ENGINE)
    rules = rules_of(products, slow, target.cudnn_version)
    known = _with_the_packages(rules, target)
    found = itertools.chain(of_rows(products, known), of_rows(others, NO_RULES))
    return {
        "schema": SCHEMA,
        "gpu": target.name,
        "sm_version": target.sm_version,
        "cudnn": target.cudnn_version // 100,
        "environment": dict(environment),
        "rows": [],
        "orders": [],
        "slow_engines": rules.slow,
        "preferred": list(rules.preferred),
        "engines": list(rules.engines),
        "kernels": entries(found),
        "measured": [*rows],
    }


def _with_the_packages(rules: Rules, target: Target) -> Rules:
    """Return rules with those of the package that hold for a target as well.

    Kernels are kept with the times of the plans that "auto" runs.
    """
    tables = [x for x in shipped() if x.is_of_architecture(target)]

    def of_tables(name: str) -> list[Mapping[str, Any]]:
        every = (each for table in tables for each in table.data.get(name, ()))
        return [each for each in every if is_measured(each, target)]

    slow = {name: {*engines} for name, engines in rules.slow.items()}
    for table in tables:
        for name, engines in table.data.get("slow_engines", {}).items():
            slow.setdefault(name, set()).update(engines)
    return Rules(
        slow={name: sorted(engines) for name, engines in slow.items()},
        preferred=[*rules.preferred, *of_tables("preferred")],
        engines=[*rules.engines, *of_tables("engines")],
    )


def has_rules(row: Mapping[str, Any]) -> bool:
    """Whether engines are slow for such kernels, or others go first.

    Depthwise convolutions have engines of their own.
    """
    kind, _, *words = row["class"].split(", ")
    return kind in KINDS and "depthwise" not in words


def environment_of(target: Target) -> dict[str, str]:
    """Return what a measurement depends on, and when and by what it was made."""
    return {
        "GPU": target.name,
        **own.environment(target.cudnn_version),
        "jax_cudnn": jax_cudnn.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def measured_rows(target: Target) -> list[dict[str, Any]]:
    """Return the rows that were measured with a GPU and a version of cuDNN.

    Raises:
      GraphError: their file is broken.
      LibraryError: it cannot be read.
    """
    path = own.path_of(target)
    if path is None or not path.exists():
        return []
    return [dict(row) for row in own.read(path).data["measured"]]


def fresh_rows(target: Target) -> list[dict[str, Any]]:
    """Return those of the rows that were measured with the versions that are here.

    Raises:
      GraphError: their file is broken.
      LibraryError: it cannot be read.
    """
    now = own.environment(target.cudnn_version)
    return [row for row in measured_rows(target) if not own.changes_of(row, now)]


def store(target: Target, found: Iterable[Mapping[str, Any]]) -> Path:
    """Add rows to those that are kept for a GPU, for this process and all others.

    What other processes added meanwhile stays. Where there is nothing to keep yet, this
    tells whether something can be.

    Raises:
      LibraryError: nothing is kept on disk, or it takes nothing.
      GraphError: the file that is there is broken.
    """
    path = own.path_of(target)
    if path is None:
        raise LibraryError(
            "nothing is kept on disk here, so no calibration can be: set "
            f"{cache.DIRECTORY_VARIABLE} to a folder, or call plans.set_cache"
        )
    try:
        with cache.exclusive(path.parent):
            cache.remove_unfinished(path)
            new = [
                {**row, "with": own.environment(target.cudnn_version)} for row in found
            ]
            every = {name_of(row): row for row in (*measured_rows(target), *new)}
            if every:
                data = table_of([*every.values()], target, environment_of(target))
                _write(path, data)
    except OSError as error:
        raise LibraryError(f"{path} cannot be written: {error}") from error
    reload()
    return path


def _write(path: Path, data: Mapping[str, Any], *, is_private: bool = True) -> None:
    text = to_text(data).encode("ascii")
    cache.replace_file(path, lambda file: file.write(text), is_private=is_private)


def to_text(data: Mapping[str, Any]) -> str:
    """Return the text of a table's file: a line for each entry of a list."""
    lines: list[str] = []
    for name, value in data.items():
        if isinstance(value, list) and value:
            entries = ",\n".join(json.dumps(each) for each in value)
            lines.append(f"{json.dumps(name)}: [\n{entries}\n]")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def reload() -> None:
    """Decide by the files as they are now."""
    own.forget()
    forget_decisions()


def export(path: Path, target: Target) -> None:
    """Write what is kept for a GPU and a version of cuDNN to a file.

    Raises:
      LibraryError: nothing is kept for these, or the file cannot be written.
      GraphError: what is kept is broken.
    """
    source = own.path_of(target)
    if source is None or not source.exists():
        raise LibraryError(
            f"nothing was calibrated for {target.name} with cuDNN "
            f"{version_text(target.cudnn_version)}: run `jax-cudnn calibrate`"
        )
    data = own.read(source).data
    try:
        _write(path, data, is_private=False)
    except OSError as error:
        raise LibraryError(f"{path} cannot be written: {error}") from error


def import_file(path: Path) -> Path:
    """Keep an exported file here, in place of what there is for its GPU and cuDNN.

    Raises:
      GraphError: it is no calibration.
      LibraryError: it cannot be read, or nothing is kept on disk.
    """
    data = own.read(path, remedy="").data
    target = Target(
        name=data["gpu"],
        sm_version=data["sm_version"],
        sm_count=0,
        cudnn_version=data["cudnn"] * 100,
    )
    place = own.path_of(target)
    if place is None:
        raise LibraryError("nothing is kept on disk here: see plans.set_cache")
    try:
        with cache.exclusive(place.parent):
            _write(place, data)
    except OSError as error:
        raise LibraryError(f"{place} cannot be written: {error}") from error
    reload()
    return place


def remove_all() -> int:
    """Remove all that was calibrated here; return how many files that were.

    Raises:
      LibraryError: a file cannot be removed.
    """
    found = own.paths()
    try:
        for path in found:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise LibraryError(f"a calibration cannot be removed: {error}") from error
    finally:
        reload()
    return len(found)
