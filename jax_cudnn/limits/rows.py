# SPDX-License-Identifier: Apache-2.0
"""Defines a row of the table of limits: a bug or a lack of some cuDNNs and GPUs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from jax_cudnn.graph import Graph, Node, Target, Tensor, version_text
from jax_cudnn.graph.kinds import roles_in

# Versions as cudnnGetVersion returns them, and ten times the compute capability.
ALL_VERSIONS: Final = range(1_000_000)
ALL_GPUS: Final = range(10_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A bug or a lack of some versions on some GPUs, and what is done about it.

    It is of ``versions`` on ``gpus``, or, if it is ``elsewhere``, of all but these.
    ``what`` and ``done`` say what is wrong and what jax_cudnn does about it, ``source``
    where that is from, as Markdown. ``words`` is what a user is told in place of
    ``what``, a format of the ``target`` and of tensors by role.
    """

    what: str
    done: str
    source: str
    words: str = ""
    versions: range = ALL_VERSIONS
    gpus: range = ALL_GPUS
    elsewhere: bool = False
    is_of_unknown: bool = False

    @property
    def is_general(self) -> bool:
        """Whether it is of every cuDNN and every GPU."""
        return (self.versions, self.gpus) == (ALL_VERSIONS, ALL_GPUS)

    @property
    def fixed(self) -> int | None:
        """The first cuDNN after those that have it, if there is one."""
        is_open = self.elsewhere or self.versions.stop == ALL_VERSIONS.stop
        return None if is_open else self.versions.stop

    def is_of(self, sm_version: int, cudnn_version: int) -> bool:
        """Whether a GPU with a cuDNN has it."""
        is_named = sm_version in self.gpus and cudnn_version in self.versions
        return is_named != self.elsewhere

    def is_here(self, target: Target | None) -> bool:
        """Whether a target has it.

        A target of None stands for an unknown one. It has what is general, and the rows
        whose workaround is right for every GPU (``is_of_unknown``).
        """
        if target is None:
            return self.is_general or self.is_of_unknown
        return self.is_of(target.sm_version, target.cudnn_version)

    @property
    def where(self) -> str:
        """The versions and GPUs in words, such as "cuDNN 9.8 to 9.14"."""
        words: list[str] = []
        if self.versions != ALL_VERSIONS:
            words.append(f"cuDNN {_span(self.versions)}")
        if self.gpus != ALL_GPUS:
            words.append(_span_of_gpus(self.gpus))
        return ("all but " if self.elsewhere else "") + " on ".join(words)

    @property
    def reason(self) -> str:
        """The text of a refusal: what is wrong, where, and the first cuDNN without."""
        reason = self.what if self.is_general else f"{self.where}: {self.what}"
        if self.fixed is None:
            return reason
        return f"{reason}. Use cuDNN {_short(self.fixed)} or newer"

    def message(self, target: Target | None, roles: Mapping[str, Tensor]) -> str:
        """Return the message for a user of a target, given the tensors of a node."""
        if not self.words:
            return self.reason
        cudnn = version_text(target.cudnn_version) if target is not None else "this"
        return self.words.format(cudnn=cudnn, target=target, **roles)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit(Row):
    """A row of nodes of some ``kinds``, where ``holds`` says so of a graph and a node.

    Legalisation drops the graphs that it is met by. One that is ``lacking`` is of all
    that was asked for, even where it would be written without such a node. The doctor
    warns neither of these nor of one that is no fault: where another way does as well.
    """

    kinds: frozenset[str]
    holds: Callable[[Graph, Node], bool]
    lacking: bool = False
    is_fault: bool = True

    def is_met(self, graph: Graph, target: Target | None) -> bool:
        """Whether it is in the way of a graph on a target."""
        return self.is_here(target) and bool(self._nodes(graph))

    def message_for(self, graph: Graph, target: Target | None) -> str:
        """Return the message for a user whose graph meets it."""
        return self.message(target, roles_in(graph, self._nodes(graph)[0]))

    def _nodes(self, graph: Graph) -> list[Node]:
        nodes = [node for node in graph.nodes if node.kind in self.kinds]
        return [node for node in nodes if self.holds(graph, node)]


def always(_: Graph, __: Node) -> bool:
    """Hold of every node."""
    return True


def _span(versions: range) -> str:
    """Return versions in words, such as "9.8 to 9.14", "9.10.0" or "9.28 and newer"."""
    first, stop = versions.start, versions.stop
    if stop == ALL_VERSIONS.stop:
        return f"{_short(first)} and newer"
    is_whole = stop % 100 == 0
    last = _short(stop - 100) if is_whole else version_text(stop - 1)
    if first == 0:
        return f"up to {last}"
    first_text = _short(first) if is_whole else version_text(first)
    return first_text if first_text == last else f"{first_text} to {last}"


def _span_of_gpus(gpus: range) -> str:
    """Return GPUs in words, such as "sm_100 to sm_109" or "GPUs before sm_80"."""
    first, last = gpus[0], gpus[-1]
    if gpus.start == ALL_GPUS.start:
        return f"GPUs before sm_{gpus.stop}"
    if gpus.stop == ALL_GPUS.stop:
        return f"sm_{first} and newer"
    return f"sm_{first}" if first == last else f"sm_{first} to sm_{last}"


def _short(version: int) -> str:
    """Return a version without a last number that is 0."""
    return version_text(version).removesuffix(".0")
