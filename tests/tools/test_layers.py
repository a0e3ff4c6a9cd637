# SPDX-License-Identifier: Apache-2.0
"""Imports and includes are those allowed."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools.sources import ROOT, sources

pytestmark = pytest.mark.once

_PACKAGE = ROOT / "jax_cudnn"

# What each layer may import from; itself always.
_DATA = {"errors", "graph"}
_MEANING = {*_DATA, "reference", "legalize"}
_MACHINE = {
    *_MEANING,
    "policy",
    *("native", "offline", "config", "cache", "choices", "contenders", "lowering"),
}
_ALLOWED = {
    "errors": set[str](),
    "startup": set[str](),
    "keywords": set[str](),
    "columns": set[str](),
    "progress": set[str](),
    "config": set[str](),
    "cache": {"native"},
    "choices": {"errors", "graph", "cache"},
    "contenders": {"errors", "graph", "reference", "choices"},
    "graph": {"errors"},
    "reference": {"errors", "graph"},
    "limits": {"graph"},
    "legalize": {"errors", "graph", "reference", "limits"},
    "policy": {"errors", "graph", "legalize", "native", "cache"},
    "native": {"errors", "graph"},
    "doctor": {"errors", "startup", "columns", "native", "limits", "policy"},
    "offline": {"errors", "graph", "native", "progress"},
    "lowering": {
        *_MEANING,
        *("policy", "native", "offline", "config", "choices", "contenders"),
    },
    "checkpoint_policies": {"lowering"},
    "ops": _MACHINE,
    "kv_cache": {"ops", "keywords"},
    "f8": {"ops", "keywords"},
    "masks": {"ops", "keywords"},
    "moe": {"ops", "keywords"},
    "score_mods": {"ops", "keywords"},
    "tuning": {*_MACHINE, "progress"},
    "calibration": {*_MACHINE, *("columns", "progress", "ops", "fusing", "tuning")},
    "plans": {
        *_MACHINE,
        *("columns", "progress", "doctor", "keywords", "ops", "tuning"),
    },
    # Of what computes, the public operations only.
    "flax": {"errors", "config", "ops", "keywords"},
    # A module for each library whose models bring layers of their own.
    "adapters": {"errors", "config", "ops", "flax", "keywords"},
    # Attention over several devices, of the operation's own parts.
    "parallel": {
        *("errors", "config", "graph", "reference", "lowering", "ops", "keywords")
    },
    # A function's kernels, of the operations' own parts.
    "fusing": {*_MACHINE, "columns", "ops", "plans"},
    "cli": {
        *(_MACHINE | {"startup", "progress"}),
        *("ops", "tuning", "plans", "calibration"),
    },
    "__init__": {
        *_MACHINE,
        "startup",
        "keywords",
        "ops",
        "checkpoint_policies",
        "f8",
        "kv_cache",
        "masks",
        "moe",
        "score_mods",
        "plans",
        "parallel",
        "fusing",
        "flax",  # for type checkers, and when it is asked for
    },
    "__main__": {"startup", "cli"},
}
# What a face hands on of a layer above: it is imported when a name is asked for.
_HANDED_ON = {"plans/__init__.py": "jax_cudnn.calibration"}
# Names outside JAX's compatibility promise, and the one module that may import them.
_SEMI_PUBLIC = ("jax.extend", "jax.interpreters", "jax.core")
_SEMI_PUBLIC_HOME = "lowering/_jax.py"
# Layers that are pure data and must not know of JAX's tracing.
_WITHOUT_JAX = ("errors", "config", "graph", "limits")


@dataclass(frozen=True)
class Import:
    """One name that a module of the package imports."""

    module: str
    layer: str
    name: str


def _modules() -> list[Path]:
    return sorted(_PACKAGE.rglob("*.py"))


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            # `jax.interpreters.ad` after `import jax`
            chain = _attribute_chain(node)
            yield from [chain] if chain.startswith("jax.") else []


def _attribute_chain(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_attribute_chain(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _imports() -> list[Import]:
    found: list[Import] = []
    for path in _modules():
        module = path.relative_to(_PACKAGE).as_posix()
        layer = module.removesuffix(".py").split("/")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [
            Import(module, layer, name)
            for name in _imported_names(tree)
            if not _is_within(name, _HANDED_ON.get(module, "-"))
        ]
    return found


def _own_layer(name: str) -> str | None:
    """Return the layer that an imported name of this package belongs to."""
    parts = name.split(".")
    if parts[0] != "jax_cudnn" or len(parts) < 2:
        return None
    return parts[1]


def _is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def test_every_layer_has_a_place_in_the_order() -> None:
    assert {found.layer for found in _imports()} <= set(_ALLOWED)


def test_the_order_has_no_cycle() -> None:
    _check_order(_ALLOWED)


def _check_order(allowed: dict[str, set[str]]) -> None:
    places: list[str] = []
    while len(places) < len(allowed):
        ready = [x for x in allowed if x not in places and allowed[x] <= {*places}]
        assert ready, f"the layers above {places} import one another"
        places += ready


def test_modules_import_from_lower_layers_only() -> None:
    wrong = [
        found
        for found in _imports()
        if (layer := _own_layer(found.name)) is not None
        and layer != found.layer
        and layer not in _ALLOWED[found.layer]
    ]
    assert not wrong


def test_the_reader_of_imports_sees_what_there_is() -> None:
    found = _imports()
    assert (
        Import("ops/attention/attend.py", "ops", "jax_cudnn.lowering.run_graph")
        in found
    )
    assert Import("lowering/_jax.py", "lowering", "jax.interpreters.mlir") in found
    chains = _imported_names(ast.parse("import jax\njax._src.core.x"))
    assert {"jax", "jax._src.core", "jax._src"} <= set(chains)


# JAX tells plugins of partitioners through it, and has no other way (lowering/_jax.py).
_PRIVATE = "jax._src.xla_bridge.register_plugin_callbacks"


def test_private_jax_is_one_name_in_one_module() -> None:
    for path in (*_modules(), *sorted((ROOT / "tests").rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = [x for x in _imported_names(tree) if _is_within(x, "jax._src")]
        is_bridge = path.parts[-2:] == ("lowering", "_jax.py")
        assert found == ([_PRIVATE] if is_bridge else []), path


def test_semi_public_jax_is_imported_in_one_module() -> None:
    users = {
        found.module
        for found in _imports()
        if any(_is_within(found.name, prefix) for prefix in _SEMI_PUBLIC)
    }
    assert users == {_SEMI_PUBLIC_HOME}


def test_pure_data_does_not_import_jax() -> None:
    wrong = [
        found
        for found in _imports()
        if found.layer in _WITHOUT_JAX and _is_within(found.name, "jax")
    ]
    assert not wrong


def test_names_with_an_underscore_stay_in_their_folder() -> None:
    wrong = []
    for found in _imports():
        parts = found.name.split(".")
        if parts[0] != "jax_cudnn":
            continue
        folder = "/".join(found.module.split("/")[:-1])
        private = [i for i, part in enumerate(parts) if part.startswith("_")]
        if private and not _is_below(folder, "/".join(parts[1 : private[0]])):
            wrong.append(found)
    assert not wrong


def _is_below(folder: str, other: str) -> bool:
    return f"{folder}/".startswith(f"{other}/") if other else not folder


# --- families -------------------------------------------------------------------------

# Each floor has a folder, or a module, for each family of operations. What families
# share lies beside them: in the floor itself, or in its folder `common`.
_FAMILIES = ("attention", "products", "norms", "pooling")
_FLOORS = ("graph", "reference", "limits", "legalize", "policy", "ops")
# The modules that name every family's parts for the floors above.
_FACES = {
    "graph/__init__.py",
    "reference/interpreter.py",
    "limits/__init__.py",
    "legalize/__init__.py",
    "policy/ranking.py",
}


def _family(floor: str, name: str) -> str | None:
    return name if floor in _FLOORS and name in _FAMILIES else None


def _families_met(imports: list[Import]) -> Iterator[tuple[Import, str]]:
    """Yield the imports of a family's parts, on the floors that have families."""
    homes = _homes_of_faces(imports)
    for found in imports:
        parts = homes.get(found.name, found.name).split(".")
        if found.layer not in _FLOORS or parts[0] != "jax_cudnn" or len(parts) < 3:
            continue
        if (family := _family(parts[1], parts[2])) is not None:
            yield found, family


def _homes_of_faces(imports: list[Import]) -> dict[str, str]:
    """Return where what a face hands on is from: it is imported by the face's name."""
    return {
        f"jax_cudnn.{found.layer}.{found.name.rpartition('.')[2]}": found.name
        for found in imports
        if found.module in _FACES and found.module.endswith("__init__.py")
    }


def _meets_another_family(found: Import, family: str) -> bool:
    floor, _, rest = found.module.partition("/")
    own = _family(floor, rest.split("/")[0].removesuffix(".py"))
    return own != family and found.module not in _FACES


def test_a_family_imports_no_other_familys_parts() -> None:
    met = list(_families_met(_imports()))
    assert len(met) > 100
    assert not [each for each in met if _meets_another_family(*each)]


def test_the_reader_of_families_sees_what_there_is() -> None:
    wrong = [
        Import("ops/norms/f8.py", "ops", "jax_cudnn.ops.attention.f8.attend_f8"),
        Import("ops/common/windows.py", "ops", "jax_cudnn.reference.pooling.cut"),
        Import("ops/pooling.py", "ops", "jax_cudnn.graph.SdpaAttributes"),
    ]
    met = list(_families_met([*_imports(), *wrong]))
    assert [found for found, family in met if _meets_another_family(found, family)] == (
        wrong
    )


# --- versions and architectures -------------------------------------------------------

# The layers that read which GPU or cuDNN there is: they keep limits, measurements,
# plans and programs. What the others do on some of them only is a row of limits.
_KNOW_VERSIONS = {
    *("limits", "policy", "choices", "native", "offline", "lowering", "plans"),
    *("doctor", "calibration"),
}
_VERSIONS = {"sm_version", "cudnn_version"}


def _versions_read(tree: ast.AST) -> list[ast.Attribute]:
    """Return where a version or an architecture is read, but for words about it."""
    told = {
        id(part)
        for text in ast.walk(tree)
        if isinstance(text, ast.FormattedValue)
        for part in ast.walk(text)
    }
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in _VERSIONS
        and id(node) not in told
    ]


def test_versions_and_architectures_are_read_by_few_layers() -> None:
    users = {
        path.relative_to(_PACKAGE).parts[0].removesuffix(".py")
        for path in _modules()
        if _versions_read(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert users == _KNOW_VERSIONS


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("target.sm_version < 80", 1),
        ("sm, cudnn = target.sm_version, target.cudnn_version", 2),
        ("(target.sm_version // 10) in (9, 10)", 1),
        ("f'sm_{target.sm_version}'", 0),
        ("LENGTHS_ARE_COPIED.is_here(target)", 0),
    ],
)
def test_the_reader_of_versions_sees_what_there_is(text: str, count: int) -> None:
    assert len(_versions_read(ast.parse(text))) == count


# The largest number of files in a folder that a reader still takes in.
_MOST_FILES = 20


def test_no_folder_is_a_hall() -> None:
    folders = [
        folder
        for top in ("jax_cudnn", "tests", "ffi")
        for folder in (ROOT / top).rglob("*")
        if folder.is_dir()
    ]
    counts = {
        str(folder.relative_to(ROOT)): sum(
            path.suffix in (".py", ".cc", ".h") for path in folder.iterdir()
        )
        for folder in folders
    }
    assert not {name: n for name, n in counts.items() if n > _MOST_FILES}


# --- the C++ sources ------------------------------------------------------------------

# What each folder of ffi/ may include from; itself always.
_FFI = ROOT / "ffi"
_INCLUDES_ALLOWED = {
    "base": set[str](),
    "graph": {"base"},
    "cudnn": {"base"},
    "frontend": {"base", "graph", "cudnn"},
    "nodes": {"base", "graph", "frontend"},
    "candidates": {"base", "graph", "cudnn", "frontend", "nodes"},
    "groups": {"base", "graph", "cudnn", "frontend", "candidates"},
    "blas": {"base", "graph", "cudnn", "candidates", "groups"},
    "plans": {
        *("base", "graph", "cudnn", "frontend", "nodes", "candidates", "groups"),
        "blas",
    },
    "keeping": {"base", "graph", "cudnn", "frontend", "plans"},
    "handler": {"base", "graph", "cudnn", "plans", "keeping"},
    "bindings": {
        *("base", "graph", "cudnn", "frontend", "candidates", "blas", "plans"),
        *("keeping", "handler"),
    },
}
# Stands in for a header of CUDA's; the frontend includes it.
_FOREIGN = {"compat"}
# Libraries that only these folders may include.
_LIBRARY_HOMES = {
    "nanobind/": {"bindings"},
    "cudnn_frontend.h": {"frontend"},
    "xla/": {"handler"},
}
_INCLUDE = re.compile(r'^#include ["<]([^">]+)[">]', re.MULTILINE)


def _includes() -> list[tuple[Path, str]]:
    """Return each file of ffi/ with each name that it includes."""
    return [
        (path.relative_to(_FFI), name)
        for path in sources("*.cc", "*.h")
        if path.is_relative_to(_FFI) and path.parent.name not in _FOREIGN
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8"))
    ]


def _own_folder(name: str) -> str | None:
    """Return the folder of ffi/ that an included name is in."""
    return name.split("/")[0] if (_FFI / name).is_file() else None


def _wrong_includes(includes: list[tuple[Path, str]]) -> list[tuple[Path, str]]:
    return [
        (path, name)
        for path, name in includes
        if (folder := _own_folder(name)) is not None
        and folder != path.parts[0]
        and folder not in _INCLUDES_ALLOWED[path.parts[0]]
    ]


def test_every_folder_of_ffi_has_a_place_in_the_order() -> None:
    assert {path.name for path in _FFI.iterdir()} == {*_INCLUDES_ALLOWED, *_FOREIGN}


def test_the_order_of_ffi_has_no_cycle() -> None:
    _check_order(_INCLUDES_ALLOWED)


def test_files_of_ffi_include_from_lower_folders_only() -> None:
    assert not _wrong_includes(_includes())


def test_the_reader_of_includes_sees_what_there_is() -> None:
    found = _includes()
    assert (Path("plans/plan.cc"), "plans/plan.h") in found
    assert (Path("frontend/frontend.h"), "cudnn_frontend.h") in found
    upward = (Path("graph/graph_spec.cc"), "plans/plan.h")
    assert _wrong_includes([*found, upward]) == [upward]


def test_own_files_are_included_by_their_path_below_ffi() -> None:
    own = {path.name for path, _ in _includes()}
    assert not [(path, name) for path, name in _includes() if name in own]


def test_libraries_are_included_in_their_folders_only() -> None:
    wrong = [
        (path, name)
        for path, name in _includes()
        for library, homes in _LIBRARY_HOMES.items()
        if name.startswith(library) and path.parts[0] not in homes
    ]
    assert not wrong
