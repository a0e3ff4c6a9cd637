# SPDX-License-Identifier: Apache-2.0
"""Does the real cuDNN plan every block of attention over several devices?"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_cudnn import parallel, plans

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
        # The diagonal, the neighbour's last keys, and the corner before these.
        ({"local_window_size": (300, 0), "is_causal": True}, False, 3),
        ({"method": "all_gather", "is_causal": True}, False, 4),
        ({"method": "all_to_all", "is_causal": True}, False, 1),
        ({"is_causal": True}, True, 4),
    ],
    ids=["zigzag", "window", "all_gather", "all_to_all", "bias"],
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
