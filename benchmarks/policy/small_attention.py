# SPDX-License-Identifier: Apache-2.0
"""Finds on one GPU from which size on cuDNN's attention is faster than XLA's code.

    python -m benchmarks.small_attention --out docs/internals/measured

times random attention with few scores by cuDNN's first plan and by XLA's code, and
writes small_attention.json and small_attention.md there. XLA need not transpose arrays
of one head or of one sequence, so half of the calls have one of these. From this table
are the bounds by which "auto" leaves attention to XLA (jax_cudnn/data/policy).
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.call_times import compare
from benchmarks.harness.page import RANGE, Data, Page, Row, table, table_of
from benchmarks.harness.program import run_benchmark
from jax_cudnn import choices
from jax_cudnn.calibration.calls import Call, drawn_call
from jax_cudnn.policy.tables import tables_for

# The scores up to which "auto" leaves attention to XLA, with gradients and without.
_LEFT = {
    row.when["gives_stats"]: row.when["scores"]["at_most"]
    for row in tables_for(None).about("attention").rows
    if {"scores", "gives_stats"} <= row.when.keys()
}
# Calls from here on are others than those that `benchmarks.untuned` times.
_FIRST = 110_000
_MOST = 2**23
_CASES = {
    (False, True): "forward, one head or one sequence",
    (True, True): "with gradients, one head or one sequence",
    (False, False): "forward, several of both",
    (True, False): "with gradients, several of both",
}


def scores_of(call: Call) -> int:
    """Return the number of scores of all heads and sequences."""
    batch, tokens, heads, _ = call.operands[0].shape
    return batch * heads * tokens * tokens


def is_one(call: Call) -> bool:
    """Whether there is one head or one sequence."""
    batch, _, heads, _ = call.operands[0].shape
    return min(batch, heads) == 1


def cases(*, small: bool) -> list[tuple[int, Call]]:
    """Return random attention of few scores with its numbers, as many of each case."""
    count = 2 if small else 12
    found: dict[tuple[bool, bool], list[tuple[int, Call]]] = {x: [] for x in _CASES}
    for number in itertools.count(_FIRST):
        call = drawn_call(number)
        if "sdpa" not in call.name or scores_of(call) > _MOST:
            continue
        query, key, _ = call.operands
        case = found[call.has_gradients, is_one(call)]
        if query.shape == key.shape and len(case) < count:
            case.append((number, call))
        if all(len(each) >= count for each in found.values()):
            break
    return sorted(each for case in found.values() for each in case)


def measure(numbered: Sequence[tuple[int, Call]]) -> Iterator[Row]:
    """Time calls; yield a row for each."""
    choices.table().clear()  # those that are shipped, too
    times = compare([call for _, call in numbered], ("cudnn", "xla"))
    for (number, call), row in zip(numbered, times, strict=True):
        yield {
            "number": number,
            "call": call.title,
            "has_gradients": call.has_gradients,
            "is_one": is_one(call),
            "scores": scores_of(call),
            **row,
        }


def _millions(scores: int) -> str:
    return f"{scores / 2**20:.0f}"


def _lines(data: Data) -> list[str]:
    timed = [
        {**row, "millions": row["scores"] / 2**20}
        for row in data["rows"]
        if "ratio" in row
    ]
    return [
        "Random attention in 16 bits, by cuDNN's first plan and by XLA's code. The",
        "ratio is cuDNN's time over XLA's: below 1, cuDNN is faster. Scores are those",
        "of all heads and sequences, and a million of them is 2^20. XLA runs attention",
        "as two products in a batch. It need not transpose arrays of one head or of",
        'one sequence. Without tuning, "auto" leaves such attention to XLA up to',
        f"{_millions(_LEFT[False])} million scores, and with gradients up to "
        f"{_millions(_LEFT[True])} million.",
        "",
        *table(
            " | million scores | >calls | >ratio, mean | >lowest | >highest",
            _by_case(timed),
        ),
        "",
        *table_of(
            sorted(timed, key=lambda x: (not x["is_one"], x["scores"])),
            "call | >million scores | >XLA µs | >ratio | range",
            "{call} | {millions:.2f} | {xla_us:.1f} | {ratio:.2f} | " + RANGE,
        ),
    ]


def _by_case(timed: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield a line for the calls up to a case's bound, and for those beyond it."""
    for case, title in _CASES.items():
        bound = _LEFT[case[0]]
        of_case = [
            row for row in timed if (row["has_gradients"], row["is_one"]) == case
        ]
        for few in (True, False):
            ratios = [x["ratio"] for x in of_case if (x["scores"] <= bound) == few]
            if ratios:
                bounds = f"{'up to' if few else 'more than'} {_millions(bound)}"
                numbers = statistics.geometric_mean(ratios), min(ratios), max(ratios)
                yield [title, bounds, len(ratios), *(f"{x:.2f}" for x in numbers)]


markdown = Page(
    name="small_attention",
    title="Small attention",
    comment="Attention with few scores, by cuDNN and by XLA.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, cases, measure, markdown, keeps="this GPU", keys=["number"])
