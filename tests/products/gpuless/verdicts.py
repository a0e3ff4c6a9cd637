# SPDX-License-Identifier: Apache-2.0
"""Asks cuDNN whether it plans each case of conv and matmul for a named GPU.

`partition`, `legalize` and `rank` are called as in the lowering. The first candidate
that cuDNN lists a plan for is taken.
"""

import functools
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from jax_cudnn.graph import Graph, Target, is_anchor, to_json
from jax_cudnn.legalize import Legalization, Rewrite, legalize
from jax_cudnn.policy import rank
from tests.common.gpuless import harness
from tests.products.shared import fusion_cases
from tests.products.shared.fusion_cases import Part


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A part with its candidates, or why there are none.

    ``answers`` are cuDNN's, to the candidates up to the first that has a plan.
    """

    part: Part
    candidates: tuple[Rewrite, ...]
    answers: tuple[dict[str, Any], ...]
    reasons: tuple[str, ...]

    @property
    def key(self) -> str:
        """The case and the step."""
        return self.part.key

    @property
    def has_contraction(self) -> bool:
        """Whether the part is meant for cuDNN; XLA runs the others by default."""
        return any(map(is_anchor, self.part.graph.nodes))

    @property
    def found(self) -> Rewrite | None:
        """The first candidate that cuDNN has a plan for."""
        both = zip(self.candidates, self.answers, strict=False)
        return next(
            (rewrite for rewrite, answer in both if "candidates" in answer), None
        )


@functools.cache
def _parts() -> tuple[Part, ...]:
    return tuple(part for case in fusion_cases.ALL for part in fusion_cases.parts(case))


@functools.cache
def verdicts(gpu: str, keys: tuple[str, ...] = ()) -> tuple[Verdict, ...]:
    """Return cuDNN's verdict on every part, or those of the keys; builds no plan."""
    chosen = [part for part in _parts() if not keys or part.key in keys]
    legalized = [(part, _legalized(part.graph, harness.target(gpu))) for part in chosen]
    texts = [[to_json(c.graph) for c in each.candidates] for _, each in legalized]
    answers = _first_planned(texts, gpu)
    return tuple(
        Verdict(
            part=part,
            candidates=each.candidates,
            answers=tuple(answers[text] for text in takewhile(answers.get, own)),
            reasons=each.reasons,
        )
        for (part, each), own in zip(legalized, texts, strict=True)
    )


def _legalized(part: Graph, target: Target) -> Legalization:
    """Return the ways to run a part, ranked, or why there are none."""
    found = legalize(part, target)
    ways = rank(part, found.candidates, target)
    return replace(found, candidates=tuple(way.rewrite for way in ways))


def _first_planned(choices: list[list[str]], gpu: str) -> dict[str, dict[str, Any]]:
    """Ask for each list of graphs until one has a plan, and return all answers."""
    answers: dict[str, dict[str, Any]] = {}
    while True:
        asked: set[str] = set()
        for texts in choices:
            if not any("candidates" in answers.get(text, ()) for text in texts):
                asked.update([text for text in texts if text not in answers][:1])
        if not asked:
            return answers
        texts = sorted(asked)
        planned = harness.plan_all(texts, gpu, build=False)
        answers.update(zip(texts, planned, strict=True))
