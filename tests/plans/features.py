# SPDX-License-Identifier: Apache-2.0
"""A call whose plans can be asked for, forward and backward; see scripts/plan_support.

The lists are in attention_features.py and operation_features.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A call with the shapes of its operands.

    ``trained`` are the places of the operands whose gradients are asked for. Without
    any, the feature has no gradient by cuDNN, and ``why`` says what there is instead.
    """

    group: str
    name: str
    call: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    trained: tuple[int, ...] = (0, 1, 2)
    why: str = ""

    @property
    def key(self) -> str:
        """What names the feature in data."""
        return f"{self.group}: {self.name}"

    def gradient(self) -> Callable[..., Any]:
        """Return the gradients with random cotangents as one more operand."""

        def pulled(cotangent: jax.Array, *operands: jax.Array) -> Any:
            def of_trained(*trained: jax.Array) -> Any:
                every = list(operands)
                for i, operand in zip(self.trained, trained, strict=True):
                    every[i] = operand
                return self.call(*every)

            trained = (operands[i] for i in self.trained)
            return jax.vjp(of_trained, *trained)[1](cotangent)

        return pulled

    def cotangent(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the call's result."""
        return jax.eval_shape(self.call, *self.operands)


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """Return an operand of a dtype and shape."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
