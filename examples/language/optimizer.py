# SPDX-License-Identifier: Apache-2.0
"""Makes the optimizer: AdamW, with the schedule of its learning rate."""

from typing import Any

import jax
import optax
from flax import nnx

from language.names import is_matrix
from language.settings import Settings


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Return AdamW as GPT-3 and Llama were trained with it.

    arXiv:2005.14165, appendix B; arXiv:2302.13971, section 2.3.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        settings.learning_rate,
        warmup_steps=max(settings.steps // 20, 1),
        decay_steps=settings.steps,
        end_value=settings.learning_rate / 10,
    )

    def matrices(params: nnx.State) -> Any:
        return jax.tree_util.tree_map_with_path(lambda p, _: is_matrix(p), params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
    )
