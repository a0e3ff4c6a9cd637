# SPDX-License-Identifier: Apache-2.0
"""Writes the parts that pages of benchmarks share: the heading, tables and ranges."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Row = dict[str, Any]


def page(
    data: Mapping[str, Any],
    lines: Iterable[str],
    *,
    title: str,
    comment: str,
    command: str,
    names_gpus: bool = False,
) -> str:
    """Return a page with its heading; a ``comment`` says what it is about.

    With ``names_gpus`` each row says on which GPU it was measured.
    """
    versions = data["environment"]
    told = last_run_text(versions) if names_gpus else f"{versions_text(versions)}."
    heading = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        f"<!-- {comment} -->",
        "",
        f"# {title}",
        "",
        f"Printed by `{command}`; do not edit. {told}",
        "",
    ]
    return "\n".join([*heading, *lines]) + "\n"


def measured_by(name: str) -> str:
    """Return the command of a program whose page is among the measurements."""
    return f"python -m benchmarks.{name} --out docs/internals/measured"


def table(columns: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table, given "size | >ratio"; ">" is before numbers."""
    names = [name.strip() for name in columns.split("|")]
    heads = (name.removeprefix(">") for name in names)
    yield "|" + "".join(f" {head} |" if head else " |" for head in heads)
    yield line("---:" if name.startswith(">") else "---" for name in names)
    yield from map(line, rows)


def line(cells: Iterable[object]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def spread(row: Mapping[str, Any], name: str = "ratio", digits: int = 2) -> str:
    """Return the lowest and the highest of rounds, as in "0.71-0.94"."""
    return f"{row[f'{name}_low']:.{digits}f}-{row[f'{name}_high']:.{digits}f}"


def ranged(row: Mapping[str, Any], name: str = "ratio", digits: int = 2) -> str:
    """Return a median with its spread, as in "0.80 (0.71-0.94)"."""
    return f"{row[name]:.{digits}f} ({spread(row, name, digits)})"


def gpu_of(row: Row) -> str:
    """Return "H100" of a row from an "NVIDIA H100 80GB HBM3"."""
    words = row["GPU"].split()
    return words[1] if words[:1] == ["NVIDIA"] else row["GPU"]


def versions_text(versions: Mapping[str, str]) -> str:
    """Return the versions as a sentence has them."""
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def last_run_text(versions: Mapping[str, str]) -> str:
    """Return the versions for a page whose rows name their GPUs."""
    return f"Each row names its GPU. The last run: {versions_text(versions)}."
