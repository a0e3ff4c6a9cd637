# SPDX-License-Identifier: Apache-2.0
"""Plans graphs with the real cuDNN for GPUs that are not there.

The planning happens in a subprocess, with a stand-in for the driver and a description
of the GPU from profiles/. Nothing is ever launched, and the harness refuses to work on
a machine with an NVIDIA driver, where the stand-in would get in its way.
"""

import atexit
import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpuless import driver_stub

HERE = Path(__file__).parent
PROFILES = ("a100", "b200", "h200", "t4")
# Stands for a graph at which the planning process dies, to test that this is noticed.
CRASH = "crash"
_TIMEOUT_S = 600
_LIBRARIES = ("libcudnn.so.9", "libcublasLt.so.13", "libnvrtc.so.13", "libcudart.so.13")


@functools.cache
def missing() -> str | None:
    """Return what keeps the harness from working here, or None."""
    for device in ("/dev/nvidia0", "/dev/nvidiactl"):
        if Path(device).exists():
            return f"{device} exists: gpuless tests are for machines without a driver"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        return "a real libcuda.so.1 exists"
    if shutil.which("cc") is None:
        return "no C compiler (cc)"
    for name in _LIBRARIES:
        if not _find(f"lib/{name}"):
            return f"{name} (pip install jax_cudnn[gpuless])"
    if not _find("include/cuda.h"):
        return "cuda.h (pip install nvidia-cuda-runtime)"
    return None


def plan_all(
    graphs: Sequence[str],
    profile: str,
    *,
    build: bool = True,
    ship: bool = False,
    choices: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Plan every graph for a GPU of profiles/; one answer per graph, in order.

    An answer has "candidates", a list of the fields of ``native.Candidate``, or
    "error", "message" and "reasons" of what was raised, or "crash", the signal that
    ended the process at that graph. The graphs after a crash are planned afresh.
    ``choices`` has one choice per graph, or none at all.

    With ``ship``, the plan goes through a plan file: an answer has "graph", "choice"
    and "plan" as read from it, its "bytes", "export_s" and "import_s", the seconds for
    building and writing it and for reading it, and "refusals", what was said to it
    where it does not belong or is damaged.
    """
    if reason := missing():
        raise RuntimeError(f"cannot plan without a GPU here: {reason}")
    answers: list[dict[str, Any]] = []
    requests = list(zip(graphs, choices or [""] * len(graphs), strict=True))
    while len(answers) < len(requests):
        answers += _run_worker(
            requests[len(answers) :], profile, {"build": build, "ship": ship}
        )
    return answers


def load_profile(profile: str) -> dict[str, Any]:
    """Return the description of a GPU: cuDNN's JSON, as a dict."""
    return json.loads((HERE / "profiles" / f"{profile}.json").read_text())


def _run_worker(
    requests: Sequence[tuple[str, str]], profile: str, flags: dict[str, bool]
) -> list[dict[str, Any]]:
    properties = load_profile(profile)
    request = {
        "driver_stub": str(_driver_stub()),
        "target": {
            "name": properties["deviceName"],
            "sm_version": properties["deviceVer"] // 10,
            "sm_count": properties["multiProcessorCount"],
        },
        "device_properties": json.dumps(properties),
        "graphs": list(requests),
        **flags,
    }
    done = subprocess.run(
        [sys.executable, HERE / "worker.py"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        # The child imports the package and the libraries that this process would.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=_TIMEOUT_S,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) == len(requests):
        return answers
    if done.returncode < 0:
        crash = signal.Signals(-done.returncode).name
        return [*answers, {"crash": crash, "message": done.stderr[-2000:]}]
    raise RuntimeError(f"the planning process failed:\n{done.stderr}")


@functools.cache
def _driver_stub() -> Path:
    header = _find("include/cuda.h")
    assert header is not None, "missing() has found it"
    directory = tempfile.TemporaryDirectory(prefix="jax_cudnn_driver_")
    atexit.register(directory.cleanup)
    return driver_stub.build(header, Path(directory.name))


def _find(name: str) -> Path | None:
    """Find lib/x or include/x among NVIDIA's wheels."""
    for entry in map(Path, sys.path):
        for directory in sorted((entry / "nvidia").glob("*")):
            if (directory / name).is_file():
                return directory / name
    return None
