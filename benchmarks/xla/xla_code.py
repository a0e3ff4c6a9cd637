# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that XLA's code of an operation moves on a GPU, without a GPU.

    pip install "jax[cuda13]" flax
    python -m benchmarks.xla_code --out docs/internals/measured

compiles each workload for an H200, once as plain JAX and once as jax_cudnn has it where
no cuDNN is, and writes xla_code.json and xla_code.md there. The programs are XLA's,
compiled as for that GPU, and neither they nor the driver run. `--only REGEX` chooses
workloads; the file's others stay.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import linen
from jax.experimental import topologies

import jax_cudnn.flax.linen
from benchmarks.harness.contest import BOTH, XLA, Cell, Function, Way, program
from benchmarks.harness.operands import Operand
from benchmarks.harness.page import Data, Page, Row, table
from benchmarks.harness.program import run_benchmark
from benchmarks.layers import norms, operation_cells
from benchmarks.products import fusion_cells
from benchmarks.xla.traffic import blocks_of, called_by, names_of, size_of
from jax_cudnn import offline, plans
from jax_cudnn.config import Implementation

_GPU = "H200"
# The ratio to plain JAX above which a program is counted.
_MOST = 1.05
# XLA would time kernels to choose among them.
_OPTIONS = {"xla_gpu_autotune_level": 0}


# --- programs -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of a compiled program, and the bytes that it reads and writes."""

    name: str
    op: str
    read: int
    written: int


# These are no kernels: names for what is there.
_NAMES = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
# Elementwise, so that a slice of the result reads a slice of the operand.
_SAME_PLACES = ("bitcast", "convert", "reshape")


def kernels(text: str) -> list[Kernel]:
    """Return the kernels of a compiled program, given as HLO's text.

    An operand that a kernel reads through slices alone counts as much as they do.
    """
    blocks = dict(blocks_of(text))
    types: dict[str, str] = {}
    found: list[Kernel] = []
    for line in blocks["ENTRY"]:
        types[line["name"]] = line["type"]
        if line["op"] in _NAMES:
            continue
        called = dict(called_by(line)).get("calls", "")
        inner = blocks.get(called, [])
        read = sum(
            size_of(types[name]) * _share(inner, i)
            for i, name in enumerate(dict.fromkeys(names_of(line)))
        )
        found.append(
            Kernel(
                name=line["name"],
                op=line["op"],
                read=round(read),
                written=size_of(line["type"]),
            )
        )
    return found


def _share(lines: Sequence[re.Match[str]], parameter: int) -> float:
    """Return the share of an operand that a computation reads."""
    for line in lines:
        if line["op"] == "parameter" and line["operands"] == str(parameter):
            whole = _elements(line["type"])
            read = _read_elements(lines, line)
            return min(1.0, read / whole) if whole else 0.0
    return 1.0


def _read_elements(lines: Sequence[re.Match[str]], of: re.Match[str]) -> int:
    total = 0
    for line in lines:
        if of["name"] not in names_of(line):
            continue
        if line["op"] == "slice":
            total += _elements(line["type"])
        elif line["op"] in _SAME_PLACES:
            total += _read_elements(lines, line)
        else:
            total += _elements(of["type"])
    return total or _elements(of["type"])


def _elements(type_: str) -> int:
    dims = re.search(r"\[([\d,]*)\]", type_)
    return math.prod(map(int, dims[1].split(","))) if dims and dims[1] else 1


class Compiler:
    """Compiles functions for a GPU that is not here."""

    def __init__(self, name: str) -> None:
        """Describe a GPU to XLA, by its name."""
        gpu = offline.find(name)
        topology = topologies.get_topology_desc(
            platform="cuda", topology="1x1x1", target_config=described(gpu)
        )
        self._sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def kernels(
        self,
        function: Function,
        operands: Sequence[Any],
        implementation: Implementation = "xla",
        **options: Any,
    ) -> list[Kernel]:
        """Return the kernels of a function of such operands, with XLA's options."""
        given = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding)
            for x in operands
        ]
        with plans.using(implementation=implementation):
            traced = jax.jit(function).trace(*given)
            lowered = traced.lower(lowering_platforms=("cuda",))
        return kernels(
            lowered.compile(compiler_options={**_OPTIONS, **options}).as_text()
        )


def described(gpu: offline.GpuDescription) -> str:
    """Return a GPU in the form in which XLA reads it."""
    has: Mapping[str, Any] = json.loads(gpu.properties)
    major, minor = divmod(gpu.sm_version, 10)
    device = {
        "threads_per_block_limit": has["maxThreadsPerBlock"],
        "threads_per_warp": has["warpSize"],
        "shared_memory_per_block": has["maxSharedMemoryPerBlock"],
        "shared_memory_per_core": has["maxSharedMemoryPerBlockOptin"]
        + has["reservedSharedMemoryPerBlock"],
        "shared_memory_per_block_optin": has["maxSharedMemoryPerBlockOptin"],
        "threads_per_core_limit": has["maxThreadsPerSM"],
        "core_count": has["multiProcessorCount"],
        "fpus_per_core": 128,
        "block_dim_limit_x": has["maxGridSize"][0],
        "block_dim_limit_y": has["maxGridSize"][1],
        "block_dim_limit_z": has["maxGridSize"][2],
        # Two edges of the memory clock move one bit of each wire.
        "memory_bandwidth": has["memoryBusWidth"] * has["memClockRateKHz"] * 1000 // 4,
        "l2_cache_size": has["l2CacheSize"],
        "clock_rate_ghz": has["smClockRateKHz"] / 1e6,
        "device_memory_size": has["totalGlobalMem"],
        "registers_per_core_limit": has["maxRegistersPerSM"],
        "registers_per_block_limit": has["regsPerBlock"],
    }
    limits = "\n".join(f"  {name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{\n{limits}\n  cuda_compute_capability "
        f"{{ major: {major} minor: {minor} "
        "feature_extension: ACCELERATED_FEATURES }\n}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 19 }\n'
        f'runtime_version {{ major: 13 }}\ndevice_description_str: "{gpu.name}"\n'
    )


# --- cells ----------------------------------------------------------------------------


def cells() -> list[Cell]:
    """Return the cells of the page, in its order."""
    return [*_attention(), *_of_norms(), *_of_operations(), *_products()]


def _attention() -> Iterator[Cell]:
    b, s, h, k, d = 4, 2048, 16, 4, 128
    causal = {"is_causal": True}
    window = {**causal, "local_window_size": (256, 0)}
    named: Sequence[tuple[str, int, int, str, dict[str, Any]]] = (
        ("attention", s, h, "bfloat16", {}),
        ("attention, causal", s, h, "bfloat16", causal),
        ("attention, causal, a window of 256", s, h, "bfloat16", window),
        ("attention, 4 heads of keys", s, k, "bfloat16", causal),
        ("attention, f32", s, h, "float32", {}),
        ("attention of one query, 4 heads of keys", 1, k, "bfloat16", {}),
    )
    for name, queries, heads, dtype, options in named:
        query = Operand((b, queries, h, d), dtype=dtype)
        keys = Operand((b, s, heads, d), dtype=dtype)
        yield _attends(name, options, query, keys, keys)
    query = Operand((b, s, h, d))
    yield _attends("attention with a bias", {}, *[query] * 3, Operand((1, h, s, s)))


def _attends(name: str, options: Mapping[str, Any], *operands: Operand) -> Cell:
    def ours(*arrays: jax.Array) -> Any:
        return jax_cudnn.sdpa(*arrays, **options)

    def plain(*arrays: jax.Array) -> Any:
        return jax.nn.dot_product_attention(*arrays, implementation="xla", **options)

    b, s, h, d = operands[0].shape
    return Cell(
        operation=name,
        size=f"({b}, {s}, {h}h, {d})",
        operands=operands,
        rivals={XLA: Way(function=plain)},
        ours=lambda: ours,
    )


def _of_norms() -> Iterator[Cell]:
    others = (
        norms.Workload(kind="instance_norm", shape=(16, 64, 64, 320)),
        norms.Workload(kind="adaptive_layer_norm", shape=(32, 1024, 1024)),
    )
    for work in (*norms.WORKLOADS, *others):
        cell = norms.cell(work)
        yield replace(cell, rivals={XLA: cell.rivals[XLA]})  # without tokamax
    yield _layer((64, 56, 56, 256))


def _layer(shape: tuple[int, ...]) -> Cell:
    """Return Flax's BatchNorm in training, with its new running values."""

    def by(layer: Any) -> Function:
        def run(x: jax.Array, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
            given = {
                "params": {"scale": scale, "bias": bias},
                "batch_stats": {"mean": mean, "var": var},
            }
            norm = layer(use_running_average=False, dtype=x.dtype)
            y, state = norm.apply(given, x, mutable=["batch_stats"])
            return y, jax.lax.stop_gradient(state)

        return run

    values = Operand(shape[-1:], dtype="float32")
    return Cell(
        operation="Flax's BatchNorm, running values",
        size=" x ".join(map(str, shape)),
        operands=(Operand(shape), *[values] * 4),
        rivals={XLA: Way(function=by(linen.BatchNorm))},
        ours=lambda: by(jax_cudnn.flax.linen.BatchNorm),
    )


def _of_operations() -> Iterator[Cell]:
    for cell in operation_cells.cells(small=False):
        # Without cuDNN, a function that `fuse` takes is what it was.
        if cell.ours is not None and "pool" in cell.operation:
            yield cell


def _products() -> Iterator[Cell]:
    for cell in dict.fromkeys(fusion_cells.CELLS):
        yield replace(cell.contest(), operation="", size=cell.name)


# --- the page -------------------------------------------------------------------------


def measure(compiler: Compiler, cell: Cell) -> Iterator[dict[str, Any]]:
    """Yield what the programs of a cell move, forward and with gradients."""
    assert cell.ours is not None
    for what in cell.directions:
        ours = _moved(compiler, cell.ours(), cell, what)
        plain = min(
            _moved(compiler, each.function, cell, what) for each in cell.rivals.values()
        )
        yield {
            "workload": cell.name,
            "what": what,
            "bytes": ours[0],
            "kernels": ours[1],
            "plain_bytes": plain[0],
            "plain_kernels": plain[1],
            "ratio": round(ours[0] / plain[0], 3),
        }


def _moved(
    compiler: Compiler, function: Function, cell: Cell, what: str
) -> tuple[int, int]:
    """Return the bytes and the number of kernels of a function."""
    operands = cell.types
    cotangents = jax.tree.leaves(jax.eval_shape(function, *operands))
    run, count = program(function, what), len(operands)
    found = compiler.kernels(
        lambda *arrays: run(arrays[:count], arrays[count:]),
        [*operands, *(cotangents if what == BOTH else ())],
    )
    return sum(each.read + each.written for each in found), len(found)


def _lines(data: Data) -> list[str]:
    rows = data["rows"]
    above = [row for row in rows if row["ratio"] > _MOST]
    groups = len({row["workload"] for row in rows})
    return [
        "Where cuDNN has no plan, or is not there, jax_cudnn runs code that XLA",
        "compiles. This page counts what that code reads and writes on a GPU, beside",
        "the code of plain JAX: `jax.nn`, `jax.lax` and the formulas of Flax. No time",
        "was measured here. Kernels without products take about as long as their bytes",
        "do. Products are compiled alike on both sides.",
        "",
        f"Of {len(rows)} programs of {groups} workloads, {len(above)} move more than "
        f"{_MOST:.2f} times the bytes",
        "of plain JAX. Products with i8 weights apply the scales to f32 sums; plain",
        "JAX may round scaled weights to bf16.",
        "",
        *table(
            "workload | | >MB | >kernels | >plain JAX: MB | >kernels | >ratio",
            map(_cells, rows),
        ),
    ]


def _cells(row: dict[str, Any]) -> list[Any]:
    ours = f"{row['bytes'] / 1e6:,.1f}", row["kernels"]
    plain = f"{row['plain_bytes'] / 1e6:,.1f}", row["plain_kernels"]
    return [row["workload"], row["what"], *ours, *plain, f"{row['ratio']:.2f}"]


def measured(
    doc: str | None,
    cases: Callable[..., Sequence[Any]],
    measure: Callable[[Compiler, Any], Iterator[Row]],
    page: Page,
) -> None:
    """Compile the cases that are asked for, and write the page after each."""
    # JAX's check of the driver's libraries, which are not here.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

    def rows(found: Sequence[Any]) -> Iterator[list[Row]]:
        compiler = Compiler(_GPU)
        for case in found:
            yield list(measure(compiler, case))

    versions = {"GPU": _GPU, "JAX": jax.__version__}
    keys = ("workload", "model", "what", "contender")
    run_benchmark(doc, cases, rows, page, versions=versions, keys=keys)


markdown = Page(
    name="xla_code",
    title="XLA's code beside plain JAX",
    comment="The bytes that XLA's code moves.",
    lines=_lines,
)

if __name__ == "__main__":
    measured(__doc__, lambda *, small: cells(), measure, markdown)
