# SPDX-License-Identifier: Apache-2.0
"""Times a training step of the GPT example on one GPU and on all, beside plain JAX.

    python -m benchmarks.train_gpt --out docs/internals/measured

writes train_gpt.json and train_gpt.md there. The model is that of
examples/train_gpt.py, under plain `jax.jit`; plain JAX has cuDNN's attention from
`jax.nn`. All contenders take turns in one run; see timing.py. Plans are untuned, but
for choices that the package ships.

    JAX_NUM_CPU_DEVICES=2 python -m benchmarks.train_gpt --size tiny

tries the script on devices of the CPU; its times say nothing.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from gpt.layout import Parallel, choose_layout
from gpt.settings import SIZES, VOCABULARY
from gpt.task import gpt_task
from language.settings import Settings
from language.text import batch_of, read_corpus
from language.training import Trainer

from benchmarks.harness.page import RANGED, Data, Page, table_of
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Timing, alternate, summary
from benchmarks.harness.versions import environment
from benchmarks.sharding.several_gpus import listed
from benchmarks.sharding.steps import BOUND, PLAIN, Compiled, State, check
from jax_cudnn import plans

OURS = "jax_cudnn"
_OTHER_GPT = (
    "GPT-2 small in [models.md](../../benchmarks/models.md) has another ratio, since "
    "it is another configuration: its vocabulary has 50,304 tokens instead of "
    f"{VOCABULARY} bytes, and `plans.autotune` has tuned its plans, which was not done "
    "here."
)
# The steps whose losses are compared.
_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a step is divided; `batch` is over all GPUs together."""

    name: str
    parallel: Parallel
    mesh: str
    batch: int


def ways(settings: Settings) -> Iterator[Way]:
    """Yield one GPU first, then all of them."""
    count, batch = len(jax.devices()), settings.batch
    yield Way(name="one GPU", parallel="data", mesh="1x1", batch=batch)
    if count > 1:
        data: Any = {"parallel": "data", "mesh": f"{count}x1"}
        yield Way(name="data, the same batch", batch=batch, **data)
        yield Way(name="data, the same batch a GPU", batch=batch * count, **data)
        yield Way(name="FSDP", parallel="fsdp", mesh=f"{count}x1", batch=batch)
        yield Way(name="tensor", parallel="tensor", mesh=f"1x{count}", batch=batch)


class Run(NamedTuple):
    """A contender, its state, and its first losses."""

    program: Compiled
    state: State
    losses: list[float]


def row(
    way: Way, package: str, settings: Settings, run: Run, timings: dict[str, Timing]
) -> dict[str, Any]:
    """Return what is reported of a contender."""
    beside, alone = timings["plain"], timings["one"]
    grown = way.batch / settings.batch
    return {
        "way": way.name,
        "contender": package,
        "batch": way.batch,
        "ms": round(beside.median_us / 1e3, 3),
        **_range("ratio", beside.ratio, beside.ratio_low, beside.ratio_high),
        **_range(
            "scaling",
            grown / alone.ratio,
            grown / alone.ratio_high,
            grown / alone.ratio_low,
        ),
        "mib": round(run.program.bytes / 2**20),
        "compile_s": round(run.program.compile_s, 1),
        "collectives": run.program.collectives,
        "losses": [round(loss, 5) for loss in run.losses],
    }


def _range(name: str, value: float, low: float, high: float) -> dict[str, float]:
    values = {name: value, f"{name}_low": low, f"{name}_high": high}
    return {key: round(each, 4) for key, each in values.items()}


def measure(settings: Settings, pattern: str, rounds: int) -> list[dict[str, Any]]:
    """Time all contenders, each way beside plain JAX and beside one GPU."""
    runs: dict[tuple[Way, str], Run] = {}
    one, *others = ways(settings)
    for way in (one, *(each for each in others if re.search(pattern, each.name))):
        own = replace(settings, batch=way.batch)
        corpus = read_corpus(None, own)
        texts = [batch_of(corpus, own, step) for step in range(_STEPS)]
        for package in (OURS, PLAIN):
            layout = choose_layout(way.parallel, way.mesh, own)
            task = gpt_task(replace(own, baseline=package == PLAIN), layout)
            program = Compiled(Trainer(task))
            state = State(program, texts)
            runs[way, package] = Run(program, state, state.losses(program))
            print(f"{way.name}, {package}: {program.compile_s:.0f} s", flush=True)
        check(runs[way, OURS].losses, runs[way, PLAIN].losses)
    times = alternate(
        {
            f"{way.name}, {package}": run.state.contender(run.program)
            for (way, package), run in runs.items()
        },
        rounds=rounds,
        round_ms=400.0,
        least_calls=3,
    )
    found: list[dict[str, Any]] = []
    for (way, package), run in runs.items():
        own = times[f"{way.name}, {package}"]
        timings = {
            "plain": summary(own, times[f"{way.name}, {PLAIN}"]),
            "one": summary(own, times[f"{one.name}, {package}"]),
        }
        found.append(row(way, package, settings, run, timings))
    return found


def _lines(data: Data) -> list[str]:
    model = data["model"]
    rows = [
        {**row, "sends": listed(row["collectives"]) or "nothing"}
        for row in data["rows"]
    ]
    speedup = "{scaling:.2f} ({scaling_low:.2f}-{scaling_high:.2f})"
    return [
        f"The example's model under plain `jax.jit`: {model['layers']} layers of width "
        f"{model['width']}, {model['heads']} heads, context {model['context']}, "
        f"{model['dtype']}. A step is forward, backward and AdamW. Times are medians "
        "of rounds in which all contenders take turns. The ratio is to plain JAX with "
        "`jax.nn`'s cuDNN attention, divided the same way; the speedup is in tokens a "
        "second, to one GPU with the same package; both with the lowest and highest. "
        f"Losses of both packages agree within {BOUND:.0%} over the first {_STEPS} "
        "steps.",
        "",
        _OTHER_GPT,
        "",
        *table_of(
            rows,
            "divided by | >batch | contender | >ms | ratio | speedup | >MiB a GPU "
            "| sends",
            f"{{way}} | {{batch}} | {{contender}} | {{ms:.2f}} | {RANGED} | {speedup} "
            "| {mib:,} | {sends}",
        ),
    ]


markdown = Page(name="train_gpt", title="Training GPT-2 on several GPUs", lines=_lines)


def main() -> None:
    """Take the times and write the report."""
    made = parser(__doc__)
    made.add_argument("--size", choices=SIZES, default="small")
    made.add_argument("--ways", default="", help="regex on ways to divide a step")
    made.add_argument("--rounds", type=int, default=7)
    options = made.parse_args()
    plans.set_cache(None)  # no plans and choices of other runs, and none left behind
    is_gpu = jax.default_backend() == "gpu"
    settings = replace(SIZES[options.size], dtype="bfloat16" if is_gpu else "float32")
    command = ["python", "-m", "benchmarks.train_gpt", "--size", options.size]
    command += ["--ways", options.ways] if options.ways else []
    versions = environment()
    count = len(jax.devices())
    names = ("layers", "width", "heads", "context", "dtype")
    found = Table(
        folder=options.out,
        page=markdown,
        keeps="nothing",
        versions={**versions, "GPU": f"{count} x {versions['GPU']}"},
        about={
            "command": shlex.join(command),
            "model": {name: getattr(settings, name) for name in names},
        },
    )
    found.add(*measure(settings, options.ways, options.rounds))
    print(found.file.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
