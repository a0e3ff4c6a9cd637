# SPDX-License-Identifier: Apache-2.0
"""Trains GPT-2 on all GPUs of a machine under plain `jax.jit`: `make gpt`.

The batch is split over the mesh axis "data", heads and layers' widths over "model".
Where each parameter lies is said once, in gpt/layout.py; the compiler finds everything
else. The text is the source of Python's standard library, NumPy, JAX and Flax, byte by
byte, so that nothing has to be downloaded. On two CPU cores the default model is tiny
and takes about two minutes.

  python examples/train_gpt.py --parallel fsdp --checkpoints runs/a
  python examples/train_gpt.py --parallel tensor --mesh 2x4 --size medium
"""

import argparse
from typing import get_args

from gpt.layout import Parallel, choose_layout
from gpt.settings import SIZES
from gpt.task import gpt_task
from language import processes
from language.arguments import check_common, choose_settings, common_parser
from language.program import corpus_of, run_task
from language.training import TrainState


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments, with settings and layout, or end the program."""
    processes.join(argv)
    parser = common_parser(__doc__, SIZES, "small", "train_gpt")
    parser.add_argument(
        "--parallel",
        choices=get_args(Parallel),
        default="data",
        help="data: parameters are whole on each device (default); fsdp: they are "
        'split over "data"; tensor: they are split over "model"',
    )
    parser.add_argument(
        "--mesh",
        metavar="DATAxMODEL",
        help="default: all devices along data, or for tensor along model",
    )
    arguments = parser.parse_args(argv)
    try:
        check_common(parser, arguments)
        arguments.settings = choose_settings(arguments, SIZES[arguments.size])
        arguments.layout = choose_layout(
            arguments.parallel, arguments.mesh, arguments.settings
        )
    except ValueError as error:
        parser.error(str(error))
    return arguments


def run(argv: list[str] | None = None) -> TrainState:
    """Train as the arguments say, and return the last state."""
    arguments = parse_arguments(argv)
    settings, layout = arguments.settings, arguments.layout
    with processes.first_alone_prints():
        return run_task(
            gpt_task(settings, layout),
            corpus_of(arguments.text, settings),
            arguments,
            name="GPT-2",
            model=f"{settings.heads} heads",
            how=f"{layout.parallel}-parallel",
        )


if __name__ == "__main__":
    run()
