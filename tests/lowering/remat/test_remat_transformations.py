# SPDX-License-Identifier: Apache-2.0
"""Tests `jax.checkpoint` of calls under JAX's transformations and on devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_cudnn
from jax_cudnn import checkpoint_policies as policies
from tests.attention.shared.small import count_kinds
from tests.common.devices import mesh_of, placed
from tests.lowering.derivatives.drawing import Random
from tests.lowering.derivatives.drawn_calls import OPERATIONS, draw_call
from tests.lowering.remat.saving import (
    Function,
    assert_close,
    draw_arrays,
    gradient_of,
    products_in,
    saved_sizes,
    sines_of,
)

pytestmark = pytest.mark.sampled


def _block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    y = jax_cudnn.matmul(jnp.tanh(x), w, activation="gelu")
    return x + jax_cudnn.matmul(y, v)


def _plain_block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(jnp.tanh(x) @ w) @ v


_WEIGHTS = ((16, 40), (40, 16))

_SAVING = {
    "dots": policies.dots_saveable,
    "elsewhere": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@pytest.mark.parametrize("policy", _SAVING.values(), ids=_SAVING)
def test_a_scan_over_layers_saves_a_result_a_layer(policy: Any) -> None:
    x, w, v = draw_arrays((6, 16), (3, 16, 40), (3, 40, 16))

    def loss(block: Function) -> Function:
        body = jax.checkpoint(block, policy=policy, prevent_cse=False)

        def run(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(
                jnp.sin(lax.scan(lambda x, wv: (body(x, *wv), None), x, (w, v))[0])
            )

        return run

    ours, plain = (loss(block) for block in (_block, _plain_block))
    gradients = [gradient_of(f, 3) for f in (ours, plain)]
    assert_close(*(jax.jit(f)(x, w, v) for f in gradients))
    counts = [products_in(f, x, w, v) for f in gradients]
    assert counts == [6, 6]  # two forward and four backward, in the loops' bodies
    assert saved_sizes(ours, x, w, v) == saved_sizes(plain, x, w, v)


# JAX transposes no copy between memories yet, so these save where they compute.
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x, w, v: jax.vmap(f, (0, None, None))(x, w[0], v),
        lambda f: jax.vmap(f, (0, 0, None)),
        lambda f: lambda *x: jax.jvp(f, x, x)[1],
        lambda f: lambda *x: jax.linearize(f, *x)[1](*x),
        lambda f: lambda *x: jnp.sin(jnp.concat([y.ravel() for y in _slopes(f)(*x)])),
        jax.jit,
        lambda f: jax.checkpoint(f, policy=policies.nothing_saveable),
        lambda f: jax.checkpoint(f, policy=policies.dots_saveable),
    ],
    ids=["vmap", "both", "jvp", "linearize", "grad", "jit", "remat", "saving remat"],
)
def test_derivatives_under_transformations(transform: Any) -> None:
    x, w, v = draw_arrays((5, 6, 16), (5, 16, 40), (40, 16))

    def total(block: Function) -> Function:
        loss = jax.checkpoint(sines_of(block), policy=policies.dots_saveable)
        return lambda *x: jnp.sum(transform(loss)(*x))

    found, want = (jax.jit(gradient_of(total(f), 3)) for f in (_block, _plain_block))
    assert_close(found(x, w, v), want(x, w, v), 1e-4)


def _slopes(loss: Function) -> Function:
    return jax.grad(loss, (0, 1, 2))


def test_tangents_are_saved_as_those_of_plain_jax() -> None:
    x, w = draw_arrays((6, 16), (16, 24))

    def loss(matmul: Function) -> Function:
        def sines(x: jax.Array, w: jax.Array) -> jax.Array:
            tangent = jax.jvp(matmul, (jnp.tanh(x), w), (x, w))[1]
            return jnp.sum(jnp.sin(tangent))

        return jax.checkpoint(sines, policy=policies.dots_saveable)

    ours, plain = loss(jax_cudnn.matmul), loss(jnp.matmul)
    assert saved_sizes(ours, x, w) == saved_sizes(plain, x, w)
    assert_close(gradient_of(ours, 2)(x, w), gradient_of(plain, 2)(x, w))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("policy", _SAVING.values(), ids=_SAVING)
def test_operands_on_several_devices(kind: AxisType, policy: Any) -> None:
    mesh = mesh_of(kind, data=4, model=2)
    operands = draw_arrays((8, 6, 16), *_WEIGHTS)
    specs = [("data",), (None, "model"), ("model",)]
    if kind is AxisType.Explicit:
        specs = [("data",), (None, "model"), ()]
    sharded = placed(mesh, operands, specs)

    def block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        y = jax_cudnn.matmul(jnp.tanh(x), w, activation="gelu")
        if kind is AxisType.Explicit:
            y = jax.sharding.reshard(y, P("data"))
        return x + jax_cudnn.matmul(y, v)

    saving = jax.checkpoint(sines_of(block), policy=policy)
    want = gradient_of(sines_of(_plain_block), 3)(*operands)
    with jax.set_mesh(mesh):
        gradient = gradient_of(saving, 3)
        if policy is policies.dots_saveable:
            # XLA for the CPU divides no program with copies between memories.
            assert_close(jax.jit(gradient)(*sharded), want, 1e-4)
        assert saved_sizes(saving, *sharded) == [8 * 6 * 16, 8 * 6 * 40]
        runs, without = (
            sum(count_kinds(each, *sharded).values())
            for each in (gradient, gradient_of(sines_of(block), 3))
        )
    assert runs == without


@pytest.mark.parametrize("is_outside", [True, False])
@pytest.mark.parametrize("policy", _SAVING.values(), ids=_SAVING)
def test_within_shard_map(policy: Any, is_outside: bool) -> None:
    mesh = mesh_of(data=4)
    operands = draw_arrays((8, 16), *_WEIGHTS)

    def mapped(block: Function) -> Function:
        return jax.shard_map(
            block, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data")
        )

    def saving(function: Function) -> Function:
        return jax.checkpoint(function, policy=policy)

    loss = sines_of(saving(mapped(_block)) if is_outside else mapped(saving(_block)))
    found = jax.jit(gradient_of(loss, 3))(*operands)
    assert_close(found, gradient_of(sines_of(_plain_block), 3)(*operands), 1e-4)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_gradients_do_not_depend_on_the_policy(op: str, activation: Any) -> None:
    with jax.enable_x64(True):
        random = Random(op, str(activation))
        call = draw_call(op, activation, random)
        operands = [random.normal(shape) for shape in call.shapes]

        def loss(*operands: jax.Array) -> jax.Array:
            results = jax.tree.leaves(call.ours(*map(jnp.tanh, operands)))
            return sum((jnp.sum(jnp.sin(x)) for x in results), jnp.zeros(()))

        want = gradient_of(loss, len(operands))(*operands)
        for policy in (policies.dots_saveable, policies.attention_saveable):
            saving = jax.checkpoint(loss, policy=policy)
            found = gradient_of(saving, len(operands))(*operands)
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["dots_saveable", "nothing_saveable"])
def test_without_jit(name: str) -> None:
    x, w = jnp.ones((8, 16)), jnp.ones((16, 32)) / 7

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.sin(jax_cudnn.matmul(x, w, activation="gelu")))

    policy = getattr(jax.checkpoint_policies, name)
    with jax.disable_jit():
        got = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1))(x, w)
    for mine, true in zip(got, jax.grad(loss, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(mine, true, rtol=1e-5, atol=1e-6)
