# SPDX-License-Identifier: Apache-2.0
"""Rewrites grouped matmuls for launches that read the sizes of the groups.

One rewrite has cuBLASLt multiply all groups in one launch, with the sizes on the device
(ffi/blas/blas_engines.h); its handler sets rows in no group to 0. The other is one of
cuDNN's matmuls for each group. ffi/groups/group_products.cc reads the sizes for it, and
makes a plan when it first meets a number of rows; so that there are few such numbers,
they are multiples of 64. For the gradient of the matrices, zeros must follow the rows
of a group then. The handler copies a few groups. Many are moved apart by XLA before: a
copy takes the host as long as a launch.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph
from jax_cudnn.legalize.common.editor import Env, GraphEditor
from jax_cudnn.legalize.common.layout import ELEMENTS_PER_LOAD, rounded_up
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.reference.products.grouped_matmul import Groups

_NOTE = "each group is a matmul of its own: the host waits for the sizes"
_TOGETHER = "all groups are one launch of cuBLASLt's"
_MOVED = "groups are moved to start at multiples of {} rows, and back"
_ROWS_PER_STEP = 64  # kRowsPerStep in ffi/groups/group_products.cc
_MANY_GROUPS = 16
_ROW_MAJOR = (0, 1, 2)
_TRANSPOSED = (0, 2, 1)
# Operands of these dtypes are read along the sum.
ALONG_SUM = ("f8_e4m3fn", "f8_e5m2")
# Which axes of a tensor are the contraction or the columns.
_LOADED = {
    "a": (2,),
    "b": (1, 2),
    "output": (2,),
    "grad_output": (2,),
    "grad_a": (2,),
    "grad_b": (1, 2),
}


def by_group(graph: Graph) -> Rewrite:
    """Return the rewrite of a grouped matmul or its gradient as a matmul a group."""
    editor = GraphEditor.by_role(graph)
    editor.notes.append(_NOTE)
    _lay_out(editor)
    tensors = editor.tensors
    if "grad_b" in tensors and tensors["b"].dims[0] >= _MANY_GROUPS:
        _move_groups(editor)
    fill_loads(editor)
    return replace(editor.finish(), waits=True)


def all_groups(graph: Graph) -> Rewrite:
    """Return the rewrite of a grouped matmul or its gradient for cuBLASLt."""
    editor = GraphEditor.by_role(graph)
    editor.notes.append(_TOGETHER)
    _lay_out(editor)
    sizes, rows = editor.tensors["group_sizes"], editor.tensors["a"].dims[1]

    def step(env: Env) -> None:
        # Addresses follow from them.
        given = env["group_sizes"]
        groups = _within(given, rows)
        env["starts"] = jnp.reshape(groups.starts, given.shape)
        env["group_sizes"] = jnp.reshape(groups.ends - groups.starts, given.shape)

    editor.before.append(step)
    editor.put_operand(replace(sizes, name="starts"))
    fill_loads(editor)
    return editor.finish()


def _lay_out(editor: GraphEditor) -> None:
    """Have arrays of rows stored row by row, and matrices group by group."""
    tensors = editor.tensors
    if "grad_output" in tensors:
        # The cotangent is rounded to the dtype of the operands.
        editor.convert("grad_output", tensors["b"].dtype)
    for name in [name for name in _LOADED if name in tensors]:
        is_matrix = name in ("b", "grad_b")
        order = tensors[name].order
        if name == "b" and tensors[name].dtype in ALONG_SUM:
            if order != _TRANSPOSED:
                editor.notes.append("b is copied: products of f8 read it along the sum")
                editor.reorder(name, _TRANSPOSED)
        elif order[0] != 0 if is_matrix else order != _ROW_MAJOR:
            editor.reorder(name, _ROW_MAJOR)


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
    return rounded_up(rows, _ROWS_PER_STEP) + groups * _ROWS_PER_STEP


class _Places(NamedTuple):
    """The places of groups, as they are passed and once they are moved apart."""

    given: Groups
    moved: Groups

    @classmethod
    def of(cls, sizes: jax.Array, rows: int) -> "_Places":
        """Take the sizes in any shape; what goes beyond the rows is left out."""
        # Groups of (3, 70, 0) rows start at rows 0, 3 and 73. Moved apart, they have
        # (64, 128, 0) rows and start at rows 0, 64 and 192: row 3 moves to row 64.
        given = _within(sizes, rows)
        moved = -(-(given.ends - given.starts) // _ROWS_PER_STEP) * _ROWS_PER_STEP
        return cls(given, Groups.of_sizes(moved))

    @property
    def sizes(self) -> jax.Array:
        """The number of rows of each group once groups are moved apart."""
        return self.moved.ends - self.moved.starts

    def sources(self, moved_rows: int, rows: int) -> jax.Array:
        """Return which given row each moved one is; `rows` for none."""
        return _counterparts(self.moved, self.given, moved_rows, rows)

    def targets(self, rows: int, moved_rows: int) -> jax.Array:
        """Return where each given row is moved to; `moved_rows` for those in none."""
        return _counterparts(self.given, self.moved, rows, moved_rows)


def _within(sizes: jax.Array, rows: int) -> Groups:
    """Return the groups of sizes in any shape, without what goes beyond the rows."""
    sums = jnp.cumsum(jnp.clip(jnp.ravel(sizes), 0, rows), dtype=sizes.dtype)
    # A sum may be beyond its dtype once one before it is beyond the rows.
    ends = jnp.minimum(jax.lax.cummax(sums), rows)
    sizes = jnp.diff(ends, prepend=jnp.zeros((), ends.dtype))
    return Groups(ends - sizes, ends)


def _counterparts(here: Groups, there: Groups, rows: int, none: int) -> jax.Array:
    """Return which row of its group there each row here is, or `none`."""
    number = here.of_rows(rows)
    group = jnp.minimum(number, len(here.ends) - 1)
    place = jnp.arange(rows, dtype=number.dtype) - here.starts[group]
    row = there.starts[group] + place
    return jnp.where((number == group) & (row < there.ends[group]), row, none)


def _move_groups(editor: GraphEditor) -> None:
    """Give the kernel groups that start at multiples of a step; move results back."""
    tensors = editor.tensors
    _, rows, _ = tensors["a"].dims
    moved_rows = _rows_of_all(rows, tensors["b"].dims[0])
    names = [name for name in ("a", "grad_output", "grad_a") if name in tensors]
    for name in names:
        first, _, last = tensors[name].dims
        tensors[name] = replace(tensors[name], dims=(first, moved_rows, last))

    def taken(x: jax.Array, source: jax.Array) -> jax.Array:
        return x.at[:, source].get(mode="fill", fill_value=0)

    def apart(env: Env) -> None:
        places = _Places.of(env["group_sizes"], rows)
        source = places.sources(moved_rows, rows)
        for name in names[:2]:
            env[name] = taken(env[name], source)
        shape = env["group_sizes"].shape
        env["group_sizes"] = jnp.reshape(places.sizes, shape)

    def back(env: Env, results: Env) -> None:
        places = _Places.of(env["group_sizes"], rows)
        target = places.targets(rows, moved_rows)
        results["grad_a"] = taken(results["grad_a"], target)

    editor.before.append(apart)
    if "grad_a" in names:
        editor.after.append(back)
    editor.notes.append(_MOVED.format(_ROWS_PER_STEP))
