# SPDX-License-Identifier: Apache-2.0
"""Times attention's features beside jax.nn, PyTorch and tokamax, on one GPU.

    python -m benchmarks.attention_features --out docs/internals/measured

writes attention_features.json and .md there. Needs an NVIDIA GPU. PyTorch is used where
it is installed, with its flash and cuDNN attention and compiled `flex_attention`, and
so is tokamax, with its Mosaic kernels.
Operands are random bf16; see contest.py for how contenders are checked and timed.
`--only REGEX` chooses workloads by their names; the rows of others that the file in the
folder has are kept. `--small` tries the script on a CPU, where times say nothing.
"""

from benchmarks.attention import ways
from benchmarks.attention.attention_cells import WORKLOADS
from benchmarks.harness import contest_report
from benchmarks.harness.contest import Cell


def cells(*, small: bool) -> list[Cell]:
    """Return the workloads; small ones are for a CPU."""
    works = map(ways.small, WORKLOADS) if small else WORKLOADS
    return [ways.cell_of(work) for work in works]


markdown = contest_report.page_of(
    name="attention_features",
    title="Attention's features",
    comment="What attention's features take on a GPU, beside other libraries.",
    baseline=ways.OURS,
    about=(
        "Sizes are (batch, length, query heads : key heads, head size). `jax_cudnn` is",
        "cuDNN's first plan. Among the candidates of `tuned` are tokamax's kernels.",
        "`torch flex` is PyTorch's `flex_attention`, compiled for these shapes. Sinks",
        "are added to it by its log-sum-exp, in the same compiled function. `torch",
        "varlen` is its `varlen_attn`. In f8, `jax_cudnn` is `f8.sdpa`, beside `sdpa`",
        "on bf16. For the deterministic gradient, PyTorch is told to use",
        "deterministic algorithms. Where heads share their dropout, `jax_cudnn` is",
        "`jax_cudnn.flax.attention_fn` by cuDNN, and neither is causal. Dropout, f8",
        "and a million tokens are not compared with a truth.",
    ),
)

if __name__ == "__main__":
    contest_report.main(__doc__, markdown, cells, max_plans=10, rounds=7, round_ms=25.0)
