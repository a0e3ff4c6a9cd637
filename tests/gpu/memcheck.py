# SPDX-License-Identifier: Apache-2.0
"""A few attention calls for compute-sanitizer, each buffer allocated on its own.

compute-sanitizer --error-exitcode 1 python -m tests.gpu.memcheck
"""

import os

# One cudaMalloc a buffer, so that an access past its end is seen.
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"

import jax

from tests.sdpa_cases import Case, attention, make_operands, with_gradients

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
    call = attention(case, "cudnn")
    gradients = with_gradients(call, operands.cotangents, operands.wanted)
    jax.block_until_ready(gradients(*operands.arrays))


if __name__ == "__main__":
    for each in CASES:
        run(each)
    print(f"{len(CASES)} cases done")
