# SPDX-License-Identifier: Apache-2.0
"""Computes in plain JAX a call of conv, matmul or dot_general with an epilogue.

A ``Problem`` is one call: its operands, the call itself, and the same thing by
jax.lax and jax.numpy in f32 (``evaluate``), to be judged against.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_cudnn.config import Implementation

# Each activation in plain JAX, with the arguments at which its derivative jumps.
ACTIVATIONS: dict[str, tuple[Callable[[jax.Array], jax.Array], tuple[float, ...]]] = {
    "elu": (jax.nn.elu, ()),
    "gelu": (jax.nn.gelu, ()),
    "gelu_exact": (functools.partial(jax.nn.gelu, approximate=False), ()),
    "leaky_relu": (jax.nn.leaky_relu, (0.0,)),
    "relu": (jax.nn.relu, (0.0,)),
    "relu6": (jax.nn.relu6, (0.0, 6.0)),
    "sigmoid": (jax.nn.sigmoid, ()),
    "silu": (jax.nn.silu, ()),
    "softplus": (jax.nn.softplus, ()),
    "swish": (jax.nn.silu, ()),
    "tanh": (jnp.tanh, ()),
    # These are passed as functions.
    "clip": (lambda x: jnp.clip(x, -1.0, 1.5), (-1.0, 1.5)),
    "hard_swish": (jax.nn.hard_swish, (-3.0, 3.0)),
    "mish": (lambda x: x * jnp.tanh(jax.nn.softplus(x)), ()),
    "quick_gelu": (lambda x: x * jax.nn.sigmoid(1.702 * x), ()),
    "softsign": (lambda x: x / (1 + jnp.abs(x)), ()),
    "squared_relu": (lambda x: jnp.square(jnp.maximum(x, 0.0)), ()),
    "wave": (lambda x: jnp.sin(x) * jnp.exp(-0.5 * x * x) + 0.25 * x, ()),
}
CALLABLES = (
    "clip",
    "hard_swish",
    "mish",
    "quick_gelu",
    "softsign",
    "squared_relu",
    "wave",
)
F8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An array; ``aligned`` is its shape with the axes of what it broadcasts to."""

    array: jax.Array
    aligned: tuple[int, ...]
    full: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return bool(jnp.issubdtype(self.array.dtype, jnp.floating))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operation.

    ``contract`` takes the two operands of the contraction and the dtype of the result.
    ``before`` and ``between`` name the scales of those operands and of the sums,
    ``terms`` what is added, or scales a branch, ``last`` what scales the result.
    ``wide`` is the dtype in which the operands are multiplied, None for 8 bits.
    """

    text: str
    call: Callable[[Implementation, Mapping[str, jax.Array]], jax.Array]
    operands: dict[str, Operand]
    contract: Callable[[jax.Array, jax.Array], jax.Array]
    sides: tuple[str, str]
    before: dict[str, str] = field(default_factory=dict)
    between: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    activation: str | None = None
    wide: str | None = None
    out_dtype: str = "float32"
    with_gradients: bool = False
    cotangent: jax.Array | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        """The operands whose gradients are compared."""
        if not self.with_gradients:
            return ()
        return tuple(name for name, each in self.operands.items() if each.is_float)

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The operands by name."""
        return {name: each.array for name, each in self.operands.items()}


# --- what a problem means -------------------------------------------------------------


def _tf32(x: jax.Array) -> jax.Array:
    """Return what a tensor core reads of an f32 number: its upper 19 bits."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)


@jax.custom_vjp
def _read_as_tf32(x: jax.Array) -> jax.Array:
    return _tf32(x)


_read_as_tf32.defvjp(lambda x: (_tf32(x), None), lambda _, grad: (grad,))


@jax.custom_vjp
def _differentiated_in_tf32(x: jax.Array) -> jax.Array:
    return x


_differentiated_in_tf32.defvjp(lambda x: (x, None), lambda _, grad: (_tf32(grad),))


def _plain(
    problem: Problem, full: Mapping[str, jax.Array], *, tf32: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the result in f32, and what the activation got."""
    value = {**full}
    for name, number in problem.numbers.items():
        value[name] = jnp.full((), number, jnp.float32)
    left, right = (
        value[side] * value[problem.before[side]]
        if side in problem.before
        else value[side]
        for side in problem.sides
    )
    if tf32:
        left, right = _read_as_tf32(left), _read_as_tf32(right)
    sums = problem.contract(left, right)
    if tf32:
        sums = _differentiated_in_tf32(sums)
    for name in problem.between:
        sums = sums * value[name]
    for name in problem.terms:
        is_factor = name == "branch_scale"
        sums = sums * value[name] if is_factor else sums + value[name]
    result = sums
    if problem.activation is not None:
        result = ACTIVATIONS[problem.activation][0](sums)
    for name in problem.last:
        result = result * value[name]
    return result, sums


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Result, gradients and, for each gradient, the norm of the terms that it sums."""

    output: np.ndarray
    gradients: dict[str, np.ndarray]
    norms: dict[str, np.ndarray]
    cotangent: jax.Array | None


def evaluate(problem: Problem, *, tf32: bool = False) -> Evaluated:
    """Return what the problem means, in f32, or with products in TF32.

    The cotangent is 0 where the activation's derivative jumps within reach of rounding
    errors: both one-sided derivatives are right there. (Of the TF32 evaluation it
    is taken as it is: give it the problem with the cotangent of the first.)
    """
    wanted = problem.wanted
    kinks = ACTIVATIONS[problem.activation][1] if problem.activation else ()

    @jax.jit
    def run(arrays: dict[str, jax.Array], cotangent: jax.Array | None) -> Any:
        full = {
            name: jnp.broadcast_to(jnp.reshape(arrays[name], each.aligned), each.full)
            for name, each in problem.operands.items()
        }
        moving = {name: full[name] for name in wanted}
        result, pullback, sums = jax.vjp(
            lambda moving: _plain(problem, {**full, **moving}, tf32=tf32),
            moving,
            has_aux=True,
        )
        if cotangent is None:
            return result, {}, None
        if not tf32:
            size = jnp.sqrt(jnp.mean(jnp.square(sums)))
            unit = eps_of(problem.out_dtype)
            for kink in kinks:
                reach = jnp.maximum(0.02 * size, 2 * unit * abs(kink))
                cotangent = jnp.where(
                    jnp.abs(sums - kink) < reach, jnp.zeros_like(cotangent), cotangent
                )
        (terms,) = pullback(cotangent.astype(jnp.float32))
        return result, terms, cotangent

    # Converted out here: XLA would find f8 operands and ask for a convolution of them.
    arrays = {name: x.astype(jnp.float32) for name, x in problem.arrays.items()}
    with jax.default_matmul_precision("highest"):
        output, terms, cotangent = run(arrays, problem.cotangent if wanted else None)
    gradients: dict[str, np.ndarray] = {}
    norms: dict[str, np.ndarray] = {}
    for name in wanted:
        each, term = problem.operands[name], np.asarray(terms[name], np.float64)
        axes = tuple(
            axis
            for axis, (own, size) in enumerate(
                zip(each.aligned, each.full, strict=True)
            )
            if own != size
        )
        shape = each.array.shape
        gradients[name] = term.sum(axis=axes, keepdims=True).reshape(shape)
        square = np.square(term).sum(axis=axes, keepdims=True)
        norms[name] = np.sqrt(square).reshape(shape)
    return Evaluated(
        output=np.asarray(output),
        gradients=gradients,
        norms=norms,
        cotangent=cotangent,
    )


def exact_integers(problem: Problem) -> np.ndarray:
    """Return the integer sums of a problem that is a contraction and nothing else."""
    arrays = (np.asarray(problem.arrays[side], np.float64) for side in problem.sides)
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        left, right = map(jnp.asarray, arrays)
        return np.asarray(problem.contract(left, right)).astype(np.int64)


def run_call(
    problem: Problem,
    implementation: Implementation,
    cotangent: jax.Array | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the call's result and gradients, compiled as one program."""
    arrays = problem.arrays
    return program(problem, implementation)(arrays, cotangent)


def program(problem: Problem, implementation: Implementation) -> Any:
    """Return the jitted function of (operands, cotangent)."""
    wanted = problem.wanted

    @jax.jit
    def run(arrays: dict[str, jax.Array], cotangent: jax.Array | None) -> Any:
        if not wanted:
            return problem.call(implementation, arrays), {}
        moving = {name: arrays[name] for name in wanted}
        output, pullback = jax.vjp(
            lambda moving: problem.call(implementation, {**arrays, **moving}), moving
        )
        return output, pullback(cotangent)[0]

    return run


def eps_of(dtype: str) -> float:
    """Return the relative distance of two numbers of a dtype, 0 for integers."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def unit_of(problem: Problem) -> float:
    """Return the relative size of the roundings on the way to a gradient."""
    wide = problem.wide
    if wide == "float32":
        return 2.0**-10  # TF32 keeps 10 bits
    if wide is None and any(
        str(problem.arrays[side].dtype) in F8 for side in problem.sides
    ):
        # The cotangent meets the widened operand in TF32 or in 16 bits.
        return max(2.0**-10, eps_of(problem.out_dtype))
    return max(eps_of(wide or "float32"), eps_of(problem.out_dtype))
