# SPDX-License-Identifier: Apache-2.0
"""Times cuDNN plans and XLA's code for a part of a graph, on random operands."""

import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn import native
from jax_cudnn.graph import Graph, Tensor, to_json
from jax_cudnn.graph.description import Role
from jax_cudnn.graph.kinds import roles_in, row_of
from jax_cudnn.graph.shapes import check_tensors
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.tuning.drawing import Tables, tables, taken

# Enough operands in turn that none is still in the cache: the largest L2 cache of the
# GPUs that cuDNN's fusions run on is 126 MB (B200).
_ROTATED_BYTES = 2**28
_MOST_SETS = 8
_SAMPLE_US = 3000.0
# XLA compiles a program for each size that it makes: so there are few.
_WORKSPACE_STEP = 2**26


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


def _drawn(
    tensor: Tensor, numbers: Tables, number: jax.Array, role: Role | None, along: int
) -> jax.Array:
    """Return a random array for a tensor, of what its role may hold.

    Counts reach to the end of their axis. Where a row has several, each has an equal
    share of the axis. ``along`` is the size of this axis, or of that which indices are
    for.
    """
    dtype = jax_dtype(tensor.dtype)
    shape = tensor.stored_shape
    parts = max(math.prod(shape[1:]), 1)
    if role is not None and role.counts:
        # One alone is cut to the axis.
        return jnp.full(shape, along // parts if parts > 1 else 2**30, dtype)
    if role is not None and role.starts_along:
        starts = jnp.arange(parts, dtype=dtype) * (along // parts)
        return jnp.broadcast_to(jnp.reshape(starts, (1, *shape[1:])), shape)
    if role is not None and role.indexes:
        places = taken(numbers.uniform, number, shape) * max(along, 1)
        return jnp.minimum(places.astype(dtype), max(along, 1) - 1)
    if jnp.issubdtype(dtype, jnp.integer):
        drawn = jnp.floor(taken(numbers.uniform, number, shape) * 9) - 4
        return drawn.astype(jnp.int32).astype(dtype)
    if dtype == np.bool_:
        return taken(numbers.uniform, number, shape) < 0.9
    if role is not None and role.is_positive:
        return (0.5 + 1.5 * taken(numbers.uniform, number, shape)).astype(dtype)
    return taken(numbers.normal, number, shape).astype(dtype)


def set_count(size: int) -> int:
    """Return how many sets of so many bytes are too large together for the cache."""
    return min(_MOST_SETS, max(2, math.ceil(_ROTATED_BYTES / max(size, 1))))


class OperandSets:
    """Sets of random operands of a graph, too large together for the cache.

    ``types`` are the shapes and dtypes of each set, ``size`` the bytes of all sets.
    `compile` may run beforehand and in another thread; each `draw` gives the same
    numbers.
    """

    def __init__(self, graph: Graph, device: Any) -> None:
        """Look at the graph; nothing is drawn."""
        self._graph = graph
        self._device = device
        tensors = (*graph.input_tensors, *graph.output_tensors)
        size = sum(_bytes(tensor) for tensor in tensors)
        count = set_count(size)
        types = [
            jax.ShapeDtypeStruct(t.stored_shape, jax_dtype(t.dtype))
            for t in graph.input_tensors
        ]
        self.types = [types] * count
        self.size = count * sum(map(_bytes, graph.input_tensors))
        self._compiled: Callable[[np.uint32, Tables], list[jax.Array]] | None = None
        self._lock = threading.Lock()

    def compile(self) -> Callable[[np.uint32, Tables], list[jax.Array]]:
        """Compile what draws a set, once."""
        with self._lock, jax.default_device(self._device):
            if self._compiled is None:
                lowered = jax.jit(self._set).lower(np.uint32(0), tables(self._device))
                self._compiled = lowered.compile()
            return self._compiled

    def draw(self) -> list[list[jax.Array]]:
        """Return the sets."""
        drawn, given = self.compile(), tables(self._device)
        return [drawn(np.uint32(i), given) for i in range(len(self.types))]

    def _set(self, number: jax.Array, numbers: Tables) -> list[jax.Array]:
        first = number * np.uint32(len(self._graph.inputs))
        roles: dict[str, Role] = {}
        along: dict[str, int] = {}
        for node in self._graph.nodes:
            row = row_of(node)
            roles_of_node = roles_in(self._graph, node)
            sizes = check_tensors(row, roles_of_node, node.attributes)
            for name_of_role, name in node.inputs:
                role = roles[name] = row.roles[name_of_role]
                letters = role.counts or role.starts_along or role.indexes or ""
                along[name] = math.prod(sizes[letter] for letter in letters)
        return [
            _drawn(t, numbers, first + np.uint32(j), roles.get(t.name), along[t.name])
            for j, t in enumerate(self._graph.input_tensors)
        ]


def draw_sets(graph: Graph, device: Any) -> list[list[jax.Array]]:
    """Return several sets of random operands, too large together for the cache."""
    return OperandSets(graph, device).draw()


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.dims) * jax_dtype(tensor.dtype).itemsize


class PlanStopwatch:
    """Times plans of one graph in memory of its own."""

    def __init__(
        self,
        graph: Graph,
        sets: Sequence[Sequence[jax.Array]],
        device: Any,
        results: Sequence[Sequence[jax.Array]] | None = None,
    ) -> None:
        """Take the operands, and arrays of one's own for the results, if there are any.

        The arrays of the results are written over.
        """
        self._json = to_json(graph)
        self._device = device
        if results is None:
            with jax.default_device(device):
                results = [results_of(graph) for _ in sets]
        # Kept alive as long as their addresses are in use.
        self._memory: list[Any] = [*sets, *results]
        jax.block_until_ready(self._memory)
        self._workspace: jax.Array | None = None
        self._buffers = [
            native.LaunchBuffers(operands=_addresses(xs), results=_addresses(ys))
            for xs, ys in zip(sets, results, strict=True)
        ]

    def time(
        self,
        plan: native.PlanInfo,
        *,
        samples: int,
        sample_us: float = _SAMPLE_US,
        enough_us: float = math.inf,
    ) -> Measurement:
        """Time one plan of the graph, by the device's events.

        One launch is all for a plan that takes longer than ``enough_us``.
        """
        workspace = self._workspace_of(plan.workspace_bytes)

        def run(
            launches: int, samples: int, buffers: list[native.LaunchBuffers]
        ) -> tuple[float, ...]:
            return native.time_plan(
                self._json,
                buffers,
                workspace=workspace.unsafe_buffer_pointer(),
                request=plan.request,
                device=self._device.local_hardware_id,
                launches=launches,
                samples=samples,
            )

        (once,) = run(1, 1, self._buffers[:1])
        if once > enough_us:
            return Measurement.of([once])
        launches = max(len(self._buffers), math.ceil(sample_us / max(once, 0.1)))
        return Measurement.of(run(launches, samples, self._buffers))

    def _workspace_of(self, size: int) -> jax.Array:
        """Return memory of that size or more, which plans take in turns."""
        if self._workspace is None or self._workspace.size < size:
            self._workspace = None  # Not both at a time.
            step = min(1 << max(size - 1, 0).bit_length(), _WORKSPACE_STEP)
            with jax.default_device(self._device):
                rounded = max(math.ceil(size / step) * step, 1)
                self._workspace = jnp.zeros(rounded, jnp.uint8).block_until_ready()
        return self._workspace


def results_of(graph: Graph) -> list[jax.Array]:
    """Return arrays for the results of a graph."""
    return [jnp.zeros(t.stored_shape, jax_dtype(t.dtype)) for t in graph.output_tensors]


def _addresses(arrays: Sequence[jax.Array]) -> tuple[int, ...]:
    return tuple(x.unsafe_buffer_pointer() for x in arrays)


def compile_over_sets(
    function: Callable[..., Any], types: Sequence[Sequence[Any]]
) -> Callable[[Sequence[Sequence[jax.Array]]], Any]:
    """Return one compiled program that runs the function on every set that it takes.

    The ``types`` are arrays, or shapes and dtypes.
    """

    def over_sets(sets: Sequence[Sequence[jax.Array]]) -> list[Any]:
        return [function(*operands) for operands in sets]

    return jax.jit(over_sets).lower(types).compile()


def call_over_sets(
    function: Callable[..., Any], sets: Sequence[Sequence[jax.Array]]
) -> Callable[[], Any]:
    """Return a call that runs the function on every set, as one compiled program."""
    return functools.partial(compile_over_sets(function, sets), sets)


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
