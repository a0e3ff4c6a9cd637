# SPDX-License-Identifier: Apache-2.0
"""Tests that the worked examples at the head of modules give what they show."""

import doctest
import importlib

import pytest

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "name",
    [
        "graph.factors",
        "lowering.sharding.subaxes",
        "lowering.sharding.typed",
        "tuning.together",
    ],
)
def test_a_worked_example_gives_what_it_shows(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"jax_cudnn.{name}"))
    assert found.attempted
    assert not found.failed
