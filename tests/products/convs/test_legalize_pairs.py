# SPDX-License-Identifier: Apache-2.0
"""Tests the rewrite of filters' gradients that takes places of the last axis in pairs.

In f64, as in test_legalize_convs.py.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.legalize.products import conv_pairs
from tests.common.evaluating import evaluate
from tests.common.legal_ways import check_ways, graphs_of, run_way, ways_with
from tests.products.shared.in_f64 import double, draw, measure_in_f64, rng

__all__ = ["double", "rng"]

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.fixture
def _small_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_in_f64(monkeypatch, work={"at_least": 1})
    monkeypatch.setattr(conv_pairs, "_LEAST", 8)


_PAIRS = "places of the last axis are taken in pairs"


@pytest.mark.usefixtures("_small_pairs")
@pytest.mark.parametrize(
    ("sizes", "window", "padding", "channels", "layout", "paired"),
    [
        ((5, 6), (3, 3), "SAME", (8, 16), "NHWC", True),
        ((5, 6), (3, 3), "SAME", (8, 16), "NCHW", True),
        ((6, 8), (5, 5), "SAME", (16, 8), "NHWC", True),
        ((4, 5, 6), (3, 1, 3), "SAME", (8, 8), "NDHWC", True),
        ((5, 8), (3, 4), [(0, 2), (2, 1)], (8, 8), "NHWC", True),
        ((5, 8), (3, 3), [(1, 1), (0, 0)], (8, 8), "NHWC", True),
        ((5, 6), (3, 3), [(-1, 3), (1, 1)], (8, 8), "NHWC", True),
        # x would have to be padded once more, or its places make no pairs.
        ((5, 8), (4, 3), [(1, 1), (2, 0)], (8, 8), "NHWC", False),
        ((5, 9), (3, 4), [(1, 1), (1, 1)], (8, 8), "NHWC", False),
        ((5, 8), (3, 4), [(1, 1), (1, 1)], (8, 8), "NHWC", False),
        ((5, 8), (3, 3), [(1, 1), (-1, 3)], (8, 8), "NHWC", False),
        # Enough channels, too few, and windows that were not measured.
        ((5, 6), (3, 3), "SAME", (8, 40), "NHWC", False),
        ((5, 6), (3, 3), "SAME", (8, 12), "NHWC", False),
        ((5, 6), (9, 1), "SAME", (8, 8), "NHWC", False),
        ((12,), (9,), "SAME", (8, 8), "NWC", False),
    ],
)
def test_places_are_taken_in_pairs(
    sizes: Sequence[int],
    window: Sequence[int],
    padding: Any,
    channels: tuple[int, int],
    layout: str,
    paired: bool,
    rng: np.random.Generator,
) -> None:
    c, o = channels
    filters = layout.replace("N", "O").replace("C", "I")
    x, w = draw(rng, 2, *sizes, c), draw(rng, o, *window, c)
    if layout == "NCHW":
        x, w = (jnp.moveaxis(each, -1, 1) for each in (x, w))

    def layer(x: Any, w: Any) -> jax.Array:
        steps, numbers = (1,) * len(sizes), (layout, filters, layout)
        return jax_cudnn.conv(x, w, steps, padding, dimension_numbers=numbers)

    check_ways(layer, (x, w))
    first, _ = ways_with(layer, (x, w), _PAIRS)
    assert first == ({"wgrad"} if paired else set())


@pytest.mark.usefixtures("_small_pairs")
def test_a_nan_of_a_pair_is_in_no_other_filter(rng: np.random.Generator) -> None:
    x, w = draw(rng, 2, 5, 6, 8), draw(rng, 3, 3, 8, 8)

    def layer(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.conv(x, w, padding="SAME", dimension_numbers=_NHWC)

    _, (graph, given) = graphs_of(layer, (x, w))
    (part,) = [part for part in partition(graph) if part.nodes[0].kind == "conv_wgrad"]
    values = dict(zip(graph.inputs, given, strict=True))
    image = dict(part.nodes[0].inputs)["x"]
    # Some elements of the window never see this corner.
    values[image] = values[image].at[0, 0, 0, 3].set(np.nan)
    arguments = [values[name] for name in part.inputs]
    (want,) = evaluate(part, arguments)
    assert 0 < np.sum(np.isnan(want)) < want.size
    for way in legalize(part, None).candidates:
        np.testing.assert_allclose(run_way(way, arguments)[0], want, atol=1e-9)
