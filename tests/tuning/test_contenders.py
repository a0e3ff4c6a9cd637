# SPDX-License-Identifier: Apache-2.0
"""Tests that a contender runs what it was measured to be fastest at, and no more."""

import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import LibraryError, choices, contenders, matmul, plans, sdpa
from jax_cudnn.choices import Choice, ChoiceTable, Trial, key_of
from jax_cudnn.config import Options, PlanOptions
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import devices, run_contender, traced_graphs
from jax_cudnn.lowering.decision import PartDecision, decide, decide_part
from jax_cudnn.plans import inspection
from jax_cudnn.reference.interpreter import evaluate, to_logical, to_stored
from jax_cudnn.tuning import in_context
from tests.common.planner import H200, made_plan

pytestmark = pytest.mark.once

_X = jnp.ones((8, 16), jnp.bfloat16)


class _Gpu:
    target, is_here = H200, True

    def plan(self, graph_json: str, request: str = "") -> Any:
        del graph_json
        return made_plan(request)

    def candidates(self, graph_json: str, request: str = "") -> Any:
        del graph_json, request
        return (made_plan(_choice().plan),)


_GPU: Any = _Gpu()


def _part() -> Graph:
    ((graph, _, _),) = traced_graphs(lambda x: matmul(x, x.T), _X)
    return graph


def _choice(**changes: Any) -> Choice:
    choice = Choice(
        op="matmul",
        operands="",
        implementation="mine 1.2",
        plan='{"engine":4,"knobs":{},"variant":0}',
        cudnn_us=10.0,
        xla_us=11.0,
        contenders_us=(("mine 1.2", 9.0), ("other", 12.0)),
    )
    return replace(choice, **changes)


def _as_reference(part: Graph) -> Callable[..., Sequence[jax.Array]]:
    """Return the reference as a contender's program, on logical axes."""

    def program(*logical: jax.Array) -> list[jax.Array]:
        stored = map(to_stored, part.input_tensors, logical)
        results = evaluate(part, list(stored))
        return [
            to_logical(t, x) for t, x in zip(part.output_tensors, results, strict=True)
        ]

    return program


def _noted(
    seen: list[tuple[int, ...]], program: Callable[..., Any], *xs: jax.Array
) -> Any:
    seen.extend(x.shape for x in xs)
    return program(*xs)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChoiceTable]:
    """A table of choices in which the contender has won; none is left behind."""
    table = ChoiceTable()
    table.add({key_of(_part(), H200): _choice()})
    monkeypatch.setattr(choices, "table", lambda: table)
    for module in (devices, inspection):
        monkeypatch.setattr(module, "gpu_for", lambda _: _GPU, raising=False)
    monkeypatch.setattr("jax_cudnn.lowering.decision.gpu_for", lambda _: _GPU)
    yield table
    for name in ("mine", "other"):
        try:
            plans.remove_contender(name)
        except LibraryError:
            continue
    assert not contenders.all_of(_part())


def _runs_on(options: Options | None = None, trial: Trial | None = None) -> str:
    return decide_part(_part(), _GPU, options or Options(), trial).runs_on


def test_it_runs_what_it_has_won() -> None:
    plans.add_contender("mine", _as_reference, version="1.2")
    assert _runs_on() == "mine 1.2"
    decision = decide(_part(), Options())
    assert [step.runs_on for step in decision.steps] == ["mine 1.2"]
    assert not decision.missing
    assert (decision.steps[0].plan, decision.steps[0].why) == (None, "tuned")


def test_only_auto_without_restrictions_takes_it() -> None:
    plans.add_contender("mine", _as_reference, version="1.2")
    assert _runs_on(Options(implementation="cudnn")) == "cudnn"
    assert _runs_on(Options(plan=PlanOptions(deterministic=True))) == "cudnn"
    assert _runs_on(trial=Trial({})) == "mine 1.2"
    by_xla = _choice(implementation="xla")
    assert _runs_on(trial=Trial({key_of(_part(), H200): by_xla})) == "xla"
    far = replace(Options(), matmul_precision="highest")
    assert _runs_on(far) == "mine 1.2", "which is about f32"


@pytest.mark.parametrize(("xla_us", "then"), [(11.0, "cudnn"), (9.5, "xla")])
def test_where_it_was_not_added_the_next_fastest_runs(
    xla_us: float, then: str, table: ChoiceTable, caplog: pytest.LogCaptureFixture
) -> None:
    table.add({key_of(_part(), H200): _choice(xla_us=xla_us)})
    with caplog.at_level(logging.INFO, "jax_cudnn"):
        assert _runs_on() == then
    plans.add_contender("mine", _as_reference, version="1.3")
    assert _runs_on() == then, "another version"
    plans.add_contender("mine", lambda _: None, version="1.2")
    assert _runs_on() == then, "it offers nothing"
    plans.add_contender("mine", _as_reference, version="1.2")
    assert _runs_on() == "mine 1.2"
    plans.remove_contender("mine")
    assert _runs_on() == then


def test_the_compiler_takes_what_was_added_since() -> None:
    assert decide(_part(), Options()).steps[0].runs_on == "cudnn"
    plans.add_contender("mine", _as_reference, version="1.2")
    assert decide(_part(), Options()).steps[0].runs_on == "mine 1.2"
    plans.remove_contender("mine")
    assert decide(_part(), Options()).steps[0].runs_on == "cudnn"


def test_its_program_has_logical_axes_and_gives_what_the_part_does() -> None:
    rng = np.random.default_rng(0)
    q, k = (
        jnp.asarray(np.asarray(rng.normal(size=(2, n, 3, 8)), jnp.float16))
        for n in (5, 7)
    )

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        return sdpa(q, k, k).astype(jnp.float32).sum()

    for graph, _, is_linear in traced_graphs(jax.grad(loss), q, k):
        assert not is_linear
        seen: list[tuple[int, ...]] = []
        program = functools.partial(_noted, seen, _as_reference(graph))
        operands = [
            jnp.asarray(
                np.asarray(
                    rng.normal(size=t.stored_shape),
                    jnp.dtype(t.dtype.replace("f", "float")),
                )
            )
            for t in graph.input_tensors
        ]
        step = PartDecision(part=graph, contender="mine 1.2", program=program)
        found = run_contender(step, *operands)
        assert seen == [t.dims for t in graph.input_tensors]
        for one, two in zip(found, evaluate(graph, operands), strict=True):
            np.testing.assert_array_equal(one, two)


def test_other_results_than_the_parts_are_refused() -> None:
    step = PartDecision(
        part=_part(), contender="mine", program=lambda *xs: [xs[0].sum(0)]
    )
    with pytest.raises(ValueError, match=r"mine returns bfloat16\[8, 16\] for matmul"):
        run_contender(step, _X[None], _X.T[None])
    step = PartDecision(part=_part(), contender="mine", program=lambda *_: [])
    with pytest.raises(ValueError, match="mine returns nothing for matmul"):
        run_contender(step, _X[None], _X.T[None])


def test_reports_name_it() -> None:
    plans.add_contender("mine", _as_reference, version="1.2")
    report = plans.inspect(lambda x: matmul(x, x.T), _X)
    (call,) = report.calls
    assert (call.implementation, call.why) == ("mine 1.2", "tuned")
    assert call.contenders_us == (("mine 1.2", 9.0), ("other", 12.0))
    assert json.dumps(report.to_json())
    assert "mine 1.2 9.0, other 12.0" in str(report)


def test_a_tuning_and_its_file_name_it(tmp_path: Path) -> None:
    key = key_of(_part(), H200)
    tuning = plans.Tuning(device="NVIDIA H200", choices={key: _choice()})
    assert "mine 1.2 9.0, other 12.0  mine 1.2" in str(tuning)
    tuning.save(tmp_path / "choices.json")
    assert choices.read(tmp_path / "choices.json") == {key: _choice()}
    tuning.choices = {key: _choice(implementation="xla", contenders_us=())}
    assert "others" not in str(tuning)
    tuning.save(tmp_path / "choices.json")
    assert "contenders_us" not in (tmp_path / "choices.json").read_text()


def test_the_whole_program_may_change_over_from_it() -> None:
    key = key_of(_part(), H200)

    class Programs:
        def __init__(self) -> None:
            self.compiled: list[Any] = []

        def compile(self, trials: Sequence[Trial]) -> list[Any]:
            numbers = range(len(self.compiled), len(self.compiled) + len(trials))
            self.compiled += [trial.choices[key] for trial in trials]
            return list(numbers)

        def times(self, numbers: list[int]) -> list[float]:
            costs = {"mine 1.2": 3.0, "cudnn": 1.0, "xla": 2.0}
            who = [self.compiled[n] for n in numbers]
            return [4.0 if c is None else costs[c.implementation] for c in who]

    chosen, times = in_context.settle(
        Programs(),
        {key: _choice()},
        {},
        runs=None,
        deadline=float("inf"),
        say=lambda _: None,
    )
    assert chosen == {key: _choice(implementation="cudnn")}
    assert (times.kernels_us, times.cudnn_us, times.xla_us) == (3.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("", "", "name='' is not one word"),
        ("my kernels", "", "name='my kernels' is not one word"),
        ("mine", "1 2", "version='1 2' is not one word"),
        ("xla", "", "name='xla' is a contender in every tuning already"),
    ],
)
def test_bad_names_are_refused(name: str, version: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plans.add_contender(name, _as_reference, version=version)


def test_bad_offers_and_unknown_names_are_refused() -> None:
    offer: Any = 3
    with pytest.raises(TypeError, match="offer=3 cannot be called"):
        plans.add_contender("mine", offer)
    with pytest.raises(LibraryError, match=r"named 'mine'.*were added: none"):
        plans.remove_contender("mine")
