# SPDX-License-Identifier: Apache-2.0
"""Compiles stand-ins for NVIDIA's libraries, with only the functions looked up.

The stand-ins claim to be CUDA 99, which no machine has, so that no real library is
found in their place.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

_CUDNN = {
    "cudnnGetVersion": "long {name}(void) {{ return {version}; }}",
    "cudnnGetCudartVersion": "long {name}(void) {{ return 99000; }}",
    "cudnnCreate": "int {name}(void** h) {{ *h = malloc(1); return 0; }}",
    "cudnnSetStream": "int {name}(void) {{ return 0; }}",
    "cudnnGetErrorString": 'const char* {name}(void) {{ return "?"; }}',
    "cudnnGetLastErrorString": "void {name}(char* s) {{ *s = 0; }}",
}
_CUDART = """
int cudaGetDevice(int* d) {{ *d = 0; return 0; }}
int cudaSetDevice(int d) {{ return 0; }}
int cudaGetDeviceCount(int* n) {{ *n = {devices}; return *n ? 0 : 100; }}
int cudaDeviceGetAttribute(int* v, int a, int d) {{ *v = 9; return 0; }}
int cudaDriverGetVersion(int* v) {{ *v = 99000; return 0; }}
const char* cudaGetErrorString(int e) {{ return "no device is there"; }}
int cudaStreamCreateWithFlags(void** s) {{ *s = s; return {failure}; }}
int cudaStreamDestroy(void) {{ return {failure}; }}
int cudaStreamSynchronize(void) {{ return {failure}; }}
int cudaStreamBeginCapture(void) {{ return {failure}; }}
int cudaStreamEndCapture(void* s, void** g) {{ *g = g; return {failure}; }}
int cudaGraphGetNodes(void* g, void* n, long* count) {{ *count = 0; return {failure}; }}
int cudaGraphNodeGetType(void) {{ return {failure}; }}
int cudaGraphDestroyNode(void) {{ return {failure}; }}
int cudaGraphInstantiate(void** e) {{ *e = e; return {failure}; }}
int cudaGraphExecDestroy(void) {{ return {failure}; }}
int cudaGraphDestroy(void) {{ return {failure}; }}
int cudaGetLastError(void) {{ return {failure}; }}
int cudaMemcpyAsync(void) {{ return {failure}; }}
int cudaMemsetAsync(void) {{ return {failure}; }}
int cudaLibraryLoadData(void** l) {{ *l = l; return {failure}; }}
int cudaLibraryGetKernel(void** k) {{ *k = k; return {failure}; }}
int cudaLaunchKernel(void) {{ return {failure}; }}
int cudaEventCreate(void) {{ return 100; }}
int cudaEventDestroy(void) {{ return 100; }}
int cudaEventRecord(void) {{ return 100; }}
int cudaEventSynchronize(void) {{ return 100; }}
int cudaEventElapsedTime(void) {{ return 100; }}
"""
_CUDA = (
    "int cuDeviceGet(void) { return 100; }\nint cuDeviceGetName(void) { return 100; }\n"
)
_CUBLASLT = "long cublasLtGetVersion(void) { return 990102; }"
_NVRTC = "int nvrtcVersion(int* x, int* y) { *x = 99; *y = 3; return 0; }"


def obstacle() -> str:
    """Return what keeps the stand-ins from being built or found, or nothing."""
    if shutil.which("cc") is None:
        return "no C compiler (cc)"
    for name in ("libcuda.so.1", "libcudnn.so.9"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return f"a real {name} exists"
    return ""


def compile_cudnn(
    directory: Path, version: int = 91900, *, without: str = "", extra: str = ""
) -> None:
    """Make libcudnn.so.9 of a version, all functions but one, and some more C."""
    lines = [
        line.format(name=name, version=version)
        for name, line in _CUDNN.items()
        if name != without
    ]
    _compile(
        directory, "libcudnn.so.9", "\n".join(["#include <stdlib.h>", *lines, extra])
    )


def compile_companions(
    directory: Path,
    *,
    without: str = "",
    devices: int = 0,
    tell_versions: bool = True,
    captures: bool = False,
    cublaslt: str = _CUBLASLT,
) -> None:
    """Make all libraries but one that go with libcudnn: cuBLASLt 99.1.2, NVRTC 99.3.

    Where CUDA ``captures``, streams and graphs can be made; nothing is in them.
    """
    sources = {
        "libcudart.so.99": _CUDART.format(
            devices=devices, failure=0 if captures else 100
        ),
        "libcuda.so.1": _CUDA,
        "libcublasLt.so.99": cublaslt if tell_versions else "int unused;",
        "libnvrtc.so.99": _NVRTC if tell_versions else "int unused;",
    }
    for soname, source in sources.items():
        if soname != without:
            _compile(directory, soname, source)


def _compile(directory: Path, soname: str, source: str) -> None:
    command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}", "-xc", "-"]
    subprocess.run(
        [*command, "-o", str(directory / soname)], input=source, text=True, check=True
    )
