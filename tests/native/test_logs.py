# SPDX-License-Identifier: Apache-2.0
"""Tests that lines of the C++ side, and cuDNN's, reach a Python sink."""

import logging
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_cudnn import GraphError, LibraryError, native
from tests.native.processes import run_python
from tests.native.stand_ins import compile_cudnn, obstacle

pytestmark = pytest.mark.once

_FOLDER = Path(__file__).parents[1] / "golden"
_GRAPH = (_FOLDER / "sdpa_forward.json").read_text(encoding="ascii").strip()
# No machine has it: planning for it fails with and without cuDNN, and is logged.
_DEVICE = 99
_MISS = f"sdpa on device {_DEVICE}: no plan in the cache"

_Line = tuple[int, str, str]

needs_stand_in = pytest.mark.skipif(bool(obstacle()), reason=obstacle())


def _plan_in_vain() -> None:
    with pytest.raises((GraphError, LibraryError)):
        native.plan(_GRAPH, device=_DEVICE)


@pytest.fixture
def lines() -> Iterator[list[_Line]]:
    found: list[_Line] = []
    native.set_log_sink(lambda *line: found.append(line))
    yield found
    native.set_log_sink(None)


def test_a_miss_and_a_failure_are_logged_at_debug(lines: list[_Line]) -> None:
    native.clear_cache()
    _plan_in_vain()
    miss, failure = lines
    assert miss == (logging.DEBUG, _MISS, "jax_cudnn")
    assert failure[0] == logging.DEBUG
    assert failure[1].startswith("sdpa: no plan after ")
    assert failure[2] == "jax_cudnn"


def test_the_choice_is_part_of_the_line(lines: list[_Line]) -> None:
    request = '{"engine":1,"knobs":{},"variant":0}'
    with pytest.raises((GraphError, LibraryError)):
        native.plan(_GRAPH, request=request, device=_DEVICE)
    assert lines[0][1] == f"{_MISS} for the request {request}"


def test_nothing_is_said_above_the_level_or_without_a_sink(lines: list[_Line]) -> None:
    native.set_log_sink(lambda *line: lines.append(line), logging.INFO)
    native.clear_cache()
    _plan_in_vain()
    native.set_log_sink(None)
    _plan_in_vain()
    assert lines == []


def test_what_a_sink_raises_is_reported_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[BaseException | None] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda event: reported.append(event.exc_value)
    )

    def sink(level: int, text: str, source: str) -> None:
        raise ValueError(text)

    native.clear_cache()
    native.set_log_sink(sink)
    try:
        _plan_in_vain()
    finally:
        native.set_log_sink(None)
    assert str(reported[0]) == _MISS
    assert len(reported) == 2


def test_a_sink_may_plan_and_not_change_the_sink() -> None:
    seen: list[str] = []
    errors: list[str] = []

    def sink(level: int, text: str, source: str) -> None:
        seen.append(text)
        _plan_in_vain()
        try:
            native.set_log_sink(None)
        except LibraryError as error:
            errors.append(str(error))

    native.clear_cache()
    native.set_log_sink(sink)
    try:
        _plan_in_vain()
    finally:
        native.set_log_sink(None)
    assert len(seen) == 2
    assert errors == ["a log handler cannot change where the log goes"] * 2


def test_threads_log_while_the_sink_changes(lines: list[_Line]) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            native.clear_cache()
            _plan_in_vain()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    others: list[_Line] = []
    for _ in range(200):
        native.set_log_sink(lambda *line: others.append(line))
        native.set_log_sink(lambda *line: lines.append(line))
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert {line[2] for line in lines + others} == {"jax_cudnn"}


def test_a_process_ends_with_a_sink_in_place() -> None:
    printed = run_python(
        f"""
        import threading
        from jax_cudnn import LibraryError, native

        native.set_log_sink(lambda *line: print(line[1], flush=True))

        def work():
            try:
                native.plan({_GRAPH!r}, device={_DEVICE})
            except Exception as error:
                print(type(error).__name__)

        thread = threading.Thread(target=work)
        thread.start()
        """
    )
    assert printed.splitlines()[0] == _MISS


# --- cuDNN's own lines ----------------------------------------------------------------

# Keeps the callback, and calls it with a message of each severity on request.
_CALLBACK = """
typedef void (*Callback)(int, void*, const void*, const char*);
static Callback callback; static unsigned mask;
int cudnnSetCallback(unsigned m, void* u, Callback f) {
  mask = m; callback = f; return 0;
}
void speak(void) {
  if (!callback) return;
  if (mask & 2) callback(0, 0, 0, "fatal\\0");
  if (mask & 2) callback(1, 0, 0, "error\\0  its reason\\0");
  if (mask & 4) callback(2, 0, 0, "warning \\377\\0");
  if (mask & 8) callback(3, 0, 0, "info\\0  more\\0  and more\\0");
}
"""


def _speak(directory: Path, *settings: str) -> list[str]:
    """Return what each setting lets through, or the error, in one process for all."""
    attempts = "".join(
        f"attempt(lambda sink: native.set_log_sink(sink, {setting}))\n"
        for setting in settings
    )
    preamble = textwrap.dedent(
        f"""
        import ctypes, logging
        from jax_cudnn import native
        from jax_cudnn.native._extension import extension
        extension().set_library_directories([{str(directory)!r}])

        def attempt(set_sink):
            lines = []
            try:
                set_sink(lambda *line: lines.append(line))
                library = ctypes.CDLL({str(directory / "libcudnn.so.9")!r})
                library.speak()
                native.set_log_sink(None)
                library.speak()
                print(lines)
            except Exception as error:
                print(f"{{type(error).__name__}}: {{error}}")

        """
    )
    return run_python(preamble + attempts).splitlines()


@needs_stand_in
def test_cudnns_messages_arrive_by_severity(tmp_path: Path) -> None:
    compile_cudnn(tmp_path, extra=_CALLBACK)
    errors = [(40, "fatal", "cudnn"), (40, "error\n  its reason", "cudnn")]
    warning = (30, "warning \ufffd", "cudnn")
    info = (10, "info\n  more\n  and more", "cudnn")
    expected = {
        "logging.ERROR, cudnn=True": errors,
        "logging.WARNING, cudnn=True": [*errors, warning],
        "logging.INFO, cudnn=True": [*errors, warning],
        "logging.DEBUG, cudnn=True": [*errors, warning, info],
        "logging.DEBUG": [],
    }
    assert _speak(tmp_path, *expected) == [str(lines) for lines in expected.values()]


@needs_stand_in
def test_a_cudnn_without_a_callback_is_said_to_have_none(tmp_path: Path) -> None:
    compile_cudnn(tmp_path)
    assert _speak(tmp_path, "logging.DEBUG, cudnn=True") == [
        f"LibraryError: {tmp_path}/libcudnn.so.9 has no function cudnnSetCallback, so "
        "that its log cannot be had; leave cudnn=True out"
    ]


@needs_stand_in
def test_cudnns_log_needs_cudnn(tmp_path: Path) -> None:
    message, *_ = _speak(tmp_path, "logging.DEBUG, cudnn=True")
    assert message.startswith("LibraryError: Cannot open libcudnn.so.9, ")
