# SPDX-License-Identifier: Apache-2.0
"""Compares "auto" without tuning with XLA, in random calls on one GPU.

    python -m benchmarks.untuned --out docs/benchmarks

times random calls as they run without any choice of the tuner, and with XLA's code, and
writes untuned.json and untuned.md there. With `--in-groups`, the calls are convolutions
in groups and depthwise ones, and are written to untuned_in_groups.json and .md.

    python -m benchmarks.untuned --parts --out docs/benchmarks

times the kernels of other random calls instead, each with cuDNN's first plan, with
the first plan of each engine, with each kernel of the first plan's engine, and by XLA,
and writes untuned_parts.json. With
`--few-rows`, the kernels are products of few rows, as those of programs that generate
text, and are written to untuned_few_rows.json. With `--mlps`, they are those of MLPs
and their gradients, and are written to untuned_mlps.json; with `--groups`, those of
convolutions in groups, and are written to untuned_groups.json. With `--most 24` no
class of kernels gets more rows with all of these times, and with `--fused` all have
something around the contraction. From these files, `python -m scripts.default_rules`
makes the rules that "auto" follows. Kernels and the calls above never share a call.

Calls that go by other rules than when they were timed are named in the file as left
out; `--left` times these.

`--first 1000` draws other calls, and `--only gated` times those whose name has this
regular expression; `--kernel silu_grad` so chooses kernels. What the file in the folder
has of others is kept; for the times of whole calls, only of the same GPU.
"""

import argparse
import functools
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.call_times import batched, compare, timed
from benchmarks.random_calls import (
    Call,
    drawn_call,
    drawn_conv_in_groups,
    drawn_grouped,
    drawn_mlp,
    drawn_step,
)
from benchmarks.records import kept_rows, others_of, write_records
from benchmarks.report import environment, versions_text
from benchmarks.timing import summary
from jax_cudnn import choices, native, plans
from jax_cudnn.config import Implementation, Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, is_anchor, label, operand_text, to_json
from jax_cudnn.lowering import run_cudnn, run_xla, traced_program
from jax_cudnn.lowering.decision import Step, decide_part
from jax_cudnn.lowering.devices import LocalGpu, local_device, local_target
from jax_cudnn.policy.nearest import LOSS
from jax_cudnn.policy.products.kernels import class_of, kernel_of
from jax_cudnn.policy.tables import tables_for
from jax_cudnn.tuning.stopwatch import (
    OperandSets,
    PlanStopwatch,
    compile_over_sets,
)
from jax_cudnn.tuning.together import together


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
# Kernels by which rules are made: of which calls, and where they are written.
_KERNELS = {
    "parts": (drawn_call, "untuned_parts.json"),
    "few_rows": (drawn_step, "untuned_few_rows.json"),
    "mlps": (drawn_mlp, "untuned_mlps.json"),
    "groups": (drawn_grouped, "untuned_groups.json"),
}
# The first number of the calls; the first whose kernels are timed is 0.
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
        f"Printed by `python -m benchmarks.untuned{of.option} --out docs/benchmarks`; "
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


# --- kernels --------------------------------------------------------------------------


def parts_of(calls: Iterable[Call]) -> list[Graph]:
    """Return the kernels of some calls, each once, of classes that rules are about."""
    found: dict[Graph, None] = {}
    for call in calls:
        traced = traced_program(functools.partial(call.run, "auto"), *call.types())
        for graph in traced.graphs:
            for part in graph.parts:
                if any(map(is_anchor, part.nodes)) and class_of(part, tables_for(None)):
                    found.setdefault(part)
    return list(found)


class _Kernel:
    """A part of a graph, with what runs it."""

    def __init__(self, part: Graph, gpu: LocalGpu) -> None:
        self.part, self._gpu = part, gpu
        self._operands = OperandSets(part, local_device())
        self.step: Step | None = None
        self.plans: dict[int, native.PlanInfo] = {}
        self.kernels: dict[str, native.PlanInfo] = {}
        self.programs: dict[str, Callable[..., Any]] = {}

    def prepare(self) -> None:
        """Build plans and compile programs; may run in a thread."""
        options = Options(implementation="cudnn")
        with jax.default_device(local_device()):
            step = decide_part(self.part, self._gpu, options)
            if step.legal is None or step.plan is None:
                return
            text = to_json(step.legal.graph)
            # cuDNN's own first plan, which a rule may have changed.
            first = self._gpu.plan(text)
            step = replace(step, plan=first, request="")
            for each in self._gpu.candidates(text):
                if each.refusal or not each.request:
                    continue
                is_first = each.engine not in self.plans
                kernel = _kernel_of(each) if each.engine == first.engine else ""
                if is_first or kernel:
                    try:
                        plan = self._gpu.plan(text, each.request)
                    except UnsupportedError:
                        continue
                    self.plans.setdefault(each.engine, plan)
                    if kernel:
                        self.kernels[kernel] = plan
            run = functools.partial(by_cudnn, step)
            self.programs["cudnn"] = compile_over_sets(run, self._operands.types)
            run = functools.partial(by_xla, self.part)
            self.programs["xla"] = compile_over_sets(run, self._operands.types)
            self._operands.compile()
        self.step = step

    def measured(self) -> dict[str, Any] | None:
        """Return what was measured, None where cuDNN has no plan."""
        step = self.step
        if step is None or step.legal is None or step.plan is None:
            return None
        sets = self._operands.draw()
        times = timed(self.programs, sets, rounds=5)
        timing = summary(times["cudnn"], times["xla"])
        changed = [list(jax.jit(step.legal.before)(each)) for each in sets]
        stopwatch = PlanStopwatch(step.legal.graph, changed, local_device())
        first_us = stopwatch.time(step.plan, samples=3).median_us

        def ratio(plan: native.PlanInfo) -> float:
            enough = 3 * first_us
            look = stopwatch.time(plan, samples=3, enough_us=enough).median_us
            return round(look / first_us, 3)

        return {
            **named(self.part),
            "xla_us": round(statistics.median(times["xla"]), 2),
            "cudnn_us": round(timing.median_us, 2),
            "ratio": round(timing.ratio, 3),
            "first_engine": step.plan.engine,
            "engines": {str(each): ratio(x) for each, x in self.plans.items()},
            "kernels": {each: ratio(x) for each, x in self.kernels.items()},
        }


def _kernel_of(candidate: native.Candidate) -> str:
    """Return the knob of an engine that is asked for one of its kernels, else ""."""
    names = [name for name, _ in candidate.knobs]
    return json.dumps(dict(candidate.knobs)) if names == ["KERNEL_CFG"] else ""


def by_cudnn(step: Step, *operands: jax.Array) -> Sequence[jax.Array]:
    """Return the results of a part by a plan of cuDNN's."""
    return run_cudnn(step, operands)


def by_xla(part: Graph, *operands: jax.Array) -> Sequence[jax.Array]:
    """Return the results of a part by XLA's code."""
    return run_xla(part, operands, Options())


def named(part: Graph) -> dict[str, Any]:
    """Return what tells a kernel from others, and its class."""
    like = kernel_of(part, tables_for(None))
    assert like is not None
    sizes = (like.rows, like.columns, like.depth, like.work)
    return {
        "class": like.name,
        "sizes": [round(size) for size in sizes],
        "op": label(part),
        "operands": operand_text(part),
    }


def lacking(
    parts: Iterable[Graph], rows: Sequence[Mapping[str, Any]], most: int
) -> list[Graph]:
    """Return the kernels that no row has, so many that each class gets ``most``.

    Rows of runs that did not time each kernel of an engine do not count.
    """
    known = {(row["op"], row["operands"]) for row in rows}
    counts = Counter(row["class"] for row in rows if "kernels" in row)
    found: list[Graph] = []
    for part in parts:
        name = class_of(part, tables_for(None))
        if (label(part), operand_text(part)) not in known and counts[name] < most:
            counts[name] += 1
            found.append(part)
    return found


def kernels(parts: Sequence[Graph]) -> Iterator[dict[str, Any]]:
    """Time kernels; yield a row for each that cuDNN plans."""
    local = local_target()
    assert local is not None
    gpu = LocalGpu(ordinal=local[0], target=local[1])
    for some in batched(parts):
        found = [_Kernel(part, gpu) for part in some]
        together([functools.partial(_unless_it_fails, each.prepare) for each in found])
        for each in found:
            row = _unless_it_fails(each.measured)
            if row is not None:
                yield {"GPU": gpu.target.name, **row}


def _unless_it_fails(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except (jax.errors.JaxRuntimeError, RuntimeError, MemoryError) as error:
        print(f"  left out: {str(error)[:200]}", flush=True)
        return None


def main() -> None:
    """Measure, and write what there is after every row."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--count", type=int, default=200, help="of random calls")
    parser.add_argument("--first", type=int, default=0, help="number of a call")
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--most", type=int, default=10**6, help="kernels of a class")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--parts", action="store_true", help="time kernels for rules")
    kind.add_argument("--few-rows", action="store_true", help="and those of few rows")
    kind.add_argument("--mlps", action="store_true", help="and those of MLPs")
    kind.add_argument("--groups", action="store_true", help="of convolutions in groups")
    kind.add_argument("--in-groups", action="store_true", help="such calls, for a page")
    parser.add_argument("--fused", action="store_true", help="no contraction alone")
    parser.add_argument("--kernel", default="", help="regex of a kernel's operations")
    parser.add_argument("--left", action="store_true", help="what the file leaves out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    choices.table().clear()  # those that are shipped, too
    wanted = re.compile(options.only)
    numbers = range(options.first, options.first + options.count)
    timed_kernels = [each for each in _KERNELS if getattr(options, each)]
    if timed_kernels:
        if numbers.stop > _FIRST:
            parser.error(f"calls from {_FIRST} on are those that rules are judged by")
        drawn, name = _KERNELS[timed_kernels[0]]
        calls = [call for call in map(drawn, numbers) if wanted.search(call.title)]
        fewest = 2 if options.fused else 1
        parts = [
            part
            for part in parts_of(calls)
            if len(part.nodes) >= fewest and re.search(options.kernel, label(part))
        ]
        _write_kernels(parts, options.out / name, options.most)
    else:
        of = _IN_GROUPS if options.in_groups else _EVERY
        left = sorted(_left(options.out / of.data))
        shifted = left if options.left else [_FIRST + number for number in numbers]
        chosen = [each for each in shifted if wanted.search(of.drawn(each).title)]
        _write_calls(chosen, options.out, of)


def _write_kernels(parts: Sequence[Graph], file: Path, most: int) -> None:
    data: dict[str, Any] = {"environment": environment(), "rows": kept_rows(file)}
    for row in kernels(lacking(parts, data["rows"], most)):
        _add(data, row)
        write_records(file, data)


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
