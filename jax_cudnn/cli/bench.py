# SPDX-License-Identifier: Apache-2.0
"""`jax-cudnn bench`: times cuDNN's plans and XLA's code for one call."""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_cudnn.choices import Choice
from jax_cudnn.cli.calls import add_call, call_of
from jax_cudnn.errors import LibraryError
from jax_cudnn.graph import Graph, is_anchor, operand_text
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.decision import operation
from jax_cudnn.lowering.devices import local_target
from jax_cudnn.progress import waiting
from jax_cudnn.tuning import measure
from jax_cudnn.tuning.candidate_times import TimedCandidate, time_candidates

# The version of what --json prints. A change of meaning raises it.
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The times of one part of a call: a kernel of cuDNN, or XLA's code for it.

    ``choice`` has the best plan and XLA in compiled programs, array work included;
    ``timed`` each candidate's kernels by themselves.
    """

    choice: Choice
    timed: tuple[TimedCandidate, ...]

    @property
    def first(self) -> TimedCandidate | None:
        """The candidate that runs where nothing was tuned: the first that builds."""
        return next((each for each in self.timed if each.time is not None), None)

    @property
    def best(self) -> TimedCandidate | None:
        """The candidate whose kernels are fastest."""
        built = [each for each in self.timed if each.time is not None]
        return min(built, key=_median, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for ``json.dumps``."""
        return {
            **dataclasses.asdict(self.choice),
            "candidates": [
                {
                    **dataclasses.asdict(each.candidate),
                    "knobs": dict(each.candidate.knobs),
                    "kernel_us": each.time and dataclasses.asdict(each.time),
                    "failure": each.failure,
                }
                for each in self.timed
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.choice.op}  {self.choice.operands}"
        yield f"  {_us(self.choice.xla_us)}  XLA"
        yield f"  {_us(self.choice.cudnn_us)}  cuDNN's best plan, with its array work"
        first, best = self.first, self.best
        if first is None or best is None:
            yield "  cuDNN has no plan"
        else:
            ratio = _median(first) / _median(best)
            yield (
                f"  {_us(_median(first))}  cuDNN's first plan, its kernels only: "
                f"{ratio:.2f} times the best one's {_us(_median(best)).strip()}"
            )
        for each in self.timed:
            yield f"    {_candidate(each, is_best=each is best)}"


def _median(timed: TimedCandidate) -> float:
    return timed.time.median_us if timed.time else float("inf")


def _us(microseconds: float | None) -> str:
    return " " * 11 + "-" if microseconds is None else f"{microseconds:9.1f} µs"


def _candidate(timed: TimedCandidate, *, is_best: bool) -> str:
    candidate = timed.candidate
    if timed.time is None:
        reason = timed.failure.splitlines()[0]
        return f"{' ' * 11}-  {candidate.name}: {reason}"
    spread = f"{timed.time.low_us:.1f} to {timed.time.high_us:.1f}"
    notes = " ".join((*candidate.behavior_notes, *candidate.numeric_notes))
    mark = "  (best)" if is_best else ""
    return (
        f"{_us(timed.time.median_us)}  {candidate.name}, {spread}, "
        f"{candidate.workspace_bytes:,} B, {notes or 'no notes'}{mark}"
    )


def add_command(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "bench",
        help="time cuDNN's first plan, all its candidates, and XLA for one call",
        description="Times each kernel of a function's calls on this machine's GPU, "
        "with random operands in separate memory. For example: bench jax_cudnn:matmul "
        '--args "bf16[8192,4096]" "bf16[4096,4096]" bias="bf16[4096]" activation=gelu',
    )
    add_call(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print the times as JSON. The default is a text to read.",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    function, operands = call_of(arguments)
    # Traced first: what is wrong with the call is wrong without a GPU, too.
    found = [
        (part, traced.options)
        for traced in traced_graphs(function, *operands)
        for part in traced.parts
        if _has_anchor(part)
    ]
    if not found:
        raise ValueError(
            "bench: the function calls none of jax_cudnn's operations that a kernel of "
            "cuDNN computes: attention, matmuls, convolutions, norms or pooling. Name "
            "one that does, such as jax_cudnn:sdpa."
        )
    local = local_target()
    if local is None:
        raise LibraryError(
            "bench needs an NVIDIA GPU; JAX sees none here. `jax-cudnn doctor` says "
            "why."
        )
    target = local[1]
    benches: list[Bench] = []
    for part, options in dict.fromkeys(found):
        with waiting("Measuring", f"{operation(part)}({operand_text(part)})"):
            choice = measure(part, options, target)
        timed = tuple(time_candidates(part, target))
        benches.append(Bench(choice=choice, timed=timed))
        if not arguments.json:
            header = f"On {target.name}, medians:\n" if len(benches) == 1 else ""
            print(f"{header}{benches[-1]}", flush=True)
    if arguments.json:
        shown = [each.to_json() for each in benches]
        data = {"schema": SCHEMA, "device": dataclasses.asdict(target), "parts": shown}
        print(json.dumps(data, indent=2))
    return 0


def _has_anchor(part: Graph) -> bool:
    return any(map(is_anchor, part.nodes))
