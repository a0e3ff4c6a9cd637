# SPDX-License-Identifier: Apache-2.0
"""Runs programs in processes that are forked from one that has imported JAX and Flax.

To import these takes most of the time of a short program. All else is as in a process
that is started for it: JAX has no backend yet when the process is forked.
"""

import contextlib
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal


def run(
    program: Path | str,
    *arguments: str,
    environment: Mapping[str, str],
    text: str = "",
    warnings_are: Literal["error", "default"] = "error",
) -> subprocess.CompletedProcess[str]:
    """Run a file, or a module by its name, with arguments and a text as its input.

    Modules of the tests and benchmarks are found after all that is installed.
    """
    of_jax = {
        name: value
        for name, value in environment.items()
        if name.startswith("JAX_") and not name.startswith("JAX_CUDNN_")
    }
    server = _server(tuple(sorted(of_jax.items())))
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        given, *told = (Path(folder, name) for name in ("input", "output", "errors"))
        given.write_text(text, encoding="utf-8")
        request = {
            "command": [str(program), *arguments],
            "is_module": isinstance(program, str),
            "warnings_are": warnings_are,
            "environment": dict(environment),
            "streams": [str(each) for each in (given, *told)],
            "folder": str(Path.cwd()),
        }
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        output, errors = (each.read_text("utf-8") for each in told)
    return subprocess.CompletedProcess([str(program)], code, output, errors)


@functools.cache
def _server(of_jax: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """Start a process that forks; JAX reads these variables when it is imported."""
    return subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **dict(of_jax)},
    )


def _serve() -> dict[str, Any] | None:
    """Fork for each line of the input; return the request in the new processes."""
    for name in ("jax_cudnn", "flax.nnx", "flax.linen", "optax"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    # JAX and Python warn of forks beside threads; there are none that compute yet.
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        if (process := os.fork()) == 0:
            return json.loads(line)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(request: dict[str, Any]) -> None:
    """Make this process that of a request."""
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, path in enumerate(request["streams"]):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
        os.dup2(os.open(path, flags), number)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )
    os.chdir(request["folder"])
    sys.argv = request["command"]
    if not request["is_module"]:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
    sys.path.append(str(Path(__file__).parents[2]))
    warnings.resetwarnings()
    warnings.simplefilter(request["warnings_are"])


if __name__ == "__main__" and (_request := _serve()) is not None:
    _become(_request)
    if _request["is_module"]:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
