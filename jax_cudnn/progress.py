# SPDX-License-Identifier: Apache-2.0
"""Shows on a terminal how far work has come that may take many seconds."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

# "off" shows nothing.
VARIABLE = "JAX_CUDNN_PROGRESS"

_T = TypeVar("_T")


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
    if not is_shown():
        yield from items
        return
    # Imported by those who look at it only.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    # rich would print to stderr what is printed meanwhile, which may belong in a file.
    is_seen = sys.stdout is not None and sys.stdout.isatty()
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=is_seen,
    ) as shown:
        task = shown.add_task(title, total=count, name="")
        for item in items:
            shown.update(task, name=name(item), refresh=True)
            yield item
            shown.advance(task)
