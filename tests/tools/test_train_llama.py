# SPDX-License-Identifier: Apache-2.0
"""Tests that examples/train_llama.py trains the same Llama however it is divided.

test_examples.py runs it as a user does; here its parts are asked on eight CPU devices.
The truth is Llama in NumPy, with weights in Hugging Face's layout.
"""

import json
import shutil

import jax
import numpy as np
import pytest

from tests.common.example_processes import EXAMPLES, run_on_eight_devices

# One process runs all of them: they share what takes longest.
pytestmark = [pytest.mark.once, pytest.mark.xdist_group("train_llama")]

# Sizes differ, so that exchanged axes are found; eight devices divide what is split.
ARGUMENTS = (
    *("--size", "tiny", "--width", "32", "--heads", "8", "--key-heads", "4"),
    *("--hidden", "48", "--context", "16", "--batch", "8", "--steps", "6"),
    *("--seed", "3"),
)
# XLA of older JAX cannot place what is offloaded.
CAN_OFFLOAD = jax.__version_info__ >= (0, 10, 2)
# Ways to divide the model. All tests run with the first ones.
DIVIDED = (
    "--mesh data=1",
    "--mesh fsdp=4,tensor=2",
    "--mesh fsdp=2,tensor=2,sequence=2 --packed --accumulate 2 --remat full",
)
OTHERS = (
    "--mesh data=1 --packed",
    "--mesh data=8",
    "--mesh tensor=8 --remat none --unroll 2",
    "--mesh data=2,sequence=4 --remat attention",
    "--mesh data=2,fsdp=2,sequence=2 --packed --method all_to_all",
    "--mesh sequence=8 --method all_gather",
    *(("--mesh fsdp=4,tensor=2 --remat offload",) if CAN_OFFLOAD else ()),
    "--mesh fsdp=4,tensor=2 --packed --baseline --accumulate 2",
)
REFUSED = {
    "--mesh 4x2": "--mesh 4x2: write it as data=2,fsdp=4, with each of data, fsdp,",
    "--mesh data=2,data=4": "--mesh data=2,data=4: write it as data=2,fsdp=4",
    "--mesh model=2": "--mesh model=2: write it as data=2,fsdp=4",
    "--mesh data=16": "needs 16 devices; there are 8 here",
    "--batch 12": "--batch 12 is not a multiple of data * fsdp * accumulate = 8",
    "--mesh data=4 --accumulate 4": "multiple of data * fsdp * accumulate = 16",
    "--accumulate 0": "--accumulate 0: it must be at least 1",
    "--unroll 0": "--unroll 0: it must be at least 1",
    "--key-heads 3": "--heads 8 is not a multiple of --key-heads 3",
    "--width 24": "--width 24 is not an even multiple of --heads 8",
    "--vocabulary 256": "--vocabulary 256: it must be at least 259, of which 256",
    "--mesh tensor=8 --hidden 44": "--hidden 44 is not a multiple of tensor = 8",
    "--mesh tensor=4 --heads 12 --key-heads 6 --width 48": (
        "--key-heads 6 is not a multiple of tensor = 4, or a divisor"
    ),
    "--mesh tensor=4,sequence=2 --key-heads 2": (
        "--key-heads 2 is not a multiple of tensor = 4, which sequence needs"
    ),
    "--mesh sequence=8 --context 24": (
        "--context 24 is not a multiple of sequence * 2 = 16"
    ),
    "--mesh sequence=8 --method all_to_all --heads 4": (
        "each part of the heads along tensor has 4, which is no multiple of "
        "sequence = 8"
    ),
    "--mesh sequence=2 --baseline": "plain JAX has no attention over a split sequence",
    "--baseline --f8": "--baseline and --f8: plain JAX has no layers in f8",
    "--remat f8": "--remat f8 saves copies in f8, and there are none without --f8",
    "--load-weights nowhere": "nowhere/config.json",
}
if not CAN_OFFLOAD:
    REFUSED["--remat offload"] = "--remat offload needs JAX 0.10.2 or newer"

_PRELUDE = """
import contextlib, io, json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_disable_most_optimizations", True)
import train_llama
from language.names import name_of
from language.text import Rows
from language.training import Trainer
from llama.task import llama_task
from llama.weights import load_weights, save_weights

folder, common = Path(sys.argv[2]), json.loads(sys.argv[1])

def parsed(line):
    return train_llama.parse_arguments([*common, *line.split()])

def trainer(line):
    given = parsed(line)
    task = llama_task(given.settings, given.layout)
    return task, Trainer(task)
"""

_GRADIENTS = """
task, _ = trainer("--mesh data=1")
rng = np.random.default_rng(0)
shape = task.settings.batch, task.settings.context + 1
text = rng.integers(256, size=shape).astype(np.int32)
documents = np.sort(rng.integers(4, size=shape), axis=1).astype(np.int32)
np.savez(folder / "text", text=text, documents=documents)

def drawn(path, x):
    # No scale is 1, and no product is small.
    noise = rng.standard_normal(x.shape).astype(np.float32)
    return 1 + 0.2 * noise if name_of(path).endswith("scale") else 0.2 * noise

params = jax.tree_util.tree_map_with_path(drawn, jax.eval_shape(task.initial))
save_weights(folder / "weights", params, task.settings)
losses = []
for number, line in enumerate(json.loads(sys.argv[3])):
    task, own = trainer(line)
    places = jax.tree.map(lambda x: x.sharding, own.shapes.params)
    gradient = jax.jit(own.gradient, out_shardings=(None, places))
    loss, found = gradient(
        jax.device_put(params, places), own.place(Rows(text, documents)))
    losses.append(float(loss))
    save_weights(folder / str(number), found, task.settings)
(folder / "losses.json").write_text(json.dumps(losses))
"""

_RUNS = """
import shutil
from jax.sharding import PartitionSpec as P

text = ("--text", str(folder / "text"))

def run(name, line, *arguments):
    state = train_llama.run([*common, *text, *line.split(), *arguments])
    np.save(folder / f"{name}.npy", np.asarray(state.losses))
    return state

straight = str(folder / "straight")
state = run("straight", "--mesh fsdp=4,tensor=2 --packed --save-every 3",
            "--checkpoints", straight)
moments = state.optimizer[1][0].mu
for tree in (state.params, moments):
    assert tree["blocks"]["query"]["kernel"].sharding.spec == P(
        None, "fsdp", "tensor", None)
shutil.copytree(folder / "straight" / "3", folder / "cut" / "3")
cut = ("--checkpoints", str(folder / "cut"))
run("resumed", "--mesh data=2,sequence=2 --packed --accumulate 2", *cut)
state = run("f8", "--mesh data=2,fsdp=2 --f8 --remat f8 --steps 40",
            "--learning-rate", "1e-2", "--profile", str(folder / "profile"),
            "--load-weights", str(folder / "hf"), "--save-weights", str(folder / "out"))
task, _ = trainer("--mesh fsdp=2,tensor=4")
again = load_weights(folder / "out", task)
for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(state.params), strict=True):
    assert x.sharding != y.sharding or x.ndim < 3
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
for line in json.loads(sys.argv[3]):
    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said):
        parsed(line)
    print("SAID", json.dumps(said.getvalue()))
"""


@pytest.fixture(autouse=True)
def _needs_the_example_s_packages():
    for package in ("flax", "optax", "matplotlib", "orbax.checkpoint", "safetensors"):
        pytest.importorskip(package, reason=f"{package} is not installed")


def run_python(program, folder, *arguments):
    """Run a program after the prelude; return what it prints."""
    given = (*ARGUMENTS, "--picture", str(folder / "loss.png"))
    return run_on_eight_devices(_PRELUDE + program, given, folder, *arguments)


# --- the truth ------------------------------------------------------------------------


def read_weights(folder):
    """Return a folder's weights by Hugging Face's names, in f64."""
    from safetensors.numpy import load_file

    files = sorted(folder.glob("*.safetensors"))
    arrays = {name: x for file in files for name, x in load_file(file).items()}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(arrays)
    return {name: x.astype(np.float64) for name, x in arrays.items()}


def _normalised(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale


def _rotated(x):
    """Rotate the halves of (length, head size), as Hugging Face does it."""
    length, size = x.shape
    omega = 10_000.0 ** (-2 * np.arange(size // 2) / size)
    angles = np.arange(length)[:, None] * np.concatenate([omega, omega])
    half = np.concatenate([-x[:, size // 2 :], x[:, : size // 2]], axis=1)
    return x * np.cos(angles) + half * np.sin(angles)


def _logits(tokens, documents, weights, heads, key_heads):
    """Llama's logits in NumPy, of one row, one head at a time."""
    length = len(tokens)
    sees = np.tri(length, dtype=bool) & (documents[:, None] == documents)
    x = weights["model.embed_tokens.weight"][tokens]
    layers = {name.split(".")[2] for name in weights if ".layers." in name}
    for layer in sorted(layers):
        prefix = f"model.layers.{layer}."
        part = {
            name.removeprefix(prefix).removesuffix(".weight"): value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        y = _normalised(x, part["input_layernorm"])
        query, key, value = (
            np.split(y @ part[f"self_attn.{name}_proj"].T, count, axis=1)
            for name, count in (("q", heads), ("k", key_heads), ("v", key_heads))
        )
        attended = []
        for head in range(heads):
            own = head // (heads // key_heads)
            scores = _rotated(query[head]) @ _rotated(key[own]).T
            scores = np.where(sees, scores / np.sqrt(key[own].shape[1]), -np.inf)
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            attended.append(shares / shares.sum(axis=1, keepdims=True) @ value[own])
        x = x + np.concatenate(attended, axis=1) @ part["self_attn.o_proj"].T
        y = _normalised(x, part["post_attention_layernorm"])
        gate = y @ part["mlp.gate_proj"].T
        hidden = gate / (1 + np.exp(-gate)) * (y @ part["mlp.up_proj"].T)
        x = x + hidden @ part["mlp.down_proj"].T
    return _normalised(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def true_loss(text, documents, weights, *, heads=8, key_heads=4):
    """Return the mean loss of all tokens whose next one is of the same document."""
    losses = []
    for row, own in zip(text + 3, documents, strict=True):
        logits = _logits(row[:-1], own[:-1], weights, heads, key_heads)
        shifted = logits - logits.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        found = -logs[np.arange(len(logs)), row[1:]]
        losses.extend(found[own[1:] == own[:-1]])
    return np.mean(losses)


# --- the model, however it is divided -------------------------------------------------


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """A function that returns loss, gradient, weights and text of a line's model."""
    folders = {}

    def of(line):
        lines = DIVIDED if line in DIVIDED else OTHERS
        if lines not in folders:
            folders[lines] = tmp_path_factory.mktemp("gradients")
            run_python(_GRADIENTS, folders[lines], json.dumps(lines))
        folder, number = folders[lines], lines.index(line)
        loss = json.loads((folder / "losses.json").read_text())[number]
        found = read_weights(folder / str(number))
        return (
            loss,
            found,
            read_weights(folder / "weights"),
            np.load(folder / "text.npz"),
        )

    return of


@pytest.mark.parametrize(
    "line",
    [*DIVIDED, *(pytest.param(line, marks=pytest.mark.thorough) for line in OTHERS)],
)
def test_loss_and_gradient_are_those_of_llama_however_it_is_divided(gradients, line):
    loss, gradient, weights, rows = gradients(line)
    documents = rows["documents"] if "--packed" in line else np.zeros_like(rows["text"])
    np.testing.assert_allclose(
        loss, true_loss(rows["text"], documents, weights), rtol=1e-5
    )
    rng = np.random.default_rng(1)
    kinds = {name.replace("layers.1.", "layers.0.") for name in weights}
    assert len(kinds) == 12
    for kind in sorted(kinds):
        # The derivative along a random direction of all layers' weights of one kind.
        names = {kind, kind.replace("layers.0.", "layers.1.")}
        step = {name: rng.standard_normal(weights[name].shape) for name in names}
        ends = [
            true_loss(
                rows["text"],
                documents,
                {**weights, **{n: weights[n] + sign * 1e-5 * step[n] for n in names}},
            )
            for sign in (1, -1)
        ]
        along = sum(np.vdot(gradient[name], step[name]) for name in names)
        size = np.sqrt(sum(np.sum(gradient[name] ** 2) for name in names))
        assert size > 0
        assert abs(along - (ends[0] - ends[1]) / 2e-5) < 1e-3 * size, kind


# --- runs -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with what runs of the program left behind, and what they printed."""
    import ml_dtypes
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    for page in sorted((EXAMPLES.parent / "docs").glob("*.md"))[:20]:
        shutil.copy(page, folder / "text")
    (folder / "hf").mkdir()
    rng = np.random.default_rng(0)
    weights = {
        name: (0.02 * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16)
        for name, shape in SHAPES.items()
    }
    for name in SHAPES:
        if "norm" in name:
            weights[name] = np.ones_like(weights[name])
    save_file(weights, folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG))
    return folder, run_python(_RUNS, folder, json.dumps(list(REFUSED)))


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 272,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
}
SHAPES = {
    "model.embed_tokens.weight": (272, 32),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "input_layernorm": (32,),
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "post_attention_layernorm": (32,),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
        }.items()
    },
    "model.norm.weight": (32,),
    "lm_head.weight": (272, 32),
}


def test_a_run_goes_on_with_another_mesh(runs):
    folder, output = runs
    straight, resumed = (
        np.load(folder / f"{name}.npy") for name in ("straight", "resumed")
    )
    assert f"Continuing  at step 3 of {folder / 'cut'}" in output
    assert straight[-1] < straight[0] - 0.1
    np.testing.assert_array_equal(resumed[:3], straight[:3])
    np.testing.assert_allclose(resumed[3:], straight[3:], rtol=2e-5)


def test_f8_trains_from_weights_of_hugging_face_s_layout(runs):
    folder, output = runs
    losses = np.load(folder / "f8.npy")
    assert abs(losses[0] - np.log(272)) < 0.3
    assert losses[-5:].mean() < losses[:5].mean() - 1
    assert ", blocks in f8" in output
    config = json.loads((folder / "out" / "config.json").read_text())
    assert {name: config.get(name) for name in CONFIG} == CONFIG
    assert {name: x.shape for name, x in read_weights(folder / "out").items()} == SHAPES
    assert f"  a profile of 3 steps is in {folder / 'profile'}" in output
    assert list((folder / "profile").rglob("*.xplane.pb"))


def test_what_does_not_fit_is_refused(runs):
    said = [line for line in runs[1].splitlines() if line.startswith("SAID ")]
    for line, message in zip(said, REFUSED.values(), strict=True):
        assert message in json.loads(line.removeprefix("SAID "))
