# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences that are sharded over several devices."""

from jax_cudnn import keywords as _keywords
from jax_cudnn.parallel.attention import sdpa
from jax_cudnn.parallel.combining import combine
from jax_cudnn.parallel.order import (
    from_striped,
    from_zigzag,
    to_striped,
    to_zigzag,
    token_positions,
)
from jax_cudnn.parallel.sharded import sharded_sdpa

__all__ = [
    "combine",
    "from_striped",
    "from_zigzag",
    "sdpa",
    "sharded_sdpa",
    "to_striped",
    "to_zigzag",
    "token_positions",
]

_keywords.hint_on(globals(), __all__)
