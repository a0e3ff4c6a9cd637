# SPDX-License-Identifier: Apache-2.0
"""Writes the golden graph files, which hold Python and C++ to the same JSON bytes.

Run from the repository's root when a node is added: `python -m scripts.write_golden`. A
file that is there stays: it holds what released programs may have. Delete the files and
run this when the schema changes.
"""

from pathlib import Path

from jax_cudnn.graph import (
    CausalConvAttributes,
    ConvAttributes,
    DTypeName,
    Graph,
    GraphWriter,
    MatmulAttributes,
    Tensor,
    causal_conv1d_graph,
    derivative_of,
    grouped_matmul_graph,
    to_json,
)
from jax_cudnn.legalize import legalize
from tests.attention.shared.cached import cached_graph
from tests.attention.shared.oracle import attention_graph, backward_graph
from tests.attention.shared.qkv import graph_of
from tests.norms.problems import KINDS, Problem, backward_of
from tests.products.shared.block_scaled import block_graph

_FOLDER = Path(__file__).parent.parent / "tests" / "golden"
_LENGTHS = ("query_lengths", "key_lengths")


def golden_graphs() -> dict[str, Graph]:
    """Return the graphs by file name: each node in its smallest and fullest form."""
    plain = attention_graph(dtype="bf16", with_stats=True)
    full = attention_graph(
        dtype="f16",
        bias="1hst",
        bias_dtype="f32",
        mask="b1s1",
        lengths=_LENGTHS,
        scale=-1e-5,
        is_causal=True,
        with_stats=True,
        order=(2, 0, 1, 3),
    )
    biased = attention_graph(
        dtype="bf16", bias="bh1t", mask="11st", lengths=_LENGTHS, with_stats=True
    )
    return {
        "sdpa_forward": attention_graph(dtype="bf16", scale=0.125),
        "sdpa_forward_full": full,
        "sdpa_backward": backward_graph(plain),
        "sdpa_backward_full": backward_graph(biased, with_grad_stats=True),
        "sdpa_cached": cached_graph(dtype="bf16"),
        "sdpa_paged_full": cached_graph(
            is_paged=True, dtype="f16", query_lengths=True, window=(7, 0)
        ),
        "sdpa_qkv_forward": graph_of("bsh3d", "mask", dtype="bf16"),
        "sdpa_qkv_backward": _backward(graph_of("sbhd", "bias", dtype="f16")),
        "causal_conv1d": _causal_conv1d(),
        "causal_conv1d_backward": _backward(_causal_conv1d()),
        "conv_forward": _with_residuals(_conv()),
        "conv_backward": _backward(_conv()),
        "block_scaled_matmul": block_graph("MXFP8", 17, 24, 3, dtype="f32", batch=2),
        "block_scaled_matmul_kernel": legalize(block_graph("NVFP4", 17, 24, 3), None)
        .candidates[0]
        .graph,
        "grouped_matmul": _grouped_matmul(),
        "grouped_matmul_backward": _backward(_grouped_matmul()),
        "grouped_matmul_kernel": legalize(_grouped_matmul(), None).candidates[0].graph,
        "matmul_forward": _with_residuals(_dequantized_matmul()),
        "matmul_backward": _backward(_dequantized_matmul()),
        "pointwise": _pointwise(),
        **_norms(),
    }


def _norms() -> dict[str, Graph]:
    """Each norm with all operands and results, and its gradient."""
    found: dict[str, Graph] = {}
    for kind in KINDS:
        problem = Problem(kind=kind, dtype="bf16", with_statistics=True, epsilon=1e-6)
        found[f"{kind}_forward"] = problem.graph
        found[f"{kind}_backward"] = backward_of(problem.graph)
    return found


# --- contractions and what goes around them -------------------------------------------

_CHANNELS_LAST = (0, 2, 3, 1)


def _tensor(
    name: str,
    dtype: DTypeName,
    dims: tuple[int, ...],
    order: tuple[int, ...] | None = None,
) -> Tensor:
    order = order or tuple(range(len(dims)))
    return Tensor(name=name, dtype=dtype, dims=dims, order=order)


def _conv() -> Graph:
    """A convolution with a value of its own for every attribute, bias and gelu."""
    writer = GraphWriter("f32")
    x = writer.input(_tensor("x", "bf16", (2, 6, 11, 13), _CHANNELS_LAST))
    w = writer.input(_tensor("w", "bf16", (10, 3, 3, 5), _CHANNELS_LAST))
    bias = writer.input(_tensor("bias", "f32", (1, 10, 1, 1), _CHANNELS_LAST))
    attributes = ConvAttributes(
        window_strides=(2, 1),
        padding_low=(1, 3),
        padding_high=(-1, 4),
        lhs_dilation=(1, 2),
        rhs_dilation=(2, 3),
    )
    dims = (2, 10, 4, 20)
    total = writer.node(
        "conv_fprop", {"x": x, "w": w}, attributes, dims=dims, order=_CHANNELS_LAST
    )
    total = writer.pointwise("add", total, bias)
    output = writer.pointwise("gelu_tanh", total)
    final = _tensor("output", "bf16", dims, _CHANNELS_LAST)
    return writer.finish([writer.result(output, final)])


def _dequantized_matmul() -> Graph:
    """A shared 8-bit right side with a scale per column, and elu of the product."""
    writer = GraphWriter("f32")
    a = writer.input(_tensor("a", "f16", (3, 5, 7)))
    b = writer.input(_tensor("b", "i8", (1, 7, 11), (0, 2, 1)))
    scale = writer.input(_tensor("scale", "f32", (1, 1, 11)))
    b = writer.cast(b, "f16")
    dims = (3, 5, 11)
    total = writer.node(
        "matmul", {"a": a, "b": b}, MatmulAttributes(), dims=dims, order=(0, 1, 2)
    )
    total = writer.pointwise("mul", total, scale)
    output = writer.pointwise("elu", total, alpha=1.25)
    return writer.finish([writer.result(output, _tensor("output", "f16", dims))])


def _grouped_matmul() -> Graph:
    inputs = {
        "a": _tensor("a", "bf16", (1, 17, 24)),
        "b": _tensor("b", "bf16", (5, 24, 11)),
        "group_sizes": _tensor("group_sizes", "i32", (1, 5)),
    }
    return grouped_matmul_graph(inputs, "f32")


def _causal_conv1d() -> Graph:
    inputs = {
        "x": _tensor("x", "bf16", (2, 11, 6), (0, 2, 1)),
        "w": _tensor("w", "bf16", (4, 6), (1, 0)),
        "bias": _tensor("bias", "bf16", (1, 6)),
        "segment_ids": _tensor("segment_ids", "i32", (2, 11)),
    }
    attributes = CausalConvAttributes(activation="silu")
    return causal_conv1d_graph(inputs, attributes=attributes)


def _pointwise() -> Graph:
    """A constant, a comparison, a selection, an alpha, and a sum."""
    writer = GraphWriter("f64")
    x = writer.input(_tensor("x", "f64", (2, 3, 5)))
    y = writer.input(_tensor("y", "bf16", (1, 3, 1)))
    small = writer.pointwise("lt", x, writer.constant(1e-3))
    leaky = writer.pointwise("relu_grad", x, y, alpha=0.01)
    chosen = writer.pointwise("select", leaky, x, small)
    total = writer.reduce_to(chosen, (1, 3, 1))
    return writer.finish(
        [
            writer.result(total, _tensor("total", "f64", (1, 3, 1))),
            writer.result(leaky, _tensor("leaky", "f32", (2, 3, 5))),
        ]
    )


def _with_residuals(graph: Graph) -> Graph:
    derivative = derivative_of(graph)
    assert derivative is not None
    return derivative.with_residuals(graph, _floats(graph))


def _backward(graph: Graph) -> Graph:
    derivative = derivative_of(graph)
    assert derivative is not None
    backward = derivative.backward(graph, _floats(graph), (True,) * len(graph.outputs))
    assert backward is not None
    return backward.graph


def _floats(graph: Graph) -> tuple[bool, ...]:
    return tuple(tensor.dtype not in ("i8", "i32") for tensor in graph.input_tensors)


def main() -> None:
    """Write the golden files that are not there yet, one line each."""
    for name, graph in golden_graphs().items():
        file = _FOLDER / f"{name}.json"
        if not file.exists():
            file.write_text(to_json(graph) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
