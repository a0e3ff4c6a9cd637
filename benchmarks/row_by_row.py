# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark that writes its data and its page after each row."""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import write_records
from benchmarks.report import environment


def run_benchmark(
    doc: str | None,
    cases: Callable[..., Sequence[Any]],
    measure: Callable[[Sequence[Any]], Iterator[dict[str, Any]]],
    markdown: Callable[[dict[str, Any]], str],
    *,
    data: str,
    page: str,
) -> None:
    """Take the arguments, measure the cases, and write the files of these names.

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
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    versions = environment()
    chosen = cases(small=options.small)
    rows: dict[str, dict[str, Any]] = {}
    if options.only is not None:
        chosen = [case for case in chosen if re.search(options.only, str(case))]
        if not chosen:
            parser.error(f"no case has {options.only} in it")
        earlier, before = _earlier_rows(options.out / data, versions)
        rows.update((_name(row), row) for row in earlier)
        versions = _of_both(before, versions)
    for row in measure(chosen):
        rows[_name(row)] = row
        found = {"environment": versions, "rows": [*rows.values()]}
        write_records(options.out / data, found)
        (options.out / page).write_text(markdown(found))
        print(_name(row), flush=True)


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


def _name(row: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in row.items() if not isinstance(v, dict)})
