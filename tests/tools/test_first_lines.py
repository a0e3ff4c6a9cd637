# SPDX-License-Identifier: Apache-2.0
"""Files begin with the licence, and with a statement of what they are for."""

import ast
import re
from pathlib import Path

import pytest

from tests.tools.sources import ROOT, sources

pytestmark = pytest.mark.once


def _label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _begins_well(path: Path) -> bool:
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines[0].startswith("#!"):
        del lines[0]
    is_python = path.suffix == ".py"
    sign, opening = ("#", ('"""', 'r"""')) if is_python else ("//", ("// ",))
    is_licensed = lines[0] == f"{sign} SPDX-License-Identifier: Apache-2.0"
    return is_licensed and lines[1].startswith(opening)


def test_files_begin_with_licence_and_purpose() -> None:
    files = sources("*.py", "*.cc", "*.h")
    assert len(files) > 500
    assert [_label(path) for path in files if not _begins_well(path)] == []


def _first_words(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text.splitlines()[1]
    return (ast.get_docstring(ast.parse(text)) or "?").split("\n\n")[0]


def test_files_begin_with_a_statement() -> None:
    files = sources("*.py", "*.cc", "*.h")
    asks = re.compile(r"\?(\s|$)")
    assert [_label(path) for path in files if asks.search(_first_words(path))] == []
