# SPDX-License-Identifier: Apache-2.0
"""Tests of sums over several devices: when they are rounded, and which are scattered.

Everything runs on eight devices of the CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
from benchmarks.xla.traffic import traffic
from jax_cudnn.policy.tables import Scattered, Table
from tests.common.devices import Function, Spec, collectives, gradient, mesh_of, placed
from tests.sharding.cases import (
    MESHES,
    OPERANDS,
    Case,
    assert_close,
    assert_equal,
    contraction,
    conv,
    draw,
    draw_spec,
    label,
    matmul,
    transposed,
)

pytestmark = pytest.mark.sampled


def test_sums_are_complete_before_they_are_rounded() -> None:
    # The devices' shares cancel: rounded to bf16 they would leave nothing but errors.
    x = jnp.concatenate([jnp.full((4, 8), 1.0), jnp.full((4, 8), -1.0)], axis=1)
    w = jnp.full((16, 8), 100.3)
    x, w = (each.astype(jnp.bfloat16) for each in (x.at[:, 0].set(1.03), w))
    sharded = placed(mesh_of(x=2), [x, w], [(None, "x"), ("x",)])
    assert_equal(
        jax.jit(contraction)(*sharded).astype(jnp.float32),
        (x.astype(jnp.float32) @ w.astype(jnp.float32))
        .astype(jnp.bfloat16)
        .astype(jnp.float32),
    )
    assert "all-reduce" in collectives(contraction, *sharded)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_of_gradients_are_complete_before_they_are_rounded(kind: AxisType) -> None:
    # As above, and the devices have examples.
    x = jnp.concatenate([jnp.full((4, 8), 1.0), jnp.full((4, 8), -1.0)])
    x, w = (each.astype(jnp.bfloat16) for each in (x.at[0].set(1.03), jnp.ones((8, 6))))
    cotangent = jnp.full((8, 6), 100.3, jnp.bfloat16)
    sharded = placed(mesh_of(kind, x=2), [x, w, cotangent], [("x",), (), ("x",)])

    def run(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(lambda w: contraction(x, w), w)[1](cotangent)[0]

    want = (x.astype(jnp.float32).T @ cotangent.astype(jnp.float32)).astype(x.dtype)
    got = jax.jit(run)(*sharded)
    assert_equal(got.astype(jnp.float32), want.astype(jnp.float32))


# Sums that are large enough, and what is sent in the result and the gradient.
_SCATTERED = [
    # in 32 bits, with an epilogue: it runs on the part that a device has. The gradient
    # has two results of 16 bits, and gathering them would send as much as the sum
    Case(
        matmul,
        ((None, None, "y"), ("y",), ()),
        "all-gather reduce-scatter",
        "all-reduce",
    ),
    # in 16 bits: exchanged, and added up by the device that keeps the sum
    Case(conv, ((), (None, None, None, "x"), ("x",)), "", "all-gather all-to-all"),
    Case(conv, ((), (None, None, None, "y"), ("y",)), "", "all-reduce"),
    # with nothing that follows
    Case(
        contraction,
        (("x", None, "y"), ("y",)),
        "all-gather reduce-scatter",
        "all-gather reduce-scatter",
    ),
]


def _on(function: Function) -> Callable[..., Any]:
    """Return a function that nothing has been compiled for."""
    return lambda *operands: function(*operands)


@pytest.mark.parametrize("case", _SCATTERED, ids=label)
def test_sums_are_scattered_where_that_sends_less(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table, "scattered", Scattered(least=1, most_alone=1 << 26))
    operands = [x.astype(jnp.bfloat16) for x in OPERANDS[case.function]]
    sharded = placed(mesh_of(x=4, y=2), operands, case.specs)
    for function, sent in (
        (case.function, case.forward),
        (gradient(case.function), case.backward),
    ):
        run = _on(function)
        assert_close(jax.jit(run)(*sharded), jax.jit(run)(*operands))
        assert " ".join(collectives(run, *sharded)) == sent


@pytest.mark.once
@pytest.mark.parametrize(
    "function",
    [matmul, contraction, transposed, conv],
    ids=lambda f: f.__name__[1:],
)
def test_random_shardings_of_operands_and_results_give_the_same_sums(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table, "scattered", Scattered(least=1, most_alone=1 << 26))
    operands = [x.astype(jnp.bfloat16) for x in OPERANDS[function]]
    want = jax.jit(_on(gradient(function)))(*operands)
    rng = np.random.default_rng(len(function.__name__))
    for _ in range(3):
        sizes = MESHES[int(rng.integers(len(MESHES)))]
        mesh = mesh_of(**sizes)
        specs = [draw_spec(rng, sizes, x.shape) for x in operands]
        results = [draw_spec(rng, sizes, x.shape) for x in want]
        print(sizes, specs, results)
        places = tuple(NamedSharding(mesh, P(*spec)) for spec in results)
        run = jax.jit(_on(gradient(function)), out_shardings=places)
        assert_close(run(*placed(mesh, operands, specs)), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_sum_is_scattered_where_the_program_wants_it(dtype: Any) -> None:
    # Weights that are split as the tokens are: each device keeps its part's gradient.
    mesh = mesh_of(x=8)
    x, w = (each.astype(dtype) for each in OPERANDS[contraction])
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
    given = [draw(8, 8, 16).astype(dtype), draw(16, 24).astype(dtype)]
    sharded = placed(mesh, given, [tokens, (weights,)])
    place = NamedSharding(mesh, P(weights))

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        product, pullback = jax.vjp(lambda w: jax_cudnn.matmul(x, w), whole)
        return jax.lax.with_sharding_constraint(pullback(product)[0], place)

    product, pullback = jax.vjp(lambda w: jax_cudnn.matmul(given[0], w), given[1])
    assert_close(jax.jit(run)(*sharded), pullback(product)[0])
    text = jax.jit(run).lower(*sharded).compile().as_text()
    assert text is not None
    found = {(x.kind, x.dtype): x.received for x in traffic(text)}
    # XLA's CPU holds bf16 in f32. The weights are gathered, and parts of the gradient.
    size, count = 4 * 16 * 24, sizes[weights]
    assert found == {
        ("all-gather", "f32"): size * (count - 1) / count + size * (1 / count - 1 / 8),
        ("reduce-scatter", "f32"): size * 7 / 8,
    }
