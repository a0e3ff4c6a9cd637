# SPDX-License-Identifier: Apache-2.0
"""Says which kernels are most like a contraction, and which plans go first or last.

"auto" leaves a contraction to XLA where cuDNN's first plan was not faster for the
measured ones most like it (nearest.py), and that plan gives way to another one where
that was faster. A table's ``kernels``, ``slow_engines``, ``preferred`` and ``engines``
have the measured ones. `python -m scripts.default_rules` writes those of the package,
from times of random calls on a GPU, and calibration/ those of a machine.
"""

import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_cudnn.graph import Graph, Node, Target, is_anchor, kind_named, label
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.products.conv import TRIPLES, arrays_in, conv_attributes
from jax_cudnn.graph.shapes import check_tensors
from jax_cudnn.legalize.products import conv, conv_depthwise, conv_groups
from jax_cudnn.policy.nearest import Kernel
from jax_cudnn.policy.products.orders import becomes_of_groups, first_rewrite
from jax_cudnn.policy.tables import Table, Tables

KINDS = (*TRIPLES, "matmul")
_BITS = {"bf16": "16 bits", "f16": "16 bits", "f32": "f32"}
_WIDTHS = ("16 bits", "f32")
# XLA has kernels that add to a contraction's result, and that take its relu.
_SUMS = frozenset({"add", "identity"})
_OF_ONES, _GROUPS = "windows of 1", "groups"
# A table of so many knows the slow engines.
_MANY_KERNELS = 1000
# Of random calls, those that are not in groups have as many channels, in and out.
_FEWEST_CHANNELS = 32
# Products of so few rows are bound by reading the other matrix. Text is generated so.
_FEW_ROWS = 64
# The steps of convolutions that were measured.
_LONGEST_STEP = 2


@functools.lru_cache(maxsize=4096)
def class_of(part: Graph, tables: Tables) -> str:
    """Return which kernels are like a part, "" where nothing says so."""
    node = _contraction(part)
    if node is None or part.has_empty_tensor:
        return ""
    bits = _bits(part, node)
    if not bits:
        return ""
    row = kind_named(node.kind).row
    sizes = check_tensors(row, roles_in(part, node), node.attributes)
    if sizes.get("g", 1) > 1 and sizes["c"] == 1:
        return ""  # Depthwise ones have rows of their own.
    words = [node.kind, bits, _tail(part)]
    windows = [size for letter, size in sizes.items() if letter.startswith("f")]
    if windows and (first_rewrite(part, tables) != conv.PLAIN):
        return ""  # Another convolution runs, which was faster wherever measured.
    if windows:
        words.append(f"{len(windows)} axes")
        words += [_OF_ONES] if max(windows) == 1 else []
        if sizes["g"] > 1:
            rewrite = becomes_of_groups(part, tables)
            words += (
                [_GROUPS] if rewrite == conv_groups.AS_IT_IS else [_GROUPS, rewrite]
            )
    elif sizes["b"] > 1:
        words.append("batched")
    elif sizes["m"] <= _FEW_ROWS:
        words.append("few rows")
    return ", ".join(words)


def is_unlike_all(part: Graph) -> bool:
    """Whether a convolution is so that no measured one says how fast XLA's code is.

    Measured ones have steps of 1 or 2, no holes and no zeros between elements of x. For
    gradients with these, `jax.lax` took up to 150 times as long as PyTorch
    (docs/internals/measured/conv_reports.md). What XLA gets of them now
    (reference/products/shifted.py) was not measured beside cuDNN.
    """
    node = _contraction(part)
    if node is None or node.kind not in TRIPLES:
        return False
    attributes = conv_attributes(node)
    if max(attributes.lhs_dilation) > 1:
        return True
    is_usual = max(attributes.window_strides) <= _LONGEST_STEP
    has_holes = max(attributes.rhs_dilation) > 1
    return node.kind != "conv_fprop" and (has_holes or not is_usual)


@functools.lru_cache(maxsize=4096)
def kernel_of(part: Graph, tables: Tables) -> Kernel | None:
    """Return the class and the sizes of a part, None where nothing says so.

    A product of (m, r) and (r, n) has arrays of mr, rn and mn elements, and each of m,
    n and r follows from these three numbers. So they do for a convolution. Products in
    a batch are like one of all their rows.
    """
    node, name = _contraction(part), class_of(part, tables)
    if node is None or not name:
        return None
    names = (*node.inputs, *node.outputs)
    one, other, result = (part.tensor(name).dims for _, name in names)
    if node.kind == "matmul":
        batch, rows, columns = result
        return Kernel(name=name, rows=batch * rows, columns=columns, depth=one[2])
    a, b, c = map(math.prod, (one, other, result))
    return Kernel(
        name=name,
        rows=math.sqrt(a * c / b),
        columns=math.sqrt(b * c / a),
        depth=math.sqrt(a * b / c),
    )


def engines_names(name: str) -> list[str]:
    """Return what slow engines are told by for kernels of a class.

    What is slow for others is so for groups, too.
    """
    every = ", ".join(kind_and_bits(name))
    return [every, f"{every}, {_GROUPS}"] if is_of_groups(name) else [every]


def slow_engines(part: Graph, target: Target | None, tables: Tables) -> tuple[int, ...]:
    """Return engines of cuDNN that XLA's code was faster than, for such kernels.

    Operands of widths that were not measured, and convolutions that are unlike those
    that were, have those that all others have. A number stands for another engine on
    another architecture.
    """
    node = _contraction(part)
    if node is None:
        return ()
    slow = _slow(target, tables)
    found = [
        {e for name in names for e in slow.get(name, _Slow()).engines}
        for names in _names_of_engines(part, node, tables)
    ]
    own = own_engines(part, tables)
    return tuple(sorted(set.intersection(*found).difference(own)))


def _names_of_engines(part: Graph, node: Node, tables: Tables) -> list[list[str]]:
    """Return the names of slow engines for a part, for each width it may have."""
    bits = _bits(part, node)
    groups = f", {_GROUPS}" if is_of_groups(class_of(part, tables)) else ""
    each = [bits] if bits and not is_unlike_all(part) else _WIDTHS
    return [engines_names(f"{node.kind}, {one}{groups}") for one in each]


@dataclass(frozen=True, slots=True)
class _Slow:
    """Slow engines of a name, and the tables that say so."""

    engines: frozenset[int] = frozenset()
    tables: tuple[Table, ...] = ()


def _slow(target: Target | None, tables: Tables) -> Mapping[str, _Slow]:
    """Return the slow engines of each name, by the nearest tables of the architecture.

    A table of few kernels adds to the next one.
    """
    found: dict[str, _Slow] = {}
    for table in tables.tables:
        if not table.is_of_architecture(target):
            continue
        for name, engines in table.data.get("slow_engines", {}).items():
            known = found.get(name, _Slow())
            found[name] = _Slow(known.engines.union(engines), (*known.tables, table))
        if len(table.data.get("kernels", ())) >= _MANY_KERNELS:
            break
    return found


def engines_source(part: Graph, target: Target | None, tables: Tables) -> str:
    """Say where the slow engines for a part were measured."""
    node, slow = _contraction(part), _slow(target, tables)
    if node is None:
        return ""
    names = itertools.chain.from_iterable(_names_of_engines(part, node, tables))
    every = (table for name in names for table in slow.get(name, _Slow()).tables)
    shown = dict.fromkeys(table.source(target) for table in every)
    return ", ".join(f"engines {each}" for each in shown)


def own_engines(part: Graph, tables: Tables) -> tuple[int, ...]:
    """Return the numbers of cuDNN's engines for a convolution, if it is depthwise."""
    node = _contraction(part)
    if node is None or node.kind not in TRIPLES:
        return ()
    if not conv_depthwise.is_depthwise(part, node):
        return ()
    wanted = {"way": conv_depthwise.OWN, "kind": node.kind}
    rows = (
        x
        for x in tables.about("depthwise").rows
        if x.of == "depthwise" and x.when == wanted
    )
    return next((row.fast_engines for row in rows), ())


def _bits(part: Graph, node: Node) -> str:
    """Return how wide a contraction's operands are, "" where nothing was measured."""
    bits = {_BITS.get(part.tensor(name).dtype, "") for _, name in node.inputs}
    return bits.pop() if len(bits) == 1 else ""


def preference(part: Graph, target: Target | None, tables: Tables) -> str:
    """Return the request for the plan that is to be tried first, "" for cuDNN's own.

    Numbers may stand for other engines and knobs in another cuDNN, and do for another
    architecture.
    """
    kernel = kernel_of(part, tables)
    if kernel is None or target is None:
        return ""
    wanted: dict[int, list[dict[str, Any]]] = {}
    for table in reversed(tables.tables):
        if not table.is_of_architecture(target):
            continue
        for each in table.data.get("engines", ()):
            is_like = is_ordered(each, kernel) and _has_measured_channels(part, tables)
            if is_like and is_measured(each, target):
                wanted[each["first"]] = [{"engine": x} for x in each["before"]]
        for each in table.data.get("preferred", ()):
            if is_preferred(each, kernel, label(part)) and is_measured(each, target):
                engine = each["engine"]
                wanted[engine] = [{"engine": engine, "knobs": x} for x in each["knobs"]]
    if not wanted:
        return ""
    # Such as {"preferred": [{"first_engine": 28, "wanted": [{"engine": 71}]}]}: where
    # cuDNN lists a plan of engine 28 first, a plan of engine 71 is tried before it.
    preferred = [
        {"first_engine": engine, "wanted": each}
        for engine, each in sorted(wanted.items())
    ]
    return json.dumps({"preferred": preferred}, sort_keys=True, separators=(",", ":"))


def is_measured(rule: Mapping[str, Any], target: Target) -> bool:
    """Whether a rule holds for a target's cuDNN, by major and minor version.

    It was measured with ``cudnn``, and holds up to the version ``to`` if there is one.
    """
    first, last = rule["cudnn"], rule.get("to", rule["cudnn"])
    return first // 100 <= target.cudnn_version // 100 <= last // 100


def is_preferred(preferred: Mapping[str, Any], kernel: Kernel, op: str) -> bool:
    """Whether a preference is about a kernel: those with something around them."""
    low, high = preferred["work"]
    is_like = kind_and_bits(kernel.name) == (preferred["kind"], preferred["bits"])
    return is_like and "+" in op and low <= kernel.work < high


def is_ordered(order: Mapping[str, Any], kernel: Kernel) -> bool:
    """Whether an order of engines is about a kernel."""
    is_like = kind_and_bits(kernel.name) == (order["kind"], order["bits"])
    has_ones = is_of_ones(kernel.name) == order["windows_of_1"]
    has_groups = is_of_groups(kernel.name) == order["groups"]
    return is_like and has_ones and has_groups


def is_of_groups(name: str) -> bool:
    """Whether a class is of convolutions in groups."""
    return _GROUPS in name


def is_of_ones(name: str) -> bool:
    """Whether a class is of convolutions with windows of 1."""
    return _OF_ONES in name


def kind_and_bits(name: str) -> tuple[str, str]:
    """Return the kind of contractions in a class, and the bits of their operands."""
    kind, bits, *_ = name.split(", ")
    return kind, bits


def _has_measured_channels(part: Graph, tables: Tables) -> bool:
    """Whether a convolution has as many channels as those that were measured.

    Those in groups may have as few as 2 in each.
    """
    node = _contraction(part)
    assert node is not None
    _, w, _ = arrays_in(part, node)
    return is_of_groups(class_of(part, tables)) or min(w.dims[:2]) >= _FEWEST_CHANNELS


def _contraction(part: Graph) -> Node | None:
    found = [node for node in part.nodes if is_anchor(node)]
    return found[0] if len(found) == 1 and found[0].kind in KINDS else None


def _mode(node: Node) -> str:
    """Return the mode of a pointwise node or a reduction; "" where there is none."""
    mode = getattr(node.attributes, "mode", "")
    is_leaky = getattr(node.attributes, "alpha", 0) != 0 and mode.startswith("relu")
    return f"leaky_{mode}" if is_leaky else mode


def _tail(part: Graph) -> str:
    """Return what is around the contraction, in a word or two."""
    modes = {_mode(node) for node in part.nodes if not is_anchor(node)}
    modes.discard("")
    gradients = [mode for mode in modes if mode.endswith("_grad")]
    if gradients:
        tail = f"gradient of {gradients[0].removesuffix('_grad')}"
    elif rest := modes - _SUMS:
        tail = "relu" if rest == {"relu"} else "more"
    else:
        tail = "sums" if "add" in modes else "alone"
    node = _contraction(part)
    assert node is not None
    (result,) = (math.prod(part.tensor(name).dims) for _, name in node.outputs)
    own = {name for _, name in node.inputs}
    arrays = [t for t in part.input_tensors if t.name not in own]
    sizes = [math.prod(each.dims) for each in (*arrays, *part.output_tensors)]
    more = max(0, sizes.count(result) - 1)
    return tail + (f", {more} more arrays" if more else "")
