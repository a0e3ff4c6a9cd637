# SPDX-License-Identifier: Apache-2.0
"""Records which kernels contenders launch, by JAX's profiler."""

import collections
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.harness.page import Row
from benchmarks.harness.timing import Contender

CALLS = 5
# So many kernels of a contender are kept.
_KEPT = 40


class Event(NamedTuple):
    """What ran on the GPU: its name, and from when and for how many nanoseconds."""

    name: str
    duration: float
    start: float = 0.0


def recorded(
    contender: Contender, count: int = CALLS, device: str = "/device:GPU"
) -> list[Event]:
    """Return what calls of a contender run on GPUs whose names begin so."""
    contender.wait(contender.call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(count):
                contender.wait(contender.call())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return list(events(file, device))


def events(file: Path, device: str) -> Iterator[Event]:
    """Yield what ran on GPUs whose names begin so, given the profiler's file."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not plane.name.startswith(device):
            continue
        for line in plane.lines:
            # The others repeat these, by modules and operations of XLA.
            if line.name.startswith("Stream"):
                for each in line.events:
                    yield Event(each.name, each.duration_ns, each.start_ns)


def summary(found: Sequence[Event], count: int) -> Row:
    """Return kernels of a workload that was computed so often, and the time of each."""
    total: collections.Counter[str] = collections.Counter()
    often: collections.Counter[str] = collections.Counter()
    for event in found:
        total[event.name] += event.duration
        often[event.name] += 1
    named = total.most_common(_KEPT)
    return {
        "kernels": round(len(found) / count, 2),
        "kernels_us": round(sum(total.values()) / count / 1e3, 2),
        "longest": [
            {
                "name": name,
                "count": round(often[name] / count, 2),
                "us": round(us / count / 1e3, 2),
            }
            for name, us in named
        ],
    }
