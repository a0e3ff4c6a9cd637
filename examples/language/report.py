# SPDX-License-Identifier: Apache-2.0
"""Reports on a run: collectives, memory, speed, and the losses as a picture."""

import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from language.names import is_matrix, name_of
from language.settings import Settings
from language.task import Task

# Dense bf16 FLOP/s, from NVIDIA's data sheets.
PEAKS = {
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def describe_program(program: Any) -> str:
    """Return the collectives and the memory of a compiled step."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" ({names})(?:-start)?\(", program.as_text())
    counts = ", ".join(f"{found.count(name)} {name}" for name in sorted(set(found)))
    memory = program.memory_analysis()
    told = f"collectives of a step: {counts or 'none'}"
    if memory is not None:
        state, scratch = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        told += (
            f"; per device {state / 2**20:,.0f} MiB of state and batch, "
            f"{scratch / 2**20:,.0f} MiB of scratch"
        )
    return told


def flops_per_token(params: nnx.State, task: Task) -> float:
    """Return the operations of one training step per token, those of products alone.

    6 for each number in a matrix (2 forward, 4 backward), and for attention the half of
    the scores that the causal mask leaves. Lookups of rows, and what is computed twice
    to save memory, are not counted.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    matrices = sum(
        leaf.size
        for path, leaf in leaves
        if is_matrix(path) and not name_of(path).endswith(task.lookups)
    )
    settings = task.settings
    return 6 * matrices + 6 * settings.layers * settings.width * settings.context


def peak_flops(task: Task) -> float | None:
    """Return the FLOP/s that the devices reach at best together, where it is known."""
    mesh = task.layout.mesh
    kind = mesh.devices.flat[0].device_kind
    peaks = (peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", kind))
    peak = next(peaks, None) if task.settings.dtype == "bfloat16" else None
    return None if peak is None else peak * mesh.size


class Progress:
    """A line that is redrawn in a terminal, and a line per twentieth elsewhere."""

    def __init__(self, settings: Settings, flops_per_token: float, peak: float | None):
        self._settings = settings
        self._is_terminal = sys.stdout.isatty()
        self._flops_per_token = flops_per_token
        self._peak = peak
        self._times: list[float] = []  # of each step, s
        self._last: float | None = None

    def show(self, done: int, loss: float, *, is_last: bool) -> None:
        """Note that a step is over, and tell of it now and then."""
        now = time.perf_counter()
        # The first step has no beginning here. The last one ran while the step before
        # was told of.
        if self._last is not None and not is_last:
            self._times.append(now - self._last)
        self._last = now
        steps = self._settings.steps
        every = max(steps // (200 if self._is_terminal else 20), 1)
        if not (is_last or done % every == 0):
            return
        line = f"  {done:>6}/{steps}  loss {loss:.3f}"
        if recent := self._times[-every:]:
            left = (steps - done) * statistics.median(recent)
            line += f"  {self._speed(recent)}  {left:3.0f} s left"
        if self._is_terminal:
            print(f"\r{line}", end="\n" if is_last else "", flush=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Tell how fast it was."""
        if self._times:
            print(f"  {self._speed(self._times)}, the median of {len(self._times)}")

    def _speed(self, times: list[float]) -> str:
        """Return the median time of a step and what follows from it."""
        seconds = statistics.median(times)
        rate = self._settings.tokens_per_step / seconds
        told = f"{1e3 * seconds:,.1f} ms a step, {rate:,.0f} tokens/s"
        if self._peak is None:
            return told
        share = self._flops_per_token * rate / self._peak
        return f"{told}, {share:.1%} model FLOPs utilisation"


def draw_losses(
    path: Path, losses: np.ndarray, lines: dict[str, float], title: str
) -> None:
    """Write the loss curve as a picture, with horizontal lines to compare it with."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    window = max(len(losses) // 50, 1)
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    axes.plot(np.arange(1, len(losses) + 1), losses, color="C0", alpha=0.3, lw=0.8)
    axes.plot(np.arange(window, len(losses) + 1), smooth, color="C0", label="training")
    for i, (label, value) in enumerate(lines.items()):
        axes.axhline(value, color=f"C{i + 1}", ls="--", label=f"{label}: {value:.3f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)
