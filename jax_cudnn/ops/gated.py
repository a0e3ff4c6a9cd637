# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.gated_matmul`: the first half of a gated MLP (SwiGLU, GEGLU, ...)."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.ops.activations import Activation
from jax_cudnn.ops.arguments import Precision, describe
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
    r"""Return a gated product, as the first half of a SwiGLU or GEGLU layer has it.

    .. math::

        \mathrm{output} = \mathrm{activation}(a \cdot \mathrm{gate}
            + \mathrm{gate\_bias}) \odot (a \cdot \mathrm{up} + \mathrm{up\_bias})

    Two kernels: the first has the activation in it, the second the multiplication with
    the first one's result, which is rounded in between. cuDNN takes both products in
    one graph, too, and is not faster that way (docs/benchmarks/where_to_fuse.md, an
    H200 with 9.19). Transformations, dtypes and errors are those of
    :func:`jax_cudnn.matmul`.

    Args:
      a: (..., m, r).
      gate: (r, n), or (..., r, n).
      up: like gate.
      activation: of the gate, as for :func:`jax_cudnn.conv`. Default "silu" (SwiGLU);
        "gelu" gives GEGLU, "sigmoid" GLU.
      gate_bias: broadcasts to the result; (n,) is the usual one. Default None: none.
      up_bias: likewise.
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

    def product(b: ArrayLike, bias: ArrayLike | None, **options: object) -> jax.Array:
        return matmul(
            a,
            b,
            bias=bias,
            precision=precision,
            preferred_element_type=preferred_element_type,
            implementation=implementation,
            plan=plan,
            **options,  # type: ignore[arg-type]
        )

    columns = [1 if jnp.ndim(b) < 2 else jnp.shape(b)[-1] for b in (gate, up)]
    if columns[0] not in (1, columns[1]):
        first, second = (describe(jnp.asarray(b)) for b in (gate, up))
        raise ValueError(
            f"gated_matmul: gate is {first} and up {second}. Both must have as many "
            "columns. Slice or pad one of them."
        )
    gates = product(gate, gate_bias, activation=activation)
    return product(up, up_bias, scale_out=gates)
