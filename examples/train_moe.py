# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer whose perceptrons are mixtures of experts: `make moe`.

In each block a router sends every byte of the text to two of eight experts, by
`jax_cudnn.flax.nnx.MixtureOfExperts`. On several devices each has some of the experts
and a part of the batch, and the layer exchanges tokens between them. Everything else is
examples/train_gpt.py's: the text, attention, and the optimizer. A second loss keeps the
experts equally busy. On two CPU cores it takes about two minutes.

  python examples/train_moe.py --experts 16 --top-k 4 --capacity-factor 1.25
"""

import argparse
import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gpt.model import AttentionBlock, Gpt, Kernels, kernels_for
from gpt.settings import SIZES
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from language.arguments import check_positive, choose_settings
from language.loss import cross_entropies
from language.names import name_of
from language.report import Progress
from language.settings import Settings
from language.task import Task
from language.text import (
    Rows,
    batch_of,
    counting_losses,
    read_corpus,
    validation_batches,
)
from language.training import Trainer

from jax_cudnn.flax.nnx import MixtureOfExperts


class ExpertsBlock(AttentionBlock):
    """Attention and a mixture of experts, each on the normalised residual."""

    def __init__(
        self,
        settings: Settings,
        kernels: Kernels,
        rngs: nnx.Rngs,
        experts: dict[str, Any],
    ):
        super().__init__(settings, kernels, rngs)
        width = settings.width
        self.experts = MixtureOfExperts(
            width, 2 * width, **experts, dtype=settings.dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Any]:
        x = self.attend(x)
        y, auxiliary = self.experts(self.mlp_norm(x))
        return x + y, auxiliary


class ExpertsGpt(Gpt):
    """GPT-2 with experts; returns logits and what each block says of its experts."""

    def __init__(
        self,
        settings: Settings,
        kernels: Kernels,
        rngs: nnx.Rngs,
        experts: dict[str, Any],
    ):
        self.block = functools.partial(ExpertsBlock, experts=experts)
        super().__init__(settings, kernels, rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, Any]:
        x, told = self.embed(tokens), []
        for block in self.blocks:
            x, auxiliary = block(x)
            told.append(auxiliary)
        return self.logits(x), jax.tree.map(lambda *xs: jnp.stack(xs), *told)


@dataclass(frozen=True)
class Layout:
    """A mesh of one axis, over which the experts are split, and the batch."""

    mesh: jax.sharding.Mesh

    @property
    def rows(self) -> P:
        """Return how the arrays of a batch are split."""
        return P("expert")

    def of_state(self, state: Any) -> Any:
        """Return where each array of parameters or of the optimizer is kept."""

        def place(path: tuple[Any, ...], x: Any) -> NamedSharding:
            is_experts = ".experts." in name_of(path) and x.ndim == 3
            return NamedSharding(self.mesh, P("expert") if is_experts else P())

        return jax.tree_util.tree_map_with_path(place, state)


def choose_layout(settings: Settings, num_experts: int) -> Layout:
    """Return a mesh of as many devices as divide the experts and the batch."""
    count = math.gcd(len(jax.devices()), num_experts, settings.batch)
    devices = jax.devices()[:count]
    kinds = (AxisType.Auto,)
    mesh = jax.make_mesh((count,), ("expert",), axis_types=kinds, devices=devices)
    return Layout(mesh)


class ExpertsTask:
    """The model, its task for the trainer, and what it says of held-out text."""

    def __init__(self, settings: Settings, layout: Layout, experts: dict[str, Any]):
        options = {**experts, "expert_axis": "expert", "mesh": layout.mesh}
        kernels = kernels_for(settings)

        def build() -> ExpertsGpt:
            return ExpertsGpt(settings, kernels, nnx.Rngs(settings.seed), options)

        self._graph = nnx.split(nnx.eval_shape(build), nnx.Param)[0]
        self.task = Task(
            settings=settings,
            layout=layout,
            initial=lambda: nnx.split(build(), nnx.Param)[1],
            arrays_of=lambda rows: rows.text,
            loss=self._loss,
            lookups=("positions.embedding",),
        )

    def _run(self, params: nnx.State, text: jax.Array) -> tuple[jax.Array, Any]:
        logits, auxiliary = nnx.merge(self._graph, params)(text[:, :-1])
        return cross_entropies(logits, text[:, 1:]), auxiliary

    def _loss(self, params: nnx.State, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, auxiliary = self._run(params, text)
        balance = jnp.mean(auxiliary.load_balance_loss)
        added = 0.01 * balance + 1e-3 * jnp.mean(auxiliary.z_loss)
        return jnp.sum(losses) + losses.size * added, jnp.float32(losses.size)

    @functools.cached_property
    def _means(self) -> Any:
        def means(params: nnx.State, text: jax.Array) -> tuple[jax.Array, Any]:
            losses, auxiliary = self._run(params, text)
            return jnp.mean(losses), auxiliary

        return jax.jit(means)

    def validate(
        self, trainer: Trainer, params: nnx.State, batches: list[Rows]
    ) -> tuple[float, Any]:
        """Return the mean loss over the batches, and what blocks say of the experts."""
        found = [self._means(params, trainer.place(rows)) for rows in batches]
        loss, auxiliary = jax.tree.map(lambda *xs: np.mean(xs, axis=0), *found)
        return float(loss), auxiliary


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    is_gpu = jax.default_backend() == "gpu"
    for name in ("layers", "width", "heads", "context", "batch"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--steps", type=int, default=2000 if is_gpu else 800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", type=int, default=8, help="default: 8")
    parser.add_argument("--top-k", type=int, default=2, help="default: 2")
    parser.add_argument(
        "--capacity-factor", type=float, help="default: experts take all tokens"
    )
    arguments = parser.parse_args(argv)
    size = replace(SIZES["small"], dtype="bfloat16")
    if not is_gpu:
        # XLA multiplies all rows by the matrices of all experts on a CPU.
        size = replace(SIZES["tiny"], width=96, heads=4)
    try:
        arguments.settings = choose_settings(arguments, size)
        for name in ("experts", "top_k"):
            check_positive(name, getattr(arguments, name))
    except ValueError as error:
        parser.error(str(error))
    if arguments.top_k > arguments.experts:
        parser.error(
            f"--top-k {arguments.top_k}: there are {arguments.experts} experts"
        )
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Train as the arguments say, and print losses and how busy the experts are."""
    arguments = parse_arguments(argv)
    settings = arguments.settings
    experts = {
        "num_experts": arguments.experts,
        "top_k": arguments.top_k,
        "capacity_factor": arguments.capacity_factor,
    }
    corpus = read_corpus(None, settings)
    held_out = validation_batches(corpus, settings)
    layout = choose_layout(settings, arguments.experts)
    model = ExpertsTask(settings, layout, experts)
    trainer = Trainer(model.task)
    state = trainer.initial()
    count = sum(x.size for x in jax.tree.leaves(state.params))
    print(f"Devices     {layout.mesh.size} {jax.devices()[0].device_kind}")
    print(f"Text        {corpus.source}: {len(corpus.train.text):,} bytes to train on")
    print(
        f"Model       {count:,} parameters: {settings.layers} layers of width "
        f"{settings.width}, {arguments.top_k} of {arguments.experts} experts for a byte"
    )
    print(f"Training    {settings.steps} steps of {settings.tokens_per_step:,} bytes")
    # No share of the peak: operations depend on how many experts a byte has.
    progress = Progress(settings, 0.0, None)
    for done in range(1, settings.steps + 1):
        text = trainer.place(batch_of(corpus, settings, done - 1))
        state, loss = trainer.step(state, text)
        progress.show(done, float(loss), is_last=done == settings.steps)
    progress.close()

    loss, auxiliary = model.validate(trainer, state.params, held_out)
    unigram, bigram = counting_losses(corpus, held_out)
    print("\nLoss on held-out text, in nats per byte:")
    print(f"  counting bytes  {unigram:.3f}")
    print(f"  counting pairs  {bigram:.3f}")
    print(f"  this model      {loss:.3f}")
    print("\nShare of the held-out text that each expert got, in per cent:")
    for i, (load, dropped) in enumerate(
        zip(auxiliary.load, auxiliary.dropped, strict=True)
    ):
        shares = " ".join(f"{100 * share:5.1f}" for share in load)
        print(f"  block {i}  {shares}  dropped {100 * dropped:.1f}")


if __name__ == "__main__":
    main()
