# SPDX-License-Identifier: Apache-2.0
"""Defines the training step and the state that it changes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_cudnn import plans
from language import processes
from language.optimizer import make_optimizer
from language.task import Task
from language.text import Rows


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint holds."""

    params: Any  # an nnx.State
    optimizer: optax.OptState
    losses: jax.Array  # (steps,) f32; NaN for steps to come
    step: jax.Array  # steps taken


class Trainer:
    """The programs of one run; the step is compiled when it is first asked for."""

    def __init__(self, task: Task):
        self._task = task
        settings, layout = task.settings, task.layout
        if settings.batch % task.parts:
            raise ValueError(
                f"a batch of {settings.batch} cannot be cut into {task.parts} equal "
                "parts"
            )
        self._optimizer = make_optimizer(settings)
        shapes = jax.eval_shape(lambda: self._state(task.initial()))
        self._places: TrainState = layout.of_state(shapes)
        self._whole = NamedSharding(layout.mesh, P())
        spec = layout.rows if task.parts == 1 else P(None, *layout.rows)
        self._rows = NamedSharding(layout.mesh, spec)
        self.shapes: TrainState = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            self._places,
        )

    def initial(self, params: nnx.State | None = None) -> TrainState:
        """Return the first state, with parameters that are drawn if none are given."""
        if params is None:
            draw = jax.jit(
                lambda: self._state(self._task.initial()), out_shardings=self._places
            )
            return draw()
        begin = jax.jit(self._state, out_shardings=self._places, donate_argnums=0)
        return begin(params)

    def _state(self, params: nnx.State) -> TrainState:
        return TrainState(
            params=params,
            optimizer=self._optimizer.init(params),
            losses=jnp.full(self._task.settings.steps, jnp.nan),
            step=jnp.zeros((), jnp.int32),
        )

    @functools.cached_property
    def step(self) -> Any:
        """The compiled step: from a state, which it uses up, to the next and a loss."""
        return self.traced.lower().compile()

    @property
    def traced(self) -> Any:
        """Return the step, traced anew."""
        settings = self._task.settings
        blank = np.zeros((settings.batch, settings.context + 1), np.int32)
        arrays = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._rows),
            self._arrays_of(Rows(blank, blank)),
        )
        step = jax.jit(
            self._step,
            donate_argnums=0,
            out_shardings=(self._places, self._whole),
        )
        with plans.using(reduce_dtype=settings.reduce_dtype):
            return step.trace(self.shapes, arrays)

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        value, gradient = self.gradient(state.params, batch)
        updates, moments = self._optimizer.update(
            gradient, state.optimizer, state.params
        )
        after = TrainState(
            params=optax.apply_updates(state.params, updates),
            optimizer=moments,
            losses=state.losses.at[state.step].set(value),
            step=state.step + 1,
        )
        return after, value

    def gradient(self, params: nnx.State, batch: Any) -> tuple[jax.Array, nnx.State]:
        """Return the mean loss of a batch, and its gradient.

        The parts of a batch are computed one after another, so that the memory for
        activations is that of one part.
        """

        def one(part: Any) -> Any:
            loss = jax.value_and_grad(self._task.loss, has_aux=True)
            (total, count), gradient = loss(params, part)
            return total, count, gradient

        def add(sums: Any, part: Any) -> Any:
            total, count, gradient = jax.tree.map(jnp.add, sums, one(part))
            kept = jax.lax.with_sharding_constraint(gradient, self._places.params)
            return (total, count, kept), None

        if self._task.parts == 1:
            total, count, gradient = one(batch)
        else:
            zero = jnp.zeros(())
            none = zero, zero, jax.tree.map(jnp.zeros_like, params)
            (total, count, gradient), _ = jax.lax.scan(add, none, batch)
        return total / count, jax.tree.map(lambda x: x / count, gradient)

    def _arrays_of(self, rows: Rows) -> Any:
        """Return the arrays of a batch, with an axis of its parts if there are some."""
        arrays = self._task.arrays_of(rows)
        parts = self._task.parts
        if parts == 1:
            return arrays
        return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), arrays)

    def place(self, rows: Rows) -> Any:
        """Return a batch on the devices, a part of it on each."""
        return jax.tree.map(
            lambda x: processes.placed(x, self._rows), self._arrays_of(rows)
        )

    @functools.cached_property
    def _sums(self) -> Any:
        def sums(params: nnx.State, batch: Any) -> tuple[jax.Array, jax.Array]:
            if self._task.parts == 1:
                return self._task.loss(params, batch)
            total, count = jax.lax.map(lambda x: self._task.loss(params, x), batch)
            return jnp.sum(total), jnp.sum(count)

        return jax.jit(sums, out_shardings=self._whole)

    def validate(self, params: nnx.State, batches: list[Rows]) -> float:
        """Return the mean loss over the batches."""
        sums = [self._sums(params, self.place(rows)) for rows in batches]
        totals, counts = np.asarray(sums, np.float64).T
        return float(totals.sum() / counts.sum())
