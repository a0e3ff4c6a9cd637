# SPDX-License-Identifier: Apache-2.0
"""Small random calls of every operation, each with its meaning in plain jax.numpy.

The calls are in f64, where an error in a derivative is larger than rounding errors.
(The calls of random_convs.py and random_matmuls.py have the sizes and dtypes of
calls on a GPU.)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_cudnn
from tests.lowering.derivatives import drawn_products as products
from tests.lowering.derivatives.drawing import Call, Random, activate, as_argument, some


def draw_call(op: str, activation: str | None, random: Random) -> Call:
    """Return a call of the operation, or of the Flax layer, of that name."""
    return _CALLS[op](random, activation)


def _sdpa(random: Random, activation: str | None) -> Call:
    del activation
    b, s, t, k, d, e = random.one_of(1, 2), 3, 4, random.one_of(1, 2), 3, 2
    h = k * random.one_of(1, 2)
    is_causal, with_lengths = random.chance(0.5), random.chance(0.3)
    more = some(
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


_Draw = Callable[[Random, str | None], Call]


def _of_rank(rank: int) -> _Draw:
    return lambda random, activation: products.draw_conv(random, activation, rank)


def _of_layer(kind: str, api: str) -> _Draw:
    return lambda random, activation: _layer(random, activation, kind, api)


_CALLS: dict[str, _Draw] = {
    "matmul": products.draw_matmul,
    "dot_general": products.draw_dot_general,
    "gated_matmul": products.draw_gated_matmul,
    "gated_conv": products.draw_gated_conv,
    **{f"conv{rank}d": _of_rank(rank) for rank in (1, 2, 3)},
    "sdpa": _sdpa,
    "norm": _norm,
    "avg_pool": _avg_pool,
    "ragged_dot": products.draw_ragged_dot,
    "causal_conv1d": products.draw_causal_conv1d,
    **{
        f"{api}_{kind}": _of_layer(kind, api)
        for api in ("nnx", "linen")
        for kind in ("dense", "conv", "attention")
    },
}
LAYERS = tuple(name for name in _CALLS if name.startswith(("nnx_", "linen_")))
OPERATIONS = tuple(name for name in _CALLS if name not in LAYERS)
