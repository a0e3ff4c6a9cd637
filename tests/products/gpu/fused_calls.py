# SPDX-License-Identifier: Apache-2.0
"""Calls of conv and matmul by implementation, and how their results are judged."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn.config import Implementation
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.decision import PartDecision
from tests.common.gpu.numerics import judge, to_f32

NHWC = ("NHWC", "HWIO", "NHWC")

Function = Callable[..., Any]


def normal(seed: int, *shape: int, size: float = 1.0, dtype: Any = jnp.bfloat16):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values * np.float32(size), dtype)


# Each: a function of (operands) by implementation, and the operands of one example.


def conv_by(how: Implementation, **options: Any) -> Function:
    def call(x, w, bias):
        return jax_cudnn.conv(
            x,
            w,
            (1, 1),
            "SAME",
            dimension_numbers=NHWC,
            bias=bias,
            activation="gelu",
            implementation=how,
            **options,
        )

    return call


def matmul_by(how: Implementation, **options: Any) -> Function:
    return lambda a, b, bias: jax_cudnn.matmul(
        a, b, bias=bias, activation="silu", implementation=how, **options
    )


def conv_operands(seed: int = 0, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    return (
        normal(seed, 2, 11, 13, 24, dtype=dtype),
        normal(seed + 10, 3, 3, 24, 40, size=1 / math.sqrt(9 * 24), dtype=dtype),
        normal(seed + 20, 40, dtype=dtype),
    )


def matmul_operands(seed: int = 0, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    return (
        normal(seed, 65, 96, dtype=dtype),
        normal(seed + 10, 96, 40, size=1 / math.sqrt(96), dtype=dtype),
        normal(seed + 20, 40, dtype=dtype),
    )


OPS = {"conv": (conv_by, conv_operands), "matmul": (matmul_by, matmul_operands)}

each_op = pytest.mark.parametrize("op", list(OPS))


def value_and_grad(function: Function, argnums: Any = (0, 1, 2)) -> Function:
    def loss(*operands):
        return jnp.sum(function(*operands).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=argnums)


def judge_all(results: Any, references: Any, truths: Any) -> None:
    leaves = [jax.tree.leaves(each) for each in (results, references, truths)]
    # The errors of a few numbers, losses, may be 0 in the reference by luck.
    noises = [abs(x) * 2.0**-9 if np.size(x) < 8 else 0.0 for x in leaves[2]]
    judge([f"leaf {i}" for i in range(len(leaves[0]))], *leaves, noises=noises)


def check(
    function: Callable[[Implementation], Function],
    operands: Any,
    how: Implementation = "cudnn",
):
    """Judge function(how) against function("xla") in f32."""
    results, references = function(how)(*operands), function("xla")(*operands)
    with jax.default_matmul_precision("highest"):
        truths = function("xla")(*map(to_f32, operands))
    judge_all(results, references, truths)


def steps_of(function: Function, *operands: Any) -> list[PartDecision]:
    """Return the parts of the function, as decided for this GPU."""
    return [
        step
        for traced in traced_graphs(function, *operands)
        for step in traced.decide().steps
    ]
