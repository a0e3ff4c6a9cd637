# SPDX-License-Identifier: Apache-2.0
"""Runs examples/train_mamba.py, and its model on a text as a whole and in pieces."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import train_mamba


def difference_of_pieces(arguments: list[str]) -> float:
    """Return the largest difference of logits of a text in pieces from the whole's."""
    settings = train_mamba.parse_arguments(arguments)
    graph, params = nnx.split(train_mamba.Mamba(settings, nnx.Rngs(0)))
    run = jax.jit(lambda *arrays: nnx.merge(graph, params)(*arrays))
    empty = nnx.merge(graph, params).empty(2)
    text = jax.random.randint(jax.random.key(0), (2, 35), 0, 256)
    numbers = jnp.cumsum(jnp.arange(35) % 11 == 10)
    documents = numbers[None] + jnp.zeros((2, 1), jnp.int32)
    whole, _ = run(text, documents, empty)
    memories, pieces = empty, []
    for first, stop in ((0, 16), (16, 21), *((i, i + 1) for i in range(21, 35))):
        piece, memories = run(text[:, first:stop], documents[:, first:stop], memories)
        pieces.append(piece)
    return float(jnp.max(jnp.abs(jnp.concatenate(pieces, 1) - whole)))


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    train_mamba.main(sys.argv[1:])
    print("pieces differ by", difference_of_pieces(sys.argv[1:]))
