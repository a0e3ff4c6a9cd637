# SPDX-License-Identifier: Apache-2.0
"""Tests of what `doctor` reads of a machine, and of its command."""

import ctypes
import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_cudnn import LibraryError, cache, native, plans
from jax_cudnn.cli import main
from jax_cudnn.doctor import machine
from jax_cudnn.doctor.findings import examine
from jax_cudnn.doctor.machine import Cudnn, CudnnFile, Facts, InstalledGpu
from jax_cudnn.doctor.system import container_of
from tests.native.stand_ins import compile_cudnn, obstacle
from tests.tools.doctor.facts import (
    CPU_ONLY,
    GOOD,
    PATH,
    SYSTEM,
    diagnosis_of,
)

pytestmark = pytest.mark.once


# --- facts ----------------------------------------------------------------------------


def test_variables_that_matter_are_told_and_no_others() -> None:
    environment = {
        "HOME": "/root",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "CUDNN_LOGLEVEL_DBG": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "LD_LIBRARY_PATH": "/lib",
        "JAX_PLATFORMS": "cpu",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PASSWORD": "secret",
    }
    told = machine.relevant(environment)
    assert told == tuple(sorted(told))
    assert set(environment) - {name for name, _ in told} == {"HOME", "PASSWORD"}


class _Cuda:
    """Stands for libcuda: two GPUs, or a status that cuInit returns."""

    def __init__(self, status: int):
        self._status = status

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 12080
        return 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return self._status

    def cuGetErrorName(self, status: int, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_%d" % status
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = 70 + ordinal
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        assert size == len(name)
        name.value = b"GPU %d" % device.value
        return 0

    def cuDeviceGetAttribute(self, value: Any, kind: int, device: Any) -> int:  # noqa: N802
        assert device.value in (70, 71)
        value._obj.value = {75: 8, 76: 9}[kind]
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:  # noqa: N802
        memory._obj.value = device.value * 2**32
        return 0


def _facts_with(status: int, monkeypatch: pytest.MonkeyPatch) -> Facts:
    def load(name: str) -> _Cuda:
        assert name == "libcuda.so.1"
        return _Cuda(status)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(native, "load_libraries", dict)
    return machine.gather()


def test_the_driver_is_asked_for_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _facts_with(0, monkeypatch).driver
    assert driver is not None
    assert driver.cuda_version == 12080
    assert driver.gpus == (
        InstalledGpu(name="GPU 70", sm_version=89, memory_bytes=70 * 2**32),
        InstalledGpu(name="GPU 71", sm_version=89, memory_bytes=71 * 2**32),
    )


def test_a_driver_may_have_no_gpu_or_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    none = _facts_with(100, monkeypatch)
    assert none.driver is not None
    assert (none.driver.gpus, none.driver.error) == ((), "")
    assert not none.has_gpu
    broken = _facts_with(803, monkeypatch)
    assert broken.driver is not None
    assert broken.driver.error == "cuInit returns 803 (CUDA_ERROR_803)"
    assert broken.has_gpu


def test_every_cudnn_within_reach_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wheel", "system"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libcudnn.so.9").write_bytes(b"no library")
    (tmp_path / "linked").symlink_to(tmp_path / "system")
    wheel = tmp_path / "wheel" / "libcudnn.so.9"
    (tmp_path / "wheel" / "libcudnn_graph.so.9").write_bytes(b"")
    directories = [str(tmp_path / "linked"), "", str(tmp_path / "absent")]
    info = native.LibraryInfo(version=91900, cuda_major=13, path=str(wheel))
    monkeypatch.setattr(native, "cudnn_version", lambda: info)
    monkeypatch.setattr(
        native, "library_directories", lambda: [str(tmp_path / "system")]
    )
    monkeypatch.setattr(machine, "_SYSTEM_DIRECTORIES", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(directories))
    facts = machine.gather()
    assert facts.cudnn == Cudnn(
        version=91900, cuda_major=13, path=str(wheel), sublibraries=("libcudnn_graph",)
    )
    assert facts.cudnn_files == (
        CudnnFile(path=str(wheel), version=91900),
        # What does not load has no version.
        CudnnFile(path=str(tmp_path / "system" / "libcudnn.so.9"), version=0),
    )


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_a_cudnn_is_asked_for_its_version_in_another_process(tmp_path: Path) -> None:
    compile_cudnn(tmp_path, 91300)
    assert machine.version_of(tmp_path / "libcudnn.so.9") == 91300
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_missing_libraries_are_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise LibraryError("Cannot open it")

    info = native.LibraryInfo(version=91900, cuda_major=13, path=PATH)
    monkeypatch.setattr(native, "cudnn_version", lambda: info)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: _Cuda(0))
    monkeypatch.setattr(native, "load_libraries", missing)
    assert machine.gather().companions_error == "Cannot open it"
    monkeypatch.setattr(native, "cudnn_version", missing)
    facts = machine.gather()
    assert (facts.cudnn, facts.cudnn_error) == (None, "Cannot open it")
    assert facts.companions_error == ""


def test_a_folder_that_may_not_be_read_is_passed_over_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, open_ = tmp_path / "closed", tmp_path / "open"
    open_.mkdir()
    (open_ / "libcudnn.so.9").write_bytes(b"no library")
    exists = Path.exists

    def refuse(self: Path, **options: Any) -> bool:
        if self.parent == closed:
            raise PermissionError(13, "Permission denied", str(self))
        return exists(self, **options)

    monkeypatch.setattr(Path, "exists", refuse)
    monkeypatch.setattr(machine, "_SYSTEM_DIRECTORIES", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{closed}:{open_}")
    facts = machine.gather()
    assert CudnnFile(path=str(open_ / "libcudnn.so.9"), version=0) in facts.cudnn_files
    ((what, error),) = facts.unread
    assert what == str(closed)
    assert error.startswith("PermissionError: [Errno 13] Permission denied")


def test_what_was_calibrated_is_among_the_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = native.LibraryInfo(version=91900, cuda_major=13, path=PATH)
    monkeypatch.setattr(native, "cudnn_version", lambda: info)
    monkeypatch.setattr(native, "load_libraries", dict)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: _Cuda(0))
    settings = cache.Settings(directory=tmp_path)
    monkeypatch.setattr(cache, "settings", lambda: settings)
    assert machine.gather().calibrations is None  # JAX sees no GPU.
    monkeypatch.setattr(machine, "_jax_devices", lambda: (("cuda",), 1, ""))
    known = machine.gather().calibrations
    assert known is not None
    assert (90, 919) in known.shipped
    assert (known.own, known.broken) == ((), ())
    (tmp_path / "calibration").mkdir()
    broken = tmp_path / "calibration" / "nvidia-l4-cudnn919-1.json"
    broken.write_text("{}")
    known = machine.gather().calibrations
    assert known is not None
    assert known.broken == (f"{broken} is not a calibration: schema None is not 1.",)


_READ = {
    "the system": (machine, "this_system"),
    "the driver": (machine, "_driver"),
    "JAX's devices": (machine, "_jax_devices"),
    "the extension": (native, "extension_problem"),
    "cuDNN": (native, "cudnn_version"),
    "how the extension is built": (native, "build_info"),
    "other cuDNNs": (native, "library_directories"),
    "the devices on the bus": (machine, "_nvidia_devices"),
    "the installed packages": (machine, "_packages"),
}


@pytest.mark.parametrize("what", _READ)
def test_the_doctor_answers_whatever_fails(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("a riddle")

    monkeypatch.setattr(*_READ[what], fail)
    assert main(["doctor"]) in (0, 1)
    told = capsys.readouterr().out
    sentence = f"{what[0].upper()}{what[1:]} could not be read: KeyError: 'a riddle'"
    assert f"warning: {sentence}\n" in told
    assert main(["doctor", "--json"]) in (0, 1)
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert [what, "KeyError: 'a riddle'"] in facts["unread"]


def test_the_system_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "5.15.1-microsoft-standard-WSL2")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(
        platform, "freedesktop_os_release", lambda: {"PRETTY_NAME": "Alpine Linux v3.2"}
    )
    system = machine.gather().system
    assert system is not None
    assert system.is_wsl
    told = str(system)
    name = "Alpine Linux v3.2, Linux 5.15.1-microsoft-standard-WSL2"
    assert told.startswith(f"{name}, {platform.machine()}, no glibc")
    assert told.endswith(", in WSL")
    docker = replace(SYSTEM, container="Docker")
    text = str(diagnosis_of(replace(GOOD, system=docker)))
    expected = "Debian 12, Linux 6.1, x86_64, glibc 2.36, in a container (Docker)"
    assert text.splitlines()[0].split(maxsplit=1) == ["system", expected]


def test_containers_are_known_by_their_files_and_variables(tmp_path: Path) -> None:
    assert container_of({}, tmp_path) == ""
    assert container_of({"container": "lxc"}, tmp_path) == "lxc"
    assert container_of({"APPTAINER_CONTAINER": "/a.sif"}, tmp_path) == "Apptainer"
    assert container_of({"KUBERNETES_SERVICE_HOST": "10.0"}, tmp_path) == "Kubernetes"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".containerenv").touch()
    assert container_of({"container": "podman"}, tmp_path) == "Podman"
    (tmp_path / ".dockerenv").touch()
    assert container_of({}, tmp_path) == "Docker"


# --- the command ----------------------------------------------------------------------


def test_doctor_tells_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = plans.doctor()
    assert diagnosis.findings == examine(diagnosis.facts)
    assert main(["doctor"]) == diagnosis.exit_status
    assert capsys.readouterr().out == f"{diagnosis}\n"
    assert main(["doctor", "--json"]) == diagnosis.exit_status
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(diagnosis.to_json())
    )


def test_a_report_does_not_name_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = replace(GOOD, location="/home/somebody/jax_cudnn")
    monkeypatch.setattr(plans, "doctor", lambda: diagnosis_of(facts))
    monkeypatch.setenv("HOME", "/home/somebody")
    assert main(["doctor", "--report"]) == 0
    told = capsys.readouterr().out
    assert "somebody" not in told
    assert told == str(diagnosis_of(facts)).replace("/home/somebody", "~") + "\n"


@pytest.mark.parametrize(
    ("home", "path", "told"),
    [
        ("/", "/site/jax_cudnn", "/site/jax_cudnn"),  # as of docker run --user
        ("", "/site/jax_cudnn", "/site/jax_cudnn"),
        ("/home/ann", "/home/anna/jax_cudnn", "/home/anna/jax_cudnn"),
        ("/root", "/opt/root/jax_cudnn", "/opt/root/jax_cudnn"),
        ("/root/", "/root/jax_cudnn", "~/jax_cudnn"),
    ],
)
def test_only_the_home_folder_is_replaced_in_a_report(
    home: str,
    path: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = replace(GOOD, location=path)
    monkeypatch.setattr(plans, "doctor", lambda: diagnosis_of(facts))
    monkeypatch.setenv("HOME", home)
    assert main(["doctor", "--report"]) == 0
    expected = str(diagnosis_of(replace(GOOD, location=told)))
    assert capsys.readouterr().out == f"{expected}\n"


def test_a_report_needs_no_home_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(plans, "doctor", lambda: diagnosis_of(GOOD))
    monkeypatch.setattr(Path, "home", fail)
    assert main(["doctor", "--report"]) == 0
    assert capsys.readouterr().out == f"{diagnosis_of(GOOD)}\n"


def test_the_exit_status_is_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for facts, status in ((GOOD, 0), (CPU_ONLY, 0), (replace(GOOD, driver=None), 1)):
        monkeypatch.setattr(plans, "doctor", lambda facts=facts: diagnosis_of(facts))
        assert main(["doctor"]) == status
        assert diagnosis_of(facts).verdict in capsys.readouterr().out


def test_facts_change_no_environment() -> None:
    before = dict(os.environ)
    machine.gather()
    assert dict(os.environ) == before
