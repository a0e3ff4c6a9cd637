# SPDX-License-Identifier: Apache-2.0
"""Tests conv and matmul on a GPU under JAX's transformations, and capture."""

import contextlib
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_cudnn
from jax_cudnn import native, plans
from jax_cudnn.config import Implementation
from jax_cudnn.lowering import traced_graphs
from tests.common.gpu.captured import custom_calls, run_dumped
from tests.common.gpu.numerics import to_f32
from tests.products.gpu.fused_calls import (
    NHWC,
    OPS,
    Function,
    check,
    conv_by,
    conv_operands,
    each_op,
    judge_all,
    matmul_by,
    matmul_operands,
    normal,
    steps_of,
    value_and_grad,
)
from tests.products.shared.fused import stacked

pytestmark = pytest.mark.gpu

_N = 3


def _implementations(function: Function, *operands: Any) -> list[str]:
    """Return who runs each contraction of the function."""
    return [
        call.implementation
        for call in plans.inspect(function, *operands).calls
        if any(kind in call.op for kind in ("conv", "matmul"))
    ]


# --- vmap -----------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize(
    "subset",
    list(itertools.product((False, True), repeat=3))[1:],
    ids=lambda subset: "".join("01"[is_in] for is_in in subset),
)
def test_vmap_of_gradients_is_a_loop_over_examples(op, subset):
    function, operands_of = OPS[op]
    single = operands_of()
    many = [operands_of(seed) for seed in range(_N)]
    axes = tuple((i % 2 if is_in else None) for i, is_in in enumerate(subset))
    operands = [
        jnp.stack([m[i] for m in many], axis=axis) if axis is not None else single[i]
        for i, axis in enumerate(axes)
    ]

    def run(how: Implementation, operands: Any) -> Any:
        mapped = jax.vmap(value_and_grad(function(how)), in_axes=axes)
        return jax.jit(mapped)(*operands)

    references = run("xla", operands)
    one = jax.jit(value_and_grad(function("xla")))
    with jax.default_matmul_precision("highest"):
        truths = stacked(one, list(map(to_f32, operands)), axes)
    judge_all(run("auto", operands), references, truths)
    if op == "conv" and subset[1]:
        # Filters of its own for each example make a grouped convolution, which cuDNN
        # may refuse.
        with contextlib.suppress(jax_cudnn.UnsupportedError):
            judge_all(run("cudnn", operands), references, truths)
    else:
        judge_all(run("cudnn", operands), references, truths)


def test_batched_filters_are_one_convolution_in_groups():
    x, w, bias = conv_operands()
    weights = jnp.stack([w, -w, 2 * w])
    mapped = jax.vmap(conv_by("auto"), in_axes=(None, 0, None))
    ((graph, _, _),) = traced_graphs(mapped, x, weights, bias)
    contraction = next(node for node in graph.nodes if node.kind == "conv_fprop")
    filters = graph.tensor(dict(contraction.inputs)["w"])
    assert filters.dims[:2] == (_N * 40, 24)


# --- loops, remat, programs -----------------------------------------------------------


@each_op
def test_scan_with_remat(op):
    layers = 4
    if op == "conv":
        x = normal(0, 2, 9, 7, 32)
        weights = normal(1, layers, 3, 3, 32, 32, size=1 / math.sqrt(9 * 32))
        biases = normal(2, layers, 32)
    else:
        x = normal(0, 67, 48)
        weights = normal(1, layers, 48, 48, size=1 / math.sqrt(48))
        biases = normal(2, layers, 48)
    function = OPS[op][0]

    def network(how):
        @jax.checkpoint
        def layer(x, parameters):
            return x + function(how)(x, *parameters), None

        def run(x, weights, biases):
            return jax.lax.scan(layer, x, (weights, biases))[0]

        return jax.jit(value_and_grad(run))

    check(network, (x, weights, biases))


def test_a_chain_of_both_in_one_gradient():
    x, w, bias = conv_operands()
    head = normal(5, 40, 24, size=1 / math.sqrt(40))

    def chain(how):
        def run(x, w, bias, head):
            y = conv_by(how)(x, w, bias)
            y = matmul_by(how)(y, head, bias[:24])
            return conv_by(how)(y, w, bias)

        return jax.jit(value_and_grad(run, argnums=(0, 1, 2, 3)))

    check(chain, (x, w, bias, head))


@each_op
def test_gradient_compiles_and_plans_once(op):
    function, operands_of = OPS[op]
    traced: list[None] = []

    def noted(*operands):
        traced.append(None)
        return function("cudnn")(*operands)

    run = jax.jit(value_and_grad(noted))
    first = jax.block_until_ready(run(*operands_of()))
    builds = native.cache_stats().builds
    for seed in range(3):
        jax.block_until_ready(run(*operands_of(seed)))
    assert native.cache_stats().builds == builds
    assert len(traced) == 1
    assert np.isfinite(float(first[0]))


@each_op
def test_forward_mode_and_second_order_run_with_the_reference(op):
    function, operands_of = OPS[op]
    operands, tangents = operands_of(), operands_of(1)

    def along(differentiated: Function) -> Function:
        def run(*x):
            given = (t.astype(p.dtype) for t, p in zip(tangents, x, strict=True))
            return jax.jvp(differentiated, x, tuple(given))[1]

        return jax.jit(run)

    def first(how: Implementation) -> Function:
        return along(lambda *x: value_and_grad(function(how))(*x)[0])

    def second(how: Implementation) -> Function:
        return along(lambda *x: value_and_grad(function(how))(*x)[1])

    check(first, operands)
    check(second, operands)
    ops = [call.op for call in plans.inspect(second("cudnn"), *operands).calls]
    assert any(name.endswith(":derivative") for name in ops)


@each_op
def test_gradient_of_a_gradient_runs_with_the_reference(op):
    function, operands_of = OPS[op]

    def penalty(how: Implementation) -> Function:
        def norm(*x):
            gradients = value_and_grad(function(how), argnums=(0, 1))(*x)[1]
            return sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in gradients)

        return jax.jit(jax.grad(norm, argnums=(0, 1)))

    check(penalty, operands_of())


@each_op
def test_export_round_trip(op):
    function, operands_of = OPS[op]
    run = jax.jit(value_and_grad(function("cudnn")))
    exported = export.export(run, disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS)(
        *operands_of()
    )
    assert f"@{native.TARGET_CAPTURED}(" in exported.mlir_module()
    assert native.TARGET_SCRATCH not in exported.mlir_module()
    check(
        lambda how: (
            export.deserialize(exported.serialize()).call
            if how == "cudnn"
            else value_and_grad(function(how))
        ),
        operands_of(),
    )


@each_op
def test_program_lowered_without_a_gpu_runs_here(op, monkeypatch):
    """The scratch target: the plan and its workspace come at run time."""
    from jax_cudnn.lowering import devices

    function, operands_of = OPS[op]
    run = jax.jit(value_and_grad(function("cudnn")))
    with monkeypatch.context() as patch:
        patch.setattr(devices, "local_target", lambda: None)
        exported = export.export(
            run,
            platforms=("cuda",),
            disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
        )(*operands_of())
    assert native.TARGET_SCRATCH in exported.mlir_module()
    check(
        lambda how: exported.call if how == "cudnn" else value_and_grad(function(how)),
        operands_of(),
    )


# --- what cuDNN does not do -----------------------------------------------------------


@each_op
@pytest.mark.parametrize("precision", ["highest", "float32", jax.lax.Precision.HIGHEST])
def test_f32_in_full_precision_is_xla_s(op, precision):
    function, operands_of = OPS[op]
    operands = operands_of(dtype=jnp.float32)
    run = jax.jit(value_and_grad(function("auto", precision=precision)))
    assert set(_implementations(run, *operands)) == {"xla"}
    reasons = [
        reason
        for call in plans.inspect(run, *operands).calls
        for reason in call.reasons
    ]
    assert any("multiplies f32 in TF32" in reason for reason in reasons)
    cpu = jax.local_devices(backend="cpu")[0]
    arrays = [np.asarray(x, np.float64) for x in operands]
    with jax.enable_x64(True), jax.default_device(cpu):
        truths = value_and_grad(function("xla"))(*map(jnp.asarray, arrays))
        truths = jax.tree.map(np.asarray, truths)
    for x, truth in zip(
        jax.tree.leaves(run(*operands)), jax.tree.leaves(truths), strict=True
    ):
        # TF32 makes 3e-4, f32 less than 1e-6.
        error = np.linalg.norm(np.asarray(x, np.float64) - truth)
        assert error <= 1e-5 * np.linalg.norm(truth)
    with pytest.raises(jax_cudnn.UnsupportedError, match="multiplies f32 in TF32"):
        function("cudnn", precision=precision)(*operands)


@each_op
def test_f32_by_default_is_cudnn_s(op):
    function, operands_of = OPS[op]
    operands = operands_of(dtype=jnp.float32)
    assert _implementations(jax.jit(function("cudnn")), *operands) == ["cudnn"]


@each_op
@pytest.mark.usefixtures("x64")
def test_f64_is_refused_with_reasons_and_left_to_xla(op):
    function, operands_of = OPS[op]
    operands = operands_of(dtype=jnp.float64)
    with pytest.raises(jax_cudnn.UnsupportedError, match="f64: cuDNN's") as caught:
        function("cudnn")(*operands)
    assert caught.value.reasons
    with pytest.raises(jax_cudnn.UnsupportedError, match="f64: cuDNN's"):
        jax.jit(value_and_grad(function("cudnn")))(*operands)
    result = function("auto")(*operands)
    assert result.dtype == jnp.float64
    np.testing.assert_allclose(
        result, function("xla")(*operands), rtol=1e-12, atol=1e-12
    )


# --- memory, bits, capture ------------------------------------------------------------


def _poison(megabytes: int = 2048) -> None:
    """Fill memory that this process takes next with NaN, in blocks of many sizes."""
    sizes = [2**20] * (megabytes // 8) + [2**24] * (megabytes // 64)
    sizes += [2**12] * 512 + [2**27] * (megabytes // 512)
    blocks = [jnp.full((size // 4,), jnp.nan, jnp.float32) for size in sizes]
    jax.block_until_ready(blocks)


def _odd_convs() -> dict[str, tuple[Function, tuple[jax.Array, ...]]]:
    """Return calls whose operands are padded, cut or moved on the way to cuDNN."""

    def call(**options: Any) -> Function:
        return lambda x, w, bias: jax_cudnn.conv(
            x,
            w,
            dimension_numbers=NHWC,
            bias=bias,
            activation="silu",
            **options,
        )

    x, w = normal(0, 2, 13, 11, 7), normal(1, 3, 2, 7, 13, size=0.1)
    bias = normal(2, 13)
    grouped = normal(3, 3, 3, 1, 24, size=0.3)
    return {
        "asymmetric": (
            call(window_strides=(2, 1), padding=((0, 2), (3, 1))),
            (x, w, bias),
        ),
        "dilated": (
            call(
                window_strides=(1, 1),
                padding=((2, 1), (1, 1)),
                lhs_dilation=(2, 2),
            ),
            (x, w, bias),
        ),
        "depthwise": (
            # By name: "auto" leaves it to XLA.
            call(
                window_strides=(1, 1),
                padding="SAME",
                feature_group_count=24,
                implementation="cudnn",
            ),
            (normal(4, 2, 9, 9, 24), grouped, normal(5, 24)),
        ),
        "matmul_unaligned": (
            lambda a, b, bias: jax_cudnn.matmul(a, b, bias=bias, activation="gelu"),
            (normal(6, 63, 61), normal(7, 61, 37, size=0.13), normal(8, 37)),
        ),
        "conv": (conv_by("cudnn"), conv_operands()),
        "matmul": (matmul_by("cudnn"), matmul_operands()),
    }


@pytest.mark.parametrize(
    "name",
    ["asymmetric", "dilated", "depthwise", "matmul_unaligned", "conv", "matmul"],
)
def test_results_do_not_depend_on_what_memory_held(name):
    """Outputs, workspaces and padded copies come from memory that was all NaN."""
    function, operands = _odd_convs()[name]

    def loss(*x):
        output = function(*x)
        return jnp.sum(output.astype(jnp.float32) ** 2), output

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    copies = jax.tree.map(np.asarray, jax.block_until_ready(run(*operands)))
    for _ in range(3):
        _poison()
        again = jax.tree.map(np.asarray, run(*operands))
        for x, y in zip(jax.tree.leaves(copies), jax.tree.leaves(again), strict=True):
            assert np.isfinite(y.astype(np.float32)).all()
            np.testing.assert_allclose(
                y.astype(np.float32), x.astype(np.float32), rtol=2e-2, atol=2e-2
            )


@pytest.mark.parametrize("name", ["asymmetric", "matmul_unaligned", "conv", "matmul"])
@pytest.mark.parametrize("direction", ["forward", "gradients"])
def test_results_are_bitwise_repeatable(name, direction):
    function, operands = _odd_convs()[name]
    if direction == "gradients":
        # Not the bias's: that sum is XLA's.
        function = value_and_grad(function, argnums=(0, 1))
    run = jax.jit(function)
    planned = [step.plan for step in steps_of(run, *operands) if step.plan is not None]
    noted = [plan.name for plan in planned if "NONDETERMINISTIC" in plan.numeric_notes]
    if noted:
        pytest.skip(f"cuDNN does not promise it: {', '.join(noted)}")
    first = jax.tree.map(np.asarray, run(*operands))
    if direction == "gradients":
        first = first[1]
    for _ in range(9):
        again = run(*operands)
        again = again[1] if direction == "gradients" else again
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(
                np.asarray(y).view(np.uint16), x.view(np.uint16)
            )


_CAPTURE = """
import jax, jax.numpy as jnp, numpy as np, jax_cudnn
rng = np.random.default_rng(0)
def normal(*shape, size=1.0):
    return jnp.asarray(rng.standard_normal(shape, np.float32) * size, jnp.bfloat16)
x, b = normal(2, 16, 16, 64), normal(64)
w, m = normal(3, 3, 64, 64, size=0.04), normal(64, 64, size=0.12)
def chain(x):
    for _ in range(3):
        x = jax_cudnn.conv(x, w, (1, 1), "SAME", bias=b, activation="relu",
            dimension_numbers=("NHWC", "HWIO", "NHWC"), implementation="cudnn")
        x = jax_cudnn.matmul(x, m, bias=b, activation="relu", implementation="cudnn")
    return x
run = jax.jit(chain)
grad = jax.jit(jax.grad(lambda x: chain(x).astype(jnp.float32).sum()))
first, first_grad = run(x), grad(x)
for _ in range(4):
    y, g = run(x), grad(x)
eager = chain(x)
np.testing.assert_allclose(
    np.asarray(y, np.float32), np.asarray(eager, np.float32), rtol=2e-2, atol=2e-2)
np.testing.assert_allclose(
    np.asarray(y, np.float32), np.asarray(first, np.float32), rtol=2e-2, atol=2e-2)
np.testing.assert_allclose(
    np.asarray(g, np.float32), np.asarray(first_grad, np.float32), rtol=2e-2, atol=2e-2)
assert bool(jnp.isfinite(g.astype(jnp.float32)).all())
print("done")
"""


def test_a_chain_is_inside_a_captured_command_buffer(tmp_path):
    """XLA's dump shows the custom calls in a command buffer, and the results hold."""
    run_dumped(_CAPTURE, tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    inside, outside = custom_calls(tmp_path)
    assert not outside
    # Six calls of the chain; six and six of its gradient; a conv and a matmul alone.
    assert len(inside) >= 6 + 12 + 2
