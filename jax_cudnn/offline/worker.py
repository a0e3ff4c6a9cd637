# SPDX-License-Identifier: Apache-2.0
"""The process that plans: `python -m jax_cudnn.offline.worker`, started by process.py.

Reads a question, a line of JSON, from standard input and writes its answer, a line of
JSON, to standard output, until the input ends. The first line that it writes says which
cuDNN it has, or why it has none.

cuDNN wants NVIDIA's driver to be loaded before it plans. Where there is one, it is
opened and only looked at: plans are made for the GPU of the question. Where there is
none, the stand-in that was built beside this module takes its place.
"""

import ctypes
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_cudnn import native
from jax_cudnn.errors import LibraryError, install_command
from jax_cudnn.graph import Target

DRIVER = "libcuda.so.1"
STAND_IN = "libjax_cudnn_no_driver.so"
# How far a process in the background gives way to others, from 0 to 19.
_NICE = 10
# Made by NVIDIA's kernel driver.
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")


def stand_in() -> Path:
    """Return the file of the stand-in for the driver.

    Raises:
      LibraryError: it is not there, in a source tree that was never installed.
    """
    # CMake installs it beside the extension, which may be another copy's than Python's.
    directory = native.extension_directory().parent / "offline"
    if (path := directory / STAND_IN).is_file():
        return path
    raise LibraryError(
        f"{STAND_IN}, the stand-in for NVIDIA's driver, is not in {directory}. It is "
        "built and installed with jax_cudnn's C++ extension: install a wheel, or run "
        f"{install_command()}."
    )


def open_driver() -> str:
    """Open the driver, or else the stand-in, for all that is loaded later.

    Returns the file name. The stand-in is never loaded where there is a driver.
    """
    try:
        ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if any(Path(path).exists() for path in _DRIVER_FILES):
            raise LibraryError(
                f"This machine runs NVIDIA's driver, but {DRIVER} does not open: "
                f"{error}. The stand-in for it is not used beside a driver; put the "
                "driver's library where the loader finds it."
            ) from error
        path = str(stand_in())
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        return path
    return DRIVER


def greet() -> dict[str, Any]:
    """Load all that planning needs, and say what was found or what is missing."""
    try:
        driver = open_driver()
        native.load_libraries()
        cudnn = native.cudnn_version()
    except LibraryError as error:
        return {"missing": str(error)}
    return {"cudnn_version": cudnn.version, "cudnn_path": cudnn.path, "driver": driver}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the candidates that a question asks for, or the error that was raised.

    A question with a "file" wants the plan there, as a plan file, instead.
    """
    asked = (
        question["graph"],
        Target(**question["target"]),
        question["device_properties"],
    )
    try:
        if (file := question.get("file")) is not None:
            data = native.export_plan_offline(*asked, request=question["request"])
            Path(file).write_bytes(data)
            return {"file": file}
        listed = native.plan_offline(
            *asked, request=question["request"], build=question["build"]
        )
    # Whatever it is, the other process is to raise it.
    except Exception as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "summary": getattr(error, "summary", ""),
            "reasons": list(getattr(error, "reasons", ())),
            "advice": getattr(error, "advice", ""),
        }
    return {"candidates": [dataclasses.asdict(each) for each in listed]}


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]] = answer) -> None:
    """Greet, and answer until there are no more questions."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What libraries print to standard output (cuDNN's log can) is not for the reader.
    os.dup2(2, 1)
    greeting = greet()
    print(json.dumps(greeting), file=answers, flush=True)
    if "missing" in greeting:
        return
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    if "--background" in sys.argv:
        os.nice(_NICE)
    serve()
