# SPDX-License-Identifier: Apache-2.0
"""Is attention through cuDNN as accurate as its dtype allows, forward and gradients?"""

import functools

import jax
import pytest

from tests.gpu.numerics import judge, to_f32
from tests.sdpa_cases import ALL, attention, make_operands, with_gradients

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", ALL, ids=[case.name for case in ALL])
def test_results_and_gradients_match_f32_truth(case, record_property):
    operands = make_operands(case)
    run = functools.partial(
        lambda implementation, arrays: with_gradients(
            attention(case, implementation), operands.cotangents, operands.wanted
        )(*arrays)
    )
    results = run("cudnn", operands.arrays)
    references = run("xla", operands.arrays)
    with jax.default_matmul_precision("highest"):
        truths = run("xla", tuple(to_f32(x) for x in operands.arrays))
    ratios = judge(operands.names, results, references, truths)
    for name, ratio in ratios.items():
        record_property(f"error ratio of {name}", f"{ratio:.2f}")
