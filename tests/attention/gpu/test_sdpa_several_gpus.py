# SPDX-License-Identifier: Apache-2.0
"""Tests that attention runs on each of several GPUs, alone and under sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_cudnn
from jax_cudnn import native
from tests.attention.shared.cases import Case, make_operands

pytestmark = pytest.mark.gpu

_CASE = Case(name="several", b=8, s=67, t=131, h=4, k=2, d=72, bias="hst")


@pytest.fixture(autouse=True)
def _needs_two_gpus():
    if len(jax.local_devices()) < 2:
        pytest.skip("one GPU only")


def _loss(query, key, value, bias):
    output = jax_cudnn.sdpa(query, key, value, bias, implementation="cudnn")
    return jnp.sum(output.astype(jnp.float32) ** 2), output


_GRADIENT = jax.value_and_grad(_loss, argnums=(0, 1, 2, 3), has_aux=True)


def _assert_close(got, want):
    """Outputs are bitwise equal; gradients are summed in another order."""
    np.testing.assert_array_equal(got[0][1], want[0][1])
    for x, y in zip(got[1], want[1], strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2 * np.abs(y).max())


def test_one_program_runs_on_every_gpu():
    operands = make_operands(_CASE).arrays[:4]
    results = [
        jax.jit(_GRADIENT)(*jax.device_put(operands, device))
        for device in jax.local_devices()
    ]
    for device, result in zip(jax.local_devices(), results, strict=True):
        assert result[0][1].devices() == {device}
        _assert_close(result, results[0])


def test_shard_map_over_the_batch_equals_one_gpu():
    operands = make_operands(_CASE).arrays[:4]
    mesh = jax.make_mesh(
        (len(jax.local_devices()),), ("batch",), axis_types=(AxisType.Auto,)
    )
    batch, shared = PartitionSpec("batch"), PartitionSpec()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(batch, batch, batch, shared),
        out_specs=batch,
    )
    def attention(query, key, value, bias):
        return jax_cudnn.sdpa(query, key, value, bias, implementation="cudnn")

    def loss(*operands):
        output = attention(*operands)
        return jnp.sum(output.astype(jnp.float32) ** 2), output

    gradient = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    specs = (batch, batch, batch, shared)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]
    sharded = jax.jit(gradient)(*placed)
    assert len(sharded[0][1].sharding.device_set) == len(jax.local_devices())
    _assert_close(sharded, jax.jit(_GRADIENT)(*operands))


def test_automatic_sharding_gives_the_right_result():
    operands = make_operands(_CASE).arrays[:4]
    mesh = jax.make_mesh(
        (len(jax.local_devices()),), ("batch",), axis_types=(AxisType.Auto,)
    )
    batch = NamedSharding(mesh, PartitionSpec("batch"))
    placed = [*jax.device_put(operands[:3], batch), operands[3]]
    _assert_close(jax.jit(_GRADIENT)(*placed), jax.jit(_GRADIENT)(*operands))


def test_each_gpu_gets_its_plan_once():
    operands = make_operands(Case(name="plans", s=53, t=59, d=104)).arrays[:3]
    run = jax.jit(lambda *x: jax_cudnn.sdpa(*x, implementation="cudnn"))
    before = native.cache_stats().builds
    for _ in range(3):
        for device in jax.local_devices():
            jax.block_until_ready(run(*jax.device_put(operands, device)))
    assert native.cache_stats().builds == before + len(jax.local_devices())
