# SPDX-License-Identifier: Apache-2.0
"""Rewrites norms for cuDNN, which has scale, bias and all statistics or none.

cuDNN's norms have no form without scale and bias, and give all statistics or none; the
gradients give all of theirs. They take no cotangent of the statistics: what it adds to
the gradient of x is computed after the kernel. A residual is added in the kernel where
scale and bias have the dtype of x.
"""

from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from jax_cudnn.graph import DTypeName, Graph, Target, Tensor
from jax_cudnn.graph.kinds import kind_named
from jax_cudnn.graph.shapes import result_dims
from jax_cudnn.legalize.common.editor import Env, GraphEditor
from jax_cudnn.legalize.common.layout import ELEMENTS_PER_LOAD, rounded_up
from jax_cudnn.legalize.common.legalization import XLA_ADVICE, Legalization, Rewrite
from jax_cudnn.legalize.norms import groups
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored
from jax_cudnn.reference.norms import with_statistics


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a graph of one norm or its gradient."""
    del target  # What a GPU or a version lacks is a limit.
    if reasons := _reasons(graph):
        return Legalization(reasons=tuple(reasons), advice=XLA_ADVICE)
    return Legalization(candidates=candidates(graph))


def candidates(graph: Graph) -> tuple[Rewrite, ...]:
    """Return the rewrites of a norm with what follows it."""
    whole, apart = GraphEditor.of(graph), GraphEditor.of(graph)
    kind = whole.main.kind.removesuffix("_backward")
    x, residual = _role(whole, "x"), _role(whole, "residual")
    assert x is not None
    if kind == "group_norm" and x.dims[2] != 1:
        return (groups.as_layer_norm(graph),)
    rewrites = [whole]
    if residual is not None:
        _add_before(apart, residual)
        rewrites = [whole, apart] if _may_add(whole) else [apart]
    return tuple(_completed(rewrite, kind) for rewrite in rewrites)


def _completed(editor: GraphEditor, kind: str) -> Rewrite:
    """Return the norm with all that cuDNN wants of its operands and results."""
    _take_statistics_gradients(editor)  # first: its arrays are those of the call
    _keep_layout(editor, _instances_last if kind == "group_norm" else _plain)
    _complete_factors(editor)
    _complete_results(editor)
    if kind in ("batch_norm", "group_norm"):
        _use_one_dtype(editor)
    if kind == "batch_norm":
        _fill_loads(editor)
    return editor.finish()


def _may_add(editor: GraphEditor) -> bool:
    """Whether a kernel may add the residual.

    Only where scale and bias are in the dtype of x does cuDNN plan it (9.19 and 9.27,
    tests/norms/gpuless/test_norm_surface.py). The output is then in that dtype as well.
    """
    roles = ("x", "scale", "bias", "output")
    found = [t for t in (_role(editor, role) for role in roles) if t is not None]
    return len({tensor.dtype for tensor in found}) == 1


def _add_before(editor: GraphEditor, residual: Tensor) -> None:
    x, total = _role(editor, "x"), _role(editor, "total")
    assert x is not None
    assert total is not None

    def added(env: Env) -> jax.Array:
        return to_logical(x, env[x.name]) + to_logical(residual, env[residual.name])

    editor.drop(residual.name)
    editor.drop(total.name)
    editor.before.append(lambda env: env.update({x.name: to_stored(x, added(env))}))
    editor.after.append(
        lambda env, found: found.update({total.name: to_stored(total, added(env))})
    )
    editor.notes.append("the residual is added by XLA")


def _reasons(graph: Graph) -> list[str]:
    reasons: list[str] = []
    (node,) = graph.nodes
    scaled = (
        dict(node.outputs).get("output") if "scale_output" in dict(node.inputs) else ""
    )
    for tensor in graph.tensors:
        is_f8 = tensor.dtype.startswith("f8") and tensor.name == scaled
        if tensor.dtype not in ("bf16", "f16", "f32") and not is_f8:
            reasons.append(
                f"{tensor.name} is {tensor.dtype}: cuDNN's norms take bf16, f16 and f32"
            )
            break
    return reasons


def _role(editor: GraphEditor, role: str) -> Tensor | None:
    """Return the tensor that the norm has in a role."""
    main = editor.main
    name = dict((*main.inputs, *main.outputs)).get(role)
    return None if name is None else editor.tensors[name]


def _keep_layout(
    editor: GraphEditor, wanted: Callable[[Tensor], tuple[int, ...]]
) -> None:
    """Store operands and results with their axes in the order that cuDNN takes."""
    for name, tensor in list(editor.tensors.items()):
        order = wanted(tensor)
        if tensor.order != order and name in (*editor.inputs, *editor.outputs):
            editor.reorder(name, order)


def _plain(tensor: Tensor) -> tuple[int, ...]:
    return tuple(range(len(tensor.dims)))


def _instances_last(tensor: Tensor) -> tuple[int, ...]:
    """Return the order of an image with its channels first or last, as it is stored."""
    first, *others = (axis for axis in tensor.order if axis != 2)
    return (0, 3, 1, 2) if (first, *others) == (0, 3, 1) else (0, 1, 2, 3)


def _use_one_dtype(editor: GraphEditor) -> None:
    """Have x, the output and their gradients in one dtype, which holds them all.

    cuDNN has no plan for two in a batch norm or an instance norm (9.19 and 9.27).
    """
    roles = ("x", "output", "grad_output", "grad_x")
    found = [t for t in (_role(editor, role) for role in roles) if t is not None]
    dtype = _widest([tensor.dtype for tensor in found])
    for tensor in found:
        if tensor.dtype != dtype:
            editor.convert(tensor.name, dtype)


def _fill_loads(editor: GraphEditor) -> None:
    """Pad channels to full loads: "c % elements_per_ldg" in the reasons of 9.19."""
    x = _role(editor, "x")
    assert x is not None
    channels = rounded_up(x.dims[1], ELEMENTS_PER_LOAD[x.dtype])
    for name, tensor in list(editor.tensors.items()):
        if tensor.dims[1] != channels:
            editor.pad(name, {1: channels})


def _complete_factors(editor: GraphEditor) -> None:
    """Give scale and bias, in one dtype: ones and zeros where there are none."""
    main = editor.main
    is_backward = main.kind.endswith("_backward")
    roles = ("scale", "grad_scale", "grad_bias") if is_backward else ("scale", "bias")
    found = [t for t in (_role(editor, role) for role in roles) if t is not None]
    x = _role(editor, "x")
    assert x is not None
    dtype = _widest([t.dtype for t in found]) if found else x.dtype
    if not is_backward and main.kind != "rms_norm":
        _give(editor, "bias", dtype, 0)
    _give(editor, "scale", dtype, 1)
    for role in roles:
        tensor = _role(editor, role)
        if tensor is not None and tensor.dtype != dtype:
            editor.convert(tensor.name, dtype)


def _give(editor: GraphEditor, role: str, dtype: DTypeName, number: int) -> None:
    """Give the norm a scale or bias that changes nothing, if it has none."""
    if _role(editor, role) is not None:
        return
    dims = _factor_dims(editor)
    editor.put_operand(
        Tensor(name=role, dtype=dtype, dims=dims, order=tuple(range(len(dims))))
    )
    full = editor.tensors[role]
    editor.before.append(
        lambda env: env.update(
            {role: jnp.full(full.stored_shape, number, jax_dtype(dtype))}
        )
    )


def _factor_dims(editor: GraphEditor) -> tuple[int, ...]:
    """Return the dims of scale and bias: those of x along their letters, else 1."""
    main = editor.main
    row = kind_named(main.kind).row
    x = _role(editor, "x")
    assert x is not None
    letters = [axis.letters for axis in row.roles["x"].axes]
    sizes = dict(zip(letters, x.dims, strict=True))
    return tuple(sizes.get(axis.letters, 1) for axis in row.roles["scale"].axes)


def _widest(dtypes: Sequence[DTypeName]) -> DTypeName:
    """Return the dtype that holds all of them."""
    return dtypes[0] if len(set(dtypes)) == 1 else "f32"


def _complete_results(editor: GraphEditor) -> None:
    """Ask for all statistics where one is asked for, and for all gradients."""
    main = editor.main
    row = kind_named(main.kind).row
    roles = {role: editor.tensors[n] for role, n in (*main.inputs, *main.outputs)}
    statistics = [role.name for role in row.outputs if role.is_sum]
    if main.kind.endswith("_backward"):
        names = ["grad_x", "grad_scale"]
        names += [] if main.kind == "rms_norm_backward" else ["grad_bias"]
    else:
        is_asked = main.kind == "batch_norm" or any(s in roles for s in statistics)
        names = statistics if is_asked else []
    for role in names:
        if role in roles:
            continue
        like = "x" if role == "grad_x" else "scale"
        dims = result_dims(row, role, roles, main.attributes)
        dtype = "f32" if role in statistics else roles[like].dtype
        # cuDNN wants x and its gradient stored alike, also where nobody reads it.
        order = roles["x"].order if role == "grad_x" else tuple(range(len(dims)))
        editor.put_result(
            Tensor(name=role, dtype=cast("DTypeName", dtype), dims=dims, order=order)
        )


def _take_statistics_gradients(editor: GraphEditor) -> None:
    """Take the cotangents of the statistics to where the kernel is done."""
    kind = editor.main.kind.removesuffix("_backward")
    taken = {
        role: name
        for role, name in editor.main.inputs
        if role in ("grad_mean", "grad_rstd")
    }
    if not taken:
        return
    kept = {role: name for role, name in editor.main.inputs if role in _READ}
    names = {**taken, **kept}
    tensors = {role: editor.tensors[name] for role, name in names.items()}
    total = _role(editor, "grad_x")
    for name in taken.values():
        editor.drop(name)
    if total is None:
        return

    def after(env: Env, found: Env) -> None:
        inputs = {role: to_logical(tensors[role], env[n]) for role, n in names.items()}
        grad_x = to_logical(total, found[total.name])
        found[total.name] = to_stored(total, with_statistics(kind, grad_x, inputs))

    editor.after.append(after)
    editor.notes.append("the gradient of the statistics is added by XLA")


_READ = ("x", "mean", "rstd")
