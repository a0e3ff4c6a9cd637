# SPDX-License-Identifier: Apache-2.0
"""Lists the features of attention, each as a call whose plans can be asked for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn import (
    cached_sdpa,
    f8,
    masks,
    paged_sdpa,
    plans,
    qkv_sdpa,
    score_mods,
    sdpa,
)
from tests.plans.features import Feature, array

B, S, T, H, K, D = 2, 256, 384, 8, 2, 128


def _arrays(
    dtype: str = "bfloat16",
    *,
    s: int = S,
    t: int = T,
    h: int = H,
    k: int = H,
    d: int = D,
    e: int | None = None,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
        array(dtype, B, s, h, d),
        array(dtype, B, t, k, d),
        array(dtype, B, t, k, d if e is None else e),
    )


def _with(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: sdpa(q, k, v, **options)


def _on_numbers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    one = jnp.float32(1)
    return f8.sdpa(
        q, k, v, query_scale=one, key_scale=one, value_scale=one, output_scale=one
    )


_LENGTHS = array("int32", B)
_SQUARE = _arrays(t=S)
_TOKENS = "queries and keys"
_SCORES = "masks, biases and functions of scores"
_WEIGHTS = "softmax, dropout and sinks"
_CACHE = "caches of keys and values"
_NO_KERNEL = "the derivative is the reference's, by XLA"


def _plain() -> list[Feature]:
    def feature(name: str, operands: Any, **options: Any) -> Feature:
        return Feature(
            group=_TOKENS, name=name, call=_with(**options), operands=operands
        )

    lengths = {"b": B, "h": H, "s": S, "d": D}
    sizes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("64", {"d": 64}),
        ("40, no multiple of 16", {"d": 40}),
        ("256", {"d": 256}),
        ("192 and 128 (latent attention)", {"d": 192, "e": 128}),
        ("512", {"d": 512}),
        ("576 and 512 (latent attention)", {"d": 576, "e": 512}),
    )
    return [
        feature("bf16, heads of 128", _arrays()),
        feature("f16", _arrays("float16")),
        feature("f32", _arrays("float32")),
        *(feature(f"heads of {text}", _arrays(**size)) for text, size in sizes),
        feature("grouped key heads", _arrays(k=K)),
        feature("one query", _arrays(s=1)),
        feature("odd lengths, 77 and 131", _arrays(s=77, t=131)),
        feature(
            "deterministic gradients",
            _arrays(),
            plan=plans.PlanOptions(deterministic=True),
        ),
        *(
            Feature(
                group=_TOKENS,
                name=f"stored as {' '.join(layout)}",
                call=_with(layout=layout),
                operands=(array("bfloat16", *(lengths[x] for x in layout)),) * 3,
            )
            for layout in ("bhsd", "sbhd")
        ),
        *(
            Feature(
                group=_TOKENS,
                name=f"one array of q, k and v, {text}",
                call=lambda qkv, layout=layout, k=k: qkv_sdpa(
                    qkv, layout=layout, key_value_heads=k, is_causal=True
                ),
                operands=(array("bfloat16", *shape),),
                trained=(0,),
            )
            for text, layout, k, shape in (
                ("b s 3 h d", "bs3hd", None, (B, S, 3, H, D)),
                ("b s h 3 d", "bsh3d", None, (B, S, H, 3, D)),
                ("grouped key heads", "bshd", K, (B, S, H + 2 * K, D)),
            )
        ),
        Feature(
            group=_TOKENS,
            name="log-sum-exp as a result, with its cotangent",
            call=lambda q, k, v: sdpa(q, k, v, return_residual=True),
            operands=_arrays(),
        ),
        Feature(
            group=_TOKENS,
            name="maximum of the logits as a result, with its cotangent",
            call=lambda q, k, v: sdpa(q, k, v, return_max_logit=True),
            operands=_arrays(),
        ),
    ]


def _hidden() -> list[Feature]:
    def feature(name: str, call: Any, *more: Any, trained: Any = (0, 1, 2)) -> Feature:
        return Feature(
            group=_SCORES,
            name=name,
            call=call,
            operands=(*_SQUARE, *more),
            trained=trained,
        )

    bias = array("bfloat16", B, H, S, S)
    return [
        feature("causal", _with(is_causal=True)),
        feature("causal from the last key", _with(mask=masks.Causal("bottom-right"))),
        feature("causal window", _with(is_causal=True, local_window_size=(64, 0))),
        feature("window on both sides", _with(local_window_size=(64, 32))),
        feature(
            "lengths",
            lambda q, k, v, s, t: sdpa(
                q, k, v, query_seq_lengths=s, key_value_seq_lengths=t
            ),
            _LENGTHS,
            _LENGTHS,
        ),
        feature(
            "packed sequences, causal",
            lambda q, k, v, ends: sdpa(
                q, k, v, mask=masks.Packed(ends), is_causal=True
            ),
            array("int32", B, 5),
        ),
        feature(
            "boolean mask",
            lambda q, k, v, mask: sdpa(q, k, v, mask=mask),
            array("bool", B, 1, S, S),
        ),
        feature("bias", lambda q, k, v, bias: sdpa(q, k, v, bias=bias), bias),
        feature(
            "bias, with its gradient",
            lambda q, k, v, bias: sdpa(q, k, v, bias=bias),
            bias,
            trained=(0, 1, 2, 3),
        ),
        feature(
            "bias of all batch entries, with its gradient",
            lambda q, k, v, bias: sdpa(q, k, v, bias=bias),
            array("bfloat16", 1, H, S, S),
            trained=(0, 1, 2, 3),
        ),
        feature(
            "bias, causal",
            lambda q, k, v, bias: sdpa(q, k, v, bias=bias, is_causal=True),
            bias,
        ),
        feature("softcap", _with(score_mod=score_mods.softcap(30.0))),
        feature(
            "softcap, causal",
            _with(score_mod=score_mods.softcap(30.0), is_causal=True),
        ),
        feature(
            "ALiBi, causal",
            _with(
                score_mod=score_mods.alibi(score_mods.alibi_slopes(H)), is_causal=True
            ),
        ),
    ]


def _weighted() -> list[Feature]:
    key = jax.random.key(0)
    drop = {"dropout_rate": 0.125, "dropout_key": key}
    return [
        Feature(
            group=_WEIGHTS,
            name="dropout",
            call=_with(**drop),
            operands=_SQUARE,
        ),
        Feature(
            group=_WEIGHTS,
            name="sinks, with their gradient",
            call=lambda q, k, v, sinks: sdpa(q, k, v, sinks=sinks, is_causal=True),
            operands=(*_SQUARE, array("float32", H)),
            trained=(0, 1, 2, 3),
        ),
        Feature(
            group=_WEIGHTS,
            name="sinks and a bias, with both gradients",
            call=lambda q, k, v, sinks, bias: sdpa(q, k, v, bias, sinks=sinks),
            operands=(
                *_SQUARE,
                array("float32", H),
                array("bfloat16", 1, H, S, S),
            ),
            trained=(0, 1, 2, 3, 4),
        ),
        Feature(
            group=_WEIGHTS,
            name="f8 (e4m3) operands and result",
            call=_on_numbers,
            operands=_arrays("float8_e4m3fn"),
            trained=(),
            why="see f8.quantized_sdpa",
        ),
        Feature(
            group=_WEIGHTS,
            name="f8.quantized_sdpa, 16-bit operands",
            call=lambda q, k, v: f8.quantized_sdpa(q, k, v),
            operands=_SQUARE,
        ),
    ]


def _cached() -> list[Feature]:
    def over_cache(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return cached_sdpa(q, k, v, lengths)

    def over_pages(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        return paged_sdpa(q, k, v, table, lengths)

    pages = (array("bfloat16", 64, 64, K, D),) * 2
    counts = (("one query", 1), ("4 queries", 4), ("a prompt", 64))
    return [
        *(
            Feature(
                group=_CACHE,
                name=name,
                call=over_cache,
                operands=(*_arrays(s=s, k=K), _LENGTHS),
                trained=(),
                why=_NO_KERNEL,
            )
            for name, s in counts
        ),
        *(
            Feature(
                group=_CACHE,
                name=f"{name}, pages of 64 tokens",
                call=over_pages,
                operands=(
                    array("bfloat16", B, s, H, D),
                    *pages,
                    array("int32", B, 6),
                    _LENGTHS,
                ),
                trained=(),
                why=_NO_KERNEL,
            )
            for name, s in counts
        ),
    ]


FEATURES: tuple[Feature, ...] = (*_plain(), *_hidden(), *_weighted(), *_cached())
