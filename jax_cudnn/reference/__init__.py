# SPDX-License-Identifier: Apache-2.0
"""The meaning of every graph, in jax.numpy. It also runs wherever cuDNN does not."""

from jax_cudnn.reference.interpreter import evaluate

__all__ = ["evaluate"]
