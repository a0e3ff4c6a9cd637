# SPDX-License-Identifier: Apache-2.0
"""Reads the description of a node kind: its row of node_kinds.json, as C++ does.

A row has the node's roles, each with its axes and its dtype:

    "query": "b kg s d : float"     "bias?": "[b] [kg] [s] [t] : float"

A letter stands for a size, the same wherever it appears. Letters side by side are
multiplied: kg query heads are k key heads times g each. An axis in brackets may be 1
and is then broadcast, or summed in a result. A letter with a star stands for any number
of axes. "= role" has the axes and the dtype of another role; a role with a question
mark may be absent.

Dtypes are: names, of which one is meant; "float"; "not bool"; "any"; "like" another
role; and "sum of" another role, the dtype in which sums of it are kept (f32, f64 for
f64). "i32 up to s" holds counts along s, and "i32 starts along s" where these begin;
a row that has several of them shares s out to them. "i32 below p" holds indices into p.
"positive" follows a dtype of numbers above 0.

The other fields of a row, all optional:

==============  ========================================================================
attributes      name: bool, integer, number, string, strings or "integers" and the
                letter that they have one entry for; ">= 1" for each. A value after
                "default" is left out of a graph's text; "entries" are how many a list
                may have
with            operands, each with what is different of a node that has it: roles that
                are new or have another text, those that it is "without", and any other
                field. This one is not shared by "like"
like            the kind whose other fields, attributes included, this one shares
letters         what each letter is called
ranks           the least and most axes that a starred letter stands for
windows         letters of a result that follow from a size, a window (a letter, or an
                attribute with an entry for each axis) and attributes
folds           the letters that examples of a vmap can enter, the best first
apart           an operand with which a kernel does more for one example than for
                several at once: those that cuDNN is asked for run one by one
whole           letters that a device must have whole; all others can be shared out
contracted      letters over which results that lack them are sums
maxima          letters over which results that lack them are maxima
adds            two operands, and the result that is their sum: where the second is
                there, the kind is one of the sum in the place of the first
divides         "xla" for kinds that XLA computes in programs for several devices: it
                adds up what each has, where a kernel would need an axis gathered
wide_sums       true for kinds whose kernels are as fast with sums as results in the
                dtype in which these are kept
pads            letters that may be padded if the row has them, to which multiples, and
                advice on doing so
precision       which setting of JAX holds for the products: "dot" or "convolution"
around          true for kinds that only come along with the others in a kernel
sums            true for kinds whose results are sums over axes of their operand
modes           the values of the attribute "mode", by the number of inputs
==============  ========================================================================
"""

import functools
import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal, cast

Precision = Literal["dot", "convolution"]
# The letters of one axis, whose sizes are multiplied.
Letters = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis of a role: the letters whose sizes it multiplies, none for a 1."""

    letters: str
    is_optional: bool
    is_starred: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A role of a node: its axes and dtype, or whose they are.

    ``counts`` are the letters along which it counts, if it does, and ``starts_along``
    the one along which its numbers are places. ``indexes`` is the letter into which its
    numbers point. ``is_positive`` says that its numbers are above 0.
    """

    name: str
    is_required: bool
    is_input: bool
    axes: tuple[Axis, ...]
    dtype: str
    counts: str | None = None
    indexes: str | None = None
    starts_along: str | None = None
    is_positive: bool = False
    same_as: str | None = None

    @property
    def fixed_rank(self) -> int:
        """The number of axes without a star."""
        return sum(not axis.is_starred for axis in self.axes)

    @property
    def is_starred(self) -> bool:
        """Whether an axis has a star."""
        return any(axis.is_starred for axis in self.axes)

    @property
    def is_sum(self) -> bool:
        """Whether its dtype is one in which sums are kept."""
        return self.dtype.startswith("sum of ")

    def place(self, letter: str) -> int | None:
        """Return the axis that begins with a letter, if there is one."""
        found = [i for i, axis in enumerate(self.axes) if axis.letters[:1] == letter]
        return found[0] if found and not self.axes[found[0]].is_starred else None

    def broadcasts(self, letter: str) -> bool:
        """Whether the axis that begins with the letter may be 1 instead."""
        place = self.place(letter)
        return place is not None and self.axes[place].is_optional


@dataclass(frozen=True, kw_only=True, slots=True)
class AttributeField:
    """An attribute's type, the letter that a list has entries for, least and default.

    The default is None where the attribute is always written. ``entries`` is empty
    where a list may have any number of them.
    """

    type: Literal["bool", "integer", "number", "string", "strings", "integers"]
    letter: str = ""
    least: int | None = None
    entries: tuple[int, ...] = ()
    default: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Letters that may be padded, the multiples to try, and what else to do then."""

    letters: tuple[str, ...]
    multiples: tuple[int, ...]
    advice: str = ""


# A row is read once, so it is equal to itself only.
@dataclass(frozen=True, kw_only=True, eq=False)
class Description:
    """A row of the table, as it is of nodes with or without certain operands.

    ``forms`` has what the row is of nodes with an operand that changes it.
    """

    name: str
    roles: Mapping[str, Role]
    attributes: Mapping[str, AttributeField]
    letters: Mapping[str, str]
    ranks: tuple[int, int]
    windows: Mapping[str, tuple[str, str]]
    folds: tuple[str, ...]
    apart: str
    whole: frozenset[str]
    contracted: frozenset[str]
    maxima: frozenset[str]
    adds: tuple[str, ...]
    is_divided_by_xla: bool
    has_wide_sums: bool
    pads: Padding | None
    precision: Precision | None
    is_around: bool
    is_sum: bool
    arity: Mapping[str, int]
    forms: Mapping[str, "Description"]

    def form(self, roles: Container[str]) -> "Description":
        """Return the row as it is of a node with these roles."""
        found = [form for operand, form in self.forms.items() if operand in roles]
        return found[0] if found else self

    @functools.cached_property
    def inputs(self) -> tuple[Role, ...]:
        """The roles that the node reads, in the table's order."""
        return tuple(role for role in self.roles.values() if role.is_input)

    @functools.cached_property
    def outputs(self) -> tuple[Role, ...]:
        """The roles that the node makes, in the table's order."""
        return tuple(role for role in self.roles.values() if not role.is_input)


@functools.cache
def table() -> Mapping[str, Any]:
    """Return the rows as they stand in the file."""
    text = resources.files(__package__ or "").joinpath("node_kinds.json").read_text()
    return json.loads(text)


@functools.cache
def axes_of(
    kind: Description, role: str, stars: int
) -> "tuple[tuple[Axis, Letters], ...]":
    """Return the axes of a role with their letters, starred ones written out.

    A starred letter becomes as many letters as it has axes, as in "y0" and "y1".
    """
    axes: list[tuple[Axis, Letters]] = []
    for axis in kind.roles[role].axes:
        if axis.is_starred:
            letters = [(f"{axis.letters}{i}",) for i in range(stars)]
            axes += [(axis, each if axis.letters else ()) for each in letters]
        else:
            axes.append((axis, tuple(axis.letters)))
    return tuple(axes)


@functools.cache
def describe(name: str) -> Description:
    """Return the row of a kind, read."""
    row: dict[str, Any] = {"with": _NO_FORMS, **table()[name]}
    shared: Mapping[str, Any] = table()[row["like"]] if "like" in row else {}
    return _described(name, {**shared, **row})


_NO_FORMS: Mapping[str, Any] = {}


def _described(name: str, shared: Mapping[str, Any]) -> Description:
    roles: dict[str, Role] = {}
    for is_input, field in ((True, "inputs"), (False, "outputs")):
        for key, text in shared[field].items():
            role = _role(key, text, roles, is_input=is_input)
            roles[role.name] = role
    pads, letters = shared.get("pads"), shared.get("letters", {})
    return Description(
        name=name,
        roles=roles,
        attributes={k: _field(v) for k, v in shared.get("attributes", {}).items()},
        letters=letters,
        ranks=tuple(shared.get("ranks", (0, 8))),
        windows={k: tuple(v.split()) for k, v in shared.get("windows", {}).items()},
        folds=tuple(shared.get("folds", "").split()),
        apart=shared.get("apart", ""),
        whole=frozenset(shared.get("whole", "").split()),
        contracted=frozenset(shared.get("contracted", "").split()),
        maxima=frozenset(shared.get("maxima", "").split()),
        adds=tuple(shared.get("adds", "").split()),
        is_divided_by_xla=shared.get("divides") == "xla",
        has_wide_sums=shared.get("wide_sums", False),
        pads=pads
        and Padding(
            letters=tuple(x for x in pads["letters"].split() if x in letters),
            multiples=tuple(pads["multiples"]),
            advice=pads.get("advice", ""),
        ),
        precision=shared.get("precision"),
        is_around=shared.get("around", False),
        is_sum=shared.get("sums", False),
        arity={
            mode: int(count)
            for count, modes in shared.get("modes", {}).items()
            for mode in modes
        },
        forms={
            operand: _described(name, _with(shared, form))
            for operand, form in shared["with"].items()
        },
    )


def _with(row: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the changes of a form; roles that are new come first."""
    without = form.get("without", ())
    changed: dict[str, Any] = {**row, **form, "with": _NO_FORMS}
    for side in ("inputs", "outputs"):
        own, old = form.get(side, {}), row[side]
        new = {role: text for role, text in own.items() if role not in old}
        changed[side] = {
            role: text
            for role, text in {**new, **old, **own}.items()
            if role.rstrip("?") not in without
        }
    return changed


def _role(key: str, text: str, known: Mapping[str, Role], *, is_input: bool) -> Role:
    name, is_required = key.rstrip("?"), not key.endswith("?")
    if text.startswith("= "):
        model = known[text.removeprefix("= ")]
        return replace(
            model,
            name=name,
            is_required=is_required,
            is_input=is_input,
            same_as=model.name,
        )
    words, _, dtype = text.partition(" : ")
    dtype, _, counts = dtype.partition(" up to ")
    dtype, _, indexes = dtype.partition(" below ")
    dtype, _, starts_along = dtype.partition(" starts along ")
    return Role(
        name=name,
        is_required=is_required,
        is_input=is_input,
        axes=tuple(map(_axis, words.split())),
        dtype=dtype.removesuffix(" positive"),
        counts=counts or None,
        indexes=indexes or None,
        starts_along=starts_along or None,
        is_positive=dtype.endswith(" positive"),
    )


def _axis(text: str) -> Axis:
    inner = text.strip("[]")
    is_starred = inner.endswith("*")
    letters = inner.rstrip("*")
    return Axis(
        letters="" if letters == "1" else letters,
        is_optional=text.startswith("["),
        is_starred=is_starred,
    )


def _field(value: Any) -> AttributeField:
    data: dict[str, Any] = {"type": value} if isinstance(value, str) else value
    found = re.fullmatch(r"(\w+)(?: (\w))?(?: >= (-?\d+))?", data["type"])
    assert found is not None, value
    kind, letter, least = found.groups()
    default: Any = data.get("default")
    return AttributeField(
        type=kind,  # type: ignore[arg-type]
        letter=letter or "",
        least=None if least is None else int(least),
        entries=tuple(data.get("entries", ())),
        default=tuple(cast("list[int | str]", default))
        if isinstance(default, list)
        else default,
    )
