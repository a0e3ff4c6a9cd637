# SPDX-License-Identifier: Apache-2.0
"""Products whose `out_sharding`, or reduced operands, say what their types are.

Beside JAX's own products of the same arrays: equal numbers, equal types of results and
gradients, and nothing sent that JAX leaves unsent.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_cudnn
from tests.common.devices import collectives, mesh_of

_Function = Callable[..., Any]
_NUMBERS = ("NHWC", "HWIO", "NHWC")
_ROWS = (((1,), (0,)), ((), ()))

pytestmark = pytest.mark.sampled


def _mesh() -> Mesh:
    return mesh_of(AxisType.Explicit, x=2, y=2)


def _draw(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[jax.Array]:
    rng = np.random.default_rng(5)
    return [jnp.asarray(np.asarray(rng.integers(-4, 5, s) / 4, dtype)) for s in shapes]


def _placed(arrays: Sequence[jax.Array], specs: Sequence[P]) -> list[jax.Array]:
    return [jax.device_put(x, spec) for x, spec in zip(arrays, specs, strict=True)]


def _whole(found: Any) -> list[np.ndarray]:
    """Return arrays with the shares of what is unreduced added up."""
    full = (jax.sharding.reshard(x, P()) for x in jax.tree.leaves(found))
    return [np.asarray(x) for x in full]


def _gradients(function: _Function, count: int) -> _Function:
    def loss(*operands: jax.Array) -> jax.Array:
        result = jax.sharding.reshard(function(*operands), P())
        return jnp.sum(jnp.sin(result))

    return jax.grad(loss, tuple(range(count)))


def _check(ours: _Function, plain: _Function, operands: Sequence[jax.Array]) -> None:
    """Compare numbers and types, also outside of jit."""
    found, want = jax.jit(ours)(*operands), jax.jit(plain)(*operands)
    for each in (found, ours(*operands)):
        assert jax.tree.map(jax.typeof, each) == jax.tree.map(jax.typeof, want)
        for x, y in zip(_whole(each), _whole(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def _same(multiply: _Function, **options: Any) -> _Function:
    return functools.partial(multiply, **options)


# --- how results are to be sharded ----------------------------------------------------

# Of (8, 4) and (4, 8): the same axis of the mesh twice, contractions on both, on one,
# on two that differ.
_OPERANDS = [
    (P("x"), P(None, "x")),
    (P("x", "y"), P("y", "x")),
    (P("x", "y"), P("y")),
    (P(None, "x"), P("y")),
    (P(("x", "y")), P(None, ("y", "x"))),
    (P("y", "x"), P("y", "x")),
]
_RESULTS = [P("x"), P(None, "x"), P("y", "x"), P(), P(("x", "y"))]


@pytest.mark.parametrize("specs", _OPERANDS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.complex64])
def test_out_sharding_decides_between_operands(dtype: Any, specs: Any) -> None:
    products = [
        (jax_cudnn.matmul, jnp.matmul),
        (
            lambda *a, **o: jax_cudnn.dot_general(*a, _ROWS, **o),
            lambda *a, **o: jax.lax.dot_general(*a, _ROWS, **o),
        ),
    ]
    with jax.set_mesh(_mesh()):
        operands = _placed(_draw((8, 4), (4, 8), dtype=dtype), specs)
        for i, result in enumerate(_RESULTS):
            ours, plain = (
                _same(multiply, out_sharding=result) for multiply in products[i % 2]
            )
            _check(ours, plain, operands)
            if dtype == np.float32:
                _check(_gradients(ours, 2), _gradients(plain, 2), operands)


def test_out_sharding_of_products_of_vectors() -> None:
    with jax.set_mesh(_mesh()):
        for dtype in (np.float32, np.int32):
            for shapes, specs, result in (
                ([(8, 4), (4,)], (P("x", "y"), P("y")), P("y")),
                ([(8,), (2, 8, 4)], (P("x"), P(None, "x")), P(None, "x")),
                ([(8,), (8,)], (P("x"), P("x")), P()),
            ):
                operands = _placed(_draw(*shapes, dtype=dtype), specs)
                ours, plain = (
                    _same(f, out_sharding=result)
                    for f in (jax_cudnn.matmul, jnp.matmul)
                )
                _check(ours, plain, operands)


def test_out_sharding_decides_for_epilogues_and_examples() -> None:
    def ours(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(a, b, bias=bias, activation="tanh", out_sharding=P("x"))

    def plain(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.matmul(a, b, out_sharding=P("x")) + bias[None])

    with jax.set_mesh(_mesh()):
        arrays = _draw((8, 4), (4, 8), (8,))
        operands = _placed(arrays, (P("x"), P(None, "x"), P()))
        _check(ours, plain, operands)
        _check(_gradients(ours, 3), _gradients(plain, 3), operands)
        stacked = [jnp.stack([x, 2 * x]) for x in arrays]
        specs = (P("y", "x"), P("y", None, "x"), P("y"))
        _check(jax.vmap(ours), jax.vmap(plain), _placed(stacked, specs))


def test_out_sharding_decides_for_convolutions() -> None:
    def layer(conv: _Function) -> _Function:
        return functools.partial(
            conv,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=_NUMBERS,
            out_sharding=P("x", None, None, "y"),
        )

    ours, plain = layer(jax_cudnn.conv), layer(jax.lax.conv_general_dilated)
    with jax.set_mesh(_mesh()):
        for dtype in (np.float32, np.int32):
            arrays = _draw((4, 4, 4, 2), (3, 3, 2, 4), dtype=dtype)
            specs = (P("x", None, None, "y"), P(None, None, "y", "x"))
            _check(ours, plain, _placed(arrays, specs))


# --- reduced operands and unreduced results -------------------------------------------

_GATED = (jax_cudnn.gated_matmul, lambda x, g, u: jax.nn.silu(x @ g) * (x @ u))
_REDUCED: dict[str, tuple[_Function, _Function, int]] = {
    "matmul": (jax_cudnn.matmul, jnp.matmul, 1),
    "matmul and gelu": (
        functools.partial(jax_cudnn.matmul, activation="gelu"),
        lambda x, w: jax.nn.gelu(x @ w),
        1,
    ),
    "dot_general": (
        lambda x, w: jax_cudnn.dot_general(x, w, (((2,), (0,)), ((), ()))),
        jnp.matmul,
        1,
    ),
    "gated_matmul": (*_GATED, 2),
    "fuse": (
        jax_cudnn.fuse(lambda x, w: jnp.tanh(x @ w)),
        lambda x, w: jnp.tanh(x @ w),
        1,
    ),
}


@pytest.mark.parametrize("columns", [None, "y"])
@pytest.mark.parametrize("name", _REDUCED)
def test_gradients_of_reduced_weights_stay_unreduced(
    name: str, columns: str | None
) -> None:
    ours, plain, count = _REDUCED[name]
    with jax.set_mesh(_mesh()):
        arrays = _draw((4, 8, 16), *[(16, 8)] * count)
        spec = P(None, columns, reduced=frozenset("x"))
        operands = _placed(arrays, (P("x"), *[spec] * count))
        _check(ours, plain, operands)
        pair = [_gradients(f, 1 + count) for f in (ours, plain)]
        _check(*pair, operands)
        # That of x is summed over the columns.
        sent = collectives(jax.grad(lambda *a: jnp.sum(ours(*a)), 1), *operands)
        assert "all-reduce" not in sent


def test_results_may_stay_unreduced() -> None:
    options: dict[str, Any] = {"out_sharding": P(None, None, unreduced=frozenset("y"))}
    with jax.set_mesh(_mesh()):
        operands = _placed(_draw((8, 4), (4, 8)), (P(None, "y"), P("y")))
        for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
            given = [x.astype(dtype) for x in operands]
            ours, plain = (_same(f, **options) for f in (jax_cudnn.matmul, jnp.matmul))
            _check(ours, plain, given)
            assert collectives(ours, *given) == {}
        pair = [_gradients(f, 2) for f in (ours, plain)]
        _check(*pair, operands)
        # What JAX refuses to compute of shares, it refuses here.
        for more in ({"bias": jnp.ones(8)}, {"scale_out": 2.0}):
            with pytest.raises(Exception, match=r"is unreduced|LHS is unreduced on"):
                ours(*operands, **more)
        with pytest.raises(jax_cudnn.UnsupportedError, match="unreduced along y of"):
            ours(*operands, implementation="cudnn")


def test_other_operations_refuse_reduced_operands() -> None:
    conv = functools.partial(jax_cudnn.conv, dimension_numbers=_NUMBERS, padding="SAME")
    calls: dict[str, tuple[_Function, list[tuple[int, ...]]]] = {
        "layer_norm: scale": (jax_cudnn.layer_norm, [(4, 16), (16,)]),
        "batch_norm: x": (lambda _, x: jax_cudnn.batch_norm(x), [(4,), (8, 16)]),
        "max_pool: x": (
            lambda _, x: jax_cudnn.max_pool(x, (2, 2)),
            [(4,), (4, 4, 4, 2)],
        ),
        "sdpa: key": (
            lambda q, k: jax_cudnn.sdpa(q, k, k),
            [(4, 8, 2, 8), (4, 8, 2, 8)],
        ),
        "conv: w": (conv, [(4, 4, 4, 2), (3, 3, 2, 4)]),
        "matmul: bias": (
            lambda x, bias: jax_cudnn.matmul(x, jnp.ones((16, 8)), bias=bias),
            [(4, 16), (8,)],
        ),
    }
    with jax.set_mesh(_mesh()):
        for start, (function, shapes) in calls.items():
            first, second = _draw(*shapes)
            operands = _placed([first, second], (P("x"), P(reduced=frozenset("x"))))
            text = rf"{start} is float32.*reduced or unreduced along x of the mesh\. "
            for each in (function, jax.jit(function)):
                with pytest.raises(jax_cudnn.UnsupportedError, match=text) as caught:
                    each(*operands)
                assert "jax.sharding.reshard" in str(caught.value)
