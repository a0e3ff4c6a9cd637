# SPDX-License-Identifier: Apache-2.0
"""Decides whether cuDNN, and by which plan, or XLA runs each part of a graph.

A pure function of graph, options, GPU and measured choices, so that ``plans.inspect``
gives the same answer as the compiler got.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jax_cudnn import choices, contenders
from jax_cudnn.choices import Choice, Trial
from jax_cudnn.config import MatmulPrecision, Options
from jax_cudnn.contenders import Program
from jax_cudnn.errors import GraphError, LibraryError, UnsupportedError
from jax_cudnn.graph import (
    Graph,
    Target,
    is_anchor,
    kind_named,
    label,
    summary,
    to_json,
)
from jax_cudnn.legalize import (
    Legalization,
    Rewrite,
    legalize,
    partition,
)
from jax_cudnn.lowering.devices import Gpu, gpu_for
from jax_cudnn.lowering.scope import scope
from jax_cudnn.native import CUBLASLT_ENGINE, PlanInfo, is_by_place
from jax_cudnn.policy import rank

_log = logging.getLogger("jax_cudnn")


# What decided: a measured choice, cuDNN's order of the candidates, or that order with
# the options of the call. One candidate may go first because kernels like this one were
# faster by it. A lowered program that pins its plan no longer says why.
Why = Literal["tuned", "heuristic", "requested", "pinned"]


def operation(graph: Graph) -> str:
    """Return what a graph computes, in a word."""
    return label(graph) or "copy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A way of rewriting a part for cuDNN that was not taken, with all that failed.

    ``is_refusal`` is whether cuDNN cannot run it. Otherwise the part is left to XLA on
    purpose: XLA is faster, or has the precision that the call asks for.
    """

    way: str
    reasons: tuple[str, ...]
    is_refusal: bool = True

    @classmethod
    def left_to_xla(cls, way: str, reason: str) -> "Attempt":
        """Return a rewrite that is not taken on purpose."""
        return cls(way=way, reasons=(reason,), is_refusal=False)


@dataclass(frozen=True, kw_only=True)
class PartDecision:
    """A part of a graph, with who runs it and why.

    ``rewrite`` is None where XLA runs it, for the ``reasons`` of the ``attempts`` that
    failed. ``plan`` and the ``target`` that it is for are None where no GPU was there
    to plan for: the plan is then made on the machine that runs. ``request`` is what the
    compiled program asks for: a pinned plan (a measured one, or any for a GPU
    elsewhere), which are allowed, or which is tried first. ``why`` is None where
    nothing was chosen. Where a contender that was added runs it, ``contender`` is its
    name, with its ``program``. ``by`` says which measurements of other kernels decided
    who runs it, where such did.
    """

    part: Graph
    rewrite: Rewrite | None = None
    plan: PlanInfo | None = None
    target: Target | None = None
    request: str = ""
    why: Why | None = None
    attempts: tuple[Attempt, ...] = ()
    advice: str = ""
    contender: str = ""
    program: Program | None = None
    by: str = ""

    @property
    def op(self) -> str:
        """The name of what it computes, in reports, profilers and errors."""
        return operation(self.part)

    @property
    def runs_on(self) -> str:
        """The implementation: "cudnn", "xla", or a contender's name and version."""
        return self.contender or ("xla" if self.rewrite is None else "cudnn")

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why no attempt was taken, each once."""
        found = (reason for attempt in self.attempts for reason in attempt.reasons)
        return tuple(dict.fromkeys(found))

    @property
    def is_missing(self) -> bool:
        """Whether cuDNN was to run it and cannot."""
        return self.runs_on == "xla" and any(map(is_anchor, self.part.nodes))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The parts of a graph with who runs each; without any, XLA runs it as a whole.

    ``by`` is as in a step.
    """

    steps: tuple[PartDecision, ...] = ()
    reasons: tuple[str, ...] = ()
    why: Why | None = None
    by: str = ""

    @property
    def missing(self) -> tuple[PartDecision, ...]:
        """The parts that cuDNN was to run and cannot."""
        return tuple(step for step in self.steps if step.is_missing)


def decided_without_cudnn(graph: Graph, options: Options) -> Decision | None:
    """Return that XLA runs a graph as a whole, and why; None if cuDNN may run it."""
    if options.implementation == "xla":
        reason = 'implementation="xla" was asked for'
        return Decision(reasons=(reason,), why="requested")
    if graph.has_empty_tensor:
        return Decision(reasons=("a tensor has no elements: nothing to launch",))
    return None


def decide(graph: Graph, options: Options) -> Decision:
    """Return who runs the graph on the GPU it is for, planning it with cuDNN."""
    if (decision := decided_without_cudnn(graph, options)) is not None:
        return decision
    try:
        if (tuner := scope().tuner) is not None:
            tuner(graph, options)
        gpu, trial = gpu_for(options), scope().trial
        return _decide(graph, gpu, options, choices.table().version, trial)
    except LibraryError as error:
        # Who names a GPU wants a program for it.
        if options.implementation == "cudnn" or options.device is not None:
            raise
        return Decision(reasons=(str(error),))


def forget_decisions() -> None:
    """Decide anew what was decided before, for when its plans are gone."""
    _decide.cache_clear()


@functools.lru_cache(maxsize=4096)
def _decide(
    graph: Graph,
    gpu: Gpu | None,
    options: Options,
    choices_version: int,
    trial: Trial | None,
) -> Decision:
    del choices_version  # Choices that were added since may decide otherwise.
    steps = tuple(decide_part(part, gpu, options, trial) for part in partition(graph))
    reasons = dict.fromkeys(reason for step in steps for reason in step.reasons)
    by = ", ".join(dict.fromkeys(step.by for step in steps if step.by))
    why = None
    is_xlas = all(step.runs_on == "xla" for step in steps)
    if is_xlas and options.implementation == "auto":
        missing = [step for step in steps if step.is_missing]
        was_measured = bool(missing) and all(step.why == "tuned" for step in missing)
        why, steps = "tuned" if was_measured else None, ()
    return Decision(steps=steps, reasons=tuple(reasons), why=why, by=by)


def decide_part(
    part: Graph, gpu: Gpu | None, options: Options, trial: Trial | None = None
) -> PartDecision:
    """Return who runs a part of a graph on a GPU; None is one that is not known."""
    target = None if gpu is None else gpu.target
    request = options.plan.to_request()
    measured = None
    if target is not None:
        measured = choices.chosen(part, target, request, trial)
    # What was measured decides first. A contender that is not there any more leaves the
    # part to the fastest of the others.
    if gpu is not None and measured is not None and measured.is_contenders:
        if (step := _contended(part, measured, gpu, options)) is not None:
            return step
        measured = measured.without_contenders()
    if measured is not None and not measured.plan and measured.cudnn_us is None:
        measured = None  # cuDNN had no plan: that is to be said with its reasons
    has_contraction = any(map(is_anchor, part.nodes))
    if not has_contraction and (measured is None or measured.implementation == "xla"):
        return PartDecision(part=part)
    if (reason := precision_refusal(part, options)) is not None:
        exact = Attempt.left_to_xla("by the precision asked for", reason)
        return PartDecision(part=part, attempts=(exact,))
    legalization = legalize(part, target)
    is_auto = options.implementation == "auto"
    if measured is not None and measured.implementation == "xla" and is_auto:
        slower = Attempt.left_to_xla("by measurement", _measured_reason(measured))
        return PartDecision(part=part, attempts=(slower,), why="tuned")
    if measured is not None and measured.plan and gpu is not None:
        step = _pinned(part, legalization, measured, gpu, options)
        if step is not None or not has_contraction:
            return step or PartDecision(part=part)
    # Nothing was measured, or what was is not there: rewrites are tried in order. If
    # the first has no plan and the second would get a slow engine, the third one runs
    # the part, and `attempts` has the first two, for `plans.explain` to show.
    attempts: list[Attempt] = []
    by: list[str] = []
    if legalization.reasons:
        way = "before cuDNN is asked"
        attempts.append(Attempt(way=way, reasons=legalization.reasons))
    for ranked in rank(part, legalization.candidates, target):
        rewrite = ranked.rewrite
        way = "; ".join(rewrite.notes) or "as one kernel"
        is_rounded = options.exact_dtypes and rewrite.rounds_sums
        is_free = gpu is not None and gpu.is_here and not request and not is_rounded
        if ranked.by_cublaslt and is_free:
            assert gpu is not None
            by_cublaslt = f"{way}, by cuBLASLt"
            plan = _planned(rewrite, ranked.asked, gpu, by_cublaslt, attempts)
            if plan is not None and plan.engine == CUBLASLT_ENGINE:
                return PartDecision(
                    part=part,
                    rewrite=rewrite,
                    plan=plan,
                    target=target,
                    # The program may run where cuBLASLt has no such plan.
                    request=ranked.asked,
                    why="heuristic",
                    attempts=tuple(attempts),
                    by=ranked.cublaslt_by if is_auto else "",
                )
            if plan is not None:
                attempts.append(Attempt(way=by_cublaslt, reasons=(_NO_CUBLASLT,)))
        if is_auto and ranked.slower:
            attempts.append(Attempt.left_to_xla(way, ranked.slower))
            by.append(ranked.by)
            continue
        if is_rounded:
            attempts.append(Attempt.left_to_xla(way, _ROUNDED))
            continue
        plan, asked = None, request or ranked.preference
        if gpu is not None:
            plan = _planned(rewrite, asked, gpu, way, attempts)
            if plan is None:
                continue
            if is_auto and not request and ranked.is_slow_by(plan.engine):
                is_slow = plan.engine in ranked.slow_engines
                shown = (_SLOW_ENGINE if is_slow else _OTHER_ENGINE).format(plan.engine)
                attempts.append(Attempt.left_to_xla(way, shown))
                by.append(ranked.engines_by)
                continue
        return PartDecision(
            part=part,
            rewrite=rewrite,
            plan=plan,
            target=target,
            request=_pin(plan, gpu) or asked,
            why="requested" if request else "heuristic",
            attempts=tuple(attempts),
            by=ranked.by if is_auto else "",
        )
    return PartDecision(
        part=part,
        attempts=tuple(attempts),
        advice=legalization.advice,
        by=", ".join(dict.fromkeys(filter(None, by))),
    )


def _planned(
    rewrite: Rewrite, request: str, gpu: Gpu, way: str, attempts: list[Attempt]
) -> PlanInfo | None:
    """Return the plan of a request; None, and the reasons among attempts, without."""
    try:
        return gpu.plan(to_json(rewrite.graph), request)
    except UnsupportedError as error:
        reasons = error.reasons or (error.summary,)
        attempts.append(Attempt(way=way, reasons=reasons))
        return None


def _contended(
    part: Graph, measured: Choice, gpu: Gpu, options: Options
) -> PartDecision | None:
    """Return the step of the contender that was the fastest, if it may run the part."""
    is_free = options.implementation == "auto" and not options.plan.to_request()
    if not (is_free and gpu.is_here) or precision_refusal(part, options) is not None:
        return None
    title = measured.implementation
    program = contenders.program_of(title, part)
    if program is None:
        _say_stale_once(summary(part), f"{title} was not added (plans.add_contender)")
        return None
    return PartDecision(part=part, contender=title, program=program, why="tuned")


_NO_CUBLASLT = "cuBLASLt has no kernel for it on this GPU"
_SLOW_ENGINE = (
    "cuDNN's first plan is of engine {}, which XLA's code is faster than: "
    "plans.autotune finds the best of all"
)
_OTHER_ENGINE = (
    "cuDNN's first plan is of engine {}, none of those that were measured to be as "
    "fast as XLA's code: plans.autotune finds the best of all"
)
_ROUNDED = "the sums would be rounded, which the function does not do"


def _pin(plan: PlanInfo | None, gpu: Gpu | None) -> str:
    """Return what names the plan in a program for a GPU elsewhere, else nothing.

    There the plan is made again, and is to need the workspace that the program has. Its
    place in the list of a GPU that is not here does not name it.
    """
    if plan is None or gpu is None or gpu.is_here or is_by_place(plan.request):
        return ""
    return plan.request


def _pinned(
    part: Graph,
    legalization: Legalization,
    measured: Choice,
    gpu: Gpu,
    options: Options,
) -> PartDecision | None:
    """Return the step with the measured plan, unless it is stale or not allowed."""
    rewrite = rewritten_as(part, legalization, gpu.target, measured.rewritten)
    if rewrite is None:
        _say_stale_once(summary(part), "this release rewrites the graph otherwise")
        return None
    if options.exact_dtypes and rewrite.rounds_sums:
        return None
    if is_by_place(measured.plan) and not gpu.is_here:
        shown = "its plan is pinned by its place in the list of a GPU that is here"
        _say_stale_once(summary(part), shown)
        return None
    try:
        json = to_json(rewrite.graph)
        if not _allows(options, gpu, json, measured.plan):
            return None
        plan = gpu.plan(json, measured.plan)
        if refused := _refused_notes(options, plan):
            shown = f"its plan has the note {refused}, which is refused"
            _say_stale_once(summary(part), shown)
            return None
    except (GraphError, UnsupportedError) as error:
        _say_stale_once(summary(part), str(error))
        return None
    limit = options.plan.workspace_limit_bytes
    if limit is not None and plan.workspace_bytes > limit:
        return None
    return PartDecision(
        part=part,
        rewrite=rewrite,
        plan=plan,
        target=gpu.target,
        request=measured.plan,
        why="tuned",
    )


def rewritten_as(
    part: Graph, legalization: Legalization, target: Target, digest: str
) -> Rewrite | None:
    """Return the rewrite of a part with that digest; without one, the first rewrite."""
    if not digest:
        ranked = rank(part, legalization.candidates, target)
        return ranked[0].rewrite if ranked else None
    for rewrite in legalization.candidates:
        if digest == choices.digest_of(rewrite.graph):
            return rewrite
    return None


def _allows(options: Options, gpu: Gpu, graph_json: str, pin: str) -> bool:
    """Whether a pinned plan is among the candidates that a call's options allow."""
    request = options.plan.to_request()
    if not request:
        return True
    listed = gpu.candidates(graph_json, request)
    return any(each.request == pin and not each.refusal for each in listed)


def _refused_notes(options: Options, plan: PlanInfo) -> str:
    """Return the notes of a measured plan that a call's options refuse."""
    notes = (*plan.behavior_notes, *plan.numeric_notes)
    refused = options.plan.all_refused_notes
    return ", ".join(note for note in notes if note in refused)


def _measured_reason(measured: Choice) -> str:
    times = f"{measured.xla_us:.1f} µs" if measured.xla_us is not None else "?"
    rival = (
        f"{measured.cudnn_us:.1f} µs" if measured.cudnn_us is not None else "no plan"
    )
    return f"XLA was measured to be faster: {times}, cuDNN {rival}"


# What cuDNN does as well, of what dot products can be asked for: the dtype of the
# operands for which it does.
_ALGORITHMS = {
    "BF16_BF16_F32": {"bf16"},
    "F16_F16_F32": {"f16"},
    "TF32_TF32_F32": {"f32"},
}


def precision_refusal(part: Graph, options: Options) -> str | None:
    """Return why the products asked for are not cuDNN's, or None."""
    products = {
        node: setting
        for node in part.nodes
        if (setting := kind_named(node.kind).row.precision) is not None
    }
    precision: Any = options.matmul_precision
    if precision is None or not products:
        return None
    dtypes = {part.tensor(name).dtype for node in products for _, name in node.inputs}
    dtypes -= {"i32"}  # sizes and offsets
    if not _is_level(precision):
        # An algorithm is for dot products; a convolution has none to lax either.
        if "dot" not in products.values() or _ALGORITHMS.get(precision) == dtypes:
            return None
        return f"the algorithm of the product was asked for, {precision!r}: XLA has it"
    levels = precision if isinstance(precision, tuple) else (precision,)
    # On a GPU, XLA takes TF32 for all lower ones (jax.lax.Precision).
    if "f32" in dtypes and any(map(_is_highest, levels)):
        return f"cuDNN multiplies f32 in TF32, less than the precision {precision!r}"
    return None


def _is_level(precision: MatmulPrecision) -> bool:
    """Whether it is a jax.lax.Precision, or two, by name and no algorithm."""
    if isinstance(precision, str):
        return precision not in jax.lax.DotAlgorithmPreset.__members__
    return not isinstance(precision, jax.lax.DotAlgorithm)


def _is_highest(name: str) -> bool:
    return jax.lax.Precision(name) is jax.lax.Precision.HIGHEST


@functools.lru_cache(maxsize=4096)
def _say_stale_once(call: str, why: str) -> None:
    _log.info("%s: the measured choice is stale and ignored: %s", call, why)
