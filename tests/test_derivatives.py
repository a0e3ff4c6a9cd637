# SPDX-License-Identifier: Apache-2.0
"""Are all derivatives right under every nesting of vmap, on the CPU and as cuDNN runs?

Random calls (drawn_calls.py) are differentiated in both modes and twice, with vmaps
inside and outside of the differentiation, over random operands, tangents and
cotangents. The truth is the call in plain jax.numpy, and its finite differences: the
slope is forward mode's, gradients are the adjoint of that, and the curvature is what
two modes nested give. What cuDNN would run is computed as well, by the reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.graph import Graph
from jax_cudnn.legalize import fusion, is_contraction, legalize, partition, sums
from jax_cudnn.legalize import sdpa as legalize_sdpa
from jax_cudnn.lowering import cuda
from jax_cudnn.reference import evaluate
from tests.drawn_calls import (
    LAYERS,
    NAMED,
    OPERATIONS,
    Call,
    Random,
    Shape,
    draw_call,
)
from tests.fused import assert_close

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

_SMALL, _LARGE = 1e-5, 3e-4
_ORDERS = ("reverse over forward", "reverse over reverse", "forward over reverse")


def _product(xs: Any, ys: Any) -> jax.Array:
    return sum((jnp.vdot(x, y) for x, y in zip(xs, ys, strict=True)), jnp.zeros(()))


def _pulled(run: Function, primals: Any, cotangents: Any) -> Any:
    return jax.vjp(run, *primals)[1](cotangents)


def _differentiated(order: str) -> Function:
    """Return both modes and the curvature, by second derivatives in one of the orders.

    All three are the same: second derivatives are symmetric.
    """

    def derivatives(run: Function, primals: Any, tangents: Any, cts: Any) -> Any:
        results, slopes = jax.jvp(run, primals, tangents)
        gradients = _pulled(run, primals, cts)
        if order == "reverse over forward":
            second = _pulled(lambda *p: jax.jvp(run, p, tangents)[1], primals, cts)
        elif order == "reverse over reverse":
            second = _pulled(lambda *p: _pulled(run, p, cts), primals, tangents)
        else:
            _, second = jax.jvp(lambda *p: _pulled(run, p, cts), primals, tangents)
        products = _product(slopes, cts), _product(gradients, tangents)
        return results, slopes, gradients, products, _product(second, tangents)

    return derivatives


def _differences(run: Function, primals: Any, tangents: Any, cts: Any) -> Any:
    """Return results, slopes and curvature by finite differences."""

    def at(step: jax.Array) -> Any:
        return run(*(x + step * t for x, t in zip(primals, tangents, strict=True)))

    steps = jnp.asarray([0, -_SMALL, _SMALL, -_LARGE, _LARGE])
    ends = jax.vmap(at)(steps)
    slopes = tuple((x[2] - x[1]) / (2 * _SMALL) for x in ends)
    curved = tuple((x[3] - 2 * x[0] + x[4]) / _LARGE**2 for x in ends)
    return tuple(x[0] for x in ends), slopes, _product(curved, cts)


def _backward(run: Function, primals: Any, _: Any, cotangents: Any) -> Any:
    results, pullback = jax.vjp(run, *primals)
    return results, pullback(cotangents)


def _as_cudnn_runs(random: Random, seen: list[Graph]) -> Function:
    """Return what computes a graph by the parts that cuDNN gets, each in some way."""

    def run(graph: Graph, operands: Sequence[jax.Array], options: Any) -> Any:
        del options
        values = dict(zip(graph.inputs, operands, strict=True))
        for part in partition(graph):
            arguments = [values[name] for name in part.inputs]
            ways = legalize(part, None).candidates
            if ways:
                way = random.one_of(*ways)
                given = way.before(arguments)
                for tensor, x in zip(way.graph.input_tensors, given, strict=True):
                    assert x.shape == tensor.stored_shape, tensor
                results = way.after(arguments, evaluate(way.graph, given))
                seen.append(way.graph)
            else:
                assert not any(map(is_contraction, part.nodes)), part
                results = evaluate(part, arguments)
            values |= dict(zip(part.outputs, results, strict=True))
        return [values[name] for name in graph.outputs]

    return run


def _assert_near(got: Any, want: Any, tolerance: float) -> None:
    """Compare as far as finite differences, which cancel, tell."""
    size = max(1.0, float(np.max(np.abs(want))))
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * size)


def _check(
    name: str, seed: int, activation: str | None, patch: pytest.MonkeyPatch
) -> None:
    random = Random(name, seed)
    call = draw_call(name, activation, random)
    program = _draw_program(random, call)
    print(f"{call.text}\ninside {program.inside}\noutside {program.outside}")
    arrays = [random.normal(shape) for shape in program.shapes]

    want, want_slopes, want_curved = jax.jit(program.of(call.plain, _differences))(
        *arrays
    )
    derivatives = _differentiated(random.one_of(*_ORDERS))
    got, slopes, gradients, (forward, reverse), curved = jax.jit(
        program.of(call.ours, derivatives)
    )(*arrays)
    assert_close(got, want, 1e-9)
    jax.tree.map(lambda x, y: _assert_near(x, y, 1e-7), slopes, want_slopes)
    lead = tuple(level.count for level in reversed(program.outside))
    assert [x.shape for x in gradients] == [(*lead, *s) for s in program.operands]
    assert_close(reverse, forward, 1e-9)
    _assert_near(curved, want_curved, 1e-4)

    # f64 is refused there but for this.
    patch.setattr(fusion, "_refusals", lambda *_: [])
    patch.setattr(sums, "_refusals", lambda _: ())
    patch.setattr(legalize_sdpa, "_refuse", lambda *_: None)
    seen: list[Graph] = []
    patch.setattr(cuda, "run_reference", _as_cudnn_runs(random, seen))
    legal = jax.jit(program.of(call.ours, _backward))(*arrays)
    assert seen
    # Some sums are kept in f32 whatever the operands are.
    assert_close(legal, (got, gradients), 2e-5)


_COUNTS = {"matmul": 8, "dot_general": 3, "gated_matmul": 4, "sdpa": 3}


@pytest.mark.parametrize(
    ("name", "seed"),
    [(name, i) for name in OPERATIONS for i in range(_COUNTS.get(name, 2))],
)
def test_operations(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    activation = Random("activation", name, seed).one_of(None, *NAMED)
    _check(name, seed, activation, monkeypatch)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flax", reason="Flax is not installed")
    _check(name, 0, Random(name).one_of(*NAMED), monkeypatch)
