# SPDX-License-Identifier: Apache-2.0
"""Tests that `doctor` finds what is wrong with a machine, and what to do."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_cudnn import native
from jax_cudnn.doctor.calibrations import Calibrations, OwnCalibration
from jax_cudnn.doctor.finding import Finding
from jax_cudnn.doctor.findings import examine
from jax_cudnn.doctor.machine import CudnnFile, InstalledGpu
from jax_cudnn.errors import install_command
from tests.tools.doctor.facts import (
    CPU_ONLY,
    CUDNN,
    GOOD,
    H200,
    PATH,
    SYSTEM,
    diagnosis_of,
    driver_with,
    only,
)

pytestmark = pytest.mark.once


# --- verdicts -------------------------------------------------------------------------


def test_a_good_machine_has_no_findings() -> None:
    diagnosis = diagnosis_of(GOOD)
    assert diagnosis.findings == ()
    assert (diagnosis.is_usable, diagnosis.exit_status) == (True, 0)
    text = str(diagnosis)
    assert text.splitlines()[-1] == "cuDNN can be used."
    for told in (
        "NVIDIA H200, sm_90, 141 GiB",
        "580.65.06, runs CUDA up to 13.0",
        f"9.19.0 for CUDA 13, {PATH}",
        "compiled against cuDNN 9.27.0",
        "cudnn-frontend 1.28.0, XLA FFI 0.3",
        "libcudnn_engines_precompiled",
        "/site/nvidia/cu13/lib/libcublasLt.so.13",
    ):
        assert told in text
    assert "jax-cuda13-pjrt 0.12.0" in " ".join(text.split())


def test_a_machine_for_the_cpu_is_well() -> None:
    diagnosis = diagnosis_of(CPU_ONLY)
    assert [(each.severity, each.name) for each in diagnosis.findings] == [
        ("note", "no-gpu")
    ]
    assert (diagnosis.is_usable, diagnosis.exit_status) == (False, 0)
    assert diagnosis.verdict == "No NVIDIA GPU here: every call runs on XLA."


def test_the_page_says_what_is_not_installed_or_why_it_fails() -> None:
    bare = [" ".join(x.split()) for x in str(diagnosis_of(CPU_ONLY)).splitlines()]
    assert {"JAX on CUDA no plugin for CUDA", "cuDNN not found"} <= {*bare}
    file = CudnnFile(path="/usr/lib64/libcudnn.so.9", version=0)
    full = replace(CPU_ONLY, packages=GOOD.packages, cudnn_files=(file,))
    page = [" ".join(x.split()) for x in str(diagnosis_of(full)).splitlines()]
    assert {"JAX on CUDA Unknown backend cuda", "cuDNN does not load"} <= {*page}


def test_errors_come_first_and_decide() -> None:
    facts = replace(
        GOOD,
        cudnn=None,
        cudnn_error="Cannot open libcudnn.so.9",
        environment=(("CUDNN_LOGLEVEL_DBG", "3"), ("NVIDIA_TF32_OVERRIDE", "1")),
    )
    diagnosis = diagnosis_of(facts)
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
    data = diagnosis_of(replace(GOOD, driver=None)).to_json()
    read = json.loads(json.dumps(data))
    assert (read["schema"], read["is_usable"]) == (1, False)
    assert read["findings"][0]["name"] == "no-driver"
    assert read["facts"]["cudnn"]["version"] == 91900


# --- findings, one by one -------------------------------------------------------------


def test_a_gpu_without_a_driver() -> None:
    finding = only(driver=None)
    assert (finding.severity, finding.name) == ("error", "no-driver")
    assert "1 NVIDIA device(s), but no driver" in finding.what
    assert "--gpus all" in finding.fix


def test_where_a_driver_belongs_depends_on_the_system() -> None:
    in_container = replace(SYSTEM, container="Docker")
    finding = only(driver=None, system=in_container)
    assert finding.fix == (
        "Pass the GPU into this container (docker run --gpus all, with "
        "nvidia-container-toolkit on the host)."
    )
    # The bus of WSL shows no NVIDIA device.
    in_wsl = replace(CPU_ONLY, system=replace(SYSTEM, is_wsl=True))
    (finding,) = examine(in_wsl)
    assert (finding.severity, finding.name) == ("note", "no-gpu")
    assert "Install NVIDIA's driver on Windows, and none in WSL." in finding.fix
    assert only(driver=None, system=None).fix.startswith("Install NVIDIA's driver; in")


def test_a_driver_that_does_not_start() -> None:
    error = "cuInit returns 803 (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"
    finding = only(driver=driver_with(gpus=(), error=error))
    assert (finding.severity, finding.name) == ("error", "driver-error")
    assert error in finding.what
    assert "nvidia-smi" in finding.fix


@pytest.mark.parametrize(
    ("value", "told"), [("", "CUDA_VISIBLE_DEVICES=''"), (None, "")]
)
def test_a_driver_that_shows_no_gpu(value: str | None, told: str) -> None:
    environment = () if value is None else (("CUDA_VISIBLE_DEVICES", value),)
    finding = only(
        driver=driver_with(gpus=()), jax_gpu_count=0, environment=environment
    )
    assert (finding.severity, finding.name) == ("note", "no-gpu")
    assert told in finding.what
    assert ("may hide it" in finding.what) == (value is not None)


def test_gpus_that_are_old_or_of_several_kinds() -> None:
    old = InstalledGpu(name="Tesla T4", sm_version=75, memory_bytes=2**34)
    first, second = examine(replace(GOOD, driver=driver_with(gpus=(H200, old, old))))
    assert (first.severity, first.name) == ("warning", "old-gpu")
    assert "Tesla T4 (sm_75) is older than sm_80" in first.what
    assert (second.severity, second.name) == ("warning", "mixed-gpus")
    assert "NVIDIA H200, Tesla T4" in second.what
    assert only(driver=driver_with(gpus=(old,))).name == "old-gpu"


def test_jax_without_a_plugin() -> None:
    finding = only(jax_gpu_count=0, packages=())
    assert (finding.severity, finding.name) == ("error", "jax-without-cuda")
    assert finding.what == "JAX 0.12.0 has no CUDA plugin, so it sees no GPU."
    assert finding.fix == install_command("cuda13")
    older = only(jax_gpu_count=0, packages=(), driver=driver_with(cuda_version=12080))
    assert older.fix == install_command("cuda12")


def test_jax_that_fails_on_cuda_or_is_kept_from_it() -> None:
    finding = only(jax_gpu_count=0, jax_error="no supported devices found")
    assert finding.name == "jax-without-cuda"
    assert "no supported devices found" in finding.what
    assert finding.fix == 'pip install --upgrade "jax[cuda13]"'
    finding = only(jax_gpu_count=0, environment=(("JAX_PLATFORMS", "cpu"),))
    assert (finding.severity, finding.name) == ("error", "jax-without-cuda")
    assert finding.what == "JAX_PLATFORMS='cpu' keeps JAX from the GPU."
    assert not examine(replace(GOOD, environment=(("JAX_PLATFORMS", "cuda,cpu"),)))


def test_jax_that_finds_nothing_to_run_on() -> None:
    nothing = replace(CPU_ONLY, jax_backends=(), jax_error="AssertionError")
    named = replace(nothing, environment=(("JAX_PLATFORMS", "cuda"),))
    finding, note = examine(named)
    assert (finding.severity, finding.name) == ("error", "no-backend")
    assert finding.what == (
        "JAX_PLATFORMS='cuda' leaves JAX nothing to run on: there is no such device "
        "here (AssertionError)."
    )
    assert finding.fix == "Unset JAX_PLATFORMS, or set it to cuda,cpu."
    assert note.name == "no-gpu"
    verdict = diagnosis_of(named).verdict
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
    finding = only(jaxlib="0.12.1")
    assert (finding.severity, finding.name) == ("warning", "jax-parts")
    assert "jaxlib is 0.12.1, but jax-cuda13-pjrt 0.12.0, " in finding.what
    assert not examine(replace(GOOD, jaxlib="0.12.0.1"))
    both = (*GOOD.packages, ("jax-cuda12-plugin", "0.12.0"))
    finding = only(packages=both)
    assert finding.what == "JAX's plugins for CUDA 12 and 13 are both installed."


def test_a_driver_too_old_for_jax() -> None:
    finding = only(driver=driver_with(cuda_version=12080, version="570.1.2"))
    assert (finding.severity, finding.name) == ("error", "old-driver")
    assert (
        "570.1.2 runs CUDA up to 12, but JAX is installed for CUDA 13" in finding.what
    )
    assert 'in a new environment pip install ".[cuda12]"' in finding.fix


def test_cudnn_for_another_cuda_than_jax() -> None:
    packages = (("jax-cuda12-pjrt", "0.12.0"), ("jax-cuda12-plugin", "0.12.0"))
    finding = only(packages=packages)
    assert (finding.severity, finding.name) == ("error", "cuda-mismatch")
    assert (
        f"JAX is installed for CUDA 12, but the cuDNN that is found ({PATH}) is "
        in (finding.what)
    )
    assert "nvidia-cudnn-cu12>=9.12" in finding.fix
    assert finding.fix.endswith("uninstall nvidia-cudnn-cu13.")


def _of_cudnn(version: int, gpu: InstalledGpu = H200) -> tuple[Finding, ...]:
    """Return the findings on a good machine with another cuDNN, and perhaps GPU."""
    return examine(
        replace(
            GOOD,
            driver=driver_with(gpus=(gpu,)),
            cudnn=replace(CUDNN, version=version),
            cudnn_files=(CudnnFile(path=PATH, version=version),),
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
    assert f"cuDNN {native.version_text(version)} ({PATH}) has" in finding.what
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
    finding = only(cudnn_files=(*GOOD.cudnn_files, other))
    assert (finding.severity, finding.name) == ("warning", "several-cudnn")
    assert f"9.19.0 ({PATH}), 9.8.0 (/usr/lib64/libcudnn.so.9)" in finding.what
    assert f"{PATH} is used" in finding.what
    same = replace(other, version=91900)
    assert not examine(replace(GOOD, cudnn_files=(*GOOD.cudnn_files, same)))
    broken = replace(other, version=0)
    finding = only(cudnn_files=(*GOOD.cudnn_files, broken))
    assert "one that does not load (/usr/lib64/" in finding.what


def test_the_small_cudnn() -> None:
    path = "/site/nvidia/cudnn_jit/lib/libcudnn.so.9"
    few = ("libcudnn_engines_runtime_compiled", "libcudnn_graph")
    small = replace(CUDNN, path=path, sublibraries=few)
    finding = only(cudnn=small, cudnn_files=(CudnnFile(path=path, version=91900),))
    assert (finding.severity, finding.name) == ("warning", "missing-sublibraries")
    assert finding.what.startswith("This is the small nvidia-cudnn-jit. ")
    assert "libcudnn_engines_precompiled (only engines compiled at" in finding.what
    assert finding.fix == 'pip install "nvidia-cudnn-cu13>=9.12,<10"'


def test_a_sublibrary_without_which_nothing_plans() -> None:
    names = tuple(x for x in CUDNN.sublibraries if x != "libcudnn_graph")
    finding = only(cudnn=replace(CUDNN, sublibraries=names))
    assert (finding.severity, finding.name) == ("error", "missing-sublibraries")
    assert finding.what.endswith(": libcudnn_graph (no graph can be built).")
    assert "--force-reinstall" in finding.fix


@pytest.mark.parametrize(
    ("cuda", "wheel"), [(12, "nvidia-cublas-cu12 "), (13, "nvidia-cublas ")]
)
def test_a_library_that_cudnn_opens_is_missing(cuda: int, wheel: str) -> None:
    packages = ((f"jax-cuda{cuda}-plugin", "0.12.0"),)
    finding = only(
        cudnn=replace(CUDNN, cuda_major=cuda),
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
    finding = only(environment=(("NVIDIA_TF32_OVERRIDE", value),))
    assert (finding.severity, finding.name) == ("warning", "tf32-override")
    assert f"NVIDIA_TF32_OVERRIDE={value}: f32 matmuls {told}" in finding.what


def test_a_log_that_slows() -> None:
    finding = only(environment=(("CUDNN_LOGLEVEL_DBG", "2"),))
    assert (finding.severity, finding.name) == ("note", "cudnn-log")
    assert not examine(replace(GOOD, environment=(("CUDNN_LOGLEVEL_DBG", "0"),)))


_ADA = InstalledGpu(name="NVIDIA L4", sm_version=89, memory_bytes=24 * 2**30)
_OWN = OwnCalibration(
    gpu=_ADA.name, cudnn=919, kernels=400, changes=(), path="/cache/nvidia-l4.json"
)


def _with_own(*own: OwnCalibration, gpu: InstalledGpu = _ADA) -> tuple[Finding, ...]:
    """Return the findings on a machine with a GPU and what was calibrated there."""
    known = Calibrations(shipped=((90, 919),), own=own)
    return examine(replace(GOOD, driver=driver_with(gpus=(gpu,)), calibrations=known))


def test_a_gpu_that_nobody_measured() -> None:
    (finding,) = _with_own()
    assert (finding.severity, finding.name) == ("note", "not-calibrated")
    assert finding.what == (
        "Nothing was measured on NVIDIA L4 (sm_89) with cuDNN 9.19: where nothing was "
        'tuned, "auto" uses the table of another GPU, or of another cuDNN.'
    )
    assert finding.fix == "`jax-cudnn calibrate` (five minutes) measures it."
    assert not _with_own(_OWN)
    assert not _with_own(gpu=H200)  # the package has a table
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
    assert not _with_own(replace(_OWN, changes=changes), gpu=H200)


def test_a_calibration_that_cannot_be_used() -> None:
    known = Calibrations(shipped=((90, 919),), broken=("/x.json is not a calibration",))
    finding = only(calibrations=known)
    assert (finding.severity, finding.name) == ("warning", "broken-calibration")
    assert finding.what == (
        "What was calibrated is not used: /x.json is not a calibration"
    )
    assert "Delete the file" in finding.fix
    assert diagnosis_of(replace(GOOD, calibrations=known)).exit_status == 0


def test_what_could_not_be_read_is_a_finding() -> None:
    finding = only(unread=(("the driver", "OSError: it hides"),))
    assert (finding.severity, finding.name) == ("warning", "unread")
    assert finding.what == "The driver could not be read: OSError: it hides"
    assert finding.fix == "Report it with this text; the rest of it is as it should be."
    closed = only(unread=(("/x", "PermissionError: [Errno 13] /x"),))
    assert closed.fix.startswith("Let this user read it. ")
    assert diagnosis_of(replace(GOOD, unread=(("x", "y"),))).exit_status == 0


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
    finding = only(**changes)
    assert (finding.severity, finding.name) == ("error", name)
    assert what in finding.what
    assert fix in finding.fix
    diagnosis = diagnosis_of(replace(CPU_ONLY, **changes))
    assert (diagnosis.is_usable, diagnosis.exit_status) == (False, 1)
    assert diagnosis.verdict == f"jax_cudnn cannot be used here: {name}."
