# SPDX-License-Identifier: Apache-2.0
"""Trains on documents that are packed in rows, and compares with one in each row.

A small causal language model predicts the next token of each document. Packed, the
documents give the same loss and the same gradients as one in each row does, and less of
the rows is padding.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from jax_cudnn import masks

VOCABULARY, WIDTH, HEADS, SIZE = 31, 32, 4, 8
Weights = dict[str, jax.Array]


def draw_documents(count: int, seed: int = 0) -> list[np.ndarray]:
    """Return documents of 2 to 40 tokens; each token follows from the one before it."""
    rng = np.random.default_rng(seed)
    step = rng.permutation(VOCABULARY)
    documents: list[np.ndarray] = []
    for length in rng.integers(2, 41, count):
        tokens = [int(rng.integers(VOCABULARY))]
        while len(tokens) < length:
            tokens.append(int(step[tokens[-1]]))
        documents.append(np.array(tokens, np.int32))
    return documents


def pack(documents: list[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of tokens (b, size), and the lengths of their documents (b, n).

    Each document goes into the first row that has room for it.
    """
    rows: list[list[np.ndarray]] = []
    for document in sorted(documents, key=len, reverse=True):
        fitting = [r for r in rows if sum(map(len, r)) + len(document) <= size]
        if not fitting:
            rows.append([])
            fitting = rows[-1:]
        fitting[0].append(document)
    tokens = np.zeros((len(rows), size), np.int32)
    lengths = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : sum(map(len, row))] = np.concatenate(row)
        lengths[i, : len(row)] = [len(document) for document in row]
    return tokens, lengths


def draw_weights(seed: int) -> Weights:
    """Return the weights of a model of one layer."""
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "qkv": (WIDTH, 3, HEADS, SIZE),
        "out": (HEADS, SIZE, WIDTH),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) * 0.3
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def total_loss(weights: Weights, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the summed loss of the documents in rows (b, s), lengths (b, n)."""
    x = weights["embedding"][tokens]
    q, k, v = jnp.moveaxis(jnp.einsum("bsw,wchd->bschd", x, weights["qkv"]), 2, 0)
    packed = masks.Packed.from_lengths(lengths)
    mixed = jax_cudnn.sdpa(q, k, v, mask=packed, is_causal=True)
    x = x + jnp.einsum("bshd,hdw->bsw", mixed, weights["out"])
    scores = jax.nn.log_softmax(x @ weights["embedding"].T)
    following = jnp.roll(tokens, -1, axis=1)
    losses = -jnp.take_along_axis(scores, following[..., None], axis=2)[..., 0]
    # The last token of a document is followed by none.
    ends = jnp.cumsum(lengths, axis=1)
    places = jnp.arange(tokens.shape[1])
    is_last = jnp.any(places[None, :, None] == ends[:, None] - 1, axis=2)
    is_predicted = (places[None] < ends[:, -1:]) & ~is_last
    return jnp.sum(jnp.where(is_predicted, losses, 0))


def main() -> None:
    """Compare packed documents with one in each row, and train on packed ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    documents = draw_documents(24)
    tokens, lengths = (jnp.asarray(x) for x in pack(documents, size=64))
    count = sum(len(document) - 1 for document in documents)
    padded = np.zeros((len(documents), tokens.shape[1]), np.int32)
    for row, document in zip(padded, documents, strict=True):
        row[: len(document)] = document
    each = jnp.array([[len(document)] for document in documents])
    print(f"{len(documents)} documents in {tokens.shape[0]} rows of {tokens.shape[1]}")

    step: Any = jax.jit(jax.value_and_grad(total_loss))
    weights = draw_weights(0)
    loss, gradient = step(weights, tokens, lengths)
    other, apart = step(weights, jnp.asarray(padded), each)
    worst = max(
        float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)))
        for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(apart), strict=True)
    )
    print(f"loss {loss / count:.4f} packed, {other / count:.4f} with one in each row")
    print(f"gradients differ by {worst:.1e} of the largest")
    if not (abs(float(loss) - other) < 1e-3 * other and worst < 1e-3):
        raise SystemExit("packed documents give other numbers than one in each row")

    for _ in range(steps):
        loss, gradient = step(weights, tokens, lengths)
        weights = jax.tree.map(lambda w, g: w - 0.5 * g / count, weights, gradient)
    print(f"loss {loss / count:.4f} after {steps} steps")


if __name__ == "__main__":
    main()
