# SPDX-License-Identifier: Apache-2.0
"""Functions of attention's scores, for `score_mod` of `jax_cudnn.sdpa`."""

from jax_cudnn import keywords as _keywords
from jax_cudnn.ops.attention.score_mod import ScoreMod
from jax_cudnn.ops.attention.score_mods import (
    alibi,
    alibi_slopes,
    compose,
    relative_bias,
    softcap,
    t5_buckets,
)

__all__ = [
    "ScoreMod",
    "alibi",
    "alibi_slopes",
    "compose",
    "relative_bias",
    "softcap",
    "t5_buckets",
]

_keywords.hint_on(globals(), __all__)
