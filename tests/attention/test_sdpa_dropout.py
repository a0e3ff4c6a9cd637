# SPDX-License-Identifier: Apache-2.0
"""Tests that attention drops what its key says, at its rate, however it runs."""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.test_util import check_grads

from jax_cudnn import masks, sdpa
from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.ops.attention.attend import Operands
from jax_cudnn.ops.attention.dropout import with_dropout
from jax_cudnn.reference.attention.dropout import kept, numbered, philox
from tests.attention.shared.dense import dense_attention, with_gradients
from tests.attention.shared.dropout import numpy_kept, numpy_numbers
from tests.common.evaluating import with_pullback
from tests.conftest import Draw

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("x64"), pytest.mark.sampled]

_SIZES = {"b": 2, "s": 37, "t": 53, "h": 6, "k": 3, "d": 5, "e": 4}
_KEY = jax.random.key(11)
_RATE = 0.3
_kept = jax.jit(kept, static_argnums=(0, 3))
_numbered = jax.jit(numbered, static_argnums=(1, 2))


def _operands(draw: Draw, dtype: Any = jnp.float64) -> list[jax.Array]:
    return [draw(axes, dtype, **_SIZES) for axes in ("bshd", "btkd", "btke")]


def _one(x: int) -> jax.Array:
    return jnp.full((1, 1, 1, 1), x, jnp.int32)


def _weights(key: jax.Array, *, rate: float = _RATE, **sizes: int) -> np.ndarray:
    """Return which weights a call keeps: with equal scores, values show them."""
    b, s, t, h = (sizes.get(x, _SIZES[x]) for x in "bsth")
    shown = np.broadcast_to(np.eye(t)[None, :, None], (b, t, h, t))
    call = jax.jit(functools.partial(sdpa, dropout_rate=rate))
    output = call(
        np.zeros((b, s, h, 8)), np.zeros((b, t, h, 8)), shown, dropout_key=key
    )
    scaled = np.moveaxis(np.asarray(output) * t * (1 - rate), 1, 2)
    np.testing.assert_allclose(scaled[scaled != 0], 1, rtol=1e-4)
    return scaled != 0


def _kept_by(key: jax.Array, b: int, h: int, s: int, t: int) -> np.ndarray:
    """Return NumPy's answer to the same question."""
    words = np.asarray(jax.random.bits(key, (2,), jnp.uint32)).view(np.int32)
    first = int(words[1]) & (2**30 - 4)
    offsets = first + 32 * np.arange(b * h).reshape(b, h)
    return numpy_kept(round(_RATE * 2**16) / 2**16, int(words[0]), offsets, s, t)


# --- the numbers ----------------------------------------------------------------------


# Those of the Random123 library (kat_vectors), 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (2**32 - 1,) * 4,
            (2**32 - 1,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    got = philox(
        tuple(map(jnp.uint32, counter)),  # type: ignore[arg-type]
        tuple(map(jnp.uint32, key)),  # type: ignore[arg-type]
        rounds=10,
    )
    assert tuple(map(int, got)) == words


_FILE = Path(__file__).parent / "shared" / "dropout_masks.json"
_MASKS = json.loads(_FILE.read_text())


# Dumped on an H200 by cuDNN 9.19.0; cuDNN keeps one number more than its rate says.
@pytest.mark.parametrize("case", _MASKS, ids=lambda x: f"{x['what']}-{x['shape']}")
def test_the_mask_is_that_of_cudnn(case: dict[str, Any]) -> None:
    b, h, s, t = case["shape"]
    count = math.floor((1 - case["rate"]) * 2**16) + 1
    got = _kept(
        1 - count / 2**16,
        _one(case["seed"]),
        _numbered(_one(case["offset"]), b, h),
        (s, t),
    )
    digest = hashlib.sha256(np.packbits(np.asarray(got)).tobytes()).hexdigest()
    assert digest == case["sha256"]


@pytest.mark.parametrize("s", [1, 7, 16, 77])
@pytest.mark.parametrize("t", [1, 15, 33])
def test_the_mask_is_that_of_numpy(s: int, t: int) -> None:
    offsets = np.array([[0, 32, 2**30], [4, 2**31 - 64, 64]], np.int32)
    for seed in (5, -3, 2**31 - 1):
        want = numpy_kept(0.375, seed, offsets, s, t)
        offset = jnp.asarray(offsets[..., None, None])
        got = _kept(0.375, _one(seed), offset, (s, t))
        np.testing.assert_array_equal(got, want)
        rows = jnp.arange(s // 3, s, dtype=jnp.int32)
        got = _kept(0.375, _one(seed), offset, (s, t), rows)
        np.testing.assert_array_equal(got, want[:, :, s // 3 :])


def test_no_rows_and_no_keys_have_an_empty_mask() -> None:
    assert _kept(0.5, _one(1), _numbered(_one(0), 2, 3), (0, 4)).shape == (2, 3, 0, 4)
    assert _kept(0.5, _one(1), _numbered(_one(0), 2, 3), (4, 0)).shape == (2, 3, 4, 0)


@pytest.mark.parametrize("rate", [0.003, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate: float) -> None:
    mask = _weights(_KEY, rate=round(rate * 2**16) / 2**16, b=3, s=160, t=176, h=4)
    # A fourth of the numbers are distinct. Five standard deviations: one test in 1.7
    # million fails by chance, and the key is fixed.
    bound = 5 * math.sqrt(rate * (1 - rate) / (mask.size / 4))
    assert abs((~mask).mean() - rate) < bound
    # In each head, and for each key, as well.
    assert np.abs((~mask).mean((2, 3)) - rate).max() < bound * math.sqrt(12)
    assert np.abs((~mask).mean((0, 1, 2)) - rate).max() < bound * math.sqrt(176)


def test_batch_entries_heads_and_keys_drop_different_weights() -> None:
    mask = _weights(_KEY, rate=0.5, b=3, s=96, t=112, h=4).reshape(12, -1)
    others = [_weights(k, rate=0.5, b=1, s=96, t=112, h=1).ravel() for k in _keys(8)]
    rows = np.concatenate([mask, np.array(others)])
    rows = np.where(rows, 1.0, -1.0)
    correlation = rows @ rows.T / rows.shape[1] - np.eye(len(rows))
    # Of 190 pairs; six standard deviations, with a fourth of the numbers distinct.
    assert np.abs(correlation).max() < 6 / math.sqrt(rows.shape[1] / 4)


def test_of_eight_queries_four_share_what_they_drop() -> None:
    mask = _weights(_KEY, s=64)
    np.testing.assert_array_equal(mask[:, :, 0:8:2], mask[:, :, :1].repeat(4, axis=2))
    assert (mask[:, :, 0] != mask[:, :, 1]).any()
    assert (mask[:, :, 0] != mask[:, :, 8]).any()


def _keys(count: int) -> list[jax.Array]:
    return list(jax.random.split(jax.random.key(5), count))


# --- what is computed -----------------------------------------------------------------

_S, _T = _SIZES["s"], _SIZES["t"]
_ROWS, _COLUMNS = np.arange(_S)[:, None], np.arange(_T)[None, :]
_LENGTHS = np.array([29, 53])
_SEES: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "all": ({}, np.ones((1, 1, _S, _T), bool)),
    "causal": ({"is_causal": True}, _COLUMNS <= _ROWS),
    "window": ({"local_window_size": (3, 5)}, np.abs(_COLUMNS - _ROWS - 1) <= 4),
    "lengths": (
        {"key_value_seq_lengths": jnp.asarray(_LENGTHS)},
        _LENGTHS.reshape(2, 1, 1, 1) > _COLUMNS,
    ),
    "mask": ({"mask": (_ROWS + _COLUMNS) % 3 != 0}, (_ROWS + _COLUMNS) % 3 != 0),
    "masks": ({"mask": masks.Causal()}, _COLUMNS <= _ROWS),
}


@pytest.mark.parametrize("more", ["", "bias", "sinks", "bias sinks"])
@pytest.mark.parametrize("sees", _SEES)
def test_values_and_gradients_are_those_of_the_dense_formula(
    draw: Draw, sees: str, more: str
) -> None:
    arguments, visible = _SEES[sees]
    names = ["query", "key", "value", *more.split()]
    given = dict(zip(names, _operands(draw), strict=False))
    if "bias" in names:
        given["bias"] = draw("1hst", jnp.float64, **_SIZES)
    if "sinks" in names:
        given["sinks"] = draw("h", jnp.float64, **_SIZES)
    pull = draw("bshe", jnp.float64, **_SIZES)

    def function(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return sdpa(
            **dict(zip(names, operands, strict=True)),
            **arguments,
            dropout_rate=_RATE,
            dropout_key=_KEY,
            return_residual=True,
        )

    b, h = _SIZES["b"], _SIZES["h"]
    rate = round(_RATE * 2**16) / 2**16
    factors = _kept_by(_KEY, b, h, _S, _T) / (1 - rate)

    def truth(given: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return dense_attention(**given, seen=visible, factors=factors)

    operands = [given[name] for name in names]
    pulls = pull, jnp.zeros(jax.eval_shape(function, *operands)[1].shape)
    (output, residual), gradients = with_pullback(function, operands, pulls)
    (want, want_residual), slopes = with_gradients(truth, given, pulls)
    np.testing.assert_allclose(output, want, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(residual, want_residual, rtol=1e-9, atol=1e-11)
    for name, got in zip(names, gradients, strict=True):
        np.testing.assert_allclose(
            got, slopes[name], rtol=1e-8, atol=1e-10, err_msg=name
        )


@pytest.mark.thorough
def test_forward_and_second_order_agree_with_differences(draw: Draw) -> None:
    operands = [x[:, :7] for x in _operands(draw)]
    call = functools.partial(sdpa, dropout_rate=0.4, dropout_key=_KEY, is_causal=True)
    check_grads(call, tuple(operands), order=2, modes=["fwd", "rev"])


def test_no_rate_is_no_dropout_bit_by_bit(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    plain = jax.make_jaxpr(sdpa)(*operands)
    for rate in (0, 0.0, 2.0**-18):
        call = functools.partial(sdpa, dropout_rate=rate, dropout_key=_KEY)
        assert str(jax.make_jaxpr(call)(*operands)) == str(plain)
    assert str(jax.make_jaxpr(functools.partial(sdpa, dropout_key=_KEY))(*operands))


# --- transformations ------------------------------------------------------------------


def _call(key: Any, *operands: jax.Array, **arguments: Any) -> jax.Array:
    return sdpa(*operands, dropout_rate=_RATE, dropout_key=key, **arguments)


def test_the_same_key_drops_the_same_in_every_transformation(draw: Draw) -> None:
    operands = _operands(draw)
    want = _call(_KEY, *operands)
    assert (want != _call(jax.random.key(12), *operands)).any()
    np.testing.assert_array_equal(_call(_KEY, *operands), want)
    old_key = jax.random.PRNGKey(11)
    np.testing.assert_array_equal(_call(old_key, *operands), want)
    np.testing.assert_allclose(jax.jit(_call)(_KEY, *operands), want, rtol=1e-12)
    once = jax.lax.scan(lambda c, k: (c, _call(k, *operands)), 0, _KEY[None])[1][0]
    np.testing.assert_allclose(once, want, rtol=1e-12)

    def total(call: Callable[..., jax.Array]) -> Any:
        function = lambda *x: jnp.sum(jnp.sin(call(_KEY, *x)))  # noqa: E731
        return jax.grad(function, argnums=(0, 1, 2))(*operands)

    for got, wanted in zip(total(jax.checkpoint(_call)), total(_call), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


# With one batch entry, examples of one key share its offsets.
@pytest.mark.parametrize("b", [2, 1])
@pytest.mark.parametrize("implementation", ["auto", "cudnn", "xla"])
@pytest.mark.parametrize("which", ["keys", "operands", "both"])
def test_examples_of_a_vmap_have_the_mask_of_their_key(
    draw: Draw, which: str, implementation: str, b: int
) -> None:
    sizes = {**_SIZES, "b": b}
    operands = [draw(f"n{x}", jnp.float64, n=3, **sizes) for x in ("bshd", "btkd")]
    value = draw("btke", jnp.float64, **sizes)
    keys = jnp.stack(_keys(3))
    axes = (0 if which != "operands" else None, *(0 if which != "keys" else None,) * 2)

    def one(key: jax.Array, q: jax.Array, k: jax.Array) -> tuple[jax.Array, Any]:
        def function(q: jax.Array, k: jax.Array) -> jax.Array:
            return _call(key, q, k, value, implementation=implementation)

        output, back = jax.vjp(function, q, k)
        return output, back(jnp.cos(output))

    given = [
        x if axis == 0 else x[0]
        for x, axis in zip((keys, *operands), axes, strict=True)
    ]
    got, alone = jax.jit(jax.vmap(one, axes))(*given), jax.jit(one)
    for i in range(3):
        each = [x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)]
        for x, y in zip(*map(jax.tree.leaves, (got, alone(*each))), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("way", ["vmap", "vmap of vmap", "scan", "jit"])
def test_what_is_dropped_follows_from_the_key_alone(
    draw: Draw, impl: str, is_raw: bool, way: str
) -> None:
    operands = _operands(draw)
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    keys = jax.random.key_data(keys) if is_raw else keys

    def one(key: jax.Array) -> jax.Array:
        return _call(key, *operands)

    with jax.default_prng_impl(impl):
        want = jnp.stack([one(key) for key in keys])
        if way == "scan":
            got = jax.lax.map(one, keys)
        elif way == "vmap of vmap":
            pairs = jnp.reshape(keys, (2, 2, *keys.shape[1:]))
            got = jnp.reshape(jax.vmap(jax.vmap(one))(pairs), want.shape)
        else:
            got = (jax.jit if way == "jit" else lambda f: f)(jax.vmap(one))(keys)
    assert len({x.tobytes() for x in np.asarray(want)}) == 4
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_part_of_batch_and_heads_drops_what_it_drops_in_the_whole() -> None:
    mask = _weights(_KEY)
    b, h = _SIZES["b"], _SIZES["h"]
    words = jnp.asarray(jax.random.bits(_KEY, (2,), jnp.uint32)).view(jnp.int32)
    offset = _numbered(words[1] & jnp.int32(2**30 - 4), b, h)
    rate = round(_RATE * 2**16) / 2**16
    part = _kept(rate, jnp.reshape(words[0], (1, 1, 1, 1)), offset[1:, 2:4], (_S, _T))
    np.testing.assert_array_equal(part, mask[1:, 2:4])


def test_operands_of_rank_three_are_one_batch_entry(draw: Draw) -> None:
    operands = [x[:1] for x in _operands(draw)]
    want = _call(_KEY, *operands)[0]
    np.testing.assert_array_equal(_call(_KEY, *(x[0] for x in operands)), want)


@pytest.mark.parametrize("shape", ["b, 37, 6, 5", "2, s, 6, 5", "b, s, 6, 5"])
def test_symbolic_dimensions_drop_what_numbers_drop(draw: Draw, shape: str) -> None:
    x = draw("bshd", jnp.float64, **_SIZES)
    call = jax.jit(lambda x: _call(_KEY, x, x, x))
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(shape), x.dtype)
    exported = export.export(call)(symbolic)
    np.testing.assert_allclose(exported.call(x), call(x), rtol=1e-12)


# --- messages -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "key", "error", "message"),
    [
        (1.0, _KEY, ValueError, "sdpa: dropout_rate=1.0 is not in [0, 1)."),
        (-0.1, _KEY, ValueError, "sdpa: dropout_rate=-0.1 is not in [0, 1)."),
        (math.nan, _KEY, ValueError, "sdpa: dropout_rate=nan is not in [0, 1)."),
        (True, _KEY, TypeError, "sdpa: dropout_rate is bool. It must be a number"),
        ("1", _KEY, TypeError, "sdpa: dropout_rate is str. It must be a number"),
        (0.1, None, ValueError, "dropout_rate is 0.1 but dropout_key is None. Pass"),
        (0.1, jnp.ones(2), TypeError, "dropout_key is f32[2]. It must be a key of"),
        (0.1, jnp.stack([_KEY] * 3), ValueError, "dropout_key has shape [3]. It must"),
        (0.0, jnp.ones(2), TypeError, "dropout_key is f32[2]. It must be a key of"),
    ],
)
def test_wrong_rates_and_keys_are_refused(
    draw: Draw, rate: Any, key: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        sdpa(*_operands(draw), dropout_rate=rate, dropout_key=key)
    assert message in str(caught.value)


def test_a_traced_rate_is_refused(draw: Draw) -> None:
    operands = _operands(draw)
    with pytest.raises(TypeError, match="known when the program is traced"):
        jax.jit(lambda p: sdpa(*operands, dropout_rate=p, dropout_key=_KEY))(0.1)


def test_more_heads_than_there_are_offsets_are_refused() -> None:
    shapes = [jax.ShapeDtypeStruct((2**20, 1, 64, 8), jnp.float32)] * 3
    with pytest.raises(ValueError, match="at most 33554432 heads in all, but there"):
        jax.eval_shape(lambda *x: _call(_KEY, *x), *shapes)


def test_the_highest_rate_keeps_one_number() -> None:
    assert numpy_numbers(1, 0, 16, 16).max() < 2**16
    _, attributes = with_dropout(
        "sdpa", *_call_of(jnp.zeros((1, 2, 1, 8))), 1 - 2.0**-20, _KEY
    )
    assert attributes.dropout == 1 - 2.0**-16


def _call_of(query: jax.Array) -> tuple[Any, Any]:
    operands = Operands(query, query, query, *(None,) * 4)
    return operands, SdpaAttributes(scale=1.0, is_causal=False)
