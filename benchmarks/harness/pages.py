# SPDX-License-Identifier: Apache-2.0
"""Prints the pages of benchmarks again from their data, which measures nothing.

    python -m benchmarks.pages

is for after a change of what a program says about its numbers, or of a rule that a page
names. Each page names the program that prints it.
"""

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_DOCS = Path(__file__).parents[2] / "docs"
_COMMAND = re.compile(r"python -m benchmarks\.(\w+)")


def printed() -> Iterator[tuple[Path, str]]:
    """Yield each page that has its data beside it, and what its program prints."""
    for folder in (_DOCS / "benchmarks", _DOCS / "internals" / "measured"):
        for page in sorted(folder.glob("*.md")):
            command = _COMMAND.search(page.read_text(encoding="utf-8"))
            data = page.with_suffix(".json")
            if command and data.exists():
                found = json.loads(data.read_text(encoding="utf-8"))
                yield page, _program(command[1]).markdown(found)


def _program(name: str) -> ModuleType:
    """Return the module of a program by its full name, so that none is loaded twice."""
    spec = importlib.util.find_spec(f"benchmarks.{name}")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin)
    if path.name == "__init__.py":
        return importlib.import_module(f"benchmarks.{name}.__main__")
    return importlib.import_module(f"benchmarks.{path.parent.name}.{name}")


def main() -> None:
    """Write the pages that differ."""
    for page, text in printed():
        if page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(_DOCS.parent))


if __name__ == "__main__":
    main()
