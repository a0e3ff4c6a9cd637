# SPDX-License-Identifier: Apache-2.0
"""Sets where plans and measured choices are kept on disk, and how much of them.

The environment is read when the answer is first needed, never at import:
``JAX_CUDNN_CACHE_DIR`` is a folder, or "off"; ``JAX_CUDNN_CACHE_LIMIT`` is the most
bytes that plans may take. Nothing is made on disk before the first thing is kept.
"""

import contextlib
import fcntl
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jax_cudnn import native

_log = logging.getLogger("jax_cudnn")

DIRECTORY_VARIABLE = "JAX_CUDNN_CACHE_DIR"
LIMIT_VARIABLE = "JAX_CUDNN_CACHE_LIMIT"
OFF = "off"
DEFAULT_LIMIT_BYTES = 1 << 30

# How long to wait for another process that writes; it takes milliseconds.
_LOCK_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The folder for everything that is kept (None: nothing is), and plans' limit."""

    directory: Path | None
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    @property
    def plans(self) -> Path | None:
        """The folder of plan files."""
        return None if self.directory is None else self.directory / "plans"


_lock = threading.Lock()
_current: Settings | None = None


def settings() -> Settings:
    """Return what is in force; the first call reads the environment."""
    global _current
    with _lock:
        if _current is None:
            _current = _from_environment()
        return _current


def configure(new: Settings) -> None:
    """Put settings in force, in the extension too, whatever the environment says."""
    global _current
    with _lock:
        _current = new
    # Not under the lock: a thread that plans may hold the extension's and ask for ours.
    native.set_plan_store(new.plans, new.limit_bytes)


def connect() -> None:
    """Tell the extension whom to ask for the settings when it first plans.

    It may plan with no Python code of ours in between: a deserialised executable.
    """
    native.set_plan_store_source(lambda: (settings().plans, settings().limit_bytes))


def _from_environment() -> Settings:
    limit = os.environ.get(LIMIT_VARIABLE, "").strip()
    if limit and not limit.isdecimal():
        _log.warning(
            "%s=%r is not a number of bytes; plans may take %d",
            LIMIT_VARIABLE, limit, DEFAULT_LIMIT_BYTES,
        )  # fmt: skip
        limit = ""
    return Settings(
        directory=_directory(os.environ.get(DIRECTORY_VARIABLE, "").strip()),
        limit_bytes=int(limit) if limit else DEFAULT_LIMIT_BYTES,
    )


def _directory(text: str) -> Path | None:
    if text.lower() == OFF:
        return None
    try:
        if text:
            return Path(text).expanduser().absolute()
        import platformdirs  # here, because importing the package must stay cheap

        return platformdirs.user_cache_path("jax_cudnn").absolute()
    except (RuntimeError, OSError) as error:  # no home, no working directory
        _log.debug("nothing is kept on disk: %s", error)
        return None


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold a folder's lock, which keeps other processes and threads out; make both.

    Raises:
        OSError: the folder cannot be written, or another holds on to it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(directory / "lock", flags, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{directory} stays locked") from error
            time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)  # and unlocks


def replace_file(
    path: Path, write: Callable[[IO[bytes]], object], *, is_private: bool = True
) -> None:
    """Have a file written that appears whole or not at all.

    For this user only, or else with the permissions that new files have.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_unfinished(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            if not is_private:
                os.fchmod(file.fileno(), 0o666 & ~_umask())
            write(file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove what ``replace_file`` left of a file where its process was killed.

    No other process may be writing the file: hold the folder's lock.

    Raises:
        OSError: the folder cannot be read or written.
    """
    for left_over in path.parent.glob(f"{_unfinished(path)}*"):
        left_over.unlink()


def _unfinished(path: Path) -> str:
    return f"tmp-{path.name}-"


def _umask() -> int:
    """Return what new files do not grant; Linux tells it without changing it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077
