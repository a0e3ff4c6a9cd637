# SPDX-License-Identifier: Apache-2.0
"""What cuDNN does not take, or computes wrongly, with versions and GPUs: a row each.

Legalisation drops what a row is of, the doctor warns of it, and docs/known_bugs.md
lists the rows that are of some versions or GPUs only (python -m scripts.known_bugs).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from jax_cudnn.graph import Graph, Node, Target, version_text
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.graph.products.conv import TRIPLES
from jax_cudnn.graph.walks import leading_to, read_by

# Versions as cudnnGetVersion returns them, and ten times the compute capability.
_ALL_VERSIONS: Final = range(1_000_000)
_ALL_GPUS: Final = range(10_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A limit of nodes of some kinds, where ``holds`` says so of the graph and a node.

    ``what`` and ``done`` say what is wrong and what jax_cudnn does about it, ``source``
    where that is from, as Markdown.
    """

    kinds: frozenset[str]
    holds: Callable[[Graph, Node], bool]
    what: str
    done: str
    source: str
    versions: range = _ALL_VERSIONS
    gpus: range = _ALL_GPUS

    @property
    def is_general(self) -> bool:
        """Whether it is of every cuDNN and every GPU."""
        return (self.versions, self.gpus) == (_ALL_VERSIONS, _ALL_GPUS)

    @property
    def fixed(self) -> int | None:
        """The first cuDNN after those that have it, if there is one."""
        return None if self.versions.stop == _ALL_VERSIONS.stop else self.versions.stop

    def is_of(self, sm_version: int, cudnn_version: int) -> bool:
        """Whether a GPU with a cuDNN has it."""
        return sm_version in self.gpus and cudnn_version in self.versions

    def is_met(self, graph: Graph, target: Target | None) -> bool:
        """Whether it is in the way of a graph on a target.

        A target of None stands for an unknown one, which has general limits only.
        """
        if target is None:
            is_here = self.is_general
        else:
            is_here = self.is_of(target.sm_version, target.cudnn_version)
        return is_here and any(
            node.kind in self.kinds and self.holds(graph, node) for node in graph.nodes
        )

    @property
    def where(self) -> str:
        """The versions and GPUs in words, such as "cuDNN 9.8 to 9.14"."""
        words = (
            f"cuDNN {_span(self.versions)}" if self.versions != _ALL_VERSIONS else ""
        )
        if self.gpus == _ALL_GPUS:
            return words
        first, last = self.gpus[0], self.gpus[-1]
        gpus = f"sm_{first}" if first == last else f"sm_{first} to sm_{last}"
        return f"{words} on {gpus}" if words else gpus

    @property
    def reason(self) -> str:
        """What a user is told."""
        told = self.what if self.is_general else f"{self.where}: {self.what}"
        if self.fixed is None:
            return told
        return f"{told}. Use cuDNN {_short(self.fixed)} or newer"


def _span(versions: range) -> str:
    """Return versions in words, such as "9.8 to 9.14", "9.10.0" or "9.28 and newer"."""
    first, stop = versions.start, versions.stop
    if stop == _ALL_VERSIONS.stop:
        return f"{_short(first)} and newer"
    is_whole = stop % 100 == 0
    last = _short(stop - 100) if is_whole else version_text(stop - 1)
    if first == 0:
        return f"up to {last}"
    first_text = _short(first) if is_whole else version_text(first)
    return first_text if first_text == last else f"{first_text} to {last}"


def _short(version: int) -> str:
    """Return a version without a last number that is 0."""
    return version_text(version).removesuffix(".0")


def met(graph: Graph, target: Target | None) -> tuple[Limit, ...]:
    """Return the limits that are in the way of a graph on a target."""
    return tuple(limit for limit in LIMITS if limit.is_met(graph, target))


# --- what the rows are of -------------------------------------------------------------

_CONVOLUTIONS = frozenset(TRIPLES)
_ATTENTION = frozenset(
    {
        *("sdpa", "sdpa_backward", "sdpa_dropout", "sdpa_dropout_backward"),
        *("sdpa_qkv", "sdpa_qkv_backward", "sdpa_cached", "sdpa_paged"),
    }
)
_F8_ATTENTION = frozenset({"sdpa_f8"})


def _always(_: Graph, __: Node) -> bool:
    return True


def _is_large_grid(graph: Graph, node: Node) -> bool:
    """Whether there are more entries or heads than blocks along an axis of a grid."""
    roles = roles_in(graph, node)
    queries = roles["query"] if "query" in roles else roles["output"]
    return max(queries.dims[:2]) > 65535


def _is_3d(graph: Graph, node: Node, *dtypes: str) -> bool:
    """Whether a convolution has three spatial axes, and operands of a dtype."""
    operands = [graph.tensor(name) for _, name in node.inputs]
    has_dtype = any(operand.dtype in dtypes for operand in operands)
    return has_dtype and len(operands[0].dims) == 5


def _is_narrow_3d(graph: Graph, node: Node) -> bool:
    w = roles_in(graph, node)[TRIPLES[node.kind][1]]
    return _is_3d(graph, node, "bf16", "f16") and {*w.dims[2:]} != {1}


def _is_f32_3d(graph: Graph, node: Node) -> bool:
    return _is_3d(graph, node, "f32")


def _is_large_depthwise(graph: Graph, node: Node) -> bool:
    roles = roles_in(graph, node)
    x, w, output = (roles[role] for role in TRIPLES[node.kind])
    is_depthwise = w.dims[1] == 1 < x.dims[1]
    return is_depthwise and max(math.prod(x.dims), math.prod(output.dims)) >= 2**31


def _has_relu_before(graph: Graph, node: Node) -> bool:
    return any(
        isinstance(each.attributes, PointwiseAttributes)
        and each.attributes.mode.startswith("relu")
        for each in leading_to(graph.nodes, read_by([node]))
    )


def _is_one_group(graph: Graph, node: Node) -> bool:
    return roles_in(graph, node)["b"].dims[0] == 1


# --- the rows -------------------------------------------------------------------------

_BY_XLA = "XLA runs them, which may ask the same cuDNN"

LIMITS = (
    Limit(
        kinds=_ATTENTION | _F8_ATTENTION,
        holds=_is_large_grid,
        what="cuDNN's attention takes at most 65535 batch entries and 65535 heads",
        done="XLA runs it",
        # They are dimensions y and z of a launch grid.
        source="CUDA C++ Programming Guide, technical specifications",
    ),
    Limit(
        kinds=_ATTENTION,
        holds=_always,
        versions=range(91000, 91002),
        what="attention is wrong in some cases",
        done="XLA runs it",
        source='cudnn-frontend refuses it ("known bugs")',
    ),
    Limit(
        kinds=_F8_ATTENTION,
        holds=_always,
        versions=range(91000, 91001),
        what="there is no f8 attention",
        done="XLA runs it",
        source="cudnn-frontend refuses it",
    ),
    Limit(
        kinds=_CONVOLUTIONS,
        holds=_is_narrow_3d,
        versions=range(90800, 91500),
        what="3-D convolutions of bf16 and f16, and their gradients, may be wrong, "
        "but for windows of 1 x 1 x 1",
        done=_BY_XLA,
        source="[pytorch 163539](https://github.com/pytorch/pytorch/issues/163539), "
        "[163581](https://github.com/pytorch/pytorch/pull/163581), "
        "[166480](https://github.com/pytorch/pytorch/pull/166480). PyTorch turned off "
        "those that are stored channels-first; here all are channels-last, and which "
        "kernels are wrong was not published",
    ),
    Limit(
        kinds=_CONVOLUTIONS,
        holds=_is_f32_3d,
        versions=range(91002, 91600),
        what="3-D convolutions of f32 that is rounded to TF32, and their gradients, "
        "may be wrong",
        done=f"{_BY_XLA}; with precision='highest', nothing is rounded to TF32",
        source="[pytorch 167024](https://github.com/pytorch/pytorch/pull/167024)",
    ),
    Limit(
        kinds=_CONVOLUTIONS,
        holds=_is_large_depthwise,
        versions=range(91100, 91500),
        what="depthwise convolutions of arrays with 2^31 elements or more, and their "
        "gradients, are wrong",
        done=_BY_XLA,
        source="[pytorch 163171](https://github.com/pytorch/pytorch/pull/163171), "
        "[168364](https://github.com/pytorch/pytorch/pull/168364)",
    ),
    Limit(
        kinds=frozenset({"conv_wgrad"}),
        holds=_has_relu_before,
        gpus=range(100, 110),
        what="listing plans for a filter's gradient with a relu of an operand in the "
        "kernel ends the process",
        done="the relu is computed before the kernel",
        source="seen: planned without a GPU with the full 9.19.0 and 9.28.1 for a B200",
    ),
    Limit(
        kinds=frozenset({"grouped_matmul"}),
        holds=_is_one_group,
        versions=range(92800, _ALL_VERSIONS.stop),
        what="a grouped product with a single group is refused",
        done="it is a plain product, with every version",
        source="seen: planned without a GPU with 9.28.1, for sm_80 to sm_100; 9.19.0 "
        "and 9.27.0 plan it",
    ),
)


# --- the page -------------------------------------------------------------------------


def table() -> str:
    """Return the rows that are of some versions or GPUs only, as a Markdown table."""
    lines = ["| cuDNN, GPUs | bug | what is done | seen or reported |"]
    lines += ["| --- | --- | --- | --- |"]
    lines += [
        f"| {limit.where} | {limit.what} | {limit.done} | {limit.source} |"
        for limit in LIMITS
        if not limit.is_general
    ]
    return "\n".join(lines) + "\n"
