# SPDX-License-Identifier: Apache-2.0
"""`plans.inspect`: the cuDNN calls in a function, who runs each, with which plan."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax_cudnn import offline
from jax_cudnn.config import Options
from jax_cudnn.errors import LibraryError
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import decide, traced_graphs
from jax_cudnn.lowering.cuda import Decision, Step, label, local_target


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One part of a distinct graph of a function: a kernel of cuDNN, or XLA's share.

    ``op`` is what it computes, ``shapes`` its operands as stored, ``count`` how often
    the traced program holds it (a loop's body counts once). ``implementation`` is
    "cudnn" or "xla"; ``plan`` names cuDNN's plan and ``workspace_bytes`` its scratch
    memory, None where XLA runs it or no GPU is here to plan for. ``reasons`` says, a
    sentence each, why cuDNN does not run it, or does not run all of it.
    """

    op: str
    shapes: str
    count: int
    implementation: str
    plan: str | None
    workspace_bytes: int | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What ``inspect`` found; ``str`` of it is a table."""

    device: str
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        rows = [("op", "count", "operands", "runs on", "plan", "workspace")]
        rows += [
            (
                call.op,
                str(call.count),
                call.shapes,
                call.implementation,
                call.plan or "-",
                "-" if call.workspace_bytes is None else f"{call.workspace_bytes:,} B",
            )
            for call in self.calls
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"cuDNN calls on {self.device}"]
        for row in rows:
            cells = (cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        operations: dict[str, list[str]] = {}
        for call in self.calls:
            for reason in call.reasons:
                operations.setdefault(reason, []).append(call.op)
        for reason, ops in operations.items():
            lines.append(f"{', '.join(dict.fromkeys(ops))}: {reason}")
        return "\n".join(lines)


def inspect(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Return every cuDNN call that ``function(*args, **kwargs)`` makes, and its plan.

    Traces the function (which may be jitted, or a gradient) without running it, and
    asks for each graph what the compiler asks: on a machine with an NVIDIA GPU the
    plans are built and stay cached for the run that follows. Inside
    ``plans.using(device="H200")`` it asks for that GPU, which need not be here.
    Arguments may be arrays
    or ``jax.ShapeDtypeStruct``; bind options that are not, with ``functools.partial``,
    unless the function is jitted and names them in ``static_argnames``.

    Returns:
      A ``Report`` with the ``Call``s of each distinct graph, in order of appearance;
      forward-mode and second-order parts, which always run as XLA's own code, are
      listed as op "...:derivative".
    """
    found = Counter(traced_graphs(function, *args, **kwargs))
    named = {options.device for _, options, _ in found}
    device, has_gpu = _device(named)
    return Report(
        device=device,
        calls=tuple(
            call
            for (graph, options, is_linear), count in found.items()
            for call in _calls(graph, options, is_linear, count, has_gpu=has_gpu)
        ),
    )


def _device(named: set[str | None]) -> tuple[str, bool]:
    """Return what to call the GPU that the calls are for, and whether there is one."""
    if None not in named and named:
        return ", ".join(offline.find(str(name)).name for name in named), True
    try:
        local = local_target()
    except LibraryError as error:
        return f"a GPU that cannot be used: {error}", True
    if local is None:
        return "XLA only (no CUDA device)", False
    return local[1].name, True


def _calls(
    graph: Graph, options: Options, is_linear: bool, count: int, *, has_gpu: bool
) -> list[Call]:
    decision = _decision(graph, options, is_linear, has_gpu=has_gpu)
    if not decision.steps:
        op = f"{label(graph)}:derivative" if is_linear else label(graph)
        return [_call(op, Step(part=graph, reasons=decision.reasons), count)]
    return [_call(label(step.part) or "copy", step, count) for step in decision.steps]


def _call(op: str, step: Step, count: int) -> Call:
    legal, plan = step.legal, step.plan
    return Call(
        op=op,
        shapes=", ".join(
            f"{t.dtype}[{','.join(map(str, t.stored_shape))}]"
            for t in step.part.input_tensors
        ),
        count=count,
        implementation="xla" if legal is None else "cudnn",
        plan=None if plan is None else plan.name,
        workspace_bytes=None if plan is None else plan.workspace_bytes,
        reasons=step.reasons if legal is None else legal.notes,
    )


def _decision(
    graph: Graph, options: Options, is_linear: bool, *, has_gpu: bool
) -> Decision:
    if is_linear:
        return Decision(reasons=("forward mode and second order run the reference",))
    if not has_gpu:
        return Decision(reasons=("this machine has no CUDA device",))
    try:
        return decide(graph, options)
    except LibraryError as error:
        return Decision(reasons=(str(error),))
