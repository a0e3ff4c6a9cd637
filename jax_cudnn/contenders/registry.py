# SPDX-License-Identifier: Apache-2.0
"""The contenders that this process has added, by name."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax_cudnn.choices import OWN
from jax_cudnn.errors import LibraryError
from jax_cudnn.graph import Graph

# From the operands of a part, with their logical axes, to its results likewise.
Program = Callable[..., Sequence[Any]]
# What a contender runs a part with; None for a part that it does not run.
Offer = Callable[[Graph], Program | None]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An implementation that competes with cuDNN's plans and XLA where plans are tuned.

    Attributes:
      name: what it is called.
      version: its version, "" for none. What was measured of another one is not used.
      offer: returns the program for a part of a graph, or None.
    """

    name: str
    version: str
    offer: Offer

    @property
    def title(self) -> str:
        """Name and version: what choices call it."""
        return f"{self.name} {self.version}".strip()


_lock = threading.Lock()
_contenders: dict[str, Contender] = {}


def add(name: str, offer: Offer, version: str = "") -> Contender:
    """Add a contender, in place of one of the same name.

    Raises:
      ValueError: the name or version is not a word.
      TypeError: the offer cannot be called.
    """
    for what, word in (("name", name), ("version", version)):
        if word.split() != [word] and (what == "name" or word):
            raise ValueError(
                f"{what}={word!r} is not one word, such as 'tokamax' or '0.0.17'"
            )
    if name in OWN:
        raise ValueError(
            f"name={name!r} is a contender in every tuning already. Give yours another "
            "name."
        )
    if not callable(offer):
        raise TypeError(
            f"offer={offer!r} cannot be called. It is a function that takes a part of "
            "a graph and returns the program that runs it, or None."
        )
    contender = Contender(name=name, version=version, offer=offer)
    with _lock:
        _contenders[name] = contender
    return contender


def remove(name: str) -> None:
    """Remove a contender.

    Raises:
      LibraryError: there is none of that name.
    """
    with _lock:
        if name not in _contenders:
            there = ", ".join(sorted(_contenders)) or "none"
            raise LibraryError(
                f"No contender is named {name!r}. Those that were added: {there}."
            )
        del _contenders[name]


def all_of(part: Graph) -> list[tuple[Contender, Program]]:
    """Return the contenders that offer to run a part, each with its program."""
    with _lock:
        asked = list(_contenders.values())
    offers = ((contender, contender.offer(part)) for contender in asked)
    return [(contender, program) for contender, program in offers if program]


def program_of(title: str, part: Graph) -> Program | None:
    """Return the program of the contender with that name and version, if it offers."""
    with _lock:
        asked = list(_contenders.values())
    for contender in asked:
        if contender.title == title:
            return contender.offer(part)
    return None
