# SPDX-License-Identifier: Apache-2.0
"""Counts what a compiled program sends between devices, and what XLA's kernels move.

The program is given as HLO's text, for a GPU or a CPU. XLA's CPU computes in f32 what
is bf16 and in f16 what is f8, so there bytes are those of the wider dtype.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

# Of a number, by the dtype as HLO names it.
BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2,
    "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_LINE = re.compile(
    r" +(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\([^=]*?\)|\S+) "
    r"(?P<op>[\w\-]+)\((?P<operands>.*?)\)(?P<rest>.*)"
)
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(body|condition|calls|to_apply|\w+_computation)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GEMM = re.compile(r'"kind":"__triton\w*gemm')
# How much of its operand a device receives of n - 1 others, given n.
_RECEIVED = {
    "all-gather": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "reduce-scatter": lambda n: (n - 1) / n,
}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Collectives of a kind on one dtype, as a device runs them in one call.

    ``received`` is the number of bytes that the device gets of others; of an all-reduce
    it is that of a ring.
    """

    kind: str
    dtype: str
    count: int
    received: float


def traffic(text: str) -> list[Sent]:
    """Return what a program sends, by kind and dtype; conditionals count in full."""
    blocks = dict(blocks_of(text))
    devices = int((re.search(r"num_partitions=(\d+)", text) or [0, 1])[1])
    found: dict[tuple[str, str], Sent] = {}
    for name, times in _times(blocks):
        types = {line["name"]: line["type"] for line in blocks[name]}
        for line in blocks[name]:
            kind = line["op"].removesuffix("-start")
            if kind not in _RECEIVED:
                continue
            share = _RECEIVED[kind](_group(line["rest"], devices))
            for operand in re.findall(r"[\w.\-]+", _bare(line["operands"])):
                for dtype, dims in _ARRAY.findall(types.get(operand, "")):
                    size = math.prod(map(int, dims.split(","))) if dims else 1
                    key = kind, dtype
                    before = found.get(
                        key, Sent(kind=kind, dtype=dtype, count=0, received=0.0)
                    )
                    found[key] = replace(
                        before,
                        count=before.count + times,
                        received=before.received
                        + times * share * size * BYTES.get(dtype, 0),
                    )
    return [found[key] for key in sorted(found)]


def received(text: str) -> list[list[Any]]:
    """Return what `traffic` does, as lists of kind, dtype, count and MiB."""
    return [
        [x.kind, x.dtype, x.count, round(x.received / 2**20)] for x in traffic(text)
    ]


def told_of(rows: list[list[Any]]) -> str:
    """Return such lists as a cell of a table; scalars and the like are left out."""
    large = [row for row in rows if row[3]]
    told = (f"{count} {kind} {dtype}: {mib:,}" for kind, dtype, count, mib in large)
    return ", ".join(told) or "nothing"


def moved(text: str) -> list[list[int]]:
    """Return what XLA's own kernels read and write, in a program and each of its loops.

    These are pairs: how often it runs, and the MiB of one run. Custom calls, matrix
    multiplications and what is sent between devices are left out. Of an array that is
    cut or changed in place, the part counts.
    """
    blocks = dict(blocks_of(text))
    ways = (x for lines in blocks.values() for y in lines for x in called_by(y))
    runs = {"ENTRY", *(called for way, called in ways if way == "body")}
    return [
        [times, round(_moved_in(blocks, name) / 2**20)]
        for name, times in _times(blocks)
        if name in runs
    ]


def told_of_moved(rows: list[list[int]]) -> str:
    """Return such pairs as a cell of a table."""
    return ", ".join(f"{times} x {mib:,}" for times, mib in rows)


def called_by(line: re.Match[str]) -> list[tuple[str, str]]:
    """Return the computations that a line calls: how, and their names."""
    return _CALLED.findall(line["rest"])


def _moved_in(blocks: dict[str, list[re.Match[str]]], name: str) -> float:
    total = 0.0
    types = {line["name"]: line["type"] for line in blocks[name]}
    for line in blocks[name]:
        if line["op"] in ("fusion", "fusion-start") and not _GEMM.search(line["rest"]):
            ((_, called),) = called_by(line)
            lines = blocks[called]
            total += _written(lines)
            total += sum(
                min(size_of(types.get(each, "")), _read(lines, i))
                for i, each in enumerate(names_of(line))
            )
        elif line["op"] in ("copy", "transpose", "convert", "broadcast"):
            total += 2 * size_of(line["type"])
    return total


def _read(lines: list[re.Match[str]], parameter: int) -> float:
    """Return how many bytes of an operand a kernel reads."""
    (start,) = (
        line
        for line in lines
        if line["op"] == "parameter" and line["operands"] == str(parameter)
    )

    def of(line: re.Match[str]) -> float:
        total = 0.0
        for reader in (x for x in lines if line["name"] in names_of(x)):
            is_first = names_of(reader)[0] == line["name"]
            if reader["op"] in ("slice", "dynamic-slice") and is_first:
                total += size_of(reader["type"])
            elif reader["op"] == "bitcast":
                total += of(reader)
            elif not (reader["op"] == "dynamic-update-slice" and is_first):
                return math.inf
        return total

    return of(start)


def _written(lines: list[re.Match[str]]) -> float:
    """Return how many bytes a kernel writes, given its lines."""
    named = {line["name"]: line for line in lines}
    root = lines[-1]
    total = 0.0
    for line in map(named.get, names_of(root)) if root["op"] == "tuple" else [root]:
        while line is not None and line["op"] == "bitcast":
            line = named.get(names_of(line)[0])
        if line is not None and line["op"] == "dynamic-update-slice":
            line = named.get(names_of(line)[1])
        total += 0 if line is None else size_of(line["type"])
    return total


def names_of(line: re.Match[str]) -> list[str]:
    """Return the names of a line's operands."""
    return re.findall(r"[\w.\-]+", _bare(line["operands"]))


def size_of(type_: str) -> int:
    """Return the bytes of an array, or of the arrays of a tuple, by its type."""
    return sum(
        BYTES.get(dtype, 0) * math.prod(map(int, dims.split(",") if dims else ()))
        for dtype, dims in _ARRAY.findall(type_)
    )


def _bare(operands: str) -> str:
    """Return the operands' names without their types."""
    return re.sub(r"\w+\[[\d,]*\](\{[^}]*\})?|/\*.*?\*/", "", operands)


def blocks_of(text: str) -> Iterator[tuple[str, list[re.Match[str]]]]:
    """Yield the computations: names, "ENTRY" for the first to run, and their lines."""
    name, lines = "", list[re.Match[str]]()
    for line in re.sub(r"/\*.*?\*/", "", text).split("\n"):
        if head := _HEAD.match(line):
            name, lines = "ENTRY" if head[1] else head[2], []
        elif line.startswith("}") and name:
            yield name, lines
            name = ""
        elif name and (found := _LINE.match(line)):
            lines.append(found)


def _times(blocks: dict[str, list[re.Match[str]]]) -> Iterator[tuple[str, int]]:
    """Yield the computations that are run, and how often, once for each caller."""
    waiting = [("ENTRY", 1)]
    while waiting:
        name, times = waiting.pop()
        yield name, times
        for line in blocks[name]:
            trips = _TRIPS.search(line["rest"])
            for way, called in _CALLED.findall(line["rest"]):
                if called in blocks:
                    often = int(trips[1]) if way == "body" and trips else 1
                    waiting.append((called, times * often))
            several = re.search(r"branch_computations=\{(.*?)\}", line["rest"])
            for called in re.findall(r"[\w.\-]+", several[1] if several else ""):
                waiting.append((called, times))


def _group(rest: str, devices: int) -> int:
    """Return how many devices take part in one collective."""
    if "source_target_pairs=" in rest:
        return 2
    _, _, groups = rest.partition("replica_groups=")
    if numbered := re.match(r"\[\d+,(\d+)\]", groups):
        return int(numbered[1])
    if listed := re.match(r"\{\{([\d,]+)\}", groups):
        return len(listed[1].split(","))
    if groups.startswith("{}"):
        return devices
    # The devices may follow in an order of their own, between the sizes and the axes.
    if named := re.match(r"mesh\[(.*?)\](?:, device_ids=\S+)? \{(.*?)\}", groups):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        # An axis may be cut, as in 'axis_0':(2)4, which are 4 devices.
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(cut or sizes[name]) for name, cut in parts)
    raise ValueError(f"{rest!r} has no replica_groups in a form that is known here.")
