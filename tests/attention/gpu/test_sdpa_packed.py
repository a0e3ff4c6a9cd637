# SPDX-License-Identifier: Apache-2.0
"""Tests packed attention through cuDNN against float64, one sequence at a time.

Padding is NaN: neither it nor a neighbour's NaN may reach another sequence.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import plans, sdpa
from tests.attention.shared.packed import Rows, answer

pytestmark = pytest.mark.gpu


def _behind(lengths: list[int], gap: int = 0) -> list[tuple[int, int]]:
    ends = np.cumsum([length + gap for length in lengths])
    return [(int(e) - n - gap, n) for e, n in zip(ends, lengths, strict=True)]


_A, _B = [37, 130, 1, 255, 64], [64, 3, 200, 0, 192]
_C, _D = [50, 129, 70, 200, 64], [192, 0, 64, 320, 64]
_SELF = Rows(
    queries=[_behind(_A, 3), _behind(_B)],
    keys=[_behind(_A, 3), _behind(_B)],
    s=530,
    t=530,
    d=64,
    e=64,
    scale=0.125,
)
_CROSS = Rows(
    queries=[_behind(_A), _behind(_B, 5)],
    keys=[_behind(_C, 7), _behind(_D)],
    s=500,
    t=700,
    d=64,
    e=64,
    scale=0.125,
)
_ROWS = {
    "self_causal": dataclasses.replace(_SELF, causal=True, d=128, e=128),
    "cross": _CROSS,
    "cross_causal": dataclasses.replace(_CROSS, causal=True),
    "cross_from_end": dataclasses.replace(_CROSS, causal=True, from_end=True),
    "window": dataclasses.replace(_SELF, causal=True, window=(20, 0)),
    "window_from_end": dataclasses.replace(
        _CROSS, causal=True, window=(20, 0), from_end=True
    ),
    "window_of_both_sides": dataclasses.replace(_CROSS, window=(20, 9)),
    "one_key_head": dataclasses.replace(_CROSS, h=5, k=1),
    "no_groups": dataclasses.replace(_CROSS, h=2, k=2, d=96, e=96),
    "odd_heads": dataclasses.replace(_CROSS, d=77, e=40),
    "value_larger": dataclasses.replace(_SELF, d=64, e=128),
    "head_256": dataclasses.replace(_SELF, d=256, e=240, causal=True),
    "short": dataclasses.replace(_SELF, causal=True, max_length=255),
    "decode": dataclasses.replace(
        _CROSS, queries=[[(j, 1) for j in range(5)]] * 2, s=5, max_length=(1, 320)
    ),
    "one_token_each": Rows(
        queries=[[(j, 1) for j in range(7)]], keys=[[(j, 1) for j in range(7)]],
        s=7, t=7, d=64, e=64, scale=0.125,
    ),
    "all_empty": Rows(
        queries=[[(0, 0), (0, 0)]], keys=[[(0, 0), (0, 9)]], s=66, t=70, d=64, e=64
    ),
}  # fmt: skip


def _results(
    rows: Rows,
    values: dict[str, Any],
    implementation: Any,
    dtype: Any,
    *,
    with_lse: bool = False,
) -> dict[str, np.ndarray]:
    """Return results and gradients; the log-sum-exp among them if asked for."""

    def call(q: Any, k: Any, v: Any) -> Any:
        return sdpa(
            q,
            k,
            v,
            mask=rows.mask(),
            scale=rows.scale,
            return_residual=with_lse,
            implementation=implementation,
        )

    @jax.jit
    def run(q: Any, k: Any, v: Any, *pulls: Any) -> Any:
        results, vjp = jax.vjp(call, q, k, v)
        if with_lse:
            return *results, *vjp(pulls)
        return results, *vjp(*pulls)

    arrays = [jnp.asarray(values[n], dtype) for n in ("query", "key", "value")]
    pulls = [jnp.asarray(values["grad_output"], dtype)]
    names = ["output", "grad_query", "grad_key", "grad_value"]
    if with_lse:
        pulls.append(jnp.asarray(values["grad_lse"], jnp.float32))
        names.insert(1, "lse")
    found = run(*arrays, *pulls)
    return {n: np.asarray(x, np.float64) for n, x in zip(names, found, strict=True)}


def _rounded(values: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    return {
        name: x if name == "grad_lse" else np.asarray(jnp.asarray(x, dtype), np.float32)
        for name, x in values.items()
    }


@pytest.mark.parametrize("with_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", _ROWS)
def test_results_and_gradients_match_float64(
    name: str, dtype: Any, with_lse: bool, record_property: Any
) -> None:
    rows = _ROWS[name]
    if with_lse and rows.e > 253:
        pytest.skip("the gradient of the log-sum-exp needs 3 columns more")
    values = _rounded(rows.draw(padding=np.nan), dtype)
    clean = _rounded(rows.draw(), dtype)
    if not with_lse:
        values["grad_lse"] = clean["grad_lse"] = np.zeros_like(clean["grad_lse"])
    truth = answer(rows, clean)
    found = _results(rows, values, "cudnn", dtype, with_lse=with_lse)
    beside = _results(rows, values, "xla", dtype, with_lse=with_lse)
    for role in found:
        z = truth[role]
        is_dead = np.isneginf(z)
        np.testing.assert_array_equal(np.isneginf(found[role]), is_dead)
        size = max(np.abs(z[~is_dead]).max(initial=0), 1e-2)
        errors = [
            np.abs(x[role][~is_dead] - z[~is_dead]).max(initial=0) / size
            for x in (found, beside)
        ]
        record_property(f"error of {role}, cudnn and xla", f"{errors}")
        assert errors[0] <= 2 * errors[1] + 2 * float(jnp.finfo(dtype).eps), role
    queries, keys = rows.is_inside()
    for role, inside in (("query", queries), ("key", keys), ("value", keys)):
        assert not np.any(found[f"grad_{role}"][~inside]), role
    assert not np.any(found["output"][~queries])


def test_a_neighbours_nan_stays_there() -> None:
    rows = _ROWS["self_causal"]
    values = rows.draw(padding=np.nan)
    start, length = rows.queries[0][1]
    for name in ("query", "key", "value", "grad_output"):
        values[name][0, start : start + length] = np.nan
    found = _results(rows, values, "cudnn", jnp.bfloat16)
    inside, _ = rows.is_inside()
    inside[0, start : start + length] = False
    for role in ("output", "grad_query", "grad_key", "grad_value"):
        assert np.all(np.isfinite(found[role][inside])), role


def test_cudnn_runs_packed_sequences_as_they_are() -> None:
    rows = _ROWS["self_causal"]
    values = {name: jnp.asarray(x, jnp.bfloat16) for name, x in rows.draw().items()}

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(sdpa(q, k, v, mask=rows.mask()).astype(jnp.float32))

    report = plans.inspect(
        jax.grad(loss, (0, 1, 2)), values["query"], values["key"], values["value"]
    )
    calls = list(report.calls)
    assert calls
    for call in calls:
        assert call.engine is not None, call
        assert not call.reasons, call.reasons


def test_the_same_bits_each_time_where_asked_for() -> None:
    rows = _ROWS["cross_from_end"]
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in rows.draw().items()}

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, pull: jax.Array) -> Any:
        def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            options = plans.PlanOptions(deterministic=True)
            return sdpa(q, k, v, mask=rows.mask(), implementation="cudnn", plan=options)

        return jax.vjp(call, q, k, v)[1](pull)

    given = [arrays[n] for n in ("query", "key", "value", "grad_output")]
    first = run(*given)
    for _ in range(5):
        for x, y in zip(first, run(*given), strict=True):
            np.testing.assert_array_equal(x, y)


def test_examples_of_a_vmap_are_more_rows() -> None:
    rows = _ROWS["self_causal"]
    values = [
        jnp.stack([jnp.asarray(rows.draw(i)[n], jnp.bfloat16) for i in range(3)])
        for n in ("query", "key", "value")
    ]

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return sdpa(q, k, v, mask=rows.mask(), implementation="cudnn")

    found = jax.jit(jax.vmap(call))(*values)
    for i in range(3):
        np.testing.assert_array_equal(found[i], call(*(x[i] for x in values)))
