# SPDX-License-Identifier: Apache-2.0
"""Tests attention over caches and pages whose operands explicit meshes divide."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jax_cudnn import masks, sdpa
from tests.attention.shared.cached import Drawn, Problem, draw
from tests.common.devices import Spec, mesh_of, placed

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# One sequence has more tokens than there is room for.
_PROBLEM = Problem(lengths=(8, 3, 9, 5), s=2, t=8, k=2, g=2, d=8, e=4)
_LETTERS = {
    "query": "bshd",
    "key": "bthd",
    "value": "bthe",
    "lengths": "b",
    "page_table": "bm",
    "query_lengths": "b",
    "sinks": "h",
}
_FREE = ("lengths", "page_table", "query_lengths", "sinks")


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A problem, and how each of its operands is sharded along x and y."""

    drawn: Drawn
    specs: dict[str, Spec]

    @classmethod
    def of(cls, seed: int) -> "_Case":
        """Draw one: query, keys and values agree, and the others as they like."""
        rng = np.random.default_rng(seed)
        page = int(rng.choice([0, 4]))
        problem = replace(
            _PROBLEM,
            page=page,
            window=(None, (3, 1))[rng.integers(2)],
            sinks=bool(rng.integers(2)),
            query_lengths=(None, (2, 1, 2, 0))[rng.integers(2)],
        )
        drawn = draw(problem, poison=False)
        if drawn.page_table is not None:
            # Pages may be divided, too.
            last = [jnp.zeros((1, *x.shape[1:])) for x in (drawn.key, drawn.value)]
            drawn = replace(
                drawn,
                key=jnp.concatenate([drawn.key, last[0]]),
                value=jnp.concatenate([drawn.value, last[1]]),
                page_table=jnp.clip(drawn.page_table, 0, len(drawn.key)),
            )
        along = dict(zip(rng.permutation([*"bhdtep"]), "xy", strict=False))
        specs: dict[str, Spec] = {}
        for name, letters in _LETTERS.items():
            if getattr(drawn, name) is None:
                continue
            if page and name in ("key", "value"):
                letters = f"p{letters[1:]}"
            specs[name] = tuple(along.get(letter) for letter in letters)
            if name in _FREE:
                axes = ["x", "y", None, None]
                places = rng.permutation(4)[: len(letters)]
                specs[name] = tuple(axes[i] for i in places)
        return cls(drawn=drawn, specs=specs)

    def call(self, *operands: Any) -> tuple[jax.Array, jax.Array]:
        given = dict(zip(self.specs, operands, strict=True))
        if "query_lengths" in given:
            given["query_seq_lengths"] = given.pop("query_lengths")
        return self.drawn.call(**given)

    @property
    def operands(self) -> list[jax.Array]:
        return [getattr(self.drawn, name) for name in self.specs]


def _gradients(case: _Case) -> Any:
    def loss(query: Any, key: Any, value: Any, *more: Any) -> jax.Array:
        return jnp.sum(jnp.sin(case.call(query, key, value, *more)[0]))

    return jax.grad(loss, (0, 1, 2))


def _examples(case: _Case) -> Any:
    axes = (0, *[None] * (len(case.specs) - 1))
    return jax.vmap(case.call, in_axes=axes)


@pytest.mark.parametrize("seed", range(24))
def test_shardings_that_agree_give_the_same_numbers(seed: int) -> None:
    case = _Case.of(seed)
    mesh = mesh_of(AxisType.Explicit, x=2, y=2)
    operands, specs = case.operands, [*case.specs.values()]
    shared = placed(mesh, operands, specs)
    for run in (case.call, jax.jit(case.call)):
        for x, y in zip(run(*shared), case.drawn.truth, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    for x, y in zip(
        jax.jit(_gradients(case))(*shared),
        jax.jit(_gradients(case))(*operands),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    stacked = jnp.stack([shared[0], 2 * shared[0]])
    plain = jnp.stack([operands[0], 2 * operands[0]])
    for x, y in zip(
        jax.jit(_examples(case))(stacked, *shared[1:]),
        jax.jit(_examples(case))(plain, *operands[1:]),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [("x", None, "y"), (None, None, ("x", "y"))])
def test_a_mask_at_the_end_of_a_shared_cache(spec: Spec, kind: AxisType) -> None:
    drawn = draw(replace(_PROBLEM, k=4), poison=False)
    mesh = mesh_of(kind, x=2, y=2)
    operands = placed(
        mesh,
        [drawn.query, drawn.key, drawn.value, drawn.lengths],
        [spec, spec, spec, spec[:1]],
    )

    @jax.jit
    def call(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        mask = masks.Causal("cache") & masks.Lengths(key=lengths)
        return sdpa(query, key, value, mask=mask, return_residual=True)

    for x, y in zip(call(*operands), drawn.truth, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
