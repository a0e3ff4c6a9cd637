# SPDX-License-Identifier: Apache-2.0
"""Plans as cuDNN's planner would answer them, for tests that have no GPU."""

import json
from dataclasses import replace
from typing import Any

from jax_cudnn.graph import Target
from jax_cudnn.native import PlanInfo

H200 = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=91900)
PIN = '{"engine":4,"knobs":{"SPLIT_K":2},"variant":0}'
# A filter that allows all, as its text has it.
ALL_ALLOWED = {
    "denied_engines": [],
    "deterministic": False,
    "engines": None,
    "modes": ["A", "FALLBACK"],
    "refused_notes": [],
    "required_notes": [],
    "workspace_limit_bytes": None,
}


def filter_text(**changes: Any) -> str:
    """Return the text of a filter that differs so from one that allows all."""
    return json.dumps({**ALL_ALLOWED, **changes}, sort_keys=True, separators=(",", ":"))


FILTER = (
    '{"denied_engines":[4],"deterministic":false,"engines":null,"modes":["A"],'
    '"refused_notes":[],"required_notes":[],"workspace_limit_bytes":null}'
)

_FIRST = PlanInfo(
    name="eng2_k24=7",
    engine=2,
    knobs=(("STAGES", 3), ("TILE_SIZE", 7)),
    variant=0,
    request="",
    behavior_notes=("RUNTIME_COMPILATION",),
    numeric_notes=("TENSOR_CORE",),
    is_built=True,
    workspace_bytes=4096,
    build_ms=123.0,
    failure="",
    failures=("eng11: no kernel",),
)


def made_plan(request: str) -> PlanInfo:
    """Return the plan that a request asks for: engine 2, or the one that is pinned."""
    pinned = json.loads(request) if request else {}
    if "engine" not in pinned:
        return _FIRST
    return replace(
        _FIRST,
        name=f"eng{pinned['engine']}",
        engine=pinned["engine"],
        knobs=tuple(sorted(pinned.get("knobs", {"UNKNOWN": 1}).items())),
        request=request,
        failures=(),
    )
