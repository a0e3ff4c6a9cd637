# SPDX-License-Identifier: Apache-2.0
"""Compiles a part with one plan of cuDNN's, and checks each plan's results."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn import UnsupportedError, native
from jax_cudnn.graph import Graph, Target, to_json
from jax_cudnn.legalize import Rewrite, legalize
from jax_cudnn.lowering.cuda import run_cudnn
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.reference import evaluate
from tests.common.drawn_operands import draw_arrays
from tests.common.gpu.numerics import judge
from tests.common.gpu.versions import needs_cudnn


def pinned(
    part: Graph, rewrite: Rewrite, target: Target, request: str
) -> Callable[..., Sequence[jax.Array]]:
    """Return the compiled part, written in one way, with the plan of a request."""
    step = PartDecision(
        part=part,
        rewrite=rewrite,
        plan=native.plan(to_json(rewrite.graph), request=request),
        target=target,
        request=request,
    )
    return jax.jit(lambda *operands: run_cudnn(step, *operands))


def judge_every_plan(part: Graph, *, fewest: int = 2) -> None:
    """Compare what each plan of a part gives with the reference in f64 on the CPU.

    There have to be as many plans as the fewest. Versions before 9.19 list fewer of
    them, and what is refused since it is wrong there has none.
    """
    target = native.device_target(0)
    arrays = draw_arrays(part)
    reference = evaluate(part, arrays)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        tensors = tuple(replace(t, dtype="f64") for t in part.tensors)
        truth = [np.asarray(x) for x in evaluate(replace(part, tensors=tensors), wide)]
    launched = 0
    for rewrite in legalize(part, target).candidates:
        try:
            listed = native.candidates(to_json(rewrite.graph))
        except UnsupportedError:  # The version has no plan of this way.
            continue
        for candidate in listed:
            if candidate.refusal:
                continue
            found = pinned(part, rewrite, target, candidate.request)(*arrays)
            try:
                judge(part.outputs, found, reference, truth)
            except AssertionError as error:
                told = f"by {candidate.name}, {candidate.numeric_notes}: {error}"
                raise AssertionError(told) from error
            launched += 1
    if launched < fewest:
        needs_cudnn(91900, f"a part with {fewest} plans")
    assert launched >= fewest
