# SPDX-License-Identifier: Apache-2.0
"""Builds the plans that cuDNN lists first for a graph."""

from jax_cudnn import native
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.lowering.devices import local_device


def first_plans(graph: Graph, most: int, request: str = "") -> list[native.PlanInfo]:
    """Return the plans of the first candidates, without those that do not build.

    ``request`` may prefer some of them.

    Raises:
      UnsupportedError: cuDNN lists none.
    """
    text, ordinal = to_json(graph), local_device().local_hardware_id
    listed = native.candidates(text, request=request, device=ordinal)
    found: list[native.PlanInfo] = []
    for each in [x for x in listed if x.request and not x.refusal][:most]:
        try:
            found.append(native.plan(text, request=each.request, device=ordinal))
        except UnsupportedError:
            continue
    return found
