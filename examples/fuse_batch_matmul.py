# SPDX-License-Identifier: Apache-2.0
"""A graph by a decorator: a batch of products, by two kinds of cuDNN's engines.

Engines that are compiled when they are planned fuse what follows a product. Precompiled
ones need no compiler. Both are asked for the same function, once each. Without an
NVIDIA GPU, this prints what cuDNN would plan for an H200 where it can be asked (see
docs/plans.md), and XLA computes the result.
"""

import jax
import jax.numpy as jnp

import jax_cudnn
from jax_cudnn import plans

BATCH, ROWS, SUMS, COLUMNS = 4, 64, 128, 64
NOTE = "RUNTIME_COMPILATION"
KINDS = {
    "compiled when planned": plans.PlanOptions(required_notes=(NOTE,)),
    "precompiled": plans.PlanOptions(refused_notes=(NOTE,)),
}


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of each pair of matrices."""
    return jnp.einsum("bmk,bkn->bmn", a, b)


def main() -> None:
    """Plan the product by both kinds of engines, run it, and compare."""
    first, second = jax.random.split(jax.random.key(0))
    a = jax.random.normal(first, (BATCH, ROWS, SUMS), jnp.float16)
    b = jax.random.normal(second, (BATCH, SUMS, COLUMNS), jnp.float16)
    exact = product(a.astype(jnp.float32), b.astype(jnp.float32))
    for kind, options in KINDS.items():
        fused = jax_cudnn.fuse(product, strict=True, plan=options)
        print(f"--- {kind}")
        print(planned(fused, a, b))
        error = jnp.max(jnp.abs(fused(a, b) - exact))
        print(f"largest error {error:.5f}, of numbers up to {jnp.max(exact):.1f}")


def planned(fused: jax_cudnn.Fused, a: jax.Array, b: jax.Array) -> str:
    """Return what becomes of the function here, or would on an H200."""
    explained = fused.explain(a, b)
    has_gpu = jax.default_backend() == "gpu"
    try:
        return str(explained.on(None if has_gpu else "H200"))
    except jax_cudnn.LibraryError as error:
        return f"{explained}\ncuDNN cannot be asked here: {error}"


if __name__ == "__main__":
    main()
