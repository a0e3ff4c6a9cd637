# SPDX-License-Identifier: Apache-2.0
"""Tests that sharded operands give the same results, and what devices send.

Everything runs on eight devices of the CPU, through XLA's partitioner and the custom
call that it divides, as on GPUs.
"""

import functools
import math
import os
import socket
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
from benchmarks.xla.traffic import traffic
from jax_cudnn import plans
from jax_cudnn.lowering import partitioned
from jax_cudnn.policy.tables import Scattered, Table
from tests.common.devices import Function, Spec, collectives, gradient, mesh_of, placed

pytestmark = pytest.mark.sampled

_NUMBERS = np.random.default_rng(0)


def _draw(*shape: int) -> jax.Array:
    return jnp.asarray(_NUMBERS.standard_normal(shape), jnp.float32)


def _matmul(x: Any, w: Any, bias: Any) -> jax.Array:
    return jax_cudnn.matmul(x, w, bias=bias, activation="gelu")


def _contraction(x: Any, w: Any) -> jax.Array:
    return jax_cudnn.matmul(x, w)


def _transposed(x: Any, w: Any) -> jax.Array:
    return jax_cudnn.dot_general(x, w, (((2,), (1,)), ((), ())), activation="silu")


def _experts(x: Any, w: Any, bias: Any) -> jax.Array:
    return jax_cudnn.matmul(x, w, bias=bias, activation=jnp.tanh)


def _sdpa(q: Any, k: Any, v: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, is_causal=True)


def _heads_first(q: Any, k: Any, v: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, layout="bhsd", is_causal=True)


def _tokens_first(q: Any, k: Any, v: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, layout="sbhd", local_window_size=(4, 5))


def _qkv(qkv: Any) -> jax.Array:
    return jax_cudnn.qkv_sdpa(qkv, is_causal=True)


def _qkv_by_heads(qkv: Any, bias: Any) -> jax.Array:
    return jax_cudnn.qkv_sdpa(qkv, bias, layout="sbh3d")


def _qkv_grouped(qkv: Any) -> jax.Array:
    return jax_cudnn.qkv_sdpa(qkv, layout="bshd", key_value_heads=2)


def _packed(q: Any, k: Any, v: Any) -> jax.Array:
    lengths = 1 + jnp.arange(8, dtype=jnp.int32)[:, None] % jnp.array([[3, 2, 4]])
    mask = jax_cudnn.masks.Packed.from_lengths(lengths, lengths + 1)
    return jax_cudnn.sdpa(q, k, v, mask=mask, is_causal=True)


def _dropped(q: Any, k: Any, v: Any) -> jax.Array:
    key = jax.random.key(5)
    return jax_cudnn.sdpa(q, k, v, dropout_rate=0.3, dropout_key=key)


def _biased(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, bias)


def _conv(x: Any, w: Any, bias: Any) -> jax.Array:
    return jax_cudnn.conv(
        x,
        w,
        padding="SAME",
        bias=bias,
        activation="silu",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _grouped(x: Any, w: Any) -> jax.Array:
    return jax_cudnn.conv(
        x,
        w,
        padding="VALID",
        feature_group_count=4,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _causal(x: Any, w: Any, bias: Any) -> jax.Array:
    return jax_cudnn.causal_conv1d(x, w, bias=bias)


def _max_pool(x: Any) -> jax.Array:
    return jax_cudnn.max_pool(x, (3, 2), (2, 1), "SAME")


def _avg_pool(x: Any) -> jax.Array:
    return jax_cudnn.avg_pool(x, (3, 2), (2, 1), "SAME", count_include_pad=False)


def _ragged_dot(x: Any, w: Any, bias: Any) -> jax.Array:
    sizes = jnp.array([3, 0, 7, 4], jnp.int32)
    return jax_cudnn.ragged_dot(x, w, sizes, bias=bias, activation="silu")


_SHAPES: dict[Function, tuple[tuple[int, ...], ...]] = {
    _matmul: ((8, 6, 16), (16, 24), (24,)),
    _contraction: ((8, 6, 16), (16, 24)),
    _transposed: ((8, 6, 16), (24, 16)),
    _experts: ((4, 10, 16), (4, 16, 12), (4, 1, 12)),
    _sdpa: ((8, 10, 16, 4), (8, 12, 8, 4), (8, 12, 8, 6)),
    _heads_first: ((8, 16, 10, 4), (8, 8, 12, 4), (8, 8, 12, 6)),
    _tokens_first: ((10, 8, 16, 4), (12, 8, 8, 4), (12, 8, 8, 6)),
    _qkv: ((8, 10, 3, 16, 4),),
    _qkv_by_heads: ((10, 8, 16, 3, 4), (1, 16, 10, 10)),
    _qkv_grouped: ((8, 10, 12, 4),),
    _packed: ((8, 10, 16, 4), (8, 13, 8, 4), (8, 13, 8, 6)),
    _dropped: ((8, 10, 16, 4), (8, 12, 8, 4), (8, 12, 8, 6)),
    _biased: ((8, 10, 8, 4), (8, 12, 4, 4), (8, 12, 4, 6), (1, 8, 10, 12)),
    _conv: ((8, 6, 4, 16), (3, 3, 16, 24), (24,)),
    _grouped: ((8, 6, 4, 16), (3, 3, 4, 32)),
    _causal: ((8, 10, 16), (4, 16), (16,)),
    _max_pool: ((8, 2, 6, 5, 16),),
    _avg_pool: ((8, 2, 6, 5, 16),),
    _ragged_dot: ((16, 8), (4, 8, 24), (4, 24)),
}
_OPERANDS = {
    function: [_draw(*shape) for shape in shapes]
    for function, shapes in _SHAPES.items()
}


class _Case(NamedTuple):
    """Shardings, and what is sent in the result and in the gradient."""

    function: Function
    specs: tuple[Spec, ...]
    forward: str = ""
    backward: str = ""


_NONE: Spec = ()
_CASES = [
    # batch and rows: the gradient of what all share is a sum
    _Case(_matmul, (("x",), _NONE, _NONE), "", "all-reduce"),
    _Case(_matmul, (("x", "y"), _NONE, _NONE), "", "all-reduce"),
    _Case(_matmul, ((("y", "x"),), _NONE, _NONE), "", "all-reduce"),
    # columns
    _Case(_matmul, (_NONE, (None, "y"), ("y",)), "", "all-reduce"),
    _Case(_matmul, (("x",), (None, "y"), ("y",)), "", "all-reduce"),
    # contraction: complete before the epilogue
    _Case(_matmul, ((None, None, "y"), ("y",), _NONE), "all-reduce", "all-reduce"),
    _Case(_contraction, (("x", None, "y"), ("y",)), "all-reduce", "all-reduce"),
    _Case(_transposed, (("x", None, "y"), (None, "y")), "all-reduce", "all-reduce"),
    _Case(_transposed, (("x",), ("y",)), "", "all-reduce"),
    # a batch of matrices that are all different
    _Case(_experts, (("x",), ("x",), ("x",))),
    _Case(_experts, (("x", "y"), ("x",), ("x",)), "", "all-reduce"),
    # batch, heads, both; key heads with their query heads
    _Case(_sdpa, (("x",),) * 3),
    _Case(_sdpa, ((("x", "y"),),) * 3),
    _Case(_sdpa, (("x", None, "y"),) * 3),
    _Case(_sdpa, ((None, None, ("x", "y")),) * 3),
    # what a kernel needs whole is gathered: keys, values and queries, once
    _Case(_sdpa, ((None, "y"),) * 3, "all-gather", "all-gather"),
    # the same in other layouts, and of one array
    _Case(_heads_first, (("x", "y"),) * 3),
    _Case(_heads_first, ((None, ("x", "y")),) * 3),
    _Case(_tokens_first, ((None, "x", "y"),) * 3),
    _Case(_qkv, (("x", None, None, "y"),)),
    _Case(_qkv, ((None, None, None, ("x", "y")),)),
    _Case(_qkv_by_heads, ((None, "x", "y"), (None, "y")), "", "all-reduce"),
    _Case(_qkv_grouped, ((("x", "y"),),)),
    # heads side by side are queries, keys and values
    _Case(_qkv_grouped, (("x", None, "y"),), "all-gather", "all-gather"),
    # Rows of packed sequences, without collectives.
    _Case(_packed, (("x",),) * 3),
    _Case(_packed, (("x", None, "y"),) * 3),
    _Case(_packed, ((("x", "y"),),) * 3),
    # a part of the batch or of the heads drops what it drops in the whole
    _Case(_dropped, (("x",),) * 3),
    _Case(_dropped, (("x", None, "y"),) * 3),
    _Case(_dropped, ((None, None, ("x", "y")),) * 3),
    _Case(_biased, (("x",),) * 3 + (_NONE,), "", "all-reduce"),
    _Case(_biased, (("x", None, "y"),) * 3 + ((None, "y"),), "", "all-reduce"),
    _Case(_conv, (("x",), _NONE, _NONE), "", "all-reduce"),
    _Case(_conv, (("x",), (None, None, None, "y"), ("y",)), "", "all-reduce"),
    _Case(
        _conv,
        ((None, None, None, "y"), (None, None, "y"), _NONE),
        "all-reduce",
        "all-reduce",
    ),
    _Case(
        _grouped, (("x", None, None, "y"), (None, None, None, "y")), "", "all-reduce"
    ),
    # neither the batch axes nor the channels of a causal convolution are sums
    _Case(_causal, (("x",), _NONE, _NONE), "", "all-reduce"),
    _Case(_causal, (("x", None, "y"), (None, "y"), ("y",)), "", "all-reduce"),
    _Case(_causal, ((None, None, "x"), (None, "x"), ("x",))),
    # neither the batch axes nor the channels meet in a window
    _Case(_max_pool, (("x",),)),
    _Case(_max_pool, (("y", None, None, None, "x"),)),
    _Case(_avg_pool, (("x", "y"),)),
    _Case(_avg_pool, (("y", None, None, None, "x"),)),
    # columns of all groups' matrices, and their contraction
    _Case(_ragged_dot, (_NONE, (None, None, "x"), (None, "x")), "", "all-reduce"),
    _Case(_ragged_dot, ((None, "x"), (None, "x"), _NONE), "all-reduce", "all-reduce"),
]


def _label(case: _Case) -> str:
    specs = ["".join(str(P(*spec))[13:]) or "()" for spec in case.specs]
    return f"{case.function.__name__[1:]} {' '.join(specs)}"


def _assert_equal(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(y)))
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("case", _CASES, ids=_label)
def test_sharded_operands_give_the_same_and_send_what_the_rule_implies(
    case: _Case,
) -> None:
    operands = _OPERANDS[case.function]
    sharded = placed(mesh_of(x=4, y=2), operands, case.specs)
    for function, sent in (
        (case.function, case.forward),
        (gradient(case.function), case.backward),
    ):
        _assert_equal(jax.jit(function)(*sharded), function(*operands))
        assert " ".join(collectives(function, *sharded)) == sent


@pytest.mark.parametrize("spec", [(None, "x"), (None, None, "x"), (None, "x", "y")])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("pool", [jax_cudnn.max_pool, jax_cudnn.avg_pool])
def test_windows_that_overlap_may_lie_on_several_devices(
    pool: Any, strides: tuple[int, int], spec: Spec
) -> None:
    x = jax.random.normal(jax.random.key(0), (3, 8, 4, 2))
    out = jax.eval_shape(lambda x: pool(x, (2, 2), strides), x)
    weights = jax.random.normal(jax.random.key(1), out.shape)

    def loss(x: Any) -> jax.Array:
        return jnp.sum(pool(x, (2, 2), strides) * weights)

    (sharded,) = placed(mesh_of(x=4, y=2), [x], [spec])
    _assert_equal(jax.jit(jax.grad(loss))(sharded), jax.grad(loss)(x))


@pytest.mark.parametrize("case", _CASES, ids=_label)
def test_shardings_in_types_give_the_same(case: _Case) -> None:
    operands = _OPERANDS[case.function]
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    sharded = placed(mesh, operands, case.specs)
    for function, sent in (
        (case.function, case.forward),
        (gradient(case.function), case.backward),
    ):
        got = jax.jit(function)(*sharded)
        _assert_equal(got, function(*operands))
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
@pytest.mark.parametrize("case", _CASES, ids=_label)
def test_an_axis_of_one_device_is_in_types_as_larger_ones_are(
    case: _Case, sizes: dict[str, int]
) -> None:
    """So that a program for many devices runs on one of them, too."""
    operands = _OPERANDS[case.function]
    many = placed(mesh_of(AxisType.Explicit, x=4, y=2), operands, case.specs)
    few = placed(mesh_of(AxisType.Explicit, **sizes), operands, case.specs)
    for function in (case.function, gradient(case.function)):
        assert _specs_of(function, few) == _specs_of(function, many)
        _assert_equal(jax.jit(function)(*few), function(*operands))


def _kernels(function: Function, operands: Sequence[jax.Array]) -> list[Any]:
    calls = plans.inspect(function, *operands).calls
    return [(call.op, call.shapes, call.count) for call in calls]


@pytest.mark.once
@pytest.mark.parametrize("case", _CASES, ids=_label)
def test_kernels_along_axes_of_one_device_are_those_of_a_single_one(
    case: _Case,
) -> None:
    """Sums along these are complete: nothing that follows a sum waits for others."""
    operands = _OPERANDS[case.function]
    mesh = mesh_of(AxisType.Explicit, x=1, y=1)
    few = placed(mesh, operands, case.specs)
    assert _kernels(case.function, few) == _kernels(case.function, operands)


def test_axes_of_one_device_contradict_no_other_sharding() -> None:
    q, k, v = _draw(2, 8, 8, 4), _draw(2, 8, 4, 4), _draw(2, 8, 4, 4)
    specs = [(None, None, ("x", "y")), (None, None, "x"), (None, None, "x")]
    for sizes in ({"x": 1, "y": 1}, {"x": 1, "y": 2}, {"x": 4, "y": 1}):
        sharded = placed(mesh_of(AxisType.Explicit, **sizes), (q, k, v), specs)
        for function in (_sdpa, gradient(_sdpa)):
            _assert_equal(jax.jit(function)(*sharded), function(q, k, v))
        assert _specs_of(_sdpa, sharded) == [P(*specs[0], None)]


def test_results_say_in_their_types_how_they_are_sharded() -> None:
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    x, w, bias = placed(mesh, _OPERANDS[_matmul], [("x",), (None, "y"), ("y",)])
    with jax.set_mesh(mesh):
        result = jax.eval_shape(_matmul, x, w, bias)
        assert result.sharding.spec == P("x", None, "y")
        mapped = jax.vmap(_matmul, in_axes=(0, None, None))(x, w, bias)
        assert jax.typeof(mapped).sharding.spec == P("x", None, "y")


def test_shardings_that_contradict_each_other_are_refused() -> None:
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    operands = placed(mesh, _OPERANDS[_matmul], [("x",), (None, "x"), ()])
    with pytest.raises(
        jax_cudnn.UnsupportedError,
        match=r"^matmul: the axis of b with size 24 is sharded along x of the mesh\. "
        r"Another operand has another axis sharded along x, .*reshard",
    ):
        jax.jit(_matmul)(*operands)


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
    x, w = _draw(8, 16), _draw(16, 24)
    operands = placed(mesh, [x, w], [(None, "y"), ("y",)])
    full = NamedSharding(mesh, P("x", None, None) if op == "conv" else P("x"))
    run = jax.jit(functools.partial(call, out_sharding=full))
    result = run(*operands)
    _assert_equal(result, call(x, w))
    assert result.sharding.spec[0] == "x"


# --- random meshes and shardings ------------------------------------------------------

_MESHES = [
    {"x": 8},
    {"x": 4, "y": 2},
    {"x": 2, "y": 2, "z": 2},
    {"x": 2, "w": 1, "y": 2, "z": 2},
]


def _draw_spec(
    rng: np.random.Generator, mesh: dict[str, int], shape: tuple[int, ...]
) -> Spec:
    """Draw a sharding of an array: some axes of the mesh, where they divide."""
    names = [str(name) for name in rng.permutation([*mesh])]
    spec: list[Any] = [()] * len(shape)
    for name in names[: int(rng.integers(0, len(names) + 1))]:
        axis = int(rng.integers(len(shape)))
        own = (*spec[axis], name)
        if shape[axis] % math.prod(mesh[each] for each in own) == 0:
            spec[axis] = own
    return tuple(own[0] if len(own) == 1 else own or None for own in spec)


@pytest.mark.once
@pytest.mark.parametrize("function", _SHAPES, ids=lambda f: f.__name__[1:])
def test_random_shardings_give_the_same(function: Function) -> None:
    operands = _OPERANDS[function]
    want = [jax.jit(f)(*operands) for f in (function, gradient(function))]
    rng = np.random.default_rng(len(function.__name__))
    for _ in range(4):
        sizes = _MESHES[int(rng.integers(len(_MESHES)))]
        specs = [_draw_spec(rng, sizes, x.shape) for x in operands]
        print(sizes, specs)
        sharded = placed(mesh_of(**sizes), operands, specs)
        got = [jax.jit(f)(*sharded) for f in (function, gradient(function))]
        _assert_equal(got, want)


def _second_order(function: Function) -> Callable[..., Any]:
    """Return the gradient's derivative along the operands."""
    return lambda *operands: jax.jvp(gradient(function), operands, operands)[1]


@pytest.mark.once
@pytest.mark.parametrize("function", _SHAPES, ids=lambda f: f.__name__[1:])
def test_random_shardings_in_types_give_the_same(function: Function) -> None:
    operands = _OPERANDS[function]
    forward = functools.partial(_along_operands, function)
    calls = (function, gradient(function), forward, _second_order(function))
    want = [jax.jit(f)(*operands) for f in calls]
    rng = np.random.default_rng(len(function.__name__))
    checked = 0
    while checked < 3:
        sizes = _MESHES[int(rng.integers(len(_MESHES)))]
        specs = [_draw_spec(rng, sizes, x.shape) for x in operands]
        print(sizes, specs)
        sharded = placed(mesh_of(AxisType.Explicit, **sizes), operands, specs)
        try:
            jax.eval_shape(function, *sharded)
        except jax_cudnn.UnsupportedError:
            continue  # they contradict each other
        _assert_equal([jax.jit(f)(*sharded) for f in calls], want)
        checked += 1


def _along_operands(function: Function, *operands: jax.Array) -> jax.Array:
    return jax.jvp(function, operands, operands)[1]


def test_key_heads_that_do_not_divide_are_not_cut_with_their_query_heads() -> None:
    shapes = (2, 10, 16, 4), (2, 12, 4, 4), (2, 12, 4, 4)
    operands = [_draw(*shape) for shape in shapes]
    sharded = placed(mesh_of(x=8), operands, [(None, None, "x"), (), ()])
    for function in (_sdpa, gradient(_sdpa)):
        _assert_equal(jax.jit(function)(*sharded), function(*operands))


def test_uneven_parts_are_gathered() -> None:
    x, w = _draw(9, 6, 16), _draw(16, 24)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(x[:6], w)

    (padded,) = placed(mesh_of(x=3), [x], [("x",)])
    _assert_equal(jax.jit(run)(padded, w), run(x, w))


def test_sums_are_complete_before_they_are_rounded() -> None:
    # The devices' shares cancel: rounded to bf16 they would leave nothing but errors.
    x = jnp.concatenate([jnp.full((4, 8), 1.0), jnp.full((4, 8), -1.0)], axis=1)
    w = jnp.full((16, 8), 100.3)
    x, w = (each.astype(jnp.bfloat16) for each in (x.at[:, 0].set(1.03), w))
    sharded = placed(mesh_of(x=2), [x, w], [(None, "x"), ("x",)])
    _assert_equal(
        jax.jit(_contraction)(*sharded).astype(jnp.float32),
        (x.astype(jnp.float32) @ w.astype(jnp.float32))
        .astype(jnp.bfloat16)
        .astype(jnp.float32),
    )
    assert "all-reduce" in collectives(_contraction, *sharded)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_of_gradients_are_complete_before_they_are_rounded(kind: AxisType) -> None:
    # As above, and the devices have examples.
    x = jnp.concatenate([jnp.full((4, 8), 1.0), jnp.full((4, 8), -1.0)])
    x, w = (each.astype(jnp.bfloat16) for each in (x.at[0].set(1.03), jnp.ones((8, 6))))
    cotangent = jnp.full((8, 6), 100.3, jnp.bfloat16)
    sharded = placed(mesh_of(kind, x=2), [x, w, cotangent], [("x",), (), ("x",)])

    def run(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(lambda w: _contraction(x, w), w)[1](cotangent)[0]

    want = (x.astype(jnp.float32).T @ cotangent.astype(jnp.float32)).astype(x.dtype)
    got = jax.jit(run)(*sharded)
    _assert_equal(got.astype(jnp.float32), want.astype(jnp.float32))


# Sums that are large enough, and what is sent in the result and the gradient.
_SCATTERED = [
    # in 32 bits, with an epilogue: it runs on the part that a device has
    _Case(
        _matmul,
        ((None, None, "y"), ("y",), _NONE),
        "all-gather reduce-scatter",
        "all-gather reduce-scatter",
    ),
    # in 16 bits: exchanged, and added up by the device that keeps the sum
    _Case(_conv, (_NONE, (None, None, None, "x"), ("x",)), "", "all-gather all-to-all"),
    _Case(_conv, (_NONE, (None, None, None, "y"), ("y",)), "", "all-reduce"),
    # with nothing that follows
    _Case(
        _contraction,
        (("x", None, "y"), ("y",)),
        "all-gather reduce-scatter",
        "all-gather reduce-scatter",
    ),
]


def _on(function: Function) -> Callable[..., Any]:
    """Return a function that nothing has been compiled for."""
    return lambda *operands: function(*operands)


@pytest.mark.parametrize("case", _SCATTERED, ids=_label)
def test_sums_are_scattered_where_that_sends_less(
    case: _Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table, "scattered", Scattered(least=1, most_alone=1 << 26))
    operands = [x.astype(jnp.bfloat16) for x in _OPERANDS[case.function]]
    sharded = placed(mesh_of(x=4, y=2), operands, case.specs)
    for function, sent in (
        (case.function, case.forward),
        (gradient(case.function), case.backward),
    ):
        _assert_close(jax.jit(_on(function))(*sharded), function(*operands))
        assert " ".join(collectives(_on(function), *sharded)) == sent


@pytest.mark.once
@pytest.mark.parametrize(
    "function",
    [_matmul, _contraction, _transposed, _conv],
    ids=lambda f: f.__name__[1:],
)
def test_random_shardings_of_operands_and_results_give_the_same_sums(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table, "scattered", Scattered(least=1, most_alone=1 << 26))
    operands = [x.astype(jnp.bfloat16) for x in _OPERANDS[function]]
    want = jax.jit(_on(gradient(function)))(*operands)
    rng = np.random.default_rng(len(function.__name__))
    for _ in range(3):
        sizes = _MESHES[int(rng.integers(len(_MESHES)))]
        mesh = mesh_of(**sizes)
        specs = [_draw_spec(rng, sizes, x.shape) for x in operands]
        results = [_draw_spec(rng, sizes, x.shape) for x in want]
        print(sizes, specs, results)
        places = tuple(NamedSharding(mesh, P(*spec)) for spec in results)
        run = jax.jit(_on(gradient(function)), out_shardings=places)
        _assert_close(run(*placed(mesh, operands, specs)), want)


def _assert_close(got: Any, want: Any) -> None:
    """Check 16-bit results, which are rounded sums in another order."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        wide = [each.astype(jnp.float32) for each in (x, y)]
        scale = float(jnp.max(jnp.abs(wide[1])))
        np.testing.assert_allclose(*wide, rtol=2**-7, atol=2**-8 * scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_sum_is_scattered_where_the_program_wants_it(dtype: Any) -> None:
    # Weights that are split as the tokens are: each device keeps its part's gradient.
    mesh = mesh_of(x=8)
    x, w = (each.astype(dtype) for each in _OPERANDS[_contraction])
    x, w = placed(mesh, [x, w], [("x",), (None, "x")])
    place = NamedSharding(mesh, P(None, "x"))

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        product, pullback = jax.vjp(lambda w: jax_cudnn.matmul(x, w), whole)
        return jax.lax.with_sharding_constraint(pullback(product)[0], place)

    assert collectives(run, x, w) == {"all-gather": 1, "reduce-scatter": 1}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("tokens", "weights"), [(("x", "y"), "x"), (("x", "y"), "y"), ((("x", "y"),), "y")]
)
def test_parts_of_a_sum_lie_where_weights_that_are_split_less_take_them(
    tokens: Spec, weights: str, dtype: Any
) -> None:
    # Sums of tokens on all devices, and weights along one axis of the mesh: what
    # devices along the other one have is gathered, and nothing else.
    sizes = {"x": 2, "y": 4}
    mesh = mesh_of(**sizes)
    given = [_draw(8, 8, 16).astype(dtype), _draw(16, 24).astype(dtype)]
    sharded = placed(mesh, given, [tokens, (weights,)])
    place = NamedSharding(mesh, P(weights))

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        product, pullback = jax.vjp(lambda w: jax_cudnn.matmul(x, w), whole)
        return jax.lax.with_sharding_constraint(pullback(product)[0], place)

    product, pullback = jax.vjp(lambda w: jax_cudnn.matmul(given[0], w), given[1])
    _assert_close(jax.jit(run)(*sharded), pullback(product)[0])
    text = jax.jit(run).lower(*sharded).compile().as_text()
    assert text is not None
    found = {(x.kind, x.dtype): x.received for x in traffic(text)}
    # XLA's CPU holds bf16 in f32. The weights are gathered, and parts of the gradient.
    size, count = 4 * 16 * 24, sizes[weights]
    assert found == {
        ("all-gather", "f32"): size * (count - 1) / count + size * (1 / count - 1 / 8),
        ("reduce-scatter", "f32"): size * 7 / 8,
    }


# --- transformations ------------------------------------------------------------------


def _check(
    function: Callable[..., Any], specs: list[Spec], *operands: jax.Array
) -> Any:
    sharded = placed(mesh_of(x=4, y=2), operands, specs)
    _assert_equal(jax.jit(function)(*sharded), function(*operands))
    return sharded


def test_examples_of_a_vmap_are_not_gathered_with_the_batch() -> None:
    q, k = _draw(3, 8, 10, 4, 4), _draw(3, 8, 12, 4, 4)

    def run(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.vmap(jax_cudnn.sdpa)(q, k, k)

    sharded = _check(run, [(None, "x"), (None, "x")], q, k)
    assert collectives(run, *sharded) == {}
    assert collectives(gradient(run), *sharded) == {}


@pytest.mark.parametrize("spmd_axis_name", [None, "x"])
def test_examples_of_a_vmap_may_be_sharded(spmd_axis_name: str | None) -> None:
    x, w = _draw(8, 6, 16), _draw(16, 24)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.vmap(
            jax_cudnn.matmul, in_axes=(0, None), spmd_axis_name=spmd_axis_name
        )(x, w)

    sharded = _check(run, [("x", "y"), ()], x, w)
    assert collectives(run, *sharded) == {}


def test_a_scan_with_remat_stays_sharded() -> None:
    x, w = _draw(8, 6, 16), _draw(3, 16, 16) / 4

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            q = jax_cudnn.matmul(x, w).reshape(8, 6, 4, 4)
            return x + jax_cudnn.sdpa(q, q, q, is_causal=True).reshape(8, 6, 16), None

        return jax.lax.scan(layer, x, w)[0]

    sharded = _check(run, [("x",), ()], x, w)
    assert collectives(run, *sharded) == {}
    _assert_equal(jax.jit(gradient(run))(*sharded), gradient(run)(x, w))
    assert [*collectives(gradient(run), *sharded)] == ["all-reduce"]


def test_forward_mode_gives_the_same() -> None:
    def run(*operands: jax.Array) -> Any:
        return jax.jvp(_matmul, operands, operands)

    _check(run, [("x",), (None, "y"), ("y",)], *_OPERANDS[_matmul])


def test_donated_operands_are_used_again() -> None:
    (x,) = placed(mesh_of(x=4, y=2), [_draw(8, 6, 16)], [("x",)])
    w = _draw(16, 16)
    want = jax_cudnn.matmul(x, w)
    _assert_equal(jax.jit(jax_cudnn.matmul, donate_argnums=0)(x, w), want)
    assert x.is_deleted()


def test_some_axes_of_the_mesh_may_be_manual() -> None:
    mesh = mesh_of(x=4, y=2)
    operands = _OPERANDS[_matmul]
    sharded = placed(mesh, operands, [("x",), (None, "y"), ("y",)])
    run = jax.shard_map(
        _matmul,
        mesh=mesh,
        in_specs=(P("x"), P(), P()),
        out_specs=P("x"),
        axis_names={"x"},
    )
    for ours, plain in ((run, _matmul), (gradient(run), gradient(_matmul))):
        _assert_equal(jax.jit(ours)(*sharded), plain(*operands))
    assert collectives(run, *sharded) == {}


def test_examples_that_are_sharded_in_their_types_have_gradients() -> None:
    # The gradient graph of one example has a kernel for each product.
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    x, w, scale = _draw(4, 6, 8), _draw(8, 10), _draw(4, 10)

    def run(x: Any, w: Any, scale: Any) -> jax.Array:
        return jax_cudnn.matmul(x, w, activation="silu", scale_out=scale)

    for axes, operands, specs in (
        ((0, None, 0), (x, w, scale), [("x",), ("y",), ("x",)]),
        # The product that the gradient reads is the same for all examples.
        ((None, None, 0), (x[0], w, scale), [(), (), ("x",)]),
    ):
        sharded = placed(mesh, operands, specs)
        for function in (
            jax.vmap(gradient(run), in_axes=axes),
            gradient(jax.vmap(run, in_axes=axes)),
        ):
            _assert_equal(jax.jit(function)(*sharded), function(*operands))


# --- other partitioners, processes and caches -----------------------------------------


def test_the_older_partitioner_gives_the_same_and_gathers_no_batch() -> None:
    function, operands = _sdpa, _OPERANDS[_sdpa]
    sharded = placed(mesh_of(x=4, y=2), operands, [("x", None, "y")] * 3)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for each in (function, gradient(function)):
                _assert_equal(jax.jit(each)(*sharded), each(*operands))
                assert collectives(each, *sharded) == {}
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def _start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def _printed(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def test_an_exported_program_is_divided_in_the_process_that_loads_it(
    tmp_path: Path,
) -> None:
    operands = _OPERANDS[_matmul]
    sharded = placed(mesh_of(x=4, y=2), operands, [("x",), (None, "y"), ("y",)])
    exported = jax.export.export(
        jax.jit(_matmul), disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS
    )(*sharded)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "operands", *operands)
    # It traces no call of its own before.
    program = """
        import sys
        import jax, numpy as np
        jax.config.update("jax_num_cpu_devices", 8)
        import jax_cudnn
        folder = sys.argv[1]
        with open(f"{folder}/program", "rb") as file:
            loaded = jax.export.deserialize(bytearray(file.read()))
        devices = np.array(jax.devices()).reshape(4, 2)
        mesh = jax.sharding.Mesh(devices, ("x", "y"))
        arrays = np.load(f"{folder}/operands.npz").values()
        operands = [
            jax.device_put(x, s)
            for x, s in zip(arrays, loaded.in_shardings_jax(mesh), strict=True)
        ]
        np.save(f"{folder}/result", jax.jit(loaded.call)(*operands))
    """
    _printed(_start(program, str(tmp_path)))
    _assert_equal(np.load(tmp_path / "result.npy"), _matmul(*operands))


@pytest.mark.once
def test_xlas_cache_knows_programs_by_all_that_they_compute(tmp_path: Path) -> None:
    program = """
        import sys
        import jax, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        jax.config.update("jax_num_cpu_devices", 8)
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        import jax_cudnn
        from jax import monitoring
        hits = []
        monitoring.register_event_listener(
            lambda name, **_: hits.append(name) if "cache_hits" in name else None
        )
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        x = np.linspace(-2, 2, 8 * 3 * 16, dtype=np.float32).reshape(8, 3, 16)
        w = np.eye(16, dtype=np.float32)
        sharded = jax.device_put(x, NamedSharding(mesh, P("x")))
        for activation in ("relu", "silu"):
            hits.clear()
            run = lambda x: jax_cudnn.matmul(x, w, activation=activation)
            result = jax.jit(run)(sharded)
            print(activation, len(hits))
            want = getattr(jax.nn, activation)(x)
            np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-5)
    """
    printed = [_printed(_start(program, str(tmp_path))).split() for _ in range(2)]
    assert printed == [["relu", "0", "silu", "0"], ["relu", "1", "silu", "1"]]


@pytest.mark.once
def test_processes_divide_a_program_alike() -> None:
    program = """
        import sys
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        jax.config.update("jax_num_cpu_devices", 4)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
        import jax_cudnn
        devices = np.array(jax.devices()).reshape(4, 2)
        mesh = jax.sharding.Mesh(devices, ("x", "y"))
        numbers = np.random.default_rng(0)
        draw = lambda *shape: numbers.standard_normal(shape).astype(np.float32)

        def check(function, operands, specs):
            sharded = [
                jax.make_array_from_callback(
                    x.shape, NamedSharding(mesh, P(*spec)), x.__getitem__
                )
                for x, spec in zip(operands, specs, strict=True)
            ]
            with jax.default_device(jax.local_devices()[0]):
                want = jax.jit(function)(*operands)
            got = jax.jit(function)(*sharded)
            for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                for shard in x.addressable_shards:
                    np.testing.assert_allclose(
                        shard.data, np.asarray(y)[shard.index], rtol=2e-5, atol=2e-5
                    )

        def loss(q, k, v):
            return jnp.sum(jnp.sin(jax_cudnn.sdpa(q, k, v, is_causal=True)))

        attention = draw(8, 6, 4, 8), draw(8, 10, 2, 8), draw(8, 10, 2, 6)
        check(jax.grad(loss, (0, 1, 2)), attention, [("x", None, "y")] * 3)
        product = draw(6, 16), draw(16, 12)
        run = lambda x, w: jax_cudnn.matmul(x, w, activation="gelu")
        check(run, product, [(None, ("y", "x")), (("y", "x"),)])
        print(len(jax.devices()))
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [_start(program, port, str(i)) for i in range(2)]
    ends = [_printed(process).split()[-1] for process in processes]
    assert ends == ["8", "8"]


def test_a_constraint_within_the_program_is_enough() -> None:
    mesh = mesh_of(x=4, y=2)
    x, w, bias = _OPERANDS[_matmul]

    def run(x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("x")))
        return _matmul(x, w, bias)

    result = jax.jit(run)(x)
    _assert_equal(result, _matmul(x, w, bias))
    assert result.sharding.spec == P("x")


# --- what runs ------------------------------------------------------------------------


def test_inspect_tells_the_calls_of_one_device() -> None:
    operands = _OPERANDS[_sdpa]
    sharded = placed(mesh_of(x=4, y=2), operands, [("x", None, "y")] * 3)
    for arguments, batch, heads in ((operands, 8, 16), (sharded, 2, 8)):
        for function in (_sdpa, jax.jit(_sdpa)):
            (call,) = plans.inspect(function, *arguments).calls
            assert call.shapes.startswith(f"f32[{batch},10,{heads},4]"), call.shapes
        ops = [call.op for call in plans.inspect(gradient(_sdpa), *arguments).calls]
        assert ops == ["sdpa", "sdpa_backward"]


def test_inspect_of_a_divided_contraction_tells_its_part() -> None:
    x, w = placed(
        mesh_of(x=4, y=2), _OPERANDS[_contraction], [("x", None, "y"), ("y",)]
    )
    (call,) = plans.inspect(jax.jit(_contraction).trace(x, w)).calls
    assert call.shapes == "f32[1,12,8], f32[1,8,24]"


def test_a_refusal_while_xla_divides_a_call_keeps_its_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(graph: Any, options: Any) -> Any:
        del graph, options
        raise jax_cudnn.UnsupportedError("no plan here:", ["too long", "too wide"])

    monkeypatch.setitem(partitioned._PROGRAMS, "cpu", refuse)
    (x,) = placed(mesh_of(x=4, y=2), [_draw(4, 16)], [("x",)])
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(lambda x: jax_cudnn.matmul(x, x.T))(x)
    for text in ("UnsupportedError: no plan here:", "too long", "too wide"):
        assert text in str(caught.value)


# --- norms ----------------------------------------------------------------------------


def _normed_rows(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.layer_norm(x, scale, bias, activation="silu")


def _normed_sums(x: Any, residual: Any, scale: Any) -> jax.Array:
    output, total = jax_cudnn.rms_norm(x, scale, residual=residual)
    return output * total


def _normed_groups(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.group_norm(x, scale, bias, groups=8)


def _normed_instances(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.instance_norm(x, scale, bias)


def _modulated(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.adaptive_layer_norm(x, scale, bias)


def _normed_channels(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.batch_norm(x, scale, bias)


_NORMS = {
    _normed_rows: ((8, 6, 16), (16,), (16,)),
    _normed_sums: ((8, 6, 16), (8, 6, 16), (16,)),
    _normed_groups: ((8, 6, 4, 16), (16,), (16,)),
    _normed_instances: ((8, 6, 4, 16), (16,), (16,)),
    _modulated: ((8, 6, 16), (8, 16), (8, 16)),
    _normed_channels: ((8, 6, 4, 16), (16,), (16,)),
}
_OPERANDS |= {f: [_draw(*shape) for shape in shapes] for f, shapes in _NORMS.items()}
_NORM_CASES = [
    # Rows are shared out; what they share has sums as gradients.
    _Case(_normed_rows, (("x",), _NONE, _NONE), "", "all-reduce"),
    _Case(_normed_rows, (("x", "y"), _NONE, _NONE), "", "all-reduce"),
    # Features are whole.
    _Case(
        _normed_rows,
        ((None, None, "x"), ("x",), ("x",)),
        "all-gather",
        "all-gather",
    ),
    _Case(_normed_sums, (("x", "y"), ("x", "y"), _NONE), "", "all-reduce"),
    _Case(_normed_sums, ((("x", "y"),), (("x", "y"),), _NONE), "", "all-reduce"),
    _Case(_normed_groups, (("x",), _NONE, _NONE), "", "all-reduce"),
    _Case(_normed_groups, (("x", None, None, "y"), ("y",), ("y",)), "", "all-reduce"),
    _Case(_normed_instances, (("x",), _NONE, _NONE), "", "all-reduce"),
    _Case(_modulated, (("x",), ("x",), ("x",))),
    _Case(_modulated, (("x", "y"), ("x",), ("x",)), "", "all-reduce"),
    # Channels are shared out, and statistics are summed over a sharded batch.
    _Case(_normed_channels, (("x",), _NONE, _NONE), "all-reduce", "all-reduce"),
    _Case(
        _normed_channels,
        (("x", None, None, "y"), ("y",), ("y",)),
        "all-reduce",
        "all-reduce",
    ),
    _Case(_normed_channels, ((None, None, None, "y"), ("y",), ("y",))),
]


@pytest.mark.parametrize("case", _NORM_CASES, ids=_label)
def test_norms_send_what_the_rule_implies(case: _Case) -> None:
    test_sharded_operands_give_the_same_and_send_what_the_rule_implies(case)


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_sum_with_a_residual_keeps_its_type(axis: int) -> None:
    """So that a scan may carry it."""
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    operands = [_draw(8, 6, 16), _draw((8, 6, 16)[axis])]
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


@pytest.mark.once
@pytest.mark.parametrize("sizes", [{"x": 1, "y": 1}, {"x": 1, "y": 2}], ids=str)
@pytest.mark.parametrize("case", _NORM_CASES, ids=_label)
def test_an_axis_of_one_device_is_in_types_of_norms_as_well(
    case: _Case, sizes: dict[str, int]
) -> None:
    test_an_axis_of_one_device_is_in_types_as_larger_ones_are(case, sizes)


@pytest.mark.parametrize("case", _NORM_CASES, ids=_label)
def test_norms_of_operands_whose_types_are_sharded(case: _Case) -> None:
    operands = _OPERANDS[case.function]
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    sharded = placed(mesh, operands, case.specs)
    for function in (case.function, gradient(case.function)):
        with jax.set_mesh(mesh):
            _assert_equal(jax.jit(function)(*sharded), function(*operands))
