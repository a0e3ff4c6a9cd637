# SPDX-License-Identifier: Apache-2.0
"""How many parts begin to be measured at once, and when does no other one begin?"""

import time
from collections.abc import Callable

from jax_cudnn.measuring.together import workers

# For each core, so many parts have their programs and plans compiled at once.
_TOGETHER = 2
# How long a part takes one core, before any was measured: 32 kernels of ConvNeXt-T took
# an H100's host with 16 cores 62 s, and nine of GPT-2 15 s, while each of the programs
# was compiled as well (cuDNN 9.19, JAX 0.11).
_CORE_SECONDS = 25.0


class OutOfTimeError(Exception):
    """The time was over before everything was measured."""


class Pace:
    """Begins as many parts as should be measured in time, but one in any case.

    ``until`` says when that is, by ``time.monotonic()``. It is asked again and again,
    since it may become known better meanwhile.
    """

    def __init__(self, until: Callable[[], float]) -> None:
        self._until = until
        self._cores = workers()
        self._begun = time.monotonic()
        self._measured = 0

    @property
    def is_late(self) -> bool:
        """Whether the time is over; what has begun should be brief from then on."""
        return time.monotonic() > self._until()

    def count(self) -> int:
        """Return how many parts may begin now.

        Raises:
          OutOfTimeError: none would be done in time, as long as those before took.
        """
        now, most = time.monotonic(), _TOGETHER * self._cores
        seconds_each = _CORE_SECONDS / self._cores
        if self._measured:
            seconds_each = max((now - self._begun) / self._measured, 1e-9)
        fitting = min(most, (self._until() - now) / seconds_each)
        if fitting < 1 and self._measured:
            raise OutOfTimeError
        return max(1, int(fitting))

    def took(self, count: int) -> None:
        """Count parts that were measured until now."""
        self._measured += count
