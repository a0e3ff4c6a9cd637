# SPDX-License-Identifier: Apache-2.0
"""Writes new tokens into a cache or into pages: one scatter, on each device its part.

Where types say that devices share a cache, the scatter runs in `jax.shard_map`. New
tokens are sent to where they may belong; the cache stays where it is.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.lowering import (
    axes_in,
    explicit_mesh,
    explicit_spec,
    is_explicitly_sharded,
    typed_as,
)
from jax_cudnn.ops.attention.layouts import Layout


class CacheAxes(NamedTuple):
    """The axes of sequences, or pages, and of tokens."""

    first: int
    tokens: int

    @classmethod
    def of(cls, layout: Layout) -> "CacheAxes":
        """Return where a layout has them."""
        return cls(layout.index("b"), layout.index("s"))

    def are_alike(self, x: jax.Array, y: jax.Array) -> bool:
        """Whether both have these axes, and all others in common."""

        def others(x: jax.Array) -> list[int]:
            return [n for i, n in enumerate(x.shape) if i not in self]

        return x.ndim == y.ndim > max(self) and others(x) == others(y)

    def in_words(self, first: str, tokens: str) -> str:
        """Return the axes, in words."""
        names = {self.first: first, self.tokens: tokens}
        found = (names.get(i, "heads") for i in range(max(self) + 1))
        return ", ".join((*found, "..."))

    def spec_of_tokens(self, old: jax.Array, *, is_paged: bool) -> tuple[Any, ...]:
        """Return how new tokens are sharded, given the array that they are put into.

        Each device has all that may go into its own part.
        """
        whole = self if is_paged else (self.tokens,)
        return tuple(
            None if axis in whole else entry
            for axis, entry in enumerate(explicit_spec(old))
        )


def typed_for(
    old: jax.Array,
    axes: CacheAxes,
    tokens: jax.Array,
    numbers: Sequence[jax.Array],
    *,
    is_paged: bool,
) -> list[jax.Array]:
    """Return new tokens and numbers of sequences, sharded in their types as is needed.

    Each device writes into its own part of `old`, which stays where it is.
    """
    like = (old, tokens, *numbers)
    if not any(map(is_explicitly_sharded, like)):
        return [tokens, *numbers]
    spec = axes.spec_of_tokens(old, is_paged=is_paged)
    of_numbers = (spec[axes.first],)
    return [
        typed_as(tokens, spec, like),
        *(typed_as(x, of_numbers, like) for x in numbers),
    ]


def written(
    axes: CacheAxes,
    old: jax.Array,
    tokens: jax.Array,
    slots: jax.Array,
    pages: jax.Array | None = None,
) -> jax.Array:
    """Return `old` with tokens in their slots (b, s) of their sequence, or page (b, s).

    Those for which there is no slot or page, such as -1, are dropped. No two others are
    at one place.
    """
    operands = [tokens, slots, *([] if pages is None else [pages])]
    spec = explicit_spec(old)
    if not is_explicitly_sharded(old):
        return _scattered(axes, old, *operands)
    first = None if pages is not None else spec[axes.first]
    specs = [axes.spec_of_tokens(old, is_paged=pages is not None)]
    specs += [(first, None)] * (len(operands) - 1)
    program = _by_devices(explicit_mesh([old]), axes, (spec, *specs))
    return program(old, *operands)


# One for each way to call it, so that calls outside of jit compile once.
@functools.lru_cache(maxsize=256)
def _by_devices(mesh: Any, axes: CacheAxes, specs: tuple[tuple[Any, ...], ...]) -> Any:
    """Return what writes into an array that devices share, each into its own part."""
    spec = specs[0]

    def write(
        old: jax.Array,
        tokens: jax.Array,
        slots: jax.Array,
        pages: jax.Array | None = None,
    ) -> jax.Array:
        def own(numbers: jax.Array, axis: int) -> jax.Array:
            names = axes_in(spec[axis])
            if not names:
                return numbers
            # What is nowhere, -1, is so everywhere.
            moved = numbers - jax.lax.axis_index(names) * old.shape[axis]
            return jnp.where(numbers < 0, -1, moved)

        slots = own(slots, axes.tokens)
        if pages is None:
            return _scattered(axes, old, tokens, slots)
        return _scattered(axes, old, tokens, slots, own(pages, axes.first))

    in_specs = tuple(jax.sharding.PartitionSpec(*each) for each in specs)
    return jax.jit(
        jax.shard_map(
            write,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=in_specs[0],
            axis_names={name for entry in spec for name in axes_in(entry)},
        )
    )


def _scattered(
    axes: CacheAxes,
    old: jax.Array,
    tokens: jax.Array,
    slots: jax.Array,
    pages: jax.Array | None = None,
) -> jax.Array:
    """Return the same on one device, or where XLA divides the work among several.

    Sequences are a batch axis of the scatter, so that XLA sends nothing between devices
    that share them.
    """
    size, count = old.shape[axes.tokens], slots.shape[1]
    is_here = (slots >= 0) & (slots < size)
    others = [axis for axis in range(old.ndim) if axis not in axes]
    # An index below 0 would count from the end. These lie past it, and differ.
    spare = jnp.arange(count, dtype=jnp.int32)[None]
    if pages is None:
        indices = jnp.where(is_here, slots, size + spare)[..., None]
        if axes.tokens < axes.first:
            indices = jnp.swapaxes(indices, 0, 1)
        numbers = jax.lax.ScatterDimensionNumbers(
            update_window_dims=tuple(others),
            inserted_window_dims=(axes.tokens,),
            scatter_dims_to_operand_dims=(axes.tokens,),
            operand_batching_dims=(axes.first,),
            scatter_indices_batching_dims=(int(axes.tokens < axes.first),),
        )
    else:
        p = old.shape[axes.first]
        is_here = is_here & (pages >= 0) & (pages < p)
        rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
        pages = jnp.where(is_here, pages, p + rows * count + spare)
        indices = jnp.stack([pages, jnp.where(is_here, slots, 0)], axis=-1)
        numbers = jax.lax.ScatterDimensionNumbers(
            update_window_dims=tuple(others),
            inserted_window_dims=tuple(axes),
            scatter_dims_to_operand_dims=tuple(axes),
        )
    return jax.lax.scatter(
        old, indices, tokens, numbers, unique_indices=True, mode="drop"
    )
