# SPDX-License-Identifier: Apache-2.0
"""Benchmarks attention over a cache of keys and values, beside jax.nn and PyTorch.

    python -m benchmarks.decode --out docs/benchmarks

writes decode.json and decode.md there. Needs an NVIDIA GPU; PyTorch is used where it is
installed. Operands are random bf16, all lengths are those of the cells; see contest.py
for how contenders are checked and timed. `--only REGEX` chooses workloads by their
sizes; the rows of others that decode.json has are kept. With `--small`, sizes are small
enough to try it on a CPU.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from benchmarks.attention.ways import heads_second, torch_kernels
from benchmarks.harness import contest_report
from benchmarks.harness.contest import Cell, Way
from benchmarks.harness.operands import Operand
from benchmarks.harness.page import RANGED, Data, Page, table_of
from benchmarks.harness.torch_side import torch
from jax_cudnn import masks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One workload; axis letters as in jax_cudnn.cached_sdpa.

    The caches are filled to a ``filled`` part. Without ``e``, values have ``d``
    columns.
    """

    b: int
    t: int
    s: int = 1
    h: int = 32
    k: int = 8
    d: int = 128
    e: int | None = None
    filled: float = 1.0
    window: int | None = None

    @property
    def size(self) -> str:
        """How tables name it."""
        sizes = f"{self.d}" if self.e is None else f"{self.d}:{self.e}"
        text = f"({self.b},{self.s},{self.h}h:{self.k},{sizes}) t={self.t}"
        text += "" if self.filled == 1 else f" filled to {self.filled:g}"
        return text + (f" window {self.window}" if self.window else "")

    @property
    def length(self) -> int:
        """The tokens of each sequence."""
        return int(self.t * self.filled)

    @property
    def columns(self) -> tuple[int, int]:
        """The head sizes of keys and of values."""
        return self.d, self.d if self.e is None else self.e

    @property
    def bytes(self) -> int:
        """The bytes of keys and values that have to be read at least."""
        tokens = min(self.length, (self.window or self.length) + self.s)
        return 2 * self.b * tokens * self.k * sum(self.columns)


_WORKLOADS = (
    Workload(b=64, t=4096),
    Workload(b=64, t=4096, filled=0.25),
    Workload(b=8, t=8192),
    Workload(b=1, t=131072),
    Workload(b=64, t=4096, s=2),
    Workload(b=64, t=4096, s=4),
    Workload(b=64, t=4096, s=8),
    Workload(b=64, t=4096, s=16),
    Workload(b=64, t=4096, s=64),
    Workload(b=8, t=8192, s=4),
    Workload(b=64, t=4096, s=1, window=512),
    Workload(b=64, t=4096, s=4, window=512),
    # Latent attention. Its values are columns of its keys, but here an array apart.
    Workload(b=64, t=4096, h=16, k=1, d=576, e=512),
    Workload(b=64, t=4096, h=128, k=1, d=576, e=512),
    Workload(b=64, t=4096, s=2, h=16, k=1, d=576, e=512),
)
_SMALL = (
    Workload(b=2, t=64, d=16),
    Workload(b=2, t=64, s=4, d=16, window=16),
    Workload(b=2, t=64, h=4, k=1, d=24, e=16),
)
_PAGES = (16, 64)
_OPERATION, _OURS = "attention over a cache", "cached_sdpa"


def cells(*, small: bool) -> list[Cell]:
    """Return the workloads; small ones are for a CPU."""
    return [_cell(work) for work in (_SMALL if small else _WORKLOADS)]


def _cell(work: Workload) -> Cell:
    caches = [Operand((work.b, work.t, work.k, size)) for size in work.columns]
    lengths = np.full((work.b,), work.length, np.int32)
    window = None if work.window is None else (work.window, 0)
    options: dict[str, Any] = {"local_window_size": window, "implementation": "cudnn"}

    def mask_of(lengths: Any) -> masks.Mask:
        mask = masks.Causal("cache") & masks.Lengths(key=lengths)
        return mask if window is None else mask & masks.Window(*window, "cache")

    cached = functools.partial(jax_cudnn.cached_sdpa, **options)

    paged = functools.partial(jax_cudnn.paged_sdpa, **options)

    def masked(query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
        mask = mask_of(lengths)
        return jax_cudnn.sdpa(query, key, value, mask=mask, implementation="cudnn")

    def theirs(how: Any, query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
        given = mask_of(lengths).arguments(work.s, work.t)
        return jax.nn.dot_product_attention(
            query, key, value, **given, implementation=how
        )

    ways = {_OURS: Way(function=cached)}
    for page in _PAGES:
        into = functools.partial(_in_pages, work, page)
        ways[f"paged_sdpa, {page}"] = Way(function=paged, enter=into)
    if work.s > 1 or work.window:
        ways["sdpa with a mask"] = Way(function=masked)
    for how in ("xla", "cudnn"):
        ways[f"jax.nn {how}"] = Way(function=functools.partial(theirs, how))
    return Cell(
        operation=_OPERATION,
        size=work.size,
        operands=(Operand((work.b, work.s, work.h, work.d)), *caches, lengths),
        rivals=ways,
        ours=None,
        torch=_torch_ways(work),
        truth=functools.partial(cached, implementation="xla"),
        has_gradients=False,
        baseline=_OURS,
    )


def _in_pages(work: Workload, page: int, operands: Sequence[Any]) -> list[Any]:
    """Return the operands with caches in pages of some tokens, and their table."""
    query, *caches, lengths = operands
    each = work.t // page
    order = np.random.default_rng(1).permutation(work.b * each)
    table = order.astype(np.int32).reshape(work.b, each)
    places = np.argsort(order)
    pages = [x.reshape(work.b * each, page, work.k, -1)[places] for x in caches]
    return [query, *pages, jnp.asarray(table), lengths]


def _torch_ways(work: Workload) -> Mapping[str, Way] | None:
    """PyTorch over full caches; its flash attention knows causality for one query."""
    is_there = torch is not None and torch.cuda.is_available()
    if not is_there or work.filled != 1 or work.window:
        return None

    names = ["torch flash", *(["torch cudnn"] if work.s == 1 else [])]
    return {
        name: Way(
            function=kernel,
            enter=lambda tensors: heads_second(tensors[:3]),  # without lengths
            outputs=heads_second,
            is_checked=work.s == 1,
        )
        for name, kernel in torch_kernels(names, enable_gqa=True).items()
    }


def _lines(data: Data) -> list[str]:
    bytes_of = {work.size: work.bytes for work in (*_WORKLOADS, *_SMALL)}
    rows = [row for row in data["rows"] if "failure" not in row]
    for row in rows:
        row["rate"] = round(bytes_of[row["size"]] / row["median_us"] / 1e3, 1)
    return [
        "Cells are (sequences, queries, query heads:key heads, head size), with the",
        "tokens that a cache has room for; of two head sizes one is that of values.",
        "Ratios are to `cached_sdpa`: the median over rounds, and their range. The",
        "bytes are those of keys and values that have to be read at least. PyTorch",
        "reads full caches without lengths, and without causality for several queries.",
        "",
        *table_of(
            rows,
            "workload | GPU | contender | >µs | ratio | >GB/s",
            "{size} | {gpu} | {contender} | {median_us:.1f} | "
            + RANGED
            + " | {rate:.0f}",
        ),
    ]


markdown = Page(
    name="decode",
    title="Attention over a cache",
    comment="Times of attention over a cache.",
    command="python -m benchmarks.decode --out docs/benchmarks",
    names_gpus=True,
    lines=_lines,
)

if __name__ == "__main__":
    contest_report.main(__doc__, markdown, cells)
