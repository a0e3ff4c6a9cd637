# SPDX-License-Identifier: Apache-2.0
"""Times what jax_cudnn runs through XLA beside what a user of JAX writes, on one GPU.

    python -m benchmarks.xla_forms --out docs/internals/measured

writes xla_forms.json and xla_forms.md there: each operation with `implementation="xla"`
and as plain JAX has it, forward, with the gradients of all operands for given
cotangents, and for norms with those of a loss. See contest.py for how contenders are
checked and timed. `--only REGEX` chooses cells by name and size; those that the file in
the folder has beside them are kept. `--small` tries the script on a CPU, where times
say nothing.
"""

from benchmarks.harness import contest_report
from benchmarks.xla.xla_form_cells import cells

markdown = contest_report.page_of(
    name="xla_forms",
    title="XLA's form of operations beside plain JAX",
    comment="What jax_cudnn runs through XLA, beside plain JAX, on a GPU.",
    about=(
        '`jax_cudnn by xla` is an operation with `implementation="xla"`. The others',
        "are what a user of JAX writes. All numbers are bf16 where no dtype is named.",
        "Gradients are those of all operands, for given cotangents, with the result.",
        "Of a loss, they are those of the sum of the squares of the result: there XLA",
        "sees how the cotangent depends on it.",
    ),
)

if __name__ == "__main__":
    contest_report.main(__doc__, markdown, cells, rounds=15, round_ms=8.0)
