# SPDX-License-Identifier: Apache-2.0
"""Tests how attention runs on a GPU: plans, memory, threads, capture, exit."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import native
from jax_cudnn.plans import inspect
from tests.attention.shared.cases import Case, make_operands
from tests.common.gpu.captured import custom_calls, run_dumped

pytestmark = pytest.mark.gpu


def _loss(q, k, v):
    out = jax_cudnn.sdpa(q, k, v, is_causal=True, implementation="cudnn")
    return jnp.sum(out.astype(jnp.float32) ** 2)


def _qkv(seed=0, **sizes):
    return make_operands(Case(name="execution", **sizes), seed).arrays[:3]


def _bits(x):
    return np.asarray(x).view(np.uint16)


def test_forward_is_bitwise_repeatable():
    q, k, v = _qkv(s=1021, t=1021, d=128)
    run = jax.jit(lambda *x: jax_cudnn.sdpa(*x, is_causal=True, implementation="cudnn"))
    first = _bits(run(q, k, v))
    for _ in range(19):
        np.testing.assert_array_equal(_bits(run(q, k, v)), first)


def test_no_plan_is_built_after_the_first_call():
    q, k, v = _qkv(s=251, t=241, d=72)
    run = jax.jit(jax.grad(_loss, argnums=(0, 1, 2)))
    jax.block_until_ready(run(q, k, v))
    before = native.cache_stats()
    for _ in range(5):
        jax.block_until_ready(run(q, k, v))
    assert native.cache_stats().builds == before.builds


def test_results_do_not_depend_on_what_memory_held():
    """Outputs and workspaces come from memory that was all NaN a moment before."""
    cases = [
        Case(name="poison", s=193, t=321, d=77, bias="hst", key_lengths=(300, 7)),
        Case(name="poison_plain", s=1000, t=1000, d=128, causal=True),
        Case(name="poison_mask", s=65, t=129, mask="bst", dead_rows=True),
    ]
    for case in cases:
        q, k, v, bias, mask, _, lengths = make_operands(case).arrays

        def loss(q, k, v, bias, mask=mask, lengths=lengths, case=case):
            out = jax_cudnn.sdpa(
                q,
                k,
                v,
                bias,
                mask,
                is_causal=case.causal,
                key_value_seq_lengths=lengths,
                implementation="cudnn",
            )
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        argnums = (0, 1, 2) if bias is None else (0, 1, 2, 3)
        run = jax.jit(jax.value_and_grad(loss, argnums=argnums, has_aux=True))
        clean = jax.block_until_ready(run(q, k, v, bias))
        copies = jax.tree.map(np.asarray, clean)
        del clean
        _poison_free_memory()
        again = jax.tree.map(np.asarray, run(q, k, v, bias))
        for x, y in zip(jax.tree.leaves(copies), jax.tree.leaves(again), strict=True):
            assert np.isfinite(y.astype(np.float32)).all()
            np.testing.assert_allclose(
                y.astype(np.float32), x.astype(np.float32), rtol=2e-2, atol=2e-2
            )


def _poison_free_memory():
    stats = jax.local_devices()[0].memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    blocks = [
        jnp.full((2**30 // 4,), jnp.nan, jnp.float32) for _ in range(free // 2**30 - 2)
    ]
    blocks += [jnp.full((2**20 // 4,), jnp.nan, jnp.float32) for _ in range(512)]
    jax.block_until_ready(blocks)


def test_eight_threads_share_one_plan():
    q, k, v = _qkv(s=515, t=515, d=64)
    run = jax.jit(jax.value_and_grad(_loss, argnums=(0, 1, 2)))
    expected = jax.tree.map(np.asarray, run(q, k, v))
    inputs = [_qkv(seed=i, s=515, t=515, d=64) for i in range(8)]
    serial = [jax.tree.map(np.asarray, run(*x)) for x in inputs]
    results: list = [None] * 8
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(i):
        try:
            barrier.wait()
            for _ in range(20):
                results[i] = run(*inputs[i])
            results[i] = jax.tree.map(np.asarray, results[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for got, want in zip(results, serial, strict=True):
        # The forward pass is bitwise repeatable; dQ is summed in any order.
        np.testing.assert_array_equal(got[0], want[0])
        for x, y in zip(got[1], want[1], strict=True):
            np.testing.assert_allclose(
                x.astype(np.float32), y.astype(np.float32), rtol=2e-2, atol=2e-2
            )
    assert np.isfinite(expected[0])


def test_threads_that_need_one_new_plan_build_it_once():
    before = native.cache_stats().builds
    q, k, v = _qkv(s=333, t=339, d=88)
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        run = jax.jit(lambda *x: jax_cudnn.sdpa(*x, implementation="cudnn"))
        jax.block_until_ready(run(q, k, v))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert native.cache_stats().builds == before + 1


def test_backward_memory_grows_linearly_with_length():
    def temporary_bytes(length):
        shape = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.bfloat16)
        compiled = jax.jit(jax.grad(_loss, argnums=(0, 1, 2))).lower(
            shape, shape, shape
        )
        return compiled.compile().memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(32768), temporary_bytes(131072)
    assert long <= 4.5 * short
    assert long < 2 * 2**30


def test_backward_runs_at_131072_tokens():
    q, k, v = _qkv(b=1, s=131072, t=131072, h=1, k=1, d=128)
    gradients = jax.jit(jax.grad(_loss, argnums=(0, 1, 2)))(q, k, v)
    for gradient in gradients:
        assert bool(jnp.isfinite(gradient.astype(jnp.float32)).all())


def test_inspect_names_plans_and_workspaces():
    q, k, v = _qkv(s=129, t=127, d=64)
    report = inspect(jax.grad(_loss, argnums=(0, 1, 2)), q, k, v)
    assert [call.op for call in report.calls] == ["sdpa", "sdpa_backward"]
    for call in report.calls:
        assert call.implementation == "cudnn"
        assert call.plan is not None
        assert call.plan.startswith("eng")
        assert call.workspace_bytes is not None


def test_f32_bias_gradient_is_noted_as_computed_by_xla():
    case = Case(name="note", bias="bhst", bias_dtype="float32")
    q, k, v, bias, *_ = make_operands(case).arrays
    report = inspect(
        jax.grad(lambda b: jnp.sum(jax_cudnn.sdpa(q, k, v, b).astype(jnp.float32))),
        bias,
    )
    backward = report.calls[-1]
    assert backward.op == "sdpa_backward"
    assert any("gradient of bias" in reason for reason in backward.reasons)


def test_cudnn_refuses_the_f32_gradient_with_reasons():
    q = jnp.ones((2, 3, 4, 8), jnp.float32)
    with pytest.raises(jax_cudnn.UnsupportedError, match="takes bf16, f16"):
        jax.grad(lambda q: jax_cudnn.sdpa(q, q, q, implementation="cudnn").sum())(q)


def test_cudnn_runs_the_f32_forward_pass_in_full_precision():
    q, k, v = (x.astype(jnp.float32) for x in _qkv(s=67, t=131, d=72))
    run = lambda how: jax_cudnn.sdpa(q, k, v, implementation=how)  # noqa: E731
    with jax.default_matmul_precision("highest"):
        truth = run("xla")
    np.testing.assert_allclose(run("cudnn"), truth, rtol=1e-4, atol=1e-5)


def test_auto_runs_f32_with_xla():
    q, k, v = (x.astype(jnp.float32) for x in _qkv(s=7, t=5, d=16))
    np.testing.assert_array_equal(
        jax_cudnn.sdpa(q, k, v), jax_cudnn.sdpa(q, k, v, implementation="xla")
    )


_EXIT = """
import jax, jax.numpy as jnp, jax_cudnn
x = jnp.ones((2, 77, 4, 64), jnp.bfloat16)
def loss(x):
    return jax_cudnn.sdpa(x, x, x, implementation="cudnn").astype(jnp.float32).sum()
jax.block_until_ready(jax.jit(jax.grad(loss))(x))
print("done")
"""


def test_process_exits_cleanly():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", _EXIT],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "done"


_CAPTURE = """
import jax, jax.numpy as jnp, jax_cudnn
def chain(x):
    for _ in range(6):
        x = jax_cudnn.sdpa(x, x, x, is_causal=True, implementation="cudnn")
    return x
x = jnp.asarray(jax.random.normal(jax.random.key(0), (2, 77, 4, 64)), jnp.bfloat16)
grad = jax.jit(jax.grad(lambda x: chain(x).astype(jnp.float32).sum()))
run = jax.jit(chain)
for _ in range(4):
    y, g = run(x), grad(x)
plain = x
for _ in range(6):
    plain = jax_cudnn.sdpa(plain, plain, plain, is_causal=True, implementation="cudnn")
assert bool((y == plain).all())
assert bool(jnp.isfinite(g.astype(jnp.float32)).all())
print("done")
"""


def test_calls_are_inside_a_captured_command_buffer(tmp_path):
    """XLA's dump shows the custom calls in a command buffer, and the results hold."""
    run_dumped(_CAPTURE, tmp_path)
    inside, outside = custom_calls(tmp_path)
    assert not outside
    # Six calls of the chain, six and six of its gradient, and one alone.
    assert len(inside) >= 6 + 12 + 1


_MEMCHECK = str(Path(__file__).parent / "memcheck.py")


def _check_memory(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests/attention/gpu/memcheck.py under compute-sanitizer.

    The sanitizer itself now and then crashes or hangs when the process ends, and then
    prints no summary: such a run says nothing and is done again.
    """
    sanitizer = shutil.which("compute-sanitizer", path=_CUDA_PATH)
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [
        sanitizer, "--tool", "memcheck", "--report-api-errors", "no",
        "--error-exitcode", "9",
        sys.executable, _MEMCHECK, *arguments,
    ]  # fmt: skip
    told: list[str] = []
    for _ in range(4):
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False
            )
        except subprocess.TimeoutExpired as error:
            told.append(str(error))
            continue
        if "ERROR SUMMARY" in result.stdout:
            return result
        told.append(result.stdout[-1000:] + result.stderr[-1000:])
    pytest.fail("compute-sanitizer printed no summary:\n" + "\n".join(told))


def test_compute_sanitizer_finds_no_bad_access():
    result = _check_memory()
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "6 cases done" in result.stdout
    assert "ERROR SUMMARY: 0 errors" in result.stdout


def test_compute_sanitizer_would_find_a_bad_access():
    result = _check_memory("--break")
    assert result.returncode == 9, result.stdout[-3000:] + result.stderr[-1000:]
    assert "ERROR SUMMARY: 0 errors" not in result.stdout


_CUDA_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
