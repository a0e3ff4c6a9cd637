# SPDX-License-Identifier: Apache-2.0
"""Convolutions in groups, for tests of how they are rewritten."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from jax_cudnn.graph import Graph
from tests.common.legal_ways import kernels_of


class GroupedLayer:
    """A convolution in groups of ``width`` channels, ``each`` out, channels last."""

    def __init__(
        self,
        sizes: Sequence[int],
        window: Sequence[int],
        padding: Any = "SAME",
        *,
        step: int = 1,
        hole: int = 1,
        spread: int = 1,
        groups: int = 16,
        width: int = 1,
        each: int = 1,
        activation: Any = None,
    ) -> None:
        letters = "DHW"[-len(sizes) :]
        self._activation = activation
        self._options: dict[str, Any] = {
            "window_strides": (step,) * len(sizes),
            "padding": padding,
            "rhs_dilation": (hole,) * len(sizes),
            "lhs_dilation": (spread,) * len(sizes),
            "dimension_numbers": (f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            "feature_group_count": groups,
        }
        self.shapes = ((2, *sizes, groups * width), (*window, width, groups * each))
        if activation is not None:
            self.shapes += ((groups * each,),)

    def __call__(self, x: Any, w: Any, *bias: Any) -> jax.Array:
        return jax_cudnn.conv(
            x,
            w,
            **self._options,
            bias=bias[0] if bias else None,
            activation=self._activation,
        )

    def draw(self, dtype: Any = jnp.float64) -> list[jax.Array]:
        rng = np.random.default_rng(3)
        return [
            jnp.asarray(np.asarray(rng.normal(size=shape), dtype))
            for shape in self.shapes
        ]

    def parts(self, dtype: Any = jnp.float64) -> dict[str, Graph]:
        """Return the kernels of the convolution and its gradients, by their kinds."""
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape in self.shapes]
        return kernels_of(self, *types)
