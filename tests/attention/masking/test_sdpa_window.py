# SPDX-License-Identifier: Apache-2.0
"""Tests that `local_window_size` means what it means in jax.nn, in each form."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import plans, sdpa
from jax_cudnn.graph import Graph, SdpaAttributes, from_json, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_graphs
from tests.attention.shared.flash import flash
from tests.attention.shared.legal import HOPPER
from tests.attention.shared.oracle import (
    attention_graph,
    backward_graph,
    by_role,
    numpy_results,
    options_of,
    to_logical,
)
from tests.common import drawn
from tests.common.drawn_operands import draw_operands

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_LENGTHS = [(7, 7), (5, 9), (9, 5)]
_WINDOWS: list[Any] = [
    *[(2, 1), (0, 0), 3, (1, 0), (0, 3), (100, 2), (4, 50), (10**6, 1)],
    *[(-1, 3), (3, -2), (None, 2), (2, None), (None, -1), (None, None)],
]


def _pair(window: Any) -> tuple[int, int]:
    """Return a window as graphs have it: 64 is as long as anything here."""
    pair = (window, window) if isinstance(window, int) else window
    left, right = (64 if size is None else size for size in pair)
    return left, right


def _seen(s: int, t: int, window: Any, is_causal: bool = False) -> np.ndarray:
    left, right = _pair(window)
    rows, columns = np.arange(s)[:, None], np.arange(t)
    seen = (columns >= rows - left) & (columns <= rows + right)
    return seen & (columns <= rows) if is_causal else seen


def _operands(s: int, t: int) -> list[jax.Array]:
    shapes = (2, s, 4, 8), (2, t, 2, 8), (2, t, 2, 8), (1, 4, s, t)
    return [drawn.normal(i, shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("form", ["alone", "is_causal", "bias", "mask", "lengths"])
@pytest.mark.parametrize(("s", "t"), _LENGTHS)
def test_values_and_gradients_are_those_of_jax_nn(s: int, t: int, form: str) -> None:
    """For queries that see a key; jax.nn gives the others a mean of hidden values."""
    q, k, v, bias = _operands(s, t)
    options: dict[str, Any] = {
        "alone": {},
        "is_causal": {"is_causal": True},
        "bias": {"bias": bias},
        "mask": {"mask": bias > -0.5},
        "lengths": {
            "query_seq_lengths": jnp.array([s, s - 1]),
            "key_value_seq_lengths": jnp.array([t - 2, t]),
        },
    }[form]
    for window in _WINDOWS[(s + len(form)) % 3 :: 3]:
        if form == "is_causal" and window == (-1, 3):
            continue  # It is refused.
        seen = _seen(s, t, window, form == "is_causal")[None, None]
        if form == "mask":
            seen = seen & np.asarray(options["mask"])
        if form == "lengths":
            length = np.asarray(options["key_value_seq_lengths"]).reshape(2, 1, 1, 1)
            seen = seen & (np.arange(t) < length)
        live = np.broadcast_to(seen.any(-1), (2, 4, s)).swapaxes(1, 2)
        if form == "lengths":
            live = live & (np.arange(s)[:, None] < np.array([[[s]], [[s - 1]]]))
        kwargs = options | {"local_window_size": window}
        cotangent = drawn.normal(9, q.shape)
        cotangent = jnp.where(live[..., None], cotangent, 0)
        found, gradients = _with_gradients(sdpa, q, k, v, cotangent, **kwargs)
        expected, theirs = _with_gradients(
            jax.nn.dot_product_attention,
            q,
            k,
            v,
            cotangent,
            **(kwargs | {"local_window_size": _pair(window)}),
            implementation="xla",
        )
        found = np.asarray(found)
        np.testing.assert_allclose(found[live], expected[live], atol=1e-5)
        assert not found[~live].any()
        for x, y in zip(gradients, theirs, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)


def _with_gradients(
    attention: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cotangent: jax.Array,
    **options: Any,
) -> Any:
    """Return a result and its gradients, by one program."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        found, pull = jax.vjp(functools.partial(attention, **options), q, k, v)
        return found, pull(cotangent)

    return jax.jit(run)(q, k, v)


_FORMS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"is_causal": True},
    "bias": {"bias": "1hst"},
    "bias of keys": {"bias": "b11t", "is_causal": True},
    "mask": {"mask": "b1st"},
    "mask of keys": {"mask": "b11t", "bias": "11st"},
    "lengths": {"lengths": ("query_lengths", "key_lengths")},
    "length and negative scale": {"lengths": ("key_lengths",), "scale": -0.5},
}


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
@pytest.mark.parametrize(("s", "t"), [*_LENGTHS, (5, 64)])
def test_rewritten_graphs_give_what_windows_mean(
    s: int, t: int, form: dict[str, Any]
) -> None:
    sizes = {"b": 2, "s": s, "t": t, "h": 4, "k": 2, "d": 8, "e": 5}
    # A graph may have an empty window.
    for window in [*_WINDOWS, (-2, -2), -1][(s + t + len(form)) % 3 :: 3]:
        forward = attention_graph(
            sizes=sizes, window=_pair(window), with_stats=True, **form
        )
        backward = backward_graph(forward, with_grad_stats=True)
        given = dict(zip(backward.inputs, draw_operands(backward, 3), strict=True))
        truth = numpy_results(
            by_role(backward, [given[name] for name in backward.inputs]),
            **options_of(forward),
        )
        operands = [jnp.asarray(given[name]) for name in forward.inputs]
        for rewrite in legalize(forward, HOPPER).candidates:
            with jax.disable_jit():
                results = rewrite.run(lambda x, g=rewrite.graph: flash(g, x), operands)
            _check(forward, results, truth)
            given |= dict(zip(forward.outputs, map(np.asarray, results), strict=True))
        operands = [jnp.asarray(given[name]) for name in backward.inputs]
        for rewrite in legalize(backward, HOPPER).candidates:
            with jax.disable_jit():
                results = rewrite.run(lambda x, g=rewrite.graph: flash(g, x), operands)
            _check(backward, results, truth)


def _check(graph: Graph, results: Any, truth: dict[str, np.ndarray]) -> None:
    for tensor, x in zip(graph.output_tensors, results, strict=True):
        np.testing.assert_allclose(
            to_logical(tensor, x), truth[tensor.name], rtol=2e-4, atol=2e-4
        )


# --- which form it takes --------------------------------------------------------------


def _forms(**options: Any) -> list[tuple[int, ...]]:
    """Return the windows that the candidates' kernels get; () beside a mask."""
    graph = attention_graph(dtype="bf16", **options)
    found = [way.graph.nodes[0].attributes for way in legalize(graph, None).candidates]
    return [x.window for x in found if isinstance(x, SdpaAttributes)]


def test_a_band_is_used_where_every_query_sees_a_key_in_it() -> None:
    assert _forms(window=(2, 1)) == [(2, 1), ()]
    assert _forms(window=(2, 0), is_causal=True) == [(2, 0), ()]
    assert _forms(window=(2, 1), bias="1hst") == [(2, 1), ()]
    # No key beside a negative bound, lengths, a mask, or for the last queries.
    assert _forms(window=(-1, 3)) == [()]
    assert _forms(window=(2, 1), lengths=("key_lengths",)) == [()]
    assert _forms(window=(2, 1), mask="b1st") == [()]
    sizes = {"b": 2, "s": 9, "t": 5, "h": 4, "k": 2, "d": 8, "e": 8}
    assert _forms(window=(3, 1), sizes=sizes) == [()]
    assert _forms(window=(4, 1), sizes=sizes) == [(4, 1), ()]


def test_a_window_that_hides_nothing_is_none() -> None:
    assert _forms(window=(100, 100)) == [()]
    graph = attention_graph(dtype="bf16", window=(100, 0), is_causal=True)
    (way,) = legalize(graph, None).candidates
    assert not way.notes
    assert "mask" not in dict(way.graph.nodes[0].inputs)
    assert (
        way.graph
        == legalize(attention_graph(dtype="bf16", is_causal=True), None)
        .candidates[0]
        .graph
    )


def test_a_window_in_the_mask_is_told() -> None:
    graph = attention_graph(dtype="bf16", window=(2, 1), mask="b1st")
    (way,) = legalize(graph, None).candidates
    assert way.notes == (
        "the window [2, 1] is part of the mask: cuDNN has no band for it",
    )


# --- what a new attribute does not change ---------------------------------------------


def test_a_graph_without_a_window_has_the_text_that_it_had() -> None:
    text = to_json(attention_graph())
    assert "window" not in text
    written = to_json(attention_graph(window=(2, 1)))
    assert ',"scale":0.29999999999999999,"window":[2,1]}' in written
    assert from_json(written) == attention_graph(window=(2, 1))
    with pytest.raises(Exception, match="not in canonical form"):
        from_json(written.replace("[2,1]", "[]"))


# --- transformations ------------------------------------------------------------------


def test_examples_of_vmap_fold_into_the_batch() -> None:
    q, k, v, _ = _operands(7, 9)
    function = functools.partial(sdpa, local_window_size=(2, 1))
    many = [jnp.stack([x, 2 * x, -x]) for x in (q, k, v)]
    found = jax.vmap(function)(*many)
    for i in range(3):
        np.testing.assert_allclose(found[i], function(*(x[i] for x in many)), atol=1e-6)
    ((graph, *_),) = [
        (each.graph,) for each in traced_graphs(jax.vmap(function), *many)
    ]
    assert graph.tensor("query").dims[0] == 6


def test_jvp_and_vjp_agree() -> None:
    q, k, v, _ = _operands(7, 5)
    function = functools.partial(sdpa, local_window_size=(2, 1))
    tangents = tuple(jnp.cos(x) for x in (q, k, v))
    out, moved = jax.jvp(function, (q, k, v), tangents)
    pulled = jax.vjp(function, q, k, v)[1](jnp.sin(out))
    left = jnp.vdot(jnp.sin(out), moved)
    right = sum(jnp.vdot(x, y) for x, y in zip(pulled, tangents, strict=True))
    np.testing.assert_allclose(left, right, rtol=1e-4)


def test_the_window_is_static_under_jit_and_in_what_is_inspected() -> None:
    q, k, v, _ = _operands(7, 7)
    compiled = jax.jit(sdpa, static_argnames="local_window_size")
    for window in ((2, 1), 3):
        found = compiled(q, k, v, local_window_size=window)
        np.testing.assert_allclose(found, sdpa(q, k, v, local_window_size=window))
    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    report = plans.inspect(compiled, x, x, x, local_window_size=(16, 0))
    assert [call.op for call in report.calls] == ["sdpa"]


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "window", [1.5, (1,), (1, 2, 3), "21", True, (1, "2"), (None, 1.5), ()]
)
def test_what_is_no_window_is_refused(window: Any) -> None:
    q, k, v, _ = _operands(5, 5)
    with pytest.raises(TypeError, match="is neither an int nor two"):
        sdpa(q, k, v, local_window_size=window)


def test_a_traced_window_is_refused() -> None:
    q, k, v, _ = _operands(5, 5)
    with pytest.raises(TypeError, match="ints known when the program is traced"):
        jax.jit(lambda n: sdpa(q, k, v, local_window_size=n))(2)


def test_a_window_beyond_64_bits_is_refused() -> None:
    q, k, v, _ = _operands(5, 5)
    with pytest.raises(ValueError, match="does not fit in 63 bits"):
        sdpa(q, k, v, local_window_size=(2**63, 0))


def test_integers_of_numpy_are_taken() -> None:
    q, k, v, _ = _operands(5, 5)
    sizes = itertools.product((np.int32(2), 2), (np.int64(1), 1))
    results = [sdpa(q, k, v, local_window_size=pair) for pair in sizes]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
