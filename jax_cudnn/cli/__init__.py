# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments in, text or JSON out. What is told, other packages know.

Exit status: 0 where all is well, 1 where the machine cannot do it, 2 for arguments that
are wrong on every machine.
"""

import argparse
import sys
from collections.abc import Sequence

from jax_cudnn.cli import bench, doctor, explain
from jax_cudnn.errors import LibraryError

# Each adds its command and sets `run`, a function of the arguments to an exit status.
_COMMANDS = (doctor.add_command, explain.add_command, bench.add_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the process, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_cudnn", description="cuDNN's graph API under JAX."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for add_command in _COMMANDS:
        add_command(commands)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except LibraryError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except (TypeError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
