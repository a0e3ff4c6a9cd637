# SPDX-License-Identifier: Apache-2.0
"""Random products of experts, in f8 too, and whole layers, in float64 NumPy.

What random_ragged_dots.py draws is here with all rows in one group, and with NaN and
infinities in one group; products in f8 have operands that are rounded in NumPy.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_cudnn
from jax_cudnn import f8, moe
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
from tests.products.moe.truth import silu
from tests.products.shared.grouped import Grouped, grouped
from tests.products.shared.random_ragged_dots import draw_ragged_dot, draw_sizes

_OUTPUT = "cotangent of output"


def draw_groups(draw: Draw, *, gradients: bool, most: int) -> Problem:
    """Return a product in groups, of floats or of f8."""
    if draw.chance(0.5):
        return _of_floats(draw, gradients=gradients, most=most)
    return _of_f8(draw, gradients=gradients, most=most)


def _of_floats(draw: Draw, *, gradients: bool, most: int) -> Problem:
    """Return a grouped product, of which a group may be spoilt."""
    problem = draw_ragged_dot(draw, gradients=gradients, most=most)
    arrays, told = problem.arrays, []
    sizes = arrays["sizes"]
    if draw.chance(0.2):
        total, place = int(sizes.sum()), draw.integer(0, len(sizes) - 1)
        sizes[:] = 0
        sizes[place] = total
        told.append(f"all rows in group {place}")
    filled = np.flatnonzero(sizes)
    if len(filled) and draw.chance(0.5):
        group = int(draw.one_of([*filled]))
        row = int(sizes[:group].sum()) + draw.integer(0, int(sizes[group]) - 1)
        value = draw.one_of((np.nan, np.inf, -np.inf))
        arrays["rows"][row, draw.integer(0, arrays["rows"].shape[1] - 1)] = value
        if _OUTPUT in arrays and draw.chance(0.5):
            arrays[_OUTPUT][row] = np.nan
            told.append("NaN in its cotangent")
        told.append(f"{value} in group {group}")
    return dataclasses.replace(
        problem,
        text=", ".join([problem.text, *told]),
        truth=np.errstate(invalid="ignore")(problem.truth),
    )


# --- f8 -------------------------------------------------------------------------------


def _of_f8(draw: Draw, *, gradients: bool, most: int) -> Problem:
    """Return a product that quantises its operands, or of operands in f8."""
    m = log_integer(draw, 1, 1000)
    k, n = (16 * log_integer(draw, 1, 32) for _ in range(2))
    groups = max(1, min(log_integer(draw, 1, 64), most // (k * n)))
    sizes = draw_sizes(draw, m, groups)
    is_stored = not gradients and draw.chance(0.4)
    dtype = draw.one_of(FLOATS)
    w_dtype = dtype if draw.chance(0.6) else "float32"
    lhs = draw.one_of(("float8_e4m3fn", "float8_e5m2")) if is_stored else dtype
    rhs = "float8_e4m3fn" if is_stored else w_dtype
    size = draw.one_of((0.01, 1.0, 30.0)) if not is_stored else 1.0
    operands = {
        "rows": _short(draw, (m, k), lhs, size),
        "matrices": _short(draw, (groups, k, n), rhs, 1.0),
    }
    arrays = {**operands, "sizes": sizes}
    if gradients:
        arrays[_OUTPUT] = _short(draw, (m, n), dtype, 1e-3)
    left = m - int(sizes.sum())
    if left and not is_stored and draw.chance(0.7):
        for name in ("rows", _OUTPUT):
            if name in arrays:
                arrays[name][m - left :] = np.nan
    # Division by a power of two is exact, so nothing is rounded the other way.
    recipe = f8.Current(power_of_2=True)

    def function(arrays: Arrays, implementation: Implementation) -> dict[str, Any]:
        given = arrays["rows"], arrays["matrices"], arrays["sizes"]
        if is_stored:
            output = jax_cudnn.ragged_dot(
                *given,
                preferred_element_type=jnp.dtype(dtype),
                implementation=implementation,
            )
        else:
            output = f8.ragged_dot(*given, recipe=recipe, implementation=implementation)
        return {"output": output}

    extra = {"out": dtype, "empty groups": int((sizes == 0).sum())}
    extra |= {"rows in none": left, "gradients": gradients}
    shown = ", ".join(array_text(name, x) for name, x in operands.items())
    return Problem(
        text=f"f8_ragged_dot({shown}; {options_text(extra)})",
        arrays=arrays,
        call=_with_gradients(function, list(operands), gradients=gradients),
        truth=functools.partial(_f8_truth, dtype),
    )


def _short(draw: Draw, shape: Any, dtype: str, size: float) -> np.ndarray:
    """Draw numbers of at most 8 bits: XLA may round to f8 by way of f16."""
    return np.array(draw.normal(shape, "bfloat16", size).astype(jnp.dtype(dtype)))


def _with_gradients(function: Any, moved: list[str], *, gradients: bool) -> Any:
    def call(arrays: Arrays, implementation: Implementation) -> dict[str, jax.Array]:
        if not gradients:
            return function(arrays, implementation)
        return with_gradients(lambda x: function(x, implementation), arrays, moved)

    return call


def _rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return what an array's copy in f8 stands for, with a power of two as scale."""
    largest = float(ml_dtypes.finfo(dtype).max)
    amax = np.float32(np.abs(x).max(initial=0))
    part, exponent = np.frexp(amax * np.float32(1 / largest))
    scale = 1.0 if amax == 0 else 2.0 ** (exponent - (part == 0.5))
    stored = np.clip(x / scale, -largest, largest).astype(np.float32).astype(dtype)
    return stored.astype(np.float64) * scale


def _f8_truth(dtype: str, arrays: Arrays) -> dict[str, Judged]:
    sizes = arrays["sizes"]
    read = int(sizes.sum())

    def wide(name: str) -> np.ndarray:
        x = double(arrays[name])
        if name != "matrices":
            x[read:] = 0
        return x

    rows, matrices = wide("rows"), wide("matrices")
    is_stored = arrays["rows"].dtype.itemsize == 1
    if not is_stored:
        rows, matrices = (
            _rounded(x, ml_dtypes.float8_e4m3fn) for x in (rows, matrices)
        )

    def judged(what: str, cotangent: Any, unit_: float, extra: float) -> Judged:
        found, size, spread = (
            getattr(_changed(change, rows, matrices, sizes, cotangent), what)
            for change in (lambda x: x, np.abs, np.square)
        )
        # Hopper's f8 units keep sums in fewer bits than f32: 8 standard deviations.
        rest = SUMS * size + (2.0**-8 + extra) * np.sqrt(spread)
        return Judged(found, 2 * unit_ * np.abs(found) + rest)

    results = {"output": judged("output", None, unit(dtype), 0.0)}
    if _OUTPUT in arrays:
        grad, w_dtype = wide(_OUTPUT), arrays["matrices"].dtype
        narrow = _rounded(grad, ml_dtypes.float8_e5m2)
        results["gradient of rows"] = judged("rows", narrow, unit(dtype), 0.0)
        # By the cotangent as it came, in 16 bits.
        both = dtype == w_dtype == "float16"
        bits = unit("float16" if both else "bfloat16")
        results["gradient of matrices"] = judged("matrices", grad, bits, 8 * bits)
    return results


def _changed(
    change: Any, rows: Any, matrices: Any, sizes: Any, cotangent: Any
) -> Grouped:
    given = None if cotangent is None else change(cotangent)
    return grouped(change(rows), change(matrices), sizes, cotangent=given)


# --- layers ---------------------------------------------------------------------------

_WEIGHTS = ("x", "router_w", "gate_w", "up_w", "down_w")
_MOST_EXPERTS = 24


def draw_layer(draw: Draw, *, gradients: bool, most: int) -> Problem:
    """Return a mixture of experts, whose choices are far from ties.

    The first features of a token are its logits, in steps of 1 / 4, which are exact in
    all dtypes.
    """
    t, e = log_integer(draw, 1, 300), draw.integer(1, _MOST_EXPERTS)
    step = 16 if draw.chance(0.7) else 1
    d = -(-(e + log_integer(draw, 1, 64)) // step) * step
    f = -(-log_integer(draw, 1, max(1, min(96, most // (e * d)))) // step) * step
    dtype = draw.one_of(FLOATS)
    x = np.array(draw.normal((t, d), "float32"), np.float64)
    order = np.argsort(draw.rng.random((t, e)), axis=1)
    if is_skewed := draw.chance(0.2):
        hot = draw.integer(0, e - 1)
        order = np.where(order == e - 1, order[:, [hot]], order)
        order[:, hot] = e - 1
    x[:, :e] = (order - e // 2) / 4
    shapes = {"gate_w": (e, d, f), "up_w": (e, d, f), "down_w": (e, f, d)}
    arrays: dict[str, np.ndarray] = {"x": x.astype(jnp.dtype(dtype))}
    arrays["router_w"] = np.eye(d, e).astype(jnp.dtype(dtype))
    for name, shape in shapes.items():
        arrays[name] = np.array(draw.normal(shape, dtype, shape[1] ** -0.5))
    options: dict[str, Any] = {
        "top_k": draw.integer(1, min(e, 8)),
        "scores": draw.one_of(("softmax", "sigmoid")),
        "normalize": draw.chance(0.6),
        "scale": draw.one_of((1.0, 2.5)),
        "capacity_factor": draw.one_of((None, None, 0.5, 1.25)),
    }
    recipe = f8.Current() if draw.chance(0.25) else None
    spoilt = None
    if gradients:
        arrays[_OUTPUT] = np.array(draw.normal((t, d), dtype))
    elif recipe is None and options["capacity_factor"] is None and draw.chance(0.4):
        spoilt = draw.integer(0, t - 1)
        arrays["x"][spoilt, draw.integer(0, d - 1)] = draw.one_of((np.nan, np.inf))

    def function(arrays: Arrays, implementation: Implementation) -> dict[str, Any]:
        weights = {name: arrays[name] for name in _WEIGHTS}
        y, _ = moe.layer(
            **weights, **options, recipe=recipe, implementation=implementation
        )
        return {"output": y}

    extra = {**options, "f8": recipe is not None, "one expert": is_skewed}
    extra |= {"spoilt token": spoilt, "gradients": gradients}
    shown = ", ".join(array_text(name, arrays[name]) for name in ("x", "gate_w"))
    return Problem(
        text=f"moe({shown}; {options_text(extra)})",
        arrays=arrays,
        call=_with_gradients(function, list(_WEIGHTS), gradients=gradients),
        truth=functools.partial(_layer_truth, options, recipe is not None, spoilt),
    )


def _layer_truth(
    options: dict[str, Any], is_f8: bool, spoilt: int | None, arrays: Arrays
) -> dict[str, Judged]:
    wide = {name: double(arrays[name]) for name in _WEIGHTS}
    if spoilt is not None:
        wide["x"][spoilt] = 0
    cotangent = arrays.get(_OUTPUT)
    found = layer_with_gradients(
        **wide,
        **options,
        cotangent=None if cotangent is None else double(cotangent),
    )
    if spoilt is not None:
        found["output"][spoilt] = np.nan
    # f32 is multiplied in TF32. Roundings follow each other: of three products, a gate
    # and a sum forward, and of as many backward; 16 and 32 of them hold for all. In f8,
    # three operands in turn have 4 bits, and cotangents 3.
    u = 2.0**-10 if arrays["x"].dtype == np.float32 else unit(arrays["x"].dtype)
    # A single share that is normalised is 1: the terms of its gradient, in f32, cancel.
    terms = found.pop("terms of router_w", np.zeros(1))
    cancelled = {"gradient of router_w": 2.0**-20 * np.abs(terms).max()}
    judged = {}
    for name, value in found.items():
        part = 16 * u if name == "output" else 32 * u
        if is_f8:
            part += 0.2 if name == "output" else 0.35
        largest = np.abs(value[np.isfinite(value)]).max(initial=0)
        bound = part * largest + cancelled.get(name, 0.0)
        judged[name] = Judged(value, np.full(value.shape, bound))
    return judged


def layer_with_gradients(
    x: np.ndarray,
    router_w: np.ndarray,
    gate_w: np.ndarray,
    up_w: np.ndarray,
    down_w: np.ndarray,
    *,
    top_k: int,
    scores: str,
    normalize: bool,
    scale: float,
    capacity_factor: float | None,
    cotangent: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return a layer's output and, given its cotangent, the gradients by name.

    "terms of router_w" is the gradient of the router's weights without its signs.
    """
    z = x @ router_w
    t, e = z.shape
    s = np.exp(z - z.max(1, keepdims=True))
    s = s / s.sum(1, keepdims=True) if scores == "softmax" else 1 / (1 + np.exp(-z))
    chosen = np.argsort(-z, axis=1, kind="stable")[:, :top_k]
    is_chosen = np.zeros((t, e), bool)
    np.put_along_axis(is_chosen, chosen, True, 1)
    total = np.where(is_chosen, s, 0).sum(1, keepdims=True) if normalize else 1.0
    kept = _kept(chosen, e, capacity_factor)
    shares = np.where(kept, scale * s / total, 0)
    ct = np.zeros_like(x) if cotangent is None else cotangent
    output, by_share = np.zeros_like(x), np.zeros((t, e))
    grads = {name: np.zeros_like(w) for name, w in (
        ("x", x), ("gate_w", gate_w), ("up_w", up_w), ("down_w", down_w)
    )}  # fmt: skip
    for i in range(e):
        own = np.flatnonzero(kept[:, i])
        a, b = x[own] @ gate_w[i], x[own] @ up_w[i]
        gate = silu(a)
        y = (gate * b) @ down_w[i]
        share = shares[own, i][:, None]
        output[own] += share * y
        by_share[own, i] = (ct[own] * y).sum(1)
        by_y = share * ct[own]
        by_hidden = by_y @ down_w[i].T
        slope = 1 / (1 + np.exp(-a))
        by_a = by_hidden * b * (slope + gate * (1 - slope))
        by_b = by_hidden * gate
        grads["down_w"][i] = (gate * b).T @ by_y
        grads["gate_w"][i], grads["up_w"][i] = x[own].T @ by_a, x[own].T @ by_b
        grads["x"][own] += by_a @ gate_w[i].T + by_b @ up_w[i].T
    if cotangent is None:
        return {"output": output}

    def by_logits(by_share: np.ndarray, sign: int) -> np.ndarray:
        """Return the cotangent of the logits; with a sign of 1, terms are added."""
        by_s = scale * by_share / total
        if normalize:
            mean = (by_share * s).sum(1, keepdims=True) / total**2
            by_s = by_s + sign * np.where(is_chosen, scale * mean, 0)
        if scores == "softmax":
            return s * (by_s + sign * (by_s * s).sum(1, keepdims=True))
        return by_s * s * (1 - s)

    by_z = by_logits(by_share, -1)
    grads["x"] += by_z @ router_w.T
    grads["router_w"] = x.T @ by_z
    return {
        "output": output,
        **{f"gradient of {n}": g for n, g in grads.items()},
        "terms of router_w": np.abs(x).T @ by_logits(np.abs(by_share), 1),
    }


def _kept(chosen: np.ndarray, experts: int, factor: float | None) -> np.ndarray:
    """Return which tokens each expert takes: first choices go first, early tokens."""
    t, k = chosen.shape
    room = np.full(experts, t if factor is None else np.ceil(factor * k * t / experts))
    kept = np.zeros((t, experts), bool)
    for choice in range(k):
        for token in range(t):
            expert = chosen[token, choice]
            kept[token, expert] = room[expert] > 0
            room[expert] -= 1
    return kept
