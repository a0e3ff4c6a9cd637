# SPDX-License-Identifier: Apache-2.0
"""Which plans does cuDNN list first for a graph, of those that it builds?"""

from jax_cudnn import native
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.lowering.devices import local_device


def first_plans(graph: Graph, most: int) -> list[native.PlanInfo]:
    """Return the plans of the first candidates, without those that do not build.

    Raises:
      UnsupportedError: cuDNN lists none.
    """
    text, ordinal = to_json(graph), local_device().local_hardware_id
    listed = native.candidates(text, device=ordinal)
    found: list[native.PlanInfo] = []
    for each in [x for x in listed if x.request and not x.refusal][:most]:
        try:
            found.append(native.plan(text, request=each.request, device=ordinal))
        except UnsupportedError:
            continue
    return found
