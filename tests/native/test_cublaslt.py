# SPDX-License-Identifier: Apache-2.0
"""Tests products by cuBLASLt without a GPU: which graphs, what is asked, what is kept.

A stand-in for the library lists algorithms and writes down what a launch is given.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import native
from jax_cudnn.graph import Graph, is_anchor, to_json
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.native._extension import extension
from tests.native.processes import run_python
from tests.native.stand_ins import compile_companions, compile_cudnn, obstacle

_HERE = Path(__file__).parent
_FFI = _HERE.parents[1] / "ffi"


def _types(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def _kernels(function: Callable[..., Any], types: list[Any]) -> list[Graph]:
    """Return the first way to write each product of a function."""
    return [
        legalize(part, None).candidates[0].graph
        for graph, *_ in traced_graphs(function, *types)
        for part in partition(graph)
        if any(map(is_anchor, part.nodes))
    ]


def _matmul(**options: Any) -> Callable[..., Any]:
    def call(x: Any, w: Any, b: Any, *more: Any) -> Any:
        named = dict(zip(("residual",), more, strict=False))
        return jax_cudnn.matmul(x, w, bias=b, **named, **options)

    return call


def _saved(x: Any, w: Any, b: Any) -> Any:
    return jax.vjp(_matmul(activation="gelu_tanh"), x, w, b)


def _scaled(x: Any, w: Any, s: Any, t: Any) -> Any:
    wide = {"preferred_element_type": jnp.bfloat16}
    return jax_cudnn.matmul(x, w.T, scale_a=s, scale_b=t, **wide)


_X, _W, _B, _Y = (48, 32), (32, 64), (64,), (48, 64)
_F8 = [
    *_types((48, 32), (64, 32), dtype=jnp.float8_e4m3fn),
    *_types((), (), dtype=jnp.float32),
]
_COVERED = {
    "bias": (_matmul(), _types(_X, _W, _B)),
    "relu": (_matmul(activation="relu"), _types(_X, _W, _B)),
    "gelu": (_matmul(activation="gelu_tanh"), _types(_X, _W, _B)),
    "gelu with its argument": (_saved, _types(_X, _W, _B)),
    "residual": (_matmul(), _types(_X, _W, _B, _Y)),
    "f32": (_matmul(), _types(_X, _W, _B, dtype=jnp.float32)),
    "a batch": (_matmul(), _types((3, 48, 32), (3, 32, 64), _B)),
}
_OTHERS = {
    "no epilogue": (lambda x, w: jax_cudnn.matmul(x, w), _types(_X, _W)),
    "gelu by erf": (_matmul(activation="gelu_erf"), _types(_X, _W, _B)),
    "silu": (_matmul(activation="silu"), _types(_X, _W, _B)),
    "leaky relu": (_matmul(activation="leaky_relu"), _types(_X, _W, _B)),
    "relu of a residual": (_matmul(activation="relu"), _types(_X, _W, _B, _Y)),
    "a bias of rows": (
        lambda x, w, b: jax_cudnn.matmul(x, w, bias=b[:, None]),
        _types(_X, _W, (48,)),
    ),
    "integers": (
        lambda x, w: jax_cudnn.matmul(x, w, preferred_element_type=jnp.int32),
        _types(_X, _W, dtype=jnp.int8),
    ),
}


@pytest.mark.parametrize("name", _COVERED)
def test_it_has_these(name: str) -> None:
    function, types = _COVERED[name]
    graph, *_ = _kernels(function, types)
    assert native.has_cublaslt_plan(to_json(graph))


@pytest.mark.parametrize("name", _OTHERS)
def test_it_has_no_others(name: str) -> None:
    function, types = _OTHERS[name]
    for graph in _kernels(function, types):
        assert not native.has_cublaslt_plan(to_json(graph))


def _changed(graph: Graph, name: str, **changes: Any) -> Graph:
    """Return the graph with another tensor in the place of one."""
    tensors = tuple(
        replace(each, **changes) if each.name == name else each
        for each in graph.tensors
    )
    return replace(graph, tensors=tensors)


def test_values_within_keep_their_meaning() -> None:
    """A value that is cut, or of another size, is none that a kernel keeps in f32."""
    (graph,) = _kernels(*_COVERED["gelu"])
    (add,) = (
        dict(node.outputs)["output"]
        for node in graph.nodes
        if getattr(node.attributes, "mode", "") == "add"
    )
    assert native.has_cublaslt_plan(to_json(_changed(graph, add, dtype="bf16")))
    for dtype in ("f16", "i32", "f8_e4m3fn", "f64"):
        other = _changed(graph, add, dtype=dtype)
        assert not native.has_cublaslt_plan(to_json(other))


def test_an_argument_is_as_large_as_the_product() -> None:
    @jax_cudnn.fuse
    def mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
        return jax.nn.gelu(x @ w + b) @ v

    def gradients(grad: Any, *operands: Any) -> Any:
        return jax.vjp(mlp, *operands)[1](grad)

    types = _types((48, 32), (48, 32), (32, 64), (1, 64), (64, 32))
    (graph,) = (
        each
        for each in _kernels(gradients, types)
        if "gelu_tanh_grad" in {getattr(x.attributes, "mode", "") for x in each.nodes}
    )
    assert native.has_cublaslt_plan(to_json(graph))
    (node,) = (x for x in graph.nodes if x.kind == "pointwise" and len(x.inputs) == 2)
    row = _changed(graph, dict(node.inputs)["b"], dims=(1, 1, 64))
    assert not native.has_cublaslt_plan(to_json(row))


def test_a_bias_of_f8_operands_is_not_of_f32() -> None:
    def call(x: Any, w: Any, b: Any, dtype: Any) -> Any:
        return jax_cudnn.matmul(x, w.T, bias=b, preferred_element_type=dtype)

    for dtype, is_covered in ((jnp.bfloat16, True), (jnp.float32, False)):
        types = [*_F8[:2], *_types((64,), dtype=dtype)]
        ways = [
            way
            for graph, *_ in traced_graphs(partial(call, dtype=dtype), *types)
            for part in partition(graph)
            for way in legalize(part, None).candidates
        ]
        found = [native.has_cublaslt_plan(to_json(way.graph)) for way in ways]
        assert any(found) == is_covered


def test_f8_operands_lie_along_the_sum() -> None:
    ways = [
        way
        for graph, *_ in traced_graphs(_scaled, *_F8)
        for part in partition(graph)
        for way in legalize(part, None).candidates
    ]
    found = {way.names: native.has_cublaslt_plan(to_json(way.graph)) for way in ways}
    assert found == {(): False, ("along the sum",): True}


_PLANS = """
import json
from pathlib import Path
from jax_cudnn import UnsupportedError, native
from jax_cudnn.native._extension import extension

extension().set_library_directories([{libraries!r}])
native.set_plan_store(None, 0)
graph, other = {graph!r}, {other!r}
for knobs in ({{}}, {{"TILE": 21}}, {{"TILE": 22, "CLUSTER": 3}}):
    request = native.cublaslt_request(knobs)
    plan = native.plan(graph, request=request)
    print(plan.name, plan.engine, plan.workspace_bytes, dict(plan.knobs)["TILE"])
    assert native.plan(graph, request=plan.request).knobs == plan.knobs
(listed,) = native.candidates(graph, request=native.cublaslt_request({{"TILE": 21}}))
print(listed.name, listed.is_built, *listed.behavior_notes)
for wanted in ([{{"TILE": 22}}, {{}}], [{{"TILE": 99}}, {{}}]):
    print(native.plan(graph, request=native.cublaslt_preference(wanted)).name)
data = native.export_plan(graph, request=plan.request)
native.clear_cache()
builds = native.cache_stats().builds
native.import_plan(data)
again = native.plan(graph, request=plan.request)
print(again.name, again.workspace_bytes, native.cache_stats().builds - builds)
for text, knobs in ((graph, {{"TILE": 99}}), (other, {{}})):
    try:
        native.plan(text, request=native.cublaslt_request(knobs))
    except UnsupportedError as error:
        print(error.reasons[-1])
print(Path({log!r}).read_text().splitlines()[-1])
"""


@pytest.mark.once
@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_plans_are_listed_pinned_launched_and_kept(tmp_path: Path) -> None:
    compile_cudnn(tmp_path)
    source = (_HERE / "programs" / "cublaslt_stand_in.c").read_text()
    compile_companions(tmp_path, devices=1, captures=True, cublaslt=source)
    (graph,) = _kernels(*_COVERED["gelu with its argument"])
    (other,) = _kernels(*_OTHERS["silu"])
    log = tmp_path / "log"
    program = _PLANS.format(
        libraries=str(tmp_path),
        graph=to_json(graph),
        other=to_json(other),
        log=str(log),
    )
    *lines, launch = run_python(program, CUBLASLT_LOG=str(log)).splitlines()
    assert lines == [
        "cublasLt_0 1000 0 20",
        "cublasLt_1 1000 256 21",
        "cublasLt_2 1000 512 22",
        "cublasLt_1 False CUBLASLT_DEPENDENCY",
        "cublasLt_2",
        "cublasLt_0",
        "cublasLt_2 512 0",
        "cuBLASLt: none of its 3 algorithms is the one that is asked for",
        "cuBLASLt has no kernel for this graph",
    ]
    # Column by column: 64 x 32 times 32 x 48, bias, gelu and its argument.
    bf16, epilogue = 14, 4 | 32 | 128
    assert launch.split() == [
        *("0", "0", str(epilogue), "64", "1", "0"),
        *(str(bf16), "64", "32", "64"),
        *(str(bf16), "32", "48", "32"),
        *(str(bf16), "64", "48", "64"),
        *(str(bf16), "64", "48", "64"),
        *("2", "512"),
    ]


def _headers() -> list[Path]:
    """Return the folders of NVIDIA's headers among the installed wheels."""
    import nvidia

    roots = [Path(each) for each in nvidia.__path__]
    found = [file.parent for root in roots for file in root.rglob("cublasLt.h")]
    return [*found, *(f.parent for root in roots for f in root.rglob("driver_types.h"))]


_ALIGN = tuple(
    f"{name}(n) __attribute__((aligned(n)))"
    for name in ("__align__", "__builtin_align__")
)

# Ours and NVIDIA's names. What they are in C is compared by a compiler.
_NAMES = {
    "kCudaF32": "CUDA_R_32F",
    "kCudaF16": "CUDA_R_16F",
    "kCudaBf16": "CUDA_R_16BF",
    "kCudaF8E4m3": "CUDA_R_8F_E4M3",
    "kCudaF8E5m2": "CUDA_R_8F_E5M2",
    "kCublasComputeF32": "CUBLAS_COMPUTE_32F",
    "kCublasComputeTf32": "CUBLAS_COMPUTE_32F_FAST_TF32",
    "kCublasTranspose": "CUBLAS_OP_T",
    "CublasLtMatmulAttribute::kTransposeA": "CUBLASLT_MATMUL_DESC_TRANSA",
    "CublasLtMatmulAttribute::kTransposeB": "CUBLASLT_MATMUL_DESC_TRANSB",
    "CublasLtMatmulAttribute::kEpilogue": "CUBLASLT_MATMUL_DESC_EPILOGUE",
    "CublasLtMatmulAttribute::kBiasPointer": "CUBLASLT_MATMUL_DESC_BIAS_POINTER",
    "CublasLtMatmulAttribute::kBiasBatchStride": (
        "CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE"
    ),
    "CublasLtMatmulAttribute::kAuxPointer": (
        "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER"
    ),
    "CublasLtMatmulAttribute::kAuxLeading": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD",
    "CublasLtMatmulAttribute::kAuxBatchStride": (
        "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE"
    ),
    "CublasLtMatmulAttribute::kScaleA": "CUBLASLT_MATMUL_DESC_A_SCALE_POINTER",
    "CublasLtMatmulAttribute::kScaleB": "CUBLASLT_MATMUL_DESC_B_SCALE_POINTER",
    "CublasLtLayoutAttribute::kBatchCount": "CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT",
    "CublasLtLayoutAttribute::kBatchStride": (
        "CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET"
    ),
    "CublasLtPreferenceAttribute::kWorkspaceBytes": (
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES"
    ),
    "CublasLtPreferenceAttribute::kReductionSchemes": (
        "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK"
    ),
    **{
        f"CublasLtPreferenceAttribute::kAlignment{x}": (
            f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{x}_BYTES"
        )
        for x in "ABCD"
    },
    "CublasLtAlgorithmAttribute::kAlgorithm": "CUBLASLT_ALGO_CONFIG_ID",
    "CublasLtAlgorithmAttribute::kReduction": "CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME",
    "CublasLtAlgorithmAttribute::kTile": "CUBLASLT_ALGO_CONFIG_TILE_ID",
    "CublasLtAlgorithmAttribute::kSplitK": "CUBLASLT_ALGO_CONFIG_SPLITK_NUM",
    "CublasLtAlgorithmAttribute::kSwizzle": "CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING",
    "CublasLtAlgorithmAttribute::kCustom": "CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION",
    "CublasLtAlgorithmAttribute::kStages": "CUBLASLT_ALGO_CONFIG_STAGES_ID",
    "CublasLtAlgorithmAttribute::kInner": "CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID",
    "CublasLtAlgorithmAttribute::kCluster": "CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID",
    "kEpilogueNone": "CUBLASLT_EPILOGUE_DEFAULT",
    "kEpilogueRelu": "CUBLASLT_EPILOGUE_RELU",
    "kEpilogueBias": "CUBLASLT_EPILOGUE_BIAS",
    "kEpilogueGelu": "CUBLASLT_EPILOGUE_GELU",
    "kEpilogueGelu | kEpilogueAux | kEpilogueBias": "CUBLASLT_EPILOGUE_GELU_AUX_BIAS",
    "kEpilogueGeluGradient | kEpilogueAux": "CUBLASLT_EPILOGUE_DGELU",
    "kCublasLtSumsInF32": "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE",
    **{
        f"CublasLtPreferenceAttribute::kAverage{ours}": (
            f"CUBLASLT_MATMUL_PREF_GROUPED_{theirs}"
        )
        for ours, theirs in {
            "Depth": "AVERAGE_REDUCTION_DIM",
            "Rows": "DESC_D_AVERAGE_ROWS",
            "Columns": "DESC_D_AVERAGE_COLS",
        }.items()
    },
    "sizeof(CublasLtAlgorithm)": "sizeof(cublasLtMatmulAlgo_t)",
    "sizeof(CublasLtHeuristicResult)": "sizeof(cublasLtMatmulHeuristicResult_t)",
}


@pytest.mark.once
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++)")
def test_declarations_are_those_of_nvidias_headers(tmp_path: Path) -> None:
    pytest.importorskip("nvidia")
    folders = _headers()
    if not folders:
        pytest.skip("no header of cuBLASLt is installed")
    compare(folders, tmp_path)


def compare(folders: list[Path], directory: Path) -> None:
    """Compile that our declarations are those of the headers in some folders."""
    lines = [
        f"static_assert(static_cast<long>({ours}) == static_cast<long>({theirs}));"
        for ours, theirs in sorted(_NAMES.items(), key=lambda x: "GROUPED" in x[1])
    ]
    # Products in groups came with 13.1.
    first = next(i for i, line in enumerate(lines) if "GROUPED" in line)
    lines.insert(first, "#if CUBLAS_VERSION >= 130100")
    lines.append("#endif")
    # NVIDIA's headers include these, which are other wheels'.
    words = ("__device_builtin__", "__host__", "__device__", *_ALIGN)
    others = {
        "crt/host_defines.h": "".join(f"#define {word}\n" for word in words),
        "cuda_fp16.h": "struct __half;\n",
        "cuda_bf16.h": "struct __nv_bfloat16;\n",
    }
    (directory / "crt").mkdir()
    for name, text in others.items():
        (directory / name).write_text(text)
    source = directory / "compare.cc"
    source.write_text(
        "\n".join(
            [
                "#include <cublasLt.h>",
                '#include "cudnn/cublaslt.h"',
                "using namespace jax_cudnn;",
                *lines,
            ]
        )
    )
    included = [f"-I{folder}" for folder in (directory, *folders, _FFI)]
    command = ["g++", "-std=c++17", "-fsyntax-only", *included, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_goes_before_cudnns_plans_is_cublaslts() -> None:
    text = native.cublaslt_preference([{"TILE": 20}, {}])
    assert extension().testing.parse_request(text.encode()) == text
    wrong = text.replace('"engine":1000', '"engine":4', 1)
    with pytest.raises(jax_cudnn.GraphError, match="engine 4 is not cuBLASLt's, 1000"):
        extension().testing.parse_request(wrong.encode())


def test_requests_are_canonical() -> None:
    text = native.cublaslt_request({"TILE": 20, "CLUSTER": 3})
    assert json.loads(text)["knobs"] == {"CLUSTER": 3, "TILE": 20}
    assert text.index("CLUSTER") < text.index("TILE")
