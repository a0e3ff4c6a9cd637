# SPDX-License-Identifier: Apache-2.0
"""tokamax as a contender, where it is installed: its Mosaic kernels for Hopper GPUs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.torch_side import installed

tokamax: Any = installed("tokamax")


def attention(**options: Any) -> Callable[..., Any]:
    """Return its attention with these options, called as `jax.nn`'s is."""

    def call(*arrays: Any) -> Any:
        return tokamax.dot_product_attention(
            *arrays, implementation="mosaic", **options
        )

    return call


def compiled(name: str, function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    """Return the function compiled for these arrays, or None; says why not."""
    try:
        return jax.jit(function).lower(*arrays).compile()
    except (NotImplementedError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        print(f"  {name} cannot run this cell: {reason}")
        return None
