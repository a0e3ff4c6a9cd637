# SPDX-License-Identifier: Apache-2.0
"""The tables of what was measured: one for each architecture and version of cuDNN.

A table is a JSON file in ``jax_cudnn/data/policy``. Its ``rows`` say of the parts that
they are about whether cuDNN or XLA runs them, and its ``orders`` which rewrite of a
part goes first. The first row that holds decides. A row has

* ``of``: what it is about, such as "attention" (ranking.py);
* ``when``: conditions on properties of a part and a rewrite, by name: a value, a list
  of values, or bounds (``at_least``, ``at_most``, ``below``, ``multiple_of``);
* ``runs``: "cudnn" or "xla", with ``why`` where it is XLA;
* ``slow_engines``: where one of these has cuDNN's first plan, XLA runs the part;
* ``fast_engines``: where none of these has it, XLA runs the part;
* ``preferred``: the request for the plan that is tried before cuDNN's first one;
* ``knobs``: those of the plan of cuBLASLt's that is tried first;
* ``elsewhere``: "cudnn" or "xla", where the row's engines are not those of the target,
  with ``why_elsewhere``;
* ``by``: the command that measured it, or the page about what was measured once.

A row of "matmuls unlike all" is about matmuls that no measured kernel is like.

``scattered`` is about sums over devices (see `Scattered`). The other entries, written
by ``python -m scripts.default_rules``, are the kernels that contractions are compared
with (products/kernels.py).

A table may say nothing of what was not measured there. One rule holds for that, and for
a target without a table: the table of the nearest architecture, and of the nearest
cuDNN on it, decides that says something of it: has a row of its sort, or an order that
holds. So a table with one row of a sort needs all of them that hold there. The table
that is ``for_unknown`` comes first for a GPU that is not known. An engine's number
means another engine on another architecture, and engines come and go with cuDNN's
versions. So a row that names fast or preferred engines decides on its own architecture
and version alone. Slow ones count on all versions of their architecture. The times of
kernels' engines count everywhere: they only leave more to XLA (evidence.py).

What ``plans.calibrate`` measured on a machine's GPU is a table, too (own.py). It has no
rows, but kernels of all families. They count as much as those of the package that were
measured with the same architecture and cuDNN. Kernels of other tables count as if they
were further away (`Tables.distances`).
"""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax_cudnn.graph import Target
from jax_cudnn.policy import own

_FOLDER = Path(__file__).parent.parent / "data" / "policy"
_BOUNDS = ("at_least", "at_most", "below", "multiple_of")

# By so much more a kernel differs that was measured with another cuDNN, on another GPU
# of the architecture, and on another architecture (nearest.py).
OTHER_CUDNN, _OTHER_GPU, _OTHER_ARCHITECTURE = 1.0, 0.5, 2.0

Runner = Literal["cudnn", "xla"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of a table; its fields are described at the top of this module."""

    of: str
    when: Mapping[str, Any]
    by: str
    runs: Runner = "cudnn"
    why: str = ""
    slow_engines: tuple[int, ...] = ()
    fast_engines: tuple[int, ...] = ()
    preferred: str = ""
    knobs: Mapping[str, int] = field(default_factory=dict)
    elsewhere: Runner = "xla"
    why_elsewhere: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The names of a part's rewrites, in the order in which they are tried.

    Ways that are not named are left out.
    """

    of: str
    when: Mapping[str, Any]
    by: str
    ways: tuple[str, ...]


class Scattered(NamedTuple):
    """Elements of a device's share of a sum that is scattered, and gathered later.

    A program that wants the parts of a sum gets them whatever their size. For others, a
    second collective costs more than it saves below ``least``. From ``most_alone`` it
    does so where nothing follows the sum: the first collective runs beside other
    kernels for so long that none is left for the second one.
    """

    least: int
    most_alone: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """The measured rows of an architecture and a cuDNN, such as 90 and 919.

    ``gpu`` is the name of the GPU whose own table it is, "" for all of the
    architecture.
    """

    sm_version: int
    cudnn: int
    gpu: str = ""
    rows: Sequence[Row]
    orders: Sequence[Order]
    data: Mapping[str, Any]
    is_for_unknown: bool = False

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Table":
        """Read a table from the data of its file."""
        return cls(
            sm_version=data["sm_version"],
            cudnn=data["cudnn"],
            gpu=data.get("gpu", ""),
            rows=[_row(each) for each in data["rows"]],
            orders=[_order(each) for each in data["orders"]],
            data=data,
            is_for_unknown=data.get("for_unknown", False),
        )

    @property
    def scattered(self) -> Scattered:
        """The bounds by which sums over devices are scattered."""
        return Scattered(*(self.data["scattered"][x] for x in Scattered._fields))

    def is_of_architecture(self, target: Target | None) -> bool:
        """Whether the table was measured on a target's architecture."""
        return target is not None and target.sm_version == self.sm_version

    def is_of(self, target: Target | None) -> bool:
        """Whether it was measured there with the target's cuDNN, by minor version."""
        return self.is_of_architecture(target) and self.cudnn == _minor(target)

    def source(self, target: Target | None) -> str:
        """Say where the table was measured, as seen from a target."""
        cudnn = f"cuDNN {self.cudnn // 100}.{self.cudnn % 100}"
        if self.gpu:
            is_here = target is not None and target.name == self.gpu
            gpu = "this GPU" if is_here else self.gpu
            is_all = is_here and self.is_of(target)
            return f"calibrated on {gpu}" + ("" if is_all else f" with {cudnn}")
        if self.is_of(target):
            return f"measured on sm_{self.sm_version} with {cudnn}"
        return f"of the nearest table: sm_{self.sm_version}, {cudnn}"

    def says(self, of: str) -> bool:
        """Whether there are rows about something, or an entry of its name."""
        return any(row.of == of for row in self.rows) or bool(self.data.get(of))

    def row(self, of: str, properties: object) -> Row | None:
        """Return the first row about something that holds for its properties."""
        return next((x for x in self.rows if x.of == of and holds(x, properties)), None)


def _row(data: Mapping[str, Any]) -> Row:
    """Read a row.

    Raises:
      ValueError: a condition is none, or XLA is to run something without a reason.
    """
    _check_conditions(data)
    names_engines = bool(data.get("fast_engines") or data.get("preferred"))
    is_xlas_elsewhere = names_engines and data.get("elsewhere", "xla") == "xla"
    if (data.get("runs") == "xla") != bool(data.get("why")):
        raise ValueError(f"a row has a `why` if XLA runs what it is about: {data}")
    if is_xlas_elsewhere != bool(data.get("why_elsewhere")):
        raise ValueError(
            f"a row has a `why_elsewhere` if it names engines and XLA runs what it is "
            f"about elsewhere: {data}"
        )
    engines = {name: tuple(data.get(name, ())) for name in _ENGINES}
    preferred = data.get("preferred")
    text = json.dumps({"preferred": preferred}, sort_keys=True, separators=(",", ":"))
    return Row(**{**data, **engines, "preferred": text if preferred else ""})


_ENGINES = ("slow_engines", "fast_engines")


def _check_conditions(data: Mapping[str, Any]) -> None:
    for name, wanted in data["when"].items():
        if isinstance(wanted, dict) and not wanted.keys() <= {*_BOUNDS}:
            raise ValueError(f"{name} has bounds {[*wanted]}; there are {_BOUNDS}")


def _order(data: Mapping[str, Any]) -> Order:
    _check_conditions(data)
    return Order(**{**data, "ways": tuple(data["ways"])})


def holds(row: Row | Order, properties: object) -> bool:
    """Whether all conditions of a row hold for a part and a rewrite."""
    return all(
        _is_met(wanted, getattr(properties, name)) for name, wanted in row.when.items()
    )


def _is_met(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, list):
        return value in wanted
    if not isinstance(wanted, dict):
        return value == wanted
    return (
        wanted.get("at_least", value) <= value <= wanted.get("at_most", value)
        and not ("below" in wanted and value >= wanted["below"])
        and value % wanted.get("multiple_of", 1) == 0
    )


def _minor(target: Target | None) -> int:
    """Return a target's cuDNN without its patch, such as 919."""
    return target.cudnn_version // 100 if target is not None else 0


@dataclass(frozen=True, eq=False)
class Tables:
    """All tables, those that are nearest to a target first.

    ``distances`` says how much is added to the distance of the kernels of each table:
    nothing for the nearest table that has kernels.
    """

    tables: tuple[Table, ...]
    distances: tuple[float, ...]

    def about(self, of: str) -> Table:
        """Return the nearest table that says something about something."""
        return next((x for x in self.tables if x.says(of)), self.tables[0])

    def order(self, of: str, properties: object) -> tuple[str, ...]:
        """Return the names of rewrites in order, by the first order that holds."""
        orders = itertools.chain.from_iterable(table.orders for table in self.tables)
        for order in orders:
            if order.of == of and holds(order, properties):
                return order.ways
        raise LookupError(f"no table has an order of {of!r} that holds here")


@functools.cache
def shipped() -> tuple[Table, ...]:
    """Return the tables of the package."""
    return tuple(
        Table.of(json.loads(file.read_text()))
        for file in sorted(_FOLDER.glob("*.json"))
    )


def tables_for(target: Target | None) -> Tables:
    """Return the tables as they decide for a target; None is one that is not known."""
    found = shipped()
    if target is not None:
        every = (*calibrated(), *found)
        return _nearest_first(every, target.sm_version, _minor(target), target.name)
    known = next(table for table in found if table.is_for_unknown)
    return _nearest_first(found, known.sm_version, known.cudnn, "")


def calibrated() -> tuple[Table, ...]:
    """Return the tables that were measured by ``plans.calibrate`` or imported."""
    return _tables_of(own.files())


@functools.lru_cache(maxsize=1)
def _tables_of(files: tuple[own.File, ...]) -> tuple[Table, ...]:
    # The measured rows stay in the file: nothing here reads them.
    return tuple(
        Table.of({k: v for k, v in file.data.items() if k != "measured"})
        for file in files
    )


@functools.lru_cache(maxsize=16)
def _nearest_first(
    found: tuple[Table, ...], sm_version: int, cudnn: int, gpu: str
) -> Tables:
    def distance(table: Table) -> tuple[int, int, int, bool]:
        generations = abs(table.sm_version // 10 - sm_version // 10)
        architectures = abs(table.sm_version - sm_version)
        return (
            generations,
            architectures,
            abs(table.cudnn - cudnn),
            table.gpu != gpu,
        )

    def kernel_distance(table: Table) -> float:
        is_other_gpu = table.gpu not in ("", gpu)
        return (
            _OTHER_ARCHITECTURE * (table.sm_version != sm_version)
            + OTHER_CUDNN * (table.cudnn != cudnn)
            + _OTHER_GPU * is_other_gpu
        )

    ordered = tuple(sorted(found, key=distance))
    with_kernels = (x for x in ordered if x.data.get("kernels"))
    least = min(map(kernel_distance, with_kernels), default=0.0)
    return Tables(ordered, tuple(max(0.0, kernel_distance(x) - least) for x in ordered))
