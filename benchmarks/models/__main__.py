# SPDX-License-Identifier: Apache-2.0
"""Times whole models on one GPU: plain JAX, jax_cudnn untuned and tuned, and PyTorch.

    python -m benchmarks.models --out docs/benchmarks

writes models.json and models.md there. Contenders start from the same weights, and
their losses over the first steps have to agree. Then all of them take turns in one run;
see timing.py. Most models are trained untuned, beside plain JAX alone, and take about a
minute each, most of it to compile; the first seven are tuned and inferred as well.

`--only REGEX` chooses models by their names and what they do, such as "ViT-B train";
those that the file in the folder has beside them are kept. `--part 1/4` runs the second
of four parts of these, so that four GPUs may share them, a process each. `--small`
tries the script on a CPU, where times say nothing.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.harness import torch_side
from benchmarks.harness.page import FINE_RANGE, Data, Page, Row, gpu_of, table
from benchmarks.harness.program import run_benchmark
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
# Steps whose losses have to agree, and those of small models.
_STEPS, _FEW_STEPS = 50, 3
# Dense bf16 products a second, from NVIDIA's data sheets.
_PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}

# The models that are trained in f8 as well, by the names of contenders.
_F8, _IN_F8 = "untuned, f8", ("Llama-like",)
# Plain JAX has two ways to mix experts. Ratios are to the faster one.
_ALL_EXPERTS, _OF_EXPERTS = f"{_PLAIN}, all experts", ("Mixtral-like",)

_Steps = JaxSteps | TorchSteps


class _Case(NamedTuple):
    """A model that is trained or inferred, and over how many steps it is checked."""

    model: Model
    is_training: bool
    steps: int

    @property
    def what(self) -> str:
        """What is done with the model."""
        return "train" if self.is_training else "infer"

    def __str__(self) -> str:
        return f"{self.model} {self.what}"


def _cases(*, small: bool) -> list[_Case]:
    return [
        _Case(model, is_training, _FEW_STEPS if small else _STEPS)
        for model in every(small=small)
        for is_training in (True, False)
        if (model.trains if is_training else not model.untuned_only)
    ]


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
    cases: Sequence[_Case], no_torch: bool, no_tuning: bool
) -> Iterator[list[Row]]:
    """Time all contenders of each model; yield a row for each."""
    with_torch = is_there() and not no_torch
    if with_torch:
        torch_side.prefer_fast_convolutions()
    for case in cases:
        print(case, flush=True)
        is_beside_all = not case.model.untuned_only
        makers = _contenders(
            case.model,
            is_training=case.is_training,
            with_torch=with_torch and is_beside_all,
            with_tuning=is_beside_all and not no_tuning,
        )
        yield _measured(case, makers)
        if with_torch:
            torch_side.release_memory()


def _measured(case: _Case, makers: dict[str, Callable[[], _Steps]]) -> list[Row]:
    model, is_training, steps = case
    runs: dict[str, _Steps] = {}
    results: dict[str, np.ndarray] = {}
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
    rows: list[Row] = []
    for name, run in runs.items():
        timing = summary(times[name], plain)
        row = {
            "model": model.name,
            "size": model.size,
            "what": case.what,
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
        f"learns one batch by heart. Losses over the first {_STEPS} steps agree",
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


markdown = Page(
    name="models",
    title="Whole models",
    comment="What whole models take on a GPU, by several packages.",
    command="python -m benchmarks.models --out docs/benchmarks",
    names_gpus=True,
    lines=_lines,
)


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        _cases,
        measure,
        markdown,
        options={
            "--no-torch": {"action": "store_true"},
            "--no-tuning": {"action": "store_true"},
        },
        keeps="any GPU",
        keys=("model", "what"),
        order=[model.name for model in every()],
    )
