# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in float64: a loop over tokens and their choices, in NumPy."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

ARRAYS = {
    "router_w": "DE",
    "selection_bias": "E",
    "gate_w": "EDF",
    "up_w": "EDF",
    "down_w": "EFD",
    "gate_bias": "EF",
    "up_bias": "EF",
    "down_bias": "ED",
    "shared_gate_w": "DG",
    "shared_up_w": "DG",
    "shared_down_w": "GD",
}
# What every layer has.
PLAIN = ("router_w", "gate_w", "up_w", "down_w")


class Mixture(NamedTuple):
    """The results of a layer."""

    output: np.ndarray
    load_balance_loss: float
    z_loss: float
    load: np.ndarray
    dropped: float


def drawn(
    seed: int, names: Any = tuple(ARRAYS), dtype: Any = np.float32, **sizes: int
) -> dict[str, Any]:
    """Return x and weights by name, of sizes T tokens, D, E, F and G."""
    rng = np.random.default_rng(seed)
    axes = {"x": "TD", **{name: ARRAYS[name] for name in names}}
    return {
        name: jnp.asarray(
            np.asarray(rng.standard_normal([sizes[a] for a in letters]), dtype)
        )
        for name, letters in axes.items()
    }


def silu(x: np.ndarray) -> np.ndarray:
    """Return x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def mixture(
    x: Any,
    *,
    top_k: int,
    scores: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    groups: tuple[int, int] | None = None,
    capacity_factor: float | None = None,
    **arrays: Any,
) -> Mixture:
    """Return the results for tokens (t, d), with "silu" as the activation."""
    x = np.asarray(x, np.float64)
    w = {
        name: None if value is None else np.asarray(value, np.float64)
        for name, value in {**dict.fromkeys(ARRAYS), **arrays}.items()
    }
    z = x @ w["router_w"]
    t, e = z.shape
    if scores == "softmax":
        s = np.exp(z - z.max(-1, keepdims=True))
        s /= s.sum(-1, keepdims=True)
    else:
        s = 1 / (1 + np.exp(-z))
    chosen = [
        _best(s[i], w["selection_bias"], top_k, groups or (1, 1)) for i in range(t)
    ]
    room = np.full(e, np.inf)
    if capacity_factor is not None:
        room[:] = np.ceil(capacity_factor * top_k * t / e)
    output = np.zeros_like(x)
    load, dropped = np.zeros(e), 0
    for j in range(top_k):
        for i in range(t):
            expert = chosen[i][j]
            load[expert] += 1
            if not room[expert]:
                dropped += 1
                continue
            room[expert] -= 1
            weight = s[i, expert] * scale
            if normalize:
                weight /= s[i, chosen[i]].sum()
            output[i] += weight * _mlp(x[i], w, expert)
    if w["shared_up_w"] is not None:
        output += _shared(x, w)
    load /= max(t * top_k, 1)
    mean = (s / s.sum(-1, keepdims=True)).sum(0) / max(t, 1)
    log_sums = np.log(np.exp(z).sum(-1))
    z_loss = (log_sums**2).sum() / max(t, 1)
    fraction = dropped / max(t * top_k, 1)
    return Mixture(output, e * (load * mean).sum(), z_loss, load, fraction)


def _best(scores: Any, bias: Any, top_k: int, groups: tuple[int, int]) -> list[int]:
    """Return the experts of a token, the best one first."""
    ranked = scores if bias is None else scores + bias
    count, kept = groups
    parts = np.arange(len(ranked)).reshape(count, -1)
    parts = sorted(parts, key=lambda part: -np.sort(ranked[part])[-2:].sum())
    eligible = np.concatenate(parts[:kept])
    return sorted(eligible, key=lambda expert: -ranked[expert])[:top_k]


def _mlp(x: np.ndarray, w: dict[str, Any], expert: int) -> np.ndarray:
    def product(x: np.ndarray, name: str) -> np.ndarray:
        bias = w[f"{name}_bias"]
        return x @ w[f"{name}_w"][expert] + (0 if bias is None else bias[expert])

    if w["gate_w"] is None:
        return product(silu(product(x, "up")), "down")
    return product(silu(product(x, "gate")) * product(x, "up"), "down")


def _shared(x: np.ndarray, w: dict[str, Any]) -> np.ndarray:
    up = x @ w["shared_up_w"]
    if w["shared_gate_w"] is None:
        return silu(up) @ w["shared_down_w"]
    return (silu(x @ w["shared_gate_w"]) * up) @ w["shared_down_w"]
