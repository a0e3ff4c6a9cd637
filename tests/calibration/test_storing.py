# SPDX-License-Identifier: Apache-2.0
"""Tests how what was measured is kept, and that broken files are refused by name."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_cudnn import cache, plans
from jax_cudnn.calibration import storing
from jax_cudnn.errors import GraphError, LibraryError
from jax_cudnn.graph import Target
from jax_cudnn.policy import own, tables
from tests.calibration.shared import H100, file_of, folder, kernel, row

__all__ = ["folder"]

pytestmark = pytest.mark.once

_ROWS = [row(kernel(rows=2**i), 0.5, i) for i in range(5, 9)]


def test_a_table_follows_from_rows() -> None:
    slow = [
        row(kernel("conv_fprop, 16 bits, more"), 3.0, i, first_engine=8, engines={})
        for i in range(8)
    ]
    norm = row(kernel("rms_norm, bf16", depth=1), 0.00001)
    table = storing.table_of([*_ROWS, *slow, norm], H100, {"JAX": "1"})
    assert (table["gpu"], table["sm_version"], table["cudnn"]) == (H100.name, 90, 919)
    assert table["slow_engines"] == {"conv_fprop, 16 bits": [8]}
    names = [name for name, *_ in table["kernels"]]
    assert names == [*["matmul, 16 bits, more"] * 4, "rms_norm, bf16"]
    # No ratio is 0, however fast cuDNN was.
    assert table["kernels"][-1] == [
        *["rms_norm, bf16", 1020.0, 1020.0, 1.0, 0.001],
        {"77": 0.001},
    ]
    assert len(table["measured"]) == 13
    # Fewer kernels make no engine slow for all of a kind.
    few = storing.table_of([*_ROWS, *slow[:7]], H100, {})
    assert few["slow_engines"] == {}


def test_times_are_those_of_the_plans_that_auto_runs() -> None:
    """The package's rules change cuDNN's first plan, and leave some engines to XLA."""
    like = kernel("matmul, 16 bits, more", rows=4096, columns=2048, depth=2048)
    (first,) = storing.table_of(
        [row(like, 1.0, op="matmul+add", first_engine=4)], H100, {}
    )["kernels"]
    assert first[4] == first[5]["4"] == pytest.approx(0.905, abs=0.01)
    newer = replace(H100, cudnn_version=92900)
    (first,) = storing.table_of(
        [row(like, 1.0, op="matmul+add", first_engine=4)], newer, {}
    )["kernels"]
    assert first[4] == 1.0
    slow = kernel("conv_fprop, 16 bits, more, 2 axes")
    assert (
        storing.table_of([row(slow, 3.0, first_engine=51)], H100, {})["kernels"] == []
    )


def test_depthwise_convolutions_say_nothing_of_other_ones() -> None:
    name = "conv_fprop, 16 bits, depthwise, 2 axes"
    like = [row(kernel(name), 3.0, i, first_engine=8) for i in range(8)]
    engines = {"77": 1.0, "78": 0.5}
    like += [row(kernel(name), 1.0, i + 8, engines=engines) for i in range(8)]
    table = storing.table_of(like, H100, {})
    assert (table["slow_engines"], table["engines"]) == ({}, [])
    assert [each[4] for each in table["kernels"]] == [*[1.0] * 8, *[3.0] * 8]
    # The engine that runs is named first.
    assert table["kernels"][0][5:] == [{"77": 1.0, "78": 0.5}]


def test_what_others_added_meanwhile_stays(folder: Path) -> None:
    storing.store(H100, _ROWS[:2])
    path = storing.store(H100, _ROWS[2:])
    assert path == file_of(H100, folder)
    assert path.name == "nvidia-h100-80gb-hbm3-cudnn919-1.json"
    assert [x["operands"] for x in storing.measured_rows(H100)] == [
        x["operands"] for x in _ROWS
    ]
    # A kernel that is measured again counts once.
    storing.store(H100, [{**_ROWS[0], "ratio": 2.0}])
    assert [x["ratio"] for x in storing.measured_rows(H100)] == [2.0, 0.5, 0.5, 0.5]
    # Of another cuDNN, there is another file.
    storing.store(replace(H100, cudnn_version=92000), _ROWS[:1])
    assert len(own.paths()) == 2
    assert len(storing.measured_rows(H100)) == 4


def test_a_file_is_for_this_user_and_whole(folder: Path) -> None:
    path = storing.store(H100, _ROWS)
    assert path.stat().st_mode & 0o777 == 0o600
    (path.parent / f"tmp-{path.name}-x").write_text("of a process that was killed")
    storing.store(H100, ())
    assert {each.name for each in path.parent.iterdir()} == {path.name, "lock"}
    data = json.loads(path.read_text())
    assert storing.to_text(data) == path.read_text()


def test_nothing_is_written_before_something_was_measured(folder: Path) -> None:
    storing.store(H100, ())
    assert own.paths() == []
    assert tables.calibrated() == ()


_KEEPS = """
import json, sys
from jax_cudnn.calibration import storing
from jax_cudnn.graph import Target
target, rows = json.loads(sys.argv[1])
for row in rows:
    storing.store(Target(**target), [row])
"""


def test_processes_keep_at_once_and_nothing_is_lost(folder: Path) -> None:
    environment = {**os.environ, cache.DIRECTORY_VARIABLE: str(folder)}
    target = {name: getattr(H100, name) for name in Target.__slots__}
    running: list[subprocess.Popen[bytes]] = []
    for start in (0, 100):
        rows = [row(kernel(rows=2**5), 0.5, start + i) for i in range(25)]
        told = json.dumps([target, rows])
        command = [sys.executable, "-c", _KEEPS, told]
        running.append(subprocess.Popen(command, env=environment))
    assert [each.wait(timeout=60) for each in running] == [0, 0]
    assert len(storing.measured_rows(H100)) == 50


def _changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


_ORDER = {
    **{"kind": "conv_fprop", "bits": "f32", "cudnn": 91900, "groups": False},
    **{"windows_of_1": False, "first": 1, "before": [2]},
}
_BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "schema 2 is not 1": lambda data: data.update(schema=2),
    "kernels is missing": lambda data: data.pop("kernels"),
    "sm_version is of type str": lambda data: data.update(sm_version="90"),
    "gpu is missing": lambda data: data.update(gpu=""),
    "it has rows or orders": lambda data: data.update(rows=[{"of": "norms"}]),
    "sm_version and cudnn are positive": lambda data: data.update(cudnn=0),
    "environment has": lambda data: data["environment"].update(JAX=1),
    "is none of its kernels": lambda data: data["kernels"].append(["x, y", 1, 1, 1]),
    "0] is none of its kernels": lambda data: data["kernels"].append(
        ["x, y", 1, 1, 1, 0]
    ),
    "inf] is none": lambda data: data["kernels"].append(["x, y", 1, 1, 1, 1e999]),
    "{'x': 1}] is none": lambda data: data["kernels"].append(
        ["x, y", 1, 1, 1, 1, {"x": 1}]
    ),
    "{'4': 0}] is none": lambda data: data["kernels"].append(
        ["x, y", 1, 1, 1, 1, {"4": 0}]
    ),
    "['x', 1,": lambda data: data["kernels"].append(["x", 1, 1, 1, 1]),
    "is none of its measured": lambda data: data["measured"].append({"class": "x"}),
    "is none of its engines": lambda data: data["engines"].append(
        {**_ORDER, "kind": "matmul"}
    ),
    "is none of its preferred": lambda data: data["preferred"].append(_ORDER),
    "are no parts of it": lambda data: data.update(norms=[1]),
    "is no name": lambda data: data.update(gpu="NVIDIA\x1b[31m"),
    "are no engines": lambda data: data["slow_engines"].update({"x": ["1"]}),
}


@pytest.mark.parametrize("words", _BROKEN)
def test_what_is_broken_is_said(words: str) -> None:
    path = storing.store(H100, _ROWS)
    _changed(path, _BROKEN[words])
    with pytest.raises(GraphError) as caught:
        own.read(path)
    assert f"{path} is not a calibration: " in str(caught.value)
    assert words in str(caught.value)


def test_an_order_of_engines_is_accepted() -> None:
    path = storing.store(H100, _ROWS)
    _changed(path, lambda data: data["engines"].append(_ORDER))
    assert own.read(path).data["engines"] == [_ORDER]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000]
)
def test_a_broken_file_is_refused_by_name_and_decides_nothing(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = storing.store(H100, _ROWS)
    assert len(tables.calibrated()) == 1
    path.write_bytes(content)
    storing.reload()
    (told,) = plans.calibrated().broken
    assert path.name in told
    assert "Delete it, and run `jax-cudnn calibrate` again." in told
    assert f"Not used: {path}" in str(plans.calibrated())
    with pytest.raises(GraphError, match=path.name):
        storing.store(H100, _ROWS)
    assert path.read_bytes() == content
    with caplog.at_level(logging.WARNING, logger="jax_cudnn"):
        assert tables.calibrated() == ()
        assert tables.calibrated() == ()
    (record,) = caplog.records
    assert record.getMessage().startswith("what was calibrated is not used: ")
    assert path.name in record.getMessage()
    # One that is broken keeps no other from deciding.
    storing.store(replace(H100, cudnn_version=92000), _ROWS)
    assert len(tables.calibrated()) == 1


def test_a_folder_that_takes_nothing_is_named(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    with pytest.raises(LibraryError, match="cannot be written") as caught:
        storing.store(H100, _ROWS)
    assert str(folder) in str(caught.value)
    assert own.paths() == []


def test_nothing_can_be_kept_where_the_cache_is_off() -> None:
    cache.configure(cache.Settings(directory=None))
    storing.reload()
    with pytest.raises(LibraryError, match="JAX_CUDNN_CACHE_DIR"):
        storing.store(H100, _ROWS)
    assert (tables.calibrated(), plans.calibrated().own) == ((), ())


def test_what_is_exported_is_imported_elsewhere(tmp_path: Path, folder: Path) -> None:
    written = tmp_path / "mine.json"
    with pytest.raises(LibraryError, match="nothing was calibrated for NVIDIA H100"):
        storing.export(written, H100)
    path = storing.store(H100, _ROWS)
    content = path.read_text()
    storing.export(written, H100)
    assert storing.remove_all() == 1
    assert tables.calibrated() == ()
    assert storing.import_file(written) == path
    assert path.read_text() == content
    (table,) = tables.calibrated()
    assert (table.gpu, table.cudnn) == (H100.name, 919)
    assert storing.remove_all() == 1
    assert storing.remove_all() == 0
    storing.store(H100, _ROWS)
    with pytest.raises(LibraryError, match="cannot be written"):
        storing.export(tmp_path / "no such folder" / "x.json", H100)


def test_garbage_is_not_imported(tmp_path: Path) -> None:
    storing.store(H100, _ROWS)
    garbage = tmp_path / "garbage.json"
    garbage.write_text('{"schema": 1}')
    with pytest.raises(GraphError, match=f"{garbage} is not a calibration") as caught:
        storing.import_file(garbage)
    # It is not to be deleted: it is somebody's.
    assert "Delete" not in str(caught.value)
    with pytest.raises(LibraryError, match="cannot be read"):
        storing.import_file(tmp_path / "absent.json")
    assert len(storing.measured_rows(H100)) == 4
    shipped = Path(tables._FOLDER) / "sm90-cudnn9.19.json"
    with pytest.raises(GraphError, match="schema None is not 1"):
        storing.import_file(shipped)


def test_rows_of_other_versions_decide_and_are_not_fresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"cuDNN": "9.19.0", "JAX": "1.0", "driver": ""}
    monkeypatch.setattr(own, "environment", lambda _: dict(versions))
    path = storing.store(H100, _ROWS)
    assert own.read(path).changes(H100.cudnn_version) == ()
    versions.update(JAX="1.1", driver="580.65.06")
    assert own.read(path).changes(H100.cudnn_version) == (
        "JAX 1.0, here 1.1 (4 kernels)",
    )
    assert storing.fresh_rows(H100) == []
    assert len(tables.calibrated()[0].data["kernels"]) == 4
    # What is measured again is fresh, and the others still are not.
    storing.store(H100, _ROWS[:1])
    assert len(storing.fresh_rows(H100)) == 1
    assert own.read(path).changes(H100.cudnn_version) == (
        "JAX 1.0, here 1.1 (3 kernels)",
    )
