# SPDX-License-Identifier: Apache-2.0
"""Defines the result of `plans.inspect`: calls as data, and a report of them all.

`CallSummary` is what `plans.explain` says of a call as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax_cudnn.columns import Block, Details, Heading, Page, Table
from jax_cudnn.config import Options
from jax_cudnn.errors import LibraryError, UnsupportedError
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.graph.printing import mermaid_lines
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering.decision import Why
from jax_cudnn.lowering.devices import gpu_for
from jax_cudnn.native import Candidate
from jax_cudnn.policy import rank

# The version of what `Report.to_json` returns. A change of meaning raises it.
SCHEMA = 1

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSummary:
    """One part of a distinct graph of a function, with the implementation that runs it.

    Attributes:
      op: what it computes.
      shapes: its operands as stored.
      count: how often it occurs in the program; a loop's body counts once.
      implementation: "cudnn", "xla", or a contender's name and version
        (``plans.add_contender``).
      plan: cuDNN's name of the plan; None if cuDNN does not run it, or there is no GPU
        to plan for.
      workspace_bytes: the plan's scratch memory; likewise.
    """

    op: str
    shapes: str
    count: int
    implementation: str
    plan: str | None = None
    workspace_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(CallSummary):
    """One part of a distinct graph of a function: a kernel of cuDNN, or code of XLA.

    It has the attributes of ``CallSummary`` and those below. The attributes of a plan
    are empty or None where there is no plan.

    Attributes:
      reasons: why cuDNN does not run it, or does not run all of it.
      direction: "forward" or "backward"; None for forward mode's derivatives, and if a
        lowered program does not contain it.
      why: "tuned" if a measured choice pins the plan or is XLA; "heuristic" if the plan
        is the first in cuDNN's list that builds, or one that is put before it because
        it was faster for similar kernels; "requested" if options of the call restrict
        the plan or request XLA; "pinned" for a lowered program that names the plan,
        either measured or the first one for a GPU that was named; None if XLA runs the
        part for the ``reasons``.
      by: which measurements of other kernels decided who runs the part: "8 kernels
        calibrated on this GPU", "a rule measured on sm_90 with cuDNN 9.19" (or "the
        rules", where none of them is about it), "a rule of the nearest table: sm_90,
        cuDNN 9.19". "" if it was tuned or requested, if nothing similar was measured,
        and in a lowered program.
      part: the graph as the user wrote it; None in a lowered program.
      graph: the graph that cuDNN gets, rewritten for it; None where XLA runs it.
      request: the text that requests the plan: it pins or restricts the plan, or says
        which kernel is tried first; "" leaves the plan to cuDNN. Plans for a named GPU
        are pinned.
      device: the GPU that was named; None is this machine's.
      allowed: the text of the call's ``PlanOptions``; "" if they allow all plans, and
        in a lowered program with a pinned plan, which does not contain it.
      engine: the number of cuDNN's engine.
      knobs: the engine's settings, (name, value) sorted by name.
      behavior_notes: what cuDNN says about how the plan works, such as
        RUNTIME_COMPILATION.
      numeric_notes: what cuDNN says about the plan's numerics, such as TENSOR_CORE.
      failures: the candidates before the plan that were rejected, with the reasons.
      cudnn_us: microseconds of the best plan with its array work, where tuned.
      xla_us: microseconds of XLA's code, where tuned.
      first_ratio: the kernel time of the plan that runs untuned divided by the best
        plan's, where tuned.
      contenders_us: names and microseconds of the contenders that were added, where
        tuned.
    """

    reasons: tuple[str, ...]
    direction: Direction | None = None
    why: Why | None = None
    by: str = ""
    part: Graph | None = None
    graph: Graph | None = None
    request: str = ""
    allowed: str = ""
    device: str | None = None
    engine: int | None = None
    knobs: tuple[tuple[str, int], ...] = ()
    behavior_notes: tuple[str, ...] = ()
    numeric_notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    cudnn_us: float | None = None
    xla_us: float | None = None
    first_ratio: float | None = None
    contenders_us: tuple[tuple[str, float], ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Behaviour notes and numerical notes."""
        return (*self.behavior_notes, *self.numeric_notes)

    def candidates(self) -> tuple[Candidate, ...]:
        """Return all of cuDNN's candidates for the call, its best guess first.

        Candidates are listed, not built: some may fail to build. A candidate that the
        options of the call do not allow says why in ``refusal``. For a part that XLA
        runs, the candidates are those of the first way of rewriting the part that cuDNN
        takes at all.

        Raises:
          LibraryError: there is no NVIDIA GPU here, and none was named, to list
            candidates for.
          UnsupportedError: cuDNN has no candidate.
        """
        gpu = gpu_for(Options(device=self.device))
        if gpu is None:
            raise LibraryError(
                "Call.candidates needs an NVIDIA GPU; JAX sees none. Inside "
                'plans.using(device="H200") calls are for one by its name.'
            )
        graphs, reasons = [self.graph] if self.graph else [], list[str]()
        if not graphs and self.part:
            legalization = legalize(self.part, gpu.target)
            ranked = rank(self.part, legalization.candidates, gpu.target)
            graphs = [each.rewrite.graph for each in ranked]
            reasons += legalization.reasons
        for graph in graphs:
            try:
                return gpu.candidates(to_json(graph), self.allowed)
            except UnsupportedError as error:
                reasons += error.reasons or (error.summary,)
        raise UnsupportedError(f"cuDNN has no candidate for {self.op}.", reasons)

    def mermaid(self) -> str:
        """Return a Mermaid flowchart of the graph that runs."""
        return "\n".join(("flowchart TD", *self.mermaid_lines("")))

    def mermaid_lines(self, prefix: str) -> Iterator[str]:
        """Yield the lines of the flowchart, a frame with the call's name around it."""
        graph = self.graph or self.part
        title = f"{self.count} x {self.op}: {self.plan or self.implementation}"
        yield f'  subgraph {prefix}call["{title}"]'
        if graph is not None:
            yield from (f"  {line}" for line in mermaid_lines(graph, prefix))
        yield "  end"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with graphs in canonical form and knobs as an object."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        lists = {name: list(getattr(self, name)) for name in _LISTS}
        graphs = {name: getattr(self, name) for name in ("part", "graph")}
        return {
            **plain,
            **lists,
            "knobs": dict(self.knobs),
            "contenders_us": dict(self.contenders_us),
            **{
                name: None if graph is None else json.loads(to_json(graph))
                for name, graph in graphs.items()
            },
        }


_PLAIN = (
    *("op", "shapes", "count", "implementation", "plan", "workspace_bytes"),
    *("direction", "why", "by", "request", "allowed", "device", "engine"),
    *("cudnn_us", "xla_us", "first_ratio"),
)
_LISTS = ("reasons", "behavior_notes", "numeric_notes", "failures")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Report(Page):
    """The result of ``inspect``; ``str(report)`` is a table.

    ``notes`` lists what could not be inspected. Below the table are the reasons why XLA
    runs a call, the measurements by which "auto" decided, the plans that were rejected,
    and the notes; a notebook folds the last three.
    """

    device: str
    calls: tuple[Call, ...]
    notes: tuple[str, ...] = ()

    def _blocks(self) -> Iterator[Block]:
        yield Heading(f"cuDNN calls on {self.device}")
        yield _table(self.calls)
        reasons = [(call.op, reason) for call in self.calls for reason in call.reasons]
        yield Details(title="reasons", notes=_once_each(reasons), is_open=True)
        failures = [
            (call.op, f"passed over: {failure}")
            for call in self.calls
            for failure in call.failures
        ]
        decided = [(call.op, f"decided by {call.by}") for call in self.calls if call.by]
        yield Details(title="measurements that decided", notes=_once_each(decided))
        yield Details(title="plans that were passed over", notes=_once_each(failures))
        yield Details(title="notes", notes=self.notes)

    def mermaid(self) -> str:
        """Return a Mermaid flowchart with a frame for each call."""
        lines = (
            line
            for i, call in enumerate(self.calls)
            for line in call.mermaid_lines(f"c{i}_")
        )
        return "\n".join(("flowchart TD", *lines))

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``json.dumps``; "schema" is the version of its form."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "calls": [call.to_json() for call in self.calls],
            "notes": list(self.notes),
        }


# --- the table ------------------------------------------------------------------------


def _once_each(notes_of_ops: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return each note once, after the names of all operations that have it."""
    ops: dict[str, list[str]] = {}
    for op, what in notes_of_ops:
        ops.setdefault(what, []).append(op)
    return tuple(f"{', '.join(dict.fromkeys(ops[what]))}: {what}" for what in ops)


def _table(calls: Sequence[Call]) -> Table:
    """Return the table of calls, without columns of which nothing is known."""
    always = ("op", "count", "operands", "runs on", "plan", "workspace")
    columns = {
        "op": [call.op for call in calls],
        "count": [str(call.count) for call in calls],
        "direction": [call.direction for call in calls],
        "operands": [call.shapes for call in calls],
        "runs on": [call.implementation for call in calls],
        "why": [call.why for call in calls],
        "plan": [call.plan for call in calls],
        "engine": [None if c.engine is None else str(c.engine) for c in calls],
        "workspace": [_bytes_text(call.workspace_bytes) for call in calls],
        "cuDNN µs": [_us_text(call.cudnn_us) for call in calls],
        "XLA µs": [_us_text(call.xla_us) for call in calls],
        "others µs": [contenders_text(call.contenders_us) for call in calls],
        "notes": [" ".join(call.notes) or None for call in calls],
    }
    shown = {
        name: [cell or "-" for cell in cells]
        for name, cells in columns.items()
        if name in always or any(cells)
    }
    return Table(tuple(shown), tuple(zip(*shown.values(), strict=True)))


def contenders_text(times: Iterable[tuple[str, float]]) -> str | None:
    """Return the times of contenders as the cell of a table; None for none."""
    return ", ".join(f"{name} {us:.1f}" for name, us in times) or None


def _bytes_text(count: int | None) -> str | None:
    return None if count is None else f"{count:,} B"


def _us_text(microseconds: float | None) -> str | None:
    return None if microseconds is None else f"{microseconds:.1f}"
