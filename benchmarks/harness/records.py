# SPDX-License-Identifier: Apache-2.0
"""Keeps measurements as JSON, beside the page that is written from them.

One row is one line, so that diffs are readable. A run may measure a part of a table and
keep the rest. Several processes, one for each GPU, may measure a part each and write to
the same folder.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.page import Data, Page, Row
from benchmarks.harness.versions import environment

# Which rows of earlier runs stay: those of other keys, of any GPU or of the run's own,
# only if GPU, JAX and cuDNN are the same (the run fails if not), or none.
Keeps = Literal["any GPU", "this GPU", "these versions", "nothing"]
_EITHER = " or "


@dataclass(kw_only=True)
class Table:
    """The rows of a record, and its page.

    Attributes:
      folder: of both files.
      page: the page, and ``name`` that of both files, by default the page's.
      keys: the fields that say what a row is about: new rows replace earlier ones of
        the same. Default: all fields that are no dict.
      order: values of the first keys, by which rows are sorted; others are dropped.
        "keys": by the keys themselves. Default: the order of the file, and new ones at
        its end.
      keeps: which rows of earlier runs stay. Where they may be of several GPUs, each
        row names its own.
      about: what the record has beside versions and rows; of "these versions", only
        rows of the same stay.
      versions: of GPU and packages.
    """

    folder: Path
    page: Page
    name: str = ""
    keys: Sequence[str] = ()
    order: Sequence[Any] | Literal["keys"] = ()
    keeps: Keeps = "any GPU"
    about: Mapping[str, Any] = field(default_factory=lambda: {})
    versions: dict[str, str] = field(default_factory=lambda: environment())
    _new: list[Row] = field(default_factory=lambda: [])

    @property
    def file(self) -> Path:
        """The file of the record."""
        return self.folder / f"{self.name or self.page.name}.json"

    def forget(self) -> None:
        """Drop the rows of earlier runs."""
        self.file.unlink(missing_ok=True)

    def earlier(self) -> tuple[list[Row], dict[str, str]]:
        """Return the rows of earlier runs that stay, and the versions of all rows."""
        if self.keeps == "nothing" or not self.file.exists():
            return [], self.versions
        if self.keeps != "these versions":
            is_own = self.keeps == "this GPU"
            kept = kept_rows(self.file)
            own = self.versions["GPU"]
            return [x for x in kept if not is_own or x["GPU"] == own], self.versions
        found = json.loads(self.file.read_text(encoding="utf-8"))
        before = {**found["environment"], **found}
        now = {**self.versions, **self.about}
        for name in ("GPU", "JAX", "cuDNN", *self.about):
            old, new = before.get(name), now.get(name)
            if old != new:
                raise SystemExit(
                    f"{self.file} was measured with {name} {old}, and this is {new}. "
                    "Measure all without --only, or write to another folder with --out."
                )
        return found["rows"], _of_both(found["environment"], self.versions)

    def add(self, *rows: Row) -> None:
        """Put new rows in their places, and write both files.

        After each case, so that a run that is cut off leaves what it measured.
        """
        is_named = self.keeps in ("any GPU", "this GPU")
        self._new += on_this_gpu(rows, self.versions) if is_named else rows
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            earlier, versions = self.earlier()
            self.write(
                {
                    "environment": versions,
                    **self.about,
                    "rows": renewed(earlier, self._new, self.keys, self.order),
                }
            )

    def write(self, data: Data) -> None:
        """Write both files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_records(self.file, data)
        self.file.with_suffix(".md").write_text(self.page(data), encoding="utf-8")


def renewed(
    rows: Sequence[Row],
    measured: Sequence[Row],
    keys: Sequence[str] = (),
    order: Sequence[Any] | Literal["keys"] = (),
) -> list[Row]:
    """Return rows in which new ones replace those of the same keys, sorted."""

    def key(row: Row) -> tuple[Any, ...]:
        if keys:
            return tuple(row.get(name) for name in keys)
        return tuple((k, str(v)) for k, v in row.items() if not isinstance(v, dict))

    new = {key(row) for row in measured}
    every = [*(row for row in rows if key(row) not in new), *measured]
    if order == "keys":
        return sorted(every, key=key)
    if not order:
        places = {x: i for i, x in enumerate(dict.fromkeys(map(key, [*rows, *every])))}
        return sorted(every, key=lambda row: places[key(row)])
    of = {x if isinstance(x, tuple) else (x,): i for i, x in enumerate(order)}
    length = len(next(iter(of)))
    known = [row for row in every if key(row)[:length] in of]
    return sorted(known, key=lambda row: of[key(row)[:length]])


def on_this_gpu(rows: Sequence[Row], versions: Mapping[str, str]) -> list[Row]:
    """Return rows that name the GPU of a run, if they do not name theirs."""
    return [{"GPU": versions["GPU"], **row} for row in rows]


def kept_rows(path: Path) -> list[Row]:
    """Return the rows of an earlier run, with their GPU; none if there is no file."""
    if not path.exists():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    return on_this_gpu(data["rows"], data["environment"])


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes that do so, too, from writing to a folder."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_records(path: Path, data: Mapping[str, Any]) -> None:
    """Write data whose lists at the top are records."""
    entries = (f"{_text(name)}: {_entry(value)}" for name, value in data.items())
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def _of_both(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """Return the versions, such as the driver's, of rows from before and from now."""
    known = {name: before[name].split(_EITHER) for name in now if name in before}
    return {
        name: _EITHER.join(dict.fromkeys([*known.get(name, []), value]))
        for name, value in now.items()
    }


def _entry(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _text(value)
    return "[\n" + ",\n".join(map(_text, value)) + "\n]"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
