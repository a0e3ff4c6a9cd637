# SPDX-License-Identifier: Apache-2.0
"""Facts of a good machine and of one for the CPU, for the doctor's tests."""

from dataclasses import replace
from typing import Any

from jax_cudnn.doctor.calibrations import Calibrations
from jax_cudnn.doctor.diagnosis import Diagnosis
from jax_cudnn.doctor.finding import Finding
from jax_cudnn.doctor.findings import examine
from jax_cudnn.doctor.machine import Cudnn, CudnnFile, Driver, Facts, InstalledGpu
from jax_cudnn.doctor.system import System

H200 = InstalledGpu(name="NVIDIA H200", sm_version=90, memory_bytes=141 * 2**30)
PATH = "/site/nvidia/cudnn/lib/libcudnn.so.9"
CUDNN = Cudnn(
    version=91900,
    cuda_major=13,
    path=PATH,
    sublibraries=(
        *("libcudnn_adv", "libcudnn_cnn", "libcudnn_engines_precompiled"),
        *("libcudnn_engines_runtime_compiled", "libcudnn_graph"),
        *("libcudnn_heuristic", "libcudnn_ops"),
    ),
)
SYSTEM = System(name="Debian 12, Linux 6.1", architecture="x86_64", glibc="2.36")
GOOD = Facts(
    system=SYSTEM,
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
    driver=Driver(version="580.65.06", cuda_version=13000, gpus=(H200,)),
    jax="0.12.0",
    jaxlib="0.12.0",
    jax_import_error="",
    jax_backends=("cuda", "cpu"),
    jax_gpu_count=1,
    jax_error="",
    cudnn=CUDNN,
    cudnn_error="",
    cudnn_files=(CudnnFile(path=PATH, version=91900),),
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
CPU_ONLY = replace(
    GOOD,
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


def driver_with(**changes: Any) -> Driver:
    """Return the good machine's driver with some facts changed."""
    assert GOOD.driver is not None
    return replace(GOOD.driver, **changes)


def only(**changes: Any) -> Finding:
    """Return the one finding for a good machine with some facts changed."""
    (finding,) = examine(replace(GOOD, **changes))
    return finding


def diagnosis_of(facts: Facts) -> Diagnosis:
    """Return what the doctor finds of these facts."""
    return Diagnosis(facts=facts, findings=examine(facts))
