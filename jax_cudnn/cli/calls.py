# SPDX-License-Identifier: Apache-2.0
"""A call written on the command line: a function, and its arguments."""

import argparse
import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.reference.dtypes import DTYPES, jax_dtype

# What a command does with it: a function of arrays, and the types of these.
WrittenCall = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]

# Dtypes as people write them, and their names in graphs.
_LONG_DTYPES = {
    "bool_": "bool",
    "uint8": "u8",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
    "float8_e4m3fn": "f8_e4m3fn",
    "float8_e5m2": "f8_e5m2",
    "bfloat16": "bf16",
    **dict.fromkeys(("float16", "fp16", "half"), "f16"),
    **dict.fromkeys(("float32", "fp32"), "f32"),
    **dict.fromkeys(("float64", "fp64", "double"), "f64"),
}
_DTYPES = {**{name: name for name in DTYPES}, **_LONG_DTYPES}

_ARRAY = re.compile(r"\s*(\w+)\[\s*(\d+(?:\s*,\s*\d+)*)?\s*\]\s*")


def add_call(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `call_of` reads."""
    parser.add_argument(
        "function",
        type=_function,
        metavar="MODULE:FUNCTION",
        help="The function to trace, such as jax_cudnn:sdpa. Its module is imported, "
        "from the current folder or from what is installed.",
    )
    parser.add_argument(
        "--args",
        type=argument,
        nargs="*",
        default=[],
        metavar="ARGUMENT",
        help="The function's arguments. An array is a dtype with sizes, such as "
        '"bf16[4,128,8,64]", "bfloat16[64]" or "f32[]". Arguments by name are '
        'NAME=VALUE, such as bias="bf16[64]", activation=gelu, is_causal=True or '
        '"window_strides=(2,2)". The default is no arguments.',
    )
    parser.add_argument(
        "--gradient",
        action="store_true",
        help="Take the gradients of all arrays of floats as well. The default is the "
        "function alone.",
    )


def call_of(arguments: argparse.Namespace) -> WrittenCall:
    """Return the function and the arrays that were asked for, or their gradient."""
    function = arguments.function
    listed = [value for name, value in arguments.args if not name]
    named = {name: value for name, value in arguments.args if name}
    _check(function, listed, named)
    arrays = {n: x for n, x in named.items() if isinstance(x, jax.ShapeDtypeStruct)}
    if named:
        function = _with_names(function, named, len(listed), tuple(arrays))
    operands = (*listed, *arrays.values())
    return (_gradient(function, operands) if arguments.gradient else function), operands


def _function(text: str) -> Callable[..., Any]:
    """Import what "package.module:name" stands for; a type for argparse."""
    module, colon, name = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not MODULE:FUNCTION, such as jax_cudnn:matmul"
        )
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


def argument(text: str) -> tuple[str, Any]:
    """Return an argument's name ("" for none) and value; a type for argparse.

    A value is an array's shape and dtype; by name also a literal of Python's, or text.
    """
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        return "", _array(text)
    if _ARRAY.fullmatch(value):
        return name, _array(value)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _array(text: str) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype that "bf16[2,3]" stands for."""
    match = _ARRAY.fullmatch(text)
    dtype = None if match is None else _DTYPES.get(match[1])
    if match is None or dtype is None:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a dtype with sizes, such as "bf16[4,128,8,64]". '
            f"Dtypes are {', '.join(DTYPES)}, and longer names of these, such as "
            "bfloat16"
        )
    sizes = tuple(int(size) for size in (match[2] or "").split(",") if size)
    return jax.ShapeDtypeStruct(sizes, jax_dtype(dtype))


def _check(
    function: Callable[..., Any], listed: list[Any], named: dict[str, Any]
) -> None:
    """Raise TypeError where the function takes other arguments than `--args` has."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # such as that of a function in C: calling it will tell
        return
    try:
        signature.bind(*listed, **named)
    except TypeError as error:
        raise TypeError(
            f"--args has {len(listed) + len(named)} arguments, which do not fit the "
            f"function: {error}. Its arguments are {', '.join(signature.parameters)}. "
            "Pass a dtype with sizes for each array, in order or as NAME=DTYPE[SIZES]."
        ) from error


def _with_names(
    function: Callable[..., Any],
    named: dict[str, Any],
    count: int,
    arrays: tuple[str, ...],
) -> Callable[..., Any]:
    """Return a function of arrays alone: those in order, then those by name."""

    @functools.wraps(function)
    def of_arrays(*xs: Any) -> Any:
        by_name = dict(zip(arrays, xs[count:], strict=True))
        return function(*xs[:count], **named | by_name)

    return of_arrays


def _gradient(
    function: Callable[..., Any], operands: tuple[jax.ShapeDtypeStruct, ...]
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
