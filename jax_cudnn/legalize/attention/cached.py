# SPDX-License-Identifier: Apache-2.0
"""Rewrites attention over a cache for cuDNN; roles and letters as in node_kinds.json.

The cache is never copied: what would need that is left to XLA. Around the kernel,

* page numbers are cut to pages that there are, past the lengths as well, since a kernel
  may read further than it uses;
* both lengths are given, and at least one key. Tokens that the cache has no room for
  are left out of both, so that positions stay;
* rows that see no key get their defined result, 0 and log-sum-exp -inf, and rows that
  see a token that is not in the cache get NaN;
* a scale that is not positive moves into the query;
* several queries of a sequence become query heads of one query (see ``_as_heads``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.graph import CachedAttributes, Graph, Target, Tensor
from jax_cudnn.graph.attention.cached import room, sdpa_cached_graph
from jax_cudnn.legalize.attention.passes import attention_pass, run_passes
from jax_cudnn.legalize.common.editor import Env, GraphEditor, by_role
from jax_cudnn.legalize.common.legalization import ADVICE, Arrays, Legalization, Rewrite
from jax_cudnn.reference.attention import sdpa
from jax_cudnn.reference.attention.cached import Ends
from jax_cudnn.reference.attention.sequences import FARTHEST
from jax_cudnn.reference.attention.softmax import combined
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a graph of attention over a cache."""
    del target  # What a GPU or a version lacks is a limit.
    editor = GraphEditor.by_role(graph)
    if reasons := _reasons(editor):
        return Legalization(reasons=tuple(reasons), advice=ADVICE)
    as_heads = _fits_as_heads(editor)
    rewrites = [_as_heads(graph, dict(editor.tensors))] if as_heads else []
    return Legalization(candidates=(*rewrites, _edited(editor)))


def _edited(editor: GraphEditor) -> Rewrite:
    run_passes(editor, "cached")
    return editor.finish()


# --- refusals -------------------------------------------------------------------------

_DTYPES = ("bf16", "f16")


def _attributes(editor: GraphEditor) -> CachedAttributes:
    attributes = editor.main.attributes
    assert isinstance(attributes, CachedAttributes)
    return attributes


def _reasons(editor: GraphEditor) -> list[str]:
    """Return the documented limits that the graph breaks, all of them."""
    reasons: list[str] = []
    roles = editor.tensors
    query, key, value = (roles[role] for role in ("query", "key", "value"))
    if query.dtype not in _DTYPES:
        reasons.append(
            f"query is {query.dtype}; cuDNN's attention over a cache takes "
            f"{', '.join(_DTYPES)}"
        )
    is_paged, size = "page_table" in roles, key.dims[2]
    # cuDNN 9.19: "block size needs to be non-zero and a power of 2".
    if is_paged and size & (size - 1):
        reasons.append(f"pages have {size} tokens; cuDNN takes a power of two")
    for name, dim in (("d", key.dims[3]), ("e", value.dims[3])):
        if dim % 8:
            reasons.append(
                f"head size {name}={dim} is not a multiple of 8; to pad it, the whole "
                "cache would have to be copied"
            )
    window = _attributes(editor).window
    if window and min(window) < 0:
        reasons.append(f"the window {list(window)} has a negative bound")
    return reasons


# --- around the kernel ----------------------------------------------------------------


def _ends(tensors: Mapping[str, Tensor], env: Env) -> Ends:
    key_lengths, query_lengths = (
        to_logical(tensors[role], env[role]) if role in env else None
        for role in ("key_lengths", "query_lengths")
    )
    assert key_lengths is not None
    return Ends.of(key_lengths, query_lengths, tensors["query"].dims[2], room(tensors))


@attention_pass()
def hide_rows_of_cache(editor: GraphEditor) -> None:
    """Give rows that see no key, or a token that is in no cache, their result."""
    tensors, attributes = dict(editor.tensors), _attributes(editor)

    def after(env: Env, results: Env) -> None:
        ends = _ends(tensors, env)
        for role in results:
            defined = _DefinedRows.of(role, ends, attributes)
            is_computed, fill = (to_stored(tensors[role], x) for x in defined)
            x = results[role]
            results[role] = jnp.where(is_computed, x, fill.astype(x.dtype))

    editor.after.append(after)


class _DefinedRows(NamedTuple):
    """The rows that a kernel computes, and what the others are, as (b, 1, s, 1)."""

    is_computed: jax.Array
    fill: jax.Array

    @classmethod
    def of(cls, role: str, ends: Ends, attributes: CachedAttributes) -> "_DefinedRows":
        """Return them for a result."""
        is_lost = ends.lost_rows(attributes)
        empty = -jnp.inf if role == "stats" else 0.0
        return cls(
            ends.live_rows(attributes) & ~is_lost, jnp.where(is_lost, jnp.nan, empty)
        )


@attention_pass()
def complete_integers(editor: GraphEditor) -> None:
    """Give cuDNN both lengths, at least one key, and pages that there are."""
    tensors = dict(editor.tensors)
    b, pages = tensors["query"].dims[0], tensors["key"].dims[0]
    dims: dict[str, tuple[int, ...]] = {
        "query_lengths": (b, 1, 1, 1),
        "key_lengths": (b, 1, 1, 1),
    }
    if "page_table" in tensors:
        dims["page_table"] = tensors["page_table"].dims
    for role, each in dims.items():
        editor.put_operand(
            Tensor(name=role, dtype="i32", dims=each, order=(0, 1, 2, 3))
        )

    def before(env: Env) -> None:
        # No window has a negative bound here. So queries that are left out see
        # themselves, and their rows are NaN.
        ends = _ends(tensors, env).in_cache
        env["query_lengths"] = ends.query_lengths
        # Zero keys gave NaN before cuDNN 9.25 (cudnn-frontend issue #943).
        env["key_lengths"] = jnp.maximum(ends.key_lengths, 1)
        if "page_table" in env:
            table = to_logical(tensors["page_table"], env["page_table"])
            env["page_table"] = jnp.clip(table, 0, pages - 1)

    editor.before.append(before)


# --- several queries ------------------------------------------------------------------

# Up to here the kernel for one query is faster, for any number of query heads of a key
# head: see `_as_heads`.
_MOST_QUERIES = 16


def _fits_as_heads(editor: GraphEditor) -> bool:
    b, h, s, _ = editor.tensors["query"].dims
    attributes = _attributes(editor)
    window = attributes.window
    return (
        1 < s <= _MOST_QUERIES
        and max(b, h * s) <= 65535
        and (not window or (attributes.is_causal and window[0] >= s))
    )


def _as_heads(graph: Graph, roles: Mapping[str, Tensor]) -> Rewrite:
    """Make the queries of a sequence query heads of a single one.

    cuDNN's kernel for one query reads the keys once for all query heads of a key head,
    and shares them out among the GPU's processors. That for several queries reads them
    once for each query head, and multiplies what lies past a length by 0, so that NaN
    there reaches the output. On an H200 with 9.19, with 8 key heads, 4096 tokens and 64
    sequences, one query took 242 us with 1 to 16 query heads of a key head, 307 with
    32, 466 with 64 and 901 with 128. Several queries took 967 with 4 such heads, from 2
    queries to 64.

    Most tokens are seen by all queries alike. The others are few: those of the queries
    themselves, and as many at the far end of a window. Attention over these is computed
    here, and combined with the kernel's by the log-sum-exps. So the output is rounded
    twice.
    """
    (node,) = graph.nodes
    attributes = node.attributes
    assert isinstance(attributes, CachedAttributes)
    role_of = {name: role for role, name in node.outputs}
    b, h, s, d = roles["query"].dims
    single = _single_query_graph(roles, attributes)
    rewrite = _edited(GraphEditor.by_role(single))

    # For example, 5 causal queries at positions 95 to 99, with 8 heads. The query
    # (b, 8, 5, d) becomes (b, 40, 1, d): a single query, which sees keys 0 to 94.
    # `after` adds keys 95 to 99, of which each query sees those up to its own position.
    def given(operands: Sequence[jax.Array]) -> tuple[Env, Ends]:
        env = by_role(graph, operands)
        return env, _ends(roles, env)

    def as_single(env: Env, ends: Ends) -> list[jax.Array]:
        query = to_logical(roles["query"], env["query"])
        ends = ends.in_cache
        before = ends.key_lengths
        if attributes.is_causal:
            before = jnp.maximum(before - ends.query_lengths, 0)
        new = {"query": jnp.reshape(query, (b, h * s, 1, d)), "key_lengths": before}
        return [{**env, **new}[role] for role in single.inputs]

    def before(operands: Sequence[jax.Array]) -> Arrays:
        return rewrite.before(as_single(*given(operands)))

    def after(operands: Sequence[jax.Array], made: Sequence[jax.Array]) -> Arrays:
        env, ends = given(operands)
        output, stats = rewrite.after(as_single(env, ends), made)
        output, stats = (jnp.reshape(x, (b, h, s, x.shape[3])) for x in (output, stats))
        if attributes.is_causal:
            own, own_stats = _over_other_tokens(roles, attributes, env, ends)
            output, stats = combined((output, own), (stats[..., 0], own_stats[..., 0]))
            stats = stats[..., None]
        found = {"output": output, "stats": stats}
        for role, x in found.items():
            defined = _DefinedRows.of(role, ends, attributes)
            found[role] = jnp.where(defined.is_computed, x, defined.fill)
        results = (
            (tensor, found[role_of[tensor.name]]) for tensor in graph.output_tensors
        )
        return tuple(
            to_stored(tensor, x.astype(jax_dtype(tensor.dtype)))
            for tensor, x in results
        )

    return Rewrite(graph=rewrite.graph, before=before, after=after)


def _single_query_graph(
    roles: Mapping[str, Tensor], attributes: CachedAttributes
) -> Graph:
    """Return the graph of one query, whose heads are those of all.

    Its sequences end before the queries' own tokens, if a query sees none after its
    own. Its window then holds what all queries see.
    """
    b, h, s, d = roles["query"].dims
    window = attributes.window and (attributes.window[0] - s, 0)
    query = replace(roles["query"], dims=(b, h * s, 1, d), order=(0, 1, 2, 3))
    given = {"query": query}
    for role in ("key", "value", "page_table"):
        if role in roles:
            given[role] = roles[role]
    given["key_lengths"] = replace(roles["key_lengths"], order=(0, 1, 2, 3))
    return sdpa_cached_graph(
        {role: replace(tensor, name=role) for role, tensor in given.items()},
        attributes=replace(attributes, is_causal=False, window=window),
        with_stats=True,
    )


def _over_other_tokens(
    roles: Mapping[str, Tensor], attributes: CachedAttributes, env: Env, ends: Ends
) -> tuple[jax.Array, jax.Array]:
    """Return attention over tokens that not all queries see, and its log-sum-exp."""
    s = roles["query"].dims[2]
    ends = ends.in_cache
    before = jnp.maximum(ends.key_lengths - ends.query_lengths, 0)
    tokens = before + jnp.arange(s, dtype=jnp.int32)[None, None, None, :]
    is_inside = tokens < ends.key_lengths
    if attributes.window:
        # Those that the last queries do not see any more.
        left = min(attributes.window[0], FARTHEST)
        far = tokens[..., : s - 1] - left
        tokens = jnp.concatenate([far, tokens], 3)
        is_inside = jnp.concatenate([(far >= 0) & (far < before), is_inside], 3)
    places = jnp.clip(tokens[:, 0, 0], 0, max(room(roles) - 1, 0))
    first, last = ends.band(attributes)
    given = {
        "query": to_logical(roles["query"], env["query"]),
        "mask": is_inside & (first <= tokens) & (tokens <= last),
    }
    is_read = jnp.swapaxes(is_inside, 2, 3)
    for role in ("key", "value"):
        own = _tokens_at(roles, env, role, places)
        given[role] = jnp.where(is_read, own, 0)
    plain = attributes.without_band()
    found = sdpa.forward(plain, given, {})
    return found["output"], found["stats"]


def _tokens_at(
    roles: Mapping[str, Tensor], env: Env, role: str, places: jax.Array
) -> jax.Array:
    """Return the keys or values of some tokens (b, s) of each sequence, (b, k, s, d).

    They are gathered from the array as it is stored: nothing else is read.
    """
    tensor = roles[role]
    first = jnp.arange(places.shape[0], dtype=jnp.int32)[:, None]
    if "page_table" in roles:
        table = to_logical(roles["page_table"], env["page_table"])[:, 0, :, 0]
        size, pages = tensor.dims[2], tensor.dims[0]
        first = jnp.take_along_axis(table, places // size, axis=1)
        first, places = jnp.clip(first, 0, pages - 1), places % size
    where = tuple(tensor.order.index(axis) for axis in (0, 2))
    found = jnp.moveaxis(env[role], where, (0, 1))[first, places]
    heads, size = tensor.order.index(1), tensor.order.index(3)
    # (b, s, k, d), or (b, s, d, k)
    return jnp.transpose(found, (0, 2, 1, 3) if heads < size else (0, 3, 1, 2))
