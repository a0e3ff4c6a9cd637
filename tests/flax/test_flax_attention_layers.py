# SPDX-License-Identifier: Apache-2.0
"""Tests jax_cudnn's attention, in layers and in Flax's own, and what layers add.

Transformations and messages are in test_flax_attention_calls.py, caches in
test_flax_cache.py.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx
from jax.test_util import check_grads

from jax_cudnn import masks
from jax_cudnn.flax import Rotary, attention_fn
from jax_cudnn.flax import linen as our_linen
from jax_cudnn.flax import nnx as our_nnx
from tests.attention.test_rotary import turned
from tests.flax.layers import (
    B,
    D,
    F,
    H,
    K,
    S,
    T,
    assert_trees_close,
    by_hand,
    flax_linen,
    flax_nnx,
    flax_promotes,
    layers,
    linen_layer,
    nnx_layer,
    normal,
    padding,
    pure,
    randomly,
    value_and_grads,
)
from tests.products.shared.fused import graphs

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# --- Flax's own -----------------------------------------------------------------------

HOLE = np.ones((S, S), np.float32)
HOLE[2, 3] = 0
BOTH = {
    "plain": ({}, {}),
    "normalised": ({"normalize_qk": True}, {"mask": padding()}),
    "no bias": ({"use_bias": False, "out_features": 13}, {"mask": padding(float)}),
    "wide heads": ({"qkv_features": 2 * F}, {"mask": HOLE}),
    "precision": ({"precision": "highest"}, {"mask": padding()}),
    "causal, padded": ({}, {"mask": padding(float) * np.tril(np.ones((1, 1, S, S)))}),
}
NNX = {
    **BOTH,
    "one key head": ({"num_kv_heads": 1}, {"is_causal": True}),
    "grouped, causal": ({"num_kv_heads": K}, {"is_causal": True}),
    "grouped, masked": ({"num_kv_heads": K}, {"mask": padding()}),
    "causal, masked": ({"normalize_qk": True}, {"mask": padding(), "is_causal": True}),
}
LINEN = {
    **BOTH,
    "f32 softmax": ({"force_fp32_for_softmax": True}, {}),
    "einsums": (
        {
            "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
            "attn_weights_value_einsum_cls": lambda: jnp.einsum,
        },
        {},
    ),
}


# Our layers of nnx and of linen, and Flax's layers with our attention.
OURS = {
    "layer": (nnx_layer, linen_layer),
    "attention_fn": tuple(
        functools.partial(make, attention_fn=attention_fn)
        for make in (flax_nnx, flax_linen)
    ),
}
each_of_ours = pytest.mark.parametrize("ours", OURS.values(), ids=OURS)


@each_of_ours
@pytest.mark.parametrize("case", NNX)
def test_nnx_layer_equals_flax(case, ours):
    options, call = NNX[case]
    x = normal(4, B, S, F)
    with flax_promotes():
        (ours, own), (flax, params) = (
            pure(make(**options)) for make in (ours[0], flax_nnx)
        )
        assert_trees_close(own, params, rtol=0, atol=0)
        params = randomly(params)
        assert_trees_close(
            value_and_grads(functools.partial(ours, **call), params, x),
            value_and_grads(functools.partial(flax, **call), params, x),
        )


@each_of_ours
@pytest.mark.parametrize("case", LINEN)
def test_linen_layer_equals_flax(case, ours):
    options, call = LINEN[case]
    x = normal(4, B, S, F)
    with flax_promotes():
        ours, flax = ours[1](**options), flax_linen(**options)
        params = flax.init(jax.random.key(1), x)
        own = ours.init(jax.random.key(1), x)
        assert_trees_close(own, params, rtol=0, atol=0)
        params = randomly(params)
        assert_trees_close(
            value_and_grads(functools.partial(ours.apply, **call), params, x),
            value_and_grads(functools.partial(flax.apply, **call), params, x),
        )


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_number_of_batch_axes(batch):
    q, k, v = normal(1, *batch, S, F), normal(2, *batch, T, F), normal(3, *batch, T, F)
    mask = jnp.tril(jnp.ones((S, T), bool), 2)
    ours, params = pure(nnx_layer(num_kv_heads=K, in_kv_features=F))
    flax, _ = pure(flax_nnx(num_kv_heads=K, in_kv_features=F))
    # Flax's own takes no mask of fewer axes beside two batch axes, nor one of none.
    whole = jnp.broadcast_to(mask, (*batch, H, S, T))
    rest = {"mask": whole} if len(batch) < 2 else {"mask": whole, "decode": False}
    with flax_promotes():
        expected = flax(params, q, k, v, **rest)
    assert_trees_close(ours(params, q, k, v, mask=mask), expected)
    variables = flax_linen().init(jax.random.key(0), q)
    with flax_promotes():
        expected = flax_linen().apply(variables, q, k, v, mask=whole)
    got = linen_layer().apply(variables, q, k, v, mask=mask)
    assert_trees_close(got, expected)


def test_checkpoints_fit_in_both_directions():
    x = normal(4, B, S, F)
    for ours, flax in (
        (nnx_layer(normalize_qk=True), flax_nnx(normalize_qk=True)),
        (nnx_layer(num_kv_heads=K), flax_nnx(num_kv_heads=K)),
    ):
        for source, target in ((ours, flax), (flax, ours)):
            drawn = randomly(nnx.state(source, nnx.Param), seed=len(str(source)))
            nnx.update(source, drawn)
            nnx.update(target, nnx.state(source, nnx.Param))
            with flax_promotes():
                assert_trees_close(target(x), source(x))


def test_linen_groups_heads_as_nnx_does():
    x, layer = normal(4, B, S, F), linen_layer(num_kv_heads=K)
    flax, params = pure(flax_nnx(num_kv_heads=K))
    shapes = layer.init(jax.random.key(0), x)["params"]
    assert shapes["key"]["kernel"].shape == (F, K, D)
    params = randomly(params)
    assert_trees_close(
        value_and_grads(lambda p, x: layer.apply({"params": p}, x), params, x),
        value_and_grads(flax, params, x),
    )


def test_linen_names_its_layers_as_flax_does():
    class Block(linen.Module):
        layer: type

        @linen.compact
        def __call__(self, x):
            return self.layer(num_heads=H)(x)

    x = normal(4, B, S, F)
    for name in ("MultiHeadDotProductAttention", "MultiHeadAttention"):
        flax, ours = (Block(getattr(m, name)) for m in (linen, our_linen))
        variables = flax.init(jax.random.key(0), x)
        assert list(variables["params"]) == [f"{name}_0"]
        assert_trees_close(ours.apply(variables, x), flax.apply(variables, x))


@each_of_ours
def test_dropout_that_heads_share_is_flaxs(ours, messages):
    x = normal(4, B, S, F)
    options = {"dropout_rate": 0.4, "broadcast_dropout": True}
    with flax_promotes():
        for heads in (H, K):
            got, flax = (
                make(num_kv_heads=heads, **options)(
                    x, deterministic=False, rngs=nnx.Rngs(9), is_causal=True
                )
                for make in (ours[0], flax_nnx)
            )
            assert_trees_close(got, flax)
        variables = flax_linen().init(jax.random.key(0), x)
        for call in (
            {"deterministic": False, "rngs": {"dropout": jax.random.key(9)}},
            {"deterministic": True},
        ):
            got, flax = (
                make(**options).apply(variables, x, **call)
                for make in (ours[1], flax_linen)
            )
            assert_trees_close(got, flax)
    assert messages()[0].endswith(
        ": Flax's own attention runs: dropout of the same attention "
        "weights in all batch entries and heads is active (dropout_rate=0.4, "
        "broadcast_dropout=True, deterministic=False), and is XLA's for float32 "
        f'operands, head size {F // H} and implementation="auto"'
    )


@each_of_ours
def test_weights_are_sown_by_flax(ours, messages):
    x = normal(4, B, S, F)
    got, flax = (
        nnx.capture(make(num_kv_heads=K), nnx.Intermediate)(
            x, sow_weights=True, is_causal=True
        )
        for make in (ours[0], flax_nnx)
    )
    (weights,) = jax.tree.leaves(got[1])
    assert weights.shape == (B, H, S, S)
    assert_trees_close(got, flax)
    assert "the attention weights are asked for" in messages()[0]
    variables = flax_linen().init(jax.random.key(0), x)
    call = {"sow_weights": True, "mutable": ["intermediates"]}
    got, flax = (make().apply(variables, x, **call) for make in (ours[1], flax_linen))
    (weights,) = got[1]["intermediates"]["attention_weights"]
    assert weights.shape == (B, H, S, S)
    assert_trees_close(got, flax)


def test_flaxs_arguments_are_ours():
    ours = inspect.signature(our_nnx.MultiHeadAttention.__call__).parameters
    flax = inspect.signature(nnx.MultiHeadAttention.__call__).parameters
    assert set(flax) <= set(ours)
    assert [*ours][:4] == [*flax][:4]
    ours = inspect.signature(our_nnx.MultiHeadAttention.__init__).parameters
    flax = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
    assert [*ours][:7] == [*flax][:7]
    ours = inspect.signature(our_linen.MultiHeadDotProductAttention.__call__)
    flax = inspect.signature(linen.MultiHeadDotProductAttention.__call__)
    assert set(flax.parameters) <= set(ours.parameters)
    # By keyword, with values that are not the defaults: all of them are taken.
    nnx_layer(
        dtype=jnp.bfloat16,
        param_dtype=jnp.float16,
        kernel_init=nnx.initializers.ones,
        out_kernel_init=nnx.initializers.zeros,
        keep_rngs=False,
    )


def test_the_deprecated_input_of_linen_still_is_one():
    x, y = normal(4, B, S, F), normal(5, B, T, F)
    variables = flax_linen().init(jax.random.key(0), x)
    expected = flax_linen().apply(variables, x, y)
    with pytest.warns(DeprecationWarning, match="linen will drop inputs_kv"):
        got = linen_layer().apply(variables, x, inputs_kv=y)
    assert_trees_close(got, expected)


# --- what is added --------------------------------------------------------------------

ROWS, COLUMNS = np.ogrid[:S, :S]
ALL = np.ones((B, S, S), bool)
CAUSAL = ALL & (COLUMNS <= ROWS)
DOCUMENTS = np.array([[0] * 4 + [1] * 3, [0] * S, [0, 0, 1, 1, 1, 2, 2]])
SAME = DOCUMENTS[:, :, None] == DOCUMENTS[:, None]
LENGTHS = np.array([7, 3, 5])
BAND = (COLUMNS >= ROWS - 2) & (COLUMNS <= ROWS + 1)
ROTARY = Rotary(base=50.0, fraction=0.8)
ADDED = {
    "causal": ({"is_causal": True}, {}, CAUSAL),
    "window": ({"local_window_size": (2, 1)}, {}, ALL & BAND),
    "window, causal": (
        {"local_window_size": 3},
        {"is_causal": True},
        CAUSAL & (COLUMNS >= ROWS - 3),
    ),
    "window, array": (
        {"local_window_size": (2, 0)},
        {"mask": np.arange(S)[None, None, None] != 4},
        CAUSAL & BAND & (COLUMNS != 4),
    ),
    "scale": ({"scale": 0.31}, {}, ALL),
    "mask": ({}, {"mask": masks.Causal()}, CAUSAL),
    "masks": (
        {"is_causal": True},
        {"mask": masks.Segments(DOCUMENTS) & masks.Window(3, None)},
        CAUSAL & SAME & (COLUMNS >= ROWS - 3),
    ),
    "lengths": (
        {"local_window_size": (9, 9)},
        {"mask": masks.Lengths(key=LENGTHS)},
        ALL & (LENGTHS[:, None, None] > COLUMNS),
    ),
    "sinks": ({"use_sinks": True, "is_causal": True}, {}, CAUSAL),
    "rotary": ({"rotary": ROTARY, "is_causal": True}, {}, CAUSAL),
    "everything": (
        {
            "rotary": ROTARY,
            "use_sinks": True,
            "scale": 0.4,
            "local_window_size": (2, 0),
        },
        {"mask": masks.Segments(DOCUMENTS), "is_causal": True},
        CAUSAL & SAME & BAND,
    ),
}


@pytest.mark.parametrize("case", ADDED)
def test_what_is_added_equals_its_formula(case):
    options, call, seen = ADDED[case]
    x = normal(4, B, S, F)
    runs, params = layers(**options)
    rotate = lambda x: x  # noqa: E731
    if "rotary" in options:
        rotate = functools.partial(
            turned, positions=np.arange(S), base=50.0, fraction=0.8
        )
    truth = by_hand(params, x, seen=seen, scale=options.get("scale"), rotate=rotate)
    for run in runs:
        np.testing.assert_allclose(run(params, x, **call), truth, rtol=1e-4, atol=1e-5)


def test_a_score_mod_needs_no_cache():
    slopes = np.linspace(0.1, 0.6, H)

    def gated(score, batch, head, query, key):
        distance = jnp.abs(query - key).astype(score.dtype)
        return jnp.tanh(score) * 2 - jnp.asarray(slopes, score.dtype)[head] * distance

    def modify(scores):
        return 2 * np.tanh(scores) - slopes[:, None, None] * np.abs(ROWS - COLUMNS)

    x = normal(4, B, S, F)
    runs, params = layers(score_mod=gated, use_sinks=True, is_causal=True)
    truth = by_hand(params, x, seen=CAUSAL, modify=modify)
    plain = by_hand(params, x, seen=CAUSAL)
    assert np.abs(truth - plain).max() > 1e-2
    with flax_promotes():
        for run in runs:
            np.testing.assert_allclose(run(params, x), truth, rtol=1e-4, atol=1e-5)
        check_grads(runs[0], (params, x), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)
        assert_trees_close(*(value_and_grads(run, params, x) for run in runs))


def test_gradients_of_what_is_added():
    options, call, _ = ADDED["everything"]
    x = normal(4, B, S, F)
    for run in layers(**options)[0]:
        params = layers(**options)[1]
        function = functools.partial(run, **call)
        check_grads(function, (params, x), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)
        gradient = value_and_grads(function, params, x)[1][0]["sinks"]
        assert gradient.shape == (H,)
        assert float(jnp.abs(gradient).min()) > 0


def test_sinks_are_the_only_new_parameter():
    plain, extra = (nnx_layer(use_sinks=flag) for flag in (False, True))
    own, more = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (plain, extra))
    sinks = more.pop("sinks")
    assert_trees_close(own, more, rtol=0, atol=0)
    np.testing.assert_array_equal(sinks, jnp.zeros(H))
    drawn = nnx_layer(
        use_sinks=True, sinks_init=nnx.initializers.ones, param_dtype=jnp.bfloat16
    )
    np.testing.assert_array_equal(drawn.sinks[...], jnp.ones(H, jnp.bfloat16))
    variables = linen_layer(use_sinks=True).init(jax.random.key(0), jnp.ones((S, F)))
    assert variables["params"]["sinks"].shape == (H,)


def test_positions_may_be_given():
    x = normal(4, B, S, F)
    positions = np.array([[9], [0], [3]]) + np.arange(S)
    (run, apply), params = layers(rotary=ROTARY)
    truth = by_hand(
        params,
        x,
        seen=ALL,
        rotate=lambda x: turned(x, positions, base=50.0, fraction=0.8),
    )
    for function in (run, apply):
        got = function(params, x, input_positions=jnp.asarray(positions))
        np.testing.assert_allclose(got, truth, rtol=1e-4, atol=1e-5)


def test_grouped_heads_and_bands_reach_the_kernel_as_such():
    layer = nnx_layer(
        num_kv_heads=K,
        is_causal=True,
        local_window_size=(3, 0),
        rotary=Rotary(fraction=0.8),
    )
    ((graph, _),) = graphs(*pure(layer), normal(4, B, S, F))
    (node,) = graph.nodes
    assert node.kind == "sdpa"
    assert node.attributes.is_causal
    assert node.attributes.window == (3, 0)
    assert not {"mask", "bias"} & set(dict(node.inputs))


# Flax's attention computes these, so the same masks and scale are to be in its words.
DELEGATED = {
    "array": ({}, {"mask": padding()}, padding()),
    "window": (
        {"local_window_size": (2, 1)},
        {"mask": padding()},
        padding() & BAND[None, None],
    ),
    "masks": (
        {"is_causal": True},
        {"mask": masks.Segments(DOCUMENTS) & masks.Lengths(key=LENGTHS)},
        (CAUSAL & SAME & (LENGTHS[:, None, None] > COLUMNS))[:, None],
    ),
}


@pytest.mark.parametrize("case", DELEGATED)
def test_masks_reach_flaxs_attention_too(case):
    options, call, mask = DELEGATED[case]
    x = normal(4, B, S, F)
    dropout = {"dropout_rate": 0.4, "num_kv_heads": K}
    with flax_promotes():
        ours = nnx_layer(**dropout, **options)(
            x, deterministic=False, rngs=nnx.Rngs(9), **call
        )
        flax = flax_nnx(**dropout)(x, deterministic=False, rngs=nnx.Rngs(9), mask=mask)
    assert_trees_close(ours, flax)


def test_tokens_that_a_cache_has_no_room_for_are_nan_by_flaxs_attention_too():
    x = normal(4, B, S, F)
    lengths = np.arange(S, S + B).astype(np.int32)
    mask = masks.Causal("cache") & masks.Lengths(key=lengths)
    biased = mask & masks.Additive(normal(5, 1, H, S, S))
    for each in (mask, biased):
        (run, _), params = layers()
        (exact, apply), _ = layers(precision="highest")
        want = run(params, x, mask=each)
        lost = np.isnan(want).all(-1)
        assert (lost == (np.arange(S) + lengths[:, None] >= 2 * S)).all()
        for function in (exact, apply):
            assert_trees_close(function(params, x, mask=each), want, atol=1e-5)


def test_scale_and_biases_reach_flaxs_attention_too():
    x, bias = normal(4, B, S, F), normal(5, 1, H, S, S)
    options = {"scale": 0.7, "use_sinks": False}
    mask = masks.Additive(bias) & masks.Causal()
    (run, _), params = layers(**options)
    (exact, apply), _ = layers(precision="highest", **options)
    for function in (exact, apply):
        got, want = (each(params, x, mask=mask) for each in (function, run))
        assert_trees_close(got, want, atol=1e-5, rtol=1e-4)


@each_of_ours
@pytest.mark.parametrize(
    ("api", "dtype"),
    [("nnx", jnp.bfloat16), ("linen", jnp.bfloat16), ("linen", jnp.float16)],
)
def test_sixteen_bits_are_as_near_to_f32_as_flaxs(ours, api, dtype):
    x = normal(4, B, S, F)
    number = ("nnx", "linen").index(api)
    ours, flax = ours[number], (flax_nnx, flax_linen)[number]
    made = [ours(dtype=dtype), flax(dtype=dtype), flax()]
    if api == "nnx":
        params = randomly(pure(made[2])[1])
        runs = [pure(layer)[0] for layer in made]
    else:
        params = randomly(made[2].init(jax.random.key(0), x))
        runs = [layer.apply for layer in made]
    with flax_promotes():
        results = [value_and_grads(run, params, x) for run in runs]
    assert results[0][0].dtype == results[1][0].dtype == dtype
    own, flaxs, truth = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(result)]
        for result in results
    )

    def error(got):
        parts = [np.sum((x - y) ** 2) for x, y in zip(got, truth, strict=False)]
        return np.sqrt(np.sum(parts))

    assert error(own) <= 1.5 * error(flaxs)
    # The result by itself, beside which the gradients are large.
    assert error(own[:1]) <= 1.5 * error(flaxs[:1])
