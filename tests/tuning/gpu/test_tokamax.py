# SPDX-License-Identifier: Apache-2.0
"""Tests that tokamax computes what the graphs say, where it runs."""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import choices, plans, ragged_dot
from jax_cudnn.choices import Choice, ChoiceTable
from tests.products.shared.grouped import grouped
from tests.tuning.tokamax import ATTENTIONS, Attention, unusual_biases

pytestmark = pytest.mark.gpu

pytest.importorskip("tokamax")


class _Forced(ChoiceTable):
    """Every part runs by tokamax, if it runs there at all."""

    def get(self, *args: Any, **kwargs: Any) -> Choice | None:
        del args, kwargs
        return Choice(
            op="",
            operands="",
            implementation=f"tokamax {importlib.metadata.version('tokamax')}",
            plan="",
            cudnn_us=2.0,
            xla_us=3.0,
        )


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    table = _Forced()
    monkeypatch.setattr(choices, "table", lambda: table)
    plans.add_tokamax()
    jax.clear_caches()
    yield
    plans.remove_contender("tokamax")
    jax.clear_caches()


def _assert_near(got: jax.Array, want: np.ndarray) -> None:
    x = np.asarray(got.astype(jnp.float32), np.float64)
    assert np.isfinite(x).all()
    assert np.linalg.norm(x - want) <= 0.01 * np.linalg.norm(want)
    assert np.abs(x - want).max() <= 0.03 * np.abs(want).max()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    cell = ATTENTIONS[name]
    operands = cell.operands()
    traced = jax.jit(cell.with_gradients).trace(*operands)
    ran = [call.implementation for call in plans.inspect(traced).calls]
    assert [name.split()[0] for name in ran] == ["tokamax", "tokamax"]
    found = traced.lower().compile()(*operands)
    for got, want in zip(found, cell.truth(*operands), strict=True):
        _assert_near(got, want)


@pytest.mark.parametrize("name", unusual_biases(jnp.zeros((1, 2, 256))))
def test_a_bias_that_hides_keys_or_is_far_from_0(name: str) -> None:
    cell = Attention()
    query, *arrays, bias, cotangent = cell.operands()
    # f32 has no digits for the scores of a row that far from 0: they are 0 here.
    query = query.at[:, 0].set(0)
    operands = query, *arrays, unusual_biases(bias)[name], cotangent
    found = jax.jit(cell.with_gradients)(*operands)
    for got, want in zip(found, cell.truth(*operands), strict=True):
        _assert_near(got, want)


def test_nan_stays_in_its_row() -> None:
    cell = Attention()
    query, *others = cell.operands()
    spoilt = query.at[0, 7, 2, 3].set(jnp.nan)
    found = jax.jit(cell.with_gradients)(spoilt, *others)
    want = cell.truth(query, *others)
    is_nan = np.isnan(np.asarray(found[0], np.float32)).any(-1)
    assert [tuple(x) for x in np.argwhere(is_nan)] == [(0, 7, 2)]
    output = np.asarray(found[0], np.float64)[~is_nan]
    assert np.abs(output - want[0][~is_nan]).max() <= 0.03 * np.abs(want[0]).max()


_SIZES = {
    "usual": (40, 100, 7, 109),
    "empty": (0, 130, 0, 0, 126, 0),
    "rows in none": (33, 0, 65),
    "all rows in none": (0, 0),
}


def _rows(sizes: tuple[int, ...], dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(len(sizes))
    shapes = (256, 64), (len(sizes), 64, 128), (256, 128)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def _with_gradients(sizes: tuple[int, ...]) -> Any:
    def run(rows: Any, matrices: Any, cotangent: Any) -> Any:
        def call(*arrays: Any) -> jax.Array:
            return ragged_dot(*arrays, jnp.array(sizes, jnp.int32))

        output, pullback = jax.vjp(call, rows, matrices)
        return output, *pullback(cotangent)

    return run


def _truth(sizes: tuple[int, ...], *operands: jax.Array) -> tuple[np.ndarray, ...]:
    rows, matrices, cotangent = operands
    return grouped(rows, matrices, sizes, cotangent=cotangent)[:3]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", _SIZES)
def test_ragged_dot(name: str, dtype: Any) -> None:
    sizes = _SIZES[name]
    operands = _rows(sizes, dtype)
    traced = jax.jit(_with_gradients(sizes)).trace(*operands)
    ran = [call.implementation for call in plans.inspect(traced).calls]
    assert [name.split()[0] for name in ran] == ["tokamax", "tokamax"]
    found = traced.lower().compile()(*operands)
    for got, want in zip(found, _truth(sizes, *operands), strict=True):
        x = np.asarray(got.astype(jnp.float32), np.float64)
        assert np.isfinite(x).all()
        assert np.abs(x - want).max() <= 0.01 * np.abs(want).max() + 1e-6
        assert np.all(x[want == 0] == 0)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_in_no_group_are_not_read(poison: float) -> None:
    sizes = _SIZES["rows in none"]
    rows, matrices, cotangent = _rows(sizes, jnp.bfloat16)
    want = _truth(sizes, rows, matrices, cotangent)
    spoilt = rows.at[98:].set(poison), matrices, cotangent.at[98:].set(poison)
    found = jax.jit(_with_gradients(sizes))(*spoilt)
    for got, truth in zip(found, want, strict=True):
        x = np.asarray(got, np.float64)
        assert np.abs(x - truth).max() <= 0.01 * np.abs(truth).max()
    assert not np.any(np.asarray(found[0][98:]))
    assert not np.any(np.asarray(found[1][98:]))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nothing_of_another_group_reaches_a_row(poison: float) -> None:
    sizes = _SIZES["rows in none"]
    rows, matrices, cotangent = _rows(sizes, jnp.bfloat16)
    want = _truth(sizes, rows, matrices, cotangent)
    spoilt = (
        rows.at[33:].set(poison),
        matrices.at[1:].set(poison),
        cotangent.at[33:].set(poison),
    )
    found = jax.jit(_with_gradients(sizes))(*spoilt)
    for got, truth in zip(found[:2], want[:2], strict=True):
        x = np.asarray(got, np.float64)
        assert np.abs(x[:33] - truth[:33]).max() <= 0.01 * np.abs(truth).max()
        assert np.all(x[98:] == 0)


def test_tuning_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "table", ChoiceTable)
    cell = ATTENTIONS["longer"]
    operands = cell.operands()
    tuning = plans.autotune(cell.with_gradients, *operands, whole_program=False)
    timed = [dict(choice.contenders_us) for choice in tuning.choices.values()]
    assert len(timed) == 2
    for times in timed:
        assert any(title.startswith("tokamax") for title in times)
