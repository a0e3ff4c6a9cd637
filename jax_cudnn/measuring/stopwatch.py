# SPDX-License-Identifier: Apache-2.0
"""Times cuDNN plans and XLA's code for a part of a graph, on random operands."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn import native
from jax_cudnn.graph import Graph, Tensor, kind_named, to_json
from jax_cudnn.graph.description import Role
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.shapes import check_tensors
from jax_cudnn.reference.dtypes import jax_dtype

# Enough operands in turn that none is still in the cache: the largest L2 cache of the
# GPUs that cuDNN's fusions run on is 126 MB (B200).
_ROTATED_BYTES = 2**28
_MOST_SETS = 8
_SAMPLE_US = 3000.0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Microseconds a call: the median of some samples and their range."""

    median_us: float
    low_us: float
    high_us: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Measurement":
        """Summarise samples."""
        return cls(
            median_us=statistics.median(samples),
            low_us=min(samples),
            high_us=max(samples),
        )


def draw(
    tensor: Tensor,
    seed: int,
    device: Any,
    *,
    role: Role | None = None,
    along: int = 0,
) -> jax.Array:
    """Return a random array for a tensor, of what its role may hold.

    Counts reach to the end of their axis. Where a row has several, each has an equal
    share of the axis. ``along`` is the size of this axis, or of that which indices are
    for.
    """
    dtype = jax_dtype(tensor.dtype)
    with jax.default_device(device):
        key = jax.random.key(seed)
        shape = tensor.stored_shape
        parts = max(math.prod(shape[1:]), 1)
        if role is not None and role.counts:
            # One alone is cut to the axis.
            return jnp.full(shape, along // parts if parts > 1 else 2**30, dtype)
        if role is not None and role.starts_along:
            starts = jnp.arange(parts, dtype=dtype) * (along // parts)
            return jnp.broadcast_to(jnp.reshape(starts, (1, *shape[1:])), shape)
        if role is not None and role.indexes:
            return jax.random.randint(key, shape, 0, max(along, 1), dtype)
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.randint(key, shape, -4, 5, jnp.int32).astype(dtype)
        if dtype == np.bool_:
            return jax.random.bernoulli(key, 0.9, shape)
        if role is not None and role.is_positive:
            return jax.random.uniform(key, shape, jnp.float32, 0.5, 2.0).astype(dtype)
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def draw_sets(graph: Graph, device: Any) -> list[list[jax.Array]]:
    """Return several sets of random operands, too large together for the cache."""
    tensors = (*graph.input_tensors, *graph.output_tensors)
    size = sum(_bytes(tensor) for tensor in tensors)
    count = min(_MOST_SETS, max(2, math.ceil(_ROTATED_BYTES / max(size, 1))))
    roles: dict[str, Role] = {}
    along: dict[str, int] = {}
    for node in graph.nodes:
        row = kind_named(node.kind).row
        sizes = check_tensors(row, roles_in(graph, node), node.attributes)
        for name_of_role, name in node.inputs:
            role = roles[name] = row.roles[name_of_role]
            letters = role.counts or role.starts_along or role.indexes or ""
            along[name] = math.prod(sizes[letter] for letter in letters)
    return [
        [
            draw(t, 100 * i + j, device, role=roles.get(t.name), along=along[t.name])
            for j, t in enumerate(graph.input_tensors)
        ]
        for i in range(count)
    ]


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.dims) * jax_dtype(tensor.dtype).itemsize


class PlanStopwatch:
    """Times plans of one graph in memory of its own."""

    def __init__(
        self, graph: Graph, sets: Sequence[Sequence[jax.Array]], device: Any
    ) -> None:
        """Take the operands, and memory for the results."""
        self._json = to_json(graph)
        self._device = device
        with jax.default_device(device):
            results = [
                [
                    jnp.zeros(t.stored_shape, jax_dtype(t.dtype))
                    for t in graph.output_tensors
                ]
                for _ in sets
            ]
        # Kept alive as long as their addresses are in use.
        self._memory: list[Any] = [*sets, *results]
        jax.block_until_ready(self._memory)
        self._buffers = [
            native.LaunchBuffers(operands=_addresses(xs), results=_addresses(ys))
            for xs, ys in zip(sets, results, strict=True)
        ]

    def time(
        self, plan: native.PlanInfo, *, samples: int, sample_us: float = _SAMPLE_US
    ) -> Measurement:
        """Time one plan of the graph, by the device's events."""
        with jax.default_device(self._device):
            workspace = jnp.zeros(max(plan.workspace_bytes, 1), jnp.uint8)
        workspace.block_until_ready()

        def run(launches: int, samples: int) -> tuple[float, ...]:
            return native.time_plan(
                self._json,
                self._buffers,
                workspace=workspace.unsafe_buffer_pointer(),
                request=plan.request,
                device=self._device.local_hardware_id,
                launches=launches,
                samples=samples,
            )

        (once,) = run(len(self._buffers), 1)
        launches = max(len(self._buffers), math.ceil(sample_us / max(once, 0.1)))
        return Measurement.of(run(launches, samples))


def _addresses(arrays: Sequence[jax.Array]) -> tuple[int, ...]:
    return tuple(x.unsafe_buffer_pointer() for x in arrays)


def compile_over_sets(
    function: Callable[..., Any], sets: Sequence[Sequence[jax.Array]]
) -> Callable[[], Any]:
    """Return a call that runs the function on every set, as one compiled program."""

    def over_sets(sets: Sequence[Sequence[jax.Array]]) -> list[Any]:
        return [function(*operands) for operands in sets]

    compiled = jax.jit(over_sets).lower(sets).compile()
    return lambda: compiled(sets)


def time_calls(
    call: Callable[[], Any], count: int, *, samples: int, sample_us: float = _SAMPLE_US
) -> Measurement:
    """Time a call that does `count` things, by the host's clock over many calls."""

    def run(calls: int) -> float:
        result = None
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / (calls * count) * 1e6

    run(2)
    once = run(2)
    calls = max(2, math.ceil(2 * sample_us / (once * count)))
    return Measurement.of([run(calls) for _ in range(samples)])
