# SPDX-License-Identifier: Apache-2.0
"""Tests f8 attention through cuDNN against float64, within its rounding.

Hopper's f8 tensor cores keep sums of products with fewer bits than f32: on an H200 with
9.19, scores were off by 2^-12 of the sum of the products' sizes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import f8
from tests.attention.shared.f8 import check, dense, gradients

pytestmark = pytest.mark.gpu

_SUM_UNIT = 2.0**-11
# b, s, t, h, k, d, e, and the options.
_CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "base": ((2, 128, 192, 4, 2, 64, 64), {}),
    "one_tile": ((2, 64, 64, 4, 4, 64, 64), {}),
    "long": ((1, 192, 1000, 4, 4, 128, 128), {}),
    "odd": ((2, 77, 129, 6, 1, 20, 36), {}),
    "causal": ((2, 192, 192, 4, 2, 128, 128), {"is_causal": True}),
    "more_queries": ((2, 300, 200, 4, 2, 128, 128), {"is_causal": True}),
    "window": ((2, 192, 192, 4, 2, 128, 128), {"window": (31, 15)}),
    "window_causal": ((2, 192, 192, 2, 2, 64, 64), {"window": (31, 0)}),
    "lengths": ((3, 128, 192, 4, 2, 128, 128), {"lengths": (192, 77, 0)}),
    "query_lengths": ((2, 128, 192, 4, 2, 64, 64), {"query_lengths": (128, 33)}),
    "one_query": ((3, 1, 257, 8, 2, 128, 128), {}),
    "one_query_lengths": ((3, 1, 257, 8, 2, 128, 128), {"lengths": (257, 100, 1)}),
    "one_key": ((2, 5, 1, 4, 2, 64, 64), {}),
    "head_256": ((2, 128, 192, 4, 2, 256, 256), {}),
    "heads_192_128": ((2, 128, 192, 4, 2, 192, 128), {}),
}
_SCALES: dict[str, Any] = {"query_scale": 0.75, "key_scale": 1.25, "value_scale": 0.5}


def _operands(sizes: tuple[int, ...], dtype: Any, seed: int = 5) -> list[jax.Array]:
    b, s, t, h, k, d, e = sizes
    rng = np.random.default_rng(seed)
    shapes = [(b, s, h, d), (b, t, k, d), (b, t, k, e)]
    return [
        jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)
        for shape in shapes
    ]


def _seen(sizes: tuple[int, ...], options: dict[str, Any]) -> np.ndarray:
    b, s, t, h = sizes[:4]
    rows, columns = np.arange(s)[:, None], np.arange(t)
    lengths = np.array(options.get("lengths", (t,) * b))
    seen = np.broadcast_to(columns < lengths[:, None, None, None], (b, h, s, t))
    queries = np.array(options.get("query_lengths", (s,) * b))
    seen = seen & (rows < queries[:, None, None, None])
    if options.get("is_causal"):
        seen = seen & (columns <= rows)
    if "window" in options:
        left, right = options["window"]
        seen = seen & (columns >= rows - left) & (columns <= rows + right)
    return seen


def _run(operands: Any, options: dict[str, Any], implementation: Any) -> Any:
    return jax.jit(
        lambda q, k, v: f8.sdpa(
            q,
            k,
            v,
            **_SCALES,
            output_scale=options.get("output_scale", 2.0**-6),
            is_causal=options.get("is_causal", False),
            local_window_size=options.get("window"),
            query_seq_lengths=options.get("query_lengths"),
            key_value_seq_lengths=options.get("lengths"),
            preferred_element_type=options.get("result"),
            implementation=implementation,
            return_residual=True,
            return_amax=True,
        )
    )(*operands)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("name", _CASES)
def test_results_match_float64(name, dtype, record_property):
    sizes, options = _CASES[name]
    options = {
        key: np.array(x) if "lengths" in key else x for key, x in options.items()
    }
    operands = _operands(sizes, dtype)
    truth = dense(
        *operands,
        scales=tuple(_SCALES.values()),
        seen=_seen(sizes, options),
        sum_unit=_SUM_UNIT,
    )
    output, lse, amax = _run(operands, options, "cudnn")
    check(truth, output, 2.0**-6, lse=lse, amax=amax)
    again = _run(operands, options, "cudnn")
    for x, y in zip((output, lse, amax), again, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    other = _run(operands, options, "xla")[0]
    same = float((output.view(jnp.uint8) == other.view(jnp.uint8)).mean())
    record_property("share of equal numbers, cudnn and xla", f"{same}")
    # The kernel rounds weights beside the maximum so far, the reference beside the
    # row's. So they differ in more numbers the more tiles there are. With weights
    # rounded after the division, half of the numbers were equal on an H200.
    assert same > (0.65 if sizes[2] <= 200 else 0.5)


def test_a_result_in_the_other_dtype_and_one_that_saturates():
    sizes, _ = _CASES["base"]
    operands = _operands(sizes, jnp.float8_e4m3fn)
    truth = dense(*operands, scales=tuple(_SCALES.values()), sum_unit=_SUM_UNIT)
    other = {"result": jnp.float8_e5m2}
    output, lse, amax = _run(operands, other, "cudnn")
    assert output.dtype == jnp.float8_e5m2
    check(truth, output, 2.0**-6, lse=lse, amax=amax)
    output, _, amax = _run(operands, {"output_scale": 1e-5}, "cudnn")
    assert float(f8.amax(output)) == 448
    check(truth, output, 1e-5, amax=amax)


def test_nan_and_scales_that_are_not_above_0_are_as_with_xla():
    sizes, _ = _CASES["base"]
    q, k, v = _operands(sizes, jnp.float8_e4m3fn)
    nan = jnp.asarray(np.nan, jnp.float8_e4m3fn)
    for spoiled in (
        [q.at[1, 2, 3, 4].set(nan), k, v],
        [q, k, v.at[0, 2, 1, 4].set(nan)],
    ):
        found = _run(spoiled, {}, "cudnn")
        want = _run(spoiled, {}, "xla")
        for x, y in zip(found[:2], want[:2], strict=True):
            x, y = (np.isnan(np.asarray(each.astype(jnp.float32))) for each in (x, y))
            np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(found[2], want[2], rtol=0.02)
    for name in [*_SCALES, "output_scale"]:
        scales = {**_SCALES, "output_scale": 1.0, name: -1.0}
        output = f8.sdpa(q, k, v, **scales, implementation="cudnn")
        assert np.isnan(np.asarray(output.astype(jnp.float32))).all(), name


def test_examples_of_a_vmap_with_scales_of_their_own():
    sizes, _ = _CASES["base"]
    q, k, v = _operands(sizes, jnp.float8_e4m3fn)
    scales = jnp.float32([0.5, 1.0, 2.0])

    def run(scale: Any) -> Any:
        given = {**_SCALES, "value_scale": scale}
        return f8.sdpa(q, k, v, **given, implementation="cudnn", return_amax=True)

    outputs, amaxes = jax.jit(jax.vmap(run))(scales)
    for i in range(3):
        output, amax = run(scales[i])
        np.testing.assert_array_equal(
            outputs[i].view(jnp.uint8), output.view(jnp.uint8)
        )
        assert float(amaxes[i]) == float(amax)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gradient_is_that_of_the_formula(is_causal, dtype, record_property):
    sizes = (2, 128, 192, 4, 2, 64, 64)
    operands = _operands(sizes, dtype)

    def run(q: Any, k: Any, v: Any) -> Any:
        return f8.quantized_sdpa(
            q, k, v, is_causal=is_causal, implementation="cudnn", return_residual=True
        )

    rng = np.random.default_rng(6)
    grad_output = jnp.asarray(rng.standard_normal((2, 128, 4, 64)), dtype)
    grad_lse = jnp.asarray(rng.standard_normal((2, 128, 4)), jnp.float32)

    def both(*operands: Any) -> Any:
        results, back = jax.vjp(run, *operands)
        return results, back((grad_output, grad_lse))

    (output, _), found = jax.jit(both)(*operands)
    stored = [f8.quantize_current(x, power_of_2=True) for x in operands]
    rounded = [f8.dequantize(*x) for x in stored]
    seen = _seen(sizes, {"is_causal": is_causal})
    truths = gradients(rounded, output, grad_output, grad_lse, seen)
    for role, x, y in zip(("query", "key", "value"), found, truths, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        record_property(f"error of {role}", f"{error}")
        # Scores that are off by 2^-11 of about 7, and the 16-bit kernel's rounding.
        assert error <= 2 * float(jnp.finfo(dtype).eps) + 7 * _SUM_UNIT, role
