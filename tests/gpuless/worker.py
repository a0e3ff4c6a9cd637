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


if __name__ == "__main__":
    main()
