# SPDX-License-Identifier: Apache-2.0
"""Tests that the rows of the limits apply to the right kernels, versions and GPUs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import limits
from jax_cudnn.graph import (
    DTypeName,
    Graph,
    Target,
    Tensor,
    grouped_matmul_graph,
    is_anchor,
)
from jax_cudnn.graph.kinds import all_kinds, roles_in
from jax_cudnn.graph.products.conv import TRIPLES
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_program
from tests.attention.shared.f8_graphs import f8_graph
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate, evaluate_legal
from tests.norms.problems import Problem, backward_of
from tests.products.shared.conv_graphs import conv_graph
from tests.tools.script import load_script

pytestmark = pytest.mark.once

_KINDS = tuple(TRIPLES)
_CHANNELS_LAST = ("NDHWC", "DHWIO", "NDHWC")


def _target(cudnn: int, sm: int = 90) -> Target:
    return Target(name=f"sm_{sm}", sm_version=sm, sm_count=132, cudnn_version=cudnn)


def _tensor(name: str, dtype: DTypeName, *dims: int) -> Tensor:
    order = tuple(range(len(dims)))
    return Tensor(name=name, dtype=dtype, dims=dims, order=order)


def _runs(graph: Graph, target: Target | None) -> bool:
    return bool(legalize(graph, target).candidates)


# --- norms ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "dims", "order", "is_met"),
    [
        ("f16", (3, 7, 1, 121), (0, 3, 1, 2), True),
        ("f16", (3, 7, 1, 121), (0, 1, 2, 3), False),  # channels first
        ("f16", (3, 7, 1, 122), (0, 3, 1, 2), False),
        ("f16", (1, 7, 1, 121), (0, 3, 1, 2), False),
        ("bf16", (3, 7, 1, 121), (0, 3, 1, 2), True),
        ("f32", (3, 7, 1, 121), (0, 3, 1, 2), False),
    ],
)
def test_group_norms_of_odd_images(
    dtype: DTypeName, dims: Any, order: Any, is_met: bool
) -> None:
    problem = Problem(
        kind="group_norm",
        dtype=dtype,
        scale=dtype,
        bias=dtype,
        dims=dims,
        order=order,
        with_statistics=True,
    )
    gradient = backward_of(problem.graph)
    assert _runs(gradient, _target(92801)) != is_met
    assert _runs(gradient, _target(91900))
    assert _runs(problem.graph, _target(92801))


# --- convolutions ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
    ("dtype", "first", "last", "sentence"),
    [
        ("bf16", 90800, 91499, "cuDNN 9.8 to 9.14: 3-D convolutions of bf16 and f16"),
        ("f16", 90800, 91499, "cuDNN 9.8 to 9.14: 3-D convolutions of bf16 and f16"),
        ("f32", 91002, 91599, "cuDNN 9.10.2 to 9.15: 3-D convolutions of f32 in"),
    ],
)
def test_3d_convolutions_are_left_to_xla_by_versions_that_are_wrong(
    kind: str, dtype: DTypeName, first: int, last: int, sentence: str
) -> None:
    graph = conv_graph(kind, dtype)
    for sm in (80, 90, 100, 120):
        for version in (first, (first + last) // 2, last):
            refused = legalize(graph, _target(version, sm))
            assert not refused.candidates
            (reason,) = refused.reasons
            assert reason.startswith(sentence)
            assert reason.endswith(f"Use cuDNN 9.{last // 100 - 899} or newer")
            assert 'implementation="xla"' in refused.advice
        # cuDNN before 9.8 has no fusions at all.
        assert _runs(graph, _target(last + 1, sm))
        assert dtype != "f32" or _runs(graph, _target(first - 1, sm))
    assert _runs(graph, None)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("axes", [1, 2])
def test_fewer_axes_are_right(kind: str, dtype: DTypeName, axes: int) -> None:
    """One axis becomes two, not three."""
    legalization = legalize(conv_graph(kind, dtype, axes=axes), _target(91300))
    assert legalization.candidates
    for way in legalization.candidates:
        assert all(len(tensor.dims) <= 4 for tensor in way.graph.tensors)


@pytest.mark.parametrize("kind", _KINDS)
def test_windows_of_one_element_are_right_in_16_bits(kind: str) -> None:
    assert _runs(conv_graph(kind, "bf16", window=1), _target(91300))
    assert not _runs(conv_graph(kind, "f32", window=1), _target(91300))


def test_patches_in_three_axes_are_windows_of_one_element() -> None:
    """The layer is written so for every version: what is asked for is what counts."""

    def patches(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_cudnn.conv(
            x, w, (4, 4, 4), "VALID", dimension_numbers=_CHANNELS_LAST
        )

    x = jax.ShapeDtypeStruct((2, 8, 8, 8, 3), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, 4, 4, 3, 64), jnp.bfloat16)
    (traced,) = traced_program(patches, x, w).graphs
    ways = legalize(traced.graph, _target(91300)).candidates
    assert ways
    for way in ways:
        (node,) = filter(is_anchor, way.graph.nodes)
        assert {*way.graph.tensor(dict(node.inputs)["w"]).dims[2:]} == {1}
    assert len(ways) < len(legalize(traced.graph, _target(91900)).candidates)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_what_surrounds_a_convolution_makes_no_difference(activation: Any) -> None:
    def layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        y = jax_cudnn.conv(
            x,
            w,
            (1, 1, 1),
            "SAME",
            dimension_numbers=_CHANNELS_LAST,
            bias=bias,
            activation=activation,
        )
        return y.sum()

    shapes = ((2, 8, 8, 8, 16), (3, 3, 3, 16, 32), (32,))
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = traced_program(jax.grad(layer, (0, 1, 2)), *operands)
    parts = [
        part
        for traced in program.graphs
        for part in traced.parts
        if any(map(is_anchor, part.nodes))
    ]
    assert {n.kind for part in parts for n in part.nodes if is_anchor(n)} == {*_KINDS}
    assert not any(_runs(part, _target(91400)) for part in parts)
    assert all(_runs(part, _target(91500)) for part in parts)


@pytest.mark.parametrize("kind", _KINDS)
def test_large_depthwise_convolutions_are_left_to_xla(kind: str) -> None:
    def graph(size: int, groups: int) -> Graph:
        return conv_graph(
            kind, "bf16", axes=2, channels=32, groups=groups, size=size, batch=16
        )

    for groups, version, size, runs in (
        (32, 91100, 2048, False),
        (32, 91499, 2048, False),
        (32, 91500, 2048, True),
        (32, 91002, 2048, True),
        (32, 91200, 2047, True),
        (1, 91200, 2048, True),
    ):
        legalization = legalize(graph(size, groups), _target(version))
        kept = [
            way
            for way in legalization.candidates
            if any(
                way.graph.tensor(n).dims[1] == 1
                for node in way.graph.nodes
                if is_anchor(node)
                for _, n in (*node.inputs, *node.outputs)
            )
        ]
        assert bool(kept) == (runs and groups > 1), (groups, version, size)
        # Groups that were merged are no such convolution.
        assert legalization.candidates


@pytest.mark.parametrize("mode", ["relu", "relu6", "neg"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_no_relu_goes_before_a_filter_s_gradient_on_blackwell(
    mode: str, dtype: DTypeName
) -> None:
    graph = conv_graph("conv_wgrad", dtype, axes=2, prologue=mode)
    for sm in (80, 90, 100, 103, 120):
        ways = legalize(graph, _target(92801, sm)).candidates
        within = [way for way in ways if len(way.graph.nodes) > 1]
        is_refused = mode != "neg" and 100 <= sm < 110
        assert bool(within) != is_refused
        alone = [way for way in ways if len(way.graph.nodes) == 1]
        assert "operands are computed by XLA before the kernel" in alone[0].notes
        operands = draw_arrays(graph)
        for way in alone:
            got = evaluate_legal(way, operands)
            for x, y in zip(got, evaluate(graph, operands), strict=True):
                np.testing.assert_allclose(
                    np.asarray(x, "f4"), np.asarray(y, "f4"), rtol=2**-7, atol=1e-3
                )


# --- grouped products -----------------------------------------------------------------


def test_a_single_group_is_no_grouped_product_for_cudnn() -> None:
    """Nothing that legalisation writes has one, for any version; the row is a guard."""

    for groups in (1, 2):
        graph = grouped_matmul_graph(
            {
                "a": _tensor("a", "bf16", 1, 24, 16),
                "b": _tensor("b", "bf16", groups, 16, 8),
                "group_sizes": _tensor("group_sizes", "i32", 1, groups),
            },
            "bf16",
        )
        for version in (91500, 91900, 92700, 92800, 92801):
            target = _target(version)
            is_met = bool(limits.met(graph, target))
            assert is_met == (groups == 1 and version >= 92800)
            kinds = {
                node.kind
                for way in legalize(graph, target).candidates
                for node in way.graph.nodes
            }
            assert ("grouped_matmul" in kinds) == (groups > 1)


# --- the table ------------------------------------------------------------------------


_ROWS = (*limits.LIMITS, *limits.WORKAROUNDS)


def test_every_row_is_of_kinds_and_versions_that_there_are() -> None:
    for row in _ROWS:
        assert row.versions
        assert row.gpus
        assert row.what == row.what.rstrip(".")
        assert "|" not in row.what + row.done + row.source
    kinds = {*all_kinds()}
    for limit in limits.LIMITS:
        assert limit.kinds
        assert limit.kinds <= kinds
        # It would be dropped for a GPU that may well take it.
        assert not limit.is_of_unknown
    # What is of all GPUs and versions needs no row to ask.
    assert not any(row.is_general for row in limits.WORKAROUNDS)


def test_every_row_has_its_words() -> None:
    graph = f8_graph()
    roles = roles_in(graph, graph.nodes[0])
    for row in _ROWS:
        assert not {*row.message(_target(91900), roles)} & {*"{}"}


# Of each row that is no bug, or is written around: targets that have it, and the next
# ones that do not, as (architecture, version).
_ENDS = {
    "there is no attention": ([(79, 91900)], [(80, 91900)]),
    "there is no attention over pages": ([(90, 90499)], [(90, 90500)]),
    "`score_mod` was not tried": ([(90, 91899)], [(90, 91900), (80, 92800)]),
    "there is no f8 attention": ([(89, 91900)], [(90, 91900), (120, 91900)]),
    "f8 attention gives no results in bf16": (
        [(90, 92800), (99, 91300), (100, 91299), (120, 91200)],
        [(100, 91300), (120, 92800)],
    ),
    "f8 attention takes head sizes of at most 256": ([(99, 91900)], [(100, 91900)]),
    "f8 attention takes head sizes of at most 128": ([(100, 92800)], [(99, 91900)]),
    "f8 attention does not take head sizes of 192": (
        [(100, 91899), (120, 91800)],
        [(100, 91900), (90, 91800)],
    ),
    "there are no matmuls with a scale for each block": (
        [(99, 92700)],
        [(100, 92700), (120, 92700)],
    ),
    "matmuls with a scale for each block": ([(100, 91899)], [(100, 91900)]),
    "there are no engines that compile": ([(79, 91900)], [(80, 91900)]),
    "matmuls and convolutions were not": ([(90, 90799)], [(90, 90800)]),
    "there are no f8 matmuls and convolutions": ([(88, 91900)], [(89, 91900)]),
    "there are no grouped matmuls": ([(79, 91900)], [(80, 91900)]),
    "there is no operation for grouped matmuls": ([(90, 91499)], [(90, 91500)]),
    "norms write no f8": ([(88, 91900)], [(89, 91900)]),
    "norms support few sizes": ([(79, 91900)], [(80, 91900)]),
    "norms were not tried": ([(90, 90799)], [(90, 90800)]),
    "without lengths, and if t % 128": ([(90, 91500), (80, 91400)], [(90, 91501)]),
    "keys of a batch entry whose query length": (
        [(90, 91400)],
        [(90, 91900), (80, 92800)],
    ),
    "there is no log-sum-exp of packed": (
        [(80, 91900), (89, 91900), (110, 92800), (120, 92800)],
        [(90, 91000), (103, 92800), (109, 91900)],
    ),
    "gradients of packed sequences are wrong": (
        [(90, 91400), (80, 91899), (100, 91899)],
        [(90, 91900), (80, 92800)],
    ),
    "f8 attention has no plan for a single query": ([(99, 92800)], [(100, 91900)]),
    "the dropout of cuDNN's kernel": (
        [(90, 91899), (90, 91901), (89, 91900), (100, 91900)],
        [(90, 91900)],
    ),
}


_WITH_ENDS: list[limits.Row] = [each for each in limits.LIMITS if each.lacking]
_WITH_ENDS += limits.WORKAROUNDS


@pytest.mark.parametrize("what", _ENDS)
def test_where_rows_begin_and_end(what: str) -> None:
    found = [row for row in _WITH_ENDS if row.what.startswith(what)]
    row = min(found, key=lambda row: len(row.what))
    have, have_not = _ENDS[what]
    assert all(row.is_here(_target(version, sm)) for sm, version in have)
    assert not any(row.is_here(_target(version, sm)) for sm, version in have_not)
    assert row.is_here(None) == row.is_of_unknown


def test_every_row_that_is_no_bug_has_its_ends_above() -> None:
    assert len(_ENDS) == len(_WITH_ENDS)


def test_a_lack_is_of_what_is_asked_for_however_it_is_written() -> None:
    """A product of each group, or sums that XLA converts, are no way around it."""
    graph = grouped_matmul_graph(
        {
            "a": _tensor("a", "bf16", 1, 24, 16),
            "b": _tensor("b", "bf16", 2, 16, 8),
            "group_sizes": _tensor("group_sizes", "i32", 1, 2),
        },
        "bf16",
    )
    assert _runs(graph, _target(91500))
    refused = legalize(graph, _target(91499))
    assert not refused.candidates
    assert refused.reasons == ("cuDNN 9.14.99 is older than 9.15",)


@pytest.mark.parametrize(
    ("versions", "gpus", "where"),
    [
        (range(90800, 91500), None, "cuDNN 9.8 to 9.14"),
        (range(91400, 91500), None, "cuDNN 9.14"),
        (range(91002, 91600), None, "cuDNN 9.10.2 to 9.15"),
        (range(91000, 91001), None, "cuDNN 9.10.0"),
        (range(91501, 91503), None, "cuDNN 9.15.1 to 9.15.2"),
        (range(92700), range(90, 91), "cuDNN up to 9.26 on sm_90"),
        (range(92801, 1_000_000), range(100, 110), "cuDNN 9.28.1 and newer on sm_100"),
        (None, range(100, 110), "sm_100 to sm_109"),
        (None, range(100, 10_000), "sm_100 and newer"),
        (None, range(80), "GPUs before sm_80"),
    ],
)
def test_versions_and_gpus_are_told(
    versions: range | None, gpus: range | None, where: str
) -> None:
    changes = {"versions": versions, "gpus": gpus}
    given = {name: x for name, x in changes.items() if x is not None}
    (general,) = (each for each in limits.LIMITS if each.is_general)
    limit = dataclasses.replace(general, **given)
    assert limit.where.startswith(where)
    assert limit.reason.startswith(f"{where}")
    assert ("Use cuDNN" in limit.reason) == (limit.fixed is not None)


def test_all_but_some_versions_and_gpus_are_told() -> None:
    row = dataclasses.replace(
        limits.WORKAROUNDS[0],
        versions=range(91900, 91901),
        gpus=range(90, 91),
        elsewhere=True,
    )
    assert row.reason == f"all but cuDNN 9.19.0 on sm_90: {row.what}"
    assert row.fixed is None


def test_an_unknown_gpu_has_general_limits_only() -> None:
    for limit in limits.LIMITS:
        if not limit.is_general:
            for kind in _KINDS:
                graph = conv_graph(kind, "bf16")
                assert not limit.is_met(graph, None)


def test_the_page_has_the_rows() -> None:
    script = load_script("known_bugs")
    page = script.PAGE.read_text()
    assert limits.table() in page
    assert script.text(page) == page, "run python -m scripts.known_bugs"
