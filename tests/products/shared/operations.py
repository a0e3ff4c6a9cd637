# SPDX-License-Identifier: Apache-2.0
"""matmul and conv as functions of operands in one order, for tests of both."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import conv, matmul
from tests.conftest import Draw
from tests.products.shared import plain_conv

ACTIVATIONS = {None: lambda x: x, "relu": jax.nn.relu, "gelu": jax.nn.gelu}


def plain_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: Any = None,
    residual: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    scale_out: Any = None,
    activation: Any = None,
) -> jax.Array:
    """Return jnp.matmul with what is around it."""
    with jax.numpy_rank_promotion("allow"):
        a = a if scale_a is None else a * scale_a
        b = b if scale_b is None else b * scale_b
        result = jnp.matmul(a, b)
        for term in (bias, residual):
            result = result if term is None else result + term
        result = ACTIVATIONS[activation](result)
        return result if scale_out is None else result * scale_out


@dataclass(frozen=True)
class Operation:
    """An operation, with the names and axes of its operands.

    ``contractions`` are the kinds of nodes that give gradients, ``mapped`` the axes at
    which vmap finds examples, and ``square`` the axes of weights that map something to
    the like, as many as "n" says.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    axes: Mapping[str, str]
    sizes: Mapping[str, int]
    contractions: Mapping[str, str]
    mapped: tuple[int, ...]
    square: str
    options: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands: two that are contracted, a bias, and more."""
        return tuple(self.axes)

    def draw(
        self, draw: Draw, dtype: Any = jnp.float64, count: int = 0, **sizes: int
    ) -> list[jax.Array]:
        """Draw all operands, each with `count` examples in its first axis."""
        more = "n" if count else ""
        sizes = {**self.sizes, "n": count, **sizes}
        return [draw(more + axes, dtype, **sizes) for axes in self.axes.values()]

    def run(
        self, *operands: jax.Array, is_plain: bool = False, **options: Any
    ) -> jax.Array:
        """Return the result for the first of the operands, ours or plain JAX's."""
        extra = dict(zip(self.names[2:], operands[2:], strict=False))
        function = self.plain if is_plain else self.ours
        return function(*operands[:2], **extra, **{**self.options, **options})


MATMUL = Operation(
    ours=matmul,
    plain=plain_matmul,
    axes={"a": "st", "b": "tk", "bias": "k", "scale_b": "1k", "residual": "sk"},
    sizes={"s": 3, "t": 5, "k": 7},
    contractions={"grad_a": "matmul", "grad_b": "matmul"},
    mapped=(1, -1, 0, 1, 2),
    square="ntt",
    options={},
)
CONV = Operation(
    ours=conv,
    plain=plain_conv.plain,
    axes={"x": "bstd", "w": "kkde", "bias": "e", "scale": "e", "residual": "bste"},
    sizes={"b": 2, "s": 5, "t": 4, "d": 3, "e": 7, "k": 2},
    contractions={"grad_x": "conv_dgrad", "grad_w": "conv_wgrad"},
    mapped=(0, -1, 1, 0, 2),
    square="nkkdd",
    options={"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "padding": "SAME"},
)
both_operations = pytest.mark.parametrize(
    "operation", [MATMUL, CONV], ids=["matmul", "conv"]
)
