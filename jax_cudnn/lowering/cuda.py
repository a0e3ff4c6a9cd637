# SPDX-License-Identifier: Apache-2.0
"""The CUDA lowering of a graph: decide who runs it, and launch it through XLA's FFI.

Deciding is a pure function of graph, options and GPU (``decide``), so that
``plans.inspect`` gives the same answer as the compiler got.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn import choices, native, offline
from jax_cudnn.choices import Choice
from jax_cudnn.config import Options
from jax_cudnn.errors import GraphError, LibraryError, UnsupportedError
from jax_cudnn.graph import Graph, Target, to_json
from jax_cudnn.legalize import (
    Legal,
    Legalization,
    is_contraction,
    legalize,
    partition,
)
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.primitives import graph_p, run_reference
from jax_cudnn.lowering.scope import scope
from jax_cudnn.native import PlanInfo
from jax_cudnn.reference.dtypes import jax_dtype

_log = logging.getLogger("jax_cudnn")

# Why XLA runs a whole graph, before cuDNN is asked about its parts.
ASKED_FOR_XLA = 'implementation="xla" was asked for'
NO_ELEMENTS = "a tensor has no elements: nothing to launch"
IS_DERIVATIVE = "forward mode and second order run the reference"


# What decided: a measured choice, cuDNN's order of the candidates, or that order with
# the options of the call.
Why = Literal["tuned", "heuristic", "requested"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A way of rewriting a part for cuDNN that was not taken, with all that failed."""

    way: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A part of a graph, with who runs it and why.

    ``legal`` is None where XLA runs it, for the ``reasons`` of the ``attempts`` that
    failed. ``plan`` and the ``target`` that it is for are None where no GPU was there
    to plan for: the plan is then made on the machine that runs. ``choice`` is what the
    compiled program asks for: a pinned plan (a measured one, or any for a GPU
    elsewhere), or which are allowed. ``why`` is None where nothing was chosen.
    """

    part: Graph
    legal: Legal | None = None
    plan: PlanInfo | None = None
    target: Target | None = None
    choice: str = ""
    why: Why | None = None
    attempts: tuple[Attempt, ...] = ()
    advice: str = ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no attempt was taken, each reason once."""
        found = (reason for attempt in self.attempts for reason in attempt.reasons)
        return tuple(dict.fromkeys(found))

    @property
    def is_missing(self) -> bool:
        """Whether cuDNN was to run it and cannot."""
        return self.legal is None and any(map(is_contraction, self.part.nodes))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who runs a graph: its parts in order. Without any, XLA runs it as a whole."""

    steps: tuple[Step, ...] = ()
    reasons: tuple[str, ...] = ()
    why: Why | None = None

    @property
    def missing(self) -> tuple[Step, ...]:
        """The parts that cuDNN was to run and cannot."""
        return tuple(step for step in self.steps if step.is_missing)


class Gpu(Protocol):
    """A GPU that plans are made for, here or elsewhere; hashable."""

    @property
    def target(self) -> Target:
        """What the GPU is."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether it is this machine's own."""
        ...

    def plan(self, graph_json: str, choice: str = "") -> PlanInfo:
        """Return the plan of a graph, or raise UnsupportedError."""
        ...

    def candidates(
        self, graph_json: str, choice: str = ""
    ) -> tuple[native.Candidate, ...]:
        """Return cuDNN's candidates for a graph, or raise UnsupportedError."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalGpu:
    """The GPU of this machine that the process plans for."""

    ordinal: int
    target: Target

    @property
    def is_here(self) -> bool:
        """Whether it is this machine's own: yes."""
        return True

    def plan(self, graph_json: str, choice: str = "") -> PlanInfo:
        """Return the plan of a graph; built once, then cached."""
        return native.plan(graph_json, choice=choice, device=self.ordinal)

    def candidates(
        self, graph_json: str, choice: str = ""
    ) -> tuple[native.Candidate, ...]:
        """Return cuDNN's candidates for a graph, none of them built."""
        return native.candidates(graph_json, choice=choice, device=self.ordinal)


def local_target() -> tuple[int, Target] | None:
    """Return the first local CUDA device's ordinal and description, if JAX has one."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    ordinal = device.local_hardware_id
    return ordinal, native.device_target(ordinal)


def gpu_for(options: Options) -> Gpu | None:
    """Return the GPU that a call is planned for; None where there is none.

    Raises:
      ValueError: the options name a GPU that is not known.
      LibraryError: they name one, and cuDNN is not installed here.
    """
    if options.device is not None:
        return offline.named_gpu(options.device)
    local = local_target()
    return None if local is None else LocalGpu(ordinal=local[0], target=local[1])


def local_ordinals() -> list[int]:
    """Return the ordinals of all CUDA devices of this process, which has some."""
    return [device.local_hardware_id for device in jax.local_devices(backend="cuda")]


def decide(graph: Graph, options: Options) -> Decision:
    """Return who runs the graph on the GPU it is for, planning it with cuDNN."""
    if options.implementation == "xla":
        return Decision(reasons=(ASKED_FOR_XLA,), why="requested")
    if graph.has_empty_tensor:
        return Decision(reasons=(NO_ELEMENTS,))
    try:
        if (tuner := scope().tuner) is not None:
            tuner(graph, options)
        return _decide(graph, gpu_for(options), options, choices.table().version)
    except LibraryError as error:
        # Who names a GPU wants a program for it.
        if options.implementation == "cudnn" or options.device is not None:
            raise
        return Decision(reasons=(str(error),))


def forget_decisions() -> None:
    """Decide anew what was decided before, for when the plans behind it are gone."""
    _decide.cache_clear()


@functools.lru_cache(maxsize=4096)
def _decide(
    graph: Graph, gpu: Gpu | None, options: Options, choices_version: int
) -> Decision:
    del choices_version  # Choices that were added since may decide otherwise.
    steps = tuple(decide_part(part, gpu, options) for part in partition(graph))
    reasons = dict.fromkeys(reason for step in steps for reason in step.reasons)
    why = None
    if all(step.legal is None for step in steps) and options.implementation == "auto":
        missing = [step for step in steps if step.is_missing]
        was_measured = bool(missing) and all(step.why == "tuned" for step in missing)
        why, steps = "tuned" if was_measured else None, ()
    return Decision(steps=steps, reasons=tuple(reasons), why=why)


def decide_part(part: Graph, gpu: Gpu | None, options: Options) -> Step:
    """Return who runs a part of a graph on a GPU; None is one that is not known."""
    target = None if gpu is None else gpu.target
    choice = options.plan.to_choice()
    measured = None if target is None else choices.table().get(part, target, choice)
    if measured is not None and not measured.plan and measured.cudnn_us is None:
        measured = None  # cuDNN had no plan: that is to be said with its reasons
    has_contraction = any(map(is_contraction, part.nodes))
    if not has_contraction and (measured is None or measured.implementation == "xla"):
        return Step(part=part)
    if (reason := precision_refusal(part, options)) is not None:
        refused = Attempt(way="by the precision asked for", reasons=(reason,))
        return Step(part=part, attempts=(refused,))
    legalization = legalize(part, target)
    is_auto = options.implementation == "auto"
    if measured is not None and measured.implementation == "xla" and is_auto:
        slower = Attempt(way="by measurement", reasons=(_measured_reason(measured),))
        return Step(part=part, attempts=(slower,), why="tuned")
    if measured is not None and measured.plan and gpu is not None:
        step = _pinned(part, legalization, measured, gpu, options)
        if step is not None or not has_contraction:
            return step or Step(part=part)
    attempts: list[Attempt] = []
    if legalization.reasons:
        way = "before cuDNN is asked"
        attempts.append(Attempt(way=way, reasons=legalization.reasons))
    for legal in legalization.candidates:
        way = "; ".join(legal.notes) or "as one kernel"
        if is_auto and legal.slower:
            attempts.append(Attempt(way=way, reasons=(legal.slower,)))
            continue
        plan = None
        if gpu is not None:
            try:
                plan = gpu.plan(to_json(legal.graph), choice)
            except UnsupportedError as error:
                reasons = error.reasons or (error.summary,)
                attempts.append(Attempt(way=way, reasons=reasons))
                continue
        return Step(
            part=part,
            legal=legal,
            plan=plan,
            target=target,
            choice=_pin(plan, gpu) or choice,
            why="requested" if choice else "heuristic",
            attempts=tuple(attempts),
        )
    return Step(part=part, attempts=tuple(attempts), advice=legalization.advice)


def _pin(plan: PlanInfo | None, gpu: Gpu | None) -> str:
    """Return what names the plan in a program for a GPU elsewhere, else nothing.

    There the plan is made again, and is to need the workspace that the program has.
    """
    return "" if plan is None or gpu is None or gpu.is_here else plan.choice


def _pinned(
    part: Graph,
    legalization: Legalization,
    measured: Choice,
    gpu: Gpu,
    options: Options,
) -> Step | None:
    """Return the step with the measured plan, unless it is stale or not allowed."""
    legal = _rewritten(legalization, measured.rewritten)
    if legal is None:
        _say_stale_once(_summary(part), "this release rewrites the graph otherwise")
        return None
    try:
        json = to_json(legal.graph)
        if not _allows(options, gpu, json, measured.plan):
            return None
        plan = gpu.plan(json, measured.plan)
    except (GraphError, UnsupportedError) as error:
        _say_stale_once(_summary(part), str(error))
        return None
    limit = options.plan.workspace_limit_bytes
    if limit is not None and plan.workspace_bytes > limit:
        return None
    return Step(
        part=part,
        legal=legal,
        plan=plan,
        target=gpu.target,
        choice=measured.plan,
        why="tuned",
    )


def _rewritten(legalization: Legalization, digest: str) -> Legal | None:
    """Return the candidate with that digest; without one, the first, if any."""
    for legal in legalization.candidates:
        if digest in ("", choices.digest_of(legal.graph)):
            return legal
    return None


def _allows(options: Options, gpu: Gpu, graph_json: str, pin: str) -> bool:
    """Whether a pinned plan is among the candidates that a call's options allow."""
    choice = options.plan.to_choice()
    if not choice:
        return True
    listed = gpu.candidates(graph_json, choice)
    return any(each.choice == pin and not each.refusal for each in listed)


def _measured_reason(measured: Choice) -> str:
    times = f"{measured.xla_us:.1f} µs" if measured.xla_us is not None else "?"
    rival = (
        f"{measured.cudnn_us:.1f} µs" if measured.cudnn_us is not None else "no plan"
    )
    return f"XLA was measured to be faster: {times}, cuDNN {rival}"


# jax.default_matmul_precision values that TF32 products satisfy.
_TF32_IS_ENOUGH = (None, "default", "fastest", "bfloat16", "tensorfloat32")


def precision_refusal(part: Graph, options: Options) -> str | None:
    """Return why the products asked for are finer than cuDNN's, or None."""
    precision = options.matmul_precision
    is_fusion = not any(node.kind.startswith("sdpa") for node in part.nodes)
    has_f32 = any(
        part.tensor(name).dtype == "f32"
        for node in part.nodes
        if is_contraction(node)
        for _, name in node.inputs
    )
    if is_fusion and has_f32 and precision not in _TF32_IS_ENOUGH:
        return f"cuDNN multiplies f32 in TF32, less than the precision {precision!r}"
    return None


def _lower_cuda(ctx: Any, *operands: Any, graph: Graph, options: Options) -> Any:
    decision = decide(graph, options)
    missing = decision.missing
    if missing and options.implementation == "cudnn":
        raise _unsupported(missing[0])
    falls_back = missing or not decision.steps
    is_told = decision.reasons and not graph.has_empty_tensor
    if options.implementation == "auto" and falls_back and is_told:
        _say_once(_summary(graph), decision.reasons)
    function = functools.partial(_run, graph, decision.steps, options)
    return _jax.lower_function(function)(ctx, *operands)


def _run(
    graph: Graph, steps: tuple[Step, ...], options: Options, *operands: jax.Array
) -> Sequence[jax.Array]:
    if not steps:
        return run_xla(graph, operands, options)
    values = dict(zip(graph.inputs, operands, strict=True))
    for step in steps:
        arguments = [values[name] for name in step.part.inputs]
        if step.legal is None:
            results = run_xla(step.part, arguments, options)
        else:
            results = run_cudnn(step, arguments)
        values |= dict(zip(step.part.outputs, results, strict=True))
    return [values[name] for name in graph.outputs]


def run_xla(
    graph: Graph, operands: Sequence[jax.Array], options: Options
) -> Sequence[jax.Array]:
    """Return the graph's results by XLA, written as XLA is fastest at it."""
    return run_reference(
        graph, operands, options, narrow_sums=True, kept=_read_by_sums(graph)
    )


# Cheap enough to be computed twice rather than written and read back.
_CHEAP = ("add", "identity", "mul", "neg", "relu_grad", "relu6_grad", "select", "sub")


@functools.lru_cache(maxsize=4096)
def _read_by_sums(graph: Graph) -> frozenset[str]:
    """Return the made tensors that sums read beside others, if they are not cheap.

    They are in memory anyway; XLA would rather compute them twice than read them
    (docs/benchmarks/where_to_fuse.md).
    """
    modes = {getattr(node.attributes, "mode", "add") for node in graph.nodes}
    if modes.issubset(_CHEAP):
        return frozenset()
    made = {name for node in graph.nodes for _, name in node.outputs}
    readers = Counter(name for node in graph.nodes for _, name in node.inputs)
    return frozenset(
        name
        for node in graph.nodes
        if node.kind == "reduction"
        for _, name in node.inputs
        if name in made and (readers[name] > 1 or name in graph.outputs)
    )


def run_cudnn(step: Step, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Return the part's results by cuDNN, with the array work before and after it."""
    assert step.legal is not None, "XLA runs the others"
    launched = _launch(step, step.legal.graph, step.legal.before(operands))
    return step.legal.after(operands, launched)


def _launch(
    step: Step, graph: Graph, operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Bind the FFI target; with a plan, its workspace is a last, dropped result."""
    results = [
        jax.ShapeDtypeStruct(t.stored_shape, jax_dtype(t.dtype))
        for t in graph.output_tensors
    ]
    name = native.TARGET_SCRATCH
    if step.plan is not None:
        name = native.TARGET_CAPTURED
        results.append(jax.ShapeDtypeStruct((step.plan.workspace_bytes,), jnp.uint8))
    call: Callable[..., Sequence[jax.Array]] = jax.ffi.ffi_call(name, results)
    # What profilers and errors call it.
    op = label(step.part) or "copy"
    target = step.target
    with jax.named_scope(f"cudnn_{op}"):
        returned = call(
            *operands,
            graph=to_json(graph),
            choice=step.choice,
            op=op,
            # The handler runs it nowhere else: ffi/program_target.h.
            sm_version=np.int64(target.sm_version if target else 0),
            cudnn_version=np.int64(target.cudnn_version if target else 0),
        )
    return returned[: len(graph.outputs)]


def _summary(graph: Graph) -> str:
    operands = ", ".join(
        f"{t.name} {t.dtype}{list(t.stored_shape)}" for t in graph.input_tensors
    )
    return f"{label(graph)}({operands})"


def label(graph: Graph) -> str:
    """Return the graph's operations in a word: kinds, and modes of pointwise nodes."""
    names = (getattr(n.attributes, "mode", n.kind) for n in graph.nodes)
    return "+".join(name for name in names if name not in ("constant", "identity"))


def operand_text(graph: Graph) -> str:
    """Return the dtypes and shapes of a graph's operands, as stored."""
    return ", ".join(
        f"{t.dtype}[{','.join(map(str, t.stored_shape))}]" for t in graph.input_tensors
    )


def _unsupported(step: Step) -> UnsupportedError:
    return UnsupportedError(
        f"cuDNN cannot run {_summary(step.part)} here:", step.reasons, step.advice
    )


@functools.lru_cache(maxsize=4096)
def _say_stale_once(summary: str, why: str) -> None:
    _log.info("%s: the measured choice is stale and ignored: %s", summary, why)


@functools.lru_cache(maxsize=4096)
def _say_once(summary: str, reasons: tuple[str, ...]) -> None:
    _log.info("%s runs with XLA: %s", summary, "; ".join(reasons))


_jax.set_lowering(
    graph_p,
    _jax.lower_function(
        lambda *operands, graph, options: run_reference(graph, operands, options)
    ),
)
_jax.set_lowering(graph_p, _lower_cuda, platform="cuda")
