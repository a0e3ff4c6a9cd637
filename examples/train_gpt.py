# SPDX-License-Identifier: Apache-2.0
"""Trains GPT-2 on all GPUs of a machine under plain `jax.jit`: `make gpt`.

The batch is split over the mesh axis "data", heads and layers' widths over "model".
Where each parameter lies is said once, in gpt/layout.py; the compiler finds everything
else. The text is the source of Python's standard library, NumPy, JAX and Flax, byte by
byte, so that nothing has to be downloaded. On two CPU cores the default model is tiny
and takes about two minutes.

  python examples/train_gpt.py --parallel fsdp --checkpoints runs/a
  python examples/train_gpt.py --parallel tensor --mesh 2x4 --size medium
"""

import argparse
import importlib.util
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import get_args

import jax
import numpy as np
from gpt.checkpoints import Checkpoints
from gpt.layout import Layout, Parallel, choose_layout
from gpt.report import (
    Progress,
    describe_program,
    draw_losses,
    flops_per_token,
    peak_flops,
)
from gpt.settings import SIZES, Settings
from gpt.text import Corpus, batch_of, counting_losses, read_corpus, validation_batches
from gpt.training import Trainer, TrainState


def is_missing(package: str) -> bool:
    """Tell whether a package that only part of this example needs is not installed."""
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # the package that it would lie in
        return True


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--size",
        choices=SIZES,
        default="small" if jax.default_backend() == "gpu" else "tiny",
        help="default: small on a GPU, else tiny; the next flags change parts of it",
    )
    for name in ("layers", "width", "heads", "context", "batch", "steps"):
        add(f"--{name}", type=int)
    add("--learning-rate", type=float)
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16" if jax.default_backend() == "gpu" else "float32",
        help="of products; default: bfloat16 on a GPU, else float32, which CPUs prefer",
    )
    add("--seed", type=int, default=0)
    add(
        "--parallel",
        choices=get_args(Parallel),
        default="data",
        help="data: parameters are whole on each device (default); fsdp: they are "
        'split over "data"; tensor: they are split over "model"',
    )
    add(
        "--mesh",
        metavar="DATAxMODEL",
        help="default: all devices along data, or for tensor along model",
    )
    add(
        "--baseline",
        action="store_true",
        help="the same in plain JAX, without jax_cudnn",
    )
    add(
        "--f8",
        action="store_true",
        help="the products of the blocks in f8, with their gradients; pays for widths "
        "of 4096 and more on GPUs with f8 units",
    )
    add("--text", type=Path, metavar="FILE", help="train on this file instead")
    add(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="save here, and continue what is here",
    )
    add("--save-every", type=int, default=500, metavar="STEPS", help="default: 500")
    add("--stop-at", type=int, metavar="STEP", help="end early, to continue later")
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="where the loss curve goes; default: train_gpt.png",
    )
    arguments = parser.parse_args(argv)
    needed = {"orbax.checkpoint": "checkpoints", "matplotlib": "picture"}
    for package, flag in needed.items():
        if getattr(arguments, flag) is not None and is_missing(package):
            parser.error(
                f"--{flag}: the package {package} is not installed. Run: pip install "
                f"{package.replace('.', '-')}, or leave --{flag} out"
            )
    for flag in ("save_every", "stop_at"):
        if (value := getattr(arguments, flag)) is not None and value < 1:
            name = flag.replace("_", "-")
            parser.error(f"--{name} {value}: it must be at least 1")
    try:
        arguments.settings = choose_settings(arguments)
        arguments.layout = choose_layout(
            arguments.parallel, arguments.mesh, arguments.settings
        )
    except ValueError as error:
        parser.error(str(error))
    return arguments


def choose_settings(arguments: argparse.Namespace) -> Settings:
    """Return the size that was asked for, with what was asked for beyond that."""
    given = vars(arguments)
    chosen = asdict(SIZES[arguments.size])
    for field in fields(Settings):
        if given.get(field.name) is not None:
            chosen[field.name] = given[field.name]
    settings = Settings(**chosen)
    for name in ("layers", "width", "heads", "context", "batch", "steps"):
        if chosen[name] < 1:
            raise ValueError(f"--{name} {chosen[name]}: it must be at least 1")
    if settings.baseline and settings.f8:
        raise ValueError("--baseline and --f8: plain JAX has no layers in f8")
    if settings.width % settings.heads:
        raise ValueError(
            f"--width {settings.width} is not a multiple of --heads {settings.heads}"
        )
    return settings


def print_run(settings: Settings, layout: Layout, corpus: Corpus, count: int) -> None:
    devices = list(layout.mesh.devices.flat)
    shape = " x ".join(f"{size} {name}" for name, size in layout.mesh.shape.items())
    print(f"Devices     {len(devices)} {devices[0].device_kind}, as a mesh of {shape}")
    print(
        f"Text        {corpus.source}: {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.validation):,} held out"
    )
    print(
        f"Model       {count:,} parameters: {settings.layers} layers of width "
        f"{settings.width}, {settings.heads} heads, context {settings.context}, "
        f"{settings.dtype}{', blocks in f8' if settings.f8 else ''}"
    )
    who = "plain JAX" if settings.baseline else "jax_cudnn"
    print(
        f"Training    {settings.steps} steps of {settings.tokens_per_step:,} bytes, "
        f"{layout.parallel}-parallel, with {who}"
    )


def train(
    trainer: Trainer,
    corpus: Corpus,
    arguments: argparse.Namespace,
    progress: Progress,
    checkpoints: Checkpoints | None,
) -> TrainState:
    """Take the steps that are left, and return the last state."""
    settings = arguments.settings
    state = checkpoints.restore(trainer.shapes) if checkpoints else None
    if state is not None:
        print(f"Continuing  at step {int(state.step)} of {arguments.checkpoints}")
    state = trainer.initial() if state is None else state
    first, last = int(state.step), settings.steps
    if arguments.stop_at is not None:
        last = min(last, arguments.stop_at)
    before = None  # the step before, which is waited for while the next one runs
    for done in range(first + 1, last + 1):
        text = trainer.place(batch_of(corpus, settings, done - 1))
        state, loss = trainer.step(state, text)
        if before is not None:
            progress.show(done - 1, float(before), is_last=False)
        before = loss
        if checkpoints and (done % arguments.save_every == 0 or done == last):
            checkpoints.save(done, state)
    if before is not None:
        progress.show(last, float(before), is_last=True)
    progress.close()
    return state


def run(argv: list[str] | None = None) -> TrainState:
    """Train as the arguments say, and return the last state."""
    arguments = parse_arguments(argv)
    settings, layout = arguments.settings, arguments.layout
    try:
        corpus = read_corpus(arguments.text, settings)
    except (OSError, ValueError) as error:
        sys.exit(f"--text {arguments.text}: {error}")
    held_out = validation_batches(corpus, settings)
    recorded = {**asdict(settings), "text": corpus.digest}
    checkpoints = (
        Checkpoints(arguments.checkpoints, recorded) if arguments.checkpoints else None
    )

    start = time.perf_counter()
    trainer = Trainer(settings, layout)
    compiled = time.perf_counter() - start
    params = trainer.shapes.params
    print_run(settings, layout, corpus, sum(x.size for x in jax.tree.leaves(params)))
    print(f"Program     compiled in {compiled:.1f} s; {describe_program(trainer.step)}")

    progress = Progress(
        settings, flops_per_token(params, settings), peak_flops(layout, settings)
    )
    state = train(trainer, corpus, arguments, progress, checkpoints)
    if checkpoints:
        checkpoints.close()

    unigram, bigram = counting_losses(corpus, held_out)
    after = trainer.validate(state.params, held_out)
    print("\nLoss on held-out text, in nats per byte:")
    print(f"  counting bytes  {unigram:.3f}")
    print(f"  counting pairs  {bigram:.3f}")
    verdict = "better than pairs" if after < bigram else "not yet better than pairs"
    print(f"  this model      {after:.3f}  {verdict} by {abs(bigram - after):.3f}")

    if arguments.picture is None and is_missing("matplotlib"):
        print("\nNo picture of the losses: the package matplotlib is not installed.")
        return state
    path = arguments.picture or Path("train_gpt.png")
    losses = np.asarray(state.losses)[: int(state.step)]
    lines = {"held out": after, "counting pairs": bigram}
    draw_losses(path, losses, lines, f"GPT-2, {settings.layers} layers")
    print(f"\nThe losses are drawn in {path}")
    return state


if __name__ == "__main__":
    run()
