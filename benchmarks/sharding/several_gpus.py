# SPDX-License-Identifier: Apache-2.0
"""Benchmarks calls under plain `jax.jit` with sharded operands, on all GPUs.

    python -m benchmarks.several_gpus --out docs/internals/measured

writes several_gpus.json and several_gpus.md there, after every cell. Beside each call
runs the same in plain JAX, on the same shards. Operands are random bf16; see timing.py
for how times are taken. Plans are untuned, but for choices that the package ships.
Devices add up their shares of a product in the operands' dtype, as plain JAX does,
unless `--reduce-dtype f32` asks for jax_cudnn's default.

    JAX_NUM_CPU_DEVICES=4 python -m benchmarks.several_gpus --small

runs everything in small sizes on devices of the CPU.
"""

import collections
import functools
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AxisType

from benchmarks.harness.checks import check, relative_errors
from benchmarks.harness.contest import BOTH, FORWARD, program
from benchmarks.harness.page import RANGED, Data, Page, Row, table_of
from benchmarks.harness.program import run_benchmark
from benchmarks.harness.timing import Contender, alternate, summary
from benchmarks.harness.versions import environment
from benchmarks.sharding.several_gpus_cells import AXIS, Cell, cells
from jax_cudnn import plans

OURS, PLAIN = "jax_cudnn", "plain JAX"
DIRECTIONS = {"fwd": FORWARD, "fwd+bwd": BOTH}
_KINDS = (
    "all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all|"
    "collective-permute"
)
# Bounds of the relative error between the contenders, of results and of gradients.
# Both round to bf16, and XLA may keep the sums of a bias's gradient in bf16 too. A
# wrong result, with a term or a sum over devices too few, is off by about 1.
BOUNDS = 3e-2, 3e-1

Sums = Literal["f32", "operands"]


# --- one cell -------------------------------------------------------------------------


def sent(text: str) -> list[str]:
    """Return what a compiled program sends between devices: the way, and the type."""
    of_one, of_several = r"\S+", r'\([^"\n]*?\)'
    pattern = rf"^ *(?:ROOT )?%?\S+ = ({of_several}|{of_one}) ({_KINDS})(?:-start)?\("
    found = re.findall(pattern, text, re.MULTILINE)
    # Without layouts, and comments that number the parts of long types.
    return [f"{kind} {re.sub(r'{.*?}|/.*?/', '', what)}" for what, kind in found]


def cudnn_calls(text: str) -> list[str]:
    """Return the names of a compiled program's calls of cuDNN, XLA's own included."""
    return re.findall(r'"(jax_cudnn\.\w+|__cudnn\$\w+)"', text)


def counted(names: Sequence[str]) -> dict[str, int]:
    """Return how often each name is there, sorted by name."""
    return dict(sorted(collections.Counter(names).items()))


def run_cell(
    cell: Cell, what: str, operands: Sequence[Any], sums: Sums, rounds: dict[str, Any]
) -> list[Row]:
    """Time a cell in one direction; return the row of each contender."""
    cotangent, *arrays = operands
    rows: dict[str, Row] = {}
    results: dict[str, Any] = {}
    contenders: dict[str, Contender] = {}
    for name, function in ((OURS, cell.ours), (PLAIN, cell.plain)):
        run = jax.jit(program(function, DIRECTIONS[what]))
        start = time.monotonic()
        with plans.using(reduce_dtype=sums):
            compiled = run.lower(arrays, [cotangent]).compile()
        seconds, text = time.monotonic() - start, compiled.as_text()
        memory = compiled.memory_analysis()
        assert text is not None
        assert memory is not None
        call = functools.partial(compiled, arrays, [cotangent])
        results[name] = jax.tree.leaves(call())
        contenders[name] = Contender(call=call, wait=jax.block_until_ready)
        rows[name] = {
            "cell": cell.name,
            "split": cell.split,
            "what": what,
            "sums": sums,
            "contender": name,
            "compile_s": round(seconds, 2),
            "collectives": counted([each.split()[0] for each in sent(text)]),
            "sent": sent(text),
            "cudnn_calls": counted(cudnn_calls(text)),
            "results_split": [_spec(x) for x in results[name]],
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    pairs = relative_errors(results.pop(OURS), results.pop(PLAIN))
    errors = [float(f"{float(error):.3g}") for error in pairs]
    times = alternate(contenders, **rounds)
    for name, row in rows.items():
        timing = summary(times[name], times[PLAIN])
        numbers = {
            "median_ms": timing.median_us / 1e3,
            "low_ms": min(times[name]) / 1e3,
            "high_ms": max(times[name]) / 1e3,
            "ratio": timing.ratio,
            "ratio_low": timing.ratio_low,
            "ratio_high": timing.ratio_high,
        }
        row |= {key: float(f"{value:.5g}") for key, value in numbers.items()}
        row["errors"] = errors
    return [*rows.values()]


def _spec(x: jax.Array) -> str:
    spec = getattr(x.sharding, "spec", None)
    return str(x.sharding) if spec is None else f"({', '.join(map(str, spec))})"


def _cases(*, small: bool) -> list[Cell]:
    if jax.device_count() < 2:
        sys.exit("benchmarks.several_gpus needs two devices or more")
    return list(cells(small=small))


def _measure(found: Sequence[Cell], reduce_dtype: Sums) -> Iterator[list[Row]]:
    """Yield the rows of cells; failures stop no others."""
    rounds: dict[str, Any] = {"rounds": 7, "round_ms": 20.0}
    if jax.default_backend() != "gpu":
        rounds = {"rounds": 3, "round_ms": 1.0, "least_calls": 2}
    plans.set_cache(None)  # no plans and choices of other runs, and none left behind
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    failed: list[str] = []
    for cell in found:
        arrays = cell.operands(mesh)
        for what in DIRECTIONS:
            try:
                rows = run_cell(cell, what, arrays, reduce_dtype, rounds)
                check(rows[0]["errors"], *BOUNDS)
                yield rows
            except Exception:
                traceback.print_exc()
                failed.append(f"{cell} {what}")
    if failed:
        sys.exit(f"failed: {failed}")


# --- the page -------------------------------------------------------------------------


_MS = "{median_ms:.3f} ({low_ms:.3f}-{high_ms:.3f})"


def _lines(data: Data) -> list[str]:
    pairs = [*zip(data["rows"][::2], data["rows"][1::2], strict=True)]
    shown = [
        {**ours, "theirs": _MS.format_map(plain), "error": max(ours["errors"])}
        for ours, plain in pairs
    ]
    every = {row["sums"] for row in data["rows"]}
    sums = "f32" if every == {"f32"} else "the dtype of the operands"
    return [
        "Programs under plain `jax.jit`, whose operands are split over all GPUs. Times "
        "are medians of alternating rounds in one run, with their range; the ratio is "
        "to plain JAX (`jax.nn.dot_product_attention` through cuDNN, `x @ w`, "
        "`jax.lax.conv_general_dilated`, and for experts a sort and "
        "`jax.lax.ragged_dot` in a `shard_map` that gathers the weights) on the same "
        "shards, round by round. jax_cudnn adds up the shares of devices in "
        f"{sums}. Errors are relative norms of the difference from plain JAX, the "
        "largest of all results.",
        "",
        *table_of(
            shown,
            "workload | split | | ms | plain JAX, ms | ratio | >error",
            f"{{cell}} | {{split}} | {{what}} | {_MS} | {{theirs}} | {RANGED} | "
            "{error:.1e}",
        ),
        "",
        "What the compiled programs hold: where they differ, jax_cudnn's and then "
        "plain JAX's. Results are the output and the gradients of all operands.",
        "",
        *table_of(
            map(_held, pairs),
            "workload | split | | collectives | calls of cuDNN | results split",
            "{cell} | {split} | {what} | {collectives} | {cudnn_calls} | {results}",
        ),
    ]


def _held(pair: Sequence[Row]) -> Row:
    """Return what both programs hold, once where it is the same."""
    told = {
        "collectives": [listed(row["collectives"]) or "none" for row in pair],
        "cudnn_calls": [listed(row["cudnn_calls"]) or "none" for row in pair],
        "results": [" ".join(row["results_split"]) for row in pair],
    }
    return {**pair[0], **{k: "<br>".join(dict.fromkeys(v)) for k, v in told.items()}}


def listed(counts: dict[str, int]) -> str:
    """Return counts by name in words."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


markdown = Page(
    name="several_gpus",
    title="Several GPUs",
    command="python -m benchmarks.several_gpus",
    lines=_lines,
)


def main() -> None:
    """Run the cells that are asked for."""
    versions = environment()
    gpu = f"{jax.device_count()} x {versions['GPU']}"
    sums = {"choices": ("f32", "operands"), "default": "operands"}
    run_benchmark(
        __doc__,
        _cases,
        _measure,
        markdown,
        options={"--reduce-dtype": {**sums, "help": "of sums over devices"}},
        keys=("cell", "split", "what", "contender"),
        versions={**versions, "GPU": gpu},
    )


if __name__ == "__main__":
    main()
