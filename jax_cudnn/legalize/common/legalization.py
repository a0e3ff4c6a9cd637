# SPDX-License-Identifier: Apache-2.0
"""Defines the result of legalisation: the rewrites of a graph for cuDNN, or reasons."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from jax_cudnn.graph import Graph, Target

XLA_ADVICE = 'Pass implementation="xla" or "auto".'
ADVICE = (
    'Pass implementation="xla" (or "auto") to compute it with XLA, or change the call '
    "as the reasons say."
)

Arrays = tuple[jax.Array, ...]
# Maps the original operands to those of the kernel.
Before = Callable[[Sequence[jax.Array]], Arrays]
# Maps (original operands, results of the kernel) to the original graph's results.
After = Callable[[Sequence[jax.Array], Sequence[jax.Array]], Arrays]


@dataclass(frozen=True, kw_only=True, slots=True)
class FastPath:
    """The array work around a kernel for operands that need no special care.

    ``applies`` says of the original operands, as a bool computed with them, whether
    ``before`` and ``after`` give the results that those of ``Rewrite`` would give.
    """

    applies: Callable[[Sequence[jax.Array]], jax.Array]
    before: Before
    after: After


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewrite:
    """A graph that cuDNN may take in place of another one.

    ``before`` maps the operands of the original graph to those of ``graph``; ``after``
    maps (original operands, results of ``graph``) to the original graph's results.
    ``fast_path`` is shorter array work that is right for most operands. ``notes`` says,
    a sentence each, which parts run outside cuDNN and why. ``rounds_sums`` says that
    sums in f32 have fewer digits on their way than the original graph gives them.
    ``waits`` says that the host waits for operands, so that no command buffer can have
    the launch.

    For jax_cudnn.policy, which decides whether the rewrite is taken: ``names`` says in
    words what was done to the graph. ``problem`` is the graph whose kernel is chosen,
    where that is not the original one; ``core`` is what of it the kernel computes,
    before it was rewritten, where that is not all of it.
    """

    graph: Graph
    before: Before
    after: After
    fast_path: FastPath | None = None
    notes: tuple[str, ...] = ()
    rounds_sums: bool = False
    waits: bool = False
    names: tuple[str, ...] = ()
    problem: Graph | None = None
    core: Graph | None = None

    def named(self, *names: str) -> "Rewrite":
        """Return the same with more said of what was done."""
        return replace(self, names=(*self.names, *names))

    def run(
        self,
        kernel: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
        operands: Sequence[jax.Array],
    ) -> Arrays:
        """Return the original graph's results, given what runs ``graph``.

        The path is chosen before the kernel: the GPU idles while the host reads the
        condition, and then only until the kernel starts.
        """

        def by(rewrite: Rewrite | FastPath) -> Arrays:
            return rewrite.after(operands, kernel(rewrite.before(operands)))

        if self.fast_path is None:
            return by(self)
        fast_path = self.fast_path
        kernel = jax.jit(kernel)  # One launch in the program's text for both.
        return jax.lax.cond(
            fast_path.applies(operands), lambda: by(fast_path), lambda: by(self)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Legalization:
    """The rewrites of a graph for cuDNN, or the reasons why there is none."""

    candidates: tuple[Rewrite, ...] = ()
    reasons: tuple[str, ...] = ()
    advice: str = ""


def around(
    rewrite: Rewrite,
    given: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] = tuple,
    results: After = lambda _, made: tuple(made),
    *,
    notes: tuple[str, ...] = (),
) -> Rewrite:
    """Return a rewrite that runs a graph, given one to run another graph in its place.

    ``given`` makes that one's operands of the graph's own. ``results`` makes the
    graph's results of its operands and of that one's results.
    """

    def before_of(before: Before) -> Before:
        return lambda operands: before(given(operands))

    def after_of(after: After) -> After:
        return lambda operands, made: results(operands, after(given(operands), made))

    fast_path = rewrite.fast_path
    if fast_path is not None:
        applies = fast_path.applies
        fast_path = FastPath(
            applies=lambda operands: applies(given(operands)),
            before=before_of(fast_path.before),
            after=after_of(fast_path.after),
        )
    return replace(
        rewrite,
        before=before_of(rewrite.before),
        after=after_of(rewrite.after),
        fast_path=fast_path,
        notes=(*rewrite.notes, *notes),
    )


# A target of None stands for an unknown GPU: only what no GPU can do is refused. What
# some GPUs or versions do not take is no rule's: see jax_cudnn/limits.
Rule = Callable[[Graph, Target | None], Legalization]
