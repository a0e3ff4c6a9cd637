# SPDX-License-Identifier: Apache-2.0
"""Tests that save, load and warmup handle all plans of a function, and no others.

cuDNN is a stand-in here; tests/plans/gpuless and tests/plans/gpu ask the real one.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import (
    GraphError,
    LibraryError,
    UnsupportedError,
    choices,
    matmul,
    native,
    plans,
)
from jax_cudnn.choices import Choice, key_of
from jax_cudnn.graph import Target
from jax_cudnn.lowering import decision, devices, traced_graphs
from jax_cudnn.native import BuildInfo, CacheStats, LibraryInfo, PlanInfo
from jax_cudnn.plans import shipping

pytestmark = pytest.mark.once

_TARGET = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=91900)
_SHAPES = (jax.ShapeDtypeStruct((6, 40), jnp.bfloat16),
           jax.ShapeDtypeStruct((40, 24), jnp.bfloat16))  # fmt: skip


def _loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return matmul(x, w, implementation="cudnn").astype(jnp.float32).sum()


_BOTH: Callable[..., Any] = jax.grad(_loss, (0, 1))


@dataclass
class _Cudnn:
    """What was asked of cuDNN: (graph, request, device)."""

    planned: list[tuple[str, str, int]] = field(default_factory=list)
    imported: list[tuple[bytes, int]] = field(default_factory=list)
    builds: int = 0
    refuses_to_write: bool = False

    def plan(self, graph: str, *, request: str = "", device: int = 0) -> PlanInfo:
        self.builds += (graph, request, device) not in self.planned
        self.planned.append((graph, request, device))
        return PlanInfo(
            name="eng0", engine=0, knobs=(), variant=0, request="", behavior_notes=(),
            numeric_notes=(), is_built=True, workspace_bytes=0, build_ms=1.0,
            failure="", failures=(),
        )  # fmt: skip

    def export_plan(self, graph: str, *, request: str = "", device: int = 0) -> bytes:
        if self.refuses_to_write:
            raise UnsupportedError("cannot be written")
        return f"{device} {request} {graph}".encode()

    def import_plan(self, data: bytes, *, device: int = 0) -> None:
        self.imported.append((data, device))

    def cache_stats(self) -> CacheStats:
        return CacheStats(entries=0, builds=self.builds, hits=0)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Cudnn]:
    """Put a stand-in in place, for two GPUs of a kind, and no choices."""
    fake = _Cudnn()
    for name in ("plan", "export_plan", "import_plan", "cache_stats"):
        monkeypatch.setattr(native, name, getattr(fake, name))
    _describe(monkeypatch)
    for module in (devices, shipping):
        monkeypatch.setattr(module, "local_target", lambda: (0, _TARGET))
    monkeypatch.setattr(shipping, "local_ordinals", lambda: [0, 1])
    choices.table().clear()
    decision.forget_decisions()
    yield fake
    decision.forget_decisions()


def _describe(
    monkeypatch: pytest.MonkeyPatch, *, cudnn: int = 91900, cpu: str = "x86_64"
) -> None:
    monkeypatch.setattr(
        native,
        "cudnn_version",
        lambda: LibraryInfo(version=cudnn, cuda_major=13, path=""),
    )
    monkeypatch.setattr(
        native,
        "build_info",
        lambda: BuildInfo(
            builder="abc",
            cpu=cpu,
            frontend_version="1.28.0",
            cudnn_header_version=92700,
            ffi_api_version=(0, 3),
        ),
    )


def test_warmup_plans_forward_and_backward_on_every_gpu(cudnn: _Cudnn) -> None:
    report = plans.warmup(_BOTH, *_SHAPES)
    graphs = {graph for graph, _, _ in cudnn.planned}
    assert report.plans == len(graphs) == 3, "the product and its two gradients"
    assert {(graph, device) for graph, _, device in cudnn.planned} == {
        (graph, device) for graph in graphs for device in (0, 1)
    }
    assert (report.built, report.from_disk) == (6, 0)
    assert report.seconds > 0
    assert plans.warmup(_BOTH, *_SHAPES).built == 0


def test_warmup_takes_arrays_and_jitted_functions(cudnn: _Cudnn) -> None:
    arrays = [jnp.ones(shape.shape, shape.dtype) for shape in _SHAPES]
    assert plans.warmup(jax.jit(_loss), *arrays).plans == 1
    assert plans.warmup(lambda x: x + 1, arrays[0]).plans == 0
    assert len(cudnn.planned) == 2


def test_what_is_traced_already_has_its_arguments(
    cudnn: _Cudnn, tmp_path: Path
) -> None:
    x = jnp.ones((8, 8), jnp.bfloat16)
    traced = jax.jit(lambda x: matmul(x, x)).trace(x)
    for use in (plans.warmup, lambda *args: plans.save(tmp_path / "plans", *args)):
        assert use(traced).plans == 1
        with pytest.raises(
            TypeError, match="Traced takes no further arguments; 1 were"
        ):
            use(traced, x)
        with pytest.raises(TypeError, match=r"Lowered: .* no longer names its graphs"):
            use(traced.lower())


def test_what_was_saved_is_loaded_on_every_gpu(cudnn: _Cudnn, tmp_path: Path) -> None:
    path = tmp_path / "model.plans"
    saved = plans.save(path, _BOTH, *_SHAPES)
    assert (saved.plans, saved.choices, saved.left_out) == (3, 0, ())
    assert plans.load(path) == saved
    graphs = {graph for graph, _, _ in cudnn.planned}
    files = {f"0  {graph}".encode() for graph in graphs}
    assert set(cudnn.imported) == {
        (data, device) for data in files for device in (0, 1)
    }
    assert len(cudnn.imported) == 6
    (file,) = tmp_path.iterdir()
    assert file.name == "model.plans"
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_choices_travel_along_and_decide(cudnn: _Cudnn, tmp_path: Path) -> None:
    ((graph, _, _),) = traced_graphs(_loss, *_SHAPES)
    pin = '{"engine":3,"knobs":{},"variant":0}'
    choice = Choice(op="matmul", operands="", implementation="cudnn", plan=pin)
    choices.table().add({key_of(graph, _TARGET): choice})
    saved = plans.save(tmp_path / "a", _loss, *_SHAPES)
    assert (saved.plans, saved.choices) == (1, 1)
    choices.table().clear()
    plans.load(tmp_path / "a")
    assert choices.table().all() == {key_of(graph, _TARGET): choice}
    assert [data.split()[1] for data, _ in cudnn.imported] == [pin.encode()] * 2


def test_choices_of_xla_and_of_restricted_calls_travel_too(
    cudnn: _Cudnn, tmp_path: Path
) -> None:
    allowed = plans.PlanOptions(denied_engines=(7,))

    def restricted(*operands: jax.Array) -> jax.Array:
        return matmul(*operands, plan=allowed)

    ((graph, _, _),) = traced_graphs(restricted, *_SHAPES)
    slow = Choice(op="", operands="", implementation="xla", cudnn_us=3, xla_us=2)
    key = key_of(graph, _TARGET, allowed.to_request())
    choices.table().add({key: slow})
    saved = plans.save(tmp_path / "a", restricted, *_SHAPES)
    assert (saved.plans, saved.choices) == (0, 1)
    choices.table().clear()
    plans.load(tmp_path / "a")
    assert choices.table().all() == {key: slow}


def test_a_plan_that_cannot_be_written_is_named(cudnn: _Cudnn, tmp_path: Path) -> None:
    cudnn.refuses_to_write = True
    saved = plans.save(tmp_path / "a", _loss, *_SHAPES)
    assert (saved.plans, saved.left_out) == (0, ("matmul: cannot be written",))
    assert plans.load(tmp_path / "a").plans == 0


def _rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    change(contents)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)


def _change_manifest(path: Path, **changes: object) -> None:
    def change(contents: dict[str, bytes]) -> None:
        manifest = json.loads(contents["manifest.json"])
        contents["manifest.json"] = json.dumps({**manifest, **changes}).encode()

    _rewrite(path, change)


def _saved(path: Path) -> Path:
    plans.save(path / "saved", _BOTH, *_SHAPES)
    return path / "saved"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"made_for": {"GPU": "NVIDIA A100"}}, "its manifest was changed"),
        ({"plans": []}, "its manifest was changed"),
        ({"digest": ""}, "its manifest was changed"),
        ({"schema": 2}, "its schema 2 is not 1"),
    ],
)
def test_a_changed_manifest_is_refused(
    cudnn: _Cudnn, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = _saved(tmp_path)
    _change_manifest(path, **changes)
    with pytest.raises(
        GraphError, match=f"{path} is not a file of plans.save: {message}"
    ):
        plans.load(path)
    assert not cudnn.imported


@pytest.mark.parametrize("suffix", [".plan", "choices.json"])
def test_a_changed_file_is_refused(cudnn: _Cudnn, tmp_path: Path, suffix: str) -> None:
    path = _saved(tmp_path)

    def change(contents: dict[str, bytes]) -> None:
        name = next(name for name in contents if name.endswith(suffix))
        contents[name] += b" "

    _rewrite(path, change)
    with pytest.raises(GraphError, match=f"{suffix} was changed"):
        plans.load(path)
    assert not cudnn.imported


def test_another_gpu_and_other_versions_are_named(
    cudnn: _Cudnn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _saved(tmp_path)
    _describe(monkeypatch, cudnn=92001, cpu="aarch64")
    other = Target(name="NVIDIA H100", sm_version=90, sm_count=114, cudnn_version=92001)
    monkeypatch.setattr(shipping, "local_target", lambda: (0, other))
    with pytest.raises(LibraryError) as caught:
        plans.load(path)
    assert str(caught.value) == (
        f"{path} cannot be used here.\n"
        "  - GPU: made for NVIDIA H200, this is NVIDIA H100\n"
        "  - multiprocessors: made for 132, this is 114\n"
        "  - cuDNN: made for 9.19.0, this is 9.20.1\n"
        "  - CPU: made for x86_64, this is aarch64\n"
        "Save the plans again here."
    )
    assert not cudnn.imported


@hypothesis.given(
    place=st.integers(0, 4000), patch=st.binary(max_size=9), cuts=st.booleans()
)
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)  # fmt: skip
def test_a_damaged_archive_is_refused_or_whole(
    cudnn: _Cudnn, tmp_path: Path, place: int, patch: bytes, cuts: bool
) -> None:
    path = _saved(tmp_path)
    whole = path.read_bytes()
    place %= len(whole)
    path.write_bytes(
        whole[:place] + patch + (b"" if cuts else whole[place + len(patch) :])
    )
    cudnn.imported.clear()
    before = {hashlib.sha256(data).digest() for data, _ in _exports(cudnn)}
    try:
        plans.load(path)
    except GraphError as error:
        assert str(error).startswith(f"{path} is not a file of plans.save: ")  # noqa: PT017
        assert not cudnn.imported
    else:
        found = {hashlib.sha256(data).digest() for data, _ in cudnn.imported}
        assert found == before, "a byte that means nothing"


def _exports(cudnn: _Cudnn) -> set[tuple[bytes, int]]:
    return {(cudnn.export_plan(graph), 0) for graph, _, _ in cudnn.planned}


def test_without_a_gpu_all_three_say_so(tmp_path: Path) -> None:
    for name, arguments in (
        ("warmup", (_loss, *_SHAPES)),
        ("save", (tmp_path / "a", _loss, *_SHAPES)),
        ("load", (tmp_path / "a",)),
    ):
        message = f"plans.{name} needs an NVIDIA GPU; JAX sees none here."
        with pytest.raises(LibraryError, match=message):
            getattr(plans, name)(*arguments)


def test_clearing_makes_decisions_anew(cudnn: _Cudnn) -> None:
    plans.warmup(_loss, *_SHAPES)
    asked = len(cudnn.planned)
    plans.warmup(_loss, *_SHAPES)
    assert len(cudnn.planned) == asked + 1, "decided already; the second GPU is asked"
    plans.clear_cache()
    plans.warmup(_loss, *_SHAPES)
    assert len(cudnn.planned) == asked + 3
