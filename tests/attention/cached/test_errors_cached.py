# SPDX-License-Identifier: Apache-2.0
"""Tests what calls over caches and pages refuse, and how they say it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn

pytestmark = [pytest.mark.once, pytest.mark.sampled]


_Q, _C, _P = (np.ones(x, "f4") for x in ((2, 3, 4, 8), (2, 7, 2, 8), (5, 4, 2, 8)))

_L, _T = np.array([3, 4], "i4"), np.array([[0, 1], [3, 2]], "i4")


def _cached(q: Any = _Q, k: Any = _C, v: Any = _C, n: Any = _L, **more: Any) -> Any:
    return lambda: jax_cudnn.cached_sdpa(q, k, v, n, **more)


def _paged(
    q: Any = _Q, k: Any = _P, v: Any = _P, table: Any = _T, n: Any = _L, **more: Any
) -> Any:
    return lambda: jax_cudnn.paged_sdpa(q, k, v, table, n, **more)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            _cached(_Q[:, 0], layout="bhsd"),
            ValueError,
            "cached_sdpa: query is f32[2,4,8], key_cache f32[2,7,2,8], value_cache "
            'f32[2,7,2,8] (layout="bhsd"). query must be (sequences, heads, query '
            "length, head size). For one query of each sequence insert its axis: "
            "query[:, :, None].",
        ),
        (
            _cached(layout="bhsd"),
            ValueError,
            "cached_sdpa: 3 query heads are not a multiple of 7 key heads: ",
        ),
        (
            _paged(layout="sbhd"),
            ValueError,
            "paged_sdpa: layout='sbhd' is not one of 'bshd', 'bhsd'. Pass",
        ),
        (
            _cached(_Q[:, 0]),
            ValueError,
            "cached_sdpa: query is f32[2,4,8], key_cache f32[2,7,2,8], value_cache "
            "f32[2,7,2,8]. query must be (sequences, query length, heads, head size). "
            "For one query of each sequence insert its axis: query[:, None].",
        ),
        (
            _cached(_Q[0, 0]),
            ValueError,
            "cached_sdpa: query is f32[4,8], key_cache f32[2,7,2,8], value_cache "
            "f32[2,7,2,8]. query must be (sequences, query length, heads, head size).",
        ),
        (
            _cached(k=_C[0]),
            ValueError,
            "cached_sdpa: query is f32[2,3,4,8], key_cache f32[7,2,8], value_cache "
            "f32[2,7,2,8]. key_cache must be (sequences, tokens, heads, head size).",
        ),
        (
            _paged(v=_P[0]),
            ValueError,
            "paged_sdpa: query is f32[2,3,4,8], key_pages f32[5,4,2,8], value_pages "
            "f32[4,2,8]. value_pages must be (pages, tokens of a page, heads, head "
            "size).",
        ),
        (
            _cached(v=_C[:, :6]),
            ValueError,
            "cached_sdpa: key_cache has 7 tokens but value_cache 6: ",
        ),
        (
            _paged(v=_P[:4]),
            ValueError,
            "paged_sdpa: key_pages has 5 pages but value_pages 4: ",
        ),
        (
            _paged(v=_P[:, :, :1]),
            ValueError,
            "paged_sdpa: key_pages has 2 heads but value_pages 1: ",
        ),
        (
            _cached(np.ones((2, 9, 4, 8), "f4")),
            ValueError,
            "cached_sdpa: 9 queries of a sequence are tokens of it, and there is room "
            "for 7: query is f32[2,9,4,8], key_cache f32[2,7,2,8]. Make room for all "
            "of them, or pass query_seq_lengths if some are padding.",
        ),
        (
            jax.jit(
                _paged(
                    np.ones((2, 4, 9, 8), "f4"),
                    *[np.ones((5, 2, 4, 8), "f4")] * 2,
                    is_causal=False,
                    local_window_size=3,
                    layout="bhsd",
                )
            ),
            ValueError,
            "paged_sdpa: 9 queries of a sequence are tokens of it, and there is room "
            "for 8: query is f32[2,4,9,8], key_pages f32[5,2,4,8], with 2 pages of a "
            'sequence in page_table (layout="bhsd"). Make room for all of them, or ',
        ),
        (
            _cached(_Q[:1]),
            ValueError,
            "cached_sdpa: query has 1 sequences but key_cache 2: ",
        ),
        (_paged(k=_P[:0], v=_P[:0]), ValueError, "paged_sdpa: key_pages has no page: "),
        (
            _paged(k=_P[:, :0], v=_P[:, :0]),
            ValueError,
            "paged_sdpa: key_pages has pages without tokens: ",
        ),
        (
            _paged(_Q[..., :7]),
            ValueError,
            "paged_sdpa: query has head size 7 but key_pages 8: query is "
            "f32[2,3,4,7], key_pages f32[5,4,2,8], value_pages f32[5,4,2,8]. They must "
            "be equal; that of value_pages may differ.",
        ),
        (
            _cached(_Q[:, :, :3]),
            ValueError,
            "cached_sdpa: 3 query heads are not a multiple of 2 key heads: ",
        ),
        (
            _cached(k=_C.astype(jnp.bfloat16)),
            TypeError,
            "cached_sdpa: key_cache is bf16[2,7,2,8] but query is f32[2,3,4,8]. All "
            "three must have one dtype. Convert key_cache to f32.",
        ),
        (
            _paged(_Q.astype(jnp.int32)),
            TypeError,
            "paged_sdpa: query is i32[2,3,4,8]. Supported dtypes are bf16, f16, f32, "
            "f64. Convert query, key_pages and value_pages to one of them.",
        ),
        (
            _paged(table=_T.astype(jnp.float32)),
            TypeError,
            "paged_sdpa: page_table is f32[2,2]. It must hold integers. Convert it to "
            "int32.",
        ),
        (
            _paged(table=_T[:1]),
            ValueError,
            "paged_sdpa: page_table is i32[1,2] but query f32[2,3,4,8]. It must have "
            "the pages of each sequence, shape [2, most pages of a sequence].",
        ),
        (
            _paged(table=None),
            TypeError,
            "paged_sdpa: page_table is None. It must be an array of numbers.",
        ),
        (
            _cached(n=_L[:1]),
            ValueError,
            "cached_sdpa: key_value_seq_lengths is i32[1]. It must have one length per "
            "sequence, shape [2].",
        ),
        (
            _paged(query_seq_lengths=_L.astype(jnp.float32)),
            TypeError,
            "paged_sdpa: query_seq_lengths is f32[2]. It must hold integers.",
        ),
        (
            _cached(scale=jnp.ones(2)),
            TypeError,
            "cached_sdpa: scale is ArrayImpl. It must be a number known when",
        ),
        (
            _paged(local_window_size=1.5),
            TypeError,
            "paged_sdpa: local_window_size=1.5 is neither an int nor two.",
        ),
        (
            _cached(is_causal=1),
            TypeError,
            "cached_sdpa: is_causal is int. It must be True or False",
        ),
        (
            _paged(sinks=jnp.ones(3)),
            ValueError,
            "paged_sdpa: sinks is f32[3]. It must have one number per query head, "
            "shape [4].",
        ),
        (_cached(implementation="cuda"), ValueError, "cached_sdpa: implementation"),
    ],
)
def test_what_makes_no_sense_is_refused(
    call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
