# SPDX-License-Identifier: Apache-2.0
"""Tests that programs for CUDA are written where JAX makes arrays of 64 bits."""

import jax
import pytest

from jax_cudnn.lowering import devices
from tests.attention.shared.features import FEATURES as ATTENTION
from tests.plans.operation_features import FEATURES as OPERATIONS

_FEATURES = {each.key: each for each in (*ATTENTION, *OPERATIONS)}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "local_target", lambda: None)


@pytest.mark.sampled
@pytest.mark.parametrize("key", _FEATURES)
def test_programs_are_written_where_jax_makes_64_bit_arrays(
    key: str, x64: None
) -> None:
    """A Python number beside an array of f32 is then no f32."""
    del x64
    feature = _FEATURES[key]
    calls = [(feature.call, feature.operands)]
    if feature.trained:
        operands = (feature.cotangent(), *feature.operands)
        calls.append((feature.gradient(), operands))
    for function, operands in calls:
        traced = jax.jit(function).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo" in text
