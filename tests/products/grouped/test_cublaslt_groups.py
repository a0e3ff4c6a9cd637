# SPDX-License-Identifier: Apache-2.0
"""Tests products in groups by cuBLASLt without a GPU: what it is told, what our kernels
write, and what is kept. A stand-in for the library writes down what a launch is given.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import ragged_dot
from jax_cudnn.graph import Graph, Target, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_graphs
from tests.native.processes import run_python
from tests.native.stand_ins import compile_companions, compile_cudnn, obstacle

pytestmark = pytest.mark.once

_ROOT = Path(__file__).parents[3]
_H200 = Target(name="H200", sm_version=90, sm_count=132, cudnn_version=92801)
_ROWS, _GROUPS, _K, _N = 96, 5, 32, 48


# --- the kernels ----------------------------------------------------------------------


def _ptx(name: str) -> str:
    code = (_ROOT / "ffi/cudnn/group_pointers.cc").read_text()
    code = code[code.index('R"(') + 3 : code.index(')";')]
    (kernel,) = (x for x in code.split(".entry ") if x.startswith(f"{name}("))
    return kernel


def _parameters(ptx: str) -> list[str]:
    return re.findall(r"\.param \.u\d+ (\w+)", ptx)


def _signed(value: int, bits: int) -> int:
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def _run_thread(
    ptx: str, special: dict[str, int], given: dict[str, int], memory: bytearray
) -> None:
    """Interpret the instructions that the kernels have, for one thread."""
    body = ptx[ptx.index("{") : ptx.rindex("}")]
    pattern = r"^(\w+:| {2}@?[%a-z][^;.]*\.?[^;]*;)"
    lines = [x.strip(" ;") for x in re.findall(pattern, body, re.MULTILINE)]
    registers: dict[str, int] = dict(special)

    def value(text: str) -> int:
        return registers[text] if text in registers else int(text)

    def address(text: str) -> Any:
        name = text.strip("[]")
        return registers.get(name, name)

    place = 0
    while True:
        line = lines[place]
        place += 1
        if line.endswith(":"):
            continue
        if line.startswith("@"):
            predicate, line = line[1:].split(None, 1)
            if not registers[predicate]:
                continue
        name, *rest = line.split(None, 1)
        words = [word.strip(" {}") for word in "".join(rest).split(",")]
        kind, *types = name.split(".")
        bits = int(types[-1][1:]) if types else 64
        result = words[0]
        match kind, types[:-1]:
            case "ret", _:
                return
            case "bra", _:
                place = lines.index(f"{result}:")
            case "mov" | "cvta" | "cvt", _:
                registers[result] = value(words[1])
            case "ld", ["param"]:
                registers[result] = given[address(words[1])]
            case "ld", ["global"]:
                assert types[-1] == "s32"
                (found,) = struct.unpack_from("<i", memory, address(words[1]))
                registers[result] = found
            case "st", ["global", *_]:
                numbers = [value(word) % (1 << bits) for word in words[1:]]
                data = b"".join(x.to_bytes(bits // 8, "little") for x in numbers)
                at = address(words[0])
                assert at % len(data) == 0
                memory[at : at + len(data)] = data
            case "setp", ["ge"]:
                registers[result] = value(words[1]) >= value(words[2])
            case "add" | "sub", _:
                sign = 1 if kind == "add" else -1
                registers[result] = value(words[1]) + sign * value(words[2])
            case "mul", ["wide" | "lo"]:
                registers[result] = value(words[1]) * value(words[2])
            case "mad", ["lo"]:
                found = value(words[1]) * value(words[2]) + value(words[3])
                registers[result] = _signed(found, bits)
            case _:
                raise AssertionError(line)


def test_the_kernel_writes_addresses_and_sizes() -> None:
    ptx, groups = _ptx("jax_cudnn_group_pointers"), 130
    names = _parameters(ptx)
    starts = [(7 * g) % 1000 for g in range(groups)]
    memory = bytearray(b"\xaa" * 16384)
    at, source = 4096, 512
    struct.pack_into(f"<{groups}i", memory, source, *starts)
    numbers = [at, source, groups]
    matrices = [(2**44 + 16, 96, 0), (2**45, 0, 3 * 2**31), (2**46 + 32, 64, 0)]
    for matrix in matrices:
        numbers += matrix
    given = dict(zip(names, [*numbers, 77, 5000], strict=True))
    for block in range(2):
        for thread in range(128):
            special = {"%ctaid.x": block, "%ntid.x": 128, "%tid.x": thread}
            _run_thread(ptx, special, given, memory)
    want = b"".join(
        struct.pack("<q", start + row * starts[g] + group * g)
        for start, row, group in matrices
        for g in range(groups)
    )
    want += struct.pack(f"<{2 * groups}i", *[77] * groups, *[5000] * groups)
    assert memory[at : at + len(want)] == want
    assert set(memory[at + len(want) :]) == {0xAA}


@pytest.mark.parametrize("end", [0, 5, 39, 40])
def test_the_kernel_sets_rows_in_no_group_to_0(end: int) -> None:
    ptx, groups, rows, row_bytes = _ptx("jax_cudnn_zero_rows"), 3, 40, 48
    starts, sizes, at = 16, 64, 512
    memory = bytearray(b"\xaa" * 4096)
    last = end // 3
    struct.pack_into("<3i", memory, starts, 0, 0, end - last)
    struct.pack_into("<3i", memory, sizes, 0, end - last, last)
    want = bytearray(memory)
    want[at + end * row_bytes : at + rows * row_bytes] = bytes((rows - end) * row_bytes)
    numbers = [at, row_bytes, rows, starts, sizes, groups]
    given = dict(zip(_parameters(ptx), numbers, strict=True))
    for block in range(3):
        for thread in range(8):
            special = {"%ctaid.x": block, "%nctaid.x": 3}
            special |= {"%ntid.x": 8, "%tid.x": thread}
            _run_thread(ptx, special, given, memory)
    assert memory == want


# --- what cuBLASLt is told ------------------------------------------------------------


def _graphs(dtype: Any = jnp.bfloat16, columns: int = _N) -> Iterator[Graph]:
    """The product and its gradient, as cuBLASLt gets them."""

    def both(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, grad: Any) -> Any:
        y, vjp = jax.vjp(lambda lhs, rhs: ragged_dot(lhs, rhs, sizes), lhs, rhs)
        return y, vjp(grad)

    types = [
        jax.ShapeDtypeStruct((_ROWS, _K), dtype),
        jax.ShapeDtypeStruct((_GROUPS, _K, columns), dtype),
        jax.ShapeDtypeStruct((_GROUPS,), jnp.int32),
        jax.ShapeDtypeStruct((_ROWS, columns), dtype),
    ]
    for graph, *_ in traced_graphs(both, *types):
        ways = legalize(graph, _H200).candidates
        (way,) = (each for each in ways if each.names[-1] == "by cuBLASLt")
        yield way.graph


def _f8_graph(dtypes: tuple[str, str]) -> Graph:
    """A product of f8, as cuBLASLt gets it."""

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16)

    types = [
        jax.ShapeDtypeStruct((_ROWS, _K - 1), dtypes[0]),
        jax.ShapeDtypeStruct((_GROUPS, _K - 1, _N), dtypes[1]),
        jax.ShapeDtypeStruct((_GROUPS,), jnp.int32),
    ]
    ((graph, *_),) = traced_graphs(run, *types)
    assert legalize(graph, None).reasons[0].startswith("f8: ")
    (way,) = legalize(graph, _H200).candidates
    assert way.notes == (
        "all groups are one launch of cuBLASLt's",
        "b is copied: products of f8 read it along the sum",
        "matrices are padded to multiples of 16 elements",
    )
    return way.graph


_PROGRAM = """
from pathlib import Path
from jax_cudnn import UnsupportedError, native
from jax_cudnn.native._extension import extension

extension().set_library_directories([{libraries!r}])
native.set_plan_store(None, 0)
for graph in {graphs!r}:
    plan = native.plan(graph)
    print(plan.name, plan.engine, plan.workspace_bytes)
    Path({log!r}).unlink()
    other = native.plan(graph, request=native.cublaslt_request({{"TILE": 21}}))
    print(other.name, other.workspace_bytes)
    data = native.export_plan(graph, request=other.request)
    native.clear_cache()
    builds = native.cache_stats().builds
    native.import_plan(data)
    again = native.plan(graph, request=other.request)
    print(again.name, again.workspace_bytes, native.cache_stats().builds - builds)
print(native.plan({f8!r}).name)
for graph in {refused!r}:
    try:
        native.plan(graph)
    except UnsupportedError as error:
        print(error.reasons[-1])
"""


def _workspace(engine: int) -> int:
    """Three addresses and two numbers for each group follow cuBLASLt's own."""
    return engine + _GROUPS * (3 * 8 + 2 * 4)


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_plans_are_launched_and_kept(tmp_path: Path) -> None:
    compile_cudnn(tmp_path)
    source = (_ROOT / "tests/native/programs/cublaslt_stand_in.c").read_text()
    compile_companions(tmp_path, devices=1, captures=True, cublaslt=source)
    log = tmp_path / "log"
    (wide, _) = _graphs(jnp.float16, columns=64)
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    f8 = to_json(_f8_graph((e5m2, e4m3)))
    along_columns = f8.replace("[0,2,1]", "[0,1,2]")
    assert along_columns != f8
    refused = [
        to_json(wide).replace('"f16"', '"f32"'),
        along_columns,
        to_json(_f8_graph((e5m2, e5m2))),
    ]
    program = _PROGRAM.format(
        libraries=str(tmp_path),
        graphs=[to_json(graph) for graph in _graphs()],
        f8=f8,
        refused=refused,
        log=str(log),
    )
    lines = run_python(program, CUBLASLT_LOG=str(log)).splitlines()
    plans = [
        f"cublasLt_0 1000 {_workspace(0)}",
        f"cublasLt_1 {_workspace(256)}",
        f"cublasLt_1 {_workspace(256)} 0",
    ]
    assert lines[:6] == [*plans, *plans]
    assert lines[6:] == [
        "cublasLt_0",
        "cuBLASLt: its products in groups are of bf16, f16 and f8, with results of "
        "bf16, f16 and f32",
        "cuBLASLt: its products of f8 in groups read both operands along the sum",
        "cuBLASLt: its products of f8 have at most one operand of f8_e5m2",
    ]
    launches = [line.split() for line in log.read_text().splitlines()]
    # The last plan's, by the second algorithm and then the first: the gradients of the
    # rows and of the matrices, the second of which adds up over rows. The memory is at
    # 2^40, with the sizes that groups share behind cuBLASLt's part and the addresses.
    rows_gradient, matrices_gradient, f8_product = launches[-3:]
    sizes = str(2**40)
    shared = [str(2**40 + 256 + _GROUPS * (24 + 4 * i)) for i in range(2)]
    bf16 = "14"
    n, k = shared
    assert rows_gradient[:4] == ["1", "0", "0", "0"]
    assert rows_gradient[6:] == [
        *(bf16, n, k, n),
        *(bf16, n, sizes, n),
        *[bf16, k, sizes, k] * 2,
        *("1", "256"),
    ]
    k, n = shared
    assert matrices_gradient[:4] == ["0", "1", "0", "0"]
    assert matrices_gradient[6:] == [
        *(bf16, n, sizes, n),
        *(bf16, k, sizes, k),
        *[bf16, n, k, n] * 2,
        *("0", "256"),
    ]
    # The matrices come first, transposed; 28 and 29 are the types of f8. The first
    # algorithm has no workspace.
    k, n = (str(2**40 + _GROUPS * (24 + 4 * i)) for i in range(2))
    assert f8_product[:4] == ["1", "0", "0", "0"]
    assert f8_product[6:] == [
        *("28", k, n, k),
        *("29", k, sizes, k),
        *[bf16, n, sizes, n] * 2,
        *("0", "0"),
    ]
