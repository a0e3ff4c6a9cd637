# SPDX-License-Identifier: Apache-2.0
"""Rewords an operation's errors for the function that the user called."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from jax_cudnn.errors import UnsupportedError


@contextmanager
def on_behalf_of(caller: str, op: str, **names: str) -> Iterator[None]:
    """Let an operation's errors name the caller, and the caller's own arguments.

    Every message of an operation begins with the operation's name, and names arguments
    as separate words. So both can be replaced by the caller's names. Errors with other
    messages pass unchanged.

    Args:
      caller: the name of the function that the user called.
      op: the operation that the caller runs, as the operation's messages begin.
      **names: for an argument of the operation, its name in the caller.
    """
    try:
        yield
    except (TypeError, ValueError, UnsupportedError) as error:
        text = str(error)
        if not text.startswith(f"{op}: "):
            raise
        words = "|".join(map(re.escape, names))
        shown = text.removeprefix(f"{op}: ")
        if words:
            shown = re.sub(rf"\b({words})\b", lambda m: names[m[1]], shown)
        raise _kind(error)(f"{caller}: {shown}") from error


def _kind(error: Exception) -> type[Exception]:
    """Return the class to raise again: some of JAX's classes take more than a text."""
    kinds = (UnsupportedError, TypeError, ValueError)
    return next(kind for kind in kinds if isinstance(error, kind))
