# SPDX-License-Identifier: Apache-2.0
"""Tests that each example, run on the CPU as by a user, prints what it should."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jax_cudnn import offline
from tests.common import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.once


def start_example(name, *arguments):
    """Run the example on the CPU; warnings are errors in it too."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"}
    return forked.run(EXAMPLES / name, *arguments, environment=environment)


def run_example(name, *arguments):
    """Return what the example prints."""
    done = start_example(name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def number_after(label, text):
    return float(re.search(rf"{label}\s+(-?[0-9.e+-]+)", text, re.MULTILINE)[1])


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "choose_plans.py",
        "export_for_another_gpu.py",
        "fuse_batch_matmul.py",
        "generate.py",
        "gradient_check.py",
        "packed_documents.py",
        "quickstart.py",
        "train_char_transformer.py",
        "train_gpt.py",
        "train_llama.py",
        "train_mamba.py",
        "train_moe.py",
        "train_residual_cnn.py",
        "train_unet.py",
        "train_vision_transformer.py",
    }


def test_quickstart_prints_loss_gradients_and_where_they_ran():
    output = run_example("quickstart.py")
    assert number_after("loss", output) > 0
    for name in "qkv":
        assert f"gradient of {name}: bfloat16[2, 77, 4, 64], largest" in output
    assert re.search(r"^sdpa +1 .* xla ", output, re.MULTILINE)
    assert re.search(r"^sdpa_backward +1 .* xla ", output, re.MULTILINE)


def test_the_readme_s_snippets_run(tmp_path):
    pages = [EXAMPLES.parent / name for name in ("README.md", "docs/index.md")]
    text = "".join(page.read_text() for page in pages)
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 3
    path = tmp_path / "snippets.py"
    path.write_text("".join(snippets))
    output = run_example(path)
    assert re.search(r"^sdpa_backward +1 .* xla ", output, re.MULTILINE)


def test_packed_documents_give_the_loss_of_one_in_each_row():
    output = run_example("packed_documents.py", "--steps", "20")
    packed, other = re.search(r"loss (\S+) packed, (\S+) with", output).groups()
    assert packed == other
    assert number_after("loss", output.splitlines()[-1]) < float(packed)


def test_gradient_check_finds_no_error():
    output = run_example("gradient_check.py", "--quick")
    assert [line.split()[0] for line in output.splitlines() if line.endswith("ok")] == [
        "plain",
        "causal",
    ]
    assert "cuDNN's backward kernel was not checked" in output


def test_train_char_transformer_lowers_its_loss():
    pytest.importorskip("flax", reason="Flax is not installed")
    pytest.importorskip("optax", reason="optax is not installed")
    output = run_example("train_char_transformer.py", "--quick", "--seed", "3")
    assert number_after("error of the chosen one in float32", output) <= 1e-5
    assert " ok (allowed: 1.0e-05)" in output
    assert re.search(r"^  sdpa +2 .* xla ", output, re.MULTILINE)
    assert re.search(r"^  sdpa_backward +2 .* xla ", output, re.MULTILINE)
    assert " 20/20  loss " in output
    before = number_after("before training ", output)
    assert number_after("after training ", output) < before - 1
    assert number_after("counting pairs", output) < number_after(
        "counting characters", output
    )


def test_train_char_transformer_refuses_zero_steps():
    pytest.importorskip("flax", reason="Flax is not installed")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_char_transformer.py"), "--steps", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--steps 0: at least 1 step is needed" in done.stderr


GPT = (
    *("--size", "tiny", "--layers", "1", "--width", "32", "--heads", "2"),
    *("--context", "16", "--learning-rate", "1e-2", "--steps", "40"),
)


def check_training(output, vocabulary, picture):
    """Check what a run of 40 steps on one device printed and drew."""
    assert "collectives of a step: none" in output
    assert " tokens/s, the median of 38" in output
    first, last = (number_after(f" {n}/40  loss", output) for n in (2, 40))
    # At first all tokens are as likely.
    assert abs(first - math.log(vocabulary)) < 0.3
    assert last < first - 1.5
    assert abs(number_after("this model", output) - last) < 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_gpt_lowers_its_loss_and_draws_it(tmp_path):
    for package in ("flax", "optax", "matplotlib"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    picture = tmp_path / "loss.png"
    output = run_example("train_gpt.py", *GPT, "--picture", str(picture))
    assert "sources of Python, NumPy, JAX and Flax: " in output
    check_training(output, 256, picture)
    assert number_after("counting pairs", output) < number_after(
        "counting bytes", output
    )
    assert f"The losses are drawn in {picture}" in output


def test_train_llama_lowers_its_loss(tmp_path):
    for package in ("flax", "optax", "matplotlib"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    sizes = ("--layers", "1", "--width", "32", "--hidden", "64", "--context", "16")
    arguments = ("--size", "tiny", *sizes, "--learning-rate", "1e-2", "--steps", "40")
    picture = tmp_path / "loss.png"
    text = EXAMPLES.parent / "docs" / "plans.md"
    given = (*arguments, "--text", str(text), "--picture", str(picture))
    output = run_example("train_llama.py", *given)
    assert "4 heads on 2 key heads, context 16, float32" in output
    check_training(output, 272, picture)


def test_train_moe_lowers_its_loss_on_the_devices_that_divide_its_experts():
    for package in ("flax", "optax"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    path = PROGRAMS / "experts.py"
    output = run_example(path, *GPT[2:], "--experts", "6", "--batch", "4")
    assert "Devices     2 cpu" in output
    first, last = (number_after(f" {n}/40  loss", output) for n in (2, 40))
    assert abs(first - math.log(256)) < 0.3
    assert last < first - 1.2
    assert abs(number_after("this model", output) - last) < 1
    (shares,) = re.findall(r"^  block 0 (.*)  dropped 0.0$", output, re.M)
    assert sum(map(float, shares.split())) == pytest.approx(100, abs=0.5)
    for line, message in {
        "--top-k 9": "--top-k 9: there are 8 experts",
        "--steps 0": "--steps 0: it must be at least 1",
    }.items():
        done = start_example("train_moe.py", *line.split())
        assert done.returncode == 2
        assert message in done.stderr


def test_train_mamba_lowers_its_loss_and_writes_what_it_would_read():
    """Text in pieces has the logits of the whole, which a byte at a time needs."""
    for package in ("flax", "optax"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    output = run_example(PROGRAMS / "mamba.py", *GPT[2:])
    assert "causal_conv1d by xla, causal_conv1d_backward by xla" in output
    first, last = (number_after(f" {n}/40  loss", output) for n in (2, 40))
    assert abs(first - math.log(256)) < 0.5
    assert last < first - 1
    assert abs(number_after("this model", output) - last) < 1
    assert "[...]" in output
    assert number_after("pieces differ by", output) < 1e-5


REFUSED_BY_GPT = {
    "--steps 0": "--steps 0: it must be at least 1",
    "--save-every 0": "--save-every 0: it must be at least 1",
    "--stop-at -1": "--stop-at -1: it must be at least 1",
    "--heads 3": "--width 32 is not a multiple of --heads 3",
    "--mesh 8": "--mesh 8: write it as 4x2",
    "--mesh 4x2": "the mesh 4x2 needs more than the 4 devices here",
    "--batch 6": "the mesh 4x1: 4 does not divide --batch 6",
    "--parallel tensor --mesh 1x4": (
        "the mesh 1x4: 4 does not divide both --heads 2 and the 256 tokens"
    ),
    "--mesh 2x2": "Pass --parallel tensor or fsdp, or --mesh 4x1",
    "--picture here": "Run: pip install matplotlib, or leave --picture out",
    "--checkpoints here": (
        "Run: pip install orbax-checkpoint, or leave --checkpoints out"
    ),
}


@pytest.mark.thorough
def test_train_gpt_runs_alone_and_says_what_does_not_fit(tmp_path):
    for package in ("flax", "optax"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    path = PROGRAMS / "gpt_alone.py"
    short = tmp_path / "short.txt"
    short.write_text("x" * 160)
    output = run_example(path, json.dumps(list(REFUSED_BY_GPT)), *GPT)
    assert "as a mesh of 4 data x 1 model" in output
    assert " 2/2  loss " in output
    assert "No picture of the losses: the package matplotlib is not" in output
    said = re.findall(r"^SAID (.*)$", output, re.M)
    for line, message in zip(said, REFUSED_BY_GPT.values(), strict=True):
        assert message in json.loads(line)
    done = start_example("train_gpt.py", *GPT, "--text", str(short))
    assert done.returncode == 1
    assert "short.txt: 160 bytes are too few: a tenth is held out, " in done.stderr
    assert "to be longer than the context of 16" in done.stderr


def learn_from_images(name, *arguments, pillow=False):
    """Return what an example prints that learns from images, and its kernels."""
    for package in ("flax", "optax", "sklearn", *(("PIL",) if pillow else ())):
        pytest.importorskip(package, reason=f"{package} is not installed")
    output = run_example(name, "--quick", "--seed", "3", *arguments)
    found = Counter()
    for op, count, *_ in (
        line.split() for line in output.splitlines() if " xla " in line
    ):
        found[op] += int(count)
    return output, found


@pytest.mark.parametrize(
    ("name", "kernels", "epochs"),
    [
        (
            "train_residual_cnn.py",
            {"conv_fprop+add+relu": 3, "conv_fprop+add+add+relu": 2, "matmul+add": 1},
            6,
        ),
        (
            "train_vision_transformer.py",
            {"conv_fprop+add": 1, "sdpa": 2, "layer_norm": 5, "layer_norm_backward": 5},
            8,
        ),
    ],
)
def test_networks_tell_held_out_digits(name, kernels, epochs):
    output, found = learn_from_images(name)
    assert "1,438 to train on, 359 held out" in output
    assert {op: found.get(op) for op in kernels} == kernels
    assert f" epoch   {epochs}/{epochs}  loss " in output
    before = number_after("before training ", output)
    assert number_after("after training ", output) > max(before, 60)


def test_train_unet_removes_more_noise_than_a_mean_does(tmp_path):
    picture = tmp_path / "unet.png"
    options = ("--epochs", "6", "--picture", str(picture))
    output, found = learn_from_images("train_unet.py", *options, pillow=True)
    assert "416 squares to train on, 104 held out" in output
    assert found["group_norm"] == 6
    noisy, mean, network = (
        number_after(f"^  {label}", output)
        for label in ("noisy", "mean of 3 by 3", "U-Net")
    )
    assert network > max(noisy, mean) + 1
    from PIL import Image

    # Eight rows of four squares, in four versions; the clean one comes last.
    drawn = np.asarray(Image.open(picture), np.float64)
    assert drawn.shape == (8 * 32, 4 * 4 * 32, 3)
    versions = np.split(drawn, 4, axis=1)
    errors = [np.square(version - versions[-1]).mean() for version in versions[:-1]]
    assert errors[2] < errors[1] < errors[0]


@pytest.mark.thorough
def test_networks_refuse_zero_epochs():
    for package in ("flax", "optax", "sklearn"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = start_example("train_residual_cnn.py", "--epochs", "0")
    assert done.returncode == 2
    assert "--epochs 0: at least 1 epoch is needed" in done.stderr


def test_generate_gives_the_text_of_the_model_without_a_cache():
    for package in ("flax", "optax"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    prompts = ("--prompt", "def f(", "--prompt", "import numpy as n")
    output = run_example("generate.py", "--quick", *prompts, "--temperature", "0.9")
    assert "20 steps of 512 bytes, loss " in output
    assert "Prompts     2 of 6, 17 bytes, 12 to follow each" in output
    assert "Greedy text with the cache and without: equal" in output
    for name in ("jax_cudnn", "XLA alone"):
        assert number_after(name, output.replace(",", "")) > 0
    assert "  | def f([...]" in output
    assert "  | import numpy as n[...]" in output


@pytest.mark.thorough
def test_generate_refuses_what_it_cannot_do():
    for package in ("flax", "optax"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    for line, message in {
        "--tokens 1": "--tokens 1: it must be at least 2",
        "--steps -1": "--steps -1: it must be at least 0",
        "--temperature nan": "--temperature nan: it must be at least 0",
    }.items():
        done = start_example("generate.py", *line.split())
        assert done.returncode == 2
        assert message in done.stderr
    done = start_example("generate.py", "--prompt", "")
    assert "--prompt: it must not be empty" in done.stderr


def test_choosing_plans_runs_with_xla_where_there_is_no_gpu():
    text = run_example("choose_plans.py")
    assert "no plans to list: this machine has no CUDA device" in text
    for kind in ("JIT only", "precompiled only", "jnp.matmul"):
        assert number_after(rf"{kind} .*largest error", text) < 0.05


def test_fuse_batch_matmul_asks_both_kinds_of_engines():
    output = run_example("fuse_batch_matmul.py")
    kinds = output.split("--- ")[1:]
    assert [kind.splitlines()[0] for kind in kinds] == [
        "compiled when planned",
        "precompiled",
    ]
    for kind in kinds:
        assert "fuse(product): 1 kernel, 0 operations left to XLA" in kind
        assert number_after("largest error", kind) < 0.05
        if offline.obstacle() is None:
            assert "cuDNN 9" in kind
            assert " NVIDIA H200" in kind
        else:
            assert "cuDNN cannot be asked here" in kind


def test_export_for_another_gpu_writes_here_what_runs_there(tmp_path):
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    path = tmp_path / "step.bin"
    arguments = ("export_for_another_gpu.py", "--write", str(path), "--device", "L4")
    if reason := offline.obstacle():
        done = start_example(*arguments)
        assert done.returncode == 1
        assert done.stderr == (
            f"cannot plan here for a GPU that is elsewhere: {reason}\n"
        )
        return
    output = run_example(*arguments)
    assert output.startswith("cuDNN calls on NVIDIA L4\n")
    for op in ("conv_fprop.add.relu", "sdpa", "sdpa_backward", "conv_wgrad"):
        assert re.search(
            rf"^{op} +1 .* cudnn +heuristic +eng\d", output, re.MULTILINE
        ), output
    assert f"wrote {path}, {path.stat().st_size:,} bytes" in output
    done = start_example("export_for_another_gpu.py", "--run", str(path))
    assert done.returncode == 1
    assert "is a program for an NVIDIA GPU; JAX has cpu here." in done.stderr


def test_export_for_another_gpu_lists_the_gpus_that_it_knows(tmp_path):
    path = str(tmp_path / "step.bin")
    done = start_example("export_for_another_gpu.py", "--write", path, "--device", "M9")
    assert done.returncode == 2
    assert "device='M9' is not a GPU that jax_cudnn knows" in done.stderr


def test_export_for_another_gpu_says_which_file_it_cannot_run(tmp_path):
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    path = tmp_path / "nothing.bin"
    for told in ("cannot be read: No such file", "is not a program that --write wrote"):
        done = start_example("export_for_another_gpu.py", "--run", str(path))
        assert done.returncode == 1
        assert done.stderr.startswith(f"{path} {told}")
        path.write_bytes(b"nothing")
