# SPDX-License-Identifier: Apache-2.0
"""Tests `plans.calibrate` with a stand-in for the GPU, and its command."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jax_cudnn import cli, plans
from jax_cudnn.calibration import api, choosing, measuring, storing
from jax_cudnn.cli import calibrate as command
from jax_cudnn.errors import GraphError, LibraryError
from jax_cudnn.graph import Graph
from jax_cudnn.lowering.devices import LocalGpu
from jax_cudnn.policy import own, ranked
from tests.calibration.shared import H100, file_of, folder, kernel, row

__all__ = ["folder"]

pytestmark = pytest.mark.once

_ROWS = [row(kernel(rows=2**i), 0.5, i) for i in range(5, 9)]
_BATCH = 3


class _Machine:
    """Stands for an H100: a batch takes ten seconds, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.batches: list[Sequence[Graph]] = []
        self.fails_at = -1

    def measure(
        self, parts: Sequence[Graph], gpu: LocalGpu, *, is_thorough: bool
    ) -> Iterator[dict[str, Any]]:
        assert not is_thorough
        if len(self.batches) == self.fails_at:
            raise KeyboardInterrupt
        self.batches.append(parts)
        self.now += 10.0
        for part in parts:
            named = measuring.named(part, ranked(part, gpu.target)[0].rewrite, gpu)
            assert named is not None
            yield {**_ROWS[0], **named, "ratio": 0.5}

    @property
    def measured(self) -> list[Graph]:
        return [part for batch in self.batches for part in batch]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    """Let calibrate find an H100 here that is not."""
    made = _Machine()
    monkeypatch.setattr(api, "local_target", lambda: (0, H100))
    monkeypatch.setattr(command, "local_target", lambda: (0, H100))
    monkeypatch.setattr(api, "workers", lambda: _BATCH)
    monkeypatch.setattr(api, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(measuring, "measure", made.measure)
    monkeypatch.setattr(choosing, "_AT_HAND", 10)
    return made


def test_it_stops_in_time_and_keeps_what_was_measured(machine: _Machine) -> None:
    result = plans.calibrate(seconds=35)
    assert len(machine.batches) == 3, "a fourth might have ended too late"
    assert len(set(machine.measured)) == 3 * _BATCH
    (mine,) = result.own
    assert (mine.gpu, mine.cudnn, mine.changes) == (H100.name, "9.19.0", ())
    assert sum(mine.kernels.values()) == 3 * _BATCH
    assert result.is_covered
    assert (result.gpu, result.cudnn) == (H100.name, "9.19.0")
    assert str(result) == str(plans.calibrated())


def test_it_goes_on_where_it_ended(machine: _Machine) -> None:
    plans.calibrate(seconds=21)
    plans.calibrate(seconds=21)
    assert len(machine.batches) == 4
    assert len(set(machine.measured)) == 4 * _BATCH
    assert len(storing.measured_rows(H100)) == 4 * _BATCH


def test_every_batch_is_kept_at_once(machine: _Machine) -> None:
    machine.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        plans.calibrate(seconds=1000)
    assert len(storing.measured_rows(H100)) == 2 * _BATCH


def test_what_was_measured_with_other_versions_is_measured_again(
    machine: _Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans.calibrate(seconds=21)
    versions = {"cuDNN": "9.19.1", "JAX": "99.0", "driver": ""}
    monkeypatch.setattr(own, "environment", lambda _: dict(versions))
    (mine,) = plans.calibrated().own
    here = own.read(mine.path).data["measured"][0]["with"]
    assert mine.changes == (
        "cuDNN 9.19.0, here 9.19.1 (6 kernels)",
        f"JAX {here['JAX']}, here 99.0 (6 kernels)",
    )
    assert f"changed since: JAX {here['JAX']}, here 99.0" in str(plans.calibrated())
    plans.calibrate(seconds=21)
    assert machine.batches[2:] == machine.batches[:2]
    (mine,) = plans.calibrated().own
    assert mine.changes == ()
    assert sum(mine.kernels.values()) == 2 * _BATCH


def test_only_calls_that_are_wanted_are_measured(
    machine: _Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = plans.calibrate(seconds=10, only="norm")
    assert all("norm" in name for name in result.own[0].kernels)
    monkeypatch.setattr(choosing, "_IN_VAIN", 20)
    with pytest.raises(ValueError, match="none of the drawn calls is wanted"):
        plans.calibrate(seconds=10, only="nothing is called so")


def test_what_keeps_it_from_measuring_is_said_first(
    machine: _Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storing.store(H100, _ROWS)
    file_of(H100, folder).write_text("{}")
    with pytest.raises(GraphError, match="is not a calibration"):
        plans.calibrate(seconds=1000)
    plans.set_cache(None)
    with pytest.raises(LibraryError, match="nothing is kept on disk here"):
        plans.calibrate(seconds=1000)
    turing = replace(H100, name="Tesla T4", sm_version=75)
    monkeypatch.setattr(api, "local_target", lambda: (0, turing))
    with pytest.raises(LibraryError, match=r"no fused plan for Tesla T4 \(sm_75\)"):
        plans.calibrate(seconds=1000)
    assert machine.batches == []


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="is not a positive number"):
        plans.calibrate(seconds=seconds)


# --- what is known --------------------------------------------------------------------


def test_without_a_gpu_it_is_said_what_there_is() -> None:
    text = str(plans.calibrated())
    assert text.splitlines() == [
        "No GPU here",
        "Nothing was calibrated on this machine.",
        "",
        "Tables of the package: sm_90, cuDNN 9.19; sm_90, cuDNN 9.28.",
    ]
    with pytest.raises(LibraryError, match="JAX sees none here"):
        plans.calibrate(seconds=1)
    storing.store(H100, _ROWS)
    text = str(plans.calibrated())
    assert f"4 kernels measured on {H100.name} with cuDNN 9.19.0, JAX " in text
    assert "matmul, 16 bits" in text


def test_the_calibration_of_this_gpu_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    l4 = replace(H100, name="NVIDIA L4", sm_version=89)
    monkeypatch.setattr(api, "local_target", lambda: (0, l4))
    storing.store(H100, _ROWS)
    storing.store(replace(l4, cudnn_version=92000), _ROWS)
    known = plans.calibrated()
    assert [each.gpu for each in known.own] == [l4.name, H100.name]
    assert not known.is_covered
    assert "`jax-cudnn calibrate` measures this GPU." in str(known)
    storing.store(l4, _ROWS)
    known = plans.calibrated()
    assert known.is_covered
    assert "the nearest decides" not in " ".join(str(known).split())


# --- the command ----------------------------------------------------------------------


def _run(*arguments: object) -> int:
    return cli.main(["calibrate", *map(str, arguments)])


def test_the_command_measures_and_shows(
    machine: _Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("--seconds", 10, "--only", "matmul") == 0
    told = capsys.readouterr().out
    assert f"3 kernels measured on {H100.name}" in told
    assert _run("--show") == 0
    assert capsys.readouterr().out == told
    assert len(machine.batches) == 1


def test_the_command_exports_imports_and_forgets(
    machine: _Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del machine
    written = tmp_path / "mine.json"
    assert _run("--export", written) == 1
    assert "nothing was calibrated for NVIDIA H100" in capsys.readouterr().err
    path = storing.store(H100, _ROWS)
    assert _run("--export", written) == 0
    assert capsys.readouterr().out == f"written to {written}\n"
    assert json.loads(written.read_text())["gpu"] == H100.name
    assert _run("--forget") == 0
    assert capsys.readouterr().out == "removed 1 calibration\n"
    assert _run("--forget") == 0
    assert capsys.readouterr().out == "removed 0 calibrations\n"
    assert _run("--import", written) == 0
    assert capsys.readouterr().out == f"kept as {path}\n"
    assert len(storing.measured_rows(H100)) == 4


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("--export", "x.json"), 1, "--export is for the GPU of this machine"),
        (("--import", "no such file"), 1, "no such file cannot be read"),
        (("--seconds", "0"), 2, "seconds=0.0 is not a positive number"),
        (("--seconds", "inf"), 2, "seconds=inf is not a positive number"),
        (("--only", "("), 2, "only='(' is no regular expression"),
        ((), 1, "calibrate needs an NVIDIA GPU"),
    ],
)
def test_what_the_command_cannot_do_is_said(
    arguments: tuple[str, ...],
    status: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run(*arguments) == status
    assert told in capsys.readouterr().err


def test_the_command_names_a_file_that_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    garbage = tmp_path / "garbage.json"
    garbage.write_text("garbage")
    assert _run("--import", garbage) == 2
    assert f"{garbage} is not a calibration: " in capsys.readouterr().err
    path = storing.store(H100, _ROWS)
    path.write_text("garbage")
    assert _run("--show") == 0
    assert f"Not used: {path} is not a calibration: " in capsys.readouterr().out
    # What is broken can be removed all the same.
    assert _run("--forget") == 0
    assert capsys.readouterr().out == "removed 1 calibration\n"


@pytest.mark.parametrize("text", ["soon", ""])
def test_seconds_are_a_number(text: str) -> None:
    with pytest.raises(SystemExit) as raised:
        _run("--seconds", text)
    assert raised.value.code == 2
