# SPDX-License-Identifier: Apache-2.0
"""Tests that "auto" goes by what was calibrated, as far as that holds."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.calibration import storing
from jax_cudnn.graph import Graph, Target
from jax_cudnn.lowering import traced_program
from jax_cudnn.policy import evidence, measured_as, ranked, tables
from jax_cudnn.policy.products import kernels
from jax_cudnn.policy.tables import tables_for
from tests.calibration.shared import H100, first_rewrite, folder, row, rows_like
from tests.policy import answers
from tests.products.shared.grouped_layers import GroupedLayer

__all__ = ["folder"]

pytestmark = pytest.mark.once

_NEWER = replace(H100, cudnn_version=92000)
_L4 = Target(name="NVIDIA L4", sm_version=89, sm_count=58, cudnn_version=91900)


def _part(function: Any, *shapes: tuple[int, ...]) -> Graph:
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    (graph,) = traced_program(function, *operands).graphs
    (part,) = graph.parts
    return part


_PARTS: dict[str, Callable[[], Graph]] = {
    "norm": lambda: _part(jax_cudnn.rms_norm, (4096, 1024)),
    "attention": lambda: _part(jax_cudnn.sdpa, *[(2, 256, 4, 64)] * 3),
    "product": lambda: _part(jax_cudnn.matmul, (4096, 2048), (2048, 1024)),
    "depthwise": lambda: GroupedLayer((9, 8), (3, 3), groups=64).parts(jnp.bfloat16)[
        "conv_fprop"
    ],
}


def _is_xlas(part: Graph, target: Target = H100) -> bool:
    return bool(ranked(part, target)[0].slower)


@pytest.mark.parametrize("name", _PARTS)
def test_kernels_of_this_gpu_decide_in_every_family(name: str) -> None:
    part = _PARTS[name]()
    storing.store(H100, rows_like(part, 1.5))
    assert _is_xlas(part)
    told = ranked(part, H100)[0].slower
    assert "for 8 of the 8 measured kernels" in told
    assert "1.50 in the mean" in told
    assert ranked(part, H100)[0].by == "8 kernels calibrated on this GPU"
    storing.store(H100, rows_like(part, 0.2))
    first, *_ = ranked(part, H100)
    assert not first.slower
    # No row asks for other engines than those that were measured.
    assert first.fast_engines == ()
    storing.remove_all()
    assert _is_xlas(part) == (name in ("norm", "product"))


@pytest.mark.parametrize("name", ["norm", "attention", "depthwise"])
def test_too_few_kernels_decide_nothing(name: str) -> None:
    part = _PARTS[name]()
    before = ranked(part, H100)
    storing.store(H100, rows_like(part, 0.2 if before[0].slower else 1.5, 2))
    assert [bool(x.slower) for x in ranked(part, H100)] == [
        bool(x.slower) for x in before
    ]


def test_nothing_changes_where_nothing_was_calibrated() -> None:
    assert tables_for(H100).tables == tables.shipped()
    assert tables_for(H100).distances == (0.0, 1.0)
    storing.store(H100, ())
    assert tables_for(H100).tables == tables.shipped()


def test_answers_elsewhere_are_as_ever() -> None:
    """What was calibrated on one GPU decides nothing for others that were measured."""
    part = _PARTS["norm"]()
    storing.store(_L4, rows_like(part, 0.2))
    expected = json.loads(answers.FILE.read_text())
    some = dict([*answers.parts().items()][::9])
    for key, each in some.items():
        assert answers.answer(ranked(each, H100)) == expected[key], key
    assert _is_xlas(part)
    assert not _is_xlas(part, _L4)


def test_another_gpu_of_the_architecture_counts_as_further_away() -> None:
    other = replace(H100, name="NVIDIA H200")
    storing.store(other, rows_like(_PARTS["norm"](), 0.2))
    assert [table.gpu for table in tables_for(H100).tables] == [other.name, "", ""]
    assert tables_for(H100).distances == (0.5, 0.0, 1.0)
    by = "8 kernels calibrated on NVIDIA H200 with cuDNN 9.19"
    assert ranked(_PARTS["norm"](), H100)[0].by == by
    assert tables_for(other).distances == (0.0, 0.0, 1.0)


def test_another_cudnn_counts_as_further_away() -> None:
    part = _PARTS["product"]()
    storing.store(H100, rows_like(part, 0.2))
    assert tables_for(H100).distances == (0.0, 0.0, 1.0)
    # The nearest there are: what all are away by is nothing.
    assert tables_for(_NEWER).distances == (0.0, 0.0, 0.0)
    storing.remove_all()
    storing.store(_NEWER, rows_like(part, 0.2))
    assert tables_for(_NEWER).distances == (0.0, 1.0, 1.0)
    assert tables_for(H100).distances == (0.0, 1.0, 1.0)
    assert [table.cudnn for table in tables_for(H100).tables] == [919, 920, 928]
    assert tables_for(_L4).distances == (0.0, 1.5, 1.0)
    like = measured_as(part, first_rewrite(part), H100)
    assert like is not None
    far, near = (evidence.verdict_on(like, tables_for(x)) for x in (H100, _NEWER))
    assert far is not None
    assert near is not None
    assert near.ratio == pytest.approx(0.2)
    assert far.ratio > 0.3


def test_rows_of_the_nearest_table_go_before_kernels_that_are_further_away() -> None:
    part = _PARTS["norm"]()
    storing.store(_NEWER, rows_like(part, 0.2))
    assert _is_xlas(part)
    assert not _is_xlas(part, _NEWER)
    storing.store(replace(H100, cudnn_version=92100), rows_like(part, 0.3, 4))
    newest = replace(H100, cudnn_version=92100)
    assert [way.by for way in ranked(part, newest)] == [
        "4 kernels calibrated on this GPU, "
        "4 kernels calibrated on this GPU with cuDNN 9.20"
    ]


def _slow_rows(engine: int, name: str) -> list[dict[str, Any]]:
    like = rows_like(_PARTS["product"](), 3.0, 8)
    changes = {"class": name, "first_engine": engine, "engines": {}}
    return [{**each, **changes} for each in like]


def test_slow_engines_add_to_those_of_the_package() -> None:
    layer = GroupedLayer((8, 8), (3, 3), groups=1, width=64, each=64)
    part = layer.parts(jnp.bfloat16)["conv_fprop"]
    shipped = kernels.slow_engines(part, H100, tables_for(H100))
    assert shipped
    storing.store(H100, _slow_rows(97, "conv_fprop, 16 bits, alone, 2 axes"))
    assert kernels.slow_engines(part, H100, tables_for(H100)) == (*shipped, 97)
    assert kernels.slow_engines(part, _L4, tables_for(_L4)) == ()


def test_an_engine_that_was_slow_nearby_leaves_a_part_to_xla_everywhere() -> None:
    layer = GroupedLayer((8, 8), (3, 3), groups=1, width=64, each=64)
    part = layer.parts(jnp.bfloat16)["conv_fprop"]
    like = measured_as(part, first_rewrite(part), H100)
    assert like is not None
    engines = {"77": 1.0, "98": 12.0}
    storing.store(H100, [row(like, 0.5, i, engines=engines) for i in range(8)])
    for target in (H100, _NEWER, _L4):
        (first, *_) = ranked(part, target)
        assert not first.slower
        assert first.is_slow_by(98)
        assert not first.is_slow_by(77)


def test_a_plan_that_was_faster_goes_first_with_the_same_cudnn_alone() -> None:
    layer = GroupedLayer((8, 8), (3, 3), groups=1, width=64, each=64)
    part = layer.parts(jnp.bfloat16)["conv_fprop"]
    like = measured_as(part, first_rewrite(part), H100)
    assert like is not None
    engines = {"77": 1.0, "78": 0.5}
    storing.store(H100, [row(like, 1.0, i, engines=engines) for i in range(8)])
    (first, *_) = ranked(part, H100)
    preferred = {"first_engine": 77, "wanted": [{"engine": 78}]}
    assert preferred in json.loads(first.preference)["preferred"]
    (first, *_) = ranked(part, _NEWER)
    assert "77" not in first.preference
