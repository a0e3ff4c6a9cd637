# SPDX-License-Identifier: Apache-2.0
"""Runs attention's graph on operands that are checked, as `jax_cudnn.sdpa` has them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.config import Options
from jax_cudnn.graph import SdpaAttributes, Tensor, sdpa_graph
from jax_cudnn.lowering import run_graph
from jax_cudnn.ops.arguments import tensor

# Stored (b, s, h, d) for logical (b, h, s, d).
_BSHD = (0, 2, 1, 3)
_PLAIN = (0, 1, 2, 3)


class Operands(NamedTuple):
    """The operands with a batch axis; absent ones are None."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    query_lengths: jax.Array | None
    key_lengths: jax.Array | None
    query_starts: jax.Array | None = None
    key_starts: jax.Array | None = None
    dropout_seed: jax.Array | None = None
    dropout_offset: jax.Array | None = None
    # 1 where a probability is kept, in place of seed and offset.
    dropout_mask: jax.Array | None = None
    # What a score_mod reads: graph/score_mod.py.
    mod_a: jax.Array | None = None
    mod_b: jax.Array | None = None
    mod_c: jax.Array | None = None
    mod_d: jax.Array | None = None

    @property
    def given(self) -> dict[str, jax.Array]:
        """Those that are there, by role."""
        return {role: x for role, x in self._asdict().items() if x is not None}


def attend(
    operands: Operands, attributes: SdpaAttributes, call: Options, *, with_stats: bool
) -> list[jax.Array]:
    """Return output (b, s, h, e) and, if asked for, log-sum-exp (b, h, s, 1)."""
    graph = sdpa_graph(
        sdpa_tensors(operands.given),
        attributes=attributes,
        output_order=_BSHD,
        with_stats=with_stats,
    )
    return run_graph(graph, list(operands.given.values()), call)


def sdpa_tensors(operands: dict[str, jax.Array]) -> dict[str, Tensor]:
    """Return the tensors of operands by role, in the operands' order."""
    return {role: tensor(role, x, stored_order(role)) for role, x in operands.items()}


def stored_order(role: str) -> tuple[int, ...]:
    """Return the order in which an operand or result stores (b, h, s, d)."""
    return _BSHD if role in _WITH_TOKENS_FIRST else _PLAIN


_WITH_TOKENS_FIRST = ("query", "key", "value", "output", "grad_output")


def of_rows(x: jax.Array) -> jax.Array:
    """Return numbers of rows, (b, s, h), as graphs have them, (b, h, s, 1)."""
    return jnp.swapaxes(x, 1, 2)[..., None]
