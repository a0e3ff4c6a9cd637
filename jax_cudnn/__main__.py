# SPDX-License-Identifier: Apache-2.0
"""`jax-cudnn` and `python -m jax_cudnn`: the command line; see cli/.

The doctor runs where the package cannot be imported; other commands say why it cannot.
"""

import os
import signal
import sys

from jax_cudnn import startup

_OLDEST_PYTHON = (3, 11)


def main() -> int:
    """Run the command line; return its exit status.

    Where the reader of the output has gone, as `head` does, this is what a shell says
    of other programs then.
    """
    output = sys.stdout
    try:
        try:
            return _run()
        finally:
            if output is not None:
                output.flush()
    except BrokenPipeError:
        if output is not None:
            # Python flushes once more as it ends: see the note on SIGPIPE in
            # https://docs.python.org/3/library/signal.html.
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        return 128 + signal.SIGPIPE


def _run() -> int:
    if sys.version_info < _OLDEST_PYTHON:
        oldest, found = (
            ".".join(map(str, v[:3])) for v in (_OLDEST_PYTHON, sys.version_info)
        )
        print(
            f"jax_cudnn needs Python {oldest} or newer; this is {found}.",
            file=sys.stderr,
        )
        return 1
    name = startup.program_name()
    if startup.failure is not None and sys.argv[1:2] != ["doctor"]:
        print(
            f"{name}: {startup.failure}\n`{name} doctor` looks for what is wrong.",
            file=sys.stderr,
        )
        return 1
    from jax_cudnn import cli  # not before Python is known to be new enough

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
