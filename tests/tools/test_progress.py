# SPDX-License-Identifier: Apache-2.0
"""Tests that progress is shown on terminals only, and changes no result."""

import io
import re
import sys
from collections.abc import Callable

import pytest

from jax_cudnn import offline, progress
from tests.plans.planning import fake_process

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


def _lines(shown: str) -> list[str]:
    """Return the lines that a terminal has shown, without its control sequences."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


# As of the gradient of attention with a bias.
_LONG = f"sdpa_backward({', '.join(['bf16[4,2048,16,128]'] * 6)}, f32[4,16,2048,1])"


def test_a_long_name_leaves_80_columns_to_bar_count_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    items = progress.followed("ab", "Planning", count=2, name=lambda _: _LONG)
    assert list(items) == ["a", "b"]
    with progress.waiting("Measuring", _LONG):
        pass
    lines = _lines(terminal.getvalue())
    assert all(len(line) <= 80 for line in lines)
    last = [line for line in lines if line.startswith("Planning")][-1]
    assert re.fullmatch(
        r"Planning ━{20} 2/2 0:00:00 sdpa_backward\(bf16\[4,2048,16,128\], bf…", last
    ), last
    (waited,) = dict.fromkeys(x for x in lines if x.startswith("Measuring"))
    start = r"Measuring . 0:00:00 sdpa_backward\(bf16\[4,2048,16,128\], "
    assert re.match(start, waited), waited
    assert waited.endswith("…")


def test_work_within_work_shows_one_line(
    look: Callable[[io.StringIO], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look(_Terminal())
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.waiting("Measuring", "the part"):
        assert list(progress.followed("ab", "Timing", count=2)) == ["a", "b"]
    assert "the part" in terminal.getvalue()
    assert "Timing" not in terminal.getvalue()
    # And the line is free again, also where the work has failed.
    with pytest.raises(ValueError, match="it"), progress.waiting("Measuring", ""):
        raise ValueError("it")
    assert list(progress.followed("ab", "Timing", count=2)) == ["a", "b"]
    assert "Timing" in terminal.getvalue()


def test_planning_for_another_gpu_shows_which(
    look: Callable[[io.StringIO], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look(_Terminal())
    terminal = _Terminal()
    with fake_process(monkeypatch) as process:
        monkeypatch.setattr(sys, "stderr", terminal)
        gpu = offline.named_gpu("H200")
        gpu.candidates("{}")
        shown = terminal.getvalue()
        gpu.candidates("{}")
    assert "for NVIDIA H200" in shown
    # What was answered before is not waited for.
    assert terminal.getvalue() == shown
    assert len(process.asked) == 1


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
