# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.fuse`: a function whose contractions and what follows are cuDNN's."""

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.fusing.chains import run_chained
from jax_cudnn.fusing.explanation import FuseExplanation, describe_work
from jax_cudnn.fusing.kernels import Kernel
from jax_cudnn.fusing.program import Arrays, as_array, program_of
from jax_cudnn.fusing.split import Split, is_free, split
from jax_cudnn.fusing.standalone import Settings
from jax_cudnn.lowering import weakly_typed
from jax_cudnn.ops.common.arguments import options

P = ParamSpec("P")
R = TypeVar("R")
# Is told of each split of a function.
_Seen = Callable[[Split], None]


class Fused(Generic[P, R]):
    """A function that `fuse` returns. It is called as the one that it was made from."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        strict: bool,
        static: dict[str, Any],
        implementation: Implementation | None,
        plan: PlanOptions | None,
    ) -> None:
        functools.update_wrapper(cast(Any, self), function)
        self._function = function
        self._strict = strict
        self._static = static
        self._settings = Settings(implementation, plan)
        self._jitted = self._compiled(lambda found: None)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the function returns."""
        return self._jitted(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return a method, where it is an attribute of a class."""
        if instance is None:
            return self
        return types.MethodType(self, instance)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> FuseExplanation:
        """Return what became of each operation, for arguments or their shapes.

        The function is traced, not run. Arrays may be given as `jax.ShapeDtypeStruct`.

        Returns:
          A ``FuseExplanation``. ``str()`` of it is a text with each kernel, the
          operations and lines that became it, and each operation that XLA keeps, with
          the reason. ``.mermaid()`` is a picture. ``.on("H200")`` adds the plans that
          cuDNN has for the kernels on a GPU, which need not be here.
        """
        seen: list[Split] = []
        jitted = self._compiled(seen.append, strict=False)
        cast(Any, jitted).trace(*args, **kwargs)
        return FuseExplanation.of(_name(self._function), seen[-1])

    def _compiled(self, seen: _Seen, *, strict: bool | None = None) -> Any:
        is_strict = self._strict if strict is None else strict

        # As a wrapper it has the signature by which jit finds static arguments.
        @functools.wraps(self._function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs, seen, is_strict)

        return jax.jit(run, **self._static)

    def _run(self, args: Any, kwargs: Any, seen: _Seen, is_strict: bool) -> Any:
        function = cast(Callable[..., Any], self._function)
        leaves, tree = jax.tree.flatten((args, kwargs))
        # All else was named static, and is part of the program.
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

        def call(*arrays: jax.Array) -> Any:
            filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(tree, filled.values())
            return function(*args, **kwargs)

        given = [leaves[i] for i in places]
        closed, like = jax.make_jaxpr(call, return_shape=True)(*given)
        program = program_of(closed)
        found = split(program, self._settings, is_strict=self._strict)
        if is_strict:
            check_one_kernel(_name(self._function), found)
        seen(found)
        # Under `jax.disable_jit` NumPy's arrays come as they are.
        known = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in given)
        arrays: Arrays = dict(zip(program.inputs, known, strict=True))
        arrays |= program.constants

        def compute(*given: jax.Array) -> list[jax.Array]:
            made: Arrays = dict(zip(arrays, given, strict=True))
            _run_steps(found, made, self._settings)
            return [as_array(x, made) for x in program.results]

        operands = [*arrays.values()]
        is_chain = len(found.kernels) > 1
        made = run_chained(compute, operands) if is_chain else compute(*operands)
        results = [
            _typed(x, variable.aval)
            for x, variable in zip(made, closed.jaxpr.outvars, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(like), results)


_ARRAYS = (jax.Array, np.ndarray)


def _run_steps(found: Split, arrays: Arrays, settings: Settings) -> None:
    for step in found.steps:
        if isinstance(step, Kernel):
            call = settings.options(step.work.params["precision"])
            step.run(arrays, replace(call, exact_dtypes=True))
        else:
            step.run(arrays)


def _typed(x: jax.Array, aval: Any) -> jax.Array:
    """Return a result as weakly typed as the function's."""
    is_weak = jax.typeof(x).weak_type
    return weakly_typed(x) if aval.weak_type and not is_weak else x


def check_one_kernel(name: str, found: Split) -> None:
    """Raise UnsupportedError unless a function is one kernel and nothing else."""
    advice = (
        "strict=True requires one kernel and nothing else. Move the operation out "
        "of the function, or omit strict: XLA then runs it."
    )
    kept = [each for each in found.left if not is_free(each.work)]
    norms = [found.norms[each.work] for each in kept if each.work in found.norms]
    if not found.kernels and norms:
        problem = f"It has {norms[0]}"
    elif not found.kernels:
        problem = "It has no contraction that a graph can have, and no norm"
    elif kept:
        left = kept[0]
        problem = f"{describe_work(left.work)} is not part of it: {left.reason}"
    elif len(found.kernels) > 1:
        second = found.kernels[1].work
        problem = (
            f"{describe_work(second)} begins another one: a kernel has one contraction "
            "or one norm"
        )
    else:
        return
    raise UnsupportedError(f"fuse: {name} is not one kernel. {problem}.", (), advice)


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


@overload
def fuse(
    fn: Callable[P, R],
    *,
    strict: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> Fused[P, R]: ...
@overload
def fuse(
    fn: None = None,
    *,
    strict: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> Callable[[Callable[P, R]], Fused[P, R]]: ...
def fuse(
    fn: Callable[..., Any] | None = None,
    *,
    strict: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> Any:
    """Return a function with its contractions, and what follows them, in cuDNN.

    The function is traced. Each :func:`jax.lax.dot_general` and
    :func:`jax.lax.conv_general_dilated` in it, however it is spelled (``@``,
    ``jnp.einsum``, a Flax layer), becomes a kernel, together with the operations that
    follow it element by element. A layer norm or RMS norm over the last axes, written
    out or as a layer of Flax, becomes one on request, and where it was measured to be
    faster so. XLA runs all other operations. What is computed, and in which dtypes, is
    what the function says:

    - An operation is part of a kernel only if it can be written there with exactly its
      meaning: value, derivatives, NaN.
    - Each operation's result is rounded to the dtype that it has in the function, also
      within a kernel, and casts are rounding. Sums are kept in f32 (f64 for f64, i32
      for 8-bit integers), and rounded to the contraction's own dtype before what
      follows. JAX's activations (`jax.nn.gelu`, `silu`, `elu`, ...) are one operation
      each: computed in f32, and rounded once.
    - Loops, branches, `jax.checkpoint` and functions with derivative rules of their own
      stay as they are. Contractions within them stay XLA's, unless the function in the
      loop is fused itself.

    All of JAX's transformations apply: a kernel is one graph, with the derivatives,
    batches and shardings of :func:`jax_cudnn.matmul` and :func:`jax_cudnn.conv`. So do
    the tools of :mod:`jax_cudnn.plans`. The function is compiled as by `jax.jit`.

    Args:
      fn: a function of any arguments and results that `jax.jit` takes: pytrees of
        arrays, and static arguments. What it captures may be traced. Left out, as in
        ``@fuse(strict=True)``, a decorator is returned.
      strict: whether the function has to be exactly one kernel, with nothing left for
        XLA: a contraction with what follows it, or a norm. Default False. That cuDNN
        has a plan for it is another question: add
        ``implementation="cudnn"`` to have it answered.
      static_argnums: as for `jax.jit`. Default None: found by `static_argnames`.
      static_argnames: as for `jax.jit`. Default None: found by `static_argnums`.
      implementation: "auto", "cudnn" or "xla", as for :func:`jax_cudnn.conv`, for each
        kernel. With "auto", norms are kernels while :func:`jax_cudnn.plans.autotune`
        measures, and where it found cuDNN to be faster for as many features; with
        "cudnn" always. Calls of this package's in the function have their own.
      plan: which of cuDNN's plans may run the kernels, as for :func:`jax_cudnn.conv`.

    Returns:
      A function of the same arguments. Its ``explain(...)`` says what became of each
      operation.

    Raises:
      TypeError: `fn` is no function, `strict` no bool or `plan` no PlanOptions.
      ValueError: an unknown `implementation`.
      UnsupportedError: when it is called: `strict=True`, and an operation is not part
        of the one kernel; the message names it, and its line. Or as for
        :func:`jax_cudnn.conv`.

    Notes:
      Which operations follow in a kernel: arithmetic, comparisons, selections by them,
      exponentials, powers, trigonometric functions, casts between floats; reshapes and
      transposes that keep rows, columns and batch apart. At most 64 steps are one
      kernel: the time for planning grows with the square of their number. Scale, bias
      and a cast are part of a norm, whose variance is that of centred values, however
      it is written.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> @jax_cudnn.fuse
      ... def layer(x, w, b):
      ...     return jax.nn.gelu(x @ w + b)
      >>> layer(jnp.ones((5, 8)), jnp.ones((8, 16)), jnp.zeros(16)).shape
      (5, 16)
      >>> len(layer.explain(*map(jnp.ones, ((5, 8), (8, 16), (16,)))).kernels)
      1
    """
    if not isinstance(strict, bool):
        raise TypeError(f"fuse: strict={strict!r} is neither True nor False.")
    options("fuse", implementation, plan)  # refuses unknown names and other types
    if fn is not None and not callable(fn):
        raise TypeError(
            f"fuse: {type(fn).__name__} is not a function. Pass one, or write "
            "@fuse(...) above its definition."
        )
    made = functools.partial(
        Fused,
        strict=strict,
        static={"static_argnums": static_argnums, "static_argnames": static_argnames},
        implementation=implementation,
        plan=plan,
    )
    return made if fn is None else made(fn)
