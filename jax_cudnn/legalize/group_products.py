# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls as one matmul for each group; axis letters and roles as in the table.

ffi/plans/group_products.cc reads the sizes of the groups and launches the matmuls.
"""

from dataclasses import replace

from jax_cudnn.graph import Graph
from jax_cudnn.legalize.editor import GraphEditor
from jax_cudnn.legalize.layout import ELEMENTS_PER_LOAD, rounded_up
from jax_cudnn.legalize.legalization import Legal

_NOTE = "each group is a matmul of its own: the host waits for the sizes"
_ROW_MAJOR = (0, 1, 2)
# Which axes of a tensor are the contraction or the columns.
_LOADED = {
    "a": (2,),
    "b": (1, 2),
    "output": (2,),
    "grad_output": (2,),
    "grad_a": (2,),
    "grad_b": (1, 2),
}


def by_group(graph: Graph) -> Legal:
    """Return the way to run a grouped matmul or its gradient as a matmul a group."""
    editor = GraphEditor.by_role(graph)
    tensors = editor.tensors
    editor.notes.append(_NOTE)
    if "grad_output" in tensors:
        # The cotangent is rounded to the dtype of the operands.
        editor.convert("grad_output", tensors["b"].dtype)
    for name in [name for name in _LOADED if name in tensors]:
        is_matrix = name in ("b", "grad_b")
        order = tensors[name].order
        if order[0] != 0 if is_matrix else order != _ROW_MAJOR:
            editor.reorder(name, _ROW_MAJOR)
    fill_loads(editor)
    return replace(editor.finish(), waits=True)


def fill_loads(editor: GraphEditor) -> None:
    """Pad the contraction and the columns to loads of 16 bytes."""
    tensors = editor.tensors
    names = [name for name in _LOADED if name in tensors]
    unit = max(ELEMENTS_PER_LOAD[tensors[name].dtype] for name in names)
    is_padded = False
    for name in names:
        dims = tensors[name].dims
        sizes = {axis: rounded_up(dims[axis], unit) for axis in _LOADED[name]}
        sizes = {axis: size for axis, size in sizes.items() if size != dims[axis]}
        if sizes:
            is_padded = True
            editor.pad(name, sizes)
    if is_padded:
        editor.notes.append(f"matrices are padded to multiples of {unit} elements")
