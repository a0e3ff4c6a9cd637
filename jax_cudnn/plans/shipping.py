# SPDX-License-Identifier: Apache-2.0
"""`plans.warmup`, `save` and `load`: a function's plans before they are needed."""

import hashlib
import json
import os
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from jax.stages import Traced

from jax_cudnn import cache, choices, native
from jax_cudnn.choices import Choice, Key
from jax_cudnn.errors import GraphError, LibraryError, UnsupportedError
from jax_cudnn.graph import Target, label, to_json
from jax_cudnn.lowering import TracedGraph, traced_graphs
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.lowering.devices import local_ordinals, local_target
from jax_cudnn.progress import followed

# The version of the archive's form.
SCHEMA = 1
_MANIFEST = "manifest.json"
_CHOICES = "choices.json"

# cuDNN compiles on one thread a plan.
_THREADS = min(16, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmup:
    """The result of ``warmup``: how many distinct plans, and where they came from.

    ``built`` counts the plans that cuDNN built or refused; XLA runs the parts whose
    plans it refused. ``from_disk`` counts the plans that the cache folder had. The
    process already had the rest.
    """

    plans: int
    built: int
    from_disk: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipment:
    """The result of ``save`` or ``load``.

    ``left_out`` names the plans that cuDNN cannot serialise, with cuDNN's message.
    These plans are built where the function runs.
    """

    plans: int
    choices: int
    left_out: tuple[str, ...] = ()


def warmup(function: Callable[..., Any] | Traced, *args: Any, **kwargs: Any) -> Warmup:
    """Build all plans of ``function(*args, **kwargs)``, several at a time.

    Traces the function without running it. cuDNN builds the plans that compiling the
    function will need, for every GPU of this process; if the function takes gradients,
    their plans are included. Arguments are as for ``plans.inspect``: arrays or shapes,
    and anything else that the function takes; none for ``jitted.trace(...)``.

    Raises:
      LibraryError: there is no NVIDIA GPU or no cuDNN here.
    """
    first, _ = _local_target("plans.warmup")
    start = time.monotonic()
    before = native.cache_stats()
    with ThreadPoolExecutor(_THREADS) as pool:
        found = _planned(pool, traced_graphs(function, *args, **kwargs))
        # The first GPU has its plans from deciding.
        others = [ordinal for ordinal in local_ordinals() if ordinal != first]
        wanted = [(*plan, ordinal) for plan in found for ordinal in others]
        list(pool.map(_plan, wanted))
    after = native.cache_stats()
    return Warmup(
        plans=len(found),
        built=after.builds - before.builds,
        from_disk=after.disk_hits - before.disk_hits,
        seconds=time.monotonic() - start,
    )


def save(
    path: str | Path, function: Callable[..., Any] | Traced, *args: Any, **kwargs: Any
) -> Shipment:
    """Write all plans of ``function(*args, **kwargs)`` and its choices into one file.

    The file is for shipping with a model. After ``load`` has read it, on the same kind
    of GPU with the same versions, no plan of the function has to be built. Traces the
    function without running it. Arguments are as for ``plans.inspect``: arrays or
    shapes, and anything else that the function takes; none for ``jitted.trace(...)``.

    Raises:
      LibraryError: there is no NVIDIA GPU or no cuDNN here.
      OSError: the file cannot be written.
    """
    ordinal, target = _local_target("plans.save")
    graphs = traced_graphs(function, *args, **kwargs)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = _planned(pool, graphs)
        files = list(pool.map(_export, [(*plan, ordinal) for plan in found]))
    kept = _choices(graphs, target)
    contents = {_CHOICES: choices.to_text(kept, "plans.save").encode("ascii")}
    entries: list[dict[str, Any]] = []
    left_out: list[str] = []
    for step, data in zip(found.values(), files, strict=True):
        if isinstance(data, UnsupportedError):
            left_out.append(f"{label(step.part)}: {data}")
            continue
        name = f"plans/{hashlib.sha256(data).hexdigest()[:32]}.plan"
        contents[name] = data
        entries.append({"file": name, "op": label(step.part)})
    manifest = {
        "schema": SCHEMA,
        "made_for": _made_for(target),
        "plans": entries,
        "sha256": {
            name: hashlib.sha256(data).hexdigest() for name, data in contents.items()
        },
    }
    _write_archive(Path(path), manifest, contents)
    return Shipment(plans=len(entries), choices=len(kept), left_out=tuple(left_out))


def load(path: str | Path) -> Shipment:
    """Use the plans and choices of a file that ``save`` wrote, from now on.

    A plan file contains native code, which will run on the GPU and in this process:
    load only what comes from someone you trust. Nothing is ever loaded unasked.

    Raises:
      LibraryError: the file was made for another GPU or with other versions, which the
        message names; or there is no NVIDIA GPU or no cuDNN here.
      GraphError: ``save`` did not write the file, or the file was changed since.
      OSError: the file cannot be read.
    """
    first, target = _local_target("plans.load")
    manifest, files, kept = _read_archive(Path(path))
    _check_same_machine(Path(path), manifest, target)
    found = choices.from_bytes(kept, f"{path}: {_CHOICES}")
    for ordinal in {first, *local_ordinals()}:
        for data in files:
            native.import_plan(data, device=ordinal)
    choices.table().add(found)
    return Shipment(plans=len(files), choices=len(found))


# --- the plans of a function ----------------------------------------------------------


def _local_target(who: str) -> tuple[int, Target]:
    local = local_target()
    if local is None:
        raise LibraryError(f"{who} needs an NVIDIA GPU; JAX sees none here.")
    return local


def _planned(
    pool: ThreadPoolExecutor, found: Iterable[TracedGraph]
) -> dict[tuple[str, str], PartDecision]:
    """Return the steps that cuDNN runs, by canonical graph and request."""
    # What is for another GPU by its name is not this one's to build.
    ours = dict.fromkeys(each for each in found if each.options.device is None)
    decisions = followed(
        pool.map(TracedGraph.decide, ours),
        "Planning",
        count=len(ours),
        name=lambda _: "",
    )
    return {
        (to_json(step.rewrite.graph), step.request): step
        for decision in decisions
        for step in decision.steps
        if step.rewrite is not None
    }


def _choices(found: Iterable[TracedGraph], target: Target) -> dict[Key, Choice]:
    """Return the choices for the parts of graphs, those that say XLA among them."""
    table = choices.table().all()
    keys = [
        choices.key_of(part, target, allowed)
        for traced in found
        for part in traced.parts
        for allowed in dict.fromkeys(("", traced.options.plan.to_request()))
    ]
    return {key: table[key] for key in keys if key in table}


def _plan(wanted: tuple[str, str, int]) -> None:
    graph, request, ordinal = wanted
    native.plan(graph, request=request, device=ordinal)


def _export(wanted: tuple[str, str, int]) -> bytes | UnsupportedError:
    graph, request, ordinal = wanted
    try:
        return native.export_plan(graph, request=request, device=ordinal)
    except UnsupportedError as error:
        return error


# --- the archive ----------------------------------------------------------------------


def _made_for(target: Target) -> dict[str, Any]:
    build = native.build_info()
    return {
        "GPU": target.name,
        "compute capability": target.sm_version,
        "multiprocessors": target.sm_count,
        "cuDNN": native.cudnn_version().version_text,
        "cuDNN's CUDA": native.cudnn_version().cuda_major,
        "CPU": build.cpu,
        "cudnn-frontend": build.frontend_version,
        "build of jax_cudnn": build.builder,
    }


def _check_same_machine(path: Path, manifest: dict[str, Any], target: Target) -> None:
    made, here = manifest["made_for"], _made_for(target)
    wrong = [
        f"  - {name}: made for {made.get(name)}, this is {value}"
        for name, value in here.items()
        if made.get(name) != value
    ]
    if wrong:
        lines = [f"{path} cannot be used here.", *wrong, "Save the plans again here."]
        raise LibraryError("\n".join(lines))


def _digest(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _write_archive(
    path: Path, manifest: dict[str, Any], contents: dict[str, bytes]
) -> None:
    text = json.dumps({**manifest, "digest": _digest(manifest)}, indent=1)

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MANIFEST, text + "\n")
            for name, data in contents.items():
                archive.writestr(name, data)

    cache.replace_file(path, write, is_private=False)


def _read_archive(path: Path) -> tuple[dict[str, Any], list[bytes], bytes]:
    """Return manifest, plan files and choices; every byte is as it was saved."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = _checked_manifest(archive.read(_MANIFEST))
            names = [entry["file"] for entry in manifest["plans"]]
            contents: list[bytes] = []
            for name in (*names, _CHOICES):
                contents.append(archive.read(name))
                found = hashlib.sha256(contents[-1]).hexdigest()
                if found != manifest["sha256"][name]:
                    raise ValueError(f"{name} was changed")
    except _BAD_ARCHIVE as error:
        raise GraphError(f"{path} is not a file of plans.save: {error}") from error
    return manifest, contents[:-1], contents[-1]


# What zipfile and json raise for what is not a whole archive of ours.
_BAD_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _checked_manifest(data: bytes) -> dict[str, Any]:
    tree = json.loads(data)
    if not isinstance(tree, dict):
        raise ValueError("its manifest is not an object")
    manifest = cast("dict[str, Any]", tree)
    if manifest["schema"] != SCHEMA:
        raise ValueError(f"its schema {manifest['schema']} is not {SCHEMA}")
    if manifest.pop("digest") != _digest(manifest):
        raise ValueError("its manifest was changed")
    return manifest
