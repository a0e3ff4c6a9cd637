# SPDX-License-Identifier: Apache-2.0
"""Tests that what a program sends is counted, in loops as often as these run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.traffic import traffic
from tests.common.devices import mesh_of

pytestmark = pytest.mark.once


def _sent(function: Any) -> Any:
    mesh = mesh_of(d=4)
    shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    sharded = shard(function, in_specs=P("d"), out_specs=P("d"))
    x = jax.ShapeDtypeStruct(
        (48, 16), jnp.float32, sharding=NamedSharding(mesh, P("d"))
    )
    text = jax.jit(sharded).lower(x).compile().as_text()
    return {sent.kind: (sent.count, sent.received) for sent in traffic(text)}


_SHARE = 12 * 16 * 4  # bytes


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: jax.lax.all_gather(x, "d")[0], {"all-gather": (1, 3 * _SHARE)}),
        (lambda x: jax.lax.psum(x, "d"), {"all-reduce": (1, 1.5 * _SHARE)}),
        (
            lambda x: jax.lax.psum_scatter(x, "d", tiled=True),
            {"reduce-scatter": (1, 0.75 * _SHARE)},
        ),
        (
            lambda x: jax.lax.ppermute(x, "d", [(0, 1), (1, 2), (2, 3), (3, 0)]),
            {"collective-permute": (1, _SHARE)},
        ),
        (lambda x: x, {}),
    ],
)
def test_a_collective_s_bytes_are_counted(function: Any, wanted: Any) -> None:
    assert _sent(function) == wanted


def test_collectives_of_loops_count_as_often_as_they_run() -> None:
    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(jax.lax.psum(x, "d")), None

    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.scan(inner, x, None, length=3)[0], None

    def loops(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.lax.scan(outer, x, None, length=5)[0], "d")

    assert _sent(loops) == {"all-reduce": (16, 16 * 1.5 * _SHARE)}
