# SPDX-License-Identifier: Apache-2.0
"""Passes lines of log of the C++ side, and of cuDNN itself, to a sink."""

import atexit
import functools
import logging
from collections.abc import Callable
from typing import Literal

from jax_cudnn.native._extension import extension

# Called with a level of `logging`, a line (cuDNN's may have several) and who wrote it.
LogSink = Callable[[int, str, Literal["jax_cudnn", "cudnn"]], None]


def set_log_sink(
    sink: LogSink | None, level: int = logging.DEBUG, *, cudnn: bool = False
) -> None:
    """Hand the lines of ``level`` and above to ``sink`` from now on, or none to None.

    We write at DEBUG what is planned: misses of the cache, candidates that fail, and
    plans with their times. The sink is called from any thread, also from XLA's. What
    it raises is reported as unraisable; what it brings about itself is not logged.
    Nothing is called once the interpreter has begun to exit.

    Args:
        sink: replaces the sink before it.
        level: of Python's ``logging``.
        cudnn: also hand over cuDNN's own messages, of all its users in the process.
            cuDNN's "info", every call of its API, has level DEBUG. Opens libcudnn.

    Raises:
        LibraryError: ``cudnn`` is asked for and there is no libcudnn, or this is called
            by a sink.
    """
    extension().set_log_sink(sink, level, cudnn)
    _unset_at_exit()


@functools.cache
def _unset_at_exit() -> None:
    # Waits for calls under way, so that no thread enters an interpreter that is gone.
    atexit.register(extension().set_log_sink, None, logging.CRITICAL, False)
