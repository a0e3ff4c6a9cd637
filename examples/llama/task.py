# SPDX-License-Identifier: Apache-2.0
"""Makes the task of training Llama, of model, layout and text."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from language.loss import cross_entropies
from language.task import Task
from language.text import Rows

from llama.layout import Layout
from llama.model import Llama
from llama.settings import FIRST_BYTE, LlamaSettings


def llama_task(
    settings: LlamaSettings, layout: Layout, most_documents: int | None = None
) -> Task:
    """Return what the trainer has to know of the model.

    Rows have at most so many documents, or as many as tokens.
    """
    most = settings.context if most_documents is None else most_documents

    def build() -> Llama:
        return Llama(settings, layout, nnx.Rngs(settings.seed), most)

    graph = nnx.split(nnx.eval_shape(build), nnx.Param)[0]

    def loss(params: nnx.State, batch: Any) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, layout.gathered(params, settings.dtype))
        logits = model(batch["tokens"], batch.get("documents"))
        losses = cross_entropies(logits, batch["targets"])
        if "counted" not in batch:
            return jnp.sum(losses), jnp.float32(losses.size)
        counted = batch["counted"]
        return jnp.sum(jnp.where(counted, losses, 0)), jnp.sum(counted, dtype=float)

    def arrays_of(rows: Rows) -> dict[str, np.ndarray]:
        """Return tokens and targets, and with packed rows what is of one document."""
        tokens, documents = rows.text + FIRST_BYTE, rows.documents
        arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        if settings.packed:
            arrays["documents"] = documents[:, :-1]
            arrays["counted"] = documents[:, :-1] == documents[:, 1:]
        order = layout.positions(settings.context)
        return {name: x[:, order] for name, x in arrays.items()}

    return Task(
        settings=settings,
        layout=layout,
        initial=lambda: nnx.split(build(), nnx.Param)[1],
        arrays_of=arrays_of,
        loss=loss,
        lookups=("tokens.embedding",),
        parts=layout.parts,
    )
