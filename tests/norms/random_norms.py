# SPDX-License-Identifier: Apache-2.0
"""Random norms of every kind: axes, groups, dtypes, residuals, statistics, f8.

The answers are those of tests/norms/problems.py, in float64. The bounds follow what is
rounded: sums in f32, each result, the sum with the residual and, in a norm of groups,
what cuDNN hands to XLA, which applies scale and bias (docs/norms.md).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from jax_cudnn import f8
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
from tests.norms import problems as norms
from tests.norms.calls import Call

_KINDS = (
    *("layer_norm", "layer_norm", "rms_norm", "rms_norm", "adaptive_layer_norm"),
    *("group_norm", "group_norm", "instance_norm", "batch_norm", "batch_norm"),
)


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """A norm with the dtypes of its results."""

    call: Call
    epsilon: float
    dtype: str
    sum_dtype: str
    output_scale: float = 0.0
    with_statistics: bool = False

    @property
    def split(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shape, normalised axes and axes of the factors, with groups as an axis."""
        shape, axes, along = self.call.shape, self.call.normalised, self.call.along
        if not (groups := self.call.groups):
            return shape, axes, along
        (channel,) = along
        own = (groups, shape[channel] // groups)
        moved = tuple(axis + (axis > channel) for axis in axes)
        shape = (*shape[:channel], *own, *shape[channel + 1 :])
        return shape, (*moved, channel + 1), (channel, channel + 1)


# --- what is drawn --------------------------------------------------------------------


def draw_norm(draw: Draw, *, gradients: bool, most: int) -> Problem:
    """Return a norm of at most `most` elements."""
    kind = draw.one_of(_KINDS)
    call, arguments = _CALLS[kind](draw, most)
    is_f8 = kind in ("layer_norm", "rms_norm") and not gradients and draw.chance(0.3)
    dtype = draw.one_of(FLOATS)
    offset, size = draw.one_of(((0, 1), (0, 1), (3, 1), (-20, 2), (0, 0.1), (0.5, 30)))
    operands: dict[str, Any] = {"x": _moved(draw, call.shape, dtype, offset, size)}
    like = draw.one_of((dtype, dtype, "float32"))
    for name, chance in (("scale", 0.8), ("bias", 0.7)):
        if draw.chance(chance):
            own = like if draw.chance(0.9) else draw.one_of((dtype, "float32"))
            operands[name] = draw.normal(call.factor_shape, own)
    norm = _Norm(
        call=call,
        epsilon=draw.one_of((1e-3, 1e-3, 1e-5, 1e-6, 0.1)),
        dtype=dtype,
        sum_dtype=dtype,
    )
    options: dict[str, Any] = {"epsilon": norm.epsilon}
    shown = dict(arguments)
    if is_f8:
        result = draw.one_of(("float8_e4m3fn", "float8_e5m2"))
        scale = draw.one_of((2.0**-5, 0.3, 1e-3))
        norm = replace(norm, dtype=result, output_scale=scale)
        function = functools.partial(getattr(f8, kind), **arguments)
        norm = replace(norm, call=replace(call, function=function))
        options |= {"output_scale": scale, "preferred_element_type": jnp.dtype(result)}
        shown |= {"output_scale": scale, "out": result}
    else:
        if draw.chance(0.25):
            other = dtype if draw.chance(0.8) else draw.one_of(FLOATS)
            operands["residual"] = draw.normal(call.shape, other, size)
            norm = replace(norm, sum_dtype=dtype if other == dtype else "float32")
        if draw.chance(0.15):
            result = draw.one_of(
                ("float32", dtype if dtype != "float32" else FLOATS[0])
            )
            norm = replace(norm, dtype=result)
            options["preferred_element_type"] = jnp.dtype(result)
            shown["out"] = result
        if draw.chance(0.4):
            norm = replace(norm, with_statistics=True)
            options["return_statistics"] = shown["return_statistics"] = True
    arrays = {name: np.array(x) for name, x in operands.items()}
    run = functools.partial(_run, norm, options)
    if gradients:
        results = jax.eval_shape(functools.partial(run, implementation="xla"), operands)
        for name, like in results.items():
            cotangent = draw.normal(like.shape, like.dtype.name)
            arrays[f"cotangent of {name}"] = np.array(cotangent)
    shown |= {"epsilon": norm.epsilon, "mean": offset, "size": size}
    shown["gradients"] = gradients
    told = ", ".join(array_text(name, x) for name, x in operands.items())

    def compute(arrays: Arrays, implementation: Implementation) -> dict[str, jax.Array]:
        function = functools.partial(run, implementation=implementation)
        if not gradients:
            return function(arrays)
        return with_gradients(function, arrays, list(operands))

    return Problem(
        text=f"{'f8.' * is_f8}{kind}({told}; {options_text(shown)})",
        arrays=arrays,
        call=compute,
        truth=functools.partial(_truth, norm),
    )


def _run(
    norm: _Norm,
    options: dict[str, Any],
    arrays: Arrays,
    implementation: Implementation,
) -> dict[str, jax.Array]:
    more = {"residual": arrays["residual"]} if "residual" in arrays else {}
    results = norm.call.run(
        arrays["x"],
        arrays.get("scale"),
        arrays.get("bias"),
        implementation=implementation,
        **more,
        **options,
    )
    names = ["output", *(["sum"] if more else [])]
    if norm.with_statistics:
        names += ["mean", "rstd"] if norm.call.is_centred else ["rstd"]
    everything = results if len(names) > 1 else (results,)
    return dict(zip(names, everything, strict=True))


def _moved(draw: Draw, shape: Any, dtype: str, offset: float, size: float) -> jax.Array:
    values = draw.rng.standard_normal(shape, np.float32) * size + offset
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


def _shape(draw: Draw, rank: int, most: int) -> list[int]:
    """Draw sizes; the last is often one that kernels like."""
    shape = [log_integer(draw, 1, 64) for _ in range(rank - 1)]
    nice = (8, 64, 128, 256, 768, 1024, 4096)
    shape.append(draw.one_of(nice) if draw.chance(0.4) else log_integer(draw, 1, 5000))
    while int(np.prod(shape)) > most:
        largest = int(np.argmax(shape))
        shape[largest] = -(-shape[largest] // 2)
    return shape


Drawn = tuple[Call, dict[str, Any]]


def _rows(name: str, draw: Draw, most: int) -> Drawn:
    """Draw a layer or RMS norm over the last axis, or over any."""
    shape = tuple(_shape(draw, draw.integer(1, 4), most))
    rank = len(shape)
    axes = (rank - 1,)
    if draw.chance(0.3):
        count = draw.integer(1, rank)
        axes = tuple(int(i) for i in draw.rng.permutation(rank)[:count])
    options = {} if axes == (rank - 1,) else {"axis": axes}
    function = functools.partial(getattr(jax_cudnn, name), **options)
    kept = tuple(sorted(axes))
    is_centred = name == "layer_norm"
    return Call(function, shape, kept, kept, is_centred=is_centred), options


def _adaptive(draw: Draw, most: int) -> Drawn:
    shape = tuple(_shape(draw, draw.integer(2, 4), most))
    last = len(shape) - 1
    return Call(jax_cudnn.adaptive_layer_norm, shape, (last,), (0, last)), {}


def _groups(draw: Draw, most: int) -> Drawn:
    """Draw a norm of groups of channels."""
    shape, channel, options = _image(draw, most)
    channels = shape[channel]
    divisors = [i for i in range(1, channels + 1) if channels % i == 0]
    groups = options["groups"] = draw.one_of(divisors)
    images = options.get("batch_axes", (0,))
    space = tuple(i for i in range(len(shape)) if i != channel and i not in images)
    function = functools.partial(jax_cudnn.group_norm, **options)
    return Call(function, shape, space, (channel,), groups), options


def _instances(draw: Draw, most: int) -> Drawn:
    shape, channel, options = _image(draw, most)
    images = options.get("batch_axes", (0,))
    space = tuple(i for i in range(len(shape)) if i != channel and i not in images)
    function = functools.partial(jax_cudnn.instance_norm, **options)
    return Call(function, shape, space, (channel,)), options


def _image(draw: Draw, most: int) -> tuple[tuple[int, ...], int, dict[str, Any]]:
    """Draw the shape of images, which axis the channels are, and options."""
    rank = draw.integer(2, 5)
    images = 2 if rank > 3 and draw.chance(0.2) else 1
    options: dict[str, Any] = {"batch_axes": (0, 1)} if images == 2 else {}
    shape = [log_integer(draw, 1, 40) for _ in range(rank)]
    channel = rank - 1 if draw.chance(0.5) else draw.integer(images, rank - 1)
    shape[channel] = draw.one_of((1, 6, 8, 12, 30, 32, 33, 64, 96, 128))
    while int(np.prod(shape)) > most:
        others = [size if i != channel else 0 for i, size in enumerate(shape)]
        largest = int(np.argmax(others))
        if others[largest] < 2:
            largest = channel
        shape[largest] = -(-shape[largest] // 2)
    if channel != rank - 1:
        options["channel_axis"] = channel
    return tuple(shape), channel, options


def _batch(draw: Draw, most: int) -> Drawn:
    rank = draw.integer(2, 4)
    shape = [log_integer(draw, 2, 200), *_shape(draw, rank - 1, max(most // 200, 8))]
    channel = rank - 1 if draw.chance(0.7) else draw.integer(0, rank - 1)
    options = {} if channel == rank - 1 else {"channel_axis": channel}
    function = functools.partial(jax_cudnn.batch_norm, **options)
    rows = tuple(i for i in range(rank) if i != channel)
    return Call(function, tuple(shape), rows, (channel,)), options


_CALLS: dict[str, Callable[[Draw, int], Drawn]] = {
    "layer_norm": functools.partial(_rows, "layer_norm"),
    "rms_norm": functools.partial(_rows, "rms_norm"),
    "adaptive_layer_norm": _adaptive,
    "group_norm": _groups,
    "instance_norm": _instances,
    "batch_norm": _batch,
}


# --- what is right --------------------------------------------------------------------


def _truth(norm: _Norm, arrays: Arrays) -> dict[str, Judged]:
    """Return results and gradients, where there are cotangents, with their bounds."""
    call = norm.call
    total = double(arrays["x"])
    if "residual" in arrays:
        total = total + double(arrays["residual"])
    factors = [double(arrays[x]) if x in arrays else None for x in ("scale", "bias")]
    wanted = call.truth(total, *factors, epsilon=norm.epsilon)
    slack = _Slack(norm, arrays, total)
    judged = {"output": Judged(wanted["output"], slack.output(wanted["output"]))}
    if norm.output_scale:
        return {"output": _in_f8(norm, judged["output"])}
    if "residual" in arrays:
        judged["sum"] = Judged(total, unit(norm.sum_dtype) * np.abs(total))
    for name, bound in (("mean", slack.mean), ("rstd", slack.of_rstd * slack.rstd)):
        if norm.with_statistics and name in wanted:
            own = np.broadcast_to(np.squeeze(bound, slack.axes), wanted[name].shape)
            judged[name] = Judged(wanted[name], own)
    if "cotangent of output" not in arrays:
        return judged
    return judged | slack.gradients()


def _in_f8(norm: _Norm, exact: Judged) -> Judged:
    """Return what the output is in f8: divided, saturated and rounded once."""
    info = jnp.finfo(norm.dtype)
    most = float(info.max)
    scaled = np.clip(exact.value / norm.output_scale, -most, most)
    # What f32 computes may lie beyond the middle between two numbers.
    bound = 1.01 * unit(norm.dtype) * np.abs(scaled) + exact.bound / norm.output_scale
    return Judged(scaled, bound + 0.51 * float(info.smallest_subnormal))


class _Slack:
    """How far a kernel's norm may be from the exact one, with groups as an axis."""

    def __init__(self, norm: _Norm, arrays: Arrays, total: np.ndarray) -> None:
        self.norm, self.arrays = norm, arrays
        self.shape, self.axes, self.along = norm.split
        self.x = x = total.reshape(self.shape)
        self.is_centred = norm.call.is_centred
        found = norms.truth(
            x, axes=self.axes, epsilon=norm.epsilon, is_centred=self.is_centred
        )
        self.normed, self.rstd = found["output"], found["rstd"]
        # What XLA adds to the norm may be read before it is rounded, or after.
        blur = unit(norm.sum_dtype) * np.abs(x) if "residual" in arrays else 0 * x
        size = np.abs(x) + np.abs(found.get("mean", np.zeros(())))
        loose = SUMS * size + blur + self._mean(blur)
        self.mean = SUMS * self._mean(size) + self._mean(blur)
        # Relative to rstd, and absolute of the normalised elements.
        self.of_rstd = 2 * SUMS + self.rstd * self._mean(np.abs(self.normed) * loose)
        self.of_normed = self.rstd * loose + np.abs(self.normed) * self.of_rstd
        # Between a norm of groups and its scale, the result has the dtype of x.
        self.between = 0.0
        if norm.call.groups:
            self.between = max(unit(norm.sum_dtype), unit(norm.dtype))

    def _mean(self, x: np.ndarray) -> np.ndarray:
        return x.mean(axis=self.axes, keepdims=True)

    def _factor(self, name: str, default: float) -> np.ndarray:
        """Return scale or bias with all axes of x."""
        if name not in self.arrays:
            return np.full((1,) * len(self.shape), default)
        own = [size if i in self.along else 1 for i, size in enumerate(self.shape)]
        return double(self.arrays[name]).reshape(own)

    def output(self, value: np.ndarray) -> np.ndarray:
        """Return the bound of the output."""
        scale, bias = np.abs(self._factor("scale", 1)), np.abs(self._factor("bias", 0))
        size = np.abs(self.normed) * scale
        bound = self.of_normed * scale + SUMS * (size + bias) + self.between * size
        rounded = 0.0 if self.norm.output_scale else unit(self.norm.dtype)
        return bound.reshape(value.shape) + rounded * np.abs(value)

    def _cotangent(self, name: str) -> np.ndarray:
        """Return the cotangent of a statistic, with axes of 1; 0 if there is none."""
        if (given := self.arrays.get(f"cotangent of {name}")) is None:
            return np.zeros_like(self.rstd)
        return double(given).reshape(self.rstd.shape)

    def gradients(self) -> dict[str, Judged]:
        """Return the gradients of all operands."""
        arrays, mean = self.arrays, self._mean
        dy = double(arrays["cotangent of output"]).reshape(self.shape)
        scale = self._factor("scale", 1)
        exact = functools.partial(
            norms.gradients,
            self.x,
            dy,
            scale,
            axes=self.axes,
            along=self.along,
            epsilon=self.norm.epsilon,
            is_centred=self.is_centred,
        )
        statistics = [self._cotangent(name) for name in ("mean", "rstd")]
        found = exact(grad_mean=statistics[0], grad_rstd=statistics[1])
        alone = exact()["x"]
        g, normed = np.abs(dy * scale), np.abs(self.normed)
        blur = (SUMS + self.between) * g
        product = np.abs(mean(dy * scale * self.normed))
        parts = self.rstd * (g + mean(g) + normed * product)
        bound = self.rstd * (blur + mean(blur) + self.of_normed * product)
        bound += self.rstd * normed * mean(g * self.of_normed + blur * normed)
        bound += (self.of_rstd + SUMS) * parts
        count = self.x.size // self.rstd.size
        terms = np.abs(statistics[1]) * self.rstd**2
        bound += SUMS * np.abs(statistics[0]) / count
        bound += terms * (self.of_normed + normed * (2 * self.of_rstd + SUMS)) / count
        # The kernel's result, and each sum with another term.
        of_sum = unit(self.norm.sum_dtype)
        value, bound = found["x"], bound + of_sum * np.abs(alone)
        value = value.reshape(self.norm.call.shape)
        bound = bound.reshape(value.shape) + of_sum * np.abs(value)
        if "residual" in arrays:
            value = value + double(arrays["cotangent of sum"])
            bound = bound + of_sum * np.abs(value)
        judged: dict[str, Judged] = {}
        for name in ("x", "residual"):
            if name in arrays:
                own = bound + unit(arrays[name].dtype) * np.abs(value)
                judged[f"gradient of {name}"] = Judged(value, own)
        others = tuple(i for i in range(dy.ndim) if i not in self.along)
        size, off = np.abs(dy), (SUMS + self.between) * np.abs(dy)
        loose = {"scale": size * self.of_normed + off * normed, "bias": off}
        for name in ("scale", "bias"):
            if name in arrays:
                value = found[name].reshape(arrays[name].shape)
                own = loose[name].sum(axis=others).reshape(value.shape)
                own = own + unit(arrays[name].dtype) * np.abs(value)
                judged[f"gradient of {name}"] = Judged(value, own)
        return judged
