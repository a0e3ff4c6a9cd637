# SPDX-License-Identifier: Apache-2.0
"""Tests that an attention layer gives the same with a cache as without one.

With one token in a call, the cache is Flax's, number for number.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx

from jax_cudnn import masks, score_mods
from jax_cudnn.flax import Rotary
from jax_cudnn.lowering import traced_graphs
from tests.flax.layers import (
    B,
    D,
    F,
    H,
    K,
    S,
    assert_trees_close,
    flax_linen,
    flax_nnx,
    flax_promotes,
    linen_layer,
    nnx_layer,
    normal,
)

pytestmark = [pytest.mark.once, pytest.mark.sampled]

FULL = {
    "num_kv_heads": K,
    "is_causal": True,
    "use_sinks": True,
    "sinks_init": nnx.initializers.normal(1.0),
    "rotary": Rotary(fraction=0.8),
}
OPTIONS = {
    "plain": {"is_causal": True},
    "full": FULL,
    "window": {**FULL, "local_window_size": (2, 0)},
    "window ahead": {**FULL, "local_window_size": (4, -1), "use_sinks": True},
    "score_mod": {
        **FULL,
        "score_mod": score_mods.compose(
            score_mods.alibi(score_mods.alibi_slopes(H)), score_mods.softcap(2.0)
        ),
    },
    "normalised": {**FULL, "normalize_qk": True, "scale": 0.4},
}


class Nnx:
    """An nnx layer whose calls with `decode` change its cache."""

    def __init__(self, *, ragged=False, shape=(B, S), kept=jnp.float32, **options):
        self.layer = nnx_layer(**options)
        self.layer.init_cache((*shape, F), kept, ragged=ragged)
        self.whole = self.layer

    def add(self, x, **call):
        return self.layer(x, decode=True, **call)

    @property
    def cache(self):
        names = ("cached_key", "cached_value", "cache_index")
        return {name: getattr(self.layer, name)[...] for name in names}


class Linen:
    """A linen layer whose calls with `decode` change its cache."""

    def __init__(self, *, ragged=False, shape=(B, S), **options):
        self.layer = linen_layer(decode=True, ragged_cache=ragged, **options)
        x = jnp.ones((*shape, F))
        self.variables = self.layer.init(jax.random.key(0), x)
        params = {"params": self.variables["params"]}
        without = linen_layer(**options)
        self.whole = functools.partial(without.apply, params)
        # One program for each length, instead of one for each operation.
        self.run = jax.jit(functools.partial(self.layer.apply, mutable="cache"))

    def add(self, x, **call):
        output, cache = self.run(self.variables, x, **call)
        self.variables = {**self.variables, **cache}
        return output

    @property
    def cache(self):
        return self.variables["cache"]


both = pytest.mark.parametrize("api", [Nnx, Linen])


@pytest.mark.parametrize("num_kv_heads", [H, K])
def test_one_token_at_a_time_is_nnxs(num_kv_heads):
    x = normal(4, B, S, F)
    ours, flax = (
        make(num_kv_heads=num_kv_heads, decode=True) for make in (nnx_layer, flax_nnx)
    )
    for layer in (ours, flax):
        layer.init_cache((B, S, F))
    for i in range(4):
        # An array over the cache's places, as Flax takes it.
        mask = jnp.ones((B, 1, 1, S), bool).at[1, 0, 0, 1].set(False)
        with flax_promotes():
            got, expected = (
                layer(x[:, i : i + 1], mask=mask) for layer in (ours, flax)
            )
            assert_trees_close(got, expected)
            states = [
                nnx.to_pure_dict(nnx.state(layer, nnx.Cache)) for layer in (ours, flax)
            ]
        assert_trees_close(*states)
    assert ours.cached_key.shape == (B, S, num_kv_heads, D)
    assert int(ours.cache_index[...]) == 4


def test_one_token_at_a_time_is_linens():
    x = normal(4, B, S, F)
    ours, flax = (make(decode=True) for make in (linen_layer, flax_linen))
    variables = flax.init(jax.random.key(0), x)
    own = ours.init(jax.random.key(0), x)
    assert_trees_close(own, variables, rtol=0, atol=0)
    for i in range(4):
        got, expected = (
            layer.apply(variables, x[:, i : i + 1], mutable="cache")
            for layer in (ours, flax)
        )
        assert_trees_close(got, expected)
        variables = {**variables, **expected[1]}


@both
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_prompt_and_then_tokens_give_the_whole(api, options):
    x = normal(4, B, S, F)
    layer = api(**options)
    found = [layer.add(x[:, a:b]) for a, b in ((0, 3), (3, 4), (4, 5), (5, 7))]
    assert_trees_close(jnp.concatenate(found, axis=1), layer.whole(x))
    assert int(layer.cache["cache_index"]) == S


@pytest.mark.parametrize("count", [1, 3])
def test_bands_over_a_cache_are_cached_sdpa(count):
    api = Linen(**OPTIONS["window"])
    bias = normal(5, B, 1, count, S) > 0

    def kinds(**call):
        graphs = traced_graphs(
            lambda x: api.layer.apply(api.variables, x, mutable="cache", **call),
            normal(4, B, count, F),
        )
        return {node.kind for traced in graphs for node in traced.graph.nodes}

    assert "sdpa_cached" in kinds()
    assert "sdpa_cached" in kinds(mask=masks.Causal() & masks.Window(3, 0))
    assert "sdpa" in kinds(mask=masks.Where(bias))
    assert "sdpa" in kinds(mask=bias)


@both
@pytest.mark.parametrize("name", ["full", "window", "score_mod"])
def test_each_entry_has_its_own_length(api, name):
    x, lengths = normal(4, B, S, F), np.array([4, 1, 3])
    layer = api(ragged=True, **OPTIONS[name])
    expected = layer.whole(x)
    out = np.asarray(out_of_zeros(layer))
    # Padding beyond the lengths is poison: no one may see it.
    prompt = jnp.where(
        np.arange(4)[None, :, None] < lengths[:, None, None], x[:, :4], 1e9
    )
    found = layer.add(prompt, input_lengths=jnp.asarray(lengths))
    np.testing.assert_array_equal(layer.cache["cache_index"], lengths)
    for b in range(B):
        assert_trees_close(found[b, : lengths[b]], expected[b, : lengths[b]])
        np.testing.assert_allclose(
            found[b, lengths[b] :], np.broadcast_to(out, (4 - lengths[b], F)), atol=1e-6
        )
    # One entry has nothing to add in the second step.
    steps = np.array([[1, 1, 1], [1, 0, 1]])
    for step in steps:
        token = jnp.stack([x[b, lengths[b]] for b in range(B)])[:, None]
        found = layer.add(token, input_lengths=jnp.asarray(step, jnp.int8))
        for b in range(B):
            if step[b]:
                assert_trees_close(found[b, 0], expected[b, lengths[b]])
        lengths = lengths + step
        np.testing.assert_array_equal(layer.cache["cache_index"], lengths)
    # Two tokens at once, without padding.
    tokens = jnp.stack([x[b, lengths[b] - 2 : lengths[b]] for b in range(B)])
    if isinstance(layer, Nnx):
        layer.layer.cache_index[...] = jnp.asarray(lengths - 2, jnp.int32)
        found = layer.add(tokens)
        for b in range(B):
            assert_trees_close(found[b], expected[b, lengths[b] - 2 : lengths[b]])


def out_of_zeros(layer):
    """Return what the output projection makes of heads that are 0: its bias."""
    if isinstance(layer, Nnx):
        return layer.layer.out.bias[...]
    return layer.variables["params"]["out"]["bias"]


DOCUMENTS = np.array([[0, 0, 0, 0, 1, 1, 1], [0] * 7, [0, 0, 1, 1, 1, 2, 2]])
HIDDEN = np.arange(S) != 2
MASKS = {
    "window": (
        lambda rows: masks.Window(2, None),
        masks.Causal() & masks.Window(2, None),
    ),
    "bands": (
        lambda rows: masks.Causal("bottom-right") & masks.Window(3, 1),
        masks.Causal() & masks.Window(3, 1),
    ),
    "documents": (
        lambda rows: masks.Segments(DOCUMENTS[:, rows], DOCUMENTS),
        masks.Causal() & masks.Segments(DOCUMENTS),
    ),
    "array": (
        lambda rows: masks.Where(HIDDEN[None]),
        masks.Causal() & masks.Where(HIDDEN[None]),
    ),
    "numbers": (
        lambda rows: jnp.asarray(HIDDEN, jnp.float32),
        masks.Causal() & masks.Where(HIDDEN[None]),
    ),
    "lengths": (
        lambda rows: masks.Lengths(key=np.array([7, 3, 5])) & masks.Window(2, 0),
        masks.Causal() & masks.Lengths(key=np.array([7, 3, 5])) & masks.Window(2, 0),
    ),
    "bias": (
        lambda rows: masks.Additive(normal(5, 1, 1, S, S)[:, :, rows]),
        masks.Causal() & masks.Additive(normal(5, 1, 1, S, S)),
    ),
}


@both
@pytest.mark.parametrize("case", MASKS)
def test_masks_mean_the_same_with_a_cache(api, case):
    part, whole = MASKS[case]
    x = normal(4, B, S, F)
    layer = api(num_kv_heads=K)
    found = [
        layer.add(x[:, a:b], mask=part(slice(a, b)))
        for a, b in ((0, 4), (4, 5), (5, 7))
    ]
    assert_trees_close(jnp.concatenate(found, axis=1), layer.whole(x, mask=whole))


@both
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_any_number_of_batch_axes(api, ragged, batch):
    x = normal(4, *batch, S, F)
    layer = api(shape=(*batch, S), ragged=ragged, **FULL)
    found = [layer.add(x[..., a:b, :]) for a, b in ((0, 5), (5, 6), (6, 7))]
    assert_trees_close(jnp.concatenate(found, axis=-2), layer.whole(x))
    index = layer.cache["cache_index"]
    assert index.shape == (batch if ragged else ())


@both
def test_without_room_the_output_is_nan(api):
    x = normal(4, B, S, F)
    layer = api(**FULL)
    assert not bool(jnp.isnan(layer.add(x[:, :5])).any())
    assert bool(jnp.isnan(layer.add(x[:, :3])).all())
    lengths = jnp.array([6, 2, 7])
    layer = api(ragged=True, **FULL)
    layer.add(x, input_lengths=lengths)
    expected = layer.whole(x)
    # Tokens of padding need no room.
    counts = jnp.array([1, 3, 1])
    rows = jnp.minimum(lengths[:, None] + jnp.arange(3)[None], S - 1)
    tokens = jnp.take_along_axis(x, rows[..., None], axis=1)
    found = layer.add(tokens, input_lengths=counts)
    assert_trees_close(found[0, 0], expected[0, 6])
    assert_trees_close(found[1], expected[1, 2:5])
    assert bool(jnp.isnan(found[2]).all())


def test_the_cache_may_have_another_dtype():
    x = normal(4, B, S, F)
    layer = Nnx(kept=jnp.bfloat16, **FULL)
    found = [layer.add(x[:, a:b]) for a, b in ((0, 5), (5, 7))]
    assert {x.dtype.name for x in layer.cache.values()} == {"bfloat16", "int32"}
    assert found[0].dtype == jnp.float32
    got, expected = jnp.concatenate(found, axis=1), layer.whole(x)
    # Keys and values are rounded to 8 bits.
    np.testing.assert_allclose(
        got, expected, atol=0.02 * float(jnp.abs(expected).max())
    )
    layer = Nnx(dtype=jnp.bfloat16, **FULL)
    assert layer.add(x).dtype == jnp.bfloat16


def test_f32_highest_precision_is_flaxs_with_a_cache_too():
    x = normal(4, B, S, F)
    options = {"num_kv_heads": K, "is_causal": True, "precision": "highest"}
    layer = Nnx(ragged=True, **options)
    lengths = jnp.array([4, 1, 3])
    found = layer.add(x[:, :4], input_lengths=lengths)
    expected = layer.whole(x)
    for b in range(B):
        assert_trees_close(found[b, : lengths[b]], expected[b, : lengths[b]])


def test_a_scan_of_steps_and_a_donated_cache():
    x = normal(4, B, S, F)
    layer = Nnx(**FULL)
    graph, params, cache = nnx.split(layer.layer, nnx.Param, nnx.Cache)
    expected = layer.whole(x)

    def step(cache, token):
        module = nnx.merge(graph, params, cache)
        output = module(token[:, None], decode=True)
        return nnx.state(module, nnx.Cache), output[:, 0]

    _, found = jax.lax.scan(step, cache, jnp.swapaxes(x, 0, 1))
    assert_trees_close(jnp.swapaxes(found, 0, 1), expected)

    run = jax.jit(step, donate_argnums=0)
    text = run.lower(cache, x[:, 0]).compile().as_text()
    # Keys, values and their number: all three are updated in place.
    assert text is not None
    assert len(re.findall(r"(?:may|must)-alias", text.splitlines()[0])) == 3
    for i in range(S):
        cache, output = run(cache, x[:, i])
        assert_trees_close(output, expected[:, i])


def test_vmap_over_caches():
    x = normal(4, 2, B, S, F)
    layer = linen_layer(decode=True, ragged_cache=True, **FULL)
    variables = layer.init(jax.random.key(0), x[0])
    params, lengths = variables["params"], jnp.array([[5, 2, 3], [1, 6, 4]])
    cache = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), variables["cache"])

    def step(cache, x, lengths):
        return layer.apply(
            {"params": params, "cache": cache},
            x,
            input_lengths=lengths,
            mutable="cache",
        )

    got = jax.vmap(step)(cache, x, lengths)
    each = [step(variables["cache"], x[i], lengths[i]) for i in range(2)]
    assert_trees_close(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))


def test_nnx_forgets_the_cache_when_it_is_made_again():
    x = normal(4, B, S, F)
    layer = Nnx(**FULL)
    first = layer.add(x[:, :2])
    layer.layer.init_cache((B, S, F), ragged=True)
    assert_trees_close(layer.add(x[:, :2]), first)
    assert layer.cache["cache_index"].shape == (B,)


class Decoder(linen.Module):
    """Two layers, one behind the other."""

    decode: bool

    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + linen_layer(decode=self.decode, **FULL)(x)
        return x


def test_a_linen_model_of_two_layers():
    x = normal(4, B, S, F)
    variables = Decoder(decode=True).init(jax.random.key(0), x)
    expected = Decoder(decode=False).apply({"params": variables["params"]}, x)
    found = []
    for a, b in ((0, 4), (4, 5), (5, 7)):
        output, cache = Decoder(decode=True).apply(
            variables, x[:, a:b], mutable="cache"
        )
        variables = {**variables, **cache}
        found.append(output)
    assert_trees_close(jnp.concatenate(found, axis=1), expected)


X = normal(4, B, S, F)
REFUSED = {
    "too many": (
        {"shape": (B, 4)},
        (X, {}),
        ValueError,
        ": 7 new tokens do not fit into the cache, which is for 4. Make a "
        "longer cache.",
    ),
    "batch": (
        {},
        (X[:2, :1], {}),
        ValueError,
        ": the new keys are f32[2,1,6,5], and the cached ones f32[3,7,6,5]. All axes "
        "but the length must be equal. Make the cache for this batch.",
    ),
    "lengths": (
        {},
        (X, {"input_lengths": jnp.array([1, 2, 3])}),
        ValueError,
        ": input_lengths was passed, and the cache has one cache_index for all batch "
        "entries. Make the cache with ragged=True in init_cache of nnx, or in a linen "
        "layer with ragged_cache=True.",
    ),
    "lengths' shape": (
        {"ragged": True},
        (X, {"input_lengths": jnp.array([1, 2])}),
        ValueError,
        ": input_lengths is i32[2]. It must have one length for each batch entry, "
        "shape [3].",
    ),
    "lengths' dtype": (
        {"ragged": True},
        (X, {"input_lengths": jnp.ones(B)}),
        TypeError,
        ": input_lengths is f32[3]. Lengths must be integers. Convert them to int32.",
    ),
    "prefix": (
        {},
        (X, {"mask": masks.Causal() & masks.Prefix(jnp.int32(2))}),
        ValueError,
        ": mask has Prefix, and tokens are added to a cache (decode=True). There it "
        "may have Causal, Window, Lengths, Segments, Where and Additive. Pass an array "
        "instead.",
    ),
    "blocks": (
        {},
        (X, {"mask": masks.Blocks(jnp.ones((1, 1), bool))}),
        ValueError,
        ": mask has Blocks, and tokens",
    ),
    "keys": (
        {},
        (X[:, :1], {"inputs_k": X}),
        ValueError,
        ": 1 queries and 7 keys are to be added to the cache. Their numbers must be "
        "equal.",
    ),
    "mask": (
        {},
        (X[:, :1], {"mask": jnp.ones((B, 1, 1, 5), bool)}),
        ValueError,
        ": mask has shape [3, 1, 1, 5], which does not broadcast to (batch axes, "
        "heads, query length, key length) = [3, 6, 1, 7].",
    ),
}


@both
@pytest.mark.parametrize("case", REFUSED)
def test_refused(api, case):
    options, (x, call), kind, message = REFUSED[case]
    layer = api(**options)
    before = layer.cache
    with pytest.raises(kind) as raised:
        layer.add(x, **call)
    assert message in str(raised.value)
    name = "MultiHead" + ("Attention" if api is Nnx else "DotProductAttention")
    assert str(raised.value).startswith(name)
    assert_trees_close(layer.cache, before, rtol=0, atol=0)


def test_nnx_needs_a_cache_of_its_own():
    told = (
        "MultiHeadAttention: decode=True, and the layer has no cache. Call "
        "init_cache((batch axes, most tokens, features)) first."
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        nnx_layer()(X, decode=True)
    layer = Nnx(ragged=True)
    layer.layer.cache_index = nnx.Cache(jnp.zeros(2, jnp.int32))
    with pytest.raises(
        ValueError, match=r"cache_index is i32\[2\]. It must be one num"
    ):
        layer.add(X)
