# SPDX-License-Identifier: Apache-2.0
"""What the package prints: rows of text in columns, and pages of results."""

import html
from collections.abc import Iterable, Iterator, Sequence


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the rows as lines of text, their cells in columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


class Page:
    """A result whose ``str`` is a page to read. A notebook shows the page."""

    __slots__ = ()

    def __repr__(self) -> str:
        first = next(iter(str(self).splitlines()), "")
        return f"<{type(self).__name__}: {first.strip()} ...; print it to read it all>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
