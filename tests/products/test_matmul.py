# SPDX-License-Identifier: Apache-2.0
"""Tests `matmul` and `dot_general` against JAX's, with epilogues and transformations.

The other side of each comparison is jnp.matmul or lax.dot_general with the epilogue in
jax.numpy, in float64.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType

from jax_cudnn import dot_general, matmul
from jax_cudnn.legalize import partition
from tests.common.devices import mesh_of, placed
from tests.common.examples import examples
from tests.conftest import Draw
from tests.products.shared.fused import (
    assert_close,
    assert_same,
    contractions,
    gradients,
    graphs,
    nodes,
    stacked,
)
from tests.products.shared.operations import ACTIVATIONS, MATMUL
from tests.products.shared.operations import plain_matmul as plain

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def _wide(x: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Return the arrays with as many axes as the first one."""
    return [each.reshape((1,) * (x.ndim - each.ndim) + each.shape) for each in others]


def _some(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Draw a shape that broadcasts to another one."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(size if draw(st.booleans()) else 1 for size in kept)


@st.composite
def products(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], Any]:
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    m, n, r = (draw(st.integers(1, 5)) for _ in range(3))
    a = (r,) if draw(st.integers(0, 4)) == 0 else (*_some(draw, batch), m, r)
    b = (r,) if draw(st.integers(0, 4)) == 0 else (*_some(draw, batch), r, n)
    result = jax.eval_shape(
        jnp.matmul, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (a, b))
    ).shape
    shapes = {"a": a, "b": b}
    for name, full in (
        ("bias", result),
        ("residual", result),
        ("scale_a", a),
        ("scale_b", b),
        ("scale_out", ()),
    ):
        if draw(st.booleans()):
            shapes[name] = _some(draw, full)
    return shapes, draw(st.sampled_from([*ACTIVATIONS]))


@pytest.mark.usefixtures("x64")
@examples(24)
@given(products())
def test_value_and_gradients_are_jnp_s(case: Any) -> None:
    shapes, activation = case
    rng = np.random.default_rng(5)
    operands = [jnp.asarray(rng.standard_normal(shape)) for shape in shapes.values()]

    def run(function: Any, *operands: jax.Array) -> Any:
        named = dict(zip(shapes, operands, strict=True))
        return function(**named, activation=activation)

    assert_same(*(functools.partial(run, f) for f in (matmul, plain)), operands)


@st.composite
def contraction(draw: st.DrawFn) -> tuple[Any, Any, Any, Any]:
    kinds = [draw(st.integers(0, 2)) for _ in range(2)]
    sizes = [draw(st.integers(1, 4)) for _ in range(sum(kinds))]
    batch, sums = [*range(kinds[0])], [*range(kinds[0], sum(kinds))]

    def operand(free: int) -> tuple[Any, Any, Any]:
        # Axes are named; free ones after the shared ones.
        names = draw(st.permutations([*range(len(sizes) + free)]))
        full = [*sizes, *(draw(st.integers(1, 4)) for _ in range(free))]
        shape = tuple(full[name] for name in names)
        return shape, [names.index(i) for i in sums], [names.index(i) for i in batch]

    (x, x_sums, x_batch), (y, y_sums, y_batch) = (
        operand(draw(st.integers(0, 2))) for _ in range(2)
    )
    return x, y, ((x_sums, y_sums), (x_batch, y_batch)), draw(st.booleans())


@pytest.mark.usefixtures("x64")
@examples(20)
@given(contraction())
def test_dot_general_is_lax_s(case: Any) -> None:
    x_shape, y_shape, numbers, has_bias = case
    rng = np.random.default_rng(7)
    x, y = (jnp.asarray(rng.standard_normal(shape)) for shape in (x_shape, y_shape))
    shape = jax.eval_shape(lambda x, y: lax.dot_general(x, y, numbers), x, y).shape
    bias = jnp.asarray(rng.standard_normal(shape[-1:]))

    def ours(x: Any, y: Any, bias: Any) -> jax.Array:
        extra = {"bias": bias, "activation": "gelu"} if has_bias else {}
        return dot_general(x, y, numbers, **extra)

    def theirs(x: Any, y: Any, bias: Any) -> jax.Array:
        result = lax.dot_general(x, y, numbers)
        return jax.nn.gelu(result + _wide(result, bias)[0]) if has_bias else result

    assert_same(ours, theirs, (x, y, bias))


@pytest.mark.parametrize(
    ("numbers", "orders"),
    [
        ((((2,), (0,)), ((0,), (1,))), ((0, 1, 2), (1, 0, 2))),
        ((((0,), (2,)), ((2,), (0,))), ((2, 1, 0), (0, 2, 1))),
    ],
)
def test_stored_axes_are_read_by_strides(numbers: Any, orders: Any) -> None:
    sizes = {"batch": 3, "sum": 5, "x": 4, "y": 7}
    (x_sums, y_sums), (x_batch, y_batch) = numbers

    def shape(sums: Any, batch: Any, free: str) -> tuple[int, ...]:
        return tuple(
            sizes["sum" if i in sums else "batch" if i in batch else free]
            for i in range(3)
        )

    x = jnp.ones(shape(x_sums, x_batch, "x"))
    y = jnp.ones(shape(y_sums, y_batch, "y"))
    run = functools.partial(dot_general, dimension_numbers=numbers)
    ((graph, _),) = graphs(run, x, y)
    assert (graph.tensor("a").order, graph.tensor("b").order) == orders
    assert "transpose" not in str(jax.make_jaxpr(run)(x, y))
    # Nor is anything moved for the gradient.
    assert "transpose" not in str(
        jax.make_jaxpr(jax.grad(lambda x: run(x, y).sum()))(x)
    )


def test_a_call_is_one_graph_with_one_contraction(draw: Draw) -> None:
    a, b = draw("bst", s=3, t=5), draw("tk", t=5, k=7)
    extra = {"bias": draw("k", k=7), "scale_a": 0.5, "scale_b": draw("1k", k=7)}
    ((graph, _),) = graphs(functools.partial(matmul, **extra, activation="silu"), a, b)
    assert nodes(graph) == {"matmul": 1, "constant": 1, "mul": 2, "add": 1, "silu": 1}
    # Without a batch of its own, b serves all rows.
    assert graph.tensor("a").dims == (1, 6, 5)
    assert graph.tensor("b").dims == (1, 5, 7)


# --- dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", [jnp.int8, jnp.uint8, jnp.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("is_left", [False, True])
def test_8_bit_weights_are_widened(narrow: Any, is_left: bool, draw: Draw) -> None:
    x = draw("st", jnp.bfloat16, s=3, t=5)
    w = jnp.abs(8 * draw("tk", t=5, k=7)).astype(narrow)
    scale = draw("k", k=7)
    wide = w.astype(jnp.float32)
    if is_left:
        got = matmul(w.T, x.T, scale_a=scale[:, None])
        want = (wide.T @ x.T.astype(jnp.float32)) * scale[:, None]
    else:
        got = matmul(x, w, scale_b=scale)
        want = (x.astype(jnp.float32) @ wide) * scale[None]
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))
    # Only what is a float is differentiated, and the weights are widened again.
    if not is_left:
        run = functools.partial(matmul, b=w)
        _, (backward, _) = graphs(gradients(lambda x: run(x), (0,)), x)
        assert backward.tensor("b_view_021" if "b_view_021" in backward.inputs else "b")
        assert contractions(backward) == ["matmul"]


def test_scales_along_the_sum_are_multiplied_in_first(draw: Draw) -> None:
    rng = np.random.default_rng(2)
    a = jnp.asarray(np.asarray(rng.integers(-128, 128, (3, 5)), jnp.int8))
    b = jnp.asarray(np.asarray(rng.integers(-128, 128, (5, 7)), jnp.int8))
    along = draw("t1", t=5)
    got = matmul(a, b, scale_b=along, preferred_element_type=jnp.float32)
    assert_close(got, a.astype(jnp.float32) @ (b.astype(jnp.float32) * along), 1e-5)
    x = draw("st", jnp.bfloat16, s=3, t=5)
    weights = (b.astype(jnp.float32) * along).astype(jnp.bfloat16)
    got = matmul(x, b, scale_b=along)
    want = x.astype(jnp.float32) @ weights.astype(jnp.float32)
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_8_bit_integers_are_summed_exactly(draw: Draw) -> None:
    rng = np.random.default_rng(2)
    for dtype, low, high in ((jnp.int8, -128, 128), (jnp.uint8, 0, 256)):
        a, b = (rng.integers(low, high, shape) for shape in ((3, 5), (5, 7)))
        exact = a @ b
        operands = jnp.asarray(a, dtype), jnp.asarray(b, dtype)
        for function in (
            matmul,
            functools.partial(dot_general, dimension_numbers=(((1,), (0,)), ((), ()))),
        ):
            got = function(*operands, preferred_element_type=jnp.int32)
            np.testing.assert_array_equal(got, exact)
            assert got.dtype == jnp.int32
        rows, columns = draw("s1", s=3), draw("1k", k=7)
        got = matmul(
            *operands,
            scale_a=rows,
            scale_b=columns,
            bias=0.5,
            preferred_element_type=jnp.float32,
        )
        assert_close(got, jnp.asarray(exact, jnp.float32) * rows * columns + 0.5, 1e-5)


def test_the_scale_of_integers_has_a_gradient(draw: Draw) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-128, 128, shape) for shape in ((3, 5), (5, 7)))
    rows = draw("s1", s=3)

    def total(rows: jax.Array) -> jax.Array:
        operands = jnp.asarray(a, jnp.int8), jnp.asarray(b, jnp.int8)
        return matmul(*operands, scale_a=rows, preferred_element_type=jnp.float32).sum()

    want = jnp.asarray((a @ b).sum(axis=1, keepdims=True), jnp.float32)
    assert_close(jax.grad(total)(rows), want, 1e-6)


def test_8_bit_floats_of_two_kinds_meet(draw: Draw) -> None:
    a = draw("st", jnp.float8_e5m2, s=3, t=5)
    b = draw("tk", jnp.float8_e4m3fn, t=5, k=7)
    wide = a.astype(jnp.float32) @ b.astype(jnp.float32)
    got = matmul(a, b, preferred_element_type=jnp.bfloat16, scale_a=2.0)
    np.testing.assert_array_equal(got, (2 * wide).astype(jnp.bfloat16))
    got = matmul(a, b, scale_out=jnp.float32(0.5))
    assert got.dtype == jnp.float8_e5m2
    run = functools.partial(matmul, preferred_element_type=jnp.float32)
    grads = jax.grad(lambda a, b: run(a, b).sum(), argnums=(0, 1))(a, b)
    assert [g.dtype for g in grads] == [a.dtype, b.dtype]


@pytest.mark.usefixtures("x64")
def test_numbers_are_exact_in_the_dtype_of_the_sums(draw: Draw) -> None:
    a, b = draw("st", jnp.float64), draw("tk", jnp.float64)
    got = matmul(a, b, scale_a=0.1, bias=0.7, residual=3, scale_out=0.3)
    assert_close(got, (a @ b * 0.1 + 0.7 + 3) * 0.3)


@pytest.mark.parametrize("name", ["scale_a", "scale_b", "scale_out"])
def test_minus_zero_is_not_taken_for_zero(name: str) -> None:
    a, b = jnp.ones((2, 3)), jnp.ones((3, 4))
    # What was compiled for one is not found by the other.
    for value in (-0.0, 0.0, -0.0):
        result = matmul(a, b, **{name: value})
        np.testing.assert_array_equal(result, 0)
        np.testing.assert_array_equal(np.signbit(result), np.signbit(value))


# --- empty and smallest ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, 5), (5, 7)),
        ((3, 0), (0, 7)),
        ((3, 5), (5, 0)),
        ((0, 3, 5), (5, 7)),
        ((1, 3, 5), (0, 5, 7)),
        ((1, 1), (1, 1)),
        ((1,), (1,)),
    ],
    ids=str,
)
def test_empty_and_smallest_sizes(a: Any, b: Any) -> None:
    columns = b[-1] if len(b) > 1 else 1
    operands = jnp.ones(a), jnp.ones(b), jnp.ones(columns if len(b) > 1 else ())

    def run(function: Any, a: Any, b: Any, bias: Any) -> jax.Array:
        return function(a, b, bias=bias, activation="gelu")

    got, want = (
        jax.jit(gradients(functools.partial(run, function), (0, 1, 2)))(*operands)
        for function in (matmul, plain)
    )
    assert_close(got, want, 1e-5)


# --- vmap -----------------------------------------------------------------------------


def test_vmap_over_rows_shares_the_weights(draw: Draw) -> None:
    a, b, bias, *_ = MATMUL.draw(draw, jnp.float32)
    run = functools.partial(MATMUL.run, activation="relu")
    mapped = jax.vmap(run, in_axes=(0, None, None))
    ((graph, _),) = graphs(mapped, jnp.stack([a] * 4), b, bias)
    assert graph.tensor("a").dims == (1, 12, 5)
    assert graph.tensor("b").dims == (1, 5, 7)
    assert graph.tensor("bias").dims == (1, 1, 7)
    gradient = jax.vmap(gradients(run, (0,)), in_axes=(0, None, None))
    _, (graph, _) = graphs(gradient, jnp.stack([a] * 4), b, bias)
    assert graph.tensor("grad_a").dims == (1, 12, 5)
    # Each example's gradient of the weights is a matrix of a batch.
    gradient = jax.vmap(gradients(run, (1,)), in_axes=(0, None, None))
    _, (graph, _) = graphs(gradient, jnp.stack([a] * 4), b, bias)
    assert graph.tensor("grad_b").dims == (4, 5, 7)


def test_vmap_over_weights_is_a_batch_and_copies_no_rows(draw: Draw) -> None:
    a, b, bias, *_ = MATMUL.draw(draw, jnp.float32)
    mapped = jax.vmap(MATMUL.run, in_axes=(None, 0, None))
    ((graph, _),) = graphs(mapped, a, jnp.stack([b] * 4), bias)
    assert graph.tensor("a").dims == (1, 3, 5)
    assert graph.tensor("b").dims == (4, 5, 7)
    assert graph.tensor("bias").dims == (1, 1, 7)
    assert graph.tensor("output").dims == (4, 3, 7)


def test_vmap_over_inputs_of_experts_copies_no_weights(draw: Draw) -> None:
    x, w = draw("nmr", n=7, m=2, r=8), draw("brk", b=3, r=8, k=16)
    mapped = jax.vmap(matmul, in_axes=(0, None))
    ((graph, _),) = graphs(mapped, x, w)
    assert graph.tensor("a").dims == (1, 14, 8)
    assert graph.tensor("b").dims == (3, 8, 16)
    assert graph.tensor("output").dims == (3, 14, 16)
    assert_close(mapped(x, w), jnp.einsum("nmr,brk->nbmk", x, w), 1e-5)
    # Nor does the gradient of the inputs.
    gradient = jax.vmap(gradients(matmul, (0,)), in_axes=(0, None))
    _, (graph, _) = graphs(gradient, x, w)
    assert graph.tensor("b_view_021").dims == (3, 16, 8)


def test_vmap_over_operands_of_which_one_has_a_batch_of_its_own(draw: Draw) -> None:
    a, b = draw("nmr", n=7, m=2, r=4), draw("nbrk", n=7, b=6, r=4, k=5)
    run = gradients(functools.partial(matmul, activation="gelu"), (0, 1))
    for axes, args in (((0, 0), (a, b)), ((None, 0), (a[0], b))):
        mapped = jax.vmap(run, in_axes=axes)
        assert_close(mapped(*args), stacked(run, args, axes), 1e-5)
    (forward, _), _ = graphs(jax.vmap(run), a, b)
    assert forward.tensor("a").dims == (42, 2, 4)
    (forward, _), _ = graphs(jax.vmap(run, in_axes=(None, 0)), a[0], b)
    assert forward.tensor("a").dims == (1, 2, 4)


def test_a_cotangent_that_examples_share_is_not_copied(draw: Draw) -> None:
    a, b, bias, *_ = MATMUL.draw(draw, jnp.float32)

    def total(b: jax.Array, a: jax.Array) -> jax.Array:
        return matmul(a, b, bias=bias, activation="gelu").sum()

    _, (graph, _) = graphs(
        jax.vmap(jax.grad(total), in_axes=(None, 0)), b, jnp.stack([a] * 4)
    )
    assert graph.tensor("grad_output").dims == (1, 3, 7)
    assert graph.tensor("grad_b").dims == (4, 5, 7)


def test_vmap_over_the_bias_computes_the_product_once(draw: Draw) -> None:
    a, b, bias, *_ = MATMUL.draw(draw, jnp.float32)
    biases = jnp.stack([bias, -bias])
    run = functools.partial(MATMUL.run, activation="relu")
    mapped = jax.vmap(run, in_axes=(None, None, 0))
    ((graph, _),) = graphs(mapped, a, b, biases)
    product, rest = partition(graph)
    assert nodes(product) == {"matmul": 1}
    assert product.tensor(product.outputs[0]).dims == (1, 3, 7)
    assert nodes(rest) == {"add": 1, "relu": 1}
    assert rest.tensor("output").dims == (2, 3, 7)
    assert_close(mapped(a, b, biases), stacked(run, (a, b, biases), (None, None, 0)))


# --- other transformations ------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_rows_on_a_typed_mesh_stay_where_they_are() -> None:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape)) for shape in ((8, 5), (5, 7)))
    mesh = mesh_of(AxisType.Explicit, data=4)
    (rows,) = placed(mesh, [x], [("data",)])
    with jax.set_mesh(mesh):
        out = jax.jit(matmul)(rows, w)
    assert jax.typeof(out).sharding.spec[0] == "data"
    np.testing.assert_allclose(out, x @ w, rtol=1e-10, atol=1e-10)


def test_f64_is_f32_without_x64_as_in_jax() -> None:
    a, b = jnp.ones((3, 5)), jnp.ones((5, 2))
    for product in (matmul, jnp.matmul):
        with pytest.warns(UserWarning, match="float64 .* truncated to dtype float32"):
            y = product(a, b, preferred_element_type=jnp.float64)
        assert y.dtype == jnp.float32
