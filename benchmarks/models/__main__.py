# SPDX-License-Identifier: Apache-2.0
"""Times whole models on one GPU: plain JAX, jax_cudnn untuned and tuned, and PyTorch.

    python -m benchmarks.models --out docs/benchmarks

writes models.json and models.md there. Contenders start from the same weights, and
their losses over the first steps have to agree. Then all of them take turns in one run;
see timing.py. Most models are trained untuned, beside plain JAX alone, and take about a
minute each, most of it to compile; the first seven are tuned and inferred as well.

`--only REGEX` chooses models by their names and what they do, such as "ViT-B train";
those that the file in the folder has beside them are kept. `--part 2/4` runs the second
of four parts of these, so that four GPUs may share them, each writing to a folder of
its own. `--merge JSON...` measures nothing, and puts the rows of such files in place.
`--small` tries the script on a CPU, where times say nothing.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import program, torch_side
from benchmarks.harness.page import FINE_RANGE, Data, Page, gpu_of, table
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, alternate, summary
from benchmarks.models.cudnn_kit import CudnnKit, F8Kit
from benchmarks.models.every import every
from benchmarks.models.jax_steps import JaxSteps, drawn, operations
from benchmarks.models.plain_kit import AllExpertsKit, PlainKit
from benchmarks.models.torch_kit import TorchSteps, is_there
from benchmarks.models.zoo import Model

_PLAIN, _TORCH = "plain JAX", ("torch eager", "torch compiled")
# Of losses, relative to the first and largest, and of outputs, by their norm.
_BOUND = 0.03
# Dense bf16 products a second, from NVIDIA's data sheets.
_PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}

# The models that are trained in f8 as well, by the names of contenders.
_F8, _IN_F8 = "untuned, f8", ("Llama-like",)
# Plain JAX has two ways to mix experts. Ratios are to the faster one.
_ALL_EXPERTS, _OF_EXPERTS = f"{_PLAIN}, all experts", ("Mixtral-like",)

_Steps = JaxSteps | TorchSteps


def _contenders(
    model: Model, *, is_training: bool, with_torch: bool, with_tuning: bool
) -> dict[str, Callable[[], _Steps]]:
    weights, kinds, batch = drawn(model)
    options: dict[str, Any] = {"rate": model.rate, "is_training": is_training}

    def of_jax(kit: PlainKit, *, is_tuned: bool = False) -> Callable[[], _Steps]:
        return lambda: JaxSteps(
            model, kit, weights, kinds, batch, is_tuned=is_tuned, **options
        )

    def of_torch(*, is_compiled: bool) -> Callable[[], _Steps]:
        return lambda: TorchSteps(
            model, weights, kinds, batch, is_compiled=is_compiled, **options
        )

    # What is tuned comes last: the choices hold for all that is compiled later.
    made: dict[str, Callable[[], _Steps]] = {_PLAIN: of_jax(PlainKit())}
    if model.name in _OF_EXPERTS:
        made[_ALL_EXPERTS] = of_jax(AllExpertsKit())
    made["untuned"] = of_jax(CudnnKit())
    if is_training and model.name in _IN_F8:
        made[_F8] = of_jax(F8Kit())
    if with_torch:
        made |= {name: of_torch(is_compiled=name != _TORCH[0]) for name in _TORCH}
    if with_tuning and jax.default_backend() == "gpu":
        made["tuned"] = of_jax(CudnnKit(), is_tuned=True)
    return made


def _check(name: str, found: np.ndarray, want: np.ndarray) -> None:
    """Raise unless a contender computes what plain JAX does, up to rounding.

    Losses fall to a thousandth as a model learns its one batch by heart, and while they
    fall, a step that is a little ahead is far off by a ratio. So the largest loss is
    the measure. A loss may jump for a step, also in plain JAX, and rounding decides
    when: the first loss counts, and the median of the differences.
    """
    apart = np.abs(found - want)
    error = float(max(apart.flat[0], np.median(apart)) / np.max(np.abs(want)))
    if want.ndim > 1:
        error = float(np.linalg.norm(found - want) / np.linalg.norm(want))
    if not error <= _BOUND:  # so that a NaN fails
        told = f"{name} differs from {_PLAIN} by {error:.3f}"
        if want.ndim == 1:
            told += f": losses {found.tolist()}, and of {_PLAIN} {want.tolist()}"
        raise RuntimeError(told)


def measure(
    model: Model,
    *,
    is_training: bool,
    with_torch: bool,
    steps: int,
    with_tuning: bool = True,
) -> list[dict[str, Any]]:
    """Time all contenders of a model; return a row for each."""
    runs: dict[str, _Steps] = {}
    results: dict[str, np.ndarray] = {}
    makers = _contenders(
        model,
        is_training=is_training,
        with_torch=with_torch and not model.untuned_only,
        with_tuning=with_tuning and not model.untuned_only,
    )
    for name, make in makers.items():
        run = make()
        runs[name] = run
        if is_training:
            rest = [run.number(run.step()) for _ in range(steps - 1)]
            results[name] = np.array([run.number(run.first), *rest])
        else:
            results[name] = run.array(run.first)
        print(f"  {name}: compiled in {run.compile_s:.1f} s", flush=True)
        if isinstance(run, JaxSteps) and run.tuning is not None:
            print(f"  tuned in {run.tuning_s:.1f} s; {run.tuning.program}")
        _check(f"{model.name}, {name}", results[name], results[_PLAIN])
    times = alternate(
        {n: Contender(call=run.step, wait=run.wait) for n, run in runs.items()},
        rounds=7,
        round_ms=300.0,
        least_calls=3,
    )
    flops, peak = 0.0, _PEAKS.get(jax.local_devices()[0].device_kind)
    if peak and not model.untuned_only:
        flops = operations(model, is_training=is_training)
    plain = min(
        (each for name, each in times.items() if name.startswith(_PLAIN)),
        key=statistics.median,
    )
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        timing = summary(times[name], plain)
        row = {
            "model": model.name,
            "size": model.size,
            "what": "train" if is_training else "infer",
            "contender": name,
            "ms": round(timing.median_us / 1e3, 3),
            "ratio": round(timing.ratio, 4),
            "ratio_low": round(timing.ratio_low, 4),
            "ratio_high": round(timing.ratio_high, 4),
            "compile_s": round(run.compile_s, 1),
            "tuning_s": round(run.tuning_s, 1),
            "mib": round(run.bytes / 2**20),
            "share_of_peak": None,
        }
        if isinstance(run, JaxSteps):
            row["temp_mib"] = round(run.temp_bytes / 2**20)
        if peak and flops:
            share = flops / timing.median_us * 1e6 / peak
            row["share_of_peak"] = round(share, 4)
        if is_training:
            row["losses"] = [round(float(x), 4) for x in results[name][::7]]
        rows.append(row)
        print(f"  {name}: {row['ms']} ms, {row['ratio']} of {_PLAIN}", flush=True)
    if with_torch:
        torch_side.release_memory()
    return rows


def _lines(data: Data) -> list[str]:
    return [
        "Weights are f32, matmuls and convolutions bf16. A training step is forward,",
        "backward and AdamW. Times are medians of rounds in which all contenders take",
        "turns. The ratio is to plain JAX with its best attention, with the lowest and",
        "highest round: below 1 is faster. Where plain JAX has two rows, it is to the",
        "faster one. All contenders of a model are timed in one run. Memory is what",
        "the compiled program needs, and for PyTorch the most that it had in use.",
        "Temporary memory is what is left of it without weights, AdamW's moments and",
        "the batch. The share of the peak counts the operations of plain JAX's program",
        "as XLA counts them, attention as matmuls of all queries and keys. A model",
        f"learns one batch by heart. Losses over the first {data['steps']} steps agree",
        f"within {_BOUND:.0%} of the first loss.",
        "",
        *(f"- {model.name}: {model.about}" for model in every() if model.about),
        "",
        *table(
            "model | batch | GPU | | contender | >ms | >ratio | range | >compile s "
            "| >tuning s | >MiB | >temporary | >peak",
            map(_cells, data["rows"]),
        ),
    ]


def _cells(row: dict[str, Any]) -> list[Any]:
    share = row["share_of_peak"]
    return [
        *(row["model"], row["size"], gpu_of(row), row["what"], row["contender"]),
        *(f"{row['ms']:.2f}", f"{row['ratio']:.3f}", FINE_RANGE.format_map(row)),
        *(row["compile_s"], row["tuning_s"] or "", row["mib"]),
        *(row.get("temp_mib", ""), "" if share is None else f"{share:.1%}"),
    ]


def _part(text: str) -> tuple[int, int]:
    """Return the number of a part, from 1, and of how many."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 2/4")
    return int(number), int(count)


def _table(folder: Path, **more: Any) -> Table:
    return Table(
        folder=folder,
        page=markdown,
        keys=("model", "what"),
        order=[model.name for model in every()],
        **more,
    )


def merge(folder: Path, files: Sequence[Path]) -> None:
    """Put the rows of other runs in the place of those that a folder has of them."""
    for file in files:
        data = json.loads(file.read_text(encoding="utf-8"))
        about = {"steps": data["steps"]}
        _table(folder, versions=data["environment"], about=about).add(*data["rows"])


markdown = Page(
    name="models",
    title="Whole models",
    comment="What whole models take on a GPU, by several packages.",
    command="python -m benchmarks.models --out docs/benchmarks",
    names_gpus=True,
    lines=_lines,
)


def main() -> None:
    """Run the models and write the report."""
    parser = program.parser(__doc__)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--part", type=_part, default=(1, 1), help="such as 2/4")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JSON")
    parser.add_argument("--steps", type=int, default=50, help="whose losses agree")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-tuning", action="store_true")
    parser.add_argument("--small", action="store_true", help="try the script on a CPU")
    options = parser.parse_args()
    if options.merge:
        merge(options.out, options.merge)
        return
    zoo = every(small=options.small)
    runs = [
        (model, is_training)
        for model in zoo
        for is_training in (True, False)
        if (model.trains if is_training else not model.untuned_only)
        and re.search(options.only, _title(model, is_training=is_training))
    ]
    number, count = options.part
    rows = _table(options.out, about={"steps": options.steps})
    if not options.only and count == 1:
        rows.forget()
    with_torch = is_there() and not options.no_torch
    if with_torch:
        torch_side.prefer_fast_convolutions()
    for model, is_training in runs[number - 1 :: count]:
        print(_title(model, is_training=is_training), flush=True)
        measured = measure(
            model,
            is_training=is_training,
            with_torch=with_torch,
            with_tuning=not options.no_tuning,
            steps=options.steps,
        )
        rows.add(*measured)


def _title(model: Model, *, is_training: bool) -> str:
    return f"{model.name} {'train' if is_training else 'infer'}"


if __name__ == "__main__":
    main()
