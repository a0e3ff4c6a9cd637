# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark that writes its data and its page after each row."""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import add_part, locked, part_of, write_records
from benchmarks.harness.report import environment


def run_benchmark(
    doc: str | None,
    cases: Callable[..., Sequence[Any]],
    measure: Callable[[Sequence[Any]], Iterator[dict[str, Any]]],
    markdown: Callable[[dict[str, Any]], str],
    *,
    name: str,
) -> None:
    """Take the arguments, measure the cases, and write the files of this name.

    ``cases`` is given whether they are to be ``small``, to try the script. In a row,
    what was measured is in dicts, and all else says what the row is about.
    """
    assert doc is not None
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--small", action="store_true", help="small kernels")
    parser.add_argument(
        "--only", metavar="REGEX", help="these cases; what the file has is kept"
    )
    parser.add_argument(
        "--name", default=name, help="of the files; another one for another cuDNN"
    )
    add_part(parser)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    versions = environment()
    every = cases(small=options.small)
    wanted = re.compile(options.only or "")
    chosen = [case for case in every if wanted.search(str(case))]
    if not chosen:
        parser.error(f"no case has {options.only} in it")
    chosen = part_of(chosen, options)
    file = options.out / f"{options.name}.json"
    if len(chosen) == len(every):
        file.unlink(missing_ok=True)
    _earlier_rows(file, versions)
    for row in measure(chosen):
        with locked(options.out):
            # Other processes may have written rows.
            earlier, before = _earlier_rows(file, versions)
            rows = {_about(each): each for each in (*earlier, row)}
            found = {
                "environment": _of_both(before, versions),
                "rows": [*rows.values()],
            }
            write_records(file, found)
            file.with_name(f"{options.name}.md").write_text(markdown(found))
        print(_about(row), flush=True)


def _earlier_rows(
    file: Path, versions: dict[str, str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a file's rows and versions; GPU and packages have to be the same."""
    if not file.exists():
        return [], versions
    earlier = json.loads(file.read_text(encoding="utf-8"))
    for name in ("GPU", "JAX", "cuDNN"):
        old, new = earlier["environment"][name], versions[name]
        if old != new:
            raise SystemExit(
                f"{file} was measured with {name} {old}, and this is {new}. Measure "
                "all without --only, or write to another folder with --out."
            )
    return earlier["rows"], earlier["environment"]


def _of_both(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """Return the versions, such as the driver's, of rows from before and from now."""
    either = " or "
    known = {name: before[name].split(either) for name in now if name in before}
    return {
        name: either.join(dict.fromkeys([*known.get(name, []), value]))
        for name, value in now.items()
    }


def _about(row: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in row.items() if not isinstance(v, dict)})
