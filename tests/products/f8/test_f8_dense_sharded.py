# SPDX-License-Identifier: Apache-2.0
"""Tests layers in f8 on meshes: amaxes of all devices, weights that are gathered."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_cudnn import f8
from tests.common.devices import collectives, mesh_of, placed
from tests.common.evaluating import with_pullback
from tests.products.shared.f8_dense import by_recipe, close, normal, step


def _trained(recipe: Any, x: Any, w: Any) -> Any:
    def loss(w: Any, state: Any) -> Any:
        return jnp.sin(f8.dense(x, w, recipe=recipe, state=state)).sum()

    state = f8.dense_state(recipe)
    grad, following = jax.grad(loss, (0, 1))(w, state)
    return grad, following


@pytest.mark.sampled
@by_recipe
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "specs", [(("d", None), (None, None)), (("d", None), (None, "t"))]
)
def test_amaxes_are_over_all_devices(recipe: Any, kind: Any, specs: Any) -> None:
    x, w = normal(0, 32, 16) * jnp.linspace(1, 9, 32)[:, None], normal(1, 16, 8)
    mesh = mesh_of(kind, d=4, t=2)
    trained = functools.partial(_trained, recipe)
    with jax.set_mesh(mesh):
        found = jax.jit(trained)(*placed(mesh, (x, w), specs))
    wanted = jax.jit(trained)(x, w)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        found,
        wanted,
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_row_order_gathers_nothing(kind: Any) -> None:
    """Programs of several devices ask for it where XLA divides what asks for it."""
    mesh = mesh_of(kind, d=4)
    x, w = placed(mesh, (normal(0, 32, 16), normal(1, 16, 8)), (("d",), ()))

    def in_order(x: Any) -> Any:
        return with_layout_constraint(x, Layout((0, 1))) + 1

    def layer(x: Any, w: Any) -> Any:
        y, back = jax.vjp(lambda x: f8.dense(x, w), x)
        return back(y)[0]

    def count(function: Any) -> int:
        lowered = jax.jit(function).trace(x, w).lower(lowering_platforms=("cuda",))
        return lowered.as_text().count("@LayoutConstraint")

    rows = PartitionSpec("d")
    by_hand = jax.shard_map(
        layer, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows
    )
    with jax.set_mesh(mesh):
        is_divided = not collectives(in_order, x)
        assert count(layer) == (3 if is_divided else 0)
        assert count(by_hand) == 3
    assert is_divided or jax.__version_info__ < (0, 11)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sums_over_devices(kind: Any) -> None:
    """The axis that is summed over is divided, in both modes."""
    x, w = normal(0, 16, 32), normal(1, 32, 8)
    mesh = mesh_of(kind, t=4)

    def layer(x: Any, w: Any) -> Any:
        return f8.dense(x, w)

    def both(x: Any, w: Any) -> Any:
        y, back = jax.vjp(layer, x, w)
        return y, *back(y), jax.jvp(layer, (x, w), (x, w))[1]

    with jax.set_mesh(mesh):
        found = jax.jit(both)(*placed(mesh, (x, w), ((None, "t"), ("t", None))))
    for y, other in zip(found, jax.jit(both)(x, w), strict=True):
        close(y, np.asarray(other, np.float64), ulp=2e-3)


def test_shard_map_adds_states_up() -> None:
    """Each device has amaxes of its own; the sum of their states stands for all."""
    recipe = f8.Delayed()
    x, w, grad = normal(0, 32, 16), normal(1, 16, 8), normal(2, 32, 8)
    _, state = step(f8.dense_state(recipe), x, w, grad, recipe)
    mesh = mesh_of(AxisType.Auto, d=4)

    def layer(x: Any, w: Any, state: Any) -> Any:
        return f8.dense(x, w, recipe=recipe, state=state)

    split, whole = PartitionSpec("d"), PartitionSpec()
    shared = jax.shard_map(
        layer, mesh=mesh, in_specs=(split, whole, whole), out_specs=split
    )
    found = jax.jit(lambda *given: jax.vjp(shared, *given)[1](grad))(x, w, state)
    _, wanted = with_pullback(layer, (x, w, state), grad)
    for y, other in zip(found[:2], wanted[:2], strict=True):
        close(y, np.asarray(other, np.float64), ulp=1e-5)
    assert float(found[2].x[-1]) == 4
    np.testing.assert_allclose(found[2].x[1:-1] / 4, wanted[2].x[1:-1], rtol=1e-6)


def test_weights_are_gathered_on_an_explicit_mesh() -> None:
    mesh = mesh_of(AxisType.Explicit, d=8)
    x, w = normal(0, 64, 128), normal(1, 128, 256)

    def gradients(x: Any, w: Any, where: Any = None) -> Any:
        y, back = jax.vjp(lambda x, w: f8.dense(x, w, w_sharding=where), x, w)
        return y, *back(y)

    with jax.set_mesh(mesh):
        divided = placed(mesh, (x, w), (("d", None), ("d", None)))
        whole = PartitionSpec(None, None)
        found = jax.jit(lambda x, w: gradients(x, w, whole))(*divided)
    for y, other in zip(found, jax.jit(gradients)(x, w), strict=True):
        close(y, np.asarray(other, np.float64), ulp=2e-3)


def test_weights_are_gathered_in_f8() -> None:
    """FSDP: what travels between devices is the copy. XLA's CPU holds f8 in f16."""
    mesh = mesh_of(AxisType.Auto, d=8)
    x, w = normal(0, 64, 128).astype("bfloat16"), normal(1, 128, 256)
    given = placed(mesh, (x, w), (("d", None), ("d", None)))
    whole = NamedSharding(mesh, PartitionSpec())

    def loss(x: Any, w: Any) -> Any:
        y = f8.dense(x, w, w_sharding=whole)
        return jnp.sin(y.astype(jnp.float32)).sum()

    for run in (loss, jax.grad(loss, (0, 1))):
        text = jax.jit(run).lower(*given).compile().as_text()
        assert text is not None
        gathered = re.findall(r"= (\w+)\[128,256\]\S* all-gather\(", text)
        assert gathered
        assert set(gathered) <= {"u8", "f8e4m3fn", "f16"}


def test_weights_of_a_gated_mlp_are_gathered_in_f8() -> None:
    mesh = mesh_of(AxisType.Auto, d=8)
    x = normal(0, 64, 128).astype("bfloat16")
    weights = normal(1, 128, 256), normal(2, 128, 256), normal(3, 256, 64)
    given = placed(mesh, (x, *weights), (("d", None),) * 4)
    whole = NamedSharding(mesh, PartitionSpec())

    def loss(where: Any, *given: Any) -> Any:
        y = f8.gated_mlp(*given, up_sharding=where, down_sharding=where)
        return jnp.sin(y.astype(jnp.float32)).sum()

    run = jax.jit(jax.value_and_grad(functools.partial(loss, whole), (0, 1, 2, 3)))
    alone = jax.value_and_grad(functools.partial(loss, None), (0, 1, 2, 3))
    found, wanted = run(*given), jax.jit(alone)(x, *weights)
    for y, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(y, np.asarray(other, np.float64), ulp=8e-3)
    text = run.lower(*given).compile().as_text()
    assert text is not None
    for shape in ("128,256", "256,64"):
        gathered = re.findall(rf"= (\w+)\[{shape}\]\S* all-gather\(", text)
        assert gathered
        assert set(gathered) <= {"u8", "f8e4m3fn", "f16"}
