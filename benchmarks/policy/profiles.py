# SPDX-License-Identifier: Apache-2.0
"""Profiles contenders: which kernels they launch, and how long each takes.

    python -m benchmarks.profiles --out docs/internals/measured

runs workloads of the other benchmarks in which a rival is ahead, records a few calls of
each contender with JAX's profiler, which sees the kernels of the whole process, and
writes profiles.json and profiles.md there. `--only REGEX` chooses workloads; those of
others that the file in the folder has are kept.
"""

import argparse
import collections
import functools
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.attention import attention_cells, attention_features, decode
from benchmarks.harness import contest, contest_report, torch_side
from benchmarks.harness.contest import BOTH, FORWARD
from benchmarks.harness.records import (
    Row,
    gpu_of,
    kept_rows,
    on_this_gpu,
    renewed,
    write_records,
)
from benchmarks.harness.report import environment, last_run_text
from benchmarks.harness.timing import Contender, watched
from benchmarks.harness.torch_side import torch
from benchmarks.layers import norms, operation_cells
from benchmarks.models import __main__ as models
from benchmarks.models import zoo
from benchmarks.products import fusion, fusion_cells

_DATA, _PAGE = "profiles.json", "profiles.md"
_CALLS = 5
# So many kernels of a contender are kept, and so many named on the page.
_KEPT, _NAMED = 40, 6
_LONGEST_NAME = 72


@dataclass(frozen=True, kw_only=True)
class Look:
    """A workload of another benchmark, in these directions, in their order."""

    name: str
    run: Callable[[], object]
    directions: Sequence[str] = (FORWARD, BOTH)


# --- the profiler ---------------------------------------------------------------------


class Event(NamedTuple):
    """What ran on the GPU: its name, and from when and for how many nanoseconds."""

    name: str
    duration: float
    start: float = 0.0


def recorded(
    contender: Contender, count: int = _CALLS, device: str = "/device:GPU"
) -> list[Event]:
    """Return what calls of a contender run on GPUs whose names begin so."""
    contender.wait(contender.call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(count):
                contender.wait(contender.call())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return list(events(file, device))


def events(file: Path, device: str) -> Iterator[Event]:
    """Yield what ran on GPUs whose names begin so, given the profiler's file."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not plane.name.startswith(device):
            continue
        for line in plane.lines:
            # The others repeat these, by modules and operations of XLA.
            if line.name.startswith("Stream"):
                for each in line.events:
                    yield Event(each.name, each.duration_ns, each.start_ns)


def summary(found: Sequence[Event], count: int) -> Row:
    """Return kernels of a workload that was computed so often, and the time of each."""
    total: collections.Counter[str] = collections.Counter()
    often: collections.Counter[str] = collections.Counter()
    for event in found:
        total[event.name] += event.duration
        often[event.name] += 1
    named = total.most_common(_KEPT)
    return {
        "kernels": round(len(found) / count, 2),
        "kernels_us": round(sum(total.values()) / count / 1e3, 2),
        "longest": [
            {
                "name": name,
                "count": round(often[name] / count, 2),
                "us": round(us / count / 1e3, 2),
            }
            for name, us in named
        ],
    }


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
            rows.append(row | summary(recorded(each), _CALLS * each.count))

    with watched(watch):
        look.run()
    return rows


# --- the page -------------------------------------------------------------------------


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- The kernels that contenders launch where a rival is ahead. -->",
        "",
        "# Profiles",
        "",
        "Printed by `python -m benchmarks.profiles --out "
        "docs/internals/measured`; do not "
        f"edit. {last_run_text(data['environment'])}",
        "",
        "These are workloads of the other pages in which a rival was ahead. The first",
        "time is that of a call, as on those pages. The second is the sum of its",
        "kernels, as JAX's profiler recorded them in other calls right after. Copies",
        "count as kernels. Numbers before a name say how many of it there are in a",
        f"call, if not one. At most {_NAMED} are named.",
    ]
    for workload in dict.fromkeys(row["workload"] for row in data["rows"]):
        lines += ["", f"## {workload}", ""]
        lines += [
            "| GPU | | contender | µs | µs in kernels | kernels | the longest, µs |"
        ]
        lines += ["| --- | --- | --- | ---: | ---: | ---: | --- |"]
        for row in data["rows"]:
            if row["workload"] == workload:
                longest = "<br>".join(map(_told, row["longest"][:_NAMED]))
                lines.append(
                    f"| {gpu_of(row)} | {row['what']} | {row['contender']} "
                    f"| {row['us']:.1f} "
                    f"| {row['kernels_us']:.1f} | {row['kernels']:g} | {longest} |"
                )
    return "\n".join(lines) + "\n"


def _told(kernel: Row) -> str:
    name = re.sub(r"\s+", " ", kernel["name"]).replace("|", "/")
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    often = "" if kernel["count"] == 1 else f"{kernel['count']:g} x "
    return f"{kernel['us']:.1f}: {often}`{name}`"


def main() -> None:
    """Look at the workloads and write the page, after each."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--only", default="", help="a regular expression of workloads")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / _DATA
    found = list(looks())
    order = [look.name for look in found]
    rows = [row for row in kept_rows(file) if row["workload"] in order]
    versions = environment()
    for look in found:
        if not re.search(options.only, look.name):
            continue
        print(look.name, flush=True)
        measured = on_this_gpu(rows_of(look), versions)
        rows = renewed(rows, measured, ["workload"], order)
        # Each time, so that a run that is cut off leaves what it measured.
        data = {"environment": versions, "rows": rows}
        write_records(file, data)
        (options.out / _PAGE).write_text(markdown(data))
        if torch is not None:
            torch_side.forget_compiled()
            torch_side.release_memory()


if __name__ == "__main__":
    main()
