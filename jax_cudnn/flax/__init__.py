# SPDX-License-Identifier: Apache-2.0
"""jax_cudnn's operations in the form that Flax's layers (nnx and linen) call them."""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(
        "jax_cudnn.flax: the package flax is not installed. It is an optional "
        "dependency of jax_cudnn. Run: pip install 'jax_cudnn[flax]'"
    ) from error

from jax_cudnn.flax.attention import AttentionFn, attention_fn, make_attention_fn

__all__ = ["AttentionFn", "attention_fn", "make_attention_fn"]
