# SPDX-License-Identifier: Apache-2.0
"""Times the ways of writing depthwise convolutions, and XLA's code.

    python -m benchmarks.depthwise --out docs/internals/measured

times depthwise convolutions and their gradients on one GPU, as MobileNets,
EfficientNets, ConvNeXts and models of sequences have them: as they are, rewritten
(legalize/products/conv_depthwise.py) and with merged groups, each by cuDNN's first plan
and by the fastest of the first ten, and by XLA. Times include the work on arrays around
the kernel. It writes depthwise.json and depthwise.md there.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness.page import Data, Page, table
from benchmarks.harness.program import run_benchmark
from benchmarks.harness.timing import Contender, alternate
from jax_cudnn import native
from jax_cudnn.calibration.measuring import by_xla
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, Target, is_anchor, label, operand_text, to_json
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.products.conv import TRIPLES, conv_attributes
from jax_cudnn.legalize import Rewrite
from jax_cudnn.lowering import run_cudnn, traced_program
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.lowering.devices import local_device, local_target
from jax_cudnn.policy import ranked
from jax_cudnn.policy.nearest import LOSS
from jax_cudnn.tuning.stopwatch import OperandSets, PlanStopwatch, compile_over_sets
from jax_cudnn.tuning.together import together

_PLANS = 10
_WAYS = ("as it is", "rewritten", "merged")
# With what follows in the kernel, too.
_FUSED = "fused"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A depthwise convolution: images with channels last, and a square window.

    Windows are padded to keep sizes, but those of even size are patches; ``ends`` are
    other paddings. ``outer`` channels are made, by default as many as there are.
    """

    images: tuple[int, ...]
    window: int
    step: int = 1
    outer: int | None = None
    activation: str | None = None
    dtype: str = "bfloat16"
    hole: int = 1
    ends: tuple[int, int] | None = None

    def parts(self) -> list[Graph]:
        """Return the kernels of the convolution and of its gradients."""
        axes, channels = len(self.images) - 2, self.images[-1]
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
                feature_group_count=channels,
                bias=bias[0] if bias else None,
                activation=self.activation,  # type: ignore[arg-type]
            )

        def all_of_it(cotangent: Any, x: Any, w: Any, *bias: Any) -> Any:
            result, pullback = jax.vjp(layer, x, w, *bias)
            return result, pullback(cotangent)

        outer = self.outer or channels
        shapes = [self.images, (*[self.window] * axes, 1, outer)]
        shapes += [(outer,)] if self.activation else []
        dtype = jnp.dtype(self.dtype)
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        result = jax.eval_shape(layer, *types)
        graphs = traced_program(all_of_it, result, *types).graphs
        found = [part for graph in graphs for part in graph.parts]
        return [part for part in found if any(map(is_anchor, part.nodes))]


def cells(*, small: bool) -> list[Cell]:
    """Return the convolutions."""
    if small:
        return [Cell(images=(2, 8, 8, 32), window=3)]
    return [
        Cell(images=(64, 112, 112, 32), window=3, activation="relu"),
        Cell(images=(64, 112, 112, 96), window=3, step=2),
        Cell(images=(64, 56, 56, 144), window=3, activation="silu"),
        Cell(images=(64, 28, 28, 192), window=3),
        Cell(images=(64, 14, 14, 576), window=3, step=2),
        Cell(images=(64, 7, 7, 960), window=3, activation="relu"),
        Cell(images=(128, 28, 28, 240), window=5, step=2, activation="silu"),
        Cell(images=(64, 14, 14, 480), window=5),
        Cell(images=(64, 7, 7, 1152), window=5, activation="silu"),
        Cell(images=(64, 56, 56, 96), window=7),
        Cell(images=(64, 28, 28, 192), window=7),
        Cell(images=(64, 14, 14, 384), window=7),
        Cell(images=(64, 7, 7, 768), window=7),
        Cell(images=(1, 56, 56, 128), window=7),
        Cell(images=(8, 14, 14, 512), window=7),
        Cell(images=(1, 28, 28, 192), window=3, activation="relu"),
        Cell(images=(32, 112, 112, 64), window=7, step=2),
        Cell(images=(8, 2048, 2048), window=4, activation="silu", ends=(3, 0)),
        Cell(images=(1, 8192, 1024), window=4, ends=(3, 0)),
        Cell(images=(8, 2048, 512), window=4),
        Cell(images=(16, 1024, 512), window=31),
        Cell(images=(16, 1024, 512), window=3, step=2),
        # cuDNN has no engines for these.
        Cell(images=(64, 56, 56, 96), window=9),
        Cell(images=(32, 28, 28, 256), window=13),
        Cell(images=(64, 28, 28, 192), window=3, hole=2),
        Cell(images=(64, 28, 28, 192), window=3, outer=384),
        Cell(images=(64, 28, 28, 192), window=2),
        Cell(images=(64, 30, 30, 192), window=3, step=3),
        Cell(images=(16, 2048, 512), window=3, hole=4),
        Cell(images=(2, 32, 32, 32, 64), window=3),
        Cell(images=(4, 16, 56, 56, 96), window=3),
        Cell(images=(64, 24, 24, 100), window=3),
        Cell(images=(64, 28, 28, 192), window=3, dtype="float16"),
        Cell(images=(64, 28, 28, 192), window=5, dtype="float16"),
        Cell(images=(64, 28, 28, 192), window=3, dtype="float32"),
        Cell(images=(64, 14, 14, 384), window=7, dtype="float32"),
    ]


def _first_plans(graph: Graph, request: str) -> list[native.PlanInfo]:
    """Return the plans of the first candidates, without those that do not build.

    ``request`` may prefer some of them.
    """
    text, ordinal = to_json(graph), local_device().local_hardware_id
    listed = native.candidates(text, request=request, device=ordinal)
    found: list[native.PlanInfo] = []
    for each in [x for x in listed if x.request and not x.refusal][:_PLANS]:
        try:
            found.append(native.plan(text, request=each.request, device=ordinal))
        except UnsupportedError:
            continue
    return found


class _Kernel:
    """A kernel with its programs, and cuDNN's plans in each way of writing it.

    Of two ways of one name the first counts.
    """

    def __init__(self, part: Graph, target: Target) -> None:
        self.part, self._target = part, target
        self._operands = OperandSets(part, local_device())
        self.plans: dict[str, tuple[Rewrite, list[native.PlanInfo]]] = {}
        self.programs: dict[str, Callable[..., Any]] = {}
        self.engines: dict[str, int] = {}

    def prepare(self) -> None:
        """Build plans and compile programs; may run in a thread."""
        ways = ranked(self.part, self._target)
        for way in ways:
            rewrite, name = way.rewrite, way_of(way.rewrite, ways[0].rewrite)
            if name in self.plans:
                continue
            if built := _first_plans(rewrite.graph, way.preference):
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


def way_of(rewrite: Rewrite, first: Rewrite) -> str:
    """Return the name of a way of writing a convolution."""

    def is_told(*told: str) -> bool:
        return any(words in note for note in rewrite.notes for words in told)

    is_rewritten = is_told("is a convolution to cuDNN", "the gradient is of windows")
    name = "merged" if is_told("are merged") else _WAYS[is_rewritten]
    has_as_much = len(rewrite.graph.nodes) == len(first.graph.nodes)
    return name if has_as_much else f"{name}, {_FUSED}"


def measure(found: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel, with its times in each way of writing it."""
    local = local_target()
    assert local is not None
    kernels = [_Kernel(part, local[1]) for cell in found for part in cell.parts()]
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


def _table_of_ways(
    rows: Sequence[Mapping[str, Any]], ways: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of a table; its last column is of the fastest of first plans."""
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
        first = [us for name, us in times.items() if name.endswith(", first")]
        ratio = f"{min(first) / times['XLA']:.2f}" if first else "-"
        shown.append([row["op"], row["operands"], *cells, ratio])
    heads = " | ".join(f">{name}" for name in names)
    yield from table(f" | operands | {heads} | >ratio", shown)


def _lines(data: Data) -> list[str]:
    rows = data["rows"]
    fused = (f"{way}, {_FUSED}" for way in _WAYS)
    ways = [*_WAYS]
    ways += [way for way in fused if any(f"{way}, first" in x["us"] for x in rows)]
    return [
        "In a depthwise convolution, each channel has filters of its own. cuDNN has",
        "engines for some of them. It runs others with groups that are merged into",
        "larger ones, of filters with zeros in between. Some gradients are rewritten:",
        "those with respect to images as convolutions with flipped filters, and those",
        "of filters as gradients of wider ones, of which a part is kept. What follows",
        f"is computed by XLA, and in a way that is {_FUSED} by the same kernel. Which",
        'of these ways "auto" takes is said in',
        "[Memory and performance](../../performance.md#shapes).",
        "",
        "The time of cuDNN's first plan over that of XLA's code, as a geometric mean:",
        "",
        *_beside_xla(rows, ways),
        "",
        "Microseconds by cuDNN's first plan, by the fastest of its first "
        f"{_PLANS}, and",
        'by XLA. The first is the one that "auto" tries first: some engines go before',
        "those that cuDNN lists first. The work on arrays around the kernel is",
        "included. The last column is the time of the fastest of the first plans over",
        "XLA's.",
        "",
        *_table_of_ways(rows, ways),
    ]


markdown = Page(
    name="depthwise",
    title="Depthwise convolutions",
    comment="Depthwise convolutions in several ways, by cuDNN and by XLA.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, cells, measure, markdown)
