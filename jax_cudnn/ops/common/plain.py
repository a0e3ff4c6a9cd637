# SPDX-License-Identifier: Apache-2.0
"""Contractions that cannot be written as a graph, in JAX's own operations.

Graphs have the dtypes, ranks and fixed shapes that cuDNN may have a kernel for. A call
with others, such as integers of 32 bits, complex numbers or symbolic dimensions, means
what it means in jax.lax, with the same epilogue as any other call. It is no cuDNN call
at all: JAX transforms it like any other program.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.ops.common.activations import Activation, Fused, on_array
from jax_cudnn.ops.common.arguments import (
    array_of,
    as_factor,
    as_term,
    describe,
    refused_by_jax,
)

_log = logging.getLogger("jax_cudnn")


class Epilogue(NamedTuple):
    """The operations on the sums: arrays and numbers, or None where not given.

    The result is scale_out * activation(branch_scale * (scale * sums + bias) +
    residual). ``gate`` is an activation of the array ``scale_out``, which a graph
    holds.
    """

    scale: jax.Array | float | None = None
    bias: jax.Array | float | None = None
    branch_scale: jax.Array | float | None = None
    residual: jax.Array | float | None = None
    activation: Activation | None = None
    scale_out: jax.Array | float | None = None
    gate: Fused | None = None

    @classmethod
    def of(
        cls,
        op: str,
        *,
        bias: ArrayLike | None,
        branch_scale: ArrayLike | None = None,
        residual: ArrayLike | None = None,
        activation: Activation | None = None,
        scale: ArrayLike | None = None,
        scale_out: ArrayLike | None = None,
        gate: Fused | None = None,
    ) -> "Epilogue":
        """Return the caller's epilogue, checked to consist of arrays and numbers."""
        return cls(
            scale=as_factor(op, "scale", scale),
            bias=as_term(op, "bias", bias),
            branch_scale=as_factor(op, "branch_scale", branch_scale),
            residual=as_term(op, "residual", residual),
            activation=activation,
            scale_out=as_factor(op, "scale_out", scale_out),
            gate=gate,
        )

    @property
    def steps(self) -> Iterator[tuple[str, str, jax.Array | float]]:
        """What happens to the sums before the activation: operation, name, value."""
        for step, name in _STEPS:
            if (value := getattr(self, name)) is not None:
                yield step, name, value


_STEPS = (
    ("mul", "scale"),
    ("add", "bias"),
    ("mul", "branch_scale"),
    ("add", "residual"),
)


def check_implementation(op: str, reason: str, call: Options) -> None:
    """Raise UnsupportedError for "cudnn"; for "auto", log once why XLA runs it."""
    if call.implementation == "cudnn":
        raise UnsupportedError(
            f'{op}: {reason} Pass implementation="auto" or "xla" to run XLA\'s code.'
        )
    if call.implementation == "auto":
        _say_once(op, reason)


class Contraction(NamedTuple):
    """A contraction in JAX's operations, and the names of its operands.

    ``run`` computes it with a given ``preferred_element_type``. ``place`` takes the
    name of an epilogue operand, its array and the result's shape. It returns the array
    with the result's rank, with size 1 where it broadcasts, or raises ValueError. Axes
    in ``dropped``, of size 1, are those that the caller's result has not.
    """

    op: str
    operands: Mapping[str, jax.Array]
    run: Callable[[Any], jax.Array]
    place: Callable[[str, jax.Array, tuple[int, ...]], jax.Array]
    dropped: tuple[int, ...] = ()


def run_plain(
    contraction: Contraction, preferred: object, epilogue: Epilogue
) -> jax.Array:
    """Return a contraction with its epilogue.

    ``preferred`` is the caller's ``preferred_element_type``.
    """
    op, operands, run, place, dropped = contraction

    with refused_by_jax(op, operands):
        result = jax.eval_shape(lambda: run(preferred))
    if all(each is None for each in epilogue):
        return run(preferred)
    value = run(_sums(result.dtype))
    assert epilogue.gate is None, "it is for graphs"
    activation, steps = epilogue.activation, list(epilogue.steps)
    last = ("mul", "scale_out", epilogue.scale_out)
    arrays = {
        name: place(name, array_of(x), result.shape)
        for _, name, x in (*steps, last)
        if x is not None
    }
    are_integers = all(map(_is_integer, arrays.values())) and activation is None
    if _is_integer(value) and not are_integers:
        value = value.astype(jnp.float32)
    for name, x in arrays.items():
        if jnp.iscomplexobj(x) and not jnp.iscomplexobj(value):
            raise TypeError(
                f"{op}: {name} is {describe(x)}, but the sums are {describe(value)}. "
                "Beside them it must be real. Take its real part."
            )
        arrays[name] = x.astype(value.dtype)
    for step, name, _ in steps:
        value = value + arrays[name] if step == "add" else value * arrays[name]
    if activation is not None:
        result_of = on_array(op, activation, jnp.squeeze(value, dropped))
        value = jnp.expand_dims(result_of, dropped)
    if "scale_out" in arrays:
        value *= arrays["scale_out"]
    return value.astype(result.dtype)


def _sums(result: np.dtype) -> np.dtype:
    """Return the dtype of the sums for a result's dtype, the same as in graphs."""
    if jnp.issubdtype(result, jnp.floating):
        return np.dtype(np.float64 if result == np.float64 else np.float32)
    is_short = result.itemsize < 4 and not jnp.issubdtype(result, jnp.complexfloating)
    return np.dtype(np.int32) if is_short else result


def _is_integer(x: jax.Array) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact)


@functools.lru_cache(maxsize=4096)
def _say_once(op: str, reason: str) -> None:
    _log.info("%s runs with XLA: %s", op, reason)
