# SPDX-License-Identifier: Apache-2.0
"""Graphs of attention as cuDNN gets them, run as a flash kernel runs them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import Graph, Target, derivative_of, from_json, to_json
from jax_cudnn.legalize import Rewrite
from tests.attention.shared.flash import flash

HOPPER = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=91900)


def _check_form(graph: Graph) -> None:
    """Assert what cuDNN is known to want of every attention graph."""
    assert from_json(to_json(graph)) == graph
    by_name = {tensor.name: tensor for tensor in graph.tensors}
    assert not {"mask", "grad_stats", "grad_max_logit", "sinks"} & set(by_name)
    # Up to 9.20, cuDNN has the maximum beside the sum, and no log-sum-exp then.
    assert ("max_logit" in by_name) == ("sum_exp" in by_name)
    if "max_logit" in by_name:
        assert "stats" not in graph.outputs
    assert ("query_lengths" in by_name) == ("key_lengths" in by_name)
    for tensor in graph.tensors:
        assert tensor.order[-1] == 3, tensor
    assert by_name["query"].dims[3] % 8 == by_name["value"].dims[3] % 8 == 0
    attributes: Any = graph.nodes[0].attributes
    assert attributes.scale > 0
    if "bias" in by_name:
        rows, columns = by_name["query"].dims[2], by_name["key"].dims[2]
        assert by_name["bias"].dims[2:] == (rows, columns)


def run_legal(rewrite: Rewrite, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Return the results of a rewritten graph, once its form is checked."""
    _check_form(rewrite.graph)
    changed = jax.jit(rewrite.before)(operands)
    for tensor, x in zip(rewrite.graph.input_tensors, changed, strict=True):
        assert x.shape == tensor.stored_shape, tensor
        # A key is hidden by -inf, but never all keys of a row: cuDNN would get 0/0.
        worst = np.max(x, axis=-1) if tensor.name == "bias" else x
        assert np.isfinite(worst).all(), tensor
    return jax.jit(rewrite.after)(operands, flash(rewrite.graph, changed))


def gradient_of(
    graph: Graph, operands: list[jax.Array], outputs: Any, **nonzero: bool
) -> tuple[Graph, list[jax.Array]]:
    """Return the gradient graph of all f32 operands, with operands of its own.

    ``nonzero`` says of which outputs, by name, there are cotangents: all others', too.
    """
    derivative = derivative_of(graph)
    assert derivative is not None
    backward = derivative.backward(
        graph,
        tuple(tensor.dtype == "f32" for tensor in graph.input_tensors),
        tuple(nonzero.get(name, True) for name in graph.outputs),
    )
    assert backward is not None
    rng = np.random.default_rng(1)
    source = {
        "input": operands,
        "output": list(outputs),
        "cotangent": [
            jnp.asarray(np.asarray(rng.standard_normal(x.shape), jnp.float32))
            for x in outputs
        ],
    }
    return backward.graph, [source[kind][i] for kind, i in backward.operands]


def assert_results_close(
    graph: Graph, got: Any, want: Any, tolerance: float = 2e-5, notes: Any = ""
) -> None:
    """Compare the results of a graph, by name."""
    for name, x, y in zip(graph.outputs, got, want, strict=True):
        np.testing.assert_allclose(
            x, y, rtol=tolerance, atol=tolerance, err_msg=f"{name} {notes}"
        )
