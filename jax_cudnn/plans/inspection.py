# SPDX-License-Identifier: Apache-2.0
"""`plans.inspect`: the cuDNN calls in a function, who runs each, with which plan."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jax.stages import Lowered, Traced

from jax_cudnn import choices
from jax_cudnn.choices import Choice
from jax_cudnn.config import Options
from jax_cudnn.errors import GraphError, LibraryError, UnsupportedError
from jax_cudnn.graph import Graph, from_json, is_anchor, kind_named, operand_text
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import TracedGraph, check_bare, stage_of, traced_graphs
from jax_cudnn.lowering.decision import Attempt, Decision, PartDecision
from jax_cudnn.lowering.devices import Gpu, gpu_for
from jax_cudnn.lowering.scope import scope
from jax_cudnn.native import PlanInfo
from jax_cudnn.plans.calls import Call, Direction, Report, Why
from jax_cudnn.plans.lowered import Launch, launches
from jax_cudnn.progress import followed

_NO_GPU = "this machine has no CUDA device"
_LOWERED_NOTE = (
    "Read from a lowered program, which names cuDNN's calls only: what XLA runs "
    "(forward mode, parts without a plan, a program not lowered for CUDA) is not here."
)


def inspect(
    function: Callable[..., Any] | Traced | Lowered, *args: Any, **kwargs: Any
) -> Report:
    """Return every cuDNN call that ``function(*args, **kwargs)`` makes, and its plan.

    Traces the function (which may be jitted, or a gradient) without running it, and
    decides each graph as the compiler would. On a machine with an NVIDIA GPU, the plans
    are built and stay cached for the run that follows. Inside
    ``plans.using(device="H200")``, the report is for that GPU, which need not be
    present.

    Args:
      function: a function, jitted (by ``jax.jit`` or ``nnx.jit``) or not. It can also
        be a traced or lowered program, ``jitted.trace(...)`` or ``jitted.lower(...)``,
        without arguments. A lowered program contains the calls that were decided when
        it was lowered.
      *args: arrays or ``jax.ShapeDtypeStruct``, and trees of them, such as a module.
        Anything else (``True``, ``"gelu"``, a number) is passed on unchanged. A jitted
        function has to list such arguments in ``static_argnames``, as for a call.
      **kwargs: as ``*args``.

    Returns:
      A ``Report`` with each distinct graph's ``Call``, in order of appearance.
      Forward-mode and second-order parts, which always run as XLA's own code, are
      listed as op "...:derivative". The report of a lowered program has cuDNN's calls
      only, and says so in its ``notes``.

    Raises:
      TypeError: arguments are given with a traced or lowered program, or the program is
        compiled.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> x = jax.ShapeDtypeStruct((4, 128, 8, 64), jnp.bfloat16)
      >>> loss = lambda x: jax_cudnn.sdpa(x, x, x).astype(jnp.float32).sum()
      >>> [call.op for call in jax_cudnn.plans.inspect(jax.grad(loss), x).calls]
      ['sdpa', 'sdpa_backward']
    """
    program = stage_of(function)
    if isinstance(program, Lowered):
        check_bare(program, args, kwargs)
        machine = _machine(scope().device)
        counted = Counter(launches(program))
        return Report(
            device=machine.name,
            calls=tuple(_launched(*item, machine) for item in counted.items()),
            notes=(_LOWERED_NOTE,),
        )
    found = traced_graphs(function, *args, **kwargs)
    named = dict.fromkeys(traced.options.device for traced in found)
    machines = {name: _machine(name) for name in named or (scope().device,)}
    return Report(
        device=", ".join(machine.name for machine in machines.values()),
        calls=tuple(
            call
            for traced, count in followed_graphs(found)
            for call in _calls(traced, count, machines[traced.options.device])
        ),
    )


def followed_graphs(found: Iterable[TracedGraph]) -> Iterable[tuple[TracedGraph, int]]:
    """Yield each graph once, with how often it is there, and show the one at hand."""
    counted = Counter(found)
    return followed(
        counted.items(),
        "Planning",
        count=len(counted),
        name=lambda item: f"{item[0].op}({operand_text(item[0].graph)})",
    )


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """The GPU that calls are for, by default this machine's, if it can be used.

    ``has_gpu`` without a ``gpu`` is one that cannot. ``device`` is the name that was
    asked for.
    """

    name: str
    has_gpu: bool = False
    gpu: Gpu | None = None
    device: str | None = None


def _machine(device: str | None) -> _Machine:
    try:
        gpu = gpu_for(Options(device=device))
    except LibraryError as error:
        name = f"a GPU that cannot be used: {error}"
        if device is not None:
            name = f"{device}, which cannot be planned for: {error}"
        return _Machine(name=name, has_gpu=True, device=device)
    if gpu is None:
        return _Machine(name="XLA only (no CUDA device)")
    return _Machine(name=gpu.target.name, has_gpu=True, gpu=gpu, device=device)


# --- traced programs ------------------------------------------------------------------


def _calls(traced: TracedGraph, count: int, machine: _Machine) -> list[Call]:
    graph, decision = traced.graph, _decision(traced, machine)
    if traced.is_linear:
        return [
            Call(
                op=traced.op,
                shapes=operand_text(graph),
                count=count,
                implementation="xla",
                reasons=decision.reasons,
                part=graph,
            )
        ]
    attempt = Attempt(way="as a whole", reasons=decision.reasons)
    whole = PartDecision(
        part=graph, attempts=(attempt,), why=decision.why, by=decision.by
    )
    steps = decision.steps or (whole,)
    direction = direction_of(graph)
    return [_call(step, traced.options, count, direction, machine) for step in steps]


def _decision(traced: TracedGraph, machine: _Machine) -> Decision:
    if not machine.has_gpu and not traced.is_linear:
        return Decision(reasons=(_NO_GPU,))
    try:
        return traced.decide()
    except LibraryError as error:
        return Decision(reasons=(str(error),))


def _call(
    step: PartDecision,
    options: Options,
    count: int,
    direction: Direction | None,
    machine: _Machine,
) -> Call:
    rewrite = step.rewrite
    measured = _measured(step.part, options, machine) if step.why == "tuned" else []
    only = measured[0] if len(measured) == 1 else None
    reasons = step.reasons if rewrite is None else rewrite.notes
    if options.remark and any(map(is_anchor, step.part.nodes)):
        reasons = (*reasons, options.remark)
    return Call(
        op=step.op,
        shapes=operand_text(step.part),
        count=count,
        implementation=step.runs_on,
        reasons=reasons,
        direction=direction,
        why=step.why,
        by=step.by,
        allowed=options.plan.to_request(),
        part=step.part,
        graph=None if rewrite is None else rewrite.graph,
        request=step.request,
        device=machine.device,
        **_plan_fields(step.plan),
        cudnn_us=only and only.cudnn_us,
        xla_us=only and only.xla_us,
        first_ratio=only and only.first_ratio,
        contenders_us=only.contenders_us if only else (),
    )


def _measured(part: Graph, options: Options, machine: _Machine) -> list[Choice]:
    """Return the measured choices of what is a kernel of its own in the part."""
    if machine.gpu is None:
        return []
    target = machine.gpu.target
    allowed = options.plan.to_request()
    own = choices.table().get(part, target, allowed)
    if own is not None:
        return [own]
    found = [
        choices.table().get(inner, target, allowed)
        for inner in partition(part)
        if any(map(is_anchor, inner.nodes))
    ]
    return [choice for choice in found if choice is not None] if all(found) else []


def why_of(request: str) -> Why:
    """Return why a lowered program has a plan, from the text that says which."""
    fields: dict[str, Any] = json.loads(request) if request else {}
    # A preference leaves all plans allowed. A measured choice names one engine, and so
    # does a plan for a GPU by its name; what a call asks for restricts the list.
    if not fields or "preferred" in fields:
        return "heuristic"
    return "pinned" if "engine" in fields else "requested"


# --- lowered programs -----------------------------------------------------------------


def _launched(launch: Launch, count: int, machine: _Machine) -> Call:
    graph = from_json(launch.graph)
    info, reasons = None, ()
    if machine.gpu is None:
        reasons = (machine.name if machine.has_gpu else f"not planned: {_NO_GPU}",)
    else:
        try:
            info = machine.gpu.plan(launch.graph, launch.request)
        except (GraphError, LibraryError, UnsupportedError) as error:
            reasons = (str(error),)
    return Call(
        op=launch.op,
        shapes=operand_text(graph),
        count=count,
        implementation="cudnn",
        reasons=reasons,
        direction=direction_of(graph),
        why=why_of(launch.request),
        allowed=launch.request if why_of(launch.request) == "requested" else "",
        graph=graph,
        request=launch.request,
        device=machine.device,
        **_plan_fields(info),
    )


# --- what graphs and plans say --------------------------------------------------------


def direction_of(graph: Graph) -> Direction | None:
    """Return whether a graph is a gradient's, by the names that gradients are given.

    None for a part with neither a result of the forward graph nor anything of a
    gradient's: in a graph of several contractions there are such.
    """
    modes = (str(getattr(node.attributes, "mode", "")) for node in graph.nodes)
    if (
        any(name.startswith("grad_") for name in (*graph.outputs, *graph.inputs))
        or any(kind_named(node.kind).gradient_of for node in graph.nodes)
        or any(mode.endswith("_grad") for mode in modes)
    ):
        return "backward"
    is_result = any(
        name in ("output", "stats") or name.startswith("saved_")
        for name in graph.outputs
    )
    return "forward" if is_result else None


def _plan_fields(info: PlanInfo | None) -> dict[str, Any]:
    if info is None:
        return {}
    return {
        "plan": info.name,
        "workspace_bytes": info.workspace_bytes,
        "engine": info.engine,
        "knobs": info.knobs,
        "behavior_notes": info.behavior_notes,
        "numeric_notes": info.numeric_notes,
        "failures": info.failures,
    }
