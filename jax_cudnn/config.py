# SPDX-License-Identifier: Apache-2.0
"""Options that change the traced program; part of each call, so that jit sees them."""

from dataclasses import dataclass
from typing import Literal, get_args

Implementation = Literal["auto", "cudnn", "xla"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a graph is to be run; hashable, and a parameter of the graph primitive.

    ``implementation``: "cudnn" runs cuDNN or raises; "xla" never touches cuDNN;
    "auto" runs cuDNN where it has a plan and XLA elsewhere, saying so.
    ``matmul_precision`` is ``jax.default_matmul_precision`` as it was when the
    operation was traced; the reference is traced later, when it is no longer in force.
    """

    implementation: Implementation = "auto"
    matmul_precision: str | None = None

    def __post_init__(self) -> None:
        if self.implementation not in get_args(Implementation):
            raise ValueError(
                f"implementation={self.implementation!r} is not one of "
                f"{', '.join(map(repr, get_args(Implementation)))}."
            )
