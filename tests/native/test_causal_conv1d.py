# SPDX-License-Identifier: Apache-2.0
"""Tests plans of cuDNN's causal convolutions without a GPU, and their declarations.

A stand-in for the library writes down what its functions are given.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import causal_conv1d, native
from jax_cudnn.graph import Target, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.native._extension import extension
from tests.native.processes import run_python
from tests.native.stand_ins import compile_companions, compile_cudnn, obstacle

pytestmark = pytest.mark.once

_FFI = Path(__file__).parents[2] / "ffi"
_TARGET = Target(name="H200", sm_version=90, sm_count=132, cudnn_version=92801)

_FORWARD = """
int {name}(void* stream, void* x, void* w, void* b, void* y, int batch, int channels,
           int steps, int taps, int dtype, int activation) {{
  return note("{name}", batch, channels, steps, taps, dtype, -1, activation);
}}
"""
_BACKWARD = """
int {name}(void* stream, void* x, void* w, void* b, void* dy, void* dx, void* dw,
           void* db, int batch, int channels, int steps, int taps, int dtype, int sums,
           int activation) {{
  return note("{name}", batch, channels, steps, taps, dtype, sums, activation);
}}
"""
_NOTE = """
#include <stdio.h>
static int note(const char* name, int n, int c, int s, int k, int dtype, int sums,
                int activation) {
  FILE* file = fopen(getenv("CAUSAL_LOG"), "a");
  fprintf(file, "%s %d %d %d %d %d %d %d\\n", name, n, c, s, k, dtype, sums,
          activation);
  fclose(file);
  return k == 256 ? 3000 : 0;  // NOT_SUPPORTED
}
"""
_SOURCE = _NOTE + "".join(
    form.format(name=f"cudnnCausalConv1d{layout}{way}")
    for layout in ("", "Nwh")
    for way, form in (("Forward", _FORWARD), ("Backward", _BACKWARD))
)


def _kernels(layout: str = "NWC", taps: int = 4, dtype: Any = jnp.bfloat16) -> Any:
    """Return what cuDNN's function computes of a convolution and its gradients."""
    is_last = layout == "NWC"
    shapes = ((2, 9, 12), (taps, 12)) if is_last else ((2, 12, 9), (12, taps))
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in (*shapes, (12,))]

    def call(x: Any, w: Any, bias: Any) -> jax.Array:
        options: Any = {"dimension_numbers": layout}
        y = causal_conv1d(x, w, bias=bias, **options)
        return jnp.sum(y.astype(jnp.float32))

    graphs = traced_graphs(jax.value_and_grad(call, (0, 1, 2)), *types)
    found = (legalize(graph, _TARGET).candidates[0].graph for graph, *_ in graphs)
    return [each for each in found if each.nodes[0].kind.startswith("causal")]


_PROGRAM = """
from pathlib import Path
from jax_cudnn import GraphError, UnsupportedError, native
from jax_cudnn.config import PlanOptions
from jax_cudnn.native._extension import extension

extension().set_library_directories([{libraries!r}])
native.set_plan_store(None, 0)
log = Path({log!r})
for graph in {graphs!r}:
    try:
        plan = native.plan(graph)
    except (GraphError, UnsupportedError) as error:
        print(*getattr(error, "reasons", [str(error)]))
        continue
    print(plan.name, plan.engine, plan.workspace_bytes, *plan.numeric_notes)
    if log.exists():
        print(log.read_text().strip())
        log.unlink()
    assert native.plan(graph, request=plan.request).name == plan.name
    (listed,) = native.candidates(graph)
    assert (listed.name, listed.request) == (plan.name, plan.request)
    data = native.export_plan(graph, request=plan.request)
    native.clear_cache()
    native.import_plan(data)
    assert native.plan(graph, request=plan.request).name == plan.name
    log.unlink(missing_ok=True)
    for options in (
        PlanOptions(deterministic=True), PlanOptions(denied_engines=(1001,))
    ):
        try:
            print(native.plan(graph, request=options.to_request()).name)
        except UnsupportedError as error:
            print(*error.reasons)
        log.unlink(missing_ok=True)
    try:
        native.plan(graph, request='{{"engine":7,"knobs":{{}},"variant":0}}')
    except UnsupportedError as error:
        print(*error.reasons)
"""


def _run(tmp_path: Path, texts: list[str], *, extra: str) -> list[str]:
    compile_cudnn(tmp_path, 92200, extra=extra)
    compile_companions(tmp_path, devices=1, captures=True)
    log = str(tmp_path / "log")
    program = _PROGRAM.format(libraries=str(tmp_path), graphs=texts, log=log)
    return run_python(program, CAUSAL_LOG=log).splitlines()


_OTHER = "the plan that is asked for is none of cuDNN's function"


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_plans_are_listed_pinned_launched_and_kept(tmp_path: Path) -> None:
    kernels = [
        *_kernels(),
        *_kernels("NCW", 7, jnp.float32)[1:],
        *_kernels("NWC", 256)[:1],
    ]
    texts = [to_json(graph) for graph in kernels]
    # What Python refuses may come in a program of another release.
    wrong = texts[0].replace('"silu"', '"gelu"')
    lines = _run(tmp_path, [*texts, wrong], extra=_SOURCE)
    refused = "causalConv1dBackward: has the note NONDETERMINISTIC, which"
    assert lines == [
        "causalConv1dForward 1001 0",
        # Batch, channels, steps, taps; bf16, no sums, silu.
        "cudnnCausalConv1dNwhForward 2 12 9 4 9 -1 1",
        "causalConv1dForward",
        "causalConv1dForward: engine 1001 is denied",
        _OTHER,
        "causalConv1dBackward 1001 0 NONDETERMINISTIC",
        "cudnnCausalConv1dNwhBackward 2 12 9 4 9 0 1",
        f"{refused} deterministic refuses",
        "causalConv1dBackward: engine 1001 is denied",
        _OTHER,
        "causalConv1dBackward 1001 0 NONDETERMINISTIC",
        "cudnnCausalConv1dBackward 2 12 9 7 0 0 1",
        f"{refused} deterministic refuses",
        "causalConv1dBackward: engine 1001 is denied",
        _OTHER,
        "causalConv1dForward: it builds and cannot be launched: "
        "cudnnCausalConv1dForward failed: ?",
        "causal_conv1d: activation 'gelu' is not one of identity, silu",
    ]


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_a_library_without_the_functions_says_so(tmp_path: Path) -> None:
    lines = _run(tmp_path, [to_json(_kernels()[0])], extra="")
    assert lines == [
        "cuDNN 9.22.0 has no cudnnCausalConv1dNwhForward and "
        "cudnnCausalConv1dNwhBackward"
    ]


def test_the_engine_has_one_number() -> None:
    assert extension().CAUSAL_CONV_ENGINE == native.CAUSAL_CONV_ENGINE


# --- declarations ---------------------------------------------------------------------

_SAME = [
    *(
        (f"CudnnDataType::{ours}", f"CUDNN_DATA_{theirs}")
        for ours, theirs in (
            ("kF32", "FLOAT"),
            ("kF64", "DOUBLE"),
            ("kF16", "HALF"),
            ("kBf16", "BFLOAT16"),
        )
    ),
    *(
        (
            f"CausalConvActivation::k{name}",
            f"CUDNN_CAUSAL_CONV1D_ACTIVATION_{name.upper()}",
        )
        for name in ("Identity", "Silu")
    ),
    ("2000", "CUDNN_STATUS_BAD_PARAM"),
    ("3000", "CUDNN_STATUS_NOT_SUPPORTED"),
]
_CUDA = """
#include <stddef.h>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUgraph_st* cudaGraph_t;
"""
# An enumeration of ours stands for each of NVIDIA's, of the same size.
_CHECKS = """
#include <type_traits>
#include <cudnn_subquadratic_ops.h>
#include "cudnn/causal_conv.h"

namespace {

template <typename Type> struct Ours { using type = Type; };
template <> struct Ours<cudaStream_t> { using type = jax_cudnn::CudaStream; };
template <> struct Ours<cudnnStatus_t> { using type = int; };
template <> struct Ours<cudnnDataType_t> { using type = jax_cudnn::CudnnDataType; };
template <> struct Ours<cudnnCausalConv1dActivation_t> {
  using type = jax_cudnn::CausalConvActivation;
};
template <typename Result, typename... Arguments> struct Ours<Result(Arguments...)> {
  using type = typename Ours<Result>::type(typename Ours<Arguments>::type...);
};
template <typename Theirs, typename Mine>
constexpr bool kSame = std::is_same_v<typename Ours<Theirs>::type, Mine>;

using namespace jax_cudnn;
static_assert(kSame<decltype(cudnnCausalConv1dForward), CausalConvForward>);
static_assert(kSame<decltype(cudnnCausalConv1dNwhForward), CausalConvForward>);
static_assert(kSame<decltype(cudnnCausalConv1dBackward), CausalConvBackward>);
static_assert(kSame<decltype(cudnnCausalConv1dNwhBackward), CausalConvBackward>);
static_assert(sizeof(cudnnStatus_t) == sizeof(int));
"""


def _folders() -> list[Path]:
    """Return the folders of cuDNN's headers among the installed wheels."""
    import nvidia

    roots = [Path(each) for each in nvidia.__path__]
    return [f.parent for r in roots for f in r.rglob("cudnn_subquadratic_ops.h")]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++)")
def test_declarations_are_those_of_nvidias_header(tmp_path: Path) -> None:
    pytest.importorskip("nvidia")
    folders = _folders()
    if not folders:
        pytest.skip("no header of cuDNN 9.22 or newer is installed")
    lines = [
        f"static_assert(static_cast<long>({ours}) == static_cast<long>({theirs}));"
        for ours, theirs in _SAME
    ]
    # cuDNN's headers include these two of CUDA's, which another wheel has, for the
    # names of three types.
    (tmp_path / "cuda_runtime_api.h").write_text(_CUDA)
    (tmp_path / "library_types.h").write_text("enum libraryPropertyType {};\n")
    source = tmp_path / "compare.cc"
    source.write_text("\n".join([_CHECKS, *lines, "}  // namespace", ""]))
    included = [f"-I{folder}" for folder in (tmp_path, *folders, _FFI)]
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", *included, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
