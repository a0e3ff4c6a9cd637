# SPDX-License-Identifier: Apache-2.0
"""Times what jax_cudnn runs through XLA beside what a user of JAX writes, on one GPU.

    python -m benchmarks.xla_forms --out docs/internals/measured

times each operation with `implementation="xla"` and as plain JAX has it, in turns, and
writes xla_forms.json and xla_forms.md there: forward, with the gradients of all
operands for given cotangents, and for norms with those of a loss. What takes over 1.05
of the fastest plain form is timed again, longer, and listed. `--only REGEX` chooses
workloads by name and size, and keeps what the file has of others. `--small` tries the
script on a CPU, where times say nothing.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.harness.call_times import batched, timed
from benchmarks.harness.contest import BOTH, FORWARD, Function, program
from benchmarks.harness.operands import as_operand, count_of, drawn_sets
from benchmarks.harness.page import RANGED, Data, Page, table
from benchmarks.harness.program import run_benchmark
from benchmarks.harness.timing import Timing, summary
from benchmarks.xla.xla_form_cells import Workload, workloads
from jax_cudnn import plans
from jax_cudnn.policy.nearest import LOSS
from jax_cudnn.tuning.stopwatch import compile_over_sets
from jax_cudnn.tuning.together import together

_LOSS = "of a loss"
_OURS = "jax_cudnn"
_Run = Callable[..., Any]


class _Set(NamedTuple):
    operands: list[Any]
    cotangents: list[Any]


def _directions(work: Workload) -> tuple[str, ...]:
    return (FORWARD, BOTH, _LOSS) if work.has_loss else (FORWARD, BOTH)


def _of_loss(function: Function) -> _Run:
    """Return what gives a sum of squares and its gradients; cotangents are not used."""

    def loss(*operands: jax.Array) -> jax.Array:
        results = jax.tree.leaves(function(*operands))
        squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in results]
        return jnp.sum(jnp.stack(squares))

    def run(operands: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        del cotangents
        return program(loss, BOTH)(operands, [jnp.ones(())])

    return run


def _types(work: Workload) -> _Set:
    operands = [
        jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in work.operands
    ]
    function = next(iter(work.plain.values()))
    results = jax.tree.leaves(jax.eval_shape(function, *operands))
    return _Set(operands, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results])


def _drawn_sets(work: Workload) -> list[_Set]:
    """Return operands in sets, so many that none is read from the cache."""
    types, number = _types(work), len(work.operands)
    given = [*work.operands, *map(as_operand, types.cotangents)]
    return [_Set(x[:number], x[number:]) for x in drawn_sets(given)]


def _compiled(function: Function, what: str, types: _Set) -> _Run:
    run = _of_loss(function) if what == _LOSS else program(function, what)
    # Traced once for all sets.
    traced = jax.jit(run)
    with plans.using(implementation="xla"):
        return compile_over_sets(traced, [types] * count_of([*types[0], *types[1]]))


def _forms(work: Workload) -> dict[str, Function]:
    return {_OURS: work.ours, **work.plain}


def measure(works: Sequence[Workload]) -> Iterator[dict[str, Any]]:
    """Time workloads; yield a row for each."""
    for some in batched(works):
        names = [
            (work, what, form)
            for work in some
            for what in _directions(work)
            for form in _forms(work)
        ]
        made = together(
            [
                functools.partial(_compiled, _forms(work)[form], what, _types(work))
                for work, what, form in names
            ]
        )
        programs = {
            (str(work), what, form): run
            for (work, what, form), run in zip(names, made, strict=True)
        }
        for work in some:
            sets = _drawn_sets(work)
            row: dict[str, Any] = {"operation": work.operation, "size": work.size}
            for what in _directions(work):
                contenders = {x: programs[str(work), what, x] for x in _forms(work)}
                row[what] = _beside(contenders, sets)
            yield row


def _beside(contenders: Mapping[str, _Run], sets: Sequence[_Set]) -> dict[str, Any]:
    """Return our time, the fastest plain form and its time, and their ratio."""
    for rounds in (5, 21):
        times = timed(dict(contenders), sets, rounds=rounds)
        form, timing = _largest_ratio(times)
        if timing.ratio <= LOSS:
            break
    return {
        "us": round(timing.median_us, 2),
        "plain_us": round(summary(times[form], times[form]).median_us, 2),
        "plain": form,
        "ratio": round(timing.ratio, 3),
        "ratio_low": round(timing.ratio_low, 3),
        "ratio_high": round(timing.ratio_high, 3),
    }


def _largest_ratio(times: Mapping[str, Sequence[float]]) -> tuple[str, Timing]:
    """Return the plain form to which our ratio is the largest, and our times."""
    found = {x: summary(times[_OURS], each) for x, each in times.items() if x != _OURS}
    form = max(found, key=lambda x: found[x].ratio)
    return form, found[form]


def _lines(data: Data) -> list[str]:
    rows = data["rows"]
    every = [(row, what) for row in rows for what in (FORWARD, BOTH, _LOSS)]
    timed_ = [(row, what) for row, what in every if what in row]
    over = [(row, what) for row, what in timed_ if row[what]["ratio"] > LOSS]
    lines = [
        'Operations with `implementation="xla"`, and as a user of JAX writes them. All',
        "numbers are bf16 where no dtype is named. Ratios are our time over that of",
        "the fastest plain form, in turns within one run: below 1, ours is faster.",
        "Gradients are those of all operands, for given cotangents, with the result.",
        "Of a loss, they are those of the sum of the squares of the result: there XLA",
        "sees how the cotangent depends on it.",
        "",
        f"Of {len(timed_)} programs, {len(over)} take more than {LOSS:.2f} of the time "
        "of plain JAX.",
    ]
    if over:
        lines += ["", *(f"- {_place(row, what)}" for row, what in over)]
    columns = "operation | size | >µs | >forward | >µs | >with gradients | >µs "
    lines += ["", *table(f"{columns} | >of a loss", map(_cells, rows))]
    return lines


def _cells(row: Mapping[str, Any]) -> list[str]:
    found = [row["operation"], row["size"]]
    for what in (FORWARD, BOTH, _LOSS):
        times = row.get(what)
        found += [f"{times['us']:.1f}", f"{times['ratio']:.2f}"] if times else ["", ""]
    return found


def _place(row: Mapping[str, Any], what: str) -> str:
    found = row[what]
    return (
        f"{row['operation']} {row['size']}, {what}: {RANGED.format_map(found)} "
        f"of {found['plain']}, "
        f"which takes {found['plain_us']:.1f} µs"
    )


markdown = Page(
    name="xla_forms",
    title="XLA's form of operations beside plain JAX",
    comment="What jax_cudnn runs through XLA, beside plain JAX, on a GPU.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, workloads, measure, markdown)
