# SPDX-License-Identifier: Apache-2.0
"""Times pooling, softmax, mixtures of experts and fused functions, on one GPU.

    python -m benchmarks.operations --out docs/internals/measured

writes operations.json and operations.md there: beside XLA's code, PyTorch and, where it
has them, tokamax. See contest.py for how contenders are checked and timed. `--only
REGEX` chooses cells by name and size; those that the file in the folder has beside them
are kept. `--small` tries the script on a CPU, where times say nothing.
"""

from benchmarks.harness import contest_report
from benchmarks.layers.operation_cells import cells

markdown = contest_report.page_of(
    name="operations",
    title="Pooling, softmax, grouped products and fused functions",
    comment="What operations take on a GPU, beside XLA's code, PyTorch and tokamax.",
    about=(
        "All numbers are bf16. `xla` is what a user of plain JAX writes, and for",
        "softmax what jax_cudnn recommends. Groups of `ragged_dot` are of different",
        "sizes. Beside products and layers in `f8` run those in bf16. Plain layers of",
        "experts sort tokens and call `jax.lax.ragged_dot`; `dense one-hot` computes",
        "all experts for all tokens. What begins with `fuse` is a function passed to",
        "`jax_cudnn.fuse`.",
    ),
)

if __name__ == "__main__":
    contest_report.main(__doc__, markdown, cells)
