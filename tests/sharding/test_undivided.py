# SPDX-License-Identifier: Apache-2.0
"""Tests of what devices send for derivatives that are XLA's own convolutions."""

import functools
import warnings
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jax_cudnn
from tests.common.devices import collectives, mesh_of, placed
from tests.sharding.cases import assert_equal, check_same, draw

pytestmark = pytest.mark.sampled


def _conv(x: jax.Array, w: jax.Array, groups: int = 1) -> jax.Array:
    return jax_cudnn.conv(
        x,
        w,
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        activation="silu",
    )


def _forward(x: jax.Array, w: jax.Array, *, groups: int = 1) -> Any:
    return jax.jvp(functools.partial(_conv, groups=groups), (x, w), (x + 1, w))


def test_forward_mode_keeps_images_divided() -> None:
    operands = draw(8, 6, 5, 4), draw(3, 3, 4, 10)
    sharded = placed(mesh_of(x=8), operands, [("x",), ()])
    check_same(_forward, sharded, operands)
    assert collectives(_forward, *sharded) == {}
    found = jax.jit(_forward)(*sharded)
    assert [x.sharding.spec for x in found] == [P("x")] * 2


@pytest.mark.parametrize("groups", [1, 2])
def test_examples_of_derivatives_are_gathered(groups: int) -> None:
    operands = draw(4, 8, 6, 5, 4), draw(3, 3, 4 // groups, 10)

    def run(x: jax.Array, w: jax.Array) -> Any:
        forward = functools.partial(_forward, groups=groups)
        return jax.vmap(forward, in_axes=(0, None))(x, w)

    for spec in (("x",), (None, "x"), ("y", "x")):
        sharded = placed(mesh_of(x=4, y=2), operands, [spec, ()])
        check_same(run, sharded, operands)


def test_the_older_partitioner_gives_the_same() -> None:
    operands = draw(8, 6, 5, 4), draw(3, 3, 2, 10)
    run = functools.partial(_forward, groups=2)
    sharded = placed(mesh_of(x=4, y=2), operands, [("x", None, None, "y"), ()])
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            check_same(run, sharded, operands)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_exported_derivatives_are_divided_where_they_are_loaded() -> None:
    operands = draw(8, 6, 5, 4), draw(3, 3, 4, 10)
    sharded = placed(mesh_of(x=8), operands, [("x",), ()])
    exported = jax.export.export(
        jax.jit(_forward), disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS
    )(*sharded)
    loaded = jax.export.deserialize(exported.serialize())
    assert_equal(jax.jit(loaded.call)(*sharded), _forward(*operands))
