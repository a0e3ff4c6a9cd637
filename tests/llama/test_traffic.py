# SPDX-License-Identifier: Apache-2.0
"""Tests that what a program sends is counted, in loops as often as these run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.xla.traffic import traffic
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


@pytest.mark.parametrize(
    ("sizes", "axis", "received"),
    [({"d": 2, "e": 4}, "e", 3), ({"d": 4, "e": 2}, "d", 3), ({"d": 8}, "d", 7)],
)
def test_groups_are_those_of_the_mesh(
    sizes: dict[str, int], axis: str, received: int
) -> None:
    mesh = mesh_of(**sizes)
    x = jax.ShapeDtypeStruct(
        (64, 24), jnp.float32, sharding=NamedSharding(mesh, P(axis))
    )

    def gathered(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P()))

    text = jax.jit(gathered).lower(x).compile().as_text()
    (found,) = traffic(text)
    share = 64 * 24 * 4 / sizes[axis]
    assert (found.kind, found.dtype) == ("all-gather", "f32")
    assert found.received == received * share


@pytest.mark.parametrize(
    ("groups", "count"),
    [
        ("{{0,1,2},{3,4,5}}", 3),
        ("[2,4]<=[8]", 4),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("{}", 8),
        ("mesh['x'=2,'y'=4] {'y'}", 4),
        ("mesh['x'=2,'y'=4] {'x','y'}", 8),
        ("mesh['x'=8] {'x':(2)4}", 4),
        ("mesh['x'=4,'y'=1], device_ids=([2,4]T(1,0)) {'x'}", 4),
    ],
)
def test_every_form_of_groups_is_read(groups: str, count: int) -> None:
    text = f"""HloModule m, num_partitions=8

ENTRY %main (p: f32[6]) -> f32[6] {{
  %p = f32[6]{{0}} parameter(0)
  ROOT %r = f32[6]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%a
}}
"""
    (found,) = traffic(text)
    assert found.received == pytest.approx(2 * (count - 1) / count * 24)


def test_an_unknown_form_of_groups_is_refused() -> None:
    text = """HloModule m, num_partitions=8

ENTRY %main (p: f32[6]) -> f32[6] {
  %p = f32[6]{0} parameter(0)
  ROOT %r = f32[6]{0} all-reduce(%p), channel_id=1, groups=?, to_apply=%a
}
"""
    with pytest.raises(ValueError, match="has no replica_groups in a form that is"):
        traffic(text)
