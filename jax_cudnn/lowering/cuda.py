# SPDX-License-Identifier: Apache-2.0
"""Lowers a graph for CUDA: launches cuDNN's plans through XLA's FFI.

Who runs what is decided in decision.py.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from jax_cudnn import native
from jax_cudnn.config import Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, kind_named, summary, to_json
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.decision import PartDecision, decide
from jax_cudnn.lowering.partitioned import set_lowering
from jax_cudnn.lowering.primitives import run_reference
from jax_cudnn.lowering.scope import scope
from jax_cudnn.lowering.sharding.subaxes import as_results, merged
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import Keep, to_logical, to_stored

_log = logging.getLogger("jax_cudnn")

# The XLA of JAX 0.11.2 runs a custom call of a loop's body twice if its results are
# both stacked over the turns and read in the body, as attention's are in a scan over
# layers: it moves a copy of the call into the fusion that stacks them. It moves none
# from behind a barrier. JAX 0.11.1 and 0.12 do not repeat calls
# (https://github.com/openxla/xla/pull/45799).
_REPEATS_STACKED_CALLS = jaxlib.version.__version__ == "0.11.2"


def cuda_program(graph: Graph, options: Options) -> Callable[..., Sequence[jax.Array]]:
    """Return what computes the graph's results on a GPU, from arrays."""
    decision = decide(graph, options)
    missing = decision.missing
    if missing and options.implementation == "cudnn":
        raise _unsupported(missing[0])
    falls_back = missing or not decision.steps
    # A program that is compiled to be timed says nothing of those that will run.
    is_told = decision.reasons and not graph.has_empty_tensor and scope().trial is None
    if options.implementation == "auto" and falls_back and is_told:
        _say_once(summary(graph), decision.reasons)
    return functools.partial(_run, graph, decision.steps, options)


def _run(
    graph: Graph,
    steps: tuple[PartDecision, ...],
    options: Options,
    *operands: jax.Array,
) -> Sequence[jax.Array]:
    if not steps:
        return run_xla(graph, operands, options)
    values = dict(zip(graph.inputs, merged(graph, operands), strict=True))
    for step in steps:
        arguments = [values[name] for name in step.part.inputs]
        results = run_step(step, arguments, options)
        values |= dict(zip(step.part.outputs, results, strict=True))
    return as_results(graph, operands, [values[name] for name in graph.outputs])


def run_step(
    step: PartDecision, operands: Sequence[jax.Array], options: Options
) -> Sequence[jax.Array]:
    """Return the part's results by whoever runs it."""
    if step.contender:
        return run_contender(step, *operands)
    if step.rewrite is None:
        return run_xla(step.part, operands, options)
    return run_cudnn(step, *operands)


def run_contender(step: PartDecision, *operands: jax.Array) -> Sequence[jax.Array]:
    """Return the part's results by a contender, which works on logical axes.

    Raises:
      ValueError: the contender's results have other shapes or dtypes than the part's.
    """
    assert step.program is not None, "a step of a contender's has its program"
    part = step.part
    logical = map(to_logical, part.input_tensors, operands)
    with jax.named_scope(f"{step.contender.split()[0]}_{step.op}"):
        results = list(step.program(*logical))
    expected = [(t.dims, jax_dtype(t.dtype)) for t in part.output_tensors]
    found = [(jnp.shape(x), jnp.result_type(x)) for x in results]
    if found != expected:
        raise ValueError(
            f"{step.contender} returns {_types(found)} for {summary(part)}, whose "
            f"results are {_types(expected)}: {', '.join(part.outputs)}"
        )
    stored = map(to_stored, part.output_tensors, results)
    return _jax.align_varying([*operands, *stored])[len(operands) :]


def _types(types: Sequence[tuple[tuple[int, ...], np.dtype]]) -> str:
    names = (f"{dtype}{list(shape)}" for shape, dtype in types)
    return ", ".join(names) or "nothing"


def run_xla(
    graph: Graph, operands: Sequence[jax.Array], options: Options
) -> Sequence[jax.Array]:
    """Return the graph's results by XLA, written as XLA is fastest at it."""
    return run_reference(
        graph, operands, options, narrow_sums=True, kept=_read_by_sums(graph)
    )


# Cheap enough to be computed twice rather than written and read back.
_CHEAP = {"add", "identity", "mul", "neg", "relu_grad", "relu6_grad", "select", "sub"}
# XLA computes these and their sums in one kernel, once it takes their results for what
# they are in 16 bits. It does not do so with others' exponentials
# (docs/internals/measured/xla_code.md).
_SUMMED_AT_ONCE = {"elu_grad", "sigmoid_grad", "silu_grad"}


def _rounded(x: jax.Array) -> jax.Array:
    """Return the same 16-bit values, of which XLA leaves out no cast to f32."""
    limits = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, limits.nexp, limits.nmant)


@functools.lru_cache(maxsize=4096)
def _read_by_sums(graph: Graph) -> dict[str, Keep]:
    """Return the made tensors that sums read beside others, if they are not cheap.

    They are in memory anyway; XLA would rather compute them twice than read them
    (docs/internals/measured/where_to_fuse.md).
    """
    modes = {getattr(node.attributes, "mode", "add") for node in graph.nodes}
    if modes <= _CHEAP:
        return {}
    at_once = modes <= _CHEAP | _SUMMED_AT_ONCE
    made = {name for node in graph.nodes for _, name in node.outputs}
    readers = Counter(name for node in graph.nodes for _, name in node.inputs)
    return {
        name: _rounded
        if at_once and graph.tensor(name).dtype in ("bf16", "f16")
        else jax.lax.optimization_barrier
        for node in graph.nodes
        if kind_named(node.kind).row.is_sum
        for _, name in node.inputs
        if name in made and (readers[name] > 1 or name in graph.outputs)
    }


def run_cudnn(step: PartDecision, *operands: jax.Array) -> Sequence[jax.Array]:
    """Return the part's results by cuDNN, with the array work before and after it."""
    assert step.rewrite is not None, "XLA runs the others"
    run = _run_cudnn if step.rewrite.fast_path is None else _run_shared
    return run(step, *operands)


def _run_cudnn(step: PartDecision, *operands: jax.Array) -> Sequence[jax.Array]:
    assert step.rewrite is not None
    return step.rewrite.run(functools.partial(_launch, step), operands)


# A step with two ways is long. A program has it once, for all of its calls.
_run_shared = jax.jit(_run_cudnn, static_argnums=0)


def _launch(step: PartDecision, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Bind the FFI target.

    With a plan, its workspace is a last, dropped result, unless the launch waits for
    the device: then it must not be captured.
    """
    assert step.rewrite is not None
    graph = step.rewrite.graph
    results = [
        jax.ShapeDtypeStruct(t.stored_shape, jax_dtype(t.dtype))
        for t in graph.output_tensors
    ]
    name = native.TARGET_SCRATCH
    if step.plan is not None and not step.rewrite.waits:
        name = native.TARGET_CAPTURED
        results.append(jax.ShapeDtypeStruct((step.plan.workspace_bytes,), jnp.uint8))
    call: Callable[..., Sequence[jax.Array]] = jax.ffi.ffi_call(name, results)
    target = step.target
    with jax.named_scope(f"cudnn_{step.op}"):
        returned = call(
            *operands,
            graph=to_json(graph),
            request=step.request,
            op=step.op,
            # The handler runs it nowhere else: ffi/handler/program_target.h.
            sm_version=np.int64(target.sm_version if target else 0),
            cudnn_version=np.int64(target.cudnn_version if target else 0),
        )
    if _REPEATS_STACKED_CALLS:
        returned = jax.lax.optimization_barrier(tuple(returned))
    # Inside shard_map they vary as the operands do; loops after the call insist on it.
    aligned = _jax.align_varying([*operands, *returned])[len(operands) :]
    return aligned[: len(graph.outputs)]


def _unsupported(step: PartDecision) -> UnsupportedError:
    return UnsupportedError(
        f"cuDNN cannot run {summary(step.part)} here:", step.reasons, step.advice
    )


@functools.lru_cache(maxsize=4096)
def _say_once(call: str, reasons: tuple[str, ...]) -> None:
    _log.info("%s runs with XLA: %s", call, "; ".join(reasons))


set_lowering(
    "cuda",
    cuda_program,
    lambda graph, options: lambda *operands: run_xla(graph, operands, options),
)
