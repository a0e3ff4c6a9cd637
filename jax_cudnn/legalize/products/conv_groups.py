# SPDX-License-Identifier: Apache-2.0
"""Rewrites convolutions in groups into forms that cuDNN may run faster.

cuDNN has fast engines for groups of 8 to 128 channels, a power of two, with as many in
as out. Others may take ten times as long. So channels of a group are padded to such a
number, or groups are merged into larger ones, or into one, of filters with zeros where
old groups do not meet. Tensor cores have multiplied these zeros before an engine for
odd or small groups is done. Gradients with respect to images in steps of 1 are
convolutions with flipped filters: for some images, cuDNN lists a slow engine for
gradients first.

A zero times a NaN is a NaN: one in x gets into all results of its merged group. Of the
gradient of merged filters, what is not of the old ones is left out, so that it stays
where it belongs. Padding adds no zero to a sum that is kept.

cuDNN's own kernels for groups that fill one load or less multiply two at once, so a NaN
may get into a neighbour.

docs/internals/measured/conv_groups.md has the times. Groups of one channel are in
conv_depthwise.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Tensor
from jax_cudnn.graph.products.conv import TRIPLES
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.layout import ELEMENTS_PER_LOAD
from jax_cudnn.legalize.products.conv_directions import make_convolution

# What becomes of groups. They stay as they are where a gradient is written as a
# convolution with flipped filters.
AS_IT_IS, FLIPPED, ONE_GROUP = "as it is", "flipped", "one group"
MERGED, PADDED, FILLED = "merged", "padded", "filled"
# Channels of a group for which cuDNN 9.19 has fast engines in 16 bits, on an H100.
_WIDTHS = (8, 16, 32, 64, 128)
# It lists slow ones first if a window has more elements than this, with the channels.
_DEEPEST = 1600
# An array gets so many times as large, at most: no more was measured.
_MOST_PADDED = 4
# Elements of an array that is padded, at most.
_LARGEST = 2**30
# Channels that small groups are merged to.
_MERGED = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRewrite:
    """A rewrite of a convolution in groups.

    ``change`` edits it, and returns whether there was anything to do. ``first`` does
    so before that, while padding is as it was. ``name`` is what becomes of groups.
    """

    name: str
    change: Callable[[GraphEditor], bool]
    first: Callable[[GraphEditor], None] = lambda _: None


def channels_of(editor: GraphEditor) -> tuple[int, int, int]:
    """Return groups, and in and out channels of each."""
    x, w, _ = _arrays(editor)
    groups = x.dims[1] // w.dims[1]
    return groups, w.dims[1], w.dims[0] // groups


def _arrays(editor: GraphEditor) -> list[Tensor]:
    """Return x, w and output, or their gradients."""
    return [editor.tensors[editor.roles[r]] for r in TRIPLES[editor.main.kind]]


def _operand_dtype(editor: GraphEditor) -> str:
    (_, name), *_ = editor.main.inputs
    return editor.tensors[name].dtype


def _fills(editor: GraphEditor, factor: int) -> bool:
    """Whether the channels of so many groups fill what is loaded at once."""
    _, c, o = channels_of(editor)
    unit = ELEMENTS_PER_LOAD[_operand_dtype(editor)]
    return not (factor * c % unit or factor * o % unit)


def group_rewrites(editor: GraphEditor) -> Iterator[GroupRewrite]:
    """Yield the rewrites of a convolution in groups.

    Each has a name of its own. They may be the same, or have nothing to do.
    """
    # cuDNN has no kernel for odd groups with something around them.
    if _fills(editor, 1) or len(editor.nodes) == 1:
        yield GroupRewrite(name=FLIPPED, change=as_it_is, first=make_convolution)
        yield GroupRewrite(name=AS_IT_IS, change=as_it_is)
    else:
        yield GroupRewrite(name=FILLED, change=fill)
    yield GroupRewrite(name=MERGED, change=merge)
    yield GroupRewrite(name=PADDED, change=pad, first=make_convolution)
    yield GroupRewrite(name=ONE_GROUP, change=make_one)


def as_it_is(editor: GraphEditor) -> bool:
    """Leave it."""
    del editor
    return True


# --- larger groups --------------------------------------------------------------------


def merged_at_once(editor: GraphEditor) -> int:
    """Return how many small groups become one of up to 32 channels.

    It is a power of two, or 1 if such groups would not fill what is loaded at once.
    """
    groups, c, _ = channels_of(editor)
    factor = 1
    while not groups % (2 * factor) and 2 * factor * c <= _MERGED:
        factor *= 2
    return factor if _fills(editor, factor) else 1


def merge(editor: GraphEditor) -> bool:
    """Make larger groups of several small ones."""
    factor = merged_at_once(editor)
    return factor > 1 and _merge(editor, factor)


def fill(editor: GraphEditor) -> bool:
    """Make larger groups of as few odd ones as fill what is loaded at once."""
    groups, _, _ = channels_of(editor)
    factors = (f for f in range(2, groups + 1) if not groups % f and _fills(editor, f))
    factor = next(factors, 1)
    return factor > 1 and _merge(editor, factor)


def make_one(editor: GraphEditor) -> bool:
    """Make one group of all, if they fill what is loaded at once."""
    groups, _, _ = channels_of(editor)
    return _fills(editor, groups) and _merge(editor, groups)


def _merge(editor: GraphEditor, factor: int) -> bool:
    """Make so many groups one."""
    groups, c, _ = channels_of(editor)
    _, w, _ = _arrays(editor)
    order = tuple(range(len(w.dims)))
    editor.rearrange(
        w.name,
        replace(w, dims=(w.dims[0], factor * c, *w.dims[2:]), order=order),
        lambda stored: _spread(w, groups // factor, factor, stored),
        lambda stored: _gathered(w, groups // factor, factor, stored),
    )
    editor.notes.append(f"{groups} groups are merged into {groups // factor}")
    return True


def _spread(w: Tensor, groups: int, factor: int, stored: jax.Array) -> jax.Array:
    """Return filters of merged groups, zero but for each old group's own channels."""
    # Four groups of 2 channels in and 3 out, merged into 2 groups: filters
    # (12, 2, y, x) become (12, 4, y, x). The first 3 of them have their channels in 0:2
    # and zeros in 2:4, the next 3 have zeros in 0:2 and their channels in 2:4, and so
    # on.
    inverse = tuple(w.order.index(axis) for axis in range(len(w.order)))
    out, c, *window = w.dims
    x = jnp.transpose(stored, inverse)
    x = jnp.reshape(x, (groups, factor, out // (groups * factor), 1, c, *window))
    own = jnp.eye(factor, dtype=jnp.bool_)
    own = jnp.reshape(own, (1, factor, 1, factor, 1, *(1,) * len(window)))
    x = jnp.where(own, x, jnp.zeros((), x.dtype))
    return jnp.reshape(x, (out, factor * c, *window))


def _gathered(w: Tensor, groups: int, factor: int, merged: jax.Array) -> jax.Array:
    """Return filters of the old groups, stored as ``w``: each group's own channels."""
    out, c, *window = w.dims
    x = jnp.reshape(merged, (groups, factor, out // (groups * factor), factor, c, -1))
    x = jnp.transpose(x, (0, 2, 4, 5, 1, 3))
    # A group's own channels are where both axes of groups have the same index.
    x = jnp.reshape(x, (*x.shape[:-2], factor * factor))[..., :: factor + 1]
    x = jnp.reshape(jnp.transpose(x, (0, 4, 1, 2, 3)), (out, c, *window))
    return jnp.transpose(x, w.order)


# --- padded groups --------------------------------------------------------------------


def pad(editor: GraphEditor) -> bool:
    """Pad each group's channels to a number for which cuDNN has fast engines."""
    groups, c, o = channels_of(editor)
    x, w, output = _arrays(editor)
    window = math.prod(w.dims[2:])
    size = next((each for each in _WIDTHS if each >= max(c, o)), None)
    if size is None or c == o == size or size * window > _DEEPEST:
        return False
    places = max(math.prod(each.dims) // each.dims[1] for each in (x, output))
    is_large = places * groups * size > _LARGEST
    if is_large or size > _MOST_PADDED * min(c, o):
        return False
    pad_each(editor, size, size)
    editor.notes.append(
        f"channels {c} -> {o} of each of {groups} groups are padded to {size} -> {size}"
    )
    return True


def pad_each(editor: GraphEditor, new_c: int, new_o: int) -> None:
    """Pad in and out channels of each group."""
    kind = editor.main.kind
    groups, c, o = channels_of(editor)
    x_name, w_name, out_name = (editor.roles[role] for role in TRIPLES[kind])
    is_gradient = kind == "conv_dgrad"
    new = {x_name: groups * new_c, out_name: groups * new_o}
    old, wide = (c, new_c) if is_gradient else (o, new_o)
    for name, tensor in editor.tensors.items():
        apart = (x_name, w_name, out_name, *editor.constants)
        if name not in apart and tensor.dims[1] == groups * old:
            new[name] = groups * wide
    for name, size in new.items():
        editor.pad(name, {1: size}, groups=groups)
    editor.pad(w_name, {0: groups * new_o}, groups=groups)
    editor.pad(w_name, {1: new_c})
