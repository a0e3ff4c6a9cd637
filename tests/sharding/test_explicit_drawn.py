# SPDX-License-Identifier: Apache-2.0
"""Operations of operands sharded at random on explicit meshes, beside plain JAX.

Whatever JAX's own formula takes, ours takes: with the same numbers, and with results
that are sharded at least as the formula's are along the axes of the first operand.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
from jax_cudnn import UnsupportedError, parallel
from tests.common.devices import mesh_of, placed

pytestmark = [pytest.mark.sampled]

_NUMBERS = ("NHWC", "HWIO", "NHWC")
_Function = Callable[..., Any]
_Shapes = list[tuple[int, ...]]
_E, _A = AxisType.Explicit, AxisType.Auto
_MESHES: list[tuple[dict[str, int], tuple[AxisType, ...]]] = [
    ({"x": 4}, (_E,)),
    ({"x": 2, "y": 2}, (_E, _E)),
    ({"x": 2, "y": 2}, (_E, _A)),
    ({"x": 2, "y": 2, "z": 2}, (_E, _E, _E)),
]


def _along(value: jax.Array, rank: int) -> jax.Array:
    return jnp.reshape(value, (1,) * (rank - value.ndim) + value.shape)


def _normed(x: jax.Array, axis: Any) -> jax.Array:
    x = x - jnp.mean(x, axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 1e-6)


def _batch_normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return _normed(x, (0, 1, 2)) * _along(scale, 4)


def _pooled(x: jax.Array, initial: float, combine: Any) -> jax.Array:
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, initial, combine, window, window, "VALID")


def _conv(function: _Function) -> _Function:
    return functools.partial(
        function, window_strides=(1, 1), padding="SAME", dimension_numbers=_NUMBERS
    )


def _largest(x: jax.Array) -> jax.Array:
    return jax_cudnn.max_pool(x, (2, 2), (2, 2), return_indices=True)[0]


def _gated(x: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(x) * x


_attention = functools.partial(jax.nn.dot_product_attention, implementation="xla")
_X, _IMAGE, _Q = (4, 8, 16), (4, 8, 8, 4), (4, 8, 4, 8)
_OPS: dict[str, tuple[_Function, _Function, _Shapes]] = {
    "matmul": (jax_cudnn.matmul, jnp.matmul, [_X, (16, 8)]),
    "matmul with all": (
        lambda x, w, b, r: jax_cudnn.matmul(
            x, w, bias=b, residual=r, activation="gelu"
        ),
        lambda x, w, b, r: jax.nn.gelu(x @ w + _along(b, 3) + r),
        [_X, (16, 8), (8,), (4, 8, 8)],
    ),
    "batched matmul": (jax_cudnn.matmul, jnp.matmul, [_X, (4, 16, 8)]),
    "gated_matmul": (
        jax_cudnn.gated_matmul,
        lambda x, g, u: jax.nn.silu(x @ g) * (x @ u),
        [_X, (16, 8), (16, 8)],
    ),
    "conv": (
        _conv(jax_cudnn.conv),
        _conv(jax.lax.conv_general_dilated),
        [_IMAGE, (3, 3, 4, 8)],
    ),
    "gated_conv": (
        lambda x, w: _conv(functools.partial(jax_cudnn.gated_conv, up=w))(x, gate=w),
        lambda x, w: _gated(_conv(jax.lax.conv_general_dilated)(x, w)),
        [_IMAGE, (3, 3, 4, 8)],
    ),
    "layer_norm": (
        jax_cudnn.layer_norm,
        lambda x, s: _normed(x, -1) * _along(s, 3),
        [_X, (16,)],
    ),
    "layer_norm of two": (
        lambda x, r: jax_cudnn.layer_norm(x, residual=r),
        lambda x, r: (_normed(x + r, -1), x + r),
        [_X, _X],
    ),
    "instance_norm": (
        jax_cudnn.instance_norm,
        lambda x: _normed(x, (1, 2)),
        [_IMAGE],
    ),
    "batch_norm": (
        functools.partial(jax_cudnn.batch_norm, epsilon=1e-6),
        _batch_normed,
        [_IMAGE, (4,)],
    ),
    "max_pool": (
        lambda x: jax_cudnn.max_pool(x, (2, 2), (2, 2)),
        lambda x: _pooled(x, -jnp.inf, jax.lax.max),
        [_IMAGE],
    ),
    "max_pool with indices": (
        _largest,
        lambda x: _pooled(x, -jnp.inf, jax.lax.max),
        [_IMAGE],
    ),
    "avg_pool": (
        lambda x: jax_cudnn.avg_pool(x, (2, 2), (2, 2)),
        lambda x: _pooled(x, 0.0, jax.lax.add) / 4,
        [_IMAGE],
    ),
    "sdpa": (jax_cudnn.sdpa, _attention, [_Q, _Q, _Q]),
    "causal sdpa": (
        functools.partial(jax_cudnn.sdpa, is_causal=True),
        functools.partial(_attention, is_causal=True),
        [_Q, (4, 8, 2, 8), (4, 8, 2, 8)],
    ),
}
_WAYS = ("call", "gradient", "remat", "tangents", "examples", "scan", "manual")


def _mesh(rng: np.random.Generator) -> Mesh:
    sizes, kinds = _MESHES[int(rng.integers(len(_MESHES)))]
    devices = mesh_of(_A, **sizes).devices
    return Mesh(devices, tuple(sizes), axis_types=kinds)


def _spec(rng: np.random.Generator, mesh: Mesh, shape: tuple[int, ...]) -> list[Any]:
    """Draw which axis of an array each explicit axis of the mesh divides, if any."""
    spec: list[Any] = [None] * len(shape)
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        axis = int(rng.integers(len(shape)))
        fits = spec[axis] is None and shape[axis] % mesh.shape[name] == 0
        if kind == _E and fits and rng.random() < 0.6:
            spec[axis] = name
    return spec


def _loss(function: _Function) -> _Function:
    return lambda *a: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*a)))


def _in_a_way(way: str, function: _Function, count: int) -> _Function:
    numbers = tuple(range(count))
    if way == "gradient":
        return jax.grad(_loss(function), numbers)
    if way == "remat":
        return jax.grad(_loss(jax.checkpoint(function)), numbers)
    if way == "tangents":
        return lambda *a: jax.jvp(function, a, tuple(map(jnp.cos, a)))
    if way == "examples":
        return jax.vmap(jax.grad(_loss(function)), (0, *[None] * (count - 1)))
    if way == "scan":
        return lambda x, *rest: jax.lax.scan(
            lambda _, each: (None, function(each, *rest)), None, x
        )[1]
    return function


def _manual(function: _Function, mesh: Mesh, shapes: _Shapes) -> _Function:
    """Return gradients of a function that shares out the batch along "x" by hand."""
    specs = tuple(P("x") if _has_batch(shape) else P() for shape in shapes)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=P("x"), axis_names={"x"}
    )
    return jax.grad(_loss(mapped), tuple(range(len(shapes))))


def _has_batch(shape: tuple[int, ...]) -> bool:
    return shape[0] == 4 and len(shape) > 2


def _outcome(function: _Function, operands: Any) -> Any:
    try:
        return jax.jit(function)(*operands)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return error
    except Exception as error:  # JAX has errors of its own about shardings
        if type(error).__name__ == "ShardingTypeError":
            return error
        raise


@pytest.mark.parametrize("draw", range(3))
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("name", _OPS)
def test_what_plain_jax_takes_is_taken(name: str, way: str, draw: int) -> None:
    ours, plain, shapes = _OPS[name]
    rng = np.random.default_rng(zlib.crc32(f"{name} {way} {draw}".encode()))
    if way in ("examples", "scan"):
        shapes = [(4, *shapes[0]), *shapes[1:]]
    mesh = _mesh(rng)
    specs = [_spec(rng, mesh, shape) for shape in shapes]
    if way == "manual":
        for spec, shape in zip(specs, shapes, strict=True):
            own = "x" if _has_batch(shape) else None
            spec[:] = [None if entry == "x" else entry for entry in spec]
            spec[0] = own or spec[0]
        pair = [_manual(f, mesh, shapes) for f in (ours, plain)]
    else:
        if way == "scan":
            specs[0][0] = None
        pair = [_in_a_way(way, f, len(shapes)) for f in (ours, plain)]
    arrays = [
        jnp.asarray(np.asarray(rng.standard_normal(shape), jnp.float32))
        for shape in shapes
    ]
    with jax.set_mesh(mesh):
        operands = placed(mesh, arrays, [tuple(spec) for spec in specs])
        found, want = (_outcome(f, operands) for f in pair)
        # Of results in a program. Once computed, XLA has chosen more on some meshes.
        types = None
        if not isinstance(found, Exception):
            types = jax.make_jaxpr(pair[0])(*operands).out_avals
    is_refused = isinstance(want, Exception)
    if isinstance(found, Exception):
        # JAX 0.10.0 takes batches that are sharded otherwise, and later ones do not.
        is_early = name == "batched matmul" and isinstance(found, UnsupportedError)
        assert is_refused or is_early, (specs, found)
        return
    if is_refused:
        if way == "manual":
            return
        want = jax.jit(pair[0])(*arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-4)
    if is_refused or way not in ("gradient", "remat", "manual"):
        return
    # A gradient is of its operand's type.
    for x, spec in zip(types or (), specs, strict=True):
        assert x.sharding.spec == P(*spec)


@pytest.mark.parametrize("name", _OPS)
def test_results_stay_sharded_as_their_first_operand(name: str) -> None:
    """Along each axis that both have, so that a loop may carry it."""
    ours, _, shapes = _OPS[name]
    mesh = mesh_of(_E, x=2, y=2)
    rank = len(shapes[0])
    # What is contracted is not the operand's axis any more.
    kept = rank - any(word in name for word in ("matmul", "conv", "sdpa"))
    arrays = [jnp.ones(shape, jnp.float32) for shape in shapes]
    for axis in range(kept):
        spec = tuple("x" if i == axis else None for i in range(rank))
        specs = [spec, *[()] * (len(shapes) - 1)]
        operands = placed(mesh, arrays, specs)
        result = jax.tree.leaves(jax.jit(ours)(*operands))[0]
        assert jax.typeof(result).sharding.spec[axis] == "x", spec


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("kinds", [(_E, _E), (_E, _A), (_A, _E)])
def test_sequences_on_meshes_of_both_kinds(
    method: Any, kinds: tuple[AxisType, AxisType]
) -> None:
    """Operands may be sharded otherwise than the call asks for, along explicit axes."""
    mesh = Mesh(mesh_of(s=2, b=2).devices, ("s", "b"), axis_types=kinds)
    rng = np.random.default_rng(7)
    shapes = [(4, 8, 4, 8), (4, 8, 2, 8), (4, 8, 2, 8)]
    arrays = [
        jnp.asarray(np.asarray(rng.standard_normal(shape), jnp.float32))
        for shape in shapes
    ]
    is_typed = dict(zip(mesh.axis_names, kinds, strict=True))

    def typed(*entries: Any) -> P:
        return P(*(x if x and is_typed[x] == _E else None for x in entries))

    specs = [typed("b", "s"), typed("s", "b"), typed(None, "b", "s")]

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return parallel.sharded_sdpa(
            q, k, v, axis="s", batch_axis="b", method=method, is_causal=True
        )

    plain = functools.partial(jax_cudnn.sdpa, is_causal=True)
    with jax.set_mesh(mesh):
        operands = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]
        found = jax.jit(jax.value_and_grad(_loss(ours), (0, 1, 2)))(*operands)
    want = jax.value_and_grad(_loss(plain), (0, 1, 2))(*arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    for x, operand in zip(found[1], operands, strict=True):
        assert jax.typeof(x).sharding == jax.typeof(operand).sharding


def test_running_statistics_of_positions_on_several_devices() -> None:
    rng = np.random.default_rng(8)
    x = jnp.asarray(np.asarray(rng.standard_normal((4, 4, 8, 8)), jnp.float32))
    mean, var = jnp.zeros(8), jnp.ones(8)
    (sharded,) = placed(mesh_of(_E, x=2, y=2), [x], [(None, "y", "x")])
    found = jax.jit(lambda x: jax_cudnn.batch_norm(x, None, None, mean, var))(sharded)
    want = jax_cudnn.batch_norm(x, None, None, mean, var)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
