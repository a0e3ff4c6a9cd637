# SPDX-License-Identifier: Apache-2.0
"""Records which kernels contenders launch, by JAX's profiler."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.harness.timing import Contender


class Event(NamedTuple):
    """What ran on the GPU: its name, and from when and for how many nanoseconds."""

    name: str
    duration: float
    start: float = 0.0


def recorded(contender: Contender, device: str) -> list[Event]:
    """Return what a call of a contender runs on GPUs whose names begin so."""
    contender.wait(contender.call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
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
