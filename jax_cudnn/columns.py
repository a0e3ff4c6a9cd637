# SPDX-License-Identifier: Apache-2.0
"""What the package prints: tables and pages, folded to the width of a terminal."""

import html
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

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
    """Return where the text of a line goes on: behind a dash, or a little inwards."""
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


class Page:
    """A result whose ``str`` is a page to read. A notebook shows the page."""

    __slots__ = ()

    def __repr__(self) -> str:
        first = next(iter(str(self).splitlines()), "")
        return f"<{type(self).__name__}: {first.strip()} ...; print it to read it all>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
