# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments that all training programs of language models have."""

import argparse
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

import jax

from language import processes
from language.settings import Settings

S = TypeVar("S", bound=Settings)

# Packages that only a flag needs.
_PACKAGES = {
    "checkpoints": ("orbax.checkpoint", "orbax-checkpoint"),
    "picture": ("matplotlib", "matplotlib"),
    "load_weights": ("safetensors", "safetensors"),
    "save_weights": ("safetensors", "safetensors"),
}


def is_missing(package: str) -> bool:
    """Tell whether a package that only part of a program needs is not installed."""
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # the package that it would lie in
        return True


def common_parser(
    text: str | None, sizes: Mapping[str, Settings], usual: str, name: str
) -> argparse.ArgumentParser:
    """Return a parser of the common arguments; `usual` is the size on a GPU."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    is_gpu = jax.default_backend() == "gpu"
    add(
        "--size",
        choices=sizes,
        default=usual if is_gpu else "tiny",
        help=f"default: {usual} on a GPU, else tiny; the next flags change parts of it",
    )
    for number in ("layers", "width", "heads", "context", "batch", "steps"):
        add(f"--{number}", type=int)
    add("--learning-rate", type=float)
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16" if is_gpu else "float32",
        help="of products; default: bfloat16 on a GPU, else float32, which CPUs prefer",
    )
    add("--seed", type=int, default=0)
    add(
        "--baseline",
        action="store_true",
        help="the same in plain JAX, without jax_cudnn",
    )
    add(
        "--f8",
        action="store_true",
        help="the products of the blocks in f8, with their gradients; pays for widths "
        "of 4096 and more on GPUs with f8 units",
    )
    add(
        "--reduce-dtype",
        choices=("f32", "operands"),
        default="f32",
        help="the dtype in which devices add up their shares of a product: f32 "
        "(default), or that of its operands, which sends half as much in bfloat16",
    )
    add(
        "--text",
        type=Path,
        metavar="PATH",
        help="train on this file instead, or on the files of this folder",
    )
    add(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="save here, and continue what is here",
    )
    add("--save-every", type=int, default=500, metavar="STEPS", help="default: 500")
    add("--stop-at", type=int, metavar="STEP", help="end early, to continue later")
    add(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="write a profile of three steps here, for TensorBoard or xprof",
    )
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help=f"where the loss curve goes; default: {name}.png",
    )
    processes.add_arguments(parser)
    return parser


def check_common(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Raise ValueError if a number cannot be; end if a package is missing."""
    for name, (package, wheel) in _PACKAGES.items():
        if getattr(given, name, None) is not None and is_missing(package):
            flag = name.replace("_", "-")
            parser.error(
                f"--{flag}: the package {package} is not installed. Run: pip install "
                f"{wheel}, or leave --{flag} out"
            )
    for name in ("save_every", "stop_at"):
        check_positive(name, getattr(given, name))


def check_positive(name: str, value: int | None) -> None:
    """Raise ValueError if a number is below 1."""
    if value is not None and value < 1:
        raise ValueError(f"--{name.replace('_', '-')} {value}: it must be at least 1")


def choose_settings(given: argparse.Namespace, size: S) -> S:
    """Return the size that was asked for, with what was asked for beyond that."""
    chosen = asdict(size)
    for field in fields(size):
        if getattr(given, field.name, None) is not None:
            chosen[field.name] = getattr(given, field.name)
    for name, value in chosen.items():
        if type(value) is int and name != "seed":
            check_positive(name, value)
    settings = type(size)(**chosen)
    if settings.baseline and settings.f8:
        raise ValueError("--baseline and --f8: plain JAX has no layers in f8")
    if settings.width % settings.heads:
        raise ValueError(
            f"--width {settings.width} is not a multiple of --heads {settings.heads}"
        )
    return settings
