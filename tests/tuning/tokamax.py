# SPDX-License-Identifier: Apache-2.0
"""Lists what tokamax runs, with what it should give; and a stand-in that runs anywhere.

Like tokamax's kernels, the stand-in leaves rows that it does not write as they are (NaN
here), multiplies rows of no group by 0, and makes NaN of a row whose bias hides a block
of keys.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from jax_cudnn import score_mods
from tests.attention.shared.dense import dense_attention

# --- what it runs ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Sizes of an attention; ``bias`` is what its bias has in place of b, h and s.

    Of values that are wider or narrower than keys, ``e`` is the size.
    """

    b: int = 2
    s: int = 128
    t: int = 256
    h: int = 4
    k: int = 2
    d: int = 64
    e: int | None = None
    bias: tuple[int, int, int] | None = (1, 4, 128)
    softcap: float | None = None
    is_causal: bool = False
    dtype: Any = jnp.bfloat16
    bias_dtype: Any = jnp.bfloat16

    def operands(self) -> list[jax.Array]:
        """Return query, key, value, the bias if there is one, and a cotangent."""
        rng = np.random.default_rng(self.s + self.h + self.d)
        e = self.e or self.d
        shapes = [
            (self.b, self.s, self.h, self.d),
            (self.b, self.t, self.k, self.d),
            (self.b, self.t, self.k, e),
            *([(*self.bias, self.t)] if self.bias else []),
            (self.b, self.s, self.h, e),
        ]
        arrays = [
            jnp.asarray(np.asarray(rng.standard_normal(x), self.dtype)) for x in shapes
        ]
        if self.bias:
            arrays[3] = arrays[3].astype(self.bias_dtype)
        return arrays

    def call(self, *operands: Any) -> jax.Array:
        """Return the attention."""
        options: dict[str, Any] = {"is_causal": self.is_causal}
        if self.softcap is not None:
            # So that it shows in scores of the usual size.
            options |= {"score_mod": score_mods.softcap(self.softcap), "scale": 1.0}
        return jax_cudnn.sdpa(*operands, **options)

    def with_gradients(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Return the result and the gradients; the last operand is a cotangent."""
        output, pullback = jax.vjp(self.call, *operands[:-1])
        return output, *pullback(operands[-1])

    def truth(self, *operands: jax.Array) -> list[np.ndarray]:
        """Return the same by definition, in float64."""
        arrays = [np.asarray(x, np.float64) for x in operands]
        shape = (self.b, self.h, self.s, self.t)
        seen = np.broadcast_to(np.tri(self.s, self.t, dtype=bool), shape)
        seen = seen | (not self.is_causal)

        def attend(*operands: Any) -> jax.Array:
            query, key, value, *bias = operands
            options: dict[str, Any] = {"bias": bias[0]} if bias else {}
            if self.softcap is not None:
                cap = self.softcap
                options |= {"score_mod": lambda x: cap * jnp.tanh(x / cap), "scale": 1}
            return dense_attention(query, key, value, seen=seen, **options)[0]

        with jax.enable_x64(True):
            output, pullback = jax.vjp(attend, *map(jnp.asarray, arrays[:-1]))
            found = output, *pullback(jnp.asarray(arrays[-1]))
            return [np.asarray(x) for x in found]


ATTENTIONS = {
    "a bias for each head": Attention(),
    "for each entry": Attention(bias=(2, 1, 128), t=128, is_causal=True),
    "one for all heads": Attention(b=3, bias=(1, 1, 128), d=128, k=4),
    "in f32": Attention(bias=(2, 4, 128), bias_dtype=jnp.float32),
    "longer": Attention(s=640, t=768, bias=(1, 4, 640), is_causal=True),
    "causal": Attention(s=256, bias=None, is_causal=True),
    "all of the keys": Attention(bias=None, d=128),
    "values of another size": Attention(t=128, bias=None, d=192, e=128, is_causal=True),
    "softcap": Attention(s=256, bias=None, softcap=5.0, is_causal=True),
}


def unusual_biases(bias: jax.Array) -> dict[str, jax.Array]:
    """Return biases that hide keys or move rows far from 0."""
    lowest = jnp.finfo(bias.dtype).min
    return {
        "a block of keys": bias.at[..., :128].set(-jnp.inf),
        "all keys of a row": bias.at[..., 0, :].set(-jnp.inf),
        "the lowest number": bias.at[..., :128].set(lowest),
        "a row far from 0": bias.at[..., 0, :].set(-1e9),
        "moderately far": bias.at[..., 1, :].set(-30000),
    }


# --- a stand-in -----------------------------------------------------------------------


def _scores(
    q: Any,
    k: Any,
    *,
    bias: Any,
    is_causal: bool,
    logits_scale: float,
    logits_soft_cap: float | None,
) -> jax.Array:
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32)
    scores = scores * logits_scale
    if bias is not None:
        scores += bias
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    is_seen = jnp.tri(*scores.shape[2:], dtype=bool) | (not is_causal)
    return jnp.where(is_seen, scores, -jnp.inf)


class _Attention:
    def bind(self, *arrays: Any, **options: Any) -> Any:
        kwargs = {"precision": None, **options, "return_residuals": False}
        return SimpleNamespace(args=arrays, kwargs=kwargs)

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        assert options.pop("return_residuals")
        scores = _scores(q, k, **options)
        bias = options["bias"]
        is_spoilt = False if bias is None else jnp.any(bias == -jnp.inf, -1)
        top = jnp.where(is_spoilt, jnp.nan, jnp.max(scores, -1))
        weights = jnp.exp(scores - top[..., None])
        total = jnp.sum(weights, -1)
        v = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
        output = jnp.einsum("bhst,bthd->bshd", weights / total[..., None], v)
        return output.astype(q.dtype), (top, total)

    def vjp(
        self, rows: Any, output: Any, grad: Any, q: Any, k: Any, v: Any, **options: Any
    ) -> dict[str, jax.Array]:
        assert options.pop("precision") is None
        top, total = (x[..., None] for x in rows)

        def scores_of(q: Any, k: Any, bias: Any) -> jax.Array:
            return _scores(q, k, **{**options, "bias": bias})

        scores, pullback = jax.vjp(scores_of, q, k, options["bias"])
        p = jnp.exp(scores - top) / total
        grad, output = (x.astype(jnp.float32) for x in (grad, output))
        wide = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
        slope = jnp.einsum("bshd,bthd->bhst", grad, wide)
        slope -= jnp.einsum("bshd,bshd->bhs", output, grad)[..., None]
        dq, dk, dbias = pullback(p * slope)
        dv = jnp.einsum("bhst,bshd->bthd", p, grad)
        dv = dv.reshape(*v.shape[:3], -1, v.shape[-1]).sum(3)
        return {"q": dq, "k": dk, "v": dv.astype(v.dtype), "bias": dbias}


def _ragged_dot(
    a: Any, b: Any, sizes: Any, *, implementation: str, **options: Any
) -> jax.Array:
    assert implementation == "mosaic"
    found = jax.lax.ragged_dot(a, b, sizes, **options)
    return jnp.where(jnp.arange(len(a))[:, None] < jnp.sum(sizes), found, jnp.nan)


def _ragged_dot_general(
    a: Any, b: Any, *given: Any, implementation: str, **options: Any
) -> jax.Array:
    assert implementation == "mosaic"
    found = jax.lax.ragged_dot_general(a, b, *given, **options)
    return found + 0 * (a.T @ b)[None]


STAND_INS: dict[str, Any] = {
    "tokamax": SimpleNamespace(
        ragged_dot=_ragged_dot, ragged_dot_general=_ragged_dot_general
    ),
    "tokamax.ops.gpu": SimpleNamespace(PallasMosaicFlashAttention=_Attention),
}
