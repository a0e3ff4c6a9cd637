# SPDX-License-Identifier: Apache-2.0
"""Benchmarks jax_cudnn.sdpa against jax.nn and PyTorch, side by side on one GPU.

    python -m benchmarks.sdpa --out docs/benchmarks

writes sdpa.json and sdpa.md there. Needs an NVIDIA GPU; PyTorch is used where it is
installed. Operands are random bf16; see contest.py for how contenders are checked and
timed. `--only REGEX` chooses cells by their names; the file's others stay. `--small`
tries the script on a CPU, where times say nothing.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import jax

import jax_cudnn
from benchmarks.attention.attention_cells import Workload
from benchmarks.attention.ways import OURS, THEIRS, cell_of, small
from benchmarks.harness import contest, contest_report, program
from benchmarks.harness.contest import BOTH, FORWARD, Cell, Settings, Way
from benchmarks.harness.operands import Operand, drawn_sets
from benchmarks.harness.page import FINE_RANGE, Data, Page, Row, table_of
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, compare

_BY_XLA = "jax_cudnn xla"
_TOLD = {FORWARD: "fwd", BOTH: "fwd+bwd"}
_TIMES = ("median_us", "ratio", "ratio_low", "ratio_high")


def _cell(name: str, *sizes: int, is_causal: bool = True, **more: Any) -> Workload:
    """Return a workload of sizes b, s, h, k and d beside `jax.nn` and PyTorch."""
    options = {"is_causal": is_causal}
    b, s, h, k, d = sizes
    return Workload(
        name=name, b=b, s=s, h=h, k=k, d=d,
        ours=lambda _: options, theirs=options, torch=options, **more,
    )  # fmt: skip


CELLS = (
    _cell("(4,4096,16h,128) causal", 4, 4096, 16, 16, 128, has_xla=True),
    _cell("(8,2048,16h,64) causal", 8, 2048, 16, 16, 64, has_xla=True),
    _cell(
        "(8,2048,16h,64) + bias [1,16,2048,2048]", 8, 2048, 16, 16, 64, has_xla=True,
        has_bias=True, is_causal=False,
    ),
    _cell("(1,32768,16h,128) causal", 1, 32768, 16, 16, 128),
    _cell("(8,4096,32h:8,128) causal", 8, 4096, 32, 8, 128),
)  # fmt: skip
_F32_CELLS = (
    _cell("f32 (2,1024,8h,64)", 2, 1024, 8, 8, 64, is_causal=False),
    _cell("f32 (4,4096,16h,128) causal", 4, 4096, 16, 16, 128),
    _cell("f32 (1,16384,8h,64) causal", 1, 16384, 8, 8, 64),
)
_SMALL = _cell("small", 1, 128, 4, 4, 64, has_xla=True)


def _cells(*, is_small: bool) -> list[Cell]:
    """Return the workloads; small ones are for a CPU, where JAX has no cuDNN."""
    made = small if is_small else lambda work: work
    rival = OURS if is_small else THEIRS
    return [
        *(replace(cell_of(made(work), baseline=rival), size="") for work in CELLS),
        *(_in_f32(made(work)) for work in _F32_CELLS),
    ]


def _in_f32(work: Workload) -> Cell:
    """Return cuDNN's plan against XLA's reference, forward in f32."""
    cell = cell_of(work, baseline=_BY_XLA)
    attention = functools.partial(jax_cudnn.sdpa, **work.ours(work.s))
    names = {OURS: "cudnn", _BY_XLA: "xla"}
    return replace(
        cell,
        size="",
        operands=tuple(Operand(x.shape, dtype="float32") for x in cell.operands),
        rivals={
            name: Way(function=functools.partial(attention, implementation=how))
            for name, how in names.items()
        },
        torch=None,
        has_gradients=False,
    )


def run_cell(cell: Cell, settings: Settings) -> Iterator[Row]:
    """Time one cell, forward and where it has gradients with them."""
    rows = contest.measure(cell, settings, {})
    contest_report.show(rows)
    for row in rows:
        if "failure" not in row:
            name = row["contender"]
            yield {
                "cell": f"{cell.name} {_TOLD[row['what']]}",
                **{key: row[key] for key in ("contender", *_TIMES)},
                "temporary_and_output_bytes": _bytes(cell, name, row["what"]),
            }


def _bytes(cell: Cell, name: str, what: str) -> int | None:
    """Return the memory of temporaries and results of a contender in JAX."""
    if name not in cell.rivals:
        return None
    run = jax.jit(contest.program(cell.rivals[name].function, what))
    memory: Any = run.lower(cell.types, cell.outputs).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def run_host(rival: str) -> Iterator[Row]:
    """Time what the host does: one small call, and 50 chained in one program."""
    cell = cell_of(_SMALL)
    (arrays,) = drawn_sets(cell.operands, 1)

    def contender(function: Callable[..., Any]) -> Contender:
        call = functools.partial(jax.jit(function), *arrays)
        return Contender(call=call, wait=jax.block_until_ready)

    def chained(attention: Callable[..., Any], q: Any, k: Any, v: Any) -> jax.Array:
        for _ in range(50):
            q = attention(q, k, v)
        return q

    every = {name: way.function for name, way in cell.rivals.items()}
    one = {name: contender(each) for name, each in every.items()}
    one["add"] = contender(lambda q, k, v: q + k)
    yield from _of_host("host time of one small call", one, rival)
    chains = {
        name: replace(contender(functools.partial(chained, each)), count=50)
        for name, each in every.items()
    }
    yield from _of_host("one of 50 chained small calls", chains, rival)


def _of_host(cell: str, timed: Mapping[str, Contender], rival: str) -> Iterator[Row]:
    for name, timing in compare(timed, baseline=rival).items():
        row = {"cell": cell, "contender": name, **asdict(timing)}
        row["median_us"] /= timed[name].count
        yield {**row, "temporary_and_output_bytes": None}


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
    """Run the cells that are asked for, all with what the host takes."""
    options = contest_report.parser(__doc__).parse_args()
    cells = _cells(is_small=options.small)
    wanted = program.chosen(cells, options)
    if options.list:
        print("\n".join(cell.name for cell in wanted))
        return
    settings = contest_report.settings(
        options, with_first=False, with_compiled=False, rounds=9, round_ms=40.0
    )
    contest_report.shipped()
    rows = Table(
        folder=options.out,
        page=markdown,
        keys=("cell", "contender"),
        keeps="these versions",
    )
    if len(wanted) == len(cells):
        rows.forget()
        rows.add(*run_host(OURS if options.small else THEIRS))
    for cell in wanted:
        rows.add(*run_cell(cell, settings))


if __name__ == "__main__":
    main()
