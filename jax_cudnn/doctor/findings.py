# SPDX-License-Identifier: Apache-2.0
"""Judges a machine's facts for cuDNN under JAX, and says what to do about them.

``examine`` is a pure function of the facts: one rule per function, each of which yields
a ``Finding`` with its fix.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from jax_cudnn import limits
from jax_cudnn.doctor.calibrations import minor_text
from jax_cudnn.doctor.machine import Cudnn, Facts
from jax_cudnn.errors import install_command
from jax_cudnn.native import version_text

# An error keeps cuDNN from a GPU that is there, or the package or JAX from running at
# all. A warning costs results, memory or time. A note explains.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is not as it should be: its name, what is so, what to do."""

    severity: Severity
    name: str
    what: str
    fix: str


# --- rules ----------------------------------------------------------------------------

# What pyproject.toml asks for.
_OLDEST_JAX = (0, 10)


def _package(facts: Facts) -> Iterator[Finding]:
    """Say why jax_cudnn cannot be imported."""
    causes = [*_jax_import(facts), *_extension(facts)]
    yield from causes
    if facts.import_error and not causes:
        yield Finding(
            severity="error",
            name="import-error",
            what=f"jax_cudnn cannot be imported: {facts.import_error}",
            fix="Install it again, with what it needs: "
            f"{install_command(options='--force-reinstall')}. If that does not help, "
            "report it.",
        )


def _jax_import(facts: Facts) -> Iterator[Finding]:
    oldest = ".".join(map(str, _OLDEST_JAX))
    if not facts.jax:
        yield Finding(
            severity="error",
            name="no-jax",
            what="JAX is not installed for this Python.",
            fix=install_command(_extra(facts)),
        )
    elif _release(facts.jax) < _OLDEST_JAX:
        yield Finding(
            severity="error",
            name="old-jax",
            what=f"JAX {facts.jax} is older than {oldest}, the oldest that jax_cudnn "
            "works with.",
            fix=f'pip install --upgrade "jax[{_extra(facts)}]"',
        )
    elif facts.jax_import_error:
        yield Finding(
            severity="error",
            name="jax-import",
            what=f"JAX {facts.jax} (jaxlib {facts.jaxlib or 'not installed'}) cannot "
            f"be imported: {facts.jax_import_error}",
            fix=f'pip install --upgrade "jax[{_extra(facts)}]" jaxlib',
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _extension(facts: Facts) -> Iterator[Finding]:
    if facts.extension_error:
        yield Finding(
            severity="error",
            name="no-extension",
            what=facts.extension_error,
            fix=facts.extension_fix,
        )


def _driver(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    if driver is None and facts.nvidia_devices:
        yield Finding(
            severity="error",
            name="no-driver",
            what=f"The machine has {facts.nvidia_devices} NVIDIA device(s), but no "
            "driver: libcuda.so.1 is not found.",
            fix=_where_the_driver_belongs(facts),
        )
    elif driver is None:
        yield Finding(
            severity="note",
            name="no-gpu",
            what="There is no NVIDIA driver and no NVIDIA device on the bus.",
            fix="None is needed on a machine for the CPU. If it has a GPU: "
            f"{_where_the_driver_belongs(facts)}",
        )
    elif driver.error:
        yield Finding(
            severity="error",
            name="driver-error",
            what=f"The driver does not start: {driver.error}.",
            fix="See whether nvidia-smi works. After an update of the driver, restart "
            "the machine or the container: libcuda and the kernel module must match.",
        )
    elif not driver.gpus:
        hidden = dict(facts.environment).get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f" CUDA_VISIBLE_DEVICES={hidden!r} may hide it."
        yield Finding(
            severity="note",
            name="no-gpu",
            what=f"The driver shows no GPU to this process.{why}",
            fix="None is needed on a machine for the CPU. Else unset "
            "CUDA_VISIBLE_DEVICES, or pass the GPU into the container.",
        )


def _where_the_driver_belongs(facts: Facts) -> str:
    """Return how to get a driver, by what kind of system this is."""
    passed = "docker run --gpus all, with nvidia-container-toolkit on the host"
    if facts.system is not None and facts.system.container:
        return f"Pass the GPU into this container ({passed})."
    if facts.system is not None and facts.system.is_wsl:
        # https://docs.nvidia.com/cuda/wsl-user-guide
        return (
            "Install NVIDIA's driver on Windows, and none in WSL. It puts libcuda.so.1 "
            "into /usr/lib/wsl/lib."
        )
    return f"Install NVIDIA's driver; in a container, pass the GPU in ({passed})."


# bf16 tensor cores, and the fused engines with them: docs/support.md.
_OLDEST_SM = 80


def _gpus(facts: Facts) -> Iterator[Finding]:
    gpus = facts.driver.gpus if facts.driver else ()
    for name, sm in dict.fromkeys((gpu.name, gpu.sm_version) for gpu in gpus):
        if sm < _OLDEST_SM:
            yield Finding(
                severity="warning",
                name="old-gpu",
                what=f"{name} (sm_{sm}) is older than sm_{_OLDEST_SM} (A100): cuDNN "
                "has no fused plan for it.",
                fix='None: implementation="auto" runs XLA there.',
            )
    if len(names := dict.fromkeys(gpu.name for gpu in gpus)) > 1:
        yield Finding(
            severity="warning",
            name="mixed-gpus",
            what=f"The GPUs are of several kinds: {', '.join(names)}. Plans are made "
            "for the process's first one.",
            fix="Show each process GPUs of one kind: set CUDA_VISIBLE_DEVICES.",
        )


_UNSET_PLATFORMS = "Unset JAX_PLATFORMS, or set it to cuda,cpu."


def _no_backend(facts: Facts) -> Iterator[Finding]:
    """Say why JAX runs nothing on a machine without a GPU."""
    is_known = facts.jax_error and not facts.jax_import_error
    if facts.has_gpu or facts.jax_backends or not is_known:
        return
    if platforms := dict(facts.environment).get("JAX_PLATFORMS", ""):
        what = (
            f"JAX_PLATFORMS={platforms!r} leaves JAX nothing to run on: there is no "
            f"such device here ({facts.jax_error})."
        )
        fix = _UNSET_PLATFORMS
    else:
        what = f"JAX {facts.jax} finds nothing to run on: {facts.jax_error}"
        fix = f'pip install --upgrade "jax[{_extra(facts)}]" jaxlib'
    yield Finding(severity="error", name="no-backend", what=what, fix=fix)


def _jax(facts: Facts) -> Iterator[Finding]:
    has_gpu = facts.driver and facts.driver.gpus
    if not has_gpu or facts.jax_gpu_count or facts.jax_import_error:
        return
    platforms = dict(facts.environment).get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        what = f"JAX_PLATFORMS={platforms!r} keeps JAX from the GPU."
        fix = _UNSET_PLATFORMS
    elif not facts.jax_cuda_majors:
        what = f"JAX {facts.jax} has no CUDA plugin, so it sees no GPU."
        fix = install_command(_extra(facts))
    else:
        what = (
            f"JAX {facts.jax} sees no GPU: {facts.jax_error or 'it does not say why'}"
        )
        fix = f'pip install --upgrade "jax[{_extra(facts)}]"'
    yield Finding(severity="error", name="jax-without-cuda", what=what, fix=fix)


def _jax_parts(facts: Facts) -> Iterator[Finding]:
    parts = [x for x in facts.packages if x[0].startswith("jax-cuda")]
    release = facts.jaxlib.split(".")[:3]
    wrong = [
        f"{name} {version}"
        for name, version in parts
        if facts.jaxlib and version.split(".")[:3] != release
    ]
    if wrong:
        yield Finding(
            severity="warning",
            name="jax-parts",
            what=f"jaxlib is {facts.jaxlib}, but {', '.join(wrong)} is installed.",
            fix=f'pip install --upgrade "jax[{_extra(facts)}]"',
        )
    if len(facts.jax_cuda_majors) > 1:
        majors = " and ".join(map(str, facts.jax_cuda_majors))
        yield Finding(
            severity="warning",
            name="jax-parts",
            what=f"JAX's plugins for CUDA {majors} are both installed.",
            fix="pip uninstall those of the version that is not wanted.",
        )


def _cuda_versions(facts: Facts) -> Iterator[Finding]:
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


def _cudnn(facts: Facts) -> Iterator[Finding]:
    cudnn = facts.cudnn
    if cudnn is None:
        if facts.has_gpu and not facts.extension_error:
            yield Finding(
                severity="error",
                name="no-cudnn",
                what=f"cuDNN does not load: {facts.cudnn_error}",
                fix=install_command(_extra(facts)),
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


def _cudnn_limits(facts: Facts) -> Iterator[Finding]:
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
    told = "; ".join(f"{limit.what} ({limit.done})" for limit in found)
    what = f"cuDNN {version_text(cudnn.version)} ({cudnn.path}) has known bugs: {told}."
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


def _copies(facts: Facts) -> Iterator[Finding]:
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


def _sublibraries(facts: Facts) -> Iterator[Finding]:
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


def _companions(facts: Facts) -> Iterator[Finding]:
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


def _environment(facts: Facts) -> Iterator[Finding]:
    environment = dict(facts.environment)
    if (override := environment.get("NVIDIA_TF32_OVERRIDE")) is not None:
        told = (
            "f32 matmuls are not rounded to TF32, whatever the program requests, and "
            "are several times slower"
            if override == "0"
            else "f32 matmuls are rounded to TF32, whatever the program asks for"
        )
        yield Finding(
            severity="warning",
            name="tf32-override",
            what=f"NVIDIA_TF32_OVERRIDE={override}: {told}.",
            fix="Unset it, and use jax.default_matmul_precision or precision=.",
        )
    if environment.get("CUDNN_LOGLEVEL_DBG", "0") != "0":
        yield Finding(
            severity="note",
            name="cudnn-log",
            what=f"CUDNN_LOGLEVEL_DBG={environment['CUDNN_LOGLEVEL_DBG']}: cuDNN "
            "writes a log, which slows each call.",
            fix="Unset it when nothing is being looked for.",
        )


def _broken_calibration(facts: Facts) -> Iterator[Finding]:
    for error in facts.calibrations.broken if facts.calibrations else ():
        yield Finding(
            severity="warning",
            name="broken-calibration",
            what=f"What was calibrated is not used: {error}",
            fix="Delete the file, and run `jax-cudnn calibrate` (five minutes).",
        )


def _calibration(facts: Facts) -> Iterator[Finding]:
    """Say whether this GPU was measured, and whether with what is here now."""
    known, gpus = facts.calibrations, facts.driver.gpus if facts.driver else ()
    if known is None or facts.cudnn is None or not gpus:
        return
    gpu, cudnn = gpus[0], facts.cudnn.version // 100
    own = [each for each in known.own if each.gpu == gpu.name and each.kernels]
    here = [each for each in own if each.cudnn == cudnn]
    is_measured = bool(here) or (gpu.sm_version, cudnn) in known.shipped
    if not is_measured and gpu.sm_version >= _OLDEST_SM:
        others = ", ".join(each.cudnn_text for each in own)
        nearest = "the table of another GPU, or of another cuDNN"
        nearest = f"what was calibrated with cuDNN {others}" if own else nearest
        yield Finding(
            severity="note",
            name="not-calibrated",
            what=f"Nothing was measured on {gpu.name} (sm_{gpu.sm_version}) with cuDNN "
            f'{minor_text(cudnn)}: where nothing was tuned, "auto" uses {nearest}.',
            fix="`jax-cudnn calibrate` (five minutes) measures it.",
        )
    for each in here:
        if each.changes:
            yield Finding(
                severity="note",
                name="stale-calibration",
                what=f"{gpu.name} was calibrated with other versions: "
                f"{'; '.join(each.changes)}. This still decides ({each.path}).",
                fix="`jax-cudnn calibrate` (five minutes) measures it again.",
            )


def _unread(facts: Facts) -> Iterator[Finding]:
    for what, error in facts.unread:
        is_closed = error.startswith(PermissionError.__name__)
        yield Finding(
            severity="warning",
            name="unread",
            what=f"{what[0].upper()}{what[1:]} could not be read: {error}",
            fix="Let this user read it. The rest of this text is as it should be."
            if is_closed
            else "Report it with this text; the rest of it is as it should be.",
        )


def _extra(facts: Facts) -> str:
    """Return the extra of ours, or of JAX, that goes with the driver."""
    newest = facts.driver.cuda_version if facts.driver else 0
    return "cuda12" if 0 < newest < 13000 else "cuda13"


_RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _package,
    _driver,
    _gpus,
    _no_backend,
    _jax,
    _jax_parts,
    _cuda_versions,
    _cudnn,
    _cudnn_limits,
    _copies,
    _sublibraries,
    _companions,
    _broken_calibration,
    _calibration,
    _environment,
    _unread,
)


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Return what is wrong, errors first."""
    found = itertools.chain.from_iterable(rule(facts) for rule in _RULES)
    order = ("error", "warning", "note")
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))
