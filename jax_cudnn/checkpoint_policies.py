# SPDX-License-Identifier: Apache-2.0
"""Policies for `jax.checkpoint`: JAX's own, and those for attention and norms.

JAX's policies treat calls of jax_cudnn as they treat the matmuls, convolutions and
attention of plain JAX, so `jax.checkpoint_policies.dots_saveable` and
`jax_cudnn.checkpoint_policies.dots_saveable` are the same object.
"""

from collections.abc import Callable
from typing import Any

from jax import checkpoint_policies as _jax
from jax.ad_checkpoint import Offloadable, Recompute

from jax_cudnn.lowering import F8_COPIES as _F8_COPIES
from jax_cudnn.lowering import kernels_of as _kernels_of

everything_saveable = _jax.everything_saveable
nothing_saveable = _jax.nothing_saveable
dots_saveable = _jax.dots_saveable
checkpoint_dots = _jax.checkpoint_dots
dots_with_no_batch_dims_saveable = _jax.dots_with_no_batch_dims_saveable
checkpoint_dots_with_no_batch_dims = _jax.checkpoint_dots_with_no_batch_dims
offload_dot_with_no_batch_dims = _jax.offload_dot_with_no_batch_dims
save_anything_except_these_names = _jax.save_anything_except_these_names
save_any_names_but_these = _jax.save_any_names_but_these
save_only_these_names = _jax.save_only_these_names
save_from_both_policies = _jax.save_from_both_policies
save_and_offload_only_these_names = _jax.save_and_offload_only_these_names
_f8_copies = _jax.save_only_these_names(_F8_COPIES)


def attention_saveable(prim: Any, *_: Any, **params: Any) -> bool:
    """Save the output and the log-sum-exp of attention, and compute all else again.

    This holds for `sdpa`, `qkv_sdpa`, `cached_sdpa`, `paged_sdpa`, `f8` and `parallel`.
    Pass the function itself as the ``policy`` of `jax.checkpoint`.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> policy = jax_cudnn.checkpoint_policies.attention_saveable
      >>> attend = jax.checkpoint(lambda q: jax_cudnn.sdpa(q, q, q), policy=policy)
      >>> jax.grad(lambda q: attend(q).sum())(jnp.ones((1, 5, 2, 8))).shape
      (1, 5, 2, 8)
    """
    return any(kind.startswith("sdpa") for kind in _kernels_of(prim, params))


def norms_saveable(prim: Any, *_: Any, **params: Any) -> bool:
    """Save the output and the statistics of norms, and compute all else again.

    This holds for `layer_norm`, `rms_norm`, `adaptive_layer_norm`, `group_norm`,
    `instance_norm` and `batch_norm`. An output has the size of the norm's input, which
    is saved or computed again as well, so this policy takes memory to save little time.
    Pass the function itself as the ``policy`` of `jax.checkpoint`.
    """
    return any(kind.endswith("_norm") for kind in _kernels_of(prim, params))


def dots_and_attention_saveable(prim: Any, *args: Any, **params: Any) -> bool:
    """Save attention, and what `dots_with_no_batch_dims_saveable` saves.

    For transformers: the results of the linear layers and of attention are saved.
    Norms, activations and other elementwise operations are computed again. Pass the
    function itself as the ``policy`` of `jax.checkpoint`.
    """
    if attention_saveable(prim, *args, **params):
        return True
    return dots_with_no_batch_dims_saveable(prim, *args, **params)


def f8_saveable(prim: Any, *args: Any, **params: Any) -> bool:
    """Save the copies in f8 of `f8.dense` and `f8.gated_mlp`, and compute all else.

    A copy takes half of the memory of an array of 16 bits. Products are computed again
    where their results are read backward, as by an activation. Pass the function itself
    as the ``policy`` of `jax.checkpoint`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn import checkpoint_policies, f8
      >>> policy = checkpoint_policies.f8_saveable
      >>> layer = jax.checkpoint(f8.dense, policy=policy)
      >>> jax.grad(lambda x: layer(x, x.T).sum())(jnp.ones((16, 32))).shape
      (16, 32)
    """
    return _f8_copies(prim, *args, **params)


def offload_dots_and_attention(
    offload_src: str, offload_dst: str
) -> Callable[..., Any]:
    """Return `dots_and_attention_saveable` for another kind of memory.

    Args:
      offload_src: where the results are computed, "device".
      offload_dst: where they are kept until the backward pass, "pinned_host".
    """

    def policy(prim: Any, *args: Any, **params: Any) -> Any:
        if dots_and_attention_saveable(prim, *args, **params):
            return Offloadable(src=offload_src, dst=offload_dst)
        return Recompute

    return policy


__all__ = [
    "attention_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_and_attention_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "f8_saveable",
    "norms_saveable",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "offload_dots_and_attention",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_only_these_names",
]
