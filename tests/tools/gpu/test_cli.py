# SPDX-License-Identifier: Apache-2.0
"""Tests `jax-cudnn doctor` and `bench` on a machine with a GPU."""

import json

import jax
import pytest

from jax_cudnn import native, plans
from jax_cudnn.cli import main

pytestmark = pytest.mark.gpu


def test_doctor_finds_this_gpu_usable(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = plans.doctor()
    assert diagnosis.is_usable, str(diagnosis)
    facts, target = diagnosis.facts, native.device_target(0)
    assert facts.driver is not None
    assert (facts.driver.gpus[0].name, facts.driver.gpus[0].sm_version) == (
        target.name,
        target.sm_version,
    )
    assert facts.driver.gpus[0].memory_bytes > 2**32
    assert facts.driver.cuda_version >= 12000
    assert facts.jax_gpu_count == len(jax.local_devices(backend="cuda"))
    assert facts.cudnn is not None
    assert facts.cudnn.version == target.cudnn_version
    assert "libcudnn_graph" in facts.cudnn.sublibraries
    assert facts.cudnn_files[0].path == facts.cudnn.path
    assert any(name.startswith("libcublasLt") for name, _ in facts.companions)
    assert set(facts.jax_cuda_majors) <= {facts.cudnn.cuda_major}
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == f"{diagnosis}\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            "matmul --args bf16[512,128] bf16[128,256] bias=bf16[256] activation=gelu",
            ["matmul"],
        ),
        (
            "sdpa --args bf16[2,256,3,64] bf16[2,256,3,64] bf16[2,256,3,64] "
            "is_causal=True --gradient",
            ["sdpa", "sdpa_backward"],
        ),
        (
            "conv --args bf16[4,16,16,32] bf16[3,3,32,64] window_strides=1,1 "
            "padding=SAME dimension_numbers=('NHWC','HWIO','NHWC')",
            ["conv_fprop"],
        ),
    ],
)
def test_bench_times_cudnn_and_xla(
    arguments: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *f"jax_cudnn:{arguments}".split(), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [part["op"].split("+")[0] for part in data["parts"]] == parts
    for part in data["parts"]:
        assert part["xla_us"] > 0
        assert part["cudnn_us"] > 0
        times = [
            each["kernel_us"]["median_us"]
            for each in part["candidates"]
            if each["kernel_us"] is not None
        ]
        assert times
        assert min(times) > 0
        for each in part["candidates"]:
            assert (each["kernel_us"] is None) == bool(each["failure"])


def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    operands = ("bf16[512,128]", "bf16[128,256]")
    assert main(["bench", "jax_cudnn:matmul", "--args", *operands]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        f"On {native.device_target(0).name}, medians:\nmatmul  bf16["
    )
    assert "cuDNN's first plan, its kernels only" in told
    assert told.count("(best)") == 1
