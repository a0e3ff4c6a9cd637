# SPDX-License-Identifier: Apache-2.0
"""Benchmarks attention over a cache of keys and values, beside jax.nn and PyTorch.

    python -m benchmarks.decode --out docs/benchmarks

writes decode.json and decode.md there. Needs an NVIDIA GPU; PyTorch is used where it is
installed. Operands are random bf16, all lengths are those of the cells; see timing.py
for how times are taken. `--only NAME ...` chooses workloads by their names, in which
`*` stands for any text; the rows of others that decode.json has are kept. With
`--small`, sizes are small enough to try it on a CPU.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness import torch_side
from benchmarks.harness.page import gpu_of, last_run_text, ranged, table
from benchmarks.harness.program import named, parser
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, Timing, compare
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


def _programs(cell: Cell) -> dict[str, tuple[Callable[..., Any], list[jax.Array]]]:
    """Return the ways in JAX by name, with their operands."""
    keys = iter(jax.random.split(jax.random.key(0), 4))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    query = normal(cell.b, cell.s, cell.h, cell.d)
    caches = [normal(cell.b, cell.t, cell.k, size) for size in cell.columns]
    lengths = jnp.full((cell.b,), cell.length, jnp.int32)
    window = None if cell.window is None else (cell.window, 0)

    def cached(query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
        return jax_cudnn.cached_sdpa(
            query, key, value, lengths, local_window_size=window, implementation="cudnn"
        )

    def paged(
        query: Any, key: Any, value: Any, lengths: Any, page_table: Any
    ) -> jax.Array:
        return jax_cudnn.paged_sdpa(
            query,
            key,
            value,
            page_table,
            lengths,
            local_window_size=window,
            implementation="cudnn",
        )

    def masked(query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
        mask = masks.Causal("cache") & masks.Lengths(key=lengths)
        if window is not None:
            mask = mask & masks.Window(*window, "cache")
        return jax_cudnn.sdpa(query, key, value, mask=mask, implementation="cudnn")

    def theirs(how: Any) -> Callable[..., jax.Array]:
        def call(query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
            mask = masks.Causal("cache") & masks.Lengths(key=lengths)
            if window is not None:
                mask = mask & masks.Window(*window, "cache")
            given = mask.arguments(cell.s, cell.t)
            return jax.nn.dot_product_attention(
                query, key, value, **given, implementation=how
            )

        return call

    dense = [query, *caches, lengths]
    programs = {_OURS: (cached, dense)}
    for page in _PAGES:
        each = cell.t // page
        order = jax.random.permutation(jax.random.key(1), cell.b * each)
        table = order.astype(jnp.int32).reshape(cell.b, each)
        pages = [x.reshape(cell.b * each, page, cell.k, -1) for x in caches]
        programs[f"paged_sdpa, {page}"] = (paged, [query, *pages, lengths, table])
    if cell.s > 1 or cell.window:
        programs["sdpa with a mask"] = (masked, dense)
    programs["jax.nn xla"] = (theirs("xla"), dense)
    programs["jax.nn cudnn"] = (theirs("cudnn"), dense)
    return programs


def _torch_contenders(cell: Cell) -> dict[str, Contender]:
    """PyTorch over full caches; its flash attention knows causality for one query."""
    if (
        torch is None
        or cell.filled != 1
        or cell.window
        or not torch.cuda.is_available()
    ):
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def normal(tokens: int, heads: int, size: int) -> Any:
        shape = (cell.b, tokens, heads, size)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    query = normal(cell.s, cell.h, cell.d)
    key, value = (normal(cell.t, cell.k, size) for size in cell.columns)

    def attention(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, enable_gqa=True
            )

    backends = {"torch flash": SDPBackend.FLASH_ATTENTION}
    if cell.s == 1:
        backends["torch cudnn"] = SDPBackend.CUDNN_ATTENTION
    contenders = {
        name: torch_side.contender(lambda backend=backend: attention(backend))
        for name, backend in backends.items()
    }
    return torch_side.usable(contenders)


def run_cell(cell: Cell) -> list[dict[str, Any]]:
    """Time one cell."""
    contenders: dict[str, Contender] = {}
    for name, (function, operands) in _programs(cell).items():
        try:
            compiled = jax.jit(function).lower(*operands).compile()
            jax.block_until_ready(compiled(*operands))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if name != _OURS:
                print(f"  {name} cannot run {cell.name}: {str(error).splitlines()[0]}")
                continue
            raise
        contenders[name] = Contender(
            call=lambda f=compiled, x=operands: f(*x), wait=jax.block_until_ready
        )
    contenders |= _torch_contenders(cell)
    timings = compare(contenders, baseline=_OURS)
    del contenders
    if torch is not None:
        torch_side.release_memory()
    return [_row(cell, name, timing) for name, timing in timings.items()]


def _row(cell: Cell, name: str, timing: Timing) -> dict[str, Any]:
    return {
        "cell": cell.name,
        "contender": name,
        "gigabytes_per_s": round(cell.bytes / timing.median_us / 1e3, 1),
        **{k: round(v, 3) for k, v in dataclasses.asdict(timing).items()},
    }


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Times of attention over a cache. -->",
        "",
        "# Attention over a cache",
        "",
        f"{last_run_text(data['environment'])} Written by `python -m "
        "benchmarks.decode`.",
        "",
        "Cells are (sequences, queries, query heads:key heads, head size), with the",
        "tokens that a cache has room for; of two head sizes one is that of values.",
        "Ratios are to `cached_sdpa`: the median over rounds, and their range. The",
        "bytes are those of keys and values that have to be read at least. PyTorch",
        "reads full caches without lengths, and without causality for several queries.",
        "",
        *table(
            "workload | GPU | contender | >µs | ratio | >GB/s",
            (
                [
                    *(row["cell"], gpu_of(row), row["contender"]),
                    *(f"{row['median_us']:.1f}", ranged(row)),
                    f"{row['gigabytes_per_s']:.0f}",
                ]
                for row in data["rows"]
            ),
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cells that are asked for, and write the report after each."""
    made = parser(__doc__, out="docs/benchmarks")
    made.add_argument("--only", nargs="+", default=["*"], help="names of workloads")
    made.add_argument("--small", action="store_true", help="sizes for a CPU")
    options = made.parse_args()
    cells = SMALL if options.small else CELLS
    names = [cell.name for cell in cells]
    chosen = named(made, cells, options.only)
    rows = Table(
        folder=options.out,
        name="decode",
        markdown=markdown,
        keys=["cell"],
        order=names,
    )
    if len(chosen) == len(cells):
        rows.forget()
    for cell in chosen:
        print(cell.name, flush=True)
        rows.add(*run_cell(cell))


if __name__ == "__main__":
    main()
