# SPDX-License-Identifier: Apache-2.0
"""`plans.using`: settings for all calls that are traced inside a `with` block."""

from contextlib import AbstractContextManager
from typing import Any

from jax_cudnn.config import Implementation, Options, PlanOptions, check_plan
from jax_cudnn.lowering import scoped


def using(
    plan: PlanOptions | None = None,
    *,
    implementation: Implementation | None = None,
) -> AbstractContextManager[None]:
    """Return a context in which calls are traced with these settings.

    The settings are part of jit's cache key: a function that was compiled outside is
    traced and compiled again inside, and the other way round. A call's own ``plan``,
    and its ``implementation`` unless that is "auto", go before them. What is not given
    stays as it is around the block.

    Args:
      plan: which of cuDNN's plans may run. Default None: as around the block.
      implementation: "auto", "cudnn" or "xla". Default None: as around the block.

    Raises:
      TypeError: ``plan`` is not a ``PlanOptions``.
      ValueError: an unknown implementation.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> from jax_cudnn import plans
      >>> x = jnp.ones((16, 16))
      >>> with plans.using(plans.PlanOptions(deterministic=True)):
      ...     y = jax.jit(jax_cudnn.matmul)(x, x)
    """
    changes: dict[str, Any] = {}
    if plan is not None:
        check_plan(plan)
        changes["plan"] = plan
    if implementation is not None:
        Options(implementation=implementation)  # refuses unknown names
        changes["implementation"] = implementation
    return scoped(**changes)
