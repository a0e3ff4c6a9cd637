# SPDX-License-Identifier: Apache-2.0
"""Ways to transform a call of attention: its results and gradients in each of them.

A call takes arrays of floats, the query first, and returns an array or several.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Call = Callable[..., Any]


def run(call: Call, *operands: jax.Array) -> Any:
    """Return results and the gradients of all operands."""

    def loss(*operands: jax.Array) -> Any:
        results = call(*operands)
        return _sum(results), results

    numbers = tuple(range(len(operands)))
    gradients, results = jax.grad(loss, numbers, has_aux=True)(*operands)
    return results, gradients


def looped(call: Call, *operands: jax.Array) -> Any:
    """Return the same of a loop whose body is computed again for its gradient."""

    def loop(query: jax.Array, *others: jax.Array) -> Any:
        @jax.checkpoint
        def body(query: jax.Array, _: None) -> Any:
            return 0.5 * query, call(query, *others)

        return jax.lax.scan(body, query, None, length=2)[1]

    return run(loop, *operands)


def of_examples(call: Call, *operands: jax.Array) -> Any:
    """Return the same of two examples with a query and a value each."""
    others = {0: -operands[0]}
    if len(operands) > 1:
        others[2] = 2 * operands[2]
    given = [
        jnp.stack([x, others[i]]) if i in others else x for i, x in enumerate(operands)
    ]
    axes = [0 if i in others else None for i in range(len(operands))]
    return jax.vmap(lambda *x: run(call, *x), in_axes=axes)(*given)


WAYS: Mapping[str, Call] = {"plain": run, "loop": looped, "examples": of_examples}


def _sum(results: Any) -> jax.Array:
    """Return a number on which each element of the results has another slope."""
    sums = [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(results)]
    return sum(sums[1:], sums[0])
