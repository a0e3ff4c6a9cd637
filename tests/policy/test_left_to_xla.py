# SPDX-License-Identifier: Apache-2.0
"""What docs/performance.md says "auto" leaves to XLA, on any GPU with any cuDNN."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.lowering import traced_program
from jax_cudnn.policy import ranked, tables
from tests.policy.answers import H100

pytestmark = pytest.mark.once

_BF16, _F32, _I8 = jnp.bfloat16, jnp.float32, jnp.int8
_GPUS = [
    replace(H100, name=name, sm_version=sm, cudnn_version=100 * table.cudnn + patch)
    for name, sm in (
        ("", 80),
        ("", 89),
        (H100.name, 90),
        ("NVIDIA H200", 90),
        ("", 100),
    )
    for table in tables.shipped()
    for patch in (0, 1)
]


def _gradient(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(*operands: jax.Array) -> jax.Array:
        return function(*operands).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))


def _biased(q: jax.Array, k: jax.Array, bias: jax.Array) -> jax.Array:
    return jax_cudnn.sdpa(q, k, k, bias)


def _pooled(x: jax.Array) -> jax.Array:
    return jax_cudnn.max_pool(x, (3, 3))


def _heads(*shape: int, dtype: Any = _BF16) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype)] * 3


def _arrays(*shapes: tuple[int, ...], last: Any = _BF16) -> list[jax.ShapeDtypeStruct]:
    dtypes = (*[_BF16] * (len(shapes) - 1), last)
    return [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]


_CALLS: dict[str, tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]] = {
    "attention in f32": (jax_cudnn.sdpa, _heads(4, 2048, 16, 128, dtype=_F32)),
    "small attention with one sequence": (jax_cudnn.sdpa, _heads(1, 256, 8, 64)),
    "its gradient": (_gradient(jax_cudnn.sdpa), _heads(1, 256, 8, 64)),
    "a trained bias of few keys": (
        _gradient(_biased),
        _arrays((64, 49, 6, 32), (64, 49, 6, 32), (1, 6, 49, 49)),
    ),
    "a norm": (jax_cudnn.layer_norm, _arrays((64, 48))),
    "pooling": (_pooled, _arrays((4, 28, 28, 64))),
    "a small grouped matmul": (
        jax_cudnn.ragged_dot,
        _arrays((64, 32), (4, 32, 48), (4,), last=jnp.int32),
    ),
    "a matmul with one column": (jax_cudnn.matmul, _arrays((4096, 512), (512, 1))),
    "weights of 8 bits": (
        jax_cudnn.matmul,
        _arrays((256, 512), (512, 384), last=_I8),
    ),
}


@pytest.mark.parametrize("name", _CALLS)
def test_auto_leaves_it_to_xla_on_every_gpu(name: str) -> None:
    function, operands = _CALLS[name]
    # Of a gradient, this is the last part.
    part = traced_program(function, *operands).graphs[-1].parts[-1]
    taken = {
        (gpu.name or gpu.sm_version, gpu.cudnn_version): [
            way.by for way in ranked(part, gpu) if not way.slower
        ]
        for gpu in _GPUS
    }
    assert {where: by for where, by in taken.items() if by} == {}
