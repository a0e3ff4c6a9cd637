# SPDX-License-Identifier: Apache-2.0
"""Tests the checks of graphs of contractions, and the derivatives of their nodes."""

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.errors import GraphError
from jax_cudnn.graph import (
    ConvAttributes,
    Graph,
    GraphWriter,
    MatmulAttributes,
    Node,
    Tensor,
    derivative_of,
    fold_rule,
)
from jax_cudnn.graph.pointwise import (
    ACTIVATIONS,
    ARITY,
    COMPARISONS,
    ConstantAttributes,
    PointwiseAttributes,
    ReductionAttributes,
)
from jax_cudnn.graph.products.conv import CONV_FPROP
from jax_cudnn.graph.rules import broadcast
from jax_cudnn.graph.shapes import result_dims
from jax_cudnn.lowering.fold import fold_graph
from jax_cudnn.lowering.sharding.subaxes import merged
from tests.common.evaluating import evaluate

pytestmark = pytest.mark.sampled


def _tensor(name: str, *dims: int, dtype: Any = "f32") -> Tensor:
    return Tensor(name=name, dtype=dtype, dims=dims, order=tuple(range(len(dims))))


def _graph(kind: str, attributes: Any, output: Tensor, **inputs: Tensor) -> Graph:
    role = {"conv_dgrad": "grad_x", "conv_wgrad": "grad_w"}.get(kind, "output")
    node = Node.make(
        kind, {r: t.name for r, t in inputs.items()}, {role: output.name}, attributes
    )
    tensors = {t.name: t for t in (*inputs.values(), output)}
    return Graph(
        tensors=tuple(tensors.values()),
        nodes=(node,),
        inputs=tuple(dict.fromkeys(t.name for t in inputs.values())),
        outputs=(output.name,),
    )


def _conv(**changes: Any) -> ConvAttributes:
    options = {
        "window_strides": (1, 2),
        "padding_low": (0, -1),
        "padding_high": (1, 3),
        "lhs_dilation": (1, 1),
        "rhs_dilation": (2, 1),
    }
    return ConvAttributes(**{**options, **changes})


def _refuses(message: str) -> Any:
    return pytest.raises(GraphError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (_conv(padding_low=(0,)), "conv_fprop: padding_low has 1 entries, not 2"),
        (
            _conv(**dict.fromkeys(ConvAttributes.__dataclass_fields__, (1,) * 4)),
            "conv_fprop: lhs_dilation has 4 entries, not 2",
        ),
        (_conv(rhs_dilation=(0, 1)), "conv_fprop: rhs_dilation [0, 1] is below 1"),
        (PointwiseAttributes(mode="gelu"), "pointwise: mode 'gelu' is not a known one"),
        (
            PointwiseAttributes(mode="relu", alpha=math.inf),
            "pointwise: alpha inf is not finite",
        ),
        (PointwiseAttributes(mode="tanh", alpha=0.1), "pointwise: tanh takes no alpha"),
        (ConstantAttributes(value=math.nan), "constant: value nan is not finite"),
        (
            ReductionAttributes(mode="median"),
            "reduction: mode 'median' is not a known one",
        ),
    ],
)
def test_wrong_attributes_are_refused(attributes: Any, message: str) -> None:
    kind = message.partition(":")[0]
    roles = {
        "conv_fprop": {"x": (2, 6, 5, 7), "w": (4, 3, 2, 3)},
        "pointwise": {"a": (3,)},
        "constant": {},
        "reduction": {"input": (3,)},
    }[kind]
    inputs = {role: _tensor(role, *dims) for role, dims in roles.items()}
    output = _tensor(
        "y", *{"conv_fprop": (2, 4, 4, 4), "pointwise": (3,)}.get(kind, (1,))
    )
    with _refuses(message):
        _graph(kind, attributes, output, **inputs)


_X, _W = _tensor("x", 2, 6, 5, 7), _tensor("w", 4, 3, 2, 3)
_OUTPUT = _tensor("y", 2, 4, 4, 4)
_A, _B = _tensor("a", 1, 3, 5), _tensor("b", 4, 5, 7)


_RIGHT: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "conv_fprop": (_conv(), {"x": _X, "w": _W, "output": _OUTPUT}),
    "matmul": (MatmulAttributes(), {"a": _A, "b": _B, "output": _tensor("y", 4, 3, 7)}),
}


@pytest.mark.parametrize("kind", _RIGHT)
def test_contractions_of_right_shapes_are_taken(kind: str) -> None:
    attributes, given = _RIGHT[kind]
    inputs = {role: x for role, x in given.items() if role != "output"}
    graph = _graph(kind, attributes, given["output"], **inputs)
    assert graph.output_tensors == (given["output"],)


@pytest.mark.parametrize(
    ("role", "tensor", "message"),
    [
        (
            *("output", _tensor("y", 2, 4, 4, 5)),
            "conv_fprop: output has dims [2, 4, 4, 5], not [2, 4, 4, 4]",
        ),
        (
            *("w", _tensor("w", 4, 4, 2, 3)),
            "conv_fprop: 6 along axis 1 of x does not divide by 4 (channels in per "
            "group)",
        ),
        (
            *("w", _tensor("w", 5, 3, 2, 3)),
            "conv_fprop: 5 along axis 0 of w does not divide by 2 (groups)",
        ),
        ("x", _tensor("x", 2, 6, 5), "conv_fprop: w has rank 4, not 3"),
        ("w", _tensor("w", 4, 3, 2, 3, dtype="bool"), "conv_fprop: w is bool"),
        ("b", _tensor("b", 4, 6, 7), "matmul: b has dims [4, 6, 7], not [4, 5, 7]"),
        ("a", _tensor("a", 3, 3, 5), "matmul: b has dims [4, 5, 7], not [3, 5, 7]"),
        ("a", _tensor("a", 3, 5), "matmul: a has rank 2, not 3"),
        ("b", _tensor("b", 4, 5, 7, dtype="bool"), "matmul: b is bool"),
        (
            *("output", _tensor("y", 1, 3, 7)),
            "matmul: output has dims [1, 3, 7], not [4, 3, 7]",
        ),
    ],
)
def test_shapes_of_contractions_are_checked(
    role: str, tensor: Tensor, message: str
) -> None:
    kind = message.partition(":")[0]
    attributes, right = _RIGHT[kind]
    given = right | {role: tensor}
    output = given.pop("output")
    with _refuses(message):
        _graph(kind, attributes, output, **given)


def _pointwise(mode: str, output: Tensor, **inputs: Tensor) -> Graph:
    return _graph("pointwise", PointwiseAttributes(mode=mode), output, **inputs)


_THREE = _tensor("a", 3)


def _constant(output: Tensor) -> Graph:
    return _graph("constant", ConstantAttributes(value=2.0), output)


def _sum(output: Tensor, x: Tensor) -> Graph:
    return _graph("reduction", ReductionAttributes(mode="add"), output, input=x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _pointwise("add", _tensor("y", 3), a=_THREE),
            "pointwise: add takes 2 inputs, not a",
        ),
        (
            lambda: _pointwise("tanh", _tensor("y", 3), a=_tensor("a", 5)),
            "pointwise: output has dims [3], not [5]",
        ),
        (
            lambda: _pointwise("tanh", _tensor("y", 3), a=_tensor("a", 1)),
            "pointwise: output has dims [3], not [1]",
        ),
        (
            lambda: _pointwise("tanh", _tensor("y", 0), a=_tensor("a", 1)),
            "pointwise: output has dims [0], not [1]",
        ),
        (
            lambda: _pointwise("tanh", _tensor("y", 3, dtype="bool"), a=_THREE),
            "pointwise: the output of tanh is bool",
        ),
        (
            lambda: _pointwise(
                "tanh", _tensor("y", 3), a=_tensor("a", 3, dtype="bool")
            ),
            "pointwise: a of tanh is bool",
        ),
        (
            lambda: _pointwise("lt", _tensor("y", 3), a=_THREE, b=_tensor("b", 1)),
            "pointwise: the output of lt is f32",
        ),
        (
            lambda: _pointwise(
                "select", _tensor("y", 3), **{role: _tensor(role, 3) for role in "abc"}
            ),
            "pointwise: c of select is f32",
        ),
        (
            lambda: _constant(_tensor("y", 1, 3)),
            "constant: output has dims [1, 3], not [1, 1]",
        ),
        (
            lambda: _constant(_tensor("y", 1, dtype="bf16")),
            "constant: output is bf16, not f32 or f64",
        ),
        (
            lambda: _sum(_tensor("y", 3, 5), _tensor("a", 3, 7)),
            "reduction: output dims [3, 5] do not broadcast to [3, 7]",
        ),
        (
            lambda: _sum(_tensor("y", 1), _tensor("a", 3, dtype="bool")),
            "reduction: input is bool",
        ),
    ],
)
def test_the_nodes_around_are_checked(make: Any, message: str) -> None:
    with _refuses(message):
        make()


def test_sizes_of_an_output_are_lax_s() -> None:
    for x, w, low, high, stride, spread, holes in itertools.product(
        (1, 4), (1, 3), (-1, 2), (0, 3), (1, 3), (1, 2), (1, 2)
    ):
        numbers = ((number,) for number in (stride, low, high, spread, holes))
        names = ConvAttributes.__dataclass_fields__
        attributes = ConvAttributes(**dict(zip(names, numbers, strict=True)))
        given = {"x": _tensor("x", 1, 1, x), "w": _tensor("w", 1, 1, w)}
        found = result_dims(CONV_FPROP.row, "output", given, attributes)[2]
        padded = (x - 1) * spread + 1 + low + high
        starts = range(0, padded - (w - 1) * holes, stride)
        assert found == len(starts)


def test_dims_broadcast_also_with_nothing_in_them() -> None:
    assert broadcast((1, 3, 1), (5, 1, 1)) == (5, 3, 1)
    assert broadcast((0, 1), (1, 3)) == (0, 3)


# --- derivatives of modes -------------------------------------------------------------

_MODES = sorted(set(ARITY) - {f"{name}_grad" for name in ACTIVATIONS} - {*COMPARISONS})


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", _MODES)
def test_the_gradient_graph_of_a_mode_is_the_reference_s(mode: str) -> None:
    alpha = 0.3 if mode in ("elu", "relu") else 0.0
    names = "abc"[: ARITY[mode]]
    writer = GraphWriter("f64")
    # Dims that broadcast, and a condition that is made from an operand.
    dims = {"a": (3, 5), "b": (1, 5), "c": (3, 1)}
    inputs = [writer.input(_tensor(name, *dims[name], dtype="f64")) for name in names]
    if mode == "select":
        inputs[2] = writer.pointwise("gt", inputs[2], writer.constant(0.9, 2))
    value = writer.pointwise(mode, *inputs, alpha=alpha)
    graph = writer.finish([writer.result(value, _tensor("y", 3, 5, dtype="f64"))])
    rng = np.random.default_rng(3)
    # Positive for logarithms; equal ones for max and min.
    operands = [jnp.asarray(rng.uniform(0.2, 1.7, dims[name])) for name in names]
    if mode in ("max", "min"):
        operands[0] = operands[0].at[0].set(operands[1][0])
    if mode in ACTIVATIONS or mode == "abs":
        operands = [x - 1 for x in operands]
    cotangent = jnp.asarray(rng.standard_normal((3, 5)))

    wanted = (True,) * len(names)
    derivative = derivative_of(graph)
    assert derivative is not None
    backward = derivative.backward(graph, wanted, (True,))
    _, pull = jax.vjp(lambda *x: evaluate(graph, x)[0], *operands)
    want = pull(cotangent)
    if backward is None:
        assert mode in ("ceil", "floor")
        assert not any(x.any() for x in want)
        return
    full = derivative.with_residuals(graph, wanted)
    sources: dict[str, Any] = {
        "input": operands,
        "output": evaluate(full, operands),
        "cotangent": [cotangent],
    }
    found = evaluate(
        backward.graph, [sources[kind][i] for kind, i in backward.operands]
    )
    gradients = dict(zip(backward.gradients, found, strict=True))
    for i, expected in enumerate(want):
        got = gradients.get(i, jnp.zeros_like(expected))
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_comparisons_have_no_gradient() -> None:
    for mode in sorted(COMPARISONS):
        writer = GraphWriter("f32")
        a, b = (writer.input(_tensor(name, 3)) for name in "ab")
        chosen = writer.pointwise(mode, a, b)
        value = writer.pointwise(
            "select", writer.constant(1.0, 1), writer.constant(0.0, 1), chosen
        )
        graph = writer.finish([writer.result(value, _tensor("y", 3))])
        derivative = derivative_of(graph)
        assert derivative is not None
        assert derivative.backward(graph, (True, True), (True,)) is None
        assert derivative.with_residuals(graph, (True, True)) == graph


def test_a_graph_without_rules_for_all_nodes_is_left_to_the_reference() -> None:
    graph = _pointwise(
        "tanh_grad", _tensor("y", 3), a=_tensor("a", 3), b=_tensor("b", 3)
    )
    assert derivative_of(graph) is None
    wgrad = _graph(
        "conv_wgrad", _conv(), _W, x=_X, grad_output=_tensor("grad", 2, 4, 4, 4)
    )
    assert derivative_of(wgrad) is None


# --- folding --------------------------------------------------------------------------


def test_pointwise_graphs_alone_do_not_fold() -> None:
    graph = _pointwise("tanh", _tensor("y", 3), a=_tensor("a", 3))
    assert fold_rule(graph, frozenset({"a"})) is None


def test_a_sum_over_channels_does_not_fold_into_them() -> None:
    writer = GraphWriter("f32")
    names = [writer.input(t) for t in (_X, _W)]
    product = writer.node(
        "conv_fprop",
        dict(zip("xw", names, strict=True)),
        _conv(),
        dims=_OUTPUT.dims,
        order=_OUTPUT.order,
    )
    total = writer.reduce_to(product, (2, 1, 4, 4))
    graph = writer.finish([writer.result(total, _tensor("sum", 2, 1, 4, 4))])
    assert fold_rule(graph, frozenset({"w"})) is None


def _products(writer: GraphWriter, *pairs: tuple[str, str]) -> list[str]:
    """Add a matmul of each pair of tensors."""
    return [
        writer.node(
            "matmul",
            {"a": a, "b": b},
            MatmulAttributes(),
            dims=(
                *broadcast(writer[a].dims[:1], writer[b].dims[:1]),
                writer[a].dims[1],
                writer[b].dims[2],
            ),
            order=(0, 1, 2),
        )
        for a, b in pairs
    ]


def _finished(writer: GraphWriter, *names: str) -> Graph:
    results = [
        writer.result(name, _tensor(f"out_{i}", *writer[name].dims))
        for i, name in enumerate(names)
    ]
    return writer.finish(results)


def test_operands_of_a_product_meet_in_the_batch() -> None:
    writer = GraphWriter("f32")
    a, b = (writer.input(t) for t in (_tensor("a", 1, 2, 4), _tensor("b", 6, 4, 5)))
    graph = _finished(writer, *_products(writer, (a, b)))
    # As rows of the six products, whose b is not copied.
    rule = fold_rule(graph, frozenset("a"))
    assert rule is not None
    assert rule.axes == {"a": 1, "out_0": 1}
    assert rule.sizes == {"a": 2, "out_0": 2}
    # Without a copy of a, which broadcasts along the batch.
    rule = fold_rule(graph, frozenset("b"))
    assert rule is not None
    assert rule.axes == {"b": 0, "out_0": 0}
    # Each example of a for its own six of b.
    rule = fold_rule(graph, frozenset("ab"))
    assert rule is not None
    assert rule.sizes == {"a": 6, "b": 6, "out_0": 6}


def test_what_meets_no_examples_stays_shared() -> None:
    writer = GraphWriter("f32")
    shapes = {"a": (6, 2, 4), "b": (6, 4, 5), "c": (6, 4, 3)}
    a, b, c = (writer.input(_tensor(name, *dims)) for name, dims in shapes.items())
    graph = _finished(writer, *_products(writer, (a, b), (a, c)))
    rule = fold_rule(graph, frozenset("b"))
    assert rule is not None
    # a is copied for the product with b, and serves the other one as it is copied.
    assert rule.axes.keys() == {"a", "b", "out_0", "c", "out_1"}
    writer = GraphWriter("f32")
    shapes["a"] = (1, 2, 4)
    a, b, c = (writer.input(_tensor(name, *dims)) for name, dims in shapes.items())
    graph = _finished(writer, *_products(writer, (a, b), (a, c)))
    rule = fold_rule(graph, frozenset("b"))
    assert rule is not None
    assert rule.axes.keys() == {"b", "out_0"}


def test_a_result_of_size_1_is_taken_once() -> None:
    writer = GraphWriter("f32")
    shapes = {"a": (1, 2, 4), "b": (6, 4, 5), "c": (1, 4, 3)}
    a, b, c = (writer.input(_tensor(name, *dims)) for name, dims in shapes.items())
    graph = _finished(writer, *_products(writer, (a, b), (a, c)))
    fold = fold_graph(graph, 3, (True, True, False))
    assert fold is not None
    rng = np.random.default_rng(3)
    x, y, z = (
        jnp.asarray(np.asarray(rng.normal(size=(*lead, *shapes[name])), jnp.float32))
        for name, lead in (("a", (3,)), ("b", (3,)), ("c", ()))
    )
    operands = [
        fold.input(i, each, axis)
        for i, (each, axis) in enumerate(((x, 0), (y, 0), (z, None)))
    ]
    first, second = evaluate(fold.graph, merged(fold.graph, operands))
    np.testing.assert_allclose(fold.output(0, first), x @ y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        fold.output(1, second), x @ z[None], rtol=1e-5, atol=1e-5
    )


def test_tensors_that_meet_two_sizes_do_not_fold() -> None:
    writer = GraphWriter("f32")
    shapes = {"a": (1, 2, 4), "b": (6, 4, 5), "c": (3, 4, 5)}
    a, b, c = (writer.input(_tensor(name, *dims)) for name, dims in shapes.items())
    graph = _finished(writer, *_products(writer, (a, b), (a, c)))
    # As rows they do, and with one of the two in the batch.
    assert fold_rule(graph, frozenset("a")) is not None
    assert fold_rule(graph, frozenset("b")) is not None
    assert fold_rule(graph, frozenset("abc")) is None


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shape", [(1, 4, 5), (6, 1, 5)])
@pytest.mark.parametrize("mode", ACTIVATIONS)
def test_a_cotangent_and_what_it_meets_broadcast(
    mode: str, shape: tuple[int, ...]
) -> None:
    # vmap may have given examples to either of them alone.
    full = (6, 4, 5)
    rng = np.random.default_rng(5)
    values = [jnp.asarray(rng.normal(size=dims)) for dims in (shape, full)]

    def result(*operands: jax.Array) -> jax.Array:
        a, b, y = (
            _tensor(name, *dims, dtype="f64")
            for name, dims in zip("aby", (*map(jnp.shape, operands), full), strict=True)
        )
        graph = _pointwise(f"{mode}_grad", y, a=a, b=b)
        return evaluate(graph, operands)[0]

    for operands in (values, values[::-1]):
        got = result(*operands)
        want = result(*(jnp.broadcast_to(each, full) for each in operands))
        np.testing.assert_allclose(got, want, rtol=1e-12)
