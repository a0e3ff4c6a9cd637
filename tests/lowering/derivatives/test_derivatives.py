# SPDX-License-Identifier: Apache-2.0
"""Tests all derivatives under nested vmaps, on the CPU and as cuDNN runs them.

Random calls (drawn_calls.py) are differentiated in both modes and twice, with vmaps
inside and outside of the differentiation, over random operands, tangents and
cotangents. The truth is the call in plain jax.numpy. Forward mode has to give its
finite differences, gradients have to be the adjoint of forward mode, and two modes
nested in any order have to give its curvature. The graphs that cuDNN would run are
evaluated as well, by the reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_cudnn
from jax_cudnn.graph import Graph, is_anchor
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.legalize.attention import sdpa as legalize_sdpa
from jax_cudnn.legalize.products import fusion, reduction
from jax_cudnn.lowering import partitioned
from jax_cudnn.lowering.sharding.subaxes import as_results, merged
from jax_cudnn.reference.dtypes import jax_dtype
from tests.attention.shared.flash import flash
from tests.common.evaluating import evaluate
from tests.lowering.derivatives.drawing import NAMED, Call, Random, Shape, activate
from tests.lowering.derivatives.drawn_calls import LAYERS, OPERATIONS, draw_call
from tests.products.shared.fused import assert_close
from tests.products.shared.fusion_problems import ACTIVATIONS

pytestmark = [pytest.mark.once, pytest.mark.sampled]

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _double() -> Any:
    with jax.enable_x64(True):
        yield


# --- vmaps ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Level:
    """A vmap: how many examples, and the axis of each argument that has them."""

    count: int
    axes: tuple[int | None, ...]


def _draw_level(random: Random, shapes: Sequence[Shape], allowed: list[int]) -> Level:
    """Draw a vmap over some of the arguments that are allowed to have examples."""
    chosen = [i for i in allowed if random.chance(0.5)] or [random.one_of(*allowed)]
    axes = (
        random.one_of(*range(len(shape) + 1)) if i in chosen else None
        for i, shape in enumerate(shapes)
    )
    return Level(count=random.one_of(2, 3), axes=tuple(axes))


def _grown(shapes: Sequence[Shape], level: Level) -> list[Shape]:
    """Return the shapes of arguments that have the examples of a level."""
    return [
        shape if axis is None else (*shape[:axis], level.count, *shape[axis:])
        for shape, axis in zip(shapes, level.axes, strict=True)
    ]


def _mapped(function: Function, levels: Sequence[Level]) -> Function:
    for level in levels:
        function = jax.vmap(function, in_axes=level.axes, axis_size=level.count)
    return function


@dataclass(frozen=True, kw_only=True)
class Program:
    """A call with vmaps in it, to be differentiated, with vmaps around all that."""

    call: Call
    inside: list[Level]
    outside: list[Level]
    operands: list[Shape]
    shapes: list[Shape]

    def of(self, call: Function, derivatives: Function) -> Function:
        """Return the function of operands, tangents and cotangents, with all vmaps."""
        mapped, count = _mapped(call, self.inside), len(self.operands)

        def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(jax.tree.leaves(mapped(*operands)))

        def one(*args: jax.Array) -> Any:
            primals, tangents = args[:count], args[count : 2 * count]
            return derivatives(run, primals, tangents, args[2 * count :])

        return _mapped(one, self.outside)


def _draw_program(random: Random, call: Call) -> Program:
    inner, outer = random.one_of((0, 1), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0))
    operands, inside = list(call.shapes), []
    for _ in range(inner):
        inside.append(_draw_level(random, operands, [*range(len(operands))]))
        operands = _grown(operands, inside[-1])
    like = (jax.ShapeDtypeStruct(shape, jnp.float64) for shape in operands)
    results = jax.eval_shape(_mapped(call.plain, inside), *like)
    shapes = [*operands, *operands, *(x.shape for x in jax.tree.leaves(results))]
    outside, count = [], len(operands)
    every = [*range(len(shapes))]
    for _ in range(outer):
        allowed = random.one_of(
            every, every[:count], every[count : 2 * count], every[2 * count :]
        )
        outside.append(_draw_level(random, shapes, allowed))
        shapes = _grown(shapes, outside[-1])
    return Program(
        call=call, inside=inside, outside=outside, operands=operands, shapes=shapes
    )


# --- derivatives ----------------------------------------------------------------------

# Small enough that no argument of a relu that was drawn changes its sign on the way.
_STEP = 1e-5
_ORDERS = ("reverse over forward", "reverse over reverse", "forward over reverse")


def _product(xs: Any, ys: Any) -> jax.Array:
    return sum((jnp.vdot(x, y) for x, y in zip(xs, ys, strict=True)), jnp.zeros(()))


def _pulled(run: Function, primals: Any, cotangents: Any) -> Any:
    return jax.vjp(run, *primals)[1](cotangents)


def _differentiated(order: str | None) -> Function:
    """Return both modes, and the curvature if second derivatives have an order.

    It is the same in all three: second derivatives are symmetric.
    """

    def derivatives(run: Function, primals: Any, tangents: Any, cts: Any) -> Any:
        results, slopes = jax.jvp(run, primals, tangents)
        gradients = _pulled(run, primals, cts)
        products = _product(slopes, cts), _product(gradients, tangents)
        if order is None:
            return results, slopes, gradients, products, None
        if order == "reverse over forward":
            second = _pulled(lambda *p: jax.jvp(run, p, tangents)[1], primals, cts)
        elif order == "reverse over reverse":
            second = _pulled(lambda *p: _pulled(run, p, cts), primals, tangents)
        else:
            _, second = jax.jvp(lambda *p: _pulled(run, p, cts), primals, tangents)
        return results, slopes, gradients, products, _product(second, tangents)

    return derivatives


def _truth(*, is_curved: bool) -> Function:
    """Return results, slopes by finite differences, and JAX's own curvature."""

    def truth(run: Function, primals: Any, tangents: Any, cts: Any) -> Any:
        def at(step: jax.Array) -> Any:
            return run(*(x + step * t for x, t in zip(primals, tangents, strict=True)))

        def slope(step: jax.Array) -> Any:
            return jax.jvp(at, (step,), (jnp.ones(()),))[1]

        below, results, above = (at(jnp.asarray(x)) for x in (-_STEP, 0.0, _STEP))
        slopes = jax.tree.map(lambda x, y: (y - x) / (2 * _STEP), below, above)
        if not is_curved:
            return results, slopes, None
        _, curved = jax.jvp(slope, (jnp.zeros(()),), (jnp.ones(()),))
        return results, slopes, _product(curved, cts)

    return truth


def _backward(run: Function, primals: Any, _: Any, cotangents: Any) -> Any:
    results, pullback = jax.vjp(run, *primals)
    return results, pullback(cotangents)


def _as_a_kernel(graph: Graph, operands: Sequence[jax.Array]) -> Any:
    """Evaluate a rewritten graph; attention's kernels read what the reference does not.

    They take the saved output and log-sum-exp, and rewriting relies on it.
    """
    if not graph.nodes[0].kind.startswith("sdpa"):
        return evaluate(graph, operands)
    # A kernel keeps f32; and x64 is not on in the thread that calls back.
    shapes = [
        jax.ShapeDtypeStruct(t.stored_shape, jnp.float32) for t in graph.output_tensors
    ]

    def kernel(*arrays: Any) -> list[np.ndarray]:
        results = flash(graph, [np.asarray(x) for x in arrays])
        return [np.asarray(x, np.float32) for x in results]

    results = jax.pure_callback(kernel, shapes, *operands)
    return [
        x.astype(jax_dtype(t.dtype))
        for x, t in zip(results, graph.output_tensors, strict=True)
    ]


def _as_cudnn_runs(random: Random, seen: list[Graph]) -> Function:
    """Return what computes a graph by the parts that cuDNN gets, each in some way."""

    def run(graph: Graph, operands: Sequence[jax.Array], options: Any) -> Any:
        del options
        values = dict(zip(graph.inputs, merged(graph, operands), strict=True))
        for part in partition(graph):
            arguments = [values[name] for name in part.inputs]
            ways = legalize(part, None).candidates
            if ways:
                way = random.one_of(*ways)
                given = way.before(arguments)
                for tensor, x in zip(way.graph.input_tensors, given, strict=True):
                    assert x.shape == tensor.stored_shape, tensor
                results = way.after(arguments, _as_a_kernel(way.graph, given))
                seen.append(way.graph)
            else:
                assert not any(map(is_anchor, part.nodes)), part
                results = evaluate(part, arguments)
            values |= dict(zip(part.outputs, results, strict=True))
        return as_results(graph, operands, [values[name] for name in graph.outputs])

    return run


def _check(program: Program, random: Random, order: str | None) -> tuple[Any, Any]:
    """Compare derivatives with finite differences, JAX's, and each other.

    Return the arrays, and the results with the gradients.
    """
    call = program.call
    print(f"{call.text}\ninside {program.inside}\noutside {program.outside}")
    arrays = [random.normal(shape) for shape in program.shapes]

    truth = _truth(is_curved=order is not None)
    want, differences, curvature = jax.jit(program.of(call.plain, truth))(*arrays)
    got, slopes, gradients, (forward, reverse), curved = jax.jit(
        program.of(call.ours, _differentiated(order))
    )(*arrays)
    assert_close(got, want, 1e-9)
    # Differences cancel: they are that exact, relative to the largest.
    size = max(1.0, *(float(jnp.max(jnp.abs(x))) for x in got))
    assert_close(slopes, differences, 1e-7 * size)
    if curved is not None:
        assert_close(curved, curvature, 1e-9)
    lead = tuple(level.count for level in reversed(program.outside))
    assert [x.shape for x in gradients] == [(*lead, *s) for s in program.operands]
    assert_close(reverse, forward, 1e-9)
    return arrays, (got, gradients)


def _check_rewritten(
    program: Program,
    random: Random,
    checked: tuple[Any, Any],
    patch: pytest.MonkeyPatch,
) -> None:
    """Compare what cuDNN's graphs compute with what `_check` returned."""
    arrays, want = checked
    # f64 is refused there but for this.
    patch.setattr(fusion, "_refusals", lambda *_: [])
    patch.setattr(reduction, "_refusals", lambda _: ())
    patch.setattr(legalize_sdpa, "_refuse", lambda *_: None)
    seen: list[Graph] = []
    run = _as_cudnn_runs(random, seen)

    def by_cudnn(graph: Graph, options: Any) -> Any:
        return lambda *operands: run(graph, operands, options)

    patch.setitem(partitioned._PROGRAMS, "cpu", by_cudnn)
    rewrite = jax.jit(program.of(program.call.ours, _backward))(*arrays)
    assert seen
    # Some sums are kept in f32 whatever the operands are.
    assert_close(rewrite, want, 2e-5)


_COUNTS = {
    "matmul": 8, "dot_general": 3, "gated_matmul": 3, "gated_conv": 3, "conv2d": 2,
    "sdpa": 2, "norm": 12, "avg_pool": 2, "ragged_dot": 3,
    "causal_conv1d": 6,
}  # fmt: skip
# test_legalize_norms.py and its siblings ask how these are rewritten, in f32.
_NOT_REWRITTEN = ("norm", "avg_pool", "ragged_dot", "causal_conv1d")


@pytest.mark.parametrize(
    ("name", "seed"),
    [(name, i) for name in OPERATIONS for i in range(_COUNTS.get(name, 1))],
)
def test_operations(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(name, seed)
    activation = random.one_of(None, *ACTIVATIONS)
    order = random.one_of(None, None, *_ORDERS)
    program = _draw_program(random, draw_call(name, activation, random))
    checked = _check(program, random, order)
    if name not in _NOT_REWRITTEN:
        _check_rewritten(program, random, checked, monkeypatch)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flax", reason="Flax is not installed")
    random = Random(name)
    program = _draw_program(random, draw_call(name, random.one_of(*NAMED), random))
    checked = _check(program, random, None)
    _check_rewritten(program, random, checked, monkeypatch)


# --- operands that have the same gradient ---------------------------------------------


def _biased(
    a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array
) -> jax.Array:
    return jax_cudnn.matmul(a, b, bias=bias, residual=residual, activation="gelu")


def test_a_bias_and_a_residual_of_the_result_s_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random, shape = Random("same"), (2, 4)
    a, b = random.normal((2, 3)), random.normal((3, 4))
    call = Call(
        text="matmul of constants",
        ours=lambda *terms: _biased(a, b, *terms),
        plain=lambda *terms: jax.nn.gelu(a @ b + sum(terms)),
        shapes=(shape, shape),
    )
    program = Program(
        call=call, inside=[], outside=[], operands=[shape] * 2, shapes=[shape] * 5
    )
    checked = _check(program, random, "reverse over reverse")
    _check_rewritten(program, random, checked, monkeypatch)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_gradient_is_rounded_for_each_operand_alone(dtypes: tuple[str, str]) -> None:
    random = Random("rounded")
    a, b, cotangent = (
        random.normal(s).astype(jnp.float32) for s in ((2, 3), (3, 4), (2, 4))
    )
    terms = [random.normal((2, 4)).astype(dtype) for dtype in dtypes]
    _, pullback = jax.vjp(lambda *terms: _biased(a, b, *terms), *terms)
    sums = a @ b + sum(x.astype(jnp.float32) for x in terms)
    _, truth = jax.vjp(jax.nn.gelu, sums)
    want = [truth(cotangent)[0].astype(dtype) for dtype in dtypes]
    for got, wanted in zip(pullback(cotangent), want, strict=True):
        assert_close(got, wanted, 1e-6 if got.dtype == jnp.float32 else 2**-7)


# --- whole Jacobians, for every activation --------------------------------------------


def _matmul_pair(name: str) -> tuple[Function, Function]:
    def plain(w: jax.Array, x: jax.Array) -> jax.Array:
        return activate(name, x @ w)

    return lambda w, x: jax_cudnn.matmul(x, w, activation=name), plain


def _conv_pair(name: str) -> tuple[Function, Function]:
    def plain(w: jax.Array, x: jax.Array) -> jax.Array:
        return activate(name, lax.conv(x, w, (1,), "SAME"))

    def ours(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax_cudnn.conv(x, w, (1,), "SAME", activation=name)

    return ours, plain


def _jacobians(function: Function, w: jax.Array, xs: jax.Array) -> dict[str, Any]:
    """Return what is mapped over basis vectors or examples, as users write it."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(function(w, x))

    ws = jnp.stack([w, -w])[: len(xs)]
    return {
        "reverse": jax.jacrev(function, (0, 1))(w, xs[0]),
        "forward": jax.jacfwd(function, (0, 1))(w, xs[0]),
        "hessian": jax.hessian(loss)(w, xs[0]),
        "of each example": jax.vmap(jax.grad(loss), (None, 0))(w, xs),
        "of each member": jax.vmap(jax.grad(loss, (0, 1)), (0, None))(ws, xs[0]),
        "of both": jax.vmap(jax.grad(loss, (0, 1)))(ws, xs),
    }


# Other names of these are left out, such as swish for silu.
_NAMES = [name for name in NAMED if name in ACTIVATIONS]


@pytest.mark.parametrize(
    ("op", "activation"),
    [*(("matmul", name) for name in _NAMES), *(("conv", name) for name in _NAMES[::4])],
)
def test_jacobians(op: str, activation: str) -> None:
    random = Random("jacobians", op, activation)
    if op == "matmul":
        (ours, plain), w, x = _matmul_pair(activation), (3, 2), (4, 3)
    else:
        (ours, plain), w, x = _conv_pair(activation), (2, 3, 2), (1, 3, 4)
    arrays = random.normal(w), random.normal((2, *x))
    got, want = jax.jit(
        lambda *arrays: tuple(_jacobians(f, *arrays) for f in (ours, plain))
    )(*arrays)
    assert_close(got, want, 1e-10)
    assert_close(got["reverse"], got["forward"], 1e-10)
