# SPDX-License-Identifier: Apache-2.0
"""Gathers facts on this machine, without judgement: GPUs, driver, JAX and cuDNN.

Nothing here raises because something is missing or cannot be read: that is a fact as
well. What the facts mean is findings.py's to say.
"""

import ctypes
import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from jax_cudnn import native, startup
from jax_cudnn.doctor.calibrations import Calibrations, calibrations
from jax_cudnn.doctor.system import System, this_system
from jax_cudnn.errors import LibraryError

# Environment variables that change what runs or what is loaded, by their beginnings.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDNN_", "JAX_PLATFORMS", "JAX_CUDNN_"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "XLA_FLAGS"),
)
# Installed packages that matter, by their names.
_PACKAGES = re.compile(
    r"jax-cuda\d+-(plugin|pjrt)|nvidia-(cudnn|cublas|cuda-nvrtc|cuda-runtime)(-.*)?"
)
# Where distributions' own packages put libcudnn, beside what the environment says.
_SYSTEM_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/cuda/lib64",
)
_CUDNN = "libcudnn.so.9"
_PROBE = """
import ctypes, sys
print(ctypes.CDLL(sys.argv[1]).cudnnGetVersion())
"""
_PROBE_SECONDS = 30

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledGpu:
    """A GPU as the driver describes it; ``sm_version`` is 90 for Hopper."""

    name: str
    sm_version: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """NVIDIA's driver: ``version`` as it is released ("580.65.06"), if it is told.

    ``cuda_version`` is the newest CUDA that it runs (13000 for 13.0). ``error`` says
    why it does not start; "" where it does, GPUs or not.
    """

    version: str
    cuda_version: int
    gpus: tuple[InstalledGpu, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cudnn:
    """The libcudnn that is used, with the libraries of its own that lie beside it."""

    version: int
    cuda_major: int
    path: str
    sublibraries: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CudnnFile:
    """A libcudnn that could be loaded; version 0 where it does not load."""

    path: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that is known of a machine.

    Attributes:
      system: what it runs on; None where that cannot be told.
      python: version of Python.
      jax_cudnn: version of this package.
      location: the folder that it is imported from.
      import_error: what importing it raised, "" where it did not.
      extension_error: why the C++ extension does not load, "" where it does.
      extension_fix: what to do about that.
      frontend: version of cudnn-frontend, compiled in; "" without the extension.
      ffi_api: version of XLA's FFI, compiled in; (0, 0) without the extension.
      header_version: cuDNN's version in the headers compiled against, or 0.
      nvidia_devices: NVIDIA display devices on the bus, driver or not.
      driver: None where libcuda.so.1 is not found.
      jax: version of JAX, "" where it is not installed.
      jaxlib: version of jaxlib, likewise.
      jax_import_error: what importing JAX raised, "" where it did not.
      jax_backends: platforms that JAX can use, as "cuda" and "cpu"; without these,
        the one that it uses.
      jax_gpu_count: CUDA devices of this process that JAX sees.
      jax_error: what JAX says where it sees none, "" otherwise.
      cudnn: None where it does not load, for the reason in ``cudnn_error``, or where
        the extension, which loads it, does not.
      cudnn_error: "" where it loads or was not tried.
      cudnn_files: every libcudnn within reach, the one in use first.
      companions: (soname, path) of what cuDNN opens itself; empty without a driver.
      companions_error: why they do not load, "" otherwise.
      packages: (name, version) of the installed packages that matter.
      calibrations: what "auto" goes by; None where cuDNN runs nothing.
      environment: (name, value) of the variables that matter and are set.
      unread: (what, error) for each thing that could not be read.
    """

    system: System | None
    python: str
    jax_cudnn: str
    location: str
    import_error: str
    extension_error: str
    extension_fix: str
    frontend: str
    ffi_api: tuple[int, int]
    header_version: int
    nvidia_devices: int
    driver: Driver | None
    jax: str
    jaxlib: str
    jax_import_error: str
    jax_backends: tuple[str, ...]
    jax_gpu_count: int
    jax_error: str
    cudnn: Cudnn | None
    cudnn_error: str
    cudnn_files: tuple[CudnnFile, ...]
    companions: tuple[tuple[str, str], ...]
    companions_error: str
    packages: tuple[tuple[str, str], ...]
    calibrations: Calibrations | None
    environment: tuple[tuple[str, str], ...]
    unread: tuple[tuple[str, str], ...]

    @property
    def has_gpu(self) -> bool:
        """Whether there is an NVIDIA GPU that this process may use."""
        if self.driver is None:
            return self.nvidia_devices > 0
        return bool(self.driver.gpus or self.driver.error)

    @property
    def jax_cuda_majors(self) -> tuple[int, ...]:
        """The versions of CUDA that JAX's installed plugins are for."""
        found = (
            re.fullmatch(r"jax-cuda(\d+)-plugin", name) for name, _ in self.packages
        )
        return tuple(sorted(int(match[1]) for match in found if match))


class _ReadErrors:
    """The things that could not be read, with the errors; these are facts as well."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, str]] = []

    def note(self, what: str, error: Exception) -> None:
        """Remember that something could not be read."""
        self.errors.append((what, _error_text(error)))

    def or_else(self, what: str, read: Callable[[], _T], otherwise: _T) -> _T:
        """Return what is read, or something else where that fails in any way."""
        try:
            return read()
        except Exception as error:  # whatever it is, it is the answer
            self.note(what, error)
            return otherwise


def gather() -> Facts:
    """Return the facts of this machine; starts JAX's backends and opens cuDNN.

    Never raises: what cannot be read is among the facts as ``unread``.
    """
    unread = _ReadErrors()
    read = unread.or_else
    driver = read("the driver", _driver, None)
    # JAX first: the libcudnn that it loads is the one that is used.
    jax_import_error = _import_error("jax")
    backends, gpu_count, jax_error = _NO_JAX
    if not jax_import_error:
        devices = read("JAX's devices", _jax_devices, _NO_JAX)
        backends, gpu_count, jax_error = devices
    problem = read("the extension", native.extension_problem, ("", ""))
    extension_error, extension_fix = problem
    cudnn, cudnn_error = (None, "")
    build = None
    if not extension_error:
        cudnn, cudnn_error = read("cuDNN", _cudnn, (None, "it could not be read"))
        build = read("how the extension is built", native.build_info, None)
    companions, companions_error = ((), "")
    if driver and cudnn:
        companions, companions_error = read("cuDNN's libraries", _companions, ((), ""))
    tables = None
    if driver and driver.gpus and cudnn and gpu_count and startup.failure is None:
        version = cudnn.version
        tables = read("what was calibrated", lambda: calibrations(version), None)
    files = read("other cuDNNs", lambda: tuple(_cudnn_files(cudnn, unread)), ())
    return Facts(
        system=read("the system", this_system, None),
        python=platform.python_version(),
        jax_cudnn=read("jax_cudnn's version", lambda: _version("jax-cudnn"), "")
        or "not installed",
        location=str(Path(native.__file__).parent.parent),
        import_error=_error_text(startup.failure),
        extension_error=extension_error,
        extension_fix=extension_fix,
        frontend=build.frontend_version if build else "",
        ffi_api=build.ffi_api_version if build else (0, 0),
        header_version=build.cudnn_header_version if build else 0,
        nvidia_devices=read("the devices on the bus", _nvidia_devices, 0),
        driver=driver,
        jax=read("JAX's version", lambda: _jax_version(jax_import_error), ""),
        jaxlib=read("jaxlib's version", lambda: _version("jaxlib"), ""),
        jax_import_error=jax_import_error,
        jax_backends=backends,
        jax_gpu_count=gpu_count,
        jax_error=jax_error,
        cudnn=cudnn,
        cudnn_error=cudnn_error,
        cudnn_files=files,
        companions=companions,
        companions_error=companions_error,
        packages=read("the installed packages", _packages, ()),
        calibrations=tables,
        environment=relevant(os.environ),
        unread=tuple(unread.errors),
    )


# What is known of its backends where it cannot be imported.
_NO_JAX: tuple[tuple[str, ...], int, str] = ((), 0, "")


def _jax_version(import_error: str) -> str:
    return _version("jax") if import_error else sys.modules["jax"].__version__


def _version(distribution: str) -> str:
    """Return the version that is installed, "" for none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever it is, it is the answer
        return _error_text(error)
    return ""


def _error_text(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def relevant(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that matter, sorted."""
    return tuple(sorted(x for x in environment.items() if x[0].startswith(_VARIABLES)))


# --- the driver -----------------------------------------------------------------------

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE in cuda.h
_CC_MAJOR, _CC_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_... there


def _driver() -> Driver | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = _driver_version()
    newest = ctypes.c_int(0)
    if cuda.cuDriverGetVersion(ctypes.byref(newest)) != 0:
        newest.value = 0
    status = cuda.cuInit(0)
    if status not in (0, _NO_DEVICE):
        error = f"cuInit returns {status} ({_error_name(cuda, status)})"
        return Driver(version=version, cuda_version=newest.value, error=error)
    gpus = tuple(_gpus(cuda)) if status == 0 else ()
    return Driver(version=version, cuda_version=newest.value, gpus=gpus)


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match[0] if match else ""


def _error_name(cuda: ctypes.CDLL, status: int) -> str:
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else "an unknown error"


def _gpus(cuda: ctypes.CDLL) -> Iterator[InstalledGpu]:
    count = ctypes.c_int(0)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for i in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(device), i)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _CC_MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CC_MINOR, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        yield InstalledGpu(
            name=name.value.decode(),
            sm_version=10 * major.value + minor.value,
            memory_bytes=memory.value,
        )


def _nvidia_devices() -> int:
    """Count NVIDIA's display controllers on the PCI bus, as Linux lists them."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
        except OSError:  # gone since it was listed
            continue
        count += vendor == "0x10de" and kind.startswith("0x03")
    return count


# --- JAX ------------------------------------------------------------------------------


def _jax_devices() -> tuple[tuple[str, ...], int, str]:
    import jax

    local_devices: Any = getattr(jax, "local_devices")  # noqa: B009  (untyped)

    def devices(platform: str | None) -> tuple[tuple[str, ...], str]:
        """Return the platform of each device, or none and what JAX says."""
        # JAX_PLATFORMS may leave out any. JAX 0.10 then raises AssertionError, too.
        try:
            found = local_devices(backend=platform)
            return tuple(platform or each.platform for each in found), ""
        except Exception as refusal:  # whatever it is, it is the answer
            return (), str(refusal) or type(refusal).__name__

    cuda, error = devices("cuda")
    cpu, _ = devices("cpu")
    others = () if cuda or cpu else devices(None)[0]
    return tuple(dict.fromkeys((*cuda, *cpu, *others))), len(cuda), error


def _packages() -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if _PACKAGES.fullmatch(name):
            # The first on sys.path is the one that is imported.
            found.setdefault(name, distribution.version)
    return tuple(sorted(found.items()))


# --- cuDNN ----------------------------------------------------------------------------


def _cudnn() -> tuple[Cudnn | None, str]:
    try:
        info = native.cudnn_version()
    except LibraryError as error:
        return None, str(error)
    beside = Path(info.path).parent.glob("libcudnn_*.so.*")
    names = {path.name.split(".so.")[0] for path in beside}
    return Cudnn(
        version=info.version,
        cuda_major=info.cuda_major,
        path=info.path,
        sublibraries=tuple(sorted(names)),
    ), ""


def _companions() -> tuple[tuple[tuple[str, str], ...], str]:
    try:
        return tuple(sorted(native.load_libraries().items())), ""
    except LibraryError as error:
        return (), str(error)


def _cudnn_files(used: Cudnn | None, unread: _ReadErrors) -> Iterator[CudnnFile]:
    """Yield every libcudnn within reach once, however many links lead to it."""
    directories = [
        *native.library_directories(),
        *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")),
        *_SYSTEM_DIRECTORIES,
    ]
    seen = set[Path]()
    if used is not None:
        seen.add(Path(used.path).resolve())
        yield CudnnFile(path=used.path, version=used.version)
    for directory in directories:
        path = Path(directory) / _CUDNN
        try:
            is_new = path.exists() and path.resolve() not in seen
        except OSError as error:  # such as a folder of another user's
            unread.note(directory, error)
            continue
        if is_new:
            seen.add(path.resolve())
            yield CudnnFile(path=str(path), version=version_of(path))


def version_of(path: Path) -> int:
    """Ask a libcudnn for its version, in another process: two do not go together.

    0 where it does not load.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-c", _PROBE, str(path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PROBE_SECONDS,
        )
        return int(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0
