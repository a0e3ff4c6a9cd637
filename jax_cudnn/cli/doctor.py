# SPDX-License-Identifier: Apache-2.0
"""`jax-cudnn doctor`: prints `plans.doctor`."""

import argparse
import json
from pathlib import Path
from typing import Any

from jax_cudnn import plans


def add_command(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "doctor",
        help="say what cuDNN has to work with here, and what is wrong with it",
        description="Exit status 1 if something keeps cuDNN from a GPU that is there, "
        "or jax_cudnn from being imported.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print data, as JSON")
    form.add_argument(
        "--report",
        action="store_true",
        help="print the text for a bug report: your home folder is not named",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    diagnosis = plans.doctor()
    if arguments.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    elif arguments.report:
        print(str(diagnosis).replace(str(Path.home()), "~"))
    else:
        print(diagnosis)
    return diagnosis.exit_status
