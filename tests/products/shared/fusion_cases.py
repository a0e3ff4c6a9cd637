# SPDX-License-Identifier: Apache-2.0
"""The calls of conv and matmul whose graphs are planned without a GPU.

The gpuless tests and scripts/support_table.py read them. No array is made: operands are
shapes. Sizes differ from one another, and are odd where the size does not matter.
Channels are multiples of 16, which every engine takes, except in the cases that are
about channels.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

import jax_cudnn
from jax_cudnn.graph import Graph, Node, is_anchor
from jax_cudnn.legalize import partition
from tests.products.shared.fused import graphs

# As users write them, and as JAX prints them.
FLOATS = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
F8 = {"f8_e4m3fn": jnp.float8_e4m3fn, "f8_e5m2": jnp.float8_e5m2}
I8 = {"i8": jnp.int8, "u8": jnp.uint8}

ACTIVATIONS: dict[str, Any] = {
    **{
        name: name
        for name in (
            *("relu", "relu6", "leaky_relu", "elu", "gelu", "gelu_exact", "silu"),
            *("tanh", "sigmoid", "softplus"),
        )
    },
    # Smooth where its branches meet, so that rounding its argument does no more there.
    "a traced function": lambda x: jnp.where(
        x > 0, x * jnp.tanh(x), x * x * jnp.exp(x)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: ``call(**operands)``, differentiated in the operands ``wanted``.

    ``group``, ``row`` and ``dtype`` place it in the table of docs/support.md.
    """

    group: str
    row: str
    dtype: str
    call: Callable[..., jax.Array]
    operands: dict[str, Shape]
    wanted: tuple[str, ...] = ()
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Name the case after its place."""
        object.__setattr__(self, "name", f"{self.group}/{self.row}/{self.dtype}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a graph of a case, which one kernel is to run, and what it makes.

    ``step`` is "forward", "training" (the same, with what the gradient needs saved),
    "grad_x", "grad_w", "grad_a", "grad_b", or "around" for a part without a
    contraction.
    """

    case: Case
    step: str
    graph: Graph

    @property
    def key(self) -> str:
        """The case and the step."""
        return f"{self.case.name}/{self.step}"


def parts(case: Case) -> list[Part]:
    """Return the parts of the case's graphs, as the lowering partitions them."""
    found = [("forward", _graphs(case.call, case.operands)[0])]
    if case.wanted:
        training, backward = _graphs(_with_gradients(case), case.operands)
        found += [("training", training), ("backward", backward)]
    return [
        Part(case=case, step=_step(direction, part), graph=part)
        for direction, graph in found
        for part in partition(graph)
    ]


def _step(direction: str, part: Graph) -> str:
    if not any(map(is_anchor, part.nodes)):
        return "around"
    if direction != "backward":
        return direction
    (name,) = (name for name in part.outputs if name.startswith("grad_"))
    return name


def _graphs(call: Callable[..., Any], operands: dict[str, Shape]) -> list[Graph]:
    names = tuple(operands)
    run = lambda *args: call(**dict(zip(names, args, strict=True)))  # noqa: E731
    return [graph for graph, _ in graphs(run, *operands.values())]


def _with_gradients(case: Case) -> Callable[..., Any]:
    def run(**operands: jax.Array) -> Any:
        moving = {name: operands.pop(name) for name in case.wanted}
        output, pullback = jax.vjp(
            lambda moving: case.call(**operands, **moving), moving
        )
        return output, pullback(output)

    return run


# --- what follows the contraction -----------------------------------------------------

_NHWC = ("NHWC", "HWIO", "NHWC")
_Epilogue = dict[str, Any]


def _epilogues(output: tuple[int, ...], dtype: Any) -> Iterator[tuple[str, _Epilogue]]:
    """Yield epilogues by name: options of the call, with shapes for operands."""
    n = output[-1]
    bias, residual = Shape((n,), dtype), Shape(output, dtype)
    yield "nothing", {}
    yield from ((name, {"activation": each}) for name, each in ACTIVATIONS.items())
    yield "bias", {"bias": bias}
    yield "residual", {"residual": residual}
    yield "a number as scale", {"scale": 0.5}
    yield "scale of each channel", {"scale": Shape((n,), jnp.float32)}
    yield "bias, residual", {"bias": bias, "residual": residual}
    every = {"scale": Shape((n,), jnp.float32), "bias": bias, "residual": residual}
    yield "scale, bias, residual, gelu", {**every, "activation": "gelu"}


def _case(
    place: tuple[str, str, str],
    function: Callable[..., jax.Array],
    options: dict[str, Any],
    wanted: tuple[str, ...] | None = None,
) -> Case:
    """Return a case; the options that are shapes are operands, wanted by default."""
    operands = {k: v for k, v in options.items() if isinstance(v, Shape)}
    rest = {k: v for k, v in options.items() if k not in operands}
    group, row, dtype = place
    return Case(
        group=group,
        row=row,
        dtype=dtype,
        call=functools.partial(function, **rest),
        operands=operands,
        wanted=tuple(operands) if wanted is None else wanted,
    )


def _conv_epilogues() -> Iterator[Case]:
    for name, dtype in FLOATS.items():
        for row, epilogue in _epilogues((3, 11, 13, 48), dtype):
            options = {
                "lhs": Shape((3, 11, 13, 32), dtype),
                "rhs": Shape((3, 5, 32, 48), dtype),
                "padding": "SAME",
                "dimension_numbers": _NHWC,
                **epilogue,
            }
            yield _case(("conv", row, name), jax_cudnn.conv, options)


def _transposed_conv_epilogues() -> Iterator[Case]:
    for name, dtype in FLOATS.items():
        for row, epilogue in _epilogues((3, 22, 26, 48), dtype):
            options = {
                "lhs": Shape((3, 11, 13, 32), dtype),
                "rhs": Shape((4, 4, 32, 48), dtype),
                "lhs_dilation": (2, 2),
                "padding": ((2, 2), (2, 2)),
                "dimension_numbers": _NHWC,
                **epilogue,
            }
            yield _case(("transposed conv", row, name), jax_cudnn.conv, options)


def _matmul_epilogues() -> Iterator[Case]:
    for name, dtype in FLOATS.items():
        for row, epilogue in _epilogues((77, 48), dtype):
            options = {"a": Shape((77, 64), dtype), "b": Shape((64, 48), dtype)}
            options |= {k.replace("scale", "scale_b"): v for k, v in epilogue.items()}
            yield _case(("matmul", row, name), jax_cudnn.matmul, options)


# --- shapes and layouts ---------------------------------------------------------------


def _conv_shapes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield options by name, the shapes of x and w as bare tuples."""
    plain = {
        "lhs": (3, 11, 13, 32),
        "rhs": (3, 5, 32, 48),
        "padding": "SAME",
        "dimension_numbers": _NHWC,
    }
    yield (
        "1-D",
        {
            "lhs": (3, 37, 32),
            "rhs": (5, 32, 48),
            "padding": "SAME",
            "dimension_numbers": ("NWC", "WIO", "NWC"),
        },
    )
    yield (
        "3-D",
        {
            "lhs": (3, 7, 11, 13, 32),
            "rhs": (3, 1, 5, 32, 48),
            "padding": "SAME",
            "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"),
        },
    )
    yield "channels first", {"lhs": (3, 32, 11, 13), "rhs": (48, 32, 3, 5)}
    yield "filters 1 x 1", {**plain, "rhs": (1, 1, 32, 48)}
    yield "stride", {**plain, "window_strides": (2, 3)}
    yield (
        "filters 1 x 1, stride",
        {**plain, "rhs": (1, 1, 32, 48), "window_strides": (2, 2)},
    )
    yield "dilated filters", {**plain, "rhs_dilation": (2, 3)}
    yield "unlike padding", {**plain, "padding": ((1, 2), (0, 3))}
    yield "negative padding", {**plain, "padding": ((-1, 2), (-2, -3))}
    yield (
        "stride, unlike padding",
        {**plain, "lhs": (3, 12, 16, 32)} | {"window_strides": (2, 2)},
    )
    yield (
        "dilated images, stride",
        {
            **plain,
            "lhs_dilation": (2, 2),
            "window_strides": (3, 3),
            "padding": ((1, 1), (2, 2)),
        },
    )
    yield (
        "groups of 16 channels in, 24 out",
        {**plain, "rhs": (3, 5, 16, 48), "feature_group_count": 2},
    )
    yield (
        "groups of 8 channels in, 12 out",
        {**plain, "rhs": (3, 5, 8, 48), "feature_group_count": 4},
    )
    yield (
        "groups of 4 channels in, 6 out",
        {**plain, "rhs": (3, 5, 4, 48), "feature_group_count": 8},
    )
    yield (
        "groups of images",
        {**plain, "lhs": (6, 11, 13, 32), "batch_group_count": 2},
    )
    yield "depthwise", {**plain, "rhs": (3, 5, 1, 32), "feature_group_count": 32}
    yield (
        "depthwise, 2 each",
        {**plain, "rhs": (3, 5, 1, 64), "feature_group_count": 32},
    )
    yield (
        "depthwise, 1-D",
        {
            "lhs": (3, 37, 32),
            "rhs": (4, 1, 32),
            "padding": ((3, 0),),
            "dimension_numbers": ("NWC", "WIO", "NWC"),
            "feature_group_count": 32,
        },
    )
    yield "3 channels in", {**plain, "lhs": (3, 11, 13, 3), "rhs": (3, 5, 3, 48)}
    yield "5 channels out", {**plain, "rhs": (3, 5, 32, 5)}
    yield "7 channels in, 5 out", {**plain, "lhs": (3, 11, 13, 7), "rhs": (3, 5, 7, 5)}
    yield "1 channel in and out", {**plain, "lhs": (3, 11, 13, 1), "rhs": (3, 5, 1, 1)}
    yield (
        "transposed, 1-D",
        {
            "lhs": (3, 37, 32),
            "rhs": (4, 32, 48),
            "lhs_dilation": (2,),
            "padding": ((2, 2),),
            "dimension_numbers": ("NWC", "WIO", "NWC"),
        },
    )
    yield (
        "transposed, groups",
        {
            **plain,
            "rhs": (4, 4, 16, 48),
            "lhs_dilation": (2, 2),
            "padding": ((2, 2), (2, 2)),
            "feature_group_count": 2,
        },
    )
    yield (
        "transposed, 7 channels in, 5 out",
        {
            **plain,
            "lhs": (3, 11, 13, 7),
            "rhs": (4, 4, 7, 5),
            "lhs_dilation": (2, 2),
            "padding": ((2, 2), (2, 2)),
        },
    )


def _shaped_convs() -> Iterator[Case]:
    for row, options in _conv_shapes():
        for name, dtype in FLOATS.items():
            full = options | {k: Shape(options[k], dtype) for k in ("lhs", "rhs")}
            yield _case(("conv alone", row, name), jax_cudnn.conv, full)
            channels = full["rhs"].shape[-1 if "dimension_numbers" in full else 0]
            full |= {"bias": Shape((channels,), dtype), "activation": "gelu"}
            yield _case(("conv, bias, gelu", row, name), jax_cudnn.conv, full)


# Name: sizes of a and b, and the axes that are summed.
_MATMULS = {
    "a batch": ((3, 77, 64), (3, 64, 48), (2, 1)),
    "rows in two axes": ((3, 77, 64), (64, 48), (2, 0)),
    "one row": ((1, 64), (64, 48), (1, 0)),
    "one column": ((77, 64), (64, 1), (1, 0)),
    "61 columns": ((77, 64), (64, 61), (1, 0)),
    "sums of 59": ((77, 59), (59, 48), (1, 0)),
    "sums of 59, 61 columns": ((77, 59), (59, 61), (1, 0)),
    "a transposed": ((64, 77), (64, 48), (0, 0)),
    "b transposed": ((77, 64), (48, 64), (1, 1)),
    "both transposed": ((64, 77), (48, 64), (0, 1)),
    "b transposed, sums of 59, 61 columns": ((77, 59), (61, 59), (1, 1)),
}


def _shaped_matmuls() -> Iterator[Case]:
    for name, dtype in FLOATS.items():
        for row, (a, b, (i, j)) in _MATMULS.items():
            batch = ((0,), (0,)) if len(b) == 3 else ((), ())
            options = {
                "lhs": Shape(a, dtype),
                "rhs": Shape(b, dtype),
                "bias": Shape((b[-1] if j < len(b) - 1 else b[-2],), dtype),
                "activation": "gelu",
                "dimension_numbers": (((i,), (j,)), batch),
            }
            place = ("matmul, bias, gelu", row, name)
            yield _case(place, jax_cudnn.dot_general, options)
        more = {
            "one a for a batch of b": {"b": Shape((3, 64, 48), dtype)},
            "bias of each row": {"bias": Shape((77, 1), dtype)},
            "bias in f32": {"bias": Shape((48,), jnp.float32)},
            "result in f32": {"preferred_element_type": jnp.float32},
        }
        for row, options in more.items():
            plain = {
                "a": Shape((77, 64), dtype),
                "b": Shape((64, 48), dtype),
                "bias": Shape((48,), dtype),
                "activation": "gelu",
            }
            place = ("matmul, bias, gelu", row, name)
            yield _case(place, jax_cudnn.matmul, plain | options)


# --- operands of 8 bits ---------------------------------------------------------------


def _narrow() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield row, name of the dtype, and options that conv and matmul share."""
    scale, bias = Shape((48,), jnp.float32), Shape((48,), jnp.float32)
    for name, dtype in {**I8, **F8}.items():
        results = {"f32": jnp.float32, "bf16": jnp.bfloat16}
        if name in I8:
            yield "result in i32", name, {"preferred_element_type": jnp.int32}
        else:
            results[name] = dtype
        for result, preferred in results.items():
            options: dict[str, Any] = {"preferred_element_type": preferred}
            in_dtype = f"result in {'f8' if result in F8 else result}"
            yield in_dtype, name, options
            options = {**options, "scale": scale}
            yield f"scale, {in_dtype}", name, options
            options = {**options, "bias": bias, "activation": "relu"}
            yield f"scale, bias, relu, {in_dtype}", name, options


_NARROWEST = "scale, bias, relu, result in f8"
# Rows of f8 whose gradients are planned as well: one for each dtype of the result.
_WITH_GRADIENTS = ("result in f32", "result in bf16", _NARROWEST)


def _narrow_cases() -> Iterator[Case]:
    for row, name, options in _narrow():
        dtype = {**I8, **F8}[name]
        wanted = ("lhs", "rhs") if name in F8 and row in _WITH_GRADIENTS else ()
        images = {
            "lhs": Shape((3, 11, 13, 32), dtype),
            "rhs": Shape((3, 5, 32, 48), dtype),
            "padding": "SAME",
            "dimension_numbers": _NHWC,
        }
        place = ("conv of 8 bits", row, name)
        yield _case(place, jax_cudnn.conv, images | options, wanted)
        matrices = {"a": Shape((77, 64), dtype), "b": Shape((64, 48), dtype)}
        matrices |= {k.replace("scale", "scale_b"): v for k, v in options.items()}
        place = ("matmul of 8 bits", row, name)
        wanted = ("a", "b") if wanted else ()
        yield _case(place, jax_cudnn.matmul, matrices, wanted)


def _weight_only_matmuls() -> Iterator[Case]:
    for name, dtype in FLOATS.items():
        for narrow, stored in {**I8, **F8}.items():
            for row, scale in {
                "no scale": None,
                "scale of each column": Shape((48,), jnp.float32),
                "scale along the sum": Shape((64, 1), jnp.float32),
            }.items():
                options = {
                    "a": Shape((77, 64), dtype),
                    "b": Shape((64, 48), stored),
                    "bias": Shape((48,), dtype),
                    "activation": "gelu",
                }
                if scale is not None:
                    options["scale_b"] = scale
                place = ("matmul, weights of 8 bits", f"{narrow}, {row}", name)
                yield _case(place, jax_cudnn.matmul, options, ("a",))


_FAMILIES = (
    *(_conv_epilogues, _transposed_conv_epilogues, _matmul_epilogues, _shaped_convs),
    *(_shaped_matmuls, _narrow_cases, _weight_only_matmuls),
)
ALL = tuple(case for cases in _FAMILIES for case in cases())


# --- what cuDNN has no plan for, as the documentation says ----------------------------

_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8_e4m3fn": 1, "f8_e5m2": 1, "i8": 1, "u8": 1}


def contraction(graph: Graph) -> Node:
    """Return the only contraction of a part."""
    (node,) = filter(is_anchor, graph.nodes)
    return node


def channels(graph: Graph) -> tuple[int, int, int]:
    """Return groups, and channels in and out of each, of fprop or wgrad."""
    node = contraction(graph)
    names = dict((*node.inputs, *node.outputs))
    x = graph.tensor(names["x"])
    w = graph.tensor(names["w" if node.kind == "conv_fprop" else "grad_w"])
    groups = x.dims[1] // w.dims[1]
    return groups, w.dims[1], w.dims[0] // groups


def loads_whole(graph: Graph) -> bool:
    """Whether channels of one pixel and group fill loads of 16 bytes."""
    name = dict(contraction(graph).inputs)["x"]
    size = _BYTES[graph.tensor(name).dtype]
    return not any(count * size % 16 for count in channels(graph)[1:])


def is_refused(graph: Graph, sm_version: int) -> bool:
    """f8 on Ampere, and products of u8."""
    node = contraction(graph)
    dtypes = {t.dtype for t in graph.tensors}
    if sm_version < 89 and dtypes & {"f8_e4m3fn", "f8_e5m2"}:
        return True
    return {graph.tensor(name).dtype for _, name in node.inputs} == {"u8"}
