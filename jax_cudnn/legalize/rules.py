# SPDX-License-Identifier: Apache-2.0
"""What a legalisation is: candidates in order of preference, or reasons."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from jax_cudnn.graph import Graph, Target

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Legal:
    """A graph that cuDNN may take in place of another one.

    ``before`` maps the operands of the original graph to those of ``graph``; ``after``
    maps (original operands, results of ``graph``) to the original graph's results.
    ``notes`` says, a sentence each, which parts run outside cuDNN and why. ``slower``,
    where not empty, says why "auto" leaves the graph to XLA all the same.
    """

    graph: Graph
    before: Callable[[Sequence[jax.Array]], Arrays]
    after: Callable[[Sequence[jax.Array], Sequence[jax.Array]], Arrays]
    notes: tuple[str, ...] = ()
    slower: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Legalization:
    """The candidates in order of preference, or the reasons why there is none."""

    candidates: tuple[Legal, ...] = ()
    reasons: tuple[str, ...] = ()
    advice: str = ""


# A target of None stands for an unknown GPU: only what no GPU can do is refused.
Rule = Callable[[Graph, Target | None], Legalization]
