# SPDX-License-Identifier: Apache-2.0
"""Tests that no zeros are written for transposed convolutions, nor for their gradients.

In f64, as in test_legalize_convs.py.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn.graph import Target
from jax_cudnn.legalize import legalize
from jax_cudnn.legalize.products import fusion
from jax_cudnn.policy import ranked
from tests.common.legal_ways import check_ways
from tests.products.shared.grouped_layers import GroupedLayer

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_H200 = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=92801)
_FULL = {"groups": 1, "width": 3, "each": 5}
_WIDE = {"groups": 1, "width": 32, "each": 48}
_LAYERS = {
    "of PyTorch": GroupedLayer((4, 5), (3, 3), ((1, 2), (1, 2)), spread=2, **_FULL),
    "one axis": GroupedLayer((7,), (6,), ((3, 2),), spread=4, **_FULL),
    "three axes": GroupedLayer((2, 3, 4), (3, 2, 3), ((1, 1),) * 3, spread=2, **_FULL),
    "holes": GroupedLayer((4, 5), (3, 2), ((2, 1), (1, 0)), spread=3, hole=2, **_FULL),
    "groups": GroupedLayer(
        (4, 5), (3, 3), ((0, 2), (2, 1)), spread=2, groups=4, width=2, each=3
    ),
    "windows within steps": GroupedLayer(
        (4, 5), (2, 2), ((1, 1), (0, 1)), spread=3, **_FULL
    ),
}


@pytest.fixture
def _double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fusion, "_refusals", lambda *_: [])
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", _LAYERS)
@pytest.mark.usefixtures("_double")
def test_every_way_keeps_the_meaning(name: str) -> None:
    layer = _LAYERS[name]
    assert check_ways(layer, layer.draw()) >= 3


@pytest.mark.parametrize("name", _LAYERS)
def test_no_zeros_are_written(name: str) -> None:
    told = {
        "conv_fprop": "the filters are flipped: a dilated x is a gradient to cuDNN",
        "conv_dgrad": "the filters are flipped: a dilated x is a gradient to cuDNN",
        "conv_wgrad": "x and grad_output change places: a dilated x is a gradient",
    }
    for kind, part in _LAYERS[name].parts(jnp.bfloat16).items():
        for way in legalize(part, _H200).candidates:
            assert any(note.startswith(told[kind]) for note in way.notes), kind
            assert not any("zeros" in note for note in way.notes), kind


def test_more_padding_than_windows_reach_is_written() -> None:
    layer = GroupedLayer((4, 5), (3, 3), ((3, 1), (1, 1)), spread=2, **_FULL)
    part = layer.parts(jnp.bfloat16)["conv_wgrad"]
    (way, *_) = legalize(part, _H200).candidates
    assert "the zeros of lhs_dilation are written into x" in way.notes


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (
            GroupedLayer((4, 5), (3, 3), ((1, 2), (1, 2)), spread=2, **_WIDE),
            {"conv_fprop", "conv_dgrad", "conv_wgrad"},
        ),
        (GroupedLayer((64, 64), (3, 3), hole=3, **_WIDE), {"conv_dgrad", "conv_wgrad"}),
        (
            GroupedLayer((64, 64), (8, 8), "VALID", step=8, **_WIDE),
            {"conv_dgrad", "conv_wgrad"},
        ),
    ],
    ids=["transposed", "dilated", "long steps"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_measured_kernel_judges_what_is_like_none(
    layer: GroupedLayer, kinds: set[str], dtype: str
) -> None:
    for kind, part in layer.parts(jnp.dtype(dtype)).items():
        if kind in kinds:
            assert not any(way.slower for way in ranked(part, _H200)), kind
