# SPDX-License-Identifier: Apache-2.0
"""Tests `matmul` and `conv` with epilogues under all transformations.

The other side of each comparison is JAX's own product with the epilogue in jax.numpy,
in float64, or the same function without the transformation.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jax_cudnn import EXPORT_SAFETY_CHECKS
from tests.common.devices import mesh_of
from tests.conftest import Draw
from tests.products.shared.fused import (
    assert_close,
    contractions,
    gradients,
    graphs,
    loss,
    stacked,
    subsets,
)
from tests.products.shared.operations import CONV, MATMUL, Operation, both_operations

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# --- rounding -------------------------------------------------------------------------


@both_operations
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_16_bit_results_are_rounded_once(
    operation: Operation, dtype: Any, draw: Draw
) -> None:
    around = {"scale_out": 0.25} if operation is MATMUL else {}
    run = functools.partial(operation.run, activation="gelu", **around)
    operands = operation.draw(draw, dtype, s=13, t=11)

    @jax.jit
    def both(*operands: jax.Array) -> Any:
        wide = (x.astype(jnp.float32) for x in operands)
        return run(*operands), run(*wide).astype(dtype)

    got, want = both(*operands)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


# --- gradients ------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@both_operations
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_of_every_subset_of_operands(
    operation: Operation, activation: Any, draw: Draw
) -> None:
    operands = operation.draw(draw)
    run = functools.partial(operation.run, activation=activation)
    every = subsets(len(operands))
    want = jax.jit(gradients(functools.partial(run, is_plain=True), every[-1]))
    value, full = want(*operands)

    @jax.jit
    def found(*operands: jax.Array) -> Any:
        return [gradients(run, subset)(*operands) for subset in every]

    for subset, got in zip(every, found(*operands), strict=True):
        assert_close(got, (value, tuple(full[i] for i in subset)))
        _, (backward, _) = graphs(gradients(run, subset), *operands)
        wanted = {f"grad_{operation.names[i]}" for i in subset}
        assert set(backward.outputs) == wanted
        kinds = operation.contractions
        assert contractions(backward) == sorted(kinds[n] for n in wanted if n in kinds)


_VIEWS = {"a_view_021", "b_view_021", "grad_output"}
_OPERANDS = {"x", "w", "grad_output"}


@pytest.mark.parametrize(
    ("operation", "activation", "saved", "read"),
    [
        (MATMUL, None, (), _VIEWS),
        (MATMUL, "relu", (), _VIEWS | {"output"}),
        (MATMUL, "gelu", ("saved_add_1",), _VIEWS),
        (CONV, None, (), _OPERANDS),
        (CONV, "relu", (), _OPERANDS | {"output"}),
        (CONV, "gelu", ("saved_add_1",), _OPERANDS),
        (CONV, jax.nn.mish, ("saved_add_1",), _OPERANDS),
    ],
)
def test_no_more_is_saved_than_the_gradient_reads(
    operation: Operation,
    activation: Any,
    saved: tuple[str, ...],
    read: set[str],
    draw: Draw,
) -> None:
    args = operation.draw(draw, jnp.bfloat16)[:3]
    run = functools.partial(operation.run, activation=activation)
    (forward, _), (backward, _) = graphs(gradients(run, (0, 1, 2)), *args)
    assert forward.outputs == ("output", *saved)
    assert set(backward.inputs) == {*read, *saved}
    assert {t.dtype for t in forward.output_tensors} == {"bf16"}
    ((alone, _),) = graphs(run, *args)
    assert alone.outputs == ("output",)
    # What a pullback holds: the operands that are read, and the result only if it is.
    result, pullback = jax.vjp(run, *args)
    held = [each.size == result.size for each in jax.tree.leaves(pullback)]
    assert sum(held) == len(saved) + ("output" in read)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("operation", "options"),
    [
        (MATMUL, {}),
        (MATMUL, {"activation": "gelu"}),
        (CONV, {"activation": "gelu", "window_strides": (2, 1)}),
        (CONV, {"activation": jax.nn.mish, "rhs_dilation": (2, 1)}),
        (CONV, {"padding": ((-1, 2), (3, 0)), "lhs_dilation": (1, 2)}),
    ],
)
def test_two_orders_of_both_modes_are_derivatives(
    operation: Operation, options: Any, draw: Draw
) -> None:
    small = {} if operation is MATMUL else {"b": 1, "s": 3, "t": 3, "e": 2}
    args = operation.draw(draw, **small)[:4]
    run = functools.partial(operation.run, **options)
    check_grads(jax.jit(run), args, order=2, modes=("fwd", "rev"))


@pytest.mark.usefixtures("x64")
@both_operations
def test_higher_derivatives_are_jax_s(operation: Operation, draw: Draw) -> None:
    small = {"s": 2, "t": 3} | ({"k": 2} if operation is MATMUL else {"b": 1, "e": 2})
    args = operation.draw(draw, **small)[:3]

    @functools.partial(jax.jit, static_argnums=0)
    def every(is_plain: bool) -> Any:
        cubic = functools.partial(operation.run, is_plain=is_plain)
        run = functools.partial(cubic, activation="gelu")
        total, cubic = (functools.partial(loss, each) for each in (run, cubic))
        value, linear = jax.linearize(run, *args)
        return (
            jax.hessian(total, argnums=(0, 2))(*args),
            jax.jacfwd(run, argnums=1)(*args),
            jax.jacrev(jax.jacrev(total, argnums=1))(*args),
            jax.jacrev(jax.jacrev(jax.jacrev(cubic, argnums=1)))(*args[:2]),
            value,
            linear(*args),
            jax.jvp(run, args, args)[1],
        )

    assert_close(every(False), every(True))


@pytest.mark.usefixtures("x64")
@both_operations
@pytest.mark.parametrize("moving", [0, 1])
def test_a_linear_call_can_be_transposed(
    operation: Operation, moving: int, draw: Draw
) -> None:
    operands = operation.draw(draw)[:2]

    def transposed(is_plain: bool) -> Any:
        def run(x: Any) -> jax.Array:
            pair = [x if i == moving else y for i, y in enumerate(operands)]
            return operation.run(*pair, is_plain=is_plain)

        cotangent = jnp.cos(run(operands[moving]))
        return jax.linear_transpose(run, operands[moving])(cotangent)

    assert_close(transposed(False), transposed(True))


# --- vmap -----------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@both_operations
def test_vmap_over_every_subset_of_operands(operation: Operation, draw: Draw) -> None:
    single, many = operation.draw(draw), operation.draw(draw, count=3)
    count = len(single)
    run = gradients(functools.partial(operation.run, activation="gelu"), range(count))
    cases = []
    for subset in subsets(count):
        axes = [operation.mapped[i] if i in subset else None for i in range(count)]
        args = [
            single[i] if axis is None else jnp.moveaxis(many[i], 0, axis)
            for i, axis in enumerate(axes)
        ]
        cases.append((axes, args))

    @jax.jit
    def every(every_args: Any) -> Any:
        return [
            jax.vmap(run, in_axes=axes)(*args)
            for (axes, _), args in zip(cases, every_args, strict=True)
        ]

    one = jax.jit(run)
    found = every([args for _, args in cases])
    for (axes, args), got in zip(cases, found, strict=True):
        assert_close(got, stacked(one, args, axes))


@pytest.mark.usefixtures("x64")
@both_operations
def test_nested_vmap_and_vmap_of_forward_mode(operation: Operation, draw: Draw) -> None:
    bias = operation.draw(draw)[2]
    xs, ws = operation.draw(draw, count=3)[0], operation.draw(draw, count=2)[1]
    run = functools.partial(operation.run, activation="gelu")

    def along(x: Any, w: Any) -> Any:
        return jax.jvp(run, (x, w, bias), (x, w, bias))

    def nested(function: Any) -> Any:
        inner = jax.vmap(function, in_axes=(0, None))
        return jax.jit(jax.vmap(inner, in_axes=(None, 0)))(xs, ws)

    once = jax.jit(along)
    want = [stacked(once, (xs, each), (0, None)) for each in ws]
    assert_close(nested(along), jax.tree.map(lambda *x: jnp.stack(x), *want))
    assert_close(nested(lambda x, w: run(x, w, bias)), jnp.stack([v for v, _ in want]))


@both_operations
def test_vmap_over_no_examples_gives_none(operation: Operation, draw: Draw) -> None:
    x, w, bias = operation.draw(draw, jnp.float32)[:3]
    run = jax.vmap(gradients(operation.run, (0, 1)), in_axes=(0, None, None))
    value, (grad_x, grad_w) = run(jnp.zeros((0, *x.shape)), w, bias)
    assert value.shape == (0,)
    assert grad_x.shape == (0, *x.shape)
    assert grad_w.shape == (0, *w.shape)


# --- other transformations ------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@both_operations
def test_scan_and_remat_match_the_unrolled_loop(
    operation: Operation, draw: Draw
) -> None:
    x = operation.draw(draw)[0]
    sizes = {**operation.sizes, "n": 3}
    ws = draw(operation.square, jnp.float64, **sizes)
    bias = draw(operation.square[-1], jnp.float64, **sizes)

    def total(body: Any, loop: Any) -> Any:
        def run(x: Any, ws: Any, bias: Any) -> jax.Array:
            return loop(lambda x, w: (body(x, w, bias), None), x, ws)[0]

        return jax.jit(gradients(run, (0, 1, 2)))(x, ws, bias)

    def unrolled(body: Any, x: Any, ws: Any) -> Any:
        for w in ws:
            x, _ = body(x, w)
        return x, None

    fused = functools.partial(operation.run, activation="gelu")
    want = total(functools.partial(fused, is_plain=True), unrolled)
    assert_close(total(fused, lax.scan), want)
    assert_close(total(jax.checkpoint(fused), lax.scan), want)


@pytest.mark.parametrize(("is_kept", "count"), [(True, 1), (False, 2)])
def test_remat_keeps_named_results(is_kept: bool, count: int, draw: Draw) -> None:
    operands = CONV.draw(draw, jnp.float32)[:3]
    kept = ("cudnn_conv_fprop_output", "cudnn_conv_fprop_saved_add_1")
    policy = jax.checkpoint_policies.save_only_these_names(*(kept if is_kept else ()))
    run = jax.checkpoint(functools.partial(CONV.run, activation="gelu"), policy=policy)
    found = [contractions(g) for g, _ in graphs(gradients(run, (0, 1)), *operands)]
    assert found.count(["conv_fprop"]) == count


@both_operations
def test_an_exported_gradient_runs_on_the_cpu(operation: Operation, draw: Draw) -> None:
    operands = operation.draw(draw, jnp.bfloat16)[:3]
    run = functools.partial(operation.run, activation="gelu")
    gradient = jax.jit(gradients(run, (0, 1)))
    exported = jax.export.export(
        gradient, platforms=("cpu",), disabled_checks=EXPORT_SAFETY_CHECKS
    )(*operands)
    assert_close(exported.call(*operands), gradient(*operands), 0)


@both_operations
def test_jit_traces_once(operation: Operation, draw: Draw) -> None:
    traces: list[int] = []

    @jax.jit
    def function(*operands: jax.Array) -> Any:
        traces.append(1)
        return operation.run(*operands)

    operands = operation.draw(draw, jnp.float32)[:3]
    for _ in range(2):
        function(*operands)
    assert len(traces) == 1
    assert math.isfinite(float(loss(function, *operands)))


@pytest.mark.usefixtures("x64")
@both_operations
def test_sharded_calls_are_unsharded_calls(operation: Operation, draw: Draw) -> None:
    rows = {"s": 8} if operation is MATMUL else {"b": 8}
    operands = operation.draw(draw, **rows)[:3]
    function = functools.partial(operation.run, activation="gelu")
    sharded = jax.shard_map(
        function,
        mesh=mesh_of(data=4),
        in_specs=(P("data"), P(), P()),
        out_specs=P("data"),
        check_vma=True,
    )

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(function: Any, *x: jax.Array) -> Any:
        backward = gradients(function, (0, 1, 2))(*x)
        return function(*x), jax.jvp(function, x, x), backward

    found, wanted = (derivatives(each, *operands) for each in (sharded, function))
    for got, want in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
