# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans every block of attention over several devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_cudnn import masks, parallel, plans, score_mods

pytestmark = pytest.mark.sampled

_TOKENS = PartitionSpec(None, "seq")
_QUERY = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)
_KEY = jax.ShapeDtypeStruct((2, 1024, 2, 64), jnp.bfloat16)
_BIAS = jax.ShapeDtypeStruct((1, 8, 1024, 1024), jnp.bfloat16)


@pytest.mark.parametrize("device", ["A100", "H200", "B200"])
@pytest.mark.parametrize(
    ("options", "has_bias", "calls"),
    [
        # The diagonal, and two programs in each of three steps.
        ({"order": "zigzag", "is_causal": True}, False, 7),
        # The same: earlier devices' keys as on the diagonal, later ones' a token later.
        ({"order": "striped", "is_causal": True}, False, 7),
        # The diagonal, the neighbour's last keys, and the corner before these.
        ({"local_window_size": (300, 0), "is_causal": True}, False, 3),
        ({"method": "all_gather", "is_causal": True}, False, 4),
        ({"method": "all_to_all", "is_causal": True}, False, 1),
        ({"is_causal": True}, True, 4),
    ],
    ids=["zigzag", "striped", "window", "all_gather", "all_to_all", "bias"],
)
def test_cudnn_plans_each_block_and_its_gradient(
    options: dict[str, Any], has_bias: bool, calls: int, device: str
) -> None:
    options = {**options, "implementation": "cudnn"}
    if options.get("method") == "all_to_all":
        key = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)
    else:
        key = _KEY
    operands = [_QUERY, key, key, *([_BIAS] if has_bias else [])]
    attend = jax.shard_map(
        functools.partial(parallel.sdpa, axis_name="seq", **options),
        mesh=AbstractMesh((4,), ("seq",), axis_types=(AxisType.Auto,)),
        in_specs=(_TOKENS,) * 3 + (PartitionSpec(None, None, "seq"),) * has_bias,
        out_specs=_TOKENS,
    )

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(attend(*operands).astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss, tuple(range(len(operands)))))
    with plans.using(device=device):
        # Raises where cuDNN has no plan.
        lowered = gradient.trace(*operands).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @jax_cudnn") == 2 * calls


_OFFSETS = jnp.array([0, 170, 512, 520, 1024])
_FEATURES = {
    "packed": {"mask": masks.Packed(_OFFSETS)},
    "packed_zigzag": {
        "mask": masks.Packed(_OFFSETS) & masks.Causal(),
        "order": "zigzag",
    },
    "packed_striped": {
        "mask": masks.Packed(_OFFSETS) & masks.Causal(),
        "order": "striped",
    },
    "packed_window": {"mask": masks.Packed(_OFFSETS) & masks.Window(300, 0)},
    "packed_ends": {
        "mask": masks.Packed(_OFFSETS, _OFFSETS) & masks.Causal("bottom-right"),
        "method": "all_gather",
    },
    "prefix": {"mask": masks.Prefix(jnp.array([100, 500]))},
    "softcap": {"score_mod": score_mods.softcap(30.0), "is_causal": True},
    "alibi": {"score_mod": score_mods.alibi(score_mods.alibi_slopes(8))},
    "dropout": {
        "dropout_rate": 0.1,
        "dropout_key": jax.random.key(0),
        "is_causal": True,
        "order": "zigzag",
    },
    "sinks": {"sinks": jnp.zeros(8), "is_causal": True},
}


@pytest.mark.parametrize("device", ["A100", "H200", "B200"])
@pytest.mark.parametrize("name", _FEATURES)
def test_cudnn_plans_blocks_with_masks_scores_and_dropout(
    name: str, device: str
) -> None:
    if name == "softcap" and device == "A100":
        pytest.skip("sm_80 has no gradient of a score_mod in cuDNN 9.19 and 9.27")
    attend = jax.shard_map(
        functools.partial(
            parallel.sdpa, axis_name="seq", implementation="cudnn", **_FEATURES[name]
        ),
        mesh=AbstractMesh((4,), ("seq",), axis_types=(AxisType.Auto,)),
        in_specs=_TOKENS,
        out_specs=_TOKENS,
    )

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(attend(*operands).astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    with plans.using(device=device):
        # Raises where cuDNN has no plan.
        lowered = gradient.trace(_QUERY, _KEY, _KEY).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    if name in ("packed_zigzag", "packed_striped") and device != "A100":
        # Also beside causality, sequences of the device's own tokens are packed.
        assert "query_offsets" in text
