# SPDX-License-Identifier: Apache-2.0
"""Random programs for `fuse`, judged by what plain XLA loses in the same dtypes.

The truth is the plain function in float64 on a CPU. XLA's error is that of the plain
function with every operation rounded to its dtype, as `fuse` promises, and with f32
products in TF32, as cuDNN has them.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from jax_cudnn.config import Implementation
from tests.common.judged import Judged
from tests.common.random_draws import FLOATS, Draw
from tests.fusing.programs import BINARY, JUMPING, KINKED, UNARY, Step, program
from tests.lowering.operation_problems import (
    Arrays,
    Problem,
    array_text,
    in_tf32,
    judged_by_xla,
    with_gradients,
)

_SIZES = ((6, 7), (16, 24), (40, 64), (64, 96), (130, 72), (128, 128), (256, 64))
_OPERANDS = ("x", "y", "u", "v")


def draw_program(draw: Draw, *, gradients: bool, most: int) -> Problem:
    """Return a program on arrays of at most `most` elements each."""
    sizes = [(m, n) for m, n in _SIZES if max(m * n, n * n) <= most] or _SIZES[:1]
    m, n = draw.one_of(sizes)
    dtype = draw.one_of(FLOATS)
    # Two values that are nearly equal are taken for each other's in 16 bits.
    left_out = KINKED if gradients else JUMPING
    steps = [_step(draw, left_out) for _ in range(draw.integer(2, 9))]
    results = [draw.integer(0, 9) for _ in range(draw.integer(0, 2))]
    size = (7 / n) ** 0.5  # of the matrices: products keep the size of their rows
    shapes = {"x": (m, n), "y": (m, n), "u": (n, n), "v": (n, n)}
    arrays = {
        name: np.asarray(draw.normal(shape, dtype, size if name in "uv" else 1.0))
        for name, shape in shapes.items()
    }
    if gradients:
        for name in _names(results):
            arrays[f"cotangent of {name}"] = np.asarray(draw.normal((m, n), dtype))

    def call(arrays: Arrays, implementation: Implementation) -> dict[str, jax.Array]:
        plain = program(steps, results)
        fused = jax_cudnn.fuse(plain, implementation=implementation)
        return _results(fused, results, arrays, gradients=gradients)

    written = "; ".join(" ".join(map(str, step)) for step in steps)
    return Problem(
        text=f"fuse({array_text('x', arrays['x'])}, u {n}x{n}: {written}; "
        f"results {results}, gradients={gradients})",
        arrays=arrays,
        call=call,
        truth=functools.partial(_truth, steps, results, gradients),
    )


def _step(draw: Draw, left_out: Sequence[str]) -> Step:
    kind = draw.one_of(("unary",) * 5 + ("binary",) * 4 + ("matmul",) * 2)
    places = draw.integer(0, 9), draw.integer(0, 9)
    if kind == "matmul":
        return "matmul", places[0], places[1] % 2
    names = [x for x in (UNARY if kind == "unary" else BINARY) if x not in left_out]
    return draw.one_of(names), *places[: 1 if kind == "unary" else 2]


def _names(results: Sequence[int]) -> list[str]:
    return ["result", *(f"result {i}" for i in range(1, 1 + len(results)))]


def _results(
    function: Callable[..., list[jax.Array]],
    results: Sequence[int],
    arrays: Arrays,
    *,
    gradients: bool,
) -> dict[str, jax.Array]:
    def named(arrays: Arrays) -> dict[str, jax.Array]:
        found = function(*(arrays[name] for name in _OPERANDS))
        return dict(zip(_names(results), found, strict=True))

    return with_gradients(named, arrays, _OPERANDS) if gradients else named(arrays)


# --- what is right --------------------------------------------------------------------


def _truth(
    steps: Sequence[Step], results: Sequence[int], gradients: bool, arrays: Arrays
) -> dict[str, Judged]:
    run = functools.partial(_results, results=results, gradients=gradients)
    is_tf32 = arrays["x"].dtype == np.float32
    plain = program(steps, results, in_tf32(jnp.matmul) if is_tf32 else jnp.matmul)
    return judged_by_xla(
        lambda x: run(program(steps, results), arrays=x),
        lambda x: run(plain, arrays=x),
        arrays,
        is_tf32=is_tf32,
    )
