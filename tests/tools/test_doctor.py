# SPDX-License-Identifier: Apache-2.0
"""Tests that `doctor` finds what is wrong with a machine, and what to do."""

import ctypes
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_cudnn import LibraryError, cache, native, plans
from jax_cudnn.cli import main
from jax_cudnn.doctor import machine
from jax_cudnn.doctor.calibrations import Calibrations, OwnCalibration
from jax_cudnn.doctor.diagnosis import Diagnosis
from jax_cudnn.doctor.finding import Finding
from jax_cudnn.doctor.findings import examine
from jax_cudnn.doctor.machine import Cudnn, CudnnFile, Driver, Facts, InstalledGpu
from jax_cudnn.doctor.system import System, container_of
from jax_cudnn.errors import install_command
from tests.native.stand_ins import compile_cudnn, obstacle

pytestmark = pytest.mark.once

_H200 = InstalledGpu(name="NVIDIA H200", sm_version=90, memory_bytes=141 * 2**30)
_PATH = "/site/nvidia/cudnn/lib/libcudnn.so.9"
_CUDNN = Cudnn(
    version=91900,
    cuda_major=13,
    path=_PATH,
    sublibraries=(
        *("libcudnn_adv", "libcudnn_cnn", "libcudnn_engines_precompiled"),
        *("libcudnn_engines_runtime_compiled", "libcudnn_graph"),
        *("libcudnn_heuristic", "libcudnn_ops"),
    ),
)
_SYSTEM = System(name="Debian 12, Linux 6.1", architecture="x86_64", glibc="2.36")
_GOOD = Facts(
    system=_SYSTEM,
    python="3.12.1",
    jax_cudnn="0.1.0",
    location="/site/jax_cudnn",
    import_error="",
    extension_error="",
    extension_fix="",
    frontend="1.28.0",
    ffi_api=(0, 3),
    header_version=92700,
    nvidia_devices=1,
    driver=Driver(version="580.65.06", cuda_version=13000, gpus=(_H200,)),
    jax="0.12.0",
    jaxlib="0.12.0",
    jax_import_error="",
    jax_backends=("cuda", "cpu"),
    jax_gpu_count=1,
    jax_error="",
    cudnn=_CUDNN,
    cudnn_error="",
    cudnn_files=(CudnnFile(path=_PATH, version=91900),),
    companions=(("libcublasLt.so.13", "/site/nvidia/cu13/lib/libcublasLt.so.13"),),
    companions_error="",
    packages=(
        ("jax-cuda13-pjrt", "0.12.0"),
        ("jax-cuda13-plugin", "0.12.0"),
        ("nvidia-cudnn-cu13", "9.19.0.56"),
    ),
    calibrations=Calibrations(shipped=((90, 919),)),
    environment=(),
    unread=(),
)
_CPU_ONLY = replace(
    _GOOD,
    nvidia_devices=0,
    driver=None,
    jax_backends=("cpu",),
    jax_gpu_count=0,
    jax_error="Unknown backend cuda",
    cudnn=None,
    cudnn_error="Cannot open libcudnn.so.9",
    cudnn_files=(),
    companions=(),
    packages=(),
    calibrations=None,
)


def _driver(**changes: Any) -> Driver:
    assert _GOOD.driver is not None
    return replace(_GOOD.driver, **changes)


def _only(**changes: Any) -> Finding:
    """Return the one finding for a good machine with some facts changed."""
    (finding,) = examine(replace(_GOOD, **changes))
    return finding


def _diagnosis(facts: Facts) -> Diagnosis:
    return Diagnosis(facts=facts, findings=examine(facts))


# --- verdicts -------------------------------------------------------------------------


def test_a_good_machine_has_no_findings() -> None:
    diagnosis = _diagnosis(_GOOD)
    assert diagnosis.findings == ()
    assert (diagnosis.is_usable, diagnosis.exit_status) == (True, 0)
    text = str(diagnosis)
    assert text.splitlines()[-1] == "cuDNN can be used."
    for told in (
        "NVIDIA H200, sm_90, 141 GiB",
        "580.65.06, runs CUDA up to 13.0",
        f"9.19.0 for CUDA 13, {_PATH}",
        "compiled against cuDNN 9.27.0",
        "cudnn-frontend 1.28.0, XLA FFI 0.3",
        "libcudnn_engines_precompiled",
        "/site/nvidia/cu13/lib/libcublasLt.so.13",
    ):
        assert told in text
    assert "jax-cuda13-pjrt 0.12.0" in " ".join(text.split())


def test_a_machine_for_the_cpu_is_well() -> None:
    diagnosis = _diagnosis(_CPU_ONLY)
    assert [(each.severity, each.name) for each in diagnosis.findings] == [
        ("note", "no-gpu")
    ]
    assert (diagnosis.is_usable, diagnosis.exit_status) == (False, 0)
    assert diagnosis.verdict == "No NVIDIA GPU here: every call runs on XLA."


def test_the_page_says_what_is_not_installed_or_why_it_fails() -> None:
    bare = [" ".join(x.split()) for x in str(_diagnosis(_CPU_ONLY)).splitlines()]
    assert {"JAX on CUDA no plugin for CUDA", "cuDNN not found"} <= {*bare}
    file = CudnnFile(path="/usr/lib64/libcudnn.so.9", version=0)
    full = replace(_CPU_ONLY, packages=_GOOD.packages, cudnn_files=(file,))
    page = [" ".join(x.split()) for x in str(_diagnosis(full)).splitlines()]
    assert {"JAX on CUDA Unknown backend cuda", "cuDNN does not load"} <= {*page}


def test_errors_come_first_and_decide() -> None:
    facts = replace(
        _GOOD,
        cudnn=None,
        cudnn_error="Cannot open libcudnn.so.9",
        environment=(("CUDNN_LOGLEVEL_DBG", "3"), ("NVIDIA_TF32_OVERRIDE", "1")),
    )
    diagnosis = _diagnosis(facts)
    assert [each.severity for each in diagnosis.findings] == [
        "error",
        "warning",
        "note",
    ]
    assert (diagnosis.is_usable, diagnosis.exit_status) == (False, 1)
    assert diagnosis.verdict == "cuDNN cannot be used on this machine's GPU: no-cudnn."
    lines = str(diagnosis).splitlines()
    assert "error: cuDNN does not load: Cannot open libcudnn.so.9" in lines
    command = """pip install ".[cuda13]" (in jax_cudnn's source folder)"""
    assert f"  fix: {command}" in lines


def test_a_diagnosis_is_plain_data() -> None:
    data = _diagnosis(replace(_GOOD, driver=None)).to_json()
    read = json.loads(json.dumps(data))
    assert (read["schema"], read["is_usable"]) == (1, False)
    assert read["findings"][0]["name"] == "no-driver"
    assert read["facts"]["cudnn"]["version"] == 91900


# --- findings, one by one -------------------------------------------------------------


def test_a_gpu_without_a_driver() -> None:
    finding = _only(driver=None)
    assert (finding.severity, finding.name) == ("error", "no-driver")
    assert "1 NVIDIA device(s), but no driver" in finding.what
    assert "--gpus all" in finding.fix


def test_where_a_driver_belongs_depends_on_the_system() -> None:
    in_container = replace(_SYSTEM, container="Docker")
    finding = _only(driver=None, system=in_container)
    assert finding.fix == (
        "Pass the GPU into this container (docker run --gpus all, with "
        "nvidia-container-toolkit on the host)."
    )
    # The bus of WSL shows no NVIDIA device.
    in_wsl = replace(_CPU_ONLY, system=replace(_SYSTEM, is_wsl=True))
    (finding,) = examine(in_wsl)
    assert (finding.severity, finding.name) == ("note", "no-gpu")
    assert "Install NVIDIA's driver on Windows, and none in WSL." in finding.fix
    assert _only(driver=None, system=None).fix.startswith("Install NVIDIA's driver; in")


def test_a_driver_that_does_not_start() -> None:
    error = "cuInit returns 803 (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"
    finding = _only(driver=_driver(gpus=(), error=error))
    assert (finding.severity, finding.name) == ("error", "driver-error")
    assert error in finding.what
    assert "nvidia-smi" in finding.fix


@pytest.mark.parametrize(
    ("value", "told"), [("", "CUDA_VISIBLE_DEVICES=''"), (None, "")]
)
def test_a_driver_that_shows_no_gpu(value: str | None, told: str) -> None:
    environment = () if value is None else (("CUDA_VISIBLE_DEVICES", value),)
    finding = _only(driver=_driver(gpus=()), jax_gpu_count=0, environment=environment)
    assert (finding.severity, finding.name) == ("note", "no-gpu")
    assert told in finding.what
    assert ("may hide it" in finding.what) == (value is not None)


def test_gpus_that_are_old_or_of_several_kinds() -> None:
    old = InstalledGpu(name="Tesla T4", sm_version=75, memory_bytes=2**34)
    first, second = examine(replace(_GOOD, driver=_driver(gpus=(_H200, old, old))))
    assert (first.severity, first.name) == ("warning", "old-gpu")
    assert "Tesla T4 (sm_75) is older than sm_80" in first.what
    assert (second.severity, second.name) == ("warning", "mixed-gpus")
    assert "NVIDIA H200, Tesla T4" in second.what
    assert _only(driver=_driver(gpus=(old,))).name == "old-gpu"


def test_jax_without_a_plugin() -> None:
    finding = _only(jax_gpu_count=0, packages=())
    assert (finding.severity, finding.name) == ("error", "jax-without-cuda")
    assert finding.what == "JAX 0.12.0 has no CUDA plugin, so it sees no GPU."
    assert finding.fix == install_command("cuda13")
    older = _only(jax_gpu_count=0, packages=(), driver=_driver(cuda_version=12080))
    assert older.fix == install_command("cuda12")


def test_jax_that_fails_on_cuda_or_is_kept_from_it() -> None:
    finding = _only(jax_gpu_count=0, jax_error="no supported devices found")
    assert finding.name == "jax-without-cuda"
    assert "no supported devices found" in finding.what
    assert finding.fix == 'pip install --upgrade "jax[cuda13]"'
    finding = _only(jax_gpu_count=0, environment=(("JAX_PLATFORMS", "cpu"),))
    assert (finding.severity, finding.name) == ("error", "jax-without-cuda")
    assert finding.what == "JAX_PLATFORMS='cpu' keeps JAX from the GPU."
    assert not examine(replace(_GOOD, environment=(("JAX_PLATFORMS", "cuda,cpu"),)))


def test_jax_that_finds_nothing_to_run_on() -> None:
    nothing = replace(_CPU_ONLY, jax_backends=(), jax_error="AssertionError")
    named = replace(nothing, environment=(("JAX_PLATFORMS", "cuda"),))
    finding, note = examine(named)
    assert (finding.severity, finding.name) == ("error", "no-backend")
    assert finding.what == (
        "JAX_PLATFORMS='cuda' leaves JAX nothing to run on: there is no such device "
        "here (AssertionError)."
    )
    assert finding.fix == "Unset JAX_PLATFORMS, or set it to cuda,cpu."
    assert note.name == "no-gpu"
    verdict = _diagnosis(named).verdict
    assert verdict == "jax_cudnn cannot be used here: no-backend."
    finding, _ = examine(nothing)
    assert finding.what == "JAX 0.12.0 finds nothing to run on: AssertionError"
    # JAX's devices were not read: that is a finding of its own.
    assert [x.name for x in examine(replace(nothing, jax_error=""))] == ["no-gpu"]


@pytest.mark.parametrize("platforms", ["cuda", "nonsense"])
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there may be a GPU")
def test_platforms_that_are_not_here_are_named(platforms: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "jax_cudnn", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": platforms},
    )
    assert (result.returncode, result.stderr) == (1, "")
    assert f"error: JAX_PLATFORMS={platforms!r} leaves JAX nothing" in result.stdout
    assert "could not be read" not in result.stdout


def test_parts_of_jax_that_do_not_match() -> None:
    finding = _only(jaxlib="0.12.1")
    assert (finding.severity, finding.name) == ("warning", "jax-parts")
    assert "jaxlib is 0.12.1, but jax-cuda13-pjrt 0.12.0, " in finding.what
    assert not examine(replace(_GOOD, jaxlib="0.12.0.1"))
    both = (*_GOOD.packages, ("jax-cuda12-plugin", "0.12.0"))
    finding = _only(packages=both)
    assert finding.what == "JAX's plugins for CUDA 12 and 13 are both installed."


def test_a_driver_too_old_for_jax() -> None:
    finding = _only(driver=_driver(cuda_version=12080, version="570.1.2"))
    assert (finding.severity, finding.name) == ("error", "old-driver")
    assert (
        "570.1.2 runs CUDA up to 12, but JAX is installed for CUDA 13" in finding.what
    )
    assert 'in a new environment pip install ".[cuda12]"' in finding.fix


def test_cudnn_for_another_cuda_than_jax() -> None:
    packages = (("jax-cuda12-pjrt", "0.12.0"), ("jax-cuda12-plugin", "0.12.0"))
    finding = _only(packages=packages)
    assert (finding.severity, finding.name) == ("error", "cuda-mismatch")
    assert (
        f"JAX is installed for CUDA 12, but the cuDNN that is found ({_PATH}) is "
        in (finding.what)
    )
    assert "nvidia-cudnn-cu12>=9.12" in finding.fix
    assert finding.fix.endswith("uninstall nvidia-cudnn-cu13.")


def _of_cudnn(version: int, gpu: InstalledGpu = _H200) -> tuple[Finding, ...]:
    """Return the findings on a good machine with another cuDNN, and perhaps GPU."""
    return examine(
        replace(
            _GOOD,
            driver=_driver(gpus=(gpu,)),
            cudnn=replace(_CUDNN, version=version),
            cudnn_files=(CudnnFile(path=_PATH, version=version),),
            calibrations=None,
        )
    )


def test_an_old_cudnn() -> None:
    old, _ = _of_cudnn(91100)
    assert (old.severity, old.name) == ("warning", "old-cudnn")
    assert "libcudnn.so.9) is older than 9.12.0, the oldest that is tested" in old.what
    assert old.fix == 'pip install --upgrade "nvidia-cudnn-cu13>=9.12,<10"'


@pytest.mark.parametrize(
    ("version", "told", "untold", "oldest"),
    [
        (
            91000,
            ["attention is wrong", "no f8 attention", "bf16 and f16"],
            "TF32",
            "15",
        ),
        (91001, ["attention is wrong", "bf16 and f16"], "f8", "15"),
        (91200, ["3-D convolutions of bf16 and f16", "TF32", "2^31"], "atten", "16"),
        (91400, ["3-D convolutions of bf16 and f16", "TF32"], "attention", "16"),
        (91501, ["TF32", "XLA runs them, possibly by the same cuDNN"], "bf16", "16"),
    ],
)
def test_a_cudnn_with_known_bugs(
    version: int, told: list[str], untold: str, oldest: str
) -> None:
    finding = _of_cudnn(version)[-1]
    assert (finding.severity, finding.name) == ("warning", "cudnn-limits")
    assert f"cuDNN {native.version_text(version)} ({_PATH}) has" in finding.what
    assert all(each in finding.what for each in told)
    assert untold not in finding.what
    assert finding.fix == f'pip install --upgrade "nvidia-cudnn-cu13>=9.{oldest},<10"'


def test_what_no_other_cudnn_mends_is_a_note() -> None:
    b200 = InstalledGpu(name="NVIDIA B200", sm_version=100, memory_bytes=180 * 2**30)
    (finding,) = _of_cudnn(91900, b200)
    assert (finding.severity, finding.name) == ("note", "cudnn-limits")
    assert "filter's gradient with a relu" in finding.what
    assert "single group" not in finding.what
    (finding,) = _of_cudnn(92801)
    assert "a single group is refused (it is computed as a plain matmul" in finding.what
    assert finding.fix.startswith("None is needed")
    assert not _of_cudnn(91600)
    (finding,) = _of_cudnn(92700)
    assert "the gradient of group norm with respect to 16-bit images" in finding.what
    assert finding.fix.startswith("None is needed")


def test_two_cudnns_of_different_versions() -> None:
    other = CudnnFile(path="/usr/lib64/libcudnn.so.9", version=90800)
    finding = _only(cudnn_files=(*_GOOD.cudnn_files, other))
    assert (finding.severity, finding.name) == ("warning", "several-cudnn")
    assert f"9.19.0 ({_PATH}), 9.8.0 (/usr/lib64/libcudnn.so.9)" in finding.what
    assert f"{_PATH} is used" in finding.what
    same = replace(other, version=91900)
    assert not examine(replace(_GOOD, cudnn_files=(*_GOOD.cudnn_files, same)))
    broken = replace(other, version=0)
    finding = _only(cudnn_files=(*_GOOD.cudnn_files, broken))
    assert "one that does not load (/usr/lib64/" in finding.what


def test_the_small_cudnn() -> None:
    path = "/site/nvidia/cudnn_jit/lib/libcudnn.so.9"
    few = ("libcudnn_engines_runtime_compiled", "libcudnn_graph")
    small = replace(_CUDNN, path=path, sublibraries=few)
    finding = _only(cudnn=small, cudnn_files=(CudnnFile(path=path, version=91900),))
    assert (finding.severity, finding.name) == ("warning", "missing-sublibraries")
    assert finding.what.startswith("This is the small nvidia-cudnn-jit. ")
    assert "libcudnn_engines_precompiled (only engines compiled at" in finding.what
    assert finding.fix == 'pip install "nvidia-cudnn-cu13>=9.12,<10"'


def test_a_sublibrary_without_which_nothing_plans() -> None:
    names = tuple(x for x in _CUDNN.sublibraries if x != "libcudnn_graph")
    finding = _only(cudnn=replace(_CUDNN, sublibraries=names))
    assert (finding.severity, finding.name) == ("error", "missing-sublibraries")
    assert finding.what.endswith(": libcudnn_graph (no graph can be built).")
    assert "--force-reinstall" in finding.fix


@pytest.mark.parametrize(
    ("cuda", "wheel"), [(12, "nvidia-cublas-cu12 "), (13, "nvidia-cublas ")]
)
def test_a_library_that_cudnn_opens_is_missing(cuda: int, wheel: str) -> None:
    packages = ((f"jax-cuda{cuda}-plugin", "0.12.0"),)
    finding = _only(
        cudnn=replace(_CUDNN, cuda_major=cuda),
        companions=(),
        companions_error=f"Cannot open libcublasLt.so.{cuda}",
        packages=packages,
    )
    assert (finding.severity, finding.name) == ("error", "missing-libraries")
    assert f"Cannot open libcublasLt.so.{cuda}" in finding.what
    assert wheel in finding.fix


@pytest.mark.parametrize(
    ("value", "told"), [("0", "are not rounded to TF32"), ("1", "are rounded to TF32")]
)
def test_tf32_that_is_overridden(value: str, told: str) -> None:
    finding = _only(environment=(("NVIDIA_TF32_OVERRIDE", value),))
    assert (finding.severity, finding.name) == ("warning", "tf32-override")
    assert f"NVIDIA_TF32_OVERRIDE={value}: f32 matmuls {told}" in finding.what


def test_a_log_that_slows() -> None:
    finding = _only(environment=(("CUDNN_LOGLEVEL_DBG", "2"),))
    assert (finding.severity, finding.name) == ("note", "cudnn-log")
    assert not examine(replace(_GOOD, environment=(("CUDNN_LOGLEVEL_DBG", "0"),)))


_ADA = InstalledGpu(name="NVIDIA L4", sm_version=89, memory_bytes=24 * 2**30)
_OWN = OwnCalibration(
    gpu=_ADA.name, cudnn=919, kernels=400, changes=(), path="/cache/nvidia-l4.json"
)


def _with_own(*own: OwnCalibration, gpu: InstalledGpu = _ADA) -> tuple[Finding, ...]:
    """Return the findings on a machine with a GPU and what was calibrated there."""
    known = Calibrations(shipped=((90, 919),), own=own)
    return examine(replace(_GOOD, driver=_driver(gpus=(gpu,)), calibrations=known))


def test_a_gpu_that_nobody_measured() -> None:
    (finding,) = _with_own()
    assert (finding.severity, finding.name) == ("note", "not-calibrated")
    assert finding.what == (
        "Nothing was measured on NVIDIA L4 (sm_89) with cuDNN 9.19: where nothing was "
        'tuned, "auto" uses the table of another GPU, or of another cuDNN.'
    )
    assert finding.fix == "`jax-cudnn calibrate` (five minutes) measures it."
    assert not _with_own(_OWN)
    assert not _with_own(gpu=_H200)  # the package has a table
    for other in (replace(_OWN, gpu="NVIDIA A10"), replace(_OWN, kernels=0)):
        assert [each.name for each in _with_own(other)] == ["not-calibrated"]
    (finding,) = _with_own(replace(_OWN, cudnn=918))
    assert finding.name == "not-calibrated"
    assert finding.what.endswith('"auto" uses what was calibrated with cuDNN 9.18.')
    old = InstalledGpu(name="Tesla T4", sm_version=75, memory_bytes=2**34)
    assert [each.name for each in _with_own(gpu=old)] == ["old-gpu"]


def test_a_calibration_with_other_versions() -> None:
    changes = ("JAX 0.11.2, here 0.12.0 (400 kernels)", "driver 1, here 2 (3 kernels)")
    (finding,) = _with_own(replace(_OWN, changes=changes))
    assert (finding.severity, finding.name) == ("note", "stale-calibration")
    assert f"with other versions: {changes[0]}; {changes[1]}." in finding.what
    assert "This still decides (/cache/nvidia-l4.json)." in finding.what
    assert "jax-cudnn calibrate" in finding.fix
    # Of another GPU or cuDNN, it is not what decides first.
    assert not _with_own(replace(_OWN, changes=changes), gpu=_H200)


def test_a_calibration_that_cannot_be_used() -> None:
    known = Calibrations(shipped=((90, 919),), broken=("/x.json is not a calibration",))
    finding = _only(calibrations=known)
    assert (finding.severity, finding.name) == ("warning", "broken-calibration")
    assert finding.what == (
        "What was calibrated is not used: /x.json is not a calibration"
    )
    assert "Delete the file" in finding.fix
    assert _diagnosis(replace(_GOOD, calibrations=known)).exit_status == 0


def test_what_could_not_be_read_is_a_finding() -> None:
    finding = _only(unread=(("the driver", "OSError: it hides"),))
    assert (finding.severity, finding.name) == ("warning", "unread")
    assert finding.what == "The driver could not be read: OSError: it hides"
    assert finding.fix == "Report it with this text; the rest of it is as it should be."
    closed = _only(unread=(("/x", "PermissionError: [Errno 13] /x"),))
    assert closed.fix.startswith("Let this user read it. ")
    assert _diagnosis(replace(_GOOD, unread=(("x", "y"),))).exit_status == 0


# --- a package that cannot be imported ------------------------------------------------

# Without them there is more that cannot be known, which is not told beside them.
_NO_JAX = {"jax_backends": (), "jax_gpu_count": 0, "import_error": "ImportError: it"}
_NO_EXTENSION = {"cudnn": None, "import_error": "ImportError: it"}


@pytest.mark.parametrize(
    ("name", "what", "fix", "changes"),
    [
        (
            *("no-extension", "No extension.", "make build"),
            {
                "extension_error": "No extension.",
                "extension_fix": "make build",
                **_NO_EXTENSION,
            },
        ),
        (
            *("no-jax", "JAX is not installed", 'pip install ".[cuda13]"'),
            {"jax": "", "jaxlib": "", "jax_import_error": "no jax", **_NO_JAX},
        ),
        (
            *("old-jax", "JAX 0.9.2 is older than 0.10", "--upgrade"),
            {"jax": "0.9.2", "import_error": "ImportError: it"},
        ),
        (
            "jax-import",
            "(jaxlib 0.12.0) cannot be imported: RuntimeError: jaxlib is older",
            "--upgrade",
            {"jax_import_error": "RuntimeError: jaxlib is older", **_NO_JAX},
        ),
        (
            *("import-error", "imported: TypeError: a riddle", "--force-reinstall"),
            {"import_error": "TypeError: a riddle"},
        ),
    ],
)
def test_what_keeps_the_package_from_being_imported_is_an_error_on_any_machine(
    name: str, what: str, fix: str, changes: dict[str, Any]
) -> None:
    finding = _only(**changes)
    assert (finding.severity, finding.name) == ("error", name)
    assert what in finding.what
    assert fix in finding.fix
    diagnosis = _diagnosis(replace(_CPU_ONLY, **changes))
    assert (diagnosis.is_usable, diagnosis.exit_status) == (False, 1)
    assert diagnosis.verdict == f"jax_cudnn cannot be used here: {name}."


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

    info = native.LibraryInfo(version=91900, cuda_major=13, path=_PATH)
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
    info = native.LibraryInfo(version=91900, cuda_major=13, path=_PATH)
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
    docker = replace(_SYSTEM, container="Docker")
    text = str(_diagnosis(replace(_GOOD, system=docker)))
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
    facts = replace(_GOOD, location="/home/somebody/jax_cudnn")
    monkeypatch.setattr(plans, "doctor", lambda: _diagnosis(facts))
    monkeypatch.setenv("HOME", "/home/somebody")
    assert main(["doctor", "--report"]) == 0
    told = capsys.readouterr().out
    assert "somebody" not in told
    assert told == str(_diagnosis(facts)).replace("/home/somebody", "~") + "\n"


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
    facts = replace(_GOOD, location=path)
    monkeypatch.setattr(plans, "doctor", lambda: _diagnosis(facts))
    monkeypatch.setenv("HOME", home)
    assert main(["doctor", "--report"]) == 0
    expected = str(_diagnosis(replace(_GOOD, location=told)))
    assert capsys.readouterr().out == f"{expected}\n"


def test_a_report_needs_no_home_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(plans, "doctor", lambda: _diagnosis(_GOOD))
    monkeypatch.setattr(Path, "home", fail)
    assert main(["doctor", "--report"]) == 0
    assert capsys.readouterr().out == f"{_diagnosis(_GOOD)}\n"


def test_the_exit_status_is_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for facts, status in ((_GOOD, 0), (_CPU_ONLY, 0), (replace(_GOOD, driver=None), 1)):
        monkeypatch.setattr(plans, "doctor", lambda facts=facts: _diagnosis(facts))
        assert main(["doctor"]) == status
        assert _diagnosis(facts).verdict in capsys.readouterr().out


def test_facts_change_no_environment() -> None:
    before = dict(os.environ)
    machine.gather()
    assert dict(os.environ) == before
