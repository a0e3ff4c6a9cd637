# SPDX-License-Identifier: Apache-2.0
"""Measured choices: which plan, or XLA, is fastest for a graph on a GPU.

A choices file is JSON, one entry per line, sorted, so that files merge as text does. An
entry is for one graph, kind of GPU and cuDNN version; for any other it is not looked
up. The package ships choices for the shapes of its benchmarks; ``load`` adds others,
which go before them.
"""

import dataclasses
import functools
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from jax_cudnn.errors import GraphError
from jax_cudnn.graph import Graph, Target, to_json

# The version of the file's form.
SCHEMA = 1
_SHIPPED = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What runs a part of a graph fastest, as measured.

    ``candidate`` counts the ways in which the part was rewritten for cuDNN, ``plan``
    pins the engine and its knobs; both are of the best plan, also where XLA won. Times
    are medians in microseconds, None where there was no such contender.
    ``first_ratio`` is the kernel time of the plan that cuDNN's heuristic gives first
    over that of the best plan.
    """

    op: str
    operands: str
    implementation: Literal["cudnn", "xla"]
    candidate: int = 0
    plan: str = ""
    cudnn_us: float | None = None
    first_ratio: float | None = None
    xla_us: float | None = None


@dataclass(frozen=True, order=True, slots=True)
class Key:
    """What a choice is for: a GPU and cuDNN by name, and a digest of the graph.

    The digest of a graph whose plans are restricted is that of the restriction, too.
    """

    device: str
    cudnn: int
    graph: str


def key_of(graph: Graph, target: Target, allowed: str = "") -> Key:
    """Return the key of a part of a graph on a target.

    ``allowed`` is the text of ``PlanOptions``, for a choice among the plans that they
    allow; "" is for a choice among all.
    """
    return Key(target.name, target.cudnn_version, _digest(graph, allowed))


@functools.lru_cache(maxsize=8192)
def _digest(graph: Graph, allowed: str) -> str:
    return hashlib.sha256((to_json(graph) + allowed).encode()).hexdigest()[:32]


class ChoiceTable:
    """Choices by key; thread-safe. ``version`` changes with every addition."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._choices: dict[Key, Choice] = {}
        self.version = 0

    def add(self, choices: Mapping[Key, Choice]) -> None:
        """Add choices; they replace those of the same keys."""
        with self._lock:
            self._choices = {**self._choices, **choices}
            self.version += 1

    def clear(self) -> None:
        """Forget all choices."""
        with self._lock:
            self._choices = {}
            self.version += 1

    def get(self, graph: Graph, target: Target, allowed: str = "") -> Choice | None:
        """Return the choice for a part of a graph, if there is one.

        Where plans are restricted, that is one measured so, or else the general one,
        which the restriction may not allow.
        """
        if not self._choices:
            return None
        general = self._choices.get(key_of(graph, target))
        return self._choices.get(key_of(graph, target, allowed), general)

    def all(self) -> dict[Key, Choice]:
        """Return a copy of the table."""
        return dict(self._choices)


@functools.cache
def table() -> ChoiceTable:
    """Return the process's choices, the shipped ones in it from the start."""
    result = ChoiceTable()
    for path in sorted(_SHIPPED.glob("*.json")):
        result.add(read(path))
    return result


def write(path: Path, choices: Mapping[Key, Choice], made: str) -> None:
    """Write a choices file; ``made`` says how it was made."""
    lines = [
        json.dumps(
            {**dataclasses.asdict(key), **dataclasses.asdict(choice)}, sort_keys=True
        )
        for key, choice in sorted(choices.items())
    ]
    head = f'{{"schema": {SCHEMA}, "made": {json.dumps(made)}, "choices": [\n'
    path.write_text(head + ",\n".join(lines) + "\n]}\n", encoding="ascii")


def read(path: Path) -> dict[Key, Choice]:
    """Read a choices file, or raise GraphError naming what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="ascii"))
        if data["schema"] != SCHEMA:
            raise GraphError(f"{path}: schema {data['schema']} is not {SCHEMA}")
        entries = cast("Iterable[dict[str, Any]]", data["choices"])
        return dict(_read_entry(entry) for entry in entries)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, GraphError):
            raise
        raise GraphError(f"{path} is not a choices file: {error!r}") from error


def _read_entry(entry: dict[str, Any]) -> tuple[Key, Choice]:
    names = [field.name for field in dataclasses.fields(Key)]
    key = Key(**{name: entry.pop(name) for name in names})
    choice = Choice(**entry)
    if choice.implementation not in ("cudnn", "xla"):
        raise ValueError(f"implementation {choice.implementation!r}")
    return key, choice
