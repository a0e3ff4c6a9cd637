# SPDX-License-Identifier: Apache-2.0
"""Measures a workload by many contenders: compiled at once, checked, timed in turn.

A `Cell` says how each contender computes it. A contender that fails has a row that says
why, and the others go on. contest_report.py runs cells and writes the page.

Each contender runs several sets of operands in one program (PyTorch: in one call),
which together are too large for the GPU's cache.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import torch_side
from benchmarks.harness.checks import attempt, compared
from benchmarks.harness.operands import Drawn, Operand, drawn_with_cotangents
from benchmarks.harness.timing import Contender, alternate, summary
from benchmarks.harness.torch_side import torch
from jax_cudnn import choices, plans
from jax_cudnn.choices import Choice, Key
from jax_cudnn.tuning.stopwatch import compile_over_sets

FORWARD, BOTH, LOSS = "forward", "with gradients", "of a loss"

XLA, UNTUNED, FIRST, TUNED = "xla", "untuned", "cudnn", "tuned"
EAGER, COMPILED = "torch eager", "torch compiled"
BY_XLA = "jax_cudnn by xla"
OURS = (BY_XLA, UNTUNED, FIRST, TUNED)
# What a time may be at most, as a ratio to the best rival's, where a cell says no more.
GOALS = {UNTUNED: 1.05, TUNED: 1.0}

# The largest relative errors (of norms) of results and of gradients.
#
# Of results: bf16 rounds to 2^-9, and up to four roundings on the way average out.
#
# Of gradients: XLA's code, which tuning may choose, rounds sums before a bias is added.
# Then some values z move across 0, where the gradient of relu jumps, or another value
# is the maximum. With z of deviation 1 and an error of about 2^-9, this happens to 1 or
# 2 of 1000 values. The relative error is the square root of this share, 0.04.
#
# Rivals may keep sums in bf16 as well, such as those of the bias's gradient. A wrong
# result, with a factor or transposition too many, is off by about 1.
OWN_BOUNDS = (2e-2, 1e-1)
RIVALS_BOUNDS = (3e-2, 3e-1)

_THREADS = 16

Function = Callable[..., Any]
Rearrange = Callable[[Sequence[Any]], list[Any]]
_Pair = tuple[list[Any], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a contender computes a cell, in the layout of operands that it likes.

    ``function`` takes what ``enter`` makes of the operands, and returns an array or a
    tuple of them. ``cotangents`` brings those of the cell into its layout; ``outputs``
    and ``gradients`` bring back what it computed. One whose results are not those of
    others, as of dropout, is not ``is_checked``. PyTorch's runs ``around`` a context.
    """

    function: Function
    enter: Rearrange = list
    cotangents: Rearrange = list
    outputs: Rearrange = list
    gradients: Rearrange = list
    is_checked: bool = True
    around: Callable[[], contextlib.AbstractContextManager[Any]] = (
        contextlib.nullcontext
    )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A workload. Gradients are those of all operands of floats.

    Attributes:
      operation: what it is, and ``size``, of what size.
      operands: random ones, or the numbers themselves.
      rivals: what runs without us; the first one says what the results are.
      ours: returns the function of jax_cudnn, a new one at each call, so that nothing
        that was traced before is remembered. None: there is none.
      by_xla: the same as XLA's code, or None where that is the rival "xla".
      first: the same with cuDNN's first plan, or None.
      torch: PyTorch's function, which takes tensors and is also compiled, or several by
        name, each as it is, or None.
      truth: what computes the same in f32, by default as the first rival does.
      has_gradients: whether they are a workload as well.
      has_loss: whether those of the sum of the results' squares are one, too. Of this
        loss, XLA sees how cotangents depend on results.
      has_products: whether XLA chooses among kernels for it, which it times while it
        compiles: nothing else runs meanwhile.
      bounds: the largest relative errors of results and gradients of what is ours.
        Default: `OWN_BOUNDS`.
      goals: for a direction, what a contender may take at most, relative to the best
        rival. Default: `GOALS`.
      baseline: the rival to which all times are relative. Default: the fastest one.
    """

    operation: str
    size: str
    operands: tuple[Operand | np.ndarray, ...]
    rivals: Mapping[str, Way]
    ours: Callable[[], Function] | None
    by_xla: Function | None = None
    first: Function | None = None
    torch: Way | Mapping[str, Way] | None = None
    truth: Function | None = None
    has_gradients: bool = True
    has_loss: bool = False
    has_products: bool = False
    bounds: tuple[float, float] | None = None
    goals: Mapping[str, Mapping[str, float]] = dataclasses.field(
        default_factory=lambda: {}
    )
    baseline: str = ""

    @property
    def name(self) -> str:
        """The workload in one line."""
        return f"{self.operation} {self.size}".strip()

    def __str__(self) -> str:
        return self.name

    @property
    def directions(self) -> tuple[str, ...]:
        """What of it is timed."""
        return (FORWARD, BOTH, LOSS)[: 1 + self.has_gradients + self.has_loss]

    @property
    def plain(self) -> Function:
        """The function of the first rival."""
        return next(iter(self.rivals.values())).function

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the operands."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.operands]

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the results."""
        return jax.tree.leaves(jax.eval_shape(self.plain, *self.types))

    def limits(self, what: str) -> Mapping[str, float]:
        """Return what contenders may take at most, relative to the best rival."""
        return {**GOALS, **self.goals.get(what, {})}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which contenders there are beside XLA, and how long they are timed.

    ``with_compiled``: PyTorch's is compiled, too. ``is_beside_jax``: ratios are to the
    fastest rival in JAX, and PyTorch's is none.
    """

    with_torch: bool
    with_tuning: bool
    with_first: bool = True
    with_compiled: bool = True
    is_beside_jax: bool = False
    max_plans: int = 3
    most_sets: int = 8
    rounds: int = 5
    round_ms: float = 20.0


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A contender; ``results`` are those of the first set, in the cell's layout."""

    contender: Contender
    results: Callable[[], _Pair]
    is_checked: bool


# --- JAX ------------------------------------------------------------------------------


def program(function: Function, what: str) -> Callable[..., _Pair]:
    """Return a function of operands and cotangents: results, and all gradients.

    Those of a loss take no cotangents.
    """
    if what == LOSS:
        of_loss = program(lambda *operands: _squares(function(*operands)), BOTH)
        return lambda operands, _: of_loss(operands, [jnp.ones(())])

    def run(operands: Sequence[Any], cotangents: Sequence[Any]) -> _Pair:
        if what == FORWARD:
            return jax.tree.leaves(function(*operands)), []
        places = [
            i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)
        ]

        def of_floats(*floats: Any) -> list[Any]:
            given = list(operands)
            for place, x in zip(places, floats, strict=True):
                given[place] = x
            return jax.tree.leaves(function(*given))

        results, pull = jax.vjp(of_floats, *(operands[i] for i in places))
        return results, list(pull(list(cotangents)))

    return run


def _squares(results: Any) -> jax.Array:
    each = [jnp.sum(jnp.square(_wide(x))) for x in jax.tree.leaves(results)]
    return jnp.sum(jnp.stack(each))


def _of_jax(way: Way, what: str, sets: Sequence[Drawn]) -> _Made:
    entered: list[Any] = [(way.enter(x), way.cotangents(grads)) for x, grads in sets]
    compiled = compile_over_sets(program(way.function, what), entered)

    def call() -> Any:
        return compiled(entered)

    def results() -> _Pair:
        outputs, gradients = call()[0]
        return way.outputs(outputs), way.gradients(gradients)

    return _Made(
        contender=Contender(call=call, wait=jax.block_until_ready, count=len(entered)),
        results=results,
        is_checked=way.is_checked,
    )


def _truth(cell: Cell, what: str, first: Drawn) -> Callable[[], _Pair]:
    """Return what computes XLA's results from the same numbers in f32, compiled.

    XLA multiplies in TF32, which holds all bf16 operands exactly.
    """

    def in_f32(operands: list[Any], cotangents: list[Any]) -> _Pair:
        run = program(cell.truth or cell.plain, what)
        return run(list(map(_wide, operands)), list(map(_wide, cotangents)))

    compiled = jax.jit(in_f32).lower(*first).compile()
    return lambda: jax.block_until_ready(compiled(*first))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


# --- PyTorch --------------------------------------------------------------------------


def _of_torch(way: Way, name: str, what: str, sets: Sequence[Drawn]) -> _Made:
    """Return PyTorch's function, which is compiled when it is called first."""
    function = way.function
    if name == COMPILED:
        function = torch.compile(function, dynamic=False)
    moved: list[_Pair] = []
    for operands, cotangents in sets:
        tensors = way.enter(list(map(torch_side.from_jax, operands)))
        for x in tensors:
            x.requires_grad_(what == BOTH and x.is_floating_point())
        moved.append(
            (tensors, way.cotangents(list(map(torch_side.from_jax, cotangents))))
        )

    def one(operands: list[Any], cotangents: list[Any]) -> _Pair:
        with way.around():
            found = function(*operands)
            outputs = list(found) if isinstance(found, tuple | list) else [found]
            if what == FORWARD:
                return outputs, []
            floats = [x for x in operands if x.requires_grad]
            return outputs, list(torch.autograd.grad(outputs, floats, cotangents))

    def call() -> Any:
        return [one(*each) for each in moved]

    def results() -> _Pair:
        outputs, gradients = call()[0]
        found = way.outputs(outputs), way.gradients(gradients)
        outputs, gradients = ([torch_side.to_jax(x) for x in each] for each in found)
        return outputs, gradients

    made = _Made(
        contender=torch_side.contender(call, len(moved)),
        results=results,
        is_checked=way.is_checked,
    )
    made.contender.wait(made.contender.call())
    return made


# --- correctness ----------------------------------------------------------------------


def _check(
    cell: Cell, what: str, name: str, made: _Made, want: _Pair | None
) -> list[float]:
    """Return the largest relative errors of results and of gradients, if there are."""
    if want is None or not made.is_checked:
        return []
    found = made.results()
    if what == LOSS:
        found, want = _joined(found), _joined(want)
    bounds = (cell.bounds or OWN_BOUNDS) if name in OURS else RIVALS_BOUNDS
    return compared(found, want, bounds)


def _joined(pair: _Pair) -> _Pair:
    """Return the gradients of a loss as one array.

    One of them alone may be rounding: the squares of what a batch norm gives have the
    same sum for all x.
    """
    results, gradients = pair
    return results, [jnp.concatenate([jnp.ravel(_wide(x)) for x in gradients])]


# --- one cell -------------------------------------------------------------------------

# By direction and name: a contender, or why there is none.
_Field = dict[tuple[str, str], _Made | str]


def measure(
    cell: Cell, settings: Settings, shipped: Mapping[Key, Choice]
) -> list[dict[str, Any]]:
    """Return a row for each contender of a cell, forward and with gradients.

    What is untuned knows only the shipped choices, and none of other cells.
    """
    choices.table().clear()
    choices.table().add(shipped)
    sets = drawn_with_cotangents(cell.operands, cell.outputs, settings.most_sets)
    ways, torch_ways = _ways(cell, settings), _torch_ways(cell, settings)
    is_checked = any(x.is_checked for x in (*ways.values(), *torch_ways.values()))
    with ThreadPoolExecutor(_THREADS) as pool:
        waiting = _submitted(pool, cell.directions, ways, sets)
        # Results are the same with and without gradients.
        truths = {
            what: pool.submit(_truth, cell, what, sets[0])
            for what in cell.directions[1:] or (FORWARD,)
            if is_checked
        }
        if cell.has_products:
            wait(waiting.values())
            wait(truths.values())
        # PyTorch compiles here while JAX does so in other threads.
        field: _Field = {
            (what, name): attempt(name, _of_torch, way, name, what, sets)
            for what in cell.directions
            for name, way in torch_ways.items()
        }
        field |= _collected(waiting)
        compiled_truths = {what: each.result() for what, each in truths.items()}
        if settings.with_tuning and cell.ours is not None:
            field |= _tuned(pool, cell, settings, sets)
    want = {what: run() for what, run in compiled_truths.items()}
    rows: list[dict[str, Any]] = []
    for what in cell.directions:
        made = {name: each for (w, name), each in field.items() if w == what}
        truth = want.get(what) or want.get(BOTH)
        rows += _timed(cell, what, made, truth, settings)
    return rows


def _ways(cell: Cell, settings: Settings) -> dict[str, Way]:
    """Return the contenders in JAX that need no tuning."""
    ways = dict(cell.rivals)
    if cell.by_xla is not None:
        ways[BY_XLA] = Way(function=cell.by_xla)
    if cell.ours is not None:
        ways[UNTUNED] = Way(function=cell.ours())
    if settings.with_first and cell.first is not None:
        ways[FIRST] = Way(function=cell.first)
    return ways


def _torch_ways(cell: Cell, settings: Settings) -> Mapping[str, Way]:
    names = (EAGER, COMPILED)[: 1 + settings.with_compiled]
    of = cell.torch if settings.with_torch else None
    return dict.fromkeys(names, of) if isinstance(of, Way) else of or {}


def _submitted(
    pool: ThreadPoolExecutor,
    directions: Sequence[str],
    ways: Mapping[str, Way],
    sets: Sequence[Drawn],
) -> dict[tuple[str, str], Future[_Made]]:
    return {
        (what, name): pool.submit(_of_jax, way, what, sets)
        for what in directions
        for name, way in ways.items()
    }


def _collected(waiting: Mapping[tuple[str, str], Future[_Made]]) -> _Field:
    return {key: attempt(key[1], future.result) for key, future in waiting.items()}


def _tuned(
    pool: ThreadPoolExecutor, cell: Cell, settings: Settings, sets: Sequence[Drawn]
) -> _Field:
    """Choose plans for each direction, and compile what is chosen.

    One after another: in one program XLA would compute once what both have in common.
    """
    assert cell.ours is not None
    field: _Field = {}
    for what in cell.directions:
        function = program(cell.ours(), what)
        found = attempt(
            TUNED,
            lambda function=function: plans.autotune(
                function, *sets[0], max_plans=settings.max_plans, progress=False
            ),
        )
        if isinstance(found, str):
            field[what, TUNED] = found
            continue
        print(found, flush=True)
        ways = {TUNED: Way(function=cell.ours())}
        field |= _collected(_submitted(pool, (what,), ways, sets))
    return field


def _timed(
    cell: Cell,
    what: str,
    made: Mapping[str, _Made | str],
    want: _Pair | None,
    settings: Settings,
) -> list[dict[str, Any]]:
    """Check the contenders of a direction, time them, and return their rows."""
    failures: dict[str, str] = {}
    errors: dict[str, list[float]] = {}
    contenders: dict[str, Contender] = {}
    for name, each in made.items():
        if isinstance(each, str):
            failures[name] = each
            continue
        checked = attempt(name, _check, cell, what, name, each, want)
        if isinstance(checked, str):
            failures[name] = checked
            continue
        errors[name] = checked
        contenders[name] = each.contender
    others = (*OURS, EAGER, COMPILED) if settings.is_beside_jax else OURS
    rivals = [name for name in contenders if name not in others]
    rivals = [name for name in rivals if cell.baseline in ("", name)]
    if not rivals:
        raise RuntimeError(f"no rival ran {what}: {failures}")
    times = alternate(
        contenders, rounds=settings.rounds, round_ms=settings.round_ms, least_calls=2
    )
    best = min(rivals, key=lambda name: summary(times[name], times[name]).median_us)
    rows: list[dict[str, Any]] = []
    for name in _in_order(cell, made):
        row: dict[str, Any] = {
            "operation": cell.operation,
            "size": cell.size,
            "what": what,
            "contender": name,
        }
        if name in failures:
            row["failure"] = failures[name]
        else:
            timing = dataclasses.asdict(summary(times[name], times[best]))
            timing["median_us"] /= contenders[name].count
            row |= {key: float(f"{value:.4g}") for key, value in timing.items()}
            row["errors"] = errors[name]
        limit = cell.limits(what).get(name)
        rows.append(row if limit is None else {**row, "goal": limit})
    return rows


def _in_order(cell: Cell, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield XLA and what else there is of JAX, PyTorch, and what is ours at the end."""
    of_torch = cell.torch if isinstance(cell.torch, Mapping) else (EAGER, COMPILED)
    order = (*cell.rivals, *of_torch, *OURS)
    yield from sorted(names, key=order.index)
