# SPDX-License-Identifier: Apache-2.0
"""Tests that sharded operands give the same results, and what devices send.

Everything runs on eight devices of the CPU, through XLA's partitioner and the custom
call that it divides, as on GPUs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
from jax_cudnn import plans
from tests.common import drawn
from tests.common.devices import Function, Spec, collectives, gradient, mesh_of, placed
from tests.sharding.cases import (
    CASES,
    MESHES,
    OPERANDS,
    SHAPES,
    Case,
    assert_equal,
    check_same,
    draw,
    draw_spec,
    label,
    matmul,
    normed_sums,
    sdpa,
    wanted,
)

pytestmark = pytest.mark.sampled


def _calls_of(case: Case) -> list[tuple[Function, Any, str]]:
    """Return the function and its gradient, what they give, and what they send."""
    value, gradients = wanted(case.function)
    return [
        (case.function, value, case.forward),
        (gradient(case.function), gradients, case.backward),
    ]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_sharded_operands_give_the_same_and_send_what_the_rule_implies(
    case: Case,
) -> None:
    sharded = placed(mesh_of(x=4, y=2), OPERANDS[case.function], case.specs)
    for function, want, sent in _calls_of(case):
        assert_equal(jax.jit(function)(*sharded), want)
        assert " ".join(collectives(function, *sharded)) == sent


@pytest.mark.parametrize("case", CASES, ids=label)
def test_shardings_in_types_give_the_same(case: Case) -> None:
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    sharded = placed(mesh, OPERANDS[case.function], case.specs)
    for function, want, sent in _calls_of(case):
        got = jax.jit(function)(*sharded)
        assert_equal(got, want)
        assert " ".join(collectives(function, *sharded)) == sent
    # A gradient is sharded as its operand is.
    for x, gradient_of in zip(sharded, got, strict=True):
        full = (*x.sharding.spec, *(None,) * x.ndim)[: x.ndim]
        assert jax.typeof(gradient_of).sharding.spec == P(*full)


def _specs_of(function: Function, operands: Sequence[jax.Array]) -> list[P]:
    results = jax.tree.leaves(jax.eval_shape(function, *operands))
    return [each.sharding.spec for each in results]


@pytest.mark.once
@pytest.mark.parametrize("sizes", [{"x": 1, "y": 1}, {"x": 1, "y": 2}], ids=str)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_an_axis_of_one_device_is_in_types_as_larger_ones_are(
    case: Case, sizes: dict[str, int]
) -> None:
    """So that a program for many devices runs on one of them, too."""
    operands = OPERANDS[case.function]
    many = placed(mesh_of(AxisType.Explicit, x=4, y=2), operands, case.specs)
    few = placed(mesh_of(AxisType.Explicit, **sizes), operands, case.specs)
    for function, want, _ in _calls_of(case):
        assert _specs_of(function, few) == _specs_of(function, many)
        assert_equal(jax.jit(function)(*few), want)


def _kernels(function: Function, operands: Sequence[jax.Array]) -> list[Any]:
    calls = plans.inspect(function, *operands).calls
    return [(call.op, call.shapes, call.count) for call in calls]


# A residual whose type is sharded is added by JAX, which gives the sum its type.
_OF_ONE = [case for case in CASES if case.function is not normed_sums]


@pytest.mark.once
@pytest.mark.parametrize("case", _OF_ONE, ids=label)
def test_kernels_along_axes_of_one_device_are_those_of_a_single_one(
    case: Case,
) -> None:
    """Sums along these are complete: nothing that follows a sum waits for others."""
    operands = OPERANDS[case.function]
    mesh = mesh_of(AxisType.Explicit, x=1, y=1)
    few = placed(mesh, operands, case.specs)
    assert _kernels(case.function, few) == _kernels(case.function, operands)


def test_axes_of_one_device_contradict_no_other_sharding() -> None:
    q, k, v = draw(2, 8, 8, 4), draw(2, 8, 4, 4), draw(2, 8, 4, 4)
    specs = [(None, None, ("x", "y")), (None, None, "x"), (None, None, "x")]
    for sizes in ({"x": 1, "y": 1}, {"x": 1, "y": 2}, {"x": 4, "y": 1}):
        sharded = placed(mesh_of(AxisType.Explicit, **sizes), (q, k, v), specs)
        for function in (sdpa, gradient(sdpa)):
            check_same(function, sharded, (q, k, v))
        assert _specs_of(sdpa, sharded) == [P(*specs[0], None)]


def test_results_say_in_their_types_how_they_are_sharded() -> None:
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    x, w, bias = placed(mesh, OPERANDS[matmul], [("x",), (None, "y"), ("y",)])
    with jax.set_mesh(mesh):
        result = jax.eval_shape(matmul, x, w, bias)
        assert result.sharding.spec == P("x", None, "y")
        mapped = jax.vmap(matmul, in_axes=(0, None, None))(x, w, bias)
        assert jax.typeof(mapped).sharding.spec == P("x", None, "y")


def test_shardings_that_contradict_each_other_are_refused() -> None:
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    operands = placed(mesh, OPERANDS[matmul], [("x",), (None, "x"), ()])
    with pytest.raises(
        jax_cudnn.UnsupportedError,
        match=r"^matmul: the axis of b with size 24 is sharded along x of the mesh\. "
        r"Another operand has another axis sharded along x, .*reshard",
    ):
        jax.jit(matmul)(*operands)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("op", ["matmul", "dot_general", "conv"])
def test_out_sharding_is_how_the_result_is_sharded(op: str, kind: AxisType) -> None:
    mesh = mesh_of(kind, x=4, y=2)
    rows = (((1,), (0,)), ((), ()))
    call = {
        "matmul": jax_cudnn.matmul,
        "dot_general": lambda x, w, **how: jax_cudnn.dot_general(x, w, rows, **how),
        "conv": lambda x, w, **how: jax_cudnn.conv(
            x[..., None], w.T[..., None], padding="VALID", **how
        )[..., 0],
    }[op]
    x, w = draw(8, 16), draw(16, 24)
    operands = placed(mesh, [x, w], [(None, "y"), ("y",)])
    full = NamedSharding(mesh, P("x", None, None) if op == "conv" else P("x"))
    run = jax.jit(functools.partial(call, out_sharding=full))
    result = run(*operands)
    assert_equal(result, call(x, w))
    assert result.sharding.spec[0] == "x"


@pytest.mark.parametrize("spec", [(None, "x"), (None, None, "x"), (None, "x", "y")])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("pool", [jax_cudnn.max_pool, jax_cudnn.avg_pool])
def test_windows_that_overlap_may_lie_on_several_devices(
    pool: Any, strides: tuple[int, int], spec: Spec
) -> None:
    x = drawn.normal(0, (3, 8, 4, 2))
    out = jax.eval_shape(lambda x: pool(x, (2, 2), strides), x)
    weights = drawn.normal(1, out.shape)

    def loss(x: Any) -> jax.Array:
        return jnp.sum(pool(x, (2, 2), strides) * weights)

    (sharded,) = placed(mesh_of(x=4, y=2), [x], [spec])
    check_same(jax.grad(loss), [sharded], [x])


def test_key_heads_that_do_not_divide_are_not_cut_with_their_query_heads() -> None:
    shapes = (2, 10, 16, 4), (2, 12, 4, 4), (2, 12, 4, 4)
    operands = [draw(*shape) for shape in shapes]
    sharded = placed(mesh_of(x=8), operands, [(None, None, "x"), (), ()])
    for function in (sdpa, gradient(sdpa)):
        check_same(function, sharded, operands)


def test_uneven_parts_are_gathered() -> None:
    x, w = draw(9, 6, 16), draw(16, 24)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(x[:6], w)

    (padded,) = placed(mesh_of(x=3), [x], [("x",)])
    check_same(run, [padded, w], [x, w])


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_sum_with_a_residual_keeps_its_type(axis: int) -> None:
    """So that a scan may carry it."""
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    operands = [draw(8, 6, 16), draw((8, 6, 16)[axis])]
    for spec in (("x",), (None, None, "y"), ("x", None, "y")):
        h, scale = placed(mesh, operands, [spec, ()])

        def step(h: Any, _: Any, scale: Any = scale) -> Any:
            output, total = jax_cudnn.layer_norm(
                jnp.tanh(h), scale, axis=axis, residual=h
            )
            return total, jnp.sum(output)

        with jax.set_mesh(mesh):
            total, _ = jax.jit(lambda h, step=step: jax.lax.scan(step, h, None, 3))(h)
        assert jax.typeof(total).sharding.spec == jax.typeof(h).sharding.spec
        want, _ = jax.lax.scan(
            functools.partial(step, scale=operands[1]), operands[0], None, 3
        )
        np.testing.assert_allclose(total, want, rtol=2e-5, atol=2e-5)


# --- random meshes and shardings ------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize("function", SHAPES, ids=lambda f: f.__name__)
def test_random_shardings_give_the_same(function: Function) -> None:
    operands = OPERANDS[function]
    rng = np.random.default_rng(len(function.__name__))
    for _ in range(4):
        sizes = MESHES[int(rng.integers(len(MESHES)))]
        specs = [draw_spec(rng, sizes, x.shape) for x in operands]
        print(sizes, specs)
        sharded = placed(mesh_of(**sizes), operands, specs)
        got = jax.jit(lambda *xs: (function(*xs), gradient(function)(*xs)))(*sharded)
        assert_equal(got, wanted(function))


def _derivatives(function: Function) -> Callable[..., Any]:
    """Return what a function gives with its gradient, and both along the operands."""

    def run(*operands: jax.Array) -> Any:
        return [jax.jvp(f, operands, operands) for f in (function, gradient(function))]

    return run


@pytest.mark.once
@pytest.mark.parametrize("function", SHAPES, ids=lambda f: f.__name__)
def test_random_shardings_in_types_give_the_same(function: Function) -> None:
    operands = OPERANDS[function]
    derivatives = _derivatives(function)
    want = jax.jit(derivatives)(*operands)
    rng = np.random.default_rng(len(function.__name__))
    checked = 0
    while checked < 3:
        sizes = MESHES[int(rng.integers(len(MESHES)))]
        specs = [draw_spec(rng, sizes, x.shape) for x in operands]
        print(sizes, specs)
        sharded = placed(mesh_of(AxisType.Explicit, **sizes), operands, specs)
        try:
            jax.eval_shape(function, *sharded)
        except jax_cudnn.UnsupportedError:
            continue  # they contradict each other
        assert_equal(jax.jit(derivatives)(*sharded), want)
        checked += 1
