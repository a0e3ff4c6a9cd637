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
from jax import lax

from jax_cudnn.config import Implementation
from tests.common.judged import Judged, worst_ratio
from tests.common.random_draws import Draw

Arrays = Mapping[str, Any]

# What sums in f32 lose, as a part of the sum of magnitudes: 64 roundings. Kernels sum
# in some order, and roundings of many terms cancel.
SUMS = 2.0**-18
# The largest error may be so many times XLA's: as in tests/common/gpu/numerics.py.
_BOUND = 4.0
_FLOOR = 1e-5


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


# --- what is judged by XLA's error ----------------------------------------------------


def judged_by_xla(
    exact: Callable[[Arrays], dict[str, jax.Array]],
    plain: Callable[[Arrays], dict[str, jax.Array]],
    arrays: Arrays,
    *,
    is_tf32: bool,
) -> dict[str, Judged]:
    """Judge results by what plain JAX loses in the same dtypes.

    The truth is ``exact``, computed in float64 on a CPU. XLA's error is that of
    ``plain`` with every operation rounded to its dtype.
    """
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        wide = {
            name: jnp.asarray(x if x.dtype.kind == "i" else double(x))
            for name, x in arrays.items()
        }
        truth = {name: np.asarray(x) for name, x in jax.jit(exact)(wide).items()}
    # XLA would leave out roundings between operations that it fuses.
    found = jax.jit(plain, compiler_options={"xla_allow_excess_precision": False})(
        {name: jnp.asarray(x) for name, x in arrays.items()}
    )
    judged: dict[str, Judged] = {}
    for name, value in truth.items():
        # Half an ulp is granted to everyone: XLA can be exact by luck.
        u = 2.0**-11 if is_tf32 else unit(found[name].dtype)
        error = np.max(np.abs(double(found[name]) - value), initial=0)
        granted = max(error, u * np.max(np.abs(value), initial=0), _FLOOR)
        judged[name] = Judged(value, np.full(value.shape, _BOUND * granted))
    return judged


def in_tf32(contract: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a contraction of two f32 arrays, and its gradients, in TF32."""

    @jax.custom_vjp
    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        return contract(_tf32(x), _tf32(y))

    def backward(saved: Sequence[jax.Array], cotangent: jax.Array) -> Any:
        _, pull = jax.vjp(contract, *map(_tf32, saved))
        return pull(_tf32(cotangent))

    run.defvjp(lambda x, y: (run(x, y), (x, y)), backward)
    return run


def _tf32(x: jax.Array) -> jax.Array:
    """Return what a tensor core reads of an f32 number: its upper 19 bits."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)
