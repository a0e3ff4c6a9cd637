# SPDX-License-Identifier: Apache-2.0
"""Graphs under JAX: the primitives, their transformations and their lowerings."""

from jax_cudnn.lowering import batching, differentiation, remat  # noqa: F401 the rules
from jax_cudnn.lowering._jax import (
    align_varying,
    constants_as_operands,
    equation_function,
    equation_name,
    equation_place,
    inner_jaxprs,
    is_array_aval,
    is_known_array,
    is_on_host,
    min_dim,
    vary_over,
    weakly_typed,
)
from jax_cudnn.lowering.cuda import run_contender, run_cudnn, run_xla
from jax_cudnn.lowering.decision import decide
from jax_cudnn.lowering.layouts import LAYOUT_TARGET, in_row_order
from jax_cudnn.lowering.linear import run_with_gradient, with_derivative_of
from jax_cudnn.lowering.partitioned import TARGET as PARTITIONED_TARGET
from jax_cudnn.lowering.primitives import run_graph
from jax_cudnn.lowering.remat import (
    F8_COPIES,
    attention_results,
    kept_copy,
    kernels_of,
    product_result,
)
from jax_cudnn.lowering.sameness import CustomCall, same_function, same_parameters
from jax_cudnn.lowering.scope import call_options, is_tuning, scoped
from jax_cudnn.lowering.sharding.array_types import (
    axes_in,
    entries_of,
    explicit_mesh,
    explicit_part,
    explicit_spec,
    gathered,
    gathered_along,
    is_explicitly_sharded,
    is_on_explicit_mesh,
    partial_axes,
    sharded_as,
    sharded_where_free,
    splittable,
    typed_along,
    typed_as,
    typed_like,
    unreduced_in,
)
from jax_cudnn.lowering.slices import exchange_slices
from jax_cudnn.lowering.tracing import (
    TracedGraph,
    TracedProgram,
    check_bare,
    graph_of,
    stage_of,
    subprograms,
    traced_graphs,
    traced_program,
)
from jax_cudnn.lowering.undivided import TARGET as UNDIVIDED_TARGET

__all__ = [
    "F8_COPIES",
    "LAYOUT_TARGET",
    "PARTITIONED_TARGET",
    "UNDIVIDED_TARGET",
    "CustomCall",
    "TracedGraph",
    "TracedProgram",
    "align_varying",
    "attention_results",
    "axes_in",
    "call_options",
    "check_bare",
    "constants_as_operands",
    "decide",
    "entries_of",
    "equation_function",
    "equation_name",
    "equation_place",
    "exchange_slices",
    "explicit_mesh",
    "explicit_part",
    "explicit_spec",
    "gathered",
    "gathered_along",
    "graph_of",
    "in_row_order",
    "inner_jaxprs",
    "is_array_aval",
    "is_explicitly_sharded",
    "is_known_array",
    "is_on_explicit_mesh",
    "is_on_host",
    "is_tuning",
    "kept_copy",
    "kernels_of",
    "min_dim",
    "partial_axes",
    "product_result",
    "run_contender",
    "run_cudnn",
    "run_graph",
    "run_with_gradient",
    "run_xla",
    "same_function",
    "same_parameters",
    "scoped",
    "sharded_as",
    "sharded_where_free",
    "splittable",
    "stage_of",
    "subprograms",
    "traced_graphs",
    "traced_program",
    "typed_along",
    "typed_as",
    "typed_like",
    "unreduced_in",
    "vary_over",
    "weakly_typed",
    "with_derivative_of",
]
