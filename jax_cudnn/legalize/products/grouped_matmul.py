# SPDX-License-Identifier: Apache-2.0
"""Rewrites grouped matmuls for cuDNN; axis letters and roles as in node_kinds.json.

cuDNN gets where each group starts. Its last group reaches to the end, so rows that are
in no group are set to 0 after the kernel. A single group is a matmul. The gradient of
the rows is one more grouped matmul. For that of the matrices, cuDNN has an operation
from 9.22 on, for which 9.28 listed no plan on an H200 either: it is XLA's.

The rewrites of group_products.py have all gradients: all groups in one launch of
cuBLASLt's, or each group as a matmul of its own. Products of f8 are cuBLASLt's.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, MatmulAttributes, Node, Target, Tensor
from jax_cudnn.graph.kinds import Roles, roles_in
from jax_cudnn.graph.transforms.gradient_kernel import single_node_graph
from jax_cudnn.legalize.common.editor import Env, GraphEditor, by_role
from jax_cudnn.legalize.common.legalization import (
    XLA_ADVICE,
    Arrays,
    Legalization,
    Rewrite,
    around,
)
from jax_cudnn.legalize.products import fusion
from jax_cudnn.legalize.products.group_products import (
    ALONG_SUM,
    all_groups,
    by_group,
    fill_loads,
)
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored
from jax_cudnn.reference.products.grouped_matmul import gradient_of_b

_GRADIENT_OF_B = "the gradient of b is computed by XLA: cuDNN lists no plan for it"
# The names of rewrites: cuDNN's kernel for all groups, a matmul for each, or all groups
# by cuBLASLt.
ONE_KERNEL, BY_GROUP, BY_CUBLASLT = "one kernel", "by group", "by cuBLASLt"
_OF_CUBLASLT = ("bf16", "f16")
_F8_UNKNOWN = "f8: cuBLASLt runs grouped matmuls, and without a GPU no cuBLAS is known"
_F64 = "f64: cuDNN's grouped matmul takes bf16, f16 and f32"


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a graph of one grouped matmul or its gradient."""
    if any(tensor.dtype == "f64" for tensor in graph.tensors):
        return Legalization(reasons=(_F64,), advice=XLA_ADVICE)
    (node,) = graph.nodes
    is_gradient = node.kind.endswith("_backward")
    b = roles_in(graph, node)["b"]
    if b.dtype in ALONG_SUM and b.dims[0] > 1:
        if target is None:
            return Legalization(reasons=(_F8_UNKNOWN,), advice=XLA_ADVICE)
        return Legalization(candidates=(all_groups(graph).named(BY_CUBLASLT),))
    rewrites = _of_gradient(graph, target) if is_gradient else _rewrites(graph, target)
    rewrites = tuple(rewrite.named(ONE_KERNEL) for rewrite in rewrites)
    if b.dims[0] == 1:
        return Legalization(candidates=rewrites)
    more = {BY_GROUP: by_group}
    # Where no GPU is known, no cuBLAS is.
    if target is not None and b.dtype in _OF_CUBLASLT:
        more[BY_CUBLASLT] = all_groups
    others = (_whole(graph, rewrite).named(name) for name, rewrite in more.items())
    return Legalization(candidates=(*rewrites, *others))


def _whole(graph: Graph, rewrite: Callable[[Graph], Rewrite]) -> Rewrite:
    """Return a rewrite, with the gradient of b by XLA where that is wanted."""
    (node,) = graph.nodes
    if not node.kind.endswith("_backward") or "grad_b" in dict(node.outputs):
        return rewrite(graph)
    # Then a is not read.
    return _with_gradient_of_b(graph, rewrite(_product(roles_in(graph, node), node)))


# --- forward --------------------------------------------------------------------------


def _rewrites(graph: Graph, target: Target | None) -> tuple[Rewrite, ...]:
    editor = GraphEditor.by_role(graph)
    if editor.tensors["b"].dims[0] == 1:
        return _as_matmul(graph, target)
    is_stored_so = editor.tensors["b"].order == (0, 2, 1)
    if is_stored_so:
        return (_kernel(graph, (0, 2, 1)),)
    rewrites = (_kernel(graph, (0, 1, 2)), _kernel(graph, (0, 2, 1)))
    # The plan is made where the program runs, and the second has one everywhere.
    return rewrites if target is not None else rewrites[::-1]


def _kernel(graph: Graph, order: tuple[int, ...]) -> Rewrite:
    """Return the rewrite that stores b in an order."""
    editor = GraphEditor.by_role(graph)
    _hide_rows(editor)
    _take_starts(editor)
    if editor.tensors["b"].order != order:
        editor.notes.append(
            "b is transposed: some of cuDNN's versions take it only with the "
            "contraction stored last"
        )
        editor.reorder("b", order)
    for name in ("a", "output"):
        if editor.tensors[name].order != (0, 1, 2):
            editor.reorder(name, (0, 1, 2))
    fill_loads(editor)
    return editor.finish()


def _take_starts(editor: GraphEditor) -> None:
    """Replace the sizes of groups by where they start."""
    if "group_sizes" not in editor.tensors:
        return
    rows = editor.tensors["a"].dims[1]
    sizes = editor.drop("group_sizes")
    starts = replace(sizes, name="starts")

    def step(env: Env) -> None:
        given = env["group_sizes"]
        ends = jnp.cumsum(given, axis=sizes.order.index(1), dtype=given.dtype)
        # An address follows from them.
        env["starts"] = jnp.clip(ends - given, 0, rows)

    editor.before.append(step)
    editor.put_operand(starts)


def _hide_rows(editor: GraphEditor) -> None:
    """Set rows that are in no group to 0 after the kernel, which gave them to the last.

    A row of the result follows from no other row of a.
    """
    output = editor.tensors["output"]
    if "group_sizes" not in editor.tensors:
        return
    place = output.order.index(1)

    def step(env: Env, results: Env) -> None:
        x = results["output"]
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, place)
        kept = row < jnp.sum(env["group_sizes"], dtype=jnp.int32)
        results["output"] = jnp.where(kept, x, jnp.zeros((), x.dtype))

    editor.after.append(step)
    editor.notes.append("rows beyond the last group are set to 0 after the kernel")


def _as_matmul(graph: Graph, target: Target | None) -> tuple[Rewrite, ...]:
    """Return the rewrites of a single group, which cuDNN 9.28 refuses (limits)."""
    editor = GraphEditor.by_role(graph)
    _hide_rows(editor)
    for name in ("group_sizes", "starts"):
        if name in editor.tensors:
            editor.drop(name)
    inputs = {"a": "a", "b": "b"}
    outputs = {"output": "output"}
    product = Node.make("matmul", inputs, outputs, MatmulAttributes())
    editor.replace_main(product)
    editor.notes.append("a single group is a matmul")
    outer = editor.finish()
    return tuple(
        replace(
            around(rewrite, outer.before, outer.after),
            notes=(*outer.notes, *rewrite.notes),
            problem=outer.graph,
        )
        for rewrite in fusion.legalize(outer.graph, target).candidates
    )


# --- gradient -------------------------------------------------------------------------


def _of_gradient(graph: Graph, target: Target | None) -> tuple[Rewrite, ...]:
    """Return the rewrites of the gradient of a, with that of b by XLA."""
    (node,) = graph.nodes
    roles = roles_in(graph, node)
    if "grad_a" not in roles and roles["b"].dims[0] > 1:
        return ()
    product = _product(roles, node)
    return tuple(
        _with_gradient_of_b(graph, rewrite) for rewrite in _rewrites(product, target)
    )


def _with_gradient_of_b(graph: Graph, rewrite: Rewrite) -> Rewrite:
    """Return the rewrite of a gradient, given that of its product."""
    (node,) = graph.nodes
    roles = roles_in(graph, node)
    dtype = jax_dtype(roles["a"].dtype)

    def given(operands: Sequence[jax.Array]) -> Arrays:
        env = by_role(graph, operands)
        return env["grad_output"].astype(dtype), env["b"], env["group_sizes"]

    def gradient_of_matrices(operands: Sequence[jax.Array]) -> jax.Array:
        env = by_role(graph, operands)
        inputs = (
            to_logical(roles[role], env[role])
            for role in ("a", "grad_output", "group_sizes")
        )
        grad = gradient_of_b(*inputs, by_lax=True).astype(dtype)
        return to_stored(roles["grad_b"], grad)

    def results(operands: Sequence[jax.Array], made: Sequence[jax.Array]) -> Arrays:
        (grad_a,) = made
        found = {"grad_a": grad_a}
        if "grad_b" in roles:
            found["grad_b"] = gradient_of_matrices(operands)
        role_of = {name: role for role, name in node.outputs}
        return tuple(found[role_of[name]] for name in graph.outputs)

    more = (_GRADIENT_OF_B,) if "grad_b" in roles else ()
    return around(rewrite, given, results, notes=more)


def _product(roles: Roles, node: Node) -> Graph:
    """Return the grouped matmul that gives the gradient of a."""
    swap = (0, 2, 1)
    b = roles["b"]
    inputs: dict[str, Tensor] = {
        # The cotangent is rounded to the dtype of the operands.
        "a": replace(roles["grad_output"], name="a", dtype=b.dtype),
        "b": replace(
            b,
            name="b",
            dims=tuple(b.dims[axis] for axis in swap),
            order=tuple(swap.index(axis) for axis in b.order),
        ),
        "group_sizes": replace(roles["group_sizes"], name="group_sizes"),
    }
    output = replace(roles.get("grad_a", roles["a"]), name="output")
    return single_node_graph(
        "grouped_matmul", inputs, {"output": output}, node.attributes
    )
