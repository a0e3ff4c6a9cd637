# SPDX-License-Identifier: Apache-2.0
"""Convolutions as cuDNN takes them; axis letters and roles as in graph/conv.py.

What cuDNN's convolutions lack is added around them:

* one spatial axis becomes two, the first of size 1;
* arrays are transposed to channels-last, the layout of the fused engines;
* zeros between the elements of x make the convolution a gradient (dgrad) of another
  one, or are written out where that is not possible;
* padding that differs between the two ends, or cuts, is done on the array;
* channels are padded to what the engines load at once, and small groups merged;
* operands of the epilogue have one value a channel, or one an element.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import ConvAttributes, Graph, Node, Tensor
from jax_cudnn.graph.conv import TRIPLES
from jax_cudnn.graph.windows import dilated
from jax_cudnn.legalize.edit import ELEMENTS_PER_LOAD, Edit, constants
from jax_cudnn.legalize.partition import is_contraction
from jax_cudnn.legalize.rules import Legal


def candidates(graph: Graph) -> tuple[Legal, ...]:
    """Return the ways in which cuDNN may run a convolution with what surrounds it."""
    ways = [_candidate(graph, _merge_groups)]
    # The engines that take channels which do not fill a load are slow, and some of
    # cuDNN 9.19's give wrong results on an H200 (tests/gpu/test_fusion_numerics.py).
    padded = _candidate(graph, _pad_channels)
    if padded is not None:
        ways.append(padded)
    elif len(graph.nodes) == 1 or not _has_odd_groups(graph):
        ways.append(_candidate(graph, lambda _: True))
    return tuple(way for way in ways if way is not None)


def _candidate(graph: Graph, change: Callable[[Edit], bool]) -> Legal | None:
    """Return a way; None where the change has nothing to change."""
    edit = Edit.of(graph)
    _add_spatial_axis(edit)
    _complete_operands(edit)
    _write_out_lhs_dilation(edit)
    _even_padding(edit)
    if not change(edit):
        return None
    _channels_last(edit)
    return edit.finish()


def _complete_operands(edit: Edit) -> None:
    """Broadcast what surrounds the kernel, but for one value a channel or in all.

    Operands with 1 along other axes plan, and give wrong results (cuDNN 9.19 on an
    H200: tests/gpu/test_fusion_numerics.py).
    """
    node = _main(edit)
    role = "grad_x" if node.kind == "conv_dgrad" else "output"
    if role not in _roles(edit):
        return
    dims = edit.tensors[_roles(edit)[role]].dims
    vector = (1, dims[1], *(1,) * (len(dims) - 2))
    contracted = dict(node.inputs).values()
    for name in edit.inputs:
        taken = (dims, vector, (1,) * len(dims))
        if name not in contracted and edit.tensors[name].dims not in taken:
            edit.expand(name, dims)


def _channels_of(edit: Edit) -> tuple[int, int, int]:
    """Return groups, and in and out channels of each."""
    x, w, _ = (edit.tensors[_roles(edit)[r]] for r in TRIPLES[_main(edit).kind])
    groups = x.dims[1] // w.dims[1]
    return groups, w.dims[1], w.dims[0] // groups


def _has_odd_groups(graph: Graph) -> bool:
    edit = Edit.of(graph)
    groups, c, o = _channels_of(edit)
    filters = _roles(edit)[TRIPLES[_main(edit).kind][1]]
    unit = ELEMENTS_PER_LOAD[edit.tensors[filters].dtype]
    return groups > 1 and bool(c % unit or o % unit)


def _main(edit: Edit) -> Node:
    return next(node for node in edit.nodes if is_contraction(node))


def _roles(edit: Edit) -> dict[str, str]:
    node = _main(edit)
    return dict((*node.inputs, *node.outputs))


def _attributes(edit: Edit) -> ConvAttributes:
    attributes = _main(edit).attributes
    assert isinstance(attributes, ConvAttributes)
    return attributes


def _set_attributes(edit: Edit, **changes: tuple[int, ...]) -> None:
    node = _main(edit)
    edit.replace_node(
        node, replace(node, attributes=replace(_attributes(edit), **changes))
    )


# --- rank -----------------------------------------------------------------------------


def _add_spatial_axis(edit: Edit) -> None:
    """Make a convolution over one spatial axis one over two, the first of size 1."""
    if len(_attributes(edit).window_strides) != 1:
        return
    for name, tensor in list(edit.tensors.items()):
        # The new axis 2 is stored just before the old one.
        order = [axis + (axis >= 2) for axis in tensor.order]
        order.insert(order.index(3), 2)
        dims = (*tensor.dims[:2], 1, *tensor.dims[2:])
        wider = replace(tensor, dims=dims, order=tuple(order))
        edit.rearrange(
            name, wider, _reshaper(wider.stored_shape), _reshaper(tensor.stored_shape)
        )
    _set_attributes(
        edit,
        **{
            name: (0 if "padding" in name else 1, *getattr(_attributes(edit), name))
            for name in ConvAttributes.__dataclass_fields__
        },
    )


def _reshaper(shape: tuple[int, ...]):
    return lambda x: jnp.reshape(x, shape)


# --- layout ---------------------------------------------------------------------------


def channels_last(rank: int) -> tuple[int, ...]:
    """Return the order of axes in which cuDNN's fused engines take their tensors."""
    return (0, *range(2, rank), 1)


def _channels_last(edit: Edit) -> None:
    for name, tensor in list(edit.tensors.items()):
        order = channels_last(len(tensor.dims))
        if tensor.order == order:
            continue
        into = tuple(tensor.order.index(axis) for axis in order)
        back = tuple(order.index(axis) for axis in tensor.order)
        moved = [axis for axis in tensor.order if tensor.dims[axis] != 1]
        stays = moved == [axis for axis in order if tensor.dims[axis] != 1]
        if not stays and name in (*edit.inputs, *edit.outputs):
            edit.notes.append(
                f"{name} is transposed to channels-last, in which cuDNN computes"
            )
        edit.rearrange(
            name,
            replace(tensor, order=order),
            lambda x, axes=into: jnp.transpose(x, axes),
            lambda x, axes=back: jnp.transpose(x, axes),
        )


# --- dilation of x --------------------------------------------------------------------


def _write_out_lhs_dilation(edit: Edit) -> None:
    attributes = _attributes(edit)
    if all(step == 1 for step in attributes.lhs_dilation):
        return
    node = _main(edit)
    if node.kind in ("conv_fprop", "conv_dgrad") and _is_transposed(edit):
        _exchange_directions(edit)
        return
    # Zeros between the elements of x, written out; dgrad's are cut out again.
    name = _roles(edit)[TRIPLES[node.kind][0]]
    tensor = edit.tensors[name]
    spread = attributes.lhs_dilation
    dims = tuple(
        dilated(size, spread[axis - 2]) if axis >= 2 else size
        for axis, size in enumerate(tensor.dims)
    )
    gaps = [(0, 0, spread[axis - 2] - 1 if axis >= 2 else 0) for axis in tensor.order]
    steps = [spread[axis - 2] if axis >= 2 else 1 for axis in tensor.order]
    if name in edit.outputs or name in edit.inputs:
        edit.notes.append(f"the zeros of lhs_dilation are written into {name}")
    edit.rearrange(
        name,
        replace(tensor, dims=dims),
        lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), gaps),
        lambda x: jax.lax.slice(x, (0,) * x.ndim, x.shape, steps),
    )
    _set_attributes(edit, lhs_dilation=(1,) * len(spread))


def _is_transposed(edit: Edit) -> bool:
    """Whether the convolution is the gradient of a strided one.

    With more padding than the window reaches, part of the result sees zeros only, for
    which the gradient of a convolution has no place.
    """
    attributes = _attributes(edit)
    window = edit.tensors[_roles(edit)["w"]].dims[2:]
    reach = (
        dilated(size, hole) - 1
        for size, hole in zip(window, attributes.rhs_dilation, strict=True)
    )
    pads = zip(attributes.padding_low, attributes.padding_high, strict=True)
    is_plain = all(step == 1 for step in attributes.window_strides)
    return is_plain and all(
        max(pair) <= most for pair, most in zip(pads, reach, strict=True)
    )


def _exchange_directions(edit: Edit) -> None:
    """Make fprop with a dilated x the dgrad of a strided convolution, and back.

    The filters are flipped, and their in and out channels change places.
    """
    node = _main(edit)
    attributes = _attributes(edit)
    roles = _roles(edit)
    is_forward = node.kind == "conv_fprop"
    source = edit.tensors[roles["x" if is_forward else "grad_output"]]
    result = edit.tensors[roles["output" if is_forward else "grad_x"]]
    x = (source if is_forward else result).dims
    filters = edit.tensors[roles["w"]]
    groups = x[1] // filters.dims[1]
    window = [
        dilated(size, hole)
        for size, hole in zip(filters.dims[2:], attributes.rhs_dilation, strict=True)
    ]
    flipped = replace(
        filters,
        dims=(groups * filters.dims[1], filters.dims[0] // groups, *filters.dims[2:]),
        order=tuple(range(len(filters.dims))),
    )
    edit.rearrange(
        roles["w"],
        flipped,
        lambda w: _flip(filters, groups, w),
        lambda w: w,
    )
    low = tuple(
        size - 1 - pad for size, pad in zip(window, attributes.padding_low, strict=True)
    )
    high = tuple(
        size - 1 - pad
        for size, pad in zip(window, attributes.padding_high, strict=True)
    )
    edit.replace_node(
        node,
        Node.make(
            "conv_dgrad" if is_forward else "conv_fprop",
            {
                "grad_output" if is_forward else "x": source.name,
                "w": roles["w"],
            },
            {"grad_x" if is_forward else "output": result.name},
            ConvAttributes(
                window_strides=attributes.lhs_dilation,
                padding_low=low,
                padding_high=high,
                lhs_dilation=attributes.window_strides,
                rhs_dilation=attributes.rhs_dilation,
            ),
        ),
    )
    edit.notes.append("the filters are flipped: a dilated x is a gradient to cuDNN")


def _flip(filters: Tensor, groups: int, stored: jax.Array) -> jax.Array:
    """Return filters flipped in space, in and out channels of each group exchanged."""
    inverse = tuple(filters.order.index(axis) for axis in range(len(filters.order)))
    w = jnp.transpose(stored, inverse)
    out, channels, *window = filters.dims
    w = jnp.flip(w, axis=tuple(range(2, w.ndim)))
    w = jnp.reshape(w, (groups, out // groups, channels, *window))
    w = jnp.swapaxes(w, 1, 2)
    return jnp.reshape(w, (groups * channels, out // groups, *window))


# --- padding --------------------------------------------------------------------------


def _even_padding(edit: Edit) -> None:
    """Pad x on the array where its two ends differ, and cut where padding is negative.

    What both ends have in common stays with cuDNN. x's gradient is cut, or filled up
    with zeros, to undo it.
    """
    attributes = _attributes(edit)
    pairs = list(zip(attributes.padding_low, attributes.padding_high, strict=True))
    common = tuple(max(min(low, high), 0) for low, high in pairs)
    rest = [(low - c, high - c) for (low, high), c in zip(pairs, common, strict=True)]
    kind = _main(edit).kind
    if kind == "conv_dgrad":
        _fit_gradient(edit)
        return
    if all(pair == (0, 0) for pair in rest):
        return
    name = _roles(edit)["x"]
    tensor = edit.tensors[name]
    dims = tuple(
        size + sum(rest[axis - 2]) if axis >= 2 else size
        for axis, size in enumerate(tensor.dims)
    )
    widths = [(*rest[axis - 2], 0) if axis >= 2 else (0, 0, 0) for axis in tensor.order]
    edit.notes.append(f"{name} is padded outside the kernel: its two ends differ")
    edit.rearrange(
        name,
        replace(tensor, dims=dims),
        lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), widths),
        lambda x: x,
    )
    _set_attributes(edit, padding_low=common, padding_high=common)


def _fit_gradient(edit: Edit) -> None:
    attributes = _attributes(edit)
    pairs = list(zip(attributes.padding_low, attributes.padding_high, strict=True))
    common = tuple(max(min(low, high), 0) for low, high in pairs)
    rest = [(low - c, high - c) for (low, high), c in zip(pairs, common, strict=True)]
    if all(pair == (0, 0) for pair in rest):
        return
    name = _roles(edit)["grad_x"]
    inverse = [(-low, -high) for low, high in rest]
    old = edit.tensors[name].dims
    for each, tensor in list(edit.tensors.items()):
        if not _follows_result(edit, each, tensor, old):
            continue
        dims = tuple(
            size + sum(rest[axis - 2]) if axis >= 2 else size
            for axis, size in enumerate(tensor.dims)
        )
        into = [
            (*rest[axis - 2], 0) if axis >= 2 else (0, 0, 0) for axis in tensor.order
        ]
        back = [
            (*inverse[axis - 2], 0) if axis >= 2 else (0, 0, 0) for axis in tensor.order
        ]
        edit.rearrange(
            each,
            replace(tensor, dims=dims),
            lambda x, widths=into: jax.lax.pad(x, jnp.zeros((), x.dtype), widths),
            lambda x, widths=back: jax.lax.pad(x, jnp.zeros((), x.dtype), widths),
        )
    edit.notes.append(f"{name} is fitted outside the kernel: its two ends differ")
    _set_attributes(edit, padding_low=common, padding_high=common)


def _follows_result(
    edit: Edit, name: str, tensor: Tensor, dims: tuple[int, ...]
) -> bool:
    apart = {n for _, n in _main(edit).inputs} | constants(edit)
    return name not in apart and tensor.dims[2:] == dims[2:]


# --- groups ---------------------------------------------------------------------------

# Channels of a group at which an H200 was fastest (cuDNN 9.19, bf16, groups of 4 and 8
# channels merged into groups of 16 to 256: benchmarks/fusion.py has such cells).
_GROUP = 32


def _merge_groups(edit: Edit) -> bool:
    """Make several small groups one, with zeros where they do not meet.

    Tensor cores have multiplied the zeros before the engines for small groups are
    done, which also are slow with an epilogue. Returns whether groups are small.
    """
    if _main(edit).kind not in ("conv_fprop", "conv_dgrad"):
        return False
    groups, c, o = _channels_of(edit)
    name = _roles(edit)["w"]
    w = edit.tensors[name]
    unit = ELEMENTS_PER_LOAD[w.dtype]
    factors = [
        factor
        for factor in range(2, groups + 1)
        if groups % factor == 0 and not (factor * c % unit or factor * o % unit)
    ]
    if groups == 1 or c >= _GROUP or not factors:
        return False
    factor = next((each for each in factors if each * c >= _GROUP), factors[-1])
    order = tuple(range(len(w.dims)))
    edit.rearrange(
        name,
        replace(w, dims=(w.dims[0], factor * c, *w.dims[2:]), order=order),
        lambda stored: _spread(w, groups // factor, factor, stored),
        lambda stored: stored,
    )
    edit.notes.append(f"{groups} groups are merged into {groups // factor}")
    return True


def _spread(w: Tensor, groups: int, factor: int, stored: jax.Array) -> jax.Array:
    """Return filters of merged groups, zero but for each old group's own channels."""
    inverse = tuple(w.order.index(axis) for axis in range(len(w.order)))
    out, c, *window = w.dims
    x = jnp.transpose(stored, inverse)
    x = jnp.reshape(x, (groups, factor, out // (groups * factor), 1, c, *window))
    own = jnp.eye(factor, dtype=jnp.bool_)
    own = jnp.reshape(own, (1, factor, 1, factor, 1, *(1,) * len(window)))
    x = jnp.where(own, x, jnp.zeros((), x.dtype))
    return jnp.reshape(x, (out, factor * c, *window))


# --- channels -------------------------------------------------------------------------


def _pad_channels(edit: Edit) -> bool:
    """Pad channels of an ungrouped convolution to what is loaded at once.

    Returns whether there was anything to pad.
    """
    kind = _main(edit).kind
    x_name, w_name, out_name = (_roles(edit)[role] for role in TRIPLES[kind])
    x, w = edit.tensors[x_name], edit.tensors[w_name]
    if x.dims[1] != w.dims[1]:
        return False
    unit = ELEMENTS_PER_LOAD[x.dtype]
    c, o = x.dims[1], w.dims[0]
    new_c, new_o = -(-c // unit) * unit, -(-o // unit) * unit
    if (new_c, new_o) == (c, o):
        return False
    sizes: dict[str, tuple[tuple[int, int], ...]] = {
        w_name: ((0, new_o), (1, new_c)),
        x_name: ((1, new_c),),
    }
    images = new_c if kind == "conv_dgrad" else new_o
    size = c if kind == "conv_dgrad" else o
    for name, tensor in edit.tensors.items():
        if name not in (*sizes, *constants(edit)) and tensor.dims[1] == size:
            sizes[name] = ((1, images),)
    if kind == "conv_dgrad":
        sizes[out_name] = ((1, new_o),)
    for name, changes in sizes.items():
        edit.pad(name, dict(changes))
    edit.notes.append(f"channels {c} -> {o} are padded to {new_c} -> {new_o}")
    return True
