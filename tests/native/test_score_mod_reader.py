# SPDX-License-Identifier: Apache-2.0
"""Tests that C++ and Python read and refuse the steps of a score_mod alike."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_cudnn import GraphError
from jax_cudnn.graph import from_json
from jax_cudnn.graph.pointwise import ARITY
from tests.native.readers import parse_graph

pytestmark = pytest.mark.once

_GOLDEN = Path(__file__).parents[1] / "golden" / "sdpa_backward_score_mod.json"
_TEXT = _GOLDEN.read_text(encoding="ascii").strip()


def _changed(steps: Any, gradient: Any = ()) -> str:
    data = json.loads(_TEXT)
    attributes = data["nodes"][0]["attributes"]
    for name, value in (("score_mod", steps), ("score_mod_grad", list(gradient))):
        if value:
            attributes[name] = value
        else:
            del attributes[name]
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _verdicts(text: str) -> tuple[str | None, str | None]:
    found: list[str | None] = []
    for read in (from_json, parse_graph):
        try:
            read(text)
            found.append(None)
        except GraphError as error:
            found.append(str(error))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("steps", "gradient", "message"),
    [
        ((), ("neg grad",), "score_mod_grad without score_mod"),
        ((), (), "score_mod: it does not read mod_a"),
        (("tanh score",), (), "score_mod: it does not read mod_a"),
        (("tanh",), (), "score_mod: 'tanh' has 0 words, not 1"),
        (("",), (), "score_mod: '' has no known mode"),
        (("cube score",), (), "score_mod: 'cube score' has no known mode"),
        (("tanh_grad score mod_a",), (), "'tanh_grad score mod_a' has no known mode"),
        (("add score mod_a 1",), (), "'add score mod_a 1' has 3 words, not 2"),
        (("add score  mod_a",), (), "'add score  mod_a' has 3 words, not 2"),
        (("add score mod_b",), (), "no value and no number is 'mod_b'"),
        (("add score %0",), (), "no value and no number is '%0'"),
        (("add score 1.0",), (), "no value and no number is '1.0'"),
        (("add score inf",), (), "no value and no number is 'inf'"),
        (("add score grad",), (), "no value and no number is 'grad'"),
        (("add score %00",), (), "no value and no number is '%00'"),
        (("gt score mod_a",), (), "score_mod: the last step gives a truth value"),
        (
            ("gt score mod_a", "add score %0"),
            (),
            "score_mod: 'add score %0': '%0' is not a number",
        ),
        (
            ("select score mod_a 1",),
            (),
            "score_mod: 'select score mod_a 1': '1' is not a truth value",
        ),
        (
            ("add score mod_a",),
            ("gt grad 0",),
            "score_mod_grad: the last step gives a truth value",
        ),
    ],
)
def test_steps_that_are_not_well_formed_are_refused(
    steps: Any, gradient: Any, message: str
) -> None:
    python, native = _verdicts(_changed(list(steps), gradient))
    assert python is not None
    assert message in python
    assert native == python


_WORDS = st.sampled_from(
    [
        *("score", "query", "key", "grad", "mod_a", "mod_b", "%0", "%1", "%9"),
        *("-inf", "0", "-0", "1e-07", "0.5", "1e+300", "nan", "", "\u00e9", "30.0"),
    ]
)
_STEPS = st.lists(
    st.builds(
        lambda mode, words: " ".join((mode, *words)),
        st.sampled_from(sorted(ARITY)),
        st.lists(_WORDS, min_size=1, max_size=3),
    ),
    max_size=3,
)


@given(_STEPS, _STEPS)
@settings(max_examples=400)
def test_both_languages_give_the_same_verdict(
    steps: list[str], gradient: list[str]
) -> None:
    python, native = _verdicts(_changed(steps, gradient))
    assert (python is None) == (native is None), (python, native)
