# SPDX-License-Identifier: Apache-2.0
"""Trains Llama-2 on all GPUs of a machine under plain `jax.jit`: `make llama`.

The mesh has the axes "data", "fsdp", "tensor" and "sequence", in any product of
devices. Where each parameter lies is said once, in llama/layout.py; the compiler finds
everything else. The text is the source of Python's standard library, NumPy, JAX and
Flax, so that nothing has to be downloaded; its bytes are the tokens that Llama's own
vocabulary has for bytes. On two CPU cores the default model is tiny and takes about two
minutes.

  python examples/train_llama.py --size 7B --mesh fsdp=8 --checkpoints runs/a
  python examples/train_llama.py --mesh fsdp=2,tensor=2,sequence=2 --packed
  python examples/train_llama.py --load-weights Llama-2-7b-hf --save-weights tuned
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

from language import processes
from language.arguments import (
    check_common,
    check_positive,
    choose_settings,
    common_parser,
)
from language.program import corpus_of, run_task
from language.training import TrainState
from llama.layout import Method, Remat, choose_layout
from llama.settings import SIZES, LlamaSettings
from llama.task import llama_task
from llama.weights import load_weights, read_config, save_weights


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments, with settings and layout, or end the program."""
    processes.join(argv)
    parser = common_parser(__doc__, SIZES, "1B", "train_llama")
    add = parser.add_argument
    for name in ("key-heads", "hidden", "vocabulary"):
        add(f"--{name}", type=int)
    add(
        "--mesh",
        metavar="AXIS=DEVICES,...",
        help="of the axes data, fsdp, tensor and sequence; default: all along fsdp",
    )
    add(
        "--method",
        choices=get_args(Method),
        default="ring",
        help="of attention over a split sequence; default: ring",
    )
    add(
        "--remat",
        choices=get_args(Remat),
        default="dots",
        help="what a layer saves for the backward pass: all that it reads (none), its "
        "input (full), also attention, also products (dots, the default), copies in f8 "
        "(f8), or products and attention in the host's memory (offload)",
    )
    add(
        "--accumulate",
        type=int,
        default=1,
        metavar="PARTS",
        help="compute the batch in so many parts, one after the other; default: 1",
    )
    add(
        "--unroll",
        type=int,
        default=1,
        metavar="LAYERS",
        help="how many one turn of the loop over layers has; more take longer to "
        "compile, and may run faster; default: 1",
    )
    add(
        "--packed",
        action="store_true",
        help="a row has several documents, and a token sees its own document only",
    )
    add(
        "--load-weights",
        type=Path,
        metavar="FOLDER",
        help="begin with weights in Hugging Face's layout (config.json, *.safetensors)",
    )
    add(
        "--save-weights",
        type=Path,
        metavar="FOLDER",
        help="write the trained weights there in this layout",
    )
    arguments = parser.parse_args(argv)
    try:
        check_common(parser, arguments)
        for name in ("accumulate", "unroll"):
            check_positive(name, getattr(arguments, name))
        arguments.settings = _settings(arguments)
        arguments.layout = choose_layout(
            arguments.mesh,
            arguments.settings,
            method=arguments.method,
            parts=arguments.accumulate,
            remat=arguments.remat,
            unroll=arguments.unroll,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return arguments


def _settings(arguments: argparse.Namespace) -> LlamaSettings:
    """Return the settings; sizes are those of the weights if some are to be loaded."""
    size = SIZES[arguments.size]
    if arguments.load_weights is None:
        return choose_settings(arguments, size)
    sizes = read_config(arguments.load_weights)
    settings = choose_settings(arguments, replace(size, **sizes))
    for name, value in sizes.items():
        if (given := getattr(settings, name)) != value:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} {given}: the model in {arguments.load_weights} has {value}. "
                f"Leave --{flag} out"
            )
    return settings


def run(argv: list[str] | None = None) -> TrainState:
    """Train as the arguments say, and return the last state."""
    arguments = parse_arguments(argv)
    with processes.first_alone_prints():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> TrainState:
    settings, layout = arguments.settings, arguments.layout
    corpus = corpus_of(arguments.text, settings)
    most = corpus.most_documents(settings.context) if settings.packed else None
    task = llama_task(settings, layout, most)
    params = None
    if arguments.load_weights is not None:
        params = load_weights(arguments.load_weights, task)
    state = run_task(
        task,
        corpus,
        arguments,
        name="Llama-2",
        model=f"{settings.heads} heads on {settings.key_heads} key heads",
        how=f"remat {layout.remat}{', packed' if settings.packed else ''}",
        params=params,
    )
    if arguments.save_weights is not None:
        save_weights(arguments.save_weights, state.params, settings)
        print(f"The weights are in {arguments.save_weights}")
    return state


if __name__ == "__main__":
    run()
