# SPDX-License-Identifier: Apache-2.0
"""Tests that only the plans that a filter allows run on a GPU."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import GraphError, UnsupportedError, native
from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.legalize import Rewrite, legalize
from jax_cudnn.lowering.devices import local_target
from jax_cudnn.lowering.primitives import run_reference
from tests.attention.gpuless.emitted import semantic_graphs
from tests.attention.shared.cases import Case, make_operands
from tests.common.drawn_operands import draw_arrays
from tests.common.gpu.numerics import judge, to_f32
from tests.common.gpu.pinned import pinned
from tests.common.planner import filter_text
from tests.norms import problems as norms
from tests.products.shared.fused import graphs

pytestmark = pytest.mark.gpu

_JIT = "RUNTIME_COMPILATION"
# The sizes of cuDNN's own sample of a batched matmul.
_B, _M, _K, _N = 4, 64, 128, 64


_JIT_ONLY = filter_text(required_notes=[_JIT])
_PRECOMPILED_ONLY = filter_text(refused_notes=[_JIT])


def _legal(graph: Graph) -> Rewrite:
    local = local_target()
    assert local is not None
    return legalize(graph, local[1]).candidates[0]


def _program(rewrite: Rewrite, request: str) -> Callable[..., Sequence[jax.Array]]:
    """Return the compiled graph, with the plan that a request asks for."""
    local = local_target()
    assert local is not None
    return pinned(rewrite.graph, rewrite, local[1], request)


@functools.cache
def _matmul() -> Rewrite:
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float16)
        for shape in ((_B, _M, _K), (_B, _K, _N))
    ]
    ((graph, _),) = graphs(jax_cudnn.matmul, *shapes)
    return _legal(graph)


def _matmul_operands() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(5)
    shapes = ((_B, _M, _K), (_B, _K, _N))
    a, b = (
        jnp.asarray(rng.standard_normal(s, np.float32), jnp.float16) for s in shapes
    )
    return a, b


def _notes(candidate: native.Candidate) -> set[str]:
    return {*candidate.behavior_notes, *candidate.numeric_notes}


def _allowed(text: str, request: str) -> list[native.Candidate]:
    try:
        listed = native.candidates(text, request=request)
    except UnsupportedError:
        return []
    return [each for each in listed if not each.refusal]


@pytest.mark.parametrize(
    ("wanted", "is_jit"), [(_JIT_ONLY, True), (_PRECOMPILED_ONLY, False)]
)
def test_matmul_runs_with_engines_of_one_sort_only(wanted: str, is_jit: bool) -> None:
    text = to_json(_matmul().graph)
    listed = native.candidates(text, request=wanted)
    assert [each.name for each in listed] == [
        each.name for each in native.candidates(text)
    ]
    allowed = [each for each in listed if not each.refusal]
    assert 0 < len(allowed) < len(listed), [(c.name, c.behavior_notes) for c in listed]
    for each in listed:
        assert ((_JIT in _notes(each)) == is_jit) == (not each.refusal)
    plan = native.plan(text, request=wanted)
    assert (_JIT in _notes(plan)) == is_jit
    assert plan.name in {each.name for each in allowed}
    a, b = _matmul_operands()
    truth = jnp.matmul(to_f32(a), to_f32(b), precision="highest")
    reference = jnp.matmul(a, b)
    # The plan that the filter leads to, and a few of the others that it allows.
    for each in ("", *(candidate.request for candidate in allowed[:4])):
        try:
            (result,) = _program(_matmul(), each or wanted)(a, b)
        except UnsupportedError:
            assert each  # Some candidates fail to build, when it comes to it.
            continue
        judge(["output"], [result], [reference], [truth])


@pytest.mark.parametrize("note", ["TENSOR_CORE", "DOWN_CONVERT_INPUTS"])
def test_refused_and_required_notes_part_the_candidates(note: str) -> None:
    text = to_json(_matmul().graph)
    every = [each.name for each in native.candidates(text)]
    having = _allowed(text, filter_text(required_notes=[note]))
    others = _allowed(text, filter_text(refused_notes=[note]))
    assert all(note in _notes(each) for each in having)
    assert not any(note in _notes(each) for each in others)
    assert sorted(each.name for each in having + others) == sorted(every)


def test_a_workspace_limit_holds() -> None:
    text = to_json(_matmul().graph)
    request = filter_text(workspace_limit_bytes=0, modes=["B", "A", "FALLBACK"])
    assert native.plan(text, request=request).workspace_bytes == 0
    a, b = _matmul_operands()
    (result,) = _program(_matmul(), request)(a, b)
    truth = jnp.matmul(to_f32(a), to_f32(b), precision="highest")
    judge(["output"], [result], [jnp.matmul(a, b)], [truth])


def test_one_engine_runs_alone_and_a_denied_one_never() -> None:
    text = to_json(_matmul().graph)
    engines = {each.engine for each in native.candidates(text)}
    assert len(engines) > 1
    first = native.plan(text).engine
    assert native.plan(text, request=filter_text(engines=[first])).engine == first
    assert (
        native.plan(text, request=filter_text(denied_engines=[first])).engine != first
    )


# --- the same bits, every time --------------------------------------------------------

_DETERMINISTIC = filter_text(deterministic=True)


@pytest.mark.parametrize("d", [64, 128])
def test_deterministic_attention_gradients_have_the_same_bits_in_20_runs(
    d: int,
) -> None:
    case = Case(name="deterministic", s=1031, t=2049, h=4, k=2, d=d)
    forward, backward = semantic_graphs(case)
    rewrite = _legal(backward)
    text = to_json(rewrite.graph)
    plan = native.plan(text, request=_DETERMINISTIC)
    assert "NONDETERMINISTIC" not in plan.numeric_notes
    assert plan.request.startswith('{"deterministic":true,')
    operands = _backward_operands(forward, backward, case)
    run = _program(rewrite, _DETERMINISTIC)
    first = [np.asarray(x).view(np.uint16) for x in run(*operands)]
    for _ in range(19):
        for x, y in zip(run(*operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(x).view(np.uint16), y)
    # A pin of that plan runs the same kernel.
    pinned = _program(rewrite, plan.request)(*operands)
    for x, y in zip(pinned, first, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint16), y)
    truth = run_reference(
        backward,
        [to_f32(x) for x in operands],
        Options(matmul_precision="highest"),
    )
    reference = run_reference(backward, operands, Options())
    judge(backward.outputs, run(*operands), reference, truth)


def _backward_operands(forward: Graph, backward: Graph, case: Case) -> list[jax.Array]:
    """Return what the gradient reads: operands, results and drawn cotangents."""
    arrays = make_operands(case).arrays[:3]
    values = dict(zip(forward.inputs, arrays, strict=True))
    results = run_reference(forward, arrays, Options())
    values |= dict(zip(forward.outputs, results, strict=True))
    drawn = zip(backward.inputs, draw_arrays(backward, 7), strict=True)
    return [values.get(name, x) for name, x in drawn]


def test_threads_without_a_context_build_what_the_first_thread_builds() -> None:
    """Some engines load code when they are built, and handles are shared."""

    def fails(text: str, request: str) -> bool:
        try:
            native.plan(text, request=request)
        except (GraphError, UnsupportedError):
            return True
        return False

    # Each size is built once; the second one finds the handles of the first.
    for rows in (1024, 2048):
        problem = norms.Problem(
            kind="layer_norm", dtype="bf16", scale="bf16", bias="bf16", dims=(rows, 512)
        )
        text = to_json(_legal(problem.graph).graph)
        requests = [each.request for each in native.candidates(text)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(functools.partial(fails, text), requests))
        assert not all(found)
        for request, has_failed in zip(requests, found, strict=True):
            assert fails(text, request) == has_failed, request
