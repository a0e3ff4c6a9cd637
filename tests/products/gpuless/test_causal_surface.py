# SPDX-License-Identifier: Apache-2.0
"""Tests who runs causal convolutions, by the cuDNN that is installed, without a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import causal_conv1d, offline, plans
from jax_cudnn.plans import PlanOptions

_DETERMINISTIC = PlanOptions(deterministic=True)


def _gradients(taps: int, layout: Any, plan: PlanOptions | None) -> Any:
    """Return a function of x, w and bias, with types for these."""
    shapes = [(2, 512, 64), (taps, 64), (64,)]
    if layout == "NCW":
        shapes[:2] = [(2, 64, 512), (64, taps)]

    def loss(x: Any, w: Any, bias: Any) -> jax.Array:
        y = causal_conv1d(
            x, w, bias=bias, dimension_numbers=layout, implementation="cudnn", plan=plan
        )
        return jnp.sum(y.astype(jnp.float32))

    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.value_and_grad(loss, (0, 1, 2)), types


@pytest.mark.parametrize(
    ("taps", "layout", "plan", "by_function"),
    [
        (4, "NWC", None, [True, True]),
        (16, "NCW", None, [True, True]),
        (4, "NWC", _DETERMINISTIC, [True, False]),
        (9, "NWC", None, [False, False]),
    ],
)
@pytest.mark.parametrize("gpu", ["A100", "H200"])
def test_who_runs_it(
    gpu: str, taps: int, layout: str, plan: PlanOptions | None, by_function: list[bool]
) -> None:
    function, types = _gradients(taps, layout, plan)
    calls = plans.explain(function, *types, device=gpu).calls
    assert [each.implementation for each in calls] == ["cudnn", "cudnn"]
    version = offline.named_gpu(gpu).target.cudnn_version
    has_it = version >= 92200
    found = [(each.plan or "").startswith("causalConv1d") for each in calls]
    assert found == [is_so and has_it for is_so in by_function]
