# SPDX-License-Identifier: Apache-2.0
"""Windows that show no key, and sides without a bound, in all that takes a window."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx import Rngs
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jax_cudnn import cached_sdpa, f8, masks, paged_sdpa, parallel, qkv_sdpa, sdpa
from jax_cudnn.flax import linen, nnx
from tests.common import drawn

pytestmark = [pytest.mark.once, pytest.mark.sampled]


# No query sees a key in them.
_EMPTY: list[Any] = [(-1, -1), -1, (-1, 0), (0, -1), (-2, 1), (2, -3), (-5, -4)]


def _paged(q: jax.Array, k: jax.Array, v: jax.Array, lengths: Any, **given: Any) -> Any:
    table = jnp.arange(q.shape[0])[:, None]
    return paged_sdpa(q, k, v, table, lengths, **given)


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("s",), axis_types=(AxisType.Auto,), devices=_two())


def _two() -> list[jax.Device]:
    return jax.devices()[:2]


def _in_shard_map(q: jax.Array, k: jax.Array, v: jax.Array, **given: Any) -> jax.Array:
    call = functools.partial(parallel.sdpa, axis_name="s", **given)
    spec = PartitionSpec(None, "s")
    shared = jax.shard_map(
        lambda *x: call(*x), mesh=_mesh(), in_specs=(spec,) * 3, out_specs=spec
    )
    return jax.jit(shared)(q, k, v)


def _of_f8(function: Any) -> Any:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, **given: Any) -> Any:
        x = [each.astype(jnp.float8_e4m3fn) for each in (q, k, v)]
        one = jnp.float32(1)
        scales = {"query_scale": one, "key_scale": one, "value_scale": one}
        return function(*x, **scales, preferred_element_type=jnp.bfloat16, **given)

    return call


def _layer(kind: str) -> Any:
    """Return a layer of Flax as a function of its input and settings."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array, **given: Any) -> Any:
        x = jnp.reshape(q, (*q.shape[:2], -1))
        if kind == "linen":
            layer = linen.MultiHeadDotProductAttention(num_heads=2, **given)
            return layer.init_with_output(jax.random.key(0), x)[0]
        layer = nnx.MultiHeadAttention(
            num_heads=2, in_features=x.shape[-1], decode=False, rngs=Rngs(0),
            **given,
        )  # fmt: skip
        return layer(x)

    return call


def _as_mask(q: jax.Array, k: jax.Array, v: jax.Array, **given: Any) -> Any:
    window = given["local_window_size"]
    left, right = (window, window) if isinstance(window, int) else window
    mask: masks.Mask = masks.Window(left, right)
    if given.get("is_causal"):
        mask = masks.Causal() & mask
    return sdpa(q, k, v, mask=mask)


# All functions that take a window, as functions of q, k, v and settings, and whether
# they are causal without being told so.
_TAKERS: dict[str, Any] = {
    "sdpa": sdpa,
    "sdpa with a mask": functools.partial(sdpa, mask=masks.Prefix(2)),
    "sdpa with packed sequences": functools.partial(sdpa, mask=masks.Packed([0, 3, 6])),
    "masks.Window": _as_mask,
    "qkv_sdpa": lambda q, k, v, **given: qkv_sdpa(jnp.stack([q, k, v], 2), **given),
    "cached_sdpa": lambda *x, **given: cached_sdpa(*x, jnp.array([6, 5]), **given),
    "paged_sdpa": lambda *x, **given: _paged(*x, jnp.array([6, 5]), **given),
    "f8.sdpa": _of_f8(f8.sdpa),
    "f8.quantized_sdpa": lambda *x, **given: f8.quantized_sdpa(
        *(each.astype(jnp.bfloat16) for each in x), **given
    ),
    "parallel.sdpa": _in_shard_map,
    "sharded_sdpa": lambda *x, **given: parallel.sharded_sdpa(
        *x, mesh=_mesh(), axis="s", **given
    ),
    "sharded_sdpa with packed sequences": lambda *x, **given: parallel.sharded_sdpa(
        *x, mesh=_mesh(), axis="s", mask=masks.Packed([0, 3, 6]), **given
    ),
    "linen": _layer("linen"),
    "nnx": _layer("nnx"),
}


def _same_sizes() -> list[jax.Array]:
    return [drawn.normal(i, (2, 6, 2, 8)) for i in range(3)]


@pytest.mark.parametrize("name", _TAKERS)
def test_a_window_that_shows_no_key_is_refused_wherever_one_is_taken(name: str) -> None:
    operands = _same_sizes()
    told = r"show(s)? no key to any.*Pass None for a side without a bound.*write -1"
    for window in _EMPTY:
        with pytest.raises(ValueError, match=told):
            _TAKERS[name](*operands, is_causal=False, local_window_size=window)
    for window in [*_EMPTY, (-1, 5), (-3, 4)]:
        with pytest.raises(ValueError, match=told):
            _TAKERS[name](*operands, is_causal=True, local_window_size=window)


@pytest.mark.parametrize("name", _TAKERS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_side_without_a_bound_is_one_beyond_all_tokens(
    name: str, is_causal: bool
) -> None:
    operands, call = _same_sizes(), _TAKERS[name]
    given = {"is_causal": is_causal}
    for open_, far in (
        ((None, 1), (9, 1)),
        ((2, None), (2, 9)),
        ((None, -1), (9, -1)),
        ((None, None), (9, 9)),
    ):
        found = call(*operands, **given, local_window_size=open_)
        expected = call(*operands, **given, local_window_size=far)
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), atol=1e-6
        )
    past = call(*operands, **given, local_window_size=(3, -1))
    assert np.asarray(past, np.float32).any()


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    bounds=st.lists(
        st.tuples(
            *[st.none() | st.integers(-4, 4)] * 2,
            st.sampled_from(["top-left", "bottom-right"]),
        ),
        min_size=1,
        max_size=3,
    ),
    is_causal=st.booleans(),
)
def test_masks_are_refused_just_where_no_position_sees_a_key(
    sizes: tuple[int, int], bounds: list[Any], is_causal: bool
) -> None:
    """Of positions without an end, as in a row of which s and t are a part."""
    s, t = sizes
    distances = np.arange(-40, 40)
    seen = distances <= 0 if is_causal else np.ones(80, bool)
    parts: list[masks.Mask] = [masks.Causal()] if is_causal else []
    is_refused = False
    for left, right, alignment in bounds:
        own = distances - (t - s if alignment == "bottom-right" else 0)
        low = -100 if left is None else -left
        high = 100 if right is None else right
        seen = seen & (low <= own) & (own <= high)
        try:
            parts.append(masks.Window(left, right, alignment))
        except ValueError:
            assert low > high
            is_refused = True
    if not is_refused:
        mask = functools.reduce(operator.and_, parts)
        try:
            mask.arguments(s, t)
        except ValueError:
            is_refused = True
    assert is_refused == (not seen.any())


def test_masks_that_show_no_key_together_are_named() -> None:
    q, k, v = (x[:, :size] for x, size in zip(_same_sizes(), (4, 6, 6), strict=True))
    ahead = masks.Window(-1, 5)
    with pytest.raises(
        ValueError,
        match=r"sdpa: Window\(left=-1, right=5\) & Causal\(\) show no key to any of 4 "
        r"queries with 6 keys: each key that one allows is masked by another\. Pass "
        r"None",
    ):
        sdpa(q, k, v, mask=ahead, is_causal=True)
    with pytest.raises(ValueError, match=r"Causal.*'cache'.*show no key to any of 4"):
        sdpa(
            q, k, v, key_value_seq_lengths=jnp.array([3, 5]),
            mask=masks.Causal("cache") & masks.Window(-1, 5, "cache"),
        )  # fmt: skip
    # Positions of different alignments, of which the last 2 are as far apart as needed.
    assert sdpa(q, k, v, mask=masks.Causal() & masks.Window(2, 0, "bottom-right")).any()
    with pytest.raises(ValueError, match=r"Causal.* & Window.*show no key to any of 4"):
        sdpa(q, k, v, mask=masks.Causal() & masks.Window(1, 0, "bottom-right"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_of_a_layer_shows_the_tokens_that_it_adds_to_a_cache_some_key(
    is_causal: bool,
) -> None:
    """Tokens that are added to a cache see none after themselves."""
    layer = nnx.MultiHeadAttention(
        num_heads=2, in_features=8, decode=True, rngs=Rngs(0), is_causal=is_causal
    )
    layer.init_cache((2, 5, 8))
    x = jnp.ones((2, 1, 8))
    with pytest.raises(
        ValueError,
        match=r"MultiHeadAttention: the windows of the mask show no key to any token "
        r"that is added to the cache.*Pass None for a side without a bound",
    ):
        layer(x, mask=masks.Window(-1, 3))
    with pytest.raises(ValueError, match="show no key to any token"):
        layer(x, mask=masks.Window(2, -1) & masks.Window(0, 3))
    assert layer(x, mask=masks.Window(2, None)).shape == (2, 1, 8)


def test_symbolic_lengths_take_a_side_without_a_bound() -> None:
    b, s = jax.export.symbolic_shape("b, s")
    x = jax.ShapeDtypeStruct((b, s, 2, 8), jnp.float32)
    q = _same_sizes()[0]
    for options in (
        {"local_window_size": (None, 1)},
        {"mask": masks.Window(2, None)},
        {"mask": masks.Window(None, -1)},
    ):
        call = functools.partial(sdpa, **options)  # type: ignore[arg-type]
        program = jax.export.export(jax.jit(lambda x, f=call: f(x, x, x)))(x)
        np.testing.assert_allclose(program.call(q), call(q, q, q), atol=1e-6)
