# SPDX-License-Identifier: Apache-2.0
"""Tests that a program lowered for a named GPU runs there, and others next to it."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jax_cudnn
from jax_cudnn import native, offline, plans
from jax_cudnn.lowering import devices
from jax_cudnn.offline import planner, worker
from tests.attention.shared.cases import Case, make_operands

pytestmark = pytest.mark.gpu

_EXAMPLE = Path(__file__).parents[3] / "examples" / "export_for_another_gpu.py"


def _loss(q, k, v):
    out = jax_cudnn.sdpa(q, k, v, is_causal=True, implementation="cudnn")
    return jnp.sum(out.astype(jnp.float32) ** 2)


_GRADIENT = jax.grad(_loss, argnums=(0, 1, 2))


@pytest.fixture(scope="module")
def here():
    """The name of this machine's GPU, where it is among those that can be named."""
    name = native.device_target(0).name
    try:
        return offline.find(name).name
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def operands():
    return make_operands(Case(name="named", s=251, t=509, d=72)).arrays[:3]


def test_the_driver_of_this_machine_is_used_and_no_stand_in():
    assert planner.greeting()["driver"] == worker.DRIVER
    assert planner.greeting()["cudnn_version"] == native.cudnn_version().version


def test_a_description_is_what_the_gpu_says_of_itself(here):
    target = native.device_target(0)
    assert offline.find(here).target(target.cudnn_version) == target


def test_the_plans_are_those_that_the_gpu_itself_gets(here, operands):
    local = plans.inspect(_GRADIENT, *operands)
    with plans.using(device=here):
        named = plans.inspect(_GRADIENT, *operands)
    assert named.device == local.device
    assert [(call.plan, call.workspace_bytes) for call in named.calls] == [
        (call.plan, call.workspace_bytes) for call in local.calls
    ]


def test_a_program_for_this_gpu_by_name_gives_the_same_bits(here, operands):
    expected = jax.jit(lambda *x: jax_cudnn.sdpa(*x, is_causal=True))(*operands)
    with plans.using(device=here):
        found = jax.jit(lambda *x: jax_cudnn.sdpa(*x, is_causal=True))(*operands)
    assert jnp.array_equal(found, expected)


def _exported(operands):
    # A function of its own, so that nothing lowered before is taken again.
    function = jax.jit(lambda *x: jax_cudnn.sdpa(*x, implementation="cudnn"))
    return export.export(function, disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS)(
        *operands
    )


def _target_text(target):
    version = native.version_text(target.cudnn_version)
    return f"sm_{target.sm_version} with cuDNN {version}"


def _expect_refused(exported, operands, lowered_for):
    """The program has its plan and workspace, and does not run."""
    assert f"@{native.TARGET_CAPTURED}(" in exported.mlir_module()
    message = (
        f"the program was lowered for {_target_text(lowered_for)}, and this is "
        f"{_target_text(native.device_target(0))}. Compile it here, or "
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)) as caught:
        jax.block_until_ready(exported.call(*operands))
    assert "FAILED_PRECONDITION" in str(caught.value)


def test_a_program_for_another_gpu_is_refused_here(operands):
    here = native.device_target(0)
    other = offline.find("A100" if here.sm_version != 80 else "H100")
    with plans.using(device=other.name):
        exported = _exported(operands)
    _expect_refused(exported, operands, other.target(here.cudnn_version))


def test_a_program_for_another_cudnn_is_refused_here(operands, monkeypatch):
    """As if the next cuDNN had planned it, with a plan that is here as well."""
    ordinal, here = devices.local_target()
    other = dataclasses.replace(here, cudnn_version=here.cudnn_version + 1)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "local_target", lambda: (ordinal, other))
        exported = _exported(operands)
    _expect_refused(exported, operands, other)


@pytest.mark.parametrize("device", ["A100", "L4", "H100", "B200", "RTX 5090"])
def test_other_gpus_are_planned_for_beside_a_real_driver(device, operands):
    told = plans.explain(_GRADIENT, *operands, device=device)
    assert told.device == offline.find(device).name
    assert [call.implementation for call in told.calls] == ["cudnn"] * 2, str(told)


def test_a_step_exported_on_a_machine_without_gpus_runs_here(here, tmp_path):
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    path = tmp_path / "step.bin"
    # Hidden from JAX and from CUDA, as on a machine that has none.
    blind = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    write = subprocess.run(
        [sys.executable, _EXAMPLE, "--write", path, "--device", here],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **blind},
    )
    assert write.returncode == 0, write.stdout + write.stderr
    run = subprocess.run(
        [sys.executable, _EXAMPLE, "--run", path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" ok") == 5
