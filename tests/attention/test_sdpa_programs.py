# SPDX-License-Identifier: Apache-2.0
"""Tests attention in programs: loops, remat, jit, export and several devices.

Values are compared with an attention written in jax.numpy, or with the same program
without the loop, the file or the other devices.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.export import deserialize, export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_cudnn import EXPORT_SAFETY_CHECKS, sdpa
from tests.attention.shared.small import (
    SMALL,
    assert_close,
    attend,
    attention_loss,
    count_kinds,
    small_operands,
    textbook,
    value_and_gradients,
)
from tests.common.devices import mesh_of, placed
from tests.conftest import Draw

# --- control flow ---------------------------------------------------------------------


def _square(draw: Draw, dtype: Any = jnp.float64) -> list[jax.Array]:
    """Draw operands whose result can be the next query."""
    return small_operands(draw, dtype, s=5, e=SMALL["d"])


@pytest.mark.usefixtures("x64")
def test_scan_and_its_derivatives_match_the_unrolled_loop(draw: Draw) -> None:
    q, k, v, bias = _square(draw)
    biases = jnp.stack([bias, -bias, 2 * bias])

    def looped(q: jax.Array, k: jax.Array) -> Any:
        return lax.scan(lambda q, bias: attend(q, k, v, bias), q, biases)

    def unrolled(q: jax.Array, k: jax.Array) -> Any:
        stats = []
        for bias in biases:
            q, row = textbook(q, k, v, bias)
            stats.append(row)
        return q, jnp.stack(stats)

    def derivatives(function: Any) -> Any:
        def loss(q: jax.Array, k: jax.Array) -> jax.Array:
            return attention_loss(function, q, k)

        gradient = jax.grad(loss, argnums=(0, 1))
        value_and_tangent = jax.jvp(function, (q, k), (k.mean() * q, k))
        return value_and_tangent, gradient(q, k), jax.jvp(gradient, (q, k), (q, k))

    got, want = (
        jax.jit(functools.partial(derivatives, f))() for f in (looped, unrolled)
    )
    assert_close(got, want)


@pytest.mark.usefixtures("x64")
def test_loops_and_branches_run_forward(draw: Draw) -> None:
    q, k, v, bias = _square(draw)

    def once(q: jax.Array) -> jax.Array:
        return attend(q, k, v, bias)[0]

    want = once(once(once(q)))
    assert_close(lax.fori_loop(0, 3, lambda _, q: once(q), q), want)
    done = lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, once(state[1])), (0, q)
    )
    assert_close(done[1], want)
    branch = jax.jit(lambda flag, q: lax.cond(flag, once, jnp.negative, q))
    assert_close(branch(True, q), once(q))
    assert_close(branch(False, q), -q)


# --- rematerialisation ----------------------------------------------------------------

_SAVED = ("cudnn_sdpa_output", "cudnn_sdpa_stats")


@pytest.mark.parametrize(
    ("policy", "forward_count"),
    [
        (None, 2),
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.everything_saveable, 1),
        (jax.checkpoint_policies.save_only_these_names(*_SAVED), 1),
        (jax.checkpoint_policies.save_only_these_names("something_else"), 2),
    ],
    ids=["default", "nothing", "everything", "names", "other-names"],
)
def test_remat_reruns_the_forward_graph_unless_its_results_are_kept(
    policy: Any, forward_count: int, draw: Draw
) -> None:
    operands = small_operands(draw, jnp.float32)

    def block(*operands: jax.Array) -> jax.Array:
        q, k, v, bias = operands
        return jnp.sum(jnp.sin(sdpa(jnp.tanh(q), k, v, bias)))

    argnums = (0, 1, 2, 3)
    kept = jax.grad(jax.checkpoint(block, policy=policy), argnums=argnums)
    assert_close(kept(*operands), jax.grad(block, argnums=argnums)(*operands), 1e-5)
    kinds = count_kinds(kept, *operands)
    assert kinds == {"sdpa": forward_count, "sdpa_backward": 1}


def test_remat_inside_scan_keeps_named_results(draw: Draw) -> None:
    q, k, v, bias = _square(draw, jnp.float32)
    policy = jax.checkpoint_policies.save_only_these_names(*_SAVED)

    @functools.partial(jax.checkpoint, policy=policy)
    def body(q: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
        return sdpa(q, k, v, bias), None

    def loss(q: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(body, q, jnp.stack([bias] * 3))[0])

    assert count_kinds(jax.grad(loss), q) == {"sdpa": 1, "sdpa_backward": 1}


# --- jit ------------------------------------------------------------------------------


def test_jit_traces_once_for_a_shape_and_again_for_another(draw: Draw) -> None:
    traces: list[int] = []

    @jax.jit
    def function(*operands: jax.Array) -> Any:
        traces.append(1)
        return value_and_gradients(*operands)

    operands = small_operands(draw, jnp.float32)
    for _ in range(3):
        function(*operands)
    assert len(traces) == 1
    function(*small_operands(draw, jnp.float32, s=2))
    assert len(traces) == 2


def _compilations(caplog: pytest.LogCaptureFixture, run: Callable[[], Any]) -> int:
    caplog.clear()
    with jax.log_compiles():
        jax.block_until_ready(run())
    return sum(r.getMessage().startswith("Compiling") for r in caplog.records)


@pytest.mark.parametrize("function", [sdpa, jax.grad(lambda *x: jnp.sum(sdpa(*x)))])
def test_eager_calls_compile_once(
    function: Callable[..., Any], draw: Draw, caplog: pytest.LogCaptureFixture
) -> None:
    # Sizes of this test's own: other tests' compilations do not count.
    operands = small_operands(draw, jnp.float32, t=37 if function is sdpa else 41)
    assert _compilations(caplog, lambda: function(*operands)) > 0
    assert _compilations(caplog, lambda: function(*operands)) == 0


@pytest.mark.usefixtures("x64")
def test_calls_and_derivatives_run_with_jit_disabled(draw: Draw) -> None:
    query, key, value, bias = small_operands(draw)

    def output(query: jax.Array) -> jax.Array:
        return attend(query, key, value, bias)[0]

    expected = output(query), jax.jvp(output, (query,), (query,))[1]
    expected_gradients = value_and_gradients(query, key, value, bias)
    with jax.disable_jit():
        result = output(query), jax.jvp(output, (query,), (query,))[1]
        gradients = value_and_gradients(query, key, value, bias)
    for x, y in zip(
        jax.tree.leaves((result, gradients)),
        jax.tree.leaves((expected, expected_gradients)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_static_options_are_part_of_the_program(draw: Draw) -> None:
    operands = small_operands(draw, jnp.float32)
    static = ("scale", "is_causal", "implementation", "return_residual")
    jitted = jax.jit(sdpa, static_argnames=static)
    for options in (
        {"scale": 0.5},
        {"scale": 2.0, "is_causal": True},
        {"implementation": "xla", "return_residual": True},
    ):
        assert_close(jitted(*operands, **options), sdpa(*operands, **options), 1e-6)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_products_have_the_precision_in_force_when_traced(
    precision: str | None, draw: Draw
) -> None:
    operands = small_operands(draw, jnp.float32)
    # A function of its own, so that nothing traced before is taken again.
    fresh = jax.jit(lambda *x: value_and_gradients(*x))
    with jax.default_matmul_precision(precision):
        traced = fresh.trace(*operands)
    products = [
        line for line in traced.lower().as_text().splitlines() if "dot_general" in line
    ]
    assert len(products) >= 6
    wanted = "DEFAULT" if precision is None else "HIGHEST"
    for line in products:
        found = set(re.findall(r"precision = \[(\w+), (\w+)\]", line))
        assert found <= {(wanted, wanted)}
        assert found or precision is None


def test_equal_options_share_one_program(draw: Draw) -> None:
    operands = small_operands(draw, jnp.float32)

    def jaxpr(**options: Any) -> str:
        return str(jax.make_jaxpr(lambda *x: sdpa(*x, **options))(*operands))

    assert jaxpr(scale=1) == jaxpr(scale=1.0) == jaxpr(scale=np.float64(1))
    assert jaxpr() == jaxpr(scale=1 / math.sqrt(3), implementation="auto")
    assert jaxpr() != jaxpr(implementation="xla")


def test_a_donated_query_gives_its_memory_to_the_result(draw: Draw) -> None:
    q, k, v, bias = _square(draw, jnp.float32)
    want = sdpa(q, k, v, bias)
    got = jax.jit(sdpa, donate_argnums=0)(q, k, v, bias)
    assert q.is_deleted()
    assert_close(got, want, 1e-6)


def test_ahead_of_time_compilation_runs(draw: Draw) -> None:
    operands = small_operands(draw, jnp.float32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    compiled = jax.jit(value_and_gradients).lower(*shapes).compile()
    assert_close(compiled(*operands), value_and_gradients(*operands), 1e-5)
    value, gradients = jax.eval_shape(value_and_gradients, *shapes)
    assert value.shape == ()
    assert [x.shape for x in gradients] == [x.shape for x in operands]


# --- export ---------------------------------------------------------------------------


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")], ids="-".join)
@pytest.mark.usefixtures("without_rules")
def test_an_exported_gradient_runs_on_the_cpu(
    platforms: tuple[str, ...], draw: Draw
) -> None:
    # 16-bit operands go to cuDNN in the part for CUDA.
    operands = small_operands(draw, jnp.bfloat16)
    gradient = jax.grad(
        lambda *x: jnp.sum(sdpa(*x).astype(jnp.float32)), argnums=(0, 1, 2, 3)
    )
    exported = export(
        jax.jit(gradient), platforms=platforms, disabled_checks=EXPORT_SAFETY_CHECKS
    )(*operands)
    assert exported.platforms == platforms
    has_cudnn = "jax_cudnn.graph_scratch" in exported.mlir_module()
    assert has_cudnn == ("cuda" in platforms)
    want = jax.jit(gradient)(*operands)
    assert_close(jax.jit(exported.call)(*operands), want, 0)


def test_an_exported_function_survives_its_bytes_and_has_a_gradient(
    draw: Draw,
) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export writes bytes with it")
    operands = small_operands(draw, jnp.float32)
    exported = export(
        jax.jit(sdpa), platforms=("cpu", "cuda"), disabled_checks=EXPORT_SAFETY_CHECKS
    )(*operands)
    read = deserialize(exported.serialize(vjp_order=1))
    assert_close(read.call(*operands), sdpa(*operands), 1e-6)

    def gradient(function: Any) -> Any:
        def loss(*operands: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(function(*operands)))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*operands)

    assert_close(gradient(read.call), gradient(sdpa), 1e-5)


# --- several devices ------------------------------------------------------------------


def _of_four(draw: Draw) -> list[jax.Array]:
    """Draw operands with four batch entries, and heads for two devices."""
    return small_operands(draw, b=4, s=3, t=7, h=6, k=2, d=5, e=3)


def _derivatives(function: Any, operands: list[jax.Array]) -> Any:
    """Return the results, the gradients and the derivatives forwards."""

    def run(*operands: jax.Array) -> Any:
        loss = functools.partial(attention_loss, function)
        gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*operands)
        return jax.jvp(function, operands, operands), gradients

    return jax.jit(run)(*operands)


_BATCH, _BOTH = P("data"), P("data", None, "model")
_MODEL, _HEADS = P(None, None, "model"), P(None, "model")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("in_specs", "out_specs"),
    [
        # The bias is the same on all devices along "data": its gradient is summed.
        ((_BATCH, _BATCH, _BATCH, P()), _BATCH),
        ((_BOTH, _BOTH, _BOTH, _HEADS), _BOTH),
        ((_MODEL, _MODEL, _MODEL, _HEADS), _MODEL),
    ],
    ids=["batch", "batch and heads", "heads"],
)
def test_shard_map_of_attention_is_attention(
    in_specs: Any, out_specs: Any, draw: Draw
) -> None:
    operands = _of_four(draw)
    sharded = jax.shard_map(
        attend,
        mesh=mesh_of(data=2, model=2),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=True,
    )
    assert_close(_derivatives(sharded, operands), _derivatives(attend, operands))


@pytest.mark.usefixtures("x64")
def test_attention_of_sharded_operands_is_attention(draw: Draw) -> None:
    operands = _of_four(draw)
    want = jax.jit(attend)(*operands)
    for kind, count in ((AxisType.Auto, 3), (AxisType.Explicit, 1)):
        mesh = mesh_of(kind, data=2, model=2)
        some = placed(mesh, operands[:count], [("data",)] * count)
        with jax.set_mesh(mesh):
            found = jax.jit(attend)(*some, *operands[count:])
        assert_close(found, want)
        assert found[0].sharding.spec[0] == "data"
