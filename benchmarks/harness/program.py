# SPDX-License-Identifier: Apache-2.0
"""Runs benchmarks: their options, the cases that are asked for, and their tables."""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.harness.page import Row
from benchmarks.harness.records import Data, Table


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


_Case = TypeVar("_Case")
_Named = TypeVar("_Named", bound=_HasName)


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


def named(
    made: argparse.ArgumentParser, cases: Sequence[_Named], patterns: Sequence[str]
) -> list[_Named]:
    """Return the cases whose names are like one of the patterns, or end the program."""
    found = [x for x in cases if any(fnmatchcase(x.name, y) for y in patterns)]
    if not found:
        names = [case.name for case in cases]
        made.error(f"--only {patterns} names no workload; there are {names}")
    return found


def run_benchmark(
    doc: str | None,
    cases: Callable[..., Sequence[Any]],
    measure: Callable[[Sequence[Any]], Iterator[Row]],
    markdown: Callable[[Data], str],
    *,
    name: str,
    **table: Any,
) -> None:
    """Take the options, measure the cases, and write both files after each row.

    ``cases`` is given whether they are to be ``small``, to try the program. Rows stay
    only beside others of the same versions, unless ``table`` has `Table`'s other
    arguments. By default, what was measured is in dicts, and all else says what the row
    is about.
    """
    made = parser(doc)
    add_cases(made)
    made.add_argument(
        "--name", default=name, help="of the files; another one for another cuDNN"
    )
    options = made.parse_args()
    every = cases(small=options.small)
    asked = chosen(every, options)
    own = Table(
        folder=options.out,
        name=options.name,
        markdown=markdown,
        **{"keeps": "these versions", **table},
    )
    if len(asked) == len(every):
        own.forget()
    own.earlier()  # before anything is measured, since it may be refused
    for row in measure(asked):
        own.add(row)
        told = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
        print(", ".join(map(str, told.values())), flush=True)
