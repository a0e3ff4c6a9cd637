# SPDX-License-Identifier: Apache-2.0
"""The attention cases planned without a GPU and run on one, with random operands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from jax_cudnn.config import Implementation


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of sdpa; axis letters as in its docstring.

    ``bias`` and ``mask`` are shapes given by which of (b, h, s, t) are full, for
    example "bhst" or "s-t" spelled "..st" with dots for size 1.
    ``shift`` is subtracted from the bias of every other row, to reach very negative
    log-sum-exps; inf stands for the largest finite number. ``score`` is that of every
    query and key, but for what is drawn.
    """

    name: str
    b: int = 2
    s: int = 65
    t: int = 129
    h: int = 4
    k: int = 4
    d: int = 64
    e: int | None = None
    dtype: str = "bfloat16"
    bias: str | None = None
    bias_dtype: str | None = None
    mask: str | None = None
    dead_rows: bool = False
    causal: bool = False
    window: tuple[int, int] | None = None
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    scale: float | None = None
    with_residual: bool = False
    residual_cotangent: float = 1.0
    shift: float = 0.0
    score: float = 0.0
    bias_gradient: bool = True
    minus_infinity: bool = False


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Random operands and cotangents of a case."""

    arrays: tuple[Any, ...]
    wanted: tuple[int, ...]
    names: tuple[str, ...]
    cotangents: tuple[Any, ...]


def _shape(case: Case, pattern: str) -> tuple[int, ...]:
    sizes = {"b": case.b, "h": case.h, "s": case.s, "t": case.t}
    return tuple(
        sizes[letter] if letter in pattern else 1 for letter in ("b", "h", "s", "t")
    )


def make_operands(case: Case, seed: int = 0) -> Operands:
    """Draw the operands of a case."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    dtype = jnp.dtype(case.dtype)
    e = case.d if case.e is None else case.e

    def normal(*shape: int, like: jnp.dtype = dtype) -> jax.Array:
        return jnp.asarray(np.asarray(rng.standard_normal(shape, np.float32), like))

    query = normal(case.b, case.s, case.h, case.d)
    key = normal(case.b, case.t, case.k, case.d)
    value = normal(case.b, case.t, case.k, e)
    if case.score:
        assert case.scale is None
        query = query.at[..., 0].set(32)
        key = key.at[..., 0].set(case.score / 32 * case.d**0.5)
    bias = mask = None
    wanted, names = [0, 1, 2], ["output"]
    if case.bias is not None:
        like = jnp.dtype(case.bias_dtype or case.dtype)
        bias = normal(*_shape(case, case.bias), like=like)
        if case.shift:
            shift = min(case.shift, float(jnp.finfo(like).max))
            bias = bias.at[:, :, ::2].add(jnp.asarray(-shift, like))
        if case.minus_infinity:
            hidden = jnp.asarray(rng.random(bias.shape) < 0.4)
            if case.dead_rows:
                hidden = hidden.at[:, :, 1::3].set(True)
            else:
                hidden = hidden.at[..., 0].set(False)
            bias = jnp.where(hidden, jnp.asarray(-jnp.inf, like), bias)
        if case.bias_gradient:
            wanted.append(3)
    if case.mask is not None:
        visible = rng.random(_shape(case, case.mask)) < 0.6
        visible[..., 0] = True
        if case.dead_rows:
            visible[:, :, 1::3] = False
        mask = jnp.asarray(visible)
    cotangents: tuple[Any, ...] = (normal(case.b, case.s, case.h, e),)
    if case.with_residual:
        names.append("residual")
        cotangent = normal(case.b, case.s, case.h, like=jnp.dtype("float32"))
        cotangents += (case.residual_cotangent * cotangent,)
    names += [f"grad_{n}" for n in ("query", "key", "value", "bias")[: len(wanted)]]
    lengths = tuple(
        None if x is None else jnp.asarray(np.asarray(x, np.int32))
        for x in (case.query_lengths, case.key_lengths)
    )
    return Operands(
        arrays=(query, key, value, bias, mask, *lengths),
        wanted=tuple(wanted),
        names=tuple(names),
        cotangents=cotangents,
    )


def attention(
    case: Case, implementation: Implementation = "auto"
) -> Callable[..., Any]:
    """Return the case's call, as a function of all of its arrays."""

    def call(query, key, value, bias, mask, query_lengths, key_lengths):
        return jax_cudnn.sdpa(
            query,
            key,
            value,
            bias,
            mask,
            scale=case.scale,
            is_causal=case.causal,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            local_window_size=case.window,
            implementation=implementation,
            return_residual=case.with_residual,
        )

    return call


def with_gradients(
    function: Callable[..., Any], cotangents: Sequence[Any], wanted: Sequence[int]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a jitted function giving results and gradients of operands `wanted`."""

    def run(*operands: Any) -> tuple[jax.Array, ...]:
        def closed(*moving: jax.Array) -> Any:
            full = list(operands)
            for index, value in zip(wanted, moving, strict=True):
                full[index] = value
            return function(*full)

        outputs, pullback = jax.vjp(closed, *(operands[i] for i in wanted))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        given = tuple(
            jnp.asarray(ct, out.dtype)
            for ct, out in zip(cotangents, outputs, strict=True)
        )
        return (*outputs, *pullback(given if len(given) > 1 else given[0]))

    return jax.jit(run)


def _named(**kinds: dict[str, Any]) -> list[Case]:
    return [Case(name=name, **options) for name, options in kinds.items()]


_BIAS_PATTERNS = [
    "".join(
        letter for letter, bit in zip("bhst", f"{n:04b}", strict=True) if bit == "1"
    )
    for n in range(16)
]

HEAD_SIZES = [
    Case(name=f"head_size_{d}", d=d, causal=True)
    for d in (
        1,
        3,
        8,
        13,
        16,
        32,
        40,
        64,
        72,
        77,
        80,
        96,
        100,
        128,
        136,
        160,
        192,
        200,
        256,
    )
]
LENGTHS = [
    Case(
        name=f"lengths_{s}_{t}_{'causal' if causal else 'full'}",
        s=s,
        t=t,
        causal=causal,
    )
    for s, t in (
        (1, 1),
        (1, 2),
        (1, 63),
        (1, 128),
        (2, 1),
        (63, 1),
        (63, 64),
        (64, 63),
        (65, 65),
        (127, 129),
        (129, 127),
        (191, 320),
        (192, 192),
        (320, 320),
        (1000, 1000),
        (77, 1216),
        (1216, 77),
        (1280, 1280),
        (1009, 997),
    )
    for causal in (False, True)
]
GROUPS = [
    Case(name=f"heads_{h}_{k}", h=h, k=k, causal=True, s=129, t=131)
    for h, k in ((8, 8), (8, 2), (12, 4), (7, 1), (6, 3))
]
VALUE_SIZES = [
    Case(name=f"head_sizes_{d}_{e}", d=d, e=e, s=129, t=131)
    for d, e in (
        (64, 128),
        (128, 64),
        (192, 128),
        (40, 24),
        (256, 128),
        (64, 256),
        (5, 11),
    )
]
BIAS = [
    Case(name=f"bias_{p or 'scalar'}_{h}_{k}", bias=p, h=h, k=k, b=3, s=67, t=133)
    for p in _BIAS_PATTERNS
    for h, k in ((4, 4), (4, 2))
]
BIAS_MORE = _named(
    bias_causal={"bias": "hst", "causal": True},
    bias_f32={"bias": "hst", "bias_dtype": "float32"},
    bias_f16={"bias": "bhst", "dtype": "float16"},
    bias_minus_infinity={"bias": "bhst", "minus_infinity": True},
    bias_minus_infinity_rows={
        "bias": "bhst",
        "minus_infinity": True,
        "dead_rows": True,
    },
    bias_minus_infinity_shared={"bias": "t", "minus_infinity": True},
    bias_lengths={"bias": "hst", "key_lengths": (129, 70), "query_lengths": (65, 9)},
    bias_mask={"bias": "hst", "mask": "bst"},
    bias_one_query={"bias": "bht", "s": 1},
    bias_one_key={"bias": "bhs", "t": 1},
    bias_one_by_one={"bias": "bh", "s": 1, "t": 1},
    mask_one_query={"mask": "bt", "s": 1},
    bias_f32_broadcast={"bias": "t", "bias_dtype": "float32"},
    bias_odd_heads={"bias": "ht", "d": 77, "e": 24, "h": 6, "k": 2, "causal": True},
    bias_mask_same={"bias": "bhst", "mask": "bhst", "dead_rows": True},
    bias_very_low={"bias": "bhst", "mask": "bst", "shift": 1e30},
    bias_very_low_f16={"bias": "bhst", "mask": "bst", "shift": 2e4, "dtype": "float16"},
    bias_minus_infinity_mask={"bias": "bhst", "mask": "bst", "minus_infinity": True},
    bias_minus_infinity_residual={
        "bias": "bhst",
        "minus_infinity": True,
        "dead_rows": True,
        "with_residual": True,
    },
)
MASKS = [
    Case(name=f"mask_{p}_{'dead' if dead else 'live'}", mask=p, dead_rows=dead)
    for p in ("bhst", "bst", "hst", "st", "bt", "t")
    for dead in ((True, False) if "s" in p else (False,))
] + _named(
    mask_causal={"mask": "bst", "causal": True, "dead_rows": True},
    mask_lengths={"mask": "bst", "key_lengths": (1, 100), "dead_rows": True},
    mask_f16={"mask": "bst", "dtype": "float16", "dead_rows": True},
)
PADDING = _named(
    key_lengths={"key_lengths": (129, 64)},
    key_lengths_zero={"key_lengths": (0, 31)},
    query_lengths={"query_lengths": (65, 1)},
    query_lengths_zero={"query_lengths": (0, 65)},
    both_lengths={"query_lengths": (13, 64), "key_lengths": (17, 128)},
    both_lengths_zero={"query_lengths": (0, 64), "key_lengths": (17, 0)},
    lengths_causal={
        "query_lengths": (13, 64),
        "key_lengths": (17, 128),
        "causal": True,
    },
    lengths_groups={"key_lengths": (17, 128), "h": 8, "k": 2, "causal": True},
    lengths_odd_head={"key_lengths": (17, 128), "d": 77},
    lengths_one_query={"s": 1, "key_lengths": (17, 128)},
)
RESIDUAL = _named(
    residual={"with_residual": True},
    residual_causal={"with_residual": True, "causal": True, "d": 128},
    residual_groups={"with_residual": True, "h": 8, "k": 2},
    residual_odd_head={"with_residual": True, "d": 77, "e": 13},
    residual_head_248={"with_residual": True, "d": 248},
    residual_f16={"with_residual": True, "dtype": "float16"},
    residual_scaled_up={"with_residual": True, "residual_cotangent": 2.0**18},
    residual_scaled_down={"with_residual": True, "residual_cotangent": 2.0**-20},
    residual_mask={"with_residual": True, "mask": "bst", "dead_rows": True},
    residual_lengths={"with_residual": True, "key_lengths": (0, 99)},
    residual_bias={"with_residual": True, "bias": "bhst"},
    residual_one_query={"with_residual": True, "s": 1},
)
# The known-bug table: shapes and values for which some cuDNN version was wrong.
KNOWN_BUGS = (
    [
        Case(name=f"negative_lse_{s}_{t}", s=s, t=t, bias="bhst", shift=1e4)
        for s, t in ((64, 64), (192, 192), (320, 320), (128, 1216), (65, 1000))
    ]
    + [
        Case(
            name=f"lse_near_minus_{shift}_{t}_{'dbias' if gradient else 'plain'}",
            s=64,
            t=t,
            bias="bhst",
            shift=shift,
            bias_gradient=gradient,
        )
        for t in (64, 192, 320, 1216, 128, 1280)
        for shift in (100, 160)
        for gradient in (True, False)
    ]
    + [
        Case(name=f"scores_near_minus_160_{t}", b=1, s=t, t=t, h=2, k=2, score=-160.0)
        for t in (64, 192, 320, 1216)
    ]
    + _named(
        low_scores_lengths={"t": 192, "key_lengths": (192, 70), "score": -160.0},
        low_scores_mask={"t": 192, "mask": "bst", "dead_rows": True, "score": -160.0},
        low_scores_causal={"s": 192, "t": 192, "causal": True, "score": -160.0},
        low_scores_residual={"t": 64, "with_residual": True, "score": -160.0},
    )
    + _named(
        one_query_lse_minus_122={"s": 1, "t": 128, "bias": "bhst", "shift": 122.0},
        one_by_one={"b": 1, "h": 1, "k": 1, "s": 1, "t": 1},
        one_by_one_batch={"s": 1, "t": 1, "h": 8, "k": 8},
        backward_unaligned_1000={"s": 1000, "t": 1000},
        backward_unaligned_77={"s": 77, "t": 77},
        decode_groups={"s": 1, "t": 517, "h": 8, "k": 2, "with_residual": True},
        decode_groups_causal={"s": 1, "t": 517, "h": 8, "k": 2, "causal": True},
        zero_key_length={"key_lengths": (0, 0)},
        bias_f32_gradient={"bias": "bhst", "bias_dtype": "float32", "s": 77, "t": 77},
        bias_batch_gradient={"bias": "bhst", "s": 63, "t": 65},
        mask_without_bias={"mask": "bt", "s": 64, "t": 64},
        unaligned_keys={"s": 128, "t": 100},
    )
)
# Rows that a bias hides as a whole, as left-padded batches have them.
_HIDDEN: dict[str, dict[str, Any]] = {
    "plain": {"bias": "bst"},
    "no_dbias": {"bias": "bst", "bias_gradient": False},
    "heads": {"bias": "hst", "h": 8, "k": 2},
    "full": {"bias": "bhst", "causal": True},
    "shared": {"bias": "st", "h": 6, "k": 3},
    "f32": {"bias": "bst", "bias_dtype": "float32"},
    "mask": {"bias": "st", "mask": "bst", "dead_rows": True},
    "lengths": {"bias": "bst", "key_lengths": (128, 70), "query_lengths": (128, 65)},
    "residual": {"bias": "bst", "with_residual": True},
}
HIDDEN = [
    Case(name=f"hidden_rows_{name}_{text}", s=128, t=128, shift=shift, **options)
    for name, options in _HIDDEN.items()
    for text, shift in (("1e9", 1e9), ("1e30", 1e30), ("least", np.inf))
    # Numbers below -2.3e38 count as -inf where each head has its own, and else the
    # log-sum-exp has three digits.
    if text != "least" or name not in ("heads", "full", "residual")
]
WINDOWS = _named(
    window_causal={"s": 300, "t": 300, "window": (37, 0), "causal": True},
    window_left={"s": 300, "t": 300, "window": (37, 0)},
    window_two_sided={"s": 300, "t": 300, "window": (20, 45), "h": 6, "k": 2},
    window_one_key={"s": 129, "t": 129, "window": (0, 0)},
    window_right={"s": 200, "t": 328, "window": (0, 90)},
    window_more_keys={"s": 100, "t": 333, "window": (64, 64), "d": 96, "e": 40},
    window_more_queries={"s": 333, "t": 100, "window": (50, 20)},
    window_negative={"s": 128, "t": 128, "window": (-3, 40)},
    window_bias={"s": 160, "t": 160, "window": (30, 10), "bias": "hst"},
    window_bias_of_keys={"s": 160, "t": 192, "window": (30, 10), "bias": "bt"},
    window_hidden_rows={"s": 128, "t": 128, "window": (30, 0), "causal": True}
    | {"bias": "bst", "shift": 1e9},
    window_mask={"s": 160, "t": 160, "window": (30, 10), "mask": "bst"},
    window_lengths={"s": 129, "t": 140, "window": (40, 40)}
    | {"query_lengths": (129, 65), "key_lengths": (140, 70)},
    window_residual={"s": 300, "t": 300, "window": (37, 5), "with_residual": True},
    window_key_count={"s": 192, "t": 192, "window": (50, 3), "score": -160.0},
    window_one_query={"s": 1, "t": 517, "window": (8, 3)},
    window_f16={"s": 256, "t": 256, "window": (100, 0), "dtype": "float16"},
    window_long={"b": 1, "s": 4096, "t": 4096, "h": 2, "k": 2, "window": (512, 0)}
    | {"causal": True},
)
SCALES = _named(
    scale_zero={"scale": 0.0},
    scale_negative={"scale": -0.3},
    scale_one={"scale": 1.0},
)
F16 = [
    Case(
        name=f"f16_{d}_{'causal' if causal else 'full'}",
        dtype="float16",
        d=d,
        causal=causal,
    )
    for d in (64, 77, 128)
    for causal in (False, True)
]
LARGE = _named(
    large_causal={
        "b": 1,
        "s": 4096,
        "t": 4096,
        "h": 4,
        "k": 2,
        "d": 128,
        "causal": True,
    },
    large_cross={"b": 1, "s": 1500, "t": 6000, "h": 3, "k": 3, "d": 96},
    many_batches={"b": 4099, "s": 3, "t": 5, "h": 2, "k": 1, "d": 16},
    many_heads={"b": 1, "s": 9, "t": 7, "h": 2050, "k": 1025, "d": 24},
)

ALL = [
    *HEAD_SIZES,
    *LENGTHS,
    *GROUPS,
    *VALUE_SIZES,
    *BIAS,
    *BIAS_MORE,
    *MASKS,
    *PADDING,
    *RESIDUAL,
    *KNOWN_BUGS,
    *HIDDEN,
    *WINDOWS,
    *SCALES,
    *F16,
    *LARGE,
]
