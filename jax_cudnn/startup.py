# SPDX-License-Identifier: Apache-2.0
"""Lets `jax-cudnn doctor` run where importing the package fails.

Python imports a package before it runs it, so an error there would leave no one to say
what is wrong. Imports nothing but the standard library.
"""

import os
import sys

# What importing the package raised, where it is imported to be run as a program.
failure: "Exception | None" = None  # in quotes for Pythons that are too old

# The command that an installation puts on the path: pyproject.toml.
COMMAND = "jax-cudnn"


def is_program() -> bool:
    """Whether the package is imported because its command line is to be run."""
    # sys.argv[0] is "-m" while Python looks for the module that it is to run: see
    # https://docs.python.org/3/library/sys.html#sys.argv. It may be another's.
    is_looking = getattr(sys, "argv", [])[:1] == ["-m"]
    if is_looking:
        return any(
            argument.removeprefix("-m") == "jax_cudnn" for argument in sys.orig_argv
        )
    return _is_command()


def program_name() -> str:
    """Return how the command line was called, for its messages."""
    return COMMAND if _is_command() else "python -m jax_cudnn"


def _is_command() -> bool:
    first = (getattr(sys, "argv", None) or [""])[0]
    return os.path.basename(first) == COMMAND  # noqa: PTH119  pathlib is slower to import
