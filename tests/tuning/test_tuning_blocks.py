# SPDX-License-Identifier: Apache-2.0
"""Tests which calls a `with plans.autotuning()` block measures."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import UnsupportedError, choices, matmul, native, plans
from jax_cudnn.choices import Choice, ChoiceTable
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import decide, decision, devices, traced_graphs
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.native import PlanInfo
from jax_cudnn.plans import PlanOptions, tuning
from tests.common.planner import H200, PIN, made_plan

pytestmark = pytest.mark.once

_MEASURED = Choice(
    op="matmul",
    operands="a, b",
    implementation="cudnn",
    plan=PIN,
    cudnn_us=5.0,
    xla_us=7.0,
)
_OTHER = PIN.replace("4", "9")
_NOTE = "REDUCED_PRECISION_REDUCTION"


class _Machine:
    """A GPU whose plans a test may take away, with what was measured on it."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.gone = ""
        self.implementation = "cudnn"
        self.measured: list[Graph] = []

    def plan(self, text: str, *, request: str, device: int) -> PlanInfo:
        del text, device
        if request and request == self.gone:
            raise UnsupportedError("there is no such engine")
        note = self.notes.get(request)
        return replace(made_plan(request), numeric_notes=(note,) if note else ())

    def measure_each(
        self, parts: Sequence[tuple[Graph, Any]], *_: Any
    ) -> Iterator[Choice]:
        for part, _options in parts:
            self.measured.append(part)
            yield replace(_MEASURED, plan=_OTHER, implementation=self.implementation)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    """Tune on a stand-in, which measures the same for all."""
    made = _Machine()
    decision._decide.cache_clear()
    monkeypatch.setattr(devices, "local_target", lambda: (3, H200))
    monkeypatch.setattr(tuning, "local_target", lambda: (3, H200))
    monkeypatch.setattr(native, "plan", made.plan)
    monkeypatch.setattr(native, "candidates", lambda *_, **__: ())
    monkeypatch.setattr(tuning, "measure_each", made.measure_each)
    return made


def _tuned_in_a_block(
    choice: Choice | None, plan: PlanOptions | None = None
) -> PartDecision:
    """Return how a product runs that has a choice and is compiled in a block."""
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((256, 384), jnp.bfloat16)
    product = functools.partial(matmul, activation="gelu", plan=plan)
    ((graph, options, _),) = traced_graphs(product, x, w)
    if choice is not None:
        choices.table().add({choices.key_of(graph, H200): choice})
    with plans.autotuning(progress=False):
        steps = decide(graph, options).steps
        decide(graph, options)
    return steps[0] if steps else PartDecision(part=graph)


def test_what_has_no_choice_is_measured_once(
    machine: _Machine, table: ChoiceTable
) -> None:
    assert _tuned_in_a_block(None).request == _OTHER
    assert len(machine.measured) == 1


@pytest.mark.parametrize(
    "choice",
    [
        _MEASURED,
        replace(_MEASURED, implementation="xla"),
        replace(_MEASURED, implementation="xla", plan="", cudnn_us=None),
    ],
    ids=["cuDNN", "XLA", "XLA, where cuDNN has no plan"],
)
def test_what_has_a_choice_is_not_measured_again(
    machine: _Machine, table: ChoiceTable, choice: Choice
) -> None:
    _tuned_in_a_block(choice)
    assert not machine.measured


@pytest.mark.parametrize("why", ["its plan is gone", "its plan adds up in 16 bits"])
def test_what_has_a_choice_that_is_ignored_is_measured_again(
    machine: _Machine, table: ChoiceTable, why: str
) -> None:
    if why == "its plan is gone":
        machine.gone = PIN
    else:
        machine.notes = {PIN: _NOTE}
    assert _tuned_in_a_block(_MEASURED).request == _OTHER
    assert len(machine.measured) == 1


def test_a_choice_among_all_plans_says_nothing_where_its_plan_is_not_allowed(
    machine: _Machine, table: ChoiceTable
) -> None:
    _tuned_in_a_block(_MEASURED, PlanOptions(denied_engines=(4,)))
    assert len(machine.measured) == 1


def _with_bias(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return matmul(x, w, bias=bias, activation="gelu").astype(jnp.float32).sum()


@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
def test_what_was_tuned_in_a_block_is_not_measured_in_another(
    machine: _Machine, table: ChoiceTable, implementation: str
) -> None:
    """Also sums without a contraction, as gradients of a bias are."""
    machine.implementation = implementation
    shapes = (512, 256), (256, 384), (384,)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = traced_graphs(jax.grad(_with_bias, (0, 1, 2)), *operands)
    counts: list[int] = []
    for _ in range(3):
        with plans.autotuning(progress=False):
            for graph, options, _ in traced:
                decide(graph, options)
        counts.append(len(machine.measured))
    assert counts[0] > 3
    assert counts == [counts[0]] * 3
