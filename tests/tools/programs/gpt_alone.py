# SPDX-License-Identifier: Apache-2.0
"""Runs examples/train_gpt.py on four devices, where neither orbax nor matplotlib is.

Prints what is said of each line of arguments in a list, which is the first argument.
"""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path

import jax

sys.modules.update({"orbax": None, "matplotlib": None})
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
train_gpt = importlib.import_module("train_gpt")

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    given = sys.argv[2:]
    train_gpt.run([*given, "--steps", "2"])
    for line in json.loads(sys.argv[1]):
        said = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said):
            train_gpt.parse_arguments([*given, *line.split()])
        print("SAID", json.dumps(said.getvalue()))
