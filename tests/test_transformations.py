# SPDX-License-Identifier: Apache-2.0
"""Do all of JAX's transformations hold for attention, and at what cost in graphs?

Values are compared with an attention written in jax.numpy below, or with those of the
same function without the transformation.
"""

import functools
import itertools
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.export import deserialize, export

from jax_cudnn import EXPORT_SAFETY_CHECKS, sdpa
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import subprograms
from tests.conftest import Draw

_SMALL = {"n": 3, "b": 2, "s": 3, "t": 5, "h": 4, "k": 2, "d": 3, "e": 2}
_NAMES = ("query", "key", "value", "bias")
_AXES = ("bshd", "btkd", "btke", "1hst")


def _operands(draw: Draw, dtype: Any = jnp.float64, **sizes: int) -> list[jax.Array]:
    return [draw(axes, dtype, **{**_SMALL, **sizes}) for axes in _AXES]


def _attend(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sdpa(*operands, is_causal=True, return_residual=True)


def _plain(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention as in the textbook, causal, with its log-sum-exp."""
    query, key, value, bias = operands
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scores = jnp.einsum("bshd,bthd->bhst", query, key) / math.sqrt(query.shape[3])
    seen = jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None]
    scores = jnp.where(seen, scores + bias, -jnp.inf)
    output = jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), value)
    return output, jnp.swapaxes(jax.nn.logsumexp(scores, axis=-1), 1, 2)


def _loss(function: Callable[..., Any], *operands: jax.Array) -> jax.Array:
    output, stats = function(*operands)
    return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(stats))


_gradients = functools.partial(jax.value_and_grad(_loss, argnums=(1, 2, 3, 4)), _attend)


def _assert_close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance),
        got,
        want,
    )


def _graphs(function: Callable[..., Any], *args: Any) -> list[tuple[Graph, bool]]:
    """Return the graphs in a function's jaxpr, with whether they are forward mode's."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return [(graph, is_linear) for graph, _, is_linear in subprograms(jaxpr)]


def _kinds(function: Callable[..., Any], *args: Any) -> Counter[str]:
    return Counter(
        f"{graph.nodes[0].kind}:derivative" if is_linear else graph.nodes[0].kind
        for graph, is_linear in _graphs(function, *args)
    )


# --- derivatives ----------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_textbook_attention(draw: Draw) -> None:
    operands = _operands(draw)
    want = jax.value_and_grad(functools.partial(_loss, _plain), argnums=(0, 1, 2, 3))
    _assert_close(_gradients(*operands), want(*operands))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("index", range(4), ids=_NAMES)
def test_second_derivatives_agree_in_every_nesting(index: int, draw: Draw) -> None:
    operands = _operands(draw, b=1, h=2, k=1)

    def loss(function: Any, x: jax.Array) -> jax.Array:
        return _loss(function, *operands[:index], x, *operands[index + 1 :])

    want = jax.jit(jax.hessian(functools.partial(loss, _plain)))(operands[index])
    ours = functools.partial(loss, _attend)
    for outer, inner in itertools.product((jax.jacfwd, jax.jacrev), repeat=2):
        got = jax.jit(outer(inner(ours)))(operands[index])
        _assert_close(got, want)


@pytest.mark.usefixtures("x64")
def test_mixed_second_derivatives_are_symmetric(draw: Draw) -> None:
    operands = _operands(draw, b=1, h=2, k=1)
    loss = functools.partial(_loss, _attend)
    blocks = jax.jit(jax.hessian(loss, argnums=(0, 3)))(*operands)
    query, bias = (math.prod(operands[i].shape) for i in (0, 3))
    upper = blocks[0][1].reshape(query, bias)
    lower = blocks[1][0].reshape(bias, query)
    assert np.abs(upper).max() > 1e-3
    _assert_close(upper, lower.T)


@pytest.mark.usefixtures("x64")
def test_third_derivatives_exist(draw: Draw) -> None:
    operands = _operands(draw, b=1, h=2, k=1)

    def along(function: Any) -> jax.Array:
        def loss(step: jax.Array) -> jax.Array:
            return _loss(function, operands[0] * step, *operands[1:])

        third = jax.grad(jax.jacfwd(jax.grad(loss)))
        return jax.jit(third)(jnp.ones((), jnp.float64))

    _assert_close(along(_attend), along(_plain))


@pytest.mark.usefixtures("x64")
def test_jvp_linearize_and_both_transposes_are_one_derivative(draw: Draw) -> None:
    operands, tangents = _operands(draw), _operands(draw)
    outputs, along = jax.jvp(_attend, operands, tangents)
    _assert_close((outputs, along), jax.jvp(_plain, operands, tangents))

    linear_outputs, linear = jax.linearize(_attend, *operands)
    _assert_close((linear_outputs, linear(*tangents)), (outputs, along))

    cotangents = jax.tree.map(lambda x: draw("", jnp.float64) * jnp.cos(x), outputs)
    _, pullback = jax.vjp(_attend, *operands)
    back = pullback(cotangents)
    _assert_close(jax.linear_transpose(linear, *operands)(cotangents), back)
    dot = sum(jnp.vdot(x, y) for x, y in zip(along, cotangents, strict=True))
    _assert_close(dot, sum(jnp.vdot(x, y) for x, y in zip(tangents, back, strict=True)))


def test_masks_and_lengths_have_no_derivative(draw: Draw) -> None:
    q, k, v, bias = _operands(draw, jnp.float32)
    mask, lengths = draw("b1st", **_SMALL) > 0, jnp.array([2, 5])

    def function(q: jax.Array, mask: jax.Array, lengths: jax.Array) -> jax.Array:
        return sdpa(q, k, v, bias, mask, key_value_seq_lengths=lengths)

    out, pullback = jax.vjp(function, q, mask, lengths)
    gradient, *others = pullback(jnp.ones_like(out))
    assert gradient.dtype == jnp.float32
    assert [x.dtype for x in others] == [jax.dtypes.float0] * 2


# --- the graphs in a program ----------------------------------------------------------


def test_a_gradient_is_one_forward_and_one_backward_graph(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    assert _kinds(_gradients, *operands) == {"sdpa": 1, "sdpa_backward": 1}
    assert _kinds(jax.jit(_gradients), *operands) == {"sdpa": 1, "sdpa_backward": 1}


def test_statistics_are_made_only_where_someone_differentiates(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    ((forward, _),) = _graphs(sdpa, *operands)
    assert forward.outputs == ("output",)
    _, pullback = jax.vjp(sdpa, *operands)
    gradient = jax.grad(lambda *x: jnp.sum(sdpa(*x)))
    (forward, _), (backward, _) = _graphs(gradient, *operands)
    assert forward.outputs == ("output", "stats")
    # Their cotangent is known to be zero, so nothing carries it.
    assert "grad_stats" not in backward.inputs
    residuals = {x.shape for x in jax.tree.leaves(pullback)}
    assert residuals == {
        *(x.shape for x in operands),
        sdpa(*operands).shape,
        forward.tensor("stats").stored_shape,
    }


def test_only_gradients_that_are_asked_for_are_computed(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    for index, outputs in (
        (0, {"grad_query", "grad_key", "grad_value"}),
        (3, {"grad_query", "grad_key", "grad_value", "grad_bias"}),
    ):
        gradient = jax.grad(lambda *x: jnp.sum(sdpa(*x)), argnums=index)
        _, (backward, _) = _graphs(gradient, *operands)
        assert set(backward.outputs) == outputs


def test_a_cotangent_of_statistics_alone_reaches_the_backward_graph(
    draw: Draw,
) -> None:
    operands = _operands(draw, jnp.float32)
    _, (backward, _) = _graphs(jax.grad(lambda *x: jnp.sum(_attend(*x)[1])), *operands)
    assert {"grad_output", "grad_stats"} <= set(backward.inputs)


def test_forward_mode_adds_one_derivative_and_no_backward_graph(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    kinds = _kinds(lambda *x: jax.jvp(_attend, x, x), *operands)
    assert kinds == {"sdpa": 1, "sdpa:derivative": 1}


def test_vmap_keeps_the_number_of_graphs(draw: Draw) -> None:
    operands = [jnp.stack([x, x, x]) for x in _operands(draw, jnp.float32)]
    kinds = _kinds(jax.vmap(_gradients), *operands)
    assert kinds == {"sdpa": 1, "sdpa_backward": 1}


# --- vmap -----------------------------------------------------------------------------


@functools.cache
def _jitted_gradients() -> Callable[..., Any]:
    return jax.jit(_gradients)


def _loop(operands: list[Any], axes: tuple[int | None, ...]) -> Any:
    """Return value and gradients for each example, one after the other."""
    count = _SMALL["n"]
    results = [
        _jitted_gradients()(
            *(
                x if axis is None else jnp.take(x, i, axis=axis)
                for x, axis in zip(operands, axes, strict=True)
            )
        )
        for i in range(count)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "subset",
    [*itertools.product((False, True), repeat=4)][1:],
    ids=lambda subset: "-".join(itertools.compress(_NAMES, subset)),
)
def test_vmap_over_every_subset_of_operands(
    subset: tuple[bool, ...], draw: Draw
) -> None:
    # Another axis for each: first, last, in the middle, first.
    places = (0, -1, 2, 0)
    axes = tuple(p if is_in else None for p, is_in in zip(places, subset, strict=True))
    operands = [
        x
        if axis is None
        else jnp.moveaxis(draw(f"n{letters}", jnp.float64, **_SMALL), 0, axis)
        for x, letters, axis in zip(_operands(draw), _AXES, axes, strict=True)
    ]
    got = jax.jit(jax.vmap(_gradients, in_axes=axes))(*operands)
    _assert_close(got, _loop(operands, axes))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("axis", [*range(5), -2])
def test_vmap_over_every_axis_of_the_query(axis: int, draw: Draw) -> None:
    operands = _operands(draw)
    operands[0] = jnp.moveaxis(draw("nbshd", jnp.float64, **_SMALL), 0, axis)
    axes = (axis, None, None, None)
    mapped = jax.vmap(_attend, in_axes=axes, out_axes=(axis, 0))
    got = jax.jit(mapped)(*operands)
    want = [
        _attend(jnp.take(operands[0], i, axis=axis), *operands[1:]) for i in range(3)
    ]
    output, stats = zip(*want, strict=True)
    _assert_close(got, (jnp.stack(output, axis=axis), jnp.stack(stats)))


@pytest.mark.usefixtures("x64")
def test_vmap_over_mask_and_lengths(draw: Draw) -> None:
    q, k, v, bias = _operands(draw)
    masks = draw("nb1st", **_SMALL) > -0.5
    lengths = jnp.array([[0, 5], [3, 2], [4, 9]])

    def run(bias: jax.Array, mask: jax.Array, lengths: jax.Array) -> Any:
        return jax.value_and_grad(
            lambda bias: jnp.sum(
                jnp.sin(sdpa(q, k, v, bias, mask, key_value_seq_lengths=lengths))
            )
        )(bias)

    for in_axes in ((None, 0, None), (None, None, 0), (None, 0, 0)):
        args = [
            x if axis == 0 else x[1]
            for x, axis in zip((masks, lengths), in_axes[1:], strict=True)
        ]
        got = jax.jit(jax.vmap(run, in_axes=in_axes))(bias, *args)
        want = []
        for i in range(3):
            mask, length = (
                x[i] if axis == 0 else x
                for x, axis in zip(args, in_axes[1:], strict=True)
            )
            want.append(run(bias, mask, length))
        _assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


@pytest.mark.usefixtures("x64")
def test_nested_vmap_is_one_larger_batch(draw: Draw) -> None:
    _, k, v, _ = _operands(draw)
    queries = draw("nkbshd", jnp.float64, **_SMALL)
    biases = draw("n1hst", jnp.float64, **_SMALL)
    inner = jax.vmap(_attend, in_axes=(0, None, None, None))
    outer = jax.jit(jax.vmap(inner, in_axes=(0, None, None, 0)))
    got = outer(queries, k, v, biases)
    want = [
        [_attend(queries[i, j], k, v, biases[i]) for j in range(2)] for i in range(3)
    ]
    for index in range(2):
        rows = [jnp.stack([cell[index] for cell in row]) for row in want]
        _assert_close(got[index], jnp.stack(rows))


@pytest.mark.usefixtures("x64")
def test_grad_of_vmap_sums_over_the_examples_of_shared_operands(draw: Draw) -> None:
    operands = _operands(draw)
    operands[0] = draw("nbshd", jnp.float64, **_SMALL)
    axes = (0, None, None, None)

    def total(function: Any, *operands: jax.Array) -> jax.Array:
        mapped = jax.vmap(functools.partial(_loss, function), in_axes=axes)
        return jnp.sum(jnp.square(mapped(*operands)))

    got, want = (
        jax.jit(jax.grad(functools.partial(total, f), argnums=(0, 1, 2, 3)))(*operands)
        for f in (_attend, _plain)
    )
    _assert_close(got, want)


@pytest.mark.usefixtures("x64")
def test_vmap_of_forward_mode_folds_tangents_and_operands(draw: Draw) -> None:
    operands = _operands(draw)
    tangents = [draw(f"n{letters}", jnp.float64, **_SMALL) for letters in _AXES]
    queries = draw("nbshd", jnp.float64, **_SMALL)

    def along(function: Any, query: jax.Array, *tangents: jax.Array) -> Any:
        return jax.jvp(function, (query, *operands[1:]), tangents)

    for axes in (
        (None, 0, 0, 0, 0),
        (0, 0, None, 0, None),
        (0, None, None, None, None),
    ):
        args = [
            x if axis == 0 else x[0]
            for x, axis in zip((queries, *tangents), axes, strict=True)
        ]
        got, want = (
            jax.jit(jax.vmap(functools.partial(along, f), in_axes=axes))(*args)
            for f in (_attend, _plain)
        )
        _assert_close(got, want)


def test_vmap_over_no_examples_gives_none(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    operands[0] = jnp.zeros((0, *operands[0].shape), jnp.float32)
    mapped = jax.vmap(_gradients, in_axes=(0, None, None, None))
    value, gradients = mapped(*operands)
    assert value.shape == (0,)
    assert gradients[1].shape == (0, *operands[1].shape)


# --- control flow ---------------------------------------------------------------------


def _square(draw: Draw, dtype: Any = jnp.float64) -> list[jax.Array]:
    """Draw operands whose result can be the next query."""
    return _operands(draw, dtype, s=5, e=_SMALL["d"])


@pytest.mark.usefixtures("x64")
def test_scan_and_its_derivatives_match_the_unrolled_loop(draw: Draw) -> None:
    q, k, v, bias = _square(draw)
    biases = jnp.stack([bias, -bias, 2 * bias])

    def looped(q: jax.Array, k: jax.Array) -> Any:
        return lax.scan(lambda q, bias: _attend(q, k, v, bias), q, biases)

    def unrolled(q: jax.Array, k: jax.Array) -> Any:
        stats = []
        for bias in biases:
            q, row = _plain(q, k, v, bias)
            stats.append(row)
        return q, jnp.stack(stats)

    def derivatives(function: Any) -> Any:
        def loss(q: jax.Array, k: jax.Array) -> jax.Array:
            return _loss(function, q, k)

        gradient = jax.grad(loss, argnums=(0, 1))
        value_and_tangent = jax.jvp(function, (q, k), (k.mean() * q, k))
        return value_and_tangent, gradient(q, k), jax.jvp(gradient, (q, k), (q, k))

    got, want = (
        jax.jit(functools.partial(derivatives, f))() for f in (looped, unrolled)
    )
    _assert_close(got, want)


@pytest.mark.usefixtures("x64")
def test_loops_and_branches_run_forward(draw: Draw) -> None:
    q, k, v, bias = _square(draw)

    def once(q: jax.Array) -> jax.Array:
        return _attend(q, k, v, bias)[0]

    want = once(once(once(q)))
    _assert_close(lax.fori_loop(0, 3, lambda _, q: once(q), q), want)
    done = lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, once(state[1])), (0, q)
    )
    _assert_close(done[1], want)
    branch = jax.jit(lambda flag, q: lax.cond(flag, once, jnp.negative, q))
    _assert_close(branch(True, q), once(q))
    _assert_close(branch(False, q), -q)


# --- rematerialisation ----------------------------------------------------------------

_SAVED = ("cudnn_sdpa_output", "cudnn_sdpa_stats")


@pytest.mark.parametrize(
    ("policy", "forward_count"),
    [
        (None, 2),
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.everything_saveable, 1),
        (jax.checkpoint_policies.save_only_these_names(*_SAVED), 1),
        (jax.checkpoint_policies.save_only_these_names("something_else"), 2),
    ],
    ids=["default", "nothing", "everything", "names", "other-names"],
)
def test_remat_reruns_the_forward_graph_unless_its_results_are_kept(
    policy: Any, forward_count: int, draw: Draw
) -> None:
    operands = _operands(draw, jnp.float32)

    def block(*operands: jax.Array) -> jax.Array:
        q, k, v, bias = operands
        return jnp.sum(jnp.sin(sdpa(jnp.tanh(q), k, v, bias)))

    argnums = (0, 1, 2, 3)
    kept = jax.grad(jax.checkpoint(block, policy=policy), argnums=argnums)
    _assert_close(kept(*operands), jax.grad(block, argnums=argnums)(*operands), 1e-5)
    kinds = _kinds(kept, *operands)
    assert kinds == {"sdpa": forward_count, "sdpa_backward": 1}


def test_remat_inside_scan_keeps_named_results(draw: Draw) -> None:
    q, k, v, bias = _square(draw, jnp.float32)
    policy = jax.checkpoint_policies.save_only_these_names(*_SAVED)

    @functools.partial(jax.checkpoint, policy=policy)
    def body(q: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
        return sdpa(q, k, v, bias), None

    def loss(q: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(body, q, jnp.stack([bias] * 3))[0])

    assert _kinds(jax.grad(loss), q) == {"sdpa": 1, "sdpa_backward": 1}


# --- jit ------------------------------------------------------------------------------


def test_jit_traces_once_for_a_shape_and_again_for_another(draw: Draw) -> None:
    traces: list[int] = []

    @jax.jit
    def function(*operands: jax.Array) -> Any:
        traces.append(1)
        return _gradients(*operands)

    operands = _operands(draw, jnp.float32)
    for _ in range(3):
        function(*operands)
    assert len(traces) == 1
    function(*_operands(draw, jnp.float32, s=2))
    assert len(traces) == 2


def _compilations(caplog: pytest.LogCaptureFixture, run: Callable[[], Any]) -> int:
    caplog.clear()
    with jax.log_compiles():
        jax.block_until_ready(run())
    return sum(r.getMessage().startswith("Compiling") for r in caplog.records)


@pytest.mark.parametrize("function", [sdpa, jax.grad(lambda *x: jnp.sum(sdpa(*x)))])
def test_eager_calls_compile_once(
    function: Callable[..., Any], draw: Draw, caplog: pytest.LogCaptureFixture
) -> None:
    # Sizes of this test's own: other tests' compilations do not count.
    operands = _operands(draw, jnp.float32, t=37 if function is sdpa else 41)
    assert _compilations(caplog, lambda: function(*operands)) > 0
    assert _compilations(caplog, lambda: function(*operands)) == 0


@pytest.mark.usefixtures("x64")
def test_calls_and_derivatives_run_with_jit_disabled(draw: Draw) -> None:
    query, key, value, bias = _operands(draw)

    def output(query: jax.Array) -> jax.Array:
        return _attend(query, key, value, bias)[0]

    expected = output(query), jax.jvp(output, (query,), (query,))[1]
    expected_gradients = _gradients(query, key, value, bias)
    with jax.disable_jit():
        result = output(query), jax.jvp(output, (query,), (query,))[1]
        gradients = _gradients(query, key, value, bias)
    for x, y in zip(
        jax.tree.leaves((result, gradients)),
        jax.tree.leaves((expected, expected_gradients)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_static_options_are_part_of_the_program(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    static = ("scale", "is_causal", "implementation", "return_residual")
    jitted = jax.jit(sdpa, static_argnames=static)
    for options in (
        {"scale": 0.5},
        {"scale": 2.0, "is_causal": True},
        {"implementation": "xla", "return_residual": True},
    ):
        _assert_close(jitted(*operands, **options), sdpa(*operands, **options), 1e-6)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_products_have_the_precision_in_force_when_traced(
    precision: str | None, draw: Draw
) -> None:
    operands = _operands(draw, jnp.float32)
    # A function of its own, so that nothing traced before is taken again.
    fresh = jax.jit(lambda *x: _gradients(*x))
    with jax.default_matmul_precision(precision):
        traced = fresh.trace(*operands)
    products = [
        line for line in traced.lower().as_text().splitlines() if "dot_general" in line
    ]
    assert len(products) >= 6
    wanted = "DEFAULT" if precision is None else "HIGHEST"
    for line in products:
        found = set(re.findall(r"precision = \[(\w+), (\w+)\]", line))
        assert found <= {(wanted, wanted)}
        assert found or precision is None


def test_equal_options_share_one_program(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)

    def jaxpr(**options: Any) -> str:
        return str(jax.make_jaxpr(lambda *x: sdpa(*x, **options))(*operands))

    assert jaxpr(scale=1) == jaxpr(scale=1.0) == jaxpr(scale=np.float64(1))
    assert jaxpr() == jaxpr(scale=1 / math.sqrt(3), implementation="auto")
    assert jaxpr() != jaxpr(implementation="xla")


def test_a_donated_query_gives_its_memory_to_the_result(draw: Draw) -> None:
    q, k, v, bias = _square(draw, jnp.float32)
    want = sdpa(q, k, v, bias)
    got = jax.jit(sdpa, donate_argnums=0)(q, k, v, bias)
    assert q.is_deleted()
    _assert_close(got, want, 1e-6)


def test_ahead_of_time_compilation_runs(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    compiled = jax.jit(_gradients).lower(*shapes).compile()
    _assert_close(compiled(*operands), _gradients(*operands), 1e-5)
    value, gradients = jax.eval_shape(_gradients, *shapes)
    assert value.shape == ()
    assert [x.shape for x in gradients] == [x.shape for x in operands]


# --- export ---------------------------------------------------------------------------


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")], ids="-".join)
def test_an_exported_gradient_runs_on_the_cpu(
    platforms: tuple[str, ...], draw: Draw
) -> None:
    # 16-bit operands go to cuDNN in the part for CUDA.
    operands = _operands(draw, jnp.bfloat16)
    gradient = jax.grad(
        lambda *x: jnp.sum(sdpa(*x).astype(jnp.float32)), argnums=(0, 1, 2, 3)
    )
    exported = export(
        jax.jit(gradient), platforms=platforms, disabled_checks=EXPORT_SAFETY_CHECKS
    )(*operands)
    assert exported.platforms == platforms
    has_cudnn = "jax_cudnn.graph_scratch" in exported.mlir_module()
    assert has_cudnn == ("cuda" in platforms)
    want = jax.jit(gradient)(*operands)
    _assert_close(jax.jit(exported.call)(*operands), want, 0)


def test_an_exported_function_survives_its_bytes_and_has_a_gradient(
    draw: Draw,
) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export writes bytes with it")
    operands = _operands(draw, jnp.float32)
    exported = export(
        jax.jit(sdpa), platforms=("cpu", "cuda"), disabled_checks=EXPORT_SAFETY_CHECKS
    )(*operands)
    read = deserialize(exported.serialize(vjp_order=1))
    _assert_close(read.call(*operands), sdpa(*operands), 1e-6)

    def gradient(function: Any) -> Any:
        def loss(*operands: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(function(*operands)))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*operands)

    _assert_close(gradient(read.call), gradient(sdpa), 1e-5)


# --- several devices ------------------------------------------------------------------

_SHARDED = """
import functools, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_cudnn import UnsupportedError, sdpa

rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
operands = draw(4, 3, 6, 5), draw(4, 7, 2, 5), draw(4, 7, 2, 3), draw(1, 6, 3, 7)
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
batch, heads = P("data", None, "model"), P(None, "model")

def attend(q, k, v, bias):
    return sdpa(q, k, v, bias, is_causal=True, return_residual=True)

def gradients(function):
    def loss(*operands):
        out, stats = function(*operands)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(stats))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*operands)

def forward_mode(function):
    return jax.jit(lambda *x: jax.jvp(function, x, x))(*operands)

def check(name, function):
    for way in (lambda f: jax.jit(f)(*operands), gradients, forward_mode):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10),
            way(function), way(attend))
    print(name)

sharded = functools.partial(jax.shard_map, attend, mesh=mesh, check_vma=True)
# The bias is the same on all devices along "data": its gradient is summed over them.
check("batch", sharded(in_specs=(P("data"),) * 3 + (P(),), out_specs=P("data")))
check("batch and heads", sharded(in_specs=(batch,) * 3 + (heads,), out_specs=batch))
# Key and value are the same everywhere, only the query's rows are shared out.
full = jax.shard_map(
    lambda q, k, v, bias: sdpa(q, k, v, bias, return_residual=True),
    mesh=mesh, in_specs=(P(None, None, "model"), P(None, None, "model"),
    P(None, None, "model"), P(None, "model")), out_specs=P(None, None, "model"))
def attend(q, k, v, bias):
    return sdpa(q, k, v, bias, return_residual=True)
check("heads", full)
placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in
          zip(operands, (P("data"), P("data"), P("data"), P()))]
out, _ = jax.jit(attend)(*placed)
np.testing.assert_allclose(out, attend(*operands)[0], rtol=1e-10, atol=1e-10)
print("automatic")

explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(explicit):
    placed = jax.device_put(operands[0], NamedSharding(explicit, P("data")))
    try:
        jax.jit(sdpa)(placed, *operands[1:])
    except UnsupportedError as error:
        print(error)
"""


def test_sharded_attention_is_unsharded_attention() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _SHARDED], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "batch",
        "batch and heads",
        "heads",
        "automatic",
        "sdpa: query is sharded in its type, as P('data', None, None, None). A cuDNN "
        "call runs on one device's share of the operands. Wrap the call in "
        "jax.shard_map, with batch and heads sharded alike in all operands, use a mesh "
        'with AxisType.Auto, or pass implementation="xla".',
    ]


def test_the_values_alone_can_be_transposed(draw: Draw) -> None:
    query, key, value = draw("bshd"), draw("btkd"), draw("btke")
    cotangent = draw("bshe")
    (got,) = jax.linear_transpose(lambda v: sdpa(query, key, v), value)(cotangent)
    _, pullback = jax.vjp(lambda v: sdpa(query, key, v), value)
    np.testing.assert_allclose(got, pullback(cotangent)[0], rtol=1e-5, atol=1e-6)
