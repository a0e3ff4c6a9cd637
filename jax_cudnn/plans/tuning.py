# SPDX-License-Identifier: Apache-2.0
"""`plans.autotune`: times every plan of a function's cuDNN calls, and XLA's code."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_cudnn import choices
from jax_cudnn.choices import Choice, Key
from jax_cudnn.config import Options
from jax_cudnn.errors import LibraryError
from jax_cudnn.graph import Graph
from jax_cudnn.legalize import is_contraction, partition
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.cuda import local_target
from jax_cudnn.measuring import measure


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
    own; and makes the fastest the choice of this process and, by way of the cache
    folder (``plans.set_cache``), of those to come: functions that are compiled
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
    choices.remember(found)
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
            has_sums = any(node.kind == "reduction" for node in part.nodes)
            if has_sums or any(map(is_contraction, part.nodes)):
                yield part, options
