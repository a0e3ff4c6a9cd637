# SPDX-License-Identifier: Apache-2.0
"""A problem written on the command line, as a function and its operands' shapes."""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.graph.rules import EIGHT_BIT
from jax_cudnn.ops.batch_norm import batch_norm
from jax_cudnn.ops.conv import conv
from jax_cudnn.ops.group_norm import group_norm, instance_norm
from jax_cudnn.ops.matmul import matmul
from jax_cudnn.ops.norms import layer_norm, rms_norm
from jax_cudnn.ops.sdpa import sdpa
from jax_cudnn.reference.dtypes import jax_dtype

# As people write them, and as graphs do.
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("f16", "fp16", "float16", "half"), "f16"),
    **dict.fromkeys(("f32", "fp32", "float32"), "f32"),
}

# How the axes of images are written, by the number of spatial axes.
_LAYOUTS = {
    1: ("NWC", "WIO", "NWC"),
    2: ("NHWC", "HWIO", "NHWC"),
    3: ("NDHWC", "DHWIO", "NDHWC"),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call of one of the operations, with the shapes of its operands.

    ``given`` are the places of operands that are not trained.
    """

    function: Callable[..., jax.Array]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    given: tuple[int, ...] = ()

    def gradient(self) -> "Problem":
        """Return the problem of its value and the gradients of what is trained."""

        def loss(*operands: jax.Array) -> jax.Array:
            return jnp.sum(self.function(*operands).astype(jnp.float32))

        every = range(len(self.operands))
        trained = tuple(i for i in every if i not in self.given)
        return Problem(function=jax.grad(loss, trained), operands=self.operands)


def add_problems(parser: argparse.ArgumentParser) -> None:
    """Add the operations as commands, each with the shapes that it takes."""
    operations = parser.add_subparsers(required=True, metavar="operation")
    _add_matmul(operations)
    _add_sdpa(operations)
    _add_conv(operations)
    _add_norms(operations)


def sizes_of(*forms: str) -> Callable[[str], tuple[int, ...]]:
    """Return a type for argparse: sizes in one of some forms, as "MxNxR"."""
    counts = [len(form.split("x")) for form in forms]

    def sizes(text: str) -> tuple[int, ...]:
        parts = text.split("x")
        if not all(map(_is_count, parts)) or len(parts) not in counts:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {' or '.join(forms)}, sizes above 0"
            )
        return tuple(int(part) for part in parts)

    return sizes


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _count(text: str) -> int:
    """Return an int above 0; a type for argparse."""
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _dtype(text: str) -> str:
    """Return the dtype's name in graphs; a type for argparse."""
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a dtype of bench: {', '.join(_DTYPES)}"
        )
    return _DTYPES[text]


def _add_common(parser: Any, make: Callable[[argparse.Namespace], Problem]) -> None:
    parser.add_argument(
        "--dtype",
        default="bf16",
        type=_dtype,
        help="of all operands: bf16, f16 or f32, or a longer name such as float16 "
        "(bf16)",
    )
    parser.add_argument(
        "--gradient", action="store_true", help="the gradients of all operands as well"
    )
    parser.add_argument("--json", action="store_true", help="print data, as JSON")
    parser.set_defaults(make=make)


def _add_fused(parser: Any) -> None:
    parser.add_argument("--activation", help="relu, gelu, silu, ... (none)")
    parser.add_argument("--bias", action="store_true", help="a bias per column")


def _add_matmul(operations: Any) -> None:
    parser = operations.add_parser("matmul", help="a matrix product")
    parser.add_argument(
        "sizes",
        type=sizes_of("MxNxR", "BxMxNxR"),
        metavar="[Bx]MxNxR",
        help="rows, columns and contraction, and a batch before them",
    )
    parser.add_argument(
        "--weights",
        choices=EIGHT_BIT,
        help="the right operand's dtype, with an f32 scale for each column",
    )
    _add_fused(parser)
    _add_common(parser, _matmul)


def _matmul(arguments: argparse.Namespace) -> Problem:
    *batch, m, n, r = arguments.sizes
    problem = _fused(
        matmul, arguments, (*batch, m, r), (*batch, r, n), bias=(n,), options={}
    )
    if arguments.weights is None:
        return problem

    def function(x: Any, w: Any, scale: Any, *bias: Any) -> jax.Array:
        return problem.function(x, w, *bias, scale_b=scale)

    left, right, *rest = problem.operands
    right = jax.ShapeDtypeStruct(right.shape, jax_dtype(arguments.weights))
    scale = jax.ShapeDtypeStruct((n,), jnp.float32)
    operands = (left, right, scale, *rest)
    return Problem(function=function, operands=operands, given=(1, 2))


def _add_sdpa(operations: Any) -> None:
    parser = operations.add_parser("sdpa", help="scaled dot-product attention")
    parser.add_argument(
        "sizes",
        type=sizes_of("BxSxHxD"),
        metavar="BxSxHxD",
        help="batch, query length, heads, head size",
    )
    parser.add_argument("--causal", action="store_true", help="no key after its query")
    parser.add_argument(
        "--window", type=_count, help="keys that a query sees to each side (all)"
    )
    parser.add_argument(
        "--mask", action="store_true", help="a bool array of queries and keys"
    )
    parser.add_argument(
        "--lengths", action="store_true", help="queries and keys of random lengths"
    )
    parser.add_argument(
        "--bias", action="store_true", help="a bias per head, query and key"
    )
    parser.add_argument("--key-length", type=_count, help="keys (as many as queries)")
    parser.add_argument(
        "--key-heads", type=_count, help="heads of keys (as of queries)"
    )
    _add_common(parser, _sdpa)


def _sdpa(arguments: argparse.Namespace) -> Problem:
    b, s, h, d = arguments.sizes
    t = s if arguments.key_length is None else arguments.key_length
    k = h if arguments.key_heads is None else arguments.key_heads
    query, key = (b, s, h, d), (b, t, k, d)
    operands = [_struct(arguments, shape) for shape in (query, key, key)]
    lengths = jax.ShapeDtypeStruct((b,), jnp.int32)
    beside = {
        "bias": (arguments.bias, _struct(arguments, (1, h, s, t))),
        "mask": (arguments.mask, jax.ShapeDtypeStruct((1, 1, s, t), jnp.bool_)),
        "query_seq_lengths": (arguments.lengths, lengths),
        "key_value_seq_lengths": (arguments.lengths, lengths),
    }
    named = {name: operand for name, (is_there, operand) in beside.items() if is_there}
    names = tuple(named)

    def function(query: Any, key: Any, value: Any, *rest: Any) -> jax.Array:
        return sdpa(
            query,
            key,
            value,
            is_causal=arguments.causal,
            local_window_size=arguments.window,
            **dict(zip(names, rest, strict=True)),
        )

    return Problem(
        function=function,
        operands=(*operands, *named.values()),
        given=tuple(3 + i for i, name in enumerate(names) if name != "bias"),
    )


def _add_conv(operations: Any) -> None:
    parser = operations.add_parser("conv", help="a convolution of 1 to 3 axes")
    parser.add_argument(
        "sizes",
        type=sizes_of("NxXxC", "NxYxXxC", "NxZxYxXxC"),
        metavar="Nx[[Zx]Yx]XxC",
        help="images, their sizes, channels",
    )
    parser.add_argument(
        "window",
        type=sizes_of("XxO", "YxXxO", "ZxYxXxO"),
        metavar="[[Zx]Yx]XxO",
        help="the filters' sizes, and their number",
    )
    parser.add_argument("--stride", type=_count, default=1, help="of the window (1)")
    parser.add_argument(
        "--padding", default="SAME", choices=("SAME", "VALID"), help="(SAME)"
    )
    parser.add_argument("--groups", type=_count, default=1, help="of channels (1)")
    _add_fused(parser)
    _add_common(parser, _conv)


def _conv(arguments: argparse.Namespace) -> Problem:
    *_, c = arguments.sizes
    *window, o = arguments.window
    space = len(arguments.sizes) - 2
    if len(window) != space:
        raise ValueError(
            f"The images have {space} sizes and the filters {len(window)}. Give both "
            "as many."
        )
    if c % arguments.groups:
        raise ValueError(f"{c} channels do not divide into {arguments.groups} groups.")
    options = {
        "window_strides": (arguments.stride,) * space,
        "padding": arguments.padding,
        "dimension_numbers": _LAYOUTS[space],
        "feature_group_count": arguments.groups,
    }
    filters = (*window, c // arguments.groups, o)
    return _fused(conv, arguments, arguments.sizes, filters, bias=(o,), options=options)


def _add_norms(operations: Any) -> None:
    for norm in (layer_norm, rms_norm):
        parser = operations.add_parser(norm.__name__, help="a norm of each row")
        parser.add_argument(
            "sizes", type=sizes_of("NxC"), metavar="NxC", help="rows and features"
        )
        _add_norm(parser, norm)
    for norm in (group_norm, instance_norm, batch_norm):
        what = norm.__name__.removesuffix("_norm")
        parser = operations.add_parser(norm.__name__, help=f"a {what} norm of images")
        parser.add_argument(
            "sizes",
            type=sizes_of("NxXxC", "NxYxXxC", "NxZxYxXxC"),
            metavar="Nx[[Zx]Yx]XxC",
            help="images, their sizes, channels",
        )
        if norm is group_norm:
            parser.add_argument(
                "--groups", type=_count, default=32, help="of channels (32)"
            )
        _add_norm(parser, norm)


def _add_norm(parser: Any, norm: Callable[..., Any]) -> None:
    parser.add_argument("--activation", help="relu, gelu, silu, ... (none)")
    _add_common(parser, functools.partial(_norm, norm))


def _norm(norm: Callable[..., Any], arguments: argparse.Namespace) -> Problem:
    options = {"activation": arguments.activation}
    if norm is group_norm:
        options["groups"] = arguments.groups
    channels = arguments.sizes[-1:]
    factor = jax.ShapeDtypeStruct(channels, jnp.float32)
    return Problem(
        function=functools.partial(norm, **options),
        operands=(_struct(arguments, arguments.sizes), factor, factor),
    )


def _fused(
    operation: Callable[..., jax.Array],
    arguments: argparse.Namespace,
    *shapes: tuple[int, ...],
    bias: tuple[int, ...],
    options: dict[str, Any],
) -> Problem:
    options = {**options, "activation": arguments.activation}

    def function(x: Any, w: Any, *rest: Any, **more: Any) -> jax.Array:
        return operation(x, w, bias=rest[0] if rest else None, **options, **more)

    every = (*shapes, bias) if arguments.bias else shapes
    return Problem(
        function=function, operands=tuple(_struct(arguments, shape) for shape in every)
    )


def _struct(
    arguments: argparse.Namespace, shape: tuple[int, ...]
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax_dtype(arguments.dtype))
