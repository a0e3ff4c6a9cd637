# SPDX-License-Identifier: Apache-2.0
"""Tests `jax_cudnn.causal_conv1d` against loops in NumPy's float64."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn import UnsupportedError, causal_conv1d
from jax_cudnn.lowering import traced_graphs
from tests.common.devices import Spec, mesh_of, placed
from tests.common.evaluating import evaluate
from tests.conftest import Draw
from tests.products.shared.causal import dense

_B, _S, _C, _K = 3, 11, 5, 4
# Two documents that meet, one whose id returns, and one of a single step.
_IDS = jnp.array(
    [[0] * 4 + [7] * 7, [2] * 3 + [5] * 2 + [2] * 6, [1] * 10 + [9]], jnp.int32
)


def _operands(draw: Draw, dtype: Any = jnp.float32, taps: int = _K) -> list[jax.Array]:
    """Draw x, w, bias and a cotangent."""
    sizes = {"b": _B, "s": _S, "d": _C, "k": taps}
    return [draw(axes, dtype, **sizes) for axes in ("bsd", "kd", "d", "bsd")]


def _with_gradients(
    function: Any, cotangent: jax.Array, *operands: jax.Array
) -> list[jax.Array]:
    output, back = jax.vjp(function, *operands)
    return [output, *back(cotangent)]


def _in_both_layouts(x: Any, w: Any, bias: Any, **options: Any) -> list[jax.Array]:
    swapped = jnp.swapaxes(x, 1, 2), w.T
    first = causal_conv1d(*swapped, bias=bias, dimension_numbers="NCW", **options)
    return [causal_conv1d(x, w, bias=bias, **options), jnp.swapaxes(first, 1, 2)]


_OPTIONS = [
    {"activation": activation, "segment_ids": ids}
    for activation in (None, "silu")
    for ids in (None, _IDS)
]


@pytest.mark.once
@pytest.mark.parametrize(
    ("taps", "dtype"),
    [(1, "float32"), (4, "float32"), (4, "bfloat16"), (3, "float16"), (35, "float32")],
)
def test_values_and_gradients_are_those_of_loops(
    taps: int, dtype: str, draw: Draw
) -> None:
    x, w, bias, cotangent = _operands(draw, dtype, taps)

    @jax.jit
    def every(*operands: jax.Array) -> Any:
        found: list[Any] = []
        for options in _OPTIONS:
            call = functools.partial(_in_both_layouts, **options)
            outputs, back = jax.vjp(call, *operands)
            zeros = jnp.zeros_like(cotangent)
            pairs = ([cotangent, zeros], [zeros, cotangent])
            found.append([(outputs[i], *back(pair)) for i, pair in enumerate(pairs)])
        return found

    unit = float(jnp.finfo(dtype).eps)
    for options, results in zip(_OPTIONS, every(x, w, bias), strict=True):
        ids, activation = options["segment_ids"], options["activation"]
        given = {"cotangent": cotangent, "ids": ids}
        truth = dense(x, w, bias, activation=activation, **given)
        given["cotangent"] = abs(cotangent)
        size = dense(abs(x), abs(w), abs(bias), activation=None, **given)
        for result in results:
            for got, want, most in zip(result, truth, size, strict=True):
                assert got.dtype == jnp.dtype(dtype)
                error = np.abs(np.asarray(got, np.float64) - want)
                # One rounding to the dtype, and sums in f32.
                assert np.all(error <= unit * np.abs(want) + 3e-6 * most + 1e-7)


@pytest.mark.usefixtures("x64")
def test_derivatives_of_all_orders_and_modes(draw: Draw) -> None:
    x, w, bias, cotangent = _operands(draw, jnp.float64)

    def call(x: Any, w: Any, bias: Any) -> Any:
        return causal_conv1d(x, w, bias=bias, segment_ids=_IDS)

    check_grads(call, (x, w, bias), order=2, modes=("fwd", "rev"))
    truth = dense(x, w, bias, cotangent=cotangent, ids=_IDS)
    for got, want in zip(
        _with_gradients(call, cotangent, x, w, bias), truth, strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    # Each gradient alone, as the graph of the gradient has it.
    for i in range(3):
        one = jax.grad(lambda *a: jnp.sum(call(*a) * cotangent), i)(x, w, bias)
        np.testing.assert_allclose(one, truth[i + 1], rtol=1e-12, atol=1e-12)


def test_more_taps_than_steps_have_second_derivatives(draw: Draw) -> None:
    """The first taps meet nothing: only the zeros before the sequence."""
    x, w, moved = (draw(axes, b=3, s=16, d=6, k=34) for axes in ("bsd", "kd", "bsd"))
    run = functools.partial(causal_conv1d, activation=None)

    def gradients(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(run, x, w)[1](moved)

    first = jax.jit(gradients)(x, w)
    assert not np.any(first[1][:-16])
    # Each gradient is linear in the other operand.
    _, along = jax.jit(lambda *a: jax.jvp(gradients, a, a))(x, w)
    transposed = jax.jit(lambda *a: jax.vjp(gradients, *a)[1](a))(x, w)
    for second in (along, transposed):
        for got, want in zip(second, first, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("layout", ["NWC", "NCW"])
def test_a_sequence_may_come_in_pieces(layout: Any, with_ids: bool, draw: Draw) -> None:
    x, w, bias, _ = _operands(draw)
    axis = 1 if layout == "NWC" else 2
    if layout == "NCW":
        x, w = jnp.swapaxes(x, 1, 2), w.T
    # A document that comes back would read what the state no longer has.
    ids = jnp.cumsum(jnp.diff(_IDS, axis=1, prepend=0) != 0, axis=1)
    ids = ids.astype(jnp.int32) if with_ids else None
    call = functools.partial(causal_conv1d, dimension_numbers=layout, bias=bias)
    whole, end = call(x, w, segment_ids=ids, return_state=True)

    def pieces(x: jax.Array, cuts: tuple[int, ...]) -> tuple[jax.Array, Any]:
        state, found = None, []
        for first, stop in zip((0, *cuts), (*cuts, _S), strict=True):
            own = None if ids is None else ids[:, first:stop]
            piece = jax.lax.slice_in_dim(x, first, stop, axis=axis)
            output, state = call(
                piece, w, segment_ids=own, initial_state=state, return_state=True
            )
            if ids is not None and stop < _S:  # The state is of its last document.
                is_same = (ids[:, stop] == ids[:, stop - 1]).reshape(-1, 1, 1)
                state = jnp.where(is_same, state, jnp.zeros((), state.dtype))
            found.append(output)
        return jnp.concatenate(found, axis), state

    # Pieces of one step, as in decoding, and of fewer steps than the state has.
    for cuts in ((6,), (2, 3, 3, 9), tuple(range(1, _S))):
        output, state = jax.jit(pieces, static_argnums=1)(x, cuts)
        np.testing.assert_allclose(output, whole, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(state, end)


def test_the_state_has_a_gradient(draw: Draw) -> None:
    x, w, bias, cotangent = _operands(draw)
    before = draw("bkd", b=_B, k=_K - 1, d=_C)

    def pieced(before: Any, x: Any, w: Any) -> Any:
        output = causal_conv1d(x, w, bias=bias, initial_state=before)
        return jnp.sum(output * cotangent)

    got = jax.grad(pieced, (0, 1, 2))(before, x, w)
    full = jnp.concatenate([before, x], 1)
    zeros = jnp.zeros((_B, _K - 1, _C))
    truth = dense(full, w, bias, cotangent=jnp.concatenate([zeros, cotangent], 1))
    wanted = truth.grad_x[:, : _K - 1], truth.grad_x[:, _K - 1 :], truth.grad_w
    for x, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_steps_that_read_them(bad: float, draw: Draw) -> None:
    x, w, bias, _ = _operands(draw)
    spoilt = x.at[0, 2, 1].set(bad)
    for ids, reached in ((None, [2, 3, 4, 5]), (_IDS, [2, 3])):
        call = functools.partial(causal_conv1d, bias=bias, segment_ids=ids)
        clean, output = np.array(call(x, w)), np.array(call(spoilt, w))
        is_spoilt = np.zeros((_B, _S, _C), bool)
        is_spoilt[0, reached, 1] = True
        np.testing.assert_array_equal(output[~is_spoilt], clean[~is_spoilt])
        assert not np.any(output[is_spoilt] == clean[is_spoilt])
        grad, _ = jax.vjp(call, spoilt, w)[1](jnp.ones_like(x))
        assert np.all(np.isfinite(np.delete(np.asarray(grad), 1, 2)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_as_they_are_written_for_a_gpu(dtype: str, draw: Draw) -> None:
    """Of 16 bits, the argument's cotangent is rounded on its way, and of f32 not."""
    x, w, bias, cotangent = _operands(draw, dtype)

    def gradient(x: Any, w: Any, bias: Any, cotangent: Any) -> Any:
        call = functools.partial(causal_conv1d, segment_ids=_IDS)
        _, back = jax.vjp(lambda x, w, bias: call(x, w, bias=bias), x, w, bias)
        return back(cotangent)

    operands = (x, w, bias, cotangent)
    graphs = [graph for graph, *_ in traced_graphs(gradient, *operands)]
    (graph,) = (g for g in graphs if g.nodes[0].kind.endswith("_backward"))
    arrays = {"x": x, "w": w, "bias": bias[None], "grad_output": cotangent}
    arrays["segment_ids"] = _IDS
    given = [arrays[name] for name in graph.inputs]
    exact = evaluate(graph, given)
    narrow = evaluate(graph, given, narrow_sums=True)
    truth = dense(x, w, bias, cotangent=cotangent, ids=_IDS)
    size = dense(
        *map(abs, (x, w, bias)), cotangent=abs(cotangent), activation=None, ids=_IDS
    )
    unit = float(jnp.finfo(dtype).eps)
    for name, a, b in zip(graph.outputs, exact, narrow, strict=True):
        want, most = getattr(truth, name), getattr(size, name)
        error = np.abs(np.asarray(b, np.float64).reshape(want.shape) - want)
        assert np.all(error <= unit * (np.abs(want) + most) + 1e-6 * most)
        is_rounded = dtype != "float32" and name == "grad_x"
        assert np.array_equal(a, b) != is_rounded or name != "grad_x"


def test_vmap_over_each_operand_and_all(draw: Draw) -> None:
    x, w, bias, cotangent = _operands(draw)
    many = [jnp.stack([each, 2 * each, -each]) for each in (x, w, bias, cotangent)]
    ids = jnp.stack([_IDS, _IDS[::-1], _IDS * 0])

    def run(x: Any, w: Any, bias: Any, cotangent: Any, ids: Any) -> Any:
        call = functools.partial(causal_conv1d, segment_ids=ids)
        return _with_gradients(
            lambda x, w, bias: call(x, w, bias=bias), cotangent, x, w, bias
        )

    given, stacks = [x, w, bias, cotangent, _IDS], [*many, ids]
    for batched in ([0, 3], [1], [2], [0, 1, 2, 3], [4], [0, 1, 3, 4]):
        operands = [stacks[i] if i in batched else given[i] for i in range(5)]
        axes = [0 if i in batched else None for i in range(5)]
        got = jax.jit(jax.vmap(run, axes))(*operands)
        for example in range(3):
            one = [x[example] if i in batched else x for i, x in enumerate(operands)]
            for a, b in zip(got, jax.jit(run)(*one), strict=True):
                np.testing.assert_allclose(a[example], b, rtol=2e-5, atol=2e-5)


def test_batch_axes_and_empty_arrays(draw: Draw) -> None:
    x, w, bias, _ = _operands(draw)
    plain = causal_conv1d(x, w, bias=bias)
    np.testing.assert_array_equal(causal_conv1d(x[1], w, bias=bias), plain[1])
    more = causal_conv1d(x[:, None, None], w, bias=bias)
    np.testing.assert_array_equal(more[:, 0, 0], plain)
    for shape in ((0, _S, _C), (_B, 0, _C), (_B, _S, 0)):
        empty = jnp.zeros(shape)
        weights = w[:, : shape[2]]
        output, state = causal_conv1d(empty, weights, return_state=True)
        assert output.shape == shape
        assert state.shape == (shape[0], _K - 1, shape[2])
    state = draw("bkd", b=_B, k=_K - 1, d=_C)
    nothing = jnp.zeros((_B, 0, _C))
    output, kept = causal_conv1d(
        nothing, w, initial_state=state, return_state=True, segment_ids=_IDS[:, :0]
    )
    assert output.shape == nothing.shape
    np.testing.assert_array_equal(kept, state)


def test_symbolic_dimensions_are_xlas(draw: Draw) -> None:
    x, w, bias, _ = _operands(draw)
    (b, s) = export.symbolic_shape("b, s")
    run = jax.jit(lambda x, w: causal_conv1d(x, w, bias=bias))
    symbolic = jax.ShapeDtypeStruct((b, s, _C), jnp.float32)
    program = export.export(run)(symbolic, jax.ShapeDtypeStruct(w.shape, w.dtype))
    np.testing.assert_allclose(program.call(x, w), run(x, w), rtol=1e-6, atol=1e-6)
    cudnn = jax.jit(lambda x, w: causal_conv1d(x, w, implementation="cudnn"))
    with pytest.raises(jax_cudnn.UnsupportedError, match="x has symbolic dimensions"):
        export.export(cudnn)(symbolic, jax.ShapeDtypeStruct(w.shape, w.dtype))


def test_sharded_types_with_a_state(draw: Draw) -> None:
    x, w, bias = (draw(a, b=8, s=10, d=16, k=_K) for a in ("bsd", "kd", "d"))
    state = draw("bkd", b=8, k=_K - 1, d=16)
    ids = jnp.broadcast_to(jnp.arange(10, dtype=jnp.int32) // 4, (8, 10))

    def run(x: Any, w: Any, bias: Any, state: Any, ids: Any) -> Any:
        call = functools.partial(causal_conv1d, bias=bias, segment_ids=ids)
        output, last = call(x, w, initial_state=state, return_state=True)
        few = causal_conv1d(x[:, :2], w, return_state=True)
        return output, last, few

    want = run(x, w, bias, state, ids)
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    cases: tuple[tuple[Spec, ...], ...] = (
        (("x",), (), (), ("x",), ("x",)),
        (("x", None, "y"), (None, "y"), ("y",), ("x",), ("x",)),
        ((None, "y"), (), (), (), (None, "y")),
        (("x",), (), ("y",), (None, None, "y"), ()),
    )
    for specs in cases:
        given = placed(mesh, (x, w, bias, state, ids), specs)
        got = jax.jit(run)(*given)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        batch = jax.typeof(got[0]).sharding.spec[0]
        assert batch == jax.typeof(given[0]).sharding.spec[0]
    given = placed(mesh, (x, w, bias, state, ids), (("x",), (), (), ("y",), ()))
    told = "initial_state and x are sharded over ('y', None, None) and ('x', None"
    with pytest.raises(UnsupportedError, match=re.escape(told)):
        jax.jit(run)(*given)


def test_what_is_refused() -> None:
    x, w = jnp.ones((2, 9, 6)), jnp.ones((4, 6))
    for error, message, call in (
        (ValueError, "x is f32[6]. In the layout NWC it must have the axes (*N,",
         lambda: causal_conv1d(x[0, 0], w)),
        (ValueError, "w is f32[4,1,6]. In the layout NWC it must have the axes",
         lambda: causal_conv1d(x, w[:, None])),
        (ValueError, "x is f32[2,9,6] and w f32[6,4]. In the layout NWC, (*N, s, c)",
         lambda: causal_conv1d(x, w.T)),
        (ValueError, "w is f32[0,6], without taps", lambda: causal_conv1d(x, w[:0])),
        (TypeError, "x is f32[2,9,6] and w bf16[4,6]. They must have one dtype",
         lambda: causal_conv1d(x, w.astype(jnp.bfloat16))),
        (TypeError, "x is i32[2,9,6]. Supported dtypes are bf16, f16, f32, f64",
         lambda: causal_conv1d(x.astype(jnp.int32), w)),
        (ValueError, "bias is f32[1,6]. It must have one entry for each of the 6",
         lambda: causal_conv1d(x, w, bias=jnp.ones((1, 6)))),
        (ValueError, "activation='gelu' is not one that the convolution has. Pass "
         "'silu' or None", lambda: causal_conv1d(x, w, activation="gelu")),  # type: ignore[call-overload]
        (ValueError, "dimension_numbers='NHWC' is no layout. Pass 'NWC'",
         lambda: causal_conv1d(x, w, dimension_numbers="NHWC")),  # type: ignore[call-overload]
        (ValueError, "segment_ids is i32[9]. It must have an id for each step of x, "
         "f32[2,9,6]: the shape (2, 9)",
         lambda: causal_conv1d(x, w, segment_ids=jnp.ones(9, jnp.int32))),
        (TypeError, "segment_ids is f32[2,9]. It must hold integers",
         lambda: causal_conv1d(x, w, segment_ids=jnp.ones((2, 9)))),
        (ValueError, "initial_state is f32[2,4,6]. For x, f32[2,9,6], and w, f32[4,6], "
         "it must have the last 3 steps: the shape (2, 3, 6)",
         lambda: causal_conv1d(x, w, initial_state=jnp.ones((2, 4, 6)))),
        (TypeError, "initial_state is bf16[2,3,6] and x f32[2,9,6]",
         lambda: causal_conv1d(x, w, initial_state=jnp.ones((2, 3, 6), jnp.bfloat16))),
        (TypeError, "return_state is str. It must be True or False",
         lambda: causal_conv1d(x, w, return_state="yes")),  # type: ignore[call-overload]
    ):  # fmt: skip
        with pytest.raises(error, match="^causal_conv1d: " + re.escape(message)):
            call()


@pytest.mark.usefixtures("x64")
def test_ids_of_64_bits_are_refused() -> None:
    ids = jnp.ones((2, 9), jnp.int64)
    with pytest.raises(TypeError, match=r"32 bits or fewer\. Convert it to int32"):
        causal_conv1d(jnp.ones((2, 9, 6)), jnp.ones((4, 6)), segment_ids=ids)


def test_names_of_the_activation(draw: Draw) -> None:
    x, w, *_ = _operands(draw)
    want = causal_conv1d(x, w)
    for same in ("silu", "swish", jax.nn.silu, jax.nn.swish):
        np.testing.assert_array_equal(causal_conv1d(x, w, activation=same), want)


def test_a_state_needs_to_know_no_number_of_steps() -> None:
    (steps,) = export.symbolic_shape("s")

    def run(x: jax.Array, w: jax.Array, state: jax.Array) -> Any:
        return causal_conv1d(x, w, initial_state=state, return_state=True)

    rng = np.random.default_rng(0)
    w, state = (rng.standard_normal((n, _C)).astype("f4") for n in (_K, _K - 1))
    state = np.broadcast_to(state, (_B, _K - 1, _C))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (w, state)]
    kind = jax.ShapeDtypeStruct((_B, steps, _C), jnp.float32)
    program = export.export(jax.jit(run))(kind, *types)
    for count in (1, _K - 2, _K + 5):
        x = rng.standard_normal((_B, count, _C)).astype("f4")
        y, after = program.call(x, w, state)
        np.testing.assert_allclose(y, run(x, w, state)[0], rtol=1e-6, atol=1e-6)
        want = np.concatenate([state, x], 1)[:, -(_K - 1) :]
        np.testing.assert_array_equal(after, want)


def test_there_may_be_no_channels_and_many_taps() -> None:
    assert causal_conv1d(jnp.ones((2, 5, 0)), jnp.ones((40, 0))).shape == (2, 5, 0)


def test_second_derivatives_of_nothing_are_nothing() -> None:
    x, w = jnp.zeros((0, 40, 8)), jnp.ones((34, 8))

    def reverse(x: jax.Array, w: jax.Array) -> Any:
        y, pull = jax.vjp(jax_cudnn.causal_conv1d, x, w)
        return pull(y)

    found, pull = jax.vjp(reverse, x, w)
    for grad_x, grad_w in (found, pull(found), jax.jvp(reverse, (x, w), (x, w))[1]):
        assert grad_x.shape == x.shape
        np.testing.assert_array_equal(grad_w, jnp.zeros_like(w))
