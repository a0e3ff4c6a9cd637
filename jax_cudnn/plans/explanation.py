# SPDX-License-Identifier: Apache-2.0
"""Implements `plans.explain`: whether cuDNN runs each call, why not, what would help.

The answers are the planner's own: each change that is named has been planned.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jax.stages import Traced

from jax_cudnn import native, offline
from jax_cudnn.columns import Block, Details, Heading, Page, Text
from jax_cudnn.config import Options
from jax_cudnn.errors import LibraryError, install_command
from jax_cudnn.graph import Graph, is_anchor, operand_text
from jax_cudnn.lowering import TracedGraph, traced_graphs
from jax_cudnn.lowering.decision import Attempt, decide_part, operation
from jax_cudnn.lowering.devices import Gpu, gpu_for
from jax_cudnn.offline import GpuDescription
from jax_cudnn.plans.calls import CallSummary
from jax_cudnn.plans.changes import Change, by_name, changes_of
from jax_cudnn.plans.inspection import followed_graphs

# The version of what `Explanation.to_json` returns. A change of meaning raises it.
SCHEMA = 1

_AROUND = "elementwise work and sums around the contractions, which XLA fuses"
_FASTER = "measured to be faster than cuDNN and XLA"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedCall(CallSummary):
    """One part of a distinct graph of a function: a kernel of cuDNN, or code of XLA.

    It has the attributes of ``CallSummary`` and these.

    Attributes:
      implementation: as in ``CallSummary``, or "none" if the call has
        `implementation="cudnn"` and cuDNN cannot run it: the call raises
        UnsupportedError.
      notes: what is done around the kernel, or why XLA runs the part on purpose.
      attempts: the rewrites that failed, in order, before the one that is used if there
        is one.
      change: the smallest change that would let cuDNN run it; "" if none was found or
        cuDNN already runs it.
      change_plan: the plan that it would then have.
    """

    notes: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    change: str = ""
    change_plan: str | None = None

    @property
    def is_refused(self) -> bool:
        """Whether it is meant for cuDNN, and cuDNN cannot run it.

        A call is not meant for cuDNN where "auto" leaves it to XLA, which is faster, or
        has the precision that the call asks for. The attempts say so.
        """
        if self.implementation == "none":
            return True
        is_left = not all(attempt.is_refusal for attempt in self.attempts)
        return self.implementation == "xla" and bool(self.attempts) and not is_left


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Explanation(Page):
    """The result of ``explain``; ``str(explanation)`` is a text to read.

    ``cudnn_version`` is the version of cuDNN that planned, such as "9.19.0". ``notes``
    lists what the answers depend on.
    """

    device: str
    cudnn_version: str
    calls: tuple[ExplainedCall, ...]
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> tuple[ExplainedCall, ...]:
        """The calls that are meant for cuDNN and that cuDNN cannot run."""
        return tuple(call for call in self.calls if call.is_refused)

    def _blocks(self) -> Iterator[Block]:
        yield Heading(f"cuDNN {self.cudnn_version} on {self.device}")
        if not self.calls:
            yield Text("no cuDNN calls")
        for call in self.calls:
            yield from _call_blocks(call)
        yield Details(title="notes", notes=self.notes)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``json.dumps``; "schema" is the version of its form."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "cudnn_version": self.cudnn_version,
            # With lists where there are tuples, as in what is read back.
            "calls": [json.loads(json.dumps(asdict(call))) for call in self.calls],
            "notes": list(self.notes),
        }


def explain(
    function: Callable[..., Any] | Traced,
    *args: Any,
    device: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Return, for each cuDNN call of a function, whether cuDNN runs it, or why not.

    Traces the function (which may be jitted, or a gradient) without running it. If
    cuDNN refuses a call, each rewrite of the call is reported with its own reasons.
    Small changes are then tried until cuDNN has a plan for one: fewer options, operands
    in 16 bits, no gradient of the bias, sizes in multiples of 8 or 16, a newer GPU. The
    first change that works is named. Each change is planned by cuDNN itself, which
    takes up to a second.

    Args:
      function: a function, jitted or not, or ``jitted.trace(...)`` and no arguments.
      *args: as for ``plans.inspect``: arrays or shapes, and anything else that the
        function takes.
      device: the name of a GPU, which need not be present: "H200", "A100 40GB", "L4",
        "RTX 4090", ... The installed cuDNN plans for it. On a machine without a GPU,
        ``pip install ".[gpuless]"`` in jax_cudnn's source folder installs all that is
        needed. Default None: the GPU of the surrounding ``plans.using``, or else this
        machine's.
      **kwargs: as ``*args``.

    Returns:
      An ``Explanation``, with an ``ExplainedCall`` for each part of each distinct
      graph, in order of appearance.

    Raises:
      ValueError: the name is not known, or no GPU is named and this machine has none.
        The message lists the known names.
      LibraryError: cuDNN, or something that it needs to plan, is missing. The message
        says what to install.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> from jax_cudnn import plans
      >>> x = jax.ShapeDtypeStruct((4, 128, 8, 64), jnp.float32)
      >>> loss = lambda x: jax_cudnn.sdpa(x, x, x).sum()
      >>> told = plans.explain(jax.grad(loss), x, device="H200")  # doctest: +SKIP
      >>> told.calls[1].change  # doctest: +SKIP
      'cast the operands from f32 to bf16'
    """
    device = None if device is None else offline.find(device).name
    found = [each.on(device) for each in traced_graphs(function, *args, **kwargs)]
    named = dict.fromkeys(traced.options.device for traced in found)
    gpus = {name: _gpu(name) for name in named or (device,)}
    calls = [
        call
        for traced, count in followed_graphs(found)
        for call in _calls(traced, count, gpus[traced.options.device])
    ]
    version = next(iter(gpus.values())).target.cudnn_version
    return Explanation(
        device=", ".join(gpu.target.name for gpu in gpus.values()),
        cudnn_version=native.version_text(version),
        calls=tuple(calls),
        notes=_notes(gpus.values(), calls),
    )


def _gpu(name: str | None) -> Gpu:
    gpu = gpu_for(Options(device=name))
    if gpu is None:
        raise ValueError(
            "plans.explain: JAX sees no NVIDIA GPU here. Name one to ask for with "
            'device="H200" (on the command line, --device H200). Known are '
            f"{', '.join(each.short_name for each in offline.known())}."
        )
    return gpu


def _notes(gpus: Iterable[Gpu], calls: Iterable[ExplainedCall]) -> tuple[str, ...]:
    notes: list[str] = []
    is_elsewhere = any(not gpu.is_here for gpu in gpus)
    if is_elsewhere and not offline.has_all_engines():
        notes.append(
            "Asked of the small cuDNN, which has only the engines that are compiled "
            "when planned. The full one may run more: "
            f"{install_command('cuda13', 'cuda12')}."
        )
    if is_elsewhere:
        notes.append(
            "Planned without the GPU: engines that ask its driver or cuBLASLt are not "
            "listed, so that another plan may come first where the GPU is."
        )
    is_asked = any(gpu.is_here for gpu in gpus) and any(c.is_refused for c in calls)
    if is_asked and (reason := offline.obstacle()) is not None:
        notes.append(f"Newer GPUs were not tried: {reason}")
    return tuple(notes)


# --- who runs a call ------------------------------------------------------------------


def _calls(traced: TracedGraph, count: int, gpu: Gpu) -> Iterator[ExplainedCall]:
    options = traced.options
    if (decision := traced.decided_without_cudnn()) is not None:
        remarks = () if traced.is_linear else _remarks(options)
        notes = (*decision.reasons, *remarks)
        yield ExplainedCall(
            op=traced.op,
            shapes=operand_text(traced.graph),
            count=count,
            implementation="xla",
            notes=notes,
        )
    else:
        for part in traced.parts:
            yield _explained(part, options, count, gpu)


def _remarks(options: Options) -> tuple[str, ...]:
    return (options.remark,) if options.remark else ()


def _explained(part: Graph, options: Options, count: int, gpu: Gpu) -> ExplainedCall:
    step = decide_part(part, gpu, options)
    remarks = _remarks(options)
    if step.contender:
        return _call(
            part, count, implementation=step.contender, notes=(_FASTER, *remarks)
        )
    if step.rewrite is not None and step.plan is not None:
        return _call(
            part,
            count,
            implementation="cudnn",
            plan=step.plan.name,
            workspace_bytes=step.plan.workspace_bytes,
            notes=(*step.rewrite.notes, *remarks),
            attempts=step.attempts,
        )
    if not any(map(is_anchor, part.nodes)):
        return _call(part, count, implementation="xla", notes=(_AROUND,))
    is_auto = options.implementation == "auto"
    changes = (by_name if step.why == "tuned" else changes_of)(part, options)
    change, plan = _nearest(part, options, gpu, changes)
    return _call(
        part,
        count,
        implementation="xla" if is_auto else "none",
        notes=remarks,
        attempts=step.attempts,
        change=change,
        change_plan=plan,
    )


def _call(part: Graph, count: int, **said: Any) -> ExplainedCall:
    shapes = operand_text(part)
    return ExplainedCall(op=operation(part), shapes=shapes, count=count, **said)


# --- what would let cuDNN run it ------------------------------------------------------


def _nearest(
    part: Graph, options: Options, gpu: Gpu, changes: Iterable[Change]
) -> tuple[str, str | None]:
    """Return the words of the first change that plans, and its plan's name."""
    elsewhere = [Change(words="", part=part, options=options)]
    for change in changes:
        plan = decide_part(change.part, gpu, change.options).plan
        if plan is not None:
            limit = str(plan.workspace_bytes)
            return change.words.replace("{workspace}", limit), plan.name
        if change.is_for_newer:
            elsewhere.append(change)
    for change in elsewhere:
        found = _newer(change, gpu)
        if found is not None:
            words, plan_name = found
            both = f"{change.words} and {words}" if change.words else words
            return both, plan_name
    return "", None


def _newer(change: Change, gpu: Gpu) -> tuple[str, str] | None:
    """Return which newer GPUs run it, one asked of each architecture, and a plan."""
    if gpu.is_here and offline.obstacle() is not None:
        return None  # which a note says
    by_version: dict[int, list[GpuDescription]] = {}
    for each in offline.known():
        if each.sm_version > gpu.target.sm_version:
            by_version.setdefault(each.sm_version, []).append(each)
    plans: dict[int, str] = {}
    for version, gpus_of_version in by_version.items():
        newer = offline.named_gpu(gpus_of_version[-1].name)
        try:
            plan = decide_part(change.part, newer, change.options).plan
        except LibraryError:
            return None  # this machine's driver does not let newer GPUs be planned for
        if plan is not None:
            plans[version] = plan.name
    if not plans:
        return None
    texts = [f"sm_{version} ({_families(by_version[version])})" for version in plans]
    is_all_later = list(plans) == list(by_version)[-len(plans) :]
    if is_all_later and len(plans) > 1:
        texts = [f"{texts[0]} and newer"]
    return f"run it on {', '.join(texts)}", next(iter(plans.values()))


def _families(gpus: list[GpuDescription]) -> str:
    """Return the GPUs' names without variants: H100, H200."""
    names = (
        name if name.startswith("RTX") else name.split()[0]
        for name in (gpu.short_name for gpu in gpus)
    )
    return ", ".join(dict.fromkeys(names))


# --- the page -------------------------------------------------------------------------


def _call_blocks(call: ExplainedCall) -> Iterator[Block]:
    times = f"{call.count} x " if call.count > 1 else ""
    yield Text("")
    yield Heading(f"{times}{call.op}({call.shapes})")
    yield Text(f"  {_who(call)}")
    yield Details(title="notes", notes=call.notes, mark="  - ")
    for attempt in call.attempts:
        title = f"{_verdict(call, attempt)} ({attempt.way})"
        yield Details(
            title=title,
            notes=attempt.reasons,
            heading=f"  {title}:",
            mark="    - ",
            is_open=call.implementation != "cudnn",
        )
    if call.change:
        what = "what would work" if call.is_refused else "what would run it in cuDNN"
        yield Text(f"  {what}: {call.change} (then {call.change_plan})")
    elif call.is_refused:
        yield Text("  what would work: none of the changes that were tried")


def _verdict(call: ExplainedCall, attempt: Attempt) -> str:
    """Return what became of an attempt, in words."""
    if attempt.is_refusal or call.implementation == "none":
        return "refused"
    return "left to XLA" if call.implementation == "xla" else "not taken"


def _who(call: ExplainedCall) -> str:
    """Return who runs a call, in words."""
    if call.implementation == "cudnn":
        return f"runs in cuDNN: {call.plan}, workspace {call.workspace_bytes:,} B"
    if call.implementation == "none":
        return "does not run: cuDNN was asked for and cannot (UnsupportedError)"
    if call.is_refused:
        return "runs in XLA, not in cuDNN"
    return f"runs in {'XLA' if call.implementation == 'xla' else call.implementation}"
