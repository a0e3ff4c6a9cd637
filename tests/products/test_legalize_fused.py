# SPDX-License-Identifier: Apache-2.0
"""Tests that every way of handing matmuls to cuDNN keeps their meaning.

The parts of forward and gradient graphs are rewritten as for cuDNN, computed by the
reference with the array work around them, and compared with the parts themselves, in
f64. (cuDNN has no f64: the refusal of it is switched off here.)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn.graph import (
    GraphWriter,
    Target,
    Tensor,
    derivative_of,
)
from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.legalize.products import pointwise as rewriting
from jax_cudnn.legalize.products.pointwise import rewrite_pointwise
from jax_cudnn.lowering import traced_graphs
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate
from tests.common.legal_ways import check_ways, run_way
from tests.products.shared.in_f64 import double, draw, rng

__all__ = ["double", "rng"]

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize(("m", "r", "n"), [(3, 5, 7), (9, 16, 8), (8, 12, 6)])
def test_every_way_keeps_the_meaning_of_a_matmul(
    m: int, r: int, n: int, rng: np.random.Generator
) -> None:
    def layer(a: Any, b: Any, bias: Any) -> jax.Array:
        return jax_cudnn.matmul(a, b, bias=bias, activation="gelu")

    operands = draw(rng, 2, m, r), draw(rng, 2, r, n), draw(rng, n)
    assert check_ways(layer, operands) >= 3


def test_what_meets_a_sum_over_the_batch_stays_beside_the_kernel(
    rng: np.random.Generator,
) -> None:
    # The gradient of the scale is a times a sum over the batch, which b alone has.
    operands = [draw(rng, 4, 5), draw(rng, 3, 5, 8), draw(rng, 1, 5)]
    product = lambda a, b, scale: jax_cudnn.matmul(a, b, scale_a=scale)  # noqa: E731
    assert check_ways(product, operands) > 2


def test_a_batch_that_is_stored_last_is_transposed(rng: np.random.Generator) -> None:
    x, y = draw(rng, 16, 8, 3, 4), draw(rng, 8, 2, 4)

    def product(x: Any, y: Any) -> jax.Array:
        numbers = (((1,), (0,)), ((3,), (2,)))
        return jax_cudnn.dot_general(x, y, numbers, activation="gelu")

    check_ways(product, (x, y))
    ((graph, _, _),) = traced_graphs(product, x, y)
    assert graph.tensor("b").order == (1, 2, 0)
    way = legalize(graph, None).candidates[0]
    assert way.graph.tensor("b").order == (0, 1, 2)
    assert "b is transposed: its batch was stored last" in way.notes


@pytest.mark.parametrize(
    ("activation", "written"),
    [
        ("elu", {"neg", "relu", "mul", "tanh", "exp", "add"}),
        ("leaky_relu", {"neg", "relu", "mul", "sub"}),
        ("sigmoid", {"neg", "exp", "add", "div"}),
    ],
)
def test_modes_that_cudnn_computes_wrongly_or_slowly_are_written_as_others(
    activation: Any, written: set[str], rng: np.random.Generator
) -> None:
    def layer(a: Any, b: Any, bias: Any) -> jax.Array:
        return jax_cudnn.matmul(a, b, bias=bias, activation=activation, scale_out=0.5)

    operands = draw(rng, 5, 8), draw(rng, 8, 4), draw(rng, 4)
    assert check_ways(layer, operands) >= 3
    ((graph, _, _),) = traced_graphs(layer, *operands)
    way = legalize(graph, None).candidates[0]
    pointwise = [each.attributes for each in way.graph.nodes]
    made = [each for each in pointwise if isinstance(each, PointwiseAttributes)]
    assert written <= {each.mode for each in made} <= written | {"add", "mul"}
    assert all(each.alpha == 0 for each in made)


# Where epilogues go wrong: what is not a number, what is not finite, signed zeros, the
# largest, and what is lost beside 1 or turns an exponential into 0 or infinity.
_SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 6.0, 17.0, -17.0, 30.0, -30.0]
    + [
        sign * x
        for x in (3e38, 1e-30, 1e-9, 1e-4, 0.3, 5.4, 5.6, 89.0)
        for sign in (1, -1)
    ],
    np.float32,
)


def _by_pointwise(mode: str, alpha: float, *operands: np.ndarray) -> jax.Array:
    """Return what a mode gives in f32, written as cuDNN gets it."""
    writer = GraphWriter("f32")
    names = [
        writer.input(Tensor(name=role, dtype="f32", dims=x.shape, order=(0,)))
        for role, x in zip("abc", operands, strict=False)
    ]
    value = writer.pointwise(mode, *names, alpha=alpha)
    final = Tensor(name="output", dtype="f32", dims=writer[value].dims, order=(0,))
    graph = writer.finish([writer.result(value, final)])
    # As within the kernel of a product.
    rewritten = rewriting._rewritten(graph, rewriting._EVERY)
    assert rewritten != graph
    arrays = dict(zip("abc", operands, strict=False))
    (found,) = evaluate(rewritten, [jnp.asarray(arrays[n]) for n in graph.inputs])
    return found


@pytest.mark.parametrize(
    ("mode", "alpha", "function"),
    [
        ("elu", 1.0, jax.nn.elu),
        ("elu", 0.7, lambda x: jax.nn.elu(x, 0.7)),
        ("relu", 0.01, jax.nn.leaky_relu),
        ("sigmoid", 0.0, jax.nn.sigmoid),
        ("silu", 0.0, jax.nn.silu),
        ("softplus", 0.0, jax.nn.softplus),
    ],
)
def test_special_values_pass_through_rewritten_activations(
    mode: str, alpha: float, function: Any
) -> None:
    x = _SPECIAL
    # In f64, and to its rounding: JAX's slope of elu may be exp(x) - 1 + 1.
    expected, slopes = jax.vjp(function, x.astype(np.float64))
    if mode != "silu":  # which is cuDNN's own, but for its gradient
        np.testing.assert_allclose(
            _by_pointwise(mode, alpha, x), expected, rtol=1e-5, atol=1e-38
        )
    cotangent = np.linspace(0.5, 2.0, x.size, dtype=np.float32)
    np.testing.assert_allclose(
        _by_pointwise(f"{mode}_grad", alpha, cotangent, x),
        slopes(cotangent.astype(np.float64))[0],
        rtol=1e-5,
        atol=3e-16,
    )


def test_what_is_slow_is_rewritten_within_a_contraction_alone() -> None:
    writer = GraphWriter("f32")
    x = writer.input(Tensor(name="x", dtype="f32", dims=(8,), order=(0,)))
    value = writer.pointwise("max", writer.pointwise("sigmoid", x), x)
    final = Tensor(name="output", dtype="f32", dims=(8,), order=(0,))
    graph = writer.finish([writer.result(value, final)])
    modes = {
        getattr(node.attributes, "mode", "") for node in rewrite_pointwise(graph).nodes
    }
    assert "sigmoid" in modes
    assert "max" not in modes


def test_constants_lie_as_the_tensors_beside_them() -> None:
    def layer(x: Any, w: Any) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax_cudnn.conv(x, w, dimension_numbers=numbers, activation="relu6")

    operands = jnp.ones((2, 8, 8, 8)), jnp.ones((3, 3, 8, 8))
    ((graph, _, _),) = traced_graphs(layer, *operands)
    written = legalize(graph, None).candidates[0].graph
    made = [node for node in written.nodes if node.kind == "constant"]
    orders = {written.tensor(name).order for node in made for _, name in node.outputs}
    assert orders == {written.output_tensors[0].order} == {(0, 2, 3, 1)}


def test_special_values_pass_through_a_rewritten_reciprocal() -> None:
    expected = np.asarray(jnp.reciprocal(_SPECIAL))
    found = np.asarray(_by_pointwise("reciprocal", 0.0, _SPECIAL))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize(
    ("mode", "function"),
    [("max", jnp.maximum), ("min", jnp.minimum), ("div", jnp.divide)],
)
def test_special_values_pass_through_rewritten_pairs(mode: str, function: Any) -> None:
    x, y = (each.ravel() for each in np.meshgrid(_SPECIAL, _SPECIAL))
    expected = np.asarray(jax.jit(function)(x, y))
    found = np.asarray(_by_pointwise(mode, 0.0, x, y))
    # Scaled down, a quotient of large divisors may leave the range of f32.
    is_tiny = np.abs(expected) < 1e-35
    np.testing.assert_allclose(found[~is_tiny], expected[~is_tiny], rtol=1e-6)
    np.testing.assert_allclose(found[is_tiny], 0, atol=1e-35)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_bounds_that_are_numbers_keep_nan(mode: str, swapped: bool) -> None:
    writer = GraphWriter("f32")
    x = writer.input(Tensor(name="x", dtype="f32", dims=_SPECIAL.shape, order=(0,)))
    operands = [x, writer.constant(0.25, 1)]
    value = writer.pointwise(mode, *(operands[::-1] if swapped else operands))
    final = Tensor(name="output", dtype="f32", dims=_SPECIAL.shape, order=(0,))
    graph = rewrite_pointwise(writer.finish([writer.result(value, final)]))
    modes = [getattr(node.attributes, "mode", "") for node in graph.nodes]
    assert sorted(modes) == ["", "lt" if mode == "max" else "gt", "select"]
    (found,) = evaluate(graph, [jnp.asarray(_SPECIAL)])
    expected = (jnp.maximum if mode == "max" else jnp.minimum)(_SPECIAL, 0.25)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("activation", ["relu6", "sigmoid", "tanh", "gelu", "relu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_argument_of_an_activation_is_no_result_beside_it(
    activation: Any, dtype: Any
) -> None:
    # cuDNN 9.19 lists engines for that which it cannot launch.
    def layer(x: Any, w: Any, bias: Any) -> jax.Array:
        return jax_cudnn.conv(
            x, w, (1, 1), "SAME", None, None, _NHWC, bias=bias, activation=activation
        )

    with jax.enable_x64(False):
        x, w, bias = (
            jnp.zeros(shape, dtype) for shape in ((2, 8, 8, 8), (3, 3, 8, 16), (16,))
        )
        ((plain, _, _),) = traced_graphs(layer, x, w, bias)
        derivative = derivative_of(plain)
        assert derivative is not None
        for graph in (plain, derivative.with_residuals(plain, (True,) * 3)):
            way = legalize(graph, None).candidates[0]
            for node in way.graph.nodes:
                attributes = node.attributes
                if getattr(attributes, "mode", "") not in _FUSED:
                    continue
                (argument,) = dict(node.inputs).values()
                assert argument not in way.graph.outputs
                read = [a for n in way.graph.nodes for _, a in n.inputs].count(argument)
                makers = {name: n for n in way.graph.nodes for _, name in n.outputs}
                maker = getattr(makers[argument].attributes, "mode", "")
                # eng0 has a tanh of its own, with an overflow.
                if activation == "tanh":
                    assert maker == "identity" or read > 1


_FUSED = ("relu", "relu6", "sigmoid", "tanh")


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_f8_results_of_f32_products_are_converted_by_xla(
    dtype: Any, rng: np.random.Generator
) -> None:
    a, b = draw(rng, 5, 33).astype(jnp.float32), draw(rng, 33, 7).astype(dtype)
    with jax.enable_x64(False):
        graph = next(
            part
            for found, _, is_linear in traced_graphs(
                jax.grad(lambda b: jax_cudnn.matmul(a, b).sum()), b
            )
            if not is_linear
            for part in partition(found)
            if part.output_tensors[0].dtype.startswith("f8")
        )
        operands = draw_arrays(graph)
        (expected,) = evaluate(graph, operands)
        candidates = legalize(graph, None).candidates
        assert candidates
        for rewrite in candidates:
            (made,) = rewrite.graph.output_tensors
            assert made.dtype == "f32"
            note = f"{graph.outputs[0]} is converted to {graph.output_tensors[0].dtype}"
            assert f"{note} by XLA" in rewrite.notes
            results = evaluate(rewrite.graph, jax.jit(rewrite.before)(operands))
            (found,) = rewrite.after(operands, results)
            assert found.dtype == expected.dtype == dtype
            # The order of the sums is not the same: half an ulp of f8 may turn over.
            np.testing.assert_allclose(
                found.astype(jnp.float32),
                expected.astype(jnp.float32),
                rtol=float(jnp.finfo(dtype).eps),
            )


def test_i32_sums_of_a_convolution_leave_the_kernel_in_f32() -> None:
    # cuDNN 9.19 writes the bits of f32 into an i32 result.
    rng = np.random.default_rng(3)
    x = jnp.asarray(np.asarray(rng.integers(-128, 128, (2, 5, 7, 16)), jnp.int8))

    def conv(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.conv(
            x, w, dimension_numbers=_NHWC, preferred_element_type=jnp.int32
        )

    w = jnp.asarray(np.asarray(rng.integers(-128, 128, (3, 3, 16, 4)), jnp.int8))
    ((graph, _, _),) = traced_graphs(conv, x, w)
    rewrite = legalize(graph, None).candidates[0]
    assert [t.dtype for t in rewrite.graph.output_tensors] == ["f32"]
    assert "output is converted to i32 by XLA" in rewrite.notes
    (found,) = rewrite.after((x, w), evaluate(rewrite.graph, rewrite.before((x, w))))
    exact = jax.lax.conv_general_dilated(
        x.astype(jnp.int32), w.astype(jnp.int32), (1, 1), "VALID", None, None, _NHWC
    )
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, exact)
    wide = jnp.zeros((8, 9, 16, 4), jnp.int8)
    ((graph, _, _),) = traced_graphs(conv, jnp.zeros((2, 9, 9, 16), jnp.int8), wide)
    (reason,) = legalize(graph, None).reasons
    assert "f32, which represents integers up to 2^24 only" in reason


def test_weights_are_converted_in_the_kernel_or_before_it() -> None:
    weights = jax.ShapeDtypeStruct((24, 16), jnp.int8)
    x = jax.ShapeDtypeStruct((5, 24), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((16,), jnp.float32)

    def layer(x: Any, weights: Any, scale: Any) -> jax.Array:
        return jax_cudnn.matmul(x, weights, scale_b=scale)

    ((graph, _, _),) = traced_graphs(layer, x, weights, scale)
    ways = legalize(graph, None).candidates
    dtypes = [[t.dtype for t in way.graph.input_tensors] for way in ways]
    assert dtypes[:2] == [["bf16", "i8", "f32"]] * 2
    assert ["bf16", "bf16", "f32"] in dtypes
    rows = [way.graph.output_tensors[0].dims[1] for way in ways[:2]]
    assert rows == [5, 16], "the weights are on the right, then on the left"
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(np.asarray(rng.normal(size=(1, 5, 24)), jnp.bfloat16)),
        jnp.asarray(np.asarray(rng.integers(-100, 100, (1, 24, 16)), jnp.int8)),
        jnp.asarray(np.asarray(rng.uniform(size=(1, 1, 16)), jnp.float32)),
    ]
    (want,) = evaluate(graph, operands)
    for way in ways:
        (got,) = run_way(way, operands)
        # One rounding more where the sums are rounded on their way.
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2**-6
        )


def test_weights_on_the_left_have_rows_that_fill_a_load() -> None:
    """Weights are stored as dense layers' often are, (n, r), with an odd n."""
    shapes = ((5, 24), (71, 24), (71,), (5, 71))

    def layer(x: Any, weights: Any, bias: Any, residual: Any) -> jax.Array:
        return jax_cudnn.dot_general(
            x, weights, (((1,), (1,)), ((), ())), bias=bias, residual=residual
        )

    dtypes = (jnp.bfloat16, jnp.int8, jnp.bfloat16, jnp.bfloat16)
    operands = map(jax.ShapeDtypeStruct, shapes, dtypes)
    ((graph, _, _),) = traced_graphs(layer, *operands)
    left = legalize(graph, None).candidates[1]
    (result,) = left.graph.output_tensors
    assert (result.dims[1], result.order) == (80, (0, 2, 1))
    for tensor in left.graph.tensors:
        fastest = tensor.dims[tensor.order[-1]]
        assert fastest % 16 == 0, f"{tensor}: 16 elements of i8 fill a load"


def test_no_way_is_there_twice() -> None:
    weights = jax.ShapeDtypeStruct((24, 16), jnp.int8)
    x = jax.ShapeDtypeStruct((5, 24), jnp.bfloat16)
    ((graph, _, _),) = traced_graphs(jax_cudnn.matmul, x, weights)
    graphs = [way.graph for way in legalize(graph, None).candidates]
    assert len(graphs) == len(set(graphs)) == 3


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "dtype", "reason"),
    [
        ((75, 91900), "bfloat16", "sm_75 (GPU): fusions need sm_80 (Ampere) or newer"),
        ((90, 90700), "bfloat16", "cuDNN 9.7.0 is older than 9.8"),
        ((80, 91900), "float8_e4m3fn", "sm_80 has no f8 tensor cores; sm_89 has"),
    ],
)
def test_refusals_say_why(
    target: tuple[int, int],
    dtype: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    sm_version, cudnn_version = target
    gpu = Target(
        name="GPU", sm_version=sm_version, sm_count=1, cudnn_version=cudnn_version
    )
    x = jax.ShapeDtypeStruct((8, 16), jnp.dtype(dtype))

    def layer(x: Any) -> jax.Array:
        return jax_cudnn.dot_general(
            x, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
        )

    ((graph, _, _),) = traced_graphs(layer, x)
    assert legalize(graph, gpu).reasons == (reason,)


def test_f64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = jnp.ones((8, 16), jnp.float64)
    ((graph, _, _),) = traced_graphs(lambda x: jax_cudnn.matmul(x, x.T), x)
    assert legalize(graph, None).reasons == (
        "f64: cuDNN's fusions take bf16, f16, f32 and 8-bit operands",
    )
