# SPDX-License-Identifier: Apache-2.0
"""Small random calls of every operation, each with its meaning in plain jax.numpy.

The calls are in f64, where an error in a derivative is larger than rounding errors.
(The calls of random_convs.py and random_matmuls.py have the sizes and dtypes of
calls on a GPU.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_cudnn
from jax_cudnn.ops.common.activations import ActivationName
from tests.products.shared.fusion_problems import ACTIVATIONS

Shape = tuple[int, ...]
# The other activations are passed as functions.
NAMED = get_args(ActivationName)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function of arrays of these shapes, and the same in plain jax.numpy."""

    text: str
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: tuple[Shape, ...]


class Random:
    """A random generator with the draws that calls have in common."""

    def __init__(self, *seeds: int | str) -> None:
        """Start; equal seeds draw alike."""
        entropy = [ord(each) for seed in seeds for each in str(seed)]
        self._rng = np.random.default_rng(entropy)

    def one_of(self, *values: Any) -> Any:
        """Draw one of the values."""
        return values[int(self._rng.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        """Draw True as often as that."""
        return bool(self._rng.random() < probability)

    def order(self, count: int) -> tuple[int, ...]:
        """Draw a permutation."""
        return tuple(int(i) for i in self._rng.permutation(count))

    def normal(self, shape: Shape) -> jax.Array:
        """Draw normal numbers in f64."""
        return jnp.asarray(self._rng.standard_normal(shape))

    def part_of(self, shape: Shape) -> Shape:
        """Draw a shape that broadcasts to that one."""
        some = tuple(size if self.chance(0.6) else 1 for size in shape)
        return some[int(self._rng.integers(len(some) + 1)) :]


def draw_call(op: str, activation: str | None, random: Random) -> Call:
    """Return a call of the operation, or of the Flax layer, of that name."""
    return _CALLS[op](random, activation)


def activate(activation: str | None, x: jax.Array) -> jax.Array:
    """Apply an activation as JAX has it."""
    return x if activation is None else ACTIVATIONS[activation][0](x)


def as_argument(activation: str | None) -> Any:
    """Return an activation as the operations take it."""
    if activation is None or activation in NAMED:
        return activation
    return ACTIVATIONS[activation][0]


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


def _some(random: Random, most: int = 2, **shapes: Shape) -> dict[str, Shape]:
    """Draw which of these operands are there."""
    chosen = {name for name in shapes if random.chance(most / len(shapes))}
    return {name: shape for name, shape in shapes.items() if name in chosen}


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


def _matmul(random: Random, activation: str | None) -> Call:
    m, r, n = random.one_of(1, 2, 4), random.one_of(2, 3), random.one_of(1, 5)
    first, second = random.one_of(*_BATCHES)
    sides = (*first, m, r), (*second, r, n)
    output = (*np.broadcast_shapes(first, second), m, n)
    more = _some(
        random,
        bias=random.one_of((n,), (m, n), output),
        residual=random.part_of(output),
        scale_a=random.one_of((), (m, 1), (1, r)),
        scale_b=random.one_of((), (1, n), (r, 1)),
        scale_out=random.part_of(output),
    )
    return _fused("matmul", jax_cudnn.matmul, jnp.matmul, activation, sides, more=more)


def _dot_general(random: Random, activation: str | None) -> Call:
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
    more = _some(random, bias=output.shape[-1:], residual=random.part_of(output.shape))
    text = f"dot_general {numbers}"
    return _fused(text, call, contract, activation, shapes, more=more)


def _gated_matmul(random: Random, activation: str | None) -> Call:
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


def _gated_conv(random: Random, activation: str | None) -> Call:
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


def _conv(random: Random, activation: str | None, rank: int) -> Call:
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
    more = _some(
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


def _sdpa(random: Random, activation: str | None) -> Call:
    del activation
    b, s, t, k, d, e = random.one_of(1, 2), 3, 4, random.one_of(1, 2), 3, 2
    h = k * random.one_of(1, 2)
    is_causal, with_lengths = random.chance(0.5), random.chance(0.3)
    more = _some(
        random,
        bias=tuple(random.one_of(1, size) for size in (b, h, s, t)),
        mask=tuple(random.one_of(1, size) for size in (b, h, s, t)),
    )
    if with_lengths:
        more["lengths"] = (b, t)
    names = tuple(more)
    # With a mask or lengths, the first key is the one that each query is sure to see.
    left = random.one_of(1, s - 1) if names in ((), ("bias",)) else s - 1
    window = random.one_of(None, (left, random.one_of(0, 1)))

    def split(extra: Sequence[jax.Array]) -> tuple[Any, Any, Any]:
        """Return bias, mask and lengths, all made from floats; each sees a key."""
        given = dict(zip(names, extra, strict=True))
        mask, lengths = given.get("mask"), given.get("lengths")
        if mask is not None:
            mask = (mask > 0) | (jnp.arange(mask.shape[3]) == 0)[None, None, None]
        if lengths is not None:
            lengths = 1 + jnp.sum(lengths[:, 1:] > 0, axis=1)
        return given.get("bias"), mask, lengths

    def ours(q: Any, k: Any, v: Any, *extra: Any) -> Any:
        bias, mask, lengths = split(extra)
        return jax_cudnn.sdpa(
            q,
            k,
            v,
            bias,
            mask,
            is_causal=is_causal,
            key_value_seq_lengths=lengths,
            local_window_size=window,
            return_residual=True,
        )

    def plain(q: Any, k: Any, v: Any, *extra: Any) -> Any:
        bias, mask, lengths = split(extra)
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(d)
        if bias is not None:
            scores = scores + bias
        seen = jnp.ones((1, 1, s, t), bool)
        seen = jnp.tril(seen) if is_causal else seen
        if window is not None:
            seen = jnp.tril(jnp.triu(seen, -window[0]), window[1])
        if mask is not None:
            seen = seen & mask
        if lengths is not None:
            within = jnp.arange(t)[None, :] < lengths[:, None]
            seen = seen & within[:, None, None, :]
        scores = jnp.where(seen, scores, -jnp.inf)
        output = jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), v)
        return output, jnp.swapaxes(jax.nn.logsumexp(scores, axis=-1), 1, 2)

    shapes = ((b, s, h, d), (b, t, k, d), (b, t, k, e), *more.values())
    return Call(
        text=f"sdpa {shapes} {names} is_causal={is_causal} window={window}",
        ours=ours,
        plain=plain,
        shapes=shapes,
    )


def _attend(query: Any, key: Any, value: Any, **_: Any) -> jax.Array:
    """Attend as Flax does, in f64: its own softmax is f32's."""
    scores = jnp.einsum("...shd,...thd->...hst", query, key)
    weights = jax.nn.softmax(scores / math.sqrt(query.shape[-1]))
    return jnp.einsum("...hst,...the->...she", weights, value)


def _layer(random: Random, activation: str | None, kind: str, api: str) -> Call:
    """Return a Flax layer of ours beside Flax's, as functions of their parameters."""
    from flax import linen, nnx

    from jax_cudnn import flax

    options: Any = {"param_dtype": jnp.float64}
    fused = {**options, "activation": as_argument(activation)}
    lead = random.one_of((2,), (2, 2))
    shape = (*lead, 4) if kind == "conv" else lead
    shape = (*shape, 3)
    if kind == "attention":
        shape, activation, fused = (2, 3, 4), None, options
    x = jax.ShapeDtypeStruct(shape, jnp.float64)
    if api == "linen":
        if kind == "attention":
            heads = {"num_heads": 2, **options}
            make = linen.MultiHeadDotProductAttention
            theirs = make(**heads, attention_fn=_attend)
            ours = make(**heads, attention_fn=flax.attention_fn)
        elif kind == "dense":
            theirs, ours = linen.Dense(5, **options), flax.linen.Dense(5, **fused)
        else:
            theirs = linen.Conv(5, (2,), **options)
            ours = flax.linen.Conv(5, (2,), **fused)
        run = [lambda p, x, layer=layer: layer.apply(p, x) for layer in (theirs, ours)]
        params = jax.eval_shape(theirs.init, jax.random.key(0), x)
    else:
        common = {**options, "rngs": nnx.Rngs(0)}
        fused = {**fused, "rngs": nnx.Rngs(0)}
        if kind == "attention":
            common |= {"num_heads": 2, "in_features": 4, "decode": False}
            theirs = nnx.MultiHeadAttention(**common, attention_fn=_attend)
            ours = nnx.MultiHeadAttention(**common, attention_fn=flax.attention_fn)
        elif kind == "dense":
            theirs, ours = nnx.Linear(3, 5, **common), flax.nnx.Linear(3, 5, **fused)
        else:
            theirs = nnx.Conv(3, 5, (2,), **common)
            ours = flax.nnx.Conv(3, 5, (2,), **fused)
        splits = [nnx.split(layer, nnx.Param, ...) for layer in (theirs, ours)]
        run = [
            lambda p, x, parts=parts: nnx.merge(parts[0], nnx.State(p), *parts[2:])(x)
            for parts in splits
        ]
        params = nnx.to_pure_dict(splits[0][1])
    leaves, tree = jax.tree.flatten(params)

    def function(index: int) -> Callable[..., Any]:
        def apply(x: jax.Array, *leaves: jax.Array) -> jax.Array:
            with (
                jax.numpy_rank_promotion("allow"),
                jax.numpy_dtype_promotion("standard"),
            ):
                result = run[index](jax.tree.unflatten(tree, leaves), x)
            return result if index else activate(activation, result)

        return apply

    return Call(
        text=f"{api} {kind} {shape} {activation}",
        ours=function(1),
        plain=function(0),
        shapes=(shape, *(leaf.shape for leaf in leaves)),
    )


# --- norms, pooling, grouped products -------------------------------------------------


def _norm(random: Random, activation: str | None) -> Call:
    kind = random.one_of(
        *("layer_norm", "rms_norm", "adaptive_layer_norm"),
        *("group_norm", "instance_norm", "batch_norm"),
    )
    shape = (random.one_of(2, 3), random.one_of(3, 4), 6)
    options: dict[str, Any] = {"epsilon": 0.1, "activation": as_argument(activation)}
    groups, factor, axes = 1, shape[2:], (2,)
    if kind in ("layer_norm", "rms_norm"):
        axes = random.one_of((2,), (1,), (1, 2), (0, 2))
        options["axis"] = axes
        factor = tuple(shape[axis] for axis in axes)
    elif kind == "adaptive_layer_norm":
        factor = (shape[0], shape[2])
    elif kind == "group_norm":
        groups, axes = random.one_of(2, 3), (1, 3)
        options["groups"] = groups
    else:
        axes = (1,) if kind == "instance_norm" else (0, 1)
    names = [name for name in ("scale", "bias") if random.chance(0.7)]
    has_residual = random.chance(0.4)

    def along(value: jax.Array) -> jax.Array:
        if kind == "adaptive_layer_norm":
            return value[:, None]
        if kind in ("layer_norm", "rms_norm"):
            return value.reshape([n if i in axes else 1 for i, n in enumerate(shape)])
        return value

    def plain(x: jax.Array, *terms: jax.Array) -> Any:
        given = dict(zip(names, terms, strict=False))
        total = x + terms[-1] if has_residual else x
        split = total.reshape(*shape[:2], groups, -1) if groups > 1 else total
        mean = 0.0 if kind == "rms_norm" else jnp.mean(split, axes, keepdims=True)
        centred = split - mean
        variance = jnp.mean(jnp.square(centred), axes, keepdims=True)
        output = (centred / jnp.sqrt(variance + 0.1)).reshape(shape)
        with jax.numpy_rank_promotion("allow"):
            if "scale" in given:
                output = output * along(given["scale"])
            if "bias" in given:
                output = output + along(given["bias"])
        output = activate(activation, output)
        return (output, total) if has_residual else output

    def ours(x: jax.Array, *terms: jax.Array) -> Any:
        given = dict(zip(names, terms, strict=False))
        residual = terms[-1] if has_residual else None
        norm = getattr(jax_cudnn, kind)
        return norm(
            x, given.get("scale"), given.get("bias"), residual=residual, **options
        )

    shapes = (shape, *[factor] * len(names), *[shape] * has_residual)
    return Call(
        text=f"{kind} {shapes} {options} {names}", ours=ours, plain=plain, shapes=shapes
    )


def _avg_pool(random: Random, activation: str | None) -> Call:
    del activation
    shape = (2, random.one_of(4, 5), random.one_of(3, 6), 2)
    window, strides = (2, random.one_of(1, 3)), (random.one_of(1, 2), 2)
    # No window lies in padding alone.
    padding = random.one_of("VALID", ((1, 0), (0, window[1] // 2)))
    counted = random.chance(0.5)
    around = padding if padding == "VALID" else ((0, 0), *padding, (0, 0))

    def sums(x: jax.Array) -> jax.Array:
        sizes = (1, *window, 1), (1, *strides, 1)
        return lax.reduce_window(x, 0.0, lax.add, *sizes, around)

    def plain(x: jax.Array) -> jax.Array:
        count = math.prod(window) if counted else sums(jnp.ones(shape, x.dtype))
        return sums(x) / count

    def ours(x: jax.Array) -> jax.Array:
        return jax_cudnn.avg_pool(
            x, window, strides, padding, count_include_pad=counted
        )

    text = f"avg_pool {shape} {window} {strides} {padding} {counted}"
    return Call(text=text, ours=ours, plain=plain, shapes=(shape,))


def _ragged_dot(random: Random, activation: str | None) -> Call:
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


def _causal_conv1d(random: Random, activation: str | None) -> Call:
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


_Draw = Callable[[Random, str | None], Call]


def _of_rank(rank: int) -> _Draw:
    return lambda random, activation: _conv(random, activation, rank)


def _of_layer(kind: str, api: str) -> _Draw:
    return lambda random, activation: _layer(random, activation, kind, api)


_CALLS: dict[str, _Draw] = {
    "matmul": _matmul,
    "dot_general": _dot_general,
    "gated_matmul": _gated_matmul,
    "gated_conv": _gated_conv,
    **{f"conv{rank}d": _of_rank(rank) for rank in (1, 2, 3)},
    "sdpa": _sdpa,
    "norm": _norm,
    "avg_pool": _avg_pool,
    "ragged_dot": _ragged_dot,
    "causal_conv1d": _causal_conv1d,
    **{
        f"{api}_{kind}": _of_layer(kind, api)
        for api in ("nnx", "linen")
        for kind in ("dense", "conv", "attention")
    },
}
LAYERS = tuple(name for name in _CALLS if name.startswith(("nnx_", "linen_")))
OPERATIONS = tuple(name for name in _CALLS if name not in LAYERS)
