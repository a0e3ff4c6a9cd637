# SPDX-License-Identifier: Apache-2.0
"""Tests what kernels get of packed sequences, and that it means the same."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jax_cudnn
from jax_cudnn.graph import (
    Graph,
    SdpaAttributes,
    Target,
    Tensor,
    from_json,
    sdpa_graph,
    to_json,
)
from jax_cudnn.graph.attention.sdpa import SDPA
from jax_cudnn.legalize import legalize
from jax_cudnn.legalize.attention import packed as sdpa_packed
from jax_cudnn.legalize.attention import sdpa as legalize_sdpa
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.lowering import traced_graphs
from tests.attention.shared.flash import flash
from tests.attention.shared.legal import HOPPER
from tests.attention.shared.packed import MIXED, ROWS, Rows, any_rows, graph_of, ragged
from tests.common.evaluating import evaluate

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_AMPERE = dataclasses.replace(HOPPER, name="NVIDIA A100", sm_version=80)
_WITH_9_14 = dataclasses.replace(HOPPER, cudnn_version=91400)


def _operands(rows: Rows, graph: Graph, values: dict[str, Any]) -> list[jax.Array]:
    found = []
    for tensor in graph.input_tensors:
        kind, _, what = tensor.name.partition("_")
        if tensor.name == "sinks":
            sinks = np.linspace(-1, 1, rows.h, dtype=np.float32)
            found.append(sinks.reshape(tensor.dims))
        elif what:
            pairs = np.asarray(rows.queries if kind == "query" else rows.keys, np.int32)
            found.append(pairs[:, :, ["starts", "lengths"].index(what), None, None])
        else:
            logical = np.swapaxes(values[tensor.name], 1, 2)
            found.append(np.transpose(logical, tensor.order))
    return [jnp.asarray(x) for x in found]


def _check_kernel(
    rows: Rows,
    *,
    as_mask: bool,
    order: tuple[int, ...] = (0, 2, 1, 3),
    with_sinks: bool = False,
) -> None:
    graph = graph_of(rows, order=order, with_sinks=with_sinks)
    operands = _operands(rows, graph, rows.draw(padding=np.nan))
    expected = evaluate(graph, operands)
    assert SDPA.derivative is not None
    wanted = tuple(tensor.dtype == "f32" for tensor in graph.input_tensors)
    for grad_stats in (False, True):
        nonzero = (True, *(grad_stats for _ in expected[1:]))
        backward = SDPA.derivative.backward(graph, wanted, nonzero)
        assert backward is not None
        rng = np.random.default_rng(1)
        pulls = [rng.standard_normal(x.shape).astype(np.float32) for x in expected]
        source = {"input": operands, "output": expected, "cotangent": pulls}
        of_gradient = [jnp.asarray(source[kind][i]) for kind, i in backward.operands]
        for each, xs in ((graph, operands), (backward.graph, of_gradient)):
            want = evaluate(each, xs)
            first, *others = legalize(each, HOPPER).candidates
            assert [
                n for rewrite in others for n in rewrite.notes if "become a mask" in n
            ]
            rewrite = others[0] if as_mask else first
            assert from_json(to_json(rewrite.graph)) == rewrite.graph
            after = jax.jit(rewrite.after)
            changed = jax.jit(rewrite.before)(xs)
            for tensor, x in zip(rewrite.graph.input_tensors, changed, strict=True):
                assert x.shape == tensor.stored_shape, tensor
            made = (flash if as_mask else ragged)(rewrite.graph, changed)
            for name, x, y in zip(each.outputs, after(xs, made), want, strict=True):
                np.testing.assert_allclose(x, y, rtol=4e-5, atol=4e-5, err_msg=name)
            reads_stats = with_sinks and "stats" in each.inputs
            if not (as_mask or reads_stats or "grad_stats" in each.inputs):
                # The reference knows what the offsets mean. It does not read what the
                # spare columns hold for a kernel, nor the log-sum-exp with sinks.
                again = evaluate(rewrite.graph, changed)
                for name, x, y in zip(
                    each.outputs, after(xs, again), want, strict=True
                ):
                    np.testing.assert_allclose(x, y, rtol=4e-5, atol=4e-5, err_msg=name)


@pytest.fixture
def _allow_f32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legalize_sdpa, "_refuse", lambda *_: None)
    monkeypatch.setattr(sdpa_packed, "_DTYPES", ("f32",))


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("as_mask", [False, True], ids=["ragged", "mask"])
@pytest.mark.parametrize("name", [name for name in ROWS if name != "window-apart"])
def test_kernels_get_graphs_that_mean_the_same(name: str, as_mask: bool) -> None:
    _check_kernel(ROWS[name], as_mask=as_mask)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("as_mask", [False, True], ids=["ragged", "mask"])
def test_sinks_and_maximum_are_beside_packed_sequences(as_mask: bool) -> None:
    """Padding has the log-sum-exp of the sink alone, which has a cotangent."""
    _check_kernel(ROWS["causal-more-queries"], as_mask=as_mask, with_sinks=True)


@pytest.mark.usefixtures("_allow_f32")
def test_tokens_are_stored_one_behind_another_for_the_kernel() -> None:
    _check_kernel(ROWS["causal"], as_mask=False, order=(1, 0, 2, 3))


@pytest.mark.thorough
@pytest.mark.usefixtures("_allow_f32")
@settings(deadline=None)
@given(any_rows())
def test_kernels_get_any_sequences_right(rows: Rows) -> None:
    with jax.disable_jit():
        _check_kernel(rows, as_mask=False)


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    [
        ({"window": (-1, 2)}, HOPPER, r"cuDNN has no band for the window \[-1, 2\]"),
        ({}, _AMPERE, "sm_80 has no packed log-sum-exp in cuDNN"),
        ({"queries": [[(0, 1)] * 40000] * 2, "keys": [[(0, 1)] * 40000] * 2}, HOPPER,
         "2 rows of 40000 sequences exceed 65535"),
        ({"t": 2**22, "d": 256}, HOPPER, r"their offsets would be 2\^31 or more"),
    ],
)  # fmt: skip
def test_other_sequences_are_a_mask_and_the_note_says_why(
    changes: dict[str, Any], target: Target, reason: str
) -> None:
    graph = graph_of(dataclasses.replace(MIXED, **changes), "bf16")
    (rewrite,) = legalize(graph, target).candidates
    assert rewrite.graph.nodes[0].attributes == SdpaAttributes(
        scale=0.3, is_causal=False
    )
    (note,) = rewrite.notes
    assert "the sequences of a row become a mask, in memory that grows with s*t" in note
    assert re.search(reason, note)


def _legal_graphs(
    rows: Rows, target: Target, *, with_gradient: bool, with_lse: bool
) -> list[Rewrite]:
    """Return the legal graphs of a call, or of the gradient alone."""

    def call(*x: Any) -> Any:
        return jax_cudnn.sdpa(*x, mask=rows.mask(), return_residual=with_lse)

    def gradient(*x: Any) -> Any:
        results, pull = jax.vjp(call, *x)
        return pull(jax.tree.map(jnp.ones_like, results))

    operands = [jnp.asarray(x, jnp.bfloat16) for x in list(rows.draw().values())[:3]]
    traced = traced_graphs(gradient if with_gradient else call, *operands)
    return list(legalize(traced[-1].graph, target).candidates)


@pytest.mark.parametrize(
    ("d", "e", "with_gradient", "with_lse", "is_wrong"),
    [
        (256, 64, True, False, True),
        (64, 240, True, False, True),
        (64, 128, True, True, True),
        (64, 128, True, False, False),
        (128, 128, True, False, False),
        (128, 64, True, True, False),
        (256, 240, False, False, False),
        (256, 240, False, True, False),
    ],
)
def test_gradients_of_large_heads_are_a_mask_before_9_19(
    d: int, e: int, with_gradient: bool, with_lse: bool, is_wrong: bool
) -> None:
    """The cotangent of the log-sum-exp takes columns beside the value's."""
    rows = dataclasses.replace(MIXED, d=d, e=e)
    options = {"with_gradient": with_gradient, "with_lse": with_lse}
    first, *others = _legal_graphs(rows, HOPPER, **options)
    assert not any("become a mask" in note for note in first.notes)
    assert "query_offsets" in first.graph.inputs
    found = _legal_graphs(rows, _WITH_9_14, **options)
    if not is_wrong:
        assert "query_offsets" in found[0].graph.inputs
        return
    assert len(found) == len(others)
    for rewrite in found:
        assert "query_offsets" not in rewrite.graph.inputs
        assert (
            "the sequences of a row become a mask, in memory that grows with s*t: "
            "cuDNN "
            "9.14.0 computes wrong gradients of packed sequences with head sizes over "
            "128; 9.19 does not"
        ) in rewrite.notes


def test_a_bias_beside_sequences_is_one_of_the_mask_form() -> None:
    graph = graph_of(MIXED, "bf16")
    bias = Tensor(name="bias", dtype="bf16", dims=(1, 4, 11, 13), order=(0, 1, 2, 3))
    inputs = {tensor.name: tensor for tensor in graph.input_tensors} | {"bias": bias}
    attributes: Any = graph.nodes[0].attributes
    (rewrite,) = legalize(sdpa_graph(inputs, attributes=attributes), HOPPER).candidates
    assert "cuDNN has no packed sequences with a bias" in rewrite.notes[0]


def test_dropout_beside_sequences_is_one_of_the_mask_form() -> None:
    def call(*x: Any) -> Any:
        key = jax.random.key(3)
        return jax_cudnn.sdpa(*x, mask=MIXED.mask(), dropout_rate=0.5, dropout_key=key)

    given = MIXED.draw()
    operands = [jnp.asarray(given[x], jnp.bfloat16) for x in ("query", "key", "value")]
    (traced,) = traced_graphs(call, *operands)
    found = legalize(traced.graph, HOPPER).candidates
    assert found
    for rewrite in found:
        assert (
            "the sequences of a row become a mask, in memory that grows with s*t: "
            "dropout "
            "depends on the positions in whole rows"
        ) in rewrite.notes


def test_one_sequence_of_a_row_is_as_it_was() -> None:
    graph = graph_of(MIXED, "bf16")
    assert "longest" not in to_json(graph)
    assert "is_bottom_right" not in to_json(graph)
