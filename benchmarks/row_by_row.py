# SPDX-License-Identifier: Apache-2.0
"""How does a benchmark run that writes its data and its page after each row?"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.records import write_records
from benchmarks.report import environment


def run_benchmark(
    doc: str | None,
    cases: Callable[..., Any],
    measure: Callable[[Any], Iterator[dict[str, Any]]],
    markdown: Callable[[dict[str, Any]], str],
    *,
    data: str,
    page: str,
) -> None:
    """Take the arguments, measure the cases, and write the files of these names.

    ``cases`` is given whether they are to be ``small``, to try the script.
    """
    assert doc is not None
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--small", action="store_true", help="small kernels")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"environment": environment(), "rows": []}
    for row in measure(cases(small=options.small)):
        found["rows"].append(row)
        write_records(options.out / data, found)
        (options.out / page).write_text(markdown(found))
    print(markdown(found))
