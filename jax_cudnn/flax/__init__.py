# SPDX-License-Identifier: Apache-2.0
"""jax_cudnn's operations for Flax (nnx and linen), as functions and as layers."""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    from jax_cudnn.errors import install_command

    raise ImportError(
        "jax_cudnn.flax: the package flax is not installed. It is an optional "
        f"dependency of jax_cudnn. Run: {install_command('flax')}"
    ) from error

from jax_cudnn import keywords as _keywords
from jax_cudnn.flax import linen, nnx
from jax_cudnn.flax.attention import AttentionFn, attention_fn, make_attention_fn
from jax_cudnn.flax.products import (
    ConvGeneralDilated,
    DotGeneral,
    conv_general_dilated,
    dot_general,
    make_conv_general_dilated,
    make_dot_general,
)
from jax_cudnn.ops.attention.rotary import Rotary, apply_rotary

__all__ = [
    "AttentionFn",
    "ConvGeneralDilated",
    "DotGeneral",
    "Rotary",
    "apply_rotary",
    "attention_fn",
    "conv_general_dilated",
    "dot_general",
    "linen",
    "make_attention_fn",
    "make_conv_general_dilated",
    "make_dot_general",
    "nnx",
]

_keywords.hint_on(globals(), __all__)
