# SPDX-License-Identifier: Apache-2.0
"""A few attention calls for compute-sanitizer, each buffer allocated on its own.

compute-sanitizer --error-exitcode 1 python -m tests.gpu.memcheck
"""

import os

# One cudaMalloc a buffer, so that an access past its end is seen.
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp

import jax_cudnn
from tests.sdpa_cases import Case, make_operands

CASES = (
    Case(name="plain", s=65, t=129, d=64),
    Case(name="causal_groups", s=67, t=67, h=4, k=2, d=77, causal=True),
    Case(name="bias", s=33, t=35, d=64, bias="ht"),
    Case(name="mask_lengths", s=63, t=65, mask="bst", key_lengths=(0, 60)),
    Case(name="residual", s=31, t=37, d=40, with_residual=True),
    Case(name="one_query", s=1, t=19, d=128, bias="bht"),
)


def run(case: Case) -> None:
    """Run forward and backward once and wait for both."""
    operands = make_operands(case)

    def loss(*moving: jax.Array) -> jax.Array:
        arrays = list(operands.arrays)
        for index, value in zip(operands.wanted, moving, strict=True):
            arrays[index] = value
        results = jax_cudnn.sdpa(
            *arrays[:5],
            is_causal=case.causal,
            query_seq_lengths=arrays[5],
            key_value_seq_lengths=arrays[6],
            implementation="cudnn",
            return_residual=case.with_residual,
        )
        leaves = jax.tree.leaves(results)
        total = jnp.zeros((), jnp.float32)
        for leaf in leaves:
            leaf = leaf.astype(jnp.float32)
            total += jnp.sum(jnp.where(jnp.isfinite(leaf), leaf, 0) ** 2)
        return total

    moving = [operands.arrays[i] for i in operands.wanted]
    gradient = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(moving)))))
    jax.block_until_ready(gradient(*moving))


if __name__ == "__main__":
    for each in CASES:
        run(each)
    print(f"{len(CASES)} cases done")
