# SPDX-License-Identifier: Apache-2.0
"""Finds the launches of cuDNN in a lowered program, with their attributes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.stages import Lowered

from jax_cudnn import native

_TARGETS = (native.TARGET_CAPTURED, native.TARGET_SCRATCH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The attributes of one custom call, as the compiler sees them."""

    op: str
    graph: str
    request: str


def launches(lowered: Lowered) -> Iterator[Launch]:
    """Yield the launches of cuDNN in a program, in the order of its text."""
    module: Any = lowered.compiler_ir("stablehlo")
    yield from _walk(module.operation)


def _walk(operation: Any) -> Iterator[Launch]:
    if operation.name == "stablehlo.custom_call":
        attributes = operation.attributes
        if attributes["call_target_name"].value in _TARGETS:
            config = attributes["mhlo.backend_config"]
            yield Launch(
                op=config["op"].value,
                graph=config["graph"].value,
                request=config["request"].value,
            )
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _walk(inner.operation)
