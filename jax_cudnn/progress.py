# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of work that may take many seconds on a terminal."""

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

# "off" shows nothing.
VARIABLE = "JAX_CUDNN_PROGRESS"

_T = TypeVar("_T")
# Held while a line is shown. Work within work, or in another thread, shows none.
_line = threading.Lock()


def is_shown() -> bool:
    """Whether progress is shown: stderr is a terminal, and it is not switched off."""
    is_off = os.environ.get(VARIABLE, "").strip().lower() in ("off", "0", "false")
    return not is_off and sys.stderr is not None and sys.stderr.isatty()


def followed(
    items: Iterable[_T], title: str, *, count: int, name: Callable[[_T], str] = str
) -> Iterator[_T]:
    """Yield the items, and show how many are done and the name of the one at hand.

    The line disappears at the end.
    """
    with _shown(is_counted=True) as shown:
        if shown is None:
            yield from items
            return
        task = shown.add_task(title, total=count, name="")
        for item in items:
            shown.update(task, name=name(item), refresh=True)
            yield item
            shown.advance(task)


@contextmanager
def waiting(title: str, name: str) -> Generator[None]:
    """Show what is waited for, and for how long, while the block runs."""
    with _shown(is_counted=False) as shown:
        if shown is not None:
            shown.add_task(title, total=None, name=name)
        yield


@contextmanager
def _shown(*, is_counted: bool) -> "Generator[Progress | None]":
    """Yield a line to show progress on; None where none is to be shown."""
    if not is_shown() or not _line.acquire(blocking=False):
        yield None
        return
    try:
        with _progress(is_counted) as shown:
            yield shown
    finally:
        _line.release()


def _progress(is_counted: bool) -> "Progress":
    # Imported by those who look at it only.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Column

    # The name gets what is left of the line; all else is there in any case.
    whole = Column(no_wrap=True)
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    bar = (
        BarColumn(bar_width=20, table_column=whole),
        MofNCompleteColumn(table_column=whole),
    )
    # rich would print to stderr what is printed meanwhile, which may belong in a file.
    is_seen = sys.stdout is not None and sys.stdout.isatty()
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=whole),
        *(bar if is_counted else (SpinnerColumn(table_column=whole),)),
        TimeElapsedColumn(table_column=whole),
        TextColumn("{task.fields[name]}", markup=False, table_column=rest),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=is_seen,
        expand=True,
    )
