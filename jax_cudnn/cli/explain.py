# SPDX-License-Identifier: Apache-2.0
"""`jax-cudnn explain`: says which calls of a function cuDNN runs, and why not.

Exit status 0 where it can run all that is meant for it, and 1 where it cannot.
"""

import argparse
import functools
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.cli.dtypes import dtype_named
from jax_cudnn.plans.explanation import explain
from jax_cudnn.reference.dtypes import DTYPES, jax_dtype


def add_command(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "explain",
        help="whether cuDNN runs a function's calls on a GPU, which need not be here",
        description="Asks cuDNN for a plan of each call that a function makes. Where "
        "there is none, it says why, and what would work. The exit status is 1 if "
        "cuDNN cannot run a call that is meant for it, and 0 otherwise. Calls that are "
        "left to XLA, because it is faster, count as well. For example: "
        'explain jax_cudnn:sdpa --device A100 --args "bf16[4,128,8,64]" '
        '"bf16[4,128,8,64]" "bf16[4,128,8,64]" --gradient',
    )
    parser.add_argument(
        "function",
        type=_function,
        metavar="MODULE:FUNCTION",
        help="The function to trace. Its module is imported, from the current folder "
        "or from what is installed, and nothing is run.",
    )
    parser.add_argument(
        "--args",
        type=operand,
        nargs="*",
        default=[],
        metavar="DTYPE[SIZES]",
        help="The dtypes and sizes of the function's operands, such as "
        '"bf16[4,128,8,64]", "bfloat16[64]" or "f32[]". The default is no operands.',
    )
    parser.add_argument(
        "--device",
        help='The name of a GPU, which need not be here, such as "H200". The default '
        "is this machine's.",
    )
    parser.add_argument(
        "--gradient",
        action="store_true",
        help="Explain the gradients of all operands as well. The default is the "
        "function alone.",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print the answers as JSON. The default is a text to read.",
    )
    parser.set_defaults(run=_run)


def _function(text: str) -> Callable[..., Any]:
    """Import what "package.module:name" stands for; a type for argparse."""
    module, colon, name = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not MODULE:FUNCTION")
    try:
        found = functools.reduce(getattr, name.split("."), _imported(module))
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not there: {error}") from error
    except Exception as error:  # argparse drops the words of some
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a function")
    return found


def _imported(module: str) -> ModuleType:
    """Import a module of the current folder, as `python -m` would, or any other."""
    here = str(Path.cwd())
    if here in sys.path or "" in sys.path:
        return importlib.import_module(module)
    sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    finally:
        # The last from now on: the process that plans is to find the same packages as
        # this one, also where the current folder is a source tree.
        sys.path.remove(here)
        sys.path.append(here)


def operand(text: str) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype that "bf16[2,3]" stands for; a type for argparse."""
    match = re.fullmatch(r"\s*(\w+)\[\s*(\d+(?:\s*,\s*\d+)*)?\s*\]\s*", text)
    dtype = None if match is None else dtype_named(match[1])
    if match is None or dtype is None:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a dtype with sizes, such as "bf16[4,128,8,64]". '
            f"Dtypes are {', '.join(DTYPES)}, and longer names of these, such as "
            "bfloat16"
        )
    sizes = tuple(int(size) for size in (match[2] or "").split(",") if size)
    return jax.ShapeDtypeStruct(sizes, jax_dtype(dtype))


def _run(arguments: argparse.Namespace) -> int:
    function = arguments.function
    _check_operands(function, arguments.args)
    if arguments.gradient:
        function = _gradient(function, arguments.args)
    found = explain(function, *arguments.args, device=arguments.device)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found)
    return int(bool(found.refused))


def _check_operands(
    function: Callable[..., Any], operands: list[jax.ShapeDtypeStruct]
) -> None:
    """Raise TypeError where the function takes other operands than `--args` has."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # such as that of a function in C: calling it will tell
        return
    try:
        signature.bind(*operands)
    except TypeError as error:
        raise TypeError(
            f"--args has {len(operands)} operands, which do not fit the function: "
            f"{error}. Its arguments are {', '.join(signature.parameters)}. Pass one "
            "operand for each array."
        ) from error


def _gradient(
    function: Callable[..., Any], operands: list[jax.ShapeDtypeStruct]
) -> Callable[..., Any]:
    """Return the gradient of the sum of all results, for all operands that have one."""

    def loss(*xs: jax.Array) -> jax.Array:
        results = jax.tree.leaves(function(*xs))
        sums = [jnp.sum(x.astype(jnp.float32)) for x in results]
        return functools.reduce(jnp.add, sums)

    wanted = [
        i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if not wanted:
        raise ValueError(
            "--gradient: none of the operands is of a float dtype, so that there is "
            "no gradient. Leave it out, or pass floats in --args."
        )
    return jax.grad(loss, tuple(wanted))
