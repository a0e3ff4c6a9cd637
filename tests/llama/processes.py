# SPDX-License-Identifier: Apache-2.0
"""Trains Llama in two processes, in one, and there again from where two stopped."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.common.example_processes import EXAMPLES

Arrays = Mapping[str, Any]

PACKAGES = ("flax", "optax", "matplotlib", "orbax.checkpoint", "safetensors")
_PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
import train_llama
from language import processes
given, file = json.loads(sys.argv[1]), Path(sys.argv[2])
arguments = train_llama.parse_arguments(given)
import jax
jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
assert jax.device_count() == int(sys.argv[3])
from language.text import batch_of, read_corpus
from language.training import Trainer
from llama.task import llama_task

settings = arguments.settings
trainer = Trainer(llama_task(settings, arguments.layout))
batch = trainer.place(batch_of(read_corpus(arguments.text, settings), settings, 0))
places = jax.tree.map(lambda x: x.sharding, trainer.shapes.params)
gradient = jax.jit(trainer.gradient, out_shardings=(None, places))
loss, found = gradient(trainer.initial().params, batch)
arrays = {f"gradient{i}": processes.whole(x)
          for i, x in enumerate(jax.tree.leaves(found))}
arrays["loss"] = loss

def run(given, file, **arrays):
    state = train_llama.run(given)
    arrays |= {f"parameter{i}": processes.whole(x)
               for i, x in enumerate(jax.tree.leaves(state.params))}
    if processes.is_first():
        np.savez(file, losses=np.asarray(state.losses), **arrays)

run(given, file, **arrays)
if checkpoints := sys.argv[4:]:
    run([*given, "--checkpoints", *checkpoints], file.with_name("resumed"))
"""


def train(
    folder: Path,
    arguments: tuple[str, ...],
    halves: tuple[Mapping[str, str], ...],
    whole: Mapping[str, str],
    devices: int,
) -> tuple[Arrays, Arrays, Arrays]:
    """Return what two processes found, what one did, and one after resuming at step 3.

    The gradient of the first step is not among what was found after resuming.

    ``halves`` and ``whole`` are the environments in which a process has half of the
    devices, and all of them. Two sets of weights and checkpoints lie in ``folder``.
    """
    (folder / "text").mkdir()
    for page in sorted((EXAMPLES.parent / "docs").glob("*.md"))[:20]:
        text = page.read_text(encoding="utf-8")[:40]
        (folder / "text" / page.name).write_text(text * 5, encoding="utf-8")
    arguments += ("--text", str(folder / "text"), "--save-every", "3")
    arguments += ("--picture", str(folder / "losses.png"))

    def start(
        environment: Mapping[str, str], name: str, *own: str, resumed: tuple[Path, ...]
    ) -> subprocess.Popen:
        given = json.dumps([*arguments, *own])
        program = (sys.executable, "-c", _PROGRAM, given, str(folder / name))
        return subprocess.Popen(
            [*program, str(devices), *map(str, resumed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(environment),
        )

    own = ("--checkpoints", str(folder / "two"), "--save-weights", str(folder / "w"))
    own += ("--processes", "2", "--coordinator", f"localhost:{_free_port()}")
    started = [
        start(environment, "two", *own, "--process", str(number), resumed=())
        for number, environment in enumerate(halves)
    ]
    first, second = _ended(*started)
    assert f"Devices     {devices} " in first
    assert "step" not in second, "only the first process tells of the run"

    # One process trains, and then goes on where two were after three steps.
    (folder / "cut").mkdir()
    (folder / "two" / "3").rename(folder / "cut" / "3")
    (alone,) = _ended(start(whole, "one", resumed=(folder / "cut",)))
    assert alone.count("Continuing  at step 3 of ") == 1
    two, one, resumed = (_read(folder / name) for name in ("two", "one", "resumed"))
    assert set(two) == set(one)
    at_first = {name for name in one if name == "loss" or name.startswith("gradient")}
    assert set(resumed) == set(one) - at_first
    assert np.isfinite(one["losses"]).all()
    assert all(np.any(one[name]) for name in one if name.startswith("gradient"))
    assert [*(folder / "w").glob("*.safetensors")]
    return two, one, resumed


def _ended(*started: subprocess.Popen) -> list[str]:
    with contextlib.ExitStack() as stack:
        for process in started:
            stack.callback(process.kill)
        said = [process.communicate(timeout=600)[0] for process in started]
    codes = [process.returncode for process in started]
    assert codes == [0] * len(started), "\n".join(said)
    return said


def _read(file: Path) -> Arrays:
    with np.load(file.with_suffix(".npz")) as arrays:
        return dict(arrays)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]
