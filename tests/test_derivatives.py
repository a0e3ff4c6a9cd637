# SPDX-License-Identifier: Apache-2.0
"""Are all derivatives right under every nesting of vmap, on the CPU and as cuDNN runs?

Random calls (drawn_calls.py) are differentiated in both modes and twice, with vmaps
inside and outside of the differentiation, over random operands, tangents and
cotangents. What is compared with is plain jax.numpy in f64, and finite differences of
that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn.graph import Graph
from jax_cudnn.legalize import (
    fusion,
    is_contraction,
    legalize,
    partition,
    sums,
)
from jax_cudnn.legalize import sdpa as legalize_sdpa
from jax_cudnn.lowering import cuda
from jax_cudnn.reference import evaluate
from tests.drawn_calls import (
    NAMED,
    OPS,
    Call,
    Random,
    Shape,
    draw_call,
)
from tests.fused import assert_close

Function = Callable[..., Any]
_STEP = 1e-5


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


def _draw_levels(
    random: Random, shapes: Sequence[Shape], depth: int
) -> tuple[list[Level], list[Shape]]:
    """Draw vmaps, innermost first, and return the shapes of the outermost arguments."""
    shapes = list(shapes)
    levels: list[Level] = []
    for _ in range(depth):
        count, axes = random.one_of(2, 3), [None] * len(shapes)
        while all(axis is None for axis in axes):
            axes = [
                random.one_of(*range(len(shape) + 1)) if random.chance(0.5) else None
                for shape in shapes
            ]
        levels.append(Level(count=count, axes=tuple(axes)))
        shapes = [
            shape if axis is None else (*shape[:axis], count, *shape[axis:])
            for shape, axis in zip(shapes, axes, strict=True)
        ]
    return levels, shapes


def _mapped(function: Function, levels: Sequence[Level]) -> Function:
    for level in levels:
        function = jax.vmap(function, in_axes=level.axes, axis_size=level.count)
    return function


@dataclass(frozen=True, kw_only=True)
class Program:
    """Derivatives of a call that has vmaps in it, with vmaps around all that."""

    call: Call
    inside: list[Level]
    outside: list[Level]
    shapes: list[Shape]

    @property
    def text(self) -> str:
        """Everything that was drawn."""
        return f"{self.call.text}\ninside {self.inside}\noutside {self.outside}"

    def of(self, function: Function, derivatives: Function) -> Function:
        """Return the jitted function of all operands, tangents and cotangents."""
        mapped = _mapped(function, self.inside)
        count = len(self.call.shapes)

        def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(jax.tree.leaves(mapped(*operands)))

        def one(*args: jax.Array) -> Any:
            return derivatives(
                run, args[:count], args[count : 2 * count], args[2 * count :]
            )

        return jax.jit(_mapped(one, self.outside))


def _draw_program(random: Random, call: Call) -> Program:
    depths = random.one_of((0, 1), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0))
    inside, shapes = _draw_levels(random, call.shapes, depths[0])
    like = (jax.ShapeDtypeStruct(shape, jnp.float64) for shape in shapes)
    results = jax.eval_shape(_mapped(call.plain, inside), *like)
    cotangents = [x.shape for x in jax.tree.leaves(results)]
    outside, shapes = _draw_levels(random, [*shapes, *shapes, *cotangents], depths[1])
    return Program(call=call, inside=inside, outside=outside, shapes=shapes)


# --- derivatives ----------------------------------------------------------------------


def _pulled(run: Function, primals: Any, cotangents: Any) -> Any:
    return jax.vjp(run, *primals)[1](cotangents)


def _first_order(run: Function, primals: Any, tangents: Any, cotangents: Any) -> Any:
    """Return results, tangents and gradients; the last two give the same product."""
    results, along = jax.jvp(run, primals, tangents)
    gradients = _pulled(run, primals, cotangents)
    return results, along, gradients


def _values_and_gradients(run: Function, primals: Any, _: Any, cotangents: Any) -> Any:
    results, pullback = jax.vjp(run, *primals)
    return results, pullback(cotangents)


def _all_orders(order: str) -> Function:
    """Return both modes, and a second derivative taken in one of three orders.

    They give the same numbers: second derivatives are symmetric.
    """

    def derivatives(run: Function, primals: Any, tangents: Any, cts: Any) -> Any:
        results, along = jax.jvp(run, primals, tangents)
        gradients = _pulled(run, primals, cts)
        if order == "reverse over forward":
            second = _pulled(lambda *p: jax.jvp(run, p, tangents)[1], primals, cts)
        elif order == "reverse over reverse":
            second = _pulled(lambda *p: _pulled(run, p, cts), primals, tangents)
        else:
            _, second = jax.jvp(lambda *p: _pulled(run, p, cts), primals, tangents)
        return results, along, gradients, second

    return derivatives


def _differences(run: Function, primals: Any, tangents: Any, cts: Any) -> Any:
    """Return what tangents and second derivatives are by finite differences."""

    def along(function: Function) -> Any:
        ends = [
            function(*(x + step * t for x, t in zip(primals, tangents, strict=True)))
            for step in (_STEP, -_STEP)
        ]
        return jax.tree.map(lambda x, y: (x - y) / (2 * _STEP), *ends)

    return along(run), along(lambda *p: _pulled(run, p, cts))


_ORDERS = ("reverse over forward", "reverse over reverse", "forward over reverse")


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


def _check(
    name: str, seed: int, activation: str | None, patch: pytest.MonkeyPatch
) -> None:
    random = Random(name, seed)
    call = draw_call(name, activation, random)
    program = _draw_program(random, call)
    print(program.text)
    arrays = [random.normal(shape) for shape in program.shapes]
    order = random.one_of(*_ORDERS)
    truth, (tangents, second) = jax.jit(
        lambda *x: (
            program.of(call.plain, _all_orders(_ORDERS[-1]))(*x),
            program.of(call.plain, _differences)(*x),
        )
    )(*arrays)
    assert_close(tangents, truth[1], 1e-5)
    assert_close(second, truth[3], 1e-5)
    got = program.of(call.ours, _all_orders(order))(*arrays)
    assert_close(got, truth, 1e-9)

    # cuDNN's parts; f64 is refused there but for this.
    patch.setattr(fusion, "_refusals", lambda *_: [])
    patch.setattr(sums, "_refusals", lambda _: ())
    patch.setattr(legalize_sdpa, "_refuse", lambda *_: None)
    seen: list[Graph] = []
    patch.setattr(cuda, "run_reference", _as_cudnn_runs(random, seen))
    got = program.of(call.ours, _values_and_gradients)(*arrays)
    assert seen
    # Some sums are kept in f32 whatever the operands are.
    assert_close(got, (truth[0], truth[2]), 2e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OPS)
def test_operations(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random("activation", name, seed)
    _check(name, seed, random.one_of(None, *NAMED), monkeypatch)
