# SPDX-License-Identifier: Apache-2.0
"""`jax-cudnn doctor`: prints `plans.doctor`."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from jax_cudnn import plans


def add_command(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "doctor",
        help="say what cuDNN has to work with here, and what is wrong with it",
        description="Looks at this machine's GPUs, driver, JAX and cuDNN, says what is "
        "wrong with them, and what to do about it. The exit status is 1 if something "
        "keeps cuDNN from a GPU that is there, or jax_cudnn or JAX from running, and 0 "
        "otherwise.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json",
        action="store_true",
        help="Print the facts and findings as JSON. The default is a text to read.",
    )
    form.add_argument(
        "--report",
        action="store_true",
        help="Print the text for a bug report, which does not name your home folder. "
        "By default the text names it.",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    diagnosis = plans.doctor()
    if arguments.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    elif arguments.report:
        print(_without_home(str(diagnosis)))
    else:
        print(diagnosis)
    return diagnosis.exit_status


def _without_home(text: str) -> str:
    """Return a text with "~" for the user's home folder."""
    try:
        home = Path.home()
    except RuntimeError:  # neither a variable nor an entry of the user names one
        return text
    # A user whom a container does not know has "/", which names nobody.
    if not home.is_absolute() or home == Path(home.anchor):
        return text
    return re.sub(rf"(?<![\w.~-]){re.escape(str(home))}(?![\w.-])", "~", text)
