# SPDX-License-Identifier: Apache-2.0
"""Makes the task of training GPT-2, of model, layout and text."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from language.loss import cross_entropies
from language.names import is_matrix
from language.settings import Settings
from language.task import Task
from language.text import Rows

from gpt.layout import Layout
from gpt.model import Gpt, kernels_for


def gpt_task(settings: Settings, layout: Layout) -> Task:
    """Return what the trainer has to know of the model."""
    kernels = kernels_for(settings)

    def build() -> Gpt:
        return Gpt(settings, kernels, nnx.Rngs(settings.seed))

    graph = nnx.split(nnx.eval_shape(build), nnx.Param)[0]

    def loss(params: nnx.State, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The matrices are converted before FSDP gathers them: half the bytes.
        params = jax.tree_util.tree_map_with_path(
            lambda p, x: x.astype(settings.dtype) if is_matrix(p) else x, params
        )
        params = jax.lax.with_sharding_constraint(params, layout.of_use(params))
        losses = cross_entropies(nnx.merge(graph, params)(text[:, :-1]), text[:, 1:])
        return jnp.sum(losses), jnp.float32(losses.size)

    def text_of(rows: Rows) -> np.ndarray:
        return rows.text

    return Task(
        settings=settings,
        layout=layout,
        initial=lambda: nnx.split(build(), nnx.Param)[1],
        arrays_of=text_of,
        loss=loss,
        lookups=("positions.embedding",),
    )
