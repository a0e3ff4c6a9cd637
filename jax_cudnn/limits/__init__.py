# SPDX-License-Identifier: Apache-2.0
"""Lists what cuDNN does not take or computes wrongly, by version and GPU: a row each.

Legalisation drops the graphs that meet a limit, and asks the other rows by name how to
write a graph. The doctor warns of the limits that are bugs. docs/known_bugs.md lists
the rows that are of some versions or GPUs only (python -m scripts.known_bugs). No other
module that writes graphs compares a version or an architecture.
"""

from jax_cudnn.graph import Graph, Target
from jax_cudnn.limits import attention, norms, products
from jax_cudnn.limits.rows import Limit, Row

__all__ = ["LIMITS", "WORKAROUNDS", "Limit", "Row", "met", "table"]

LIMITS: tuple[Limit, ...] = (*attention.LIMITS, *products.LIMITS, *norms.LIMITS)
# Not reasons to drop a graph, but to write it in another way.
WORKAROUNDS: tuple[Row, ...] = attention.WORKAROUNDS


def met(graph: Graph, target: Target | None) -> tuple[Limit, ...]:
    """Return the limits that are in the way of a graph on a target."""
    return tuple(limit for limit in LIMITS if limit.is_met(graph, target))


def table() -> str:
    """Return the rows that are of some versions or GPUs only, as a Markdown table."""
    lines = ["| cuDNN, GPUs | bug or limitation | what is done | seen or reported |"]
    lines += ["| --- | --- | --- | --- |"]
    lines += [
        f"| {row.where} | {row.what} | {row.done} | {row.source} |"
        for row in (*LIMITS, *WORKAROUNDS)
        if not row.is_general
    ]
    return "\n".join(lines) + "\n"
