# SPDX-License-Identifier: Apache-2.0
"""Tests the rewrites of convolutions in groups, and which one comes first.

In f64, as in test_legalize_convs.py. Groups of one channel are in
test_legalize_depthwise.py.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.graph import Graph
from jax_cudnn.legalize import Rewrite
from jax_cudnn.legalize.products import conv_groups, fusion
from jax_cudnn.policy import ranked
from tests.common.legal_ways import check_bad_numbers, check_ways
from tests.products.shared.grouped_layers import GroupedLayer

pytestmark = [pytest.mark.once, pytest.mark.sampled]


@pytest.fixture
def _double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fusion, "_refusals", lambda *_: [])
    monkeypatch.setitem(conv_groups.ELEMENTS_PER_LOAD, "f64", 8)
    with jax.enable_x64(True):
        yield


# Channels of a group, in and out, are a power of two, or they are not.
_EVEN = {"groups": 4, "width": 8, "each": 8}
_SMALL = {"groups": 16, "width": 2, "each": 2}
_ODD = {"groups": 4, "width": 6, "each": 6}
_LAYERS = {
    "even": GroupedLayer((5, 6), (3, 3), **_EVEN),
    "small": GroupedLayer((5, 6), (3, 3), **_SMALL),
    "odd": GroupedLayer((5, 6), (3, 3), **_ODD),
    "narrower": GroupedLayer((5, 6), (3, 3), groups=4, width=8, each=2),
    "wider": GroupedLayer((5, 6), (3, 3), groups=4, width=4, each=24),
    "7 groups": GroupedLayer((5, 6), (3, 3), groups=7, width=4, each=4),
    "steps": GroupedLayer((8, 6), (3, 3), step=2, **_ODD),
    "holes": GroupedLayer((8, 6), (3, 3), hole=2, **_ODD),
    "uneven padding": GroupedLayer((5, 6), (2, 2), **_ODD),
    "windows of 1": GroupedLayer((5, 6), (1, 1), **_ODD),
    "transposed": GroupedLayer((4, 5), (3, 3), ((1, 2), (1, 2)), spread=2, **_ODD),
    "one axis": GroupedLayer((9,), (5,), **_ODD),
    "three axes": GroupedLayer((4, 3, 5), (3, 3, 3), **_ODD),
    "7 groups of 8, silu": GroupedLayer(
        (5, 6), (3, 3), groups=7, width=8, each=8, activation="silu"
    ),
    "even, silu": GroupedLayer((5, 6), (3, 3), activation="silu", **_EVEN),
    "small, relu": GroupedLayer((5, 6), (3, 3), activation="relu", **_SMALL),
    "odd, gelu": GroupedLayer((5, 6), (3, 3), activation="gelu", **_ODD),
    "steps, silu": GroupedLayer((8, 6), (3, 3), step=2, activation="silu", **_ODD),
}


@pytest.mark.parametrize("name", _LAYERS)
@pytest.mark.usefixtures("_double")
def test_every_way_keeps_the_meaning(name: str) -> None:
    layer = _LAYERS[name]
    assert check_ways(layer, layer.draw()) >= 5


def _told(way: Rewrite) -> str:
    """Return what is done to groups, in a few words."""
    told = ["flipped"] if any("are flipped" in note for note in way.notes) else []
    for note in way.notes:
        told += [f"into {note.split()[-1]}"] if "are merged" in note else []
        told += [f"to {note.split()[-1]}"] if "of each of" in note else []
    return ", ".join(told) or "as it is"


def _ways(part: Graph) -> list[str]:
    return list(dict.fromkeys(_told(way.rewrite) for way in ranked(part, None)))


@pytest.mark.parametrize(
    ("groups", "width", "each", "window", "ways"),
    [
        (32, 2, 2, (3, 3), ["into 2", "flipped", "as it is", "into 1"]),
        (32, 4, 4, (3, 3), ["into 4", "flipped", "as it is", "into 1"]),
        (32, 8, 8, (3, 3), ["into 8", "flipped", "as it is", "into 1"]),
        (7, 4, 4, (3, 3), ["to 8", "flipped", "as it is"]),
        (16, 16, 16, (3, 3), ["flipped", "as it is", "into 8", "into 1"]),
        (16, 32, 32, (3, 3), ["flipped", "as it is", "into 1"]),
        (16, 64, 64, (3, 3), ["flipped", "as it is"]),
        # Up to 1536 multiplications for an element of the result, and more.
        (5, 24, 24, (3, 3), ["into 1", "to 32", "flipped", "as it is"]),
        (9, 48, 48, (3, 3), ["to 64", "into 1", "flipped", "as it is"]),
        (21, 48, 48, (3, 3), ["to 64", "flipped", "as it is"]),
        (8, 48, 48, (1, 1), ["into 1", "to 64", "flipped", "as it is"]),
        (8, 16, 16, (1, 1), ["into 1", "flipped", "as it is"]),
        (8, 16, 32, (3, 3), ["into 1", "to 32", "flipped", "as it is"]),
        # Too many channels, too few of them, or with too large windows, to be padded.
        (100, 2, 32, (3, 3), ["into 1", "flipped", "as it is"]),
        (8, 256, 256, (3, 3), ["flipped", "as it is"]),
        (2, 96, 96, (5, 5), ["into 1", "flipped", "as it is"]),
    ],
)
def test_what_is_fast_comes_first(
    groups: int, width: int, each: int, window: tuple[int, int], ways: list[str]
) -> None:
    layer = GroupedLayer((8, 8), window, groups=groups, width=width, each=each)
    parts = layer.parts(jnp.bfloat16)
    plain = [way for way in ways if way != "flipped"]
    assert _ways(parts["conv_fprop"]) == plain
    # What is padded is a convolution as well.
    assert [way.removeprefix("flipped, ") for way in _ways(parts["conv_dgrad"])] == ways
    if width != 8:
        assert _ways(parts["conv_wgrad"]) == plain


def test_gradients_of_filters_of_8_channels_come_as_they_are() -> None:
    layer = GroupedLayer((8, 8), (3, 3), groups=32, width=8, each=8)
    ways = _ways(layer.parts(jnp.bfloat16)["conv_wgrad"])
    assert ways == ["as it is", "into 8", "into 1"]


def test_odd_groups_have_a_way_with_something_around_them() -> None:
    layer = GroupedLayer((8, 8), (3, 3), groups=128, width=9, each=9, activation="relu")
    part = layer.parts(jnp.float32)["conv_fprop"]
    first = ranked(part, None)[0].rewrite
    assert len(first.graph.nodes) > 1
    assert _told(first) == "into 32"


@pytest.mark.parametrize(
    ("groups", "width", "sizes", "is_alone"),
    [
        (17, 8, (8, 8), True),
        (17, 8, (8,), True),
        (17, 8, (4, 4, 4), False),
        (18, 8, (8, 8), False),  # These can be merged.
        (17, 16, (8, 8), False),
        (1, 8, (8, 8), False),
    ],
)
def test_odd_groups_of_8_channels_are_alone(
    groups: int, width: int, sizes: tuple[int, ...], *, is_alone: bool
) -> None:
    layer = GroupedLayer(
        sizes, (3,) * len(sizes), groups=groups, width=width, each=width,
        activation="silu",
    )  # fmt: skip
    part = layer.parts(jnp.bfloat16)["conv_fprop"]
    counts = [len(way.rewrite.graph.nodes) for way in ranked(part, None)]
    assert (counts[0] == 1) == is_alone
    assert max(counts) > 1  # That way is there as well, for the tuner.


def test_f32_comes_as_it_is() -> None:
    for width in (8, 24):
        layer = GroupedLayer((8, 8), (3, 3), groups=4, width=width, each=width)
        for part in layer.parts(jnp.float32).values():
            assert _ways(part)[0] == "as it is"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["even", "small", "odd", "steps", "one axis"])
@pytest.mark.usefixtures("_double")
def test_bad_numbers_stay_in_their_group_and_windows(name: str, bad: float) -> None:
    for kind, part in _LAYERS[name].parts().items():
        is_gradient = kind == "conv_wgrad"
        # But for x and results of merged groups.
        check_bad_numbers(
            part,
            None,
            bad,
            lambda way, is_any=is_gradient: is_any or "into" not in _told(way),
        )
