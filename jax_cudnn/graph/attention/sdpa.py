# SPDX-License-Identifier: Apache-2.0
"""The attention nodes: `sdpa` and its gradient.

Their tensors are described in node_kinds.json. ``bias`` is added to the scaled scores;
a ``mask`` is False where a key is hidden from a query; queries and keys at or past
``query_lengths`` and ``key_lengths`` are hidden; ``stats`` is the log-sum-exp of the
scores.

A row may hold n sequences, each with a length and a start (``query_starts``,
``key_starts``; without these, one begins where the one before it ends). Query i belongs
to the first sequence j with starts[j] <= i < starts[j] + lengths[j], and sees keys of
the same sequence. Causality and windows count positions within it. What belongs to no
sequence gives 0, log-sum-exp -inf and gradient 0, and is not read. In place of starts,
cuDNN gets offsets: where in the array of a tensor each sequence begins, counted in
elements, all rows one after another, and the number of elements at the end.

With dropout, probabilities are dropped after the softmax, and ``stats`` is that without
it. Which ones are dropped follows from a seed, and an offset for each batch entry and
head: reference/attention/dropout.py. Each batch entry and head has its offset, so
devices can share them out, and each entry may have its seed, so examples of a vmap fold
into the batch. What entries share is there once. A kernel takes one seed and one
offset, from which it counts on (``dropout_heads`` is 0 then), or the mask that follows,
1 where a probability is kept.

Query, key and value may be one operand, ``qkv``: graph/attention/qkv.py.

``mod_a`` to ``mod_d`` are what ``score_mod`` reads beside the scores.

``sinks`` are scores of one more key for each head, whose value is 0. Every query sees
it; it is part of ``stats``, and neither scaled nor modified nor dropped.

``max_logit`` is the largest of a row's scores as the softmax of its keys reads them:
scaled, modified and biased, without hidden keys and the sink. ``sum_exp`` is the sum
of exp(score - max_logit) over these keys, which kernels give in place of ``stats``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jax_cudnn.graph.attention.qkv import check_parts, part_tensor, parts_of
from jax_cudnn.graph.attention.score_mod import Steps, check_score_mod
from jax_cudnn.graph.kinds import Roles
from jax_cudnn.graph.shapes import result_like
from jax_cudnn.graph.spec import Attributes, Graph, Tensor
from jax_cudnn.graph.transforms.gradient_kernel import (
    register_with_gradient,
    single_node_graph,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionAttributes(Attributes):
    """Static configuration of every attention.

    ``scale`` multiplies query-key products before the bias is added; with
    ``is_causal`` a query at position i sees keys 0 to i. A ``window`` of (left, right)
    lets it see keys i - left to i + right; () is none.
    """

    scale: float
    is_causal: bool
    window: tuple[int, ...] = ()

    def common(self) -> dict[str, Any]:
        """Return these by their names, without those that only some attention has."""
        return {
            each.name: getattr(self, each.name) for each in fields(AttentionAttributes)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpaAttributes(AttentionAttributes):
    """Static configuration of attention, forward and backward.

    Query i is at position i, counted from the first key (top-left alignment). With
    ``is_bottom_right`` the last query of a sequence has the position of its last key,
    so it is the query's number plus its sequence's key length minus query length.
    ``longest`` is the most tokens that a sequence has, of queries and of keys; what is
    beyond is padding, and () is no limit.

    ``is_partial`` means something to the gradient only. The keys are then a part of
    those that the queries see, and ``output`` and ``stats`` are those of all of them:
    with P = exp(S - stats) and delta = rowsum(output * grad_output), the gradients of
    all parts add up to that of the whole. Without it, both follow from the operands.

    ``dropout`` is the share of probabilities that is dropped, a multiple of 2^-16, and
    ``dropout_heads`` and ``dropout_batch`` are the numbers of query heads and batch
    entries that offsets are counted over (0 for all entries that there are). A device
    may have some of these only. Where examples were folded it is 1 entry: a device may
    have some entries of each example, so that two which meet are not counted on.

    ``score_mod`` are the steps of a function that the scaled scores go through before
    the bias is added (see graph/attention/score_mod.py); () is none. ``score_mod_grad``
    are the steps to its gradient, which follow from it: legalisation writes them for
    kernels.
    """

    is_partial: bool = False
    is_bottom_right: bool = False
    longest: tuple[int, ...] = ()
    dropout: float = 0
    dropout_heads: int = 0
    dropout_batch: int = 0
    score_mod: Steps = ()
    score_mod_grad: Steps = ()

    def folded(self, letter: str) -> "SdpaAttributes":
        """Return the attributes where examples are the slower part of a letter."""
        is_counted = letter == "b" and bool(self.dropout_batch)
        return replace(self, dropout_batch=1) if is_counted else self


def sdpa_graph(
    inputs: Mapping[str, Tensor],
    *,
    attributes: SdpaAttributes,
    output_order: tuple[int, ...] = (0, 1, 2, 3),
    query_heads: int = 0,
    with_stats: bool = False,
    with_max: bool = False,
) -> Graph:
    """Build the one-node forward graph; tensors are named by their roles.

    ``inputs`` maps roles to tensors of the same name, in operand order. Only an operand
    ``qkv`` needs ``query_heads``; the output then stores its axes as qkv does.
    """
    if (qkv := inputs.get("qkv")) is not None:
        part = parts_of(qkv.dims, query_heads)["query"]
        output = part_tensor(qkv, "output", part)
    else:
        output = result_like(SDPA.row, "output", inputs, attributes)
        output = replace(output, order=output_order)
    outputs = {"output": output}
    for role in row_results(with_stats=with_stats, with_max=with_max):
        roles = {**inputs, "output": output}
        outputs[role] = result_like(SDPA.row, role, roles, attributes)
    return single_node_graph(SDPA.name, inputs, outputs, attributes)


def row_results(*, with_stats: bool, with_max: bool) -> tuple[str, ...]:
    """Return the roles of the results with a number for each row that are asked for."""
    asked = {"stats": with_stats, "max_logit": with_max}
    return tuple(role for role, is_asked in asked.items() if is_asked)


def sdpa_backward_graph(
    inputs: Mapping[str, Tensor],
    *,
    attributes: SdpaAttributes,
    gradients_of: tuple[str, ...] = (),
) -> Graph:
    """Build the one-node gradient graph; tensors are named by their roles.

    ``inputs`` maps roles to tensors of the same name, in operand order. A gradient is
    stored as its operand is. Beside those of query, key and value, there are those of
    the roles asked for, in the order of the table.
    """
    roles = ["query", "key", "value", *gradients_of]
    outputs = {f"grad_{x}": replace(inputs[x], name=f"grad_{x}") for x in roles}
    return single_node_graph(f"{SDPA.name}_backward", inputs, outputs, attributes)


def _check(roles: Roles, attributes: Attributes) -> None:
    assert isinstance(attributes, SdpaAttributes)
    check_score_mod(attributes.score_mod, attributes.score_mod_grad, roles)
    if "qkv" in roles:
        check_parts(roles)


def _cancelled(roles: Roles) -> frozenset[str]:
    """Return the gradients that are sums of terms which cancel.

    They do where output and log-sum-exp are those of the row: for a bias that all keys
    of a row share, and with a single key for all that makes its score. A sink is
    another key, and the maximum follows a score that all keys share.
    """
    found: set[str] = set()
    if "sinks" in roles or "grad_max_logit" in roles:
        return frozenset()
    if "bias" in roles and roles["bias"].dims[3] == 1:
        found.add("grad_bias")
    keys = roles["qkv"].dims[3] if "qkv" in roles else roles["key"].dims[2]
    if keys == 1 and "grad_stats" not in roles:
        # Those of queries and keys in one array have those of values beside them.
        found |= {"grad_query", "grad_key", "grad_bias"}
    return frozenset(found & roles.keys())


SDPA = register_with_gradient(
    "sdpa",
    SdpaAttributes,
    check=_check,
    check_gradient=_check,
    cancelled=_cancelled,
)
