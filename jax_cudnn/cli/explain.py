# SPDX-License-Identifier: Apache-2.0
"""`jax-cudnn explain`: says which calls of a function cuDNN runs, and why not.

Exit status 0 where it can run all that is meant for it, and 1 where it cannot.
"""

import argparse
import json
from typing import Any

from jax_cudnn.cli.calls import add_call, call_of
from jax_cudnn.plans.explanation import explain


def add_command(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "explain",
        help="whether cuDNN runs a function's calls on a GPU, which need not be here",
        description="Asks cuDNN for a plan of each call that a function makes. Where "
        "there is none, it says why, and what would work. Nothing is run. The exit "
        "status is 1 if cuDNN cannot run a call that is meant for it, and 0 otherwise. "
        "Calls that are left to XLA, because it is faster, count as well. For example: "
        'explain jax_cudnn:sdpa --device A100 --args "bf16[4,128,8,64]" '
        '"bf16[4,128,8,64]" "bf16[4,128,8,64]" is_causal=True --gradient',
    )
    add_call(parser)
    parser.add_argument(
        "--device",
        help='The name of a GPU, which need not be here, such as "H200". The default '
        "is this machine's.",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print the answers as JSON. The default is a text to read.",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    function, operands = call_of(arguments)
    found = explain(function, *operands, device=arguments.device)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found)
    return int(bool(found.refused))
