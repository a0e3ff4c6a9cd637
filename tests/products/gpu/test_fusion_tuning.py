# SPDX-License-Identifier: Apache-2.0
"""Tests on a GPU that choices which were measured, or are stale, are followed."""

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import choices, plans
from jax_cudnn.choices import Choice
from jax_cudnn.config import Implementation
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.lowering.devices import local_target
from tests.products.gpu.fused_calls import (
    OPS,
    Function,
    check,
    each_op,
    matmul_by,
    matmul_operands,
    normal,
    steps_of,
    value_and_grad,
)

pytestmark = pytest.mark.gpu


def _tuned(
    op: str,
) -> tuple[Callable[[Implementation], Function], tuple[jax.Array, ...]]:
    function, operands_of = OPS[op]
    # A new function each time: nothing that was compiled before is used again.
    return lambda how: value_and_grad(function(how)), operands_of()


def _autotune(function: Function, operands: tuple[jax.Array, ...]) -> plans.Tuning:
    """Tune kernel by kernel; for whole programs, see test_in_context.py."""
    return plans.autotune(function, *operands, progress=False, whole_program=False)


@each_op
def test_autotuned_choices_are_used_by_the_next_jit(op, table):
    function, operands = _tuned(op)
    tuning = _autotune(function("auto"), operands)
    assert tuning.choices
    assert table.all() == tuning.choices
    assert op in str(tuning)
    local = local_target()
    assert local is not None
    steps = steps_of(function("auto"), *operands)
    for step in steps:
        choice = tuning.choices.get(choices.key_of(step.part, local[1]))
        if choice is None:
            assert not _is_measured(step)
        elif choice.implementation == "xla":
            assert step.rewrite is None
        else:
            assert step.rewrite is not None
            assert step.request == choice.plan
    if not steps:  # XLA runs them all
        assert {c.implementation for c in tuning.choices.values()} == {"xla"}
    check(lambda how: jax.jit(function(how)), operands, "auto")


def _is_measured(step: PartDecision) -> bool:
    return any(
        node.kind.startswith(("conv", "matmul", "reduction"))
        for node in step.part.nodes
    )


@each_op
@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
def test_either_choice_is_followed_and_accurate(op, implementation, table):
    """Whatever was faster here: each of the best plans, and XLA, by choice."""
    function, operands = _tuned(op)
    tuning = _autotune(function("auto"), operands)
    forced = {
        key: dataclasses.replace(choice, implementation=implementation)
        for key, choice in tuning.choices.items()
        if choice.plan or implementation == "xla"
    }
    table.clear()
    table.add(forced)
    contractions = [
        call
        for call in plans.inspect(function("auto"), *operands).calls
        if any(kind in call.op for kind in ("conv", "matmul"))
    ]
    assert contractions
    assert {call.implementation for call in contractions} == {implementation}
    if implementation == "xla":
        reasons = [reason for call in contractions for reason in call.reasons]
        assert any("XLA was measured to be faster" in reason for reason in reasons)
    else:
        pinned = {step.request for step in steps_of(function("auto"), *operands)}
        assert pinned - {""} == {choice.plan for choice in forced.values()}
    check(lambda how: jax.jit(function(how)), operands, "auto")


def test_a_choices_file_round_trips(table, tmp_path):
    function, operands = _tuned("matmul")
    tuning = _autotune(function("auto"), operands)
    path = tmp_path / "choices.json"
    tuning.save(path, made="by a test")
    assert "by a test" in path.read_text()
    decided = [step.request for step in steps_of(function("auto"), *operands)]
    table.clear()
    assert not any(step.request for step in steps_of(function("auto"), *operands))
    assert plans.load_choices(path) == len(tuning.choices)
    assert table.all() == tuning.choices
    assert [step.request for step in steps_of(function("auto"), *operands)] == decided


@pytest.mark.parametrize(
    "stale",
    [
        {"plan": '{"engine":12345,"knobs":{},"variant":0}'},
        {"plan": '{"engine":0,"knobs":{},"variant":0}', "rewritten": "gone"},
        {"plan": "not a plan"},
    ],
    ids=["engine", "rewritten", "text"],
)
def test_a_stale_choice_is_ignored_with_one_message(stale, table, caplog):
    caplog.set_level(logging.INFO, logger="jax_cudnn")
    # Sizes of its own in each case: a message comes once for a graph.
    columns = 40 + 8 * len(stale["plan"]) + 8 * len(stale.get("rewritten", ""))
    a, _, bias = matmul_operands()
    operands = (a, normal(1, 96, columns, size=0.1), jnp.tile(bias, columns)[:columns])
    (step,) = steps_of(matmul_by("auto"), *operands)
    local = local_target()
    assert local is not None
    entry = Choice(op="matmul", operands="", implementation="cudnn", **stale)
    table.add({choices.key_of(step.part, local[1]): entry})
    expected = jax.jit(matmul_by("xla"))(*operands)
    for _ in range(2):
        result = jax.jit(functools.partial(matmul_by("auto")))(*operands)
        np.testing.assert_allclose(
            np.asarray(result, np.float32),
            np.asarray(expected, np.float32),
            rtol=2e-2,
            atol=2e-2,
        )
        table.add({})  # a new version: all is decided again
    (step,) = steps_of(matmul_by("auto"), *operands)
    assert step.rewrite is not None
    assert step.request == ""
    messages = [r.getMessage() for r in caplog.records if "stale" in r.getMessage()]
    assert len(messages) == 1
    assert "the measured choice is stale and ignored" in messages[0]
