# SPDX-License-Identifier: Apache-2.0
"""Is attention through cuDNN as accurate as its dtype allows, forward and gradients?"""

import functools

import jax
import pytest

import jax_cudnn
from tests.gpu.numerics import judge, to_f32, with_gradients
from tests.sdpa_cases import ALL, Case, make_operands

pytestmark = pytest.mark.gpu


def _attention(case: Case, implementation: str):
    def call(query, key, value, bias, mask, query_lengths, key_lengths):
        return jax_cudnn.sdpa(
            query,
            key,
            value,
            bias,
            mask,
            scale=case.scale,
            is_causal=case.causal,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            implementation=implementation,
            return_residual=case.with_residual,
        )

    return call


@pytest.mark.parametrize("case", ALL, ids=[case.name for case in ALL])
def test_results_and_gradients_match_f32_truth(case, record_property):
    operands = make_operands(case)
    run = functools.partial(
        lambda implementation, arrays: with_gradients(
            _attention(case, implementation), operands.cotangents, operands.wanted
        )(*arrays)
    )
    results = run("cudnn", operands.arrays)
    references = run("xla", operands.arrays)
    with jax.default_matmul_precision("highest"):
        truths = run("xla", tuple(to_f32(x) for x in operands.arrays))
    ratios = judge(operands.names, results, references, truths)
    for name, ratio in ratios.items():
        record_property(f"error ratio of {name}", f"{ratio:.2f}")
