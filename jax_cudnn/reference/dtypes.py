# SPDX-License-Identifier: Apache-2.0
"""The dtypes of graphs as JAX knows them."""

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = {
    "bool": np.dtype(jnp.bool_),
    "u8": np.dtype(jnp.uint8),
    "i8": np.dtype(jnp.int8),
    "i32": np.dtype(jnp.int32),
    "i64": np.dtype(jnp.int64),
    "f4_e2m1fn": np.dtype(jnp.float4_e2m1fn),
    "f8_e4m3fn": np.dtype(jnp.float8_e4m3fn),
    "f8_e5m2": np.dtype(jnp.float8_e5m2),
    "f8_e8m0fnu": np.dtype(jnp.float8_e8m0fnu),
    "bf16": np.dtype(jnp.bfloat16),
    "f16": np.dtype(jnp.float16),
    "f32": np.dtype(jnp.float32),
    "f64": np.dtype(jnp.float64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def jax_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype that a graph's dtype name stands for."""
    return DTYPES[name]


def dtype_name(dtype: object) -> str | None:
    """Return the graph's name of a dtype, or None where graphs have none for it."""
    return _NAMES.get(np.dtype(dtype))  # type: ignore[call-overload]


def saturated(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return x in a dtype; in f8, what is too large becomes the largest number.

    So do infinities, of which e4m3 has none. NaN stays NaN. JAX's own conversion makes
    NaN of what e4m3 does not hold, and infinities in e5m2.
    """
    return kept_rounding(clipped(x, dtype))


def clipped(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return what `saturated` does, for readers that call `kept_rounding`."""
    if dtype.itemsize != 1:
        return x.astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


def kept_rounding(x: jax.Array) -> jax.Array:
    """Return an array that may be converted back; in f8, its rounding stays.

    XLA leaves out a conversion to f8 that is followed by one back (on a GPU, by
    xla_allow_excess_precision), and with it the rounding. A barrier keeps it. Where it
    is, XLA also merges no operations.
    """
    is_f8 = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.lax.optimization_barrier(x) if is_f8 else x
