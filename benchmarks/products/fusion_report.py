# SPDX-License-Identifier: Apache-2.0
"""The fusion benchmarks' report: goals met and missed, and a table for each group.

It reads what fusion.py measured, and needs no GPU.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.page import RANGE, Data, Page, table, versions_text
from benchmarks.products.fusion_cells import GOALS, GROUPS
from jax_cudnn.choices import Choice, Key

FORWARD, BOTH = "fwd", "fwd+bwd"
XLA, TUNED, UNTUNED, TORCH = "XLA", "tuned", "untuned", "torch"

# No cell, forward or with gradients, may be slower than XLA by more than this.
_SLOWEST = 1.03

_TITLES = {
    "conv": "Convolutions",
    "matmul": "Matmuls",
    "resnet50": "ResNet-50's convolutions (64 images of 224 px)",
    "convnext": "ConvNeXt-T's layers (64 images of 224 px)",
    "mlp": "Transformer MLPs and int8 weights",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One workload in one direction."""

    group: str
    name: str
    what: str
    goal: str | None
    result: dict[str, Any]

    def ratio(self, contender: str, field: str = "ratio") -> float | None:
        """Return a number of a contender, None where it did not run."""
        return self.result["contenders"].get(contender, {}).get(field)

    @property
    def ours(self) -> float:
        """The ratio to XLA, tuned; untuned where nothing was tuned."""
        tuned = self.ratio(TUNED)
        found = self.ratio(UNTUNED) if tuned is None else tuned
        assert found is not None
        return found


def rows(data: dict[str, Any]) -> list[Row]:
    """Return all workloads, direction by direction."""
    return [
        Row(group=cell["group"], name=cell["name"], what=what, goal=cell["goal"],
            result=result)
        for cell in data["cells"]
        for what, result in cell["results"].items()
    ]  # fmt: skip


def origin(info: dict[str, Any]) -> str:
    """Return where and when a run's numbers were taken."""
    return f"{versions_text(info['environment'])}, {info['date']}"


# --- choices --------------------------------------------------------------------------


def tuned_choices(data: dict[str, Any]) -> dict[Key, Choice]:
    """Return what tuning chose in all cells."""
    names = [field.name for field in dataclasses.fields(Key)]
    found: dict[Key, Choice] = {}
    for cell in data["cells"]:
        for entry in cell["tuning"]:
            fields = dict(entry)
            key = Key(**{name: fields.pop(name) for name in names})
            found[key] = Choice(**fields)
    return found


def made_by(data: dict[str, Any]) -> str:
    """Return what says where choices are from."""
    origins = dict.fromkeys(origin(info) for info in data["runs"])
    return "; ".join(["benchmarks.fusion", *origins])


# --- the page -------------------------------------------------------------------------


def _lines(data: Data) -> list[str]:
    lines = [*_introduction(data), "", "## Goals", ""]
    found = rows(data)
    lines += _goals(found)
    lines += [
        "",
        "[What limits the cells that miss them.]"
        "(../internals/measured/fusion_misses.md)",
    ]
    for group in GROUPS:
        for what, title in ((FORWARD, "forward"), (BOTH, "forward and gradients")):
            wanted = [row for row in found if (row.group, row.what) == (group, what)]
            if wanted:
                lines += ["", f"## {_TITLES[group]}, {title}", "", *_table(wanted)]
    lines += ["", "## Tuning", "", *_tuning(data)]
    notes = list(_failures(data))
    lines += ["", "## Failures", "", *notes] if notes else []
    return lines


def _introduction(data: dict[str, Any]) -> Iterator[str]:
    for info in data["runs"]:
        rates = (
            f"copy {info['copy_tb_per_s']:.1f} TB/s, "
            f"bf16 matmul {info['matmul_tf_per_s']:.0f} TF/s"
        )
        yield f"- `{info['command']}`: {origin(info)}; {rates}"
    yield ""
    yield (
        "XLA is what a user of JAX writes today, in bf16: `conv_general_dilated` or "
        "`jnp.matmul`, then bias, residual and `jax.nn`'s activation, with XLA's "
        'autotuner on. jax_cudnn is `implementation="auto"`: tuned after '
        "`plans.autotune`, untuned with no measured choices at all. PyTorch is eager, "
        "channels-last, with `cudnn.benchmark`. Each takes random operands, several "
        "sets of them in turn, too large together for the GPU's cache."
    )
    yield ""
    yield (
        "Times are medians a call. Ratios are times relative to XLA's, taken round by "
        "round in the same run: the median, in brackets the lowest and the highest. "
        "The floor is the larger of the least memory traffic at the rate of a copy and "
        "the flops at the rate of a large matmul, both measured in the same run. The "
        'last column says who runs each contraction after tuning; "alone" is cuDNN '
        "for the contraction, and XLA for what surrounds it. Results of all contenders "
        "were compared with XLA's in f32 before they were timed."
    )


def _goals(found: Sequence[Row]) -> Iterator[str]:
    yield "| goal: time relative to XLA | met | cells that miss it |"
    yield "| --- | ---: | --- |"
    every = f"all cells, both directions: at most {_SLOWEST}"
    yield _goal_line(every, found, _SLOWEST)
    for name, most in GOALS.items():
        wanted = [row for row in found if row.goal == name and row.what == FORWARD]
        if wanted:
            yield _goal_line(f"{name}, forward: at most {most}", wanted, most)


def _goal_line(text: str, wanted: Sequence[Row], most: float) -> str:
    missed = [row for row in wanted if row.ours > most]
    named = [f"{row.name} {row.what} {row.ours:.2f}" for row in missed]
    met = f"{len(wanted) - len(missed)} of {len(wanted)}"
    return f"| {text} | {met} | {'; '.join(named)} |"


def _table(wanted: Sequence[Row]) -> Iterator[str]:
    columns = "cell | >XLA, µs | >floor, µs | jax_cudnn tuned | >untuned | >torch "
    yield from table(f"{columns} | >ours / torch | runs on", map(_cells, wanted))


def _cells(row: Row) -> list[str]:
    contenders = row.result["contenders"]
    return [
        row.name,
        f"{contenders[XLA]['median_us']:.1f}",
        f"{row.result['floor_us']:.1f}",
        _with_range(contenders.get(TUNED)),
        _number(row.ratio(UNTUNED)),
        _number(row.ratio(TORCH)),
        _number(row.ratio(TUNED, "ratio_to_torch")),
        _who(row.result["calls"]),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _with_range(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"**{row['ratio']:.2f}** ({RANGE.format_map(row)})"


def _who(calls: Sequence[dict[str, Any]]) -> str:
    """Return who runs each contraction, and the plan where there is one only."""
    found: list[str] = []
    for call in calls:
        kinds = [
            word.removeprefix("conv_")
            for word in call["op"].split("+")
            if word.startswith(("conv_", "matmul"))
        ]
        if not kinds:
            continue
        who = "XLA"
        if call["implementation"] == "cudnn":
            is_alone = any("surrounds" in reason for reason in call["reasons"])
            who = "cuDNN alone" if is_alone else "cuDNN"
            who += f" {call['plan']}" if call["plan"] else ""
        found.append(f"{' and '.join(kinds)}: {who}")
    return ", ".join(found)


def _tuning(data: dict[str, Any]) -> Iterator[str]:
    parts = {
        entry["graph"]: entry for cell in data["cells"] for entry in cell["tuning"]
    }
    if not parts:
        yield "Nothing was tuned."
        return
    chosen = sum(entry["implementation"] == "cudnn" for entry in parts.values())
    first = [entry["first_ratio"] for entry in parts.values()]
    first = [ratio for ratio in first if ratio is not None]
    yield (
        f"Of {len(parts)} distinct graphs, cuDNN is fastest for {chosen}, XLA for "
        f"{len(parts) - chosen}."
    )
    if first:
        yield (
            "The plan that cuDNN's heuristic lists first takes "
            f"{statistics.median(first):.2f} times as long as the best one (median; at "
            f"worst {max(first):.2f} times)."
        )
    seconds = _seconds(data)
    told = ", ".join(
        f"{name} {statistics.median(values):.1f} and {max(values):.1f}"
        for name, values in seconds.items()
    )
    told = f"Seconds a cell, median and most: {told}."
    if "tune" in seconds:  # Until November 2026, tuning had a time of its own.
        told += (
            " Cells that differ only in what follows the sums are tuned together, in "
            "the time of the first."
        )
    yield told
    yield ""
    yield from table(
        "graph | operands | >first / best | >cuDNN, µs | >XLA, µs | chosen",
        (
            [
                *(entry["op"], entry["operands"], _number(entry["first_ratio"])),
                *(_number(entry["cudnn_us"]), _number(entry["xla_us"])),
                entry["implementation"],
            ]
            for entry in parts.values()
        ),
    )


def _seconds(data: dict[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for cell in data["cells"]:
        for name, value in cell["seconds"].items():
            found.setdefault(name, []).append(value)
    return found


def _failures(data: dict[str, Any]) -> Iterator[str]:
    for failure in data["failures"]:
        yield f"- {failure['cell']}: {_one_line(failure['error'])}"
    for row in rows(data):
        if row.result["torch_failure"] is not None:
            reason = _one_line(row.result["torch_failure"])
            yield f"- {row.name} {row.what}: PyTorch is left out: {reason}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _head(_: Data) -> str:
    return "Printed by `python -m benchmarks.fusion`; do not edit. The runs:"


markdown = Page(name="fusion", title="Fusion benchmarks", head=_head, lines=_lines)
