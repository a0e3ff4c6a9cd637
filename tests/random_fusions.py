# SPDX-License-Identifier: Apache-2.0
"""Random calls of conv, matmul and dot_general, each with its meaning in plain JAX.

A ``Problem`` is one call: its operands, the call itself, and the same computation in
jax.lax and jax.numpy in f32 (``evaluate``), which is the truth to compare with. Seeds
are fixed, so that a problem is the same in every run.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_cudnn
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
_CALLABLES = (
    "clip",
    "hard_swish",
    "mish",
    "quick_gelu",
    "softsign",
    "squared_relu",
    "wave",
)
F8 = ("float8_e4m3fn", "float8_e5m2")
_FLOATS: Sequence[str] = (
    "bfloat16",
    "bfloat16",
    "bfloat16",
    "float16",
    "float32",
    "float32",
)
# Fewer elements than this say little about a norm.
_FEWEST = 64
# Products in a contraction: the whole ring is to take minutes.
_MOST_PRODUCTS = 3e8


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
    ``terms`` what is added, ``last`` what scales the result. ``wide`` is the dtype in
    which the operands are multiplied, None for 8 bits.
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
        sums = sums + value[name]
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
            unit = _eps(problem.out_dtype)
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


def _eps(dtype: str) -> float:
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
        return max(2.0**-10, _eps(problem.out_dtype))
    return max(_eps(wide or "float32"), _eps(problem.out_dtype))


# --- drawing --------------------------------------------------------------------------


class _Draw:
    """A random generator with the draws that problems have in common."""

    def __init__(self, seed: int, name: str) -> None:
        self.rng = np.random.default_rng([seed, *name.encode()])

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """Draw from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def normal(self, shape: Sequence[int], dtype: str, size: float = 1.0) -> jax.Array:
        values = self.rng.standard_normal(tuple(shape), np.float32) * np.float32(size)
        return jnp.asarray(values, jnp.dtype(dtype))

    def factors(self, shape: Sequence[int], dtype: str, size: float) -> jax.Array:
        """Draw numbers between 0.5 and 1.5 times a size."""
        values = (self.rng.random(tuple(shape), np.float32) + 0.5) * np.float32(size)
        return jnp.asarray(values, jnp.dtype(dtype))

    def activation(self) -> str | None:
        if self.chance(0.2):
            return None
        if self.chance(0.25):
            return self.one_of(_CALLABLES)
        return self.one_of([name for name in ACTIVATIONS if name not in _CALLABLES])


def _activation(name: str | None) -> Any:
    return ACTIVATIONS[name][0] if name in _CALLABLES else name


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _shapes(operands: Mapping[str, Operand]) -> str:
    return ", ".join(
        f"{name} {each.array.dtype}{list(each.array.shape)}"
        for name, each in operands.items()
    )


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
    dtypes: Sequence[str] = _FLOATS,
    with_gradients: bool = False,
) -> Problem:
    """Draw a convolution.

    `grouping` is "none", "feature", "depthwise" or "batch"; `stretch` has strides and
    holes in w; `transposed` has zeros between the elements of x.
    """
    draw = _Draw(seed, name)
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
        is_sized = min(sizes) >= _FEWEST and max(sizes) <= 2**22
        if is_sized and sizes[2] * reach <= _MOST_PRODUCTS:
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
        x = jnp.asarray(draw.rng.integers(-127, 128, x_shape), jnp.int8)
        w = jnp.asarray(draw.rng.integers(-127, 128, w_shape), jnp.int8)
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

    def call(
        implementation: Implementation, arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        return jax_cudnn.conv(
            **arrays,  # type: ignore[arg-type]
            **numbers_given,  # type: ignore[arg-type]
            **options,
            activation=_activation(activation),
            preferred_element_type=None if preferred is None else jnp.dtype(preferred),
            implementation=implementation,
        )

    extra = {**options, **numbers_given, "activation": activation, "out": out_dtype}
    return Problem(
        text=f"conv({_shapes(operands)}; {_shown(extra)})",
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


_ALIGNED = (8, 16, 32, 64, 96, 128, 256, 384)
_UNALIGNED = (1, 3, 5, 7, 13, 17, 31, 33, 63, 65, 100, 127, 129, 200, 255, 257)
_LARGE = (512, 768, 1000, 1024, 1025, 2048, 3001, 4096)


def _matrix_sizes(draw: _Draw, sizes: str, deepest: int) -> tuple[int, int, int]:
    """Draw rows, columns and the length of the sums."""
    while True:
        pool = {
            "aligned": _ALIGNED,
            "unaligned": _UNALIGNED,
            "mixed": (*_ALIGNED, *_UNALIGNED),
            "large": (*_ALIGNED, *_LARGE, *_LARGE),
        }[sizes]
        m, n, r = (draw.one_of(pool) for _ in range(3))
        is_sized = min(m * n, m * r, r * n) >= _FEWEST
        if is_sized and r <= deepest and m * n * r <= 2 * _MOST_PRODUCTS:
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
    draw = _Draw(seed, name)
    # Sums of 1000 products of i8 are exact in f32; those of f8 are kept in few bits.
    m, n, r = _matrix_sizes(draw, sizes, {"int8": 1000, "f8": 384}.get(kind, 4096))
    batch = (draw.one_of((2, 3, 5)),) if batched else ()
    if batched and draw.chance(0.3):
        batch = (2, 3)
    if batched and batch and m * n * r * math.prod(batch) > _MOST_PRODUCTS:
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
            array = jnp.asarray(draw.rng.integers(low, high, own), jnp.dtype(dtype))
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

    def call(
        implementation: Implementation, arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        return jax_cudnn.matmul(
            **arrays,  # type: ignore[arg-type]
            **numbers,  # type: ignore[arg-type]
            activation=_activation(activation),
            preferred_element_type=None if preferred is None else jnp.dtype(preferred),
            implementation=implementation,
        )

    extra = {**numbers, "activation": activation, "out": out_dtype}
    return Problem(
        text=f"matmul({_shapes(operands)}; {_shown(extra)})",
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


def _matmul_dtypes(draw: _Draw, kind: str) -> tuple[tuple[str, str], str | None]:
    """Draw the operands' dtypes, and the result's where it has to be given."""
    if kind == "float":
        dtype = draw.one_of(_FLOATS)
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
    draw = _Draw(seed, name)
    dtype = draw.one_of(_FLOATS)
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
        is_sized = min(outer * m * r, outer * n * r, outer * m * n) >= _FEWEST
        if is_sized and outer * m * n * r <= _MOST_PRODUCTS and r <= 4096:
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
            activation=_activation(activation),
            preferred_element_type=None if preferred is None else jnp.dtype(preferred),
            implementation=implementation,
        )

    out_dtype = preferred or dtype
    extra = {"numbers": numbers, "activation": activation, "out": out_dtype}
    return Problem(
        text=f"dot_general({_shapes(operands)}; {_shown(extra)})",
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
