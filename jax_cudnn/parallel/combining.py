# SPDX-License-Identifier: Apache-2.0
"""`combine`: attention over two sets of keys, from attention over each of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.common.arguments import as_operand, check_dtype, describe
from jax_cudnn.reference.attention.softmax import combined


def combine(
    output_1: ArrayLike, lse_1: ArrayLike, output_2: ArrayLike, lse_2: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    r"""Return attention over two sets of keys, given attention over each of them.

    With the outputs :math:`O_1, O_2` and log-sum-exps :math:`L_1, L_2` that
    :func:`jax_cudnn.sdpa` returns with `return_residual` for the same queries,

    .. math::

        L = \log(e^{L_1} + e^{L_2}), \qquad
        O = e^{L_1 - L} O_1 + e^{L_2 - L} O_2

    where the sets have no key in common. A log-sum-exp of -inf stands for no key: then
    the other side is returned as it is, whatever the output beside -inf holds. If both
    are -inf, the result is 0 and -inf, with gradient 0. Weights and sums are kept in
    f32 (f64 for f64), and the output is rounded once. All of JAX's transformations
    apply.

    To combine many parts of 16-bit outputs, convert the first one to f32: the result
    stays f32, and nothing is rounded in between.

    Args:
      output_1: (\*any, e); bf16, f16, f32 or f64.
      lse_1: (\*any), the log-sum-exp that belongs to it (natural logarithm); bf16, f16,
        f32 or f64. Finite or -inf.
      output_2: like `output_1`, for the other keys.
      lse_2: like `lse_1`, for the other keys.

    Returns:
      The output, of the wider dtype of both outputs, and its log-sum-exp in f32 (f64 if
      an operand is f64).

    Raises:
      TypeError: dtypes that are not supported.
      ValueError: shapes that do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn import sdpa
      >>> from jax_cudnn.parallel import combine
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 6, 4, 8))
      >>> halves = [(slice(None), slice(0, 3)), (slice(None), slice(3, 6))]
      >>> parts = [sdpa(q, k[x], v[x], return_residual=True) for x in halves]
      >>> output, lse = combine(*parts[0], *parts[1])
      >>> bool(jnp.allclose(output, sdpa(q, k, v), atol=1e-5))
      True
    """

    def array(name: str, x: ArrayLike) -> jax.Array:
        return as_operand("combine", name, x)

    outputs = [array("output_1", output_1), array("output_2", output_2)]
    stats = [array("lse_1", lse_1), array("lse_2", lse_2)]
    for i in (0, 1):
        check_dtype("combine", f"output_{i + 1}", outputs[i])
        check_dtype("combine", f"lse_{i + 1}", stats[i])
    first = outputs[0]
    for name, x, shape in (
        ("output_2", outputs[1], first.shape),
        ("lse_1", stats[0], first.shape[:-1]),
        ("lse_2", stats[1], first.shape[:-1]),
    ):
        if not first.ndim or x.shape != shape:
            raise ValueError(
                f"combine: output_1 is {describe(first)} and {name} {describe(x)}. "
                "Outputs must have one shape, and log-sum-exps this shape without its "
                "last axis. Pass what sdpa returns with return_residual=True."
            )
    output, lse = combined(outputs, stats)
    return output.astype(_wider(outputs)), lse


def _wider(outputs: list[jax.Array]) -> jnp.dtype:
    """Return the dtype that holds both: f32 for bf16 beside f16."""
    first, second = (x.dtype for x in outputs)
    if first == second:
        return first
    return jnp.dtype(jnp.float64 if jnp.float64 in (first, second) else jnp.float32)
