# SPDX-License-Identifier: Apache-2.0
"""Offers tokamax's kernels for the parts of a graph that they compute alike.

They are written in Pallas' Mosaic dialect (https://github.com/openxla/tokamax). What is
offered is what they were ahead of cuDNN 9.19 in, on an H100 or H200: attention with a
bias, with a softcap, or with neither, and products of groups of rows.

A block of keys whose bias is -inf makes NaN of tokamax's rows, and its gradient loses
digits where a bias moves a row far from 0. So whether a bias is of an ordinary size is
asked when the program runs, and the others are left to who runs them exactly.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.contenders.registry import Program
from jax_cudnn.errors import LibraryError, UnsupportedError
from jax_cudnn.graph import Graph, SdpaAttributes
from jax_cudnn.graph.attention.score_mod import Steps, read_step
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored

# Beyond it, in size, f32 has too few digits for the log-sum-exp of a row: see
# legalize/attention/far_rows.py.
_LARGEST_BIAS = 2.0**11

# By role, on logical axes.
_Arrays = dict[str, jax.Array]
_Run = Callable[[Graph, _Arrays], _Arrays]
# Runs a part on arrays as they are stored.
Exact = Callable[..., Sequence[jax.Array]]


def version() -> str:
    """Return the version of tokamax that is installed.

    Raises:
      LibraryError: it cannot be imported.
    """
    _kernels()
    return importlib.metadata.version("tokamax")


def _library() -> Any:
    return _imported("tokamax")


def _kernels() -> Any:
    return _imported("tokamax.ops.gpu")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LibraryError(
            f"{name} cannot be imported: {error}. It is installed by `pip install "
            "'tokamax[cuda]>=0.0.17'`, and needs JAX 0.11.1 and Python 3.12 or newer."
        ) from error


@functools.lru_cache(maxsize=1024)
def offer(part: Graph, exact: Exact) -> Program | None:
    """Return the program that runs a part by tokamax, or None.

    Where its meaning would be another one, the program runs ``exact(part, *arrays)``.
    """
    if len(part.nodes) != 1 or part.nodes[0].kind not in _RUNS:
        return None
    (node,) = part.nodes
    can_run, run = _RUNS[node.kind]
    if not can_run(part):
        return None
    roles = {name: role for role, name in (*node.inputs, *node.outputs)}

    def by_tokamax(*arrays: jax.Array) -> list[jax.Array]:
        given = {roles[n]: x for n, x in zip(part.inputs, arrays, strict=True)}
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            found = run(part, given)
        return [
            found[roles[tensor.name]].astype(jax_dtype(tensor.dtype))
            for tensor in part.output_tensors
        ]

    def exactly(*arrays: jax.Array) -> list[jax.Array]:
        found = exact(part, *map(to_stored, part.input_tensors, arrays))
        return list(map(to_logical, part.output_tensors, found))

    def guarded(*arrays: jax.Array) -> list[jax.Array]:
        bias = arrays[part.inputs.index(dict(node.inputs)["bias"])]
        # Of a NaN, this is not true.
        is_ordinary = jnp.max(jnp.abs(bias)) <= _LARGEST_BIAS
        return jax.lax.cond(is_ordinary, by_tokamax, exactly, *arrays)

    program = guarded if "bias" in dict(node.inputs) else by_tokamax
    shapes = [
        jax.ShapeDtypeStruct(tensor.dims, jax_dtype(tensor.dtype))
        for tensor in part.input_tensors
    ]
    try:
        jax.eval_shape(program, *shapes)
    except (NotImplementedError, ValueError, UnsupportedError):
        return None  # not on this GPU, or not of this size
    return program


def _dims(part: Graph, name: str) -> tuple[int, ...]:
    (found,) = (tensor.dims for tensor in part.tensors if tensor.name == name)
    return found


def _dtypes(part: Graph, names: Mapping[str, str], roles: Sequence[str]) -> set[str]:
    tensors = {tensor.name: tensor for tensor in part.tensors}
    return {tensors[names[role]].dtype for role in roles if role in names}


# --- attention ------------------------------------------------------------------------

# The kernels of 0.0.17 work on tiles of up to so many queries and keys. A tile that the
# operands do not fill made one fail to compile, and another return NaN.
_TILE = 128
_OPERANDS = ("query", "key", "value")
_ROWS = (*_OPERANDS, "bias", "output", "stats", "grad_output")


def _has_attention(part: Graph) -> bool:
    (node,) = part.nodes
    names, attributes = dict(node.inputs), node.attributes
    assert isinstance(attributes, SdpaAttributes)
    if not set(names) <= set(_ROWS):
        return False
    plain = SdpaAttributes(scale=attributes.scale, is_causal=attributes.is_causal)
    is_capped = _softcap(attributes.score_mod) is not None
    if is_capped:
        plain = replace(plain, score_mod=attributes.score_mod)
    lengths = _rows_and_columns(part, names)
    return (
        "max_logit" not in dict(node.outputs)
        and attributes == plain
        and _dtypes(part, names, _OPERANDS) == {"bf16"}
        and not any(size % _TILE for size in lengths)
        # tokamax caps the sum of score and bias.
        and not ("bias" in names and is_capped)
        and ("bias" not in names or _dims(part, names["bias"])[2:] == lengths)
    )


def _softcap(steps: Steps) -> float | None:
    """Return c where the steps of a function of scores are c tanh(score / c)."""
    cap = read_step(steps[-1]).words[-1] if steps else ""
    if steps != (f"div score {cap}", "tanh %0", f"mul %1 {cap}"):
        return None
    try:
        number = float(cap)
    except ValueError:  # an operand, a position or another step
        return None
    return number if number > 0 else None


def _rows_and_columns(part: Graph, names: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(_dims(part, names[role])[2] for role in ("query", "key"))


def _tokens_first(x: jax.Array) -> jax.Array:
    """Return b h s d as b s h d, or the other way round."""
    return jnp.swapaxes(x, 1, 2)


def _bound(part: Graph, given: _Arrays) -> tuple[Any, list[jax.Array], dict[str, Any]]:
    """Return tokamax's attention, its operands and its options."""
    attributes = part.nodes[0].attributes
    assert isinstance(attributes, SdpaAttributes)
    options = {
        "bias": given.get("bias"),
        "is_causal": attributes.is_causal,
        "logits_scale": attributes.scale,
        "logits_soft_cap": _softcap(attributes.score_mod),
    }
    attention = _kernels().PallasMosaicFlashAttention()
    return attention, [_tokens_first(given[role]) for role in _OPERANDS], options


def _attention(part: Graph, given: _Arrays) -> _Arrays:
    attention, operands, options = _bound(part, given)
    output, (top, total) = attention(*operands, **options, return_residuals=True)
    stats = (top + jnp.log(total))[..., None]
    return {"output": _tokens_first(output), "stats": stats}


def _attention_gradient(part: Graph, given: _Arrays) -> _Arrays:
    attention, operands, options = _bound(part, given)
    stats = given["stats"][..., 0]
    rows = stats, jnp.ones_like(stats)
    bound = attention.bind(*operands, **options)
    kept = {k: v for k, v in bound.kwargs.items() if k != "return_residuals"}
    output, grad = (_tokens_first(given[x]) for x in ("output", "grad_output"))
    found = attention.vjp(rows, output, grad, *bound.args, **kept)
    return {
        "grad_query": _tokens_first(found["q"]),
        "grad_key": _tokens_first(found["k"]),
        "grad_value": _tokens_first(found["v"]),
        "grad_bias": found.get("bias"),
    }


# --- products of groups of rows -------------------------------------------------------

# tokamax compares these with its own, which have lists.
_NO_AXES: list[int] = []
_BY_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), (_NO_AXES, _NO_AXES)),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=_NO_AXES,
)


def _has_sizes(part: Graph) -> bool:
    (node,) = part.nodes
    names = dict(node.inputs)
    return "group_sizes" in names and _dtypes(
        part, names, ("a", "b", "grad_output")
    ) in ({"bf16"}, {"f16"})


def _in_groups(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return x with 0 beyond the rows of all groups.

    tokamax does not write there, and what it reads there is multiplied by 0.
    """
    count = jnp.sum(sizes)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(x.shape[0])[:, None] < count, x, 0)

    return jax.lax.cond(count == x.shape[0], lambda x: x, cut, x)


def _grouped_matmul(part: Graph, given: _Arrays) -> _Arrays:
    a, sizes = given["a"][0], given["group_sizes"][0]
    (tensor,) = part.output_tensors
    found = _library().ragged_dot(
        a,
        given["b"],
        sizes,
        preferred_element_type=jax_dtype(tensor.dtype),
        implementation="mosaic",
    )
    return {"output": _in_groups(found, sizes)[None]}


def _grouped_matmul_gradient(part: Graph, given: _Arrays) -> _Arrays:
    a, b, sizes = given["a"][0], given["b"], given["group_sizes"][0]
    grad = given["grad_output"][0]
    library, how = _library(), {"implementation": "mosaic"}
    found, wanted = {}, dict(part.nodes[0].outputs)
    if "grad_a" in wanted:
        grad_a = library.ragged_dot(
            grad, b.mT, sizes, preferred_element_type=a.dtype, **how
        )
        found["grad_a"] = _in_groups(grad_a, sizes)[None]
    if "grad_b" in wanted:
        a, grad = (_in_groups(x, sizes) for x in (a, grad))
        found["grad_b"] = library.ragged_dot_general(
            a, grad, sizes, _BY_ROWS, preferred_element_type=b.dtype, **how
        )
    return found


# Whether a part can be run, and how.
_RUNS: dict[str, tuple[Callable[[Graph], bool], _Run]] = {
    "sdpa": (_has_attention, _attention),
    "sdpa_backward": (_has_attention, _attention_gradient),
    "grouped_matmul": (_has_sizes, _grouped_matmul),
    "grouped_matmul_backward": (_has_sizes, _grouped_matmul_gradient),
}
