# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.parallel.sharded_sdpa`: attention of whole arrays over a mesh."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    reshard,
)
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.options import AttentionCall, SdpaOptions
from jax_cudnn.ops.attention.score_mod import Positions
from jax_cudnn.ops.attention.visibility.masks import Mask
from jax_cudnn.ops.common.arguments import as_operand, describe, in_front
from jax_cudnn.ops.common.meshes import (
    AxisName,
    by_operands,
    check_axes,
    check_name,
    device_count,
    mesh_of,
    typed_part,
)
from jax_cudnn.ops.common.signatures import takes
from jax_cudnn.parallel.arguments import Layout, check_arguments
from jax_cudnn.parallel.attention import attend_shards, check_method
from jax_cudnn.parallel.order import all_positions, check_order, natural
from jax_cudnn.parallel.problem import SCORES, SEQUENCES, Method, Problem
from jax_cudnn.parallel.schedule import Order

_OP = "parallel.sharded_sdpa"


@overload
def sharded_sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    axis: AxisName,
    mesh: Mesh | AbstractMesh | None = ...,
    batch_axis: AxisName | None = ...,
    head_axis: AxisName | None = ...,
    method: Method = ...,
    order: Order = ...,
    return_residual: Literal[False] = ...,
    **options: Unpack[SdpaOptions],
) -> jax.Array: ...


@overload
def sharded_sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    axis: AxisName,
    mesh: Mesh | AbstractMesh | None = ...,
    batch_axis: AxisName | None = ...,
    head_axis: AxisName | None = ...,
    method: Method = ...,
    order: Order = ...,
    return_residual: Literal[True],
    **options: Unpack[SdpaOptions],
) -> tuple[jax.Array, jax.Array]: ...


@takes(AttentionCall, SdpaOptions)
def sharded_sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis: AxisName,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: AxisName | None = None,
    head_axis: AxisName | None = None,
    method: Method = "ring",
    order: Order = "contiguous",
    return_residual: bool = False,
    **options: Unpack[SdpaOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return :func:`jax_cudnn.sdpa` of arrays that are sharded along the sequence.

    The whole arrays go in and come out, inside or outside of :func:`jax.jit`. In
    between, :func:`jax_cudnn.parallel.sdpa` runs under :func:`jax.shard_map`; it says
    how the methods differ. Arrays that are sharded otherwise are moved first.

    Axis letters as in :func:`jax_cudnn.sdpa`: b batch, s query length, t key length, h
    query heads, k key heads, d head size, e value head size.

    Args:
      query: (b, s, h, d) or (s, h, d); s a multiple of the devices along `axis`.
      key: (b, t, k, d) or (t, k, d), of query's dtype; t a multiple as well.
      value: (b, t, k, e) or (t, k, e), of query's dtype.
      bias: broadcasts to (b, h, s, t); sharded along s, with all of t on each device.
      mask: bool, broadcasts to (b, h, s, t); sharded like `bias`. Or one of
        :mod:`jax_cudnn.masks`, with arrays of whole sequences. Segments, and the
        arrays of :class:`~jax_cudnn.masks.Where` and
        :class:`~jax_cudnn.masks.Additive`, are in the order of the tokens.
      axis: the mesh axis, or several, that the sequence is sharded over.
      mesh: the mesh. Default None: that of :func:`jax.set_mesh`.
      batch_axis: the mesh axis, or several, that b is sharded over. Default None: b is
        not sharded.
      head_axis: likewise for h and k, both of which must be multiples.
      method: "ring" (default), "all_gather" or "all_to_all".
      order: the order of the tokens in all operands: "contiguous" (default), or
        "zigzag" or "striped" where :func:`to_zigzag` or :func:`to_striped` has ordered
        them, for as many devices.
      sinks: (h,), sharded like h.
      dropout_rate: as in :func:`jax_cudnn.sdpa`, with the same weights dropped.
      dropout_key: as in :func:`jax_cudnn.sdpa`.
      score_mod: as in :func:`jax_cudnn.sdpa`; batch, head and positions are those of
        the whole arrays. What it adds for each query and key is an array like `bias`.
      implementation: for each block of queries and keys.
      plan: for each block of queries and keys.
      **options: as in :class:`AttentionCall`.
      return_residual: whether to return the log-sum-exp as well.

    Returns:
      (b, s, h, e) or (s, h, e), sharded as query is meant to be. With
      `return_residual`, a pair of this array and the log-sum-exp (b, s, h) or (s, h),
      as in :func:`jax_cudnn.parallel.sdpa`.

    Raises:
      ValueError: no mesh; an axis that the mesh lacks, or that is named twice; sizes
        that are not multiples of their axes; and as :func:`jax_cudnn.parallel.sdpa`.
      TypeError: what is no mesh or no name of an axis; and as
        :func:`jax_cudnn.parallel.sdpa`.
      UnsupportedError: as :func:`jax_cudnn.sdpa`, for a block.
      LibraryError: as :func:`jax_cudnn.sdpa`.

    Example:
      >>> import jax
      >>> from jax.sharding import AxisType
      >>> from jax_cudnn import parallel
      >>> mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,))
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 6, 4, 8))
      >>> parallel.sharded_sdpa(q, k, v, mesh=mesh, axis="seq", is_causal=True).shape
      (2, 6, 4, 8)
    """
    axes = _Axes(
        mesh=mesh_of(_OP, mesh), sequence=axis, batch=batch_axis, heads=head_axis
    )
    axes.check_names()
    check_method(_OP, method)
    check_order(_OP, order)
    tokens = {"query": query, "key": key, "value": value}
    axes.check_sizes({**tokens, "bias": bias, "mask": mask})
    checked = check_arguments(
        _OP,
        tokens,
        AttentionCall(bias=bias, mask=mask, **options),
        _layout(axis, axes.count, method, order),
        return_residual=return_residual,
    )
    program = _program(
        axes.mesh,
        tuple(
            (role, axes.spec(role, x, has_batch=checked.has_batch))
            for role, x in checked.arrays.items()
        ),
        checked.problem,
    )
    results = program(*checked.arrays.values())
    output, *residual = results if checked.has_batch else [x[0] for x in results]
    return (output, residual[0]) if residual else output


def _layout(axis: AxisName, count: int, method: Method, order: Order) -> Layout:
    """Return the layout of whole arrays that devices share."""

    def whole(x: jax.Array) -> jax.Array:
        return natural(x, count, order)

    def positions(s: int, t: int) -> Positions:
        if order == "contiguous":
            return None, None
        rows, columns = (jnp.asarray(all_positions(count, x, order)) for x in (s, t))
        return rows, columns

    return Layout(
        axis_name=axis,
        method=method,
        order=order,
        count=count,
        shards=1,
        whole=whole,
        positions=positions,
    )


# One for each way to call it, so that calls outside of jit compile once.
@functools.lru_cache(maxsize=256)
def _program(
    mesh: Mesh | AbstractMesh,
    specs: tuple[tuple[str, PartitionSpec], ...],
    problem: Problem,
) -> Any:
    query = dict(specs)["query"]

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip((name for name, _ in specs), arrays, strict=True))
        return attend_shards(_OP, given, problem)

    in_specs = tuple(spec for _, spec in specs)
    # Without the head size, which the log-sum-exp lacks.
    out = PartitionSpec(*query[:-1])
    sharded = jax.shard_map(
        by_operands(mesh, run),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(out, out) if problem.with_lse else (out,),
    )
    if AxisType.Explicit not in mesh.axis_types:
        return jax.jit(sharded)

    def moved(*arrays: jax.Array) -> Any:
        shardings = (NamedSharding(mesh, typed_part(mesh, spec)) for spec in in_specs)
        return sharded(*map(reshard, arrays, shardings))

    return jax.jit(moved)


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """The axes of a mesh that shard each axis of the operands."""

    mesh: Mesh | AbstractMesh
    sequence: AxisName
    batch: AxisName | None
    heads: AxisName | None

    def check_names(self) -> None:
        """Raise unless each name is an axis of the mesh, and none is used twice."""
        check_name(_OP, "axis", self.sequence)
        check_axes(
            _OP,
            self.mesh,
            "sequence, batch and heads",
            axis=self.sequence,
            batch_axis=self.batch,
            head_axis=self.heads,
        )

    @property
    def count(self) -> int:
        """The number of devices that share a sequence."""
        return device_count(self.mesh, self.sequence)

    def check_sizes(self, given: Mapping[str, Any]) -> None:
        """Raise unless the sizes of tokens and scores are multiples of the devices."""
        for name in ("query", "key", "value"):
            x = as_operand(_OP, name, given[name])
            if x.ndim not in (3, 4):
                raise ValueError(
                    f"{_OP}: {name} is {describe(x)}. It must be (batch, length, "
                    "heads, head size) or (length, heads, head size)."
                )
            axes = (self.batch, self.sequence, self.heads, None)[-x.ndim :]
            self._check_sizes(name, x, axes)
        for name in ("bias", "mask"):
            scores = given[name]
            if scores is None or isinstance(scores, Mask):
                continue
            x = as_operand(_OP, name, scores)
            if x.ndim > 4:
                raise ValueError(
                    f"{_OP}: {name} is {describe(x)}. It must broadcast to (batch, "
                    "heads, query length, key length)."
                )
            shape = in_front(x.shape, 4)
            axes = self._of_scores(shape)
            self._check_sizes(name, jnp.reshape(x, shape), axes)

    def spec(self, role: str, x: jax.Array, *, has_batch: bool) -> PartitionSpec:
        """Return how an array of `check_arguments` is sharded."""
        batch = self.batch if has_batch and x.shape[0] != 1 else None
        if role in ("query", "key", "value"):
            return PartitionSpec(batch, self.sequence, self.heads, None)
        if role == "sinks":
            return PartitionSpec(self.heads)
        if role in (*SCORES, "mask"):
            return PartitionSpec(*self._of_scores(x.shape))
        if x.ndim == 4:
            # Dropout's offsets and tables of blocks have heads, lengths have none.
            has_heads = role not in SEQUENCES and x.shape[1] != 1
            return PartitionSpec(batch, self.heads if has_heads else None)
        return PartitionSpec(batch)

    def _of_scores(self, shape: tuple[int, ...]) -> tuple[AxisName | None, ...]:
        """Return how a bias or mask is sharded, of which axes of size 1 are not."""
        axes = (self.batch, self.heads, self.sequence, None)
        return tuple(
            None if size == 1 else axis for size, axis in zip(shape, axes, strict=True)
        )

    def _check_sizes(
        self, name: str, x: jax.Array, axes: tuple[AxisName | None, ...]
    ) -> None:
        for number, axis in enumerate(axes):
            if axis is None:
                continue
            count = device_count(self.mesh, axis)
            if x.shape[number] % count:
                what = "Pad the sequence, and pass its length, or use"
                if axis != self.sequence:
                    what = "Use"
                raise ValueError(
                    f"{_OP}: {name} is {describe(x)}. Its axis {number} of size "
                    f"{x.shape[number]} is sharded over {axis!r}, which has {count} "
                    f"devices, and must be a multiple of that. {what} an axis of fewer "
                    "devices."
                )
