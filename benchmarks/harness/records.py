# SPDX-License-Identifier: Apache-2.0
"""Writes measurements as JSON, and reads those of earlier runs.

One record is one line, so that diffs are readable. Each row names the GPU that it was
measured on, since a run may measure a part of a table and keep the rest. Several
processes, one for each GPU, may measure a part each and write to the same folder.
"""

import argparse
import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

_GPU = "GPU"
Row = dict[str, Any]
_Case = TypeVar("_Case")


def add_part(parser: argparse.ArgumentParser) -> None:
    """Add the option by which processes share out the cases of a benchmark."""
    parser.add_argument(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="one of N parts of the cases, 0 the first; a process for each may write "
        "to the same folder",
    )


def _part(text: str) -> tuple[int, int]:
    """Return which part of how many, from "0/4"."""
    part, _, count = text.partition("/")
    if not 0 <= int(part) < int(count):
        raise ValueError(text)
    return int(part), int(count)


def part_of(cases: Sequence[_Case], options: argparse.Namespace) -> Sequence[_Case]:
    """Return the cases of the part that is asked for."""
    part, count = options.part
    return cases[part::count]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes that do so, too, from writing to a folder."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_records(path: Path, data: dict[str, Any]) -> None:
    """Write data whose lists at the top are records."""
    entries = (f"{_text(name)}: {_entry(value)}" for name, value in data.items())
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def on_this_gpu(rows: Sequence[Row], versions: dict[str, str]) -> list[Row]:
    """Return rows that name the GPU of a run, if they do not name theirs."""
    return [{_GPU: versions[_GPU], **row} for row in rows]


def kept_rows(path: Path) -> list[Row]:
    """Return the rows of an earlier run, with their GPU; none if there is no file."""
    if not path.exists():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    return on_this_gpu(data["rows"], data["environment"])


def others_of(path: Path, numbers: Collection[int], gpu: str) -> list[Row]:
    """Return the rows of an earlier run on a GPU about calls of other numbers."""
    return [
        row
        for row in kept_rows(path)
        if row["number"] not in numbers and row[_GPU] == gpu
    ]


def renewed(
    rows: Sequence[Row],
    measured: Sequence[Row],
    names: Sequence[str],
    order: Sequence[str],
) -> list[Row]:
    """Return rows in which new ones replace those of the same names.

    ``names`` are the fields that say what a row is about. The first of them has one of
    the values of ``order``, by which rows are sorted.
    """
    new = {tuple(row[name] for name in names) for row in measured}
    kept = [row for row in rows if tuple(row[name] for name in names) not in new]
    return sorted([*kept, *measured], key=lambda row: order.index(row[names[0]]))


def gpu_of(row: Row) -> str:
    """Return "H100" of a row from an "NVIDIA H100 80GB HBM3"."""
    words = row[_GPU].split()
    return words[1] if words[:1] == ["NVIDIA"] else row[_GPU]


def _entry(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _text(value)
    return "[\n" + ",\n".join(map(_text, value)) + "\n]"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
