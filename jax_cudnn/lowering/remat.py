# SPDX-License-Identifier: Apache-2.0
"""Defines how `jax.checkpoint` treats a graph; importing this registers the rules.

JAX asks a policy about each equation: its primitive, its operands' types and its
parameters. JAX's policies know JAX's primitives only. So a policy is asked about the
graph's primitive first, and then about the matmuls and convolutions of plain JAX that
the graph stands for. If it saves one of them, the kernel does not run again. What
follows elementwise from the saved results is computed again, as in plain JAX.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable, Recompute, Saveable, checkpoint_name

from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, is_anchor, saved_results
from jax_cudnn.graph.products.conv import TRIPLES
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.primitives import graph_p, linear_p, run_reference
from jax_cudnn.lowering.sharding.array_types import struct_of, typed_like
from jax_cudnn.lowering.sharding.parts import run_parts
from jax_cudnn.reference.dtypes import jax_dtype

Policy = Callable[..., Any]

# --- results that are not a graph's ---------------------------------------------------

# The name of copies in f8 for policies.
F8_COPIES = "jax_cudnn.f8"


def kept_copy(copy: jax.Array) -> jax.Array:
    """Return the bytes of a copy in f8, named for policies.

    jax.checkpoint rounds floats that a policy saves, and takes e4m3fn for a format with
    infinities: numbers above 240 become NaN (JAX 0.10.2).
    """
    stored = jax.lax.bitcast_convert_type(copy, jnp.uint8)
    return checkpoint_name(stored, F8_COPIES)


kept_p = _jax.Primitive("cudnn_kept")
kept_p.multiple_results = True


def attention_results(results: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Return output and log-sum-exp of attention that is not one graph.

    They have the names of the results of `sdpa`, and the policies that save these save
    them. JAX asks no policy about what is within a function with its own derivative.
    """
    names = ("cudnn_sdpa_output", "cudnn_sdpa_stats")
    return tuple(kept_p.bind(*map(checkpoint_name, results, names), kind="sdpa"))


def product_result(result: jax.Array) -> jax.Array:
    """Return the result of a product that is not one graph.

    Policies that save a matmul without batch axes save it.
    """
    (kept,) = kept_p.bind(result, kind="matmul")
    return kept


def _kept_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, kind: str
) -> tuple[Sequence[jax.Array], Sequence[Any]]:
    return kept_p.bind(*primals, kind=kind), tangents


kept_p.def_impl(lambda *results, kind: list(results))
kept_p.def_abstract_eval(lambda *results, kind: list(results))
_jax.set_jvp(kept_p, _kept_jvp)
_jax.set_batching(
    kept_p, lambda args, axes, *, kind: (kept_p.bind(*args, kind=kind), axes)
)
_jax.set_lowering(kept_p, _jax.lower_function(lambda *results, kind: results))


def kernels_of(primitive: Any, params: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of nodes for whose kernels an equation is there, if any."""
    if primitive is kept_p:
        return frozenset({params["kind"]})
    if primitive is graph_p:
        return frozenset(x.kind for x in params["graph"].nodes if is_anchor(x))
    return frozenset()


# --- what a policy says ---------------------------------------------------------------


def _answer(policy: Policy, equation: Any) -> Any:
    """Return what a policy says of an equation: Saveable, Offloadable or Recompute."""
    types = (x.aval for x in equation.invars)
    answer = policy(equation.primitive, *types, **equation.params)
    if isinstance(answer, bool):
        return Saveable if answer else Recompute
    if isinstance(answer, (type(Saveable), type(Recompute), Offloadable)):
        return answer
    raise TypeError(
        f"a jax.checkpoint policy returned {answer!r} for {equation.primitive}. A "
        "policy returns a bool, or Saveable, Recompute or Offloadable(src, dst) of "
        "jax.ad_checkpoint."
    )


def _is_saved(answer: Any) -> bool:
    return not isinstance(answer, type(Recompute))


def _of_products(policy: Policy, equation: Any) -> Any:
    """Return what a policy says of the first product that it saves, if any."""
    if policy is jax.checkpoint_policies.nothing_saveable:
        return Recompute
    if equation.primitive is kept_p:
        products = _products_of_kind(equation.params["kind"])
    else:
        products = _products_of(equation.params["graph"], equation.params["options"])
    answers = (_answer(policy, product) for product in products)
    return next(filter(_is_saved, answers), Recompute)


@functools.lru_cache(maxsize=4096)
def _products_of(graph: Graph, options: Options) -> tuple[Any, ...]:
    """Return the matmuls and convolutions of the graph's reference, as equations.

    A convolution that the reference writes as a sum of shifted products counts as the
    convolution that it is in plain JAX.
    """
    operands = [
        jax.ShapeDtypeStruct(tensor.stored_shape, jax_dtype(tensor.dtype))
        for tensor in graph.input_tensors
    ]

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return run_reference(graph, operands, options)

    with _jax.without_mesh():
        found = tuple(_products_in(jax.make_jaxpr(run)(*operands).jaxpr))
    is_conv = any(node.kind in TRIPLES for node in graph.nodes)
    return _products_of_kind("conv") if is_conv and not found else found


@functools.lru_cache(maxsize=3)
def _products_of_kind(kind: str) -> tuple[Any, ...]:
    """Return the products of attention, a convolution or a matmul, of any size."""
    run, rank, count = {
        "sdpa": (jax.nn.dot_product_attention, 4, 3),  # over examples and heads
        "conv": (
            functools.partial(jax.lax.conv, window_strides=(1,), padding="SAME"),
            3,
            2,
        ),
        "matmul": (jnp.matmul, 2, 2),
    }[kind]
    operands = [jax.ShapeDtypeStruct((2,) * rank, jnp.float32)] * count
    with _jax.without_mesh():
        return tuple(_products_in(jax.make_jaxpr(run)(*operands).jaxpr))


def _products_in(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive in _PRODUCTS:
            yield equation
        for inner in _jax.inner_jaxprs(equation.params):
            yield from _products_in(getattr(inner, "jaxpr", inner))


_PRODUCTS = (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p)


# --- what is computed in which pass ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The results that are saved, by their places, and how the others follow.

    ``others`` takes these and the operands at the places ``read``, and returns the
    other results by their places.
    """

    places: tuple[int, ...]
    read: tuple[int, ...] = ()
    others: Callable[[list[Any], list[Any]], dict[int, Any]] | None = None

    @classmethod
    def all_of(cls, equation: Any) -> "_Saved":
        """Save all results."""
        return cls(places=tuple(range(len(equation.outvars))))

    @classmethod
    def products_of(cls, equation: Any) -> "_Saved":
        """Save the results from which the others follow elementwise."""
        if equation.primitive is not graph_p:
            return cls.all_of(equation)
        graph, options = equation.params["graph"], equation.params["options"]
        names, rest = saved_results(graph)
        if rest is None:
            return cls.all_of(equation)
        read = tuple(name for name in graph.inputs if name in rest.inputs)
        around = functools.partial(run_reference, options=options)

        def others(saved: list[Any], operands: list[Any]) -> dict[int, Any]:
            values = dict(zip((*names, *read), (*saved, *operands), strict=True))
            given = [values[name] for name in rest.inputs]
            results = run_parts(rest, given, around, around)
            return dict(
                zip(map(graph.outputs.index, rest.outputs), results, strict=True)
            )

        return cls(
            places=tuple(map(graph.outputs.index, names)),
            read=tuple(map(graph.inputs.index, read)),
            others=others,
        )


def _rule(
    policy: Policy, unknown: Sequence[bool], available: Sequence[bool], equation: Any
) -> Any:
    """Divide an equation between the passes; see `_jax.set_saving`."""
    count = len(equation.outvars)
    operands = zip(equation.invars, available, strict=True)
    missing = [x for x, is_there in operands if not is_there]
    if any(unknown):
        return None, equation, [True] * count, [True] * count, missing
    answer, saved = _answer(policy, equation), _Saved.all_of(equation)
    if not _is_saved(answer):
        answer, saved = _of_products(policy, equation), _Saved.products_of(equation)
    if not _is_saved(answer):
        return equation, equation, [False] * count, [True] * count, missing
    if not isinstance(answer, Offloadable) and saved.others is None:
        return equation, None, [False] * count, [False] * count, []
    first, second, kept = _divided(equation, saved, answer)
    read = [x for x in missing if any(x is each for each in second.invars)]
    return first, second, [False] * count, [True] * count, [*kept, *read]


def _divided(equation: Any, saved: _Saved, answer: Any) -> tuple[Any, Any, list[Any]]:
    """Return the equations of both passes, and the variables that are saved.

    The first equation has copies of the saved results as further results, if these are
    saved elsewhere. The second one gives the results that are not at hand.
    """
    # For example, a graph returns gelu(z) and z = x @ w, and the policy saves matmuls.
    # Then `saved.places` is (1,), the first equation is the kernel, and the second one
    # computes gelu(z) from z: `results_again` is [0]. If the policy offloads z, the
    # first equation has a third result, the copy in the host's memory. The second one
    # copies it back and gives both results.
    count = len(equation.outvars)
    moves = isinstance(answer, Offloadable)
    results_again = [i for i in range(count) if moves or i not in saved.places]

    def kernel_and_copies(*operands: jax.Array) -> list[jax.Array]:
        results = equation.primitive.bind(*operands, **equation.params)
        return [
            *results,
            *(_moved(results[i], answer.dst) for i in saved.places if moves),
        ]

    def from_saved(kept: list[jax.Array], read: list[jax.Array]) -> list[jax.Array]:
        if moves:
            kept = [_moved(x, answer.src) for x in kept]
        found = dict(zip(saved.places, kept, strict=True))
        if saved.others is not None:
            found |= saved.others(kept, read)
        avals = {i: equation.outvars[i].aval for i in results_again}
        return [
            typed_like(jnp.reshape(found[i], aval.shape), aval)
            for i, aval in avals.items()
        ]

    def both(*operands: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        results = jax.jit(kernel_and_copies)(*operands)
        kept = results[count:] if moves else [results[i] for i in saved.places]
        return results, jax.jit(from_saved)(kept, [operands[i] for i in saved.read])

    types = [struct_of(x.aval) for x in equation.invars]
    with jax.disable_jit(disable=False):  # Each half has to be one equation.
        jaxpr = jax.make_jaxpr(both)(*types).jaxpr
    first, second = jaxpr.eqns
    copies = first.outvars[count:]
    names = dict(zip(jaxpr.invars, equation.invars, strict=True))
    names |= dict(zip(first.outvars, [*equation.outvars, *copies], strict=True))
    again = [equation.outvars[i] for i in results_again]
    names |= dict(zip(second.outvars, again, strict=True))
    first, second = (_renamed(each, names, like=equation) for each in (first, second))
    if moves:
        return first, second, copies
    return equation, second, [equation.outvars[i] for i in saved.places]


def _renamed(equation: Any, names: Mapping[Any, Any], *, like: Any) -> Any:
    """Return an equation of other variables, in the place of another equation."""
    return equation.replace(
        invars=[names[x] for x in equation.invars],
        outvars=[names[x] for x in equation.outvars],
        source_info=like.source_info,
        ctx=like.ctx,
    )


def _moved(x: jax.Array, kind: str) -> jax.Array:
    """Return an array in a kind of memory, which policies name as JAX's devices do."""
    space = jax.memory.Space.Host if kind == "pinned_host" else jax.memory.Space.Device
    return jax.device_put(x, space, may_alias=False)


for _primitive in (graph_p, linear_p, kept_p):
    _jax.set_saving(_primitive, _rule)
