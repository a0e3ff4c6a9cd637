# SPDX-License-Identifier: Apache-2.0
"""Tests attention's gradient for rows that a bias moves far from 0.

Padding is often hidden by a bias of -1e9 or finfo.min for whole rows. The log-sum-exp
of such a row has no digits left for the number of its keys. The truth is the softmax of
the scores as rounded to f32, and its gradient, in float64 NumPy
(tests/attention/shared/oracle.py). The reference has to give this, and so has a
rewritten graph in a flash kernel's arithmetic (tests/attention/shared/flash.py).
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import sdpa
from jax_cudnn.graph import Graph
from jax_cudnn.legalize import legalize
from jax_cudnn.legalize.attention import far_rows
from tests.attention.shared.far_rows import (
    BIASES,
    FAR,
    FORMS,
    LEAST,
    LENGTHS,
    SIZES,
    check_results,
    ordinary,
    problem_of,
    rows_at,
)
from tests.attention.shared.flash import flash
from tests.attention.shared.legal import HOPPER
from tests.attention.shared.oracle import shape_of, to_logical
from tests.common.evaluating import evaluate

pytestmark = [pytest.mark.once, pytest.mark.sampled]


_LEAST_BIASES = (BIASES["finfo.min"], BIASES["-inf and low"])


_ALL = pytest.mark.parametrize("edit", BIASES.values(), ids=BIASES)
_EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


# --- the reference --------------------------------------------------------------------


@_ALL
@_EVERY_FORM
def test_the_reference_is_exact(
    edit: Callable[[np.ndarray], None], form: dict[str, Any]
) -> None:
    problem = problem_of(edit, **form)
    outputs = _reference(problem.forward)(problem.operands)
    check_results(problem.forward, outputs, problem.truth)
    operands = problem.backward_operands(outputs)
    results = _reference(problem.backward)(operands)
    check_results(problem.backward, results, problem.truth)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("low", [-FAR, "min"])
def test_gradients_of_left_padded_batches_are_those_of_jax_nn(
    low: float | str, dtype: Any
) -> None:
    rng = np.random.default_rng(0)
    query, key, value, weight = (
        jnp.asarray(np.asarray(rng.standard_normal((2, 32, 2, 16)), dtype))
        for _ in range(4)
    )
    hidden = float(jnp.finfo(dtype).min) if low == "min" else float(low)
    # The first half of the second entry is padding, as query and as key.
    bias = np.zeros((2, 1, 32, 32), np.float32)
    bias[1, :, :16], bias[1, :, :, :16] = hidden, hidden
    bias = jnp.asarray(bias, dtype)

    operands = [query, key, value, bias]
    _check_as_good_as_jax_nn(operands, weight)


def _check_as_good_as_jax_nn(operands: list[jax.Array], weight: jax.Array) -> None:
    """Compare with `jax.nn` in f32: as good as `jax.nn` in the dtype, or equal."""

    def gradients(function: Any, dtype: Any) -> list[np.ndarray]:
        given = [x.astype(dtype) for x in operands]
        with jax.numpy_dtype_promotion("standard"):  # jax.nn relies on it
            pulled = jax.jit(lambda *xs: jax.vjp(function, *xs[:-1])[1](xs[-1]))(
                *given, weight.astype(dtype)
            )
        return [np.asarray(x, np.float64) for x in pulled]

    truth = gradients(jax.nn.dot_product_attention, jnp.float32)
    theirs = gradients(jax.nn.dot_product_attention, weight.dtype)
    ours = gradients(sdpa, weight.dtype)
    for i, (x, y, true) in enumerate(zip(ours, theirs, truth, strict=True)):
        error, most = np.linalg.norm(x - true), np.linalg.norm(y - true)
        assert error <= 1.2 * most + 2e-6 * np.linalg.norm(true), (i, error, most)


@pytest.mark.parametrize("low", [-1e4, -FAR, LEAST])
def test_both_modes_of_differentiation_agree(low: float) -> None:
    rng = np.random.default_rng(1)
    operands = [
        jnp.asarray(np.asarray(rng.standard_normal(shape_of(axes, SIZES)), jnp.float32))
        for axes in ("bshd", "btkd", "btke", "b1st")
    ]
    operands[3] = operands[3].at[:, :, ::2].set(low)

    def function(*operands: jax.Array) -> Any:
        return sdpa(*operands, return_residual=True)

    tangents = tuple(
        jnp.asarray(np.asarray(rng.standard_normal(x.shape), jnp.float32))
        for x in operands
    )
    (output, stats), pushed = jax.jvp(function, tuple(operands), tangents)
    cotangents = tuple(
        jnp.asarray(np.asarray(rng.standard_normal(x.shape), jnp.float32))
        for x in (output, stats)
    )
    pulled = jax.vjp(function, *operands)[1](cotangents)

    def product(xs: Any, ys: Any) -> float:
        return sum(float(jnp.vdot(x, y)) for x, y in zip(xs, ys, strict=True))

    assert product(pushed, cotangents) == pytest.approx(
        product(pulled, tangents), rel=1e-4, abs=1e-4
    )


def test_16_bit_gradients_of_large_scores_are_as_good_as_those_of_jax_nn() -> None:
    # The sum of O dO over a rounded output would be off by more than the gradient is.
    rng = np.random.default_rng(2)
    query, key, value, weight = (
        jnp.asarray(
            np.asarray(rng.standard_normal((1, 64, 2, 32)) * size, jnp.bfloat16)
        )
        for size in (4, 4, 1, 1)
    )
    _check_as_good_as_jax_nn([query, key, value], weight)


# --- what cuDNN gets ------------------------------------------------------------------


# One compilation serves all biases of a form.
@functools.cache
def _compiled(graph: Graph, number: int) -> tuple[Graph, Any, Any]:
    rewrite = legalize(graph, HOPPER).candidates[number]
    return rewrite.graph, jax.jit(rewrite.before), jax.jit(rewrite.after)


@functools.cache
def _reference(graph: Graph) -> Callable[..., Any]:
    return jax.jit(functools.partial(evaluate, graph))


def _legal_results(
    graph: Graph, operands: list[jax.Array], number: int = 0
) -> tuple[jax.Array, ...]:
    legal, before, after = _compiled(graph, number)
    return after(operands, flash(legal, before(operands)))


def _as_the_kernel_sees(bias: np.ndarray) -> np.ndarray:
    """Return a bias without what the kernel is documented not to see of it.

    It adds none that all keys of a row share, and takes numbers below -2.3e38 for -inf
    where each head has its own.
    """
    if bias.shape[3] == 1:
        return np.where(bias == -np.inf, bias, 0)
    has_own_heads = bias.shape[1] != 1 and bias.shape[2] != 1
    return np.where(has_own_heads & (bias < -2.3e38), -np.inf, bias)


@pytest.mark.usefixtures("_allow_f32")
@_ALL
@_EVERY_FORM
def test_a_kernels_results_and_gradients_are_exact(
    edit: Callable[[np.ndarray], None], form: dict[str, Any]
) -> None:
    problem = problem_of(edit, seen=_as_the_kernel_sees, **form)
    outputs = _legal_results(problem.forward, problem.operands)
    # Beside a bias of 1e4, scores times log2(e) are 2^-10 apart.
    eps = 2**-10 if edit is BIASES["-1e4"] else 1e-6
    check_results(problem.forward, outputs, problem.truth, eps=eps, skip=("stats",))
    operands = problem.backward_operands(outputs)
    count = len(legalize(problem.backward, HOPPER).candidates)
    if form.get("bias") in ("bhst", "1hst") and edit in _LEAST_BIASES:
        count = 1  # XLA, which the others ask for dbias, does see finfo.min.
    for number in range(count):
        results = _legal_results(problem.backward, operands, number)
        check_results(problem.backward, results, problem.truth, eps=1e-5)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("form", ["b1st", "11st mask", "b1st lengths", "1hst"])
def test_rows_are_taken_block_by_block(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Six rows in blocks of two, and in the 11st form, all at once, of four and two.
    monkeypatch.setattr(far_rows, "_MOST_SCORES", 2 * 2 * 7)
    problem = problem_of(rows_at(-FAR), **FORMS[form])
    outputs = _reference(problem.forward)(problem.operands)
    operands = problem.backward_operands(outputs)
    legal, before, after = _compiled.__wrapped__(problem.backward, 0)
    results = after(operands, flash(legal, before(operands)))
    check_results(problem.backward, results, problem.truth, eps=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("form", ["bhst", "b1st", "11st mask", "1h1t"])
def test_16_bit_gradients_of_hidden_rows_are_as_exact_as_others(
    form: str, dtype: str
) -> None:
    low = -6e4 if dtype == "f16" else -FAR
    sizes = {**SIZES, "s": 32, "t": 48}
    errors = []
    for edit in (ordinary, rows_at(low)):
        problem = problem_of(edit, dtype=dtype, sizes=sizes, **FORMS[form])
        outputs = _legal_results(problem.forward, problem.operands)
        operands = problem.backward_operands(outputs)
        results = _legal_results(problem.backward, operands)
        errors.append(
            [
                np.linalg.norm(to_logical(tensor, x).astype(np.float64) - truth)
                / np.linalg.norm(truth)
                for tensor, x in zip(
                    problem.backward.output_tensors, results, strict=True
                )
                for truth in [problem.truth[tensor.name]]
            ]
        )
    eps = float(jnp.finfo(jnp.bfloat16 if dtype == "bf16" else jnp.float16).eps)
    usual, hidden = np.array(errors)
    assert (usual <= 2 * eps).all(), errors
    # f16 keeps no digits of scores beside 6e4 that are smaller than 2^-8.
    assert (hidden <= 2 * np.maximum(usual, 2**-8 if dtype == "f16" else eps)).all()


def test_rows_without_a_cotangent_are_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding that the loss does not read costs no time."""
    problem = problem_of(rows_at(-FAR), dtype="bf16", bias="b1st")
    outputs = _reference(problem.forward)(problem.operands)
    operands = problem.backward_operands(outputs)
    index = problem.backward.inputs.index("grad_output")
    rewrite = legalize(problem.backward, HOPPER).candidates[0]

    def groups_computed(cotangent: jax.Array) -> int:
        count = 0

        def counted(*args: Any) -> Any:  # self, group, sums, ...
            nonlocal count
            count += 1
            return args[2]

        given = [*operands[:index], cotangent, *operands[index + 1 :]]
        with monkeypatch.context() as patch, jax.disable_jit():
            patch.setattr(far_rows._FarRows, "_add_group", counted)
            rewrite.after(given, flash(rewrite.graph, rewrite.before(given)))
        return count

    full = operands[index]  # stored (b, s, h, e); the odd rows are ordinary
    # Batch entries with the heads that share their bias, whose gradient is asked for.
    assert groups_computed(full) == 2
    assert groups_computed(full.at[0].set(0)) == 1
    assert groups_computed(full.at[:, ::2].set(0)) == 0


@pytest.mark.parametrize("edit", [ordinary, rows_at(-FAR), rows_at(-np.inf)])
@pytest.mark.parametrize("form", ["b1st", "b1st lengths", "bhs1"])
def test_the_loop_is_left_out_where_no_row_is_far(
    form: str, edit: Callable[[np.ndarray], None]
) -> None:
    """The way without the loop is taken if it is enough, and gives the same numbers."""
    problem = problem_of(edit, dtype="bf16", **FORMS[form])
    outputs = _reference(problem.forward)(problem.operands)
    operands = problem.backward_operands(outputs)
    stats = operands[problem.backward.inputs.index("stats")]
    is_far = bool((jnp.abs(jnp.where(stats == -jnp.inf, 0, stats)) > 2**11).any())
    rewrite = legalize(problem.backward, HOPPER).candidates[0]
    assert rewrite.fast_path is not None
    assert bool(rewrite.fast_path.applies(operands)) == (not is_far)

    def kernel(given: Any) -> Any:
        return tuple(flash(rewrite.graph, given))

    results = kernel(rewrite.before(operands))
    text = str(jax.make_jaxpr(rewrite.fast_path.after)(operands, results))
    assert "while" not in text
    # Nothing hides rows from the kernel that there are not.
    assert "clamp" in str(jax.make_jaxpr(rewrite.before)(operands))
    assert "clamp" not in str(jax.make_jaxpr(rewrite.fast_path.before)(operands))
    with jax.disable_jit():  # the kernel is NumPy's
        found = rewrite.run(kernel, operands)
        expected = rewrite.after(operands, results)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def _lowered(layers: int, *, is_causal: bool = False, with_bias: bool = True) -> str:
    """Return the "cuda" text of the gradients of attentions that share a bias."""

    def loss(x: jax.Array, bias: jax.Array) -> jax.Array:
        for _ in range(layers):
            given = bias if with_bias else None
            x = sdpa(x, x, x, given, is_causal=is_causal)
        return jnp.sum(x.astype(jnp.float32)) + jnp.sum(bias.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((16, 512, 12, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 12, 512, 512), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(x, bias)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("is_causal", [False, True])
def test_calls_of_a_program_share_the_branch(is_causal: bool) -> None:
    one, four = (_lowered(layers, is_causal=is_causal) for layers in (1, 4))
    for text in (one, four):
        assert text.count("stablehlo.while") == text.count("stablehlo.case") == 1
        assert text.count("stablehlo.dot_general") == 5
    # Each further call is little more than one without a bias.
    bare = [len(_lowered(layers, with_bias=False)) for layers in (1, 4)]
    assert len(four) - len(one) < 1.2 * (bare[1] - bare[0])


def test_programs_of_64_bits_have_the_branch(x64: None) -> None:
    """JAX 0.10 takes indices of one dtype only."""
    del x64
    assert _lowered(1).count("stablehlo.while") == 1


def test_the_branch_is_short() -> None:
    text = _lowered(1)
    assert len(text) < 6 * len(_lowered(1, with_bias=False))
    assert text.count("\n") < 300


def test_a_gradient_without_bias_has_no_loop() -> None:
    graph = problem_of(ordinary, dtype="bf16", mask="b1st").backward
    (rewrite,) = legalize(graph, HOPPER).candidates
    shapes = [
        jax.ShapeDtypeStruct(x.stored_shape, jnp.bfloat16) for x in graph.output_tensors
    ]
    operands = problem_of(ordinary, dtype="bf16", mask="b1st")
    given = operands.backward_operands(evaluate(operands.forward, operands.operands))
    text = str(jax.make_jaxpr(rewrite.after)(given, shapes))
    assert "while" not in text


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize(("t", "low"), [(64, -100.0), (192, -160.0)])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"bias": "1hst"},
        {"bias": "b1st", "is_causal": True, "with_grad_stats": True},
        {"bias": "bh1t", "mask": "b1st", "lengths": LENGTHS},
        {"mask": "11st", "lengths": ("key_lengths",)},
    ],
    ids=lambda form: "-".join(form) or "plain",
)
def test_low_rows_get_finite_gradients_at_every_key_count(
    form: dict[str, Any], low: float, t: int
) -> None:
    sizes = {**SIZES, "s": 5, "t": t}
    for with_bias_gradient in (False, True) if "bias" in form else (False,):
        problem = problem_of(rows_at(low), sizes=sizes, **form)
        if "bias" not in form:
            # Scores near `low` without any bias.
            problem = problem_of(ordinary, sizes=sizes, score=low, **form)
        if not with_bias_gradient:
            problem = problem.without_bias_gradient()
        outputs = _reference(problem.forward)(problem.operands)
        operands = problem.backward_operands(outputs)
        rewrite = legalize(problem.backward, HOPPER).candidates[0]
        with jax.disable_jit():  # no row is far: nothing is gained by compiling
            results = rewrite.after(
                operands, flash(rewrite.graph, rewrite.before(operands))
            )
        assert all(np.isfinite(x).all() for x in results)
        check_results(problem.backward, results, problem.truth, eps=2e-5)


# --- masks that are known at compile time ---------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("role", ["mask", "bias"])
def test_nothing_is_computed_from_a_captured_mask_at_compile_time(
    role: str, is_causal: bool
) -> None:
    """XLA would take seconds for a mask of (4096, 4096)."""
    # The other tests switch most of XLA's passes off.
    jax.config.update("jax_disable_most_optimizations", False)
    sizes = {**SIZES, "s": 48, "t": 32}
    problem = problem_of(
        ordinary, dtype="bf16", sizes=sizes, is_causal=is_causal, **{role: "11st"}
    )
    outputs = _reference(problem.forward)(problem.operands)
    for graph, operands in (
        (problem.forward, problem.operands),
        (problem.backward, problem.backward_operands(outputs)),
    ):
        rewrite = legalize(graph, None).candidates[0]
        place = graph.inputs.index(role)
        captured = operands[place]
        results = flash(rewrite.graph, rewrite.before(operands))

        def run(operands: Any, results: Any) -> Any:
            given = [*operands[:place], captured, *operands[place + 1 :]]  # noqa: B023
            return rewrite.before(given), rewrite.after(given, results)  # noqa: B023

        text = jax.jit(run).lower(operands, results).compile().as_text()
        found = re.findall(r"= \w+\[([\d,]+)\]\S* constant\(", text)
        sizes_found = [math.prod(map(int, dims.split(","))) for dims in found]
        assert [size for size in sizes_found if size >= 48] == [48 * 32]
