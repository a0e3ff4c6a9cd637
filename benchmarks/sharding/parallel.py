# SPDX-License-Identifier: Apache-2.0
"""Times attention over several GPUs, method by method, against one GPU.

    python -m benchmarks.parallel --out docs/benchmarks

writes parallel.json and parallel.md there. Needs NVIDIA GPUs, two by default. One GPU
computes a sequence of half the length for comparison: under a causal mask that is a
quarter of the work, so half of what each of two GPUs does.

    python -m benchmarks.parallel --documents 32768 --out docs/internals/measured

writes parallel_packed.json and parallel_packed.md: of packed documents with so many
tokens on average. One GPU computes those of its share of the sequence, half of them
beside two GPUs.

    python -m benchmarks.parallel --cpu --tokens 64 --out build/benchmarks

tries the script on CPU devices; its times say nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_cudnn
from benchmarks.harness.contest import BOTH, FORWARD, program
from benchmarks.harness.page import RANGE, Data, Page, Row, table_of, versions_text
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, Timing, compare
from jax_cudnn import masks, parallel

_ONE = "one GPU"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The attention of one long sequence; letters as in jax_cudnn.sdpa.

    With ``documents`` it consists of documents of so many tokens on average.
    """

    tokens: int
    devices: int
    documents: int = 0
    h: int = 16
    k: int = 4
    d: int = 128

    @property
    def tokens_of_one(self) -> int:
        """The length of the sequence that one GPU computes."""
        return self.tokens // self.devices

    def lengths(self, tokens: int) -> np.ndarray:
        """Return the documents' lengths in the first tokens, or that of a whole row.

        They are drawn for each GPU's share, so that the first has whole documents.
        """
        if not self.documents:
            return np.array([tokens])
        rng, size = np.random.default_rng(0), self.tokens_of_one
        found: list[np.ndarray] = []
        for _ in range(tokens // size):
            cuts = rng.integers(1, size, max(1, size // self.documents) - 1)
            found.append(np.diff(np.sort([0, *cuts, size])))
        return np.concatenate(found)

    @property
    def ideal(self) -> float:
        """How many times as long as one GPU all of them take, at best."""
        every, one = (
            np.sum(self.lengths(x).astype(np.float64) ** 2)
            for x in (self.tokens, self.tokens_of_one)
        )
        return float(every / one / self.devices)

    def mask(self, tokens: int) -> masks.Mask | None:
        """Return the mask of the documents in the first tokens."""
        if not self.documents:
            return None
        return masks.Packed.from_lengths(self.lengths(tokens))


# By name: a method and the order of the tokens.
_WAYS: dict[str, tuple[Any, Any]] = {
    "ring, striped": ("ring", "striped"),
    "ring, zigzag": ("ring", "zigzag"),
    "ring, contiguous": ("ring", "contiguous"),
    "all-gather, zigzag": ("all_gather", "zigzag"),
    "all-gather, contiguous": ("all_gather", "contiguous"),
    "all-to-all": ("all_to_all", "contiguous"),
}

_Attention = Callable[..., jax.Array]


def _mesh(count: int) -> Mesh:
    return jax.make_mesh(
        (count,),
        ("seq",),
        axis_types=(AxisType.Auto,),
        devices=jax.local_devices()[:count],
    )


def _operands(workload: Workload, tokens: int, devices: int) -> list[jax.Array]:
    """Draw query, key, value and the cotangent of the output, each in its place."""
    sharding = NamedSharding(_mesh(devices), PartitionSpec(None, "seq"))
    heads = (workload.h, workload.k, workload.k, workload.h)
    keys = jax.random.split(jax.random.key(0), len(heads))

    @functools.partial(jax.jit, static_argnums=1, out_shardings=sharding)
    def normal(key: jax.Array, count: int) -> jax.Array:
        return jax.random.normal(key, (1, tokens, count, workload.d), jnp.bfloat16)

    return [normal(key, count) for key, count in zip(keys, heads, strict=True)]


def _programs(workload: Workload) -> dict[str, tuple[_Attention, list[jax.Array]]]:
    """Return each contender's attention, with its operands."""
    sharded = _operands(workload, workload.tokens, workload.devices)
    found: dict[str, tuple[_Attention, list[jax.Array]]] = {}
    for name, (method, order) in _WAYS.items():
        found[name] = (
            functools.partial(
                parallel.sharded_sdpa,
                mesh=_mesh(workload.devices),
                axis="seq",
                method=method,
                order=order,
                mask=workload.mask(workload.tokens),
                is_causal=True,
                implementation="cudnn",
            ),
            sharded,
        )
    one = functools.partial(
        jax_cudnn.sdpa,
        mask=workload.mask(workload.tokens_of_one),
        is_causal=True,
        implementation="cudnn",
    )
    found[_ONE] = (one, _operands(workload, workload.tokens_of_one, 1))
    return found


_PASSES = {"forward": FORWARD, "forward and backward": BOTH}


def run(workload: Workload, rounds: int) -> Iterator[Row]:
    """Time all contenders, forward and with gradients."""
    found = _programs(workload)
    for title, what in _PASSES.items():
        compiled: dict[str, Any] = {}
        contenders: dict[str, Contender] = {}
        for name, (attention, (*operands, cotangent)) in found.items():
            given = operands, [cotangent]
            made = jax.jit(program(attention, what)).lower(*given).compile()
            compiled[name] = made
            call = functools.partial(made, *given)
            contenders[name] = Contender(call=call, wait=jax.block_until_ready)
        timings = compare(contenders, baseline=_ONE, rounds=rounds, least_calls=1)
        for name, timing in timings.items():
            yield _row(workload, title, name, timing, compiled[name])


def _row(
    workload: Workload, what: str, name: str, timing: Timing, compiled: Any
) -> Row:
    memory = compiled.memory_analysis()
    ideal = 1.0 if name == _ONE else workload.ideal
    row = {
        "pass": what,
        "contender": name,
        **dataclasses.asdict(timing),
        "efficiency": ideal / timing.ratio,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_and_output_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes,
    }
    print(
        f"{what:22s} {name:24s} {timing.median_us / 1e3:10.2f} ms  "
        f"{row['efficiency']:6.1%}  {memory.temp_size_in_bytes / 2**20:10.1f} MiB",
        flush=True,
    )
    return row


def _head(data: Data) -> str:
    return (
        f"Written by `{data['command']}`; do not edit. "
        f"{versions_text(data['environment'])}, {data['workload']['devices']} devices."
    )


def _lines(data: Data) -> list[str]:
    workload = Workload(**data["workload"])
    what = "One causal sequence"
    if workload.documents:
        lengths = workload.lengths(workload.tokens)
        own = len(workload.lengths(workload.tokens_of_one))
        what = (
            f"{len(lengths)} causal documents of {lengths.min():,} to "
            f"{lengths.max():,} tokens, {workload.documents:,} on average, packed in "
            f"one sequence, {own} of them for one GPU: a row"
        )
    rows = [
        {
            **row,
            "ms": row["median_us"] / 1e3,
            "mib": row["temporary_bytes"] / 2**20,
        }
        for row in data["rows"]
    ]
    return [
        f"{what} of {workload.tokens:,} tokens in bf16, {workload.h} "
        f"query heads, {workload.k} key heads, head size {workload.d}. One GPU "
        f"computes {workload.tokens_of_one:,} tokens; at best, all of them take "
        f"{workload.ideal:.3g} times as long. The efficiency is this time over the "
        "measured one. Times are medians over rounds in which all take turns; ratios "
        "are to one GPU, with the lowest and highest. Memory is what XLA allocates on "
        "each device, beside operands and results.",
        "",
        *table_of(
            rows,
            "pass | contender | >ms | >ratio | range | >efficiency | >memory (MiB)",
            "{pass} | {contender} | {ms:.1f} | {ratio:.2f} | "
            + RANGE
            + " | {efficiency:.0%} | {mib:.0f}",
        ),
    ]


_SEQUENCE = Page(
    name="parallel", title="Attention over several GPUs", head=_head, lines=_lines
)
_DOCUMENTS = Page(
    name="parallel_packed",
    title="Packed documents over several GPUs",
    head=_head,
    lines=_lines,
)


def markdown(data: Data) -> str:
    """Return the page of a run, given its data."""
    return _page_of(data["workload"]["documents"])(data)


def _page_of(documents: int) -> Page:
    return _DOCUMENTS if documents else _SEQUENCE


def main() -> None:
    """Take the times and write the report."""
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=262144, help="of the sequence")
    made.add_argument("--devices", type=int, default=2)
    made.add_argument(
        "--documents",
        type=int,
        default=0,
        metavar="TOKENS",
        help="on average, of packed documents; default: one sequence",
    )
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--cpu", action="store_true", help="try it on CPU devices")
    options = made.parse_args()
    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
        # Calls that overlap may wait for each other where cores are few.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if options.tokens % (2 * options.devices):
        made.error(f"--tokens {options.tokens} is not a multiple of 2 * --devices")
    if not 0 <= options.documents <= options.tokens // options.devices:
        made.error(f"--documents {options.documents} are more than a GPU's tokens")
    if len(jax.local_devices()) < options.devices:
        made.error(f"there are only {len(jax.local_devices())} devices")
    workload = Workload(
        tokens=options.tokens, devices=options.devices, documents=options.documents
    )
    packed = f" --documents {options.documents}" if options.documents else ""
    found = Table(
        folder=options.out,
        page=_page_of(options.documents),
        keeps="nothing",
        about={
            "command": f"python -m benchmarks.parallel --tokens {options.tokens} "
            f"--devices {options.devices}{packed}{' --cpu' if options.cpu else ''}",
            "workload": dataclasses.asdict(workload),
        },
    )
    found.add(*run(workload, options.rounds))
    print(found.file.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
