# SPDX-License-Identifier: Apache-2.0
"""One contraction with its prologue and epilogue as cuDNN takes it, or why it does not."""

from collections.abc import Callable

from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import conv, matmul
from jax_cudnn.legalize.partition import is_contraction
from jax_cudnn.legalize.rules import Legal, Legalization

_CANDIDATES: dict[str, Callable[[Graph], tuple[Legal, ...]]] = {
    "conv_dgrad": conv.candidates,
    "conv_fprop": conv.candidates,
    "conv_wgrad": conv.candidates,
    "matmul": matmul.candidates,
}

# Below Ampere cuDNN has no engines that compile a fusion at run time.
_OLDEST_SM = 80
_OLDEST_CUDNN = 90800


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a graph of one contraction."""
    contractions = [node for node in graph.nodes if is_contraction(node)]
    kinds = [node.kind for node in contractions]
    if len(kinds) != 1:
        return Legalization(
            reasons=(f"cuDNN has no kernel for {len(kinds)} contractions: {kinds}",)
        )
    reasons = _refusals(graph, target)
    if reasons:
        return Legalization(
            reasons=tuple(reasons), advice='Pass implementation="xla" or "auto".'
        )
    return Legalization(candidates=_CANDIDATES[kinds[0]](graph))


def _refusals(graph: Graph, target: Target | None) -> list[str]:
    reasons: list[str] = []
    if any(t.dtype == "f64" for t in graph.tensors):
        reasons.append("f64: cuDNN's fusions take bf16, f16, f32 and 8-bit operands")
    if target is None:
        return reasons
    if target.sm_version < _OLDEST_SM:
        reasons.append(
            f"sm_{target.sm_version} ({target.name}): fusions need sm_{_OLDEST_SM} "
            "(Ampere) or newer"
        )
    if target.cudnn_version < _OLDEST_CUDNN:
        reasons.append(f"cuDNN {target.cudnn_version} is older than 9.8")
    eight_bit_float = [t for t in graph.tensors if t.dtype.startswith("f8")]
    if eight_bit_float and target.sm_version < 89:
        reasons.append(f"sm_{target.sm_version} has no f8 tensor cores; sm_89 has")
    return reasons
