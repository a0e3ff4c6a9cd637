# SPDX-License-Identifier: Apache-2.0
"""Defines masks as data, and translates them into the arguments of `sdpa`.

A mask says which keys a query may see: it is a condition on a batch entry, a head, a
query i and a key j. Masks are pytrees: their arrays are traced, batched and sharded,
all else is static.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeVar,
    dataclass_transform,
    get_args,
)

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.visibility.arrays import (
    at_ends,
    blocks,
    bools,
    cache_ends,
    combined,
    prefix,
    scores_like,
    segments,
    shortest,
    shown,
)
from jax_cudnn.ops.attention.visibility.bands import (
    NO_BOUND,
    Bounds,
    as_bound,
    closed,
    is_empty,
    least,
)
from jax_cudnn.ops.attention.visibility.predicates import Overrun, Predicate, Tokens
from jax_cudnn.ops.common.pytrees import as_pytree

Alignment = Literal["top-left", "bottom-right", "cache"]

_Class = TypeVar("_Class", bound=type["Mask"])


class Mask:
    """A condition on which keys a query may see.

    ``first & second`` allows what both allow. Pass a mask to :func:`jax_cudnn.sdpa` as
    `mask`; the other arguments that mask keys are combined with it.
    """

    _arrays: ClassVar[tuple[str, ...]] = ()
    # Whether it says where sequences begin that share a row (packing.py).
    is_packing: ClassVar[bool] = False

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise TypeError(
                f"{type(self).__name__} & {type(other).__name__}: a mask is combined "
                "with masks. Write masks.Where(array) for an array of bools, and "
                "masks.Additive(array) for one that is added."
            )
        return Intersection((*self._parts(), *other._parts()))

    __rand__ = __and__
    # NumPy would combine a mask with each element of an array.
    __array_ufunc__ = None

    def __or__(self, other: object) -> NoReturn:
        self._refuse(f"{type(self).__name__} | {type(other).__name__}")

    def __xor__(self, other: object) -> NoReturn:
        self._refuse(f"{type(self).__name__} ^ {type(other).__name__}")

    __ror__, __rxor__ = __or__, __xor__

    def __invert__(self) -> NoReturn:
        self._refuse(f"~{type(self).__name__}")

    def __bool__(self) -> NoReturn:
        # `or` and `and` would return one of the two.
        self._refuse(f"`or`, `and`, `not` or `if` of {type(self).__name__}")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{what}: masks are combined with & alone, which lets a query see what "
            "both let it see. For another condition, compute an array of bools, which "
            "broadcasts to (batch, heads, query length, key length), and pass it as "
            "masks.Where(array)."
        )

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = ((field, getattr(self, field.name)) for field in fields)
        texts = (
            f"{field.name}={shown(value)}"
            for field, value in values
            if (
                value is not None
                if field.name in self._arrays
                else value != field.default
            )
        )
        return f"{type(self).__name__}({', '.join(texts)})"

    def arguments(self, query_length: int, key_length: int) -> dict[str, Any]:
        """Return the arguments of :func:`jax_cudnn.sdpa` that mean the same.

        This is the form in which the kernel gets the mask. `is_causal` and
        `local_window_size` are a band, and lengths are padding; neither takes memory,
        nor do packed sequences, which are given as `mask`. All else in a `mask`, and a
        `bias`, is an array, which is read by the kernel. No argument stands for the NaN
        of tokens that a cache has no room for.
        """
        given = sorted_arguments(self, query_length, key_length)
        given.pop("overrun", None)
        if (packed := given.pop("packed", None)) is None:
            return given
        mask: Mask = packed
        if given.pop("is_bottom_right", False):
            bands = [p for p in self._parts() if isinstance(p, Causal | Window)]
            mask = functools.reduce(operator.and_, bands, mask)
            given = {k: x for k, x in given.items() if k not in _BAND}
        if "mask" in given:
            mask = mask & Where(given["mask"])
        return {**given, "mask": mask}

    def _parts(self) -> Iterator[Mask]:
        yield self

    def _predicate(self, s: int, t: int) -> Predicate | None:
        """Return what no argument stands for, for s queries and t keys."""
        del s, t
        return None


@dataclass_transform(frozen_default=True)
def mask_class(cls: _Class) -> _Class:
    """Make a class of masks a dataclass and a pytree."""
    made = dataclass(frozen=True, repr=False, eq=not cls._arrays)(cls)
    names = [field.name for field in dataclasses.fields(made)]  # type: ignore[arg-type]
    static = [name for name in names if name not in cls._arrays]
    return as_pytree(made, "jax_cudnn.masks", static)


@mask_class
class Causal(Mask):
    """Query i sees keys up to its own position.

    Attributes:
      alignment: "top-left" (default): keys j <= i. "bottom-right": j <= i + t - s, so
        that the last query sees the last key, for s queries and t keys. "cache": the
        same with the lengths of the batch entry, of its keys and of its queries, in
        place of t and s: the queries are the last tokens of a cache that is filled up
        to the key length. A key length may be above t: a query that sees a key which is
        not there, as it sees its own, gives NaN.
    """

    alignment: Alignment = "top-left"

    def __post_init__(self) -> None:
        _check_alignment(self)


@mask_class
class Window(Mask):
    """Query i sees keys i - left to i + right.

    Attributes:
      left: how many keys before its own position, or None for all of them.
      right: how many keys after it, or None for all of them.
      alignment: its own position is i for "top-left" (default), and i + t - s for
        "bottom-right", with s queries and t keys. "cache" is "bottom-right" with the
        lengths of the batch entry as s and t.

    Raises:
      ValueError: no query sees a key in it, as with left = right = -1. Masks that show
        no key together are refused by the function that gets them.
    """

    left: int | None
    right: int | None
    alignment: Alignment = "top-left"

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            size = getattr(self, name)
            try:
                object.__setattr__(self, name, as_bound(size))
            except TypeError:  # A traced value is one of its causes.
                raise TypeError(
                    f"Window: {name} is {size!r}. Pass an int that is known when the "
                    "program is traced, or None for no bound."
                ) from None
        if is_empty(self.left, self.right):
            raise ValueError(
                f"Window: left={self.left} and right={self.right} show no key to any "
                "query. A query at position i sees the keys i - left to i + right. "
                f"{NO_BOUND}"
            )
        _check_alignment(self)


@mask_class
class Lengths(Mask):
    """Queries and keys at or past their batch entry's length are padding.

    Lengths below 0 count as 0, and lengths above the axis's size as its size.

    Attributes:
      query: integers (b,), or None (default): no query is padding.
      key: integers (b,), or None (default): no key is padding.
    """

    _arrays = ("query", "key")
    query: ArrayLike | None = None
    key: ArrayLike | None = None


@mask_class
class Segments(Mask):
    """A query sees the keys of its own segment: documents in one row, for example.

    Attributes:
      query: integers (b, s) or (s,), the segment of each query.
      key: integers (b, t) or (t,). Default None: as `query`.
    """

    _arrays = ("query", "key")
    query: ArrayLike
    key: ArrayLike | None = None

    def _predicate(self, s: int, t: int) -> Predicate:
        return segments(self.query, self.key, s, t)


@mask_class
class Prefix(Mask):
    """Every query sees the first keys, and the others up to its own position.

    Attributes:
      length: integers (b,) or (), how many keys all queries see. Below 0 counts as 0,
        and above t as t.
    """

    _arrays = ("length",)
    length: ArrayLike

    def _predicate(self, s: int, t: int) -> Predicate:
        del s
        return prefix(self.length, t)


@mask_class
class Blocks(Mask):
    """A table says which blocks of keys a block of queries sees.

    Attributes:
      table: bool; broadcasts to (b, h, s / rows, t / columns), rounded up.
      size: (rows, columns) of a block, or an int for both. Default 128.
    """

    _arrays = ("table",)
    table: ArrayLike
    size: int | tuple[int, int] = 128

    def __post_init__(self) -> None:
        sizes = self._sizes
        is_right = len(sizes) == 2 and all(
            isinstance(size, int) and not isinstance(size, bool) and size > 0
            for size in sizes
        )
        if not is_right:
            raise ValueError(
                f"Blocks: size is {self.size!r}. Pass (rows, columns), two ints above "
                "0, or one int for both."
            )

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    def _predicate(self, s: int, t: int) -> Predicate:
        return blocks(self.table, self._sizes, s, t)


@mask_class
class Where(Mask):
    """A query sees the keys where an array is True.

    Attributes:
      mask: bool; broadcasts to (b, h, s, t).
    """

    _arrays = ("mask",)
    mask: ArrayLike


@mask_class
class Additive(Mask):
    """Numbers that are added to the scores; -inf masks a key.

    Attributes:
      bias: broadcasts to (b, h, s, t). Differentiable.
    """

    _arrays = ("bias",)
    bias: ArrayLike


@mask_class
class Intersection(Mask):
    """The keys that all of several masks allow; made by ``first & second``."""

    _arrays = ("parts",)
    parts: tuple[Mask, ...]

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))

    def _parts(self) -> Iterator[Mask]:
        for part in self.parts:
            yield from part._parts()


def _check_alignment(mask: Any) -> None:
    if mask.alignment not in get_args(Alignment):
        raise ValueError(
            f"{type(mask).__name__}: alignment={mask.alignment!r} is not one of "
            f"{', '.join(map(repr, get_args(Alignment)))}."
        )


# --- as arguments ---------------------------------------------------------------------


_BAND = ("is_causal", "local_window_size")


def sorted_arguments(mask: Mask, s: int, t: int) -> dict[str, Any]:
    """Return the arguments of `sdpa` that stand for a mask, and what has none.

    That is `packed`, where the mask has packed sequences, `is_bottom_right`, where
    positions count from the ends of these, and `overrun`, where they count from the
    ends of caches.
    """
    given, predicates = sorted_predicates(mask, s, t)
    conditions = [x.seen(Tokens(s), Tokens(t)) for x in predicates]
    if "mask" in given:
        conditions.append(given["mask"])
    if conditions:
        given["mask"] = combined("masks", jnp.logical_and, conditions)
    return given


def sorted_predicates(
    mask: Mask, s: int, t: int
) -> tuple[dict[str, Any], list[Predicate]]:
    """Split a mask into arguments of sdpa, and predicates that none expresses.

    The `mask` among the arguments is that of the predicates that are arrays.
    """
    # Causal() & Window(7, None) & Segments(ids) & Where(array) gives is_causal=True,
    # local_window_size=(7, 0), mask=array, and the predicate that two tokens have the
    # same id.
    parts = [*mask._parts()]
    given: dict[str, Any] = {}
    packings = [part for part in parts if part.is_packing]
    if len(packings) > 1:
        raise ValueError(
            "sdpa: two masks say which sequences a row contains. Pass one Packed; "
            "Segments may be combined with it."
        )
    lengths = _lengths(parts, s, t)
    if packings or not lengths:
        # The caches are full, and sequences end with their last key.
        parts = [_with_full_caches(part) for part in parts]
    band_at_ends = _bounds(parts, "cache", 0)
    most = (s, t)
    if packings:
        given["packed"] = packings[0]
        if _is_from_ends(packings[0], parts):
            given["is_bottom_right"] = True
        most = (s + t, s + t)
    band = _band(parts, *((0, 0) if packings else (s, t)))
    if is_empty(*band) or is_empty(*band_at_ends):
        bands = [part for part in parts if isinstance(part, Causal | Window)]
        raise ValueError(
            f"sdpa: {' & '.join(map(repr, bands))} show no key to any of {s} queries "
            f"with {t} keys: each key that one allows is masked by another. {NO_BOUND}"
        )
    if band[1] == 0:
        given["is_causal"] = True
    if band != (None, 0) and (window := closed(band, *most)):
        given["local_window_size"] = window
    given |= lengths
    arrays = [bools("Where.mask", x.mask) for x in parts if isinstance(x, Where)]
    if arrays:
        given["mask"] = combined("masks", jnp.logical_and, arrays)
    biases = [scores_like("bias", x.bias) for x in parts if isinstance(x, Additive)]
    if len(biases) == 1:
        given["bias"] = biases[0]
    elif biases:
        # Added in the dtype of the scores.
        is_double = any(x.dtype == jnp.float64 for x in biases)
        wide = jnp.float64 if is_double else jnp.float32
        given["bias"] = combined("biases", jnp.add, [x.astype(wide) for x in biases])
    predicates = [x for part in parts if (x := part._predicate(s, t)) is not None]
    if band_at_ends != (None, None):
        ends = cache_ends(lengths, s, t)
        if (at_end := at_ends(band_at_ends, *ends, s, t)) is not None:
            predicates.append(at_end)
        if "key_value_seq_lengths" in lengths:
            given["overrun"] = Overrun(*ends, *band_at_ends, most=s, room=t)
    return given, predicates


def refuse_mask_data(op: str, mask: object) -> None:
    """Raise TypeError for a mask of this module where arrays only are taken."""
    if isinstance(mask, Mask):
        raise TypeError(
            f"{op}: mask is {type(mask).__name__}(...). Masks of jax_cudnn.masks are "
            "for jax_cudnn.sdpa. Here, pass an array of bools, or the other arguments "
            "that mask keys. There is none for packed sequences."
        )


def _is_from_ends(packed: Any, parts: Sequence[Mask]) -> bool:
    """Whether positions count from the ends of packed sequences."""
    found = {part.alignment for part in parts if isinstance(part, Causal | Window)}
    if packed.has_same_sequences and not any(isinstance(x, Lengths) for x in parts):
        return False  # There, both alignments mean the same.
    if len(found) > 1:
        raise ValueError(
            "sdpa: causality and windows of packed sequences have different "
            "alignments. Give all of them one alignment."
        )
    return "bottom-right" in found


def _band(parts: Sequence[Mask], s: int, t: int) -> Bounds:
    """Return how far before and after its own number a query sees, at most."""
    bands = [_bounds(parts, "top-left", 0), _bounds(parts, "bottom-right", t - s)]
    lefts, rights = zip(*bands, strict=True)
    return least(lefts), least(rights)


def _bounds(parts: Sequence[Mask], alignment: Alignment, offset: int) -> Bounds:
    """Return the band of all parts of an alignment, moved by an offset."""
    lefts: list[int | None] = []
    rights: list[int | None] = []
    for part in parts:
        if not isinstance(part, Causal | Window) or part.alignment != alignment:
            continue
        left, right = (None, 0) if isinstance(part, Causal) else (part.left, part.right)
        lefts.append(None if left is None else left - offset)
        rights.append(None if right is None else right + offset)
    return least(lefts), least(rights)


def _with_full_caches(part: Mask) -> Mask:
    """Return a mask whose caches are filled to their end, where no length says else."""
    if isinstance(part, Causal | Window) and part.alignment == "cache":
        return dataclasses.replace(part, alignment="bottom-right")
    return part


def _lengths(parts: Sequence[Mask], s: int, t: int) -> dict[str, jax.Array]:
    """Return the lengths that hold for all parts, by the names of the arguments."""
    found: dict[str, jax.Array] = {}
    for name, field, size in (
        ("query_seq_lengths", "query", s),
        ("key_value_seq_lengths", "key", t),
    ):
        own = [
            x
            for part in parts
            if isinstance(part, Lengths) and (x := getattr(part, field)) is not None
        ]
        if own:
            found[name] = shortest(name, own, size)
    return found
