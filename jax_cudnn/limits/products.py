# SPDX-License-Identifier: Apache-2.0
"""The limits of contractions: convolutions, matmuls, and grouped matmuls."""

import math

from jax_cudnn.graph import Graph, Node
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.graph.products.conv import TRIPLES, arrays_in
from jax_cudnn.graph.walks import leading_to, read_by
from jax_cudnn.limits.rows import ALL_VERSIONS, Limit, always

_CONVOLUTIONS = frozenset(TRIPLES)
_FUSED = _CONVOLUTIONS | {"matmul"}
_CAUSAL = frozenset({"causal_conv1d", "causal_conv1d_backward"})
_GROUPED = frozenset({"grouped_matmul", "grouped_matmul_backward"})
_BLOCK_SCALED = frozenset({"block_scaled_matmul"})
_BY_XLA = "XLA runs them"
_BY_XLAS_CUDNN = "XLA runs them, possibly by the same cuDNN"


def _is_3d(graph: Graph, node: Node, *dtypes: str) -> bool:
    """Whether a convolution has three spatial axes, and operands of a dtype."""
    operands = [graph.tensor(name) for _, name in node.inputs]
    has_dtype = any(operand.dtype in dtypes for operand in operands)
    return has_dtype and len(operands[0].dims) == 5


def _is_narrow_3d(graph: Graph, node: Node) -> bool:
    _, w, _ = arrays_in(graph, node)
    return _is_3d(graph, node, "bf16", "f16") and {*w.dims[2:]} != {1}


def _is_f32_3d(graph: Graph, node: Node) -> bool:
    return _is_3d(graph, node, "f32")


def _is_large_depthwise(graph: Graph, node: Node) -> bool:
    x, w, output = arrays_in(graph, node)
    is_depthwise = w.dims[1] == 1 < x.dims[1]
    return is_depthwise and max(math.prod(x.dims), math.prod(output.dims)) >= 2**31


def _has_relu_before(graph: Graph, node: Node) -> bool:
    return any(
        isinstance(each.attributes, PointwiseAttributes)
        and each.attributes.mode.startswith("relu")
        for each in leading_to(graph.nodes, read_by([node]))
    )


def _is_one_group(graph: Graph, node: Node) -> bool:
    return roles_in(graph, node)["b"].dims[0] == 1


def _has_f8(graph: Graph, _: Node) -> bool:
    return any(tensor.dtype.startswith("f8") for tensor in graph.tensors)


LIMITS = (
    Limit(
        kinds=_BLOCK_SCALED,
        holds=always,
        lacking=True,
        gpus=range(100),
        what="there are no matmuls with a scale for each block",
        words="{target.name} is sm_{target.sm_version}; matmuls in MXFP8 and NVFP4 "
        "need sm_100 (Blackwell) or newer",
        done="XLA multiplies the dequantised values in bf16",
        source="cuDNN 9.27 lists no plan for sm_90, and lists plans for sm_100 and "
        "sm_120; not run on a GPU",
    ),
    Limit(
        kinds=_BLOCK_SCALED,
        holds=always,
        lacking=True,
        versions=range(91900),
        what="matmuls with a scale for each block were not tried",
        words="cuDNN {cudnn} is older than 9.19",
        done="XLA multiplies the dequantised values in bf16",
        source="cuDNN has them from 9.7 on; older ones than 9.19 were not tried",
    ),
    Limit(
        kinds=_FUSED,
        holds=always,
        lacking=True,
        gpus=range(80),
        what="there are no engines that compile a fusion at run time",
        words="sm_{target.sm_version} ({target.name}): fusions need sm_80 (Ampere) or "
        "newer",
        done=_BY_XLA,
        source="cuDNN's developer guide, runtime fusion engines",
    ),
    Limit(
        kinds=_FUSED,
        holds=always,
        lacking=True,
        versions=range(90800),
        what="matmuls and convolutions were not tried",
        words="cuDNN {cudnn} is older than 9.8",
        done=_BY_XLA,
        source="older ones were not tried",
    ),
    Limit(
        kinds=_FUSED,
        holds=_has_f8,
        lacking=True,
        gpus=range(89),
        what="there are no f8 matmuls and convolutions",
        words="sm_{target.sm_version} has no f8 tensor cores; sm_89 has",
        done=_BY_XLA,
        source="CUDA C++ Programming Guide, tensor cores",
    ),
    Limit(
        kinds=_GROUPED,
        holds=always,
        lacking=True,
        gpus=range(80),
        what="there are no grouped matmuls",
        words="sm_{target.sm_version} ({target.name}): grouped matmuls need sm_80 "
        "(Ampere) or newer",
        done=_BY_XLA,
        source="older GPUs were not tried",
    ),
    Limit(
        kinds=_GROUPED,
        holds=always,
        lacking=True,
        versions=range(91500),
        what="there is no operation for grouped matmuls",
        words="cuDNN {cudnn} is older than 9.15",
        done=_BY_XLA,
        source='cudnn-frontend 1.28.0 ("Moe grouped matmul requires cuDNN v9.15.0")',
    ),
    Limit(
        kinds=_CAUSAL,
        holds=always,
        is_fault=False,
        versions=range(92200),
        what="there is no function for causal convolutions",
        words="cuDNN {cudnn} is older than 9.22, which has cudnnCausalConv1dForward",
        done="a causal convolution is written as a depthwise one",
        source="cudnn_subquadratic_ops.h of 9.28.1",
    ),
    Limit(
        kinds=_CONVOLUTIONS,
        holds=_is_narrow_3d,
        versions=range(90800, 91500),
        what="3-D convolutions of bf16 and f16, and their gradients, may be wrong, "
        "except with windows of 1 x 1 x 1",
        done=_BY_XLAS_CUDNN,
        source="[pytorch 163539](https://github.com/pytorch/pytorch/issues/163539), "
        "[163581](https://github.com/pytorch/pytorch/pull/163581), "
        "[166480](https://github.com/pytorch/pytorch/pull/166480). PyTorch disabled "
        "those with channels first. Here all are channels last, and which kernels are "
        "wrong was not published",
    ),
    Limit(
        kinds=_CONVOLUTIONS,
        holds=_is_f32_3d,
        versions=range(91002, 91600),
        what="3-D convolutions of f32 in TF32, and their gradients, may be wrong",
        done=f"{_BY_XLAS_CUDNN}; with precision='highest', nothing is rounded to TF32",
        source="[pytorch 167024](https://github.com/pytorch/pytorch/pull/167024)",
    ),
    Limit(
        kinds=_CONVOLUTIONS,
        holds=_is_large_depthwise,
        versions=range(91100, 91500),
        what="depthwise convolutions of arrays with 2^31 elements or more, and their "
        "gradients, are wrong",
        done=_BY_XLAS_CUDNN,
        source="[pytorch 163171](https://github.com/pytorch/pytorch/pull/163171), "
        "[168364](https://github.com/pytorch/pytorch/pull/168364)",
    ),
    Limit(
        kinds=frozenset({"conv_wgrad"}),
        holds=_has_relu_before,
        gpus=range(100, 110),
        what="listing plans for a filter's gradient with a relu of an operand in the "
        "kernel crashes the process",
        done="the relu is computed before the kernel",
        source="seen: planned without a GPU with the full 9.19.0 and 9.28.1 for a B200",
    ),
    Limit(
        kinds=frozenset({"grouped_matmul"}),
        holds=_is_one_group,
        versions=ALL_VERSIONS[92800:],
        what="a grouped matmul with a single group is refused",
        done="it is computed as a plain matmul, with every version",
        source="seen: planned without a GPU with 9.28.1, for sm_80 to sm_100; 9.19.0 "
        "and 9.27.0 plan it",
    ),
)
