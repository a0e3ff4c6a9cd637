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

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness.call_times import compare
from benchmarks.harness.records import others_of, write_records
from benchmarks.harness.report import environment, versions_text
from jax_cudnn import choices, plans
from jax_cudnn.calibration.calls import (
    Call,
    drawn_call,
    drawn_conv_in_groups,
)
from jax_cudnn.config import Implementation
from jax_cudnn.policy.nearest import LOSS


@dataclass(frozen=True, kw_only=True)
class _Calls:
    """Whole calls: how they are drawn, and the files about them, by their name."""

    drawn: Callable[[int], Call]
    option: str
    file: str
    heading: str
    told: str

    @property
    def data(self) -> str:
        return f"{self.file}.json"


_EVERY = _Calls(
    drawn=drawn_call,
    option="",
    file="untuned",
    heading="Without tuning",
    told="calls of the sizes that models have (products, convolutions, norms, "
    "attention)",
)
_IN_GROUPS = _Calls(
    drawn=drawn_conv_in_groups,
    option=" --in-groups",
    file="untuned_in_groups",
    heading="Convolutions in groups without tuning",
    told="convolutions in groups of the sizes that models have, two of three depthwise",
)
# The first number of the calls. Those whose kernels are calibrated begin with 0.
_FIRST = 100_000


# --- calls ----------------------------------------------------------------------------


def _text(call: Call, implementation: Implementation) -> str:
    """Return the program that XLA gets."""
    run = functools.partial(call.run, implementation)
    return jax.jit(run).lower(*call.types()).as_text()


def check(
    numbers: Sequence[int], drawn: Callable[[int], Call]
) -> Iterator[dict[str, Any]]:
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


def markdown(data: dict[str, Any], of: _Calls) -> str:
    """Return the page."""
    every = [row for row in data["rows"] if "ratio" in row]
    same = [row["ratio"] for row in every if row["is_same"]]
    rows = [row for row in every if not row["is_same"]]
    ratios = np.array([row["ratio"] for row in rows])
    over = sorted((r for r in rows if r["ratio"] > LOSS), key=lambda r: -r["ratio"])
    not_timed = len(data["rows"]) - len(every)
    left = len(data.get("left", ()))
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        '<!-- Random calls with "auto" and no tuning, beside XLA. -->',
        "",
        f"# {of.heading}",
        "",
        f"Printed by `python -m benchmarks.untuned{of.option} --out "
        "docs/internals/measured`; "
        f"do not edit. {versions_text(data['environment'])}.",
        "",
        f"{len(data['rows'])} random {of.told},",
        'half of them with all gradients, as they run with `implementation="auto"` and',
        "no choice of the tuner. The ratio is to XLA's code in the same run: below 1",
        "is faster. The kernels by which rules decide are of other calls.",
        *(
            [f"{left} more calls go by rules made since they were timed: left out."]
            if left
            else []
        ),
        "",
        f"- cuDNN runs all or part of {len(rows)}. Of these, {len(over)} are more than "
        f"{LOSS - 1:.0%} slower than XLA.",
        f"  The median ratio is {np.median(ratios):.2f}, the geometric mean "
        f"{np.exp(np.log(ratios).mean()):.2f}, the largest {ratios.max():.2f};",
        f"- XLA runs all of {len(same)}, with the same program as without jax_cudnn. "
        "Compiled twice, it",
        "  may choose other kernels: they took "
        f"{min(same, default=1):.2f} to {max(same, default=1):.2f} of their own time;",
        f"- {not_timed} could not be timed, as XLA has no memory for them.",
        "",
        "| more than 5 % slower | runs on | XLA µs | ratio | range |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    lines += [
        f"| {row['call']} | {row['runs on']} | {row['xla_us']:.1f} "
        f"| {row['ratio']:.2f} | {row['ratio_low']:.2f}-{row['ratio_high']:.2f} |"
        for row in over
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write what there is after every row."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--count", type=int, default=200, help="of random calls")
    parser.add_argument("--first", type=int, default=0, help="number of a call")
    parser.add_argument("--every", type=int, default=1, help="one of so many calls")
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument(
        "--in-groups", action="store_true", help="convolutions in groups"
    )
    parser.add_argument("--left", action="store_true", help="what the file leaves out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    choices.table().clear()  # those that are shipped, too
    wanted = re.compile(options.only)
    numbers = range(options.first, options.first + options.count, options.every)
    of = _IN_GROUPS if options.in_groups else _EVERY
    left = sorted(_left(options.out / of.data))
    shifted = left if options.left else [_FIRST + number for number in numbers]
    chosen = [each for each in shifted if wanted.search(of.drawn(each).title)]
    _write_calls(chosen, options.out, of)


def _write_calls(numbers: Sequence[int], folder: Path, of: _Calls) -> None:
    found, file = environment(), folder / of.data
    data: dict[str, Any] = {
        "environment": found,
        "rows": others_of(file, numbers, found["GPU"]),
    }
    left = _left(file)
    for row in check(numbers, of.drawn):
        _add(data, row)
        data["rows"].sort(key=lambda row: row["number"])
        left.discard(row["number"])
        data["left"] = sorted(left)
        write_records(file, data)
        if any("ratio" in each and not each["is_same"] for each in data["rows"]):
            file.with_suffix(".md").write_text(markdown(data, of))


def _left(file: Path) -> set[int]:
    """Return calls that a file leaves out, since rules changed after their times."""
    return set(json.loads(file.read_text()).get("left", ())) if file.exists() else set()


def _add(data: dict[str, Any], row: dict[str, Any]) -> None:
    data["rows"].append(row)
    if len(data["rows"]) % 16 == 0:
        print(f"{len(data['rows'])} rows", flush=True)


if __name__ == "__main__":
    main()
