# SPDX-License-Identifier: Apache-2.0
"""Times how long plans take: built, read from disk, or from the process's own cache.

    python -m benchmarks.plan_times --out docs/internals/measured

writes plan_times.json and plan_times.md there, after every sample. Needs an NVIDIA
GPU. Every sample of a plan that is built or comes from disk is taken in a process of
its own.
"""

import argparse
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness.page import Data, Page, table, versions_text
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from jax_cudnn import native, plans
from jax_cudnn.errors import LibraryError
from jax_cudnn.graph import is_anchor, to_json
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.devices import local_target
from jax_cudnn.policy import ranked

# Where a plan comes from. For the first two, the process starts without plans.
COLD, DISK, PROCESS = "cold", "disk", "process"
# What cuDNN has planned before in the process: libraries that its engines share
# (cuBLASLt, the precompiled kernels) are opened for the first of a kind.
_STATES = {
    "start": "nothing",
    "other": "another kind",
    "same": "the same kind",
}
# A plan from disk may take at most this share of the time that building it takes.
_GOAL = 0.05


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A function whose plans, forward and backward, are timed."""

    function: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]


_sdpa = functools.partial(jax_cudnn.sdpa, is_causal=True)
_conv = functools.partial(
    jax_cudnn.conv, window_strides=(1, 1), padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"), activation="relu",
)  # fmt: skip
_matmul = functools.partial(jax_cudnn.matmul, activation="gelu")
WORKLOADS = {
    "sdpa": Workload(function=_sdpa, shapes=((4, 4096, 16, 128),) * 3),
    "conv": Workload(function=_conv, shapes=((64, 56, 56, 64), (3, 3, 64, 64))),
    "matmul": Workload(function=_matmul, shapes=((8192, 4096), (4096, 4096))),
}


# --- in a process of its own ----------------------------------------------------------


def _halved(workload: Workload) -> Workload:
    """Return the workload with half as many rows or images."""
    first, *others = workload.shapes
    has_batch = all(
        len(shape) == len(first) and shape[0] == first[0] for shape in others
    )
    half = (first[0] // 2, *first[1:])
    shapes = [half] * len(workload.shapes) if has_batch else [half, *others]
    return replace(workload, shapes=tuple(shapes))


def _graphs(workload: Workload) -> list[str]:
    """Return the graphs that cuDNN plans for a call with its gradients."""

    def value_and_grads(*operands: jax.Array) -> Any:
        run = functools.partial(workload.function, implementation="cudnn")
        out, pull = jax.vjp(run, *operands)
        return out, pull(jnp.ones_like(out))

    local = local_target()
    assert local is not None
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in workload.shapes]
    found: dict[str, None] = {}
    for traced in traced_graphs(value_and_grads, *operands):
        for part in traced.parts:
            for candidate in (way.rewrite for way in ranked(part, local[1])[:1]):
                if any(map(is_anchor, candidate.graph.nodes)):
                    found[to_json(candidate.graph)] = None
    return list(found)


def _plan_all(graphs: Sequence[str], ordinal: int) -> float:
    """Return the milliseconds that the plans of all graphs take, one by one."""
    start = time.perf_counter()
    for graph in graphs:
        native.plan(graph, device=ordinal)
    return (time.perf_counter() - start) * 1e3


def work(names: Sequence[str], folder: str) -> dict[str, Any]:
    """Plan workloads in order, with JAX and CUDA started, but not cuDNN."""
    local = local_target()
    if local is None:
        raise LibraryError("benchmarks.plan_times needs an NVIDIA GPU.")
    jnp.zeros(8).block_until_ready()
    native.load_libraries()
    plans.set_cache(folder)
    times: list[dict[str, Any]] = []
    rounds = [("start", names[:1]), ("other", names[1:]), ("same", names)]
    for state, workloads in rounds:
        for name in workloads:
            workload = WORKLOADS[name]
            graphs = _graphs(workload if state != "same" else _halved(workload))
            first = _plan_all(graphs, local[0])
            again = _plan_all(graphs, local[0])
            times.append(
                {"name": name, "state": state, "first_ms": first, "again_ms": again,
                 "plans": len(graphs)}
            )  # fmt: skip
    stats = native.cache_stats()
    return {
        "times": times,
        "builds": stats.builds,
        "disk_hits": stats.disk_hits,
        "failures": [stats.disk_last_failure] if stats.disk_failures else [],
    }


# --- the samples ----------------------------------------------------------------------


def _orders() -> Iterator[tuple[str, ...]]:
    """Yield orders in which each workload is the first once."""
    names = tuple(WORKLOADS)
    for i in range(len(names)):
        yield names[i:] + names[:i]


def _ask(order: Sequence[str], folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan_times", "--work", ",".join(order),
         "--folder", str(folder)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
             "CUDA_CACHE_PATH": str(folder / "cuda")},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(samples: int) -> Iterator[dict[str, Any]]:
    """Yield the samples so far, in ms, by workload, state of cuDNN and source."""
    found: dict[str, Any] = {
        name: {state: {COLD: [], DISK: [], PROCESS: []} for state in _STATES}
        for name in WORKLOADS
    }
    failures: dict[str, None] = {}
    for sample in range(samples):
        for order in _orders():
            with tempfile.TemporaryDirectory() as folder:
                for source in (COLD, DISK):
                    answer = _ask(order, Path(folder))
                    count = sum(each["plans"] for each in answer["times"])
                    builds, hits = (count, 0) if source == COLD else (0, count)
                    if (answer["builds"], answer["disk_hits"]) != (builds, hits):
                        raise RuntimeError(f"{source}: not as expected: {answer}")
                    failures |= dict.fromkeys(answer["failures"])
                    _note(found, source, answer["times"])
        print(f"sample {sample + 1} of {samples}", file=sys.stderr)
        yield {"workloads": found, "failures": list(failures), "samples": sample + 1}


def _note(found: dict[str, Any], source: str, times: list[dict[str, Any]]) -> None:
    for each in times:
        place = found[each["name"]][each["state"]]
        place[source].append(each["first_ms"])
        place[PROCESS].append(each["again_ms"])
        found[each["name"]]["plans"] = each["plans"]


# --- the report -----------------------------------------------------------------------


def _head(data: Data) -> str:
    info = data["run"]
    return (
        f"Written by `{info['command']}`; do not edit. {info['date']}, "
        f"{versions_text(info['environment'])}."
    )


def _lines(data: Data) -> list[str]:
    lines = [
        "The plans of a call and its gradients in bf16, asked for one by one as a "
        "compilation does. Cold: built by cuDNN, with an empty cache folder and CUDA's "
        "own cache empty (`CUDA_CACHE_PATH`: NVRTC and the driver keep what they have "
        "compiled there). Disk: from the cache folder, in another process. Both are "
        "taken in fresh processes, in which JAX and CUDA are running. What cuDNN has "
        "planned before decides which of its libraries are open: without any, its "
        "first handle and all of them are in the time; the same kind is the workload "
        "itself, after which one with half the rows or images is timed. Process: asked "
        "for again. Medians, in brackets the lowest and the highest of all samples.",
        "",
    ]
    missed: list[str] = []
    rows: list[list[Any]] = []
    for name, workload in data["workloads"].items():
        for state, label in _STATES.items():
            samples = workload[state]
            ratio = _median(samples[DISK]) / _median(samples[COLD])
            if ratio >= _GOAL:
                missed.append(f"{name} after {label} ({ratio:.1%})")
            cold, disk, process = (_text(samples[x]) for x in (COLD, DISK, PROCESS))
            about = name, workload["plans"], label
            rows.append([*about, cold, disk, f"{ratio:.1%}", process])
    columns = "workload | >plans | before | >cold, ms | >disk, ms | >of cold "
    lines += table(f"{columns} | >process, ms", rows)
    verdict = f"missed by {', '.join(missed)}" if missed else "met"
    lines += ["", f"Goal, disk below {_GOAL:.0%} of cold: {verdict}."]
    if data["failures"]:
        lines += ["", "What went wrong on disk:", ""]
        lines += [f"- {failure}" for failure in data["failures"]]
    lines += ["", "The workloads:", ""]
    for name, workload in WORKLOADS.items():
        shapes = ", ".join(f"bf16{list(shape)}" for shape in workload.shapes)
        lines.append(f"- {name}: {shapes}")
    return lines


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def _text(samples: Sequence[float]) -> str:
    low, middle, high = min(samples), _median(samples), max(samples)
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


markdown = Page(
    name="plan_times", title="How long plans take", head=_head, lines=_lines
)


def main() -> None:
    """Take the samples and write the report, or take one as another process asks."""
    made = parser(__doc__)
    made.add_argument("--samples", type=int, default=5, help="at least 1")
    made.add_argument("--work", help=argparse.SUPPRESS)
    made.add_argument("--folder", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.work:
        print(json.dumps(work(options.work.split(","), options.folder)))
        return
    found = Table(folder=options.out, page=markdown)
    for data in measure(options.samples):
        data["run"] = {
            "command": f"python -m benchmarks.plan_times --samples {data['samples']}",
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "environment": found.versions,
        }
        found.write(data)


if __name__ == "__main__":
    main()
