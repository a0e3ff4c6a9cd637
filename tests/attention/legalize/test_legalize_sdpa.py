# SPDX-License-Identifier: Apache-2.0
"""Tests that the graph that cuDNN gets means what the user's graph does.

The user's graph is evaluated by the reference, and cuDNN's graph as a flash kernel
computes it. Both are in f32, so that rounding hides few mistakes; the refusal of f32 is
switched off for this. Whether cuDNN takes the graphs is asked of cuDNN itself, in
tests/attention/gpuless and tests/attention/gpu.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import Rewrite, legalize
from jax_cudnn.reference.dtypes import jax_dtype
from tests.attention.shared.legal import (
    HOPPER,
    assert_results_close,
    gradient_of,
    run_legal,
)
from tests.attention.shared.oracle import attention_graph, backward_graph
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# The last version for which lengths are always given; see the rule.
_OLD = dataclasses.replace(HOPPER, cudnn_version=91500)
_SIZES = {"b": 2, "s": 5, "t": 7, "h": 6, "k": 3, "d": 5, "e": 3}
_BSHD = (0, 2, 1, 3)
_LENGTHS = [(), ("query_lengths",), ("key_lengths",), ("query_lengths", "key_lengths")]


def _given(rewrite: Rewrite, operands: list[jax.Array]) -> dict[str, jax.Array]:
    """Return what a kernel gets, by name."""
    return dict(zip(rewrite.graph.inputs, rewrite.before(operands), strict=True))


def _unwritten(rewrite: Rewrite) -> list[jax.Array]:
    """Return the results of a kernel that writes nothing over NaN."""
    tensors = rewrite.graph.output_tensors
    return [jnp.full(t.stored_shape, jnp.nan, jax_dtype(t.dtype)) for t in tensors]


def _with_lengths(graph: Graph, *lengths: int) -> list[jax.Array]:
    """Draw operands with these lengths of queries and keys."""
    counts = jnp.array(lengths, jnp.int32).reshape(2, 1, 1, 1)
    drawn = zip(graph.input_tensors, draw_arrays(graph), strict=True)
    return [counts if tensor.dtype == "i32" else x for tensor, x in drawn]


def _logical(graph: Graph, name: str, x: jax.Array) -> np.ndarray:
    order = graph.tensor(name).order
    return np.moveaxis(np.asarray(x, np.float32), order, range(4))


def _check_meaning(
    graph: Graph, target: Target | None, *, with_grad_stats: bool = False
) -> tuple[Rewrite, ...]:
    """Compare forward and gradient, before and after legalisation; return all used."""
    operands = draw_arrays(graph)
    (forward,) = legalize(graph, target).candidates
    outputs = evaluate(graph, operands)
    assert_results_close(graph, run_legal(forward, operands), outputs)
    backward, operands = gradient_of(graph, operands, outputs, stats=with_grad_stats)
    want = evaluate(backward, operands)
    candidates = legalize(backward, target).candidates
    # The gradient of a bias has a second way, unless it needs no kernel at all.
    has_two = "bias" in graph.inputs and graph.tensor("bias").dims[3] != 1
    assert len(candidates) == (2 if has_two else 1)
    for rewrite in candidates:
        assert_results_close(backward, run_legal(rewrite, operands), want)
    return (forward, *candidates)


# --- the meaning is kept --------------------------------------------------------------


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("lengths", _LENGTHS, ids=lambda x: "-".join(x) or "full")
@pytest.mark.parametrize("mask", [None, "b1st", "1h1t", "bhst"])
@pytest.mark.parametrize("bias", [None, "bhst", "1hst", "111t", "b1s1"])
def test_legal_graphs_keep_the_meaning(
    bias: str | None, mask: str | None, lengths: tuple[str, ...]
) -> None:
    # The other options take turns, so that each meets each in some case.
    turn = sum(map(ord, f"{bias}{mask}{lengths}"))
    _check_meaning(
        attention_graph(
            sizes=_SIZES,
            bias=bias,
            mask=mask,
            lengths=lengths,
            is_causal=turn % 2 == 1,
            scale=(0.3, -0.7, 0.0)[turn % 3],
            with_stats=True,
            with_max=turn % 3 < 2 and turn % 11 < 6,
            sinks=(None, "1h11", "bh11", None)[turn // 2 % 4],
            order=_BSHD if turn % 5 else (0, 1, 3, 2),
        ),
        _OLD if turn % 7 < 3 else HOPPER,
        with_grad_stats=turn % 4 < 2,
    )


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("with_grad_stats", [False, True])
@pytest.mark.parametrize(
    "order",
    [*itertools.permutations((0, 1, 2, 3))][::3],
    ids=lambda o: "".join(map(str, o)),
)
def test_every_layout_keeps_the_meaning(
    order: tuple[int, ...], with_grad_stats: bool
) -> None:
    graph = attention_graph(
        sizes=_SIZES, lengths=("key_lengths",), with_stats=True, order=order
    )
    for rewrite in _check_meaning(graph, HOPPER, with_grad_stats=with_grad_stats):
        # Only the last axis moves: the others stay in the caller's order.
        others = [axis for axis in order if axis != 3]
        assert rewrite.graph.tensor("query").order == (*others, 3)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("with_grad_stats", [False, True])
@pytest.mark.parametrize(
    ("t", "bias", "mask", "lengths"),
    [
        (1, None, None, ()),
        (9, "bhst", None, ("key_lengths",)),
        (9, "b11t", "b11t", _LENGTHS[3]),
    ],
)
def test_a_single_query_keeps_the_meaning_with_a_second_row(
    t: int,
    bias: str | None,
    mask: str | None,
    lengths: tuple[str, ...],
    with_grad_stats: bool,
) -> None:
    graph = attention_graph(
        sizes={**_SIZES, "s": 1, "t": t},
        bias=bias,
        mask=mask,
        lengths=lengths,
        is_causal=t == 1,
        with_stats=True,
    )
    forward, *backward = _check_meaning(graph, HOPPER, with_grad_stats=with_grad_stats)
    assert forward.graph.tensor("query").dims[2] == 1
    for rewrite in backward:
        for name in ("query", "output", "grad_output", "grad_query", "stats"):
            assert rewrite.graph.tensor(name).dims[2] == 2, name


@pytest.mark.usefixtures("_allow_f32")
def test_a_row_without_keys_meets_finite_numbers_and_gives_zero() -> None:
    graph = attention_graph(
        sizes=_SIZES, mask="b1st", lengths=_LENGTHS[3], is_causal=True, with_stats=True
    )
    (rewrite,) = legalize(graph, HOPPER).candidates
    operands = draw_arrays(graph)
    operands[graph.inputs.index("mask")] = jnp.zeros((2, 1, 5, 7), bool)
    operands[graph.inputs.index("key_lengths")] = jnp.zeros((2, 1, 1, 1), jnp.int32)
    changed = _given(rewrite, operands)
    # Zero keys gave NaN in some versions: at least one is passed.
    np.testing.assert_array_equal(changed["key_lengths"], 1)
    output, stats = run_legal(rewrite, operands)
    np.testing.assert_array_equal(output, 0)
    np.testing.assert_array_equal(stats, -np.inf)


@pytest.mark.usefixtures("_allow_f32")
def test_lengths_beyond_the_axis_are_cut_to_it() -> None:
    graph = attention_graph(sizes=_SIZES, lengths=_LENGTHS[3])
    (rewrite,) = legalize(graph, HOPPER).candidates
    operands = _with_lengths(graph, -4, 99)
    changed = _given(rewrite, operands)
    assert changed["query_lengths"].ravel().tolist() == [0, 5]
    assert changed["key_lengths"].ravel().tolist() == [1, 7]


def test_what_the_kernel_leaves_in_hidden_places_does_not_come_out() -> None:
    forward = attention_graph(
        sizes=_SIZES, dtype="bf16", lengths=_LENGTHS[3], with_stats=True
    )
    for graph in (forward, backward_graph(forward)):
        (rewrite,) = legalize(graph, HOPPER).candidates
        operands, left = _with_lengths(graph, 2, 3), _unwritten(rewrite)
        for name, x in zip(graph.outputs, rewrite.after(operands, left), strict=True):
            logical = _logical(graph, name, x)
            hidden = [logical[0, :, 2:], logical[1, :, 3:]]
            seen = [logical[0, :, :2], logical[1, :, :3]]
            fill = -np.inf if name == "stats" else 0
            assert all((part == fill).all() for part in hidden), name
            assert all(np.isnan(part).all() for part in seen), name


@pytest.mark.parametrize("cudnn_version", [91400, 91900])
def test_entries_without_queries_give_their_keys_no_gradient(
    cudnn_version: int,
) -> None:
    target = dataclasses.replace(HOPPER, cudnn_version=cudnn_version)
    forward = attention_graph(
        sizes=_SIZES, dtype="bf16", lengths=("query_lengths",), with_stats=True
    )
    graph = backward_graph(forward)
    (rewrite,) = legalize(graph, target).candidates
    operands, left = _with_lengths(graph, 0, 3), _unwritten(rewrite)
    found = dict(zip(graph.outputs, rewrite.after(operands, left), strict=True))
    for name in ("grad_key", "grad_value"):
        logical = _logical(graph, name, found[name])
        assert np.isnan(logical[1]).all()
        # Later versions write the zeros themselves.
        assert (logical[0] == 0).all() == (cudnn_version < 91900)


# --- what is added --------------------------------------------------------------------


@pytest.mark.parametrize(("size", "padded"), [(1, 8), (8, 8), (77, 80), (251, 256)])
def test_head_sizes_are_padded_to_multiples_of_8(size: int, padded: int) -> None:
    graph = attention_graph(
        sizes={**_SIZES, "d": size, "e": size + 16}, dtype="bf16", with_stats=True
    )
    (rewrite,) = legalize(graph, HOPPER).candidates
    for name in ("query", "key"):
        assert rewrite.graph.tensor(name).dims[3] == padded
    for name in ("value", "output"):
        assert rewrite.graph.tensor(name).dims[3] == padded + 16


@pytest.mark.parametrize(
    ("cudnn_version", "t", "is_given"),
    [
        (91500, 100, True),
        (91500, 129, True),
        (91500, 128, False),
        (91500, 256, False),
        (91501, 100, False),
        (91900, 100, False),
    ],
)
def test_old_cudnn_gets_lengths_where_the_frontend_would_add_its_own(
    cudnn_version: int, t: int, is_given: bool
) -> None:
    target = dataclasses.replace(HOPPER, cudnn_version=cudnn_version)
    forward = attention_graph(sizes={**_SIZES, "t": t}, dtype="bf16", with_stats=True)
    for graph in (forward, backward_graph(forward)):
        (rewrite,) = legalize(graph, target).candidates
        assert ("query_lengths" in rewrite.graph.inputs) == is_given
        assert ("key_lengths" in rewrite.graph.inputs) == is_given
        if is_given:
            given = _given(rewrite, draw_arrays(graph))
            assert given["query_lengths"].ravel().tolist() == [5, 5]
            assert given["key_lengths"].ravel().tolist() == [t, t]


@pytest.mark.parametrize(
    ("cudnn_version", "sm_version", "t", "is_padded"),
    [
        (92000, 90, 64, True),
        (92501, 90, 192, True),
        (92300, 90, 128, False),
        (92300, 100, 64, True),
        (91900, 90, 320, True),
        (91900, 90, 100, False),
        (92600, 80, 64, True),
        (None, None, 64, True),
    ],
)
def test_key_counts_whose_gradient_is_nan_are_padded(
    cudnn_version: int | None, sm_version: int | None, t: int, is_padded: bool
) -> None:
    target = None
    if cudnn_version is not None and sm_version is not None:
        target = dataclasses.replace(
            HOPPER, cudnn_version=cudnn_version, sm_version=sm_version
        )
    forward = attention_graph(sizes={**_SIZES, "t": t}, dtype="bf16", with_stats=True)
    (rewrite,) = legalize(forward, target).candidates
    assert rewrite.graph.tensor("key").dims[2] == t
    (rewrite,) = legalize(backward_graph(forward), target).candidates
    for name in ("key", "value", "grad_key", "grad_value"):
        assert rewrite.graph.tensor(name).dims[2] == (t + 64 if is_padded else t)
    assert ("key_lengths" in rewrite.graph.inputs) == is_padded


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("lengths", [(), ("query_lengths", "key_lengths")])
@pytest.mark.parametrize("mask", [None, "b1st"])
@pytest.mark.parametrize("bias", [None, "1hst"])
def test_padded_key_counts_keep_the_meaning(
    bias: str | None, mask: str | None, lengths: tuple[str, ...]
) -> None:
    _check_meaning(
        attention_graph(
            sizes={**_SIZES, "t": 64},
            bias=bias,
            mask=mask,
            lengths=lengths,
            with_stats=True,
        ),
        HOPPER,
        with_grad_stats=True,
    )


def test_an_unknown_gpu_gets_no_lengths() -> None:
    (rewrite,) = legalize(attention_graph(dtype="bf16"), None).candidates
    assert set(rewrite.graph.inputs) == {"query", "key", "value"}


@pytest.mark.parametrize(
    ("mask", "bias", "bias_dtype", "dims", "dtype"),
    [
        ("b11t", None, None, (2, 1, 5, 7), "bf16"),
        ("b11t", "1h1t", "bf16", (2, 6, 5, 7), "bf16"),
        ("11st", "111t", "f32", (1, 1, 5, 7), "f32"),
        ("11s1", "1hs1", "f32", (1, 1, 5, 7), "bf16"),
        (None, "1h1t", "bf16", (1, 6, 5, 7), "bf16"),
        (None, "b11t", "f32", (2, 1, 5, 7), "f32"),
    ],
)
def test_mask_and_bias_become_one_bias_with_full_rows_and_columns(
    mask: str | None,
    bias: str | None,
    bias_dtype: str | None,
    dims: tuple[int, ...],
    dtype: str,
) -> None:
    graph = attention_graph(
        sizes=_SIZES, dtype="bf16", mask=mask, bias=bias, bias_dtype=bias_dtype
    )
    (rewrite,) = legalize(graph, HOPPER).candidates
    tensor = rewrite.graph.tensor("bias")
    assert (tensor.dims, tensor.dtype) == (dims, dtype)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("lengths", [(), ("key_lengths",)])
@pytest.mark.parametrize("lowest", [-1e4, -1e30, float(jnp.finfo(jnp.float32).min)])
def test_a_mask_hides_keys_below_any_bias(
    lowest: float, lengths: tuple[str, ...]
) -> None:
    graph = attention_graph(
        sizes=_SIZES, mask="11st", bias="1hst", lengths=lengths, with_stats=True
    )
    operands = dict(zip(graph.inputs, draw_arrays(graph), strict=True))
    # Where the mask lets a query look, there the bias nearly forbids it.
    low = jnp.where(operands["mask"], jnp.float32(lowest), operands["bias"])
    operands["bias"] = low
    (rewrite,) = legalize(graph, HOPPER).candidates
    ordered = [operands[name] for name in graph.inputs]
    # Scores are rounded to what f32 has beside the bias, the kernel's times log2(e).
    spacing = float(
        np.spacing(np.float32(lowest * np.log2(np.e) if lowest > -1e9 else 0))
    )
    for x, y in zip(run_legal(rewrite, ordered), evaluate(graph, ordered), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 + abs(spacing))


@pytest.mark.parametrize("bias", ["1111", "b1s1", "bhs1"])
def test_a_bias_that_all_keys_of_a_row_share_does_not_reach_cudnn(bias: str) -> None:
    forward = attention_graph(sizes=_SIZES, dtype="bf16", bias=bias, with_stats=True)
    for graph in (forward, backward_graph(forward)):
        (rewrite,) = legalize(graph, HOPPER).candidates
        assert "bias" not in rewrite.graph.inputs
        assert "grad_bias" not in rewrite.graph.outputs
        assert not rewrite.notes


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("axes", ["bhs1", "1111"])
@pytest.mark.parametrize("with_grad_stats", [False, True])
def test_a_bias_of_whole_rows_is_added_to_the_statistics_only(
    axes: str, with_grad_stats: bool
) -> None:
    graph = attention_graph(sizes=_SIZES, bias=axes, with_stats=True)
    for rewrite in _check_meaning(graph, HOPPER, with_grad_stats=with_grad_stats):
        assert "bias" not in rewrite.graph.inputs
        assert rewrite.notes == ()


@pytest.mark.usefixtures("_allow_f32")
def test_minus_infinity_in_a_bias_of_whole_rows_hides_the_row() -> None:
    forward = attention_graph(sizes=_SIZES, bias="b1s1", with_stats=True)
    values = dict(zip(forward.inputs, draw_arrays(forward, 2), strict=True))
    values["bias"] = values["bias"].at[0, 0, 1].set(-jnp.inf).at[1].set(-jnp.inf)
    for graph in (forward, backward_graph(forward)):
        for tensor in graph.input_tensors:
            if tensor.name not in values:  # the cotangent
                values[tensor.name] = jnp.ones(tensor.stored_shape, jnp.float32)
        operands = [values[name] for name in graph.inputs]
        want = evaluate(graph, operands)
        (rewrite,) = legalize(graph, HOPPER).candidates
        assert_results_close(graph, run_legal(rewrite, operands), want)
        values |= dict(zip(graph.outputs, want, strict=True))
    assert np.isneginf(values["stats"]).sum() == 6 + 6 * 5


@pytest.mark.parametrize(
    ("scale", "legal_scale", "factor"),
    [(0.25, 0.25, 1), (-0.25, 0.25, -1), (0.0, 1.0, 0), (-0.0, 1.0, 0)],
)
def test_a_scale_that_is_not_positive_moves_into_the_query(
    scale: float, legal_scale: float, factor: int
) -> None:
    graph = attention_graph(dtype="bf16", sizes=_SIZES, scale=scale)
    (rewrite,) = legalize(graph, HOPPER).candidates
    attributes: Any = rewrite.graph.nodes[0].attributes
    assert attributes.scale == legal_scale
    operands = draw_arrays(graph)
    changed = _given(rewrite, operands)
    np.testing.assert_array_equal(changed["query"][..., :5], factor * operands[0])


def test_graphs_that_cudnn_takes_are_left_alone() -> None:
    graph = attention_graph(
        sizes={**_SIZES, "d": 64, "e": 128}, dtype="f16", bias="1hst", bias_dtype="f32"
    )
    (rewrite,) = legalize(graph, HOPPER).candidates
    operands = draw_arrays(graph)
    assert {t.name: t for t in rewrite.graph.tensors} == {
        t.name: t for t in graph.tensors
    }
    by_name = dict(zip(graph.inputs, operands, strict=True))
    for name, x in zip(rewrite.graph.inputs, rewrite.before(operands), strict=True):
        assert x is by_name[name]
    assert rewrite.notes == ()


# --- the gradient of a bias -----------------------------------------------------------


@pytest.mark.parametrize(
    ("bias_dtype", "with_grad_bias", "notes"),
    [
        ("bf16", False, [0]),
        ("f32", False, [0]),
        ("bf16", True, [0, 1]),
        ("f32", True, [1]),
    ],
)
def test_a_bias_gradient_falls_back_to_xla_alone_with_a_note(
    bias_dtype: str, with_grad_bias: bool, notes: list[int]
) -> None:
    forward = attention_graph(
        sizes=_SIZES, dtype="bf16", bias="1hst", bias_dtype=bias_dtype, with_stats=True
    )
    graph = backward_graph(forward, with_grad_bias=with_grad_bias)
    candidates = legalize(graph, HOPPER).candidates
    assert [len(rewrite.notes) for rewrite in candidates] == notes
    for rewrite in candidates:
        in_cudnn = with_grad_bias and not rewrite.notes
        assert ("grad_bias" in rewrite.graph.outputs) == in_cudnn
        if rewrite.notes:
            assert rewrite.notes == (
                f"the gradient of bias {bias_dtype}[1, 6, 5, 7] is computed by XLA: "
                "cuDNN has no plan for it; its memory grows with s*t",
            )
