# SPDX-License-Identifier: Apache-2.0
"""Caches of keys and values for `jax_cudnn.sdpa` and `paged_sdpa`, updated in place."""

from jax_cudnn import keywords as _keywords
from jax_cudnn.ops.attention.caches.kv_cache import update, update_pages

__all__ = ["update", "update_pages"]

_keywords.hint_on(globals(), __all__)
