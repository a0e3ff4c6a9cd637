# SPDX-License-Identifier: Apache-2.0
"""Explains each operation of a fused function, as text and as a picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jax_cudnn.columns import Block, Details, Heading, Page, Rows, Text
from jax_cudnn.config import Options
from jax_cudnn.fusing.kernels import Kernel
from jax_cudnn.fusing.known import Activation
from jax_cudnn.fusing.program import Operation, Value
from jax_cudnn.fusing.split import LeftToXla, Split, Work
from jax_cudnn.fusing.standalone import StandaloneKernel
from jax_cudnn.graph import Graph, label, operand_text
from jax_cudnn.graph.printing import in_mermaid
from jax_cudnn.lowering import equation_name, run_graph
from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.reference.dtypes import jax_dtype

if TYPE_CHECKING:
    from jax_cudnn.plans.explanation import ExplainedCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedOperation:
    """An operation of the function.

    Attributes:
      name: that of JAX's primitive, or of the activation that several of them are.
      result: dtype and shape, as in "bf16[64,128]".
      place: file, line and function of the user's code; "" where JAX does not know.
      reason: why XLA keeps it; "" for one that is part of a kernel.
    """

    name: str
    result: str
    place: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedKernel:
    """A kernel of a fused function.

    Attributes:
      operations: what became it, the contraction first.
      graph: the graph that cuDNN plans.
      calls: who runs it on the GPU that was asked about, of ``plans.explain``; empty
        where none was.
    """

    operations: tuple[ExplainedOperation, ...]
    graph: Graph
    calls: tuple["ExplainedCall", ...] = ()
    _options: Options = field(repr=False)

    @property
    def op(self) -> str:
        """The name of what it computes."""
        return label(self.graph)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FuseExplanation(Page):
    """The result of ``fuse(fn).explain``; ``str(explanation)`` is a text to read.

    Attributes:
      name: that of the function.
      kernels: its kernels, in the order in which they run.
      left: the operations that XLA keeps, with the reasons.
      device: the GPU that was asked about, with cuDNN's version; "" where none was.
    """

    name: str
    kernels: tuple[FusedKernel, ...]
    left: tuple[ExplainedOperation, ...]
    device: str = ""
    _split: Split = field(repr=False)

    @classmethod
    def of(cls, name: str, split: Split) -> "FuseExplanation":
        """Return the explanation of a split whose kernels were run."""
        return cls(
            name=name,
            kernels=tuple(map(_kernel, split.kernels)),
            left=tuple(_operation(each.work, each.reason) for each in split.left),
            _split=split,
        )

    def on(self, device: str | None = None) -> "FuseExplanation":
        """Return it with cuDNN's plan for each kernel, or why there is none.

        Args:
          device: the name of a GPU, which need not be here, as for ``plans.explain``.
            Default None: this machine's GPU.

        Raises:
          ValueError, LibraryError: as ``plans.explain``.
        """
        from jax_cudnn.plans.explanation import explain

        kernels: list[FusedKernel] = []
        shown = ""
        for kernel in self.kernels:
            graph, options = kernel.graph, kernel._options
            operands = [
                jax.ShapeDtypeStruct(t.stored_shape, jax_dtype(t.dtype))
                for t in graph.input_tensors
            ]

            def run(
                *arrays: jax.Array, graph: Graph = graph, options: Options = options
            ) -> Sequence[jax.Array]:
                return run_graph(graph, arrays, options)

            found = explain(run, *operands, device=device)
            shown = f"cuDNN {found.cudnn_version} on {found.device}"
            kernels.append(replace(kernel, calls=found.calls))
        return replace(self, kernels=tuple(kernels), device=shown)

    def _blocks(self) -> Iterator[Block]:
        yield Heading(
            f"fuse({self.name}): {_counted(len(self.kernels), 'kernel')}, "
            f"{_counted(len(self.left), 'operation')} left to XLA"
        )
        if self.device:
            yield Text(self.device)
        for i, kernel in enumerate(self.kernels, 1):
            yield Text("")
            yield Heading(f"kernel {i}: {kernel.op}({operand_text(kernel.graph)})")
            for call in kernel.calls:
                yield from _who(call)
            yield _table(kernel.operations, is_left=False)
        if self.left:
            yield Text("")
            yield Heading("XLA")
            yield _table(self.left, is_left=True)

    def mermaid(self) -> str:
        """Return a Mermaid flowchart, with a frame around each kernel's operations."""
        return "\n".join(_picture(self._split))


def describe_work(work: Work) -> str:
    """Return what an operation is of which operands, and where, for a message."""
    operands = ", ".join(describe(x) for x in work.inputs)  # type: ignore[arg-type]
    place = _place(work)
    return f"{_called(work)}({operands})" + (f" at {place}" if place else "")


def _called(work: Work) -> str:
    """Return the name of a primitive, or of the function that has its own rule."""
    if isinstance(work, Operation) and work.name.startswith("custom_"):
        return equation_name(work.equation)
    return work.name


def _kernel(kernel: Kernel | StandaloneKernel) -> FusedKernel:
    graph, options = kernel.graph, kernel.options
    assert graph is not None, "it was run"
    assert options is not None, "it was run"
    operations = tuple(_operation(work) for work in kernel.works)
    return FusedKernel(operations=operations, graph=graph, _options=options)


def _operation(work: Work, reason: str = "") -> ExplainedOperation:
    results = ", ".join(describe(x) for x in work.outputs)  # type: ignore[arg-type]
    return ExplainedOperation(
        name=_called(work), result=results, place=_place(work), reason=reason
    )


def _place(work: Work) -> str:
    """Return file, line and function, without folders and columns."""
    if not work.place:
        return ""
    place, _, function = work.place.partition(" ")
    line = ":".join(Path(place).name.split(":")[:2])
    return f"{line} {function}".rstrip()


def _table(operations: Sequence[ExplainedOperation], *, is_left: bool) -> Rows:
    names = ("operation", "result", "place", *(("reason",) if is_left else ()))
    rows = tuple(
        (each.name, each.result, each.place, *((each.reason,) if is_left else ()))
        for each in operations
    )
    return Rows(rows, names, indent="  ")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _who(call: "ExplainedCall") -> Iterator[Block]:
    if call.implementation == "cudnn":
        who = f"runs in cuDNN: {call.plan}, workspace {call.workspace_bytes:,} B"
        yield Text(f"  {who}")
    else:
        yield Text(f"  {call.op} runs in XLA")
        found = (reason for each in call.attempts for reason in each.reasons)
        reasons = tuple(dict.fromkeys(found))
        yield Details(title="reasons", notes=reasons, mark="  - ", is_open=True)
    yield Details(title="notes", notes=call.notes, mark="  - ")


# --- the picture ----------------------------------------------------------------------


def _picture(split: Split) -> Iterator[str]:
    yield "flowchart TD"
    sources: dict[Value, str] = {}
    arrows: list[str] = []
    for i, value in enumerate(split.program.inputs):
        sources[value] = f"i{i}"
        yield f'  i{i}(["{_in_box(value)}"])'
    count = 0
    for step in split.steps:
        is_kernel = not isinstance(step, LeftToXla)
        works = step.works if is_kernel else [step.work]
        indent = "  "
        if is_kernel:
            indent = "    "
            yield f'  subgraph k{count}["{in_mermaid(_title(step))}"]'
        for work in works:
            left, right = ("[", "]") if is_kernel else ("(", ")")
            yield f'{indent}n{count}{left}"{in_mermaid(_called(work))}"{right}'
            for x in dict.fromkeys(_read(step, work)):
                if x in sources:
                    arrows.append(f'  {sources[x]} -->|"{_in_box(x)}"| n{count}')
            sources |= dict.fromkeys(work.outputs, f"n{count}")
            count += 1
        if is_kernel:
            yield "  end"
    for i, value in enumerate(split.program.results):
        if isinstance(value, Value) and value in sources:
            yield f'  r{i}(["{_in_box(value)}"])'
            arrows.append(f"  {sources[value]} --> r{i}")
    yield from arrows


def _title(kernel: Kernel | StandaloneKernel) -> str:
    return "kernel" if kernel.graph is None else label(kernel.graph)


def _read(
    step: Kernel | StandaloneKernel | LeftToXla, work: Operation | Activation
) -> Iterator[Value]:
    """Yield what an operation reads, where it is read from."""
    if isinstance(step, LeftToXla):
        yield from work.reads
        return
    yield from (x for x in work.reads if x in step.made)
    if work is step.works[0]:
        # And what the kernel reads beside: not every reader is told apart.
        yield from step.reads


def _in_box(value: Value) -> str:
    return in_mermaid(describe(value))  # type: ignore[arg-type]
