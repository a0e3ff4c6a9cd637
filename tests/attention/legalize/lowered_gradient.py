# SPDX-License-Identifier: Apache-2.0
"""Prints the program of a gradient of attention for a GPU."""

from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn


def text() -> str:
    """Return the program as text. Its graphs are padded."""

    def gradients(*operands: jax.Array) -> Any:
        loss = lambda *x: jax_cudnn.sdpa(*x).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(*operands)

    operands = [jax.ShapeDtypeStruct((2, 5, 6, 13), jnp.bfloat16)] * 3
    lowered = jax.jit(gradients).trace(*operands).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


if __name__ == "__main__":
    print(text())
