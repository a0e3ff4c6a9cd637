# SPDX-License-Identifier: Apache-2.0
"""Defines the options that all norms take, once for all of them.

An option is a field of `NormCall`, which has its default and its description. `takes`,
of ops/common/signatures.py, writes the options into a norm's signature and docstring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.ops.common.activations import Activation


class OneResultOptions(TypedDict, total=False):
    """Options with which a norm returns its output alone."""

    epsilon: float
    activation: Activation | None
    preferred_element_type: DTypeLike | None
    implementation: Implementation | None
    plan: PlanOptions | None


class NormOptions(OneResultOptions, total=False):
    """Options of all norms."""

    residual: ArrayLike | None
    return_statistics: bool


@dataclass(frozen=True, kw_only=True)
class NormCall:
    """The arguments of a norm besides its operands and axes.

    Attributes:
      epsilon: a Python number, 0 or more. Default 1e-6, as in Flax; PyTorch has 1e-5.
      residual: added to x before it is normalised; x's shape. The sum is returned as
        well, rounded to the dtype to which both promote. In `layer_norm` and
        `rms_norm`, where scale and bias have that dtype, cuDNN's kernel adds it.
        Default None.
      activation: as for :func:`jax_cudnn.conv`; it is computed in f32 from the
        output, but silu of bf16 in bf16, as in plain JAX. Default None: none.
      preferred_element_type: dtype of the output: bf16, f16, f32 or f64. Default None:
        x's.
      return_statistics: whether to return mean and rstd. Default False.
      implementation: "auto" (default) runs XLA's code, unless a plan of cuDNN's was
        measured to be faster (:func:`jax_cudnn.plans.autotune`); "cudnn" runs cuDNN's
        kernels or raises; "xla" never touches cuDNN.
      plan: as for :func:`jax_cudnn.conv`.
    """

    epsilon: float = 1e-6
    residual: ArrayLike | None = None
    activation: Activation | None = None
    preferred_element_type: DTypeLike | None = None
    return_statistics: bool = False
    implementation: Implementation | None = "auto"
    plan: PlanOptions | None = None
