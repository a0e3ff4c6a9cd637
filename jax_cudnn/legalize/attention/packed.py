# SPDX-License-Identifier: Apache-2.0
"""Legalises attention whose rows hold several sequences.

cuDNN takes them one after another ("ragged", THD): each tensor comes with the places
in memory where its sequences begin, and nothing is padded. Beside a bias or a mask, and
where a GPU or a version has no plan for that, the sequences become a mask of s * t.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from jax_cudnn.graph import Graph, SdpaAttributes, Target, Tensor
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.legalize.attention.masks import (
    DEAD_STATS,
    GRADIENTS_ALONG,
    where_logical,
)
from jax_cudnn.legalize.attention.operands import (
    attributes_in,
    by_other_operands,
    operands_in,
)
from jax_cudnn.legalize.attention.padding import STATS_COLUMNS, WIDE_MULTIPLE
from jax_cudnn.legalize.attention.passes import attention_pass, attributes_of
from jax_cudnn.legalize.common.editor import Env, GraphEditor
from jax_cudnn.legalize.common.layout import rounded_up
from jax_cudnn.legalize.common.legalization import Legalization, Rewrite, Rule
from jax_cudnn.limits.attention import LARGE_PACKED_HEADS, NO_PACKED_STATS
from jax_cudnn.reference.attention import sequences
from jax_cudnn.reference.attention.sequences import Spans
from jax_cudnn.reference.interpreter import to_logical, to_stored

# Sizes of tiles divide it, so no kernel has fewer tiles than for the sequences alone.
# Counts of keys with t % 128 = 64 and a single query, which kernels compute wrongly
# (padding.py), are none of its multiples.
_LENGTH_MULTIPLE = 128
_DTYPES = ("bf16", "f16")
_BSHD = (0, 2, 1, 3)
# The tensors of a graph that share the offsets of a role.
_WITH_OFFSETS = {
    "query": ("query", "grad_query"),
    "key": ("key", "grad_key"),
    "value": ("value", "grad_value"),
    "output": ("output", "grad_output"),
    "stats": ("stats", "max_logit"),
}


def by_packing(
    graph: Graph,
    target: Target | None,
    *,
    rule: Rule,
    ragged: Callable[[Graph], Rewrite],
) -> Legalization:
    """Legalise a graph by a rule for rows of one sequence, and one for several."""
    attributes, roles = attributes_in(graph), roles_in(graph, graph.nodes[0])
    if not sequences.is_packed(attributes, roles):
        return rule(graph, target)
    reason = _why_not_ragged(attributes, roles, target)
    by_mask = _as_mask(graph, target, rule, reason)
    if reason or not by_mask.candidates:
        return by_mask
    return replace(by_mask, candidates=(ragged(graph), *by_mask.candidates))


def _why_not_ragged(
    attributes: SdpaAttributes, roles: Mapping[str, Tensor], target: Target | None
) -> str:
    """Return why cuDNN cannot take the sequences as they are; "" if it may."""
    query = roles["query"]
    if found := [role for role in ("bias", "mask") if role in roles]:
        return f"cuDNN has no packed sequences with a {found[0]}"
    if not roles.keys().isdisjoint(("dropout_seed", "dropout_mask")):
        return "dropout depends on the positions in whole rows"
    if attributes.score_mod:
        return "cuDNN has no packed sequences with a score_mod"
    if query.dtype not in _DTYPES:
        return f"query is {query.dtype}, and cuDNN packs bf16 and f16"
    if any(bound < 0 for bound in attributes.window):
        return f"cuDNN has no band for the window {list(attributes.window)}"
    if NO_PACKED_STATS.is_here(target):
        return NO_PACKED_STATS.message(target, roles)
    if LARGE_PACKED_HEADS.is_here(target) and _largest_gradient_head(roles) > 128:
        return LARGE_PACKED_HEADS.message(target, roles)
    largest = max(math.prod(tensor.dims) for tensor in roles.values())
    if largest * _most_padding(query, roles["value"]) >= 2**31:
        return "their offsets would be 2^31 or more"
    n = _count(roles)
    # A dimension of a launch grid.
    if query.dims[0] * n > 65535:
        return f"{query.dims[0]} rows of {n} sequences exceed 65535"
    return ""


def _largest_gradient_head(roles: Mapping[str, Tensor]) -> int:
    """Return the largest head size that a gradient's kernel gets; forward, 0."""
    if "grad_output" not in roles:
        return 0
    more = STATS_COLUMNS if "grad_stats" in roles else 0
    return max(roles["query"].dims[3], roles["value"].dims[3] + more)


def _most_padding(query: Tensor, value: Tensor) -> float:
    """Return how much larger head sizes may become by padding."""
    return max(
        (x.dims[3] + 2 * WIDE_MULTIPLE) / max(x.dims[3], 1) for x in (query, value)
    )


def _count(roles: Mapping[str, Tensor]) -> int:
    found = [
        roles[f"{kind}_lengths"]
        for kind in GRADIENTS_ALONG
        if f"{kind}_lengths" in roles
    ]
    return max((tensor.dims[1] for tensor in found), default=1)


# --- as cuDNN's packed sequences ------------------------------------------------------


@attention_pass()
def pack_tokens(editor: GraphEditor) -> None:
    """Store tokens one after another, and give padding its defined results.

    Kernels leave what is in no sequence as it was. Queries that see no key are not
    among the kernel's: it gets the others only.
    """
    for role in (*editor.inputs, *editor.outputs):
        if len(editor.tensors[role].dims) == 4 and role not in _COUNTS:
            editor.reorder(role, _BSHD)
    tensors = dict(editor.tensors)
    sizes = {kind: tensors[kind].dims[2] for kind in GRADIENTS_ALONG}
    attributes = attributes_of(editor)

    def before(env: Env) -> None:
        seen = _seen(attributes, tensors, env)
        is_live = sequences.is_inside(sizes["query"], seen["query"])
        for role, fill in (("stats", DEAD_STATS), ("grad_stats", 0)):
            if role in env:
                env[role] = where_logical(tensors[role], is_live, env[role], fill)

    def after(env: Env, results: Env) -> None:
        seen = _seen(attributes, tensors, env)
        for kind, spans in seen.items():
            is_live = sequences.is_inside(sizes[kind], spans)
            fills = dict.fromkeys(GRADIENTS_ALONG[kind], 0.0)
            if kind == "query":
                fills |= {"output": 0.0, "stats": -math.inf, "max_logit": -math.inf}
            for role, fill in fills.items():
                if role in results:
                    results[role] = where_logical(
                        tensors[role], is_live, results[role], fill
                    )

    editor.before.append(before)
    editor.after.append(after)


_COUNTS = ("query_lengths", "key_lengths", "query_starts", "key_starts")


@attention_pass()
def put_offsets(editor: GraphEditor) -> None:
    """Give the kernel offsets in place of starts; the last step, with all sizes final.

    The frontend takes a tensor of b * n + 1 offsets for each tensor, in elements.
    """
    tensors, attributes = dict(editor.tensors), attributes_of(editor)
    b, n = tensors["query"].dims[0], _count(tensors)
    for role in ("query_starts", "key_starts"):
        if role in tensors:
            editor.drop(role)
    for kind in GRADIENTS_ALONG:
        editor.put_operand(
            Tensor(
                name=f"{kind}_lengths",
                dtype="i32",
                dims=(b, n, 1, 1),
                order=(0, 1, 2, 3),
            )
        )
    strides: dict[str, int] = {}
    for role, names in _WITH_OFFSETS.items():
        if found := [tensors[name] for name in names if name in tensors]:
            _, heads, _, width = found[0].dims
            strides[role] = heads * width
            editor.put_operand(
                Tensor(
                    name=f"{role}_offsets",
                    dtype="i32",
                    dims=(b * n + 1, 1, 1, 1),
                    order=(0, 1, 2, 3),
                )
            )
    sizes = {kind: tensors[kind].dims[2] for kind in GRADIENTS_ALONG}
    longest = attributes.longest or tuple(sizes.values())
    longest = tuple(
        rounded_up(max(min(most, size), 1), _LENGTH_MULTIPLE)
        for most, size in zip(longest, sizes.values(), strict=True)
    )
    editor.set_attributes(replace(attributes, longest=longest))

    def before(env: Env) -> None:
        # Two rows of 8 tokens, with sequences that start at 0 and 5 in the first row,
        # and at 0 and 3 in the second: `tokens` is (0, 5, 8, 11, 16). A query of 4
        # heads of size 16 has 64 elements a token, and its offsets are
        # (0, 320, 512, 704, 1024).
        seen = _seen(attributes, tensors, env)
        for kind, spans in seen.items():
            env[f"{kind}_lengths"] = spans.lengths[:, :, None, None]
            rows = jnp.arange(b, dtype=jnp.int32)[:, None] * sizes[kind]
            tokens = jnp.ravel(rows + spans.starts)
            tokens = jnp.append(tokens, jnp.int32(b * sizes[kind]))
            for role, stride in strides.items():
                if (role in ("key", "value")) == (kind == "key"):
                    offsets = tokens * jnp.int32(stride)
                    env[f"{role}_offsets"] = offsets[:, None, None, None]

    editor.before.append(before)


def _seen(
    attributes: SdpaAttributes, tensors: Mapping[str, Tensor], env: Env
) -> dict[str, Spans]:
    """Return the sequences of queries and keys, without queries that see no key.

    With bounds that are not negative these are the first or last of their sequence. A
    sequence that lacks queries or keys is empty: cuDNN gave NaN for those without keys
    before 9.25 (cudnn-frontend issue #943).
    """
    arrays = {
        role: to_logical(tensors[role], env[role]) for role in _COUNTS if role in env
    }
    shaped = {kind: _ShapeOnly(tensors[kind].dims) for kind in GRADIENTS_ALONG}
    queries, keys = sequences.spans(attributes, {**arrays, **shaped})  # type: ignore[arg-type]
    left, right = _bounds(attributes)
    # A causal sequence of 5 queries and 3 keys, aligned at its end: `more` is -2, so
    # queries 0 and 1 see no key, and the kernel's sequence begins with query 2.
    more = jnp.zeros((), jnp.int32)
    if attributes.is_bottom_right:
        more = keys.lengths - queries.lengths
    first, end = jnp.zeros_like(queries.lengths), queries.lengths
    if right is not None:
        first = jnp.clip(-more - right, 0, end)
    if left is not None:
        end = jnp.clip(keys.lengths - more + left, first, end)
    is_used = (end > first) & (keys.lengths > 0)
    return {
        "query": Spans(
            starts=queries.starts + first, lengths=jnp.where(is_used, end - first, 0)
        ),
        "key": Spans(starts=keys.starts, lengths=jnp.where(is_used, keys.lengths, 0)),
    }


class _ShapeOnly(NamedTuple):
    """A stand-in for an array of which only the shape is read."""

    shape: tuple[int, ...]


def _bounds(attributes: SdpaAttributes) -> tuple[int | None, int | None]:
    left = right = None
    if attributes.window:
        left, right = sequences.cut_window(attributes.window)
    if attributes.is_causal:
        right = 0
    return left, right


# --- as a mask ------------------------------------------------------------------------


def _as_mask(
    graph: Graph, target: Target | None, rule: Rule, reason: str
) -> Legalization:
    """Legalise a graph as one whose mask says which keys a query sees.

    Padding is 0 there.
    """
    given, attributes = operands_in(graph), attributes_in(graph)
    b, _, s, _ = given["query"].dims
    heads = given["mask"].dims[1] if "mask" in given else 1
    mask = Tensor(
        name="mask",
        dtype="bool",
        dims=(b, heads, s, given["key"].dims[2]),
        order=(0, 1, 2, 3),
    )
    kept = {role: tensor for role, tensor in given.items() if role not in _COUNTS}

    def made(env: Env) -> Env:
        logical = {role: to_logical(given[role], x) for role, x in env.items()}
        is_seen = sequences.visible(attributes, logical, (b, 1, *mask.dims[2:]))
        if "mask" in logical:
            is_seen = is_seen & logical["mask"]
        cleaned = dict(sequences.without_padding(attributes, logical))
        if "sinks" in logical:
            # Padding has these too: the log-sum-exp of the sink alone.
            of_sinks = ("stats", "grad_stats")
            cleaned |= {role: logical[role] for role in of_sinks if role in logical}
        changed = {
            role: to_stored(given[role], cleaned[role])
            for role, x in logical.items()
            if cleaned[role] is not x
        }
        return {**env, **changed, "mask": jnp.broadcast_to(is_seen, mask.dims)}

    return by_other_operands(
        graph,
        target,
        rule,
        tensors={**kept, "mask": mask},
        attributes=replace(
            attributes, is_causal=False, window=(), is_bottom_right=False, longest=()
        ),
        made=made,
        note="the sequences of a row become a mask, in memory that grows with s*t: "
        f"{reason or 'cuDNN has no plan for packed sequences'}",
    )
