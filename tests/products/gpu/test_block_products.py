# SPDX-License-Identifier: Apache-2.0
"""Tests layers in MXFP8 and NVFP4 on a GPU, beside float64 of the rounded."""

from typing import Any

import jax
import numpy as np
import pytest

from jax_cudnn import f8, native, plans
from tests.products.shared.block_scaled import truth
from tests.products.shared.f8_dense import ULP, close, normal

pytestmark = pytest.mark.gpu

_RECIPES = {"MXFP8": f8.MXFP8(), "NVFP4": f8.NVFP4()}
# Tiles are full, are not, and are nearly empty.
_SIZES = [(256, 512, 384), (77, 131, 251), (1, 48, 7)]
# Sums of f8 kernels may not be kept in f32 to the last bit.
_SUMS = 3e-3


@pytest.mark.parametrize("name", list(_RECIPES))
@pytest.mark.parametrize("dtype", list(ULP))
@pytest.mark.parametrize("sizes", _SIZES, ids=str)
def test_products_are_those_of_the_rounded(
    name: str, dtype: str, sizes: tuple[int, int, int]
) -> None:
    """By cuDNN where the GPU has block-scaled products, and by XLA elsewhere."""
    m, k, n = sizes
    x = normal(0, m, k).astype(dtype)
    w = (normal(1, k, n) / np.sqrt(k)).astype(dtype)
    grad = (normal(2, m, n) * 1e-2).astype(dtype)

    @jax.jit
    def run(x: Any, w: Any, grad: Any) -> Any:
        y, back = jax.vjp(lambda x, w: f8.dense(x, w, recipe=_RECIPES[name]), x, w)
        return y, *back(grad)

    calls = plans.inspect(run, x, w, grad).calls
    runs = "cudnn" if native.device_target(0).sm_version >= 100 else "xla"
    assert {call.implementation for call in calls} == {runs}
    for found, wanted in zip(run(x, w, grad), truth(x, w, grad, name), strict=True):
        assert found.dtype == dtype
        close(found, wanted, ulp=ULP[dtype] + _SUMS)


@pytest.mark.parametrize("name", list(_RECIPES))
def test_a_block_that_is_not_finite_stays_in_its_row(name: str) -> None:
    x, w = normal(0, 256, 128), normal(1, 128, 256)
    run = jax.jit(lambda x: f8.dense(x, w, recipe=_RECIPES[name]))
    for value in (np.inf, np.nan):
        y = np.asarray(run(x.at[3, 4].set(value)))
        assert np.isnan(y[3]).all()
        assert np.isfinite(np.delete(y, 3, 0)).all()
