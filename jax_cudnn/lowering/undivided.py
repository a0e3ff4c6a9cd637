# SPDX-License-Identifier: Apache-2.0
"""Defines a primitive that has XLA gather an array, except along one axis.

XLA's partitioner makes mistakes with convolutions: wrong numbers, programs that it
refuses itself, and a check that ends the process (docs/known_bugs.md). Divided by their
images alone, they are right.
"""

import json
from typing import Any

import jax
import numpy as np

from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.sharding.sharding_rule import letter_of
from jax_cudnn.lowering.sharding.xla_forms import bytecode, parts_of

# A promise: exported programs have the name and the fields of the text.
TARGET = "jax_cudnn.undivided"

_undivided_p = _jax.Primitive("cudnn_undivided")
_undivided_p.multiple_results = True


def undivided(x: jax.Array, *, but: int | None) -> jax.Array:
    """Return an array of which each device has all, or a part along one axis.

    It is as the program's partitioner divides it. Elsewhere, nothing happens.
    """
    (result,) = _undivided_p.bind(x, but=but)
    return result


def _lower(ctx: Any, x: Any, *, but: int | None) -> Any:
    (aval,) = ctx.avals_in
    if _jax.partitioned_region(ctx) is None or not aval.size or not _IS_REGISTERED:
        return [x]
    # An axis that is gathered is another factor in the result, so that XLA propagates
    # no sharding along it.
    letters = [letter_of(i) for i in range(2 * aval.ndim - (but is not None))]
    read, rest = letters[: aval.ndim], iter(letters[aval.ndim :])
    made = [read[i] if i == but else next(rest) for i in range(aval.ndim)]
    size_of = dict(zip([*read, *made], [*aval.shape] * 2, strict=True))
    sizes = ", ".join(f"{name}={size_of[name]}" for name in letters)
    mapping = f"([{', '.join(read)}])->([{', '.join(made)}])"
    return _jax.custom_call(
        ctx,
        [x],
        target=TARGET,
        config=json.dumps({"but": but, "dtype": aval.dtype.name}, sort_keys=True),
        sharding_rule=f"#sdy.op_sharding_rule<{mapping} {{{sizes}}}, custom>",
    )


def _sharding(shape: Any, given: Any, but: int | None) -> tuple[Any, tuple[int, ...]]:
    """Return the first sharding that divides the axis evenly, and a part's shape."""
    dims = tuple(shape.dimensions())
    for each in given:
        devices, parts = parts_of(each, len(dims))
        if but is None or (own := parts[but]) is None:
            continue
        count = max(own) + 1
        if dims[but] % count == 0:
            cuts = [[(count, own)] if i == but else [] for i in range(len(dims))]
            part = (*dims[:but], dims[but] // count, *dims[but + 1 :])
            return _jax.hlo_sharding(cuts, devices), part
    return _jax.hlo_sharding([[] for _ in dims], 1), dims


def _partition(
    arg_shapes: Any,
    arg_shardings: Any,
    result_shape: Any,
    result_sharding: Any,
    config: bytes,
) -> tuple[bytes, list[Any], Any]:
    del result_shape
    data = json.loads(config)
    given = [*arg_shardings, result_sharding]
    sharding, part = _sharding(arg_shapes[0], given, data["but"])
    dtype = jax.numpy.dtype(data["dtype"])
    with _jax.without_mesh(), jax.enable_x64(dtype == np.float64):
        lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct(part, dtype))
    return bytecode(lowered), [sharding], sharding


def _infer(
    arg_shapes: Any, arg_shardings: Any, result_shape: Any, config: bytes
) -> Any:
    del result_shape
    return _sharding(arg_shapes[0], arg_shardings, json.loads(config)["but"])[0]


def _batch(args: Any, axes: Any, *, but: int | None) -> Any:
    (x,), (examples,) = args, axes
    moved = but if but is None else but + (examples <= but)
    return _undivided_p.bind(x, but=moved), axes


def _jvp(primals: Any, tangents: Any, *, but: int | None) -> Any:
    (tangent,) = tangents
    moved = tangents if _jax.is_zero(tangent) else _undivided_p.bind(tangent, but=but)
    return _undivided_p.bind(*primals, but=but), moved


def _transpose(cotangents: Any, x: Any, *, but: int | None) -> list[Any]:
    del x
    if _jax.is_zero(cotangents[0]):
        return cotangents
    return _undivided_p.bind(*cotangents, but=but)


_undivided_p.def_impl(lambda x, *, but: [x])
_undivided_p.def_abstract_eval(lambda x, *, but: [x])
_jax.set_batching(_undivided_p, _batch)
_jax.set_jvp(_undivided_p, _jvp)
_jax.set_transpose(_undivided_p, _transpose)
_jax.set_lowering(_undivided_p, _lower)

_IS_REGISTERED = _jax.register_partitioner(TARGET, partition=_partition, infer=_infer)
