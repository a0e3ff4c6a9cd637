# SPDX-License-Identifier: Apache-2.0
"""The depthwise convolutions that were measured, and what their rows are called.

The rows are in docs/internals/measured/depthwise.json, of an H100 with cuDNN 9.19, and
in depthwise_9.28.json, of an H200 with 9.28.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from jax_cudnn.graph import Graph, is_anchor, label
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.products.conv import conv_attributes
from jax_cudnn.legalize import Rewrite
from jax_cudnn.lowering import traced_program


@dataclass(frozen=True, kw_only=True)
class Depthwise:
    """A depthwise convolution: images with channels last, and a square window.

    Windows are padded to keep sizes, but those of even size are patches; ``ends`` are
    other paddings. ``outer`` channels are made, by default as many as there are.
    """

    images: tuple[int, ...]
    window: int
    step: int = 1
    outer: int | None = None
    activation: str | None = None
    dtype: str = "bfloat16"
    hole: int = 1
    ends: tuple[int, int] | None = None

    def parts(self) -> list[Graph]:
        """Return the kernels of the convolution and of its gradients."""
        axes, channels = len(self.images) - 2, self.images[-1]
        letters = "DHW"[-axes:]
        reach = self.hole * (self.window - 1)
        ends = self.ends or ((0, 0) if reach % 2 else (reach // 2, reach // 2))

        def layer(x: Any, w: Any, *bias: Any) -> jax.Array:
            return jax_cudnn.conv(
                x,
                w,
                (self.step,) * axes,
                [ends] * axes,
                dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
                rhs_dilation=(self.hole,) * axes,
                feature_group_count=channels,
                bias=bias[0] if bias else None,
                activation=self.activation,  # type: ignore[arg-type]
            )

        def all_of_it(cotangent: Any, x: Any, w: Any, *bias: Any) -> Any:
            result, pullback = jax.vjp(layer, x, w, *bias)
            return result, pullback(cotangent)

        outer = self.outer or channels
        shapes = [self.images, (*[self.window] * axes, 1, outer)]
        shapes += [(outer,)] if self.activation else []
        dtype = jnp.dtype(self.dtype)
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        result = jax.eval_shape(layer, *types)
        graphs = traced_program(all_of_it, result, *types).graphs
        found = [part for graph in graphs for part in graph.parts]
        return [part for part in found if any(map(is_anchor, part.nodes))]


MEASURED = (
    Depthwise(images=(64, 112, 112, 32), window=3, activation="relu"),
    Depthwise(images=(64, 112, 112, 96), window=3, step=2),
    Depthwise(images=(64, 56, 56, 144), window=3, activation="silu"),
    Depthwise(images=(64, 28, 28, 192), window=3),
    Depthwise(images=(64, 14, 14, 576), window=3, step=2),
    Depthwise(images=(64, 7, 7, 960), window=3, activation="relu"),
    Depthwise(images=(128, 28, 28, 240), window=5, step=2, activation="silu"),
    Depthwise(images=(64, 14, 14, 480), window=5),
    Depthwise(images=(64, 7, 7, 1152), window=5, activation="silu"),
    Depthwise(images=(64, 56, 56, 96), window=7),
    Depthwise(images=(64, 28, 28, 192), window=7),
    Depthwise(images=(64, 14, 14, 384), window=7),
    Depthwise(images=(64, 7, 7, 768), window=7),
    Depthwise(images=(1, 56, 56, 128), window=7),
    Depthwise(images=(8, 14, 14, 512), window=7),
    Depthwise(images=(1, 28, 28, 192), window=3, activation="relu"),
    Depthwise(images=(32, 112, 112, 64), window=7, step=2),
    Depthwise(images=(8, 2048, 2048), window=4, activation="silu", ends=(3, 0)),
    Depthwise(images=(1, 8192, 1024), window=4, ends=(3, 0)),
    Depthwise(images=(8, 2048, 512), window=4),
    Depthwise(images=(16, 1024, 512), window=31),
    Depthwise(images=(16, 1024, 512), window=3, step=2),
    # cuDNN has no engines for these.
    Depthwise(images=(64, 56, 56, 96), window=9),
    Depthwise(images=(32, 28, 28, 256), window=13),
    Depthwise(images=(64, 28, 28, 192), window=3, hole=2),
    Depthwise(images=(64, 28, 28, 192), window=3, outer=384),
    Depthwise(images=(64, 28, 28, 192), window=2),
    Depthwise(images=(64, 30, 30, 192), window=3, step=3),
    Depthwise(images=(16, 2048, 512), window=3, hole=4),
    Depthwise(images=(2, 32, 32, 32, 64), window=3),
    Depthwise(images=(4, 16, 56, 56, 96), window=3),
    Depthwise(images=(64, 24, 24, 100), window=3),
    Depthwise(images=(64, 28, 28, 192), window=3, dtype="float16"),
    Depthwise(images=(64, 28, 28, 192), window=5, dtype="float16"),
    Depthwise(images=(64, 28, 28, 192), window=3, dtype="float32"),
    Depthwise(images=(64, 14, 14, 384), window=7, dtype="float32"),
)


def way_of(rewrite: Rewrite, first: Rewrite) -> str:
    """Return the name of a way of writing a convolution."""

    def is_told(*told: str) -> bool:
        return any(words in note for note in rewrite.notes for words in told)

    name = "as it is"
    if is_told("are merged"):
        name = "merged"
    elif is_told("is a convolution to cuDNN", "the gradient is of windows"):
        name = "rewritten"
    has_as_much = len(rewrite.graph.nodes) == len(first.graph.nodes)
    return name if has_as_much else f"{name}, fused"


def named_op(part: Graph) -> str:
    """Return what a kernel computes, with steps and holes that are not 1.

    Of a gradient of filters also their shape, as none of its operands has it.
    """
    (node,) = filter(is_anchor, part.nodes)
    attributes = conv_attributes(node)
    step, hole = max(attributes.window_strides), max(attributes.rhs_dilation)
    more: list[str] = []
    if node.kind == "conv_wgrad":
        shape = roles_in(part, node)["grad_w"].stored_shape
        more.append(f"filters [{','.join(map(str, shape))}]")
    more += [f"steps of {step}"] if step > 1 else []
    more += [f"dilated by {hole}"] if hole > 1 else []
    return ", ".join([label(part), *more])
