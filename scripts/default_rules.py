# SPDX-License-Identifier: Apache-2.0
"""Makes the rules by which "auto" leaves contractions to XLA, from measured times.

    python -m scripts.default_rules

reads docs/benchmarks/untuned_parts.json, untuned_few_rows.json and untuned_mlps.json,
which `python -m benchmarks.untuned` writes on a GPU with `--parts`, `--few-rows` and
`--mlps`, and the choices that are shipped for the cells of the fusion benchmarks. It
writes jax_cudnn/data/rules/rules.json and docs/benchmarks/rules.md. It needs no GPU.

For each class of kernels (legalize/measured.py) a rule is one of three: cuDNN runs all,
XLA runs all, or XLA runs those beyond a bound of one size. The cheapest one is taken.
A kernel costs the logarithm of the time that it takes, as a ratio to XLA's, and more
where that is above 1.05. A bound has to be worth its words, and what is given to XLA
has to be faster there on the whole.

A kernel of an engine is tried before the engine's own choice, for products with what
surrounds them that are large enough, if it was faster on the whole. Rules are then made
of its times.

Engines that took several times as long as cuDNN's first plan wherever they were
measured are left to XLA where they come first.
"""

import itertools
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.fusion_cells import CELLS
from benchmarks.records import on_this_gpu, write_records
from jax_cudnn import choices
from jax_cudnn.graph import label
from jax_cudnn.legalize.measured import (
    FEATURES,
    Rule,
    class_of,
    general,
    read_rules,
    rule_for,
    sizes_of,
)
from jax_cudnn.lowering import traced_program

_ROOT = Path(__file__).resolve().parent.parent
_MEASURED = ("untuned_parts.json", "untuned_few_rows.json", "untuned_mlps.json")
_RULES = _ROOT / "jax_cudnn" / "data" / "rules" / "rules.json"
_PAGE = _ROOT / "docs" / "benchmarks" / "rules.md"

# Fewer kernels than this say too little of a class.
_FEWEST = 3
_GOAL = math.log(1.05)
# So many times the excess over the goal is added to a kernel's cost.
_PENALTY = 1.0
# What a rule has to save in all, without a bound and with one.
_WORTH = 0.1
_WORTH_OF_BOUND = 0.3
# A bound has at least so many kernels on the side that stays with cuDNN.
_FEWEST_BEYOND = 2
# The least geometric mean of the ratios of what is given to XLA.
_SLOWER = 1.03
# An engine is slow if it never took less than so many times as long as the first plan.
_SLOW_ENGINE = 3.0
_FEWEST_OF_ENGINE = 2
# A kernel goes before an engine's own choice that took, as a geometric mean over so
# many, no more than this of its time.
_FASTER = 0.95
_FEWEST_OF_KERNEL = 20
# Between these numbers of multiplications, the same kernel goes before.
_BOUNDS = (2**20, 2**26, 2**30, 2**32, 2**34, 2**36, 2**38)
# Rules hold for sizes within this factor of what was measured.
_REACH = 2.0


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel that was measured: its sizes, and cuDNN's first plan beside XLA."""

    name: str
    sizes: Mapping[str, float]
    ratio: float

    @property
    def cost(self) -> float:
        """What it costs that cuDNN runs it; XLA costs nothing."""
        told = math.log(self.ratio)
        return told + _PENALTY * max(0.0, told - _GOAL)


def slow_engines(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the engines that were slow wherever they were measured, by kind."""
    ratios: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        kind, _ = _kind_and_bits(row["class"])
        for engine, ratio in row["engines"].items():
            if int(engine) != row["first_engine"]:
                ratios[kind, int(engine)].append(ratio)
    found: defaultdict[str, list[int]] = defaultdict(list)
    for (kind, engine), each in sorted(ratios.items()):
        if len(each) >= _FEWEST_OF_ENGINE and min(each) >= _SLOW_ENGINE:
            found[kind].append(engine)
    return dict(found)


def preferences(rows: Sequence[Mapping[str, Any]], cudnn: int) -> list[dict[str, Any]]:
    """Return the kernels that go before their engines' own choice, and for which work.

    The first that cuDNN lists for a problem is taken. Where it lists none, nothing
    changes.
    """
    groups: defaultdict[tuple[str, str, int], list[Mapping[str, Any]]] = defaultdict(
        list
    )
    for row in rows:
        if "+" in row["op"] and row.get("kernels"):
            groups[*_kind_and_bits(row["class"]), row["first_engine"]].append(row)
    found: list[dict[str, Any]] = []
    for (kind, bits, engine), group in sorted(groups.items()):
        of_kind: list[dict[str, Any]] = []
        for bounds in itertools.pairwise(_BOUNDS):
            if (best := _preferred(group, bounds)) is not None:
                of_kind.append({"work": bounds, **best})
        for each in _merged(of_kind):
            ratios = each.pop("ratios")
            mean = round(statistics.geometric_mean(ratios), 3)
            each |= {"ratio": mean, "count": len(ratios)}
            same = {"kind": kind, "bits": bits, "cudnn": cudnn, "engine": engine}
            found.append({**same, **each})
    return found


def _merged(entries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield entries, those as one that say the same of ranges side by side."""
    last: dict[str, Any] | None = None
    for each in entries:
        (low, high), knobs = each["work"], each["knobs"]
        if last is not None and (last["knobs"], last["work"][1]) == (knobs, low):
            last["work"][1] = high
            last["ratios"] += each["ratios"]
            continue
        if last is not None:
            yield last
        last = {"knobs": knobs, "work": [low, high], "ratios": [*each["ratios"]]}
    if last is not None:
        yield last


def _preferred(
    rows: Sequence[Mapping[str, Any]], bounds: tuple[float, float]
) -> dict[str, Any] | None:
    """Return which kernel goes first for that much work, with its times, if any does.

    And which one does where that is not listed: the two that save most together.
    """
    low, high = bounds
    work = FEATURES.index("work")
    times = [row["kernels"] for row in rows if low <= row["sizes"][work] < high]
    listed = Counter(name for each in times for name in each)
    known = sorted(name for name in listed if listed[name] >= _FEWEST_OF_KERNEL)
    most, best = 0.0, None
    for names in (*itertools.permutations(known, 1), *itertools.permutations(known, 2)):
        found = (next((x[n] for n in names if n in x), None) for x in times)
        ratios = [ratio for ratio in found if ratio is not None]
        saved = -sum(map(math.log, ratios))
        if statistics.geometric_mean(ratios) <= _FASTER and saved > most:
            knobs = [json.loads(name) for name in names]
            most, best = saved, {"knobs": knobs, "ratios": ratios}
    return best


def _kind_and_bits(name: str) -> tuple[str, str]:
    """Return the kind of contractions in a class, and the bits of their operands."""
    kind, bits, *_ = name.split(", ")
    return kind, bits


def measured_kernels(
    rows: Sequence[Mapping[str, Any]],
    slow: Mapping[str, Sequence[int]],
    preferred: Sequence[Mapping[str, Any]],
) -> Iterator[Kernel]:
    """Yield the kernels that were measured, but for those of slow engines.

    Where another kernel goes before the first, its time counts. Those that are not
    known to have it are left out.
    """
    for row in rows:
        if row["first_engine"] in slow.get(_kind_and_bits(row["class"])[0], ()):
            continue
        sizes = dict(zip(FEATURES, map(float, row["sizes"]), strict=True))
        ratio = row["ratio"]
        each = _preference_for(row["class"], row["op"], sizes, preferred)
        if each is not None and row["first_engine"] == each["engine"]:
            if "kernels" not in row:
                continue
            ratio *= _ratio_of_first(row["kernels"], each["knobs"])
        yield Kernel(name=row["class"], sizes=sizes, ratio=ratio)
    times = {key.graph: choice for key, choice in choices.shipped().items()}
    seen: set[str] = set()
    for cell in CELLS:
        for part in _parts_of(cell):
            digest, name = choices.digest_of(part), class_of(part)
            choice = times.get(digest)
            if choice is None or digest in seen or not name:
                continue
            seen.add(digest)
            sizes = sizes_of(part)
            if _preference_for(name, label(part), sizes, preferred):
                continue
            if choice.cudnn_us and choice.xla_us and choice.first_ratio:
                ratio = choice.cudnn_us * choice.first_ratio / choice.xla_us
                yield Kernel(name=name, sizes=sizes, ratio=ratio)


def _ratio_of_first(
    kernels: Mapping[str, float], preferred: Sequence[Mapping[str, int]]
) -> float:
    """Return the time of the first preferred kernel that is listed, as a ratio."""
    for knobs in preferred:
        if (ratio := kernels.get(json.dumps(knobs))) is not None:
            return ratio
    return 1.0


def _preference_for(
    name: str,
    op: str,
    sizes: Mapping[str, float],
    preferred: Sequence[Mapping[str, Any]],
) -> Mapping[str, Any] | None:
    for each in preferred:
        low, high = each["work"]
        is_like = (each["kind"], each["bits"]) == _kind_and_bits(name) and "+" in op
        if is_like and low <= sizes["work"] < high:
            return each
    return None


def _parts_of(cell: Any) -> Iterator[Any]:
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cell.operands]

    def with_gradients(*operands: Any) -> Any:
        result, pullback = jax.vjp(cell.ours, *operands)
        return pullback(result)

    for function in (cell.ours, with_gradients):
        for graph in traced_program(function, *types).graphs:
            yield from graph.parts


def _splits(kernels: Sequence[Kernel]) -> Iterator[Rule]:
    """Yield the rule that XLA runs all, and those beyond each bound."""
    everything = Rule(count=len(kernels))
    yield everything
    for feature in FEATURES:
        sizes = sorted({kernel.sizes[feature] for kernel in kernels})
        for low, high in itertools.pairwise(sizes):
            bound = float(f"{math.sqrt(low * high):.3g}")
            if low < bound < high:
                yield replace(everything, feature=feature, least=bound)
                yield replace(everything, feature=feature, most=bound)


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def rule_of(name: str, kernels: Sequence[Kernel]) -> dict[str, Any] | None:
    """Return the rule of a class, None where cuDNN runs all or too little is known."""
    if len(kernels) < _FEWEST:
        return None

    def saved(rule: Rule) -> float:
        worth = _WORTH_OF_BOUND if rule.feature else _WORTH
        return sum(k.cost for k in kernels if rule.holds(k.sizes)) - worth

    def mean(rule: Rule) -> float:
        given = (k.ratio for k in kernels if rule.holds(k.sizes))
        return statistics.geometric_mean(given)

    def is_known(rule: Rule) -> bool:
        kept = sum(not rule.holds(k.sizes) for k in kernels)
        return mean(rule) >= _SLOWER and (not rule.feature or kept >= _FEWEST_BEYOND)

    splits = [each for each in _splits(kernels) if is_known(each)]
    best = max(splits, key=saved, default=None)
    if best is None or saved(best) <= 0:
        return None
    given = [kernel for kernel in kernels if best.holds(kernel.sizes)]
    return {
        "class": name,
        "feature": best.feature,
        "least": _finite(best.least),
        "most": _finite(best.most),
        "sizes": {
            feature: [
                float(f"{min(k.sizes[feature] for k in kernels) / _REACH:.3g}"),
                float(f"{max(k.sizes[feature] for k in kernels) * _REACH:.3g}"),
            ]
            for feature in FEATURES
        },
        "ratio": round(mean(best), 3),
        "count": len(given),
    }


def rules(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Return the rules of all classes, and of what classes have in common."""
    by_class: defaultdict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_class[kernel.name].append(kernel)
        if general(kernel.name) != kernel.name:
            by_class[general(kernel.name)].append(kernel)
    found = (rule_of(name, each) for name, each in sorted(by_class.items()))
    known = [rule for rule in found if rule is not None]
    # Where a class is known well enough, it says so itself that cuDNN runs it.
    named = {rule["class"] for rule in known}
    for name, each in sorted(by_class.items()):
        if name not in named and len(each) >= _FEWEST and general(name) in named:
            known.append({"class": name, "count": 0})
    return sorted(known, key=lambda rule: rule["class"])


def markdown(
    data: Mapping[str, Any], environments: Sequence[Mapping[str, str]], kernels: int
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
        "Printed by `python -m scripts.default_rules`; do not edit. Rules from the",
        f"times of {kernels} kernels on {measured_with('GPU')} with cuDNN "
        f"{measured_with('cuDNN')} and JAX {measured_with('JAX')}.",
        "",
        "A kernel is a convolution, a gradient of one, or a product, with what follows",
        "it. It is like a product of (rows, depth) and (depth, columns). Within a",
        "factor of 2 of the sizes that were measured, XLA runs those that are named.",
        "Products of up to 64 rows are classes of their own: they are bound by reading",
        "the other matrix.",
        "The ratio is the geometric mean of the time of cuDNN's first plan over XLA's,",
        "in as many kernels. Tuning looks at each kernel instead, and goes before",
        "these rules.",
        "",
        "| kernels | left to XLA | ratio | kernels measured |",
        "| --- | --- | ---: | ---: |",
    ]
    for rule in data["rules"]:
        if not rule["count"]:
            lines.append(f"| {rule['class']} | none | | |")
            continue
        where = "all"
        if rule["feature"]:
            least = rule["least"] is not None
            bound = rule["least"] if least else rule["most"]
            where = f"{rule['feature']} {'from' if least else 'up to'} {bound:,.0f}"
        lines.append(
            f"| {rule['class']} | {where} | {rule['ratio']:.2f} | {rule['count']} |"
        )
    lines += ["", "Engines of cuDNN whose plans are left to XLA where they come first:"]
    lines += [
        f"{kind}: {', '.join(map(str, engines))}."
        for kind, engines in data["slow_engines"].items()
    ]
    lines += [
        "",
        "Kernels that are tried before an engine's own choice, for contractions with",
        "something around them, where cuDNN lists them, with their time as a ratio to",
        "that of the engine's choice:",
        "",
        "| | | cuDNN | engine | kernel | work | ratio | kernels measured |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for each in data["preferred"]:
        knobs = ", else ".join(
            f"{name} {value}" for one in each["knobs"] for name, value in one.items()
        )
        version = f"{each['cudnn'] // 10000}.{each['cudnn'] // 100 % 100}"
        lines.append(
            f"| {each['kind']} | {each['bits']} | {version} "
            f"| {each['engine']} | {knobs} "
            f"| {_power(each['work'][0])} to {_power(each['work'][1])} "
            f"| {each['ratio']:.2f} | {each['count']} |"
        )
    return "\n".join(lines) + "\n"


def _each_once(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows without those that were measured again later on the same GPU."""
    named = {
        (row["GPU"], row["op"], row["operands"], *row["sizes"]): row for row in rows
    }
    yield from named.values()


def _number(version: str) -> int:
    """Return cuDNN's number of a version: 91900 of 9.19.0."""
    major, minor, patch = map(int, version.split("."))
    return (major * 100 + minor) * 100 + patch


def _power(number: float) -> str:
    return f"2^{round(math.log2(number))}"


def main() -> None:
    """Write the rules and their page."""
    folder = _ROOT / "docs" / "benchmarks"
    rows: list[dict[str, Any]] = []
    environments: list[dict[str, str]] = []
    for name in _MEASURED:
        measured = json.loads((folder / name).read_text())
        versions = measured["environment"]
        found_here = list(_each_once(on_this_gpu(measured["rows"], versions)))
        rows += found_here
        environments += [{**versions, "GPU": row["GPU"]} for row in found_here]
    engines = slow_engines(rows)
    (cudnn,) = {each["cuDNN"] for each in environments}  # all of one version
    preferred = preferences(rows, _number(cudnn))
    kernels = list(measured_kernels(rows, engines, preferred))
    found = rules(kernels)
    _RULES.parent.mkdir(exist_ok=True)
    data = {
        "sm_version": 90,
        "slow_engines": engines,
        "preferred": preferred,
        "rules": found,
    }
    write_records(_RULES, data)
    _PAGE.write_text(markdown(data, environments, len(kernels)))
    known = read_rules(found)
    slow = [kernel for kernel in kernels if math.log(kernel.ratio) > _GOAL]
    kept = [kernel for kernel in slow if not _is_given(kernel, known)]
    print(f"{len(kernels)} kernels, {len(found)} rules")
    print(f"more than 5 % slower than XLA: {len(slow)}, with the rules {len(kept)}")


def _is_given(kernel: Kernel, known: Mapping[str, Rule]) -> bool:
    """Whether the rules give a kernel to XLA."""
    rule = rule_for(kernel.name, known)
    return rule is not None and rule.holds(kernel.sizes)


if __name__ == "__main__":
    main()
