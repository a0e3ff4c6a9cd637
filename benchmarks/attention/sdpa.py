# SPDX-License-Identifier: Apache-2.0
"""Benchmarks jax_cudnn.sdpa against jax.nn and PyTorch, side by side on one GPU.

    python -m benchmarks.sdpa --out docs/benchmarks

writes sdpa.json and sdpa.md there. Needs an NVIDIA GPU; PyTorch is used where it is
installed. Operands are random bf16; see timing.py for how times are taken.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.attention.attention_cells import Workload
from benchmarks.attention.attention_features import (
    functions,
    jax_programs,
    operands,
    torch_contenders,
)
from benchmarks.attention.ways import Program, Way, contenders, programs
from benchmarks.harness.contest import BOTH, FORWARD
from benchmarks.harness.page import FINE_RANGE, Data, Page, Row, table_of
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, Timing, compare

_THEIRS = "jax.nn cudnn"


def _cell(name: str, b: int, s: int, h: int, k: int, d: int, **more: Any) -> Workload:
    """Return a workload beside `jax.nn` and PyTorch; it is causal or has a bias."""
    options = {"is_causal": not more.get("has_bias")}
    return Workload(
        name=name, b=b, s=s, h=h, k=k, d=d,
        ours=lambda _: options, theirs=options, torch=options, **more,
    )  # fmt: skip


CELLS = (
    _cell("(4,4096,16h,128) causal", 4, 4096, 16, 16, 128, has_xla=True),
    _cell("(8,2048,16h,64) causal", 8, 2048, 16, 16, 64, has_xla=True),
    _cell(
        "(8,2048,16h,64) + bias [1,16,2048,2048]", 8, 2048, 16, 16, 64, has_xla=True,
        has_bias=True,
    ),
    _cell("(1,32768,16h,128) causal", 1, 32768, 16, 16, 128),
    _cell("(8,4096,32h:8,128) causal", 8, 4096, 32, 8, 128),
)  # fmt: skip
# By name, and whether it is causal.
_F32_CELLS = {
    "(2,1024,8h,64)": (_cell("", 2, 1024, 8, 8, 64), False),
    "(4,4096,16h,128) causal": (_cell("", 4, 4096, 16, 16, 128), True),
    "(1,16384,8h,64) causal": (_cell("", 1, 16384, 8, 8, 64), True),
}
_SMALL = _cell("small", 1, 128, 4, 4, 64, has_xla=True)


def run_cell(cell: Workload) -> Iterator[Row]:
    """Time one cell, forward and forward with gradients."""
    arrays, cotangent = operands(cell)
    for what, told in ((FORWARD, "fwd"), (BOTH, "fwd+bwd")):
        given = cell, arrays, cotangent, what
        compiled = jax_programs(*given)
        timed = contenders(compiled) | torch_contenders(*given, with_flex=False)
        yield from _rows(f"{cell.name} {told}", timed, _THEIRS, compiled)


def run_f32(name: str, cell: Workload, *, is_causal: bool) -> Iterator[Row]:
    """Time the f32 forward pass: cuDNN's plan against XLA's reference."""
    arrays = [x.astype(jnp.float32) for x in operands(cell)[0]]
    attention = functools.partial(jax_cudnn.sdpa, is_causal=is_causal)
    names: dict[str, Any] = {"jax_cudnn": "cudnn", "jax_cudnn xla": "xla"}
    ways = {
        name: Way(functools.partial(attention, implementation=how), arrays)
        for name, how in names.items()
    }
    compiled = programs(ways, FORWARD, ours=list(names))
    timed = contenders(compiled)
    yield from _rows(f"f32 {name} fwd", timed, "jax_cudnn xla", compiled)


def run_host() -> Iterator[Row]:
    """Time what the host does: one small call, and 50 chained in one program."""
    arrays, _ = operands(_SMALL)

    def contender(function: Callable[..., Any]) -> Contender:
        call = functools.partial(jax.jit(function), *arrays)
        return Contender(call=call, wait=jax.block_until_ready)

    def chained(attention: Callable[..., Any], q: Any, k: Any, v: Any) -> jax.Array:
        for _ in range(50):
            q = attention(q, k, v)
        return q

    every = functions(_SMALL)
    one = {name: contender(each) for name, each in every.items()}
    one["add"] = contender(lambda q, k, v: q + k)
    yield from _rows("host time of one small call", one, _THEIRS)
    chains = {
        name: replace(contender(functools.partial(chained, each)), count=50)
        for name, each in every.items()
    }
    yield from _rows("one of 50 chained small calls", chains, _THEIRS)


def _rows(
    cell: str,
    timed: dict[str, Contender],
    baseline: str,
    compiled: dict[str, Program] | None = None,
) -> Iterator[Row]:
    """Time contenders, and yield a row for each, with the memory of programs."""
    for name, timing in compare(timed, baseline=baseline).items():
        peak = None
        if compiled and name in compiled:
            memory = compiled[name].compiled.memory_analysis()
            peak = memory.temp_size_in_bytes + memory.output_size_in_bytes
        yield _row(cell, name, timing, timed[name].count, peak)


def _row(cell: str, name: str, timing: Timing, count: int, peak: int | None) -> Row:
    row = {"cell": cell, "contender": name, **asdict(timing)}
    row["median_us"] /= count
    row["temporary_and_output_bytes"] = peak
    told = "{cell:52s} {contender:13s} {median_us:10.1f} us {ratio:6.3f} " + FINE_RANGE
    print(told.format_map(row), flush=True)
    return row


def _lines(data: Data) -> list[str]:
    rows: list[Row] = []
    for row in data["rows"]:
        peak = row["temporary_and_output_bytes"]
        rows.append({**row, "memory": "" if peak is None else f"{peak / 1e6:.1f}"})
    return [
        "Times are medians a call; the ratio is to `jax.nn` with cuDNN, taken round by "
        "round in the same run (median, lowest and highest); in the f32 rows it is to "
        "XLA. Memory is what XLA allocates for temporaries and results.",
        "",
        *table_of(
            rows,
            "workload | contender | >µs | >ratio | range | >memory (MB)",
            "{cell} | {contender} | {median_us:.1f} | {ratio:.3f} | "
            + FINE_RANGE
            + " | {memory}",
        ),
    ]


markdown = Page(
    name="sdpa",
    title="Attention benchmarks",
    command="python -m benchmarks.sdpa",
    lines=_lines,
)


def main() -> None:
    """Run all cells and write the report."""
    options = parser(__doc__).parse_args()
    table = Table(folder=options.out, page=markdown, keeps="nothing")
    for row in run_host():
        table.add(row)
    for cell in CELLS:
        table.add(*run_cell(cell))
    for name, (cell, is_causal) in _F32_CELLS.items():
        table.add(*run_f32(name, cell, is_causal=is_causal))


if __name__ == "__main__":
    main()
