# SPDX-License-Identifier: Apache-2.0
"""Is progress shown on terminals, only there, and without changing what is done?"""

import io
import sys
from collections.abc import Callable

import pytest

from jax_cudnn import progress

pytestmark = pytest.mark.once


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[[io.StringIO], str]:
    """Return a function that follows three items on a stream, and what is shown."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv(progress.VARIABLE, raising=False)

    def follow(stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        found = progress.followed(
            iter("abc"), "Planning", count=3, name=lambda x: f"sdpa(bf16[4,{x}])"
        )
        assert list(found) == ["a", "b", "c"]
        return stream.getvalue()

    return follow


def test_a_terminal_shows_count_and_name(look: Callable[[io.StringIO], str]) -> None:
    shown = look(_Terminal())
    for text in ("Planning", "1/3", "2/3", "sdpa(bf16[4,b])"):
        assert text in shown


def test_a_file_gets_nothing(look: Callable[[io.StringIO], str]) -> None:
    assert not look(io.StringIO())


def test_what_is_printed_meanwhile_goes_where_it_was_to_go(
    look: Callable[[io.StringIO], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look(_Terminal())
    file, terminal = io.StringIO(), _Terminal()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", terminal)
    for item in progress.followed("ab", "Planning", count=2):
        print(f"result {item}")
    assert file.getvalue() == "result a\nresult b\n"
    assert "result" not in terminal.getvalue()


@pytest.mark.parametrize("value", ["off", "OFF ", "0", "false"])
def test_one_switch_turns_it_off(
    value: str,
    look: Callable[[io.StringIO], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(progress.VARIABLE, value)
    assert not look(_Terminal())


def test_without_a_stream_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress.followed([1, 2], "Planning", count=2)) == [1, 2]
