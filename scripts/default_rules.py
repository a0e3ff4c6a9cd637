# SPDX-License-Identifier: Apache-2.0
"""Writes what "auto" goes by where nothing was tuned, from measured times.

    python -m scripts.default_rules

reads untuned_parts.json, untuned_few_rows.json, untuned_mlps.json and
untuned_groups.json in docs/internals/measured, which have kernels of random calls on a
GPU (what is measured now is by `jax-cudnn calibrate --thorough`), and the choices that
are shipped for the cells of the fusion benchmarks. It writes the kernels of
jax_cudnn/data/policy/sm90-cudnn9.19.json and docs/internals/measured/rules.md. It
needs no GPU.

The kernels that were measured are written one by one, with the plans that are to go
first and the engines that are slow (jax_cudnn/calibration/rules.py). The page says
how well the rules do.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import on_this_gpu, write_records
from jax_cudnn.calibration.rules import entries, of_rows, rules_of, slow_engines
from jax_cudnn.policy.nearest import LOSS
from scripts.judged_rules import Judged, judged, of_cells

_ROOT = Path(__file__).resolve().parent.parent
# Up to this version, cuDNN lists the same engines for products in the same order, and
# the kernels that go first were as much faster (plan_changes.md and
# calibration_sm90-cudnn9.28.json in docs/internals/measured).
_SAME_TO = {"matmul": 92801}
_MEASURED = ("parts", "few_rows", "mlps", "groups")
_TABLE = _ROOT / "jax_cudnn" / "data" / "policy" / "sm90-cudnn9.19.json"
_TIMES = _ROOT / "docs" / "internals" / "measured"
_PAGE = _TIMES / "rules.md"


def _table(found: Sequence[Judged]) -> Iterator[str]:
    yield "| kernels | measured | ratio | cuDNN's | ratio | over 1.05 |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    by_class: defaultdict[str, list[Judged]] = defaultdict(list)
    for each in found:
        by_class[each.kernel.name].append(each)
    for name, group in (*sorted(by_class.items()), ("all", found)):
        ratios = [each.ratio for each in group]
        kept = [each.ratio for each in group if each.is_cudnns]
        mean = f"{statistics.geometric_mean(kept):.2f}" if kept else ""
        over = sum(ratio > LOSS for ratio in kept) if kept else ""
        yield (
            f"| {name} | {len(group)} | {statistics.geometric_mean(ratios):.2f} "
            f"| {len(kept)} | {mean} | {over} |"
        )


def _sentence_on_best(found: Sequence[Judged]) -> Iterator[str]:
    """Yield how many losses are of the choice of an engine, and how many are not."""
    kept = [each for each in found if each.is_cudnns]
    over = sum(each.ratio > LOSS for each in kept)
    over_by_best = sum(each.best_ratio > LOSS for each in kept)
    yield f"Of the {len(kept)} kernels that cuDNN runs so, {over} take more than 1.05"
    yield "of XLA's time. By the first plan of their fastest engine,"
    yield f"{over_by_best} would: no choice of an engine makes up for these, and their"
    yield "neighbours do not tell."


def markdown(
    data: Mapping[str, Any],
    found: Sequence[Judged],
    environments: Sequence[Mapping[str, str]],
) -> str:
    """Return the page, of what is written for the package and how it was measured."""

    def measured_with(name: str) -> str:
        return " and ".join(dict.fromkeys(each[name] for each in environments))

    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Which kernels auto leaves to XLA without tuning. -->",
        "",
        '# What "auto" leaves to XLA',
        "",
        "Printed by `python -m scripts.default_rules`; do not edit. From the times of",
        f"{len(data['kernels'])} kernels on {measured_with('GPU')} with cuDNN "
        f"{measured_with('cuDNN')} and JAX {measured_with('JAX')}.",
        "",
        "A kernel is a convolution, a gradient of one, or a product, with what follows",
        "it. It is like a product of (rows, depth) and (depth, columns). Where nothing",
        "was tuned, the eight measured kernels that are most like it decide: those of",
        "the nearest sizes, and of its class or one that differs little. XLA runs it",
        "unless cuDNN's first plan was faster for them, by at least 10 %, in a mean in",
        "which near kernels weigh more. They are also asked about the engine of its",
        "first plan. What a time is above 1.05 counts three times,",
        "and no time counts more than 2. Products of up to 64 rows are judged by such",
        "products alone: they are bound by reading the other matrix. Convolutions in",
        "groups are judged by those alone whose groups become the same. Products in a",
        "batch, none of which was measured, are judged like one of all their rows.",
        "cuDNN runs a kernel whose sizes are far from all of these, by a factor of 20",
        "in one of them, and products of 8 bits and of integers: none was measured.",
        "Tuning looks at each kernel itself, and goes before all this.",
        "",
        "The table is by class. The first ratio is the geometric mean of the time of",
        "cuDNN's first plan over XLA's. The last columns say what becomes of a block",
        "of kernels of which nothing is known, if the others decide: how many of them",
        "cuDNN runs, their mean ratio, and how many take more than 1.05 of XLA's time.",
        "",
        *_table(found),
        "",
        *_sentence_on_best(found),
    ]
    lines += ["", "Engines of cuDNN whose plans are left to XLA where they come first:"]
    lines += [
        f"{kind}: {', '.join(map(str, engines))}."
        for kind, engines in data["slow_engines"].items()
    ]
    lines += [
        "",
        "Kernels that are tried before an engine's own choice, for contractions with",
        "something around them, where cuDNN lists them, with their time as a ratio to",
        "that of the engine's choice in blocks that had no part in choosing them:",
        "",
        "| | | cuDNN | engine | kernel | work | ratio | kernels measured |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for each in data["preferred"]:
        knobs = ", else ".join(
            f"{name} {value}" for one in each["knobs"] for name, value in one.items()
        )
        version = " to ".join(dict.fromkeys(map(_minor, (each["cudnn"], each["to"]))))
        lines.append(
            f"| {each['kind']} | {each['bits']} | {version} "
            f"| {each['engine']} | {knobs} "
            f"| {_power(each['work'][0])} to {_power(each['work'][1])} "
            f"| {each['ratio']:.2f} | {each['count']} of {each['of']} |"
        )
    lines += [
        "",
        "Engines that go before another one where cuDNN lists that one first, for",
        "convolutions in groups and for others with 32 channels or more. The ratio is",
        "that of their first plans' times, for each kernel by engines that the others",
        "choose:",
        "",
        "| | | | windows | first by cuDNN | goes before it | ratio | measured |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for each in data["engines"]:
        engines = ", else ".join(map(str, each["before"]))
        lines.append(
            f"| {each['kind']} | {each['bits']} | {'groups' if each['groups'] else ''} "
            f"| {'of 1' if each['windows_of_1'] else 'larger'} "
            f"| {each['first']} | {engines} "
            f"| {each['ratio']:.2f} | {each['count']} of {each['of']} |"
        )
    return "\n".join(lines) + "\n"


def _each_once(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows without those that were measured again later on the same GPU."""
    named = {
        (row["GPU"], row["op"], row["operands"], *row["sizes"]): row for row in rows
    }
    yield from named.values()


def _minor(number: int) -> str:
    """Return a version without its patch, such as "9.19"."""
    return f"{number // 10000}.{number // 100 % 100}"


def _number(version: str) -> int:
    """Return cuDNN's number of a version: 91900 of 9.19.0."""
    major, minor, patch = map(int, version.split("."))
    return (major * 100 + minor) * 100 + patch


def _power(number: float) -> str:
    return f"2^{round(math.log2(number))}"


def main() -> None:
    """Write the rules and their page."""
    rows: list[dict[str, Any]] = []
    environments: list[dict[str, str]] = []
    for name in _MEASURED:
        measured = json.loads((_TIMES / f"untuned_{name}.json").read_text())
        versions = measured["environment"]
        found_here = list(_each_once(on_this_gpu(measured["rows"], versions)))
        rows += found_here
        environments += [{**versions, "GPU": row["GPU"]} for row in found_here]
    slow = slow_engines(rows)
    (cudnn,) = {each["cuDNN"] for each in environments}  # all of one version
    rules = rules_of(rows, slow, _number(cudnn))
    kernels = [*of_rows(rows, rules), *of_cells(rules)]
    data = {
        **json.loads(_TABLE.read_text()),
        "slow_engines": slow,
        "preferred": [
            {**each, "to": _SAME_TO.get(each["kind"], each["cudnn"])}
            for each in rules.preferred
        ],
        "engines": rules.engines,
        "kernels": entries(kernels),
    }
    write_records(_TABLE, data)
    found = list(judged(rows, slow, _number(cudnn)))
    _PAGE.write_text(markdown(data, found, environments))
    slower = [each for each in found if each.ratio > LOSS]
    kept = [each for each in slower if each.is_cudnns]
    print(f"more than 5 % slower than XLA: {len(slower)} of {len(found)} kernels")
    print(f"of these, run by cuDNN if the others decide: {len(kept)}")


if __name__ == "__main__":
    main()
