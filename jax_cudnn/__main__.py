# SPDX-License-Identifier: Apache-2.0
"""`python -m jax_cudnn`: the command line; see cli/.

The doctor runs where the package cannot be imported; other commands say why it cannot.
"""

import sys

from jax_cudnn import startup

_OLDEST_PYTHON = (3, 11)


def _main() -> int:
    if sys.version_info < _OLDEST_PYTHON:
        oldest, found = (
            ".".join(map(str, v[:3])) for v in (_OLDEST_PYTHON, sys.version_info)
        )
        print(
            f"jax_cudnn needs Python {oldest} or newer; this is {found}.",
            file=sys.stderr,
        )
        return 1
    if startup.failure is not None and sys.argv[1:2] != ["doctor"]:
        print(
            f"python -m jax_cudnn: {startup.failure}\n"
            "`python -m jax_cudnn doctor` looks for what is wrong.",
            file=sys.stderr,
        )
        return 1
    from jax_cudnn.cli import main  # not before Python is known to be new enough

    return main()


if __name__ == "__main__":
    sys.exit(_main())
