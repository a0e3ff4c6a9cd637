# SPDX-License-Identifier: Apache-2.0
"""`plans.using`: settings for all calls that are traced inside a `with` block."""

from contextlib import AbstractContextManager
from typing import Any

from jax_cudnn import offline
from jax_cudnn.config import (
    Implementation,
    Options,
    PlanOptions,
    ReduceDtype,
    check_plan,
)
from jax_cudnn.lowering import scoped


def using(
    plan: PlanOptions | None = None,
    *,
    implementation: Implementation | None = None,
    device: str | None = None,
    reduce_dtype: ReduceDtype | None = None,
) -> AbstractContextManager[None]:
    """Return a context in which calls are traced with these settings.

    The settings are part of jit's cache key: a function that was compiled outside is
    traced and compiled again inside, and the other way round. A call's own ``plan``
    overrides the setting, and so does its ``implementation`` unless that is "auto". A
    setting that is not passed is the one of the enclosing block.

    Args:
      plan: which of cuDNN's plans may run. Default None: as around the block.
      implementation: "auto", "cudnn" or "xla". Default None: as around the block.
      device: the GPU to plan for when a program is lowered for CUDA, such as "H200",
        "A100 80GB" or "RTX 4090". It need not be present: the installed cuDNN makes the
        plans. The plans are pinned in the program with their workspaces, so the program
        is for such a GPU with the same version of cuDNN. The program refuses to run on
        a GPU of another compute capability, with another version of cuDNN, or where its
        plans do not exist or need more workspace. On a machine without a GPU, ``pip
        install ".[gpuless]"`` in jax_cudnn's source folder installs all that planning
        needs. Default None: as around the block; outside of any block, this machine's
        GPU.
      reduce_dtype: the dtype in which devices add up partial sums of bf16 or f16
        operands, as in a matmul with a sharded contraction or in the gradient of a
        weight that all examples share. "f32" keeps the partial sums in f32.
        "operands" rounds each of them to the dtype of the operands first and sends
        half of the bytes, as plain JAX does. A result that is f32 itself
        (``preferred_element_type``) is added up in f32 either way. The gradients of a
        call follow the call. Collectives of your own in ``jax.shard_map`` do not.
        Default None: as around the block; outside of any block, "f32".

    Raises:
      TypeError: ``plan`` is not a ``PlanOptions``.
      ValueError: an unknown implementation, GPU or ``reduce_dtype``; the message lists
        the known ones.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> from jax_cudnn import plans
      >>> x = jnp.ones((16, 16))
      >>> with plans.using(plans.PlanOptions(deterministic=True)):
      ...     y = jax.jit(jax_cudnn.matmul)(x, x)

      A program for another GPU, from a machine that has none:

      >>> with plans.using(device="H200"):  # doctest: +SKIP
      ...     exported = jax.export.export(
      ...         jax.jit(jax_cudnn.matmul),
      ...         platforms=["cuda"],
      ...         disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
      ...     )(x, x)
    """
    changes: dict[str, Any] = {}
    if plan is not None:
        check_plan(plan)
        changes["plan"] = plan
    if implementation is not None:
        Options(implementation=implementation)  # refuses unknown names
        changes["implementation"] = implementation
    if device is not None:
        changes["device"] = offline.find(device).name
    if reduce_dtype is not None:
        Options(reduce_dtype=reduce_dtype)  # refuses unknown names
        changes["reduce_dtype"] = reduce_dtype
    return scoped(**changes)
