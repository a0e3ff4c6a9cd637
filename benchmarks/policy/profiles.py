# SPDX-License-Identifier: Apache-2.0
"""Profiles contenders: which kernels they launch, and how long each takes.

    python -m benchmarks.profiles --out docs/internals/measured

runs workloads of the other benchmarks in which a rival is ahead, records a few calls of
each contender with JAX's profiler, which sees the kernels of the whole process, and
writes profiles.json and profiles.md there. `--only REGEX` chooses workloads; those of
others that the file in the folder has are kept.
"""

import functools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.attention import attention_cells, attention_features, decode
from benchmarks.harness import contest, contest_report, torch_side
from benchmarks.harness.contest import BOTH, FORWARD
from benchmarks.harness.page import Data, Page, Row, table_of
from benchmarks.harness.profiler import CALLS, recorded, summary
from benchmarks.harness.program import run_benchmark
from benchmarks.harness.timing import Contender, watched
from benchmarks.harness.torch_side import torch
from benchmarks.layers import norms, operation_cells
from benchmarks.models import __main__ as models
from benchmarks.models import zoo
from benchmarks.products import fusion, fusion_cells

# So many kernels are named on the page.
_NAMED = 6
_LONGEST_NAME = 72


@dataclass(frozen=True, kw_only=True)
class Look:
    """A workload of another benchmark, in these directions, in their order."""

    name: str
    run: Callable[[], Iterable[object] | None]
    directions: Sequence[str] = (FORWARD, BOTH)

    def __str__(self) -> str:
        return self.name


# --- workloads ------------------------------------------------------------------------


def looks() -> Iterator[Look]:
    """Yield the workloads."""
    for work in attention_cells.WORKLOADS:
        if work.name in _ATTENTION:
            run = functools.partial(
                attention_features.run_workload, work, with_flex=False
            )
            yield Look(name=f"attention, {work.name}", run=run)
    cached = decode.CELLS[0]
    yield Look(
        name=f"attention over a cache {cached.name}",
        run=functools.partial(decode.run_cell, cached),
        directions=(FORWARD,),
    )
    for cell in fusion_cells.CELLS:
        if cell.key in _FUSIONS:
            yield Look(name=cell.key, run=functools.partial(_run_fusion, cell))
    settings = contest.Settings(
        with_torch=torch is not None, with_tuning=True, with_first=False
    )
    shipped = contest_report.shipped()
    for each in (
        *map(norms.cell, norms.WORKLOADS),
        *operation_cells.cells(small=False),
    ):
        if re.search(_CONTESTS, each.name):
            run = functools.partial(contest.measure, each, settings, shipped)
            yield Look(name=each.name, run=run, directions=each.directions)
    for model in zoo.models(small=False):
        if model.name in _MODELS:
            yield Look(
                name=f"{model.name}, a training step",
                run=functools.partial(_train, model),
                directions=(BOTH,),
            )


_ATTENTION = (
    "causal, d=128",
    "a learned bias, d=64",
    "dropout",
    "latent attention, d=192, e=128",
)
_FUSIONS = (
    "conv: conv 3x3 (64,56,56,64->64)+bias+silu",
    "conv: conv 3x3 groups 32 (64,28,28,256->256)+bias+relu",
    "convnext: conv 4x4/4 (64,224,224,3->96)+bias",
)
_CONTESTS = "group_norm|batch_norm.* 64 x 56|layer_norm . residual|ragged_dot, 8"
_MODELS = ("GPT-2 small", "Llama-like", "ViT-B", "ResNet-50", "3-D U-Net")


def _train(model: zoo.Model) -> None:
    models.measure(
        model,
        is_training=True,
        with_torch=torch is not None,
        with_tuning=False,
        steps=2,
    )


def _run_fusion(cell: fusion_cells.Cell) -> None:
    settings = fusion.Settings(
        tuner=fusion.Tuner([cell], has_gpu=True),
        rates=fusion.measured_rates(tiny=False),
        with_torch=torch is not None,
    )
    fusion.run_cell(cell, settings)


def rows_of(look: Look) -> list[Row]:
    """Run a workload, and return a row for each contender that was timed."""
    directions = iter(look.directions)
    rows: list[Row] = []

    def watch(
        contenders: Mapping[str, Contender], times: Mapping[str, Sequence[float]]
    ) -> None:
        what = next(directions)
        for name, each in contenders.items():
            row = {"workload": look.name, "what": what, "contender": name}
            row["us"] = round(statistics.median(times[name]) / each.count, 2)
            rows.append(row | summary(recorded(each), CALLS * each.count))

    with watched(watch):
        for _ in look.run() or ():
            pass
    return rows


def _measure(found: Sequence[Look]) -> Iterator[Row]:
    for look in found:
        yield from rows_of(look)
        if torch is not None:
            torch_side.forget_compiled()
            torch_side.release_memory()


# --- the page -------------------------------------------------------------------------


def _lines(data: Data) -> list[str]:
    lines = [
        "These are workloads of the other pages in which a rival was ahead. The first",
        "time is that of a call, as on those pages. The second is the sum of its",
        "kernels, as JAX's profiler recorded them in other calls right after. Copies",
        "count as kernels. Numbers before a name say how many of it there are in a",
        f"call, if not one. At most {_NAMED} are named.",
    ]
    for workload in dict.fromkeys(row["workload"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["workload"] == workload]
        told = ("<br>".join(map(_told, row["longest"][:_NAMED])) for row in rows)
        lines += ["", f"## {workload}", ""]
        lines += table_of(
            ({**row, "told": each} for row, each in zip(rows, told, strict=True)),
            "GPU | | contender | >µs | >µs in kernels | >kernels | the longest, µs",
            "{gpu} | {what} | {contender} | {us:.1f} | {kernels_us:.1f} | {kernels:g} "
            "| {told}",
        )
    return lines


def _told(kernel: Row) -> str:
    name = re.sub(r"\s+", " ", kernel["name"]).replace("|", "/")
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    often = "" if kernel["count"] == 1 else f"{kernel['count']:g} x "
    return f"{kernel['us']:.1f}: {often}`{name}`"


markdown = Page(
    name="profiles",
    title="Profiles",
    comment="The kernels that contenders launch where a rival is ahead.",
    names_gpus=True,
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda *, small: list(looks()),
        _measure,
        markdown,
        keeps="any GPU",
        keys=["workload"],
        order=[look.name for look in looks()],
    )
