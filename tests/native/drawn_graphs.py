# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for graphs of contractions with prologue and epilogue."""

from dataclasses import replace
from itertools import count

from hypothesis import strategies as st

from jax_cudnn.graph import (
    ConvAttributes,
    DTypeName,
    Graph,
    GraphWriter,
    MatmulAttributes,
    Tensor,
)
from jax_cudnn.graph.pointwise import ARITY, COMPARISONS
from jax_cudnn.graph.products.conv import CONV_FPROP
from jax_cudnn.graph.shapes import result_dims

_DTYPES: tuple[DTypeName, ...] = (
    *("f8_e4m3fn", "f8_e5m2", "bf16", "f16", "f32", "f64"),
    *("u8", "i8", "i32", "i64"),
)
_WITH_ALPHA = ("elu", "elu_grad", "relu", "relu_grad")
_SIZES = st.integers(0, 5)
_FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def fused_graphs(draw: st.DrawFn) -> Graph:
    """Draw a contraction, or none, with pointwise nodes and sums behind it."""
    writer = GraphWriter(draw(st.sampled_from(["f32", "f64"])))
    add = draw(st.sampled_from([_add_operand, _add_matmul, _add_conv]))
    name = add(draw, writer)
    for _ in range(draw(st.integers(0, 4))):
        name = _add_pointwise(draw, writer, name)
    if draw(st.booleans()):
        dims = tuple(draw(st.sampled_from([1, dim])) for dim in writer[name].dims)
        name = writer.reduce_to(name, dims)
    dtype = draw(st.sampled_from(_DTYPES))
    final = replace(writer[name], name="result", dtype=dtype)
    return writer.finish((writer.result(name, final),))


def _operand(
    draw: st.DrawFn, writer: GraphWriter, name: str, dims: tuple[int, ...]
) -> str:
    return writer.input(
        Tensor(
            name=name,
            dtype=draw(st.sampled_from(_DTYPES)),
            dims=dims,
            order=tuple(draw(st.permutations(range(len(dims))))),
        )
    )


def _add_operand(draw: st.DrawFn, writer: GraphWriter) -> str:
    dims = draw(st.lists(_SIZES, min_size=1, max_size=8))
    return _operand(draw, writer, "x", tuple(dims))


def _add_matmul(draw: st.DrawFn, writer: GraphWriter) -> str:
    batch, m, r, n = (draw(_SIZES) for _ in range(4))
    a_batch, b_batch = draw(st.sampled_from([(batch, batch), (1, batch), (batch, 1)]))
    return writer.node(
        "matmul",
        {
            "a": _operand(draw, writer, "a", (a_batch, m, r)),
            "b": _operand(draw, writer, "b", (b_batch, r, n)),
        },
        MatmulAttributes(),
        dims=(batch, m, n),
        order=(0, 1, 2),
    )


def _add_conv(draw: st.DrawFn, writer: GraphWriter) -> str:
    axes = draw(st.integers(1, 3))

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    attributes = ConvAttributes(
        window_strides=per_axis(1, 3),
        padding_low=per_axis(-1, 3),
        padding_high=per_axis(-1, 3),
        lhs_dilation=per_axis(1, 3),
        rhs_dilation=per_axis(1, 3),
    )
    n, c, groups, o = draw(_SIZES), draw(_SIZES), draw(st.integers(1, 3)), draw(_SIZES)
    x = (n, c * groups, *per_axis(0, 6))
    w = (o * (groups if c else 1), c, *per_axis(0, 4))
    given = {
        role: Tensor(name=role, dtype="f32", dims=dims, order=tuple(range(len(dims))))
        for role, dims in (("x", x), ("w", w))
    }
    out = result_dims(CONV_FPROP.row, "output", given, attributes)
    sizes = {"image": x, "filter": w, "out": out}
    kind, inputs, output, made = draw(
        st.sampled_from(
            [
                ("conv_fprop", {"x": "image", "w": "filter"}, "output", "out"),
                (
                    "conv_dgrad",
                    {"grad_output": "out", "w": "filter"},
                    "grad_x",
                    "image",
                ),
                (
                    "conv_wgrad",
                    {"grad_output": "out", "x": "image"},
                    "grad_w",
                    "filter",
                ),
            ]
        )
    )
    return writer.node(
        kind,
        {
            role: _operand(draw, writer, each, sizes[each])
            for role, each in inputs.items()
        },
        attributes,
        output=output,
        dims=sizes[made],
        order=tuple(draw(st.permutations(range(axes + 2)))),
    )


def _add_pointwise(draw: st.DrawFn, writer: GraphWriter, name: str) -> str:
    """Add one mode over `name` and over constants or operands that broadcast to it."""
    dims = writer[name].dims
    arity = draw(st.integers(1, 3))
    modes = [m for m in ARITY if ARITY[m] == arity and m not in COMPARISONS]
    mode = draw(st.sampled_from(modes))
    names = [name, *(_other(draw, writer, dims) for _ in range(arity - 1))]
    if mode == "select":
        names[2] = writer.pointwise(draw(st.sampled_from(COMPARISONS)), name, names[2])
    alpha = draw(_FINITE) if mode in _WITH_ALPHA else 0.0
    return writer.pointwise(mode, *names, alpha=alpha)


def _other(draw: st.DrawFn, writer: GraphWriter, dims: tuple[int, ...]) -> str:
    if draw(st.booleans()):
        return writer.constant(draw(_FINITE), len(dims))
    name = next(f"other_{i}" for i in count() if f"other_{i}" not in writer)
    small = tuple(draw(st.sampled_from([1, dim])) for dim in dims)
    return _operand(draw, writer, name, small)
