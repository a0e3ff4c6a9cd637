# SPDX-License-Identifier: Apache-2.0
"""Tests that two processes of four devices train Llama as one process of eight does."""

import contextlib
import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.common.example_processes import EXAMPLES, on_devices

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("train_llama")]

ARGUMENTS = (
    *("--size", "tiny", "--width", "32", "--heads", "4", "--key-heads", "2"),
    *("--hidden", "48", "--context", "16", "--batch", "8", "--steps", "6"),
    *("--layers", "2", "--mesh", "fsdp=4,sequence=2", "--packed", "--save-every", "3"),
)
_PROGRAM = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_disable_most_optimizations", True)
import numpy as np, train_llama
from language import processes
from language.text import batch_of, read_corpus
from language.training import Trainer
from llama.task import llama_task

given, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
arguments = train_llama.parse_arguments(given)
settings = arguments.settings
trainer = Trainer(llama_task(settings, arguments.layout))
batch = trainer.place(batch_of(read_corpus(arguments.text, settings), settings, 0))
places = jax.tree.map(lambda x: x.sharding, trainer.shapes.params)
gradient = jax.jit(trainer.gradient, out_shardings=(None, places))
loss, found = gradient(trainer.initial().params, batch)
arrays = {f"gradient{i}": processes.whole(x)
          for i, x in enumerate(jax.tree.leaves(found))}
state = train_llama.run(given)
arrays |= {f"parameter{i}": processes.whole(x)
           for i, x in enumerate(jax.tree.leaves(state.params))}
assert jax.device_count() == 8
if processes.is_first():
    np.savez(folder, loss=loss, losses=np.asarray(state.losses), **arrays)
"""


@pytest.fixture(autouse=True)
def _needs_the_example_s_packages():
    for package in ("flax", "optax", "matplotlib", "orbax.checkpoint", "safetensors"):
        pytest.importorskip(package, reason=f"{package} is not installed")


def _start(devices, folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, json.dumps(arguments), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=on_devices(devices),
    )


def _ended(*started):
    with contextlib.ExitStack() as stack:
        for process in started:
            stack.callback(process.kill)
        said = [process.communicate(timeout=600)[0] for process in started]
    codes = [process.returncode for process in started]
    assert codes == [0] * len(started), "\n".join(said)
    return said


def _free_port():
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def test_two_processes_train_as_one_does(tmp_path):
    (tmp_path / "text").mkdir()
    for page in sorted((EXAMPLES.parent / "docs").glob("*.md"))[:20]:
        text = page.read_text(encoding="utf-8")[:40]
        (tmp_path / "text" / page.name).write_text(text * 5, encoding="utf-8")
    common = (*ARGUMENTS, "--text", str(tmp_path / "text"))
    common += ("--picture", str(tmp_path / "losses.png"))

    address = f"localhost:{_free_port()}"
    own = (
        "--checkpoints",
        str(tmp_path / "two"),
        "--save-weights",
        str(tmp_path / "w"),
    )
    joined = ("--processes", "2", "--coordinator", address, "--process")
    started = [
        _start(4, tmp_path / "two.npz", *common, *own, *joined, str(number))
        for number in range(2)
    ]
    first, second = _ended(*started)
    assert "Devices     8 cpu, as a mesh of 1 data x 4 fsdp x 1 tensor" in first
    assert "step" not in second, "only the first process tells of the run"

    # One process goes on where two were after three steps.
    (tmp_path / "cut").mkdir()
    (tmp_path / "two" / "3").rename(tmp_path / "cut" / "3")
    own = ("--checkpoints", str(tmp_path / "cut"))
    _ended(_start(8, tmp_path / "resumed.npz", *common, *own))
    _ended(_start(8, tmp_path / "one.npz", *common))
    two, one, resumed = (
        np.load(tmp_path / f"{name}.npz") for name in ("two", "one", "resumed")
    )
    assert set(two) == set(one)
    assert np.isfinite(one["losses"]).all()
    assert all(np.any(one[name]) for name in one if name.startswith("gradient"))
    for name in one:
        for other in (two, resumed):
            np.testing.assert_allclose(
                other[name], one[name], rtol=2e-4, atol=2e-6, err_msg=name
            )
    assert len([*(tmp_path / "w").glob("*.safetensors")]) == 3
