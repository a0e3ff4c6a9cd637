# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans the kernels of fused functions and of their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import offline, plans
from jax_cudnn.graph import label, to_json
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.policy import ranked
from tests.fusing.functions import block, conv_bn_relu, gated_mlp, normed

pytestmark = pytest.mark.sampled

_DEVICES = ("A100 40GB", "H200", "B200")


def _structs(dtype: Any, *shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def _wide(x, w, b):
    """A product whose bias and gelu are in f32."""
    sums = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    return jax.nn.gelu(sums + b.astype(jnp.float32)).astype(x.dtype)


def _product(a, b):
    return jnp.einsum("bmk,bkn->bmn", a, b)


# Functions, their operands' shapes, and how many kernels they are.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "conv, batch norm, relu": (
        conv_bn_relu,
        ((8, 28, 28, 128), (3, 3, 128, 256), *((256,),) * 4),
        1,
    ),
    "matmul, bias, gelu, residual, layer norm": (
        block,
        ((4, 512, 768), (768, 768), (768,), (4, 512, 768), (768,), (768,)),
        1,
    ),
    "gated MLP": (
        gated_mlp,
        ((4, 256, 512), (512, 1024), (512, 1024), (1024, 512)),
        3,
    ),
    "wide sums": (_wide, ((256, 512), (512, 1024), (1, 1024)), 1),
    "batch of products": (_product, ((4, 64, 128), (4, 128, 64)), 1),
}


def _calls(function: Any, operands: Any, device: str) -> list[plans.ExplainedCall]:
    told = plans.explain(function, *operands, device=device)
    return [
        call for call in told.calls if call.implementation == "cudnn" or call.attempts
    ]


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", list(_FUNCTIONS))
def test_kernels_have_plans_as_they_are(name: str, dtype: Any, device: str) -> None:
    function, shapes, count = _FUNCTIONS[name]
    calls = _calls(jax_cudnn.fuse(function), _structs(dtype, *shapes), device)
    assert len(calls) == count
    for call in calls:
        assert call.implementation == "cudnn", call
        # Nothing is taken out of the kernel.
        assert not call.attempts, call


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("name", list(_FUNCTIONS))
def test_gradients_have_plans(name: str, device: str) -> None:
    function, shapes, _ = _FUNCTIONS[name]
    fused = jax_cudnn.fuse(function)

    def loss(*operands: jax.Array) -> jax.Array:
        return fused(*operands).astype(jnp.float32).sum()

    gradient = jax.grad(loss, tuple(range(len(shapes))))
    for call in _calls(gradient, _structs(jnp.bfloat16, *shapes), device):
        assert call.implementation == "cudnn", call


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_an_mlps_gradient_has_its_activation_and_sum_in_a_product(
    dtype: Any, device: str
) -> None:
    @jax_cudnn.fuse
    def mlp(x, w, b, v):
        return jax.nn.gelu(x @ w + b[None, None]) @ v

    def loss(*operands: jax.Array) -> jax.Array:
        return mlp(*operands).astype(jnp.float32).sum()

    operands = _structs(dtype, (4, 256, 512), (512, 1024), (1024,), (1024, 512))
    gradient = jax.grad(loss, (0, 1, 2, 3))
    (call,) = (x for x in _calls(gradient, operands, device) if "_grad" in x.op)
    assert (call.op, call.implementation) == ("matmul+gelu_tanh_grad+add", "cudnn")
    gpu = offline.named_gpu(device)
    (part,) = (
        part
        for graph, _, _ in traced_graphs(gradient, *operands)
        for part in partition(graph)
        if label(part) == call.op
    )
    with_sum = ranked(part, gpu.target)[-1].rewrite
    assert [n.kind for n in with_sum.graph.nodes].count("reduction") == 1
    gpu.plan(to_json(with_sum.graph))  # which raises where there is none


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_norms_that_are_asked_for_have_plans(dtype: Any, device: str) -> None:
    fused = jax_cudnn.fuse(normed, implementation="cudnn")

    def loss(*operands: jax.Array) -> jax.Array:
        return fused(*operands).astype(jnp.float32).sum()

    operands = _structs(dtype, (4, 512, 768), (768, 768), (768,))
    calls = _calls(jax.grad(loss, (0, 1, 2)), operands, device)
    assert {call.implementation for call in calls} == {"cudnn"}
    assert {"matmul", "rms_norm", "rms_norm_backward"} <= {call.op for call in calls}


def test_engines_of_both_kinds_are_asked_for() -> None:
    operands = _structs(jnp.float16, (4, 64, 128), (4, 128, 64))
    note = "RUNTIME_COMPILATION"
    wanted = plans.PlanOptions(required_notes=(note,))
    fused = jax_cudnn.fuse(_product, strict=True, plan=wanted)
    (kernel,) = fused.explain(*operands).on("H200").kernels
    assert kernel.calls[0].implementation == "cudnn"
