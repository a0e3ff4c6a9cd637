# SPDX-License-Identifier: Apache-2.0
"""Puts plans through plan files, in place of jax_cudnn.offline's planning process.

It takes the same requests as that process; `harness.ship_all` describes the answers.
"""

import ctypes
import dataclasses
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from jax_cudnn import native
from jax_cudnn.graph import Target
from jax_cudnn.native._extension import extension
from jax_cudnn.offline import worker


def ship(question: dict[str, Any]) -> dict[str, Any]:
    """Write the plan of a graph to a plan file and read it, or read a given one."""
    target = Target(**question["target"])
    properties = question["device_properties"]
    if (file := question.get("file")) is not None:
        read = native.import_plan_offline(Path(file).read_bytes(), target, properties)
        return {"graph": read.graph_json, "request": read.request}
    start = time.perf_counter()
    data = native.export_plan_offline(
        question["graph"], target, properties, request=question["request"]
    )
    export_s = time.perf_counter() - start
    start = time.perf_counter()
    read = native.import_plan_offline(data, target, properties)
    import_s = time.perf_counter() - start
    again = native.import_plan_offline(data, target, properties)
    assert again == read, "reading is repeatable"
    return {
        "graph": read.graph_json,
        "request": read.request,
        "plan": dataclasses.asdict(read.plan),
        "bytes": len(data),
        "export_s": export_s,
        "import_s": import_s,
        "libraries": _libraries(),
        "refusals": _refusals(data, target, properties),
    }


def _refusals(data: bytes, target: Target, properties: str) -> dict[str, str]:
    """Return what is said to the file where it does not belong or is damaged."""
    refusals: dict[str, str] = {}
    attempts = {
        "gpu": (data, dataclasses.replace(target, name="NVIDIA A100")),
        "sm_count": (data, dataclasses.replace(target, sm_count=7)),
        "sm_version": (data, dataclasses.replace(target, sm_version=80)),
        "truncated": (data[:-1], target),
        "flipped": (data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], target),
        "empty": (b"", target),
        "cublaslt_version": (_made_with(data, "cublaslt_version", "120803"), target),
        "nvrtc_version": (_made_with(data, "nvrtc_version", "12080"), target),
        "settings": (data, target),
    }
    for name, (changed, other) in attempts.items():
        if name == "settings":
            os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        try:
            native.import_plan_offline(changed, other, properties)
        except Exception as error:
            refusals[name] = f"{type(error).__name__}: {error}"
    os.environ.pop("NVIDIA_TF32_OVERRIDE")
    return refusals


def _made_with(data: bytes, field: str, value: str) -> bytes:
    """Return a plan file whose key has another value in a field."""
    key_bytes = int.from_bytes(data[24:32], "little")
    key, payload = data[40 : 40 + key_bytes], data[40 + key_bytes :]
    changed, count = re.subn(
        rf"^{field} \d+:.*$".encode(),
        f"{field} {len(value)}:{value}".encode(),
        key,
        flags=re.MULTILINE,
    )
    assert count == 1, field
    with tempfile.TemporaryDirectory() as folder:
        native.set_plan_store(Path(folder), 1 << 30)
        extension().testing.store_put(changed, payload)
        native.set_plan_store(None, 0)
        (path,) = Path(folder).glob("*.plan")
        return path.read_bytes()


def _libraries() -> dict[str, str]:
    """Return the versions of cuBLASLt and NVRTC, as these say by themselves."""
    paths = native.load_libraries()
    opened = {name.partition(".")[0]: ctypes.CDLL(paths[name]) for name in paths}
    cublaslt = opened["libcublasLt"].cublasLtGetVersion()
    major, minor = ctypes.c_int(), ctypes.c_int()
    opened["libnvrtc"].nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return {
        "cuBLASLt": native.version_text(cublaslt),
        "NVRTC": f"{major.value}.{minor.value}",
    }


if __name__ == "__main__":
    worker.serve(ship)
