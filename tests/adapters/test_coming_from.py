# SPDX-License-Identifier: Apache-2.0
"""Each row of docs/coming_from.md computes what the other library documents.

The rows are read from the page: the cell of jax_cudnn is evaluated with the operands
that the page's snippet defines, and compared with the formula of the row's first cell.
"""

import functools
import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from tests.adapters.formulas import attention, log_sum_exp, packed
from tests.tools.snippets import DOCS, snippets

pytestmark = pytest.mark.once

_PAGE = DOCS / "coming_from.md"
_ROW = re.compile(r"^\| (?P<theirs>[^|]+) \| `(?P<ours>[^`]+)` \|")
_CALL = re.compile(r"[\w.]+\(")


def _rows() -> dict[tuple[str, str], str]:
    """Return the cell of jax_cudnn of each row, by its library and its first cell."""
    found: dict[tuple[str, str], str] = {}
    heading = ""
    for line in _PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif match := _ROW.match(line):
            found[heading, match["theirs"].replace("`", "")] = match["ours"]
    return found


@functools.cache
def _operands() -> dict[str, Any]:
    """Return the names that the page's snippet defines."""
    (snippet,) = snippets(_PAGE)
    names: dict[str, Any] = {}
    exec(snippet.code, names)
    return names


@functools.cache
def _numbers() -> SimpleNamespace:
    """Return the operands as NumPy's arrays."""
    arrays = {
        name: np.asarray(x)
        for name, x in _operands().items()
        if isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }
    return SimpleNamespace(**arrays)


@functools.cache
def _found() -> dict[tuple[str, str], Any]:
    """Return what all rows compute, as one program."""
    names = _operands()
    arrays = {name: x for name, x in names.items() if isinstance(x, jax.Array)}

    @jax.jit
    def run(arrays: dict[str, jax.Array]) -> list[Any]:
        scope = {**names, **arrays}
        return [
            eval(ours if _CALL.match(ours) else f"sdpa(q, k, v, {ours})", scope)
            for ours in _rows().values()
        ]

    return dict(zip(_rows(), run(arrays), strict=True))


# --- what the libraries document ------------------------------------------------------

_S, _T = 5, 7  # queries and keys of the page
_SHIFT = _T - _S


def _of(**arguments: Any) -> Callable[[Any], Any]:
    """Return attention of q, k and v with these arguments."""
    return lambda o: attention(o.q, o.k, o.v, **arguments)


def _from_end(left: float, right: float) -> Callable[[Any], Any]:
    """Return attention in a window around the keys that end with the queries."""
    return _of(seen=lambda i, j: i + _SHIFT - left <= j <= i + _SHIFT + right)


def _top_left(i: int, j: int) -> bool:
    return j <= i


def _with(**names: str) -> Callable[[Any], Any]:
    """Return attention with operands of the page, by their names."""
    return lambda o: attention(
        o.q, o.k, o.v, **{name: getattr(o, which) for name, which in names.items()}
    )


def _few(o: Any) -> Any:
    return attention(o.q, o.few_k, o.few_v)


def _qkv(o: Any) -> Any:
    return attention(*(o.qkv[:, :, i] for i in range(3)))


def _capped(scores: np.ndarray) -> np.ndarray:
    return 2.0 * np.tanh(scores / 2.0)


def _with_lse(o: Any, axes: tuple[int, ...] = (0, 2, 1)) -> Any:
    return attention(o.q, o.k, o.v), log_sum_exp(o.q, o.k).transpose(axes)


def _alibi(o: Any) -> Any:
    far = [[abs(i + _SHIFT - j) for j in range(_T)] for i in range(_S)]
    return attention(o.q, o.k, o.v, bias=-o.slopes[:, None, None] * np.array(far))


def _relative(o: Any) -> Any:
    bias = [[0.1 * (j - i) for j in range(_T)] for i in range(_S)]
    return attention(o.q, o.k, o.v, bias=np.array(bias))


def _cached(o: Any) -> Any:
    """Return attention of the first two queries as the last tokens of their keys."""
    found = [
        attention(
            o.q[i : i + 1, :2],
            o.k[i : i + 1, :length],
            o.v[i : i + 1, :length],
            seen=functools.partial(lambda n, i, j: j <= i + n - 2, length),
        )
        for i, length in enumerate((7, 4))
    ]
    return np.concatenate(found)


def _sequences(seen: Callable[[int, int], Any]) -> Callable[[Any], Any]:
    """Return attention within the sequences; ``seen`` is of a sequence's lengths."""
    return lambda o: packed(
        o.packed_q, o.packed_k, o.packed_v, (0, 2, 5), (0, 3, 7), seen
    )


def _all(s: int, t: int) -> Any:
    del s, t
    return True


def _from_start(s: int, t: int) -> Any:
    del s, t
    return _top_left


def _to_end(s: int, t: int) -> Any:
    return lambda i, j: j <= i + t - s


def _documents(o: Any) -> Any:
    rows = [((0, 2, 4), o.q[0]), ((0, 1, 5), o.q[1])]  # the last token of 0 is padding
    return np.stack([packed(x, x, x, ends, ends, _all) for ends, x in rows])


def _padded(*, is_causal: bool) -> Callable[[Any], Any]:
    def formula(o: Any) -> Any:
        i, j = np.arange(_S)[:, None], np.arange(_T)
        seen = (i < o.query_lengths[:, None, None]) & (j < o.lengths[:, None, None])
        return attention(
            o.q, o.k, o.v, seen=(seen & ((j <= i) | (not is_causal)))[:, None]
        )

    return formula


def _heads_first(o: Any) -> Any:
    return attention(o.q, o.k, o.v).swapaxes(1, 2)


def _capped_with_bias(o: Any) -> Any:
    return attention(o.q, o.k, o.v, on_scores=lambda x: _capped(x + o.bias))


def _biased_before_the_scale(o: Any) -> Any:
    return attention(o.q, o.k, o.v, scale=0.3, bias=0.3 * o.bias)


_BOTTOM_RIGHT = _from_end(np.inf, 0)
_DROPOUT = None  # test_dropout_rows looks at these
FORMULAS: dict[str, dict[str, Callable[[Any], Any] | None]] = {
    "flash-attn": {
        "causal=True": _BOTTOM_RIGHT,
        "window_size=(3, 1)": _from_end(3, 1),
        "window_size=(3, -1)": _from_end(3, np.inf),
        "causal=True, window_size=(2, -1)": _from_end(2, 0),
        "softmax_scale=0.3": _of(scale=0.3),
        "softcap=2.0": _of(on_scores=_capped),
        "alibi_slopes=slopes": _alibi,
        "dropout_p=0.25": _DROPOUT,
        "deterministic=True": _of(),
        "return_attn_probs=True": _with_lse,
        "k and v with fewer heads": _few,
        "flash_attn_qkvpacked_func(qkv)": _qkv,
        "flash_attn_varlen_func(packed_q, packed_k, packed_v, cu_seqlens_q, "
        "cu_seqlens_k, 3, 4)": _sequences(_all),
        "the same with causal=True": _sequences(_to_end),
        "flash_attn_with_kvcache(q[:, :2], k, v, cache_seqlens=lengths, "
        "causal=True)": _cached,
        "flash_attn_with_kvcache(q[:, :2], pages_k, pages_v, cache_seqlens=lengths, "
        "block_table=block_table, causal=True)": _cached,
    },
    "torch": {
        "the layout": _heads_first,
        "is_causal=True": _of(seen=_top_left),
        "attn_mask=visible, booleans": _with(seen="visible"),
        "attn_mask=bias, floats": _with(bias="bias"),
        "attn_mask=causal_lower_right(s, t)": _BOTTOM_RIGHT,
        "dropout_p=0.25": _DROPOUT,
        "scale=0.3": _of(scale=0.3),
        "enable_gqa=True": _few,
        "flex_attention(..., score_mod=score_mod)": _relative,
        "flex_attention(..., return_lse=True)": _with_lse,
        "MultiheadAttention's key_padding_mask=is_padding": lambda o: attention(
            o.q, o.k, o.v, seen=~o.is_padding[:, None, None]
        ),
        "MultiheadAttention's attn_mask=~visible, booleans": _with(seen="visible"),
    },
    "xFormers": {
        "LowerTriangularMask()": _of(seen=_top_left),
        "LowerTriangularFromBottomRightMask()": _BOTTOM_RIGHT,
        # "greater than or equal to X + window_size" is hidden, of distances to the end
        "LowerTriangularFromBottomRightLocalAttentionMask(3)": _of(
            seen=lambda i, j: _S - 1 - i <= _T - 1 - j < _S - 1 - i + 3
        ),
        "LocalAttentionFromBottomRightMask(2, 1)": _from_end(2, 1),
        "LowerTriangularMask().add_bias(bias)": lambda o: attention(
            o.q, o.k, o.v, seen=_top_left, bias=o.bias
        ),
        "attn_bias=bias, an array": _with(bias="bias"),
        "BlockDiagonalMask.from_seqlens([2, 3], [3, 4])": lambda o: _sequences(_all)(o)[
            None
        ],
        "BlockDiagonalCausalMask": _sequences(_from_start),
        "BlockDiagonalCausalFromBottomRightMask": _sequences(_to_end),
        "p=0.25": _DROPOUT,
        "scale=0.3": _of(scale=0.3),
        "arrays (b, s, groups, heads, d)": _few,
    },
    "TransformerEngine": {
        'transpose_batch_sequence=True, or qkv_format="sbhd"': lambda o: attention(
            o.q, o.k, o.v
        ).swapaxes(0, 1),
        'attn_mask_type="no_mask"': _of(),
        'attn_mask_type="causal"': _of(seen=_top_left),
        'attn_mask_type="causal_bottom_right", PyTorch': _BOTTOM_RIGHT,
        'attn_mask_type="padding" with a mask, True for padding': _padded(
            is_causal=False
        ),
        'attn_mask_type="padding_causal"': _padded(is_causal=True),
        'attn_mask_type="arbitrary" with ~visible, PyTorch': _with(seen="visible"),
        'attn_mask_type="causal", window_size=(2, 0)': _of(
            seen=lambda i, j: i - 2 <= j <= i
        ),
        'attn_bias_type="post_scale_bias"': _with(bias="bias"),
        'attn_bias_type="pre_scale_bias", scale_factor=0.3': _biased_before_the_scale,
        "scale_factor=0.3": _of(scale=0.3),
        "attention_dropout=0.25": _DROPOUT,
        "num_gqa_groups=2": _few,
        'qkv_layout="bs3hd"': _qkv,
        'qkv_layout="thd_thd_thd" with SequenceDescriptor.from_segment_ids_and_pos': (
            _documents
        ),
        'softmax_type="learnable", offsets (1, h, 1, 1)': lambda o: attention(
            o.q, o.k, o.v, more=np.exp(o.sink)
        ),
        'softmax_type="off-by-one"': _of(more=1.0),
    },
    "tokamax": {
        "bias=bias, mask=visible, scale=0.3": lambda o: attention(
            o.q, o.k, o.v, bias=o.bias, seen=o.visible, scale=0.3
        ),
        "is_causal=True": _of(seen=_top_left),
        "local_window_size=(2, 1)": _of(seen=lambda i, j: i - 2 <= j <= i + 1),
        "query_seq_lengths=..., key_value_seq_lengths=...": _padded(is_causal=False),
        "logits_soft_cap=2.0": _of(on_scores=_capped),
        "logits_soft_cap=2.0, bias=bias": _capped_with_bias,
        "further batch axes": lambda o: attention(o.q, o.k, o.v)[None],
        'implementation="cudnn"': _of(),
    },
}


def test_each_row_has_a_formula() -> None:
    rows = {(library, row) for library, rows in FORMULAS.items() for row in rows}
    assert {*_rows()} == rows
    # A row that the reader of tables does not take is none that is tested.
    tables = _PAGE.read_text(encoding="utf-8").partition("## flash-attn")[2]
    lines = [each for each in tables.splitlines() if each.startswith("| ")]
    assert len(lines) == len(rows) + 2 * len(FORMULAS)


def test_each_keyword_of_another_library_is_answered_with_ours() -> None:
    known = {*inspect.signature(jax_cudnn.sdpa).parameters}
    keywords = {x for _, cell in _rows() for x in re.findall(r"\b([a-z]\w+)=", cell)}
    others = sorted(keywords - known)
    assert len(others) > 20
    messages = {}
    for name in others:
        with pytest.raises(TypeError) as caught:
            jax_cudnn.sdpa(*[jnp.ones((1, 5, 2, 8))] * 3, **{name: None})
        messages[name] = str(caught.value)
    unanswered = [name for name, text in messages.items() if "Its arguments" in text]
    assert unanswered == []


@pytest.mark.parametrize(
    ("library", "row"),
    [
        (library, row)
        for library, rows in FORMULAS.items()
        for row, formula in rows.items()
        if formula is not None
    ],
)
def test_a_row_means_what_the_library_documents(library: str, row: str) -> None:
    formula = FORMULAS[library][row]
    assert formula is not None
    expected = formula(_numbers())
    found = _found()[library, row]
    assert isinstance(expected, tuple) == isinstance(found, tuple)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
    plain = _of()(_numbers())
    is_plain = any(
        x.shape == plain.shape and np.allclose(x, plain, rtol=2e-5, atol=2e-6)
        for x in jax.tree.leaves(found)
    )
    # What a row says makes a difference to these operands, or is meant to make none.
    assert is_plain == (row in _WITHOUT_EFFECT), row


_WITHOUT_EFFECT = {
    "deterministic=True",
    "return_attn_probs=True",
    "flex_attention(..., return_lse=True)",
    'attn_mask_type="no_mask"',
    'implementation="cudnn"',
}


def test_dropout_rows_drop_a_share_of_weights_and_scale_the_others() -> None:
    """They all drop weights after the softmax, and divide those that are kept."""
    rows = [
        _rows()[library, row]
        for library, formulas in FORMULAS.items()
        for row, formula in formulas.items()
        if formula is None
    ]
    assert len(rows) == 4
    assert len({*rows}) == 1
    b, t, h, d = 4, 32, 8, 16
    q, k = jax.random.normal(jax.random.key(9), (2, b, t, h, d))
    # Values that are a unit matrix return the weights.
    v = jnp.broadcast_to(jnp.eye(t)[:, None], (b, t, h, t))
    scope = {**_operands(), "q": q, "k": k, "v": v}
    found = np.asarray(eval(f"sdpa(q, k, v, {rows[0]})", scope)).swapaxes(1, 2)
    kept = attention(q, k, q, weights_only=True) / (1 - 0.25)
    is_kept = found != 0
    np.testing.assert_allclose(found[is_kept], kept[is_kept], rtol=1e-4)
    assert abs(1 - is_kept.mean() - 0.25) < 0.02


def test_queries_that_see_no_key_give_0() -> None:
    """As flash-attn documents for more queries than keys and `causal=True`."""
    o = _numbers()
    found = jax_cudnn.sdpa(o.k, o.q, o.q, mask=jax_cudnn.masks.Causal("bottom-right"))
    assert not jnp.any(found[:, : _T - _S])
    expected = attention(o.k, o.q, o.q, seen=lambda i, j: j <= i + _S - _T)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
