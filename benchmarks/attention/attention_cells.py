# SPDX-License-Identifier: Apache-2.0
"""Lists the attention that is timed, and the options that each library is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.torch_side import torch
from jax_cudnn import masks, plans, score_mods

# Documents in the rows of the packed workload, as shares of a row.
_DOCUMENTS = (1, 3, 2, 8, 5, 1, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Operands of a size, and the contenders; letters as in jax_cudnn.sdpa.

    Attributes:
      ours: options of `jax_cudnn.sdpa` for a length, made when the workload is run.
      is_flaxs: whether `jax_cudnn.flax.attention_fn` is called, beside Flax's.
      is_f8: whether `jax_cudnn.f8.sdpa` is called, beside `sdpa` on bf16.
      theirs: options of `jax.nn.dot_product_attention`, or None where it has no such
        feature.
      torch: options of PyTorch's attention, likewise.
      tokamax: options of tokamax's, likewise.
      has_xla: whether XLA's attention of `jax.nn` is a contender, whose scores fit in
        memory.
      has_bias: whether a learned bias, shared by the batch, is a fourth operand.
      has_sinks: whether a logit for each head, in f32, is the last operand.
      flex: what `flex_attention` takes, given its module and a length.
      varlen: where sequences begin, and the last one ends, in a row of a length, for
        PyTorch's `varlen_attn`. It is causal.
      is_deterministic: whether PyTorch's kernels are asked for the same bits each time.
      has_gradient: whether the gradient is timed too.
      is_tuned: whether the call is timed as `plans.autotune` chooses, too.
      is_checked: whether results are compared. Each library draws its own dropout, and
        no truth of a million tokens is computed.
    """

    name: str
    b: int
    s: int
    h: int
    k: int
    d: int
    ours: Callable[[int], dict[str, Any]]
    e: int | None = None
    theirs: dict[str, Any] | None = None
    torch: dict[str, Any] | None = None
    tokamax: dict[str, Any] | None = None
    has_xla: bool = False
    has_bias: bool = False
    has_sinks: bool = False
    flex: Callable[[Any, int], dict[str, Any]] | None = None
    varlen: Callable[[int], np.ndarray] | None = None
    is_flaxs: bool = False
    is_f8: bool = False
    is_deterministic: bool = False
    has_gradient: bool = True
    is_tuned: bool = False
    is_checked: bool = True

    def __str__(self) -> str:
        return self.name


def _bounds(s: int) -> np.ndarray:
    """Return where the documents of a row begin, and its end."""
    shares = np.cumsum((0, *_DOCUMENTS)) / sum(_DOCUMENTS)
    return np.round(shares * s).astype(np.int32)


def _packed(s: int) -> dict[str, Any]:
    return {"mask": masks.Packed(jnp.asarray(_bounds(s))), "is_causal": True}


def _segment_ids(s: int) -> np.ndarray:
    return np.searchsorted(_bounds(s), np.arange(s), side="right").astype(np.int32)


def _flex_mask(flex: Any, s: int, is_seen: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return the option for a mask that is causal, and what more is asked for."""

    def seen(b: Any, h: Any, row: Any, column: Any) -> Any:
        del b, h
        return (row >= column) & is_seen(row, column)

    return {"block_mask": flex.create_block_mask(seen, None, None, s, s)}


def _flex_window(flex: Any, s: int, left: int) -> dict[str, Any]:
    return _flex_mask(flex, s, lambda row, column: row - column <= left)


def _flex_documents(flex: Any, s: int) -> dict[str, Any]:
    ids = torch.as_tensor(_segment_ids(s)).cuda()
    return _flex_mask(flex, s, lambda row, column: ids[row] == ids[column])


def _flex_causal(flex: Any, s: int) -> dict[str, Any]:
    return _flex_mask(flex, s, lambda row, column: row >= column)


def _flex_softcap(flex: Any, cap: float) -> dict[str, Any]:
    del flex
    return {"score_mod": lambda score, *_: cap * torch.tanh(score / cap)}


_CAUSAL: dict[str, Any] = {"is_causal": True}
_LEFT = 511


def _dropout(_: int) -> dict[str, Any]:
    return {"is_causal": True, "dropout_rate": 0.125, "dropout_key": jax.random.key(0)}


def _shared_dropout(_: int) -> dict[str, Any]:
    return {"dropout_rate": 0.125, "dropout_rng": jax.random.key(0)}


WORKLOADS = (
    *(
        Workload(
            name=f"causal, d={d}", b=4, s=4096, h=16, k=16, d=d,
            ours=lambda _: _CAUSAL, theirs=_CAUSAL, torch=_CAUSAL, tokamax=_CAUSAL,
        )
        for d in (64, 128, 256)
    ),
    Workload(
        name="grouped key heads, 32 and 8", b=4, s=4096, h=32, k=8, d=128,
        ours=lambda _: _CAUSAL, theirs=_CAUSAL, torch=_CAUSAL, tokamax=_CAUSAL,
    ),
    *(
        Workload(
            name=f"a learned bias, d={d}", b=8, s=2048, h=16, k=16, d=d, has_bias=True,
            ours=lambda _: {}, theirs={}, torch={}, tokamax={},
            flex=lambda flex, _: {}, is_tuned=True,
        )
        for d in (64, 128)
    ),
    Workload(
        name=f"causal window of {_LEFT + 1}", b=2, s=8192, h=16, k=16, d=128,
        ours=lambda _: {**_CAUSAL, "local_window_size": (_LEFT, 0)},
        theirs={**_CAUSAL, "local_window_size": (_LEFT, 0)},
        tokamax={**_CAUSAL, "local_window_size": (_LEFT, 0)},
        flex=lambda flex, s: _flex_window(flex, s, _LEFT),
    ),
    Workload(
        name="softcap", b=4, s=2048, h=16, k=16, d=128,
        ours=lambda _: {"score_mod": score_mods.softcap(30.0)},
        tokamax={"logits_soft_cap": 30.0},
        flex=lambda flex, _: _flex_softcap(flex, 30.0), is_tuned=True,
    ),
    Workload(
        name="packed documents", b=1, s=16384, h=16, k=16, d=128,
        ours=_packed, flex=_flex_documents, varlen=_bounds,
    ),
    Workload(
        name="sinks", b=4, s=4096, h=16, k=16, d=128, has_sinks=True,
        ours=lambda _: _CAUSAL, flex=_flex_causal,
    ),
    *(
        Workload(
            name=f"dropout{text}", b=4, s=4096, h=16, k=16, d=d,
            ours=_dropout, torch={**_CAUSAL, "dropout_p": 0.125}, is_checked=False,
        )
        for text, d in (("", 128), (", d=64", 64))
    ),
    *(
        Workload(
            name=f"dropout that heads share, s={s}", b=b, s=s, h=h, k=h, d=d,
            ours=_shared_dropout, is_flaxs=True, is_checked=False,
        )
        for b, s, h, d in ((32, 1024, 12, 64), (128, 197, 12, 64), (4, 4096, 16, 128))
    ),
    *(
        Workload(
            name=f"deterministic gradient{text}", b=4, s=4096, h=16, k=16, d=d,
            ours=lambda _: {**_CAUSAL, "plan": plans.PlanOptions(deterministic=True)},
            torch=_CAUSAL, is_deterministic=True,
        )
        for text, d in (("", 128), (", d=64", 64))
    ),
    *(
        Workload(
            name=f"f8, d={d}", b=4, s=4096, h=16, k=16, d=d,
            ours=lambda _: _CAUSAL, is_f8=True, has_gradient=False,
        )
        for d in (64, 128)
    ),
    Workload(
        name="latent attention, d=192, e=128", b=4, s=4096, h=16, k=16, d=192, e=128,
        ours=lambda _: _CAUSAL, torch=_CAUSAL, tokamax=_CAUSAL, is_tuned=True,
    ),
    Workload(
        name="a million tokens, 4 heads and 1", b=1, s=1 << 20, h=4, k=1, d=128,
        ours=lambda _: _CAUSAL, has_gradient=False, is_checked=False,
    ),
)  # fmt: skip
