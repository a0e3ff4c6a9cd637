# SPDX-License-Identifier: Apache-2.0
"""Runs the training of a language model, and tells of it."""

import argparse
import contextlib
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from language import processes
from language.arguments import is_missing
from language.checkpoints import Checkpoints
from language.report import (
    Progress,
    describe_program,
    draw_losses,
    flops_per_token,
    peak_flops,
)
from language.settings import Settings
from language.task import Task
from language.text import (
    Corpus,
    batch_of,
    counting_losses,
    read_corpus,
    validation_batches,
)
from language.training import Trainer, TrainState

# A profile is of so many steps, after as many others.
_PROFILED = 3


def corpus_of(path: Path | None, settings: Settings) -> Corpus:
    """Return the text, or end the program with what is wrong with it."""
    try:
        return read_corpus(path, settings)
    except (OSError, ValueError) as error:
        sys.exit(f"--text {path}: {error}")


def print_run(task: Task, corpus: Corpus, count: int, model: str, how: str) -> None:
    """Print the devices, the text, the model and how it is trained."""
    settings, mesh = task.settings, task.layout.mesh
    devices = list(mesh.devices.flat)
    shape = " x ".join(f"{size} {name}" for name, size in mesh.shape.items())
    print(f"Devices     {len(devices)} {devices[0].device_kind}, as a mesh of {shape}")
    print(
        f"Text        {corpus.source}: {len(corpus.train.text):,} bytes to train on, "
        f"{len(corpus.validation.text):,} held out"
    )
    print(
        f"Model       {count:,} parameters: {settings.layers} layers of width "
        f"{settings.width}, {model}, context {settings.context}, "
        f"{settings.dtype}{', blocks in f8' if settings.f8 else ''}"
    )
    who = "plain JAX" if settings.baseline else "jax_cudnn"
    print(
        f"Training    {settings.steps} steps of {settings.tokens_per_step:,} bytes, "
        f"{how}, with {who}"
    )


class _Profile:
    """Records some steps of a run, if that was asked for."""

    def __init__(self, folder: Path | None, first: int, last: int):
        self._folder = folder
        self._begin = min(first + _PROFILED, last - 1)
        self._end = min(self._begin + _PROFILED, last)
        self._open = contextlib.ExitStack()

    def before(self, step: int, done: jax.Array | None) -> None:
        """Begin or end, before a step; `done` is a result of the step before."""
        if self._folder is None:
            return
        if step == self._begin + 1:
            jax.block_until_ready(done)
            self._open.enter_context(jax.profiler.trace(str(self._folder)))
        elif step == self._end + 1:
            jax.block_until_ready(done)
            self._open.close()
            print(
                f"  a profile of {self._end - self._begin} steps is in {self._folder}"
            )


def train(
    trainer: Trainer,
    state: TrainState,
    corpus: Corpus,
    arguments: argparse.Namespace,
    progress: Progress,
    checkpoints: Checkpoints | None,
) -> TrainState:
    """Take the steps that are left, and return the last state."""
    settings = arguments.settings
    first, last = int(state.step), settings.steps
    if arguments.stop_at is not None:
        last = min(last, arguments.stop_at)
    profile = _Profile(arguments.profile, first, last)
    before = None  # the step before, which is waited for while the next one runs
    for done in range(first + 1, last + 1):
        text = trainer.place(batch_of(corpus, settings, done - 1))
        profile.before(done, before)
        state, loss = trainer.step(state, text)
        if before is not None:
            progress.show(done - 1, float(before), is_last=False)
        before = loss
        if checkpoints and (done % arguments.save_every == 0 or done == last):
            checkpoints.save(done, state)
    if before is not None:
        profile.before(last + 1, before)
        progress.show(last, float(before), is_last=True)
    progress.close()
    return state


def run_task(
    task: Task,
    corpus: Corpus,
    arguments: argparse.Namespace,
    *,
    name: str,
    model: str,
    how: str,
    params: nnx.State | None = None,
) -> TrainState:
    """Train as the arguments say, and return the last state.

    The run begins with `params`, or with drawn ones, unless it is continued. `name` is
    the model's, `model` and `how` are told of the model and of the training.
    """
    settings = task.settings
    held_out = validation_batches(corpus, settings)
    recorded = {**asdict(settings), "text": corpus.digest}
    folder = arguments.checkpoints
    checkpoints = Checkpoints(folder, recorded) if folder else None

    trainer = Trainer(task)
    start = time.perf_counter()
    program = trainer.step
    compiled = time.perf_counter() - start
    shapes = trainer.shapes.params
    count = sum(x.size for x in jax.tree.leaves(shapes))
    print_run(task, corpus, count, model, how)
    print(f"Program     compiled in {compiled:.1f} s; {describe_program(program)}")

    state = checkpoints.restore(trainer.shapes) if checkpoints else None
    if state is not None:
        print(f"Continuing  at step {int(state.step)} of {folder}")
    state = trainer.initial(params) if state is None else state
    progress = Progress(settings, flops_per_token(shapes, task), peak_flops(task))
    state = train(trainer, state, corpus, arguments, progress, checkpoints)
    if checkpoints:
        checkpoints.close()

    unigram, bigram = counting_losses(corpus, held_out)
    after = trainer.validate(state.params, held_out)
    print("\nLoss on held-out text, in nats per byte:")
    print(f"  counting bytes  {unigram:.3f}")
    print(f"  counting pairs  {bigram:.3f}")
    verdict = "better than pairs" if after < bigram else "not yet better than pairs"
    print(f"  this model      {after:.3f}  {verdict} by {abs(bigram - after):.3f}")

    if not processes.is_first():
        return state
    if arguments.picture is None and is_missing("matplotlib"):
        print("\nNo picture of the losses: the package matplotlib is not installed.")
        return state
    path = arguments.picture or Path(f"train_{name.partition('-')[0].lower()}.png")
    losses = np.asarray(state.losses)[: int(state.step)]
    lines = {"held out": after, "counting pairs": bigram}
    draw_losses(path, losses, lines, f"{name}, {settings.layers} layers")
    print(f"\nThe losses are drawn in {path}")
    return state
