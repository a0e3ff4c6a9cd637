# SPDX-License-Identifier: Apache-2.0
"""Writes measurements as JSON with one record per line, so that diffs are readable."""

import json
from pathlib import Path
from typing import Any


def write_records(path: Path, data: dict[str, Any]) -> None:
    """Write data whose lists at the top are records."""
    entries = (f"{_text(name)}: {_entry(value)}" for name, value in data.items())
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def _entry(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _text(value)
    return "[\n" + ",\n".join(map(_text, value)) + "\n]"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
