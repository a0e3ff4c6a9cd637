# SPDX-License-Identifier: Apache-2.0
"""The exceptions that jax_cudnn raises, and how their messages are put together.

``ValueError`` and ``TypeError`` mean that the call is wrong on every backend. The
classes here are for the other cases: the request is valid but cuDNN cannot serve it, or
the environment (library, driver) failed.
"""

from collections.abc import Sequence


def install_command(*extras: str, options: str = "") -> str:
    """Return the command that installs jax_cudnn with one of the extras, for messages.

    No package index has jax_cudnn: pip installs it from the folder of its sources.
    """
    named = " or ".join(f'".[{extra}]"' for extra in extras) or "."
    command = " ".join(filter(None, ("pip install", options, named)))
    return f"{command} (in jax_cudnn's source folder)"


class GraphError(ValueError):
    """A graph specification is malformed; the message names the field."""


class UnsupportedError(NotImplementedError):
    """The request is valid, but cuDNN has no plan for it here.

    ``reasons`` has one sentence for each failed condition. ``implementation="auto"`` or
    ``"xla"`` still computes the same result.
    """

    def __init__(self, summary: str, reasons: Sequence[str] = (), advice: str = ""):
        self.summary = summary
        self.reasons = tuple(reasons)
        self.advice = advice
        lines = [summary, *(f"  - {reason}" for reason in self.reasons)]
        if advice:
            lines.append(advice)
        super().__init__("\n".join(lines))


class LibraryError(RuntimeError):
    """cuDNN, CUDA or the driver is missing, too old or cannot be used."""
