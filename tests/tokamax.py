# SPDX-License-Identifier: Apache-2.0
"""What tokamax runs, with what it should give; and a stand-in that runs anywhere.

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
from tests.dense import dense_attention

# --- what it runs ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Sizes of an attention; ``bias`` is what its bias has in place of b, h and s."""

    b: int = 2
    s: int = 128
    t: int = 256
    h: int = 4
    k: int = 2
    d: int = 64
    bias: tuple[int, int, int] = (1, 4, 128)
    is_causal: bool = False
    dtype: Any = jnp.bfloat16
    bias_dtype: Any = jnp.bfloat16

    def operands(self) -> list[jax.Array]:
        """Return query, key, value, bias and a cotangent."""
        rng = np.random.default_rng(self.s + self.h + self.d)
        shapes = [
            (self.b, self.s, self.h, self.d),
            (self.b, self.t, self.k, self.d),
            (self.b, self.t, self.k, self.d),
            (*self.bias, self.t),
            (self.b, self.s, self.h, self.d),
        ]
        dtypes = [self.dtype] * 3 + [self.bias_dtype, self.dtype]
        return [
            jnp.asarray(rng.standard_normal(shape), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    def call(self, query: Any, key: Any, value: Any, bias: Any) -> jax.Array:
        """Return the attention."""
        return jax_cudnn.sdpa(query, key, value, bias, is_causal=self.is_causal)

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

        def attend(query: Any, key: Any, value: Any, bias: Any) -> jax.Array:
            return dense_attention(query, key, value, bias=bias, seen=seen)[0]

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
    q: Any, k: Any, *, bias: Any, is_causal: bool, logits_scale: float
) -> jax.Array:
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32)
    scores = scores * logits_scale + bias
    is_seen = jnp.tri(*scores.shape[2:], dtype=bool) | (not is_causal)
    return jnp.where(is_seen, scores, -jnp.inf)


class _Attention:
    def bind(self, *arrays: Any, **options: Any) -> Any:
        kwargs = {"precision": None, **options, "return_residuals": False}
        return SimpleNamespace(args=arrays, kwargs=kwargs)

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        assert options.pop("return_residuals")
        scores = _scores(q, k, **options)
        is_spoilt = jnp.any(options["bias"] == -jnp.inf, -1)
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
