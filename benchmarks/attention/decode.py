# SPDX-License-Identifier: Apache-2.0
"""Benchmarks attention over a cache of keys and values, beside jax.nn and PyTorch.

    python -m benchmarks.decode --out docs/benchmarks

writes decode.json and decode.md there. Needs an NVIDIA GPU; PyTorch is used where it is
installed. Operands are random bf16, all lengths are those of the cells; see timing.py
for how times are taken. `--only REGEX` chooses workloads by their names; the rows of
others that decode.json has are kept. With `--small`, sizes are small enough to try it
on a CPU.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.attention.ways import Way, contenders, programs, torch_kernels
from benchmarks.harness import torch_side
from benchmarks.harness.contest import FORWARD
from benchmarks.harness.page import RANGED, Data, Page, Row, last_run_text, table_of
from benchmarks.harness.program import run_benchmark
from benchmarks.harness.timing import Contender, compare
from benchmarks.harness.torch_side import torch
from jax_cudnn import masks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
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
    def name(self) -> str:
        """How tables name it."""
        sizes = f"{self.d}" if self.e is None else f"{self.d}:{self.e}"
        text = f"({self.b},{self.s},{self.h}h:{self.k},{sizes}) t={self.t}"
        text += "" if self.filled == 1 else f" filled to {self.filled:g}"
        return text + (f" window {self.window}" if self.window else "")

    def __str__(self) -> str:
        return self.name

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


CELLS = (
    Cell(b=64, t=4096),
    Cell(b=64, t=4096, filled=0.25),
    Cell(b=8, t=8192),
    Cell(b=1, t=131072),
    Cell(b=64, t=4096, s=2),
    Cell(b=64, t=4096, s=4),
    Cell(b=64, t=4096, s=8),
    Cell(b=64, t=4096, s=16),
    Cell(b=64, t=4096, s=64),
    Cell(b=8, t=8192, s=4),
    Cell(b=64, t=4096, s=1, window=512),
    Cell(b=64, t=4096, s=4, window=512),
    # Latent attention. Its values are columns of its keys, but here an array apart.
    Cell(b=64, t=4096, h=16, k=1, d=576, e=512),
    Cell(b=64, t=4096, h=128, k=1, d=576, e=512),
    Cell(b=64, t=4096, s=2, h=16, k=1, d=576, e=512),
)
SMALL = (
    Cell(b=2, t=64, d=16),
    Cell(b=2, t=64, s=4, d=16, window=16),
    Cell(b=2, t=64, h=4, k=1, d=24, e=16),
)
_PAGES = (16, 64)
_OURS = "cached_sdpa"


def _ways(cell: Cell) -> dict[str, Way]:
    """Return the ways in JAX by name."""
    keys = iter(jax.random.split(jax.random.key(0), 4))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    query = normal(cell.b, cell.s, cell.h, cell.d)
    caches = [normal(cell.b, cell.t, cell.k, size) for size in cell.columns]
    lengths = jnp.full((cell.b,), cell.length, jnp.int32)
    window = None if cell.window is None else (cell.window, 0)
    options: dict[str, Any] = {"local_window_size": window, "implementation": "cudnn"}

    def mask_of(lengths: Any) -> masks.Mask:
        mask = masks.Causal("cache") & masks.Lengths(key=lengths)
        return mask if window is None else mask & masks.Window(*window, "cache")

    def cached(query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
        return jax_cudnn.cached_sdpa(query, key, value, lengths, **options)

    def paged(query: Any, key: Any, value: Any, lengths: Any, table: Any) -> jax.Array:
        return jax_cudnn.paged_sdpa(query, key, value, table, lengths, **options)

    def masked(query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
        mask = mask_of(lengths)
        return jax_cudnn.sdpa(query, key, value, mask=mask, implementation="cudnn")

    def theirs(how: Any, query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
        given = mask_of(lengths).arguments(cell.s, cell.t)
        return jax.nn.dot_product_attention(
            query, key, value, **given, implementation=how
        )

    dense = [query, *caches, lengths]
    ways = {_OURS: Way(cached, dense)}
    for page in _PAGES:
        each = cell.t // page
        order = jax.random.permutation(jax.random.key(1), cell.b * each)
        table = order.astype(jnp.int32).reshape(cell.b, each)
        pages = [x.reshape(cell.b * each, page, cell.k, -1) for x in caches]
        ways[f"paged_sdpa, {page}"] = Way(paged, [query, *pages, lengths, table])
    if cell.s > 1 or cell.window:
        ways["sdpa with a mask"] = Way(masked, dense)
    for how in ("xla", "cudnn"):
        ways[f"jax.nn {how}"] = Way(functools.partial(theirs, how), dense)
    return ways


def _torch_contenders(cell: Cell) -> dict[str, Contender]:
    """PyTorch over full caches; its flash attention knows causality for one query."""
    is_there = torch is not None and torch.cuda.is_available()
    if not is_there or cell.filled != 1 or cell.window:
        return {}

    def normal(tokens: int, heads: int, size: int) -> Any:
        shape = (cell.b, tokens, heads, size)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    query = normal(cell.s, cell.h, cell.d)
    caches = [normal(cell.t, cell.k, size) for size in cell.columns]
    names = ["torch flash", *(["torch cudnn"] if cell.s == 1 else [])]
    made = torch_kernels(names, query, *caches, enable_gqa=True)
    return torch_side.usable({x: torch_side.contender(y) for x, y in made.items()})


def run_cell(cell: Cell) -> Iterator[Row]:
    """Time one cell; yield a row for each contender."""
    timed = contenders(programs(_ways(cell), FORWARD, ours=[_OURS]))
    timings = compare({**timed, **_torch_contenders(cell)}, baseline=_OURS)
    del timed
    if torch is not None:
        torch_side.release_memory()
    for name, timing in timings.items():
        yield {
            "cell": cell.name,
            "contender": name,
            "gigabytes_per_s": round(cell.bytes / timing.median_us / 1e3, 1),
            **{k: round(v, 3) for k, v in dataclasses.asdict(timing).items()},
        }


def _measure(found: Sequence[Cell]) -> Iterator[Row]:
    for cell in found:
        yield from run_cell(cell)


def _head(data: Data) -> str:
    told = last_run_text(data["environment"])
    return f"{told} Written by `python -m benchmarks.decode`."


def _lines(data: Data) -> list[str]:
    return [
        "Cells are (sequences, queries, query heads:key heads, head size), with the",
        "tokens that a cache has room for; of two head sizes one is that of values.",
        "Ratios are to `cached_sdpa`: the median over rounds, and their range. The",
        "bytes are those of keys and values that have to be read at least. PyTorch",
        "reads full caches without lengths, and without causality for several queries.",
        "",
        *table_of(
            data["rows"],
            "workload | GPU | contender | >µs | ratio | >GB/s",
            "{cell} | {gpu} | {contender} | {median_us:.1f} | "
            + RANGED
            + " | {gigabytes_per_s:.0f}",
        ),
    ]


markdown = Page(
    name="decode",
    title="Attention over a cache",
    comment="Times of attention over a cache.",
    head=_head,
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda *, small: SMALL if small else CELLS,
        _measure,
        markdown,
        keeps="any GPU",
        keys=["cell"],
        order=[cell.name for cell in (*CELLS, *SMALL)],
    )
