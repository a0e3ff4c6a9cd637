# SPDX-License-Identifier: Apache-2.0
"""Runs benchmarks: their options, the cases that are asked for, and their tables."""

import argparse
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.page import Page, Row
from benchmarks.harness.records import Table

_Case = TypeVar("_Case")


def parser(
    doc: str | None, *, out: str = "build/benchmarks"
) -> argparse.ArgumentParser:
    """Return a program's options: the folder that it writes to."""
    assert doc is not None
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--out", type=Path, default=Path(out), help="of the files")
    return made


def add_cases(made: argparse.ArgumentParser) -> None:
    """Add the options that choose cases."""
    made.add_argument(
        "--only",
        metavar="REGEX",
        default="",
        help="these cases; the file's others stay",
    )
    made.add_argument(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="one of N parts of the cases, 0 the first; a process for each may write "
        "to the same folder",
    )
    made.add_argument("--small", action="store_true", help="small sizes, for a CPU")


def _part(text: str) -> tuple[int, int]:
    """Return which part of how many, from "0/4"."""
    part, _, count = text.partition("/")
    if not 0 <= int(part) < int(count):
        raise ValueError(text)
    return int(part), int(count)


def chosen(cases: Sequence[_Case], options: argparse.Namespace) -> Sequence[_Case]:
    """Return the cases that are asked for, by what they are called as a string."""
    found = [case for case in cases if re.search(options.only, str(case))]
    if not found:
        raise SystemExit(f"no case has {options.only} in it")
    part, count = options.part
    return found[part::count]


def run_benchmark(
    doc: str | None,
    cases: Callable[..., Sequence[Any]],
    measure: Callable[..., Iterator[Row | list[Row]]],
    page: Page,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    **table: Any,
) -> None:
    """Take the options, measure the cases, and write both files after each row.

    What ``measure`` yields may be several rows, to be written together.
    ``cases`` is given whether they are to be ``small``, to try the program. Rows stay
    only beside others of the same versions, unless ``table`` has `Table`'s other
    arguments. By default, what was measured is in dicts, and all else says what the row
    is about. A program's own ``options`` have argparse's arguments; ``measure`` is
    given their values by name.
    """
    made = parser(doc)
    add_cases(made)
    made.add_argument(
        "--name", default=page.name, help="of the files; another one for another cuDNN"
    )
    more = [made.add_argument(x, **y).dest for x, y in (options or {}).items()]
    given = made.parse_args()
    every = cases(small=given.small)
    asked = chosen(every, given)
    own = Table(
        folder=given.out,
        name=given.name,
        page=page,
        **{"keeps": "these versions", **table},
    )
    if len(asked) == len(every):
        own.forget()
    own.earlier()  # before anything is measured, since it may be refused
    measure = functools.partial(measure, **{x: getattr(given, x) for x in more})
    for found in measure(asked):
        rows = found if isinstance(found, list) else [found]
        own.add(*rows)
        for row in rows:
            told = (x for x in row.values() if not isinstance(x, dict | list))
            texts = (f"{x:.5g}" if isinstance(x, float) else str(x) for x in told)
            print(", ".join(texts), flush=True)
