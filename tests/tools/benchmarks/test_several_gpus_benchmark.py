# SPDX-License-Identifier: Apache-2.0
"""Tests the benchmarks of several GPUs, and that they report what programs hold."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from tests.tools.sources import ROOT

pytestmark = [pytest.mark.once, pytest.mark.thorough]

# As `python -m` does it, with the installed package ahead of the working tree.
_RUN = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
sys.argv[0] = sys.argv.pop(1)
runpy.run_module(sys.argv[0], run_name="__main__")
"""
# What each split sends, in the result and beside its gradients.
_SENT = {
    "batch": ("", ""),
    "heads": ("", ""),
    "rows": ("", "all-reduce"),
    "columns": ("", "all-reduce"),
    "contraction": ("all-reduce", "all-reduce"),
    "tensors": ("all-reduce", "all-reduce"),
    "tokens": ("", "all-reduce"),
    "images": ("", "all-reduce"),
    "output channels": ("", "all-reduce"),
    "tokens of experts": ("", "all-reduce"),
}
# Where devices share experts, tokens are sent to them; plain JAX sends the weights.
_SENT_TO_EXPERTS = {
    "jax_cudnn": ("all-gather all-to-all", "all-gather all-reduce all-to-all"),
    "plain JAX": ("all-gather", "all-gather all-reduce"),
}


def _run(name: str, *arguments: str, devices: int) -> subprocess.CompletedProcess[str]:
    command = ["-W", "error", "-c", _RUN, str(ROOT), f"benchmarks.{name}", *arguments]
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONIOENCODING": "utf-8",
        },
    )


@pytest.fixture
def benchmark_module():
    return importlib.import_module("benchmarks.sharding.several_gpus")


def test_every_cell_is_timed_beside_plain_jax(tmp_path):
    done = _run("several_gpus", "--small", "--out", str(tmp_path), devices=2)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "several_gpus.json").read_text())
    found = {(row["split"], row["what"], row["contender"]): row for row in data["rows"]}
    assert len(found) == len(data["rows"])
    assert set(found) == {
        (split, what, name)
        for split in (*_SENT, "experts")
        for what in ("fwd", "fwd+bwd")
        for name in ("jax_cudnn", "plain JAX")
    }
    for (split, what, name), row in found.items():
        sent = _SENT_TO_EXPERTS[name] if split == "experts" else _SENT[split]
        assert " ".join(row["collectives"]) == sent[what == "fwd+bwd"]
        assert len(row["sent"]) == sum(row["collectives"].values())
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["cudnn_calls"] == {}  # no GPU
        assert len(row["errors"]) == len(row["results_split"])
    page = (tmp_path / "several_gpus.md").read_text()
    assert page.count("+bias+silu | output channels | fwd+bwd |") == 2
    assert "GPU 2 x cpu" in page


def test_one_device_is_too_few(tmp_path):
    done = _run("several_gpus", "--small", "--out", str(tmp_path), devices=1)
    assert done.returncode == 1
    assert done.stderr == "benchmarks.several_gpus needs two devices or more\n"
    assert not [*tmp_path.iterdir()]


def test_what_is_sent_is_read_from_the_text_of_a_gpu_program(benchmark_module):
    text = """
  %x = bf16[8,5]{1,0} parameter(0), metadata={op_name="a all-reduce(b)"}
  %y = (f32[2]{0}, f32[7]{0}) fusion(%x), metadata={op_name="(a) all-gather(b)"}
  %s.1 = (f32[3,2]{1,0}, /*index=1*/f32[7]{0:T(8)}) all-reduce-start(%y), channel_id=1
  %d.1 = (f32[3,2]{1,0}, f32[7]{0}) all-reduce-done(%s.1), channel_id=1
  ROOT %all-gather.2 = bf16[16,5]{1,0} all-gather(%x), dimensions={0}
"""
    assert benchmark_module.sent(text) == [
        "all-reduce (f32[3,2], f32[7])",
        "all-gather bf16[16,5]",
    ]


def test_calls_of_cudnn_are_read_from_the_text_of_a_gpu_program(benchmark_module):
    text = """
  %a = (bf16[8]{0}, u8[0]{0}) custom-call(%x), custom_call_target="jax_cudnn.graph", api_version=API_VERSION_TYPED_FFI
  %b = (bf16[8]{0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$convForward"
  %c = bf16[8]{0} fusion(%x), kind=kCustom, backend_config={"fusion_backend_config":{"kind":"__cudnn$fusion"}}
  %d = bf16[8]{0} custom-call(%x), custom_call_target="__cublas$gemm"
"""  # noqa: E501
    assert benchmark_module.cudnn_calls(text) == [
        "jax_cudnn.graph",
        "__cudnn$convForward",
        "__cudnn$fusion",
    ]


def test_wrong_results_fail(benchmark_module):
    checks = importlib.import_module("benchmarks.harness.checks")
    checks.check([0.02], *benchmark_module.BOUNDS)
    checks.check([0.02, 0.2, 0.2], *benchmark_module.BOUNDS)
    for errors in ([0.04], [0.04, 0.2], [0.02, 0.2, 0.5], [0.02, float("nan")]):
        with pytest.raises(checks.WrongError, match=r"^relative errors \["):
            checks.check(errors, *benchmark_module.BOUNDS)


def test_a_training_step_is_timed_beside_plain_jax(tmp_path):
    arguments = ("--size", "tiny", "--ways", "none", "--rounds", "2")
    done = _run("train_gpt", *arguments, "--out", str(tmp_path), devices=2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "train_gpt.json").read_text())["rows"]
    assert [(row["way"], row["contender"]) for row in rows] == [
        ("one GPU", "jax_cudnn"),
        ("one GPU", "plain JAX"),
    ]
    for row in rows:
        assert row["scaling"] == 1
        assert row["collectives"] == {}
        assert row["losses"][-1] < row["losses"][0]
    assert "| one GPU | 8 | plain JAX |" in (tmp_path / "train_gpt.md").read_text()


def test_a_step_is_divided_in_every_way():
    train_gpt = importlib.import_module("benchmarks.sharding.train_gpt")
    one, same, more, *others = train_gpt.ways(train_gpt.SIZES["tiny"])
    assert (one.mesh, one.batch) == ("1x1", 8)
    assert (same.mesh, same.batch) == ("8x1", 8)
    assert (more.mesh, more.batch) == ("8x1", 64)
    assert [each.parallel for each in others] == ["fsdp", "tensor"]


def test_contenders_train_llama_on_one_state_in_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # It compiles more.
    arguments = ("--size", "tiny", "--rounds", "2", "--steps", "4", "--gpus", "4")
    done = _run(
        "llama",
        *arguments,
        "--mesh",
        "fsdp=2,tensor=2",
        "--out",
        str(tmp_path),
        devices=8,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "llama.json").read_text())["rows"]
    names = [row["contender"] for row in rows]
    # Without a GPU none is tuned.
    assert names == [
        "plain JAX",
        "jax_cudnn",
        "jax_cudnn, sums in f32",
        "jax_cudnn, f8",
    ]
    for row, bound in zip(rows, (0, 1e-4, 1e-4, 0.01), strict=True):
        assert row["loss_share"] <= bound
        assert row["losses"][-1] < row["losses"][0]
        assert row["collectives"]["all-gather"] > 0
        # 4 GPUs share 8 rows of 64.
        assert row["tokens_s_gpu"] == pytest.approx(8 * 64 / row["ms"] * 250, rel=0.01)
    page = (tmp_path / "llama.md").read_text()
    assert "| tiny | cpu | fsdp=2,tensor=2 | 2 | dots | jax_cudnn, f8 |" in page
    assert len({line.count("|") for line in page.splitlines() if "|" in line}) == 1


def test_losses_of_llama_that_differ_fail():
    llama = importlib.import_module("benchmarks.sharding.llama")
    assert llama.check([2.0, 1.01], [2.0, 1.0]) == pytest.approx(0.01)
    for losses in ([2.1, 1.0], [2.0, float("nan")]):
        with pytest.raises(RuntimeError, match="are not those of plain JAX"):
            llama.check(losses, [2.0, 1.0])
    # After ten steps rounding may have grown, but the mean of all is as it was.
    late = [*[2.0] * 10, 1.0, 1.2]
    assert llama.check([*late[:10], 1.2, 1.0], late) == pytest.approx(0.2)
    with pytest.raises(RuntimeError, match="are not those of plain JAX"):
        llama.check([*late[:10], 1.4, 1.4], late)
    # A spike that lies a step later.
    spikes = [2.0, 1.2, 1.0], [2.0, 1.0, 1.2]
    assert llama.check(*spikes, f8=True) == pytest.approx(0.2)
    for losses in ([2.1, 1.2, 0.9], [2.0, 1.4, 1.2], [2.0, float("nan"), 1.0]):
        with pytest.raises(RuntimeError, match="are not those of plain JAX"):
            llama.check(losses, spikes[1], f8=True)


def test_time_that_events_cover_is_counted_once():
    llama = importlib.import_module("benchmarks.sharding.llama")
    spans = [(5.0, 2.0), (0.0, 3.0), (1.0, 1.0), (6.0, 4.0)]
    events = [llama.Event("kernel", length, start) for start, length in spans]
    assert llama.covered(events) == 3 + 5
