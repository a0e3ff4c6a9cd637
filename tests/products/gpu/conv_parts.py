# SPDX-License-Identifier: Apache-2.0
"""The kernels of a convolution and of its gradients."""

from collections.abc import Sequence
from typing import Any

import jax

import jax_cudnn
from jax_cudnn.graph import Graph
from tests.common.legal_ways import kernels_of


def conv_parts(
    shapes: Sequence[tuple[int, ...]], dtype: Any, **options: Any
) -> dict[str, Graph]:
    """Return the kernels of a convolution and its gradients, by their kinds."""
    letters = "DHW"[-(len(shapes[0]) - 2) :]
    activation = options.pop("activation", None)

    def layer(x: Any, w: Any, *bias: Any) -> jax.Array:
        return jax_cudnn.conv(
            x,
            w,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            bias=bias[0] if bias else None,
            activation=activation,
            **options,
        )

    return kernels_of(layer, *(jax.ShapeDtypeStruct(x, dtype) for x in shapes))
