# SPDX-License-Identifier: Apache-2.0
"""Writes the source of a stand-in for libcuda.so.1: `write_no_driver.py CUDA_H SOURCE`.

cuDNN plans with it, but nothing can run. Its runtime-compiled engines want the driver's
library to have its functions before they agree to plan. The names come from cuda.h, in
the plain and the versioned spelling. All of them answer "no device", but for those
through which cuDNN loads the kernels that it has compiled: these pretend to succeed.
"""

import re
import sys
from pathlib import Path

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

# What cuDNN calls to finish a plan. Handles only have to be different from null.
_PRETENDED = {
    "cuDriverGetVersion": "(int* version) { *version = 13000; return 0; }",
    "cuFuncSetAttribute": "(void) { return 0; }",
    "cuKernelGetAttribute": "(int* value) { *value = 0; return 0; }",
    "cuKernelSetAttribute": "(void) { return 0; }",
    "cuLibraryGetKernel": "(void** kernel) { *kernel = (void*)1; return 0; }",
    "cuLibraryLoadData": "(void** library) { *library = (void*)1; return 0; }",
    "cuLibraryUnload": "(void) { return 0; }",
    "cuModuleGetFunction": "(void** function) { *function = (void*)1; return 0; }",
    "cuModuleLoadData": "(void** module) { *module = (void*)1; return 0; }",
    "cuModuleUnload": "(void) { return 0; }",
}
# Looked up by name only, and not spelled out in every cuda.h.
_UNDECLARED = (
    "cuLinkAddData",
    "cuLinkAddData_v2",
    "cuLinkComplete",
    "cuLinkCreate",
    "cuLinkCreate_v2",
    "cuLinkDestroy",
    "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeTiled",
)


def function_names(header: str) -> list[str]:
    """Return every function name that the text of cuda.h declares or maps to."""
    declared = re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", header)
    mapped = re.findall(
        r"^#\s*define\s+(cu[A-Z]\w*)\s+(?:__CUDA_API_\w+\()?(cu[A-Z]\w*)",
        header,
        re.MULTILINE,
    )
    names = {*declared, *_UNDECLARED, *_PRETENDED}
    for pair in mapped:
        names.update(pair)
    return sorted(names)


def source(header: str) -> str:
    """Return the C++ source of the stand-in for the text of a cuda.h."""
    absent = f"(void) {{ return {_NO_DEVICE}; }}"
    functions = "".join(
        f"int {name}{_PRETENDED.get(name, absent)}\n" for name in function_names(header)
    )
    return f'extern "C" {{\n{functions}}}\n'


def main() -> None:
    """Write the file."""
    header, path = map(Path, sys.argv[1:])
    path.write_text(source(header.read_text(encoding="utf-8")), encoding="ascii")


if __name__ == "__main__":
    main()
