# SPDX-License-Identifier: Apache-2.0
"""A problem written on the command line, as a function and its operands' shapes."""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.cli.dtypes import dtype_named, spellings
from jax_cudnn.graph.rules import EIGHT_BIT
from jax_cudnn.ops.attention.sdpa import sdpa
from jax_cudnn.ops.norms.batch import batch_norm
from jax_cudnn.ops.norms.groups import group_norm, instance_norm
from jax_cudnn.ops.norms.rows import layer_norm, rms_norm
from jax_cudnn.ops.products.conv import conv
from jax_cudnn.ops.products.matmul import matmul
from jax_cudnn.reference.dtypes import jax_dtype

_DTYPES = ("bf16", "f16", "f32")

_IMAGES = (
    "N is the number of images, Z, Y and X are their sizes, and C is the number of "
    "channels."
)
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
    operations = parser.add_subparsers(
        required=True, metavar="OPERATION", title="operations"
    )
    _add_matmul(operations)
    _add_sdpa(operations)
    _add_conv(operations)
    _add_norms(operations)


def _add_parser(operations: Any, name: str, what: str) -> Any:
    return operations.add_parser(name, help=what, description=f"Times {what}.")


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
    name = dtype_named(text)
    if name not in _DTYPES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a dtype of bench: {', '.join(spellings(*_DTYPES))}"
        )
    return name


def _weights(text: str) -> str:
    """Return the dtype's name in graphs, if it has one; a type for argparse."""
    return dtype_named(text) or text


def _add_common(parser: Any, make: Callable[[argparse.Namespace], Problem]) -> None:
    parser.add_argument(
        "--dtype",
        default="bf16",
        type=_dtype,
        help="The dtype of the operands: bf16, f16 or f32, or a longer name of these "
        "such as float16. The default is bf16.",
    )
    parser.add_argument(
        "--gradient",
        action="store_true",
        help="Time the gradients of all operands as well. The default is the forward "
        "pass alone.",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print the times as JSON. The default is a text to read.",
    )
    parser.set_defaults(make=make)


def _add_activation(parser: Any) -> None:
    parser.add_argument(
        "--activation",
        help="Apply an activation to the result: relu, gelu, silu, ... The default is "
        "none.",
    )


def _add_fused(parser: Any) -> None:
    _add_activation(parser)
    parser.add_argument(
        "--bias",
        action="store_true",
        help="Add a bias for each column of the result. The default is none.",
    )


def _add_matmul(operations: Any) -> None:
    parser = _add_parser(operations, "matmul", "a matrix product")
    parser.add_argument(
        "sizes",
        type=sizes_of("MxNxR", "BxMxNxR"),
        metavar="[Bx]MxNxR",
        help="The result has M rows and N columns, R is the length of the sums, and B "
        "is a batch.",
    )
    parser.add_argument(
        "--weights",
        type=_weights,
        choices=EIGHT_BIT,
        help="The dtype of 8 bits that the right operand has, with an f32 scale for "
        "each column. By default it has the --dtype of the others, and no scale.",
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
    parser = _add_parser(operations, "sdpa", "scaled dot-product attention")
    parser.add_argument(
        "sizes",
        type=sizes_of("BxSxHxD"),
        metavar="BxSxHxD",
        help="B is the batch, S the number of queries, H of heads, and D is the size "
        "of a head.",
    )
    parser.add_argument(
        "--causal",
        action="store_true",
        help="Hide the keys after each query. The default is to hide none.",
    )
    parser.add_argument(
        "--window",
        type=_count,
        help="How many keys a query sees to each side. The default is all.",
    )
    parser.add_argument(
        "--mask",
        action="store_true",
        help="Hide keys by a bool array of queries and keys. The default is none.",
    )
    parser.add_argument(
        "--lengths",
        action="store_true",
        help="Give each sequence a random length. By default all are full.",
    )
    parser.add_argument(
        "--bias",
        action="store_true",
        help="Add a bias for each head, query and key. The default is none.",
    )
    parser.add_argument(
        "--key-length",
        type=_count,
        help="The number of keys. The default is that of queries.",
    )
    parser.add_argument(
        "--key-heads",
        type=_count,
        help="The number of heads that keys and values have. The default is that of "
        "the queries.",
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
    parser = _add_parser(operations, "conv", "a convolution over 1 to 3 axes")
    parser.add_argument(
        "sizes",
        type=sizes_of("NxXxC", "NxYxXxC", "NxZxYxXxC"),
        metavar="Nx[[Zx]Yx]XxC",
        help=_IMAGES,
    )
    parser.add_argument(
        "window",
        type=sizes_of("XxO", "YxXxO", "ZxYxXxO"),
        metavar="[[Zx]Yx]XxO",
        help="Z, Y and X are the sizes of a filter, and O is the number of filters.",
    )
    parser.add_argument(
        "--stride",
        type=_count,
        default=1,
        help="The step of the filters along each axis. The default is 1.",
    )
    parser.add_argument(
        "--padding",
        default="SAME",
        choices=("SAME", "VALID"),
        help="SAME pads the images so that the result keeps their size, VALID pads "
        "nothing. The default is SAME.",
    )
    parser.add_argument(
        "--groups",
        type=_count,
        default=1,
        help="The number of groups of channels. The default is 1.",
    )
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
        what = f"{'a layer' if norm is layer_norm else 'an RMS'} norm of each row"
        parser = _add_parser(operations, norm.__name__, what)
        parser.add_argument(
            "sizes",
            type=sizes_of("NxC"),
            metavar="NxC",
            help="N is the number of rows, and C of their features.",
        )
        _add_norm(parser, norm)
    for norm, name in (
        (group_norm, "a group norm"),
        (instance_norm, "an instance norm"),
        (batch_norm, "a batch norm"),
    ):
        parser = _add_parser(operations, norm.__name__, f"{name} of images")
        parser.add_argument(
            "sizes",
            type=sizes_of("NxXxC", "NxYxXxC", "NxZxYxXxC"),
            metavar="Nx[[Zx]Yx]XxC",
            help=_IMAGES,
        )
        if norm is group_norm:
            parser.add_argument(
                "--groups",
                type=_count,
                default=32,
                help="The number of groups of channels. The default is 32.",
            )
        _add_norm(parser, norm)


def _add_norm(parser: Any, norm: Callable[..., Any]) -> None:
    _add_activation(parser)
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
