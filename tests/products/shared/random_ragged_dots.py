# SPDX-License-Identifier: Apache-2.0
"""Random grouped products: empty groups, many, and NaN in rows that are in none."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from jax_cudnn.config import Implementation
from tests.common.judged import Judged
from tests.common.random_draws import FLOATS, Draw, options_text
from tests.lowering.operation_problems import (
    SUMS,
    Arrays,
    Problem,
    array_text,
    double,
    log_integer,
    unit,
    with_gradients,
)
from tests.products.shared.grouped import Grouped, grouped

_MOST_GROUPS = 100


def draw_ragged_dot(draw: Draw, *, gradients: bool, most: int) -> Problem:
    """Return a grouped product of at most `most` elements in its matrices."""
    m = log_integer(draw, 1, 1000)
    k, n = (log_integer(draw, 1, 512) for _ in range(2))
    groups = 1 if draw.chance(0.08) else log_integer(draw, 2, _MOST_GROUPS)
    groups = max(1, min(groups, most // (k * n)))
    sizes = draw_sizes(draw, m, groups)
    dtype = draw.one_of(FLOATS)
    preferred = "float32" if draw.chance(0.2) else dtype
    operands: dict[str, Any] = {
        "rows": draw.normal((m, k), dtype),
        "matrices": draw.normal((groups, k, n), dtype),
    }
    if draw.chance(0.4):
        shape = (groups, n) if draw.chance(0.8) else (n,)
        operands["bias"] = draw.normal(shape, draw.one_of((dtype, "float32")))
    arrays = {name: np.array(x) for name, x in operands.items()}
    if gradients:
        arrays["cotangent of output"] = np.array(draw.normal((m, n), preferred))
    left = m - int(sizes.sum())
    if is_poisoned := left > 0 and draw.chance(0.7):
        for name in ("rows", "cotangent of output"):
            if name in arrays:
                arrays[name][m - left :] = np.nan
    arrays["sizes"] = sizes
    extra = {"empty groups": int((sizes == 0).sum()), "rows in none": left}
    extra |= {"NaN there": is_poisoned, "out": preferred, "gradients": gradients}
    shown = ", ".join(array_text(name, x) for name, x in operands.items())

    def function(arrays: Arrays, implementation: Implementation) -> dict[str, Any]:
        output = jax_cudnn.ragged_dot(
            arrays["rows"],
            arrays["matrices"],
            arrays["sizes"],
            bias=arrays.get("bias"),
            preferred_element_type=jnp.dtype(preferred),
            implementation=implementation,
        )
        return {"output": output}

    def call(arrays: Arrays, implementation: Implementation) -> dict[str, jax.Array]:
        if not gradients:
            return function(arrays, implementation)
        return with_gradients(
            lambda x: function(x, implementation), arrays, list(operands)
        )

    return Problem(
        text=f"ragged_dot({shown}; {options_text(extra)})",
        arrays=arrays,
        call=call,
        truth=functools.partial(_truth, preferred),
    )


def draw_sizes(draw: Draw, m: int, groups: int) -> np.ndarray:
    """Draw how many rows groups have; often they leave rows that are in none."""
    used = m if draw.chance(0.5) else draw.integer(0, m)
    cuts = np.sort(draw.rng.integers(0, used + 1, groups - 1))
    sizes = np.diff(np.concatenate([[0], cuts, [used]]))
    if draw.chance(0.4):
        sizes[draw.rng.random(groups) < 0.5] = 0
    return sizes.astype(np.int32)


def _truth(preferred: str, arrays: Arrays) -> dict[str, Judged]:
    rows, matrices = (double(arrays[name]) for name in ("rows", "matrices"))
    sizes = arrays["sizes"]
    groups, n = len(sizes), matrices.shape[2]
    ct = arrays.get("cotangent of output")
    cotangent = np.zeros((len(rows), n)) if ct is None else double(ct)
    bias = double(arrays.get("bias", np.zeros(n)))
    full = np.broadcast_to(bias, (groups, n))

    def of(change: Callable[[np.ndarray], np.ndarray]) -> Grouped:
        """Return product and gradients of changed numbers."""
        changed = map(change, (full, cotangent))
        return grouped(change(rows), change(matrices), sizes, *changed)

    found, size = of(lambda x: x), of(np.abs)
    # The root of what a sum's squares add up to: the size of many small errors' sum.
    spread = of(np.square)
    dtype = arrays["rows"].dtype
    is_tf32 = dtype == np.float32
    judged: dict[str, Judged] = {}
    for name, value in found._asdict().items():
        if name != "output" and (ct is None or name not in arrays):
            continue
        magnitude, squares = getattr(size, name), getattr(spread, name)
        u = unit(preferred if name == "output" else arrays[name].dtype)
        bound = u * np.abs(value) + SUMS * magnitude
        if is_tf32 and name != "bias":
            # TF32 keeps 10 bits, and cuts off the rest: 8 standard deviations.
            bound += 2.0**-9 * np.abs(value) + 2.0**-8 * np.sqrt(squares)
        elif name in ("rows", "matrices") and preferred != dtype:
            # The cotangent is rounded to the dtype of the operands.
            bound += 8 * unit(dtype) * np.sqrt(squares)
        if name == "bias" and bias.ndim == 1:
            value, bound = value.sum(0), bound.sum(0)
        judged["output" if name == "output" else f"gradient of {name}"] = Judged(
            value, bound
        )
    return judged
