# SPDX-License-Identifier: Apache-2.0
"""Did importing the package fail? `python -m jax_cudnn doctor` answers all the same.

Python imports a package before it runs it, so an error there would leave no one to say
what is wrong. Imports nothing but the standard library.
"""

import sys

# What importing the package raised, where it is imported to be run as a program.
failure: "Exception | None" = None  # in quotes for Pythons that are too old


def is_program() -> bool:
    """Whether the package is imported because of `python -m jax_cudnn`."""
    # sys.argv[0] is "-m" while Python looks for the module that it is to run: see
    # https://docs.python.org/3/library/sys.html#sys.argv. It may be another's.
    is_looking = getattr(sys, "argv", [])[:1] == ["-m"]
    return is_looking and any(
        argument.removeprefix("-m") == "jax_cudnn" for argument in sys.orig_argv
    )
