# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU name what there is: no run without a GPU would tell."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.once

_ROOT = Path(__file__).parents[2]
_FILES = [
    path
    for folder in ("*/gpu", "common/gpu", "*/shared", "common")
    for path in sorted((_ROOT / "tests").glob(f"{folder}/*.py"))
]
_OWN = ("jax_cudnn", "tests", "benchmarks", "scripts")


def _named(module: str, name: str) -> Any:
    """Return what `from module import name` gives; AttributeError if nothing."""
    found = importlib.import_module(module)
    if hasattr(found, name):
        return getattr(found, name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"{module} has no {name}") from error


def _modules(tree: ast.AST) -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.split(".")[0]
                if top in _OWN and not each.asname:
                    found[top] = importlib.import_module(top)
        elif isinstance(node, ast.ImportFrom) and _is_own(node.module):
            assert node.module is not None
            for each in node.names:
                value = _named(node.module, each.name)
                if isinstance(value, ModuleType):
                    found[each.asname or each.name] = value
    return found


def _is_own(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in _OWN


def _attributes(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield a name, an attribute that is read or replaced, and the line."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                yield name, attribute, node.lineno
            case ast.Call(
                func=ast.Attribute(attr="setattr"),
                args=[ast.Name(id=name), ast.Constant(value=str(attribute)), *_],
            ):
                yield name, attribute, node.lineno


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_names_of_modules_exist(path: Path) -> None:
    if "flax" in path.parts:
        pytest.importorskip("flax")
    tree = ast.parse(path.read_text())
    modules = _modules(tree)
    missing = [
        f"{path.name}:{line}: {name}.{attribute}"
        for name, attribute, line in _attributes(tree)
        if name in modules and not hasattr(modules[name], attribute)
    ]
    assert not missing
