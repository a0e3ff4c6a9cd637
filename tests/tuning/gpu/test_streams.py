# SPDX-License-Identifier: Apache-2.0
"""Tests that every plan launches its kernels on the stream that it is given.

A kernel on CUDA's default stream would not wait for its operands, and nobody would wait
for it. It would also run where a launch is captured only.
"""

import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import native
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.reference.dtypes import jax_dtype
from tests.norms.problems import Problem, backward_of

pytestmark = pytest.mark.gpu

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@functools.cache
def _cudart() -> ctypes.CDLL:
    """Return the CUDA runtime that this process has loaded."""
    maps = Path("/proc/self/maps").read_text()
    paths = set(re.findall(r"/\S*libcudart\.so\S*", maps))
    assert paths
    return ctypes.CDLL(sorted(paths)[0])


@contextlib.contextmanager
def _default_stream_refused() -> Generator[None]:
    """Have CUDA refuse launches on the default stream within this context.

    It would wait for a blocking stream, and cannot while that one is captured.
    """
    cuda = _cudart()
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    jax.effects_barrier()
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), 0) == 0
    assert cuda.cudaStreamBeginCapture(stream, _RELAXED) == 0
    try:
        yield
    finally:
        cuda.cudaStreamEndCapture(stream, ctypes.byref(graph))
        if graph:
            cuda.cudaGraphDestroy(graph)
        cuda.cudaStreamDestroy(stream)
        cuda.cudaGetLastError()


def test_the_default_stream_is_refused_within() -> None:
    x = jnp.zeros(1024, jnp.uint8).block_until_ready()
    pointer = ctypes.c_void_p(x.unsafe_buffer_pointer())
    cuda = _cudart()
    assert cuda.cudaMemsetAsync(pointer, 0, 4, None) == 0
    with _default_stream_refused():
        assert cuda.cudaMemsetAsync(pointer, 0, 4, None) != 0
    assert cuda.cudaMemsetAsync(pointer, 0, 4, None) == 0


def _with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(*arrays: jax.Array) -> Any:
        output, pull = jax.vjp(function, *arrays)
        return output, pull(output)

    return run


def _shapes(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def _forced(function: Any, **options: Any) -> Any:
    return functools.partial(function, implementation="cudnn", **options)


_IMAGE = (4, 30, 30, 64)
_CALLS: dict[str, tuple[Any, list[jax.ShapeDtypeStruct]]] = {
    "sdpa": (_forced(jax_cudnn.sdpa), _shapes(*[(2, 256, 4, 64)] * 3)),
    "sdpa_bias": (
        lambda q, k, v, b: jax_cudnn.sdpa(q, k, v, b, implementation="cudnn"),
        _shapes(*[(2, 256, 4, 64)] * 3, (1, 4, 256, 256)),
    ),
    "conv": (
        lambda x, w, b: jax_cudnn.conv(
            x,
            w,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            bias=b,
            activation="silu",
            implementation="cudnn",
        ),
        _shapes(_IMAGE, (3, 3, 64, 128), (128,)),
    ),
    "matmul": (
        lambda a, b, c: jax_cudnn.matmul(
            a, b, bias=c, activation="gelu", implementation="cudnn"
        ),
        _shapes((256, 512), (512, 384), (384,)),
    ),
    "max_pool": (
        lambda x: jax_cudnn.max_pool(x, (2, 2), (2, 2), implementation="cudnn"),
        _shapes(_IMAGE),
    ),
    "avg_pool": (
        lambda x: jax_cudnn.avg_pool(x, (2, 2), (2, 2), implementation="cudnn"),
        _shapes(_IMAGE),
    ),
}


def _check(graph: Graph) -> int:
    """Launch every plan of a graph, and return how many there are."""
    count = 0
    for part in partition(graph):
        for rewrite in legalize(part, native.device_target(0)).candidates:
            text = to_json(rewrite.graph)
            operands, results = (
                [jnp.zeros(x.stored_shape, jax_dtype(x.dtype)) for x in tensors]
                for tensors in (
                    rewrite.graph.input_tensors,
                    rewrite.graph.output_tensors,
                )
            )
            buffers = native.LaunchBuffers(
                operands=tuple(x.unsafe_buffer_pointer() for x in operands),
                results=tuple(x.unsafe_buffer_pointer() for x in results),
            )
            try:
                listed = native.candidates(text)
            except jax_cudnn.UnsupportedError:
                continue  # another way of writing the part has plans
            for candidate in listed:
                if candidate.refusal:
                    continue
                try:
                    plan = native.plan(text, request=candidate.request)
                except jax_cudnn.UnsupportedError:
                    continue  # it is listed, and does not build
                workspace = jnp.zeros(max(plan.workspace_bytes, 1), jnp.uint8)
                jax.block_until_ready((operands, results, workspace))
                with _default_stream_refused():
                    native.time_plan(
                        text,
                        [buffers],
                        request=candidate.request,
                        workspace=workspace.unsafe_buffer_pointer(),
                    )
                count += 1
    return count


@pytest.mark.parametrize("name", _CALLS)
def test_kernels_of_calls_stay_on_their_stream(name: str) -> None:
    function, shapes = _CALLS[name]
    found = traced_graphs(_with_gradients(function), *shapes)
    assert sum(_check(each.graph) for each in found) > 0


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        ("adaptive_layer_norm", (4, 128, 1024)),
        ("batch_norm", (4096, 64)),
        ("group_norm", (4, 64, 1, 900)),
        ("group_norm", (4, 8, 8, 64)),
        ("layer_norm", (2048, 1024)),
        ("rms_norm", (2048, 1024)),
    ],
    ids=str,
)
def test_kernels_of_norms_stay_on_their_stream(
    kind: str, dims: tuple[int, ...], dtype: str
) -> None:
    graph = Problem(kind=kind, dtype=dtype, dims=dims, with_statistics=True).graph
    nonzero = [name == "output" for name in graph.outputs]
    for each in (graph, backward_of(graph, nonzero=nonzero)):
        assert _check(each) > 0
