# SPDX-License-Identifier: Apache-2.0
"""Describes a device's share of attention: static settings, and the arrays."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.config import Options
from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.graph.attention.score_mod import OPERANDS
from jax_cudnn.ops.attention.visibility.predicates import (
    InSequence,
    Overrun,
    Predicate,
    Tokens,
)
from jax_cudnn.ops.common.meshes import AxisName
from jax_cudnn.parallel.order import all_positions, positions_of
from jax_cudnn.parallel.schedule import Band, Call, Order

Method = Literal["ring", "all_gather", "all_to_all"]

# What is ([b], [h], [s], [t]) and gets gradients.
SCORES = ("bias", *OPERANDS)
# They say something of whole sequences, and nothing of heads.
SEQUENCES = ("query_lengths", "key_lengths", "query_starts", "key_starts")
# The names of the arrays of predicates begin with it.
_PREDICATE = "predicate_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The static settings of a call; hashable.

    ``attributes`` are those of a call of attention on whole sequences. ``predicates``
    is the structure of the mask's predicates, whose arrays are operands.
    """

    axis_name: AxisName
    count: int
    order: Order
    method: Method
    call: Options
    attributes: SdpaAttributes
    with_lse: bool
    predicates: Any = None

    @property
    def band(self) -> Band:
        """The band of keys that causality and the window let a query see."""
        return Band.of(
            is_causal=self.attributes.is_causal, window=self.attributes.window
        )

    @property
    def device(self) -> jax.Array:
        """The number of this device along the axis."""
        return jax.lax.axis_index(self.axis_name)

    def attributes_of(self, call: Call, longest: tuple[int, ...]) -> SdpaAttributes:
        """Return the attributes of a call on a part of the queries and keys."""
        return replace(
            self.attributes,
            is_causal=call.is_causal,
            window=call.window,
            longest=longest,
            # What is dropped is an operand: see blocks.py.
            dropout_heads=0,
            dropout_batch=0,
        )


class Shards(NamedTuple):
    """A device's shards of the operands; absent ones are None.

    Letters as in `sdpa`, with s and t for one device's tokens and n devices:

    * query (b, s, h, d), key (b, t, k, d), value (b, t, k, e);
    * bias, mask and what a score_mod reads ([b], [h], [s], [n t]), in brackets what may
      be 1, the keys of all devices one after another;
    * lengths and starts of sequences (b, sequences, 1, 1), in the whole sequence;
    * the seed of dropout (1, 1, 1, 1) and its offsets (b, h, 1, 1);
    * shift ([b], [h], [s], 1), to be subtracted from the bias (see `bias_shift`). The
      log-sum-exp is that of the scores with it subtracted;
    * sinks ([b], [s], h), with the shift subtracted. The log-sum-exp with them is that
      with their base subtracted as well (see `base_of`);
    * the arrays of the mask's predicates, of whole sequences.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    query_starts: jax.Array | None = None
    key_starts: jax.Array | None = None
    dropout_seed: jax.Array | None = None
    dropout_offset: jax.Array | None = None
    mod_a: jax.Array | None = None
    mod_b: jax.Array | None = None
    mod_c: jax.Array | None = None
    mod_d: jax.Array | None = None
    shift: jax.Array | None = None
    sinks: jax.Array | None = None
    predicates: tuple[jax.Array, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, jax.Array]) -> "Shards":
        """Return shards from arrays by their names."""
        own = {role: x for role, x in given.items() if not role.startswith(_PREDICATE)}
        return cls(**own, predicates=predicate_arrays(given))

    @property
    def given(self) -> dict[str, jax.Array]:
        """Those that are there, by their names."""
        own = self._asdict()
        arrays = own.pop("predicates")
        return {role: x for role, x in own.items() if x is not None} | named(arrays)

    @property
    def scores(self) -> dict[str, jax.Array]:
        """The bias and what a score_mod reads, as far as they are there."""
        return {role: x for role in SCORES if (x := getattr(self, role)) is not None}


def named(arrays: Any) -> dict[str, jax.Array]:
    """Return the arrays of predicates by names."""
    return {f"{_PREDICATE}{i}": x for i, x in enumerate(arrays)}


def predicate_arrays(given: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Return the arrays of predicates among arrays by their names, in their order."""
    return tuple(x for role, x in given.items() if role.startswith(_PREDICATE))


def predicates_of(problem: Problem, shards: Shards) -> tuple[Predicate, ...]:
    """Return the mask's predicates."""
    return tuple(
        x for x in _all_predicates(problem, shards) if not isinstance(x, Overrun)
    )


def overrun_of(problem: Problem, shards: Shards) -> Overrun | None:
    """Return which queries see a token that is not in the cache; None for none."""
    found = _all_predicates(problem, shards)
    return next((x for x in found if isinstance(x, Overrun)), None)


def _all_predicates(problem: Problem, shards: Shards) -> tuple[Any, ...]:
    if problem.predicates is None:
        return ()
    return jax.tree.unflatten(problem.predicates, shards.predicates)


def membership(shards: Shards) -> InSequence | None:
    """Return the predicate of lengths with starts; None without these."""
    if shards.query_starts is None or shards.key_starts is None:
        return None
    assert shards.query_lengths is not None
    assert shards.key_lengths is not None

    def numbers(x: jax.Array) -> jax.Array:
        return x[:, :, 0, 0]

    return InSequence(
        numbers(shards.query_starts),
        numbers(shards.query_lengths),
        numbers(shards.key_starts),
        numbers(shards.key_lengths),
    )


# --- biases ---------------------------------------------------------------------------


def without_row_bias(shards: Shards) -> tuple[Shards, jax.Array | None]:
    """Return the shards without a bias that is one number for all keys of a row.

    It moves the row's log-sum-exp, and hides the row if it is -inf (`with_row_bias`).
    """
    bias = shards.bias
    if bias is None or bias.shape[3] != 1:
        return shards, None
    return shards._replace(bias=None), bias


def with_row_bias(
    bias: jax.Array | None, output: jax.Array, stats: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return output (b, s, h, e) and log-sum-exp (b, s, h) with such a bias."""
    if bias is None:
        return output, stats
    rows = of_stats(bias).astype(stats.dtype)
    is_hidden = rows == -jnp.inf
    output = jnp.where(is_hidden[..., None], jnp.zeros((), output.dtype), output)
    # Neither side of a row without keys gets a gradient.
    is_dead = is_hidden | (stats == -jnp.inf)
    return output, jnp.where(is_dead, -jnp.inf, stats + rows)


def of_stats(rows: jax.Array) -> jax.Array:
    """Return ([b], [h], [s], 1) as log-sum-exps are, ([b], [s], [h])."""
    return jnp.swapaxes(rows[..., 0], 1, 2)


# Log-sum-exps that are further than this from 0 lose digits that matter, see
# legalize/attention/far_rows.py. In every float dtype, numbers that are larger differ
# by numbers that it holds exactly, as far as these matter beside the largest.
_FAR = 2.0**10


def bias_shift(problem: Problem, shards: Shards) -> jax.Array | None:
    """Return what to subtract from each row of the bias, as ([b], [h], [s], 1).

    That is the row's largest number where this is far from 0, as in a row of -1e9. The
    softmax does not depend on it. The parts of a row meet through their log-sum-exps,
    which have no digits left for the number of keys beside -1e9.

    Batch entries and heads that share a bias share the shift: a bias of their own would
    take many times the memory.
    """
    bias = shards.bias
    if bias is None:
        return None
    is_seen = _seen(problem, shards)
    seen = bias if is_seen is None else jnp.where(is_seen, bias, -jnp.inf)
    shared = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
    largest = jnp.max(seen, axis=(*shared, 3), keepdims=True)
    largest = jax.lax.stop_gradient(largest)
    is_far = jnp.isfinite(largest) & (jnp.abs(largest) > _FAR)
    return jnp.where(is_far, largest, jnp.zeros((), largest.dtype))


def base_of(sinks: jax.Array) -> jax.Array:
    """Return what to subtract from a row's log-sum-exps beside its sink.

    That is the sink where it is above 0. Where it is huge, since the row was shifted by
    a bias of -1e9, the log-sum-exp is the sink, whose digits the shift would take.
    """
    sinks = jax.lax.stop_gradient(sinks)
    return jnp.where(jnp.isfinite(sinks), jnp.maximum(sinks, 0), 0)


def _seen(problem: Problem, shards: Shards) -> jax.Array | None:
    """Return which keys of all devices each query sees, None for all of them."""
    count, order = problem.count, problem.order
    s, t = shards.query.shape[1], shards.key.shape[1]
    columns = jnp.asarray(all_positions(count, t, order))
    rows = positions_of(problem.device, count, s, order)
    conditions = [] if shards.mask is None else [shards.mask]
    packing = membership(shards)
    if packing is None and shards.key_lengths is not None:
        conditions.append(columns[None, None, None, :] < shards.key_lengths)
    if not problem.band.is_everything:
        difference = (columns[None, :] - rows[:, None])[None, None]
        lowest, highest = (
            int(max(-(2**30), min(x, 2**30)))
            for x in (problem.band.lowest, problem.band.highest)
        )
        conditions.append((lowest <= difference) & (difference <= highest))
    predicates = predicates_of(problem, shards)
    for predicate in (*predicates, *(() if packing is None else (packing,))):
        seen = predicate.seen(Tokens(s, rows), Tokens(count * t, columns))
        conditions.append(seen)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None
