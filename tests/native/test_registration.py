# SPDX-License-Identifier: Apache-2.0
"""Tests that registering the handlers is cheap and leaves JAX's backends alone."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jax_cudnn import native
from tests.native.processes import run_python

pytestmark = pytest.mark.once


def test_importing_starts_no_backend_and_opens_no_nvidia_library() -> None:
    loaded = run_python(
        """
        import jax, jax_cudnn
        # JAX refuses this once a backend has started.
        jax.config.update("jax_num_cpu_devices", 3)
        maps = open("/proc/self/maps").read()
        print([name for name in ("libcudnn", "libcudart", "libcuda") if name in maps])
        """
    )
    assert loaded == "[]"


def test_the_cpu_backend_starts_after_registering() -> None:
    assert (
        run_python(
            """
        import jax_cudnn, jax, jax.numpy as jnp
        jax_cudnn.native.register_targets()
        print(int(jax.jit(lambda x: x + 1)(jnp.int32(1))), jax.default_backend())
        """,
            JAX_PLATFORMS="cpu",
        )
        == "2 cpu"
    )


def test_the_extension_needs_no_library_but_the_system_s() -> None:
    from jax_cudnn.native import _ffi

    assert _ffi.__file__ is not None
    listed = subprocess.run(
        ["ldd", _ffi.__file__], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[0].split(".")[0] for line in listed.splitlines()}
    loader = {"/lib64/ld-linux-x86-64", "/lib/ld-linux-aarch64"}
    system = {"linux-vdso", "libm", "libc", "libpthread", "libdl", "librt"}
    assert names <= {*system, *loader}, names


def test_build_info_names_what_was_compiled_in() -> None:
    info = native.build_info()
    assert info.frontend_version == "1.28.0"
    assert info.cpu == platform.machine()
    assert 90000 < info.cudnn_header_version < 100000
    # The oldest minor version of the FFI that we support; see pyproject.toml.
    assert info.ffi_api_version == (0, 3)


def test_the_targets_have_the_names_that_programs_carry() -> None:
    # Exported programs hold these names: changing one breaks them.
    assert native.TARGET_CAPTURED == "jax_cudnn.graph"
    assert native.TARGET_SCRATCH == "jax_cudnn.graph_scratch"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no stable ABI before 3.12")
def test_the_extension_uses_the_stable_abi() -> None:
    from jax_cudnn.native import _ffi

    assert Path(_ffi.__file__ or "").name == "_ffi.abi3.so"
