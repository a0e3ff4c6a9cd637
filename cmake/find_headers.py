# SPDX-License-Identifier: Apache-2.0
"""Print the include directories of the header wheels, separated by semicolons.

Says what to install where one of them, or Python's own header, is missing.
Looks along sys.path, so that it works in an isolated build environment as well as in a
plain one, and imports none of the packages.
"""

import sys
import sysconfig
from pathlib import Path

# A header that identifies each directory, and the wheel that brings it.
WANTED = {
    "include/cudnn_frontend.h": "nvidia-cudnn-frontend",
    "nvidia/cudnn_jit/include/cudnn.h": "nvidia-cudnn-jit-cu13",
    "nvidia/cu13/include/cuda_runtime.h": "nvidia-cuda-runtime",
    "nvidia/cu13/include/crt/host_config.h": "nvidia-cuda-crt",
    "nvidia/cu13/include/nv/target": "nvidia-cuda-cccl",
    "nvidia/cu13/include/nvtx3/nvtx3.hpp": "nvidia-nvtx",
    "jaxlib/include/xla/ffi/api/ffi.h": "jaxlib",
}


def include_directory(header: str) -> Path | None:
    """Return the first include directory on sys.path that holds the header."""
    inside = header.rpartition("include/")[2]
    for entry in map(Path, sys.path):
        # The frontend's wheel installs into the environment's own include directory
        # where pip honours its data scheme, beside the packages where it does not.
        for root in (entry, entry.parents[2] if len(entry.parents) > 2 else entry):
            if (root / header).is_file():
                return Path(str(root / header)[: -len(inside) - 1])
    return None


def main() -> None:
    """Print the directories, or say what is missing."""
    python = Path(sysconfig.get_path("include"), "Python.h")
    if not python.is_file():
        sys.exit(
            f"{python} is missing, which this Python's extensions are compiled with. "
            "Install Python's headers: python3-dev on Debian and Ubuntu, "
            "python3-devel on Fedora."
        )
    found = {}
    for header, wheel in WANTED.items():
        directory = include_directory(header)
        if directory is None:
            sys.exit(f"{header} is not on sys.path; install {wheel}")
        found[str(directory)] = None
    print(";".join(found))


if __name__ == "__main__":
    main()
