# SPDX-License-Identifier: Apache-2.0
"""Times the convolutions that users of JAX reported as slow, on one GPU.

    python -m benchmarks.conv_reports --out docs/internals/measured

writes conv_reports.json and conv_reports.md there: forward and with all gradients,
beside plain JAX, and PyTorch as it is and compiled. See contest.py for how contenders
are checked and timed. `--only REGEX` chooses cells by name and size, and `--part I/N`
one of N parts, so that N GPUs may share the cells, a process each; the other rows in
the folder are kept. `--small` tries the script on a CPU, where times say nothing.
"""

from benchmarks.harness import contest_report
from benchmarks.products.conv_report_cells import REPORTS, cells

markdown = contest_report.page_of(
    name="conv_reports",
    title="Convolutions that were reported as slow",
    comment="Convolutions of issues about JAX, beside plain JAX and PyTorch.",
    about=(
        "Each workload is a program of our own with the sizes of a report:",
        "",
        *(f"- {each.link}: {each.about}" for each in REPORTS),
        "",
        "`xla` is plain JAX with channels last, and `xla, channels first` the same",
        "with the layout of the report. PyTorch has channels last in memory, except",
        "for 1-D convolutions, for which it has no such format. It times cuDNN's",
        "algorithms first (`torch.backends.cudnn.benchmark`). jax_cudnn has channels",
        "last. All contenders may multiply f32 in TF32.",
    ),
)

if __name__ == "__main__":
    contest_report.main(__doc__, markdown, cells)
