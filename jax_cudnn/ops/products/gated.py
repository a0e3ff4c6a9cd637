# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.gated_matmul`: the first half of a gated MLP (SwiGLU, GEGLU, ...)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.graph import DTypeName
from jax_cudnn.graph.rules import broadcasts_to
from jax_cudnn.ops.common.activations import Activation, Fused, gate_dtype, resolve
from jax_cudnn.ops.common.arguments import (
    FLOATS,
    Precision,
    as_operand,
    describe,
    graph_dtype,
    in_front,
    options,
    result_dtype,
    sums_dtype,
)
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.plain import Epilogue
from jax_cudnn.ops.products.matmul import matmul_with
from jax_cudnn.ops.products.operands import common_dtypes
from jax_cudnn.reference.dtypes import dtype_name, jax_dtype


def gated_matmul(
    a: ArrayLike,
    gate: ArrayLike,
    up: ArrayLike,
    *,
    activation: Activation | None = "silu",
    gate_bias: ArrayLike | None = None,
    up_bias: ArrayLike | None = None,
    precision: Precision = None,
    preferred_element_type: object = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a gated product: the first half of a SwiGLU or GEGLU layer.

    .. math::

        \mathrm{output} = \mathrm{activation}(a \cdot \mathrm{gate}
            + \mathrm{gate\_bias}) \odot (a \cdot \mathrm{up} + \mathrm{up\_bias})

    This takes two kernels. The first computes the gate's product, which is rounded to
    the result's dtype, in f16 to infinity beyond 65504. The second computes the other
    product and all the rest. An activation that cuDNN does not have is applied to the
    first product before it is rounded. So is any where the products are not floats of
    one dtype. cuDNN also takes both matmuls in one graph, but is not faster that way
    (docs/internals/measured/where_to_fuse.md, an H200 with 9.19). Transformations,
    dtypes and errors are those of :func:`jax_cudnn.matmul`.

    Args:
      a: (..., m, r).
      gate: (r, n), or (..., r, n).
      up: like gate.
      activation: of the gate, as for :func:`jax_cudnn.conv`. Default "silu" (SwiGLU);
        "gelu" gives GEGLU, "sigmoid" GLU, and None the bilinear layer.
      gate_bias: broadcasts to the result; (n,) is the usual one. Default None: none.
      up_bias: like gate_bias.
      precision: as for :func:`jax_cudnn.matmul`.
      preferred_element_type: as for :func:`jax_cudnn.matmul`.
      implementation: "auto", "cudnn" or "xla", as for :func:`jax_cudnn.conv`.
      plan: as for :func:`jax_cudnn.conv`.

    Returns:
      (..., m, n).

    Raises:
      ValueError, TypeError, UnsupportedError, LibraryError: as
        :func:`jax_cudnn.matmul`.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((5, 8)), jnp.ones((8, 16))
      >>> jax_cudnn.gated_matmul(x, w, w).shape
      (5, 16)
    """
    call = options("gated_matmul", implementation, plan, precision)
    a, gate, up = (
        _operand(name, x) for name, x in (("a", a), ("gate", gate), ("up", up))
    )

    def product(
        name: str, b: jax.Array, bias: ArrayLike | None, dtype: object, **epilogue: Any
    ) -> jax.Array:
        words = {"b": name, "bias": f"{name}_bias", "scale_out": "the gate's product"}
        with on_behalf_of("gated_matmul", "matmul", **words):
            with_bias = Epilogue.of("matmul", bias=bias, **epilogue)
            return matmul_with(a, b, with_bias, dtype, call)

    shape, full = _shape(a, gate), _shape(a, up)
    own, sums = _dtypes("gate", a, gate, preferred_element_type)
    within: Fused | None = None
    if (own, sums) == _dtypes("up", a, up, preferred_element_type):
        within = _fused(activation, shape, sums)
    # No array has the activation then, and gradients need the two products alone.
    first = activation if within is None else None
    dtype = gate_dtype(own, activation, preferred_element_type)
    gates = product("gate", gate, gate_bias, dtype, activation=first)
    _check_alike(gate, up, shape, full)
    return product(
        "up", up, up_bias, preferred_element_type, scale_out=gates, gate=within
    )


def _operand(name: str, value: ArrayLike) -> jax.Array:
    x = as_operand("gated_matmul", name, value)
    if x.ndim == 0:
        raise ValueError(
            f"gated_matmul: {name} is {describe(x)}. It must have one axis or more."
        )
    return x


def _dtypes(
    name: str, a: jax.Array, b: jax.Array, preferred: object
) -> tuple[np.dtype, DTypeName | None]:
    """Return the dtype of a product, and of the sums in a graph that has it in floats.

    Operands of 8 bits, both of them, are not in floats.
    """
    with on_behalf_of("gated_matmul", "matmul", b=name):
        dtypes = common_dtypes("matmul", a, b)
        dtype = result_dtype("matmul", preferred, dtypes.result)
    if dtypes.operands is None or dtypes.why_plain(dtype, a=a, b=b):
        return dtype, None
    wide = dtype_name(dtypes.operands)
    rounded = graph_dtype(dtype, wide)
    return dtype, sums_dtype(rounded, wide) if rounded in FLOATS else None


def _fused(
    activation: Activation | None, shape: tuple[int, ...] | None, sums: DTypeName | None
) -> Fused | None:
    """Return the activation for the second kernel, None where the first applies it.

    The gate's product has that shape, and sums of that dtype.
    """
    if activation is None or shape is None or sums is None:
        return None
    like = jax.ShapeDtypeStruct(shape, jax_dtype(sums))
    found = resolve("gated_matmul", activation, like)
    return found if isinstance(found, Fused) else None


def _shape(a: jax.Array, b: jax.Array) -> tuple[int, ...] | None:
    """Return the shape of a product, None where the operands do not go together."""
    like = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (a, b)]
    try:
        return jax.eval_shape(jnp.matmul, *like).shape
    except (TypeError, ValueError):
        return None


def _check_alike(
    gate: jax.Array,
    up: jax.Array,
    gates: tuple[int, ...] | None,
    full: tuple[int, ...] | None,
) -> None:
    """Raise ValueError unless the gates broadcast to what they multiply."""
    if gates is None or full is None:
        return  # the product says what is wrong with up
    if not broadcasts_to(in_front(gates, len(full)), full):
        raise ValueError(
            f"gated_matmul: gate is {describe(gate)} and up {describe(up)}, so that "
            f"their products with a are {list(gates)} and {list(full)}. The first must "
            "broadcast to the second. Give both as many columns and the same batch "
            "axes."
        )
