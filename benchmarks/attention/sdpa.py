# SPDX-License-Identifier: Apache-2.0
"""Benchmarks jax_cudnn.sdpa against jax.nn and PyTorch, side by side on one GPU.

    python -m benchmarks.sdpa --out docs/benchmarks

writes sdpa.json and sdpa.md there. Needs an NVIDIA GPU; PyTorch is used where it is
installed. Operands are random bf16; see timing.py for how times are taken.

    python -m benchmarks.sdpa --only bias --out docs/internals/measured

times calls with a bias or a mask alone, with and without the array work that keeps rows
exact which a bias moves far from 0 (jax_cudnn/legalize/attention/far_rows.py), and
writes sdpa_bias.json and sdpa_bias.md.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness import torch_side
from benchmarks.harness.page import spread, table, versions_text
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, Timing, compare
from benchmarks.harness.torch_side import torch
from jax_cudnn import native
from jax_cudnn.config import Implementation
from jax_cudnn.legalize.attention import masks as sdpa_masks
from jax_cudnn.legalize.attention import sdpa as legalize_sdpa
from jax_cudnn.lowering.decision import forget_decisions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One workload; axis letters as in jax_cudnn.sdpa."""

    name: str
    b: int
    s: int
    h: int
    k: int
    d: int
    causal: bool
    has_bias: bool = False
    # The reference's s*t scores do not fit in memory.
    skip_xla: bool = False


CELLS = (
    Cell(name="(4,4096,16h,128) causal", b=4, s=4096, h=16, k=16, d=128, causal=True),
    Cell(name="(8,2048,16h,64) causal", b=8, s=2048, h=16, k=16, d=64, causal=True),
    Cell(
        name="(8,2048,16h,64) + bias [1,16,2048,2048]",
        b=8, s=2048, h=16, k=16, d=64, causal=False, has_bias=True,
    ),
    Cell(
        name="(1,32768,16h,128) causal",
        b=1, s=32768, h=16, k=16, d=128, causal=True, skip_xla=True,
    ),
    Cell(
        name="(8,4096,32h:8,128) causal", b=8, s=4096, h=32, k=8, d=128, causal=True,
        skip_xla=True,
    ),
)  # fmt: skip
F32_CELLS = (
    Cell(name="(2,1024,8h,64)", b=2, s=1024, h=8, k=8, d=64, causal=False),
    Cell(name="(4,4096,16h,128) causal", b=4, s=4096, h=16, k=16, d=128, causal=True),
    Cell(name="(1,16384,8h,64) causal", b=1, s=16384, h=8, k=8, d=64, causal=True),
)
# (s, d) of calls with b=8, h=16, and which axes their bias or mask has. The gradient of
# a bias is asked for where it is "trained".
BIAS_SIZES = ((1024, 64), (2048, 64), (4096, 64), (4096, 128))
BIASES = ("b1st", "1hst", "trained 1hst", "11st", "mask b1st")
SMALL = Cell(name="small", b=1, s=128, h=4, k=4, d=64, causal=True)

Attention = Callable[..., jax.Array]


def jax_contenders(cell: Cell) -> dict[str, Attention]:
    """The ways to attention in JAX, by name."""

    def ours(q: Any, k: Any, v: Any, bias: Any = None) -> jax.Array:
        return jax_cudnn.sdpa(
            q, k, v, bias, is_causal=cell.causal, implementation="cudnn"
        )

    def theirs(how: str) -> Attention:
        def call(q: Any, k: Any, v: Any, bias: Any = None) -> jax.Array:
            return jax.nn.dot_product_attention(
                q, k, v, bias, is_causal=cell.causal, implementation=how
            )

        return call

    contenders = {"jax_cudnn": ours, "jax.nn cudnn": theirs("cudnn")}
    if not cell.skip_xla:
        contenders["jax.nn xla"] = theirs("xla")
    return contenders


def operands(cell: Cell) -> tuple[list[jax.Array], jax.Array]:
    """Random operands and the cotangent of the output."""
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    arrays = [
        normal(cell.b, cell.s, cell.h, cell.d),
        normal(cell.b, cell.s, cell.k, cell.d),
        normal(cell.b, cell.s, cell.k, cell.d),
    ]
    cotangent = normal(cell.b, cell.s, cell.h, cell.d)
    if cell.has_bias:
        arrays.append(normal(1, cell.h, cell.s, cell.s))
    return arrays, cotangent


def _with_gradients(attention: Attention, cotangent: jax.Array) -> Attention:
    def run(*arrays: jax.Array) -> Any:
        output, pullback = jax.vjp(attention, *arrays)
        return output, pullback(cotangent)

    return run


def _contender(function: Any, arrays: list[jax.Array]) -> Contender:
    return Contender(call=lambda: function(*arrays), wait=jax.block_until_ready)


def _torch_contenders(cell: Cell, *, gradients: bool) -> dict[str, Contender]:
    if torch is None or (cell.has_bias and gradients):
        return {}  # PyTorch has no fast path with a gradient for the mask.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(
            shape, device="cuda", dtype=torch.bfloat16, generator=generator
        )

    q, k, v, ct = (
        normal(cell.b, cell.s, heads, cell.d).transpose(1, 2).requires_grad_(gradients)
        for heads in (cell.h, cell.k, cell.k, cell.h)
    )
    bias = normal(1, cell.h, cell.s, cell.s) if cell.has_bias else None

    def attention(backend: Any) -> Any:
        with sdpa_kernel(backend):
            output = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, bias, is_causal=cell.causal, enable_gqa=cell.h != cell.k
            )
        return torch.autograd.grad(output, (q, k, v), ct) if gradients else output

    backends = {"torch cudnn": SDPBackend.CUDNN_ATTENTION}
    if not cell.has_bias:
        backends["torch flash"] = SDPBackend.FLASH_ATTENTION
    contenders = {
        name: torch_side.contender(lambda backend=backend: attention(backend))
        for name, backend in backends.items()
    }
    return torch_side.usable(contenders)


def run_cell(cell: Cell) -> list[dict[str, Any]]:
    """Time one cell, forward and forward with gradients."""
    rows: list[dict[str, Any]] = []
    arrays, cotangent = operands(cell)
    for gradients in (False, True):
        compiled: dict[str, Any] = {}
        for name, attention in jax_contenders(cell).items():
            function = _with_gradients(attention, cotangent) if gradients else attention
            compiled[name] = jax.jit(function).lower(*arrays).compile()
        contenders = {n: _contender(f, arrays) for n, f in compiled.items()}
        contenders |= _torch_contenders(cell, gradients=gradients)
        builds = native.cache_stats().builds
        timings = compare(contenders, baseline="jax.nn cudnn")
        assert native.cache_stats().builds == builds, "a plan was built while timing"
        what = "fwd+bwd" if gradients else "fwd"
        for name, timing in timings.items():
            rows.append(_row(f"{cell.name} {what}", name, timing, compiled.get(name)))
    return rows


def run_f32(cell: Cell) -> list[dict[str, Any]]:
    """Time the f32 forward pass: cuDNN's plan against XLA's reference."""
    arrays = [x.astype(jnp.float32) for x in operands(cell)[0]]

    def attention(how: Implementation) -> Attention:
        return lambda q, k, v: jax_cudnn.sdpa(
            q, k, v, is_causal=cell.causal, implementation=how
        )

    names: dict[str, Implementation] = {"jax_cudnn": "cudnn", "jax_cudnn xla": "xla"}
    compiled = {
        name: jax.jit(attention(how)).lower(*arrays).compile()
        for name, how in names.items()
    }
    contenders = {n: _contender(f, arrays) for n, f in compiled.items()}
    timings = compare(contenders, baseline="jax_cudnn xla")
    return [
        _row(f"{_F32} {cell.name} fwd", name, timing, compiled[name])
        for name, timing in timings.items()
    ]


# Such rows have ratios to XLA: jax.nn's cuDNN does not take f32.
_F32 = "f32"


@contextlib.contextmanager
def _without_care_for_biases() -> Iterator[None]:
    """Lower without the array work that keeps rows exact which a bias moves far."""
    forget_decisions()
    with (
        mock.patch.object(legalize_sdpa, "take_far_rows"),
        mock.patch.object(sdpa_masks, "_raised", lambda bias: bias),
    ):
        yield
    forget_decisions()


def run_bias(s: int, d: int, axes: str) -> list[dict[str, Any]]:
    """Time calls with a bias: what exactness costs, and what rows cost that need it.

    "padded" calls have a bias of -1e9 for the first eighth of the rows, with and
    without a cotangent there.
    """
    b, h = 8, 16
    arrays, cotangent = operands(Cell(name="", b=b, s=s, h=h, k=h, d=d, causal=False))
    *kind, letters = axes.split()
    is_mask, is_trained = kind == ["mask"], kind == ["trained"]
    sizes = {"1": 1, "b": b, "h": h, "s": s, "t": s}
    shape = tuple(sizes[axis] for axis in letters)
    bias = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    rows = jnp.arange(s)[:, None] < s // 8
    extra = bias > -1 if is_mask else bias
    padded = extra if is_mask else jnp.where(rows, jnp.bfloat16(-1e9), bias)

    def attention(q: Any, k: Any, v: Any, extra: Any) -> jax.Array:
        both = {"mask": extra} if is_mask else {"bias": extra}
        return jax_cudnn.sdpa(q, k, v, **both, implementation="cudnn")

    def forward(q: Any, k: Any, v: Any, extra: Any, cotangent: Any) -> jax.Array:
        del cotangent
        return attention(q, k, v, extra)

    def gradients(q: Any, k: Any, v: Any, extra: Any, cotangent: Any) -> Any:
        if is_trained:
            output, pullback = jax.vjp(attention, q, k, v, extra)
        else:
            output, pullback = jax.vjp(lambda *x: attention(*x, extra), q, k, v)
        return output, pullback(cotangent)

    found: list[dict[str, Any]] = []
    for what, function in (("fwd", forward), ("fwd+bwd", gradients)):

        def compiled(function: Any = function) -> Any:
            fresh = jax.jit(lambda *x: function(*x))
            return fresh.lower(*arrays, extra, cotangent).compile()

        ours = compiled()
        with _without_care_for_biases():
            plain = compiled()
        given = [*arrays, extra, cotangent]
        programs = {"jax_cudnn": ours, "without": plain}
        contenders = {n: _contender(f, given) for n, f in programs.items()}
        if not is_mask and what == "fwd+bwd":
            hidden = cotangent * ~rows[:, None]
            for name, pulled in (("padded", hidden), ("padded, read", cotangent)):
                contenders[name] = _contender(ours, [*arrays, padded, pulled])
        timings = compare(contenders, baseline="without")
        found += [
            _row(f"{_BIAS} ({b},{s},{h}h,{d}) {axes} {what}", n, t, programs.get(n))
            for n, t in timings.items()
        ]
    return found


# Such rows have ratios to the same call without care for rows that a bias moves far.
_BIAS = "bias"


def run_host() -> list[dict[str, Any]]:
    """Time what the host does: one small call, and 50 chained in one program."""
    arrays, _ = operands(SMALL)
    rows: list[dict[str, Any]] = []
    single = {
        name: _contender(jax.jit(attention), arrays)
        for name, attention in jax_contenders(SMALL).items()
    }
    single["add"] = _contender(jax.jit(lambda q, k, v: q + k), arrays)
    for name, timing in compare(single, baseline="jax.nn cudnn").items():
        rows.append(_row("host time of one small call", name, timing, None))

    def chain(attention: Attention) -> Attention:
        def run(q: Any, k: Any, v: Any) -> jax.Array:
            for _ in range(50):
                q = attention(q, k, v)
            return q

        return run

    chained = {
        name: _contender(jax.jit(chain(attention)), arrays)
        for name, attention in jax_contenders(SMALL).items()
    }
    for name, timing in compare(chained, baseline="jax.nn cudnn").items():
        each = dataclasses.replace(timing, median_us=timing.median_us / 50)
        rows.append(_row("one of 50 chained small calls", name, each, None))
    return rows


def _row(cell: str, name: str, timing: Timing, compiled: Any) -> dict[str, Any]:
    peak = None
    if compiled is not None:
        memory = compiled.memory_analysis()
        peak = memory.temp_size_in_bytes + memory.output_size_in_bytes
    row = {"cell": cell, "contender": name, **dataclasses.asdict(timing)}
    row["temporary_and_output_bytes"] = peak
    print(
        f"{cell:52s} {name:13s} {timing.median_us:10.1f} us  "
        f"{timing.ratio:5.3f} ({timing.ratio_low:.3f}-{timing.ratio_high:.3f})",
        flush=True,
    )
    return row


def markdown(data: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [
        "# Attention benchmarks",
        "",
        "Printed by `python -m benchmarks.sdpa`; do not edit. "
        + versions_text(data["environment"])
        + ".",
        "",
        "Times are medians a call; the ratio is to `jax.nn` with cuDNN, taken round by "
        "round in the same run (median, lowest and highest); in the f32 rows it is to "
        "XLA, and in the bias rows to the call without the array work that keeps rows "
        "exact which a bias moves far from 0. Memory is what XLA allocates for "
        "temporaries and results.",
        "",
        *table(
            "workload | contender | >µs | >ratio | range | >memory (MB)",
            map(_cells, data["rows"]),
        ),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    peak = row["temporary_and_output_bytes"]
    memory = "" if peak is None else f"{peak / 1e6:.1f}"
    times = f"{row['median_us']:.1f}", f"{row['ratio']:.3f}", spread(row, digits=3)
    return [row["cell"], row["contender"], *times, memory]


def main() -> None:
    """Run all cells and write the report."""
    made = parser(__doc__, out="docs/benchmarks")
    made.add_argument("--only", choices=["bias"], help="time these alone")
    options = made.parse_args()
    rows: list[dict[str, Any]] = []
    if options.only is None:
        rows += run_host()
        for cell in CELLS:
            rows += run_cell(cell)
        for cell in F32_CELLS:
            rows += run_f32(cell)
    else:
        for s, d in BIAS_SIZES:
            for axes in BIASES:
                rows += run_bias(s, d, axes)
    Table(
        folder=options.out,
        name="sdpa" if options.only is None else f"sdpa_{options.only}",
        markdown=markdown,
        keeps="nothing",
    ).add(*rows)


if __name__ == "__main__":
    main()
