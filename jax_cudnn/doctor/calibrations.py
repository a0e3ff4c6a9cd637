# SPDX-License-Identifier: Apache-2.0
"""Lists the policy tables that "auto" uses on this machine: shipped and calibrated.

Needs the whole package, which it imports when it is asked.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCalibration:
    """What was measured on this machine, or imported, of a GPU with a cuDNN.

    ``cudnn`` is its minor version, such as 919. ``changes`` says what was measured with
    other versions than those here, such as "JAX 0.11.2, here 0.12.0 (400 kernels)".
    """

    gpu: str
    cudnn: int
    kernels: int
    changes: tuple[str, ...]
    path: str

    @property
    def cudnn_text(self) -> str:
        """The version as people write it, "9.19"."""
        return minor_text(self.cudnn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrations:
    """The tables that decide where nothing was tuned.

    ``shipped`` has the architecture and the minor version of cuDNN of each table of the
    package, such as (90, 919). ``broken`` says what is wrong with the files that are
    not used.
    """

    shipped: tuple[tuple[int, int], ...]
    own: tuple[OwnCalibration, ...] = ()
    broken: tuple[str, ...] = ()


def minor_text(cudnn: int) -> str:
    """Return a minor version of cuDNN as people write it: "9.19" for 919."""
    return f"{cudnn // 100}.{cudnn % 100}"


def calibrations(cudnn_version: int) -> Calibrations:
    """Return the tables that there are, for this version of cuDNN."""
    from jax_cudnn.policy import own, tables

    files, broken = own.read_all(remedy="")
    found = tuple(
        OwnCalibration(
            gpu=file.data["gpu"],
            cudnn=file.data["cudnn"],
            kernels=len(file.data["kernels"]),
            changes=file.changes(cudnn_version),
            path=str(file.path),
        )
        for file in files
    )
    shipped = tuple((each.sm_version, each.cudnn) for each in tables.shipped())
    return Calibrations(shipped=shipped, own=found, broken=broken)
