# SPDX-License-Identifier: Apache-2.0
"""Tests that examples/train_gpt.py trains the same GPT-2 however it is split.

test_examples.py runs it as a user does; here its parts are asked on eight CPU devices.
"""

import shutil

import numpy as np
import pytest

from tests.common.example_processes import EXAMPLES, run_on_eight_devices

# One process runs all of them: they share what takes longest.
pytestmark = [pytest.mark.once, pytest.mark.xdist_group("train_gpt")]

# Sizes differ, so that exchanged axes are found; eight devices divide what is split.
ARGUMENTS = (
    *("--size", "tiny", "--layers", "1", "--width", "48", "--heads", "8"),
    *("--context", "12", "--batch", "16", "--steps", "6", "--seed", "3"),
)

_PRELUDE = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_disable_most_optimizations", True)
import train_gpt

def run(*arguments):
    return train_gpt.run([*json.loads(sys.argv[1]), *arguments])

def save(path, state):
    leaves = jax.tree.leaves_with_path(state)
    np.savez(path, **{jax.tree_util.keystr(path): x for path, x in leaves})

folder = Path(sys.argv[2])
"""


@pytest.fixture(autouse=True)
def _needs_the_example_s_packages():
    for package in ("flax", "optax", "matplotlib", "orbax.checkpoint"):
        pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small text, so that reading it takes no time."""
    path = tmp_path_factory.mktemp("text") / "plans.md"
    shutil.copy(EXAMPLES.parent / "docs" / "plans.md", path)
    return path


def run_python(program, folder, text):
    """Run a program that finds `run` and `save`; return what it prints."""
    given = (*ARGUMENTS, "--text", str(text), "--picture", str(folder / "loss.png"))
    return run_on_eight_devices(_PRELUDE + program, given, folder)


# --- parallelism and checkpoints ------------------------------------------------------

_LAYOUTS = """
for name, *arguments in (
    ("single", "--mesh", "1x1"),
    ("data", "--parallel", "data", "--stop-at", "4"),
    ("tensor", "--parallel", "tensor", "--mesh", "2x4"),
    ("fsdp", "--parallel", "fsdp", "--mesh", "4x2", "--save-every", "3",
     "--checkpoints", str(folder / "straight")),
):
    state = run(*arguments)
    save(folder / name, state)
    print("SPLIT", name, state.params["blocks"][0]["up"]["kernel"].sharding.spec)
"""

_RESUMED = """
try:
    run("--seed", "4", "--checkpoints", str(folder / "cut"))
except SystemExit as refusal:
    print(refusal)
state = run("--parallel", "fsdp", "--mesh", "4x2", "--checkpoints", str(folder / "cut"))
save(folder / "resumed", state)
"""


_MODEL = """
from flax import nnx
from dataclasses import replace
from gpt.model import Gpt, kernels_for
from gpt.task import gpt_task
from language.loss import cross_entropies
from language.names import name_of
from language.report import flops_per_token

arguments = [*json.loads(sys.argv[1]), "--layers", "2"]
parsed = train_gpt.parse_arguments(arguments)
settings = parsed.settings
rng = np.random.default_rng(0)
told = {}
tokens = rng.integers(256, size=(3, settings.context))
for name, is_plain in (("ours", False), ("plain", True)):
    kernels = kernels_for(replace(settings, baseline=is_plain))
    model = Gpt(settings, kernels, nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    rng = np.random.default_rng(1)
    # No bias is 0, and no scale is 1.
    params = jax.tree.map(
        lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(np.float32), params)
    told[name] = jax.jit(nnx.merge(graph, params))(tokens)
leaves = jax.tree.leaves_with_path(params)
weights = {name_of(path): np.asarray(x) for path, x in leaves}
targets = rng.integers(256, size=tokens.shape)
told["loss"] = jnp.mean(cross_entropies(told["ours"], targets))
np.savez(folder / "model", tokens=tokens, targets=targets, **told)
np.savez(folder / "weights", **weights)

def loss(params, tokens):
    return jnp.sum(nnx.merge(graph, params)(tokens))

def product_flops(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inner = np.prod([shape[axis] for axis in contracted])
            total += 2 * np.prod(equation.outvars[0].aval.shape) * inner
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            total += product_flops(inner.jaxpr) if hasattr(inner, "jaxpr") else 0
    return int(total)

jaxpr = jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr
save(folder / "flops", {
    "counted": product_flops(jaxpr) / tokens.size,
    "told": flops_per_token(params, gpt_task(settings, parsed.layout)),
    "masked": 6 * settings.layers * settings.width * settings.context,
    "lookup": 4 * 256 * settings.width,  # forward, and of the table
})
"""


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory):
    """The folder with what the programs saved, and what they printed."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_python(_LAYOUTS, folder, text)


@pytest.mark.thorough
def test_loss_does_not_depend_on_how_the_work_is_split(runs):
    folder, output = runs
    single = np.load(folder / "single.npz")
    losses = single[".losses"]
    assert losses.shape == (6,)
    assert losses[-1] < losses[0] - 0.3
    for name, steps in (("data", 4), ("tensor", 6), ("fsdp", 6)):
        other = np.load(folder / f"{name}.npz")
        assert other.files == single.files
        np.testing.assert_allclose(other[".losses"][:steps], losses[:steps], rtol=2e-5)
        assert np.isnan(other[".losses"][steps:]).all()  # --stop-at
    splits = [line for line in output.splitlines() if line.startswith("SPLIT")]
    assert splits == [
        "SPLIT single P(None, 'model')",
        "SPLIT data P(None, 'model')",
        "SPLIT tensor P(None, 'model')",
        "SPLIT fsdp P('data', 'model')",
    ]


@pytest.mark.thorough
def test_each_layout_needs_the_collectives_that_it_is_known_for(runs):
    lines = [x for x in runs[1].splitlines() if x.startswith("Program")]
    single, data, tensor, fsdp = lines
    assert "collectives of a step: none" in single
    assert "all-reduce" in data
    assert "all-gather" not in data
    assert "all-reduce" in tensor
    assert "all-gather" in fsdp


@pytest.mark.thorough
def test_a_resumed_run_is_the_straight_one_bit_for_bit(runs, text, tmp_path):
    folder, _ = runs
    # As if the run had been killed after its checkpoint of step 3: the steps that
    # followed it there took over the memory of the state that was being written.
    shutil.copytree(folder / "straight" / "3", tmp_path / "cut" / "3")
    output = run_python(_RESUMED, tmp_path, text)
    cut = tmp_path / "cut"
    assert f"{cut} holds a run with other settings: seed was 3 and is 4." in output
    assert f"Continuing  at step 3 of {cut}" in output
    assert " 6/6  loss " in output
    straight, resumed = (
        np.load(folder / "fsdp.npz"),
        np.load(tmp_path / "resumed.npz"),
    )
    assert straight.files == resumed.files
    assert len(straight.files) > 40
    for name in straight.files:
        assert straight[name].dtype == resumed[name].dtype, name
        assert straight[name].tobytes() == resumed[name].tobytes(), name
    assert not np.isnan(straight[".losses"]).any()


# --- the model and what is told of it -------------------------------------------------


def _normalised(x, weights, name):
    centred = x - x.mean(-1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return unit * weights[f"{name}.scale"] + weights[f"{name}.bias"]


def _gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _gpt(tokens, weights, layers):
    """GPT-2's logits in NumPy, one example and one head at a time."""
    length = len(tokens)
    x = weights["tokens.embedding"][tokens] + weights["positions.embedding"][:length]
    for i in range(layers):
        part = {
            name.removeprefix(f"blocks.{i}."): value for name, value in weights.items()
        }
        y = _normalised(x, part, "attention_norm")
        sums = np.zeros_like(x)
        for head in range(part["qkv.kernel"].shape[1]):
            query, key, value = (
                y @ part["qkv.kernel"][:, head, j] + part["qkv.bias"][head, j]
                for j in range(3)
            )
            scores = query @ key.T / np.sqrt(query.shape[1])
            scores[np.triu_indices(length, 1)] = -np.inf
            shares = np.exp(scores - scores.max(1, keepdims=True))
            shares /= shares.sum(1, keepdims=True)
            sums += shares @ value @ part["out.kernel"][head]
        x = x + sums + part["out.bias"]
        y = _normalised(x, part, "mlp_norm")
        y = _gelu(y @ part["up.kernel"] + part["up.bias"])
        x = x + y @ part["down.kernel"] + part["down.bias"]
    return _normalised(x, weights, "norm") @ weights["tokens.embedding"].T


@pytest.fixture(scope="module")
def model(text, tmp_path_factory):
    """The folder with logits, loss, weights and FLOPs of a model."""
    folder = tmp_path_factory.mktemp("model")
    run_python(_MODEL, folder, text)
    return folder


def test_the_model_is_gpt_2(model):
    told, weights = (np.load(model / f"{name}.npz") for name in ("model", "weights"))
    weights = {name: weights[name].astype(np.float64) for name in weights.files}
    truth = np.stack([_gpt(tokens, weights, layers=2) for tokens in told["tokens"]])
    scale = np.abs(truth).max()
    for name in ("ours", "plain"):
        np.testing.assert_allclose(told[name], truth, rtol=0, atol=3e-5 * scale)
    logs = truth - truth.max(-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logs, told["targets"][..., None], -1)
    np.testing.assert_allclose(told["loss"], -chosen.mean(), rtol=1e-4)


def test_flops_are_those_of_the_products(model):
    flops = np.load(model / "flops.npz")
    # Plain JAX computes the scores that the mask hides; they are not work to be done.
    # Nor is the product that looks up tokens.
    extra = flops["['masked']"] + flops["['lookup']"]
    assert flops["['counted']"] == flops["['told']"] + extra
