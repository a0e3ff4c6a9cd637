# SPDX-License-Identifier: Apache-2.0
"""Writes docs/gpu-report.md from what scripts/gpu_report.py kept of the GPU tests."""

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = dict[str, Any]  # of a test
Run = dict[str, Any]  # "environment" and "tests"
Pair = tuple[str, str]  # versions of cuDNN and JAX
# What a pair's tests were, by module and name.
Results = dict[tuple[str, str], Record]
Reasons = Sequence[Mapping[str, str]]  # of failures: tests/common/gpu/explained.json

# Of what is planned without a GPU: see tests/products/gpu/test_launch_matrix.py.
LISTED = ("planned", "launched", "refused")


def name_of(record: Record) -> tuple[str, str]:
    """Return the module and the name of a test."""
    return record["module"], record["test"]


def pair_of(run: Run) -> Pair:
    """Return the versions of cuDNN and JAX of a run."""
    return run["environment"]["cuDNN"], run["environment"]["JAX"]


def _as_numbers(pair: Pair) -> list[list[int]]:
    return [[int(part) for part in re.findall(r"\d+", text)] for text in pair]


def _by_pair(runs: Sequence[Run]) -> dict[Pair, Results]:
    found: dict[Pair, Results] = {}
    for run in sorted(runs, key=lambda run: _as_numbers(pair_of(run))):
        results = found.setdefault(pair_of(run), {})
        results.update({name_of(record): record for record in run["tests"]})
    return found


def markdown(runs: Sequence[Run], reasons: Reasons) -> str:
    """Return the report as text."""
    pairs = _by_pair(runs)
    titles = [f"{cudnn}, JAX {jax}" for cudnn, jax in pairs]
    lines = [
        "# GPU test report",
        "",
        "What the tests in `tests/*/gpu` gave with each pair of versions of cuDNN and "
        "JAX that they ran on. Written by `python -m scripts.gpu_report`; do not edit.",
        "",
        *_table(
            ("cuDNN", *titles),
            [(name, *map(cell, pairs.values())) for name, cell in _CELLS.items()],
        ),
        "",
        "## Tests",
        "",
        "How many tests of a file passed. Those that ran with another pair alone are "
        "counted as not run.",
        "",
        *_table(("file", *titles), _counts(pairs)),
        "",
        "## Failures, and what differs",
        "",
        *_differences(pairs, reasons),
        "",
        "## Accuracy",
        "",
        "The largest error against float32 truth, as a multiple of the error that the "
        "same dtype makes in the reference (in norm); the tests refuse more than 2.",
        "",
        *_table(("file", "dtype in the test's name", *titles), _accuracy(pairs)),
        "",
        "## Launch matrix",
        "",
        "Kernels that the tests plan without a GPU "
        "(tests/products/shared/fusion_cases.py): launched, and "
        "right against float64; or refused, as docs/support.md says.",
        "",
        *_launches(pairs, titles),
        "",
        "## Runs",
        "",
        *_table(
            ("cuDNN", "JAX", "commit", "day", "GPU", "driver", "Python", "tests"),
            _runs(runs),
        ),
    ]
    return "\n".join(lines) + "\n"


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def _outcomes(records: Iterable[Record]) -> collections.Counter[str]:
    counts = collections.Counter(record["outcome"] for record in records)
    counts["failed"] = counts.pop("failure", 0) + counts.pop("error", 0)
    return counts


_CELLS = {
    "tests": lambda results: len(results),
    "passed": lambda results: _outcomes(results.values())["passed"],
    "failed": lambda results: _outcomes(results.values())["failed"],
    "skipped": lambda results: _outcomes(results.values())["skipped"],
}


def _counts(pairs: Mapping[Pair, Results]) -> Iterable[Sequence[str]]:
    known = {name for results in pairs.values() for name in results}
    for module in sorted({module for module, _ in known}):
        names = [name for name in known if name[0] == module]
        yield module, *(_told(names, results) for results in pairs.values())


def _told(names: Sequence[tuple[str, str]], results: Results) -> str:
    found = [results[name] for name in names if name in results]
    counts = _outcomes(found)
    counts["not run"] = len(names) - len(found)
    more = [f"{counts[x]} {x}" for x in ("failed", "skipped", "not run") if counts[x]]
    return ", ".join([str(counts["passed"]), *more]) if found else "not run"


def _reason(record: Record, pair: Pair, reasons: Reasons) -> str | None:
    name = "::".join(name_of(record))
    for each in reasons:
        if re.search(each["test"], name) and each.get("cuDNN", pair[0]) == pair[0]:
            return each["reason"]
    return None


def _differences(pairs: Mapping[Pair, Results], reasons: Reasons) -> list[str]:
    """Return what failed, and what was skipped that ran elsewhere, by its reason."""
    ran = {
        name
        for results in pairs.values()
        for name, record in results.items()
        if record["outcome"] != "skipped"
    }
    found = collections.defaultdict[tuple[str, str, str], list[str]](list)
    unexplained: list[str] = []
    for pair, results in pairs.items():
        for name, record in results.items():
            told = "::".join(name)
            if record["outcome"] == "skipped" and name in ran:
                found[pair[0], "skipped", record["message"]].append(told)
            elif record["outcome"] in ("failure", "error"):
                if (reason := _reason(record, pair, reasons)) is None:
                    unexplained.append(f"- {pair[0]}: {told}: {record['message']}")
                else:
                    found[pair[0], "failed", reason].append(told)
    lines: list[str] = []
    for (cudnn, what, reason), names in found.items():
        shown = f"`{names[0]}`" + (f" and {len(names) - 1} more" * (len(names) > 1))
        lines.append(f"- {cudnn}: {what}: {shown}. {reason}")
    return [*(lines or ["None."]), "", "Unexplained:", "", *(unexplained or ["- none"])]


_DTYPES = [
    "bfloat16",
    "float16",
    "float32",
    "float8_e4m3fn",
    "float8_e5m2",
    "bf16",
    "f16",
    "f32",
    "f8",
]


def _dtype_of(test: str) -> str:
    words = re.split(r"[^a-z0-9]+(?!m3fn|5m2)", test.partition("[")[2])
    return next((dtype for dtype in _DTYPES if dtype in words), "none")


def _accuracy(pairs: Mapping[Pair, Results]) -> Iterable[Sequence[str]]:
    worst = collections.defaultdict[tuple[str, str], dict[Pair, float]](dict)
    for pair, results in pairs.items():
        for (module, test), record in results.items():
            for ratio in record.get("error_ratios", {}).values():
                row = worst[module, _dtype_of(test)]
                row[pair] = max(row.get(pair, 0.0), ratio)
    for (module, dtype), row in sorted(worst.items()):
        yield module, dtype, *(f"{row[x]:.2f}" if x in row else "" for x in pairs)


def _launches(pairs: Mapping[Pair, Results], titles: Sequence[str]) -> list[str]:
    rows: list[Sequence[Any]] = []
    missing: list[str] = []
    for title, results in zip(titles, pairs.values(), strict=True):
        records = list(results.values())
        planned, launched, refused = (
            {key for record in records for key in record.get(name, ())}
            for name in LISTED
        )
        never = planned - launched - refused
        rows.append((title, len(launched), len(refused - launched), len(never)))
        missing += [f"- {title}: {key}" for key in sorted(never)]
    names = ("cuDNN", "launched", "refused", "planned and never launched")
    return [*_table(names, rows), *([""] if missing else []), *missing]


def _runs(runs: Sequence[Run]) -> Iterable[Sequence[Any]]:
    names = ("cuDNN", "JAX", "commit", "date", "GPU", "driver", "Python")
    for run in sorted(runs, key=lambda run: _as_numbers(pair_of(run))):
        versions = run["environment"]
        yield *(versions.get(name, "") for name in names), len(run["tests"])


def has_unexplained(run: Run, reasons: Reasons) -> bool:
    """Whether a test of a run failed for no reason that is written down."""
    return any(
        record["outcome"] in ("failure", "error")
        and _reason(record, pair_of(run), reasons) is None
        for record in run["tests"]
    )
