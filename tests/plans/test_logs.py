# SPDX-License-Identifier: Apache-2.0
"""Tests that `plans.log` switches its own lines on and off, and no other logging."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from jax_cudnn import GraphError, LibraryError, native, plans
from jax_cudnn.graph import to_json
from tests.attention.shared.oracle import attention_graph

pytestmark = pytest.mark.once

_LOGGER = logging.getLogger("jax_cudnn")
_GRAPH = to_json(attention_graph(dtype="bf16"))
_MISS = "sdpa on device 99: no plan in the cache"


@pytest.fixture(autouse=True)
def _log_nothing_afterwards() -> Iterator[None]:
    yield
    plans.log(None)
    assert _LOGGER.level == logging.NOTSET
    assert not any(type(each) is logging.StreamHandler for each in _LOGGER.handlers)


def _plan_in_vain() -> None:
    native.clear_cache()
    with pytest.raises((GraphError, LibraryError)):
        native.plan(_GRAPH, device=99)


@pytest.mark.parametrize("level", ["DEBUG", logging.DEBUG])
def test_what_is_planned_goes_to_the_package_s_logger(
    level: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    plans.log(level)
    _plan_in_vain()
    record = caplog.records[0]
    assert (record.name, record.levelname) == ("jax_cudnn", "DEBUG")
    assert record.getMessage() == _MISS


def test_info_leaves_out_what_is_planned(caplog: pytest.LogCaptureFixture) -> None:
    plans.log("INFO")
    _plan_in_vain()
    assert caplog.records == []
    _LOGGER.info("said by the Python side")
    assert [record.getMessage() for record in caplog.records] == [
        "said by the Python side"
    ]


def test_none_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    plans.log()
    plans.log(None)
    caplog.set_level(logging.DEBUG)
    _plan_in_vain()
    assert caplog.records == []


def test_a_handler_is_added_only_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans.log()
    assert _LOGGER.handlers == []  # pytest's handler sees the lines.
    monkeypatch.setattr(_LOGGER, "propagate", False)
    for _ in range(2):
        plans.log()
        assert len(_LOGGER.handlers) == 1
    _plan_in_vain()
    assert capsys.readouterr().err.splitlines()[0] == f"DEBUG jax_cudnn: {_MISS}"


@pytest.mark.parametrize("level", ["LOUD", 2.5])
def test_a_wrong_level_changes_nothing(level: Any) -> None:
    wanted = rf"{level!r} is not a level .* Pass DEBUG"
    with pytest.raises(ValueError, match=wanted):
        plans.log(level)
    assert _LOGGER.level == logging.NOTSET
