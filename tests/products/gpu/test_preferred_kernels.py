# SPDX-License-Identifier: Apache-2.0
"""Tests the plans that go before cuDNN's first one."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import pytest

import jax_cudnn
from jax_cudnn import native
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.devices import local_target
from jax_cudnn.policy import ranked
from tests.common.gpu.pinned import judge_every_plan
from tests.fusing.functions import normal

pytestmark = pytest.mark.gpu


def _conv(x: jax.Array, w: jax.Array, step: int, **tail: Any) -> jax.Array:
    letters = "DHW"[-(x.ndim - 2) :]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    steps = (step,) * len(letters)
    return jax_cudnn.conv(x, w, steps, "SAME", dimension_numbers=numbers, **tail)


def _convolution(
    dtype: str, images: Sequence[int], window: Sequence[int], step: int, **tail: Any
) -> Graph:
    def layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return _conv(x, w, step, bias=bias, **tail)

    shapes = images, window, window[-1:]
    operands = [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    ((graph, _, _),) = traced_graphs(layer, *operands)
    return graph


def _alone(
    kind: str,
    dtype: str,
    images: Sequence[int],
    window: Sequence[int],
    step: int,
) -> Graph:
    def gradients(x: jax.Array, w: jax.Array) -> Any:
        y, pullback = jax.vjp(functools.partial(_conv, step=step), x, w)
        return pullback(y)

    shapes = images, window
    operands = [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    parts = [
        part for each in traced_graphs(gradients, *operands) for part in each.parts
    ]
    (found,) = (part for part in parts if part.nodes[0].kind == kind)
    return found


def _product(dtype: str, m: int, r: int, n: int) -> Graph:
    def layer(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(a, b, activation="gelu")

    a, b = (normal(i, *shape).astype(dtype) for i, shape in enumerate(((m, r), (r, n))))
    ((graph, _, _),) = traced_graphs(layer, a, b)
    return graph


_MADE = {
    "3 axes": lambda dtype: _convolution(
        dtype, (1, 16, 16, 16, 128), (5, 5, 5, 128, 64), 1, activation="relu"
    ),
    "few places": lambda dtype: _convolution(
        dtype, (2, 7, 7, 7, 256), (3, 3, 3, 256, 320), 1, activation="silu"
    ),
    "many channels": lambda dtype: _convolution(
        dtype, (16, 8, 8, 112), (5, 5, 112, 1024), 1, activation="gelu"
    ),
    "steps of 2": lambda dtype: _convolution(
        dtype, (3, 14, 14, 464), (3, 3, 464, 512), 2, activation="gelu"
    ),
    "few channels": lambda dtype: _convolution(
        dtype, (2, 12, 12, 12, 32), (3, 3, 3, 32, 32), 1, activation="silu"
    ),
    # Where cuDNN listed engine 22, 40, 57, 63, 10, 47 and 28 first.
    "images, few places": lambda dtype: _alone(
        "conv_dgrad", dtype, (4, 32, 32, 480), (3, 3, 480, 80), 2
    ),
    "images, 3 axes": lambda dtype: _alone(
        "conv_dgrad", dtype, (1, 16, 16, 16, 64), (5, 5, 5, 64, 256), 1
    ),
    "images, 1 axis": lambda dtype: _alone(
        "conv_dgrad", dtype, (2, 512, 128), (3, 128, 512), 1
    ),
    "images, windows of 1": lambda dtype: _alone(
        "conv_dgrad", dtype, (8, 14, 14, 512), (1, 1, 512, 256), 1
    ),
    "filters, 3 axes": lambda dtype: _alone(
        "conv_wgrad", dtype, (1, 21, 21, 21, 96), (3, 3, 3, 96, 192), 1
    ),
    "filters": lambda dtype: _alone(
        "conv_wgrad", dtype, (5, 21, 21, 128), (5, 5, 128, 96), 1
    ),
    "large windows": lambda dtype: _alone(
        "conv_fprop", dtype, (1, 16, 16, 16, 64), (5, 5, 5, 64, 256), 1
    ),
    "a product": lambda dtype: _product(dtype, 2048, 1536, 2048),
}
# The truth of these would take the CPU too long.
_LARGE = {"a large product": lambda dtype: _product(dtype, 16384, 1536, 4096)}


@pytest.mark.parametrize("name", _MADE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_plan_is_right(name: str, dtype: str) -> None:
    judge_every_plan(_MADE[name](dtype))


@pytest.mark.parametrize("name", [*_MADE, *_LARGE])
def test_what_goes_first_is_what_runs(name: str) -> None:
    local = local_target()
    assert local is not None
    ordinal, target = local
    ways = ranked((_MADE | _LARGE)[name]("bfloat16"), target)
    if not ways or not ways[0].preference:
        pytest.skip("nothing was measured for this GPU and cuDNN")
    (first, *_) = ways
    text = to_json(first.rewrite.graph)
    own = native.plan(text, device=ordinal)
    plan = native.plan(text, request=first.preference, device=ordinal)
    listed = native.candidates(text, device=ordinal)
    wanted = [
        each["wanted"]
        for each in json.loads(first.preference)["preferred"]
        if each["first_engine"] == own.engine
    ]
    found = [
        (candidate.engine, candidate.knobs)
        for each in (wanted[0] if wanted else [])
        for candidate in listed
        if not candidate.refusal
        and candidate.engine == each["engine"]
        and each.get("knobs", dict(candidate.knobs)) == dict(candidate.knobs)
    ]
    assert (plan.engine, plan.knobs) == (found or [(own.engine, own.knobs)])[0]
