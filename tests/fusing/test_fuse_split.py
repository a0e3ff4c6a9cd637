# SPDX-License-Identifier: Apache-2.0
"""Tests that `fuse` says what became of each operation, and what breaks a kernel."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import UnsupportedError, fuse, offline, plans
from jax_cudnn.fusing.views import View
from jax_cudnn.lowering import traced_graphs
from tests.fusing.functions import CASES, normal

pytestmark = pytest.mark.sampled

_X, _W, _B = normal(0, 5, 8), normal(1, 8, 12), normal(2, 1, 12)


def _left(function: Callable[..., Any], *operands: Any) -> dict[str, str]:
    return {each.name: each.reason for each in fuse(function).explain(*operands).left}


@jax.custom_jvp
def _own(x):
    return jnp.tanh(x)


@_own.defjvp
def _own_jvp(primals, tangents):
    return _own(*primals), tangents[0] * 0.5


@pytest.mark.parametrize(
    ("function", "name", "reason"),
    [
        (lambda x, w, b: (x @ w).prod(0), "reduce_prod", "XLA fuses reductions with"),
        (lambda x, w, b: (x @ w).sum(0) * 2, "mul", "nothing follows a reduction"),
        (lambda x, w, b: jnp.expm1(x @ w), "expm1", "which graphs have no node for"),
        (lambda x, w, b: _own(x @ w), "_own", "a derivative rule of its own"),
        (
            lambda x, w, b: jnp.where(b > 0.0, x @ w, 0.0),
            "select_n",
            "truth values that are no comparison's here",
        ),
        (lambda x, w, b: (x @ w > 0.0, x @ w)[0], "gt", "give no truth values"),
        (
            lambda x, w, b: (x @ w)[:, None] * jnp.ones((1, 3, 1)),
            "mul",
            "other sizes than the contraction's",
        ),
        (lambda x, w, b: (x @ w).astype(jnp.int32), "convert_element_type", "i32"),
        (
            lambda x, w, b: jax.lax.fori_loop(0, 3, lambda i, c: c * 2.0, x @ w),
            "scan",
            "loops are left to XLA",
        ),
        (
            lambda x, w, b: jax.checkpoint(jnp.sin)(x @ w),
            "remat2",
            "jax.checkpoint",
        ),
        (
            lambda x, w, b: (lambda h: h[:5, :5] + h[:5, :5].T)(x @ w),
            "slice",
            "other sizes",
        ),
        (
            lambda x, w, b: (lambda h: h + h.T)((x @ w)[:, :5] @ x[:, :5]),
            "add",
            "axes in different orders",
        ),
        (
            lambda x, w, b: (x @ w) * jnp.inf,
            "mul",
            "cuDNN takes finite ones",
        ),
        (lambda x, w, b: jnp.sin(x), "sin", "depends on no contraction"),
        (
            lambda x, w, b: x.astype(jnp.int32) @ w.astype(jnp.int32),
            "dot_general",
            "Graphs have operands of",
        ),
        (lambda x, w, b: (x @ w).reshape(6, 10), "reshape", "rows, columns and batch"),
    ],
)
def test_what_ends_a_kernel_is_told(
    function: Callable[..., Any], name: str, reason: str
) -> None:
    left = _left(function, _X, _W, _B)
    assert reason in left[name], left
    found, wanted = fuse(function)(_X, _W, _B), function(_X, _W, _B)
    assert jnp.allclose(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_rule_of_the_user_s_own_is_kept() -> None:
    gradient = jax.grad(lambda x: fuse(lambda x: _own(x @ _W))(x).sum())(_X)
    assert jnp.allclose(gradient, 0.5 * jnp.ones((5, 12)) @ _W.T, rtol=1e-5)


def test_too_many_operations_end_a_kernel() -> None:
    def function(x, w):
        h = x @ w
        for _ in range(70):
            h = jnp.sin(h)
        return h

    explained = fuse(function).explain(_X, _W)
    assert len(explained.kernels[0].operations) == 65
    assert "a kernel is given 64" in explained.left[0].reason


def test_what_only_sums_read_is_not_written_to_memory() -> None:
    explained = fuse(CASES["several results"].function).explain(_X, _W, _B[0])
    (kernel,) = explained.kernels
    assert len(kernel.graph.outputs) == 2
    assert "XLA fuses it" in {x.name: x.reason for x in explained.left}["integer_pow"]


# --- strict ---------------------------------------------------------------------------


def test_what_xla_widens_is_written_in_its_narrow_form() -> None:
    def block(x, w, shift):
        h = jax.nn.gelu(x @ w) + shift
        wide = h.astype(jnp.float32)
        return (wide / jnp.sum(wide, -1, keepdims=True)).astype(h.dtype)

    x, w, shift = (each.astype(jnp.bfloat16) for each in (_X, _W, _B))
    assert _left(block, x, w, shift)["convert_element_type"]
    (graph,) = (each.graph for each in traced_graphs(fuse(block), x, w, shift))
    assert [each.dtype for each in graph.output_tensors] == ["bf16"]
    # A product reads f32 operands from memory, and the user gets what is returned.
    for kept in (
        lambda *x: block(*x).astype(jnp.float32) @ _W.T,
        lambda *x: (jax.nn.gelu(x[0] @ x[1]) + x[2]).astype(jnp.float32),
    ):
        graph = next(each.graph for each in traced_graphs(fuse(kept), x, w, shift))
        found, wanted = fuse(kept)(x, w, shift), kept(x, w, shift)
        assert found.dtype == jnp.float32
        assert jnp.allclose(found, wanted, rtol=2e-2, atol=2e-2)
    assert [each.dtype for each in graph.output_tensors] == ["f32"]


def test_strict_takes_one_kernel() -> None:
    layer = fuse(lambda x, w, b: jax.nn.gelu(x @ w + b), strict=True)
    assert layer(_X, _W, _B).shape == (5, 12)
    reshaped = fuse(lambda x, w: (x.reshape(5, 8) @ w).reshape(1, 5, 12), strict=True)
    assert reshaped(_X.reshape(1, 5, 8), _W).shape == (1, 5, 12)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            lambda x, w, b: jnp.expm1(x @ w + b),
            r"fuse: <lambda> is not one kernel. expm1\(f32\[5,12\]\) at "
            r"test_fuse_split.py:\d+ .* is not part of it: it uses 'expm1', which",
        ),
        (
            lambda x, w, b: x @ w @ w.T,
            r"dot_general\(f32\[5,12\], f32\[12,8\]\) at test_fuse_split.py:\d+ .* "
            "begins another one: a kernel has one contraction",
        ),
        (lambda x, w, b: jnp.sin(x), "has no contraction that a graph can have"),
        (
            lambda x, w, b: x @ w + jnp.exp(b),
            r"exp\(f32\[1,12\]\) at .* is not part of it: it depends on no contraction",
        ),
    ],
)
def test_strict_names_what_breaks_the_kernel(
    function: Callable[..., Any], told: str
) -> None:
    fused = fuse(function, strict=True)
    with pytest.raises(UnsupportedError, match=told) as caught:
        fused(_X, _W, _B)
    assert "omit strict" in str(caught.value)
    assert fused.explain(_X, _W, _B).name == "<lambda>"


# --- bad arguments --------------------------------------------------------------------


def test_bad_arguments_are_refused_at_once() -> None:
    bad: Any = fuse
    with pytest.raises(TypeError, match="fuse: int is not a function"):
        bad(3)
    with pytest.raises(TypeError, match="fuse: strict=1 is neither True nor False"):
        bad(jnp.sin, strict=1)
    with pytest.raises(TypeError, match="fuse: plan='A' is not a PlanOptions"):
        bad(jnp.sin, plan="A")
    with pytest.raises(ValueError, match="fuse: implementation='gpu' is not one of"):
        bad(jnp.sin, implementation="gpu")


def test_errors_of_the_function_are_the_user_s() -> None:
    def function(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fuse(function)(_X)


# --- explain --------------------------------------------------------------------------


def test_text_tells_kernels_and_the_rest_with_lines() -> None:
    def layer(x, w, b):
        h = jax.nn.relu(x @ w + b)
        return h / h.sum(-1, keepdims=True)

    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (_X, _W, _B))
    text = str(fuse(layer).explain(*shapes))
    assert text.startswith("fuse(layer): 1 kernel, 3 operations left to XLA\n")
    assert "kernel 1: matmul+add+relu(f32[1,5,8], f32[1,8,12], f32[1,1,12])" in text
    line = test_text_tells_kernels_and_the_rest_with_lines.__code__.co_firstlineno + 2
    place = rf"test_fuse_split.py:{line} \(.*layer\)"
    assert re.search(rf"  dot_general +f32\[5,12\] +{place}", text)
    assert re.search(rf"  relu +f32\[5,12\] +{place}", text)
    assert re.search(r"  reduce_sum +f32\[5\] .*XLA fuses reductions", text)


def test_picture_has_a_frame_for_each_kernel() -> None:
    case = CASES["gated MLP"]
    lines = fuse(case.function).explain(*case.operands).mermaid().splitlines()
    assert lines[0] == "flowchart TD"
    assert sum(line.lstrip().startswith("subgraph") for line in lines) == 3
    assert sum(line.strip() == "end" for line in lines) == 3
    drawn = {match[1] for line in lines if (match := re.match(r" +(\w+)[\[(]", line))}
    arrows = [re.match(r"  (\w+) -->.* ?(\b\w+)$", line) for line in lines]
    ends = {end for arrow in arrows if arrow for end in arrow.groups()}
    assert ends <= drawn
    assert len(drawn) == 4 + 5 + 1  # operands, operations, a result


def test_what_a_gpu_would_run() -> None:
    if reason := offline.obstacle():
        pytest.skip(reason)
    case = CASES["tanh gelu"]
    explained = fuse(case.function).explain(*case.operands).on("H200")
    (kernel,) = explained.kernels
    assert kernel.calls[0].implementation == "cudnn"
    assert "runs in cuDNN: eng" in str(explained)
    with pytest.raises(ValueError, match="is not a GPU that jax_cudnn knows"):
        fuse(case.function).explain(*case.operands).on("no such GPU")


def test_plans_explain_takes_a_fused_function() -> None:
    if reason := offline.obstacle():
        pytest.skip(reason)
    case = CASES["tanh gelu"]
    told = plans.explain(fuse(case.function), *case.operands, device="A100 40GB")
    assert [call.implementation for call in told.calls] == ["cudnn"]


# --- views ----------------------------------------------------------------------------


def test_views_of_reshapes_and_transposes() -> None:
    view = View(((2, 3), (5,), (7, 1)), (0, 1, 2))
    assert view.reshaped((6, 5, 7)) == View(((6,), (5,), (7,)), (0, 1, 2))
    assert view.reshaped((2, 15, 7)) is None
    assert view.reshaped((1, 6, 1, 5, 7)) == View(((1, 6, 1), (5,), (7,)), (0, 1, 2))
    assert view.transposed((3, 4, 2, 0, 1)) == View(((7, 1), (5,), (2, 3)), (2, 1, 0))
    assert view.transposed((1, 0, 2, 3, 4)) is None
    assert view.transposed((0, 2, 1, 3, 4)) is None


def test_views_with_groups_of_one_element() -> None:
    view = View(((), (5,), (1,)), (0, 1, 2))
    moved = view.transposed((1, 0))
    assert moved is not None
    assert moved.shape == (1, 5)
    assert sorted(moved.order) == [0, 1, 2]
    empty = View(((), (0,), (7,)), (0, 1, 2))
    assert empty.reshaped((0, 7)) == empty
    assert empty.reshaped((7, 0)) is None
