# SPDX-License-Identifier: Apache-2.0
"""Writes docs/benchmarks/plans.md: what choosing the plan is worth, in measured times.

It also writes the three sentences between the marks of docs/plans.md.

    python -m scripts.plan_tables              # from the data in docs/benchmarks
    python -m scripts.plan_tables --measure    # on an NVIDIA GPU: plans.json first

The times of convolutions and matmuls are those of docs/benchmarks/fusion.json, which
`python -m benchmarks.fusion` measured. With --measure, attention's plans are timed and
the train step of examples/train_char_transformer.py is inspected, before and after
tuning; the results are kept in docs/benchmarks/plans.json. Writing the page needs no
GPU and nothing but Python.
"""

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
GUIDE = FOLDER.parent / "plans.md"
_MARKS = ("<!-- summary -->", "<!-- /summary -->")

# First plans that take more than so many times as long as the best one are counted;
# below that, much is noise.
_NOTABLE = 1.1
_DIRECTIONS = {"fwd": "forward", "fwd+bwd": "forward and gradients"}
_KINDS = {
    "conv_fprop": "convolutions, forward",
    "conv_dgrad": "convolutions, gradient of x",
    "conv_wgrad": "convolutions, gradient of w",
    "matmul": "matmuls alone (gradients)",
    "matmul+": "matmuls with bias and more",
    "": "activation gradients, sums",
}

Entry = dict[str, Any]


# --- the page -------------------------------------------------------------------------


def page(fusion: Entry, measured: Entry | None) -> str:
    """Return the page, from fusion.json and, where it was measured, plans.json."""
    lines = [*_introduction(fusion), *_programs(fusion), *_graphs(fusion)]
    if measured is not None:
        lines += [*_attention(measured), *_demo(measured)]
    return "\n".join(lines) + "\n"


def _introduction(fusion: Entry) -> Iterator[str]:
    yield "# What choosing the plan is worth"
    yield ""
    yield "Written by `python -m scripts.plan_tables`; do not edit."
    yield ""
    yield (
        "Convolutions and matmuls are the cells of [fusion.md](fusion.md), which says "
        "how they were timed. These runs:"
    )
    yield ""
    for origin in dict.fromkeys(map(_origin, fusion["runs"])):
        yield f"- {origin}"


def _origin(run: Entry) -> str:
    versions = (f"{name} {value}" for name, value in run["environment"].items())
    return f"{', '.join(versions)}, {run['date']}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _median_and_worst(ratios: Sequence[float]) -> list[str]:
    return [f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}"]


# --- whole programs -------------------------------------------------------------------


def _tuned_rows(fusion: Entry) -> list[tuple[str, str, Entry]]:
    return [
        (cell["name"], what, result["contenders"])
        for cell in fusion["cells"]
        for what, result in cell["results"].items()
        if "tuned" in result["contenders"]
    ]


def _programs(fusion: Entry) -> Iterator[str]:
    yield ""
    yield "## Programs"
    yield ""
    yield (
        "A program is a cell's forward pass, or that with all gradients. *First plan* "
        'is `implementation="auto"` with no measured choices: the first of cuDNN\'s '
        "plans that builds. *Tuned* is the same after `plans.autotune`: for each graph "
        "in the program the fastest plan, or XLA. *XLA* is XLA's code alone. Ratios "
        "below 1 are faster."
    )
    yield ""
    yield from _program_summary(fusion)
    yield ""
    yield "Microseconds a call:"
    yield ""
    yield _row(["program", "", "XLA", "first plan", "tuned", "tuned / first plan"])
    yield _row(["---", "---", *["---:"] * 4])
    for name, what, contenders in _tuned_rows(fusion):
        gain = contenders["tuned"]["ratio"] / contenders["untuned"]["ratio"]
        times = [contenders[each]["median_us"] for each in ("XLA", "untuned", "tuned")]
        yield _row([name, what, *(f"{us:.1f}" for us in times), f"{gain:.2f}"])


def _program_summary(fusion: Entry) -> Iterator[str]:
    """Yield a table: medians, and the best and the worst of them."""
    rows = _tuned_rows(fusion)
    yield _row(
        [
            *("", "programs", "tuned / first plan: median", "best", "worst"),
            *("first plan / XLA: median", "worst", "tuned / XLA: median", "worst"),
        ]
    )
    yield _row(["---", *["---:"] * 8])
    for what, title in _DIRECTIONS.items():
        found = [contenders for _, each, contenders in rows if each == what]
        gains = [c["tuned"]["ratio"] / c["untuned"]["ratio"] for c in found]
        yield _row(
            [
                *(title, str(len(found))),
                *(f"{statistics.median(gains):.2f}", f"{min(gains):.2f}"),
                f"{max(gains):.2f}",
                *_median_and_worst([c["untuned"]["ratio"] for c in found]),
                *_median_and_worst([c["tuned"]["ratio"] for c in found]),
            ]
        )


# --- single graphs --------------------------------------------------------------------


def _entries(fusion: Entry) -> list[Entry]:
    by_digest = {
        entry["graph"]: entry for cell in fusion["cells"] for entry in cell["tuning"]
    }
    return list(by_digest.values())


def _graphs(fusion: Entry) -> Iterator[str]:
    yield ""
    yield "## Graphs"
    yield ""
    yield (
        "The distinct graphs in those programs, each by itself. *First / best* is the "
        "time of cuDNN's first plan over that of its fastest plan, kernels only, for "
        "the first way of writing the graph that cuDNN takes. *Best plan* and *XLA* "
        "are microseconds a call in compiled programs; with the plan comes the array "
        "work around it, such as transposed or padded operands."
    )
    yield ""
    yield from _graph_summary(fusion)
    yield ""
    yield _row(["graph", "operands", "first / best", "best plan", "XLA", "chosen"])
    yield _row(["---", "---", *["---:"] * 3, "---"])
    for entry in _entries(fusion):
        numbers = (entry["first_ratio"], entry["cudnn_us"], entry["xla_us"])
        yield _row(
            [
                *(entry["op"], entry["operands"]),
                *("" if x is None else f"{x:.2f}" for x in numbers),
                entry["implementation"],
            ]
        )


def _graph_summary(fusion: Entry) -> Iterator[str]:
    """Yield a sentence and a table: how far from the best the first plans are."""
    entries = _entries(fusion)
    ratios = [e["first_ratio"] for e in entries if e["first_ratio"] is not None]
    notable = sum(ratio > _NOTABLE for ratio in ratios)
    xla = [entry for entry in entries if entry["implementation"] == "xla"]
    yield (
        f"For {notable} of {len(entries)} graphs ({notable / len(entries):.0%}), the "
        f"first plan takes more than {_NOTABLE} times as long as the best. The median "
        f"ratio is {statistics.median(ratios):.2f}, the worst {max(ratios):.2f}. For "
        f"{len(xla)} ({len(xla) / len(entries):.0%}), XLA beats every plan."
    )
    yield ""
    yield _row(
        [
            "",
            "graphs",
            "first / best: median",
            "worst",
            f"over {_NOTABLE}",
            "XLA is faster",
        ]
    )
    yield _row(["---", *["---:"] * 5])
    for kind, title in _KINDS.items():
        found = [entry for entry in entries if _kind(entry["op"]) == kind]
        yield _row([title, *_summary(found)])


def _kind(op: str) -> str:
    """Return which of _KINDS a graph is, by its label."""
    if op.startswith("matmul+"):
        return "matmul+"
    return next(kind for kind in _KINDS if op.startswith(kind))


def _summary(entries: Sequence[Entry]) -> list[str]:
    ratios = [e["first_ratio"] for e in entries if e["first_ratio"] is not None]
    xla = sum(entry["implementation"] == "xla" for entry in entries)
    return [
        str(len(entries)),
        *_median_and_worst(ratios),
        str(sum(ratio > _NOTABLE for ratio in ratios)),
        str(xla),
    ]


# --- what --measure adds --------------------------------------------------------------


def _attention(measured: Entry) -> Iterator[str]:
    yield ""
    yield "## Attention"
    yield ""
    yield (
        "The cells of [sdpa.md](sdpa.md), bf16, microseconds of the kernels. XLA's are "
        "of a compiled program, and left out where its scores do not fit in memory. "
        f"`{measured['command']}`: {_origin(measured)}."
    )
    yield ""
    yield _row(["cell", "graph", "plans", "first plan", "best plan", "XLA", "best is"])
    yield _row(["---", "---", *["---:"] * 4, "---"])
    for entry in measured["sdpa"]:
        times = (entry["first_us"], entry["best_us"], entry["xla_us"])
        yield _row(
            [
                *(entry["cell"], entry["op"], str(entry["plans"])),
                *("" if us is None else f"{us:.1f}" for us in times),
                entry["best"],
            ]
        )


def _demo(measured: Entry) -> Iterator[str]:
    yield ""
    yield "## A train step"
    yield ""
    yield (
        "`plans.inspect` of the train step of `examples/train_char_transformer.py`, as "
        f"`make demo` runs it on a GPU. {_origin(measured)}."
    )
    for title, text in (
        ("Untuned", measured["demo"]["untuned"]),
        ("After `plans.autotune`", measured["demo"]["tuned"]),
    ):
        yield ""
        yield f"{title}:"
        yield ""
        yield "```text"
        yield text
        yield "```"


def measure() -> Entry:
    """Return what plans.json holds, measured on this machine's GPU."""
    # Here, because writing the page needs none of them.
    from benchmarks.harness.versions import environment
    from jax_cudnn import choices, plans
    from jax_cudnn.lowering.devices import local_target

    local = local_target()
    if local is None:
        raise SystemExit("--measure needs an NVIDIA GPU; JAX sees none here.")
    # What this machine's user has tuned has no part in it, nor this in that.
    plans.set_cache(None)
    choices.table().clear()
    return {
        "command": "python -m scripts.plan_tables --measure",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "environment": environment(),
        "demo": _measure_demo(),
        "sdpa": list(_measure_attention(local[1])),
    }


def _measure_attention(target: Any) -> Iterator[Entry]:
    import jax

    from benchmarks.attention.sdpa import CELLS
    from jax_cudnn.lowering import traced_graphs
    from jax_cudnn.tuning import measure as measure_part
    from jax_cudnn.tuning.candidate_times import time_candidates

    for cell in CELLS:
        for graph, options, _ in traced_graphs(*_step(cell)):
            timed = time_candidates(graph, target)
            built = [each for each in timed if each.time is not None]
            best = min(built, key=lambda each: each.time.median_us)
            # The reference's scores would not fit in memory.
            found = measure_part(graph, options, target) if cell.has_xla else None
            yield {
                "cell": cell.name,
                "op": graph.nodes[0].kind,
                "plans": len(built),
                "first_us": built[0].time.median_us,
                "best_us": best.time.median_us,
                "xla_us": found and found.xla_us,
                "best": best.candidate.name,
            }
            jax.clear_caches()


def _step(cell: Any) -> tuple[Any, ...]:
    """Return a function with the cell's forward and gradient, and its operands."""
    import jax
    import jax.numpy as jnp

    import jax_cudnn

    query = jax.ShapeDtypeStruct((cell.b, cell.s, cell.h, cell.d), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((cell.b, cell.s, cell.k, cell.d), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, cell.h, cell.s, cell.s), jnp.bfloat16)
    operands = (query, key, key, *([bias] if cell.has_bias else []))

    def step(*xs: jax.Array) -> Any:
        output, pullback = jax.vjp(
            lambda *xs: jax_cudnn.sdpa(*xs, **cell.ours(cell.s)), *xs
        )
        return output, pullback(output)

    return step, *operands


def _measure_demo() -> Entry:
    import jax

    from examples import train_char_transformer as demo
    from jax_cudnn import plans
    from jax_cudnn.flax import make_attention_fn

    corpus = demo.read_corpus()
    model, params = demo.build(corpus, demo.ON_GPU, make_attention_fn(), seed=0)
    trainer = demo.Trainer(model, params, demo.ON_GPU)
    text = next(demo.batches(corpus.train, demo.ON_GPU, seed=0))
    untuned = str(trainer.inspect(text))
    plans.autotune(jax.value_and_grad(model.loss), params, text)
    return {"untuned": untuned, "tuned": str(trainer.inspect(text))}


# --- the command ----------------------------------------------------------------------


def written(folder: Path = FOLDER) -> str:
    """Return the page that the data in a folder make."""
    kept = folder / "plans.json"
    return page(
        json.loads((folder / "fusion.json").read_text(encoding="utf-8")),
        json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None,
    )


def guide(text: str, folder: Path = FOLDER) -> str:
    """Return the text of docs/plans.md with the summary between its marks."""
    fusion = json.loads((folder / "fusion.json").read_text(encoding="utf-8"))
    before, _, rest = text.partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    return "\n".join((before + _MARKS[0], _guide_summary(fusion), _MARKS[1] + after))


def _guide_summary(fusion: Entry) -> str:
    """Return three sentences: what tuning saves, and what first plans lose."""
    programs = [times for _, what, times in _tuned_rows(fusion) if what == "fwd+bwd"]
    gains = [x["tuned"]["ratio"] / x["untuned"]["ratio"] for x in programs]
    entries = _entries(fusion)
    ratios = [e["first_ratio"] for e in entries if e["first_ratio"] is not None]
    slow = sum(ratio > _NOTABLE for ratio in ratios) / len(entries)
    xla = sum(entry["implementation"] == "xla" for entry in entries) / len(entries)
    return (
        f"- Tuning makes {len(gains)} programs, forward and gradients, take "
        f"{1 - statistics.median(gains):.0%} less time in the median, and "
        f"{1 - min(gains):.0%} less in the best case.\n"
        f"- For {slow:.0%} of their {len(entries)} graphs, cuDNN's first plan takes "
        f"more than {_NOTABLE - 1:.0%} longer than its best one.\n"
        f"- For {xla:.0%} of the graphs, XLA is faster than every plan."
    )


def main() -> None:
    """Write the pages, and the data before it if that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure plans.json first, on a GPU"
    )
    if parser.parse_args().measure:
        # Here, since the tests load this file without the benchmarks.
        from benchmarks.harness.records import write_records

        write_records(FOLDER / "plans.json", measure())
    (FOLDER / "plans.md").write_text(written(), encoding="utf-8")
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(guide(text), encoding="utf-8")


if __name__ == "__main__":
    main()
