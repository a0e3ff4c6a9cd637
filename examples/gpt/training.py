# SPDX-License-Identifier: Apache-2.0
"""Defines the training step and the state that it changes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gpt.layout import Layout, is_matrix
from gpt.model import Gpt, cross_entropy, kernels_for
from gpt.optimizer import make_optimizer
from gpt.settings import Settings


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint holds."""

    params: Any  # an nnx.State
    optimizer: optax.OptState
    losses: jax.Array  # (steps,) f32; NaN for steps to come
    step: jax.Array  # steps taken


class Trainer:
    """The compiled programs of one run."""

    def __init__(self, settings: Settings, layout: Layout):
        self._layout = layout
        kernels = kernels_for(settings)
        optimizer = make_optimizer(settings)

        def build() -> tuple[nnx.GraphDef, nnx.State]:
            return nnx.split(Gpt(settings, kernels, nnx.Rngs(settings.seed)), nnx.Param)

        def initial() -> TrainState:
            params = build()[1]
            return TrainState(
                params=params,
                optimizer=optimizer.init(params),
                losses=jnp.full(settings.steps, jnp.nan),
                step=jnp.zeros((), jnp.int32),
            )

        graph = nnx.split(
            nnx.eval_shape(lambda: Gpt(settings, kernels, nnx.Rngs(0))), nnx.Param
        )[0]

        def loss(params: nnx.State, text: jax.Array) -> jax.Array:
            # The matrices are converted before FSDP gathers them: half the bytes.
            params = jax.tree_util.tree_map_with_path(
                lambda p, x: x.astype(settings.dtype) if is_matrix(p) else x, params
            )
            params = jax.lax.with_sharding_constraint(params, layout.of_use(params))
            logits = nnx.merge(graph, params)(text[:, :-1])
            return cross_entropy(logits, text[:, 1:])

        def step(state: TrainState, text: jax.Array) -> tuple[TrainState, jax.Array]:
            value, gradient = jax.value_and_grad(loss)(state.params, text)
            updates, moments = optimizer.update(gradient, state.optimizer, state.params)
            after = TrainState(
                params=optax.apply_updates(state.params, updates),
                optimizer=moments,
                losses=state.losses.at[state.step].set(value),
                step=state.step + 1,
            )
            return after, value

        shapes = jax.eval_shape(initial)
        places = layout.of_state(shapes)
        whole = NamedSharding(layout.mesh, P())
        self.shapes: TrainState = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            places,
        )
        self.initial = jax.jit(initial, out_shardings=places)
        text = jax.ShapeDtypeStruct(
            (settings.batch, settings.context + 1), jnp.int32, sharding=layout.batch
        )
        self.step = (
            jax.jit(step, donate_argnums=0, out_shardings=(places, whole))
            .lower(self.shapes, text)
            .compile()
        )
        self._loss = jax.jit(loss, out_shardings=whole)

    def place(self, text: np.ndarray) -> jax.Array:
        """Return a batch on the devices, a part of the rows on each."""
        return jax.device_put(text, self._layout.batch)

    def validate(self, params: nnx.State, batches: np.ndarray) -> float:
        """Return the mean loss over the batches."""
        return float(np.mean([self._loss(params, self.place(x)) for x in batches]))
