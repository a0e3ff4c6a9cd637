# SPDX-License-Identifier: Apache-2.0
"""Plans graphs in a process of its own, with the stand-in driver; see harness.py.

Reads one JSON object from standard input and writes one JSON line per graph, at once,
so that the harness knows which graph a crash belongs to.
"""

import ctypes
import dataclasses
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    request = json.load(sys.stdin)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        sys.exit("a real libcuda.so.1 is within reach: not loading the stand-in")
    ctypes.CDLL(request["driver_stub"], mode=ctypes.RTLD_GLOBAL)

    from jax_cudnn import native
    from jax_cudnn.graph import Target

    version = native.cudnn_version().version
    target = Target(**request["target"], cudnn_version=version)
    for graph, choice in request["graphs"]:
        if graph == "crash":
            os.abort()
        answer: dict[str, object] = {"cudnn_version": version}
        try:
            if request["ship"]:
                answer |= _ship(graph, choice, target, request["device_properties"])
                print(json.dumps(answer), flush=True)
                continue
            listed = native.plan_offline(
                graph,
                target,
                request["device_properties"],
                choice=choice,
                build=request["build"],
            )
            answer["candidates"] = [dataclasses.asdict(each) for each in listed]
        # The harness compares what the tests expect with what was raised.
        except Exception as error:
            answer["error"] = type(error).__name__
            answer["message"] = str(error)
            answer["reasons"] = list(getattr(error, "reasons", ()))
        print(json.dumps(answer), flush=True)


def _ship(
    graph: str, choice: str, target: Any, device_properties: str
) -> dict[str, object]:
    """Write the plan of a graph to a plan file and read it, as harness.py says."""
    from jax_cudnn import native

    native.load_libraries()  # what both would do first
    start = time.perf_counter()
    data = native.export_plan_offline(graph, target, device_properties, choice=choice)
    export_s = time.perf_counter() - start
    start = time.perf_counter()
    read = native.import_plan_offline(data, target, device_properties)
    import_s = time.perf_counter() - start
    again = native.import_plan_offline(data, target, device_properties)
    assert again == read, "reading is repeatable"
    refusals: dict[str, str] = {}
    attempts = {
        "gpu": (data, dataclasses.replace(target, name="NVIDIA A100")),
        "sm_count": (data, dataclasses.replace(target, sm_count=7)),
        "sm_version": (data, dataclasses.replace(target, sm_version=80)),
        "truncated": (data[:-1], target),
        "flipped": (data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], target),
        "empty": (b"", target),
        "settings": (data, target),
    }
    for name, (changed, other) in attempts.items():
        if name == "settings":
            os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        try:
            native.import_plan_offline(changed, other, device_properties)
        except Exception as error:
            refusals[name] = f"{type(error).__name__}: {error}"
    os.environ.pop("NVIDIA_TF32_OVERRIDE")
    return {
        "graph": read.graph_json,
        "choice": read.choice,
        "plan": dataclasses.asdict(read.plan),
        "bytes": len(data),
        "export_s": export_s,
        "import_s": import_s,
        "refusals": refusals,
    }


if __name__ == "__main__":
    main()
