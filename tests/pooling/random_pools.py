# SPDX-License-Identifier: Apache-2.0
"""Random pooling: windows, strides, padding, layouts, ties, NaN and infinities.

The answers are those of tests/pooling/windows.py. The gradient of a maximum goes to the
first largest element, a NaN before all others (docs/pooling.md).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
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
from tests.pooling.windows import pads_of, pooled

# The answer looks at windows one by one: so many elements take two seconds.
_MOST_LOOKED_AT = 60_000


class _Pool(NamedTuple):
    """A kind of pooling, "max", "avg" or "avg_exclude", and its arguments."""

    kind: str
    window: tuple[int, ...]
    strides: tuple[int, ...] | None
    padding: Any
    layout: str | None

    @property
    def order(self) -> list[int] | None:
        """Where the batch, the spatial axes and the channels are."""
        if self.layout is None:
            return None
        spatial = [i for i, letter in enumerate(self.layout) if letter not in "NC"]
        return [self.layout.index("N"), *spatial, self.layout.index("C")]

    def last(self, x: np.ndarray) -> np.ndarray:
        """Return an array with the channels last."""
        return x if self.order is None else np.transpose(x, self.order)

    def back(self, x: np.ndarray) -> np.ndarray:
        """Return an array with the channels last as the call has it."""
        return x if self.order is None else np.transpose(x, np.argsort(self.order))

    def counts(self, space: tuple[int, ...]) -> list[int]:
        """Return how many windows there are along each axis."""
        strides = self.strides or (1,) * len(self.window)
        pads = pads_of(self.padding, space, self.window, strides)
        sizes = zip(space, self.window, strides, pads, strict=True)
        return [(n + sum(pad) - f) // stride + 1 for n, f, stride, pad in sizes]


def draw_pool(draw: Draw, *, gradients: bool, most: int) -> Problem:
    """Return a pooling whose windows have at most `most` elements, all together."""
    most = min(most, _MOST_LOOKED_AT)
    while True:
        pool, space = _windows(draw)
        batch = [log_integer(draw, 1, 6) for _ in range(draw.integer(0, 2))]
        if pool.layout is not None:
            batch = [log_integer(draw, 1, 6)]
        channels = draw.one_of((1, 3, 5, 8, 16, 33))
        counts = pool.counts(space)
        places = math.prod(batch) * channels * math.prod(counts)
        looked_at = places * math.prod(pool.window)
        if min(counts) > 0 and looked_at <= most:
            break
    dtype = draw.one_of(FLOATS)
    values, told = _values(draw, (*batch, *space, channels))
    # As a NumPy array of the dtype.
    inputs = np.asarray(jax.numpy.asarray(values, jax.numpy.dtype(dtype)))
    arrays = {"inputs": pool.back(inputs)}
    if gradients:
        cotangent = draw.normal((*batch, *counts, channels), dtype)
        arrays["cotangent of output"] = pool.back(np.asarray(cotangent))
    shown: dict[str, Any] = {"window": pool.window, "strides": pool.strides}
    shown |= {"padding": pool.padding, "layout": pool.layout}
    if pool.kind != "max":
        shown["count_include_pad"] = pool.kind == "avg"
    shown |= {"values": told, "gradients": gradients}
    name = "max_pool" if pool.kind == "max" else "avg_pool"

    def function(arrays: Arrays, implementation: Implementation) -> dict[str, Any]:
        options: Any = {"implementation": implementation}
        options["dimension_numbers"] = pool.layout
        if pool.kind != "max":
            options["count_include_pad"] = pool.kind == "avg"
        call = getattr(jax_cudnn, name)
        return {"output": call(arrays["inputs"], *pool[1:4], **options)}

    def call(arrays: Arrays, implementation: Implementation) -> dict[str, jax.Array]:
        if not gradients:
            return function(arrays, implementation)
        return with_gradients(lambda x: function(x, implementation), arrays, ["inputs"])

    shown_array = array_text("inputs", arrays["inputs"])
    return Problem(
        text=f"{name}({shown_array}; {options_text(shown)})",
        arrays=arrays,
        call=call,
        truth=functools.partial(_truth, pool),
    )


def _windows(draw: Draw) -> tuple[_Pool, tuple[int, ...]]:
    """Draw a pooling, and the spatial sizes of its array."""
    rank = draw.one_of((1, 2, 2, 2, 3))
    space = tuple(log_integer(draw, 2, 40 if rank < 3 else 12) for _ in range(rank))
    window = tuple(min(log_integer(draw, 1, 7), n) for n in space)
    if draw.chance(0.1):
        window = space
    strides = None
    if draw.chance(0.8):
        strides = tuple(draw.integer(1, 3) for _ in range(rank))
    padding: Any = draw.one_of(("VALID", "SAME", "SAME_LOWER", "pairs", "pairs"))
    if padding == "pairs":
        padding = [
            (draw.integer(0, f - 1), draw.integer(0, f - 1)) if f > 1 else (0, 0)
            for f in window
        ]
        if draw.chance(0.15):  # cut, or windows in padding alone
            padding = [(draw.integer(-1, f), draw.integer(-1, f + 1)) for f in window]
    layout = None
    if draw.chance(0.4):
        spatial = "DHW"[-rank:]
        letters = [*spatial]
        for letter in "NC":
            letters.insert(draw.integer(0, len(letters)), letter)
        layout = "".join(letters)
    kind = draw.one_of(("max", "avg", "avg_exclude"))
    return _Pool(kind, window, strides, padding, layout), space


def _values(draw: Draw, shape: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """Draw numbers: a third of the arrays has ties, or NaN and infinities."""
    x = draw.rng.standard_normal(shape, np.float32)
    if draw.chance(2 / 3):
        return x, "normal"
    if draw.chance(0.4):
        return np.maximum(np.round(x), -1), "rounded"
    if draw.chance(0.4):
        return np.maximum(x, 0), "relu"
    spoilt = draw.rng.random(shape)
    x = np.where(spoilt < 0.1, np.float32(-np.inf), x)
    if draw.chance(0.5):
        return x, "with -inf"
    return np.where(spoilt > 0.95, np.float32(np.nan), x), "with NaN and -inf"


def _truth(pool: _Pool, arrays: Arrays) -> dict[str, Judged]:
    x = double(pool.last(arrays["inputs"]))
    u = unit(arrays["inputs"].dtype)
    names = ("kind", "window", "strides", "padding")
    given = {name: getattr(pool, name) for name in names}
    ct = arrays.get("cotangent of output")
    cotangent = None if ct is None else double(pool.last(ct))
    # What is not finite is compared as it is.
    with np.errstate(invalid="ignore"):
        found = pooled(x, **given, cotangent=cotangent)
        bound = np.zeros_like(found.output)
        if pool.kind != "max":
            size = pooled(np.abs(x), **given).output
            bound = u * np.abs(found.output) + SUMS * size
    judged = {"output": Judged(pool.back(found.output), pool.back(bound))}
    if cotangent is not None:
        with np.errstate(invalid="ignore"):
            size = pooled(x, **given, cotangent=np.abs(cotangent)).grad
        # XLA adds up the gradient of a maximum in the dtype of the inputs.
        roundings = math.prod(pool.window) if pool.kind == "max" else 0
        bound = u * np.abs(found.grad) + (roundings * u + SUMS) * size
        judged["gradient of inputs"] = Judged(pool.back(found.grad), pool.back(bound))
    return judged
