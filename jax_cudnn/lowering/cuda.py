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
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn import choices, native
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
from jax_cudnn.native import PlanInfo
from jax_cudnn.reference.dtypes import jax_dtype

_log = logging.getLogger("jax_cudnn")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A part of a graph, with who runs it and why.

    ``legal`` is None where XLA runs it, for the ``reasons`` given. ``plan`` is None
    where no GPU was there to plan for: the plan is then made on the machine that runs.
    """

    part: Graph
    legal: Legal | None = None
    plan: PlanInfo | None = None
    choice: str = ""
    reasons: tuple[str, ...] = ()
    advice: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether cuDNN was to run it and cannot."""
        return self.legal is None and any(map(is_contraction, self.part.nodes))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who runs a graph: its parts in order. Without any, XLA runs it as a whole."""

    steps: tuple[Step, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[Step, ...]:
        """The parts that cuDNN was to run and cannot."""
        return tuple(step for step in self.steps if step.is_missing)


def local_target() -> tuple[int, Target] | None:
    """Return the first local CUDA device's ordinal and description, if JAX has one."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    ordinal = device.local_hardware_id
    return ordinal, native.device_target(ordinal)


def local_ordinals() -> list[int]:
    """Return the ordinals of all CUDA devices of this process; there is one."""
    return [device.local_hardware_id for device in jax.local_devices(backend="cuda")]


def decide(graph: Graph, options: Options) -> Decision:
    """Return who runs the graph on this machine's GPU, planning it with cuDNN."""
    if options.implementation == "xla":
        return Decision(reasons=('implementation="xla" was asked for',))
    if graph.has_empty_tensor:
        return Decision(reasons=("a tensor has no elements: nothing to launch",))
    try:
        return _decide(graph, local_target(), options, choices.table().version)
    except LibraryError as error:
        if options.implementation == "cudnn":
            raise
        return Decision(reasons=(str(error),))


def forget_decisions() -> None:
    """Decide anew what was decided before, for when the plans behind it are gone."""
    _decide.cache_clear()


@functools.lru_cache(maxsize=4096)
def _decide(
    graph: Graph,
    local: tuple[int, Target] | None,
    options: Options,
    choices_version: int,
) -> Decision:
    del choices_version  # Choices that were added since may decide otherwise.
    steps = tuple(_decide_part(part, local, options) for part in partition(graph))
    reasons = dict.fromkeys(reason for step in steps for reason in step.reasons)
    if all(step.legal is None for step in steps) and options.implementation == "auto":
        steps = ()
    return Decision(steps=steps, reasons=tuple(reasons))


def _decide_part(
    part: Graph, local: tuple[int, Target] | None, options: Options
) -> Step:
    ordinal, target = local or (0, None)
    measured = None if target is None else choices.table().get(part, target)
    if not any(map(is_contraction, part.nodes)) and (
        measured is None or measured.implementation == "xla"
    ):
        return Step(part=part)
    if (reason := _precision_refusal(part, options)) is not None:
        return Step(part=part, reasons=(reason,))
    legalization = legalize(part, target)
    is_auto = options.implementation == "auto"
    if measured is not None and measured.implementation == "xla" and is_auto:
        return Step(part=part, reasons=(_measured_reason(measured),))
    if measured is not None and measured.plan:
        step = _pinned(part, legalization, measured, ordinal)
        if step is not None:
            return step
    reasons = list(legalization.reasons)
    for legal in legalization.candidates:
        if is_auto and legal.slower:
            reasons.append(legal.slower)
            continue
        if target is None:
            return Step(part=part, legal=legal, reasons=tuple(reasons))
        try:
            plan = native.plan(to_json(legal.graph), device=ordinal)
        except UnsupportedError as error:
            reasons += error.reasons or (error.summary,)
        else:
            return Step(part=part, legal=legal, plan=plan, reasons=tuple(reasons))
    return Step(part=part, reasons=tuple(reasons), advice=legalization.advice)


def _pinned(
    part: Graph, legalization: Legalization, measured: Choice, ordinal: int
) -> Step | None:
    """Return the step with the measured plan; None, said once, where it is stale."""
    try:
        legal = legalization.candidates[measured.candidate]
        plan = native.plan(to_json(legal.graph), choice=measured.plan, device=ordinal)
    except (IndexError, GraphError, UnsupportedError) as error:
        _say_stale_once(_summary(part), str(error))
        return None
    return Step(part=part, legal=legal, plan=plan, choice=measured.plan)


def _measured_reason(measured: Choice) -> str:
    times = f"{measured.xla_us:.1f} µs" if measured.xla_us is not None else "?"
    rival = (
        f"{measured.cudnn_us:.1f} µs" if measured.cudnn_us is not None else "no plan"
    )
    return f"XLA was measured to be faster: {times}, cuDNN {rival}"


# jax.default_matmul_precision values that TF32 products satisfy.
_TF32_IS_ENOUGH = (None, "default", "fastest", "bfloat16", "tensorfloat32")


def _precision_refusal(part: Graph, options: Options) -> str | None:
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
    if options.implementation == "auto" and falls_back and not graph.has_empty_tensor:
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
            changed = step.legal.before(arguments)
            launched = launch(step.legal.graph, step.plan, step.choice, changed)
            results = step.legal.after(arguments, launched)
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


def launch(
    graph: Graph, plan: PlanInfo | None, choice: str, operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Bind the FFI target; with a plan, its workspace is a last, dropped result."""
    results = [
        jax.ShapeDtypeStruct(t.stored_shape, jax_dtype(t.dtype))
        for t in graph.output_tensors
    ]
    target = native.TARGET_SCRATCH
    if plan is not None:
        target = native.TARGET_CAPTURED
        results.append(jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8))
    call: Callable[..., Sequence[jax.Array]] = jax.ffi.ffi_call(target, results)
    kinds = label(graph)
    with jax.named_scope(f"cudnn_{kinds}"):
        returned = call(*operands, graph=to_json(graph), choice=choice, op=kinds)
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
