# SPDX-License-Identifier: Apache-2.0
"""Tests which axes may be divided, what is then a sum, and Shardy's rule."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.graph import Factors, Graph, all_kinds
from jax_cudnn.lowering.primitives import graph_p
from jax_cudnn.lowering.sharding.cuts import DeviceCut, Division, NamedCut, divide
from jax_cudnn.lowering.sharding.sharding_rule import factors_at, sharding_rule

pytestmark = pytest.mark.once


def _traced(function: Any, *shapes: tuple[int, ...]) -> list[tuple[Graph, Any]]:
    """Return the graphs that a function runs, with the shapes of their operands."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return [
        (eqn.params["graph"], tuple(x.aval.shape for x in eqn.invars))
        for eqn in jax.make_jaxpr(function)(*arrays).jaxpr.eqns
        if eqn.primitive is graph_p
    ]


def _rule(function: Any, *shapes: tuple[int, ...]) -> str:
    ((graph, operands),) = _traced(function, *shapes)
    text = sharding_rule(graph, operands, may_sum=True)
    return text.removeprefix("#sdy.op_sharding_rule<").removesuffix(", custom>")


def test_letters_of_the_table_are_letters() -> None:
    rows = [kind.row for kind in all_kinds().values()]
    for row in (*rows, *(form for each in rows for form in each.forms.values())):
        known = {x for role in row.roles.values() for a in role.axes for x in a.letters}
        assert row.whole | row.contracted | {*row.folds} <= known, row.name
        assert not row.whole & row.contracted, row.name


def test_a_product_with_rows_of_two_axes() -> None:
    assert _rule(jax_cudnn.matmul, (5, 3, 8), (8, 7)) == (
        "([i, j, k, l], [m, l, n])->([o, j, k, n]) "
        "{i=1, j=5, k=3, l=8, m=1, n=7, o=1} reduction={l}"
    )


def test_attention_divides_key_heads_and_the_query_heads_of_each() -> None:
    rule = _rule(jax_cudnn.sdpa, (2, 9, 6, 8), (2, 7, 3, 8), (2, 7, 3, 4))
    assert rule == (
        "([i, j, kl, m], [i, n, k, m], [i, n, k, o])->([i, j, kl, o]) "
        "{i=2, j=9, k=3, l=2, m=8, n=7, o=4} need_replication={j, m, n}"
    )


def test_a_convolution_with_groups() -> None:
    def conv(x: Any, w: Any) -> Any:
        return jax_cudnn.conv(x, w, padding="VALID", feature_group_count=2)

    # Spatial axes of operands and results are apart: none may be divided.
    assert _rule(conv, (3, 8, 9, 7), (10, 4, 3, 2)) == (
        "([i, jk, l, m], [jn, k, o, p])->([i, jn, q, r]) "
        "{i=3, j=2, k=4, l=9, m=7, n=5, o=3, p=2, q=7, r=6} "
        "reduction={k} need_replication={l, m, o, p, q, r}"
    )


def test_without_sums_what_is_contracted_is_whole() -> None:
    ((graph, shapes),) = _traced(jax_cudnn.matmul, (4, 8), (8, 7))
    text = sharding_rule(graph, shapes, may_sum=False)
    assert "reduction" not in text
    assert "need_replication={k}" in text


# --- cuts -----------------------------------------------------------------------------


def _divided(
    graph: Graph, shapes: Any, given: list[tuple[str, list[NamedCut | None]]]
) -> dict[str, tuple[int, ...]]:
    division = divide(factors_at(graph, shapes), given)
    return {t.name: division.local_shape(t.name) for t in graph.tensors}


def _named(**sizes: int) -> NamedCut:
    return NamedCut(tuple(sizes.items()))


def test_one_table_of_cuts_divides_all_tensors() -> None:
    ((graph, shapes),) = _traced(
        jax_cudnn.sdpa, (2, 9, 6, 8), (2, 7, 3, 8), (2, 7, 3, 4)
    )
    found = _divided(graph, shapes, [("query", [None, None, _named(x=3), None])])
    assert found["query"] == (2, 9, 2, 8)
    assert found["key"] == (2, 7, 1, 8)
    assert found["output"] == (2, 9, 2, 4)


def test_query_heads_of_one_key_head_are_divided_where_key_heads_are() -> None:
    ((graph, shapes),) = _traced(
        jax_cudnn.sdpa, (2, 9, 6, 8), (2, 7, 3, 8), (2, 7, 3, 4)
    )
    cut = NamedCut((("x", 3), ("y", 2)))
    found = _divided(graph, shapes, [("query", [None, None, cut, None])])
    assert found["query"] == (2, 9, 1, 8)
    assert found["key"] == (2, 7, 1, 8)
    # Alone, parts of groups would be on one device with parts of others.
    cut = NamedCut((("y", 2),))
    found = _divided(graph, shapes, [("query", [None, None, cut, None])])
    assert found["query"] == (2, 9, 6, 8)


def test_a_device_may_have_one_of_each_factor() -> None:
    factors = Factors(
        sizes=(4, 2), axes={"x": ((0, 1),)}, whole=frozenset(), partial={}
    )
    given = [("x", [NamedCut((("x", 4), ("y", 2)))])]
    assert divide(factors, given).local_shape("x") == (1,)
    # With two of the slower one, it would have two pieces.
    assert not Division(factors, {0: _named(x=2), 1: _named(y=2)}).is_contiguous()


def test_the_larger_of_two_rivals_keeps_its_cut() -> None:
    ((graph, shapes),) = _traced(jax_cudnn.matmul, (20, 8), (8, 6))
    rows, columns = ("a", [None, _named(x=2), None]), ("b", [None, None, _named(x=2)])
    for given in ([rows, columns], [columns, rows]):
        found = _divided(graph, shapes, given)
        assert (found["a"], found["b"]) == ((1, 10, 8), (1, 8, 6))


def test_what_does_not_divide_is_whole() -> None:
    ((graph, shapes),) = _traced(jax_cudnn.matmul, (9, 8), (8, 6))
    assert _divided(graph, shapes, [("a", [None, _named(x=2), None])])["a"] == (1, 9, 8)


def test_cuts_by_devices_split_and_are_independent_as_meshes_are() -> None:
    x = DeviceCut(4, (0, 0, 1, 1, 2, 2, 3, 3))
    y = DeviceCut(2, (0, 1) * 4)
    assert x.is_independent_of([y])
    assert not x.is_independent_of([DeviceCut(2, (0, 0, 0, 0, 1, 1, 1, 1))])
    assert x.split(2) == (
        DeviceCut(2, (0, 0, 0, 0, 1, 1, 1, 1)),
        DeviceCut(2, (0, 0, 1, 1, 0, 0, 1, 1)),
    )
    assert x.split(3) is None
    assert _named(x=4).split(2) is None  # half of an axis has no name
