# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls as one matmul for each group; axis letters and roles as in the table.

ffi/plans/group_products.cc reads the sizes of the groups and launches the matmuls. It
makes a plan when it first meets a number of rows. So that there are few such numbers,
groups are moved apart before: each starts at a multiple of 64 rows, and zeros follow
it. Zeros add nothing to the gradient of the matrices, and their own rows are left out
of the result.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph
from jax_cudnn.legalize.editor import Env, GraphEditor
from jax_cudnn.legalize.layout import ELEMENTS_PER_LOAD, rounded_up
from jax_cudnn.legalize.legalization import Legal

ROWS_PER_STEP = 64

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
_NOTES = (
    "each group is a matmul of its own: the host waits for the sizes",
    f"groups are moved to start at multiples of {ROWS_PER_STEP} rows, and back",
)


def by_group(graph: Graph) -> Legal:
    """Return the way to run a grouped matmul or its gradient as a matmul a group."""
    editor = GraphEditor.by_role(graph)
    tensors = editor.tensors
    if "grad_output" in tensors:
        # The cotangent is rounded to the dtype of the operands.
        editor.convert("grad_output", tensors["b"].dtype)
    rows, groups = tensors["a"].dims[1], tensors["b"].dims[0]
    for name in ("a", "grad_output", "output", "grad_a"):
        if name in tensors:
            if tensors[name].order != _ROW_MAJOR:
                editor.reorder(name, _ROW_MAJOR)
            _move_groups(editor, name, _rows_of_all(rows, groups))
    for name in ("b", "grad_b"):
        if name in tensors and tensors[name].order[0] != 0:
            editor.reorder(name, _ROW_MAJOR)
    _fill_sizes(editor, rows)
    fill_loads(editor)
    editor.notes.extend(_NOTES)
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


def _rows_of_all(rows: int, groups: int) -> int:
    """Return how many rows groups have at most that start at multiples of a step."""
    return rounded_up(rows, ROWS_PER_STEP) + groups * ROWS_PER_STEP


class _Places(NamedTuple):
    """Where groups begin and end, as they are given and as they are moved apart."""

    sizes: jax.Array
    ends: jax.Array
    moved_sizes: jax.Array
    moved_ends: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, rows: int) -> "_Places":
        """Take the sizes in any shape; what goes beyond the rows is left out."""
        sums = jnp.cumsum(jnp.clip(jnp.ravel(sizes), 0, rows), dtype=sizes.dtype)
        # A sum may be beyond its dtype once one before it is beyond the rows.
        ends = jnp.minimum(jax.lax.cummax(sums), rows)
        sizes = jnp.diff(ends, prepend=jnp.zeros((), ends.dtype))
        moved = -(-sizes // ROWS_PER_STEP) * ROWS_PER_STEP
        return cls(sizes, ends, moved, jnp.cumsum(moved, dtype=sizes.dtype))

    def sources(self, moved_rows: int, rows: int) -> jax.Array:
        """Return which given row each moved one is; `rows` for none."""
        row = jnp.arange(moved_rows, dtype=self.ends.dtype)
        group, is_in_one = _group_of(row, self.moved_ends)
        place = row - (self.moved_ends - self.moved_sizes)[group]
        source = (self.ends - self.sizes)[group] + place
        return jnp.where(is_in_one & (place < self.sizes[group]), source, rows)

    def targets(self, rows: int, moved_rows: int) -> jax.Array:
        """Return where each given row is moved to; `moved_rows` for those in none."""
        row = jnp.arange(rows, dtype=self.ends.dtype)
        group, is_in_one = _group_of(row, self.ends)
        place = row - (self.ends - self.sizes)[group]
        target = (self.moved_ends - self.moved_sizes)[group] + place
        return jnp.where(is_in_one, target, moved_rows)


def _group_of(row: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the group of each row, and whether there is one."""
    group = jnp.sum(ends[None] <= row[:, None], axis=1, dtype=row.dtype)
    return jnp.minimum(group, len(ends) - 1), group < len(ends)


def _move_groups(editor: GraphEditor, name: str, moved_rows: int) -> None:
    """Give the kernel an array of rows whose groups are moved apart; move them back."""
    tensor = editor.tensors[name]
    rows = tensor.dims[1]
    editor.tensors[name] = replace(
        tensor, dims=(tensor.dims[0], moved_rows, tensor.dims[2])
    )

    def taken(x: jax.Array, source: jax.Array) -> jax.Array:
        return x.at[:, source].get(mode="fill", fill_value=0)

    if name in editor.inputs:

        def apart(env: Env) -> None:
            places = _Places.of(env["group_sizes"], rows)
            env[name] = taken(env[name], places.sources(moved_rows, rows))

        editor.before.append(apart)
    else:

        def back(env: Env, results: Env) -> None:
            places = _Places.of(env["group_sizes"], rows)
            target = places.targets(rows, moved_rows)
            results[name] = taken(results[name], target)

        editor.after.append(back)


def _fill_sizes(editor: GraphEditor, rows: int) -> None:
    """Give the kernel the sizes of the groups that were moved, after the others."""

    def step(env: Env) -> None:
        places = _Places.of(env["group_sizes"], rows)
        shape = env["group_sizes"].shape
        env["group_sizes"] = jnp.reshape(places.moved_sizes, shape)

    editor.before.append(step)
