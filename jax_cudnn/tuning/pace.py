# SPDX-License-Identifier: Apache-2.0
"""Decides how many parts are measured at once, and when to begin no more."""

import time
from collections.abc import Callable

from jax_cudnn.tuning.together import workers

# For each core, so many parts have their programs and plans compiled at once.
_TOGETHER = 2
# Seconds of a core that a part takes, before any was measured. On an H100's host with
# 16 cores, 32 kernels of ConvNeXt-T took 62 s, and nine of GPT-2 15 s (cuDNN 9.19, JAX
# 0.11): 31 and 27 seconds of cores each, the program's own compilation among them.
_CORE_SECONDS = 25.0


class OutOfTimeError(Exception):
    """The time was over before everything was measured."""


class Pace:
    """Says how many parts should be measured in time.

    ``until`` returns when the time is over, by ``time.monotonic()``. It is called again
    and again, since that may become known better meanwhile.
    """

    def __init__(self, until: Callable[[], float]) -> None:
        self._until = until
        self._cores = workers()
        self._begun = time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether the time is over; what has begun should be brief from then on."""
        return time.monotonic() > self._until()

    def count(self, measured: int) -> int:
        """Return how many parts may begin, after so many; at first, one in any case.

        Raises:
          OutOfTimeError: if each took as long as those before, none would be done in
            time.
        """
        now, most = time.monotonic(), _TOGETHER * self._cores
        seconds_each = _CORE_SECONDS / self._cores
        if measured:
            seconds_each = max((now - self._begun) / measured, 1e-9)
        fitting = min(most, (self._until() - now) / seconds_each)
        if fitting < 1 and measured:
            raise OutOfTimeError
        return int(max(1, fitting))
