# SPDX-License-Identifier: Apache-2.0
"""A model's steps in JAX, of training or of inference, over a kit of layers."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models.plain_kit import CountedKit, PlainKit
from benchmarks.models.zoo import Kind, Model, Weights
from jax_cudnn import plans


def drawn(model: Model) -> tuple[list[np.ndarray], list[Kind], dict[str, np.ndarray]]:
    """Return a model's weights, how they are stored, and its batch."""
    kit = PlainKit()
    batch = model.batch(np.random.default_rng(1))
    weights = Weights(kit)
    given = {name: kit.operand(x) for name, x in batch.items()}
    jax.eval_shape(lambda given: model.output(kit, weights, given), given)
    return weights.drawn, weights.kinds, batch


def program(
    model: Model,
    kit: PlainKit,
    weights: Sequence[np.ndarray],
    kinds: Sequence[Kind],
    batch: dict[str, np.ndarray],
    *,
    rate: float,
    is_training: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    """Return a step, from a state and a batch to the next state, and both of these."""
    arrays = [kit.stored(x, kind) for x, kind in zip(weights, kinds, strict=True)]
    given = {name: kit.operand(x) for name, x in batch.items()}
    optimizer = optax.adamw(rate, weight_decay=1e-4)

    def train(state: Any, batch: Any) -> Any:
        arrays, memory = state
        value, gradients = with_gradients(model, kit)(arrays, batch)
        updates, memory = optimizer.update(gradients, memory, arrays)
        return (optax.apply_updates(arrays, updates), memory), value

    def infer(state: Any, batch: Any) -> Any:
        arrays, carried = state
        result = model.output(kit, Weights(kit, arrays), {**batch, **carried})
        result, carried = result if model.carried else (result, carried)
        return (arrays, carried), result

    if is_training:
        return train, (arrays, optimizer.init(arrays)), given
    carried = {name: given.pop(name) for name in model.carried}
    return infer, ([x.astype(jnp.bfloat16) for x in arrays], carried), given


def with_gradients(model: Model, kit: PlainKit) -> Any:
    """Return a function, of weights and a batch, to the loss and its gradients."""

    def loss(arrays: Any, batch: Any) -> jax.Array:
        assert model.loss is not None
        output = model.output(kit, Weights(kit, arrays), batch)
        return model.loss(kit, output, batch)

    if model.clips_examples:
        return functools.partial(_clipped, loss)
    return jax.value_and_grad(loss)


def _clipped(loss: Any, arrays: Any, batch: Any) -> tuple[jax.Array, Any]:
    """Return the mean loss, and the mean of gradients that have a norm of 1 at most."""
    examples = jax.tree.map(lambda x: x[:, None], batch)  # each a batch of one
    losses, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0))(arrays, examples)
    squares = [jax.vmap(lambda x: jnp.vdot(x, x))(x) for x in gradients]
    scales = jax.lax.rsqrt(jnp.maximum(sum(squares), 1)) / len(losses)
    mean = jax.tree.map(lambda x: jnp.tensordot(scales, x, 1), gradients)
    return jnp.mean(losses), mean


def operations(model: Model, *, is_training: bool) -> float:
    """Return the floating-point operations of a step, as XLA counts those of plain JAX.

    Attention counts as products of all queries and keys, also where it is causal. It is
    the program for a CPU: XLA counts no operations of one for a GPU.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        step, *operands = program(
            model, CountedKit(), *drawn(model), rate=0.0, is_training=is_training
        )
        costs: Any = jax.jit(step).lower(*operands).cost_analysis()
    return float(costs["flops"])


class JaxSteps:
    """A model's steps as one compiled program, its state donated."""

    def __init__(
        self,
        model: Model,
        kit: PlainKit,
        weights: Sequence[np.ndarray],
        kinds: Sequence[Kind],
        batch: dict[str, np.ndarray],
        *,
        rate: float,
        is_training: bool,
        is_tuned: bool,
    ) -> None:
        """Tune if asked to, compile, and run the first step."""
        step, self._state, self._batch = program(
            model, kit, weights, kinds, batch, rate=rate, is_training=is_training
        )
        self.tuning: plans.Tuning | None = None
        start = time.perf_counter()
        if is_tuned:
            self.tuning = plans.autotune(step, self._state, self._batch)
        self.tuning_s = time.perf_counter() - start
        start = time.perf_counter()
        jitted = jax.jit(step, donate_argnums=0)
        self._step = jitted.lower(self._state, self._batch).compile()
        self.compile_s = time.perf_counter() - start
        memory: Any = self._step.memory_analysis()
        self.temp_bytes = int(memory.temp_size_in_bytes)
        self.bytes = self.temp_bytes + int(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
        self.first = jax.block_until_ready(self.step())

    def step(self) -> Any:
        """Run a step; return the loss, or the output."""
        self._state, result = self._step(self._state, self._batch)
        return result

    @staticmethod
    def number(loss: Any) -> float:
        """Return a loss as a number."""
        return float(loss)

    @staticmethod
    def array(output: Any) -> np.ndarray:
        """Return an output as NumPy's."""
        return np.asarray(output, np.float32)

    @staticmethod
    def wait(result: Any) -> None:
        """Wait for the device."""
        jax.block_until_ready(result)
