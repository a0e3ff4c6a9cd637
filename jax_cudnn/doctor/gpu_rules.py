# SPDX-License-Identifier: Apache-2.0
"""The doctor's rules about the driver, the GPUs and what was measured on them."""

from collections.abc import Iterator

from jax_cudnn.doctor.calibrations import minor_text
from jax_cudnn.doctor.finding import Finding
from jax_cudnn.doctor.machine import Facts


def driver_state(facts: Facts) -> Iterator[Finding]:
    """Say why no GPU can be used: no driver, or it does not start."""
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


def gpu_kinds(facts: Facts) -> Iterator[Finding]:
    """Say that GPUs are too old, or of several kinds."""
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


def broken_calibration(facts: Facts) -> Iterator[Finding]:
    """Say which file of measurements cannot be read."""
    for error in facts.calibrations.broken if facts.calibrations else ():
        yield Finding(
            severity="warning",
            name="broken-calibration",
            what=f"What was calibrated is not used: {error}",
            fix="Delete the file, and run `jax-cudnn calibrate` (five minutes).",
        )


def calibration(facts: Facts) -> Iterator[Finding]:
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
