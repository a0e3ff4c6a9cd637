# SPDX-License-Identifier: Apache-2.0
"""Small random contractions, each with its meaning in plain jax.numpy."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_cudnn
from tests.lowering.derivatives.drawing import (
    Call,
    Random,
    Shape,
    activate,
    as_argument,
    some,
)


def _fused(
    text: str,
    call: Callable[..., jax.Array],
    contract: Callable[[jax.Array, jax.Array], jax.Array],
    activation: str | None,
    sides: Sequence[Shape],
    *,
    more: dict[str, Shape],
    channel: int = -1,
) -> Call:
    """Return a contraction with what is before and after it, as documented.

    A vector lies along the axis `channel` of the result.
    """
    names = tuple(more)

    def along(x: jax.Array, result: jax.Array) -> jax.Array:
        if x.ndim != 1:
            return x
        shape = [1] * result.ndim
        shape[channel] = x.size
        return x.reshape(shape)

    def plain(left: jax.Array, right: jax.Array, *extra: jax.Array) -> jax.Array:
        given = dict(zip(names, extra, strict=True))
        with jax.numpy_rank_promotion("allow"):
            result = contract(
                left * given.get("scale_a", 1), right * given.get("scale_b", 1)
            )
            if "scale" in given:
                result = result * along(given["scale"], result)
            for name in ("bias", "residual"):
                if name in given:
                    result = result + along(given[name], result)
            return activate(activation, result) * given.get("scale_out", 1)

    def ours(left: jax.Array, right: jax.Array, *extra: jax.Array) -> jax.Array:
        given = dict(zip(names, extra, strict=True))
        return call(left, right, activation=as_argument(activation), **given)

    shapes = (*sides, *more.values())
    return Call(
        text=f"{text} {shapes} {names} {activation}",
        ours=ours,
        plain=plain,
        shapes=shapes,
    )


# What products of matrices have in front of their axes, on the left and on the right.
_BATCHES: tuple[tuple[Shape, Shape], ...] = (
    ((), ()),
    ((3,), ()),
    ((), (3,)),
    ((3,), (3,)),
    ((1,), (3,)),
    ((2, 3), (3,)),
    ((3,), (2, 1)),
)


def draw_matmul(random: Random, activation: str | None) -> Call:
    m, r, n = random.one_of(1, 2, 4), random.one_of(2, 3), random.one_of(1, 5)
    first, second = random.one_of(*_BATCHES)
    sides = (*first, m, r), (*second, r, n)
    output = (*np.broadcast_shapes(first, second), m, n)
    more = some(
        random,
        bias=random.one_of((n,), (m, n), output),
        residual=random.part_of(output),
        scale_a=random.one_of((), (m, 1), (1, r)),
        scale_b=random.one_of((), (1, n), (r, 1)),
        scale_out=random.part_of(output),
    )
    return _fused("matmul", jax_cudnn.matmul, jnp.matmul, activation, sides, more=more)


def draw_dot_general(random: Random, activation: str | None) -> Call:
    batch = random.one_of((), (), (3,), (2, 3))
    sums = random.one_of((4,), (2, 3))
    shapes, contracting, batches = [], [], []
    for free in ((2,), random.one_of((5,), (2, 2))):
        full = (*batch, *sums, *free)
        order = random.order(len(full))
        shapes.append(tuple(full[i] for i in order))
        batches.append(tuple(order.index(i) for i in range(len(batch))))
        contracting.append(tuple(order.index(len(batch) + i) for i in range(len(sums))))
    numbers = (tuple(contracting), tuple(batches))

    def contract(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, numbers)

    def call(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
        return jax_cudnn.dot_general(x, y, numbers, **options)

    output = jax.eval_shape(contract, *map(jax.ShapeDtypeStruct, shapes, [float] * 2))
    more = some(random, bias=output.shape[-1:], residual=random.part_of(output.shape))
    text = f"dot_general {numbers}"
    return _fused(text, call, contract, activation, shapes, more=more)


def draw_gated_matmul(random: Random, activation: str | None) -> Call:
    activation = activation or "silu"
    batch = random.one_of((), (3,))
    expert = random.one_of((), batch)
    a, w = (*batch, 2, 3), (*expert, 3, 4)
    biases = random.one_of((), ((4,), (2, 4)))

    def ours(a: Any, gate: Any, up: Any, *biases: Any) -> jax.Array:
        names = ("gate_bias", "up_bias")
        given: Any = dict(zip(names, biases, strict=False))
        name = as_argument(activation)
        return jax_cudnn.gated_matmul(a, gate, up, activation=name, **given)

    def plain(a: Any, gate: Any, up: Any, *biases: Any) -> jax.Array:
        with jax.numpy_rank_promotion("allow"):
            gate_bias, up_bias = biases or (0.0, 0.0)
            gates = activate(activation, a @ gate + gate_bias)
            return gates * (a @ up + up_bias)

    return Call(
        text=f"gated_matmul {a} {w} {biases} {activation}",
        ours=ours,
        plain=plain,
        shapes=(a, w, w, *biases),
    )


def draw_gated_conv(random: Random, activation: str | None) -> Call:
    other = random.one_of(None, "tanh")
    groups, side = random.one_of(1, 2), random.one_of(3, 4)
    x, w = (2, side, 2 * groups), (2, 2, 3 * groups)
    biases = random.one_of((), ((3 * groups,), (2, 1, 3 * groups)))
    options: dict[str, Any] = {
        "window_strides": (random.one_of(1, 2),),
        "padding": (random.one_of((0, 0), (1, 0)),),
        "lhs_dilation": (random.one_of(1, 1, 2),),
        "rhs_dilation": (random.one_of(1, 2),),
        "dimension_numbers": ("NXC", "XIO", "NXC"),
        "feature_group_count": groups,
    }

    def ours(x: Any, gate: Any, up: Any, *biases: Any) -> jax.Array:
        names = ("gate_bias", "up_bias")
        given: Any = dict(zip(names, biases, strict=False))
        given |= {"activation": as_argument(activation)}
        given |= {"up_activation": as_argument(other)}
        return jax_cudnn.gated_conv(x, gate, up, **options, **given)

    def plain(x: Any, gate: Any, up: Any, *biases: Any) -> jax.Array:
        with jax.numpy_rank_promotion("allow"):
            gate_bias, up_bias = biases or (0.0, 0.0)
            gates, ups = (lax.conv_general_dilated(x, w, **options) for w in (gate, up))
            return activate(activation, gates + gate_bias) * activate(
                other, ups + up_bias
            )

    return Call(
        text=f"gated_conv {x} {w} {biases} {options} {activation} {other}",
        ours=ours,
        plain=plain,
        shapes=(x, w, w, *biases),
    )


def draw_conv(random: Random, activation: str | None, rank: int) -> Call:
    letters = "XYZ"[:rank]
    groups, batch_groups = random.one_of((1, 1), (1, 1), (2, 1), (1, 2))
    n, c, o = random.one_of(1, 2), random.one_of(1, 2), random.one_of(1, 3)
    by_letter = {
        **{"N": n * batch_groups, "C": c * groups},
        **{"O": o * groups * batch_groups, "I": c},
    }
    space = {letter: random.one_of(3, 4) for letter in letters}
    window = {letter: random.one_of(1, 2) for letter in letters}
    numbers = random.one_of(
        ("NC" + letters, "OI" + letters, "NC" + letters),
        (f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    )
    steps = {
        name: tuple(random.one_of(1, 1, 2) for _ in letters)
        for name in ("window_strides", "lhs_dilation", "rhs_dilation")
    }
    options: dict[str, Any] = {
        **steps,
        "padding": tuple(random.one_of((1, 1), (0, 2), (2, 1)) for _ in letters),
        "dimension_numbers": numbers,
        "feature_group_count": groups,
        "batch_group_count": batch_groups,
    }
    sides = tuple(
        tuple({**by_letter, **sizes}[letter] for letter in spec)
        for spec, sizes in zip(numbers[:2], (space, window), strict=True)
    )

    def contract(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, **options)

    def call(x: jax.Array, w: jax.Array, **given: Any) -> jax.Array:
        return jax_cudnn.conv(x, w, **options, **given)

    output = jax.eval_shape(
        contract, *map(jax.ShapeDtypeStruct, sides, [float] * 2)
    ).shape
    vector = (by_letter["O"],)
    more = some(
        random,
        bias=vector,
        residual=random.one_of(output, (1, *random.part_of(output[1:]))),
        scale=random.one_of((), vector),
    )
    if "residual" in more:
        missing = len(output) - len(more["residual"])
        more["residual"] = (1,) * missing + more["residual"]
    channel = numbers[2].index("C")
    text = f"conv {options}"
    return _fused(text, call, contract, activation, sides, more=more, channel=channel)


def draw_ragged_dot(random: Random, activation: str | None) -> Call:
    del activation
    sizes = [random.one_of(0, 1, 2, 3) for _ in range(3)]
    beyond = random.one_of(0, 2)
    rows = sum(sizes) + beyond
    group = np.repeat([*range(3), 3], [*sizes, beyond])

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        zeros = jnp.zeros((1, *w.shape[1:]), w.dtype)
        return jnp.einsum("rk,rkn->rn", x, jnp.concatenate([w, zeros])[group])

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_cudnn.ragged_dot(x, w, np.asarray(sizes, np.int32))

    shapes = ((rows, 3), (3, 3, 4))
    text = f"ragged_dot {shapes} {sizes}"
    return Call(text=text, ours=ours, plain=plain, shapes=shapes)


def draw_causal_conv1d(random: Random, activation: str | None) -> Call:
    del activation
    taps, steps = random.one_of(1, 2, 3, 9), random.one_of(1, 5)
    is_last, has_bias = random.chance(0.5), random.chance(0.5)
    has_silu, has_ids = random.chance(0.5), random.chance(0.3)
    each = np.arange(steps)
    ids = np.stack([each // 2, each // 3]).astype(np.int32)
    options: dict[str, Any] = {
        "activation": "silu" if has_silu else None,
        "dimension_numbers": "NWC" if is_last else "NCW",
        "segment_ids": ids if has_ids else None,
    }
    back = each[:, None] - each[None]
    taken = np.stack([(back >= 0) & (back < taps)] * 2)
    if has_ids:
        taken &= ids[:, :, None] == ids[:, None]
    rows = np.clip(taps - 1 - back, 0, taps - 1)

    def plain(x: jax.Array, w: jax.Array, *bias: jax.Array) -> jax.Array:
        x, w = (x, w) if is_last else (jnp.swapaxes(x, 1, 2), w.T)
        # Every pair of steps has the weights of a tap, or zeros.
        weights = jnp.where(taken[..., None], w[rows][None], 0.0)
        y = jnp.einsum("bsc,btsc->btc", x, weights)
        y = y + bias[0][None, None] if bias else y
        y = jax.nn.silu(y) if has_silu else y
        return y if is_last else jnp.swapaxes(y, 1, 2)

    def ours(x: jax.Array, w: jax.Array, *bias: jax.Array) -> jax.Array:
        return jax_cudnn.causal_conv1d(x, w, bias=bias[0] if bias else None, **options)

    shape, weights = (
        ((2, steps, 3), (taps, 3)) if is_last else ((2, 3, steps), (3, taps))
    )
    shapes = (shape, weights, *[(3,)] * has_bias)
    text = f"causal_conv1d {shapes} {options}"
    return Call(text=text, ours=ours, plain=plain, shapes=shapes)
