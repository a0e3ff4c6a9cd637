# SPDX-License-Identifier: Apache-2.0
"""Writes docs/support.md: for which convolutions and matmuls cuDNN has plans.

Run from the repository's root on a machine without a GPU, with the "gpuless" extra:
`python -m scripts.support_table`. The real cuDNN is asked for plans of the graphs of
tests/products/shared/fusion_cases.py; test_fusion_surface.py holds the same verdicts.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax

import jax_cudnn
from tests.common.gpuless import harness
from tests.common.gpuless.harness import CUDNN, target
from tests.products.gpuless.verdicts import Verdict, verdicts

FILE = Path(__file__).parent.parent / "docs" / "support.md"
_GPUS = ("a100", "h200", "b200")

# A pattern of a legalisation's notes, its word in the table, and what it stands for. An
# empty word is left out: filters are small.
_NOTES = (
    (r"^(grad_)?w is transposed", "", ""),
    (
        r"is transposed to channels-last",
        "transposed",
        "arrays are transposed to channels-last and back",
    ),
    (
        r"is (padded|fitted) outside the kernel",
        "padded outside",
        "padding that differs between two ends, or is negative, is applied before the "
        "kernel",
    ),
    (
        r"^channels .* are padded|^matrices are padded",
        "sizes padded",
        "channels, or the sizes of a matrix, are padded to multiples of 16 bytes",
    ),
    (
        r"is channels of",
        "more channels",
        "few channels become more channels: those of patches, windows, or rows of "
        "windows",
    ),
    (
        r"are taken in pairs",
        "pairs",
        "neighbouring positions of the last axis are computed together",
    ),
    (
        r"groups are merged into",
        "groups merged",
        "groups are merged into larger ones, with zeros in the filters",
    ),
    (
        r"groups are padded to",
        "groups padded",
        "channels of each group are padded to a size for which cuDNN has fast engines",
    ),
    (
        r"zeros of lhs_dilation are written",
        "zeros written",
        "the zeros of `lhs_dilation` are inserted before the kernel",
    ),
    (
        r"^the filters are flipped",
        "flipped",
        "the filters are flipped, and a convolution is computed as the gradient of "
        "another one, or a gradient as a convolution",
    ),
    (
        r"^x and grad_output change places",
        "swapped",
        "the gradient of the filters is that of an ordinary convolution, whose input "
        "is the cotangent",
    ),
    (
        r"^what surrounds the contraction",
        "alone",
        "cuDNN computes the contraction, and XLA the operations around it",
    ),
    (
        r"^8-bit operands are converted",
        "converted before",
        "XLA converts the 8-bit operands before the kernel",
    ),
)
# cuDNN gives a reason for each engine. These only say that an engine is for other GPUs.
_UNTELLING = (
    r"only supported since|fortBackend\.is_|fort_device::|Unsupported node in the graph"
    r"|support this graph pattern at: true|Only GEMV"
)
_NOTHING = "no engine takes this pattern"
_STEPS = ("forward", "training", "grad_x", "grad_w", "grad_a", "grad_b")


class _Row(NamedTuple):
    """Verdicts that are the same for all combinations of the names."""

    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    steps: tuple[str, ...]
    cells: tuple[str, ...]


class _Refusals:
    """The distinct reasons of refusals, numbered as they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, verdict: Verdict) -> int:
        """Return the number of a verdict's reasons."""
        text = _reason(verdict)
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def _reason(verdict: Verdict) -> str:
    """Return our reason, or the informative ones of cuDNN's first refusal, short."""
    if verdict.reasons:
        return "; ".join(verdict.reasons)
    sentences, conditions = set[str](), set[str]()
    for reason in verdict.answers[0]["reasons"]:
        _, _, text = str(reason).partition(": ")
        if not re.search(_UNTELLING, text):
            sentence, at, _ = text.partition(" at: ")
            (sentences if at else conditions).add(" ".join(sentence.split()))
    # A condition from cuDNN's source code is informative only if it is short.
    told = sorted(sentences) + sorted(each for each in conditions if len(each) < 40)
    return "cuDNN: " + ("; ".join(f"`{each}`" for each in told) or _NOTHING)


def _cell(verdict: Verdict, refusals: _Refusals) -> str:
    if verdict.found is None:
        return f"no ({refusals.number(verdict)})"
    words = dict.fromkeys(word for note in verdict.found.notes if (word := _word(note)))
    return ", ".join(words) or "yes"


def _word(note: str) -> str:
    return next((word for text, word, _ in _NOTES if re.search(text, note)), note)


def _rows(group: str, refusals: _Refusals) -> list[_Row]:
    """Return the verdicts of a group of cases, rows of equal cells merged."""
    columns = [
        [v for v in verdicts(gpu) if v.part.case.group == group and v.has_contraction]
        for gpu in _GPUS
    ]
    rows = [
        _Row(
            cases=(each[0].part.case.row,),
            dtypes=(each[0].part.case.dtype,),
            steps=(each[0].part.step,),
            cells=tuple(_cell(verdict, refusals) for verdict in each),
        )
        for each in zip(*columns, strict=True)
    ]
    for field in ("dtypes", "steps", "cases"):
        rows = _merged(rows, field)
    return rows


def _merged(rows: Iterable[_Row], field: str) -> list[_Row]:
    """Merge rows that differ in one field only."""
    found: dict[_Row, list[str]] = {}
    for row in rows:
        rest = row._replace(**{field: ()})
        found.setdefault(rest, []).extend(getattr(row, field))
    return [row._replace(**{field: tuple(names)}) for row, names in found.items()]


def _section(group: str, refusals: _Refusals) -> list[str]:
    rows = _rows(group, refusals)
    names = [f"sm_{target(gpu).sm_version}" for gpu in _GPUS]
    lines = ["", f"## {group.capitalize()}", ""]
    cases = tuple(
        dict.fromkeys(
            v.part.case.row for v in verdicts(_GPUS[0]) if v.part.case.group == group
        )
    )
    if any(row.cases == cases for row in rows):
        lines += [*textwrap.wrap(f"All cases: {'; '.join(cases)}.", 88), ""]
    lines.append(f"| case | dtype | part | {' | '.join(names)} |")
    lines.append("| --- | --- | --- |" + " --- |" * len(names))
    for row in rows:
        which = "all" if row.cases == cases else "; ".join(row.cases)
        steps = sorted(row.steps, key=_STEPS.index)
        told = (which, ", ".join(row.dtypes), ", ".join(steps), *row.cells)
        lines.append(f"| {' | '.join(told)} |")
    return lines


_REST = """
- "auto" also leaves i8 and f8 weights with 16-bit inputs to XLA, until `plans.autotune`
  has measured a plan to be faster.
- XLA always runs f64. GPUs below sm_80 have no plan.
"""


def _head() -> list[str]:
    version = f"{CUDNN // 10000}.{CUDNN // 100 % 100}.{CUDNN % 100}"
    return f"""\
# Supported configurations: convolutions and matmuls

Written by `python -m scripts.support_table`, on a machine without a GPU; do not edit.
jax_cudnn {jax_cudnn.__version__}, cuDNN {version}.

This page says which convolutions and matmuls cuDNN has plans for, by GPU.
[Attention](attention_support.md) and [norms, pooling and grouped
matmuls](operation_support.md) have pages of their own.

The real cuDNN was asked for a plan of each part of the graphs in
`tests/products/shared/fusion_cases.py`, for an A100 (sm_80), an H200 (sm_90) and a B200
(sm_100) that were not present. Nothing was run on a GPU; `make gpuless` builds a sample
of the plans. The package was `nvidia-cudnn-jit`, which has only the engines that are
compiled when they are planned. The full cuDNN also has precompiled engines, for grouped
convolutions among others, and may support more.

- **case**: sizes are small, channels are multiples of 16, and arrays are channels-last
  unless the case says otherwise. "conv alone" has no epilogue.
- **part**: "forward" is the call, and "training" the call that also saves values for
  its gradient in the same kernel. The others are the gradients. By default, XLA
  computes the derivative of the activation and the gradients of bias, residual and
  scale.

| cell | meaning |
| --- | --- |
| yes | one kernel, with no work around it except on the filters, which are small |
| no | "auto" runs XLA, and "cudnn" raises `UnsupportedError` |
""".splitlines()


def page() -> str:
    """Return the text of docs/support.md; asks cuDNN about every case."""
    refusals = _Refusals()
    body: list[str] = []
    for group in dict.fromkeys(v.part.case.group for v in verdicts(_GPUS[0])):
        body += _section(group, refusals)
    used = "\n".join(body)
    legend = [
        f"| {word} | {meaning} |"
        for _, word, meaning in _NOTES
        if word and re.search(rf"\b{word}\b", used)
    ]
    reasons = [f"{i}. {text}" for i, text in enumerate(refusals.texts, 1)]
    rest = _REST.splitlines()
    lines = [*_head(), *legend, *rest, *body, "", "## Refusals", "", *reasons]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Plan every case, and write the page."""
    # As for the tests: see tests/conftest.py.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if reason := harness.missing():
        raise SystemExit(f"cannot plan without a GPU here: {reason}")
    FILE.write_text(page())


if __name__ == "__main__":
    main()
