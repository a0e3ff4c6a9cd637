# SPDX-License-Identifier: Apache-2.0
"""Compares "auto" without tuning with XLA, in random calls on one GPU.

    python -m benchmarks.untuned --out docs/internals/measured

times random calls as they run without any choice of the tuner, and with XLA's code, and
writes untuned.json and untuned.md there. With `--in-groups`, the calls are convolutions
in groups and depthwise ones, and are written to untuned_in_groups.json and .md.

Calls that go by other rules than when they were timed are named in the file as left
out; `--left` times these.

`--first 1000` draws other calls, `--every 3` takes one of three, and `--only gated`
times those whose name has this regular expression. What the file in the folder has of
others is kept, if it is of the same GPU. What "auto" goes by was measured with other
calls (jax-cudnn calibrate).
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.harness.call_times import compare
from benchmarks.harness.page import RANGE, Data, Page, Row, table_of
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from jax_cudnn import choices, plans
from jax_cudnn.calibration.calls import (
    Call,
    drawn_call,
    drawn_conv_in_groups,
)
from jax_cudnn.config import Implementation
from jax_cudnn.policy.nearest import LOSS

# The names of records, by which calls they have.
_EVERY, _IN_GROUPS = "untuned", "untuned_in_groups"
_DRAWN: dict[str, Callable[[int], Call]] = {
    _EVERY: drawn_call,
    _IN_GROUPS: drawn_conv_in_groups,
}
_TOLD = {
    _EVERY: "calls of the sizes that models have (products, convolutions, norms, "
    "attention)",
    _IN_GROUPS: "convolutions in groups of the sizes that models have, two of three "
    "depthwise",
}
# The first number of the calls. Those whose kernels are calibrated begin with 0.
_FIRST = 100_000


# --- calls ----------------------------------------------------------------------------


def _text(call: Call, implementation: Implementation) -> str:
    """Return the program that XLA gets."""
    run = functools.partial(call.run, implementation)
    return jax.jit(run).lower(*call.types()).as_text()


def check(numbers: Sequence[int], drawn: Callable[[int], Call]) -> Iterator[Row]:
    """Time calls without choices and by XLA; yield a row for each.

    What is over the goal is timed again, longer, and that time counts. Of a call for
    which XLA gets the same program both times, the ratio says how much XLA's own
    choices differ between two compilations.
    """
    calls = [drawn(number) for number in numbers]
    compared = compare(calls, ("auto", "xla"))
    for number, call, times in zip(numbers, calls, compared, strict=True):
        report = plans.inspect(functools.partial(call.run, "auto"), *call.types())
        yield {
            "number": number,
            "call": call.title,
            "runs on": ", ".join(each.implementation for each in report.calls),
            "is_same": _text(call, "auto") == _text(call, "xla"),
            **times,
        }


def _lines(data: Data) -> list[str]:
    every = [row for row in data["rows"] if "ratio" in row]
    same = [row["ratio"] for row in every if row["is_same"]]
    rows = [row for row in every if not row["is_same"]]
    ratios = np.array([row["ratio"] for row in rows])
    over = sorted((r for r in rows if r["ratio"] > LOSS), key=lambda r: -r["ratio"])
    not_timed = len(data["rows"]) - len(every)
    left = len(data.get("left", ()))
    lines = [
        f"{len(data['rows'])} random {_TOLD[data['calls']]},",
        'half of them with all gradients, as they run with `implementation="auto"` and',
        "no choice of the tuner. The ratio is to XLA's code in the same run: below 1",
        "is faster. The kernels by which rules decide are of other calls.",
    ]
    if left:
        lines.append(
            f"{left} more calls go by rules made since they were timed: left out."
        )
    lines += [
        "",
        f"- cuDNN runs all or part of {len(rows)}. Of these, {len(over)} are more than "
        f"{LOSS - 1:.0%} slower than XLA.",
    ]
    if rows:
        lines.append(
            f"  The median ratio is {np.median(ratios):.2f}, the geometric mean "
            f"{np.exp(np.log(ratios).mean()):.2f}, the largest {ratios.max():.2f};"
        )
    return [
        *lines,
        f"- XLA runs all of {len(same)}, with the same program as without jax_cudnn. "
        "Compiled twice, it",
        "  may choose other kernels: they took "
        f"{min(same, default=1):.2f} to {max(same, default=1):.2f} of their own time;",
        f"- {not_timed} could not be timed, as XLA has no memory for them.",
        "",
        *table_of(
            over,
            "more than 5 % slower | runs on | >XLA µs | >ratio | range",
            "{call} | {runs on} | {xla_us:.1f} | {ratio:.2f} | " + RANGE,
        ),
    ]


def _page(name: str) -> Page:
    """Return the page of a record."""
    is_every = name == _EVERY
    flags = "" if is_every else " --in-groups"
    return Page(
        name=name,
        title="Without tuning" if is_every else "Convolutions in groups without tuning",
        comment='Random calls with "auto" and no tuning, beside XLA.',
        lines=_lines,
        command=f"python -m benchmarks.untuned{flags} --out docs/internals/measured",
    )


def markdown(data: Data) -> str:
    """Return the page of either record."""
    return _page(data["calls"])(data)


def main() -> None:
    """Measure, and write what there is after every row."""
    made = parser(__doc__)
    made.add_argument("--count", type=int, default=200, help="of random calls")
    made.add_argument("--first", type=int, default=0, help="number of a call")
    made.add_argument("--every", type=int, default=1, help="one of so many calls")
    made.add_argument("--only", default="", help="a regular expression")
    made.add_argument("--in-groups", action="store_true", help="convolutions in groups")
    made.add_argument("--left", action="store_true", help="what the file leaves out")
    options = made.parse_args()
    choices.table().clear()  # those that are shipped, too
    name = _IN_GROUPS if options.in_groups else _EVERY
    drawn = _DRAWN[name]
    about: dict[str, Any] = {"calls": name, "left": []}
    rows = Table(
        folder=options.out,
        page=_page(name),
        keeps="this GPU",
        keys=["number"],
        order="keys",
        about=about,
    )
    # Calls that the file leaves out, since rules changed after their times.
    left: list[int] = []
    if rows.file.exists():
        left = json.loads(rows.file.read_text()).get("left", [])
    numbers = range(options.first, options.first + options.count, options.every)
    shifted = sorted(left) if options.left else [_FIRST + x for x in numbers]
    chosen = [x for x in shifted if re.search(options.only, drawn(x).title)]
    for count, row in enumerate(check(chosen, drawn), 1):
        about["left"] = sorted({*left} - {*chosen[:count]})
        rows.add(row)
        if count % 16 == 0:
            print(f"{count} rows", flush=True)


if __name__ == "__main__":
    main()
