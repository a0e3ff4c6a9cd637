# SPDX-License-Identifier: Apache-2.0
"""Writes options that functions share into their signatures and docstrings.

Options are the fields of a dataclass, the record of a call, which has their defaults
and descriptions. A function names them by a typed dictionary, so that type checkers
know its keywords. For example, where `Call` is a record that has and describes
`width: int = 3`::

    class Options(TypedDict, total=False):
        width: int

    @takes(Call, Options)
    def f(x: ArrayLike, **options: Unpack[Options]) -> jax.Array: ...

``help(f)`` shows ``f(x: ArrayLike, *, width: int = 3)``, with the description of
`width` where the docstring of `f` has the entry ``**options: as in :class:`Call`.``
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Arguments that a docstring describes: a name, a colon, and lines that are indented.
_ENTRY = re.compile(r"^  (\*{0,2}\w+): .*\n(?:    .*\n)*", re.MULTILINE)
_WIDTH = 84


def takes(
    record: type, keywords: Any, **defaults: Any
) -> Callable[[_Function], _Function]:
    """Give a function with ``**options`` the options of a typed dictionary.

    They are in its signature, and in its docstring in place of the entry ``**options``,
    except for those that it describes itself. A description that refers to
    the record is replaced by the one there. The function is called with keywords that
    it has, and with the ``defaults`` that differ from those of the record.
    """

    def decorated(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
        added = [*_parameters(record, keywords, defaults)]
        first = [x for x in own if x.kind is not x.KEYWORD_ONLY]
        named = [x for x in own if x.kind is x.KEYWORD_ONLY]
        results = [x for x in named if x.name.startswith("return_")]
        others = [x for x in named if x not in results]
        described = [*first, *others, *added, *results]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[_with_plain_type(x) for x in described],
            return_annotation=_Plain(signature.return_annotation),
        )
        if function.__doc__ is not None:  # There is none under python -OO.
            names = [x.name for x in described]
            function.__doc__ = _described(record, function.__doc__, names)
        known = {x.name for x in described}

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument "
                        f"{name!r}"
                    )
            return function(*args, **{**defaults, **given})

        # Sphinx would look for all defaults in the source of what is wrapped.
        del call.__wrapped__
        return call  # type: ignore[return-value]

    return decorated


class _Plain(str):
    """A type as it is written; `help` shows strings in quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _with_plain_type(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(annotation=_Plain(parameter.annotation))


def _parameters(
    record: Any, keywords: Any, defaults: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    """Yield the options of a typed dictionary, in the order of the record's fields."""
    for field in dataclasses.fields(record):
        if field.name in keywords.__optional_keys__:
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(field.name, field.default),
                annotation=field.type,
            )


def _described(record: type, doc: str, names: list[str]) -> str:
    """Return a docstring with what the record's fields are in place of references.

    The entry ``**options`` becomes one for each of the names that has none.
    """
    doc, reference = inspect.cleandoc(doc), f": as in :class:`{record.__name__}`"
    start = doc.index("\nArgs:\n")
    end = doc.index("\n\n", start)
    arguments = doc[start:end] + "\n"
    own = {found[1] for found in _ENTRY.finditer(arguments)}

    def written(found: re.Match[str]) -> str:
        if found[1] == "**options":
            return "".join(_entry(record, x) for x in names if x not in own)
        return _entry(record, found[1]) if reference in found[0] else found[0]

    arguments = _ENTRY.sub(written, arguments)
    return doc[:start] + arguments.removesuffix("\n") + doc[end:]


def _entry(record: type, name: str) -> str:
    entry = textwrap.fill(
        f"{name}: {_texts(record)[name]}",
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{entry}\n"


@functools.cache
def _texts(record: type) -> dict[str, str]:
    """Return the description of each of the record's fields, on one line.

    Those that a record does not describe itself are those of the class above it.
    """
    docs = [inspect.cleandoc(each.__doc__ or "") for each in record.__mro__[::-1]]
    return {
        found[1]: " ".join(found[0].split()).removeprefix(f"{found[1]}: ")
        for doc in docs
        for found in _ENTRY.finditer(f"{doc}\n")
    }
