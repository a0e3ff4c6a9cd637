# SPDX-License-Identifier: Apache-2.0
"""Derives from measured times when XLA runs a kernel, and which plans go first.

A row is what measuring.py measured of a kernel. For another kernel, those
most like it decide (policy/nearest.py). Some kernels of an engine are tried
before the engine's own choice, for contractions with something around them, if they
were faster: on the whole, and in blocks that had no part in choosing them. So is an
engine before another one that cuDNN lists first, for convolutions. Contractions are
then written with these plans' times.

Engines that were slower than XLA's code for nearly all kernels, and much slower on the
whole, are left to XLA where they come first.
"""

import functools
import itertools
import json
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jax_cudnn.policy.nearest import LOSS, Kernel, cost_of
from jax_cudnn.policy.products.kernels import (
    engines_names,
    is_of_groups,
    is_of_ones,
    is_ordered,
    is_preferred,
    kind_and_bits,
)

# Sizes have so many digits in tables.
_SIGNIFICANT = 3
# Kernels that are measured in a row may be of one call: so many are judged together.
TOGETHER = 16
# An engine is slow if it took so many times as long as XLA's code, as a geometric mean
# over so many kernels, and at most this share of them was not slower.
_SLOW_ENGINE = 2.0
_FEWEST_OF_ENGINE = 3
_NOT_SLOWER = 0.01
# A kernel goes before an engine's own choice that took, as a geometric mean over so
# many, no more than this of its time; and than that, in blocks that did not choose it.
_FASTER = 0.95
_FASTER_IN_OTHERS = 0.96
_FEWEST_OF_KERNEL = 8
# For one engine to go before another, so many kernels have to be timed with both; or so
# few, if it took no more than this of the other's time for each of them. There are many
# pairs of engines, so the mean has to be so many of its standard errors below none.
# With 2 instead of 1, or with three axes apart, fewer rules are left. Then cuDNN gains
# 2 % less if kernels are judged by others, and has as many losses.
_FEWEST_WITH_BOTH = 6
_FEW_WITH_BOTH = 3
_FASTER_FOR_EACH = 0.9
_STANDARD_ERRORS = 1.0
_MOST_KERNELS = 5
# Between these numbers of multiplications, the same kernels go before. That cuDNN lists
# a kernel for a convolution says as much as the work does.
_BOUNDS = {
    "conv_fprop": (2**20, 2**40),
    "matmul": (2**20, 2**28, 2**32, 2**36, 2**40),
}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What follows from rows: see `slow_engines`, `preferences`, `engine_orders`."""

    slow: Mapping[str, Sequence[int]]
    preferred: Sequence[Mapping[str, Any]]
    engines: Sequence[Mapping[str, Any]]


NO_RULES = Rules(slow={}, preferred=(), engines=())


def slow_engines(
    rows: Sequence[Mapping[str, Any]], *, fewest: int = _FEWEST_OF_ENGINE
) -> dict[str, list[int]]:
    """Return the engines that XLA's code is faster than, by kind, bits and groups.

    So many kernels have to say so at least.
    """
    ratios: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        *_, name = engines_names(row["class"])
        for engine, ratio in ({str(row["first_engine"]): 1.0} | row["engines"]).items():
            ratios[name, int(engine)].append(ratio * row["ratio"])
    found: defaultdict[str, list[int]] = defaultdict(list)
    for (name, engine), each in sorted(ratios.items()):
        not_slower = sum(ratio <= LOSS for ratio in each)
        if (
            len(each) >= fewest
            and statistics.geometric_mean(each) >= _SLOW_ENGINE
            and not_slower <= _NOT_SLOWER * len(each)
        ):
            found[name].append(engine)
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
            groups[*kind_and_bits(row["class"]), row["first_engine"]].append(row)
    found: list[dict[str, Any]] = []
    for (kind, bits, engine), group in sorted(groups.items()):
        for low, high in itertools.pairwise(_BOUNDS.get(kind, ())):
            times = [x["kernels"] for x in group if low <= x["sizes"][-1] < high]
            names = _preferred(times, _is_faster_kernel)
            ratio = _ratio_in_others(times)
            if names and ratio <= _FASTER_IN_OTHERS:
                found.append(
                    {
                        "kind": kind,
                        "bits": bits,
                        "cudnn": cudnn,
                        "engine": engine,
                        "knobs": [json.loads(name) for name in names],
                        "work": [low, high],
                        "ratio": round(ratio, 3),
                        "count": sum(
                            not each.keys().isdisjoint(names) for each in times
                        ),
                        "of": len(times),
                    }
                )
    return found


def engine_orders(
    rows: Sequence[Mapping[str, Any]], cudnn: int
) -> Iterator[dict[str, Any]]:
    """Yield engines that come first for convolutions, with those to go before them.

    Windows of 1 are judged by themselves, and so are groups.
    """
    groups: defaultdict[tuple[Any, ...], list[Mapping[str, float]]] = defaultdict(list)
    for row in rows:
        name = row["class"]
        kind, bits = kind_and_bits(name)
        if kind.startswith("conv"):
            first = row["first_engine"]
            others = {e: x for e, x in row["engines"].items() if e != str(first)}
            key = kind, bits, is_of_groups(name), is_of_ones(name), first
            groups[key].append(others)
    for (kind, bits, has_groups, is_ones, first), times in sorted(groups.items()):
        names = _preferred(times, _is_faster_engine)
        ratio = _engine_ratio_in_others(times)
        if names and ratio <= _FASTER_IN_OTHERS:
            yield {
                "kind": kind,
                "bits": bits,
                "cudnn": cudnn,
                "groups": has_groups,
                "windows_of_1": is_ones,
                "first": first,
                "before": [int(name) for name in names],
                "ratio": round(ratio, 3),
                "count": sum(not each.keys().isdisjoint(names) for each in times),
                "of": len(times),
            }


def _engine_ratio_in_others(times: Sequence[Mapping[str, float]]) -> float:
    """Return the mean ratio of engines that go first, each chosen by all others.

    They are few, so the one that is left out counts among those timed with both.
    """
    found: list[float] = []
    for (each,), others in blocks(times, beside=0, size=1):
        left_out = functools.partial(_is_faster_engine, left_out=each)
        ratio = _ratio_of_first(each, _preferred(others, left_out))
        if ratio is not None:
            found.append(ratio)
    return statistics.geometric_mean(found) if found else 1.0


def _is_faster(ratios: Sequence[float]) -> bool:
    """Whether a plan was faster than another one on the whole, by its ratios to it."""
    is_less = statistics.geometric_mean(ratios) <= _FASTER
    return is_less and sum(map(cost_of, ratios)) < 0


def _is_faster_kernel(name: str, ratios: Sequence[float]) -> bool:
    del name
    return len(ratios) >= _FEWEST_OF_KERNEL and _is_faster(ratios)


def _is_faster_engine(
    name: str, ratios: Sequence[float], left_out: Mapping[str, float] | None = None
) -> bool:
    count = len(ratios) + (name in (left_out or ()))
    if count < _FEW_WITH_BOTH or not _is_faster(ratios):
        return False
    if max(ratios) <= _FASTER_FOR_EACH:
        return True
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    is_sure = statistics.mean(logs) + _STANDARD_ERRORS * error < 0
    return count >= _FEWEST_WITH_BOTH and is_sure


_Row = TypeVar("_Row")


def blocks(
    rows: Sequence[_Row], *, beside: int, size: int = TOGETHER
) -> Iterator[tuple[Sequence[_Row], Sequence[_Row]]]:
    """Yield blocks of rows, each with the others but for so many right beside it."""
    for start in range(0, len(rows), size):
        end = start + size
        others = [*rows[: max(0, start - beside)], *rows[end + beside :]]
        yield rows[start:end], others


def _ratio_in_others(times: Sequence[Mapping[str, float]]) -> float:
    """Return the mean ratio of preferred kernels where these had no part in it."""
    found = [
        _ratio_of_first(each, names)
        for block, others in blocks(times, beside=0)
        for names in [_preferred(others, _is_faster_kernel)]
        for each in block
    ]
    ratios = [ratio for ratio in found if ratio is not None]
    return statistics.geometric_mean(ratios) if ratios else 1.0


def _preferred(
    times: Sequence[Mapping[str, float]],
    is_faster: Callable[[str, Sequence[float]], bool],
) -> list[str]:
    """Return which plans go first, given what plans took as ratios.

    Each is the one that saves most where the ones before it are not listed.
    """
    names: list[str] = []
    while len(names) < _MOST_KERNELS:
        ratios: defaultdict[str, list[float]] = defaultdict(list)
        for each in times:
            if _ratio_of_first(each, names) is None:
                for name, ratio in each.items():
                    ratios[name].append(ratio)
        saved = {
            name: -sum(map(cost_of, found))
            for name, found in ratios.items()
            if is_faster(name, found)
        }
        best = max(saved, key=lambda name: saved[name], default=None)
        if best is None:
            break
        names.append(best)
    return names


def kernel_of_row(row: Mapping[str, Any]) -> Kernel:
    """Return the kernel that a row is about."""
    rows, columns, depth, _ = row["sizes"]
    return Kernel(name=row["class"], rows=rows, columns=columns, depth=depth)


def of_rows(
    rows: Iterable[Mapping[str, Any]], rules: Rules
) -> Iterator[tuple[Kernel, float]]:
    """Yield the kernels of rows with their ratios, but for those of slow engines.

    Where another plan goes before the first, its time counts. The kernels have the
    ratios of all engines that were timed, that of this plan first.
    """
    for row in rows:
        kernel = kernel_of_row(row)
        engine, ratio = row["first_engine"], row["ratio"]
        engines = {int(e): ratio * x for e, x in row["engines"].items()}
        each = preference_for(kernel, row["op"], rules.preferred)
        orders = [x for x in rules.engines if x["first"] == engine]
        order = next((x for x in orders if is_ordered(x, kernel)), None)
        if each is not None and engine == each["engine"]:
            ratio *= _gain(row, each)
        elif order is not None:
            names = [str(x) for x in order["before"] if str(x) in row["engines"]]
            if names:
                engine, ratio = int(names[0]), ratio * row["engines"][names[0]]
        slow = (rules.slow.get(name, ()) for name in engines_names(row["class"]))
        if engine not in itertools.chain(*slow):
            others = {e: x for e, x in engines.items() if e != engine}
            engines = {engine: ratio, **others}
            engines = {e: max(0.001, round(x, 3)) for e, x in engines.items()}
            yield replace(kernel, engines=engines), engines[engine]


def entries(found: Iterable[tuple[Kernel, float]]) -> list[list[Any]]:
    """Return what a table has of measured kernels, in its order."""
    return sorted(itertools.starmap(_entry, found), key=operator.itemgetter(slice(5)))


def _entry(kernel: Kernel, ratio: float) -> list[Any]:
    sizes = (kernel.rows, kernel.columns, kernel.depth)
    short = (float(f"{size:.{_SIGNIFICANT}g}") for size in sizes)
    engines = {str(engine): x for engine, x in kernel.engines.items()}
    return [kernel.name, *short, ratio, *([engines] if engines else [])]


def _gain(row: Mapping[str, Any], preference: Mapping[str, Any]) -> float:
    """Return by how much a preference changes a time: as a mean, if it is not known."""
    if "kernels" not in row:
        return preference["ratio"] ** (preference["count"] / preference["of"])
    names = map(json.dumps, preference["knobs"])
    return _ratio_of_first(row["kernels"], names) or 1.0


def _ratio_of_first(times: Mapping[str, float], names: Iterable[str]) -> float | None:
    """Return the time of the first of these kernels that is listed, if any is."""
    return next((times[name] for name in names if name in times), None)


def preference_for(
    kernel: Kernel, op: str, preferred: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the preference that is about a kernel, if there is one."""
    return next((each for each in preferred if is_preferred(each, kernel, op)), None)


def rules_of(
    rows: Sequence[Mapping[str, Any]], slow: Mapping[str, Sequence[int]], cudnn: int
) -> Rules:
    """Return what follows from rows; ``slow`` is what does from all of them."""
    return Rules(
        slow=slow,
        preferred=preferences(rows, cudnn),
        engines=list(engine_orders(rows, cudnn)),
    )
