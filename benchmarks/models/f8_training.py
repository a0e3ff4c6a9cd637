# SPDX-License-Identifier: Apache-2.0
"""Trains the GPT example with and without f8, from two seeds, and compares the losses.

    python -m benchmarks.f8_training --out docs/internals/measured

trains the model of examples/train_gpt.py on its own text, with the blocks' products in
f8 and without, and writes f8_training.json and f8_training.md there. On a GPU it is
GPT-2 small in bf16; on a CPU the tiny size in f32, whose losses mean the same.
`--steps` and `--size` choose others, and `--seeds 1` trains one seed: what the folder's
file has of the other is kept.
"""

from dataclasses import replace

import jax
import numpy as np
from gpt.layout import choose_layout
from gpt.settings import SIZES
from gpt.task import gpt_task
from language.settings import Settings
from language.text import batch_of, read_corpus, validation_batches
from language.training import Trainer

from benchmarks.harness.page import Data, Page, Row, table
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table

_SEEDS = 0, 1
# The mean of the last losses counts, and is to be within this share of that without f8.
_LAST, _GOAL = 100, 0.01
# The losses that are kept are means of so many steps.
_POINTS = 40


def train(settings: Settings) -> Row:
    """Train a model; return its losses."""
    trainer = Trainer(gpt_task(settings, choose_layout("data", None, settings)))
    corpus = read_corpus(None, settings)
    state = trainer.initial()
    for step in range(settings.steps):
        text = trainer.place(batch_of(corpus, settings, step))
        state, loss = trainer.step(state, text)
        if step % 100 == 0:
            print(f"  step {step}: {float(loss):.4f}", flush=True)
    losses = np.asarray(state.losses, np.float64)
    held_out = trainer.validate(state.params, validation_batches(corpus, settings))
    points = [float(each.mean()) for each in np.array_split(losses, _POINTS)]
    return {
        "seed": settings.seed,
        "f8": settings.f8,
        "last": round(float(losses[-_LAST:].mean()), 5),
        "held out": round(held_out, 5),
        "losses": [round(each, 4) for each in points],
    }


def _lines(data: Data) -> list[str]:
    rows = data["rows"]
    lines = [
        f"The model of examples/train_gpt.py ({data['size']}), {data['steps']} steps",
        f"in {data['dtype']}, from two seeds. In f8, all products of the blocks and of",
        "their gradients are, with the scales of their own largest numbers. Losses are",
        f"in nats per byte: the mean of the last {_LAST} steps, and on text held",
        "out.",
        "",
        *table(
            ">seed | | >last steps | >held out",
            (
                [
                    *(row["seed"], "f8" if row["f8"] else data["dtype"]),
                    *(f"{row['last']:.4f}", f"{row['held out']:.4f}"),
                ]
                for row in rows
            ),
        ),
    ]
    for seed in _SEEDS:
        pair = {row["f8"]: row["last"] for row in rows if row["seed"] == seed}
        if len(pair) == 2:
            share = pair[True] / pair[False] - 1
            verdict = "within" if abs(share) <= _GOAL else "beyond"
            lines += [
                "",
                f"Seed {seed}: f8 differs by {share:+.2%}, {verdict} {_GOAL:.0%}.",
            ]
    first = [row["last"] for row in rows if not row["f8"]]
    if len(first) == len(_SEEDS):
        between = abs(first[0] / first[1] - 1)
        lines += ["", f"Two seeds without f8 differ by {between:.2%}."]
    return lines


markdown = Page(
    name="f8_training",
    title="Training with and without f8",
    comment="Losses of a GPT trained with and without f8.",
    lines=_lines,
)


def main() -> None:
    """Train all models and write the page."""
    is_gpu = jax.default_backend() == "gpu"
    made = parser(__doc__)
    made.add_argument("--size", choices=SIZES, default="small" if is_gpu else "tiny")
    made.add_argument("--steps", type=int, default=1500)
    made.add_argument("--seeds", type=int, nargs="+", default=_SEEDS)
    options = made.parse_args()
    dtype = "bfloat16" if is_gpu else "float32"
    settings = replace(SIZES[options.size], steps=options.steps, dtype=dtype)
    runs = [(seed, is_f8) for seed in options.seeds for is_f8 in (False, True)]
    found = Table(
        folder=options.out,
        page=markdown,
        keys=("seed", "f8"),
        order=[(seed, is_f8) for seed in _SEEDS for is_f8 in (False, True)],
        keeps="these versions",
        about={"size": options.size, "steps": options.steps, "dtype": dtype},
    )
    if {*options.seeds} == {*_SEEDS}:
        found.forget()
    for seed, is_f8 in runs:
        print(f"seed {seed}, {'f8' if is_f8 else dtype}", flush=True)
        found.add(train(replace(settings, seed=seed, f8=is_f8)))


if __name__ == "__main__":
    main()
