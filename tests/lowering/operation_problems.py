# SPDX-License-Identifier: Apache-2.0
"""Defines a random problem of any operation: arrays, a call, and what is right.

Right is what NumPy computes in float64 (tests/lowering/random_operations.py says by
what), up to a bound of its own for each entry: what a kernel may round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.config import Implementation
from tests.attention.shared.random_attentions import Judged, worst_ratio
from tests.common.random_draws import Draw

Arrays = Mapping[str, Any]

# What sums in f32 lose, as a part of the sum of magnitudes: 64 roundings. Kernels sum
# in some order, and roundings of many terms cancel.
SUMS = 2.0**-18


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operation, on arrays of its own.

    Attributes:
      text: the operation, "(", its arguments and what else is drawn.
      arrays: operands and cotangents by name.
      call: computes the results, and the gradients if there are any, by name.
      truth: says what is right, for each result of the call.
    """

    text: str
    arrays: dict[str, np.ndarray]
    call: Callable[[Arrays, Implementation], dict[str, jax.Array]]
    truth: Callable[[Arrays], dict[str, Judged]]

    def worst_ratios(self, found: Mapping[str, jax.Array]) -> dict[str, float]:
        """Return for each result the largest error as a part of its bound."""
        judged = self.truth(self.arrays)
        assert found.keys() == judged.keys()
        return {name: worst_ratio(x, judged[name]) for name, x in found.items()}


def with_gradients(
    function: Callable[[Arrays], dict[str, jax.Array]],
    arrays: Arrays,
    moved: Sequence[str],
) -> dict[str, jax.Array]:
    """Return results and the gradients of those operands, "gradient of NAME".

    The cotangent of a result is the array "cotangent of NAME".
    """
    found, pull = jax.vjp(
        lambda moving: function({**arrays, **moving}),
        {name: arrays[name] for name in moved},
    )
    (gradients,) = pull({name: arrays[f"cotangent of {name}"] for name in found})
    return {**found, **{f"gradient of {name}": x for name, x in gradients.items()}}


def log_integer(draw: Draw, low: int, high: int) -> int:
    """Draw from low to high, as often between 1 and 10 as between 10 and 100."""
    return int(np.exp(draw.rng.uniform(np.log(low), np.log(high + 0.99))))


def unit(dtype: Any) -> float:
    """Return the largest relative error of rounding to a dtype."""
    return float(jnp.finfo(dtype).eps) / 2


def double(x: Any) -> np.ndarray:
    """Return an array in float64."""
    return np.asarray(x).astype(np.float64)


def array_text(name: str, x: Any) -> str:
    """Return an array's name, dtype and shape."""
    return f"{name} {x.dtype}[{','.join(map(str, x.shape))}]"
