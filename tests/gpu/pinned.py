# SPDX-License-Identifier: Apache-2.0
"""How is a part compiled so that it runs by one of cuDNN's plans?"""

from collections.abc import Callable, Sequence

import jax

from jax_cudnn import native
from jax_cudnn.graph import Graph, Target, to_json
from jax_cudnn.legalize import Legal
from jax_cudnn.lowering.cuda import run_cudnn
from jax_cudnn.lowering.decision import Step


def pinned(
    part: Graph, legal: Legal, target: Target, request: str
) -> Callable[..., Sequence[jax.Array]]:
    """Return the compiled part, written in one way, with the plan of a request."""
    step = Step(
        part=part,
        legal=legal,
        plan=native.plan(to_json(legal.graph), request=request),
        target=target,
        request=request,
    )
    return jax.jit(lambda *operands: run_cudnn(step, operands))
