# SPDX-License-Identifier: Apache-2.0
"""Starts the process that plans, talks to it, and starts it again after a crash.

A question and its answer are a line of JSON each. The process is shared by all threads,
one question at a time, and ends with this one.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any

from jax_cudnn.errors import LibraryError, UnsupportedError

_COMMAND = (sys.executable, "-P", "-m", "jax_cudnn.offline.worker")
# One that gives way to whatever else the machine has to do.
BACKGROUND_COMMAND = (*_COMMAND, "--background")
# A plan that is compiled takes seconds.
_TIMEOUT_S = 600.0
# Of what a process that died has printed.
_TAIL = 2000


class PlanningProcess:
    """A process that plans, its greeting and its answers; thread-safe."""

    def __init__(
        self, command: Sequence[str] = _COMMAND, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """Take the command to start; nothing is started yet."""
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._reset()
        atexit.register(self.close)
        # A child has neither the process nor the thread that may hold the lock.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Guards all that follows; held while a question is answered.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._greeting: dict[str, Any] = {}

    def greeting(self) -> dict[str, Any]:
        """Return what the process says of itself, starting it if need be.

        Raises:
          LibraryError: it lacks something to plan with, or did not start.
        """
        with self._lock:
            self._ensure()
            return self._greeting

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question.

        A crash is an answer: "crash" is then what ended the process, "message" what it
        printed last. The next question finds a new process.

        Raises:
          LibraryError: there is no process and none can be started.
        """
        with self._lock:
            process = self._ensure()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                is_late, line = self._read(process)
            except BrokenPipeError:
                return self._ended()
            except BaseException:
                self._abandon(process)
                raise
            if line:
                return json.loads(line)
            crash = self._ended()
            if is_late:
                crash["crash"] = f"no answer in {self._timeout_s:.0f} s"
            return crash

    def close(self) -> None:
        """End the process; the next question starts another one."""
        with self._lock:
            if self._process is None:
                return
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()
                self._process.wait(timeout=5)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
            self._ended()

    def _ensure(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self._ended()  # while nobody was asking: no graph is to blame
        if self._process is None:
            self._start()
        assert self._process is not None
        return self._process

    def _start(self) -> None:
        # A file, so that much output cannot block the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            # It imports the package and finds the libraries that this process does, and
            # sees no GPU: a driver with another one refuses to load what is compiled.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(_import_path()),
                "CUDA_VISIBLE_DEVICES": "",
            },
        )
        self._process = process
        try:
            _, line = self._read(process)
        except BaseException:
            self._abandon(process)
            raise
        if not line:
            crash = self._ended()
            raise LibraryError(
                "The process that plans for a GPU that is not here did not start "
                f"({crash['crash']}):\n{crash['message']}"
            )
        greeting = json.loads(line)
        if "missing" in greeting:
            self._ended()
            raise LibraryError(greeting["missing"])
        self._greeting = greeting

    def _abandon(self, process: subprocess.Popen[str]) -> None:
        """End a process whose answer nobody waits for: the next is for another."""
        process.kill()
        self._ended()

    def _read(self, process: subprocess.Popen[str]) -> tuple[bool, str]:
        """Return whether the process was killed for being late, and its next line."""
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._timeout_s, stop)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
        finally:
            timer.cancel()
        # A process that dies may leave half a line.
        return is_late.is_set(), line if line.endswith("\n") else ""

    def _ended(self) -> dict[str, Any]:
        """Wait for the process to be gone, and return its end as a crash."""
        process, errors = self._process, self._errors
        assert process is not None
        assert errors is not None
        with process:
            status = process.wait()
        with errors:
            errors.seek(0)
            text = errors.read().decode(errors="replace")
        self._process = self._errors = None
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return {"crash": name, "message": text[-_TAIL:].strip()}


def raise_crash(answer: dict[str, Any], gpu: str) -> None:
    """Raise ``UnsupportedError`` if the process crashed at a graph for a GPU."""
    if "crash" in answer:
        raise UnsupportedError(
            f"cuDNN crashed on this graph for {gpu}.",
            [f"cuDNN crashed while it planned: {answer['crash']}"],
        )


def _import_path() -> list[str]:
    """Return where this process imports from; "" is its directory of now."""
    return list(dict.fromkeys(entry or os.getcwd() for entry in sys.path))  # noqa: PTH109
