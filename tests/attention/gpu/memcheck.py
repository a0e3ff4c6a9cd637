# SPDX-License-Identifier: Apache-2.0
"""A few attention calls for compute-sanitizer, with a separate allocation per buffer.

    compute-sanitizer --error-exitcode 1 python memcheck.py [--break]

With --break, one launch is given an operand at an address that is not allocated.
"""

import os
import sys
from pathlib import Path

# One cudaMalloc a buffer, so that an access past its end is seen.
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
# Last, so that the package is the installed one and not the source tree beside tests/.
sys.path.append(str(Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp

import jax_cudnn
from jax_cudnn import native
from jax_cudnn.graph import to_json
from jax_cudnn.lowering import traced_graphs
from tests.attention.shared.cases import Case, attention, make_operands, with_gradients

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


def run_with_a_bad_address() -> None:
    """Launch a matmul whose first operand is nowhere."""
    x, w = jnp.zeros((512, 256), jnp.bfloat16), jnp.zeros((256, 128), jnp.bfloat16)
    ((graph, _, _),) = traced_graphs(jax_cudnn.matmul, x, w)
    plan = native.plan(to_json(graph))
    result = jnp.zeros((512, 128), jnp.bfloat16)
    workspace = jnp.zeros(max(plan.workspace_bytes, 1), jnp.uint8)
    jax.block_until_ready((w, result, workspace))
    buffers = native.LaunchBuffers(
        operands=(4096, w.unsafe_buffer_pointer()),
        results=(result.unsafe_buffer_pointer(),),
    )
    native.time_plan(
        to_json(graph), [buffers], workspace=workspace.unsafe_buffer_pointer()
    )


if __name__ == "__main__":
    if "--break" in sys.argv:
        run_with_a_bad_address()
    else:
        for each in CASES:
            run(each)
        print(f"{len(CASES)} cases done", flush=True)
    # Under the sanitizer, XLA's own tear-down now and then crashes or hangs. That a
    # process ends well without it is tested elsewhere (test_sdpa_execution.py).
    os._exit(0)
