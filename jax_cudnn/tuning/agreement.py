# SPDX-License-Identifier: Apache-2.0
"""Compares what a plan or a contender computes for a part with the reference."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jax_cudnn.graph import Graph, label, operand_text
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.tuning.correctness import (
    bound,
    comparable,
    largest_error,
    reference_results,
    with_own_results,
)

_log = logging.getLogger("jax_cudnn")

_T = TypeVar("_T")
# Operands, and what the reference gives for them.
Example = tuple[list[jax.Array], list[jax.Array]]


def unless_it_fails(run: Callable[[], _T]) -> _T | None:
    """Return what a contender's run returns; None, with a line of log, if it cannot.

    XLA's attention may be out of memory where cuDNN's is not, for one.
    """
    try:
        # What fails on the device may do so after the call.
        return jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        _log.debug("a contender does not run: %s", error)
        return None


def make_example(part: Graph, *operands: jax.Array) -> Example:
    """Return operands that go together, and what the reference gives for them."""
    fitting = with_own_results(part, operands)
    return fitting, reference_results(part, fitting)


def measured_error(
    part: Graph, run: Callable[..., Sequence[jax.Array]], *given: jax.Array
) -> jax.Array:
    """Return how far off a run is, given a part's operands and what is expected."""
    count = len(part.inputs)
    found = comparable(part, run(*given[:count]))
    return largest_error(found, comparable(part, given[count:]))


def agrees(
    step: PartDecision, error_of: Callable[..., Any] | None, example: Example | None
) -> bool:
    """Whether a step computes what is expected; one that does not is warned of."""
    if error_of is None:
        return False
    if example is None:
        return True
    operands, expected = example
    error = unless_it_fails(lambda: error_of(*operands, *expected))
    if error is None:
        return False
    part, most = step.part, bound(step.part)
    if error <= most:
        return True
    name = f"cuDNN's plan {step.plan.name}" if step.plan else step.contender
    _log.warning(
        "%s for %s(%s) is not chosen: its results differ from the "
        "reference's by %.2g of their norm, where rounding explains %.2g",
        name, label(part), operand_text(part), error, most,
    )  # fmt: skip
    return False
