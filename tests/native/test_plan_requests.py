# SPDX-License-Identifier: Apache-2.0
"""Tests that the C++ reader takes the plan requests that it writes, and no others."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_cudnn import GraphError
from tests.common.planner import ALL_ALLOWED
from tests.native.readers import parse_request

pytestmark = pytest.mark.once

_NOTES = (
    "CUBLASLT_DEPENDENCY",
    "DOWN_CONVERT_INPUTS",
    "FFT",
    "NONDETERMINISTIC",
    "REDUCED_PRECISION_REDUCTION",
    "REQUIRES_BIAS_INT8x32_REORDER",
    "REQUIRES_FILTER_INT8x32_REORDER",
    "RUNTIME_COMPILATION",
    "STRICT_NAN_PROP",
    "SUPPORTS_CUDA_GRAPH_NATIVE_API",
    "TENSOR_CORE",
    "WINOGRAD",
    "WINOGRAD_TILE_13x13",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
)
_FILTER = ALL_ALLOWED
_PIN = {"engine": 7, "knobs": {"STAGES": 3, "TILEK": 0}, "variant": 0}


def _dump(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _filter(**changes: Any) -> str:
    return _dump({**_FILTER, **changes})


def _pin(**changes: Any) -> str:
    return _dump({**_PIN, **changes})


def _preferences(*each: Any) -> str:
    return _dump({"preferred": each})


def _preference(*wanted: Any, **changes: Any) -> str:
    return _preferences({"first_engine": 4, "wanted": wanted, **changes})


# A plan that may be wanted before the first one.
_WANTED = {"engine": 4, "knobs": {"KERNEL_CFG": 40}}


def _refusal(text: str) -> str | None:
    """Return the reader's message, or None where it takes the text."""
    try:
        assert parse_request(text) == text
    except GraphError as error:
        return str(error)
    return None


# --- what is taken --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        _filter(),
        _filter(modes=["FALLBACK", "B", "A"]),
        _filter(engines=[7, 1], denied_engines=[3, 0]),
        _filter(deterministic=True, workspace_limit_bytes=0),
        _filter(workspace_limit_bytes=2**63 - 1),
        _filter(refused_notes=["RUNTIME_COMPILATION"], required_notes=["TENSOR_CORE"]),
        _filter(deterministic=True, refused_notes=["NONDETERMINISTIC"]),
        _pin(),
        _pin(knobs={}, variant=1),
        _pin(deterministic=True),
        _preference(_WANTED),
        _preference({"engine": 4, "knobs": {}}, {"engine": 7}, {"engine": 0}),
        _preference({"engine": 4, "knobs": {"STAGES": 3, "TILEK": 0}}, _WANTED),
        _preferences(
            {"first_engine": 4, "wanted": [_WANTED]},
            {"first_engine": 7, "wanted": [{"engine": 4}]},
            {"first_engine": 11, "wanted": [_WANTED, {"engine": 7}]},
        ),
    ],
)
def test_a_request_comes_back_byte_for_byte(text: str) -> None:
    assert parse_request(text) == text


@given(
    st.lists(st.integers(0, 99), max_size=4),
    st.none() | st.lists(st.integers(100, 2**63 - 1), min_size=1, max_size=4),
    st.booleans(),
    st.permutations(["A", "B", "FALLBACK"]).map(lambda modes: modes[1:]),
    st.sets(st.sampled_from(_NOTES)).map(sorted),
    st.none() | st.integers(0, 2**63 - 1),
)
def test_every_filter_without_contradiction_is_taken(
    denied: list[int],
    engines: list[int] | None,
    deterministic: bool,
    modes: list[str],
    refused: list[str],
    limit: int | None,
) -> None:
    text = _filter(
        denied_engines=denied,
        engines=engines,
        deterministic=deterministic,
        modes=modes,
        refused_notes=refused,
        required_notes=[
            name
            for name in _NOTES
            if name not in refused and not (deterministic and name == _NOTES[3])
        ],
        workspace_limit_bytes=limit,
    )
    assert parse_request(text) == text


# --- what is refused ------------------------------------------------------------------

_MODES = "A, B, FALLBACK"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A", "request: not JSON: syntax error at byte"),
        ("[]", "request: expected an object, got a list"),
        ("{}", "request.denied_engines: missing field"),
        (_filter(mode=["A"]), "request.mode: unknown field"),
        (_filter(modes=[]), f"request.modes: empty; name one or more of {_MODES}"),
        (
            _filter(modes=["B", "C"]),
            f"request.modes[1]: 'C' is not a known mode; known are {_MODES}",
        ),
        (
            _filter(modes=["B", "A", "B"]),
            "request.modes[2]: 'B' appears twice",
        ),
        (_filter(modes="A"), "request.modes: expected a list, got a string"),
        (
            _filter(required_notes=["TENSOR_CORES"]),
            "request.required_notes[0]: 'TENSOR_CORES' is not a known note; known are "
            + ", ".join(_NOTES),
        ),
        (
            _filter(refused_notes=["FFT", "fft"]),
            "request.refused_notes[1]: 'fft' is not a known note; known are CUBLASLT_",
        ),
        (
            _filter(refused_notes=["FFT"], required_notes=["WINOGRAD", "FFT"]),
            "request.required_notes: 'FFT' is both required and refused; take it out "
            "of required_notes or of refused_notes",
        ),
        (
            _filter(deterministic=True, required_notes=["NONDETERMINISTIC"]),
            "request.required_notes: 'NONDETERMINISTIC' is what deterministic refuses; "
            "drop one of the two",
        ),
        (
            _filter(deterministic=1),
            "request.deterministic: expected a boolean, got an integer",
        ),
        (
            _filter(engines=[]),
            "request.engines: empty, which allows no engine; null allows all",
        ),
        (
            _filter(engines=[1, 5], denied_engines=[2, 5]),
            "request.engines: engine 5 is both allowed and denied; take it out of "
            "engines or of denied_engines",
        ),
        (
            _filter(denied_engines=[4, -2]),
            "request.denied_engines[1]: -2 is not an engine; engines count from 0",
        ),
        (
            _filter(engines=["eng0"]),
            "request.engines[0]: expected an integer, got a string",
        ),
        (_filter(denied_engines=None), "request.denied_engines: expected a list"),
        (
            _filter(workspace_limit_bytes=-1),
            "request.workspace_limit_bytes: -1 is negative; 0 allows no workspace, "
            "null any",
        ),
        (
            _filter(workspace_limit_bytes=1.5),
            "request.workspace_limit_bytes: expected an integer, got a number",
        ),
        (
            _filter(workspace_limit_bytes=2**63),
            f"request.workspace_limit_bytes: {2**63} does not fit in 64 bits",
        ),
        (_pin(modes=["A"]), "request.modes: unknown field"),
        (
            _dump({"modes": ["A"], "preferred": []}),
            "request.modes: unknown field",
        ),
        (_dump({"preferred": None}), "request.preferred: expected a list, got null"),
        (_preferences(), "request.preferred: empty; an empty request lets cuDNN"),
        (_preferences(7), "request.preferred[0]: expected an object, got an integer"),
        (
            _preferences({"first_engine": 4}),
            "request.preferred[0].wanted: missing field",
        ),
        (
            _preference(_WANTED, modes=["A"]),
            "request.preferred[0].modes: unknown field",
        ),
        (
            _preference(_WANTED, first_engine=-1),
            "request.preferred[0].first_engine: -1 is not an engine; engines",
        ),
        (
            _preference(),
            "request.preferred[0].wanted: empty; name an engine to be tried first",
        ),
        (
            _preference(_WANTED, 7),
            "request.preferred[0].wanted[1]: expected an object, got an integer",
        ),
        (
            _preference({"knobs": {}}),
            "request.preferred[0].wanted[0].engine: missing field",
        ),
        (
            _preference({"engine": 7}, {"engine": -2}),
            "request.preferred[0].wanted[1].engine: -2 is not an engine; engines",
        ),
        (
            _preference({"engine": 7, "variant": 0}),
            "request.preferred[0].wanted[0].variant: unknown field",
        ),
        (
            _preference({"engine": 7, "knobs": None}),
            "request.preferred[0].wanted[0].knobs: expected an object, got null",
        ),
        (
            _preference({"engine": 7}, {"engine": 4, "knobs": {"TILEK": "1"}}),
            "request.preferred[0].wanted[1].knobs.TILEK: expected an integer, got a "
            "string",
        ),
        (
            _preference({"engine": 7}, {"engine": 4}),
            "request.preferred[0].wanted[1]: engine 4 comes first as it is; name its "
            "knobs, or another one",
        ),
        (
            _preference(_WANTED, {"engine": 7}, _WANTED),
            "request.preferred[0].wanted[2]: the same appears twice",
        ),
        (
            _preferences(
                {"first_engine": 7, "wanted": [_WANTED]},
                {"first_engine": 4, "wanted": [_WANTED]},
            ),
            "request.preferred[1].first_engine: 4 comes after 7; each is named once, "
            "smaller ones first",
        ),
        (
            _preferences(*[{"first_engine": 7, "wanted": [_WANTED]}] * 2),
            "request.preferred[1].first_engine: 7 comes after 7; each is named once",
        ),
        (
            _preference({"engine": 4, "knobs": {"TILEK": 0, "STAGES": 3}})[:-1] + " }",
            "request: the text is valid but not in canonical form",
        ),
        ('{"engine":7,"knobs":{}}', "request.variant: missing field"),
        (_pin(engine=-1), "request.engine: -1 is not an engine; engines count from 0"),
        (_pin(engine=1.5), "request.engine: expected an integer, got a number"),
        (_pin(knobs=[]), "request.knobs: expected an object, got a list"),
        (_pin(knobs={"TILEK": "1"}), "request.knobs.TILEK: expected an integer, got a"),
        (_pin(variant=None), "request.variant: expected an integer, got null"),
        (
            _pin(deterministic=False),
            "request.deterministic: a pin leaves it out where it is not true",
        ),
        (
            _filter(engines=[*range(50_000)]),
            "request: 289038 bytes of text, more than 262144",
        ),
    ],
)
def test_a_refusal_names_the_field_and_what_is_valid(text: str, message: str) -> None:
    refusal = _refusal(text)
    assert refusal is not None
    assert refusal.startswith(message)


@pytest.mark.parametrize("data", [_FILTER, _PIN])
def test_only_the_canonical_form_is_taken(data: dict[str, Any]) -> None:
    keys = dict(reversed(data.items()))
    for text in (json.dumps(data), json.dumps(keys, separators=(",", ":"))):
        assert _refusal(text) == (
            "request: the text is valid but not in canonical form, which is "
            + _dump(data)
        )
    unsorted = '{"engine":7,"knobs":{"TILEK":0,"STAGES":3},"variant":0}'
    assert "not in canonical form" in str(_refusal(unsorted))


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["A", "FFT", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*_FILTER, *_PIN]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from([_FILTER, _PIN]), st.data(), _VALUES)
def test_a_field_of_any_value_is_taken_as_it_is_or_refused(
    data: dict[str, Any], draw: st.DataObject, value: Any
) -> None:
    name = draw.draw(st.sampled_from(sorted(data)))
    refusal = _refusal(_dump({**data, name: value}))
    assert refusal is None or refusal.startswith("request")


@given(st.text(max_size=40) | st.binary(max_size=40))
def test_random_texts_are_refused(text: str | bytes) -> None:
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    if not text:
        return
    with pytest.raises(GraphError, match=r"^request: "):
        parse_request(text)
