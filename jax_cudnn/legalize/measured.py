# SPDX-License-Identifier: Apache-2.0
"""Who runs a contraction by default, and by which plan, as others like it were faster?

"auto" leaves some classes of them to XLA, and cuDNN's first plan gives way to another
one where that was faster. The rules are in data/rules/rules.json.
`python -m scripts.default_rules` makes them from times of random calls on a GPU
(benchmarks/untuned.py). A rule holds for one class of kernels, within the sizes that
were measured. What was measured for a graph itself goes before (choices.py).
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_cudnn.graph import Graph, Node, Target, is_anchor, kind_named
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.shapes import check_tensors
from jax_cudnn.legalize.conv_channels import is_faster_with_more
from jax_cudnn.legalize.conv_pairs import pairs

_FILE = Path(__file__).parent.parent / "data" / "rules" / "rules.json"
_KINDS = ("conv_dgrad", "conv_fprop", "conv_wgrad", "matmul")
_BITS = {"bf16": "16 bits", "f16": "16 bits", "f32": "f32"}
# XLA has kernels that add to a contraction's result, and that take its relu.
_SUMS = frozenset({"add", "identity"})
# Products of so few rows are bound by reading the other matrix. Text is generated so.
_FEW_ROWS = 64
# What rules may ask for: sizes of the product that a contraction is like.
FEATURES: Sequence[str] = ("rows", "columns", "depth", "work")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """When XLA runs kernels of a class, and from how many that is known.

    XLA runs those whose ``feature`` is between ``least`` and ``most``; all of them
    where no feature is named. ``sizes`` has the least and the most of each feature that
    were measured, outside of which the rule says nothing. ``ratio`` is the geometric
    mean of the time of cuDNN's first plan over that of XLA's code, in the ``count``
    kernels that the rule gives to XLA; 0 of them says that cuDNN runs the class.
    """

    feature: str = ""
    least: float = -math.inf
    most: float = math.inf
    sizes: Mapping[str, tuple[float, float]] = field(default_factory=lambda: {})
    ratio: float = 1.0
    count: int = 0

    def holds(self, sizes: Mapping[str, float]) -> bool:
        """Whether XLA is to run a kernel of these sizes."""
        if not self.count:
            return False
        is_known = all(
            low <= sizes[name] <= high for name, (low, high) in self.sizes.items()
        )
        return is_known and (
            not self.feature or self.least <= sizes[self.feature] <= self.most
        )


def slower(part: Graph) -> str:
    """Say why "auto" leaves a part with one contraction to XLA, if it does."""
    name = class_of(part)
    if not name:
        return ""
    rule = rule_for(name, rules())
    if rule is None or not rule.holds(sizes_of(part)):
        return ""
    return (
        f"in {rule.count} measured kernels like this one ({name}) cuDNN's first plan "
        f"took {rule.ratio:.2f} of the time of XLA's code: plans.autotune finds the "
        "best of both"
    )


def rule_for(name: str, known: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a class: its own, or that of the class it belongs to."""
    return known.get(name, known.get(general(name)))


def class_of(part: Graph) -> str:
    """Return which kernels are like a part, "" where no rule is for it."""
    node = _contraction(part)
    if node is None:
        return ""
    bits = {_BITS.get(part.tensor(name).dtype, "") for _, name in node.inputs}
    if len(bits) != 1 or "" in bits:
        return ""
    row = kind_named(node.kind).row
    sizes = check_tensors(row, roles_in(part, node), node.attributes)
    if sizes.get("g", 1) > 1 and sizes["c"] == 1:
        return ""  # Depthwise convolutions have a rule of their own (conv.py).
    words = [node.kind, *bits, _tail(part)]
    windows = [size for letter, size in sizes.items() if letter.startswith("f")]
    if windows and (is_faster_with_more(part, node) or pairs(part, node)):
        return ""  # Another convolution runs, which was faster wherever measured.
    if windows:
        words.append(f"{len(windows)} axes")
        words += ["windows of 1"] if max(windows) == 1 else []
        words += ["groups"] if sizes["g"] > 1 else []
    elif sizes["b"] > 1:
        words.append("batched")
    elif sizes["m"] <= _FEW_ROWS:
        words.append("few rows")
    return ", ".join(words)


def general(name: str) -> str:
    """Return the class that a class belongs to: any windows, and any more arrays.

    Batches and groups of products are none of it. Products of few rows are a class.
    """
    words = name.split(", ")
    if {"batched", "groups"} & {*words}:
        return name
    kept = (word for word in words if word.endswith(" axes") or word == "few rows")
    return ", ".join([*words[:3], *kept])


def sizes_of(part: Graph) -> dict[str, float]:
    """Return rows, columns, depth and work of the product that a part is like.

    A product of (m, r) and (r, n) has arrays of mr, rn and mn elements, and each of m,
    n and r follows from these three numbers. So they do for a convolution.
    """
    node = _contraction(part)
    assert node is not None
    a, b, c = (
        math.prod(part.tensor(name).dims) for _, name in (*node.inputs, *node.outputs)
    )
    rows, columns, depth = (
        math.sqrt(a * c / b),
        math.sqrt(b * c / a),
        math.sqrt(a * b / c),
    )
    work = rows * columns * depth
    return {"rows": rows, "columns": columns, "depth": depth, "work": work}


def slow_engines(part: Graph, target: Target | None) -> tuple[int, ...]:
    """Return engines of cuDNN that were slow wherever such a kernel was measured.

    A number stands for another engine on another architecture.
    """
    node = _contraction(part)
    data = _read()
    if node is None or target is None or target.sm_version != data["sm_version"]:
        return ()
    return tuple(data["slow_engines"].get(node.kind, ()))


def preference(part: Graph, target: Target | None) -> str:
    """Return the request for the plan that is to be tried first, "" for cuDNN's own.

    Numbers stand for other engines and knobs in another cuDNN, or for another GPU.
    """
    node, data = _contraction(part), _read()
    if node is None or target is None or target.sm_version != data["sm_version"]:
        return ""
    bits = {_BITS.get(part.tensor(name).dtype) for _, name in node.inputs}
    for each in data["preferred"]:
        is_measured = target.cudnn_version // 100 == each["cudnn"] // 100
        is_like = node.kind == each["kind"] and bits == {each["bits"]}
        is_like = is_like and len(part.nodes) > 1
        low, high = each["work"]
        if is_measured and is_like and low <= sizes_of(part)["work"] < high:
            request = {"first": each["knobs"], "of_engine": each["engine"]}
            return json.dumps(request, sort_keys=True, separators=(",", ":"))
    return ""


@functools.cache
def rules() -> Mapping[str, Rule]:
    """Return the rules by their class."""
    return read_rules(_read()["rules"])


def read_rules(entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Rule]:
    """Return rules by their class, given as the file has them."""
    return {entry["class"]: _rule(entry) for entry in entries}


@functools.cache
def _read() -> dict[str, Any]:
    return json.loads(_FILE.read_text())


def _rule(entry: Mapping[str, Any]) -> Rule:
    given = {name: value for name, value in entry.items() if value is not None}
    sizes = given.pop("sizes", {})
    del given["class"]
    return Rule(
        sizes={name: (low, high) for name, (low, high) in sizes.items()}, **given
    )


def _contraction(part: Graph) -> Node | None:
    found = [node for node in part.nodes if is_anchor(node)]
    return found[0] if len(found) == 1 and found[0].kind in _KINDS else None


def _tail(part: Graph) -> str:
    """Return what is around the contraction, in a word or two."""
    modes = {
        getattr(node.attributes, "mode", "")
        for node in part.nodes
        if not is_anchor(node)
    }
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
