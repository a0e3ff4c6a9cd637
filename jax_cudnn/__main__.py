# SPDX-License-Identifier: Apache-2.0
"""`jax-cudnn` and `python -m jax_cudnn`: the command line; see cli/.

The doctor runs where the package cannot be imported; other commands say why it cannot.
"""

import sys

from jax_cudnn import startup

_OLDEST_PYTHON = (3, 11)


def main() -> int:
    """Run the command line; return its exit status."""
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
