# SPDX-License-Identifier: Apache-2.0
"""Prints pages of blocks, such as tables and notes.

A page is text, folded to the width of a terminal, or HTML for a notebook.
"""

import html
import re
import shutil
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_GAP = "  "
# Of the last column of a table; where there is less room, it goes on further left.
_NARROWEST = 24


def terminal_width() -> int | None:
    """Return the columns of the terminal that is printed to; None for what is none.

    Files and pipes, and with them notebooks, get lines of any length.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def aligned(rows: Iterable[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Yield the rows as lines of text, their cells in columns.

    A terminal that is too narrow gets the last column folded.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    start = len(indent) + sum(width + len(_GAP) for width in widths[:-1])
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield from _folded(f"{indent}{_GAP.join(cells)}".rstrip(), start)


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table with the names of its columns, as lines of text.

    A terminal that is too narrow for it gets a block for each row, of a line for each
    cell.
    """
    rows = list(rows)
    columns = zip(names, *rows, strict=True)
    needed = sum(max(map(len, column)) + len(_GAP) for column in columns) - len(_GAP)
    width = terminal_width()
    if width is None or needed <= width or not rows:
        yield from aligned([names, *rows])
        return
    for title, *cells in rows:
        yield title
        yield from aligned(zip(names[1:], cells, strict=True), indent=_GAP)


def page(lines: Iterable[str]) -> str:
    """Return lines as one text. Those that a terminal is too narrow for are folded."""
    return "\n".join(part for line in lines for part in _folded(line, _hanging(line)))


def _hanging(line: str) -> int:
    """Return where the text of a line goes on: after a dash, or indented."""
    rest = line.lstrip()
    return len(line) - len(rest) + 2


def _folded(line: str, indent: int) -> list[str]:
    width = terminal_width()
    if width is None or len(line) <= width:
        return [line]
    if indent > width - min(_NARROWEST, width // 2):
        indent = _hanging(line) + 2
    # Names and paths stay whole, to be copied.
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# --- blocks ---------------------------------------------------------------------------

_Rows = tuple[tuple[str, ...], ...]
# As cells have numbers: with a unit, or a dash where there is none.
_NUMBER = re.compile(r"-|[-+]?[\d,]*\.?\d+( [A-Za-zµ%]+)?")


@dataclass(frozen=True, slots=True)
class Heading:
    """A line that names what follows."""

    line: str

    def lines(self) -> Iterator[str]:
        """Yield the block as lines of text."""
        yield self.line

    def html(self) -> str:
        """Return the block as HTML."""
        return f"<p><b>{html.escape(self.line)}</b></p>"


@dataclass(frozen=True, slots=True)
class Text:
    """A line; an empty one parts blocks of text, and is nothing in HTML."""

    line: str

    def lines(self) -> Iterator[str]:
        """Yield the block as lines of text."""
        yield self.line

    def html(self) -> str:
        """Return the block as HTML."""
        line = self.line.strip()
        return f'<p style="margin:0">{html.escape(line)}</p>' if line else ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with the names of its columns."""

    names: tuple[str, ...]
    rows: _Rows

    def lines(self) -> Iterator[str]:
        """Yield the block as lines of text."""
        return table(self.names, self.rows)

    def html(self) -> str:
        """Return the block as HTML."""
        return _html_table(self.names, self.rows)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in columns; text leaves out the names of the columns, if there are any."""

    rows: _Rows
    names: tuple[str, ...] = ()
    indent: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the block as lines of text."""
        return aligned(self.rows, self.indent)

    def html(self) -> str:
        """Return the block as HTML."""
        return _html_table(self.names, self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Details:
    """Notes. A notebook folds them under a title; text has all of them.

    In text, ``heading`` is a line before them, if it is not empty, and ``mark`` begins
    each of them.
    """

    title: str
    notes: tuple[str, ...]
    heading: str = ""
    mark: str = ""
    is_open: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the block as lines of text."""
        if self.heading and self.notes:
            yield self.heading
        yield from (f"{self.mark}{note}" for note in self.notes)

    def html(self) -> str:
        """Return the block as HTML."""
        if not self.notes:
            return ""
        items = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        title = html.escape(self.title)
        opened = " open" if self.is_open else ""
        return f"<details{opened}><summary>{title}</summary><ul>{items}</ul></details>"


Block = Heading | Text | Table | Rows | Details


def _html_table(names: Sequence[str], rows: _Rows) -> str:
    """Return a table in HTML, with columns of numbers to the right."""
    # Notebooks have a side of their own for cells that do not say theirs.
    sides = [_side(column) for column in zip(*rows, strict=True)]
    sides = sides or ["left"] * len(names)
    head = f"<thead>{_html_row('th', names, sides)}</thead>" if names else ""
    body = "".join(_html_row("td", row, sides) for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _side(column: Sequence[str]) -> str:
    numbers = [_NUMBER.fullmatch(cell) for cell in column]
    return "right" if all(numbers) and {*column} != {"-"} else "left"


def _html_row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    filled = (
        f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(filled)}</tr>"


class Page(ABC):
    """A result that is a page to read: ``print`` it, or end a notebook's cell with it.

    A notebook shows it with tables, and with notes that unfold.
    """

    __slots__ = ()

    @abstractmethod
    def _blocks(self) -> Iterable[Block]:
        """Return what the page shows, in order."""

    def __str__(self) -> str:
        return page(line for block in self._blocks() for line in block.lines())

    def __repr__(self) -> str:
        first = next(iter(str(self).splitlines()), "")
        return f"<{type(self).__name__}: {first.strip()} ...; print it to read it all>"

    def _repr_html_(self) -> str:
        return f"<div>{''.join(block.html() for block in self._blocks())}</div>"
