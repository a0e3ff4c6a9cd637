# SPDX-License-Identifier: Apache-2.0
"""Checks the gradients of jax_cudnn.sdpa, case by case.

The formula is checked in f64, against central differences. On an NVIDIA GPU, cuDNN's
backward kernel is then checked in bf16, against the truth in f32. Exits with 1 if a
check fails.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn

# Central differences have an error of about STEP**2 from the step, and one of the
# loss's rounding (some 1e-14) divided by STEP: together about 1e-9 here.
STEP = 1e-5
BOUND = 1e-7
# How far cuDNN in bf16 may be from the truth, in units of XLA's own bf16 error.
MULTIPLE = 2.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to call `sdpa`; sizes by axis letter (see its docstring)."""

    name: str
    b: int = 2
    s: int = 5
    t: int = 7
    h: int = 6
    k: int = 6
    d: int = 8
    e: int = 8
    bias: tuple[int, ...] = ()
    is_masked: bool = False
    options: dict[str, Any] = field(default_factory=dict)


LENGTHS = np.array([6, 4])
CASES = (
    Case(name="plain"),
    Case(name="causal", t=5, options={"is_causal": True}),
    Case(name="scaled", options={"scale": 0.3}),
    Case(name="bias per head", bias=(1, 6, 5, 7)),
    Case(name="bias per key, mask", bias=(2, 1, 1, 7), is_masked=True),
    Case(name="3 queries per key head", k=2),
    Case(name="wider values", d=8, e=16),
    Case(name="key lengths", options={"key_value_seq_lengths": LENGTHS}),
)


def operands(case: Case) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Return query, key, value, maybe a bias, and the mask; each row sees a key."""
    rng = np.random.default_rng(0)
    shapes = [
        (case.b, case.s, case.h, case.d),
        (case.b, case.t, case.k, case.d),
        (case.b, case.t, case.k, case.e),
    ]
    if case.bias:
        shapes.append(case.bias)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    if not case.is_masked:
        return arrays, None
    mask = rng.random((case.b, 1, case.s, case.t)) < 0.6
    mask[..., 0] = True
    return arrays, mask


def loss_of(
    case: Case, mask: np.ndarray | None, implementation: str
) -> Callable[..., jax.Array]:
    """Return a scalar function of the operands that weighs all results unequally."""

    def loss(*arrays: jax.Array) -> jax.Array:
        output = jax_cudnn.sdpa(
            *arrays, mask=mask, implementation=implementation, **case.options
        )
        wide = output.astype(jnp.promote_types(output.dtype, jnp.float32))
        return jnp.sum(
            jnp.sin(wide + jnp.linspace(0, 3, wide.size).reshape(wide.shape))
        )

    return loss


def gradients(
    loss: Callable[..., jax.Array], arrays: list[np.ndarray], dtype: Any
) -> np.ndarray:
    """Return the gradients of all operands, one after another, in f64."""
    function = jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays)))))
    results = function(*(jnp.asarray(x, dtype) for x in arrays))
    return np.concatenate([np.asarray(g, np.float64).ravel() for g in results])


def central_differences(
    loss: Callable[..., jax.Array], arrays: list[np.ndarray]
) -> np.ndarray:
    """Return the gradients by central differences, moving one number at a time."""
    sizes = [x.size for x in arrays]

    def at(flat: jax.Array) -> jax.Array:
        parts = jnp.split(flat, np.cumsum(sizes)[:-1])
        return loss(*(p.reshape(x.shape) for p, x in zip(parts, arrays, strict=True)))

    @jax.jit
    def difference(flat: jax.Array, index: jax.Array) -> jax.Array:
        above, below = flat.at[index].add(STEP), flat.at[index].add(-STEP)
        return (at(above) - at(below)) / (2 * STEP)

    flat = jnp.concatenate([jnp.asarray(x, jnp.float64).ravel() for x in arrays])
    one_by_one = functools.partial(jax.lax.map, batch_size=64)
    return np.asarray(
        one_by_one(functools.partial(difference, flat), jnp.arange(flat.size))
    )


def relative_error(x: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(x - truth) / np.linalg.norm(truth))


def check_formula(case: Case) -> bool:
    """Compare gradients in f64 with central differences; print a line."""
    arrays, mask = operands(case)
    loss = loss_of(case, mask, "auto")
    with jax.enable_x64(True):
        error = relative_error(
            gradients(loss, arrays, jnp.float64), central_differences(loss, arrays)
        )
    is_right = error <= BOUND
    print(f"  {case.name:<24} {error:9.1e}  {'ok' if is_right else 'WRONG'}")
    return is_right


def check_kernel(case: Case) -> bool:
    """Compare cuDNN's bf16 gradients with XLA's in f32; print a line."""
    arrays, mask = operands(case)
    # Numbers that bf16 holds exactly, so that all dtypes start from the same numbers.
    arrays = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in arrays]
    with jax.default_matmul_precision("highest"):
        truth = gradients(loss_of(case, mask, "xla"), arrays, jnp.float32)
    errors = [
        relative_error(
            gradients(loss_of(case, mask, implementation), arrays, jnp.bfloat16), truth
        )
        for implementation in ("cudnn", "xla")
    ]
    is_right = errors[0] <= MULTIPLE * errors[1]
    told = "ok" if is_right else "WRONG"
    print(f"  {case.name:<24} {errors[0]:9.1e}  {errors[1]:9.1e}  {told}")
    return is_right


def for_kernel(case: Case) -> Case:
    """Return the case with the lengths and head sizes of a real model."""
    times = 16
    bias = tuple(
        size * times if axis >= 2 and size > 1 else size
        for axis, size in enumerate(case.bias)
    )
    options = dict(case.options)
    if "key_value_seq_lengths" in options:
        options["key_value_seq_lengths"] = LENGTHS * times
    return replace(
        case,
        s=case.s * times,
        t=case.t * times,
        d=case.d * 8,
        e=case.e * 8,
        bias=bias,
        options=options,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first two cases only")
    cases = CASES[:2] if parser.parse_args().quick else CASES

    print(f"Gradients in f64 against central differences (allowed: {BOUND:.0e})")
    results = [check_formula(case) for case in cases]
    if jax.default_backend() == "gpu":
        print(f"Gradients in bf16 against f32 (allowed: {MULTIPLE} times XLA's error)")
        print(f"  {'':<24} {'cuDNN':>9}  {'XLA':>9}")
        results += [check_kernel(for_kernel(case)) for case in cases]
    else:
        print("No GPU: cuDNN's backward kernel was not checked.")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
