# SPDX-License-Identifier: Apache-2.0
"""Tests `gated_matmul` on a GPU, by every plan of the kernel with the gate."""

from typing import Any

import jax
import pytest

import jax_cudnn
from jax_cudnn.graph import label
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import traced_graphs
from tests.common.gpu.numerics import judge, to_f32
from tests.common.gpu.pinned import judge_every_plan
from tests.fusing.functions import normal

pytestmark = pytest.mark.gpu

_ACTIVATIONS: dict[str, Any] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "of one's own": lambda x: x * jax.nn.sigmoid(1.7 * x),
}
_SIZES = {"small": (3, 40, 64, 96), "odd": (1, 77, 59, 61), "large": (2, 640, 256, 512)}


def _both(function: Any, operands: Any, cotangent: Any) -> list[jax.Array]:
    result, pullback = jax.vjp(function, *operands)
    return [result, *pullback(cotangent)]


def _operands(size: str, dtype: Any) -> list[jax.Array]:
    b, m, r, n = _SIZES[size]
    weights = [normal(i, r, n) / r**0.5 for i in (1, 2)]
    biases = [normal(i, n) for i in (3, 4)]
    return [x.astype(dtype) for x in (normal(0, b, m, r), *weights, *biases)]


@pytest.mark.parametrize("implementation", ["cudnn", "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", list(_SIZES))
@pytest.mark.parametrize("activation", list(_ACTIVATIONS))
def test_values_and_gradients(
    activation: str, size: str, dtype: str, implementation: Any
) -> None:
    function = _ACTIVATIONS[activation]
    given = activation if activation in ("silu", "gelu") else function
    operands = _operands(size, dtype)
    b, m, _, n = _SIZES[size]
    cotangent = normal(9, b, m, n).astype(dtype)

    def ours(x: Any, gate: Any, up: Any, *biases: Any) -> Any:
        return jax_cudnn.gated_matmul(
            x,
            gate,
            up,
            gate_bias=biases[0],
            up_bias=biases[1],
            activation=given,
            implementation=implementation,
        )

    def plain(x: Any, gate: Any, up: Any, *biases: Any) -> Any:
        c, d = (bias[None, None] for bias in biases)
        return function(x @ gate + c) * (x @ up + d)

    found, by_jax = (
        jax.jit(lambda *xs, f=f: _both(f, xs[:-1], xs[-1]))(*operands, cotangent)
        for f in (ours, plain)
    )
    with jax.default_matmul_precision("highest"):
        truth = _both(plain, [to_f32(x) for x in operands], to_f32(cotangent))
    names = ["result", *(f"gradient {i}" for i in range(5))]
    judge(names, found, by_jax, truth)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", list(_ACTIVATIONS))
def test_every_plan_of_the_kernel_with_the_gate(activation: str, dtype: str) -> None:
    """With the product beside it, which gradients need."""
    function = _ACTIVATIONS[activation]
    operands = _operands("large", dtype)[:3]

    def loss(*xs: Any) -> Any:
        return jax_cudnn.gated_matmul(*xs, activation=function).sum()

    parts = (
        part
        for graph, _, _ in traced_graphs(jax.grad(loss, (0, 1, 2)), *operands)
        for part in partition(graph)
    )
    (part,) = (each for each in parts if label(each).startswith("matmul+"))
    assert len(part.outputs) == 2
    judge_every_plan(part)
