# SPDX-License-Identifier: Apache-2.0
"""Computes the loss of a language model."""

import jax
import jax.numpy as jnp


def cross_entropies(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the losses of targets (...) in nats, of logits (..., vocabulary) in f32.

    The logits of the targets are summed out rather than looked up, so that GPUs that
    have parts of the vocabulary need not gather it.
    """
    hits = targets[..., None] == jnp.arange(logits.shape[-1])
    chosen = jnp.sum(jnp.where(hits, logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen
