# SPDX-License-Identifier: Apache-2.0
"""The limits of norms and their gradients."""

from jax_cudnn.graph import NORMALISED, Graph, Node
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.limits.rows import Limit, always

_NORMS = frozenset(name for kind in NORMALISED for name in (kind, f"{kind}_backward"))
_BY_XLA = "XLA runs them"


def _writes_f8(graph: Graph, node: Node) -> bool:
    roles = roles_in(graph, node)
    return "scale_output" in roles and roles["output"].dtype.startswith("f8")


LIMITS = (
    Limit(
        kinds=_NORMS,
        holds=_writes_f8,
        lacking=True,
        gpus=range(89),
        what="norms write no f8",
        words="sm_{target.sm_version} writes no f8; sm_89 does",
        done=_BY_XLA,
        source='seen: "!hardware_fp8_supported" in the reasons of 9.19 and 9.27 for '
        "sm_80",
    ),
    Limit(
        kinds=_NORMS,
        holds=always,
        lacking=True,
        gpus=range(80),
        what="there are norms of few sizes, and none of bf16",
        words="sm_{target.sm_version} ({target.name}): norms need sm_80 (Ampere) or "
        "newer",
        done=_BY_XLA,
        source="seen: planned with 9.19 and 9.27 for sm_75",
    ),
    Limit(
        kinds=_NORMS,
        holds=always,
        lacking=True,
        versions=range(90800),
        what="norms were not planned",
        words="cuDNN {cudnn} is older than 9.8",
        done=_BY_XLA,
        source="older ones were not tried",
    ),
)
