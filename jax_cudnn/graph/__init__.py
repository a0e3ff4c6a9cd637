# SPDX-License-Identifier: Apache-2.0
"""Graphs as pure data: what cuDNN is to compute, with its canonical JSON form."""

from jax_cudnn.graph.codec import from_json, to_json
from jax_cudnn.graph.kinds import NodeKind, kind_named, register_kind
from jax_cudnn.graph.sdpa import SdpaAttributes, sdpa_graph
from jax_cudnn.graph.spec import (
    SCHEMA,
    Attributes,
    DTypeName,
    Graph,
    Node,
    Tensor,
)
from jax_cudnn.graph.target import Target

__all__ = [
    "SCHEMA",
    "Attributes",
    "DTypeName",
    "Graph",
    "Node",
    "NodeKind",
    "SdpaAttributes",
    "Target",
    "Tensor",
    "from_json",
    "kind_named",
    "register_kind",
    "sdpa_graph",
    "to_json",
]
