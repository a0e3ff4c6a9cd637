# SPDX-License-Identifier: Apache-2.0
"""Tests that every default plan adds up in f32, past what 16 bits can hold."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import native
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.plans import PlanOptions
from jax_cudnn.policy import ranked
from tests.common.gpu.pinned import pinned

pytestmark = pytest.mark.gpu

_NOTE = "REDUCED_PRECISION_REDUCTION"
_REDUCED = PlanOptions(reduced_precision_reduction=True).to_request()
_CHANNELS, _STEP = 512, 16.0


def _halves(*shape: int, axis: int) -> jax.Array:
    """Return 16 in the first half of an axis and -16 in the second."""
    signs = np.ones(shape[axis], np.float32)
    signs[shape[axis] // 2 :] = -1.0
    where = [1] * len(shape)
    where[axis] = -1
    return jnp.asarray(np.broadcast_to(_STEP * signs.reshape(where), shape), "float16")


def _alike(*shape: int) -> jax.Array:
    return jnp.full(shape, _STEP, jnp.float16)


def _conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax_cudnn.conv(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _gradients(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
    return jax.vjp(_conv, x, w)[1](g)


def _case(kind: str) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """Return a function and operands: sums are 0, and half of one 262,144 or more."""
    c = _CHANNELS
    if kind == "matmul":
        return jax_cudnn.matmul, (_alike(64, 4 * c), _halves(4 * c, 96, axis=0))
    if kind == "conv_fprop":
        return _conv, (_alike(4, 16, 16, c), _halves(3, 3, c, 64, axis=2))
    if kind == "conv_dgrad":
        images, filters = _alike(4, 16, 16, 64), _halves(3, 3, 64, c, axis=3)
        return _gradients, (images, filters, _alike(4, 16, 16, c))
    images, given = _alike(8, 16, 16, 64), _halves(8, 16, 16, 128, axis=0)
    return _gradients, (images, _alike(3, 3, 64, 128), given)


def _part(kind: str) -> tuple[Graph, list[jax.Array]]:
    function, operands = _case(kind)
    parts = [p for each in traced_graphs(function, *operands) for p in each.parts]
    (found,) = (part for part in parts if part.nodes[0].kind == kind)
    of_size = {x.size: x for x in operands}
    shapes = [tensor.stored_shape for tensor in found.input_tensors]
    return found, [of_size[math.prod(shape)].reshape(shape) for shape in shapes]


@pytest.mark.parametrize("kind", ["matmul", "conv_fprop", "conv_dgrad", "conv_wgrad"])
def test_sums_may_pass_what_16_bits_hold(kind: str) -> None:
    part, operands = _part(kind)
    target = native.device_target(0)
    (rewrite, *_) = [way.rewrite for way in ranked(part, target)]
    launched = 0
    for candidate in native.candidates(to_json(rewrite.graph)):
        assert (_NOTE in candidate.numeric_notes) <= bool(candidate.refusal)
        if not candidate.refusal:
            found = pinned(part, rewrite, target, candidate.request)(*operands)
            # Sums of integers below 2^24 are exact in f32.
            for result in map(np.asarray, found):
                assert not result.any(), (candidate.name, np.abs(result).max())
            launched += 1
    assert launched > 1


@pytest.mark.parametrize("kind", ["conv_dgrad", "conv_wgrad"])
def test_kernels_that_add_up_in_16_bits_run_where_they_are_allowed(kind: str) -> None:
    part, given = _part(kind)
    # Half of a sum is 1024 or 2304 then, which 16 bits hold.
    operands = [x / jnp.asarray(_STEP, x.dtype) for x in given]
    target = native.device_target(0)
    (rewrite, *_) = [way.rewrite for way in ranked(part, target)]
    listed = native.candidates(to_json(rewrite.graph), request=_REDUCED)
    some = [each for each in listed if _NOTE in each.numeric_notes]
    assert some
    assert not any(each.refusal for each in listed)
    options = PlanOptions(reduced_precision_reduction=True, required_notes=(_NOTE,))
    plan = native.plan(to_json(rewrite.graph), request=options.to_request())
    assert plan.request in {each.request for each in some}
    (result,) = pinned(part, rewrite, target, plan.request)(*operands)
    # It is not exact: beyond 2048, 16 bits lose what is added by ones.
    assert (np.abs(np.asarray(result, np.float32)) <= 2304 - 2048).all(), plan.name
