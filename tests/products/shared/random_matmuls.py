# SPDX-License-Identifier: Apache-2.0
"""Random matmuls and dot_generals with an epilogue: sizes, batches, layouts, dtypes."""

import math
from collections.abc import Mapping

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

_ALIGNED = (8, 16, 32, 64, 96, 128, 256, 384)
_UNALIGNED = (1, 3, 5, 7, 13, 17, 31, 33, 63, 65, 100, 127, 129, 200, 255, 257)
_LARGE = (512, 768, 1000, 1024, 1025, 2048, 3001, 4096)


def _matrix_sizes(draw: Draw, sizes: str, deepest: int) -> tuple[int, int, int]:
    """Draw rows, columns and the length of the sums."""
    while True:
        pool = {
            "aligned": _ALIGNED,
            "unaligned": _UNALIGNED,
            "mixed": (*_ALIGNED, *_UNALIGNED),
            "large": (*_ALIGNED, *_LARGE, *_LARGE),
        }[sizes]
        m, n, r = (draw.one_of(pool) for _ in range(3))
        is_sized = min(m * n, m * r, r * n) >= FEWEST
        if is_sized and r <= deepest and m * n * r <= 2 * MOST_PRODUCTS:
            return m, n, r


def matmul_problem(
    seed: int,
    name: str,
    *,
    sizes: str = "mixed",
    batched: bool = False,
    kind: str = "float",
    with_gradients: bool = False,
) -> Problem:
    """Draw a matmul; `kind` is "float", "weight_only", "int8" or "f8"."""
    draw = Draw(seed, name)
    # Sums of 1000 products of i8 are exact in f32; those of f8 are kept in few bits.
    m, n, r = _matrix_sizes(draw, sizes, {"int8": 1000, "f8": 384}.get(kind, 4096))
    batch = (draw.one_of((2, 3, 5)),) if batched else ()
    if batched and draw.chance(0.3):
        batch = (2, 3)
    if batched and batch and m * n * r * math.prod(batch) > MOST_PRODUCTS:
        m, n, r = 65, 48, 96
    lead = [
        tuple(1 if draw.chance(0.2) else size for size in batch),
        batch if draw.chance(0.6) else (),
    ]
    if draw.chance(0.3):
        lead.reverse()
    a_shape, b_shape = (*lead[0], m, r), (*lead[1], r, n)
    dtypes, result = _matmul_dtypes(draw, kind)
    # What a scale is multiplied with, so that sums have size 1 after it.
    sizes_of = {"int8": 1 / 73, "uint8": 1 / 9}
    shape = (*np.broadcast_shapes(*lead), m, n)
    operands: dict[str, Operand] = {}
    numbers: dict[str, float] = {}
    before: dict[str, str] = {}
    varies = False
    has_eight = [dtype in (*sizes_of, *F8) for dtype in dtypes]
    wide = next((dtype for dtype in dtypes if dtype not in (*sizes_of, *F8)), None)
    for i, (side, own, dtype) in enumerate(
        zip("ab", (a_shape, b_shape), dtypes, strict=True)
    ):
        target = sizes_of.get(dtype, 1.0) / (math.sqrt(r) if side == "b" else 1.0)
        is_scaled = draw.chance(0.75) if has_eight[i] else draw.chance(0.1)
        is_scaled |= dtype in sizes_of and result != "int32"
        is_scaled &= result != "int32"
        if dtype in sizes_of:
            low, high = (-127, 128) if dtype == "int8" else (0, 16)
            array = jnp.asarray(
                np.asarray(draw.rng.integers(low, high, own), jnp.dtype(dtype))
            )
        else:
            size = 1.0 if is_scaled or dtype in F8 else target
            array = draw.normal(own, dtype, size)
        operands[side] = Operand(array=array, aligned=own, full=own)
        if not is_scaled:
            continue
        before[side] = f"scale_{side}"
        form = draw.one_of(("number", "scalar", "outer", "outer", "sum", "all"))
        if form == "number":
            numbers[f"scale_{side}"] = float(np.float32(target))
            continue
        rows = form in (("outer", "all") if side == "a" else ("sum", "all"))
        columns = form in (("sum", "all") if side == "a" else ("outer", "all"))
        varies |= form in ("sum", "all")
        given: tuple[int, ...] = (own[-2] if rows else 1, own[-1] if columns else 1)
        if form == "scalar":
            given = ()
        elif side == "b" and form == "outer" and draw.chance(0.5):
            given = (n,)
        aligned = (1,) * (len(own) - len(given)) + given
        # f32, or the dtype of the wide operand if there is one.
        like = draw.one_of(("float32", wide or "float32"))
        array = draw.factors(given, like, target)
        operands[f"scale_{side}"] = Operand(array=array, aligned=aligned, full=own)
    wide = next(
        (d for d, eight in zip(dtypes, has_eight, strict=True) if not eight), None
    )
    if wide is None and varies:
        wide = "float32"
    epilogue = "bfloat16" if all(has_eight) else (wide or "float32")
    is_bare = result == "int32"
    terms: list[str] = []
    for term, chance in (("bias", 0.6), ("residual", 0.35)):
        if is_bare or not draw.chance(chance):
            continue
        given = (n,) if term == "bias" and draw.chance(0.7) else shape
        like = draw.one_of((epilogue, epilogue, "float32"))
        operands[term] = Operand(
            array=draw.normal(given, like),
            aligned=(1,) * (len(shape) - len(given)) + given,
            full=shape,
        )
        terms.append(term)
    last: tuple[str, ...] = ()
    if not is_bare and (draw.chance(0.15) or result in F8):
        last = ("scale_out",)
        if draw.chance(0.5):
            numbers["scale_out"] = 0.75
        else:
            operands["scale_out"] = Operand(
                array=draw.factors((), "float32", 1.0),
                aligned=(1,) * len(shape),
                full=shape,
            )
    activation = None if is_bare else draw.activation()
    preferred = result
    if result is None and draw.chance(0.12):
        preferred = "float32"
    out_dtype = preferred or wide
    if out_dtype is None:
        out_dtype = preferred = "bfloat16"
    with_gradients &= out_dtype not in (*F8, "int32")
    if terms and draw.chance(0.2):  # last, so that all else is as it was
        own = draw.one_of(((), (n,), (*shape[:-1], 1)))
        operands["branch_scale"] = Operand(
            array=draw.factors(own, draw.one_of((epilogue, "float32")), 1.0),
            aligned=(1,) * (len(shape) - len(own)) + own,
            full=shape,
        )
        terms.insert(int(terms[0] == "bias"), "branch_scale")

    def call(
        implementation: Implementation, arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        return jax_cudnn.matmul(
            **arrays,  # type: ignore[arg-type]
            **numbers,  # type: ignore[arg-type]
            activation=activation_argument(activation),
            preferred_element_type=None if preferred is None else jnp.dtype(preferred),
            implementation=implementation,
        )

    extra = {**numbers, "activation": activation, "out": out_dtype}
    return Problem(
        text=f"matmul({operands_text(operands)}; {options_text(extra)})",
        call=call,
        operands=operands,
        contract=jnp.matmul,
        sides=("a", "b"),
        before=before,
        terms=tuple(terms),
        last=last,
        numbers=numbers,
        activation=activation,
        wide=wide,
        out_dtype=out_dtype,
        with_gradients=with_gradients,
        cotangent=draw.normal(shape, out_dtype) if with_gradients else None,
    )


def _matmul_dtypes(draw: Draw, kind: str) -> tuple[tuple[str, str], str | None]:
    """Draw the operands' dtypes, and the result's where it has to be given."""
    if kind == "float":
        dtype = draw.one_of(FLOATS)
        return (dtype, dtype), None
    if kind == "weight_only":
        wide = draw.one_of(("bfloat16", "bfloat16", "float16", "float32"))
        narrow = draw.one_of(("int8", "int8", "uint8", *F8))
        return ((wide, narrow) if draw.chance(0.75) else (narrow, wide)), None
    if kind == "int8":
        dtype = draw.one_of(("int8", "int8", "int8", "uint8"))
        result = draw.one_of(("int32", "bfloat16", "bfloat16", "float16", "float32"))
        return (dtype, dtype), result
    pairs = (F8[:1] * 2, F8[:1] * 2, F8, F8[::-1])
    results = ("bfloat16", "bfloat16", "float16", "float32", *F8)
    return draw.one_of(pairs), draw.one_of(results)


def dot_general_problem(
    seed: int, name: str, *, with_gradients: bool = False
) -> Problem:
    """Draw a dot_general whose operands have their axes in any order."""
    draw = Draw(seed, name)
    dtype = draw.one_of(FLOATS)
    while True:
        is_matrix = draw.chance(0.5)
        counts = (
            (0 if is_matrix else draw.integer(0, 2)),
            (1 if is_matrix else draw.integer(1, 2)),
        )
        pool = (*_ALIGNED, *_UNALIGNED) if is_matrix else (2, 3, 5, 7, 8, 16, 24, 33)
        shared = [draw.one_of(pool) for _ in range(sum(counts))]
        free = [
            [draw.one_of(pool) for _ in range(1 if is_matrix else draw.integer(1, 2))]
            for _ in range(2)
        ]
        r = math.prod(shared[counts[0] :])
        outer = math.prod(shared[: counts[0]])
        m, n = map(math.prod, free)
        is_sized = min(outer * m * r, outer * n * r, outer * m * n) >= FEWEST
        if is_sized and outer * m * n * r <= MOST_PRODUCTS and r <= 4096:
            break
    shapes: list[tuple[int, ...]] = []
    sums: list[tuple[int, ...]] = []
    batches: list[tuple[int, ...]] = []
    for each in free:
        names = list(range(len(shared) + len(each)))
        if draw.chance(0.8):
            names = [int(i) for i in draw.rng.permutation(len(names))]
        full = [*shared, *each]
        shapes.append(tuple(full[i] for i in names))
        batches.append(tuple(names.index(i) for i in range(counts[0])))
        sums.append(tuple(names.index(i) for i in range(counts[0], len(shared))))
    numbers = ((sums[0], sums[1]), (batches[0], batches[1]))
    shape = jax.eval_shape(
        lambda x, y: lax.dot_general(x, y, numbers),
        *(jax.ShapeDtypeStruct(each, jnp.float32) for each in shapes),
    ).shape
    operands = {
        "lhs": Operand(
            array=draw.normal(shapes[0], dtype), aligned=shapes[0], full=shapes[0]
        ),
        "rhs": Operand(
            array=draw.normal(shapes[1], dtype, 1 / math.sqrt(r)),
            aligned=shapes[1],
            full=shapes[1],
        ),
    }
    terms: list[str] = []
    for term, chance in (("bias", 0.6), ("residual", 0.3)):
        if draw.chance(chance):
            given = shape[-1:] if term == "bias" else shape
            operands[term] = Operand(
                array=draw.normal(given, draw.one_of((dtype, dtype, "float32"))),
                aligned=(1,) * (len(shape) - len(given)) + given,
                full=shape,
            )
            terms.append(term)
    activation = draw.activation()
    preferred = "float32" if draw.chance(0.15) else None

    def call(
        implementation: Implementation, arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        return jax_cudnn.dot_general(
            **arrays,  # type: ignore[arg-type]
            dimension_numbers=numbers,
            activation=activation_argument(activation),
            preferred_element_type=None if preferred is None else jnp.dtype(preferred),
            implementation=implementation,
        )

    out_dtype = preferred or dtype
    extra = {"numbers": numbers, "activation": activation, "out": out_dtype}
    return Problem(
        text=f"dot_general({operands_text(operands)}; {options_text(extra)})",
        call=call,
        operands=operands,
        contract=lambda x, y: lax.dot_general(x, y, numbers),
        sides=("lhs", "rhs"),
        terms=tuple(terms),
        activation=activation,
        wide=dtype,
        out_dtype=out_dtype,
        with_gradients=with_gradients,
        cotangent=draw.normal(shape, out_dtype) if with_gradients else None,
    )
