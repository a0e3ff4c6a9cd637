# SPDX-License-Identifier: Apache-2.0
"""Tests that new tokens reach a sharded cache without a copy of it being sent."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jax_cudnn import kv_cache
from tests.common import drawn
from tests.common.devices import Spec, collectives, gradient, mesh_of, placed

pytestmark = [pytest.mark.once, pytest.mark.sampled]

B, S, T, K, D = 4, 2, 8, 6, 10
PAGES, PAGE = 12, 4
_LENGTHS, _COUNTS = [0, 5, 7, 9], [2, 0, 1, 2]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An update; operands are the cache, new tokens, the table of pages, lengths."""

    layout: str = "bshd"
    is_paged: bool = False

    @property
    def operands(self) -> list[jax.Array]:
        axes = ["bshd".index(letter) for letter in self.layout]
        sizes = [(PAGES, PAGE, K, D) if self.is_paged else (B, T, K, D), (B, S, K, D)]
        cache, new = (
            drawn.normal(i, tuple(size[axis] for axis in axes))
            for i, size in enumerate(sizes)
        )
        table = [jnp.array([[7, 2], [4, 0], [11, -1], [9, 5]])] if self.is_paged else []
        return [cache, new, *table, jnp.array(_LENGTHS), jnp.array(_COUNTS)]

    def __call__(self, *operands: Any) -> jax.Array:
        if self.is_paged:
            return kv_cache.update_pages(*operands, layout=self.layout)  # type: ignore[arg-type]
        return kv_cache.update(*operands, layout=self.layout)  # type: ignore[arg-type]


_CASES = [Case(layout=layout) for layout in ("bshd", "bhsd", "sbhd")] + [
    Case(layout=layout, is_paged=True) for layout in ("bshd", "bhsd")
]


def _specs(case: Case, seed: int) -> list[Spec]:
    """Draw how each operand is sharded."""
    rng = np.random.default_rng(seed)

    def spec(rank: int) -> Spec:
        axes = ["x", "y", *[None] * rank]
        return tuple(axes[i] for i in rng.permutation(len(axes))[:rank])

    return [spec(x.ndim) for x in case.operands]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("case", _CASES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_any_shardings_give_the_same_cache(
    seed: int, case: Case, kind: AxisType
) -> None:
    specs = _specs(case, seed)
    mesh = mesh_of(kind, x=2, y=2)
    operands = placed(mesh, case.operands, specs)
    want = case(*case.operands)
    for run in (case, jax.jit(case)):
        found = run(*operands)
        np.testing.assert_array_equal(found, want)
        if kind == AxisType.Explicit:
            assert tuple(jax.typeof(found).sharding.spec) == specs[0]
    # One length for all, and no new ones.
    plain = [*operands[:-2], jnp.array(3)]
    want = case(*case.operands[:-2], 3)
    np.testing.assert_array_equal(jax.jit(case)(*plain), want)


@pytest.mark.parametrize("case", _CASES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_gradients_and_batches_of_sharded_caches(seed: int, case: Case) -> None:
    specs = _specs(case, seed)
    mesh = mesh_of(AxisType.Explicit, z=2, x=2, y=2)
    operands = placed(mesh, case.operands, specs)
    numbers = operands[2:]

    def of(numbers: Any) -> Any:
        return lambda cache, new: case(cache, new, *numbers)

    want = gradient(of(case.operands[2:]))(*case.operands[:2])
    found = jax.jit(gradient(of(numbers)))(*operands[:2])
    for x, y, spec in zip(found, want, specs, strict=False):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
        assert tuple(jax.typeof(x).sharding.spec) == spec
    # The examples may be sharded as well.
    for examples in (None, "z"):
        stacked = placed(
            mesh,
            [jnp.stack([x, 2 * x]) for x in case.operands[:2]],
            [(examples, *spec) for spec in specs[:2]],
        )
        found = jax.jit(jax.vmap(of(numbers)))(*stacked)
        want = case(*case.operands)
        np.testing.assert_array_equal(found, jnp.stack([want, 2 * want]))
        assert tuple(jax.typeof(found).sharding.spec) == (examples, *specs[0])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_no_cache_is_sent(case: Case, kind: AxisType) -> None:
    """A donated cache is written in place; at most new tokens are sent."""
    mesh = mesh_of(kind, x=2, y=2)
    for letters in ("b", "s", "h", "d", "bh", "sb"):
        axes = dict(zip(letters, "xy", strict=False))
        spec = tuple(axes.get(letter) for letter in case.layout)
        # The operands lie where the cache does, as they do in a decoding step.
        of_new = tuple(
            axes.get(letter) if letter in "bhd" else None for letter in case.layout
        )
        of_numbers = (axes.get("b"),)
        specs = [spec, of_new, *[of_numbers] * (len(case.operands) - 2)]
        operands = placed(mesh, case.operands, specs)
        text = (
            jax.jit(case, donate_argnums=0).lower(*operands).compile().as_text() or ""
        )
        assert "may-alias" in text or "must-alias" in text
        sent = collectives(case, *operands)
        if not case.is_paged and "s" not in letters:
            assert not sent, (letters, sent)
        local = operands[0].sharding.shard_shape(operands[0].shape)
        shape = ",".join(map(str, local))
        assert not re.findall(rf"= f32\[{shape}\]\S* (?:copy|all-\w+)\(", text)
        assert not re.findall(
            rf"= f32\[{','.join(map(str, operands[0].shape))}\]", text
        )
