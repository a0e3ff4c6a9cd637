# SPDX-License-Identifier: Apache-2.0
"""Tests the ready-made functions of scores against the papers that define them."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import score_mods, sdpa
from tests.attention.shared.oracle import SIZES
from tests.conftest import Draw

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def test_alibi_is_that_of_the_paper(draw: Draw) -> None:
    np.testing.assert_allclose(
        score_mods.alibi_slopes(8), [2.0**-i for i in range(1, 9)]
    )
    np.testing.assert_allclose(
        score_mods.alibi_slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    )
    q, k, v = (draw(axes) for axes in ("bshd", "btkd", "btke"))
    slopes = score_mods.alibi_slopes(SIZES["h"])
    got = sdpa(q, k, v, score_mod=score_mods.alibi(slopes), is_causal=True)
    rows, columns = np.arange(SIZES["s"])[:, None], np.arange(SIZES["t"])
    bias = slopes[:, None, None] * jnp.asarray(columns - rows, slopes.dtype)[None]
    want = sdpa(q, k, v, bias[None], is_causal=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_t5_buckets_are_those_of_its_paper() -> None:
    # From the function in the T5 code base, for 32 buckets up to 128.
    bucket = score_mods.t5_buckets()
    positions = [-200, -128, -20, -8, -7, -1, 0, 1, 7, 8, 20, 127, 128, 300]
    want = [15, 15, 10, 8, 7, 1, 0, 17, 23, 24, 26, 31, 31, 31]
    assert [int(bucket(jnp.int32(x))) for x in positions] == want
    causal = score_mods.t5_buckets(bidirectional=False)
    assert [int(causal(jnp.int32(x))) for x in (5, 0, -1, -15, -16, -500)] == [
        *(0, 0, 1, 15, 16, 31)
    ]


def test_ready_made_ones_refuse_bad_arguments() -> None:
    with pytest.raises(ValueError, match=re.escape("cap=0 is not above 0")):
        score_mods.softcap(0)
    with pytest.raises(ValueError, match=re.escape("cap is f32[2]. It must be one")):
        score_mods.softcap(jnp.ones(2))
    with pytest.raises(ValueError, match=re.escape("one number per query head")):
        score_mods.alibi(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=re.escape("must be (positions, heads)")):
        score_mods.relative_bias(jnp.ones(3))
    with pytest.raises(ValueError, match=re.escape("heads=0 is below 1")):
        score_mods.alibi_slopes(0)
