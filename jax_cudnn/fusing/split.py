# SPDX-License-Identifier: Apache-2.0
"""Splits a function into kernels and XLA's operations, and puts them in order.

A value's level is the last contraction that it depends on. A kernel takes the
operations of its contraction's level that read its values, and beside them only values
of lower levels. So no two kernels wait for each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax_cudnn.fusing.contractions import contraction_of
from jax_cudnn.fusing.kernels import REDUCTIONS, Kernel
from jax_cudnn.fusing.known import Activation, with_activations
from jax_cudnn.fusing.norms import Norm, norms_of
from jax_cudnn.fusing.program import Arrays, Operation, Program, Value, needed
from jax_cudnn.fusing.standalone import (
    Settings,
    StandaloneKernel,
    standalone_kernel,
    why_left,
)

Work = Operation | Activation | Norm


class LeftToXla(NamedTuple):
    """An operation that XLA keeps, and why."""

    work: Operation | Activation
    reason: str

    def run(self, arrays: Arrays) -> None:
        """Compute it as JAX does, and add its results to the arrays."""
        self.work.run(arrays)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Kernels and XLA's operations, in the order in which they run.

    ``norms`` says of operations of norms why these are no kernels.
    """

    program: Program
    steps: tuple[Kernel | StandaloneKernel | LeftToXla, ...]
    norms: Mapping[Work, str]

    @property
    def kernels(self) -> tuple[Kernel | StandaloneKernel, ...]:
        """The kernels, in the order in which they run."""
        return tuple(step for step in self.steps if not isinstance(step, LeftToXla))

    @property
    def left(self) -> tuple[LeftToXla, ...]:
        """The operations that XLA keeps, in the order in which they run."""
        return tuple(step for step in self.steps if isinstance(step, LeftToXla))


def split(program: Program, settings: Settings, *, is_strict: bool = False) -> Split:
    """Return the kernels that a program is made of, and what is left for XLA.

    In a strict split all norms are kernels.
    """
    norms = norms_of(program)
    left = {} if is_strict else {norm: why_left(norm, settings) for norm in norms.found}
    taken = [norm for norm in norms.found if not left.get(norm)]
    works = needed(_with_norms(with_activations(program), taken), program.results)
    reasons: dict[Work, str] = {**norms.reasons}
    for norm, reason in left.items():
        if reason:
            reasons |= dict.fromkeys(norm.parts, reason)
    refused: dict[Work, str] = {}
    while True:
        found = _Assignment(program, works, refused, reasons, settings)
        more = found.unwanted(is_strict=is_strict)
        if not more:
            return Split(program=program, steps=found.ordered(), norms=reasons)
        refused |= more


def _with_norms(
    works: Sequence[Operation | Activation], norms: Iterable[Norm]
) -> list[Work]:
    """Return the operations with each norm in place of its last one.

    Others of a norm stay where something else reads them.
    """
    given = set(works)
    last: dict[Work, Norm] = {
        norm.parts[-1]: norm for norm in norms if given.issuperset(norm.parts)
    }
    return [last.get(work, work) for work in works]


class _Assignment:
    """The assignment of operations to kernels, except for those that are refused.

    ``norms`` says of operations why they are no norm of cuDNN's.
    """

    def __init__(
        self,
        program: Program,
        works: Iterable[Work],
        refused: Mapping[Work, str],
        norms: Mapping[Work, str],
        settings: Settings,
    ) -> None:
        self._program = program
        self._works = tuple(works)
        self._refused = refused
        self._makers = {x: work for work in self._works for x in work.outputs}
        self._kernel_of: dict[Work, Kernel] = {}
        self._norms = norms
        self._reasons: dict[Work, str] = {}
        self._standalone: dict[Work, StandaloneKernel] = {}
        # For y = gelu(x @ w1 + b) and z = y @ w2 + x, the values from x @ w1 to y have
        # level 1, and those from y @ w2 to z have level 2. The last addition may be in
        # kernel 2: x has level 0, so it is known before the kernel runs. If an operand
        # were of level 2 and made by XLA from the kernel's result, it could not be.
        levels: dict[Value, int] = {}
        # The kernel of each level, but those that began before an effect.
        kernels: dict[int, Kernel] = {}
        count = 0
        for work in self._works:
            level = max((levels.get(x, 0) for x in work.reads), default=0)
            kernel = self._begun(work)
            if (alone := standalone_kernel(work, settings)) is not None:
                self._standalone[work] = alone
            elif kernel is not None:
                count += 1
                level = count
                kernels[level] = kernel
            elif level in kernels:
                self._joined(work, kernels[level], levels, level)
            if work.has_effects:
                # What follows an effect stays after it.
                kernels.clear()
            levels |= dict.fromkeys(work.outputs, level)
        self._levels = levels
        self._readers: dict[Value, list[Work]] = {}
        for work in self._works:
            for x in work.reads:
                self._readers.setdefault(x, []).append(work)
        self._results = {x for x in program.results if isinstance(x, Value)}
        for kernel in set(self._kernel_of.values()):
            kernel.outputs = tuple(x for x in kernel.made if self._leaves(x, kernel))

    def _begun(self, work: Work) -> Kernel | None:
        """Return a new kernel, if the operation is a contraction that a graph has."""
        if not isinstance(work, Operation):
            return None
        contraction = contraction_of(work, self._makers)
        if contraction is None:
            return None
        if isinstance(contraction, str):
            self._reasons[work] = contraction
            return None
        self._kernel_of[work] = kernel = Kernel(contraction)
        return kernel

    def _joined(
        self, work: Work, kernel: Kernel, levels: Mapping[Value, int], level: int
    ) -> None:
        """Add an operation to the kernel of its level, or note why not."""
        outside = [x for x in work.reads if x not in kernel.made]
        if len(outside) == len(work.reads):
            return
        if work in self._refused:
            reason = self._refused[work]
        elif any(self._makers.get(x) in self._standalone for x in outside):
            reason = _FOLLOWS_STANDALONE
        elif any(levels.get(x, 0) == level for x in outside):
            reason = "it reads what XLA makes of the kernel's result"
        elif work.name in _KEPT and work.name not in REDUCTIONS:
            reason = _KEPT[work.name]
        else:
            assert not isinstance(work, Norm), "norms are kernels of their own"
            reason = kernel.add(work, self._makers)
        if reason:
            self._reasons[work] = reason
        else:
            self._kernel_of[work] = kernel

    def _leaves(self, value: Value, kernel: Kernel) -> bool:
        """Whether a value of a kernel is read outside of it, or is a result."""
        readers = self._readers.get(value, ())
        is_read = any(self._kernel_of.get(reader) is not kernel for reader in readers)
        return is_read or value in self._results or self._reads_anew(value, kernel)

    def _reads_anew(self, value: Value, kernel: Kernel) -> bool:
        """Whether some kernel reads it by looking through what others make of it."""
        others = (each for each in set(self._kernel_of.values()) if each is not kernel)
        return any(value in other.reads for other in others)

    # --- what is better left to XLA ---------------------------------------------------

    def unwanted(self, *, is_strict: bool) -> dict[Work, str]:
        """Return the operations that are not to be in their kernels, and why."""
        found: dict[Work, str] = {}
        for kernel in dict.fromkeys(self._kernel_of.values()):
            sums = [x for x in kernel.outputs if kernel.is_reduction(x)]
            if len(sums) not in (0, len(kernel.outputs)) and not is_strict:
                # What they are taken of is written all the same.
                reason = _KEPT["reduce_sum"]
                found |= {self._makers[x]: reason for x in sums}
                continue
            for value in kernel.outputs:
                maker = self._makers[value]
                if kernel.made[value].is_bool:
                    found[maker] = "kernels give no truth values to others"
                elif self._is_widened(value, kernel):
                    found[maker] = "XLA widens it where it reads it"
                elif kernel.made[value].position == 0 and maker is not kernel.works[0]:
                    continue
                elif len(kernel.outputs) > 1 and (extra := self._extra(value, kernel)):
                    found |= dict.fromkeys(
                        extra, "XLA fuses it with what reads it, without memory"
                    )
                    break
        return found

    def _is_widened(self, value: Value, kernel: Kernel) -> bool:
        """Whether a result is a narrower one of the kernel, cast for XLA's sake.

        XLA casts it within what reads it. It would take more memory.
        """
        maker = self._makers[value]
        source = next(iter(maker.reads), None)
        return (
            maker.name == "convert_element_type"
            and source in kernel.made
            and value.dtype.itemsize > source.dtype.itemsize
            and self._is_read_within(value, kernel)
        )

    def _is_read_within(self, value: Value, kernel: Kernel) -> bool:
        """Whether XLA alone reads a value, as part of what it computes from it."""
        return (
            value not in self._results
            and not self._reads_anew(value, kernel)
            and all(map(self._is_elementwise_or_sum, self._readers.get(value, ())))
        )

    def _extra(self, value: Value, kernel: Kernel) -> tuple[Work, ...]:
        """Return what makes a result that XLA has no need of in memory.

        It computes that from another result of the kernel, within what reads it.
        """
        if not self._is_read_within(value, kernel):
            return ()
        extra = [self._makers[value]]
        pending = list(extra)
        while pending:
            for x in pending.pop().reads:
                if x not in kernel.made or x in kernel.outputs:
                    continue
                maker = self._makers[x]
                others = set(self._readers[x]).difference(extra)
                if maker is kernel.works[0] or others:
                    return ()
                if maker not in extra:
                    extra.append(maker)
                    pending.append(maker)
        return tuple(extra) if kernel.works[0] not in extra else ()

    def _is_elementwise_or_sum(self, work: Work) -> bool:
        """Whether XLA computes an operation's operands within it."""
        if work in self._kernel_of:
            # Those of the kernel itself read it in any case.
            return False
        return isinstance(work, Activation) or work.name in _FUSED_BY_XLA

    # --- the order --------------------------------------------------------------------

    def ordered(self) -> tuple[Kernel | StandaloneKernel | LeftToXla, ...]:
        """Return what is needed, in an order in which it can run."""
        needed = self._needed()
        done: set[Work | Kernel] = set()
        steps: list[Kernel | StandaloneKernel | LeftToXla] = []
        for work in self._works:
            pending: list[Work] = [work] if work in needed else []
            while pending:
                current = pending[-1]
                step = self._kernel_of.get(current, current)
                before = [
                    each
                    for each in self._before(step)
                    if self._kernel_of.get(each, each) not in done
                ]
                if step in done or not before:
                    pending.pop()
                    if step not in done:
                        done.add(step)
                        steps.append(self._as_step(step))
                else:
                    pending += reversed(before)
        return tuple(steps)

    def _as_step(self, step: Work | Kernel) -> Kernel | StandaloneKernel | LeftToXla:
        if isinstance(step, Kernel):
            return step
        if step in self._standalone:
            return self._standalone[step]
        assert not isinstance(step, Norm), "norms are kernels of their own"
        reasons = (self._norms.get(step), self._reasons.get(step))
        return LeftToXla(step, next(filter(None, reasons), "") or self._reason(step))

    def _reason(self, work: Work) -> str:
        """Return why XLA keeps an operation that no kernel was asked to take."""
        if work.name in _KEPT:
            return _KEPT[work.name]
        if work.name == "custom_jvp_call":
            return _OWN_RULE
        if is_free(work):
            return "it moves nothing"
        if any(self._makers.get(x) in self._standalone for x in work.reads):
            return _FOLLOWS_STANDALONE
        if any(self._levels.get(x, 0) for x in work.reads):
            return "it follows operations of XLA's"
        return "it depends on no contraction"

    def _before(self, step: Work | Kernel) -> list[Work]:
        """Return what makes the operands of a kernel or an operation of XLA's."""
        return [self._makers[x] for x in step.reads if x in self._makers]

    def _needed(self) -> set[Work]:
        """Return what is run: what leads to a result, and what has an effect."""
        pending = [self._makers[x] for x in self._results if x in self._makers]
        pending += [work for work in self._works if work.has_effects]
        needed: set[Work] = set()
        while pending:
            work = pending.pop()
            if work not in needed:
                needed.add(work)
                pending += self._before(self._kernel_of.get(work, work))
        return needed


# What XLA puts into one kernel with what it reads.
_FUSED_BY_XLA = frozenset(
    (
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "ceil"),
        *("convert_element_type",),
        *("cos", "div", "eq", "erf", "erfc", "exp", "exp2", "expm1", "floor", "ge"),
        *("gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt"),
        *("max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_and"),
        *("reduce_max", "reduce_min", "reduce_or", "reduce_sum", "reshape", "round"),
        *("rsqrt", "select_n", "sign", "sin", "sqrt", "square", "squeeze", "sub"),
        *("tan", "tanh"),
    )
)
_FOLLOWS_STANDALONE = "norms and calls of jax_cudnn's take nothing of what follows"
_OWN_RULE = "it has a derivative rule of its own, which a graph cannot keep"
# What no kernel takes.
_KEPT = {
    **dict.fromkeys(
        (
            *("argmax", "argmin", "cumsum", "reduce_max", "reduce_min"),
            *("reduce_prod", "reduce_sum"),
        ),
        "XLA fuses reductions with the operations around them",
    ),
    **dict.fromkeys(
        ("scan", "while"), "loops are left to XLA; use fuse inside of the loop"
    ),
    **dict.fromkeys(
        ("checkpoint", "remat2"),
        "what jax.checkpoint computes again is its own; fuse within it",
    ),
    **dict.fromkeys(("jit", "pjit"), "it says how it is sharded or compiled"),
    "cond": "branches are branches; fuse within them",
    "custom_vjp_call": _OWN_RULE,
    "shard_map": "it is what each device computes; fuse within it",
}


def is_free(work: Work) -> bool:
    """Whether an operation only gives an array another shape, in the same memory."""
    is_plain = isinstance(work, Operation) and work.params.get("dimensions") is None
    return work.name == "squeeze" or (work.name == "reshape" and is_plain)
