# SPDX-License-Identifier: Apache-2.0
"""Times a training step of Llama on one GPU or several, beside plain JAX.

    python -m benchmarks.llama --size 7B --gpus 4 --out docs/benchmarks

adds to llama.json and llama.md there. The model is that of examples/train_llama.py,
under plain `jax.jit`: plain JAX has cuDNN's attention from `jax.nn`; jax_cudnn runs
untuned and tuned, in 16 bits and in f8. Devices add up their shares of a product in
bf16, as in plain JAX, and in f32 where the contender's name says so. A GPU's memory
holds one state of the 7B model and not two, so the contenders take turns on one state,
which each step uses up. Before that each begins anew, and its losses are compared with
those of plain JAX. JAX's profiler tells how long the first GPU computes and sends.

    JAX_NUM_CPU_DEVICES=8 python -m benchmarks.llama --size tiny

tries the script on devices of the CPU, where nothing is tuned; its times say nothing.
"""

import argparse
import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from language.report import flops_per_token, peak_flops
from language.text import batch_of, read_corpus
from language.training import Trainer
from llama.layout import POLICIES, choose_layout
from llama.settings import SIZES, LlamaSettings
from llama.task import llama_task

from benchmarks.harness.page import (
    RANGED,
    Data,
    Page,
    Row,
    gpu_of,
    last_run_text,
    table,
)
from benchmarks.harness.profiler import Event, recorded
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, alternate, summary
from benchmarks.harness.versions import environment
from benchmarks.sharding.several_gpus import listed
from benchmarks.sharding.steps import ALIKE, BOUND, PLAIN, Compiled, State, check
from jax_cudnn import plans

# Rows for each GPU, as many as fit into 80 GB.
ROWS = {"tiny": 2, "1B": 8, "7B": 2}
# What names a row of the table.
_NAMES = ("size", "GPU", "mesh", "rows", "remat", "unroll", "contender")
# The steps whose losses are compared.
_STEPS = 50
# The learning rate is less than the example's by this factor. At its own, the loss of
# the 7B model jumps by half within the first ten steps, and rounding decides where.
_SLOWER = 0.1
_MAXTEXT = (
    "MaxText's Llama-2 7B takes 0.721 s a step on eight H100s, which is 11,361 tokens "
    "a second and GPU "
    "([JAX-Toolbox](https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/"
    "maxtext/README.md)). It too has bf16, 4,096 tokens a row, two rows a GPU, FSDP, "
    "and fused attention whose results are saved. Differences: where this page has "
    "other than eight GPUs, each sends and keeps another share of the model; MaxText's "
    "layers are not in a loop; MaxText sets a list of XLA's flags, and this page those "
    "named above."
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """Who computes, and how."""

    name: str
    is_plain: bool = False
    f8: bool = False
    is_tuned: bool = False
    reduce_dtype: Literal["f32", "operands"] = "operands"


# Untuned ones come first: what is tuned holds for all programs compiled afterwards.
WAYS = (
    Way(name=PLAIN, is_plain=True),
    Way(name="jax_cudnn"),
    Way(name="jax_cudnn, sums in f32", reduce_dtype="f32"),
    Way(name="jax_cudnn, f8", f8=True),
    Way(name="jax_cudnn, tuned", is_tuned=True),
    Way(name="jax_cudnn, f8, tuned", f8=True, is_tuned=True),
)


class Program(Compiled):
    """A contender's compiled step."""

    def __init__(
        self, way: Way, settings: LlamaSettings, options: argparse.Namespace
    ) -> None:
        self.way = way
        own = replace(
            settings,
            baseline=way.is_plain,
            f8=way.f8,
            reduce_dtype=way.reduce_dtype,
        )
        layout = choose_layout(
            options.mesh,
            own,
            remat=options.remat,
            unroll=options.unroll,
            devices=jax.devices()[: options.gpus],
        )
        task = llama_task(own, layout)
        tune = functools.partial(plans.autotune, budget_s=options.tuning_s)
        super().__init__(Trainer(task), tune if way.is_tuned else None)
        self.mesh_size = layout.mesh.size
        self.flops_per_token = flops_per_token(self.trainer.shapes.params, task)
        self.peak = peak_flops(task)


def busy(contender: Contender) -> dict[str, float]:
    """Return for how many ms the first GPU computes, sends, and does either."""
    found = recorded(contender, "/device:GPU:0")
    sends = [event for event in found if "nccl" in event.name]
    computes = [event for event in found if "nccl" not in event.name]
    groups = {"computes_ms": computes, "sends_ms": sends, "busy_ms": found}
    return {name: round(covered(each) / 1e6, 2) for name, each in groups.items()}


def covered(found: Sequence[Event]) -> float:
    """Return how many nanoseconds lie within at least one of the events."""
    total, end = 0.0, 0.0
    for event in sorted(found, key=lambda event: event.start):
        last = event.start + event.duration
        total += max(0.0, last - max(end, event.start))
        end = max(end, last)
    return total


def measure(settings: LlamaSettings, options: argparse.Namespace) -> list[Row]:
    """Compile all contenders, compare their losses, and time them in turns."""
    on_gpu = jax.default_backend() == "gpu"
    corpus = read_corpus(None, settings)
    texts = [batch_of(corpus, settings, step) for step in range(options.steps)]
    programs: dict[str, Program] = {}
    losses: dict[str, list[float]] = {}
    for way in WAYS:
        is_asked = way.is_plain or re.search(options.contenders, way.name)
        if not is_asked or (way.is_tuned and not on_gpu):
            continue
        program = programs[way.name] = Program(way, settings, options)
        losses[way.name] = State(program, texts).losses(program)
        print(
            f"{way.name}: {program.tuning_s:.0f} s of tuning, "
            f"{program.compile_s:.0f} s of compiling, loss {losses[way.name][-1]:.4f}",
            flush=True,
        )
        check(losses[way.name], losses[PLAIN], f8=way.f8)
    state = State(programs[PLAIN], texts)
    contenders = {name: state.contender(each) for name, each in programs.items()}
    times = alternate(contenders, rounds=options.rounds, round_ms=1000.0, least_calls=3)
    found: list[Row] = []
    for name, program in programs.items():
        timing = summary(times[name], times[PLAIN])
        rate = settings.tokens_per_step / timing.median_us * 1e6
        share = None
        if program.peak is not None:
            share = round(rate * program.flops_per_token / program.peak, 4)
        found.append(
            {
                "contender": name,
                "ms": round(timing.median_us / 1e3, 3),
                "ratio": round(timing.ratio, 4),
                "ratio_low": round(timing.ratio_low, 4),
                "ratio_high": round(timing.ratio_high, 4),
                "tokens_s_gpu": round(rate / program.mesh_size),
                "utilisation": share,
                "mib": round(program.bytes / 2**20),
                "compile_s": round(program.compile_s, 1),
                "tuning_s": round(program.tuning_s, 1),
                "collectives": program.collectives,
                **(busy(contenders[name]) if on_gpu else {}),
                "loss_share": round(
                    check(losses[name], losses[PLAIN], f8=program.way.f8), 6
                ),
                "losses": [round(loss, 5) for loss in losses[name]],
            }
        )
    return found


def _head(data: Data) -> str:
    return (
        f"Printed by `{data['command']}` and others like it; do not edit. "
        f"{last_run_text(data['environment'])}"
    )


def _lines(data: Data) -> list[str]:
    return [
        "The model of examples/train_llama.py under plain `jax.jit`, its layers in a "
        "loop. A step is forward, backward and AdamW with f32 parameters; it computes "
        "in bf16 where no f8 is named. Times are medians of rounds in which all "
        "contenders take turns on one state. The ratio is to plain JAX with `jax.nn`'s "
        "cuDNN attention, with the lowest and highest. Utilisation is of the bf16 "
        "peak, by the operations of products. The time in which the GPU sends and "
        "computes nothing is that of busy less that of computing. Losses are those of "
        f"plain JAX within {BOUND:.0%}, from the same start: the first {ALIKE}, in f8 "
        "the first one, and the mean of all. The last column but one has the largest "
        "difference.",
        "",
        _MAXTEXT,
        "",
        *table(
            "size | GPU | mesh | >rows a GPU | remat | contender | >ms | ratio "
            "| >tokens/s a GPU | >utilisation | computes, sends, busy ms | >MiB a GPU "
            "| >compile s | >tuning s | >losses | sends",
            map(_cells, data["rows"]),
        ),
    ]


def _cells(row: Row) -> list[Any]:
    told = listed(row["collectives"])
    share = row["utilisation"]
    parts = [row.get(name) for name in ("computes_ms", "sends_ms", "busy_ms")]
    looped = "" if row["unroll"] == 1 else f", {row['unroll']} layers a turn"
    return [
        *(row["size"], gpu_of(row), row["mesh"], row["rows"]),
        *(f"{row['remat']}{looped}", row["contender"]),
        *(f"{row['ms']:,.1f}", RANGED.format_map(row), f"{row['tokens_s_gpu']:,}"),
        "" if share is None else f"{share:.1%}",
        ", ".join(f"{part:.0f}" for part in parts if part is not None),
        *(f"{row['mib']:,}", f"{row['compile_s']:.0f}", f"{row['tuning_s']:.0f}"),
        *(f"{row['loss_share']:.2%}", told or "nothing"),
    ]


markdown = Page(name="llama", title="Training Llama-2", head=_head, lines=_lines)


def main() -> None:
    """Take the times and add them to the report."""
    is_gpu = jax.default_backend() == "gpu"
    count = len(jax.devices())
    made = parser(__doc__)
    add = made.add_argument
    add("--size", choices=SIZES, default="1B")
    add("--gpus", type=int, default=count, help="how many; default: all")
    add("--mesh", help="such as fsdp=2,tensor=2; default: all along fsdp")
    add("--rows", type=int, help="of the batch, for each GPU; default: by the size")
    add("--remat", choices=("none", *POLICIES), default="dots")
    add(
        "--unroll", type=int, default=1, help="layers of a turn of the loop; default: 1"
    )
    add("--contenders", default="", help="regex on those beside plain JAX")
    add("--tuning-s", type=float, default=300.0, help="for each that is tuned")
    add("--steps", type=int, default=_STEPS, help="whose losses are compared")
    add("--rounds", type=int, default=7)
    options = made.parse_args()
    if not 1 <= options.gpus <= count:
        made.error(f"--gpus {options.gpus}: there are {count}")
    plans.set_cache(None)  # no plans and choices of other runs, and none left behind
    rows = options.rows or ROWS[options.size]
    settings = replace(
        SIZES[options.size],
        batch=rows * options.gpus,
        dtype="bfloat16" if is_gpu else "float32",
        learning_rate=SIZES[options.size].learning_rate * _SLOWER,
    )
    versions = environment()
    about = {
        "size": options.size,
        "GPU": versions["GPU"],
        "mesh": options.mesh or f"fsdp={options.gpus}",
        "rows": rows,
        "remat": options.remat,
        "unroll": options.unroll,
    }
    measured = [{**about, **row} for row in measure(settings, options)]
    command = ["python", "-m", "benchmarks.llama", "--size", options.size]
    command += ["--gpus", str(options.gpus)]
    found = Table(
        folder=options.out,
        page=markdown,
        keys=_NAMES,
        order=tuple(SIZES),
        versions=versions,
        about={"command": shlex.join(command)},
    )
    found.add(*measured)
    print(found.file.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
