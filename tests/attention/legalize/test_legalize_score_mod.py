# SPDX-License-Identifier: Apache-2.0
"""Tests that a score_mod keeps its meaning in the graph that cuDNN gets.

The user's graph is evaluated by the reference, and cuDNN's graph as a flash kernel
computes it (flash.py), which checks what cuDNN is known to want. Both are in f32; the
refusal of f32 is switched off.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import score_mods, sdpa
from jax_cudnn.graph import Graph, SdpaAttributes, Tensor, from_json, to_json
from jax_cudnn.graph.attention.score_mod import gradient_steps, largest
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_graphs
from tests.attention.shared.legal import (
    HOPPER,
    assert_results_close,
    gradient_of,
    run_legal,
)
from tests.attention.shared.oracle import attention_graph, shape_of
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_SIZES = {"b": 2, "s": 5, "t": 7, "h": 6, "k": 3, "d": 5, "e": 3}

_SOFTCAP = ("div score 2", "tanh %0", "mul %1 2")
# Steps, and the axes of what they read.
_MODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "softcap": (_SOFTCAP, ()),
    "gated": (("sigmoid score", "mul score %0"), ()),
    "square": (("mul score score",), ()),
    "last": (("gt score 0.5", "select 0 score %0", "add 1 score", "mul %1 %2"), ()),
    "twins": (
        (
            *("mul mod_a mod_a", "add score score", "mul %1 %0", "tanh %2"),
            *("eq %3 %3", "select %3 %3 %4", "div 1 %2", "max %5 -1"),
        ),
        ("1h11",),
    ),
    "temperatures": (("mul score mod_a",), ("b111",)),
    "two_arrays": (("mul score mod_a", "add %0 mod_b", "tanh %1"), ("bh11", "1h1t")),
    "two_rows": (("mul score mod_a", "add %0 mod_b"), ("b1s1", "11s1")),
    "three_arrays": (
        ("max score mod_a", "min %0 mod_b", "mul %1 mod_c"),
        ("1111", "b1s1", "bhst"),
    ),
    "slopes": (("sub key query", "abs %0", "mul %1 mod_a", "sub score %2"), ("1h11",)),
    "chosen": (
        ("mul key 0", "add %0 mod_a", "gt %1 0.5", "mul score 0.5", "select -2 %3 %2"),
        ("b11t",),
    ),
}
_OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal_bias": {"is_causal": True, "bias": "1hst"},
    "lengths_mask": {"lengths": ("query_lengths", "key_lengths"), "mask": "b1st"},
    "key_lengths_causal": {"lengths": ("key_lengths",), "is_causal": True},
    "band": {"window": (1, 3), "scale": -0.3},
    "window_mask": {"window": (1, 1), "is_causal": True, "mask": "111t"},
    "row_bias": {"bias": "b1s1", "lengths": ("query_lengths",), "scale": 0.0},
}


def with_steps(graph: Graph, steps: tuple[str, ...], axes: tuple[str, ...]) -> Graph:
    """Return a forward graph with a score_mod that reads arrays with these axes."""
    (node,) = graph.nodes
    roles = [f"mod_{letter}" for letter in "abcd"[: len(axes)]]
    dtype = graph.tensor("query").dtype
    read = [
        Tensor(name=role, dtype=dtype, dims=shape_of(each, _SIZES), order=(0, 1, 2, 3))
        for role, each in zip(roles, axes, strict=True)
    ]
    attributes: Any = node.attributes
    return dataclasses.replace(
        graph,
        tensors=(*graph.tensors, *read),
        nodes=(
            dataclasses.replace(
                node,
                inputs=tuple(sorted((*node.inputs, *((x, x) for x in roles)))),
                attributes=dataclasses.replace(attributes, score_mod=steps),
            ),
        ),
        inputs=(*graph.inputs, *roles),
    )


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("others", _OTHERS)
@pytest.mark.parametrize("name", _MODS)
def test_legal_graphs_keep_the_meaning(name: str, others: str) -> None:
    graph = with_steps(
        attention_graph(sizes=_SIZES, with_stats=True, **_OTHERS[others]), *_MODS[name]
    )
    operands = draw_arrays(graph)
    outputs = evaluate(graph, operands)
    for rewrite in legalize(graph, HOPPER).candidates:
        assert rewrite.graph.tensor("query").dims[2] > 1
        assert_results_close(graph, run_legal(rewrite, operands), outputs, 3e-5)

    backward, operands = gradient_of(graph, operands, outputs, stats=len(name) % 2 == 0)
    want = evaluate(backward, operands)
    candidates = legalize(backward, HOPPER).candidates
    assert candidates
    for rewrite in candidates:
        assert_results_close(backward, run_legal(rewrite, operands), want, 3e-5)
        # What cuDNN has no gradient of is left to the reference, which is said.
        kept = set(rewrite.graph.outputs) - {"grad_query", "grad_key", "grad_value"}
        assert not kept
        is_said = any("score_mod reads" in note for note in rewrite.notes)
        assert is_said == bool(_MODS[name][1])


@pytest.mark.usefixtures("_allow_f32")
def test_a_single_query_gets_a_second_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_SIZES, "s", 1)
    test_legal_graphs_keep_the_meaning("two_arrays", "key_lengths_causal")
    test_legal_graphs_keep_the_meaning("two_rows", "causal_bias")


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("name", ["temperatures", "slopes", "two_arrays", "chosen"])
def test_a_single_key_has_no_columns_to_pad(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_SIZES, "t", 1)
    test_legal_graphs_keep_the_meaning(name, "alone")
    test_legal_graphs_keep_the_meaning(name, "key_lengths_causal")


def test_old_versions_and_five_arrays_are_refused() -> None:
    steps = ("add score mod_a", "mul %0 mod_b", "add %1 mod_c", "mul %2 mod_d")
    graph = attention_graph(sizes=_SIZES, dtype="bf16", lengths=("key_lengths",))
    four = with_steps(graph, steps, ("1h11",) * 4)
    assert "4 arrays in addition to the key lengths" in " ".join(
        legalize(four, HOPPER).reasons
    )
    old = dataclasses.replace(HOPPER, cudnn_version=91800)
    plain = with_steps(graph, _SOFTCAP, ())
    assert "cuDNN 9.19 and newer" in " ".join(legalize(plain, old).reasons)
    assert legalize(plain, HOPPER).candidates
    wide = dataclasses.replace(with_steps(graph, ("add score mod_a",), ("1h11",)))
    tensors = tuple(
        dataclasses.replace(t, dtype="f16") if t.name == "mod_a" else t
        for t in wide.tensors
    )
    wide = dataclasses.replace(wide, tensors=tensors)
    assert "mod_a, which is f16" in " ".join(legalize(wide, HOPPER).reasons)


def test_dropout_beside_steps_is_refused() -> None:
    def call(softcap: bool) -> Any:
        q, k, v = (
            jnp.zeros(shape_of(axes, _SIZES), jnp.bfloat16)
            for axes in ("bshd", "btkd", "btke")
        )
        (found,) = traced_graphs(
            lambda *x: sdpa(
                *x,
                score_mod=score_mods.softcap(2.0) if softcap else None,
                dropout_rate=0.25,
                dropout_key=jax.random.key(3),
            ),
            *(q, k, v),
        )
        return legalize(found.graph, HOPPER)

    assert call(False).candidates
    assert not call(True).candidates
    assert call(True).reasons == (
        "dropout with a score_mod that runs in the kernel; what cuDNN drops there "
        "was not compared",
    )


@pytest.mark.parametrize("name", _MODS)
def test_gradient_steps_are_the_derivative(name: str) -> None:
    steps, axes = _MODS[name]
    graph = with_steps(attention_graph(sizes=_SIZES), steps, axes)
    attributes = graph.nodes[0].attributes
    assert isinstance(attributes, SdpaAttributes)
    whole = dataclasses.replace(attributes, score_mod_grad=gradient_steps(steps))
    node = dataclasses.replace(graph.nodes[0], attributes=whole)
    checked = dataclasses.replace(graph, nodes=(node,))
    assert from_json(to_json(checked)) == checked


def test_a_bound_of_the_new_scores_is_found() -> None:
    assert largest(_SOFTCAP) == 2
    assert largest((*_SOFTCAP, "lt key 5", "select %2 -inf %3")) == 2
    assert largest(("sigmoid score", "mul %0 -8", "add %1 3", "div %2 4")) == 2.75
    assert largest(("mul score 0",)) == float("inf")  # NaN where the score is infinite
    for steps in (("mul score mod_a",), ("exp score",), ("tanh score", "div 1 %0")):
        assert largest(steps) == float("inf")
