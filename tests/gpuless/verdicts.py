# SPDX-License-Identifier: Apache-2.0
"""What cuDNN says of the parts of every case of conv and matmul, for a GPU of profiles/.

Asks `partition` and `legalize` as the lowering does, and takes the first candidate that
cuDNN lists a plan for.
"""

import functools
from dataclasses import dataclass
from typing import Any

from jax_cudnn.graph import Target, to_json
from jax_cudnn.legalize import Legal, is_contraction, legalize
from tests import fusion_cases
from tests.fusion_cases import Part
from tests.gpuless import harness

# That of the pinned wheel, in pyproject.toml.
CUDNN = 92700


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A part, its candidates with cuDNN's answers, and why there are none."""

    part: Part
    candidates: tuple[Legal, ...]
    answers: tuple[dict[str, Any], ...]
    reasons: tuple[str, ...]

    @property
    def key(self) -> str:
        """The case and the step."""
        return f"{self.part.case.name}/{self.part.step}"

    @property
    def has_contraction(self) -> bool:
        """Whether the part is meant for cuDNN; XLA runs the others by default."""
        return any(map(is_contraction, self.part.graph.nodes))

    @property
    def found(self) -> Legal | None:
        """The first candidate that cuDNN has a plan for."""
        both = zip(self.candidates, self.answers, strict=True)
        return next((legal for legal, answer in both if "candidates" in answer), None)


def target(profile: str) -> Target:
    """Return the GPU of a profile, with the cuDNN that the tests plan with."""
    properties = harness.load_profile(profile)
    return Target(
        name=properties["deviceName"],
        sm_version=properties["deviceVer"] // 10,
        sm_count=properties["multiProcessorCount"],
        cudnn_version=CUDNN,
    )


@functools.cache
def _parts() -> tuple[Part, ...]:
    return tuple(part for case in fusion_cases.ALL for part in fusion_cases.parts(case))


@functools.cache
def verdicts(profile: str) -> tuple[Verdict, ...]:
    """Return cuDNN's verdict on every part of every case; no plan is built."""
    legalized = [(part, legalize(part.graph, target(profile))) for part in _parts()]
    texts = sorted(
        {to_json(legal.graph) for _, each in legalized for legal in each.candidates}
    )
    answers = dict(
        zip(texts, harness.plan_all(texts, profile, build=False), strict=True)
    )
    return tuple(
        Verdict(
            part=part,
            candidates=each.candidates,
            answers=tuple(answers[to_json(legal.graph)] for legal in each.candidates),
            reasons=each.reasons,
        )
        for part, each in legalized
    )
