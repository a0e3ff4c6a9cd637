# SPDX-License-Identifier: Apache-2.0
"""`plans.autotune`: times every plan of a function's cuDNN calls, and XLA's code."""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jax_cudnn import choices, native
from jax_cudnn.choices import Choice, Key
from jax_cudnn.config import Options
from jax_cudnn.errors import GraphError, LibraryError, UnsupportedError
from jax_cudnn.graph import Graph, Target, to_json
from jax_cudnn.legalize import Legal, is_contraction, legalize, partition
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.cuda import label, launch, local_target, run_xla
from jax_cudnn.plans.stopwatch import (
    PlanStopwatch,
    compile_over_sets,
    draw_sets,
    time_calls,
)

# A first look takes one sample of each plan; those this much slower than the best one
# are not looked at again.
_HOPELESS = 1.25
_SAMPLES = 7
_BUILDERS = 8


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What ``autotune`` measured; ``str`` of it is a table."""

    device: str
    choices: dict[Key, Choice]

    def __str__(self) -> str:
        rows = [("op", "operands", "first / best", "cuDNN", "XLA", "chosen")]
        rows += [
            (
                choice.op,
                choice.operands,
                "-" if choice.first_ratio is None else f"{choice.first_ratio:.2f}",
                _text(choice.cudnn_us),
                _text(choice.xla_us),
                choice.implementation,
            )
            for choice in self.choices.values()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"microseconds a call on {self.device}"]
        for row in rows:
            cells = (cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def save(self, path: str | Path, made: str = "plans.autotune") -> None:
        """Write a choices file, for ``plans.load_choices``."""
        choices.write(Path(path), self.choices, made)


def _text(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.1f}"


def autotune(
    function: Callable[..., Any],
    *args: Any,
    budget_s: float = float("inf"),
    progress: bool = True,
    **kwargs: Any,
) -> Tuning:
    """Measure which plan is fastest for each cuDNN call of a function, and use it.

    Finds every convolution, matmul and attention that ``function(*args, **kwargs)``
    hands to cuDNN, gradients included if it takes them; times all of cuDNN's plans and
    XLA's own code for each, on random operands of those shapes and in memory of its
    own; and makes the fastest the choice of this process: functions that are compiled
    afterwards use it, with ``implementation="auto"`` also where that is XLA. Functions
    that were compiled before keep their plans.

    Args:
      function: traced, not run; may be jitted.
      *args: arrays or ``jax.ShapeDtypeStruct``.
      budget_s: seconds after which no further call is measured. Default: no limit.
      progress: whether to show progress on stderr. Default True.
      **kwargs: as ``*args``.

    Returns:
      A ``Tuning``; its ``save`` writes a file that ``plans.load_choices`` reads.

    Raises:
      LibraryError: there is no NVIDIA GPU or no cuDNN here.
    """
    local = local_target()
    if local is None:
        raise LibraryError("plans.autotune needs an NVIDIA GPU; JAX sees none here.")
    target = local[1]
    parts = dict.fromkeys(_parts(traced_graphs(function, *args, **kwargs)))
    found: dict[Key, Choice] = {}
    start = time.monotonic()
    for i, (part, options) in enumerate(parts):
        if time.monotonic() - start > budget_s:
            break
        choice = measure(part, options, target)
        found[choices.key_of(part, target)] = choice
        if progress:
            best = _text(choice.cudnn_us)
            print(
                f"[{i + 1}/{len(parts)}] {choice.op} {choice.operands}: "
                f"cuDNN {best} µs, XLA {_text(choice.xla_us)} µs",
                file=sys.stderr,
            )
    choices.table().add(found)
    return Tuning(device=target.name, choices=found)


def load_choices(path: str | Path) -> int:
    """Use a choices file from now on, and return how many choices it has.

    Entries for other GPUs and other versions of cuDNN are kept and have no effect.

    Raises:
      GraphError: the file is not a choices file.
    """
    loaded = choices.read(Path(path))
    choices.table().add(loaded)
    return len(loaded)


def _parts(found: list[tuple[Graph, Options, bool]]) -> Iterator[tuple[Graph, Options]]:
    for graph, options, is_linear in found:
        if is_linear or graph.has_empty_tensor or options.implementation == "xla":
            continue
        for part in partition(graph):
            if any(map(is_contraction, part.nodes)):
                yield part, options


def measure(part: Graph, options: Options, target: Target) -> Choice:
    """Time everything that can run a part of a graph, and return the fastest.

    Plans of one graph race by the device's events. The winner of each way of rewriting
    the part then meets XLA's code, each with all its array work, in compiled programs.
    """
    device = jax.local_devices(backend="cuda")[0]
    sets = draw_sets(part, device)

    def time_it(function: Callable[..., Any]) -> float:
        call = compile_over_sets(function, sets)
        return time_calls(call, len(sets), samples=_SAMPLES).median_us

    xla_us = time_it(lambda *xs: run_xla(part, xs, options))
    first_ratio: float | None = None
    best: tuple[float, int, str] | None = None
    for index, legal, plans in _contenders(part, target):
        changed = [list(jax.jit(legal.before)(operands)) for operands in sets]
        race = list(_race(PlanStopwatch(legal.graph, changed, device), plans))
        if not race:
            continue
        winner, winner_us = min(race, key=lambda entry: entry[1])
        if first_ratio is None:
            first_ratio = race[0][1] / winner_us
        us = time_it(functools.partial(_run_legal, legal, winner))
        if best is None or us < best[0]:
            best = (us, index, winner.choice)
    is_cudnn = best is not None and best[0] <= xla_us
    return Choice(
        op=label(part),
        operands=", ".join(
            f"{t.dtype}[{','.join(map(str, t.stored_shape))}]"
            for t in part.input_tensors
        ),
        implementation="cudnn" if is_cudnn else "xla",
        candidate=best[1] if best else 0,
        plan=best[2] if best else "",
        cudnn_us=round(best[0], 2) if best else None,
        first_ratio=None if first_ratio is None else round(first_ratio, 3),
        xla_us=round(xla_us, 2),
    )


def _run_legal(
    legal: Legal, plan: native.PlanInfo, *operands: jax.Array
) -> Sequence[jax.Array]:
    launched = launch(legal.graph, plan, plan.choice, legal.before(operands))
    return legal.after(operands, launched)


def _contenders(
    part: Graph, target: Target
) -> Iterator[tuple[int, Legal, list[native.PlanInfo]]]:
    """Yield each way of rewriting the part, with the plans that build for it."""
    with ThreadPoolExecutor(_BUILDERS) as pool:
        for index, legal in enumerate(legalize(part, target).candidates):
            json = to_json(legal.graph)
            try:
                listed = native.candidates(json)
            except UnsupportedError:
                continue
            pinned = [each.choice for each in listed if each.choice]
            built = pool.map(lambda choice, json=json: _build(json, choice), pinned)
            yield index, legal, [plan for plan in built if plan is not None]


def _build(json: str, choice: str) -> native.PlanInfo | None:
    try:
        return native.plan(json, choice=choice)
    except (UnsupportedError, GraphError):
        return None


def _race(
    stopwatch: PlanStopwatch, plans: list[native.PlanInfo]
) -> Iterator[tuple[native.PlanInfo, float]]:
    """Time the plans, with more samples for those that may be the best."""
    looks = [
        (plan, stopwatch.time(plan, samples=1, sample_us=500).median_us)
        for plan in plans
    ]
    bound = min((look for _, look in looks), default=0.0) * _HOPELESS
    for i, (plan, look) in enumerate(looks):
        if look <= bound:
            yield plan, stopwatch.time(plan, samples=_SAMPLES).median_us
        elif i == 0:
            yield plan, look
