# SPDX-License-Identifier: Apache-2.0
"""Random convolutions with an epilogue: layouts, windows, groups, dtypes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_cudnn
from jax_cudnn.config import Implementation
from tests.common.random_draws import (
    FEWEST,
    FLOATS,
    MOST_PRODUCTS,
    Draw,
    activation_argument,
    operands_text,
    options_text,
)
from tests.products.shared.fusion_problems import F8, Operand, Problem

_CHANNELS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24, 32, 33, 48, 64, 65, 96, 100, 128)
_MANY_CHANNELS = (160, 192, 255, 256, 257, 320, 384, 511, 512)
# Layouts by number of spatial axes: channels last first.
_LAYOUTS = {
    1: (
        ("NWC", "WIO", "NWC"),
        ("NCW", "OIW", "NCW"),
        ("NWC", "OWI", "NWC"),
    ),
    2: (
        ("NHWC", "HWIO", "NHWC"),
        ("NCHW", "OIHW", "NCHW"),
        ("NHWC", "OHWI", "NHWC"),
        ("NCHW", "HWIO", "NHWC"),
        ("NHWC", "OIHW", "NCHW"),
        ("HWNC", "HWOI", "HWNC"),
        ("CHWN", "IHWO", "CHWN"),
        ("NWHC", "WHIO", "NWHC"),
    ),
    3: (
        ("NDHWC", "DHWIO", "NDHWC"),
        ("NCDHW", "OIDHW", "NCDHW"),
        ("NDHWC", "ODHWI", "NDHWC"),
    ),
}
_LARGEST_IMAGE = {1: 150, 2: 22, 3: 9}


def _stored(spec: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[letter] for letter in spec)


def conv_problem(
    seed: int,
    name: str,
    *,
    spatial: int | None = None,
    grouping: str = "none",
    stretch: bool = False,
    transposed: bool = False,
    any_layout: bool = False,
    dtypes: Sequence[str] = FLOATS,
    with_gradients: bool = False,
) -> Problem:
    """Draw a convolution.

    `grouping` is "none", "feature", "depthwise" or "batch"; `stretch` has strides and
    holes in w; `transposed` has zeros between the elements of x.
    """
    draw = Draw(seed, name)
    dtype = draw.one_of(dtypes)
    while True:
        rank = spatial or draw.one_of((1, 2, 2, 2, 3))
        letters = "DHW"[3 - rank :]
        limit = _LARGEST_IMAGE[rank]
        image = [draw.integer(max(2, limit // 4), limit) for _ in range(rank)]
        largest_filter = 7 if rank < 3 else 4
        window = [
            min(draw.one_of((1, 2, 3, 3, 3, 4, 5, 6, 7)), largest_filter) for _ in image
        ]
        strides = [draw.one_of((1, 1, 2, 3)) if stretch else 1 for _ in image]
        if not stretch and draw.chance(0.3):
            strides = [2 for _ in image]
        holes = [draw.one_of((1, 2, 3)) if stretch else 1 for _ in image]
        spread = [draw.one_of((1, 2, 2, 3)) if transposed else 1 for _ in image]
        if transposed and draw.chance(0.7):
            strides = [1 for _ in image]
        padding: Any = draw.one_of(("SAME", "SAME", "SAME_LOWER", "VALID", "pairs"))
        if padding == "pairs" or transposed:
            reach = [(f - 1) * hole for f, hole in zip(window, holes, strict=True)]
            padding = [(draw.integer(0, most), draw.integer(0, most)) for most in reach]
            if draw.chance(0.25):
                padding[0] = (-1, padding[0][1] + 1)
        n = draw.integer(1, 5)
        c, o = (
            draw.one_of(_CHANNELS if draw.chance(0.8) else _MANY_CHANNELS)
            for _ in range(2)
        )
        groups = batch_groups = 1
        if grouping == "feature":
            groups = draw.one_of((2, 3, 4, 8, 16, 32))
            c, o = (groups * draw.one_of((1, 2, 3, 4, 8, 16)) for _ in range(2))
        elif grouping == "depthwise":
            groups = c
            o = c * draw.one_of((1, 1, 1, 2, 3))
        elif grouping == "batch":
            batch_groups = draw.one_of((2, 3))
            n, o = n * batch_groups, batch_groups * draw.one_of((4, 7, 16, 24))
        numbers = _LAYOUTS[rank][0]
        if any_layout or draw.chance(0.1):
            numbers = draw.one_of(_LAYOUTS[rank])
        x_shape = _stored(
            numbers[0], {"N": n, "C": c, **dict(zip(letters, image, strict=True))}
        )
        w_shape = _stored(
            numbers[1],
            {"O": o, "I": c // groups, **dict(zip(letters, window, strict=True))},
        )
        options: dict[str, Any] = {
            "window_strides": tuple(strides),
            "padding": padding if isinstance(padding, str) else tuple(padding),
            "lhs_dilation": tuple(spread),
            "rhs_dilation": tuple(holes),
            "dimension_numbers": numbers,
            "feature_group_count": groups,
            "batch_group_count": batch_groups,
        }
        try:
            shape = jax.eval_shape(
                lambda x, w, options=options: lax.conv_general_dilated(x, w, **options),
                jax.ShapeDtypeStruct(x_shape, jnp.float32),
                jax.ShapeDtypeStruct(w_shape, jnp.float32),
            ).shape
        except ValueError:  # the window is larger than the image
            continue
        reach = math.prod(window) * c // groups
        sizes = [math.prod(each) for each in (x_shape, w_shape, shape)]
        is_sized = min(sizes) >= FEWEST and max(sizes) <= 2**22
        if is_sized and sizes[2] * reach <= MOST_PRODUCTS:
            break
    channel = numbers[2].index("C")
    vector = tuple(o if axis == channel else 1 for axis in range(rank + 2))
    f8 = dtype in F8
    preferred = None
    if draw.chance(0.12):
        preferred = draw.one_of(("float32", dtype))
    if dtype == "int8" or f8:
        preferred = draw.one_of(("bfloat16", "float32"))
    out_dtype = preferred or dtype
    epilogue = "bfloat16" if dtype == "int8" or f8 else dtype
    if dtype == "int8":
        x = jnp.asarray(np.asarray(draw.rng.integers(-127, 128, x_shape), jnp.int8))
        w = jnp.asarray(np.asarray(draw.rng.integers(-127, 128, w_shape), jnp.int8))
        scale_size = 1 / (73 * 73 * math.sqrt(reach))
    else:
        x = draw.normal(x_shape, dtype)
        w = draw.normal(w_shape, dtype, 1.0 if f8 else 1 / math.sqrt(reach))
        scale_size = 1 / math.sqrt(reach) if f8 else 1.0
    operands = {
        "lhs": Operand(array=x, aligned=x_shape, full=x_shape),
        "rhs": Operand(array=w, aligned=w_shape, full=w_shape),
    }
    terms: list[str] = []
    if draw.chance(0.7):
        like = draw.one_of((epilogue, epilogue, "float32"))
        bias = draw.normal((o,), like)
        operands["bias"] = Operand(array=bias, aligned=vector, full=shape)
        terms.append("bias")
    if draw.chance(0.35):
        own = tuple(1 if draw.chance(0.1) else size for size in shape)
        residual = draw.normal(own, draw.one_of((epilogue, epilogue, "float32")))
        operands["residual"] = Operand(array=residual, aligned=own, full=shape)
        terms.append("residual")
    numbers_given: dict[str, float] = {}
    between: tuple[str, ...] = ()
    if draw.chance(0.35) or dtype == "int8" or f8:
        between = ("scale",)
        kind = draw.one_of(("number", "scalar", "vector"))
        if kind == "number":
            numbers_given["scale"] = float(np.float32(1.25 * scale_size))
        else:
            own = () if kind == "scalar" else (o,)
            aligned = vector if own else (1,) * len(shape)
            factors = draw.factors(own, draw.one_of((epilogue, "float32")), scale_size)
            operands["scale"] = Operand(array=factors, aligned=aligned, full=shape)
    activation = draw.activation()
    if terms and draw.chance(0.2):  # last, so that all else is as it was
        images = tuple(
            size if letter == "N" else 1
            for letter, size in zip(numbers[2], shape, strict=True)
        )
        own = draw.one_of(((), (o,), images))
        aligned = {(): (1,) * len(shape), (o,): vector, images: images}[own]
        factors = draw.factors(own, draw.one_of((epilogue, "float32")), 1.0)
        operands["branch_scale"] = Operand(array=factors, aligned=aligned, full=shape)
        terms.insert(int(terms[0] == "bias"), "branch_scale")

    def call(
        implementation: Implementation, arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        return jax_cudnn.conv(
            **arrays,  # type: ignore[arg-type]
            **numbers_given,  # type: ignore[arg-type]
            **options,
            activation=activation_argument(activation),
            preferred_element_type=None if preferred is None else jnp.dtype(preferred),
            implementation=implementation,
        )

    extra = {**options, **numbers_given, "activation": activation, "out": out_dtype}
    return Problem(
        text=f"conv({operands_text(operands)}; {options_text(extra)})",
        call=call,
        operands=operands,
        contract=lambda x, w: lax.conv_general_dilated(x, w, **options),
        sides=("lhs", "rhs"),
        between=between,
        terms=tuple(terms),
        numbers=numbers_given,
        activation=activation,
        wide=None if dtype == "int8" or f8 else dtype,
        out_dtype=out_dtype,
        with_gradients=with_gradients,
        cotangent=draw.normal(shape, out_dtype) if with_gradients else None,
    )
