# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients: what all examples share is repeated for none of them.

The gradient by a shared operand is one for each example. The gradient by the others
takes the examples as more rows or images. The truth is a loop over the examples.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn.graph import is_anchor
from jax_cudnn.lowering._jax import inner_jaxprs
from jax_cudnn.lowering.primitives import graph_p

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_N = 5


def _conv(x: Any, w: Any, **options: Any) -> jax.Array:
    return jax_cudnn.conv(x, w, padding="SAME", **options)


def _strided(x: Any, w: Any) -> jax.Array:
    return _conv(x, w, window_strides=(2, 1), activation="silu")


def _in_groups(x: Any, w: Any) -> jax.Array:
    return _conv(x, w, feature_group_count=2)


def _gated(x: Any, w: Any) -> jax.Array:
    return jax_cudnn.gated_matmul(x, w, w[::-1], activation="silu")


# With the shapes of what has examples, and of what all share.
CALLS: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
    _conv: ((2, 6, 7, 9), (4, 6, 3, 3)),
    _strided: ((1, 4, 8, 6), (6, 4, 3, 2)),
    _in_groups: ((2, 4, 5, 6), (6, 2, 3, 3)),
    jax_cudnn.matmul: ((3, 4), (4, 6)),
    _gated: ((3, 4), (4, 6)),
}
_EACH = pytest.mark.parametrize("function", CALLS)


def _gradients(function: Any, x: Any, w: Any) -> Any:
    def loss(x: Any, w: Any) -> jax.Array:
        # Neither operand is the program's own, so both gradients are asked for.
        return jnp.sum(jnp.sin(function(jnp.tanh(x), jnp.tanh(w))))

    return jax.value_and_grad(loss, (0, 1))(x, w)


def _operands(function: Any, batched: tuple[bool, bool]) -> list[jax.Array]:
    rng = np.random.default_rng(3)
    return [
        jnp.asarray(
            np.asarray(
                rng.standard_normal((_N, *shape) if is_in else shape), jnp.float32
            )
        )
        for shape, is_in in zip(CALLS[function], batched, strict=True)
    ]


@_EACH
@pytest.mark.parametrize("batched", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("implementation", ["auto", "cudnn"])
def test_gradients_are_those_of_a_loop(
    function: Any, batched: tuple[bool, bool], implementation: Any
) -> None:
    operands = _operands(function, batched)
    axes = tuple(0 if is_in else None for is_in in batched)

    def one(x: Any, w: Any) -> Any:
        with jax_cudnn.plans.using(implementation=implementation):
            return _gradients(function, x, w)

    got = jax.jit(jax.vmap(one, axes))(*operands)
    for i in range(_N):
        own = [x[i] if a == 0 else x for x, a in zip(operands, axes, strict=True)]
        for x, y in zip(*map(jax.tree.leaves, (got, one(*own))), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-5)


def _kernels(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        if eqn.primitive is graph_p and any(map(is_anchor, eqn.params["graph"].nodes)):
            yield eqn.params["graph"]
        for each in inner_jaxprs(eqn.params):
            yield from _kernels(each)


@_EACH
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_shared_is_not_repeated(function: Any, depth: int) -> None:
    x, w = _operands(function, (False, False))
    examples = jnp.broadcast_to(x, (*(_N,) * depth, *x.shape))
    every = lambda x, w: _gradients(function, x, w)  # noqa: E731
    for _ in range(depth):
        every = jax.vmap(every, (0, None))
    graphs = [*_kernels(jax.make_jaxpr(every)(examples, w).jaxpr)]
    shared = [
        g for g in graphs if w.size in (math.prod(t.dims) for t in g.input_tensors)
    ]
    # The products themselves, and the gradient of each by x. Beside these, there is the
    # gradient of each by w.
    products = 2 if function is _gated else 1
    assert len(shared) == 2 * products
    assert len(graphs) == 3 * products
