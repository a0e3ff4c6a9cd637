# SPDX-License-Identifier: Apache-2.0
"""Tests that a program runs only on the target it was lowered for."""

import pytest

from jax_cudnn import GraphError, LibraryError
from jax_cudnn.native._extension import extension
from tests.native.processes import run_python

pytestmark = pytest.mark.once

_HERE = (90, 91900)


def _check(sm_version: int, cudnn_version: int) -> None:
    extension().testing.check_program_target(sm_version, cudnn_version, *_HERE)


def test_a_program_runs_on_what_it_was_lowered_for() -> None:
    _check(90, 91900)


def test_a_program_that_was_lowered_for_no_gpu_runs_everywhere() -> None:
    _check(0, 0)


@pytest.mark.parametrize(
    ("lowered_for", "text"),
    [
        ((80, 91900), "sm_80 with cuDNN 9.19.0"),
        ((120, 91900), "sm_120 with cuDNN 9.19.0"),
        ((90, 92700), "sm_90 with cuDNN 9.27.0"),
        ((90, 91901), "sm_90 with cuDNN 9.19.1"),
        ((89, 91800), "sm_89 with cuDNN 9.18.0"),
    ],
)
def test_elsewhere_it_is_refused(lowered_for: tuple[int, int], text: str) -> None:
    with pytest.raises(LibraryError) as caught:
        _check(*lowered_for)
    assert str(caught.value) == (
        f"the program was lowered for {text}, and this is sm_90 with cuDNN 9.19.0. "
        "Compile it here, or lower it for this GPU within plans.using(device=...) "
        "where cuDNN is of this version."
    )


@pytest.mark.parametrize(
    ("sm_version", "cudnn_version"),
    [(90, 0), (0, 91900), (-90, 91900), (90, -1), (1 << 31, 91900), (90, 1 << 32)],
)
def test_numbers_that_no_lowering_writes_are_refused(
    sm_version: int, cudnn_version: int
) -> None:
    with pytest.raises(GraphError) as caught:
        _check(sm_version, cudnn_version)
    assert str(caught.value) == (
        f"sm_version={sm_version} with cudnn_version={cudnn_version} is no target: "
        "both are positive, or 0 where no GPU was known. Lower the program again."
    )


# XLA runs Instantiate for the CPU as well, once its backend has started, and then has
# no stream for Execute. Each line tells how far a program with other attributes comes.
_INSTANTIATE = """
import jax, jax.numpy as jnp, numpy as np
from jax_cudnn import native, sdpa
from jax_cudnn.graph import to_json
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.native._extension import extension

query = jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.bfloat16)
((graph, _, _),) = traced_graphs(sdpa, query, query, query)
operands, results = (
    [jax.ShapeDtypeStruct(tensor.stored_shape, jnp.bfloat16) for tensor in tensors]
    for tensors in (graph.input_tensors, graph.output_tensors)
)
arrays = [jnp.ones(each.shape, each.dtype) for each in operands]
jax.ffi.register_ffi_type(
    "jax_cudnn.GraphState", extension().state_type(), platform="cpu"
)
name = native.TARGET_SCRATCH
jax.ffi.register_ffi_target(name, extension().scratch_handlers(), platform="cpu")

def try_with(**target):
    call = jax.ffi.ffi_call(name, results)
    attributes = {"graph": to_json(graph), "op": "sdpa", "request": "", **target}
    try:
        jax.jit(lambda *arrays: call(*arrays, **attributes))(*arrays)
    except jax.errors.JaxRuntimeError as error:
        print(str(error).splitlines()[0])

try_with(sm_version=np.int64(90), cudnn_version=np.int64(91900))
try_with(sm_version=np.int64(90), cudnn_version=np.int64(0))
try_with(sm_version=np.int32(90), cudnn_version=np.int64(91900))
try_with()
"""


def test_a_program_without_a_whole_target_is_not_loaded() -> None:
    whole, half, narrow, missing = run_python(
        _INSTANTIATE, JAX_PLATFORMS="cpu"
    ).splitlines()
    assert "[execute]" in whole
    assert "jax_cudnn sdpa: sm_version=90 with cudnn_version=0 is no target" in half
    assert "[instantiate]" in narrow
    assert "[instantiate] Wrong number of attributes: expected 5 but got 3" in missing
