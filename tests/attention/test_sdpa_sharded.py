# SPDX-License-Identifier: Apache-2.0
"""Tests that each feature of attention gives the same on several devices.

Results and gradients of sharded operands are compared with those of one device: as XLA
divides them, with shardings in types, in a loop with remat, exported, and under vmap.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_cudnn
from jax_cudnn import f8, masks, score_mods
from tests.attention.shared.ways import WAYS, run
from tests.common.devices import mesh_of

pytestmark = [pytest.mark.once, pytest.mark.sampled]

B, H, K, S, T, D = 4, 4, 2, 6, 10, 8
_LENGTHS = jnp.array([10, 0, 7, 3], jnp.int32)
_PAGES = jnp.arange(B * 3, dtype=jnp.int32).reshape(B, 3)
_KEY = jax.random.key(2)
_BATCH, _HEADS = "x", "y"
_TOKENS = (_BATCH, None, _HEADS, None)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A function of operands by name, with their shapes and shardings.

    The first ones are query, key and value. Others get gradients as well.
    """

    function: Callable[..., jax.Array]
    more: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = ()
    has_pages: bool = False

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the operands."""
        keys = (B * 3, 4, K, D) if self.has_pages else (B, T, K, D)
        return [(B, S, H, D), keys, keys, *(shape for shape, _ in self.more)]

    @property
    def specs(self) -> list[tuple[Any, ...]]:
        """How the operands are sharded. All devices have all pages."""
        keys = (None, None, _HEADS, None) if self.has_pages else _TOKENS
        return [_TOKENS, keys, keys, *(spec for _, spec in self.more)]


def _score_mod(q: Any, k: Any, v: Any, slopes: Any, table: Any) -> jax.Array:
    mod = score_mods.compose(
        score_mods.alibi(slopes),
        score_mods.softcap(2.0),
        lambda score, b, h, i, j: score * table[b, j],
    )
    return jax_cudnn.sdpa(q, k, v, score_mod=mod, is_causal=True)


def _dropout(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    return jax_cudnn.sdpa(
        q, k, v, sinks=sinks, dropout_rate=0.25, dropout_key=_KEY, is_causal=True
    )


def _packed(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    mask = masks.Packed(jnp.array([0, 2, 2, 6]), jnp.array([0, 5, 7, 10]))
    return jax_cudnn.sdpa(
        q, k, v, mask=mask & masks.Causal("bottom-right"), sinks=sinks
    )


def _segments(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> jax.Array:
    rows = jnp.arange(B * S).reshape(B, S) // 5
    columns = jnp.arange(B * T).reshape(B, T) // 9
    mask = masks.Segments(rows, columns) & masks.Prefix(jnp.array([4, 1, 0, 2]))
    return jax_cudnn.sdpa(q, k, v, bias, mask, sinks=sinks)


def _cached(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    return jax_cudnn.cached_sdpa(q, k, v, _LENGTHS, sinks=sinks)


def _paged(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    return jax_cudnn.paged_sdpa(q, k, v, _PAGES, _LENGTHS, sinks=sinks)


def _quantized(q: Any, k: Any, v: Any) -> jax.Array:
    given = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return f8.quantized_sdpa(*given, is_causal=True, local_window_size=(4, 0))


def _all_in_one(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> jax.Array:
    return jax_cudnn.sdpa(
        *(q, k, v, bias),
        mask=masks.Packed(jnp.array([0, 2, 6]), jnp.array([0, 5, 9])),
        sinks=sinks,
        dropout_rate=0.25,
        dropout_key=_KEY,
        score_mod=score_mods.softcap(1.5),
    )


_SINKS = ((H,), (_HEADS,))
_BIAS = ((1, H, S, T), (None, _HEADS, None, None))
FEATURES = {
    "score_mod": Feature(function=_score_mod, more=(_SINKS, ((B, T), (_BATCH, None)))),
    "dropout": Feature(function=_dropout, more=(_SINKS,)),
    "packed": Feature(function=_packed, more=(_SINKS,)),
    "segments": Feature(function=_segments, more=(_BIAS, _SINKS)),
    "cached": Feature(function=_cached, more=(_SINKS,)),
    "paged": Feature(function=_paged, more=(_SINKS,), has_pages=True),
    "quantized": Feature(function=_quantized),
    "all_in_one": Feature(function=_all_in_one, more=(_BIAS, _SINKS)),
}


def _operands(feature: Feature) -> list[jax.Array]:
    rng = np.random.default_rng(len(feature.shapes))
    return [
        jnp.asarray(np.asarray(rng.standard_normal(x), jnp.float32))
        for x in feature.shapes
    ]


def _placed(feature: Feature, mesh: jax.sharding.Mesh, shift: int = 0) -> Any:
    """Return the operands with shardings; `shift` is how many axes are in front."""
    return [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*[None] * shift, *spec)))
        for x, spec in zip(_operands(feature), feature.specs, strict=True)
    ]


def _assert_same(got: Any, want: Any) -> None:
    # Sums over devices are added up in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(lambda x, y: close(np.asarray(x), np.asarray(y)), got, want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FEATURES)
def test_divided_by_xla(name: str, way: str) -> None:
    feature = FEATURES[name]
    program = jax.jit(functools.partial(WAYS[way], feature.function))
    want = program(*_operands(feature))
    _assert_same(program(*_placed(feature, mesh_of(x=4, y=2))), want)


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FEATURES)
def test_query_heads_on_more_devices_than_key_heads(
    name: str, way: str, key_heads: int
) -> None:
    """Each device takes the key heads of its own queries, and sums their gradients."""
    feature = FEATURES[name]
    operands = _operands(feature)
    operands[1:3] = [x[:, :, :key_heads] for x in operands[1:3]]
    mesh = mesh_of(x=2, y=4)
    specs = [*feature.specs]
    specs[1:3] = [(*spec[:2], None, None) for spec in specs[1:3]]
    placed = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in zip(operands, specs, strict=True)
    ]
    program = jax.jit(functools.partial(WAYS[way], feature.function))
    got, want = program(*placed), program(*operands)
    if name == "quantized":
        # Four devices each round their share of a gradient to bf16, by 2^-9 of it.
        for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            atol = 4 * 2.0**-9 * float(jnp.abs(y).max())
            np.testing.assert_allclose(x, y, rtol=0, atol=atol)
    else:
        _assert_same(got, want)
    forward = jax.jit(feature.function).lower(*placed).compile()
    # Nothing as large as a device's part of the queries is gathered.
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", forward.as_text())
    sizes = [math.prod(map(int, filter(None, x.split(",")))) for x in gathered]
    assert max(sizes, default=0) < operands[0].size // 8
    assert forward.output_shardings.is_equivalent_to(placed[0].sharding, 4)


_GROUPED = {
    "bshd": lambda q, k, v: jax_cudnn.sdpa(q, k, v, is_causal=True),
    "bhsd": lambda q, k, v: jax_cudnn.sdpa(
        q, k, v, jnp.cos(jnp.arange(8.0))[None, :, None, None], layout="bhsd"
    ),
    "sbhd": lambda q, k, v: jax_cudnn.sdpa(q, k, v, local_window_size=2, layout="sbhd"),
    "cached": lambda q, k, v: jax_cudnn.cached_sdpa(q[:, :2], k, v, jnp.array([5, 7])),
}


@pytest.mark.parametrize("name", _GROUPED)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "sizes", [{"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 2}], ids=str
)
def test_query_heads_in_types_on_more_devices_than_key_heads(
    name: str, key_heads: int, sizes: dict[str, int]
) -> None:
    function, layout = _GROUPED[name], name if name != "cached" else "bshd"
    rng = np.random.default_rng(key_heads)
    shapes = [{"b": 2, "s": 7, "h": h, "d": 8} for h in (8, key_heads, key_heads)]
    operands = [
        jnp.asarray(
            np.asarray(rng.standard_normal([x[axis] for axis in layout]), jnp.float32)
        )
        for x in shapes
    ]
    mesh = mesh_of(AxisType.Explicit, **sizes)
    heads = PartitionSpec(*(tuple(sizes) if x == "h" else None for x in layout))
    specs = (heads, PartitionSpec(), PartitionSpec())
    program = jax.jit(functools.partial(run, function))
    want = program(*operands)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, spec) for x, spec in zip(operands, specs, strict=True)
        ]
        _assert_same(program(*placed), want)
        forward = jax.jit(function).lower(*placed).compile().as_text()
        output = jax.typeof(jax.jit(function)(*placed)).sharding.spec
    if name != "cached" or key_heads in (1, sizes["x"]):
        assert "all-gather" not in forward
        assert output == PartitionSpec(*heads, *(None,) * (4 - len(heads)))


def test_key_heads_along_another_axis_than_query_heads() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(np.asarray(rng.standard_normal((2, 6, heads, 8)), jnp.float32))
        for heads in (8, 2, 2)
    )
    want = jax.jit(functools.partial(run, _GROUPED["bshd"]))(q, k, v)
    with jax.set_mesh(mesh_of(AxisType.Explicit, x=2, y=4)):
        placed = [
            jax.device_put(x, PartitionSpec(None, None, axis))
            for x, axis in zip((q, k, v), "yxx", strict=True)
        ]
        got = jax.jit(functools.partial(run, _GROUPED["bshd"]))(*placed)
        # The output is sharded as the query, so that they add up.
        assert (got[0] + placed[0]).shape == q.shape
    _assert_same(got, want)


@pytest.mark.parametrize("name", FEATURES)
def test_with_shardings_in_types(name: str) -> None:
    feature = FEATURES[name]
    program = functools.partial(run, feature.function)
    want = jax.jit(program)(*_operands(feature))
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    with jax.set_mesh(mesh):
        if name == "score_mod" and jax.__version_info__ < (0, 11):
            # Before, JAX took no element of slopes that are divided.
            with pytest.raises(Exception, match="dynamic_slice on sharded dims"):
                jax.jit(program)(*_placed(feature, mesh))
            return
        got = jax.jit(program)(*_placed(feature, mesh))
    _assert_same(got, want)
    for x, spec in zip(got[1], feature.specs, strict=True):
        is_same = x.sharding.is_equivalent_to(
            NamedSharding(mesh, PartitionSpec(*spec)), x.ndim
        )
        assert is_same, (x.sharding, spec)


@pytest.mark.parametrize("name", FEATURES)
def test_exported(name: str) -> None:
    feature = FEATURES[name]
    program = jax.jit(functools.partial(run, feature.function))
    placed = _placed(feature, mesh_of(x=4, y=2))
    checks = jax_cudnn.EXPORT_SAFETY_CHECKS
    exported = jax.export.export(program, disabled_checks=checks)(*placed)
    got = jax.export.deserialize(exported.serialize()).call(*placed)
    _assert_same(got, program(*_operands(feature)))
