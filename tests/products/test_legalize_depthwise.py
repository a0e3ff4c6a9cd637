# SPDX-License-Identifier: Apache-2.0
"""Tests the rewrites of depthwise convolutions, and which one comes first.

In f64, as in test_legalize_convs.py.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.graph import Graph, Target, operand_text
from jax_cudnn.legalize import Rewrite
from jax_cudnn.legalize.products import conv_depthwise, fusion
from jax_cudnn.policy import ranked
from jax_cudnn.policy.products import kernels
from jax_cudnn.policy.tables import tables_for
from tests.common.legal_ways import check_bad_numbers, check_ways
from tests.products.convs import measured_depthwise as depthwise
from tests.products.shared.grouped_layers import GroupedLayer

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_H100 = Target(name="NVIDIA H100", sm_version=90, sm_count=132, cudnn_version=91900)
_ROOT = Path(__file__).parents[2]
_H200 = dataclasses.replace(_H100, name="NVIDIA H200", cudnn_version=92801)
_A100 = dataclasses.replace(_H100, name="NVIDIA A100", sm_version=80)
_NEWER = dataclasses.replace(_H100, cudnn_version=92000)
_FLIPPED = "the filters are flipped: the gradient is a convolution to cuDNN"


@pytest.fixture
def _double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fusion, "_refusals", lambda *_: [])
    monkeypatch.setattr(conv_depthwise, "_NARROW", ("f64", "bf16", "f16"))
    with jax.enable_x64(True):
        yield


_CAUSAL = ((3, 0),)
_LAYERS = {
    "same": GroupedLayer((7, 6), (3, 3)),
    "valid": GroupedLayer((9, 8), (5, 5), "VALID"),
    "far padding": GroupedLayer((5, 6), (3, 3), ((4, 3), (2, 5))),
    "cut": GroupedLayer((7, 6), (3, 3), ((-1, 2), (1, -1))),
    "steps": GroupedLayer((9, 8), (3, 3), step=2),
    "steps of 3": GroupedLayer((9, 8), (3, 3), step=3),
    "even windows": GroupedLayer((7, 6), (2, 2)),
    "unequal windows": GroupedLayer((7, 6), (1, 5)),
    "large windows": GroupedLayer((10, 11), (9, 9)),
    "holes": GroupedLayer((9, 8), (3, 3), hole=2),
    "large holes": GroupedLayer((11, 12), (3, 3), hole=4),
    "2 each": GroupedLayer((7, 6), (3, 3), each=2),
    "few channels": GroupedLayer((7, 6), (3, 3), groups=4),
    "odd channels": GroupedLayer((7, 6), (3, 3), groups=13),
    "causal": GroupedLayer((11,), (4,), _CAUSAL),
    "causal, 9 taps": GroupedLayer((11,), (9,), ((8, 0),)),
    "anticausal": GroupedLayer((11,), (4,), ((0, 3),)),
    "one axis, same": GroupedLayer((11,), (5,)),
    "one axis, same, even": GroupedLayer((11,), (6,)),
    "one axis, valid": GroupedLayer((11,), (4,), "VALID"),
    "one axis, steps": GroupedLayer((12,), (3,), step=2),
    "one axis, holes": GroupedLayer((12,), (3,), hole=3),
    "one axis, large holes": GroupedLayer((50,), (3,), hole=20),
    "longer than x": GroupedLayer((3,), (6,)),
    "transposed": GroupedLayer((5, 6), (3, 3), ((1, 2), (1, 2)), spread=2),
    "transposed, 2 each": GroupedLayer(
        (5, 6), (3, 3), ((1, 2), (1, 2)), spread=2, each=2
    ),
    "one axis, transposed": GroupedLayer((7,), (4,), ((2, 2),), spread=2),
    "three axes": GroupedLayer((4, 5, 3), (3, 3, 3)),
    "with silu": GroupedLayer((7, 6), (3, 3), activation="silu"),
    "one axis, with silu": GroupedLayer((11,), (4,), _CAUSAL, activation="silu"),
}


@pytest.mark.parametrize("name", _LAYERS)
@pytest.mark.usefixtures("_double")
def test_every_way_keeps_the_meaning(name: str) -> None:
    layer = _LAYERS[name]
    assert check_ways(layer, layer.draw()) >= 3


def _ways(part: Graph, target: Target | None = _H100) -> list[str]:
    """Return how each way is told apart, and "auto" where auto may take it."""
    return [
        f"{_told(way.rewrite)}{'' if way.slower else ', auto'}"
        for way in ranked(part, target)
    ]


def _told(way: Rewrite) -> str:
    for words, told in (
        ("are merged", "merged"),
        (_FLIPPED, "flipped"),
        ("the gradient is of windows", "wider"),
    ):
        if any(words in note for note in way.notes):
            return told
    return "as it is"


_ENGINE = {
    "conv_fprop": ["as it is, auto", "merged"],
    "conv_dgrad": ["flipped, auto", "as it is", "merged"],
    "conv_wgrad": ["as it is, auto", "merged"],
}
# No factor of 13 fills a load.
_PRIME = {
    "conv_fprop": ["as it is, auto"],
    "conv_dgrad": ["flipped, auto", "as it is"],
    "conv_wgrad": ["as it is, auto"],
}
# Along one axis, sums of up to 8 taps are XLA's.
_ALONG_ONE = {
    "conv_fprop": ["as it is", "merged"],
    "conv_dgrad": ["as it is", "merged"],
    "conv_wgrad": ["merged", "wider", "as it is"],
}
_MERGED = {
    "conv_fprop": ["merged, auto", "as it is"],
    "conv_dgrad": ["merged, auto", "as it is"],
    "conv_wgrad": ["merged, auto", "as it is"],
}
_DILATED = {**_MERGED, "conv_wgrad": ["merged, auto", "as it is, auto"]}
_WIDER = {**_MERGED, "conv_wgrad": ["wider, auto", "as it is", "merged"]}


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("same", _ENGINE),
        ("valid", _ENGINE),
        ("far padding", _ENGINE),
        ("odd channels", _PRIME),
        (
            "steps",
            {
                "conv_fprop": ["as it is, auto", "merged"],
                "conv_dgrad": ["as it is", "merged"],
                "conv_wgrad": ["as it is, auto", "merged"],
            },
        ),
        (
            "causal, 9 taps",
            {
                "conv_fprop": ["as it is, auto", "merged"],
                "conv_dgrad": ["as it is, auto", "merged"],
                "conv_wgrad": ["merged, auto", "wider, auto", "as it is"],
            },
        ),
        ("causal", _ALONG_ONE),
        ("anticausal", _ALONG_ONE),
        ("one axis, same, even", _ALONG_ONE),
        ("one axis, same", {**_ALONG_ONE, "conv_wgrad": ["merged", "as it is"]}),
        ("one axis, valid", {**_ALONG_ONE, "conv_wgrad": ["merged", "as it is"]}),
        ("one axis, steps", {**_ALONG_ONE, "conv_wgrad": ["merged", "as it is"]}),
        ("even windows", _WIDER),
        ("unequal windows", _WIDER),
        (
            "holes",
            {**_MERGED, "conv_wgrad": ["wider, auto", "as it is, auto", "merged"]},
        ),
        (
            "one axis, holes",
            {
                "conv_fprop": ["merged", "as it is"],
                "conv_dgrad": ["merged", "as it is"],
                "conv_wgrad": ["merged", "wider", "as it is"],
            },
        ),
        # Windows of 9 x 9, or of 41 elements, do not get wider.
        ("large holes", _DILATED),
        (
            "one axis, large holes",
            {kind: ["merged", "as it is"] for kind in _MERGED},
        ),
        ("large windows", _MERGED),
        ("three axes", _MERGED),
        ("2 each", _MERGED),
        # The convolution is a gradient in steps of 2, and the other way round.
        (
            "transposed",
            {
                "conv_fprop": ["as it is", "merged"],
                "conv_dgrad": ["as it is, auto", "merged"],
                "conv_wgrad": ["as it is, auto", "merged"],
            },
        ),
        (
            "transposed, 2 each",
            {
                "conv_fprop": ["merged", "as it is"],
                "conv_dgrad": ["merged, auto", "as it is"],
                "conv_wgrad": ["merged, auto", "as it is"],
            },
        ),
        ("steps of 3", {**_MERGED, "conv_dgrad": ["merged", "as it is"]}),
    ],
)
def test_cudnns_own_engine_comes_first_where_it_has_one(
    name: str, ways: dict[str, list[str]]
) -> None:
    parts = _LAYERS[name].parts(jnp.bfloat16)
    assert {kind: _ways(part) for kind, part in parts.items()} == ways


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("same", {**_ENGINE, "conv_wgrad": ["as it is", "merged"]}),
        # What was not measured in f32 is XLA's.
        (
            "causal",
            {
                "conv_fprop": ["as it is", "merged"],
                "conv_dgrad": ["as it is", "merged"],
                "conv_wgrad": ["as it is", "merged"],
            },
        ),
        (
            "holes",
            {
                "conv_fprop": ["merged", "as it is"],
                "conv_dgrad": ["merged", "as it is"],
                "conv_wgrad": ["as it is", "merged"],
            },
        ),
    ],
)
def test_f32(name: str, ways: dict[str, list[str]]) -> None:
    parts = _LAYERS[name].parts(jnp.float32)
    assert {kind: _ways(part) for kind, part in parts.items()} == ways


def test_what_follows_is_computed_by_xla_behind_cudnns_engine() -> None:
    part = _LAYERS["one axis, with silu"].parts(jnp.bfloat16)["conv_fprop"]
    # Of few taps along one axis, XLA computes a sum.
    assert _ways(part) == ["as it is", "merged", "merged", "as it is"]
    alone, merged, *whole = (way.rewrite for way in ranked(part, _H100))
    assert len(alone.graph.nodes) == len(merged.graph.nodes) == 1
    assert all(len(way.graph.nodes) > 1 for way in whole)


@pytest.mark.parametrize("target", [None, _A100, _NEWER])
def test_elsewhere_only_gradients_of_filters_are_cudnns(target: Target | None) -> None:
    for name in ("same", "causal"):
        for kind, part in _LAYERS[name].parts(jnp.bfloat16).items():
            ways = ranked(part, target)
            taken = [way for way in ways if not way.slower]
            # Of few taps along one axis, XLA computes a sum.
            assert bool(taken) == (name == "same" and kind == "conv_wgrad"), kind
            first, *_ = taken or ways
            # Numbers of engines may stand for others there.
            assert not first.is_slow_by(77)
            own = kernels.own_engines(part, tables_for(target))
            assert own
            assert not any(map(first.is_slow_by, own))


@pytest.mark.parametrize("target", [None, _A100, _NEWER])
def test_elsewhere_merged_groups_are_left_to_xla(target: Target | None) -> None:
    for name in _LAYERS:
        for part in _LAYERS[name].parts(jnp.bfloat16).values():
            for way in ranked(part, target):
                assert way.slower or _told(way.rewrite) != "merged", name


@pytest.mark.parametrize(
    ("name", "kind", "fast"),
    [
        ("same", "conv_fprop", [5, 57]),
        ("same", "conv_dgrad", [5, 57]),
        ("same", "conv_wgrad", [16, 19]),
        ("causal, 9 taps", "conv_dgrad", [6]),
        ("causal, 9 taps", "conv_wgrad", [9, 10, 65]),
        ("holes", "conv_fprop", [22, 62, 71]),
        ("holes", "conv_dgrad", [22, 40, 46, 67]),
    ],
)
def test_other_engines_are_left_to_xla(name: str, kind: str, fast: list[int]) -> None:
    part = _LAYERS[name].parts(jnp.bfloat16)[kind]
    first = ranked(part, _H100)[0]
    assert [e for e in range(80) if not first.is_slow_by(e)] == fast


@pytest.mark.parametrize(
    ("file", "target", "fewest", "kept", "lost"),
    [
        # Without an engine of its own for f32, another kernel takes 1.25 of XLA's time.
        ("depthwise", _H100, 90, [("conv_wgrad, filters [3,3,1,192]", "f32", 61)], []),
        # Kernels most like these decide, which take 30 us or have other windows.
        (
            "depthwise_9.28",
            _H200,
            50,
            [("conv_dgrad", "bf16", 5)] * 2,
            [("conv_dgrad, steps of 2", 6)],
        ),
    ],
)
def test_auto_goes_by_what_was_measured(
    file: str,
    target: Target,
    fewest: int,
    kept: list[tuple[str, str, int]],
    lost: list[tuple[str, int]],
) -> None:
    """In each row of the table whose first way is clearly faster or slower."""
    file_of_rows = _ROOT / f"docs/internals/measured/{file}.json"
    data = json.loads(file_of_rows.read_text())
    rows = {(row["op"], row["operands"]): row for row in data["rows"]}
    assert data["environment"]["cuDNN"].startswith(
        f"9.{target.cudnn_version // 100 % 100}."
    )
    left, slow, judged = [], [], 0
    for cell in depthwise.MEASURED:
        for part in cell.parts():
            row = rows.get((depthwise.named_op(part), operand_text(part)))
            if row is None:
                continue
            first = ranked(part, target)[0]
            if "sum of shifted products" in first.slower:
                continue  # It was measured beside another code of XLA's.
            name = f"{depthwise.way_of(first.rewrite, first.rewrite)}, first"
            engine, us = row["engines"][name], row["us"]
            ratio = us[name] / us["XLA"]
            is_cudnns = not first.slower and not first.is_slow_by(engine)
            judged += 1
            if ratio < 0.8 and not is_cudnns:
                left.append((row["op"], row["operands"].split("[")[0], engine))
            if ratio > 1.2 and is_cudnns and us[name] > 60:
                slow.append((row["op"], engine))
    assert judged > fewest
    assert slow == lost
    assert left == kept


@pytest.mark.parametrize("target", [_H100, _H200])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("taps", "options"),
    [(4, {"ends": (3, 0)}), (3, {"hole": 4}), (7, {"step": 2}), (8, {})],
)
def test_sums_of_few_shifted_products_are_left_to_xla(
    taps: int,
    options: dict[str, Any],
    dtype: str,
    activation: str | None,
    target: Target,
) -> None:
    """Whatever was measured of other depthwise convolutions."""
    cell = depthwise.Depthwise(
        images=(32, 2048, 256),
        window=taps,
        dtype=dtype,
        activation=activation,
        **options,
    )
    for part in cell.parts():
        for way in ranked(part, target):
            assert "sum of shifted products" in way.slower, way


@pytest.mark.parametrize("target", [None, _H100, _NEWER])
@pytest.mark.parametrize(
    ("name", "kind", "first"),
    [
        ("same", "conv_wgrad", 61),
        ("large windows", "conv_fprop", 45),
        ("large windows", "conv_wgrad", 49),
        ("causal, 9 taps", "conv_wgrad", 33),
    ],
)
def test_a_faster_engine_goes_before_the_first(
    name: str, kind: str, first: int, target: Target | None
) -> None:
    part = _LAYERS[name].parts(jnp.float16)[kind]
    preferred = ranked(part, target)[0].preference
    assert (f'"first_engine":{first},' in preferred) == (target is _H100)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name",
    ["same", "steps", "causal", "anticausal", "holes", "even windows", "far padding"],
)
@pytest.mark.usefixtures("_double")
def test_bad_numbers_stay_in_their_channel_and_windows(name: str, bad: float) -> None:
    for kind, part in _LAYERS[name].parts().items():
        # What a gradient of merged filters gets of other channels is left out.
        check_bad_numbers(
            part,
            _H100,
            bad,
            lambda way, kind=kind: kind == "conv_wgrad" or _told(way) != "merged",
        )
