# SPDX-License-Identifier: Apache-2.0
"""Schedules which queries meet which keys on each device: numbers, no arrays.

A sequence is cut into chunks of equal length. In contiguous order device i of n holds
chunk i; in zigzag order chunks i and 2n - 1 - i. In striped order device i holds every
n-th token, from token i on. A device's tokens are in ascending order in all of them.
Query r sees key c if `lowest` <= position of c - position of r <= `highest`: causality
and windows are of this kind, everything else hides no whole block.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Order = Literal["contiguous", "zigzag", "striped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The differences of position between a key and a query that sees it."""

    lowest: float
    highest: float

    @classmethod
    def of(cls, *, is_causal: bool, window: tuple[int, ...]) -> "Band":
        """Return the band of `sdpa`'s arguments."""
        left, right = window or (math.inf, math.inf)
        return cls(lowest=-left, highest=min(right, 0) if is_causal else right)

    @property
    def is_everything(self) -> bool:
        """Whether it hides no key at all."""
        return self.lowest == -math.inf and self.highest == math.inf

    def between(self, queries: int, keys: int, count: int) -> "Band":
        """Return the band of two devices' tokens by their numbers, in striped order.

        Query r and key c of these devices have the positions count * r + queries and
        count * c + keys.
        """
        # Device 0 of 2 has positions 0, 2, 4, ..., and device 1 has 1, 3, 5, ... Under
        # a causal mask, query r of device 0 sees key c of device 1 if 2c + 1 <= 2r.
        # That is c - r <= -0.5, so `highest` is -1.
        lowest, highest = (x + queries - keys for x in (self.lowest, self.highest))
        return Band(
            lowest=lowest if math.isinf(lowest) else math.ceil(lowest / count),
            highest=highest if math.isinf(highest) else math.floor(highest / count),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of attention on parts of the local queries and keys at hand.

    The parts are a first index and a count. ``is_causal`` and ``window`` are counted
    from their first query and key. These have different positions where one of both is
    given and the call ``is_shifted``.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    is_causal: bool = False
    window: tuple[int, ...] = ()
    is_shifted: bool = False

    @property
    def is_full(self) -> bool:
        """Whether each of its queries sees each of its keys."""
        return not self.is_causal and not self.window


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The calls of all devices on the keys that each has at hand.

    ``shift`` is how many devices back the keys come from. Device i makes the calls
    ``programs[program_of[i]]``, with columns that begin at ``columns_of[i]``.
    """

    shift: int
    programs: tuple[tuple[Call, ...], ...]
    program_of: tuple[int, ...]
    columns_of: tuple[tuple[int, ...], ...]

    @property
    def is_empty(self) -> bool:
        """Whether no device has anything to do."""
        return not any(self.programs)

    @property
    def work(self) -> tuple[int, ...]:
        """The number of pairs of a query and a key in each device's kernels."""
        areas = [
            sum(x.rows[1] * x.columns[1] for x in calls) for calls in self.programs
        ]
        return tuple(areas[number] for number in self.program_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Tokens that are neighbours both in memory and in the sequence."""

    first: int
    position: int
    count: int


def chunks_of(device: int, count: int, order: Order) -> tuple[int, ...]:
    """Return the chunks that a device holds, in its order."""
    return (device,) if order == "contiguous" else (device, 2 * count - 1 - device)


@functools.lru_cache(maxsize=1024)
def ring_steps(
    *,
    count: int,
    order: Order,
    queries: int,
    keys: int,
    band: Band,
    is_packed: bool = False,
) -> tuple[Step, ...]:
    """Return the steps of a ring of `count` devices that hold so many tokens each.

    Steps in which no device has work are left out, but not the first, in which each
    device has its own keys. With ``is_packed``, causality and windows of calls that are
    not shifted count from the first visible token of each packed sequence.
    """

    def calls(device: int, source: int) -> tuple[Call, ...]:
        if order == "striped":
            own = band.between(device, source, count)
            is_causal = is_packed and band.highest == 0
            call = (_packed_call if is_causal else _striped_call)(queries, keys, own)
            return () if call is None else (call,)
        return _calls(
            _runs(chunks_of(device, count, order), queries),
            _runs(chunks_of(source, count, order), keys),
            band,
            is_packed=is_packed,
        )

    steps = [
        _step(
            shift,
            [calls(device, (device - shift) % count) for device in range(count)],
        )
        for shift in range(count)
    ]
    return tuple(step for step in steps if step.shift == 0 or not step.is_empty)


@functools.lru_cache(maxsize=1024)
def gathered_step(
    *,
    count: int,
    order: Order,
    queries: int,
    keys: int,
    band: Band,
    is_packed: bool = False,
) -> Step:
    """Return the only step of devices that have all keys, in the sequence's order."""
    everything = [_Run(first=0, position=0, count=keys * count)]

    def calls(device: int) -> tuple[Call, ...]:
        runs = _runs(chunks_of(device, count, order), queries)
        return _calls(runs, everything, band, is_packed=is_packed)

    return _step(0, [calls(device) for device in range(count)])


def _step(shift: int, calls: Sequence[tuple[Call, ...]]) -> Step:
    """Return a step; calls that differ in where their columns begin are one program."""
    at_zero = [
        tuple(replace(call, columns=(0, call.columns[1])) for call in each)
        for each in calls
    ]
    programs = tuple(dict.fromkeys(at_zero))
    return Step(
        shift=shift,
        programs=programs,
        program_of=tuple(programs.index(each) for each in at_zero),
        columns_of=tuple(tuple(call.columns[0] for call in each) for each in calls),
    )


def _runs(chunks: Sequence[int], tokens: int) -> list[_Run]:
    """Return the runs of a device's tokens; chunks that are neighbours are one run."""
    size = tokens // len(chunks)
    runs: list[_Run] = []
    for i, chunk in enumerate(chunks):
        new = _Run(first=i * size, position=chunk * size, count=size)
        if runs and runs[-1].position + runs[-1].count == new.position:
            last = runs.pop()
            new = _Run(first=last.first, position=last.position, count=2 * size)
        runs.append(new)
    return runs


def _striped_call(queries: int, keys: int, band: Band) -> Call | None:
    """Return the call on all tokens of two devices, given the band of their numbers."""
    rows, columns = (_Run(first=0, position=0, count=x) for x in (queries, keys))
    call = _call(rows, columns, band)
    # Packed sequences begin with other tokens on each device.
    return None if call is None else replace(call, is_shifted=not call.is_full)


def _packed_call(queries: int, keys: int, band: Band) -> Call | None:
    """Return the call on the tokens of two devices, for causal packed sequences.

    A query of a sequence sees the keys up to its own number within the sequence, or up
    to the one before that, depending on which device has the sequence's first token. So
    numbers count from its first query that sees a key. Thus devices need not differ.
    """
    left = band.highest - band.lowest
    if left < 0 or not queries or not keys:
        return None
    return Call(
        rows=(0, queries),
        columns=(0, keys),
        is_causal=True,
        window=(int(left), 0) if left < queries - 1 else (),
    )


def _calls(
    queries: Sequence[_Run], keys: Sequence[_Run], band: Band, *, is_packed: bool
) -> tuple[Call, ...]:
    """Return as few calls as cover what the queries see of the keys.

    With ``is_packed``, keys before the queries have calls of their own, since causality
    and windows of calls that are not shifted count from the first token.
    """
    if list(queries) == list(keys) and band == Band(lowest=-math.inf, highest=0):
        # Tokens in ascending order, against themselves: no position matters.
        total = (0, sum(run.count for run in queries))
        return (Call(rows=total, columns=total, is_causal=True),)
    if is_packed:
        # Queries 4 to 7 see keys 0 to 7 under a causal mask: the first four without a
        # mask, and the others from the first on, as sequences do.
        starts = [run.position for run in queries]
        keys = [part for run in keys for part in _cut(run, starts)]
    found: list[Call] = []
    for rows in queries:
        seen = [call for x in keys if (call := _call(rows, x, band)) is not None]
        found += _joined(seen, _beside)
    return tuple(_joined(found, _below))


def _cut(run: _Run, positions: Sequence[int]) -> list[_Run]:
    """Return the parts of a run before, between and after some positions."""
    end = run.position + run.count
    inside = (x for x in positions if run.position < x < end)
    return [
        _Run(first=run.first + start - run.position, position=start, count=stop - start)
        for start, stop in itertools.pairwise(sorted({run.position, *inside, end}))
    ]


def _call(queries: _Run, keys: _Run, band: Band) -> Call | None:
    """Return the call that covers what a run of queries sees of a run of keys.

    It has no row and no column at its edges that sees, or is seen by, nothing.
    """
    if not queries.count or not keys.count:
        return None
    # Queries 4 to 7 and keys 0 to 3 under a causal mask with window (2, 0): query 4
    # sees keys 2 and 3, query 5 sees key 3, and the others see none. So the call has
    # rows (0, 2), columns (2, 2) and window (0, 1), counted from its first query and
    # key.
    # Query r of the run sees key c of the run if lowest <= c - r <= highest.
    offset = keys.position - queries.position
    lowest, highest = band.lowest - offset, band.highest - offset
    if lowest > highest:
        return None
    first_row = int(max(0, -highest))
    last_row = int(min(queries.count - 1, keys.count - 1 - lowest))
    first_column = int(max(0, first_row + lowest))
    last_column = int(min(keys.count - 1, last_row + highest))
    if first_row > last_row or first_column > last_column:
        return None
    moved = first_column - first_row
    rows, columns = last_row - first_row + 1, last_column - first_column + 1
    left = int(min(moved - lowest, rows - 1))
    right = int(min(highest - moved, columns - 1))
    has_left, has_right = left < rows - 1, right < columns - 1
    is_causal = has_right and right == 0
    has_band = has_left or has_right
    return Call(
        rows=(queries.first + first_row, rows),
        columns=(keys.first + first_column, columns),
        is_causal=is_causal,
        window=(left, right) if has_left or (has_right and not is_causal) else (),
        is_shifted=has_band and offset + moved != 0,
    )


def _joined(
    calls: Sequence[Call], join: Callable[[Call, Call], Call | None]
) -> list[Call]:
    """Return calls in which each that can be is joined with the one before it."""
    found: list[Call] = []
    for call in calls:
        both = join(found[-1], call) if found else None
        if both is not None:
            found[-1] = both
        else:
            found.append(call)
    return found


def _beside(first: Call, second: Call) -> Call | None:
    """Return a call of both where they are one block, of the same rows."""
    (start, count), (other, more) = first.columns, second.columns
    if not first.is_full or not second.is_full:
        return None
    if first.rows != second.rows or start + count != other:
        return None
    return Call(rows=first.rows, columns=(start, count + more))


def _below(first: Call, second: Call) -> Call | None:
    """Return a call of both where they are one block, of the same columns."""
    (start, count), (other, more) = first.rows, second.rows
    if not first.is_full or not second.is_full:
        return None
    if first.columns != second.columns or start + count != other:
        return None
    return Call(rows=(start, count + more), columns=first.columns)
