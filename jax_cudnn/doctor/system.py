# SPDX-License-Identifier: Apache-2.0
"""Detects distribution, architecture, C library, container and WSL of the system.

Each is told by files and variables that those who make such systems put there.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Files that container engines make: moby's daemon/initlayer, and podman-run(1).
_FILES = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman"}
# Variables that tell of others: apptainer.org's and Kubernetes's documentation, and
# https://systemd.io/CONTAINER_INTERFACE, by which some say their own name.
_VARIABLES = {
    "APPTAINER_CONTAINER": "Apptainer",
    "SINGULARITY_CONTAINER": "Singularity",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}
_OWN_NAME = "container"


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """An operating system, and where it runs.

    Attributes:
      name: the distribution's name and version, and the kernel's.
      architecture: of the processor, such as "x86_64" or "aarch64".
      glibc: version of the GNU C library; "" for another library.
      container: what kind of container this is; "" for none that is known.
      is_wsl: whether this is Windows's subsystem for Linux.
    """

    name: str
    architecture: str
    glibc: str
    container: str = ""
    is_wsl: bool = False

    def __str__(self) -> str:
        parts = (
            self.name,
            self.architecture,
            f"glibc {self.glibc}" if self.glibc else "no glibc",
            f"in a container ({self.container})" if self.container else "",
            "in WSL" if self.is_wsl else "",
        )
        return ", ".join(filter(None, parts))


def this_system() -> System:
    """Return what this process runs on."""
    library, version = platform.libc_ver()
    kernel = platform.release()
    return System(
        name=f"{_distribution()}, {platform.system()} {kernel}",
        architecture=platform.machine(),
        glibc=version if library == "glibc" else "",
        container=container_of(os.environ, Path("/")),
        # Microsoft's kernels have its name in their release.
        is_wsl="microsoft" in kernel.lower(),
    )


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:  # there is no such file, as on other systems
        return "no known distribution"


def container_of(environment: Mapping[str, str], root: Path) -> str:
    """Return the kind of container, by its variables and the files below a root."""
    for file, name in _FILES.items():
        if os.path.exists(root / file.lstrip("/")):  # noqa: PTH110  (Path's may raise)
            return name
    for variable, name in _VARIABLES.items():
        if environment.get(variable):
            return name
    return environment.get(_OWN_NAME, "")
