# SPDX-License-Identifier: Apache-2.0
"""tokamax as a contender, where it is installed: its Mosaic kernels for Hopper GPUs."""

import os
from collections.abc import Callable
from typing import Any

from benchmarks.harness.torch_side import installed

_CACHE = "TRITON_CACHE_DIR"


def _without_its_cache() -> Any:
    """Import tokamax, and give Triton its cache back.

    jax_triton, which tokamax imports, turns it off, and then PyTorch compiles nothing.
    """
    before = os.environ.get(_CACHE)
    found = installed("tokamax")
    if before is None:
        os.environ.pop(_CACHE, None)
    else:
        os.environ[_CACHE] = before
    return found


tokamax: Any = _without_its_cache()


def attention(**options: Any) -> Callable[..., Any]:
    """Return its attention with these options, called as `jax.nn`'s is."""

    def call(*arrays: Any) -> Any:
        return tokamax.dot_product_attention(
            *arrays, implementation="mosaic", **options
        )

    return call
