# SPDX-License-Identifier: Apache-2.0
"""The CUDA lowering of a graph: decide who runs it, and launch it through XLA's FFI.

Deciding is a pure function of graph, options and GPU (``decide``), so that
``plans.inspect`` gives the same answer as the compiler got.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn import native
from jax_cudnn.config import Options
from jax_cudnn.errors import LibraryError, UnsupportedError
from jax_cudnn.graph import Graph, Target, to_json
from jax_cudnn.legalize import Legal, legalize
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.primitives import graph_p, run_reference
from jax_cudnn.native import PlanInfo
from jax_cudnn.reference.interpreter import jax_dtype

_log = logging.getLogger("jax_cudnn")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who runs a graph and why.

    ``legal`` is None where XLA runs it, for the ``reasons`` given. ``plan`` is None
    where no GPU was there to plan for: the plan is then made on the machine that runs.
    """

    legal: Legal | None = None
    plan: PlanInfo | None = None
    reasons: tuple[str, ...] = ()
    advice: str = ""


def local_target() -> tuple[int, Target] | None:
    """Return the first local CUDA device's ordinal and description, if JAX has one."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    ordinal = device.local_hardware_id
    return ordinal, native.device_target(ordinal)


def decide(graph: Graph, options: Options) -> Decision:
    """Return who runs the graph on this machine's GPU, planning it with cuDNN."""
    if options.implementation == "xla":
        return Decision(reasons=('implementation="xla" was asked for',))
    if graph.has_empty_tensor:
        return Decision(reasons=("a tensor has no elements: nothing to launch",))
    try:
        local = local_target()
        return _decide(graph, local, is_auto=options.implementation == "auto")
    except LibraryError as error:
        if options.implementation == "cudnn":
            raise
        return Decision(reasons=(str(error),))


@functools.lru_cache(maxsize=4096)
def _decide(
    graph: Graph, local: tuple[int, Target] | None, *, is_auto: bool
) -> Decision:
    ordinal, target = local or (0, None)
    legalization = legalize(graph, target)
    reasons = list(legalization.reasons)
    for legal in legalization.candidates:
        if is_auto and legal.slower:
            reasons.append(legal.slower)
            continue
        if target is None:
            return Decision(legal=legal, reasons=tuple(reasons))
        try:
            plan = native.plan(to_json(legal.graph), device=ordinal)
        except UnsupportedError as error:
            reasons += error.reasons or (error.summary,)
        else:
            return Decision(legal=legal, plan=plan, reasons=tuple(reasons))
    return Decision(reasons=tuple(reasons), advice=legalization.advice)


def _lower_cuda(ctx: Any, *operands: Any, graph: Graph, options: Options) -> Any:
    decision = decide(graph, options)
    if decision.legal is not None:
        function = functools.partial(_run, decision.legal, decision.plan)
    elif options.implementation == "cudnn" and not graph.has_empty_tensor:
        raise _unsupported(graph, decision)
    else:
        if options.implementation == "auto" and not graph.has_empty_tensor:
            _say_once(_summary(graph), decision.reasons)
        function = functools.partial(_evaluate, graph, options)
    return _jax.lower_function(function)(ctx, *operands)


def _evaluate(
    graph: Graph, options: Options, *operands: jax.Array
) -> Sequence[jax.Array]:
    return run_reference(graph, operands, options)


def _run(
    legal: Legal, plan: PlanInfo | None, *operands: jax.Array
) -> Sequence[jax.Array]:
    results = _launch(legal.graph, plan, legal.before(operands))
    return legal.after(operands, results)


def _launch(
    graph: Graph, plan: PlanInfo | None, operands: Sequence[jax.Array]
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
    kinds = "+".join(node.kind for node in graph.nodes)
    with jax.named_scope(f"cudnn_{kinds}"):
        returned = call(*operands, graph=to_json(graph), choice="", op=kinds)
    return returned[: len(graph.outputs)]


def _summary(graph: Graph) -> str:
    operands = ", ".join(
        f"{t.name} {t.dtype}{list(t.stored_shape)}" for t in graph.input_tensors
    )
    return f"{'+'.join(node.kind for node in graph.nodes)}({operands})"


def _unsupported(graph: Graph, decision: Decision) -> UnsupportedError:
    return UnsupportedError(
        f"cuDNN cannot run {_summary(graph)} here:", decision.reasons, decision.advice
    )


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
