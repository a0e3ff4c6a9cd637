# SPDX-License-Identifier: Apache-2.0
"""Measured choices: which plan, or XLA, is fastest for a graph on a GPU.

A choices file is JSON, one entry per line, sorted, so that files merge as text does. An
entry is for one graph, kind of GPU and cuDNN version; for any other it is not looked
up. The package ships choices for the shapes of its benchmarks; ``load`` adds others,
which go before them. What ``remember`` is told is kept in the user's cache folder
(cache.py), where the next process finds it.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jax_cudnn import cache
from jax_cudnn.errors import GraphError
from jax_cudnn.graph import Graph, Target, to_json

_log = logging.getLogger("jax_cudnn")

# The implementations that are always there.
OWN = ("cudnn", "xla")
# The version of the file's form.
SCHEMA = 2
_SHIPPED = Path(__file__).parent / "data"
# The most entries that the cache folder keeps: some 10 MB.
_MOST_KEPT = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A measured choice: what runs a part of a graph fastest.

    ``implementation`` is "cudnn", "xla", or the name and version of a contender that
    was added (contenders/).
    ``plan`` pins the engine and its knobs of the best plan, also where XLA won;
    ``rewritten`` is the digest of the graph that it is for, which is the part in one of
    the ways in which it is rewritten for cuDNN ("": the first of them). Times are
    medians in microseconds, None where there was no such contender;
    ``contenders_us`` has those of the contenders that were added.
    ``first_ratio`` is the kernel time of the plan that runs untuned over that of the
    best plan.
    """

    op: str
    operands: str
    implementation: str
    plan: str = ""
    rewritten: str = ""
    cudnn_us: float | None = None
    first_ratio: float | None = None
    xla_us: float | None = None
    contenders_us: tuple[tuple[str, float], ...] = ()

    @property
    def times_us(self) -> dict[str, float]:
        """The times of all that ran, by the name of the implementation."""
        own = {"cudnn": self.cudnn_us, "xla": self.xla_us}
        ran = {name: us for name, us in own.items() if us is not None}
        return {**ran, **dict(self.contenders_us)}

    @property
    def fastest(self) -> str:
        """The fastest implementation; cuDNN, then XLA, where others are not faster."""
        times = self.times_us
        return min(times, key=lambda name: times[name], default="xla")

    @property
    def is_contenders(self) -> bool:
        """Whether neither cuDNN nor XLA was the fastest."""
        return self.implementation not in OWN

    def without_contenders(self) -> "Choice":
        """Return the choice between cuDNN and XLA, by the same measurement."""
        own = dataclasses.replace(self, contenders_us=())
        return dataclasses.replace(own, implementation=own.fastest)


@dataclass(frozen=True, order=True, slots=True)
class Key:
    """The key of a choice: a GPU and cuDNN by name, and a digest of the graph.

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
    return Key(target.name, target.cudnn_version, digest_of(graph, allowed))


@functools.lru_cache(maxsize=8192)
def digest_of(graph: Graph, allowed: str = "") -> str:
    """Return what stands for a graph, and for the text of a restriction, in a file."""
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

    def forget(self, keys: Iterable[Key]) -> None:
        """Remove the choices of these keys, as far as there are any."""
        with self._lock:
            gone = set(keys)
            kept = {k: v for k, v in self._choices.items() if k not in gone}
            self._choices = kept
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


@dataclass(frozen=True, eq=False)
class Trial:
    """Choices for one program that is compiled to be timed, before all others.

    None stands for a part that was not measured. Two trials are never equal, so that
    what was decided in one is not remembered for another.
    """

    choices: Mapping[Key, Choice | None]


def chosen(
    graph: Graph, target: Target, allowed: str = "", trial: Trial | None = None
) -> Choice | None:
    """Return the choice that is in force for a part of a graph, if there is one."""
    if trial is not None:
        key = key_of(graph, target, allowed)
        if key in trial.choices:
            return trial.choices[key]
    return table().get(graph, target, allowed)


@functools.cache
def table() -> ChoiceTable:
    """Return the process's choices: the shipped ones, then those kept on disk."""
    result = ChoiceTable()
    result.add(shipped())
    result.add(kept())
    return result


def shipped() -> dict[Key, Choice]:
    """Return the choices that come with the package."""
    paths = sorted(_SHIPPED.glob("*.json"))
    return {key: each for path in paths for key, each in read(path).items()}


def kept_file() -> Path | None:
    """Return the cache folder's file of choices, whether it is there or not.

    A release that writes another form has a file of its own.
    """
    directory = cache.settings().directory
    return None if directory is None else directory / f"choices-{SCHEMA}.json"


def kept_files() -> list[Path]:
    """Return the files of choices that are there, those of other releases too."""
    directory = cache.settings().directory
    return [] if directory is None else sorted(directory.glob("choices-*.json"))


def kept() -> dict[Key, Choice]:
    """Return the choices of the cache folder; none, and a debug line, if it is bad."""
    path = kept_file()
    if path is None:
        return {}
    try:
        return read(path)
    except FileNotFoundError:
        return {}
    except (GraphError, OSError) as error:
        _log.debug("the choices kept on disk are ignored: %s", error)
        return {}


def remember(found: Mapping[Key, Choice]) -> None:
    """Use choices from now on, and keep them for the processes to come.

    What other processes kept meanwhile stays; a disk that takes nothing is a debug
    line, no error.
    """
    table().add(found)
    path = kept_file()
    if path is None or not found:
        return
    try:
        with cache.exclusive(path.parent):
            cache.remove_unfinished(path)
            text = to_text(_within_bounds(kept(), found), "plans.autotune")
            cache.replace_file(path, lambda file: file.write(text.encode("ascii")))
    except OSError as error:
        _log.debug("choices are not kept on disk: %s", error)


def _within_bounds(
    old: Mapping[Key, Choice], found: Mapping[Key, Choice]
) -> dict[Key, Choice]:
    """Return all that was found, and of the old as much as there is room for.

    What is for other GPUs and other versions of cuDNN goes first.
    """
    current = {(key.device, key.cudnn) for key in found}
    rest = sorted(
        old.keys() - found.keys(),
        key=lambda key: ((key.device, key.cudnn) not in current, key),
    )
    room = max(0, _MOST_KEPT - len(found))
    return {**{key: old[key] for key in rest[:room]}, **found}


def write(path: Path, choices: Mapping[Key, Choice], made: str) -> None:
    """Write a choices file; ``made`` says how it was made."""
    path.write_text(to_text(choices, made), encoding="ascii")


def to_text(choices: Mapping[Key, Choice], made: str) -> str:
    """Return the text of a choices file."""
    lines = [
        json.dumps({**dataclasses.asdict(key), **_entry_of(choice)}, sort_keys=True)
        for key, choice in sorted(choices.items())
    ]
    head = f'{{"schema": {SCHEMA}, "made": {json.dumps(made)}, "choices": [\n'
    return head + ",\n".join(lines) + "\n]}\n"


def _entry_of(choice: Choice) -> dict[str, Any]:
    """Return a choice as plain data; without contenders as before there were any."""
    entry = dataclasses.asdict(choice)
    times = dict(entry.pop("contenders_us"))
    return {**entry, "contenders_us": times} if times else entry


def read(path: Path) -> dict[Key, Choice]:
    """Read a choices file, or raise GraphError naming what is wrong with it."""
    return from_bytes(path.read_bytes(), str(path))


def from_bytes(data: bytes, where: str) -> dict[Key, Choice]:
    """Read the contents of a choices file; ``where`` it is goes into the message."""
    try:
        tree = json.loads(data.decode("ascii"))
        if tree["schema"] != SCHEMA:
            raise GraphError(
                f"{where}: schema {tree['schema']} is not {SCHEMA}, the form that this "
                "release reads. Tune again and save, with this release."
            )
        entries = cast("Iterable[dict[str, Any]]", tree["choices"])
        return dict(_read_entry(dict(entry)) for entry in entries)
    except GraphError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GraphError(
            f"{where} is not a choices file: {error!r}. plans.autotune(...).save(path) "
            "writes one."
        ) from error


_NAMES = [field.name for field in dataclasses.fields(Key)]


def _read_entry(entry: dict[str, Any]) -> tuple[Key, Choice]:
    key = Key(**{name: entry.pop(name) for name in _NAMES})
    times = entry.pop("contenders_us", {})
    if not isinstance(times, dict):
        raise TypeError(f"contenders_us is {times!r}")
    times = cast("dict[str, Any]", times)
    choice = Choice(**entry, contenders_us=tuple(sorted(times.items())))
    if choice.implementation not in (*OWN, *times):
        raise ValueError(f"implementation {choice.implementation!r}")
    names = (key.device, key.graph, choice.op, choice.operands)
    texts = (*names, choice.plan, choice.rewritten)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"not all of {texts} are strings")
    if type(key.cudnn) is not int or key.cudnn < 0:
        raise ValueError(f"{key.cudnn!r} is not a version")
    own = (choice.cudnn_us, choice.first_ratio, choice.xla_us)
    for time in (*(each for each in own if each is not None), *times.values()):
        if type(time) not in (int, float) or not 0 <= time <= sys.float_info.max:
            raise TypeError(f"{time!r} is not a time")
    return key, choice
