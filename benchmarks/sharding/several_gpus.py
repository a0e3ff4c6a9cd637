# SPDX-License-Identifier: Apache-2.0
"""Benchmarks calls under plain `jax.jit` with sharded operands, on all GPUs.

    python -m benchmarks.several_gpus --out docs/internals/measured

writes several_gpus.json and several_gpus.md there, after every cell. Beside each call
runs the same in plain JAX, on the same shards. Operands are random bf16; see timing.py
for how times are taken. Plans are untuned, but for choices that the package ships.
Devices add up their shares of a product in the operands' dtype, as plain JAX does,
unless `--reduce-dtype f32` asks for jax_cudnn's default.

    JAX_NUM_CPU_DEVICES=4 python -m benchmarks.several_gpus --tiny

runs everything in small sizes on devices of the CPU.
"""

import argparse
import collections
import functools
import math
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AxisType

from benchmarks.harness.checks import check, relative_errors
from benchmarks.harness.page import ranged, table, versions_text
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, alternate, summary
from benchmarks.harness.versions import environment
from benchmarks.sharding.several_gpus_cells import AXIS, Cell, Function, cells
from jax_cudnn import native, plans

OURS, PLAIN = "jax_cudnn", "plain JAX"
FORWARD, BOTH = "fwd", "fwd+bwd"
_KINDS = (
    "all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all|"
    "collective-permute"
)
# Bounds of the relative error between the contenders, of results and of gradients.
# Both round to bf16, and XLA may keep the sums of a bias's gradient in bf16 too. A
# wrong result, with a term or a sum over devices too few, is off by about 1.
BOUNDS = 3e-2, 3e-1


# --- one cell -------------------------------------------------------------------------


def _forward(function: Function) -> Callable[..., tuple[jax.Array, ...]]:
    return lambda cotangent, *operands: (function(*operands),)


def _with_gradients(function: Function) -> Callable[..., tuple[jax.Array, ...]]:
    def run(cotangent: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        output, pullback = jax.vjp(function, *operands)
        return output, *pullback(cotangent)

    return run


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


def _counts(names: Sequence[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(names).items()))


def run_cell(
    cell: Cell,
    what: str,
    arrays: Sequence[jax.Array],
    *,
    reduce_dtype: Literal["f32", "operands"] = "operands",
    **how: Any,
) -> list[dict[str, Any]]:
    """Time a cell in one direction; return the row of each contender."""
    wrapped = {FORWARD: _forward, BOTH: _with_gradients}[what]
    rows: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {}
    contenders: dict[str, Contender] = {}
    for name, function in ((OURS, cell.ours), (PLAIN, cell.plain)):
        start = time.monotonic()
        with plans.using(reduce_dtype=reduce_dtype):
            program = jax.jit(wrapped(function)).lower(*arrays).compile()
        seconds, text = time.monotonic() - start, program.as_text()
        memory = program.memory_analysis()
        assert text is not None
        assert memory is not None
        call = functools.partial(program, *arrays)
        results[name] = call()
        contenders[name] = Contender(call=call, wait=jax.block_until_ready)
        rows[name] = {
            "cell": cell.name,
            "split": cell.split,
            "what": what,
            "contender": name,
            "compile_s": round(seconds, 2),
            "collectives": _counts([each.split()[0] for each in sent(text)]),
            "sent": sent(text),
            "cudnn_calls": _counts(cudnn_calls(text)),
            "results_split": [_spec(x) for x in results[name]],
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    pairs = relative_errors(results.pop(OURS), results.pop(PLAIN))
    errors = [float(f"{float(error):.3g}") for error in pairs]
    builds = native.cache_stats().builds
    times = alternate(contenders, **how)
    assert native.cache_stats().builds == builds, "a plan was built while timing"
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
        print(
            f"  {what:8s} {name:10s} {_ms(row)} ms  {ranged(row)}  "
            f"{_listed(row['collectives'])}; {_listed(row['cudnn_calls'])}; "
            f"errors {errors}",
            flush=True,
        )
    return [*rows.values()]


def _ms(row: dict[str, Any]) -> str:
    return f"{row['median_ms']:.3f} ({row['low_ms']:.3f}-{row['high_ms']:.3f})"


def _spec(x: jax.Array) -> str:
    spec = getattr(x.sharding, "spec", None)
    return str(x.sharding) if spec is None else f"({', '.join(map(str, spec))})"


# --- the report -----------------------------------------------------------------------


def markdown(data: dict[str, Any]) -> str:
    """Return the report as a page."""
    pairs = [*zip(data["rows"][::2], data["rows"][1::2], strict=True)]
    lines = [
        "# Several GPUs",
        "",
        f"Printed by `{data['command']}`; do not edit. "
        f"{versions_text(data['environment'])}.",
        "",
        "Programs under plain `jax.jit`, whose operands are split over all GPUs. Times "
        "are medians of alternating rounds in one run, with their range; the ratio is "
        "to plain JAX (`jax.nn.dot_product_attention` through cuDNN, `x @ w`, "
        "`jax.lax.conv_general_dilated`, and for experts a sort and "
        "`jax.lax.ragged_dot` in a `shard_map` that gathers the weights) on the same "
        "shards, round by round. jax_cudnn adds up the shares of devices in "
        f"{'f32' if data['reduce_dtype'] == 'f32' else 'the dtype of the operands'}. "
        "Errors "
        "are relative norms of the difference from plain JAX, the largest of all "
        "results.",
        "",
        *table(
            "workload | split | | ms | plain JAX, ms | ratio | >error",
            (
                [
                    *(ours["cell"], ours["split"], ours["what"], _ms(ours)),
                    *(_ms(plain), ranged(ours), f"{max(ours['errors']):.1e}"),
                ]
                for ours, plain in pairs
            ),
        ),
    ]
    lines += [
        "",
        "What the compiled programs hold: where they differ, jax_cudnn's and then "
        "plain JAX's. Results are the output and the gradients of all operands.",
        "",
        *table(
            "workload | split | | collectives | calls of cuDNN | results split",
            map(_held, pairs),
        ),
    ]
    for failure in data["failures"]:
        lines += ["", f"Failed: {failure['cell']}: {failure['error']}"]
    return "\n".join(lines) + "\n"


def _held(pair: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what both programs hold, once where it is the same."""
    yield from (pair[0][key] for key in ("cell", "split", "what"))
    for told in (
        [_listed(row["collectives"]) for row in pair],
        [_listed(row["cudnn_calls"]) for row in pair],
        [" ".join(row["results_split"]) for row in pair],
    ):
        yield "<br>".join(dict.fromkeys(told))


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cells, writing the report after each; failures stop no others."""
    start = time.monotonic()
    count = len(jax.devices())
    if count < 2:
        sys.exit("benchmarks.several_gpus needs two devices or more")
    mesh = jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,))
    versions = environment()
    command = ["python", "-m", "benchmarks.several_gpus"]
    command += ["--tiny"] if options.tiny else []
    command += ["--reduce-dtype=f32"] if options.reduce_dtype == "f32" else []
    command += ["--cells", options.cells] if options.cells else []
    data: dict[str, Any] = {
        "command": shlex.join(command),
        "reduce_dtype": options.reduce_dtype,
        "environment": {**versions, "GPU": f"{count} x {versions['GPU']}"},
        "rows": [],
        "failures": [],
    }
    report = Table(folder=options.out, name="several_gpus", markdown=markdown)
    rounds: dict[str, Any] = {"rounds": 7, "round_ms": 20.0}
    if options.tiny:
        rounds = {"rounds": 3, "round_ms": 1.0, "least_calls": 2}
    for cell in cells(tiny=options.tiny):
        if not re.search(options.cells, cell.key):
            continue
        spent = time.monotonic() - start
        if spent > options.budget_s:
            print(f"not run for lack of time: {cell.key}")
            continue
        print(f"[{spent:5.0f} s] {cell.key}", flush=True)
        arrays = cell.operands(mesh)
        for what in (FORWARD, BOTH):
            try:
                rows = run_cell(
                    cell, what, arrays, reduce_dtype=options.reduce_dtype, **rounds
                )
                data["rows"] += rows
                check(rows[0]["errors"], *BOUNDS)
            except Exception as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}"[:2000]
                data["failures"].append({"cell": f"{cell.key} {what}", "error": text})
        report.write(data)
    print(f"[{time.monotonic() - start:5.0f} s] done")
    return data


def main() -> None:
    """Run the cells that are asked for."""
    made = parser(__doc__)
    made.add_argument("--cells", default="", help="regex on 'name, ... split'")
    made.add_argument("--budget-s", type=float, default=math.inf,
                        help="start no cell after so many seconds")  # fmt: skip
    made.add_argument("--reduce-dtype", choices=("f32", "operands"),
                        default="operands",
                        help="of sums over devices; default: operands")  # fmt: skip
    made.add_argument("--tiny", action="store_true", help="small sizes, for CPUs")
    options = made.parse_args()
    plans.set_cache(None)  # no plans and choices of other runs, and none left behind
    data = run(options)
    print(markdown(data))
    if data["failures"]:
        sys.exit(f"failed: {[failure['cell'] for failure in data['failures']]}")


if __name__ == "__main__":
    main()
