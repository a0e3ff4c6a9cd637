# SPDX-License-Identifier: Apache-2.0
"""Tests that GPUs are found by name, and that programs are planned for them."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import (
    GraphError,
    LibraryError,
    UnsupportedError,
    choices,
    native,
    offline,
    plans,
)
from jax_cudnn.lowering import decision, devices, traced_graphs
from jax_cudnn.offline import worker
from tests.plans.planning import CANDIDATE, FAILED, FakeProcess

pytestmark = pytest.mark.once

_ROOT = Path(__file__).parents[2]


# --- names and descriptions -----------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("H200", "NVIDIA H200"),
        ("nvidia h200", "NVIDIA H200"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("geforce-rtx-5090", "NVIDIA GeForce RTX 5090"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("A100 40GB", "NVIDIA A100-SXM4-40GB"),
        ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("h100 pcie", "NVIDIA H100 PCIe"),
        ("T4", "Tesla T4"),
        ("gh200", "NVIDIA GH200 480GB"),
    ],
)
def test_a_gpu_is_found_by_what_people_call_it(said: str, name: str) -> None:
    assert offline.find(said).name == name


@pytest.mark.parametrize("name", ["", "H2000", "nvidia", "200", None, 200])
def test_an_unknown_gpu_is_refused_with_those_that_are_known(name: Any) -> None:
    with pytest.raises(ValueError, match="is not a GPU that jax_cudnn knows") as caught:
        offline.find(name)
    message = str(caught.value)
    assert message.startswith(f"device={name!r} is not")
    assert "T4, A30, " in message
    assert message.endswith("RTX 5090.")


def test_no_two_gpus_share_a_name() -> None:
    names = [name for gpu in offline.known() for name in (gpu.name, *gpu.also)]
    assert all(offline.find(name).name in names for name in names)
    found = {name: offline.find(name).name for name in names}
    for gpu in offline.known():
        assert {found[name] for name in (gpu.name, *gpu.also)} == {gpu.name}
        assert offline.find(gpu.short_name) is gpu


# What cuDNN 9.28 asks a description for (`DeviceProperties::deserialize`).
_KEYS = {
    "maxGridSize",
    "maxBlockSize",
    "regsPerBlock",
    "multiProcessorCount",
    "warpSize",
    "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin",
    "reservedSharedMemoryPerBlock",
    "maxRegistersPerSM",
    "maxCtasPerSM",
    "maxThreadsPerBlock",
    "maxThreadsPerSM",
    "pciDeviceId",
    "isTccDriver",
    "supportCoopLaunch",
    "totalGlobalMem",
    "smClockRateKHz",
    "memClockRateKHz",
    "l2CacheSize",
    "cudaDeviceId",
    "deviceVer",
    "driverVer",
    "deviceName",
    "memoryBusWidth",
    "oversizedSharedMemoryPerBlock",
    "smCountOrigin",
}


@pytest.mark.parametrize("gpu", offline.known(), ids=lambda gpu: gpu.short_name)
def test_a_description_has_every_value_and_its_source(
    gpu: offline.GpuDescription,
) -> None:
    values = json.loads(gpu.properties)
    assert set(values) == _KEYS
    assert (values["deviceName"], values["deviceVer"]) == (
        gpu.name,
        gpu.sm_version * 10,
    )
    assert values["multiProcessorCount"] == gpu.sm_count
    assert gpu.name.startswith(("NVIDIA ", "Tesla "))
    assert gpu.source
    assert values["maxSharedMemoryPerBlockOptin"] % 1024 == 0
    assert 4 << 20 <= values["l2CacheSize"] < 256 << 20
    assert 8 << 30 <= values["totalGlobalMem"] < 512 << 30
    # Published bandwidths lie between 300 GB/s (L4, T4) and 8 TB/s (B200): two edges of
    # the memory clock move one bit of each wire.
    bytes_per_s = values["memoryBusWidth"] / 8 * values["memClockRateKHz"] * 2e3
    assert 2.9e11 < bytes_per_s < 8.4e12


def test_shipped_choices_are_for_gpus_that_can_be_named() -> None:
    names = {key.device for key in choices.table().all()}
    assert names
    assert names <= {gpu.name for gpu in offline.known()}


def test_a_target_has_the_name_that_the_driver_gives() -> None:
    target = offline.find("h200").target(91900)
    assert (target.name, target.sm_version, target.sm_count) == ("NVIDIA H200", 90, 132)
    assert target.cudnn_version == 91900


# --- the stand-in for the driver ------------------------------------------------------


def _generator() -> ModuleType:
    path = _ROOT / "cmake" / "write_no_driver.py"
    spec = importlib.util.spec_from_file_location("write_no_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stand_in_has_both_spellings_and_pretends_to_load() -> None:
    header = (
        "#define cuMemAlloc __CUDA_API_PTDS(cuMemAlloc_v2)\n"
        "CUresult CUDAAPI cuInit(unsigned int Flags);\n"
    )
    source = _generator().source(header)
    assert "int cuInit(void) { return 100; }\n" in source
    assert "int cuMemAlloc(void) { return 100; }\n" in source
    assert "int cuMemAlloc_v2(void) { return 100; }\n" in source
    assert "*library = (void*)1; return 0;" in source


def test_a_missing_stand_in_says_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "extension_directory", lambda: tmp_path / "native")
    folder = tmp_path / "offline"
    with pytest.raises(LibraryError, match=re.escape(f"is not in {folder}. It is")):
        worker.stand_in()
    folder.mkdir()
    (folder / worker.STAND_IN).touch()
    assert worker.stand_in() == folder / worker.STAND_IN


def _no_library(name: str, mode: int) -> None:
    assert name == worker.DRIVER
    raise OSError(f"{name}: no such file")


def test_the_stand_in_is_not_loaded_beside_a_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    fake = SimpleNamespace(
        CDLL=lambda name, mode: opened.append(name),
        RTLD_GLOBAL=worker.ctypes.RTLD_GLOBAL,
    )
    monkeypatch.setattr(worker, "ctypes", fake)
    assert worker.open_driver() == "libcuda.so.1"
    assert opened == ["libcuda.so.1"]
    fake.CDLL = _no_library
    monkeypatch.setattr(worker, "_DRIVER_FILES", (str(tmp_path),))
    with pytest.raises(
        LibraryError, match=r"libcuda.so.1 does not open: .*no such file"
    ):
        worker.open_driver()


# --- the planner, with a process that answers as a test says --------------------------


def test_the_first_candidate_that_builds_is_the_plan(fake: FakeProcess) -> None:
    gpu = offline.named_gpu("h200")
    plan = gpu.plan("{}")
    assert (plan.name, plan.workspace_bytes, plan.knobs) == (
        "eng2",
        4321,
        (("STAGES", 3),),
    )
    assert plan.failures == ("eng7: no kernel",)
    assert hash(plan)
    assert gpu == offline.named_gpu("NVIDIA H200")
    assert hash(gpu) == hash(offline.named_gpu("NVIDIA H200"))
    assert gpu.plan("{}") == plan
    (question,) = fake.asked
    assert question["build"] is True
    assert question["target"] == {
        "name": "NVIDIA H200",
        "sm_version": 90,
        "sm_count": 132,
        "cudnn_version": 91900,
    }
    names = [each.name for each in gpu.candidates("{}")]
    assert names == ["eng7", "eng2", "eng8"]
    assert fake.asked[1]["build"] is False


def test_where_none_builds_each_says_why(fake: FakeProcess) -> None:
    fake.answer = lambda _: {"candidates": [FAILED, {**FAILED, "name": "eng9"}]}
    with pytest.raises(UnsupportedError, match="no plan that builds") as caught:
        offline.named_gpu("h200").plan("{}", "pin")
    assert caught.value.reasons == ("eng7: no kernel", "eng9: no kernel")
    assert "on NVIDIA H200 with the request pin." in caught.value.summary


def test_a_driver_that_refuses_kernels_of_another_gpu_is_no_refusal_by_cudnn(
    fake: FakeProcess,
) -> None:
    words = "cuLibraryGetKernel returned error no kernel image is available for "
    failed = {**FAILED, "failure": f"{words}execution on the device (209)"}
    fake.answer = lambda _: {"candidates": [FAILED, failed]}
    message = (
        r"does not load kernels for NVIDIA H200 \(sm_90\).*without NVIDIA's driver"
    )
    with pytest.raises(LibraryError, match=message):
        offline.named_gpu("h200").plan("{}")


def test_what_is_raised_there_is_raised_here(fake: FakeProcess) -> None:
    gpu = offline.named_gpu("h200")
    refused = {"summary": "No plan.", "reasons": ["a", "b"], "advice": "Pad."}
    answers: dict[type[Exception], dict[str, Any]] = {
        GraphError: {"error": "GraphError", "message": "choice: not JSON"},
        LibraryError: {"error": "LibraryError", "message": "libnvrtc is gone"},
        RuntimeError: {"error": "KeyError", "message": "'graph'"},
        UnsupportedError: {"error": "UnsupportedError", "message": "", **refused},
    }
    for kind, answer in answers.items():
        fake.answer = lambda _, answer=answer: answer
        with pytest.raises(kind) as caught:
            gpu.plan(kind.__name__)
        assert answer["message"] in str(caught.value)
    assert isinstance(caught.value, UnsupportedError)
    assert caught.value.reasons == ("a", "b")
    assert str(caught.value) == "No plan.\n  - a\n  - b\nPad."


def test_a_crash_is_not_remembered(fake: FakeProcess) -> None:
    gpu = offline.named_gpu("h200")
    fake.answer = lambda _: {"crash": "SIGKILL", "message": ""}
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="crashed"):
            gpu.candidates("{}")
    assert len(fake.asked) == 2


def test_a_crash_of_cudnn_is_a_refusal(fake: FakeProcess) -> None:
    fake.answer = lambda _: {"crash": "SIGSEGV", "message": "core dumped"}
    with pytest.raises(UnsupportedError, match="cuDNN crashed on this graph") as caught:
        offline.named_gpu("h200").plan("{}")
    assert caught.value.reasons == ("cuDNN crashed while it planned: SIGSEGV",)


def test_missing_libraries_name_what_to_install(fake: FakeProcess) -> None:
    fake.missing = "Cannot open libcudnn.so.9."
    assert offline.obstacle() is not None
    with pytest.raises(
        LibraryError,
        match=r"pip install \"\.\[gpuless\]\" \(in jax_cudnn's source folder\)",
    ) as caught:
        offline.named_gpu("h200")
    assert str(caught.value).startswith("Cannot open libcudnn.so.9.\n")
    fake.missing = ""
    assert offline.obstacle() is None
    assert offline.named_gpu("h200").target.name == "NVIDIA H200"


# --- lowering for a GPU by its name ---------------------------------------------------

_X = jax.ShapeDtypeStruct((24, 16), jnp.bfloat16)


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax_cudnn.matmul(x, w, activation="relu")


_W = jax.ShapeDtypeStruct((16, 40), jnp.bfloat16)


def _text(platform: str = "cuda") -> str:
    traced = jax.jit(lambda *xs: _matmul(*xs)).trace(_X, _W)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_a_program_for_a_named_gpu_pins_its_plan_with_its_workspace(
    fake: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plans.using(device="h200"):
        text = _text()
    assert "@jax_cudnn.graph(" in text
    assert "tensor<4321xui8>" in text
    pin = CANDIDATE["request"].replace('"', r"\22")
    assert f'request = "{pin}"' in text
    (question,) = fake.asked
    assert question["request"] == ""
    # Outside, it is for any GPU, and asks nobody.
    monkeypatch.setattr(devices, "local_target", lambda: None)
    assert "@jax_cudnn.graph_scratch(" in _text()
    assert 'request = ""' in _text()
    assert len(fake.asked) == 1


def test_each_gpu_has_a_program_of_its_own(fake: FakeProcess) -> None:
    def answer(question: dict[str, Any]) -> dict[str, Any]:
        count = question["target"]["sm_count"]
        return {"candidates": [{**CANDIDATE, "workspace_bytes": count}]}

    fake.answer = answer
    function = jax.jit(_matmul)
    for name, count in (("H200", 132), ("A100", 108), ("nvidia h200", 132)):
        with plans.using(device=name):
            lowered = function.trace(_X, _W).lower(lowering_platforms=("cuda",))
        assert f"tensor<{count}xui8>" in lowered.as_text()
    assert len(fake.asked) == 2


def test_other_platforms_do_not_ask(fake: FakeProcess) -> None:
    with plans.using(device="H200", implementation="cudnn"):
        assert "jax_cudnn" not in _text("cpu")
        cpu = jax.devices("cpu")[0]
        x, w = (jax.device_put(jnp.ones(s.shape, s.dtype), cpu) for s in (_X, _W))
        assert jax.jit(_matmul)(x, w).shape == (24, 40)
    assert not fake.asked


def test_who_names_a_gpu_is_told_what_is_missing(fake: FakeProcess) -> None:
    fake.missing = "Cannot open libcudnn.so.9."
    with plans.using(device="H200"), pytest.raises(LibraryError, match="gpuless"):
        _text()
    with pytest.raises(ValueError, match="device='H2000' is not a GPU"):
        plans.using(device="H2000")


def test_choices_of_the_named_gpu_apply(fake: FakeProcess) -> None:
    with plans.using(device="H200"):
        (graph, options, _), *_ = traced_graphs(_matmul, _X, _W)
    target = offline.find("H200").target(91900)
    key = choices.key_of(graph, target)
    measured = choices.Choice(
        op="", operands="", implementation="cudnn", plan="the pin of a race"
    )
    choices.table().add({key: measured})
    assert decision.decide(graph, options).steps[0].why == "tuned"
    assert fake.asked[-1]["request"] == "the pin of a race"
    slow = choices.Choice(op="", operands="", implementation="xla", cudnn_us=9.5)
    choices.table().add({key: slow})
    assert not decision.decide(graph, options).steps


def test_inspect_answers_for_the_named_gpu(fake: FakeProcess) -> None:
    with plans.using(device="H200"):
        report = plans.inspect(_matmul, _X, _W)
    assert report.device == "NVIDIA H200"
    (call,) = report.calls
    assert (call.implementation, call.plan) == ("cudnn", "eng2")
    assert call.workspace_bytes == 4321
    assert len(fake.asked) == 1
