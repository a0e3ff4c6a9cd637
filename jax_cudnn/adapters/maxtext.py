# SPDX-License-Identifier: Apache-2.0
"""MaxText's hooks for attention and for quantised dense layers, run by jax_cudnn.

Written for MaxText 0.2.5, which is not imported here: its classes are arguments.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_cudnn import keywords as _keywords
from jax_cudnn.config import Implementation, Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.flax.linen import F8DotGeneral
from jax_cudnn.ops.attention.score_mods import softcap
from jax_cudnn.ops.attention.sdpa import sdpa
from jax_cudnn.ops.attention.visibility.masks import Mask, Segments
from jax_cudnn.ops.attention.visibility.packing import Packed
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.f8_recipes import Delayed, Recipe, check_recipe

__all__ = ["F8Quantization", "to_cudnn"]

_METHOD = "cudnn_flash_attention"
# MaxText's types of attention: whether queries see only the keys up to their own.
_IS_CAUSAL = {
    "global": True,
    "local_sliding": True,
    "chunk": True,
    "mla": True,
    "full": False,
}


def to_cudnn(attention_op: type, *, implementation: Implementation = "auto") -> None:
    """Have MaxText's attention run :func:`jax_cudnn.sdpa`, in place.

    The class's method `cudnn_flash_attention` is replaced: what runs where the
    configuration says `attention: cudnn_flash_te`, in training and prefill.
    TransformerEngine is then not needed. It computes what MaxText's `dot_product` does:

    - attention that is global, local (sliding window), chunked, full or MLA, with
      grouped heads, a soft cap and sinks, of queries that MaxText has scaled;
    - packed rows: a token sees its own segment only. With `max_segments_per_seq` above
      0 and `packing`, or without `packing`, segments are
      :class:`jax_cudnn.masks.Packed`, and otherwise a mask of all scores;
    - dropout of weights, while training.

    Args:
      attention_op: `maxtext.layers.attention_op.AttentionOp`.
      implementation: as in :func:`jax_cudnn.sdpa`. Default "auto".

    Raises:
      TypeError: `attention_op` is no class with a method `cudnn_flash_attention`.
      ValueError: an unknown `implementation`. In the model's calls: a sequence that is
        sharded (context parallelism), MoBA, block-diffusion and compressed attention,
        dropout without a stream of random keys.
      UnsupportedError, LibraryError: in the model's calls, as :func:`jax_cudnn.sdpa`.

    Notes:
      Tokens of segment 0 are padding: they see nothing and give 0. With `packing`, so
      do tokens of further segments than `max_segments_per_seq`. MaxText hands no
      bidirectional mask and no indexer's mask to this method, and decoding needs
      `attention: dot_product`.

    Example:
      >>> from jax_cudnn.adapters import maxtext
      >>> class AttentionOp:  # maxtext.layers.attention_op.AttentionOp
      ...     def cudnn_flash_attention(self, query, key, value, *rest): ...
      >>> maxtext.to_cudnn(AttentionOp)
    """
    Options(implementation=implementation)  # refuses unknown names
    if not (isinstance(attention_op, type) and hasattr(attention_op, _METHOD)):
        raise TypeError(
            f"to_cudnn: attention_op is {attention_op!r}, not a class with a method "
            f"{_METHOD}. Pass maxtext.layers.attention_op.AttentionOp, of MaxText "
            "0.2.5 or a version with the same method."
        )
    setattr(attention_op, _METHOD, _method(implementation))


def _method(implementation: Implementation) -> Callable[..., jax.Array]:
    """Return the method, whose arguments are MaxText's."""

    def cudnn_flash_attention(
        self: Any,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        decoder_segment_ids: jax.Array | None,
        segment_positions: jax.Array | None = None,
        model_mode: str = "train",
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        del segment_positions  # positions within segments follow from the segments
        kind = self.attention_type.value
        _check(self, kind)
        rate = float(self.dropout_rate) if model_mode == "train" else 0.0
        cap = self.attn_logits_soft_cap
        with on_behalf_of("AttentionOp", "sdpa"):
            return sdpa(
                query,
                key,
                value,
                mask=_mask(self, kind, query.shape[1], decoder_segment_ids),
                scale=1.0,  # MaxText scales queries
                is_causal=_IS_CAUSAL[kind],
                local_window_size=(
                    (self.sliding_window_size - 1, 0)
                    if kind == "local_sliding"
                    else None
                ),
                sinks=sinks,
                dropout_rate=rate,
                dropout_key=_dropout_key(self, rate) if rate else None,
                score_mod=softcap(cap) if cap else None,
                implementation=implementation,
            )

    return cudnn_flash_attention


def _check(op: Any, kind: str) -> None:
    """Raise for what the method does not compute."""
    if kind not in _IS_CAUSAL:
        raise ValueError(
            f'AttentionOp: attention of type "{kind}" is not computed by jax_cudnn. '
            f"It computes {', '.join(_IS_CAUSAL)}. Set attention=dot_product."
        )
    if getattr(op.config, "moba", False):
        raise ValueError(
            "AttentionOp: moba=true chooses blocks of keys by their scores, which "
            "jax_cudnn does not compute. Set attention=dot_product."
        )
    axis = op.config.context_sharding
    if (devices := op.mesh.shape.get(axis, 1)) > 1:
        raise ValueError(
            f'AttentionOp: the sequence is divided over {devices} devices, by axis "'
            f'{axis}" of the mesh. MaxText may reorder it then, which jax_cudnn does '
            "not know. Give that axis size 1, or leave to_cudnn out."
        )


def _mask(op: Any, kind: str, length: int, ids: jax.Array | None) -> Mask | None:
    """Return which tokens see which, besides causality and a window."""
    found: list[Mask] = []
    if ids is not None:
        count = op.config.max_segments_per_seq if op.config.packing else 1
        found.append(
            Packed.from_segment_ids(ids, count, padding=0)
            if count > 0
            else Segments(jnp.where(ids == 0, -1, ids), ids)
        )
    if kind == "chunk":
        chunk = jnp.arange(length, dtype=jnp.int32) // op.chunk_attn_window_size
        found.append(Segments(chunk[None]))
    return functools.reduce(lambda x, y: x & y, found) if found else None


def _dropout_key(op: Any, rate: float) -> jax.Array:
    """Return the next key of the module's stream."""
    if getattr(op.rngs, "dropout", None) is None:
        raise ValueError(
            f"AttentionOp: dropout_rate is {rate}, and rngs has no stream named "
            "dropout. Set dropout_rate=0."
        )
    return op.rngs.dropout()


@dataclass(frozen=True, slots=True)
class F8Quantization:
    """A quantisation of MaxText's dense layers: their matmuls run in f8.

    MaxText calls it for the matmul of each layer. Parameters do not move. The
    scales of `f8.Delayed` are variables in "_overwrite_with_gradient", which MaxText's
    training step carries on.

    Attributes:
      recipe: `f8.Delayed()` (default) or `f8.Current()`, as for
        :class:`jax_cudnn.flax.linen.F8DotGeneral`.
      implementation: "auto" (default), "cudnn" or "xla", as for
        :func:`jax_cudnn.matmul`.

    Example:
      >>> from jax_cudnn.adapters.maxtext import F8Quantization
      >>> quantisation = F8Quantization()
      >>> quantisation.dot_general_cls(mesh_axes=("embed", "mlp"))().recipe
      Delayed(history=16, margin=0, power_of_2=False)
    """

    needs_apply_rngs: ClassVar[bool] = False
    quant_mode: ClassVar[str] = "train"

    recipe: Recipe = Delayed()  # noqa: RUF009 (immutable)
    implementation: Implementation = "auto"

    def __post_init__(self) -> None:
        check_recipe("F8Quantization", self.recipe)
        Options(implementation=self.implementation)  # refuses unknown names

    def dot_general_cls(
        self, mesh_axes: tuple[str | None, ...] = ()
    ) -> Callable[[], F8DotGeneral]:
        """Return what makes the product of a dense layer.

        Args:
          mesh_axes: the logical axes of the kernel, which the product does not need.

        Returns:
          A function without arguments that returns a module of linen, called as
          `jax.lax.dot_general` is.
        """
        del mesh_axes
        return functools.partial(
            F8DotGeneral, recipe=self.recipe, implementation=self.implementation
        )

    def einsum(
        self, dtype: DTypeLike = jnp.float32, mesh_axes: tuple[str | None, ...] = ()
    ) -> NoReturn:
        """Raise UnsupportedError: only mixtures of experts ask for it.

        Args:
          dtype: MaxText's, ignored.
          mesh_axes: likewise.

        Raises:
          UnsupportedError: always.
        """
        del dtype, mesh_axes
        raise UnsupportedError(
            "F8Quantization: the einsums of MaxText's mixtures of experts have no "
            "product in f8.",
            advice="Leave quantisation out for such models.",
        )


_keywords.hint_on(globals(), __all__)
