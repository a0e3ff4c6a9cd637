# SPDX-License-Identifier: Apache-2.0
"""Has XLA's partitioner divide a kernel's graph in a program for several devices.

The lowering emits one custom call for each kernel, on arrays of full size, with a
sharding rule that names the factors of their axes. While XLA compiles, it propagates
shardings by that rule and then asks here for the program of one device, given the
shardings that it found. The program that it gets is that of the local sizes: their
plan, their workspace, and the sums over devices that they need.

The call's text says all that it computes, so that equal programs are equal in caches
and an exported program can be divided where it is loaded.
"""

import contextlib
import functools
import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jax_cudnn.config import MatmulPrecision, Options, PlanOptions
from jax_cudnn.graph import Graph, from_json, is_anchor, to_json
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.primitives import (
    graph_avals,
    graph_p,
    reference_program,
    run_graph,
)
from jax_cudnn.lowering.scope import scope, scoped
from jax_cudnn.lowering.sharding.array_types import is_explicitly_sharded
from jax_cudnn.lowering.sharding.cuts import DeviceCut, Division, divide
from jax_cudnn.lowering.sharding.explicit import run_explicit
from jax_cudnn.lowering.sharding.one_device import Collectives, run_on_device
from jax_cudnn.lowering.sharding.parts import is_divided_by_xla, run_parts
from jax_cudnn.lowering.sharding.sharding_rule import factors_at, sharding_rule
from jax_cudnn.lowering.sharding.subaxes import all_subaxes
from jax_cudnn.lowering.sharding.sums import note_on_partial_sums, scattering
from jax_cudnn.lowering.sharding.xla_forms import bytecode, parts_of
from jax_cudnn.reference.dtypes import jax_dtype

_log = logging.getLogger("jax_cudnn")

# A promise: exported programs have the name and the fields of the text.
TARGET = "jax_cudnn.partitioned"
_SCHEMA = 1

_kernel_p = _jax.Primitive("cudnn_partitioned")
_kernel_p.multiple_results = True
_sum_p = _jax.Primitive("cudnn_sum_over_devices")
_max_p = _jax.Primitive("cudnn_max_over_devices")
_scatter_p = _jax.Primitive("cudnn_scatter_sum_over_devices")
_exchange_p = _jax.Primitive("cudnn_exchange_between_devices")


# Makes what computes a graph on one device of a platform, from arrays.
Program = Callable[[Graph, Options], Callable[..., Sequence[jax.Array]]]
_PROGRAMS: dict[str, Program] = {}
# Likewise, in XLA's operations only.
_XLA_PROGRAMS: dict[str, Program] = {}


def set_lowering(platform: str, program: Program, xla_program: Program) -> None:
    """Set how graphs are lowered for a platform, in programs for any devices."""
    _PROGRAMS[platform], _XLA_PROGRAMS[platform] = program, xla_program

    def lower(ctx: Any, *operands: Any, graph: Graph, options: Options) -> Any:
        region = _jax.partitioned_region(ctx)
        record = _RECORDS.get(scope().record)
        if any(map(is_explicitly_sharded, ctx.avals_in)):
            if record is not None:
                record.is_divided = True
            function = functools.partial(_run_typed, graph=graph, options=options)
            return _jax.lower_function(function)(ctx, *operands)
        if record is not None:
            record.is_divided |= region is not None
        if region is None or graph.has_empty_tensor or not _can_divide():
            if record is not None:
                record.graphs.append((graph, options))
            programs = _XLA_PROGRAMS if record else _PROGRAMS
            function = programs[platform](graph, options)
        else:
            function = functools.partial(
                _run_divided,
                graph=graph,
                options=options,
                platform=platform,
                may_sum=region == "automatic",
            )
        return _jax.lower_function(function)(ctx, *operands)

    _jax.set_lowering(graph_p, lower, platform=platform)


@dataclass(kw_only=True)
class Record:
    """The graphs of each device of a program, and whether XLA divided any."""

    graphs: list[tuple[Graph, Options]] = field(default_factory=list)
    is_divided: bool = False


_RECORDS: dict[str, Record] = {}


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record the graphs of the programs that are lowered and compiled in the block.

    Nothing is planned for them. A program's text names the record, so that no cache
    holds another program for it.
    """
    name = uuid.uuid4().hex
    _RECORDS[name] = Record()
    try:
        with scoped(record=name):
            yield _RECORDS[name]
    finally:
        del _RECORDS[name]


@functools.cache
def _can_divide() -> bool:
    """Whether XLA knows who divides the custom call; says once if it does not."""
    if not _IS_REGISTERED:
        _log.warning(
            "This version of JAX (%s) has no partitioner for custom calls where "
            "jax_cudnn looks for it: calls in programs for several devices gather "
            "their operands, outside of jax.shard_map.",
            jax.__version__,
        )
    return _IS_REGISTERED


# --- the program of all devices -------------------------------------------------------


def _run_typed(*operands: jax.Array, graph: Graph, options: Options) -> list[jax.Array]:
    """Run a graph in parts that the types of its operands say."""
    kernel = functools.partial(run_graph, options=options)
    return run_explicit(graph, operands, kernel, kernel, options)


def _run_divided(
    *operands: jax.Array, graph: Graph, options: Options, platform: str, may_sum: bool
) -> list[jax.Array]:
    """Run a graph's kernels each by a custom call, and the rest in XLA's operations."""

    def kernel(part: Graph, arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if options.implementation != "cudnn" and is_divided_by_xla(part):
            return around(part, arguments)
        settings = {"platform": platform, "may_sum": may_sum}
        return _kernel_p.bind(*arguments, graph=part, options=options, **settings)

    def around(part: Graph, arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return _XLA_PROGRAMS[platform](part, options)(*arguments)

    return run_parts(graph, operands, kernel, around)


def _lower_kernel(
    ctx: Any, *operands: Any, graph: Graph, options: Options, **settings: Any
) -> Any:
    shapes = tuple(aval.shape for aval in ctx.avals_in)
    text = {
        "graph": to_json(graph),
        "options": _options_data(options),
        "schema": _SCHEMA,
        **settings,
    }
    if scope().record:
        text["record"] = scope().record
    return _jax.custom_call(
        ctx,
        operands,
        target=TARGET,
        config=json.dumps(text, sort_keys=True, separators=(",", ":")),
        sharding_rule=sharding_rule(graph, shapes, may_sum=settings["may_sum"]),
    )


# --- the program of one device --------------------------------------------------------


def _partition(
    arg_shapes: Any,
    arg_shardings: Any,
    result_shape: Any,
    result_sharding: Any,
    config: bytes,
) -> tuple[bytes, list[Any], Any]:
    """Answer XLA's partitioner: a device's program, and what is sharded how."""
    call = _Call(config, arg_shapes)
    results = _elements(result_shape, result_sharding)
    division, devices = call.divide([*arg_shardings], results)
    module = call.program(division, devices)
    return (
        module,
        [call.sharding(division, devices, name) for name in call.graph.inputs],
        call.result_sharding(division, devices, result_shape),
    )


def _infer(
    arg_shapes: Any, arg_shardings: Any, result_shape: Any, config: bytes
) -> Any:
    """Answer GSPMD: how the results are sharded, given how the operands are."""
    call = _Call(config, arg_shapes)
    division, devices = call.divide([*arg_shardings], [])
    return call.result_sharding(division, devices, result_shape)


class _Call:
    """A custom call, read from its text and the shapes of its operands."""

    def __init__(self, config: bytes, arg_shapes: Any) -> None:
        data = json.loads(config)
        if data["schema"] != _SCHEMA:
            raise ValueError(
                f"{TARGET} has schema {data['schema']}, and this release of jax_cudnn "
                f"reads {_SCHEMA}. Export the program again with this release."
            )
        self.graph = from_json(data["graph"])
        self._options = _options(data["options"])
        self._platform: str = data["platform"]
        self._may_sum: bool = data["may_sum"]
        self._record = _RECORDS.get(data.get("record", ""))
        self._shapes = tuple(tuple(shape.dimensions()) for shape in arg_shapes)
        self._factors = factors_at(self.graph, self._shapes)

    def divide(
        self, arguments: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Division[DeviceCut], int]:
        """Return what is divided how, and among how many devices.

        Sums are scattered only once it is known how the results are wanted.
        """
        names = [*self.graph.inputs, *self.graph.outputs]
        given: list[tuple[str, list[DeviceCut | None]]] = []
        devices = 1
        for name, sharding in zip(names, [*arguments, *results], strict=False):
            if sharding is None:
                continue
            count, parts = parts_of(sharding, len(self._factors.axes[name]))
            devices = max(devices, count)
            cuts = [
                None if each is None else DeviceCut(max(each) + 1, each)
                for each in parts
            ]
            given.append((name, cuts))
        division = divide(self._factors, given, may_sum=self._may_sum)
        if results:
            wanted = {name: cuts for name, cuts in given if name in self.graph.outputs}
            division = scattering(self.graph, division, wanted, self._options)
        return division, devices

    def sharding(self, division: Division[DeviceCut], devices: int, name: str) -> Any:
        """Return a tensor's sharding in XLA's form."""
        axes = [
            [(cut.count, cut.parts) for cut in cuts] for cuts in division.cuts_of(name)
        ]
        return _jax.hlo_sharding(axes, devices)

    def result_sharding(
        self, division: Division[DeviceCut], devices: int, result_shape: Any
    ) -> Any:
        """Return the sharding of the result, or of the tuple of results."""
        found = [self.sharding(division, devices, name) for name in self.graph.outputs]
        return _jax.packed(result_shape, found)

    def program(self, division: Division[DeviceCut], devices: int) -> bytes:
        """Return a device's program, as StableHLO's bytecode."""

        def groups(over: frozenset[int], cut: DeviceCut | None = None) -> _jax.Groups:
            return _groups(division, devices, over, cut)

        collectives = Collectives(
            total=lambda x, over: _sum_p.bind(x, groups=groups(over)),
            most=lambda x, over: _max_p.bind(x, groups=groups(over)),
            scatter=lambda x, over, axis, cut: _scatter_p.bind(
                x, groups=groups(over, cut), axis=axis
            ),
            exchange=lambda x, over, axis, cut: _exchange_p.bind(
                x, groups=groups(over, cut), axis=axis
            ),
        )

        def run(graph: Graph, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
            if self._record is None:
                programs = _PROGRAMS
            else:
                programs = _XLA_PROGRAMS
                if any(map(is_anchor, graph.nodes)):
                    remarks = (
                        self._options.remark,
                        note_on_partial_sums(graph, division),
                    )
                    options = replace(
                        self._options, remark=" ".join(filter(None, remarks))
                    )
                    self._record.graphs.append((graph, options))
            return programs[self._platform](graph, self._options)(*operands)

        def body(*operands: jax.Array) -> list[jax.Array]:
            subaxes = all_subaxes(self.graph, self._shapes)
            return run_on_device(
                self.graph,
                subaxes,
                division,
                operands,
                run,
                collectives,
                self._options,
            )

        operands = [
            jax.ShapeDtypeStruct(division.local_shape(t.name), jax_dtype(t.dtype))
            for t in self.graph.input_tensors
        ]
        is_double = any(tensor.dtype == "f64" for tensor in self.graph.tensors)
        with _jax.without_mesh(), jax.enable_x64(is_double):
            # XLA passes all operands, those that the program does not read as well.
            lowered = (
                jax.jit(body, keep_unused=True)
                .trace(*operands)
                .lower(lowering_platforms=(self._platform,))
            )
        return bytecode(lowered)


def _elements(shape: Any, sharding: Any) -> list[Any]:
    """Return the shardings of the results that a shape, maybe a tuple, stands for."""
    return sharding.tuple_elements() if shape.is_tuple() else [sharding]


def _groups(
    division: Division[DeviceCut],
    devices: int,
    over: frozenset[int],
    cut: DeviceCut | None,
) -> _jax.Groups:
    """Return which devices add up partial sums: those that differ only along `over`.

    Where several devices have the same part, each of these joins one group. Groups are
    in the order of the parts of a sum that is scattered by a cut, or of the partial
    sums.
    """
    # Of 4 devices, rows are cut as (0, 0, 1, 1) and the contraction as (0, 1, 0, 1).
    # Over the contraction, devices 0 and 1 add up the first half of the rows, and 2 and
    # 3 the other: ((0, 1), (2, 3)).
    found: dict[tuple[Any, ...], dict[tuple[int, ...], list[int]]] = {}
    for device in range(devices):
        cuts = [division.cuts[f] for f in sorted(over)] if cut is None else [cut]
        shares = tuple(each.parts[device] for each in cuts)
        others = tuple(
            each.parts[device] for f, each in division.cuts.items() if f not in over
        )
        found.setdefault(others, {}).setdefault(shares, []).append(device)
    return tuple(
        group
        for by_share in found.values()
        for group in zip(*(by_share[each] for each in sorted(by_share)), strict=True)
    )


def _part_aval(x: Any, *, groups: _jax.Groups, axis: int) -> Any:
    part = x.shape[axis] // len(groups[0])
    return x.update(shape=(*x.shape[:axis], part, *x.shape[axis + 1 :]))


# --- options as data ------------------------------------------------------------------


def _options_data(options: Options) -> dict[str, Any]:
    precision: Any = options.matmul_precision
    if isinstance(precision, jax.lax.DotAlgorithm):
        precision = {
            key: value if isinstance(value, int) else np.dtype(value).name
            for key, value in precision._asdict().items()
        }
    data = {**asdict(options), "matmul_precision": precision}
    for name in ("exact_dtypes", "reduce_dtype"):
        if data[name] == getattr(Options(), name):
            del data[name]  # So that the text of most programs is as it was.
    return data


def _options(data: Mapping[str, Any]) -> Options:
    precision: MatmulPrecision = data["matmul_precision"]
    if isinstance(precision, list):
        precision = tuple(precision)
    elif isinstance(precision, dict):
        fields: Any = {
            key: value if isinstance(value, int) else np.dtype(value)
            for key, value in precision.items()
        }
        precision = jax.lax.DotAlgorithm(**fields)
    plan = PlanOptions(**data["plan"])
    return Options(**{**data, "matmul_precision": precision, "plan": plan})


# --- registration ---------------------------------------------------------------------

_kernel_p.def_abstract_eval(graph_avals)
_jax.set_lowering(_kernel_p, _lower_kernel)

# At import: a program that was exported by another process may come first.
_IS_REGISTERED = _jax.register_partitioner(TARGET, partition=_partition, infer=_infer)

_sum_p.def_abstract_eval(lambda x, *, groups: x)
_jax.set_lowering(_sum_p, _jax.sum_over_groups)

_max_p.def_abstract_eval(lambda x, *, groups: x)
_jax.set_lowering(_max_p, _jax.max_over_groups)

_scatter_p.def_abstract_eval(_part_aval)
_jax.set_lowering(_scatter_p, _jax.scatter_sum_over_groups)

_exchange_p.def_abstract_eval(lambda x, *, groups, axis: x)
_jax.set_lowering(_exchange_p, _jax.exchange_in_groups)


set_lowering("cpu", reference_program, reference_program)
