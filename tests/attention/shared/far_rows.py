# SPDX-License-Identifier: Apache-2.0
"""Problems with rows that a bias moves far from 0, with their truth in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import Graph
from tests.attention.shared.oracle import (
    attention_graph,
    backward_graph,
    by_role,
    numpy_results,
    options_of,
    to_logical,
)

SIZES = {"b": 2, "s": 6, "t": 7, "h": 4, "k": 2, "d": 8, "e": 5}
FAR = 1e9
LEAST = float(jnp.finfo(jnp.float32).min)


def rows_at(low: float) -> Callable[[np.ndarray], None]:
    """Add to all keys of the even rows; the first entry's last row has one key left."""

    def edit(bias: np.ndarray) -> None:
        bias[:, :, ::2] = low + bias[:, :, ::2] if abs(low) < 1e5 else low
        if bias.shape[2] == SIZES["s"] and bias.shape[3] > 1:
            bias[0, :, 4, 0] = 0.5

    return edit


def _two_levels(bias: np.ndarray) -> None:
    """Hide twice, as causal and padding biases that are added do."""
    bias[:] = -FAR
    bias[..., ::2] = -2 * FAR


def _all_but_one_level(bias: np.ndarray) -> None:
    bias[:, :, 1:] = -np.inf
    bias[:, :, 1:2, 2:] = LEAST
    bias[:, :, 2:3, 3:4] = -FAR


def ordinary(bias: np.ndarray) -> None:
    del bias


def _tiny(bias: np.ndarray) -> None:
    bias *= 1e-30


BIASES = {
    "ordinary": ordinary,
    "tiny": _tiny,
    "-1e4": rows_at(-1e4),
    "-1e9": rows_at(-FAR),
    "finfo.min": rows_at(LEAST),
    "+1e9": rows_at(FAR),
    "+1e32": rows_at(1e32),
    "two levels": _two_levels,
    "-inf": rows_at(-np.inf),
    "-inf and low": _all_but_one_level,
}

LENGTHS = ("query_lengths", "key_lengths")

FORMS: dict[str, dict[str, Any]] = {
    "bhst": {"bias": "bhst"},
    "b1st": {"bias": "b1st", "with_grad_stats": True},
    "1hst": {"bias": "1hst", "is_causal": True},
    "11st mask": {"bias": "11st", "mask": "b1st"},
    "b1st lengths": {"bias": "b1st", "lengths": LENGTHS, "scale": -0.25},
    "1h1t": {"bias": "1h1t", "is_causal": True, "with_grad_stats": True},
    "bhs1": {"bias": "bhs1", "with_grad_stats": True},
    "no bias": {"mask": "b1st", "lengths": LENGTHS},
}


class Problem(NamedTuple):
    forward: Graph
    backward: Graph
    operands: list[jax.Array]
    cotangents: list[jax.Array]
    truth: dict[str, np.ndarray]

    def backward_operands(self, outputs: Any) -> list[jax.Array]:
        """Return the gradient graph's operands, given the forward graph's results."""
        given = dict(zip(self.forward.inputs, self.operands, strict=True))
        for name, x, cotangent in zip(
            self.forward.outputs, outputs, self.cotangents, strict=True
        ):
            given |= {name: x, f"grad_{name}": cotangent}
        return [given[name] for name in self.backward.inputs]

    def without_bias_gradient(self) -> "Problem":
        has_grad_stats = "grad_stats" in self.backward.inputs
        graph = backward_graph(
            self.forward, with_grad_bias=False, with_grad_stats=has_grad_stats
        )
        return self._replace(backward=graph)


def problem_of(
    edit: Callable[[np.ndarray], None],
    *,
    dtype: str = "f32",
    sizes: dict[str, int] = SIZES,
    with_grad_stats: bool = False,
    seen: Callable[[np.ndarray], np.ndarray] = lambda bias: bias,
    score: float = 0.0,
    **options: Any,
) -> Problem:
    """Draw a problem whose scores are exact in f32: numbers of few bits.

    `seen` is what the truth has of the bias. A `score` is that of every query and key,
    but for what is drawn.
    """
    graph = attention_graph(
        sizes=sizes, dtype=dtype, with_stats=True, **{"scale": 0.25, **options}
    )
    rng = np.random.default_rng(5)
    like = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}

    def drawn(tensor: Any) -> jax.Array:
        if tensor.dtype == "bool":
            mask = rng.random(tensor.dims) < 0.7
            mask[0, 0, 3] = False
            return jnp.asarray(mask)
        if tensor.dtype == "i32":
            return jnp.asarray([5, 6], jnp.int32).reshape(2, 1, 1, 1)
        x = rng.integers(-8, 9, tensor.stored_shape) / 4
        if tensor.name == "bias":
            edit(x)
        if score and tensor.name in ("query", "key"):
            x[..., 0] = 4 * score if tensor.name == "query" else 1
        with np.errstate(over="ignore"):
            return jnp.asarray(x, like[tensor.dtype])

    operands = [drawn(tensor) for tensor in graph.input_tensors]
    cotangents = [drawn(tensor) for tensor in graph.output_tensors]
    made = backward_graph(graph, with_grad_stats=with_grad_stats)
    values = by_role(graph, operands)
    if "bias" in values:
        values["bias"] = seen(np.asarray(values["bias"], np.float32))
    for tensor, x in zip(graph.output_tensors, cotangents, strict=True):
        if tensor.name == "output" or with_grad_stats:
            values[f"grad_{tensor.name}"] = to_logical(tensor, x)
    return Problem(
        graph, made, operands, cotangents, numpy_results(values, **options_of(graph))
    )


def check_results(
    graph: Graph,
    results: Any,
    truth: dict[str, np.ndarray],
    *,
    eps: float = 4e-7,
    skip: tuple[str, ...] = (),
) -> None:
    for tensor, x in zip(graph.output_tensors, results, strict=True):
        if tensor.name in skip:
            continue
        want = truth[tensor.name]
        got = to_logical(tensor, x).astype(np.float64)
        if tensor.name == "stats":
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
            continue
        error = np.linalg.norm(got - want)
        assert error <= 4 * eps * np.linalg.norm(want) + 1e-6, tensor.name
