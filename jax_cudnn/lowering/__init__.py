# SPDX-License-Identifier: Apache-2.0
"""Graphs under JAX: the primitives, their transformations and their lowerings."""

from jax_cudnn.lowering import cuda as _cuda  # registers the lowerings
from jax_cudnn.lowering.primitives import (
    check_bare,
    run_graph,
    subprograms,
    traced_graphs,
)
from jax_cudnn.lowering.scope import call_options, scoped

decide = _cuda.decide

__all__ = [
    "call_options",
    "check_bare",
    "decide",
    "run_graph",
    "scoped",
    "subprograms",
    "traced_graphs",
]
