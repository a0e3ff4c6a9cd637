# SPDX-License-Identifier: Apache-2.0
"""The meaning of every graph, in jax.numpy: what runs where cuDNN does not."""

from jax_cudnn.reference.interpreter import evaluate

__all__ = ["evaluate"]
