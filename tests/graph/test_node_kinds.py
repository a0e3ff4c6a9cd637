# SPDX-License-Identifier: Apache-2.0
"""Tests that every registry has the same kinds of nodes, those of node_kinds.json."""

import dataclasses

import pytest

from jax_cudnn import legalize
from jax_cudnn.graph import NORMALISED, all_kinds
from jax_cudnn.graph.description import Description, describe, table
from jax_cudnn.policy import ranking
from jax_cudnn.policy.products.kernels import KINDS as CONTRACTIONS
from jax_cudnn.reference import interpreter

pytestmark = pytest.mark.once

_KINDS = sorted(table())
_TYPES = {
    "bool": bool,
    "integer": int,
    "number": float,
    "string": str,
    "strings": tuple[str, ...],
    "integers": tuple[int, ...],
}


def test_the_table_is_written_in_order() -> None:
    assert list(table()) == _KINDS


def test_every_kind_has_its_functions() -> None:
    assert sorted(all_kinds()) == _KINDS


def test_every_kind_has_a_meaning() -> None:
    assert sorted(interpreter.RULES) == _KINDS


def test_kinds_that_are_legalised_alone_are_known() -> None:
    assert set(legalize.RULES) < set(_KINDS)


def test_every_kernel_can_be_written_for_cudnn() -> None:
    """Those without a rule of their own are the contractions, which fusion takes."""
    kernels = {name for name in _KINDS if not all_kinds()[name].row.is_around}
    assert kernels == {*legalize.RULES, *CONTRACTIONS}


def test_the_policy_knows_every_kernel() -> None:
    named = {name.removesuffix("_backward") for name in legalize.RULES}
    assert named == {*NORMALISED, *ranking.NAMED}


@pytest.mark.parametrize("name", _KINDS)
def test_attributes_have_the_types_of_the_table(name: str) -> None:
    kind = all_kinds()[name]
    declared = {f.name: f.type for f in dataclasses.fields(kind.attributes)}
    assert declared == {k: _TYPES[v.type] for k, v in kind.row.attributes.items()}
    defaults = {f.name: f.default for f in dataclasses.fields(kind.attributes)}
    for field, value in kind.row.attributes.items():
        if value.default is not None:
            assert defaults[field] == value.default
        assert value.type == "integers" or not value.entries


@pytest.mark.parametrize("name", _KINDS)
def test_letters_and_roles_are_declared(name: str) -> None:
    for row in (describe(name), *describe(name).forms.values()):
        _check_letters_and_roles(row)


def _check_letters_and_roles(row: Description) -> None:
    letters = {
        x for role in row.roles.values() for axis in role.axes for x in axis.letters
    }
    named = set(row.letters)
    assert not row.letters or letters <= named
    assert letters.issuperset(row.folds)
    for role in row.roles.values():
        for word in ("like ", "sum of "):
            if role.dtype.startswith(word):
                assert role.dtype.removeprefix(word) in row.roles
        assert letters.issuperset(role.counts or "")
        assert letters.issuperset(role.indexes or "")
    if row.pads is not None:
        assert letters.issuperset(row.pads.letters)
