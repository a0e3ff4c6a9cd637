# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN's graphs with dropout mean what the user's graphs do.

As in test_legalize_sdpa.py: the user's graph is evaluated by the reference, and cuDNN's
as a flash kernel computes it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import sdpa
from jax_cudnn.graph import Graph, SdpaAttributes, Target, Tensor, sdpa_graph
from jax_cudnn.legalize import Rewrite, legalize
from jax_cudnn.reference.attention.dropout import numbered
from jax_cudnn.reference.dtypes import jax_dtype
from tests.attention.shared.legal import gradient_of, run_legal
from tests.attention.shared.oracle import SIZES, shape_of
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate
from tests.products.shared.fused import graphs

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_COMPARED = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=91900)
_OTHER = dataclasses.replace(_COMPARED, cudnn_version=92700)
_SMALL = {**SIZES, "s": 21, "t": 35, "d": 5, "e": 3}
_KEPT_WHERE = {"drawn": _COMPARED, "given": _OTHER}


def _graph(
    *roles: str,
    rate: float = 0.25,
    heads: int = 0,
    entries: int = 0,
    with_stats: bool = True,
    **sizes: int,
) -> Graph:
    """Build a graph with dropout, of so many heads and batch entries in all."""
    sizes = {**_SMALL, **sizes}
    axes = {
        "query": "bhsd",
        "key": "bktd",
        "value": "bkte",
        "bias": "1hst",
        "mask": "b1st",
        "query_lengths": "b111",
        "key_lengths": "b111",
        "dropout_seed": "b111" if entries else "1111",
        "dropout_offset": "bh11",
        "dropout_mask": "bhst",
        "sinks": "1h11",
    }
    floats = ("query", "key", "value", "bias", "dropout_mask", "sinks")
    dtypes = dict.fromkeys(floats, "f32")
    dtypes["mask"] = "bool"
    drawn = () if "dropout_mask" in roles else ("dropout_seed", "dropout_offset")
    given = ("query", "key", "value", *roles, *drawn)
    attributes = SdpaAttributes(
        scale=0.3,
        is_causal=False,
        dropout=rate,
        dropout_heads=(heads or sizes["h"]) if drawn else 0,
        dropout_batch=entries if drawn else 0,
    )
    tensors = {
        role: Tensor(
            name=role,
            dtype=dtypes.get(role, "i32"),  # type: ignore[arg-type]
            dims=shape_of(axes[role], sizes),
            order=(0, 2, 1, 3) if role in ("query", "key", "value") else (0, 1, 2, 3),
        )
        for role in given
    }
    return sdpa_graph(tensors, attributes=attributes, with_stats=with_stats)


def _operands(graph: Graph) -> list[jax.Array]:
    """Draw operands; the offsets are those of a call with so many heads."""
    drawn = dict(zip(graph.inputs, draw_arrays(graph), strict=True))
    b, h, _, _ = graph.tensor("query").dims
    drawn["dropout_seed"] = jnp.full((1, 1, 1, 1), -77, jnp.int32)
    drawn["dropout_offset"] = numbered(jnp.int32(2**30 - 4), b, h)
    attributes: Any = graph.nodes[0].attributes
    if entries := attributes.dropout_batch:
        # One example after the other, each with its seed.
        seeds = np.repeat(-77 + 13 * np.arange(max(b // entries, 1)), min(b, entries))
        drawn["dropout_seed"] = jnp.asarray(seeds, jnp.int32).reshape(b, 1, 1, 1)
        own = numbered(jnp.int32(2**30 - 4), min(b, entries), h)
        drawn["dropout_offset"] = jnp.tile(own, (max(b // entries, 1), 1, 1, 1))
    return list(drawn.values())


def _run(rewrite: Rewrite, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    assert rewrite.graph.nodes[0].kind in ("sdpa", "sdpa_backward")
    return run_legal(rewrite, operands)


def _assert_close(graph: Graph, rewrite: Rewrite, got: Any, want: Any) -> None:
    for name, x, y in zip(graph.outputs, got, want, strict=True):
        atol = 2e-5
        if "dropout_seed" in _dropout_roles(rewrite):
            # A kernel that draws for itself divides by 1 - rate - 2^-16. For a quarter
            # that is 2e-5 of each term of a sum, of which some cancel.
            atol = 5e-5 * max(1.0, float(np.abs(y[np.isfinite(y)]).max()))
        np.testing.assert_allclose(x, y, rtol=5e-5, atol=atol, err_msg=name)


def _dropout_roles(rewrite: Rewrite) -> set[str]:
    roles = {role for role, _ in rewrite.graph.nodes[0].inputs}
    return {role for role in roles if role.startswith("dropout")}


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("way", _KEPT_WHERE)
@pytest.mark.parametrize(
    "roles",
    [
        (),
        ("bias",),
        ("mask",),
        ("key_lengths",),
        ("bias", "mask", "query_lengths"),
        ("sinks",),
    ],
    ids="-".join,
)
def test_legal_graphs_with_dropout_keep_the_meaning(
    roles: tuple[str, ...], way: str
) -> None:
    graph = _graph(*roles)
    operands = _operands(graph)
    target = _KEPT_WHERE[way]
    outputs = evaluate(graph, operands)
    forward = legalize(graph, target).candidates
    backward, more = gradient_of(graph, operands, outputs)
    want = evaluate(backward, more)
    gradient = legalize(backward, target).candidates
    ways = 2 if way == "drawn" else 1
    assert len(forward) == ways
    assert len(gradient) == ways * (2 if "bias" in roles else 1)
    drawn = {"dropout_seed", "dropout_offset"}
    first = drawn if way == "drawn" else {"dropout_mask"}
    assert _dropout_roles(forward[0]) == _dropout_roles(gradient[0]) == first
    assert _dropout_roles(forward[-1]) == _dropout_roles(gradient[-1])
    assert _dropout_roles(forward[-1]) == {"dropout_mask"}
    for rewrite in forward:
        _assert_close(graph, rewrite, _run(rewrite, operands), outputs)
    for rewrite in gradient:
        _assert_close(backward, rewrite, _run(rewrite, more), want)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("way", _KEPT_WHERE)
@pytest.mark.parametrize("roles", [(), ("bias", "sinks"), ("sinks",)], ids="-".join)
def test_the_log_sum_exp_need_not_be_asked_for(
    roles: tuple[str, ...], way: str
) -> None:
    graph = _graph(*roles, with_stats=False)
    operands = _operands(graph)
    outputs = evaluate(graph, operands)
    for rewrite in legalize(graph, _KEPT_WHERE[way]).candidates:
        _assert_close(graph, rewrite, _run(rewrite, operands), outputs)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize(
    "roles", [(), ("bias", "mask"), ("key_lengths",)], ids="-".join
)
def test_a_mask_of_the_callers_keeps_the_meaning(roles: tuple[str, ...]) -> None:
    graph = _graph(*roles, "dropout_mask")
    operands = dict(zip(graph.inputs, draw_arrays(graph), strict=True))
    dims = graph.tensor("dropout_mask").dims
    drawn = jax.random.bernoulli(jax.random.key(0), 0.75, dims)
    operands["dropout_mask"] = drawn.astype(jnp.float32)
    given = list(operands.values())
    outputs = evaluate(graph, given)
    backward, more = gradient_of(graph, given, outputs)
    for rewrite in legalize(graph, _COMPARED).candidates:
        _assert_close(graph, rewrite, _run(rewrite, given), outputs)
    for rewrite in legalize(backward, _COMPARED).candidates:
        _assert_close(backward, rewrite, _run(rewrite, more), evaluate(backward, more))


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("way", _KEPT_WHERE)
@pytest.mark.parametrize(("s", "t"), [(1, 35), (21, 64), (1, 192)])
def test_padded_rows_and_keys_do_not_move_what_is_dropped(
    s: int, t: int, way: str
) -> None:
    graph = _graph(s=s, t=t)
    operands = _operands(graph)
    outputs = evaluate(graph, operands)
    backward, more = gradient_of(graph, operands, outputs)
    for rewrite in legalize(backward, _KEPT_WHERE[way]).candidates:
        _assert_close(backward, rewrite, _run(rewrite, more), evaluate(backward, more))


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("way", _KEPT_WHERE)
@pytest.mark.parametrize("roles", [(), ("bias", "mask", "key_lengths")], ids="-".join)
def test_a_single_query_gets_a_second_row(roles: tuple[str, ...], way: str) -> None:
    graph = _graph(*roles, s=1)
    operands = _operands(graph)
    outputs = evaluate(graph, operands)
    for rewrite in legalize(graph, _KEPT_WHERE[way]).candidates:
        assert rewrite.graph.tensor("query").dims[2] == 2
        _assert_close(graph, rewrite, _run(rewrite, operands), outputs)


@pytest.mark.thorough
@pytest.mark.usefixtures("_allow_f32")
def test_rows_far_from_zero_have_the_gradient_of_their_mask() -> None:
    graph = _graph("bias")
    operands = dict(zip(graph.inputs, _operands(graph), strict=True))
    operands["bias"] = operands["bias"].at[:, :, ::3].add(-1e9)
    outputs = evaluate(graph, list(operands.values()))
    backward, more = gradient_of(graph, list(operands.values()), outputs)
    for rewrite in legalize(backward, _COMPARED).candidates:
        _assert_close(backward, rewrite, _run(rewrite, more), evaluate(backward, more))


@pytest.mark.parametrize(
    ("sizes", "target", "draws"),
    [
        ({}, _COMPARED, True),
        ({}, _OTHER, False),
        ({}, dataclasses.replace(_COMPARED, sm_version=80), False),
        ({}, dataclasses.replace(_COMPARED, sm_version=100), False),
        ({}, None, False),
        # A device has 6 of 12 heads: those of its next batch entry do not follow.
        ({"heads": 12}, _COMPARED, False),
        ({"heads": 12, "b": 1}, _COMPARED, True),
        # Several examples of a vmap, and a part of one.
        ({"b": 4, "entries": 2}, _COMPARED, False),
        ({"b": 3, "entries": 6}, _COMPARED, True),
        ({"b": 3, "entries": 4}, _COMPARED, False),
        ({"b": 1, "entries": 4, "heads": 12}, _COMPARED, True),
        ({"rate": 0.96875}, _COMPARED, True),
        ({"rate": 0.97}, _COMPARED, False),
    ],
)
@pytest.mark.usefixtures("_allow_f32")
def test_a_kernel_draws_where_it_draws_the_same(
    sizes: dict[str, Any], target: Target | None, draws: bool
) -> None:
    first = legalize(_graph(**sizes), target).candidates[0]
    assert ("dropout_seed" in _dropout_roles(first)) == draws
    notes = "".join(first.notes)
    assert ("which probabilities dropout keeps is written by XLA" in notes) != draws


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize(("b", "entries"), [(6, 2), (2, 4)])
def test_entries_of_several_examples_keep_the_meaning(b: int, entries: int) -> None:
    graph = _graph("bias", b=b, entries=entries)
    operands = _operands(graph)
    outputs = evaluate(graph, operands)
    backward, more = gradient_of(graph, operands, outputs)
    for each, given, want in (
        (graph, operands, outputs),
        (backward, more, evaluate(backward, more)),
    ):
        candidates = legalize(each, _COMPARED).candidates
        draws = "dropout_seed" in _dropout_roles(candidates[0])
        assert draws == (b <= entries)
        for rewrite in candidates:
            _assert_close(each, rewrite, _run(rewrite, given), want)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("has_own_keys", [True, False])
def test_a_device_with_half_of_each_example_keeps_the_meaning(
    has_own_keys: bool,
) -> None:
    """It has as many entries as an example, but they are of two."""
    x = np.random.default_rng(0).standard_normal((2, 4, 5, 3, 8)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 2)

    def call(x: Any, key: Any) -> Any:
        return sdpa(x, x, x, dropout_rate=0.5, dropout_key=key)

    axes, given = ((0, 0), keys) if has_own_keys else ((0, None), keys[0])
    ((graph, _),) = graphs(jax.vmap(call, axes), x, given)
    dims = {t.name: (t.dims[0] // 2 or 1, *t.dims[1:]) for t in graph.tensors}
    part = dataclasses.replace(
        graph,
        tensors=tuple(dataclasses.replace(t, dims=dims[t.name]) for t in graph.tensors),
    )
    own = x[:, :2].reshape(4, 5, 3, 8)
    seeds = [[-77], [13]] if has_own_keys else [[-77], [-77]]
    operands: dict[str, Any] = {
        "query": own,
        "key": own,
        "value": own,
        "dropout_seed": np.repeat(seeds, 2)[: dims["dropout_seed"][0]],
        "dropout_offset": np.tile(numbered(jnp.int32(64), 4, 3)[:2], (2, 1, 1, 1)),
    }
    arrays = [
        jnp.asarray(operands[t.name], jax_dtype(t.dtype)).reshape(t.stored_shape)
        for t in part.input_tensors
    ]
    for rewrite in legalize(part, _COMPARED).candidates:
        _assert_close(part, rewrite, _run(rewrite, arrays), evaluate(part, arrays))


def test_examples_fold_unless_cudnn_is_asked_for() -> None:
    x = jnp.ones((3, 2, 5, 4, 8), jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 3)
    for implementation, entries in (("auto", 6), ("cudnn", 2), ("xla", 6)):

        def call(x: Any, key: Any, implementation: Any = implementation) -> Any:
            return sdpa(
                x,
                x,
                x,
                dropout_rate=0.5,
                dropout_key=key,
                implementation=implementation,
            )

        found = graphs(jax.vmap(call), x, keys)
        assert [graph.tensor("query").dims[0] for graph, _ in found] == [entries]
