# SPDX-License-Identifier: Apache-2.0
"""Writes the rows of jax_cudnn/limits between the marks of docs/known_bugs.md.

python -m scripts.known_bugs
"""

from pathlib import Path

from jax_cudnn import limits

PAGE = Path(__file__).parent.parent / "docs" / "known_bugs.md"
_MARKS = ("<!-- limits -->\n", "<!-- /limits -->\n")


def text(page: str) -> str:
    """Return the page with the rows as they are now."""
    before, _, rest = page.partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    return "".join((before, _MARKS[0], limits.table(), _MARKS[1], after))


if __name__ == "__main__":
    PAGE.write_text(text(PAGE.read_text()))
