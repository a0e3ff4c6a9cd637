# SPDX-License-Identifier: Apache-2.0
"""Tests mixtures of experts on GPUs: against float64, and over all GPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jax_cudnn import moe
from tests.products.moe.truth import PLAIN, drawn, mixture

pytestmark = pytest.mark.gpu

_SIZES = {"T": 96, "D": 64, "E": 8, "F": 80, "G": 48}


@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_a_layer_in_bf16_is_the_loop_in_f64(capacity_factor: float | None) -> None:
    options: dict[str, Any] = {"top_k": 2, "capacity_factor": capacity_factor}
    arrays: dict[str, Any] = {
        # Scaled as layers are.
        name: (x / x.shape[-2] ** 0.5 if x.ndim > 1 else x).astype(jnp.bfloat16)
        for name, x in drawn(0, **_SIZES).items()
    }
    y, auxiliary = jax.jit(functools.partial(moe.layer, **options))(**arrays)
    want = mixture(**arrays, **options)
    eps = 2e-2 * np.abs(want.output).max()
    np.testing.assert_allclose(np.asarray(y, np.float64), want.output, atol=eps)
    np.testing.assert_allclose(auxiliary.load, want.load, rtol=1e-5)
    assert float(auxiliary.dropped) == pytest.approx(want.dropped)


def _over_all_gpus() -> dict[str, Any]:
    count = len(jax.local_devices())
    if count < 2 or _SIZES["E"] % count:
        pytest.skip(f"{count} GPUs: it needs 2, 4 or 8")
    mesh = jax.make_mesh((count,), ("expert",), axis_types=(AxisType.Auto,))
    return {"expert_axis": "expert", "mesh": mesh}


def _loss(options: dict[str, Any], arrays: dict[str, Any]) -> Any:
    y, auxiliary = moe.layer(**arrays, **options)
    return jnp.sum(jnp.sin(y)) + auxiliary.load_balance_loss, y


@pytest.mark.parametrize("capacity_factor", [None, 0.7])
@pytest.mark.parametrize("examples", [None, "x", "down_w"])
def test_gpus_that_share_experts_give_what_one_gives(
    x64: None, capacity_factor: float | None, examples: str | None
) -> None:
    options: dict[str, Any] = {"top_k": 3, "capacity_factor": capacity_factor}
    arrays = drawn(1, PLAIN, np.float64, **_SIZES)

    def gradient(options: dict[str, Any]) -> Any:
        run = jax.value_and_grad(functools.partial(_loss, options), has_aux=True)
        if examples is None:
            return jax.jit(run)(arrays)
        axes = {name: 0 if name == examples else None for name in arrays}
        array = arrays[examples]
        many = arrays | {examples: jnp.stack([array, -array])}
        return jax.jit(jax.vmap(run, (axes,)))(many)

    got, want = gradient(options | _over_all_gpus()), gradient(options)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = 1 + np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-10 * scale)
