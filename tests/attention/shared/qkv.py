# SPDX-License-Identifier: Apache-2.0
"""Arrays of queries, keys and values, put together and taken apart, and their graphs.

The graphs are written here from their axes, without the code that calls use.
"""

from typing import Any

import numpy as np

from jax_cudnn.graph import Graph, SdpaAttributes, Tensor, sdpa_graph

# Each layout of qkv_sdpa, with an example of a shape: distinct sizes, none is 1.
SIZES = {"b": 2, "s": 5, "h": 4, "d": 6, "3": 3}
# With heads side by side: query heads and key heads.
HEADS = (6, 2)
LAYOUTS = ("bs3hd", "bsh3d", "sb3hd", "sbh3d", "b3hsd", "bshd", "sbhd", "bhsd")


def arguments_of(layout: str) -> dict[str, Any]:
    """Return the arguments that say how an array of `shape_of` is to be read."""
    heads = {} if "3" in layout else {"key_value_heads": HEADS[1]}
    return {"layout": layout, **heads}


def shape_of(layout: str, **changed: int) -> tuple[int, ...]:
    """Return the shape of an array in a layout."""
    h = SIZES["h"] if "3" in layout else HEADS[0] + 2 * HEADS[1]
    sizes = {**SIZES, "h": h, **changed}
    return tuple(sizes[letter] for letter in layout)


def apart(layout: str, qkv: Any) -> list[Any]:
    """Return queries, keys and values as (b, s, h, d) of an array in a layout."""
    axes = [layout.index(letter) for letter in "bshd"]
    if "3" in layout:
        place = layout.index("3")
        return [qkv.transpose(place, *axes)[i] for i in range(3)]
    plain = qkv.transpose(axes)
    h, k = HEADS
    return [plain[:, :, :h], plain[:, :, h : h + k], plain[:, :, h + k :]]


def together(layout: str, parts: Any) -> np.ndarray:
    """Return the array in a layout of queries, keys and values as (b, s, h, d)."""
    if "3" in layout:
        stacked = np.stack(parts)
        return stacked.transpose(["3bshd".index(letter) for letter in layout])
    return np.concatenate(parts, 2).transpose(["bshd".index(x) for x in layout])


def in_layout(layout: str, x: Any) -> Any:
    """Return an array (b, s, h, d) with its axes as a layout has them."""
    plain = layout.replace("3", "")
    return x.transpose(["bshd".index(letter) for letter in plain])


def graph_of(
    layout: str, extra: str = "", *, dtype: Any = "f32", **sizes: int
) -> Graph:
    """Return the graph of attention over an array in a layout, with its log-sum-exp.

    ``extra`` is one more operand: "mask", "key_lengths" or "bias".
    """
    h = SIZES["h"] if "3" in layout else sum(HEADS) + HEADS[1]
    own = {**SIZES, "h": h, **sizes}
    b, s, d = (own[letter] for letter in "bsd")
    if "3" in layout:
        dims, letters, query_heads = (b, 3, h, s, d), layout, h
    else:
        # Parts of one head each.
        dims, letters, query_heads = (
            (b, h, 1, s, d),
            layout.replace("h", "3h"),
            HEADS[0],
        )
    order = tuple(map("b3hsd".index, letters))
    inputs = {"qkv": Tensor(name="qkv", dtype=dtype, dims=dims, order=order)}
    others: dict[str, tuple[Any, tuple[int, ...]]] = {
        "mask": ("bool", (b, 1, s, s)),
        "key_lengths": ("i32", (b, 1, 1, 1)),
        "bias": (dtype, (1, query_heads, s, s)),
    }
    if extra:
        kind, shape = others[extra]
        inputs[extra] = Tensor(name=extra, dtype=kind, dims=shape, order=(0, 1, 2, 3))
    return sdpa_graph(
        inputs,
        attributes=SdpaAttributes(scale=0.375, is_causal=extra != "mask"),
        query_heads=query_heads,
        with_stats=True,
    )
