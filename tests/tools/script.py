# SPDX-License-Identifier: Apache-2.0
"""Loads a module of scripts/, which is not a package and cannot be imported here."""

import importlib.util
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    """Return the module in scripts/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
