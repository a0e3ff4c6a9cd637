# SPDX-License-Identifier: Apache-2.0
"""Tests that what runs by tokamax is what the graph says, with a stand-in.

tests/tuning/gpu/test_tokamax.py asks the library itself, where it is installed.
"""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import LibraryError, contenders, masks, plans, ragged_dot, score_mods
from jax_cudnn.contenders import tokamax
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.reference.interpreter import evaluate, to_logical, to_stored
from jax_cudnn.tuning import competing
from tests.tuning.tokamax import ATTENTIONS, STAND_INS, Attention, unusual_biases

pytestmark = pytest.mark.once


_ran: list[Graph] = []


def _exact(part: Graph, *operands: jax.Array) -> Any:
    """Run a part by the reference, and note that."""
    jax.debug.callback(lambda: _ran.append(part))
    return evaluate(part, list(operands))


# One program, instead of one for each operation.
_evaluate = jax.jit(evaluate, static_argnums=0)


def _offer(part: Graph) -> Any:
    return tokamax.offer(part, _exact)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in play tokamax."""
    monkeypatch.setattr(tokamax, "_imported", STAND_INS.__getitem__)
    tokamax.offer.cache_clear()
    _ran.clear()


def _graphs(call: Any, *operands: Any) -> list[Graph]:
    """Return the graphs of a call and of its gradient."""
    *arrays, cotangent = operands

    def both(*arrays: Any) -> Any:
        output, pullback = jax.vjp(call, *arrays)
        return output, pullback(cotangent)

    return [graph for graph, *_ in traced_graphs(both, *arrays)]


def _by_offers(call: Any, *operands: jax.Array) -> list[list[Any]]:
    """Return what the offers give for the graphs of a call, and the reference."""
    graphs = _graphs(call, *operands)
    first = graphs[0]
    given = {
        tensor.name: to_logical(tensor, x)
        for tensor, x in zip(first.input_tensors, operands, strict=False)
    }
    pairs = []
    for graph in graphs:
        output = {t.name: t for t in first.output_tensors}["output"]
        given["grad_output"] = to_logical(output, operands[-1])
        program = _offer(graph)
        assert program is not None
        found = jax.jit(program)(*(given[name] for name in graph.inputs))
        stored = [to_stored(t, given[t.name]) for t in graph.input_tensors]
        made = map(to_logical, graph.output_tensors, _evaluate(graph, stored))
        want = dict(zip(graph.outputs, made, strict=True))
        pairs += [[x, y] for x, y in zip(found, want.values(), strict=True)]
        given |= want
    return pairs


def _assert_near(got: jax.Array, want: jax.Array) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    x, y = (np.asarray(x, np.float64) for x in (got, want))
    assert np.array_equal(np.isfinite(x), np.isfinite(y))
    x, y = (np.where(np.isfinite(y), each, 0) for each in (x, y))
    assert np.abs(x - y).max() <= 0.02 * np.abs(y).max() + 1e-3


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    cell = ATTENTIONS[name]
    for got, want in _by_offers(cell.call, *cell.operands()):
        _assert_near(got, want)
    assert not _ran


@pytest.mark.parametrize("name", unusual_biases(jnp.zeros((1, 2, 256))))
def test_cudnn_runs_what_tokamax_would_spoil(name: str) -> None:
    cell = Attention()
    query, key, value, bias, cotangent = cell.operands()
    bias = unusual_biases(bias)[name]
    for got, want in _by_offers(cell.call, query, key, value, bias, cotangent):
        _assert_near(got, want)
    assert len(_ran) == 2, "forward and backward"


def test_cudnn_runs_a_bias_with_nan() -> None:
    query, key, value, bias, cotangent = Attention().operands()
    bias = bias.at[0, 0, 3, 5].set(jnp.nan)
    (got, want), *_ = _by_offers(Attention().call, query, key, value, bias, cotangent)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(want).any()
    assert _ran


_CAPS = jnp.array([3.0, 4.0, 5.0, 6.0])


def _capped(score: jax.Array, cap: Any) -> jax.Array:
    return cap * jnp.tanh(score / cap)


_OTHERS: dict[str, dict[str, Any]] = {
    "a mask": {"mask": jnp.ones((128, 256), bool)},
    "a window": {"mask": masks.Window(8, 0)},
    "lengths": {"key_value_seq_lengths": jnp.array([3, 9])},
    "dropout": {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
    "sinks": {"sinks": jnp.zeros(4)},
    "a bias and a softcap": {"score_mod": score_mods.softcap(3.0)},
    "another function of scores": {
        "bias": None,
        "score_mod": lambda x, *_: 3 * jnp.tanh(x / 2),
    },
    "a softcap by an array": {
        "bias": None,
        "score_mod": lambda x, b, h, *_: _capped(x, _CAPS[h]),
    },
    "a softcap by the query": {
        "bias": None,
        "score_mod": lambda x, b, h, i, j: _capped(x, i.astype(jnp.float32)),
    },
    "a softcap by a negative number": {
        "bias": None,
        "score_mod": lambda x, *_: _capped(x, -3),
    },
    "a step": {"bias": None, "score_mod": lambda x, *_: jnp.abs(x)},
    "the largest score": {"return_max_logit": True},
}


@pytest.mark.parametrize("name", _OTHERS)
def test_other_attentions_are_not_offered(name: str) -> None:
    query, key, value, bias, _ = Attention().operands()
    options = {"bias": bias, **_OTHERS[name]}
    call = partial(jax_cudnn.sdpa, **options)
    for graph, *_ in traced_graphs(call, query, key, value):
        assert _offer(graph) is None


@pytest.mark.parametrize(
    "cell",
    [
        Attention(t=192),
        Attention(s=96, bias=(1, 4, 96)),
        Attention(bias=(1, 4, 1)),
        Attention(dtype=jnp.float16),
        Attention(dtype=jnp.float32),
    ],
)
def test_other_sizes_and_dtypes_are_not_offered(cell: Attention) -> None:
    assert not any(map(_offer, _graphs(cell.call, *cell.operands())))


@pytest.mark.parametrize("padding", [None, np.nan, np.inf])
@pytest.mark.parametrize("sizes", [(5, 0, 9, 10), (0, 7, 3, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_ragged_dot(sizes: tuple[int, ...], dtype: Any, padding: float | None) -> None:
    rng = np.random.default_rng(sum(sizes))
    shapes = (24, 16), (4, 16, 32), (24, 32)
    rows, matrices, cotangent = (
        jnp.asarray(np.asarray(rng.standard_normal(shape), dtype)) for shape in shapes
    )
    if padding is not None:
        rows, cotangent = (x.at[sum(sizes) :].set(padding) for x in (rows, cotangent))

    def call(rows: Any, matrices: Any) -> jax.Array:
        return ragged_dot(rows, matrices, jnp.array(sizes, jnp.int32))

    graphs = _graphs(call, rows, matrices, cotangent)
    given: dict[str, jax.Array] = {
        "a": rows[None],
        "b": matrices,
        "group_sizes": jnp.array([sizes], jnp.int32),
        "grad_output": cotangent[None],
    }
    kinds = set()
    for graph in graphs:
        kinds |= {node.kind for node in graph.nodes}
        program = _offer(graph)
        assert program is not None
        operands = [given[name] for name in graph.inputs]
        stored = map(to_stored, graph.input_tensors, operands)
        made = map(to_logical, graph.output_tensors, _evaluate(graph, list(stored)))
        for got, want in zip(jax.jit(program)(*operands), made, strict=True):
            _assert_near(got, want)
    assert kinds == {"grouped_matmul", "grouped_matmul_backward"}


def test_ragged_dot_of_f32_is_not_offered() -> None:
    rows, matrices = jnp.ones((8, 4)), jnp.ones((2, 4, 4))
    call = partial(ragged_dot, group_sizes=jnp.array([3, 5], jnp.int32))
    ((graph, *_),) = traced_graphs(call, rows, matrices)
    assert _offer(graph) is None


@pytest.mark.parametrize("error", [NotImplementedError, ValueError, UnsupportedError])
def test_what_does_not_run_is_not_offered(error: type[Exception]) -> None:
    def refuse(*args: Any) -> Any:
        raise error("not on this GPU")

    for graph in _graphs(Attention().call, *Attention().operands()):
        assert tokamax.offer(graph, refuse) is None


def test_it_is_added_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokamax.importlib.metadata, "version", lambda _: "0.0.17")
    monkeypatch.setattr(
        competing, "cuda_program", lambda part, _: partial(_exact, part)
    )
    plans.add_tokamax()
    try:
        graph = _graphs(Attention().call, *Attention().operands())[0]
        ((contender, program),) = contenders.all_of(graph)
        assert contender.title == "tokamax 0.0.17"
        assert callable(program)
    finally:
        plans.remove_contender("tokamax")


def test_without_it_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tokamax.ops.gpu", None)
    with pytest.raises(LibraryError, match="pip install 'tokamax"):
        plans.add_tokamax()
