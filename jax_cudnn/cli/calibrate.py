# SPDX-License-Identifier: Apache-2.0
"""`jax-cudnn calibrate`: measures this machine's GPU for "auto"."""

import argparse
from pathlib import Path
from typing import Any

from jax_cudnn import plans
from jax_cudnn.calibration import storing
from jax_cudnn.errors import LibraryError
from jax_cudnn.lowering.devices import local_target


def add_command(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "calibrate",
        help='measure this GPU, so that "auto" knows where cuDNN is faster on it',
        description="Times kernels of the sizes that models have by cuDNN and by XLA, "
        "and keeps the times in the cache folder. Programs that are compiled from "
        'then on use them where implementation="auto" decides. A later call goes on '
        "where an earlier one ended. It needs the GPU to itself. For example: "
        "calibrate --seconds 600",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="For how long to measure. The default is 300.",
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="Time the plans of all engines, which takes several times as long for "
        "each kernel. The default is the first plan and a few others.",
    )
    parser.add_argument(
        "--only",
        metavar="REGEX",
        default="",
        help="Measure calls in whose title this regular expression is found, such as "
        '"conv 3x3" or "layer_norm". The default is all calls.',
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--show",
        action="store_true",
        help="Print what is known, and measure nothing. The default is to measure.",
    )
    other.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="Write what is kept for this GPU and its cuDNN to a file, and measure "
        "nothing. The default is to measure.",
    )
    other.add_argument(
        "--import",
        dest="take",
        type=Path,
        metavar="FILE",
        help="Keep an exported file here in place of what is kept for its GPU, and "
        "measure nothing. The default is to measure.",
    )
    other.add_argument(
        "--forget",
        action="store_true",
        help="Remove all that was calibrated here, and measure nothing. The default is "
        "to measure.",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.forget:
        count = storing.remove_all()
        print(f"removed {count} calibration{'s' * (count != 1)}")
    elif arguments.take is not None:
        print(f"kept as {storing.import_file(arguments.take)}")
    elif arguments.export is not None:
        local = local_target()
        if local is None:
            raise LibraryError("--export is for the GPU of this machine: there is none")
        storing.export(arguments.export, local[1])
        print(f"written to {arguments.export}")
    elif arguments.show:
        print(plans.calibrated())
    else:
        print(
            plans.calibrate(
                seconds=arguments.seconds,
                is_thorough=arguments.thorough,
                only=arguments.only,
            )
        )
    return 0
