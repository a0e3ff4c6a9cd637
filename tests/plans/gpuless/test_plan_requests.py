# SPDX-License-Identifier: Apache-2.0
"""Tests that a filter leaves exactly those of cuDNN's candidates that it allows."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.legalize import legalize
from tests.attention.gpuless.emitted import emitted_graphs
from tests.attention.shared.cases import Case
from tests.common.gpuless import harness
from tests.common.gpuless.harness import target
from tests.common.planner import filter_text
from tests.products.gpuless.verdicts import verdicts
from tests.products.shared.fused import graphs

_Candidates = list[dict[str, Any]]
_JIT = "RUNTIME_COMPILATION"


def _of(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _legal(graph: Graph, gpu: str) -> str:
    return to_json(legalize(graph, target(gpu)).candidates[0].graph)


@functools.cache
def _texts(gpu: str) -> dict[str, str]:
    """Return a graph of each sort, as it reaches cuDNN."""
    ((matmul, _),) = graphs(jax_cudnn.matmul, _of(4, 64, 128), _of(4, 128, 72))
    ((conv, _),) = graphs(
        functools.partial(
            jax_cudnn.conv,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ),
        _of(3, 24, 20, 64),
        _of(3, 3, 64, 96),
    )
    case = Case(name="request", s=256, t=192, h=4, k=2, d=64)
    forward, backward = emitted_graphs(case, target(gpu))
    return {
        "matmul": _legal(matmul, gpu),
        "conv": _legal(conv, gpu),
        "sdpa": to_json(forward[0]),
        "sdpa_backward": to_json(backward[0]),
    }


_KINDS = ("matmul", "conv", "sdpa", "sdpa_backward")


def _ask(
    requests: Mapping[str, str], gpu: str = "h200", build: bool = False
) -> dict[str, dict[str, Any]]:
    """Ask for graphs by name; one process answers them all."""
    texts = [_texts(gpu)[kind] for kind in requests]
    answers = harness.plan_all(
        texts, gpu, build=build, requests=list(requests.values())
    )
    return dict(zip(requests, answers, strict=True))


def _ask_for_each(request: str, build: bool = False) -> dict[str, dict[str, Any]]:
    return _ask(dict.fromkeys(_KINDS, request), build=build)


@functools.cache
def _all(gpu: str = "h200") -> dict[str, _Candidates]:
    """Return all candidates of each graph, one of them built."""
    answers = _ask(dict.fromkeys(_KINDS, ""), gpu, build=True)
    return {kind: answer["candidates"] for kind, answer in answers.items()}


def _names(candidates: _Candidates) -> list[str]:
    return [candidate["name"] for candidate in candidates]


def _allowed(answer: dict[str, Any]) -> _Candidates:
    return [each for each in answer["candidates"] if not each["refusal"]]


def _built(candidates: _Candidates) -> dict[str, Any]:
    (built,) = [each for each in candidates if each["is_built"]]
    return built


def test_a_filter_that_allows_all_changes_nothing() -> None:
    for kind, answer in _ask_for_each(filter_text()).items():
        assert _names(answer["candidates"]) == _names(_all()[kind])
        assert not any(candidate["refusal"] for candidate in answer["candidates"])
        assert not any(candidate["refusal"] for candidate in _all()[kind])


# The pinned wheel has the runtime-compiled engines only.
@pytest.mark.parametrize("build", [False, True])
def test_when_no_candidate_is_allowed_each_says_why(build: bool) -> None:
    request = filter_text(refused_notes=[_JIT])
    for kind, answer in _ask_for_each(request, build=build).items():
        assert answer["error"] == "UnsupportedError"
        assert f"with the request {request}." in answer["message"]
        # cuDNN's own reasons may follow, for a way of writing that has no plan.
        assert set(answer["reasons"]) >= {
            f"{name}: has the note {_JIT}, which is refused"
            for name in _names(_all()[kind])
        }


def test_required_notes_leave_those_who_have_them_all() -> None:
    notes = [_JIT, "TENSOR_CORE"]
    missing = 0
    for kind, answer in _ask_for_each(filter_text(required_notes=notes)).items():
        assert _names(answer["candidates"]) == _names(_all()[kind])
        for candidate in answer["candidates"]:
            has = {*candidate["behavior_notes"], *candidate["numeric_notes"]}
            lacking = [note for note in notes if note not in has]
            missing += len(lacking)
            assert candidate["refusal"] == (
                f"lacks the note {lacking[0]}, which is required" if lacking else ""
            )
    assert missing


def test_allowing_one_engine_leaves_only_that_engine() -> None:
    engines = {kind: _all()[kind][-1]["engine"] for kind in _KINDS}
    requests = {kind: filter_text(engines=[engine]) for kind, engine in engines.items()}
    for kind, answer in _ask(requests, build=True).items():
        assert {each["engine"] for each in _all()[kind]} != {engines[kind]}
        assert {each["engine"] for each in _allowed(answer)} == {engines[kind]}
        assert _built(answer["candidates"])["engine"] == engines[kind]
        for each in answer["candidates"]:
            if each["engine"] != engines[kind]:
                assert each["refusal"] == (
                    f"engine {each['engine']} is not allowed; "
                    f"allowed are {engines[kind]}"
                )
                assert each["build_ms"] == 0


def test_an_engine_is_denied_by_its_number_and_not_by_its_digits() -> None:
    usual = _ask({"matmul": ""}, "b200")["matmul"]["candidates"]
    engines = {candidate["engine"] for candidate in usual}
    assert 10 in engines
    assert 1 not in engines
    answer = _ask({"matmul": filter_text(denied_engines=[1, 0])}, "b200")["matmul"]
    assert answer["candidates"] == usual
    answer = _ask({"matmul": filter_text(denied_engines=[10])}, "b200")["matmul"]
    assert {each["engine"] for each in _allowed(answer)} == engines - {10}
    refusals = {each["refusal"] for each in answer["candidates"]}
    assert refusals == {"", "engine 10 is denied"}


def test_the_first_plan_is_another_where_the_first_engine_is_denied() -> None:
    first = _all()["conv"][0]["engine"]
    answer = _ask({"conv": filter_text(denied_engines=[first])}, build=True)["conv"]
    assert _built(answer["candidates"])["engine"] != first
    tried = [each for each in answer["candidates"] if each["build_ms"] > 0]
    assert all(each["engine"] != first for each in tried)


def test_the_workspace_is_limited_to_the_byte_before_anything_is_built() -> None:
    usual = {kind: _built(_all()[kind]) for kind in ("sdpa", "sdpa_backward")}
    sizes = {kind: built["workspace_bytes"] for kind, built in usual.items()}
    assert all(sizes.values())
    enough = {kind: filter_text(workspace_limit_bytes=n) for kind, n in sizes.items()}
    for kind, answer in _ask(enough, build=True).items():
        assert _built(answer["candidates"])["name"] == usual[kind]["name"]
    short = {
        kind: filter_text(workspace_limit_bytes=n - 1) for kind, n in sizes.items()
    }
    for kind, answer in _ask(short).items():
        reasons = answer.get("reasons") or [
            f"{each['name']}: {each['refusal']}" for each in answer["candidates"]
        ]
        assert (
            f"{usual[kind]['name']}: needs {sizes[kind]:,} bytes of workspace, "
            f"more than the limit of {sizes[kind] - 1:,}"
        ) in reasons


def test_no_workspace_at_all_leaves_plans_without_one() -> None:
    requests = {"sdpa": filter_text(workspace_limit_bytes=0)}
    candidates = _ask(requests, build=True)["sdpa"]["candidates"]
    assert _built(candidates)["workspace_bytes"] == 0
    refusals = [each["refusal"] for each in candidates if each["refusal"]]
    assert refusals
    pattern = "needs [0-9,]+ bytes of workspace, more than the limit of 0"
    assert all(re.fullmatch(pattern, text) for text in refusals)


def test_modes_are_asked_in_their_order() -> None:
    text = _texts("h200")["conv"]
    modes = [["A"], ["B"], ["FALLBACK"], ["A", "FALLBACK"], ["FALLBACK", "B"]]
    requests = [filter_text(modes=each) for each in modes]
    answers = harness.plan_all([text] * 5, "h200", build=False, requests=requests)
    a, b, fallback, usual, other = (answer["candidates"] for answer in answers)
    assert usual == a + fallback
    assert other == fallback + b
    assert _names(fallback) != _names(a)
    assert _names(usual) == _names(_all()["conv"])


def test_deterministic_attention_gradients_are_computed_in_another_way() -> None:
    requests = {"sdpa_backward": filter_text(deterministic=True)}
    answer = _ask(requests, build=True)["sdpa_backward"]
    built = _built(answer["candidates"])
    assert "NONDETERMINISTIC" not in built["numeric_notes"]
    # The products are kept, b * h * s * t numbers of 2 bytes, and summed in one order.
    assert built["workspace_bytes"] >= 2 * 4 * 256 * 192 * 2
    usual = _built(_all()["sdpa_backward"])
    assert usual["workspace_bytes"] < built["workspace_bytes"]


def test_a_pin_remembers_that_its_plan_is_deterministic() -> None:
    listed = {
        kind: answer["candidates"]
        for kind, answer in _ask_for_each(filter_text(deterministic=True)).items()
    }
    for candidates in listed.values():
        for each in candidates:
            assert each["request"].startswith('{"deterministic":true,"engine":')
    pins = {kind: candidates[0]["request"] for kind, candidates in listed.items()}
    for kind, answer in _ask(pins).items():
        assert answer["candidates"] == listed[kind][:1]
        assert not any("deterministic" in each["request"] for each in _all()[kind])


def test_a_sum_within_a_matmul_has_no_deterministic_plan() -> None:
    """Its kernels add up their tiles in any order."""
    key = "matmul, bias, gelu/one a for a batch of b/f32/grad_a"
    (verdict,) = verdicts("h200", (key,))
    assert verdict.found is not None
    assert any(node.kind == "reduction" for node in verdict.found.graph.nodes)
    (answer,) = harness.plan_all(
        [to_json(verdict.found.graph)],
        "h200",
        build=False,
        requests=[filter_text(deterministic=True)],
    )
    assert answer["error"] == "UnsupportedError"
    assert any("Deterministic reduction" in reason for reason in answer["reasons"])


def _variant(candidate: Mapping[str, Any]) -> int:
    return json.loads(candidate["request"])["variant"]


def _in_front(listed: _Candidates, *each: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(_names([*each, *listed])))


def test_what_is_wanted_is_tried_before_the_first_in_its_order() -> None:
    moved = crossed = 0
    for kind, usual in _all().items():
        first = usual[0]
        of_engine = [each for each in usual if each["engine"] == first["engine"]]
        other = of_engine[-1]
        moved += other is not first

        def wanted(each: Mapping[str, Any]) -> dict[str, Any]:
            return {"engine": each["engine"], "knobs": dict(each["knobs"])}

        def preferring(*listed: dict[str, Any], first_engine: int) -> str:
            each = {"first_engine": first_engine, "wanted": listed}
            data = {"preferred": [each]}
            return json.dumps(data, sort_keys=True, separators=(",", ":"))

        engine = first["engine"]
        unknown = {"engine": engine, "knobs": {"KERNEL_CFG": 12345}}

        in_front = functools.partial(_in_front, usual)
        both = [wanted(other), *([] if other is first else [wanted(first)])]
        for request, expected in (
            (preferring(wanted(other), first_engine=engine), in_front(other)),
            # Those that are listed, one after another.
            (
                preferring(*(unknown, *both), first_engine=engine),
                in_front(other, first),
            ),
            (preferring(unknown, first_engine=engine), _names(usual)),
            # Another engine comes first.
            (preferring(wanted(other), first_engine=engine + 1), _names(usual)),
        ):
            answer = _ask({kind: request}, build=True)[kind]
            assert _names(answer["candidates"]) == expected, request
            assert not any(each["refusal"] for each in answer["candidates"])
            built = _built(answer["candidates"])
            # Each names itself, and not the preference.
            again = _ask({kind: built["request"]}, build=True)[kind]["candidates"]
            assert _names(again) == [built["name"]]
        # Other variants of a graph have lists of their own.
        later = [
            each
            for each in usual
            if each["engine"] != engine and _variant(each) == _variant(first)
        ]
        if not later:
            continue
        crossed += 1
        of_engine = [each for each in later if each["engine"] == later[-1]["engine"]]
        any_of_it, other = {"engine": of_engine[0]["engine"]}, of_engine[-1]
        missing = {"engine": 12345}
        for request, expected in (
            (preferring(any_of_it, first_engine=engine), in_front(of_engine[0])),
            (preferring(wanted(other), first_engine=engine), in_front(other)),
            (
                preferring(missing, any_of_it, first_engine=engine),
                in_front(of_engine[0]),
            ),
            (
                preferring(wanted(first), any_of_it, first_engine=engine),
                in_front(first, of_engine[0]),
            ),
            # The same plan twice.
            (
                preferring(wanted(of_engine[0]), any_of_it, first_engine=engine),
                in_front(of_engine[0]),
            ),
            (preferring(missing, first_engine=engine), _names(usual)),
            (preferring(any_of_it, first_engine=engine + 1000), _names(usual)),
        ):
            answer = _ask({kind: request}, build=True)[kind]
            assert _names(answer["candidates"]) == expected, request
    assert moved
    assert crossed
