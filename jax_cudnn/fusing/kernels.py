# SPDX-License-Identifier: Apache-2.0
"""Finds which operations of a function become one kernel, and why others do not.

A kernel is a contraction with the operations that follow it element by element, and
reductions of these at its end. Each is written as nodes with exactly the meaning
that it has in the function: its value, its derivatives, NaN, and the rounding to its
dtype. What cannot be written so ends the kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.config import Options
from jax_cudnn.fusing.broadcasts import Makers, narrowed
from jax_cudnn.fusing.contractions import Contraction, operand_array
from jax_cudnn.fusing.known import Activation
from jax_cudnn.fusing.program import Arrays, Atom, Number, Operation, Value
from jax_cudnn.fusing.views import View
from jax_cudnn.graph import DTypeName, Graph
from jax_cudnn.graph.pointwise import COMPARISONS
from jax_cudnn.lowering import (
    equation_place,
    is_explicitly_sharded,
    partial_axes,
    typed_like,
)
from jax_cudnn.ops.common.fusion import Fusion, Result
from jax_cudnn.ops.common.score_independent import External
from jax_cudnn.ops.common.tracing import (
    Step,
    StepResult,
    UntraceableError,
    check_count,
    write_equation,
)
from jax_cudnn.reference.dtypes import dtype_name

# What a program is a list of.
Work = Operation | Activation
_FLOATS = ("f32", "bf16", "f16")


@dataclass(frozen=True, kw_only=True)
class Read(External):
    """An array beside the contraction, of a view's rank, with 1 where it broadcasts."""

    value: Value
    shape: tuple[int, ...]
    view: View

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        return self.value.dtype


class Rounding(NamedTuple):
    """The dtype that a step's result has, and the parameter of its mode."""

    dtype: DTypeName | None = None
    alpha: float = 0.0


@dataclass(eq=False)
class Kernel:
    """A contraction with what follows it, being put together and then run.

    ``made`` says which step makes a value, and ``views`` how its axes lie. ``reduced``
    are the steps that are reductions, with the axes of the kernel's tensor along
    which they are, and ``casts`` says of what each cast of one is: XLA casts after the
    kernel. ``graph`` and ``options`` are what it was run as.
    """

    contraction: Contraction
    works: list[Work] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    reduced: dict[int, frozenset[int]] = field(default_factory=dict)
    casts: dict[Value, Value] = field(default_factory=dict)
    roundings: dict[int, Rounding] = field(default_factory=dict)
    made: dict[Value, StepResult] = field(default_factory=dict)
    views: dict[Value, View] = field(default_factory=dict)
    outputs: tuple[Value, ...] = ()
    graph: Graph | None = None
    options: Options | None = None

    def __post_init__(self) -> None:
        """Begin with the contraction."""
        self.works.append(self.contraction.operation)
        (result,) = self.contraction.operation.outputs
        self.made[result] = StepResult(0)
        self.views[result] = self.contraction.view

    @property
    def work(self) -> Operation:
        """The operation to name in a refusal of the kernel."""
        return self.contraction.operation

    @property
    def reads(self) -> tuple[Value, ...]:
        """The arrays that it reads, each once."""
        others = (
            x.value for s in self.steps for x in s.arguments if isinstance(x, Read)
        )
        return tuple(dict.fromkeys((*self.contraction.reads, *others)))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of floats that its operations may have."""
        own = dtype_name(self.contraction.dtype)
        operands = {dtype_name(value.dtype) for value in self.contraction.reads}
        if own == "f64":
            return ("f64",)
        return () if "f64" in operands else _FLOATS

    # --- adding operations ------------------------------------------------------------

    def add(self, work: Work, makers: Makers) -> str:
        """Add an operation that reads values of the kernel; return why not, or "".

        All that it reads beside them is there before the kernel.
        """
        count = len(self.steps)
        try:
            self._add(work, makers)
            check_count(self.steps)
        except UntraceableError as reason:
            del self.steps[count:]
            for found in (self.roundings, self.reduced):
                for position in [i for i in found if i > count]:
                    del found[position]
            for output in work.outputs:
                self.casts.pop(output, None)
                self.made.pop(output, None)
                self.views.pop(output, None)
            place = equation_place(work.equation) if isinstance(work, Operation) else ""
            return str(reason).removesuffix(f" ({place})")
        self.works.append(work)
        return ""

    def _add(self, work: Work, makers: Makers) -> None:
        if len(work.outputs) != 1:
            raise UntraceableError("it has several results")
        (output,) = work.outputs
        if any(self.is_reduction(x) for x in work.reads):
            if not (isinstance(work, Operation) and _is_cast(work)):
                raise UntraceableError("nothing follows a reduction")
            self._check_dtype(output)
            self._check_cast(work)
            (x,) = work.reads
            self.casts[output] = x
            self.made[output], self.views[output] = self.made[x], self.views[x]
            return
        views = {self.views[x] for x in work.reads if x in self.made}
        if len(views) > 1:
            raise UntraceableError("it combines axes in different orders")
        (view,) = views
        if isinstance(work, Operation) and work.name in _LAYOUT:
            (x,) = work.inputs
            assert isinstance(x, Value)
            self.made[output], self.views[output] = self.made[x], _viewed(work, view)
            return
        if isinstance(work, Operation) and work.name in REDUCTIONS:
            self.made[output], self.views[output] = self._reduction(work, view)
            return
        if output.shape != view.shape:
            raise UntraceableError("its result has other sizes than the contraction's")
        self.made[output] = self._written(work, view, makers)
        self.views[output] = view

    def _written(self, work: Work, view: View, makers: Makers) -> StepResult:
        (output,) = work.outputs
        start = len(self.steps)
        self._check_dtype(output)
        if isinstance(work, Activation):
            (x,) = (self.made[x] for x in work.reads)
            made = self._activation(work, x)
        elif _is_cast(work):
            (x,) = (self.made[x] for x in work.reads)
            self._check_cast(work)
            self.steps.append(Step("identity", (x.position,)))
            made = StepResult(len(self.steps))
        else:
            args = [self._argument(x, view, makers) for x in work.inputs]
            dtype = next(
                (x.dtype for x in (*work.inputs, output) if _is_float(x)),
                np.dtype(np.float64 if self.dtypes == ("f64",) else np.float32),
            )
            written = write_equation(work.jaxpr, work.equation, args, self.steps, dtype)
            if not isinstance(written, StepResult):
                raise UntraceableError("it does not depend on the contraction")
            made = written
        if made.position > start and not made.is_bool:
            alpha = self.roundings.get(made.position, Rounding()).alpha
            self.roundings[made.position] = Rounding(_name_of(output.dtype), alpha)
        return made

    def is_reduction(self, x: Value) -> bool:
        """Whether a value is a reduction that the kernel makes."""
        made = self.made.get(x)
        return made is not None and made.position in self.reduced

    def _reduction(self, work: Operation, view: View) -> tuple[StepResult, View]:
        """Write a reduction; return it, and how its axes lie."""
        (x,), (output,) = work.inputs, work.outputs
        assert isinstance(x, Value)
        self._check_dtype(output)
        operands = (each.aval for each in self.contraction.reads)
        if any(map(is_explicitly_sharded, operands)):
            raise UntraceableError("the types of operands say how these are sharded")
        if self.contraction.operation.name != "dot_general":
            raise UntraceableError("it follows a convolution")
        reduced = view.reduced(work.params["axes"])
        if reduced is None:
            raise UntraceableError("it leaves a part of the rows, columns or batch")
        left = zip(reduced.order, reduced.stored_shape, view.stored_shape, strict=True)
        axes = frozenset(axis for axis, size, full in left if size != full)
        if axes.isdisjoint((_ROWS, _COLUMNS)):
            raise UntraceableError("it is along neither rows nor columns")
        self.steps.append(Step(REDUCTIONS[work.name], (self.made[x].position,)))
        position = len(self.steps)
        self.reduced[position] = axes
        self.roundings[position] = Rounding(_name_of(output.dtype))
        return StepResult(position), reduced

    def _activation(self, work: Activation, x: StepResult) -> StepResult:
        form = work.form
        self.steps.append(Step(form.mode, (x.position,)))
        position = len(self.steps)
        self.roundings[position] = Rounding(alpha=form.alpha)
        if form.factor is not None:
            self.steps.append(Step("mul", (position, form.factor)))
        return StepResult(len(self.steps))

    def _check_dtype(self, x: Atom) -> None:
        name = dtype_name(x.dtype)
        if name not in (*self.dtypes, "bool"):
            raise UntraceableError(f"it computes in {name or x.dtype}")

    def _check_cast(self, work: Operation) -> None:
        (x,) = work.inputs
        name = dtype_name(x.dtype)
        if work.params.get("sharding") is not None:
            raise UntraceableError("it says how its result is sharded")
        if name == "i32" and work.outputs[0].dtype == np.float32:
            return
        if name not in self.dtypes:
            raise UntraceableError(f"it converts {name or x.dtype}")

    def _argument(self, atom: Atom, view: View, makers: Makers) -> Any:
        """Return what an operation reads: a step's result, a number, or an array."""
        if isinstance(atom, Value) and atom in self.made:
            self._check_dtype(atom)
            return self.made[atom]
        source, shape = narrowed(atom, len(view.shape), makers)
        if source.dtype == np.bool_:
            raise UntraceableError(
                "it reads truth values that are no comparison's here"
            )
        if isinstance(source, Number):
            return source.value
        self._check_dtype(source)
        if partial_axes(source.aval):
            raise UntraceableError("it reads what is reduced or unreduced by its type")
        return Read(value=source, shape=shape, view=view)

    # --- running ----------------------------------------------------------------------

    def run(self, arrays: Arrays, options: Options) -> None:
        """Run it as one graph, and add its results to the arrays."""
        self.options = options
        fusion, value, rounded = self.contraction.begin(
            arrays, is_rounded=bool(self.steps)
        )
        names = self._write(fusion, value, arrays)
        main, *others = self._ordered_results()
        dtype = rounded if self.made[main].position == 0 else _name_of(main.dtype)
        aside = list(dict.fromkeys(names[self.made[x].position] for x in others))
        view = self.views[main]
        target = Result(names[self.made[main].position], dtype, view.order)
        aside = [name for name in aside if name != target.value]
        orders = {name: fusion.writer[name].order for name in aside}
        self.graph = fusion.graph(target, aside)
        results = fusion.compute(self.graph, options)
        orders |= {target.value: view.order}
        by_name = dict(zip((target.value, *aside), results, strict=True))
        for x in (main, *others):
            name = names[self.made[x].position]
            stored = self.views[x].array(by_name[name], orders[name])
            # Sharded as in the program that was traced, by which the rest goes.
            arrays[x] = typed_like(stored.astype(x.dtype), x.aval)
        for x, source in self.casts.items():
            if source in arrays:
                arrays[x] = arrays[source].astype(x.dtype)

    def _ordered_results(self) -> list[Value]:
        """Return the graph's results, the last first: it is what the others lead to."""
        results: dict[Value, None] = {}
        for x in self.outputs:
            while x in self.casts:
                x = self.casts[x]
            results[x] = None
        return sorted(results, key=lambda x: -self.made[x].position)

    def _write(self, fusion: Fusion, value: str, arrays: Arrays) -> list[str]:
        """Return the tensors that the contraction and each step make."""
        names, operands = [value], dict[Read, str]()
        rank = len(fusion.writer[value].dims)

        def argument(x: int | float | External) -> str:
            if isinstance(x, int):
                return names[x]
            if not isinstance(x, External):
                return fusion.writer.constant(x, rank)
            assert isinstance(x, Read)
            if x not in operands:
                array = operand_array(x.value, arrays, x.shape)
                name = f"operand_{_letters(len(operands))}"
                operands[x] = fusion.operand(name, x.view.operand(array))
            return operands[x]

        for i, step in enumerate(self.steps, 1):
            dtype, alpha = self.roundings.get(i, Rounding())
            if (axes := self.reduced.get(i)) is not None:
                (source,) = map(argument, step.arguments)
                sizes = enumerate(fusion.writer[source].dims)
                dims = tuple(1 if axis in axes else size for axis, size in sizes)
                made = fusion.writer.reduce_to(source, dims, step.mode, dtype=dtype)
                names.append(made)
                continue
            if step.mode in COMPARISONS:
                dtype = None
            given = map(argument, step.arguments)
            names.append(
                fusion.writer.pointwise(step.mode, *given, alpha=alpha, dtype=dtype)
            )
        return names


def _name_of(dtype: np.dtype) -> DTypeName:
    name: Any = dtype_name(dtype)
    return name


def _letters(count: int) -> str:
    """Return a name without digits, which nodes have: a, b, ..., z, ba, ..."""
    rest, letter = divmod(count, 26)
    return (_letters(rest) if rest else "") + "abcdefghijklmnopqrstuvwxyz"[letter]


# --- reading what surrounds a kernel --------------------------------------------------

# The axes of a matmul's tensors other than the batch.
_ROWS, _COLUMNS = 1, 2
# The operations that a kernel ends with, and their modes.
REDUCTIONS = {"reduce_max": "max", "reduce_min": "min", "reduce_sum": "add"}
_LAYOUT = ("broadcast_in_dim", "copy", "copy_p", "reshape", "squeeze", "transpose")


def _viewed(work: Operation, view: View) -> View:
    """Return how the result of a layout operation lies in the tensor it is given."""
    shape = work.outputs[0].shape
    params: Mapping[str, Any] = work.params
    if params.get("dimensions") is not None and work.name == "reshape":
        raise UntraceableError("it moves elements to other axes")
    if params.get("sharding") is not None:
        raise UntraceableError("it says how its result is sharded")
    if work.name == "broadcast_in_dim" and _size(shape) != _size(view.shape):
        raise UntraceableError("its result has other sizes than the contraction's")
    if work.name == "transpose":
        found = view.transposed(params["permutation"])
    elif shape == view.shape:
        found = view
    else:
        found = view.reshaped(shape)
    if found is None:
        raise UntraceableError("it moves elements between rows, columns and batch")
    return found


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _is_float(x: Atom) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_cast(work: Operation) -> bool:
    """Whether an operation converts numbers, which is rounding."""
    if work.name != "convert_element_type":
        return False
    return all(each.dtype != jax.numpy.bool_ for each in (*work.inputs, *work.outputs))
