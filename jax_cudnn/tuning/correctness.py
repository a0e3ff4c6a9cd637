# SPDX-License-Identifier: Apache-2.0
"""Compares the results of a plan with those of the reference.

cuDNN has had engines that build for a graph and compute something else. What is
measured to be fastest is therefore compared before it is chosen.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import Graph, forward_graph, kind_named
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.walks import read_by
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import evaluate

# What rounding may do to a tensor by its norm, in units of eps: a few roundings to the
# dtype, which average out, are less than one. What is wrong is off by tenths.
_UNITS = 8
_MOST = 0.5
# Products of f32 may be TF32's, with the fraction of f16.
_TF32_EPS = float(jnp.finfo(jnp.float16).eps)

_T = TypeVar("_T")


def bound(part: Graph) -> float:
    """Return the relative error that a plan may have: by the coarsest dtype in it.

    8 eps: 0.06 for bf16, 0.008 for f16, for f32 in TF32 and for integers, 0.5 for f8.
    What is only converted is exact: f8 weights beside bf16 do not count.
    """
    converted = read_by(
        node
        for node in part.nodes
        if getattr(node.attributes, "mode", "") == "identity"
    )
    exact = converted.intersection(part.inputs)
    most = max(_eps(jax_dtype(t.dtype)) for t in part.tensors if t.name not in exact)
    return min(_MOST, _UNITS * most)


def _eps(dtype: np.dtype) -> float:
    if not jnp.issubdtype(dtype, jnp.floating):
        return _TF32_EPS
    return max(_TF32_EPS, float(jnp.finfo(dtype).eps))


def reference_results(part: Graph, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return what a part gives for operands, by the reference in full precision."""
    with jax.default_matmul_precision("highest"):
        return list(jax.jit(lambda *xs: evaluate(part, xs))(*operands))


def with_own_results(part: Graph, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return operands with output and log-sum-exp, where read, that they lead to.

    Kernels take these for what they are, and the reference computes them again. With a
    random log-sum-exp, probabilities would reach what f16 does not hold.
    """
    given = dict(zip(part.inputs, operands, strict=True))
    node, forward = part.sole_node(), forward_graph(part)
    if node is not None and forward is not None:
        names = dict(node.inputs)
        read = [given[names[role]] for role in forward.inputs]
        found = reference_results(forward, read)
        results = dict(zip(forward.outputs, found, strict=True))
        given |= {names[role]: x for role, x in results.items() if role in names}
    return [given[name] for name in part.inputs]


def comparable(part: Graph, results: Sequence[_T]) -> list[_T]:
    """Return those results of a part that are more than rounding errors."""
    node = part.sole_node()
    cancelled: set[str] = set()
    if node is not None:
        roles = roles_in(part, node)
        names = dict(node.outputs)
        cancelled = {names[r] for r in kind_named(node.kind).cancelled(roles)}
    pairs = zip(part.outputs, results, strict=True)
    return [result for name, result in pairs if name not in cancelled]


def largest_error(found: Sequence[Any], expected: Sequence[Any]) -> jax.Array:
    """Return the largest relative error of some results, by the norm of each.

    Where the reference is not finite, nothing is compared: random operands may ask for
    what no dtype holds. Where only the result is not, the error is infinite.
    """
    errors = [_error(x, y) for x, y in zip(found, expected, strict=True)]
    return jnp.max(jnp.stack(errors)) if errors else jnp.zeros(())


@jax.jit
def _error(x: jax.Array, y: jax.Array) -> jax.Array:
    right = y.astype(jnp.float32)
    is_compared = jnp.isfinite(right)
    right = jnp.where(is_compared, right, 0)
    difference = jnp.where(is_compared, x.astype(jnp.float32) - right, 0)
    # Squares of what is not scaled may be more than f32 holds.
    scale = jnp.maximum(jnp.max(jnp.abs(right), initial=0), jnp.finfo(right.dtype).tiny)
    error = jnp.linalg.norm((difference / scale).ravel())
    relative = error / jnp.linalg.norm((right / scale).ravel())
    return jnp.where(error == 0, 0, jnp.where(jnp.isnan(relative), jnp.inf, relative))
