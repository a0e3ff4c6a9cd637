# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.gated_matmul`: the first half of a gated MLP (SwiGLU, GEGLU, ...)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.graph.rules import broadcasts_to
from jax_cudnn.ops.activations import Activation
from jax_cudnn.ops.arguments import Precision, as_operand, describe, in_front
from jax_cudnn.ops.callers import on_behalf_of
from jax_cudnn.ops.matmul import matmul


def gated_matmul(
    a: ArrayLike,
    gate: ArrayLike,
    up: ArrayLike,
    *,
    activation: Activation = "silu",
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

    This takes two kernels. The first includes the activation. The second multiplies by
    the first kernel's result, which is rounded in between. cuDNN also takes both
    products in one graph, but is not faster that way (docs/benchmarks/where_to_fuse.md,
    an H200 with 9.19). Transformations, dtypes and errors are those of
    :func:`jax_cudnn.matmul`.

    Args:
      a: (..., m, r).
      gate: (r, n), or (..., r, n).
      up: like gate.
      activation: of the gate, as for :func:`jax_cudnn.conv`. Default "silu" (SwiGLU);
        "gelu" gives GEGLU, "sigmoid" GLU.
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
    a, gate, up = (
        _operand(name, x) for name, x in (("a", a), ("gate", gate), ("up", up))
    )

    def product(name: str, b: jax.Array, bias: Any, **options: Any) -> jax.Array:
        with on_behalf_of("gated_matmul", "matmul", b=name, bias=f"{name}_bias"):
            return matmul(
                a,
                b,
                bias=bias,
                precision=precision,
                preferred_element_type=preferred_element_type,
                implementation=implementation,
                plan=plan,
                **options,
            )

    gates = product("gate", gate, gate_bias, activation=activation)
    _check_alike(a, gate, up)
    return product("up", up, up_bias, scale_out=gates)


def _operand(name: str, value: ArrayLike) -> jax.Array:
    x = as_operand("gated_matmul", name, value)
    if x.ndim == 0:
        raise ValueError(
            f"gated_matmul: {name} is {describe(x)}. It must have one axis or more."
        )
    return x


def _check_alike(a: jax.Array, gate: jax.Array, up: jax.Array) -> None:
    """Raise ValueError unless the gates broadcast to what they multiply."""
    like = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (a, gate, up)]
    try:
        gates, full = (jax.eval_shape(jnp.matmul, like[0], x).shape for x in like[1:])
    except (TypeError, ValueError):
        return  # the product says what is wrong with up
    if not broadcasts_to(in_front(gates, len(full)), full):
        raise ValueError(
            f"gated_matmul: gate is {describe(gate)} and up {describe(up)}, so that "
            f"their products with a are {list(gates)} and {list(full)}. The first must "
            "broadcast to the second. Give both as many columns and the same batch "
            "axes."
        )
