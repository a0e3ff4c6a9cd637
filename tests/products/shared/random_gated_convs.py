# SPDX-License-Identifier: Apache-2.0
"""Random causal and gated convolutions, and residual branches that are scaled."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from jax_cudnn.config import Implementation
from tests.common.judged import Judged
from tests.common.random_draws import FLOATS, Draw, options_text
from tests.lowering.operation_problems import (
    Arrays,
    Problem,
    array_text,
    in_tf32,
    judged_by_xla,
    log_integer,
    with_gradients,
)

# Without kinks, since gradients are compared.
_SMOOTH: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    None: lambda x: x,
}
_NAMES: Sequence[str | None] = tuple(_SMOOTH)

# A call of arrays by name, by jax_cudnn, and in plain JAX with a contraction that
# keeps what "contract" is given.
_Ours = Callable[[Arrays, Implementation], jax.Array]
_Contract = Callable[..., jax.Array]
_Plain = Callable[[Arrays, Callable[[_Contract], _Contract]], jax.Array]
_Drawn = tuple[str, dict[str, Any], dict[str, Any], _Ours, _Plain]


def draw_conv(draw: Draw, *, gradients: bool, most: int) -> Problem:
    """Return a problem whose arrays have at most `most` elements each."""
    drawing = draw.one_of((_causal, _causal, _gated, _gated, _scaled_conv, _scaled))
    name, operands, options, ours, plain = drawing(draw, draw.one_of(FLOATS), most)
    floats = [name for name, x in operands.items() if x.dtype.kind != "i"]
    arrays = {name: np.asarray(x) for name, x in operands.items()}
    dtype = operands["x"].dtype
    output = jax.eval_shape(lambda x: ours(x, "xla"), arrays)
    if gradients:
        arrays["cotangent of output"] = np.asarray(
            draw.normal(output.shape, str(dtype))
        )

    def results(function: Any, arrays: Arrays) -> dict[str, jax.Array]:
        def named(arrays: Arrays) -> dict[str, jax.Array]:
            return {"output": function(arrays)}

        return with_gradients(named, arrays, floats) if gradients else named(arrays)

    def call(arrays: Arrays, implementation: Implementation) -> dict[str, jax.Array]:
        return results(lambda x: ours(x, implementation), arrays)

    def truth(arrays: Arrays) -> dict[str, Judged]:
        is_tf32 = dtype == np.float32
        keep = in_tf32 if is_tf32 else _as_it_is
        return judged_by_xla(
            lambda x: results(lambda x: plain(x, _as_it_is), x),
            lambda x: results(lambda x: plain(x, keep), x),
            arrays,
            is_tf32=is_tf32,
        )

    shown = ", ".join(array_text(name, x) for name, x in operands.items())
    told = options_text({**options, "gradients": gradients})
    text = f"{name}({shown}; {told})"
    return Problem(text=text, arrays=arrays, call=call, truth=truth)


def _as_it_is(contract: _Contract) -> _Contract:
    return contract


def _along(x: jax.Array, rank: int, axis: int) -> jax.Array:
    """Return a vector as an array of a rank, along an axis."""
    return jnp.reshape(x, tuple(-1 if i == axis else 1 for i in range(rank)))


# --- causal convolutions --------------------------------------------------------------


def _causal(draw: Draw, dtype: str, most: int) -> _Drawn:
    batch, taps = draw.integer(1, 3), draw.one_of((1, 2, 3, 4, 4, 4, 7, 16, 31))
    channels = log_integer(draw, 1, min(256, most // 4))
    steps = log_integer(draw, 1, max(1, most // (batch * channels)))
    is_last = draw.chance(0.6)
    options: dict[str, Any] = {
        "activation": draw.one_of((None, "silu", "silu")),
        "dimension_numbers": "NWC" if is_last else "NCW",
    }
    x = draw.normal((batch, steps, channels), dtype)
    w = draw.normal((taps, channels), dtype, taps**-0.5)
    operands = {"x": x, "w": w} if is_last else {"x": jnp.swapaxes(x, 1, 2), "w": w.T}
    if draw.chance(0.6):
        operands["bias"] = draw.normal((channels,), dtype)
    if draw.chance(0.25):
        ids = np.cumsum(draw.rng.random((batch, steps)) < 0.1, axis=1)
        operands["segment_ids"] = jnp.asarray(ids.astype(np.int32))

    def ours(arrays: Arrays, implementation: Implementation) -> jax.Array:
        names = ("bias", "segment_ids")
        given = {name: arrays[name] for name in names if name in arrays}
        return jax_cudnn.causal_conv1d(
            arrays["x"], arrays["w"], **given, **options, implementation=implementation
        )

    def plain(arrays: Arrays, keep: Callable[[_Contract], _Contract]) -> jax.Array:
        multiplied = keep(lambda x, w: x * w)
        x, w = arrays["x"], arrays["w"]
        x, w = (x, w) if is_last else (jnp.swapaxes(x, 1, 2), w.T)
        ids = arrays.get("segment_ids", jnp.zeros((batch, steps), jnp.int32))
        total = jnp.zeros(
            x.shape, jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        )
        for back in range(min(taps, steps)):
            moved = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :steps]
            before = jnp.pad(ids, ((0, 0), (back, 0)), constant_values=-1)[:, :steps]
            moved = jnp.where((before == ids)[..., None], moved, 0)
            wide = (each.astype(total.dtype) for each in (moved, w[taps - 1 - back]))
            moved, tap = wide
            total = total + multiplied(moved, jnp.broadcast_to(tap, moved.shape))
        if "bias" in arrays:
            total = total + arrays["bias"].astype(total.dtype)[None, None]
        y = _SMOOTH[options["activation"]](total).astype(x.dtype)
        return y if is_last else jnp.swapaxes(y, 1, 2)

    return "causal_conv1d", operands, options, ours, plain


# --- convolutions ---------------------------------------------------------------------


def _geometry(
    draw: Draw, most: int
) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Draw the shapes of images and filters, channels last, and options."""
    axes, groups = draw.one_of((1, 2, 2)), draw.one_of((1, 1, 1, 2))
    n = draw.integer(1, 3)
    c, o = (draw.one_of((1, 3, 4, 8, 16, 24, 32, 64)) for _ in range(2))
    while n * c * groups * 4**axes > most or o * c * groups * 9 > most:
        c, o = max(1, c // 2), max(1, o // 2)
    longest = max(4, int((most / (n * max(c, o) * groups)) ** (1 / axes)))
    window = [draw.integer(1, 3) for _ in range(axes)]
    sides = [draw.integer(4, min(longest, 24)) for _ in range(axes)]
    letters = "HW"[-axes:]
    options: dict[str, Any] = {
        "window_strides": tuple(draw.one_of((1, 1, 2)) for _ in range(axes)),
        "padding": tuple((draw.integer(0, 2), draw.integer(0, 2)) for _ in range(axes)),
        "rhs_dilation": (draw.one_of((1, 1, 1, 2)),) * axes,
        "dimension_numbers": (f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        "feature_group_count": groups,
    }
    options["padding"] = tuple((low + 1, high) for low, high in options["padding"])
    return (n, *sides, c * groups), (*window, c, o * groups), options


def _gated(draw: Draw, dtype: str, most: int) -> _Drawn:
    images, filters, options = _geometry(draw, most)
    size = float(np.prod(filters[:-1])) ** -0.5
    operands = {"x": draw.normal(images, dtype)}
    operands |= {name: draw.normal(filters, dtype, size) for name in ("gate", "up")}
    for name in ("gate_bias", "up_bias"):
        if draw.chance(0.5):
            operands[name] = draw.normal(filters[-1:], dtype)
    names = {name: draw.one_of(_NAMES) for name in ("activation", "up_activation")}

    def ours(arrays: Arrays, implementation: Implementation) -> jax.Array:
        given: dict[str, Any] = {"lhs" if k == "x" else k: arrays[k] for k in operands}
        return jax_cudnn.gated_conv(
            **given, **options, **names, implementation=implementation
        )

    def plain(arrays: Arrays, keep: Callable[[_Contract], _Contract]) -> jax.Array:
        run = keep(functools.partial(jax.lax.conv_general_dilated, **options))
        found = []
        for name, activation in zip(("gate", "up"), names.values(), strict=True):
            y = run(arrays["x"], arrays[name])
            if (bias := arrays.get(f"{name}_bias")) is not None:
                y = y + _along(bias, y.ndim, y.ndim - 1)
            found.append(_SMOOTH[activation](y))
        return found[0] * found[1]

    return "gated_conv", operands, {**options, **names}, ours, plain


# --- residual branches ----------------------------------------------------------------


def _branch(
    draw: Draw, dtype: str, shape: tuple[int, ...]
) -> tuple[dict[str, Any], str | None]:
    """Draw what follows a contraction with a result of that shape."""
    features = shape[-1:]
    per_image = (shape[0], *(1,) * (len(shape) - 1))
    scales = (features, per_image, (*per_image[:-1], *features), shape)
    operands = {"branch_scale": draw.normal(draw.one_of(scales), dtype)}
    if draw.chance(0.6):
        operands["bias"] = draw.normal(features, dtype)
    if draw.chance(0.8):
        operands["residual"] = draw.normal(shape, dtype)
    return operands, draw.one_of(_NAMES)


def _followed(y: jax.Array, arrays: Arrays, activation: str | None) -> jax.Array:
    def term(name: str) -> jax.Array:
        x = arrays[name]
        return _along(x, y.ndim, y.ndim - 1) if x.ndim == 1 else x

    y = y + term("bias") if "bias" in arrays else y
    y = y * term("branch_scale")
    y = y + term("residual") if "residual" in arrays else y
    return _SMOOTH[activation](y)


def _of_branch(
    name: str,
    sides: dict[str, jax.Array],
    more: dict[str, Any],
    activation: str | None,
    options: dict[str, Any],
    function: Callable[..., jax.Array],
    contract: _Contract,
) -> _Drawn:
    def ours(arrays: Arrays, implementation: Implementation) -> jax.Array:
        first, second = (arrays[side] for side in sides)
        given: dict[str, Any] = {name: arrays[name] for name in more}
        given |= {"activation": activation, "implementation": implementation}
        return function(first, second, **options, **given)

    def plain(arrays: Arrays, keep: Callable[[_Contract], _Contract]) -> jax.Array:
        y = keep(contract)(*(arrays[side] for side in sides))
        return _followed(y, arrays, activation)

    told = {**options, "activation": activation}
    return name, {**sides, **more}, told, ours, plain


def _scaled_conv(draw: Draw, dtype: str, most: int) -> _Drawn:
    images, filters, options = _geometry(draw, most)
    size = float(np.prod(filters[:-1])) ** -0.5
    sides = {"x": draw.normal(images, dtype), "w": draw.normal(filters, dtype, size)}
    contract = functools.partial(jax.lax.conv_general_dilated, **options)
    shape = jax.eval_shape(contract, *sides.values()).shape
    more, activation = _branch(draw, dtype, shape)
    return _of_branch(
        "conv, branch_scale", sides, more, activation, options, jax_cudnn.conv, contract
    )


def _scaled(draw: Draw, dtype: str, most: int) -> _Drawn:
    batch = draw.integer(1, 3)
    r, n = (log_integer(draw, 1, min(200, most // 4)) for _ in range(2))
    m = log_integer(draw, 1, max(1, most // (batch * max(r, n))))
    sides = {
        "x": draw.normal((batch, m, r), dtype),
        "w": draw.normal((r, n), dtype, r**-0.5),
    }
    more, activation = _branch(draw, dtype, (batch, m, n))
    return _of_branch(
        *("matmul, branch_scale", sides, more, activation, {}),
        jax_cudnn.matmul,
        jnp.matmul,
    )
