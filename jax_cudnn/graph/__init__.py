# SPDX-License-Identifier: Apache-2.0
"""Graphs as pure data: what cuDNN is to compute, with its canonical JSON form."""

from jax_cudnn.graph.attention.cached import CachedAttributes, sdpa_cached_graph
from jax_cudnn.graph.attention.f8 import sdpa_f8_graph, sdpa_f8_output
from jax_cudnn.graph.attention.sdpa import (
    AttentionAttributes,
    SdpaAttributes,
    sdpa_backward_graph,
    sdpa_graph,
)
from jax_cudnn.graph.axes import axis_classes
from jax_cudnn.graph.codec import from_json, to_json
from jax_cudnn.graph.factors import Factors, factors_of
from jax_cudnn.graph.kinds import (
    NodeKind,
    all_kinds,
    is_anchor,
    kind_named,
    register_kind,
)
from jax_cudnn.graph.norms import NORMALISED, NormAttributes, norm_graph
from jax_cudnn.graph.pooling import AvgPoolAttributes, MaxPoolAttributes, pool_graph
from jax_cudnn.graph.printing import label, operand_text, summary
from jax_cudnn.graph.products.block_scaled_matmul import (
    BlockScaledAttributes,
    block_scaled_graph,
)
from jax_cudnn.graph.products.causal_conv1d import (
    CausalConvAttributes,
    causal_conv1d_graph,
)
from jax_cudnn.graph.products.conv import ConvAttributes
from jax_cudnn.graph.products.grouped_matmul import (
    grouped_matmul_graph,
    matrices_gradient_graph,
)
from jax_cudnn.graph.products.matmul import MatmulAttributes
from jax_cudnn.graph.spec import (
    MAX_RANK,
    SCHEMA,
    Attributes,
    DTypeName,
    Graph,
    Node,
    Tensor,
)
from jax_cudnn.graph.target import Target, version_text
from jax_cudnn.graph.transforms.derivative import added_first, derivative_of
from jax_cudnn.graph.transforms.folding import FoldRule, fold_rule, is_apart
from jax_cudnn.graph.transforms.gradient_kernel import forward_graph
from jax_cudnn.graph.transforms.joining import joined
from jax_cudnn.graph.transforms.saving import saved_results
from jax_cudnn.graph.writer import GraphWriter

__all__ = [
    "MAX_RANK",
    "NORMALISED",
    "SCHEMA",
    "AttentionAttributes",
    "Attributes",
    "AvgPoolAttributes",
    "BlockScaledAttributes",
    "CachedAttributes",
    "CausalConvAttributes",
    "ConvAttributes",
    "DTypeName",
    "Factors",
    "FoldRule",
    "Graph",
    "GraphWriter",
    "MatmulAttributes",
    "MaxPoolAttributes",
    "Node",
    "NodeKind",
    "NormAttributes",
    "SdpaAttributes",
    "Target",
    "Tensor",
    "added_first",
    "all_kinds",
    "axis_classes",
    "block_scaled_graph",
    "causal_conv1d_graph",
    "derivative_of",
    "factors_of",
    "fold_rule",
    "forward_graph",
    "from_json",
    "grouped_matmul_graph",
    "is_anchor",
    "is_apart",
    "joined",
    "kind_named",
    "label",
    "matrices_gradient_graph",
    "norm_graph",
    "operand_text",
    "pool_graph",
    "register_kind",
    "saved_results",
    "sdpa_backward_graph",
    "sdpa_cached_graph",
    "sdpa_f8_graph",
    "sdpa_f8_output",
    "sdpa_graph",
    "summary",
    "to_json",
    "version_text",
]
