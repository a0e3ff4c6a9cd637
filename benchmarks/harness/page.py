# SPDX-License-Identifier: Apache-2.0
"""Writes the parts that pages of benchmarks share: the heading, tables and ranges."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Data = dict[str, Any]

# Formats of a row that has a ratio with its lowest and highest round.
RANGE = "{ratio_low:.2f}-{ratio_high:.2f}"
RANGED = "{ratio:.2f} (" + RANGE + ")"
FINE_RANGE = "{ratio_low:.3f}-{ratio_high:.3f}"
FINELY_RANGED = "{ratio:.3f} (" + FINE_RANGE + ")"


@dataclass(frozen=True, kw_only=True)
class Page:
    """The page of a program: called with the program's data, it returns the text.

    Attributes:
      name: of the page and of the record beside it.
      title: the page's heading.
      lines: returns what is below the heading, given the data.
      comment: what the page is about, which its source says, if it does.
      names_gpus: whether each row says on which GPU it was measured.
      command: what prints the page. Default: what the data say, or the program of the
        page's name, as one that writes to docs/internals/measured.
      head: returns the sentence about command and versions, given the data, where it
        is another one.
    """

    name: str
    title: str
    lines: Callable[[Data], Iterable[str]]
    comment: str = ""
    names_gpus: bool = False
    command: str = ""
    head: Callable[[Data], str] | None = None

    def __call__(self, data: Data) -> str:
        """Return the page as a file."""
        lines = [f"# {self.title}", "", (self.head or self._head)(data), ""]
        if self.comment:
            licence = "<!-- SPDX-License-Identifier: Apache-2.0 -->"
            lines = [licence, f"<!-- {self.comment} -->", "", *lines]
        return "\n".join([*lines, *self.lines(data)]) + "\n"

    def _head(self, data: Data) -> str:
        versions = data["environment"]
        told = versions_text(versions) + "."
        if self.names_gpus:
            told = last_run_text(versions)
        command = (
            self.command
            or data.get("command")
            or (f"python -m benchmarks.{self.name} --out docs/internals/measured")
        )
        return f"Printed by `{command}`; do not edit. {told}"


def table_of(rows: Iterable[Mapping[str, Any]], columns: str, form: str) -> list[str]:
    """Return the lines of a table of rows, given "size | >ratio" and their cells.

    The cells are a format of a row's fields, such as "{size} | {ratio:.2f}".
    """
    cells = (
        form.format_map({**row, "gpu": gpu_of(row) if "GPU" in row else ""})
        for row in rows
    )
    return [*table(columns, ()), *(f"| {each} |" for each in cells)]


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


def gpu_of(row: Mapping[str, Any]) -> str:
    """Return "H100" of a row from an "NVIDIA H100 80GB HBM3"."""
    words = row["GPU"].split()
    return words[1] if words[:1] == ["NVIDIA"] else row["GPU"]


def versions_text(versions: Mapping[str, str]) -> str:
    """Return the versions as a sentence has them."""
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def last_run_text(versions: Mapping[str, str]) -> str:
    """Return the versions for a page whose rows name their GPUs."""
    return f"Each row names its GPU. The last run: {versions_text(versions)}."
