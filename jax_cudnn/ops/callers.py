# SPDX-License-Identifier: Apache-2.0
"""Errors of an operation in the words of the function that the user called."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from jax_cudnn.errors import UnsupportedError


@contextmanager
def on_behalf_of(caller: str, op: str, **names: str) -> Iterator[None]:
    """Let an operation's refusals name the caller, and the caller's own arguments.

    Every message of an operation begins with its name and names arguments as words of
    their own, so that they are put into the caller's words here. Others pass.

    Args:
      caller: the name of what the user called.
      op: the operation that it calls, as its messages begin.
      **names: what the caller calls an argument of the operation.
    """
    try:
        yield
    except (TypeError, ValueError, UnsupportedError) as error:
        text = str(error)
        if not text.startswith(f"{op}: "):
            raise
        words = "|".join(map(re.escape, names))
        told = text.removeprefix(f"{op}: ")
        if words:
            told = re.sub(rf"\b({words})\b", lambda m: names[m[1]], told)
        raise _kind(error)(f"{caller}: {told}") from error


def _kind(error: Exception) -> type[Exception]:
    """Return the class to raise again; some of JAX's take more than a text."""
    kinds = (UnsupportedError, TypeError, ValueError)
    return next(kind for kind in kinds if isinstance(error, kind))
