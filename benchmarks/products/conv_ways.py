# SPDX-License-Identifier: Apache-2.0
"""Times convolutions of few channels as they are, rewritten, and by XLA.

    python -m benchmarks.conv_ways --out docs/internals/measured

times convolutions of few channels and their gradients on one GPU: as they are and as
they are rewritten (legalize/products/conv_channels.py, conv_pairs.py), each by cuDNN's
first plan and by the fastest of the first ten, and by XLA. Times include the work on
arrays around the kernel. It writes conv_ways.json and conv_ways.md there.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness.first_plans import first_plans
from benchmarks.harness.page import Data, Page, table
from benchmarks.harness.program import run_benchmark
from benchmarks.harness.timing import Contender, alternate
from jax_cudnn import native
from jax_cudnn.calibration.measuring import by_xla
from jax_cudnn.graph import Graph, Target, is_anchor, label, operand_text
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.products.conv import TRIPLES, conv_attributes
from jax_cudnn.legalize import Rewrite
from jax_cudnn.lowering import run_cudnn, traced_program
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.lowering.devices import local_device, local_target
from jax_cudnn.policy import ranked
from jax_cudnn.policy.nearest import LOSS
from jax_cudnn.tuning.stopwatch import (
    OperandSets,
    PlanStopwatch,
    compile_over_sets,
)
from jax_cudnn.tuning.together import together

_PLANS = 10
# Microseconds by way and plan.
Times = Mapping[str, float]
_WAYS = ("as it is", "rewritten")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A convolution: images with channels last, a square window, channels made.

    Windows are padded to keep sizes, but those of even size are patches; ``ends`` are
    other paddings.
    """

    images: tuple[int, ...]
    window: int
    step: int
    outer: int
    activation: str | None = None
    dtype: str = "bfloat16"
    groups: int = 1
    hole: int = 1
    ends: tuple[int, int] | None = None

    def parts(self) -> list[Graph]:
        """Return the kernels of the convolution and of its gradients."""
        axes = len(self.images) - 2
        letters = "DHW"[-axes:]
        reach = self.hole * (self.window - 1)
        ends = self.ends or ((0, 0) if reach % 2 else (reach // 2, reach // 2))

        def layer(x: Any, w: Any, *bias: Any) -> jax.Array:
            return jax_cudnn.conv(
                x,
                w,
                (self.step,) * axes,
                [ends] * axes,
                dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
                rhs_dilation=(self.hole,) * axes,
                feature_group_count=self.groups,
                bias=bias[0] if bias else None,
                activation=self.activation,  # type: ignore[arg-type]
            )

        def all_of_it(cotangent: Any, x: Any, w: Any, *bias: Any) -> Any:
            result, pullback = jax.vjp(layer, x, w, *bias)
            return result, pullback(cotangent)

        channels = self.images[-1] // self.groups
        shapes = [self.images, (*[self.window] * axes, channels, self.outer)]
        shapes += [(self.outer,)] if self.activation else []
        dtype = jnp.dtype(self.dtype)
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        result = jax.eval_shape(layer, *types)
        graphs = traced_program(all_of_it, result, *types).graphs
        found = [part for graph in graphs for part in graph.parts]
        return [part for part in found if any(map(is_anchor, part.nodes))]


def cells(*, small: bool) -> list[Cell]:
    """Return the convolutions: first layers, patches, and those to few channels."""
    if small:
        return [Cell(images=(2, 8, 8, 3), window=4, step=4, outer=8)]
    return [
        Cell(images=(128, 224, 224, 3), window=7, step=2, outer=64),
        Cell(images=(64, 224, 224, 3), window=3, step=1, outer=64, activation="relu"),
        Cell(images=(64, 224, 224, 3), window=4, step=4, outer=96),
        Cell(images=(128, 224, 224, 3), window=16, step=16, outer=768),
        Cell(images=(64, 112, 112, 4), window=3, step=2, outer=64),
        Cell(images=(64, 96, 96, 4), window=3, step=1, outer=320),
        Cell(images=(2, 128, 128, 128, 1), window=3, step=2, outer=32),
        Cell(images=(2, 96, 96, 96, 1), window=3, step=1, outer=32, activation="silu"),
        Cell(images=(64, 112, 112, 3), window=3, step=1, outer=128),
        Cell(images=(64, 224, 224, 3), window=3, step=2, outer=32),
        Cell(images=(256, 28, 28, 1), window=5, step=1, outer=32),
        Cell(images=(64, 112, 112, 3), window=3, step=1, outer=16),
        Cell(images=(2, 96, 96, 96, 1), window=3, step=1, outer=16),
        Cell(images=(32, 112, 112, 32), window=3, step=1, outer=32),
        Cell(images=(2, 96, 96, 96, 32), window=3, step=1, outer=32),
    ]


class _Kernel:
    """A kernel with its programs, and cuDNN's plans in each way of writing it.

    ``way_of`` is the name of a way, "" of one that is not measured. Of two of one name
    the first counts.
    """

    def __init__(
        self, part: Graph, target: Target, way_of: Callable[[Rewrite, Rewrite], str]
    ) -> None:
        self.part, self._target, self._way_of = part, target, way_of
        self._operands = OperandSets(part, local_device())
        self.plans: dict[str, tuple[Rewrite, list[native.PlanInfo]]] = {}
        self.programs: dict[str, Callable[..., Any]] = {}
        self.engines: dict[str, int] = {}

    def prepare(self) -> None:
        """Build plans and compile programs; may run in a thread."""
        ways = ranked(self.part, self._target)
        for way in ways:
            rewrite, name = way.rewrite, self._way_of(way.rewrite, ways[0].rewrite)
            if not name or name in self.plans:
                continue
            if built := first_plans(rewrite.graph, _PLANS, way.preference):
                self.plans[name] = rewrite, built
        self._operands.compile()

    def compile_xla(self) -> None:
        """Compile XLA's code, which is tuned: nothing else is to run."""
        with jax.default_device(local_device()):
            run = functools.partial(by_xla, self.part)
            self.programs["XLA"] = compile_over_sets(run, self._operands.types)

    def measured(self) -> dict[str, Any]:
        """Return the microseconds of everything."""
        sets = self._operands.draw()
        steps: dict[str, PartDecision] = {}
        for way, (rewrite, plans) in self.plans.items():
            changed = [list(jax.jit(rewrite.before)(each)) for each in sets]
            stopwatch = PlanStopwatch(rewrite.graph, changed, local_device())
            first, best = plans[0], plans[0]
            fastest = stopwatch.time(first, samples=3).median_us
            for plan in plans[1:]:
                us = stopwatch.time(plan, samples=3, enough_us=2 * fastest).median_us
                if us < fastest:
                    fastest, best = us, plan
            for kind, plan in (("first", first), ("best", best)):
                self.engines[f"{way}, {kind}"] = plan.engine
                steps[f"{way}, {kind}"] = PartDecision(
                    part=self.part,
                    rewrite=rewrite,
                    plan=plan,
                    target=self._target,
                    request=plan.request,
                )
        compiled = together(
            [functools.partial(self._compiled, step) for step in steps.values()]
        )
        programs = {**self.programs, **dict(zip(steps, compiled, strict=True))}
        contenders = {
            name: Contender(
                call=functools.partial(program, sets), wait=jax.block_until_ready
            )
            for name, program in programs.items()
        }
        times = alternate(contenders, rounds=5, round_ms=8.0, least_calls=2)
        return {
            name: round(statistics.median(each) / len(sets), 2)
            for name, each in times.items()
        }

    def _compiled(self, step: PartDecision) -> Callable[..., Any]:
        with jax.default_device(local_device()):
            run = functools.partial(run_cudnn, step)
            return compile_over_sets(run, self._operands.types)


def is_rewritten(rewrite: Rewrite) -> bool:
    """Whether there are more channels, or places are taken in pairs."""
    told = ("is channels of", "taken in pairs")
    return any(words in note for note in rewrite.notes for words in told)


def is_merged(rewrite: Rewrite) -> bool:
    """Whether groups are merged."""
    return any("are merged" in note for note in rewrite.notes)


def is_like(rewrite: Rewrite, first: Rewrite) -> bool:
    """Whether as much is in the kernel as in that of the first way."""
    return len(rewrite.graph.nodes) == len(first.graph.nodes)


def _way_of(rewrite: Rewrite, first: Rewrite) -> str:
    return _WAYS[is_rewritten(rewrite)] if is_like(rewrite, first) else ""


def measure(found: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel that is rewritten."""
    target = local_target()
    assert target is not None
    rewritten = [
        part
        for cell in found
        for part in cell.parts()
        if any(map(is_rewritten, [way.rewrite for way in ranked(part, target[1])]))
    ]
    yield from measured_ways(rewritten, _way_of)


def measured_ways(
    parts: Sequence[Graph], way_of: Callable[[Rewrite, Rewrite], str]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel, with its times in each way of writing it."""
    local = local_target()
    assert local is not None
    kernels = [_Kernel(part, local[1], way_of) for part in parts]
    together([each.prepare for each in kernels])
    for each in kernels:
        named = {"op": named_op(each.part), "operands": operand_text(each.part)}
        try:
            each.compile_xla()
            times = each.measured()
            yield {**named, "us": times, "engines": each.engines}
        except (RuntimeError, MemoryError) as error:
            print(f"  left out: {named}: {str(error)[:200]}", flush=True)


def named_op(part: Graph) -> str:
    """Return what a kernel computes, with steps and holes that are not 1.

    Of a gradient of filters also their shape, as none of its operands has it.
    """
    (node,) = filter(is_anchor, part.nodes)
    attributes = conv_attributes(node)
    step, hole = max(attributes.window_strides), max(attributes.rhs_dilation)
    more: list[str] = []
    if node.kind == "conv_wgrad":
        shape = roles_in(part, node)["grad_w"].stored_shape
        more.append(f"filters [{','.join(map(str, shape))}]")
    more += [f"steps of {step}"] if step > 1 else []
    more += [f"dilated by {hole}"] if hole > 1 else []
    return ", ".join([label(part), *more])


def _first_plan_and_xla(times: Times) -> tuple[float | None, float | None]:
    """Return the time of the fastest of the first plans, and of XLA's code."""
    first = [us for name, us in times.items() if name.endswith(", first")]
    return min(first, default=None), times["XLA"]


def _beside_xla(
    rows: Sequence[Mapping[str, Any]], ways: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of a table: cuDNN's first plan beside XLA, by kind and way."""
    rows_of_ways: list[list[Any]] = []
    for kind in TRIPLES:
        for way in ways:
            ratios = [
                row["us"][f"{way}, first"] / row["us"]["XLA"]
                for row in rows
                if row["op"].startswith(kind) and f"{way}, first" in row["us"]
            ]
            if ratios:
                numbers = statistics.geometric_mean(ratios), min(ratios), max(ratios)
                over = sum(ratio > LOSS for ratio in ratios)
                shown = (f"{x:.2f}" for x in numbers)
                rows_of_ways.append([f"{kind}, {way}", len(ratios), *shown, over])
    columns = " | >kernels | >mean | >lowest | >highest | >over 1.05"
    yield from table(columns, rows_of_ways)


def tables_beside_xla(
    rows: Sequence[dict[str, Any]], ways: Sequence[str], *told: str
) -> Iterator[str]:
    """Yield the lines of both tables, with what is ``told`` between them."""
    yield "The time of cuDNN's first plan over that of XLA's code, as a geometric mean:"
    yield ""
    yield from _beside_xla(rows, ways)
    yield from ("", *told)
    most = f"the fastest of its first {_PLANS}"
    yield f"Microseconds by cuDNN's first plan, by {most}, and"
    yield 'by XLA. The first is the one that "auto" tries first: some engines go before'
    yield "those that cuDNN lists first. The work on arrays around the kernel is"
    yield "included. The last column is the time of the fastest of the first plans over"
    yield "XLA's."
    yield ""
    yield from table_of_ways(rows, ways, _first_plan_and_xla)


def table_of_ways(
    rows: Sequence[dict[str, Any]],
    ways: Sequence[str],
    ratio_of: Callable[[Times], tuple[float | None, float | None]],
) -> Iterator[str]:
    """Yield the lines of a table; its last column is the ratio of two of the times."""
    names = [f"{way}, {kind}" for way in ways for kind in ("first", "best")]
    names = ["XLA", *names]
    shown: list[list[str]] = []
    for row in rows:
        times = dict(row["us"])
        for way in ways:
            if f"{way}, best" in times:
                # Chosen by the kernel alone, it may take longer in a program.
                both = (times[f"{way}, {kind}"] for kind in ("first", "best"))
                times[f"{way}, best"] = min(both)
        cells = [f"{times[name]:.1f}" if name in times else "-" for name in names]
        new, old = ratio_of(times)
        ratio = "-" if old is None or new is None else f"{new / old:.2f}"
        shown.append([row["op"], row["operands"], *cells, ratio])
    heads = " | ".join(f">{name}" for name in names)
    yield from table(f" | operands | {heads} | >ratio", shown)


def _rewritten_and_not(times: Times) -> tuple[float | None, float | None]:
    return times.get("rewritten, first"), times.get("as it is, first")


def _lines(data: Data) -> list[str]:
    return [
        "cuDNN's kernels load 8 channels or more at once. Where x has fewer, it is",
        "written with more: what lies within a step, or what windows read along the",
        "last axis, becomes channels. For gradients of filters it is all that windows",
        "read, if x is then no larger than the other operand. The gradient of filters",
        "between few channels is computed for two neighbouring places at once. Here",
        "are microseconds by cuDNN's first plan, by the fastest of its first",
        f"{_PLANS}, and by XLA. The work on arrays around the kernel is included. The",
        "last column is the time of the first plan, rewritten over as it is.",
        "",
        *table_of_ways(data["rows"], _WAYS, _rewritten_and_not),
    ]


markdown = Page(
    name="conv_ways",
    title="Convolutions of few channels",
    comment="Convolutions of few channels, as they are and rewritten.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, cells, measure, markdown)
