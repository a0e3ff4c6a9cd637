# SPDX-License-Identifier: Apache-2.0
"""Computes attention for all public functions, from arguments to results."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Options
from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.graph.attention.score_mod import Steps
from jax_cudnn.graph.attention.sdpa import row_results
from jax_cudnn.ops.attention.attend import (
    Operands,
    attend_by_rows,
    by_rows,
    logical,
)
from jax_cudnn.ops.attention.dropout import with_dropout
from jax_cudnn.ops.attention.layouts import Layout, order_of
from jax_cudnn.ops.attention.operands import as_typed, canonicalize
from jax_cudnn.ops.attention.options import AttentionCall, TokenCounts
from jax_cudnn.ops.attention.qkv import Qkv
from jax_cudnn.ops.attention.reads import Scores
from jax_cudnn.ops.attention.score_mod import (
    ScoreMod,
    check_score_mod,
    on_scores,
    with_score_mod,
)
from jax_cudnn.ops.attention.sinks import check_sinks
from jax_cudnn.ops.attention.visibility.joining import Visibility, joined
from jax_cudnn.ops.attention.visibility.masks import Mask
from jax_cudnn.ops.attention.visibility.packing import Packed, longest
from jax_cudnn.ops.attention.visibility.predicates import Tokens
from jax_cudnn.ops.common.arguments import check_flag, why_symbolic
from jax_cudnn.ops.common.plain import check_implementation
from jax_cudnn.ops.common.tracing import UntraceableError
from jax_cudnn.reference.attention.sdpa import forward as attention


def run_sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    given: AttentionCall,
    call: Options,
    layout: Layout,
    *,
    return_residual: bool,
    return_max_logit: bool,
    qkv: Qkv | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Return the output in the layout; log-sum-exp and maximum if asked for.

    With ``qkv``, which holds query, key and value, these are types with a batch axis.
    """
    visibility = given.visibility("sdpa")
    if isinstance(given.mask, type) and issubclass(given.mask, Mask):
        name = given.mask.__name__
        raise TypeError(
            f"sdpa: mask is the class masks.{name}. Pass a mask, such as "
            f"masks.{name}()."
        )
    if isinstance(given.mask, str):
        raise TypeError(
            f"sdpa: mask is {given.mask!r} (str). It must be an array of bools or "
            "one of jax_cudnn.masks. Pass for example is_causal=True or "
            "mask=masks.Causal()."
        )
    if isinstance(given.mask, Mask):
        visibility = _joined(given.mask, visibility, query, key, layout)
    operands, has_batch = canonicalize(
        query,
        key,
        value,
        visibility.bias,
        visibility.mask,
        visibility.query_seq_lengths,
        visibility.key_value_seq_lengths,
        packed=visibility.packed,
        layout=layout,
    )
    operands = operands._replace(qkv=qkv)
    _, s, _, d = operands.query_sizes
    checked = given.attributes(
        visibility, TokenCounts(s, operands.key_count), d, operands.query.dtype
    )
    attributes = SdpaAttributes(
        **checked.common(),
        is_bottom_right=visibility.is_bottom_right,
        longest=_longest(visibility.packed, operands),
    )
    operands, attributes = with_dropout(
        "sdpa", operands, attributes, given.dropout_rate, given.dropout_key
    )
    sinks = check_sinks("sdpa", given.sinks, operands.query_sizes[2])
    if sinks is not None:
        operands = operands._replace(sinks=jnp.reshape(sinks, (1, -1, 1, 1)))
    with_lse = check_flag("sdpa", "return_residual", return_residual)
    with_max = check_flag("sdpa", "return_max_logit", return_max_logit)
    modified = _modified(given.score_mod, operands, attributes, call)
    output, *rows = _attend(
        modified.operands,
        replace(attributes, score_mod=modified.steps),
        call,
        with_lse=with_lse,
        with_max=with_max,
        plain=modified.plain,
    )
    if visibility.overrun is not None:
        tokens = Tokens(operands.query_sizes[1])
        output, *rows = visibility.overrun.put(tokens, output, rows, layout)
    if not (has_batch if qkv is None else qkv.had_batch):
        output = jnp.squeeze(output, layout.index("b"))
        rows = [x[0] for x in rows]
    return (output, *rows) if rows else output


def _joined(
    mask: Mask, beside: Visibility, query: ArrayLike, key: ArrayLike, layout: Layout
) -> Visibility:
    """Return the arguments that a mask and others beside it stand for."""
    arrays = [as_typed(name, x) for name, x in (("query", query), ("key", key))]
    if not all(x.ndim in (3, 4) for x in arrays):
        return Visibility()  # They are refused next.
    tokens = layout.replace("b", "").index("s")
    lengths = (x.shape[tokens if x.ndim == 3 else layout.index("s")] for x in arrays)
    return joined(mask, beside._replace(mask=None), *lengths)


def _longest(packed: Packed | None, operands: Operands) -> tuple[int, ...]:
    if packed is None:
        return ()
    return longest(packed, operands.query_sizes[1], operands.key_count)


class _Modified(NamedTuple):
    """The operands and steps of a score_mod, or the function itself for XLA."""

    operands: Operands
    steps: Steps = ()
    plain: ScoreMod | None = None


def _modified(
    function: ScoreMod | None,
    operands: Operands,
    attributes: SdpaAttributes,
    call: Options,
) -> _Modified:
    if function is None:
        return _Modified(operands)
    wide = jnp.float64 if operands.query.dtype == jnp.float64 else jnp.float32
    b, s, h, _ = operands.query_sizes
    scores = Scores(
        sizes=(b, h, s, operands.key_count),
        is_causal=attributes.is_causal,
        window=attributes.window,
        is_hidden=operands.may_hide_keys,
    )
    closed = check_score_mod(function, wide, scores)
    if why_symbolic(**operands.given):
        return _Modified(operands, plain=function)
    try:
        return _Modified(*with_score_mod(closed, operands))
    except UntraceableError as error:
        name = getattr(function, "__name__", type(function).__name__)
        reason = f"score_mod {name} cannot be part of a kernel: {error}."
        check_implementation("sdpa", reason, call)
        return _Modified(operands, plain=function)


def _attend(
    operands: Operands,
    attributes: SdpaAttributes,
    call: Options,
    *,
    with_lse: bool,
    with_max: bool,
    plain: ScoreMod | None,
) -> tuple[jax.Array, ...]:
    """Return the output in the layout; log-sum-exp and maximum (b, s, h) if asked for.

    ``plain`` is a score_mod that only XLA can run.
    """
    reason = why_symbolic(**operands.given)
    if not reason and plain is None:
        return attend_by_rows(
            operands, attributes, call, with_lse=with_lse, with_max=with_max
        )
    if reason:
        check_implementation("sdpa", reason, call)
    results = _plain(attributes, operands.apart, plain)
    roles = row_results(with_stats=with_lse, with_max=with_max)
    return (results["output"], *(by_rows(results[role]) for role in roles))


def _plain(
    attributes: SdpaAttributes,
    operands: Operands,
    score_mod: ScoreMod | None,
) -> dict[str, jax.Array]:
    """Return the results by the reference, for what no graph can hold."""
    inputs = logical(operands.given, operands.layout)
    function = None if score_mod is None else on_scores(score_mod)
    results = attention(attributes, inputs, {}, function)
    output = jnp.transpose(results["output"], order_of(operands.layout))
    return {**results, "output": output.astype(operands.query.dtype)}
