# SPDX-License-Identifier: Apache-2.0
"""The command line: reads arguments, and prints what other packages answer.

Exit status: 0 where all is well, 1 where the machine cannot do it, 2 for arguments that
are wrong on every machine.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

import jax_cudnn
from jax_cudnn import startup
from jax_cudnn.errors import LibraryError

# The modules of the commands. Each adds its own and sets `run`, a function of the
# arguments to an exit status.
_COMMANDS = ("doctor", "explain", "bench", "calibrate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the process, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog=startup.program_name(),
        description="See what cuDNN does for JAX on this machine, and on other GPUs.",
        epilog="`%(prog)s COMMAND --help` tells what a command takes, with an example.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"jax-cudnn {jax_cudnn.__version__}",
        help="Print the version of jax_cudnn, and stop.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    given = sys.argv[1:] if arguments is None else arguments
    # The doctor alone can be imported where JAX cannot.
    wanted = ("doctor",) if given[:1] == ["doctor"] else _COMMANDS
    for name in wanted:
        importlib.import_module(f"{__name__}.{name}").add_command(commands)
    parsed = parser.parse_args(given)
    try:
        return parsed.run(parsed)
    except LibraryError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except (TypeError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
