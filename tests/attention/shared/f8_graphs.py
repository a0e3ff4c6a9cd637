# SPDX-License-Identifier: Apache-2.0
"""Graphs of f8 attention, as users mean them."""

from typing import Any

from jax_cudnn.graph import (
    Graph,
    SdpaAttributes,
    Tensor,
    sdpa_f8_graph,
    sdpa_f8_output,
)
from tests.attention.shared.oracle import SIZES, shape_of

_BSHD = (0, 2, 1, 3)
_PLAIN = (0, 1, 2, 3)
_NUMBERS = (
    *("descale_query", "descale_key", "descale_value"),
    *("descale_probabilities", "scale_probabilities", "scale_output"),
)


def f8_graph(
    *,
    dtype: Any = "f8_e4m3fn",
    result: Any = None,
    lengths: tuple[str, ...] = (),
    scale: float = 0.125,
    is_causal: bool = False,
    window: tuple[int, ...] = (),
    with_stats: bool = True,
    with_amax: bool = True,
    order: tuple[int, ...] = _BSHD,
    **sizes: int,
) -> Graph:
    """Return a graph of one node; sizes are SIZES but for those that are given."""
    letters = {**SIZES, **sizes}

    def tensor(name: str, axes: str, dtype: Any, order: Any = _PLAIN) -> Tensor:
        return Tensor(name=name, dtype=dtype, dims=shape_of(axes, letters), order=order)

    inputs = {
        "query": tensor("query", "bhsd", dtype, order),
        "key": tensor("key", "bktd", dtype, order),
        "value": tensor("value", "bkte", dtype, order),
        **{name: tensor(name, "b111", "i32") for name in lengths},
        **{name: tensor(name, "1111", "f32") for name in _NUMBERS},
    }
    attributes = SdpaAttributes(scale=scale, is_causal=is_causal, window=window)
    output = sdpa_f8_output(
        inputs, attributes=attributes, dtype=result or dtype, order=order
    )
    return sdpa_f8_graph(
        inputs,
        attributes=attributes,
        output=output,
        with_stats=with_stats,
        with_amax=with_amax,
    )
