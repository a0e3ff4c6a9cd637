# SPDX-License-Identifier: Apache-2.0
"""Computes the values in a score_mod that do not depend on the score.

A score_mod receives a score, and the indices of batch entry, head, query and key.
Values that do not depend on the score are computed here as arrays, with only those axes
of (b, h, s, t) that they depend on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.lowering import align_varying, equation_function

LETTERS = "bhst"


class External:
    """A value that the steps of a traced function read, and that no step computes."""

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreIndependent(External):
    """A value that does not depend on the score.

    ``array`` begins with the axes of the indices that the value depends on, which are
    ``letters``. ``narrow`` is what it was converted from, if that lost nothing.
    """

    array: jax.Array
    letters: str = ""
    narrow: "ScoreIndependent | None" = None

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array."""
        return self.array.dtype

    def broadcast(self) -> jax.Array:
        """Return a number for each score as (b, h, s, t), with 1 where it is shared."""
        sizes = dict(zip(self.letters, self.array.shape, strict=True))
        return jnp.reshape(self.array, [sizes.get(letter, 1) for letter in LETTERS])


def indices(numbers: Sequence[int | jax.Array]) -> list[ScoreIndependent]:
    """Return the indices along b, h, s and t: given, or as many as a size says."""
    arrays = (
        x if isinstance(x, jax.Array) else jnp.arange(x, dtype=jnp.int32)
        for x in numbers
    )
    return [
        ScoreIndependent(array=array, letters=letter)
        for letter, array in zip(LETTERS, arrays, strict=True)
    ]


def evaluate(
    jaxpr: Any, equation: Any, args: Sequence[ScoreIndependent | np.ndarray]
) -> list[ScoreIndependent]:
    """Return the results of an equation for all indices that its operands depend on."""
    given: Mapping[Any, ScoreIndependent] = {
        variable: value
        if isinstance(value, ScoreIndependent)
        else ScoreIndependent(array=jnp.asarray(value, value.dtype))
        for variable, value in zip(equation.invars, args, strict=True)
        if not hasattr(variable, "val")
    }
    values = list(given.values())
    letters = "".join(x for x in LETTERS if any(x in each.letters for each in values))
    function = equation_function(jaxpr, equation)
    for letter in reversed(letters):
        axes = [0 if letter in value.letters else None for value in values]
        function = jax.vmap(function, in_axes=axes)
    # Inside shard_map some may differ between devices, and others not.
    results = function(*align_varying([value.array for value in values]))
    narrow = values[0] if _widens(equation) else None
    return [ScoreIndependent(array=x, letters=letters, narrow=narrow) for x in results]


def _widens(equation: Any) -> bool:
    """Whether an equation converts 16-bit floats to wider ones."""
    if equation.primitive.name != "convert_element_type":
        return False
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return old in (jnp.bfloat16, jnp.float16) and new in (jnp.float32, jnp.float64)
