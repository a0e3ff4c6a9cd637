# SPDX-License-Identifier: Apache-2.0
"""Opening cuDNN: what JAX has loaded first, then NVIDIA's wheels, then the loader."""

from dataclasses import dataclass

from jax_cudnn.graph.target import version_text
from jax_cudnn.native._extension import extension


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryInfo:
    """The libcudnn in use: version as cuDNN counts it (91900 is 9.19.0) and file."""

    version: int
    cuda_major: int
    path: str

    @property
    def version_text(self) -> str:
        """The version as people write it, "9.19.0"."""
        return version_text(self.version)


def cudnn_version() -> LibraryInfo:
    """Return the version and path of libcudnn, opening it alone if need be.

    Raises:
        LibraryError: libcudnn is not there or too old; says where it was looked for.
    """
    return LibraryInfo(**extension().cudnn_version())


def load_libraries() -> dict[str, str]:
    """Open cuDNN with all that it needs; return the path of each by its soname.

    Raises:
        LibraryError: one of them is missing; cuDNN is not called without it.
    """
    return extension().load_libraries()
