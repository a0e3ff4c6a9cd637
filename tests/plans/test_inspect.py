# SPDX-License-Identifier: Apache-2.0
"""Tests that `plans.inspect` sees every call, and answers where things are missing."""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import LibraryError, UnsupportedError, choices, native, plans
from jax_cudnn.choices import Choice, key_of
from jax_cudnn.graph import Graph, from_json
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import decision, devices, traced_graphs
from jax_cudnn.native import Candidate, PlanInfo
from jax_cudnn.plans.inspection import direction_of, why_of
from tests.common.planner import FILTER, H200, PIN, made_plan

_X = jax.ShapeDtypeStruct((2, 5, 3, 8), jnp.bfloat16)


def _loss(x: jax.Array, implementation: str = "auto") -> jax.Array:
    output = jax_cudnn.sdpa(x, x, x, implementation=implementation)
    return jnp.sum(output.astype(jnp.float32))


def test_a_gradient_is_a_forward_and_a_backward_call() -> None:
    report = plans.inspect(jax.grad(_loss), _X)
    assert [(call.op, call.count) for call in report.calls] == [
        ("sdpa", 1),
        ("sdpa_backward", 1),
    ]
    assert report.calls[0].shapes == ", ".join(["bf16[2,5,3,8]"] * 3)
    assert "XLA only (no CUDA device)" in str(report)
    assert "sdpa, sdpa_backward: this machine has no CUDA device" in str(report)


def test_calls_in_loops_and_forward_mode_are_found() -> None:
    def loop(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax_cudnn.sdpa(carry, carry, carry), None

        return jax.lax.scan(body, x, None, length=3)[0]

    report = plans.inspect(lambda x: jax.jvp(loop, (x,), (x,)), _X)
    assert [call.op for call in report.calls] == ["sdpa", "sdpa:derivative"]


def test_jitted_functions_keep_their_static_arguments() -> None:
    jitted = jax.jit(_loss, static_argnames="implementation")
    (call,) = plans.inspect(jitted, _X, implementation="xla").calls
    assert call.implementation == "xla"
    (call,) = plans.inspect(functools.partial(_loss, implementation="xla"), _X).calls
    assert call.implementation == "xla"


def test_a_missing_library_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise LibraryError("libcudnn.so.9 is not there")

    monkeypatch.setattr(devices, "local_target", missing)
    for implementation in ("auto", "cudnn"):
        report = plans.inspect(
            functools.partial(_loss, implementation=implementation), _X
        )
        assert report.calls[0].reasons == ("libcudnn.so.9 is not there",)
        assert "a GPU that cannot be used: libcudnn.so.9 is not there" in str(report)


# --- with a planner -------------------------------------------------------------------


class Planner:
    """Stands for cuDNN on an H200: refuses some kinds of nodes."""

    def __init__(self) -> None:
        self.refused: set[str] = set()

    def _check(self, text: str) -> None:
        for node in from_json(text).nodes:
            if node.kind in self.refused:
                raise UnsupportedError("no plan", [f"no engine for {node.kind}"])

    def plan(self, text: str, *, request: str = "", device: int) -> PlanInfo:
        assert device == 3
        self._check(text)
        return made_plan(request)

    def candidates(
        self, text: str, *, request: str, device: int
    ) -> tuple[Candidate, ...]:
        assert device == 3
        self._check(text)
        return made_plan(""), made_plan(PIN)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planner]:
    """Inspect as on a machine with an H200, with no choices but the test's own."""
    fake = Planner()
    table = choices.ChoiceTable()
    decision._decide.cache_clear()
    monkeypatch.setattr(devices, "local_target", lambda: (3, H200))
    monkeypatch.setattr(native, "plan", fake.plan)
    monkeypatch.setattr(native, "candidates", fake.candidates)
    monkeypatch.setattr(choices, "table", lambda: table)
    yield fake
    decision._decide.cache_clear()


_W = jax.ShapeDtypeStruct((16, 24), jnp.bfloat16)
_A = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)


def _layer(a: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return jax_cudnn.matmul(a, w, activation="silu", **options)


def _layer_loss(a: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return jnp.sum(_layer(a, w, **options).astype(jnp.float32))


_GRADIENT = jax.grad(_layer_loss, (0, 1))


def _choose(function: Any, index: int, **fields: Any) -> None:
    """Add a measured choice for a part of the only graph of a function."""
    (graph, _, _), *_ = traced_graphs(function, _A, _W)
    part = [part for part in partition(graph) if _has_product(part)][index]
    choice = Choice(op="", operands="", **fields)
    choices.table().add({key_of(part, H200): choice})


def _has_product(graph: Graph) -> bool:
    return any(node.kind == "matmul" for node in graph.nodes)


@pytest.mark.usefixtures("planner")
def test_a_call_has_all_that_its_plan_says() -> None:
    report = plans.inspect(_layer, _A, _W)
    (call,) = report.calls
    assert report.device == "NVIDIA H200"
    assert (call.op, call.direction, call.why) == (
        "matmul+silu",
        "forward",
        "heuristic",
    )
    assert (call.plan, call.engine, call.workspace_bytes) == ("eng2_k24=7", 2, 4096)
    assert call.knobs == (("STAGES", 3), ("TILE_SIZE", 7))
    assert call.notes == ("RUNTIME_COMPILATION", "TENSOR_CORE")
    assert call.failures == ("eng11: no kernel",)
    assert call.request == ""
    assert call.cudnn_us is None
    header, row, decided, failure = str(report).splitlines()[1:]
    titles = "op count direction operands runs on why plan engine workspace notes"
    assert header.split() == titles.split()
    told = "heuristic eng2_k24=7 2 4,096 B RUNTIME_COMPILATION TENSOR_CORE"
    assert row.split()[-7:] == told.split()
    assert decided == f"matmul+silu: decided by {call.by}"
    assert failure == "matmul+silu: passed over: eng11: no kernel"


@pytest.mark.usefixtures("planner")
def test_forward_and_backward_are_told_apart() -> None:
    calls = plans.inspect(jax.value_and_grad(_layer_loss, (0, 1)), _A, _W).calls
    assert [(call.op, call.direction) for call in calls] == [
        ("matmul+silu", "forward"),
        ("silu_grad", "backward"),
        ("matmul", "backward"),
        ("matmul", "backward"),
    ]
    calls = plans.inspect(lambda x: jax.jvp(_loss, (x,), (x,)), _X).calls
    assert [call.direction for call in calls] == ["forward", None]


def test_a_part_of_a_lowered_program_may_not_tell_its_direction() -> None:
    (graph, _, _), *_ = traced_graphs(_layer, _A, _W)
    (node, *_) = graph.nodes
    (made,) = (name for _, name in node.outputs)
    part = replace(
        graph,
        nodes=(node,),
        tensors=tuple(graph.tensor(name) for name in (*graph.inputs, made)),
        outputs=(made,),
    )
    assert direction_of(graph) == "forward"
    assert direction_of(part) is None


@pytest.mark.usefixtures("planner")
def test_a_call_has_the_users_graph_and_cudnns() -> None:
    odd = jax.ShapeDtypeStruct((8, 13), jnp.bfloat16)
    (call,) = plans.inspect(
        _layer, odd, jax.ShapeDtypeStruct((13, 24), jnp.bfloat16)
    ).calls
    assert call.part is not None
    assert call.graph is not None
    assert call.part.tensor("a").dims == (1, 8, 13)
    assert call.graph.tensor("a").dims == (1, 8, 16)


@pytest.mark.usefixtures("planner")
def test_a_tuned_plan_comes_with_its_times() -> None:
    times = {"cudnn_us": 30.25, "xla_us": 41.5, "first_ratio": 1.75}
    _choose(_layer, 0, implementation="cudnn", plan=PIN, **times)
    report = plans.inspect(_layer, _A, _W)
    (call,) = report.calls
    assert (call.why, call.engine, call.request) == ("tuned", 4, PIN)
    assert (call.cudnn_us, call.xla_us, call.first_ratio) == (30.25, 41.5, 1.75)
    assert re.search(r"cuDNN µs +XLA µs", str(report))
    assert re.search(r" 30\.2 +41\.5 ", str(report))


@pytest.mark.usefixtures("planner")
def test_what_was_measured_of_other_kernels_is_told_where_it_decided() -> None:
    here = "measured on sm_90 with cuDNN 9.19"

    def norm(x: jax.Array, **options: Any) -> jax.Array:
        return jax_cudnn.rms_norm(x, **options)

    report = plans.inspect(norm, _A)
    (call,) = report.calls
    assert (call.implementation, call.why) == ("xla", None)
    assert call.by == f"a rule {here}"
    assert f"rms_norm: decided by a rule {here}" in str(report).splitlines()
    assert json.loads(json.dumps(call.to_json()))["by"] == call.by
    (call,) = plans.inspect(_loss, _X).calls
    assert (call.implementation, call.by) == ("cudnn", f"the rules {here}")
    # What was asked for or tuned is no matter of measurements of others.
    (call,) = plans.inspect(functools.partial(norm, implementation="cudnn"), _A).calls
    assert (call.implementation, call.by) == ("cudnn", "")
    _choose(_layer, 0, implementation="cudnn", plan=PIN, cudnn_us=1.0, xla_us=2.0)
    report = plans.inspect(_layer, _A, _W)
    assert report.calls[0].by == ""
    assert "decided by" not in str(report)


@pytest.mark.usefixtures("planner")
def test_xla_is_tuned_requested_or_explained() -> None:
    (call,) = plans.inspect(
        functools.partial(_layer, implementation="xla"), _A, _W
    ).calls
    assert (call.implementation, call.why) == ("xla", "requested")
    _choose(_layer, 0, implementation="xla", plan=PIN, cudnn_us=9.5, xla_us=3.25)
    (call,) = plans.inspect(_layer, _A, _W).calls
    assert (call.implementation, call.why) == ("xla", "tuned")
    assert (call.plan, call.cudnn_us, call.xla_us) == (None, 9.5, 3.25)
    (call,) = plans.inspect(
        functools.partial(_layer, implementation="cudnn"), _A, _W
    ).calls
    assert (call.implementation, call.why, call.request) == ("cudnn", "tuned", PIN)


def test_without_a_plan_there_is_no_why_but_a_reason(planner: Planner) -> None:
    planner.refused = {"matmul"}
    (call,) = plans.inspect(_layer, _A, _W).calls
    assert (call.implementation, call.why, call.graph) == ("xla", None, None)
    assert call.reasons == ("no engine for matmul",)


def test_why_follows_from_the_text_of_the_choice() -> None:
    assert why_of("") == "heuristic"
    assert why_of(PIN) == "pinned"
    assert why_of('{"deterministic":true,' + PIN[1:]) == "pinned"
    assert why_of(FILTER) == "requested"
    assert why_of(FILTER.replace('"engines":null', '"engines":[7]')) == "requested"


# --- candidates -----------------------------------------------------------------------


def test_candidates_are_cudnns_for_the_graph_that_it_gets(planner: Planner) -> None:
    (call,) = plans.inspect(_layer, _A, _W).calls
    assert [each.engine for each in call.candidates()] == [2, 4]
    planner.refused = {"matmul"}
    with pytest.raises(
        UnsupportedError, match=r"no candidate for matmul\+silu\.\n  - no"
    ):
        call.candidates()


@pytest.mark.usefixtures("planner")
def test_candidates_of_what_xla_runs_are_what_cudnn_would_take() -> None:
    _choose(_layer, 0, implementation="xla", plan=PIN, cudnn_us=9.5, xla_us=3.25)
    (call,) = plans.inspect(_layer, _A, _W).calls
    assert call.graph is None
    assert [each.engine for each in call.candidates()] == [2, 4]


def test_candidates_need_a_gpu() -> None:
    (call,) = plans.inspect(_layer, _A, _W).calls
    with pytest.raises(LibraryError, match=r"Call\.candidates needs an NVIDIA GPU"):
        call.candidates()


# --- traced and lowered programs ------------------------------------------------------


@pytest.mark.usefixtures("planner")
def test_a_traced_program_is_its_function() -> None:
    traced = jax.jit(_GRADIENT).trace(_A, _W)
    assert plans.inspect(traced) == plans.inspect(_GRADIENT, _A, _W)


@pytest.mark.usefixtures("planner")
def test_a_lowered_program_has_the_calls_it_was_lowered_with() -> None:
    _choose(_layer, 0, implementation="cudnn", plan=PIN)

    def program(a: jax.Array, w: jax.Array) -> tuple[Any, ...]:
        twice = _layer(a, w), _layer(jnp.sin(a), w)
        return (*twice, *_GRADIENT(a, w), jax.jvp(_layer, (a, w), (a, w)))

    lowered = jax.jit(program).trace(_A, _W).lower(lowering_platforms=("cuda",))
    choices.table().clear()
    report = plans.inspect(lowered)
    assert [(call.op, call.count, call.direction) for call in report.calls] == [
        ("matmul+silu", 2, "forward"),
        ("matmul+silu", 2, "forward"),
        ("matmul", 1, "backward"),
        ("matmul", 1, "backward"),
    ]
    assert [call.why for call in report.calls] == ["pinned", *["heuristic"] * 3]
    assert [call.engine for call in report.calls] == [4, 2, 2, 2]
    first = report.calls[0]
    (traced,) = plans.inspect(_layer, _A, _W).calls
    assert (first.part, first.graph, first.shapes) == (
        None,
        traced.graph,
        traced.shapes,
    )
    (note,) = report.notes
    assert "what XLA runs (forward mode," in note
    assert str(report).endswith(note)


def test_a_lowered_program_is_read_without_a_gpu() -> None:
    traced = jax.jit(_layer).trace(_A, _W)
    (call,) = plans.inspect(traced.lower(lowering_platforms=("cuda",))).calls
    assert (call.implementation, call.plan, call.engine) == ("cudnn", None, None)
    assert call.reasons == ("not planned: this machine has no CUDA device",)
    on_cpu = plans.inspect(traced.lower(lowering_platforms=("cpu",)))
    assert on_cpu.calls == ()
    assert "a program not lowered for CUDA" in str(on_cpu)


def test_a_lowered_program_that_no_longer_plans_says_why(planner: Planner) -> None:
    lowered = jax.jit(_layer).trace(_A, _W).lower(lowering_platforms=("cuda",))
    planner.refused = {"matmul"}
    (call,) = plans.inspect(lowered).calls
    assert call.plan is None
    assert "no engine for matmul" in call.reasons[0]


def test_programs_take_no_arguments_and_compiled_ones_are_refused() -> None:
    traced = jax.jit(_layer).trace(_A, _W)
    with pytest.raises(TypeError, match="Traced takes no further arguments; 2 were"):
        plans.inspect(traced, _A, _W)
    with pytest.raises(TypeError, match="Lowered takes no further arguments; 1 were"):
        plans.inspect(traced.lower(), a=_A)
    with pytest.raises(TypeError, match=r"dict is not a function\. Pass one"):
        plans.inspect({})
    with pytest.raises(TypeError, match=r"Compiled: .* no longer names its graphs"):
        plans.inspect(traced.lower().compile())


# --- as data and as pictures ----------------------------------------------------------


@pytest.mark.usefixtures("planner")
def test_a_report_is_plain_data() -> None:
    _choose(_layer, 0, implementation="cudnn", plan=PIN, cudnn_us=3.5, xla_us=4.5)
    report = plans.inspect(jax.value_and_grad(_layer_loss), _A, _W)
    data = json.loads(json.dumps(report.to_json()))
    assert data == report.to_json()
    assert (data["schema"], data["device"]) == (1, "NVIDIA H200")
    assert len(data["calls"]) == len(report.calls)
    for call, fields in zip(report.calls, data["calls"], strict=True):
        names = {each for each in dir(call) if not each.startswith("_")}
        methods = {"candidates", "mermaid", "mermaid_lines", "notes", "to_json"}
        assert set(fields) == names - methods
        assert fields["knobs"] == dict(call.knobs)
        assert fields["behavior_notes"] == list(call.behavior_notes)
        for name in ("part", "graph"):
            graph, text = getattr(call, name), _canonical(fields[name])
            assert (graph is None) == (text is None)
            assert text is None or from_json(text) == graph


@pytest.mark.usefixtures("planner")
def test_a_report_is_short_in_a_shell_and_a_page_in_a_notebook() -> None:
    report = plans.inspect(_layer, _A, _W)
    assert repr(report) == (
        "<Report: cuDNN calls on NVIDIA H200 ...; print it to read it all>"
    )
    page = report._repr_html_()
    assert "<p><b>cuDNN calls on NVIDIA H200</b></p><table><thead><tr><th " in page
    assert page.count("<tr>") == 1 + len(report.calls)
    assert '<td style="text-align:right">4,096 B</td>' in page
    folded = "<details><summary>plans that were passed over</summary><ul><li>"
    assert f"{folded}matmul+silu: passed over: eng11: no kernel</li></ul>" in page


def test_a_notebook_shows_without_a_click_why_xla_runs_a_call() -> None:
    page = plans.inspect(_layer, _A, _W)._repr_html_()
    assert "<details open><summary>reasons</summary><ul><li>matmul+silu: this " in page


def _canonical(data: Any) -> str | None:
    """Return the canonical text again; no number here has more than one spelling."""
    if data is None:
        return None
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


@pytest.mark.usefixtures("planner")
def test_a_report_is_drawn_with_a_frame_for_each_call() -> None:
    report = plans.inspect(_GRADIENT, _A, _W)
    lines = report.mermaid().splitlines()
    assert lines[0] == "flowchart TD"
    frames = [line for line in lines if line.startswith("  subgraph ")]
    assert frames[0] == '  subgraph c0_call["1 x matmul+silu: eng2_k24=7"]'
    assert len(frames) == len(report.calls) == lines.count("  end")
    boxes = [line.split("[")[0].split("(")[0] for line in lines if '["' in line]
    assert len(set(boxes)) == len(boxes)
    drawn = report.calls[0].mermaid()
    assert "call[" in drawn
    assert '    n0["matmul"]' in drawn
