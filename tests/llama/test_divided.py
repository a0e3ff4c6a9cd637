# SPDX-License-Identifier: Apache-2.0
"""Tests what divided training of Llama costs: rounding, bytes between devices, plans.

That loss and gradient are right is in tests/tools/test_train_llama.py.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
from benchmarks.xla.traffic import traffic
from tests.common.devices import mesh_of
from tests.common.example_processes import EXAMPLES, run_on_eight_devices

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("train_llama")]

LAYERS, WIDTH, HEADS, KEY_HEADS, HIDDEN, VOCABULARY = 2, 32, 8, 4, 48, 272
ARGUMENTS = (
    *("--size", "tiny", "--width", str(WIDTH), "--heads", str(HEADS)),
    *("--key-heads", str(KEY_HEADS), "--hidden", str(HIDDEN)),
    *("--vocabulary", str(VOCABULARY), "--context", "16", "--batch", "8"),
    *("--steps", "50", "--learning-rate", "3e-3", "--dtype", "bfloat16"),
)
TRUTHS = ("--baseline", "--baseline --dtype float32")
ALL_AXES = "--mesh fsdp=2,tensor=2,sequence=2 --packed"
FSDP, F8 = "--mesh fsdp=8", "--mesh fsdp=8 --f8"
DEPTHS = tuple(f"--mesh fsdp=4,tensor=2 --layers {layers}" for layers in (2, 3))
# With all of these, --f8 aside, losses are compared with those of plain JAX.
OTHERS = (
    "--mesh data=8",
    "--mesh data=2,tensor=4 --remat none --unroll 2",
    "--mesh data=2,sequence=4 --remat attention",
    "--mesh fsdp=2,sequence=4 --method all_gather --remat full",
    "--mesh fsdp=2,sequence=4 --method all_to_all --packed",
    "--mesh fsdp=4,tensor=2 --accumulate 2",
)

_PROGRAM = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_disable_most_optimizations", True)
import train_llama
from jax_cudnn import plans
from language.text import batch_of, read_corpus
from language.training import Trainer
from llama.task import llama_task

common, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
trained, compiled, inspected = map(json.loads, sys.argv[3:])

def trainer(line):
    alone = "" if "--mesh" in line else "--mesh data=1"
    given = train_llama.parse_arguments([*common, *line.split(), *alone.split()])
    return given.settings, Trainer(llama_task(given.settings, given.layout))

found = {"losses": {}, "text": {}, "calls": {}}
for line in trained:
    settings, own = trainer(line)
    corpus = read_corpus(folder / "text", settings)
    state, losses = own.initial(), found["losses"].setdefault(line, [])
    for step in range(settings.steps):
        state, loss = own.step(state, own.place(batch_of(corpus, settings, step)))
        losses.append(float(loss))
for line in compiled:
    found["text"][line] = trainer(line)[1].step.as_text()
for line in inspected:
    report = plans.inspect(trainer(line)[1].traced)
    found["calls"][line] = [[x.op, x.count] for x in report.calls]
(folder / "found.json").write_text(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def _needs_the_example_s_packages():
    for package in ("flax", "optax"):
        pytest.importorskip(package, reason=f"{package} is not installed")


def _found(folder, trained, compiled=(), inspected=()):
    """Return losses, programs and calls of what the lines of arguments say."""
    (folder / "text").mkdir()
    for page in sorted((EXAMPLES.parent / "docs").glob("*.md"))[:20]:
        text = page.read_text(encoding="utf-8")[:300]
        (folder / "text" / page.name).write_text(text, encoding="utf-8")
    given = map(json.dumps, (trained, compiled, inspected))
    run_on_eight_devices(_PROGRAM, ARGUMENTS, folder, *given)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    trained = [ALL_AXES, *(f"{x} --packed" for x in TRUTHS)]
    folder = tmp_path_factory.mktemp("divided")
    return _found(folder, trained, (FSDP, F8), DEPTHS)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    truths = [f"{x}{y}" for x in TRUTHS for y in ("", " --packed")]
    return _found(tmp_path_factory.mktemp("others"), [*truths, FSDP, *OTHERS])


@pytest.mark.parametrize(
    "line",
    [
        ALL_AXES,
        *(pytest.param(line, marks=pytest.mark.thorough) for line in (FSDP, *OTHERS)),
    ],
)
def test_losses_are_those_of_plain_jax_within_the_noise_of_bf16(request, line):
    found = request.getfixturevalue("found" if line == ALL_AXES else "others")
    packed = " --packed" if "--packed" in line else ""
    lines = (line, *(f"{x}{packed}" for x in TRUTHS))
    losses, plain, wide = (np.array(found["losses"][x]) for x in lines)
    noise = np.max(np.abs(plain - wide) / wide)
    assert plain[-5:].mean() < plain[:5].mean() - 1, "it has to learn"
    assert 1e-5 < noise < 5e-3
    assert np.max(np.abs(losses - plain) / plain) < 3 * noise


def _matrices():
    """Return how many numbers the matrices of a layer have."""
    size = WIDTH // HEADS
    attention = WIDTH * size * (2 * HEADS + 2 * KEY_HEADS)
    return attention + 3 * WIDTH * HIDDEN


def _sent(text):
    return {(x.kind, x.dtype): x.received for x in traffic(text)}


def test_weights_are_gathered_in_f8_and_their_gradients_scattered(found):
    # Forward and backward. XLA's CPU holds f8 in f16 and bf16 in f32.
    gathered = 2 * LAYERS * _matrices() * 7 / 8
    # Those of the output layer, too.
    scattered = (LAYERS * _matrices() + WIDTH * VOCABULARY) * 7 / 8
    f8, bf16 = (_sent(found["text"][line]) for line in (F8, FSDP))
    assert f8["all-gather", "f16"] == 2 * gathered
    assert ("all-gather", "f16") not in bf16
    rest = f8["all-gather", "f32"]
    assert bf16["all-gather", "f32"] == 4 * gathered + rest
    for sent in (f8, bf16):
        assert sent["reduce-scatter", "f32"] == 4 * scattered


def test_a_layer_in_a_loop_is_planned_and_tuned_once(found):
    few, more = (found["calls"][line] for line in DEPTHS)
    assert few == more
    assert sum(op == "sdpa" for op, _ in few) == 1


def test_gradients_of_divided_weights_are_scattered_without_a_constraint():
    mesh = mesh_of(d=8)

    def array(*shape):
        place = NamedSharding(mesh, P("d"))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    weights = array(256, 1024), array(1024, 256)

    def loss(weights, x):
        y = jax_cudnn.matmul(jax.nn.gelu(jax_cudnn.matmul(x, weights[0])), weights[1])
        return jnp.mean(y.astype(jnp.float32) ** 2)

    kept = tuple(x.sharding for x in weights)
    gradient = jax.jit(jax.grad(loss), out_shardings=kept)
    program = gradient.lower(weights, array(64, 512, 256)).compile()
    numbers = sum(math.prod(x.shape) for x in weights)
    # XLA's CPU holds bf16 in f32.
    assert _sent(program.as_text()) == {
        ("all-gather", "f32"): 4 * numbers * 7 / 8,
        ("reduce-scatter", "f32"): 4 * numbers * 7 / 8,
    }
