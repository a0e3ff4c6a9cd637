# SPDX-License-Identifier: Apache-2.0
"""The doctor's rules about CUDA, cuDNN and the libraries that it opens."""

from collections.abc import Iterator

from jax_cudnn import limits
from jax_cudnn.doctor.finding import Finding, extra
from jax_cudnn.doctor.machine import Cudnn, Facts
from jax_cudnn.errors import install_command
from jax_cudnn.native import version_text


def cuda_versions(facts: Facts) -> Iterator[Finding]:
    """Compare the CUDA of the driver, of JAX and of cuDNN."""
    if not facts.has_gpu:
        return
    majors, driver, cudnn = facts.jax_cuda_majors, facts.driver, facts.cudnn
    if driver and driver.cuda_version and majors:
        newest = driver.cuda_version // 1000
        if newest < min(majors):
            yield Finding(
                severity="error",
                name="old-driver",
                what=f"The driver {driver.version} runs CUDA up to {newest}, but JAX "
                f"is installed for CUDA {min(majors)}.",
                fix="Update the driver, or in a new environment "
                f"{install_command(f'cuda{newest}')}.",
            )
    if cudnn and majors and cudnn.cuda_major not in majors:
        wanted = majors[-1]
        yield Finding(
            severity="error",
            name="cuda-mismatch",
            what=f"JAX is installed for CUDA {wanted}, but the cuDNN that is found "
            f"({cudnn.path}) is for CUDA {cudnn.cuda_major}.",
            fix=f'pip install "nvidia-cudnn-cu{wanted}>=9.12,<10", and uninstall '
            f"nvidia-cudnn-cu{cudnn.cuda_major}.",
        )


# What pyproject.toml asks for.
_OLDEST_CUDNN = 91200


def cudnn_version(facts: Facts) -> Iterator[Finding]:
    """Say why cuDNN does not load, or that it is too old."""
    cudnn = facts.cudnn
    if cudnn is None:
        if facts.has_gpu and not facts.extension_error:
            yield Finding(
                severity="error",
                name="no-cudnn",
                what=f"cuDNN does not load: {facts.cudnn_error}",
                fix=install_command(extra(facts)),
            )
        return
    if cudnn.version < _OLDEST_CUDNN:
        oldest = f"{version_text(_OLDEST_CUDNN)}, the oldest that is tested"
        yield Finding(
            severity="warning",
            name="old-cudnn",
            what=f"cuDNN {version_text(cudnn.version)} ({cudnn.path}) is older than "
            f"{oldest}.",
            fix=_newer_cudnn(cudnn, _OLDEST_CUDNN),
        )


def _newer_cudnn(cudnn: Cudnn, oldest: int) -> str:
    """Return how to install a cuDNN that is not older than a version."""
    least = version_text(oldest).removesuffix(".0")
    return f'pip install --upgrade "nvidia-cudnn-cu{cudnn.cuda_major}>={least},<10"'


def cudnn_limits(facts: Facts) -> Iterator[Finding]:
    """Say what the versions and GPUs that are here are known to do wrongly."""
    cudnn = facts.cudnn
    gpus = facts.driver.gpus if facts.driver else ()
    if cudnn is None:
        return
    found = [
        limit
        for limit in limits.LIMITS
        if limit.is_fault
        and not (limit.is_general or limit.lacking)
        and any(limit.is_of(gpu.sm_version, cudnn.version) for gpu in gpus)
    ]
    fixed = [limit.fixed for limit in found if limit.fixed is not None]
    shown = "; ".join(f"{limit.what} ({limit.done})" for limit in found)
    what = (
        f"cuDNN {version_text(cudnn.version)} ({cudnn.path}) has known bugs: {shown}."
    )
    if fixed:
        yield Finding(
            severity="warning",
            name="cudnn-limits",
            what=what,
            fix=_newer_cudnn(cudnn, max(*fixed, _OLDEST_CUDNN)),
        )
    elif found:
        yield Finding(
            severity="note",
            name="cudnn-limits",
            what=what,
            fix="None is needed: jax_cudnn does as is said.",
        )


def copies(facts: Facts) -> Iterator[Finding]:
    """Say that several versions of cuDNN can be found."""
    if len({each.version for each in facts.cudnn_files}) < 2:
        return
    listed = ", ".join(
        f"{version_text(each.version) if each.version else 'one that does not load'} "
        f"({each.path})"
        for each in facts.cudnn_files
    )
    used = f"{facts.cudnn.path} is used" if facts.cudnn else "None is used"
    yield Finding(
        severity="warning",
        name="several-cudnn",
        what=f"cuDNNs of different versions are within reach: {listed}. {used}; "
        "a process that mixes their sublibraries fails.",
        fix="Keep one: uninstall the others, or take their directories off "
        "LD_LIBRARY_PATH.",
    )


# What each sublibrary is there for; NVIDIA, "cuDNN Library Overview".
_SUBLIBRARIES = {
    "libcudnn_graph": "no graph can be built",
    "libcudnn_engines_runtime_compiled": "no fused kernel can be compiled",
    "libcudnn_engines_precompiled": "only engines compiled at run time are there",
    "libcudnn_heuristic": "candidates come in no good order",
}
_NEEDED = ("libcudnn_graph", "libcudnn_engines_runtime_compiled")


def sublibraries(facts: Facts) -> Iterator[Finding]:
    """Say which of cuDNN's sublibraries are missing."""
    cudnn = facts.cudnn
    if cudnn is None or not facts.has_gpu:
        return
    missing = [name for name in _SUBLIBRARIES if name not in cudnn.sublibraries]
    if not missing:
        return
    wheel = f"nvidia-cudnn-cu{cudnn.cuda_major}"
    is_small = "cudnn_jit" in cudnn.path
    intro = "This is the small nvidia-cudnn-jit. " if is_small else ""
    option = "" if is_small else "--force-reinstall "
    yield Finding(
        severity="error" if set(missing).intersection(_NEEDED) else "warning",
        name="missing-sublibraries",
        what=f"{intro}Not beside {cudnn.path}: "
        + "; ".join(f"{name} ({_SUBLIBRARIES[name]})" for name in missing)
        + ".",
        fix=f'pip install {option}"{wheel}>=9.12,<10"',
    )


def companions(facts: Facts) -> Iterator[Finding]:
    """Say which library is missing that cuDNN opens."""
    if facts.has_gpu and facts.companions_error:
        cuda = facts.cudnn.cuda_major if facts.cudnn else 13
        suffix = "-cu12" if cuda == 12 else ""
        wheels = [f"{name}{suffix}" for name in _COMPANION_WHEELS]
        yield Finding(
            severity="error",
            name="missing-libraries",
            what=f"A library that cuDNN opens is missing: {facts.companions_error}",
            fix=f"pip install {' '.join(wheels)}",
        )


_COMPANION_WHEELS = ("nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
