# SPDX-License-Identifier: Apache-2.0
"""`plans.calibrate` and `plans.calibrated`: what "auto" knows of this machine's GPU."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax_cudnn.calibration import measuring, storing
from jax_cudnn.calibration.choosing import Chooser, drawn
from jax_cudnn.columns import Block, Heading, Page, Rows, Text
from jax_cudnn.errors import LibraryError
from jax_cudnn.graph import Target, version_text
from jax_cudnn.lowering.devices import LocalGpu, local_target
from jax_cudnn.policy import own
from jax_cudnn.policy.tables import shipped
from jax_cudnn.progress import followed
from jax_cudnn.tuning.together import workers

# The oldest architecture that cuDNN has fused plans for.
_OLDEST_SM = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was measured on a kind of GPU with a version of cuDNN.

    ``kernels`` counts the measured kernels by family, such as "matmul, 16 bits".
    ``changes`` says what was measured with other versions than those here, such as "JAX
    0.11.2, here 0.12.0 (400 kernels)". It decides all the same, until ``calibrate``
    measures it again. ``path`` is the file.
    """

    gpu: str
    cudnn: str
    jax: str
    driver: str
    date: str
    kernels: dict[str, int]
    changes: tuple[str, ...]
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Calibrated(Page):
    """The result of ``calibrated``: which measurements "auto" uses on this machine's
    GPU.

    ``gpu`` and ``cudnn`` are "" where JAX has no GPU. ``own`` are the calibrations
    that are kept here, and ``shipped`` the architecture and the version of cuDNN of
    the tables that come with the package, such as "sm_90, cuDNN 9.19". ``is_covered``
    says whether one of these is of this GPU's architecture and its cuDNN.
    """

    gpu: str
    cudnn: str
    own: tuple[Calibration, ...]
    shipped: tuple[str, ...]
    is_covered: bool
    broken: tuple[str, ...] = ()

    def _blocks(self) -> Iterator[Block]:
        name = f"{self.gpu} with cuDNN {self.cudnn}" if self.gpu else "No GPU here"
        yield Heading(name)
        if not self.own:
            yield Text("Nothing was calibrated on this machine.")
        for each in self.own:
            yield Text("")
            yield Text(
                f"{sum(each.kernels.values())} kernels measured on {each.gpu} with "
                f"cuDNN {each.cudnn}, JAX {each.jax}, {each.date}"
            )
            yield Rows(tuple((k, str(v)) for k, v in sorted(each.kernels.items())))
            for change in each.changes:
                yield Text(f"  changed since: {change}")
            yield Text(f"  in {each.path}")
        for shown in self.broken:
            yield Text("")
            yield Text(f"Not used: {shown}")
        yield Text("")
        yield Text(f"Tables of the package: {'; '.join(self.shipped)}.")
        if self.gpu and not self.is_covered:
            yield Text(
                "None of them is of this GPU's architecture and its cuDNN: the "
                "nearest decides. `jax-cudnn calibrate` measures this GPU."
            )


def calibrate(
    *,
    seconds: float = 300.0,
    is_thorough: bool = False,
    only: str = "",
) -> Calibrated:
    """Measure this machine's GPU, so that "auto" knows where cuDNN is faster on it.

    Calls of the sizes that models have are drawn: matmuls with the operations after
    them, convolutions, in groups and depthwise ones, norms and attention. Until the
    time is over, the kernels that are least like those measured before are timed with
    cuDNN and with XLA. What was measured is stored in the cache folder after every
    batch. This process and all that share the folder go by it, for this kind of GPU. A
    later call goes on where an earlier one ended, and measures again what was measured
    with another cuDNN, JAX or driver. Several processes may calibrate at once.

    What was tuned for a program itself (``plans.autotune``) goes before.

    Args:
      seconds: how long to measure. Default 300.
      is_thorough: whether to time the first plan of every engine, and every kernel of
        the first plan's. It takes several times as long for each call; the tables of
        the package are made so.
      only: a regular expression. Calls whose title has it are measured, such as "conv
        3x3", "layer_norm" or "bfloat16". Default: all.

    Returns:
      What is known now, as ``calibrated`` tells it.

    Raises:
      LibraryError: JAX has no NVIDIA GPU, or one that is older than sm_80, nothing can
        be kept on disk, or no kernel could be timed.
      GraphError: what is kept for this GPU is broken; the message names the file.
      ValueError: ``seconds`` is not a positive number, ``only`` is no regular
        expression, or no drawn call has it.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"calibrate: seconds={seconds!r} is not a positive number")
    try:
        wanted = re.compile(only)
    except re.error as error:
        raise ValueError(
            f"calibrate: only={only!r} is no regular expression: {error}"
        ) from error
    local = local_target()
    if local is None:
        raise LibraryError(
            "calibrate needs an NVIDIA GPU; JAX sees none here. `jax-cudnn doctor` "
            "says why."
        )
    gpu = LocalGpu(ordinal=local[0], target=local[1])
    if gpu.target.sm_version < _OLDEST_SM:
        raise LibraryError(
            f"calibrate: cuDNN has no fused plan for {gpu.target.name} "
            f"(sm_{gpu.target.sm_version}), so XLA runs all. Nothing is to be measured."
        )
    storing.store(gpu.target, ())  # What cannot be kept is told before it is measured.
    calls = drawn(gpu.target, lambda call: bool(wanted.search(call.title)))
    chooser = Chooser(calls, storing.fresh_rows(gpu.target))
    batches = _measured(chooser, gpu, seconds, is_thorough=is_thorough)
    for _ in followed(batches, "Calibrating", count=round(seconds), name=str):
        pass
    return calibrated()


def _measured(
    chooser: Chooser, gpu: LocalGpu, seconds: float, *, is_thorough: bool
) -> Iterator[str]:
    """Measure batches until the time is over; yield once for every second."""
    start, yielded, longest, count = time.monotonic(), 0, 0.0, 0
    while (spent := time.monotonic() - start) + longest < seconds:
        while yielded < spent:
            yield f"{yielded} s"
            yielded += 1
        chosen = chooser.take(workers())
        if not chosen and not longest:
            raise ValueError("calibrate: none of the drawn calls is wanted, or is new")
        if not chosen:
            break
        found = list(
            measuring.measure(
                [each.part for each in chosen], gpu, is_thorough=is_thorough
            )
        )
        for row in found:
            chooser.learn(row)
        storing.store(gpu.target, found)
        count += len(found)
        longest = max(longest, time.monotonic() - start - spent)
    if longest and not count:
        raise LibraryError(
            "calibrate: none of the kernels could be timed. Is the GPU's memory in "
            "use? The log of `jax_cudnn` at the level DEBUG has each reason."
        )


def calibrated() -> Calibrated:
    """Return which measurements "auto" uses on this machine's GPU: its own, or others.

    It reads the files as they are now. A running program uses a file that
    another process wrote after `set_cache`.
    """
    local = local_target()
    target = None if local is None else local[1]
    files, broken = own.read_all()
    tables = [(table.sm_version, table.cudnn) for table in shipped()]
    is_covered = False
    if target is not None:
        files.sort(key=lambda each: each.data["gpu"] != target.name)
        cudnn = target.cudnn_version // 100
        is_own = any(each.is_of(target.name, cudnn) for each in files)
        is_covered = is_own or (target.sm_version, cudnn) in tables
    return Calibrated(
        gpu="" if target is None else target.name,
        cudnn="" if target is None else version_text(target.cudnn_version),
        own=tuple(_calibration(each, target) for each in files),
        shipped=tuple(
            f"sm_{sm}, cuDNN {cudnn // 100}.{cudnn % 100}" for sm, cudnn in tables
        ),
        is_covered=is_covered,
        broken=broken,
    )


def _calibration(file: own.File, target: Target | None) -> Calibration:
    environment = file.data["environment"]
    kernels = Counter(
        ", ".join(name.split(", ")[:2]) for name, *_ in file.data["kernels"]
    )
    is_here = target is not None and file.is_of(
        target.name, target.cudnn_version // 100
    )
    return Calibration(
        gpu=file.data["gpu"],
        cudnn=environment.get("cuDNN", ""),
        jax=environment.get("JAX", ""),
        driver=environment.get("driver", ""),
        date=environment.get("date", ""),
        kernels=dict(kernels),
        changes=file.changes(target.cudnn_version) if target and is_here else (),
        path=file.path,
    )
