# SPDX-License-Identifier: Apache-2.0
"""Norms by NumPy in float64, which know nothing of graphs, and random problems."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_cudnn.graph import (
    NORMALISED,
    Graph,
    NormAttributes,
    Tensor,
    derivative_of,
    norm_graph,
)

# The dims of x by kind: sizes that differ from each other.
DIMS: dict[str, tuple[int, ...]] = {
    "adaptive_layer_norm": (3, 5, 7),
    "batch_norm": (11, 5),
    "group_norm": (3, 2, 5, 7),
    "layer_norm": (5, 7),
    "rms_norm": (5, 7),
}
# The axes along which scale and bias are.
FACTORS: dict[str, tuple[int, ...]] = {
    "adaptive_layer_norm": (0, 2),
    "batch_norm": (1,),
    "group_norm": (1, 2),
    "layer_norm": (1,),
    "rms_norm": (1,),
}
KINDS = tuple(NORMALISED)
# Those that add a residual.
OF_ROWS = ("layer_norm", "rms_norm")


def truth(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axes: Sequence[int],
    epsilon: float,
    is_centred: bool = True,
) -> dict[str, np.ndarray]:
    """Return output, mean and rstd (with axes of 1) in float64; factors broadcast."""
    x = np.asarray(x, np.float64)
    axes = tuple(axes)
    mean = x.mean(axis=axes, keepdims=True) if is_centred else np.zeros(())
    variance = ((x - mean) ** 2).mean(axis=axes, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        rstd = 1 / np.sqrt(variance + epsilon)
        output = (x - mean) * rstd
    if scale is not None:
        output = output * np.asarray(scale, np.float64)
    if bias is not None:
        output = output + np.asarray(bias, np.float64)
    found = {"output": output, "rstd": rstd}
    return found | ({"mean": mean} if is_centred else {})


def gradients(
    x: Any,
    cotangent: Any,
    scale: Any = None,
    *,
    axes: Sequence[int],
    along: Sequence[int],
    epsilon: float,
    is_centred: bool = True,
    grad_mean: Any = 0.0,
    grad_rstd: Any = 0.0,
) -> dict[str, np.ndarray]:
    """Return the gradients of x, scale and bias in float64, by name.

    ``along`` are the axes of scale and bias, whose gradients have the others with 1.
    The cotangents of the statistics have axes of 1, as these have.
    """
    x, dy = np.asarray(x, np.float64), np.asarray(cotangent, np.float64)
    axes = tuple(axes)
    found = truth(x, axes=axes, epsilon=epsilon, is_centred=is_centred)
    normed, rstd = found["output"], found["rstd"]

    def mean(value: np.ndarray) -> np.ndarray:
        return value.mean(axis=axes, keepdims=True)

    g = dy if scale is None else dy * np.asarray(scale, np.float64)
    grad = g - normed * mean(g * normed)
    if is_centred:
        grad = grad - mean(g)
    # The mean of n elements has the slope 1 / n, and rstd -rstd^2 normed / n.
    count = x.size // rstd.size
    statistics = (grad_mean - grad_rstd * rstd**2 * normed) / count
    others = tuple(i for i in range(x.ndim) if i not in along)
    return {
        "x": rstd * grad + statistics,
        "scale": (dy * normed).sum(axis=others, keepdims=True),
        "bias": dy.sum(axis=others, keepdims=True),
    }


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph of a norm: which operands and results it has, in which dtypes."""

    kind: str
    dtype: str = "f32"
    scale: str | None = "f32"
    bias: str | None = "f32"
    output: str | None = None
    dims: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    epsilon: float = 1e-3
    has_residual: bool = False
    with_statistics: bool = False

    @property
    def graph(self) -> Graph:
        """The forward graph."""
        dims = self.dims or DIMS[self.kind]
        order = self.order or tuple(range(len(dims)))
        factor = tuple(
            size if i in FACTORS[self.kind] else 1 for i, size in enumerate(dims)
        )
        dtypes: Any = {"x": self.dtype, "scale": self.scale, "bias": self.bias}
        inputs = {
            role: Tensor(
                name=role,
                dtype=dtype,
                dims=dims if role == "x" else factor,
                order=order,
            )
            for role, dtype in dtypes.items()
            if dtype is not None
        }
        if self.has_residual:
            inputs["residual"] = replace(inputs["x"], name="residual")
        output: Any = self.output or self.dtype
        return norm_graph(
            self.kind,
            inputs,
            attributes=NormAttributes(epsilon=self.epsilon),
            output=replace(inputs["x"], name="output", dtype=output),
            with_statistics=self.with_statistics,
        )


def backward_of(
    graph: Graph,
    wanted: Sequence[bool] | None = None,
    nonzero: Sequence[bool] | None = None,
) -> Graph:
    """Return the gradient graph of a norm."""
    derivative = derivative_of(graph)
    assert derivative is not None
    backward = derivative.backward(
        graph,
        tuple(wanted or (True,) * len(graph.inputs)),
        tuple(nonzero or (True,) * len(graph.outputs)),
    )
    assert backward is not None
    return backward.graph


def f8_graph(
    kind: str,
    dims: tuple[int, ...],
    *,
    dtype: Any = "bf16",
    scale: Any = None,
    output: Any = "f8_e4m3fn",
) -> Graph:
    """Return a norm that writes f8."""
    x = Tensor(name="x", dtype=dtype, dims=dims, order=(0, 1))
    inputs = {"x": x}
    if scale is not None:
        inputs["scale"] = replace(x, name="scale", dtype=scale, dims=(1, dims[1]))
    inputs["scale_output"] = replace(x, name="scale_output", dtype="f32", dims=(1, 1))
    return norm_graph(
        kind,
        inputs,
        attributes=NormAttributes(epsilon=1e-3),
        output=replace(x, name="output", dtype=output),
    )
