# SPDX-License-Identifier: Apache-2.0
"""jax_cudnn's attention layers for Flax: transformations, and what they refuse."""

import pickle
import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx

from jax_cudnn import UnsupportedError, masks
from jax_cudnn.flax import Rotary
from jax_cudnn.flax import nnx as our_nnx
from tests.common.devices import collectives, mesh_of, placed
from tests.flax.layers import (
    B,
    F,
    K,
    S,
    T,
    assert_trees_close,
    layers,
    linen_layer,
    nnx_layer,
    normal,
    pure,
    value_and_grads,
)

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# --- transformations ------------------------------------------------------------------

FULL = {
    "num_kv_heads": K,
    "is_causal": True,
    "local_window_size": (3, 0),
    "use_sinks": True,
    "sinks_init": nnx.initializers.normal(1.0),
    "rotary": Rotary(fraction=0.8),
}


def test_vmap_over_inputs_and_over_parameters():
    x = normal(4, 2, B, S, F)
    (run, apply), params = layers(**FULL)
    stack = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), params)
    each = [jax.tree.map(lambda p, i=i: p[i], stack) for i in range(2)]
    for function in (run, apply):
        expected = jnp.stack([function(params, x[i]) for i in range(2)])
        got = jax.jit(jax.vmap(function, in_axes=(None, 0)))(params, x)
        assert_trees_close(got, expected)
        expected = jnp.stack([function(each[i], x[0]) for i in range(2)])
        assert_trees_close(jax.vmap(function, in_axes=(0, None))(stack, x[0]), expected)


def test_remat_and_jit_change_nothing():
    x = normal(4, B, S, F)
    for run in layers(**FULL)[0]:
        params = layers(**FULL)[1]
        expected = value_and_grads(run, params, x)
        assert_trees_close(value_and_grads(jax.checkpoint(run), params, x), expected)
        assert_trees_close(run(params, x), expected[0])


def test_nnx_scans_over_layers():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return our_nnx.MultiHeadAttention(6, F, decode=False, rngs=rngs, **FULL)

    x = normal(4, B, S, F)
    stack = make(nnx.Rngs(0))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def walk(x, layer):
        return x + layer(x)

    expected = x
    graph, state = nnx.split(stack)
    for i in range(3):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        expected = expected + layer(expected)
    assert_trees_close(walk(x, stack), expected)


def test_linen_scans_over_layers():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return x + linen_layer(**FULL, name="attention")(x), None

    x = normal(4, B, S, F)
    walk = linen.scan(
        linen.remat(Block),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
    )()
    variables = walk.init(jax.random.key(0), x, None)
    expected = x
    for i in range(3):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], variables)
        expected = Block().apply(own, expected, None)[0]
    assert_trees_close(walk.apply(variables, x, None)[0], expected)


def test_layers_split_over_devices():
    x = normal(4, 4, S, 32)
    layer = our_nnx.MultiHeadAttention(
        8, 32, num_kv_heads=4, is_causal=True, rotary=Rotary(), use_sinks=True,
        decode=False, rngs=nnx.Rngs(0),
    )  # fmt: skip
    run, params = pure(layer)
    expected = run(params, x)
    mesh = mesh_of(data=2, model=4)
    specs = {
        ("out", "kernel"): ("model",),
        ("out", "bias"): (),
        ("sinks",): ("model",),
        **{
            (name, leaf): axes
            for name in ("query", "key", "value")
            for leaf, axes in (("kernel", (None, "model")), ("bias", ("model",)))
        },
    }
    leaves, structure = jax.tree.flatten_with_path(params)
    own = [
        placed(mesh, [leaf], [specs[tuple(key.key for key in path)]])[0]
        for path, leaf in leaves
    ]
    params = jax.tree.unflatten(structure, own)
    (x,) = placed(mesh, [x], [("data",)])
    assert_trees_close(jax.jit(run)(params, x), expected)
    # Heads stay where they are: only the sum over heads of the output is sent.
    assert collectives(run, params, x) == {"all-reduce": 1}


def test_settings_are_part_of_what_is_compiled():
    layer = linen_layer(**FULL)
    assert layer == linen_layer(**FULL)
    assert hash(layer) == hash(linen_layer(**FULL))
    assert hash(nnx_layer(**FULL).settings) == hash(nnx_layer(**FULL).settings)
    assert pickle.loads(pickle.dumps(nnx_layer(**FULL).settings))
    calls = []

    @nnx.jit
    def run(layer, x):
        calls.append(1)
        return layer(x)

    for _ in range(2):
        run(nnx_layer(**FULL), normal(4, B, S, F))
    assert len(calls) == 1


# --- what is refused ------------------------------------------------------------------


def nnx_call(options, inputs=None, **call):
    inputs = [normal(4, B, S, F)] if inputs is None else inputs
    return nnx_layer(**options)(*inputs, **call)


def linen_call(options, inputs=None, **call):
    inputs = [normal(4, B, S, F)] if inputs is None else inputs
    return linen_layer(**options).init_with_output(jax.random.key(0), *inputs, **call)


def test_flaxs_own_refusals_stay():
    with pytest.raises(ValueError, match="No `decode` argument was provided"):
        nnx_call({"decode": None})
    with pytest.raises(ValueError, match="`inputs_k` cannot be None if `inputs_v`"):
        nnx_layer()(normal(4, B, S, F), None, normal(5, B, S, F))


X, Y = normal(4, B, S, F), normal(5, B, T, F)
ONE = X[:, :1]
REFUSED = {
    "attention": (
        ({"attention_fn": jnp.add}, None, {}),
        ValueError,
        ": attention_fn was passed. This layer runs jax_cudnn.sdpa. Leave it out, or "
        "pass it to Flax's layer.",
    ),
    "heads": (
        ({"num_kv_heads": 4}, None, {}),
        ValueError,
        ": num_heads=6 is not a multiple of num_kv_heads=4. Each key head serves "
        "equally many query heads.",
    ),
    "no heads": (
        ({"num_kv_heads": 0}, None, {}),
        ValueError,
        ": num_heads=6 is not a multiple of num_kv_heads=0.",
    ),
    "implementation": (
        ({"implementation": "cuda"}, None, {}),
        ValueError,
        "implementation='cuda'",
    ),
    "causal": (
        ({"is_causal": 1}, None, {}),
        TypeError,
        ": is_causal is int. It must be True or False",
    ),
    "causal call": (
        ({}, None, {"is_causal": "yes"}),
        TypeError,
        ": is_causal is str. It must be True or False",
    ),
    "window": (
        ({"local_window_size": (1, 2, 3)}, None, {}),
        TypeError,
        ": local_window_size=(1, 2, 3) is neither an int nor two.",
    ),
    "scale": (
        ({"scale": float("inf")}, None, {}),
        ValueError,
        ": scale=inf is not finite. Pass a finite number.",
    ),
    "rotary": (
        ({"rotary": 10_000}, None, {}),
        TypeError,
        ": rotary is 10000. Pass a jax_cudnn.flax.Rotary, or None for no rotary "
        "embedding.",
    ),
    "odd heads": (
        ({"rotary": Rotary()}, None, {}),
        ValueError,
        ": 5 of 5 features are to be rotated (fraction=1.0). They are rotated in pairs",
    ),
    "positions": (
        ({}, None, {"input_positions": jnp.arange(S)}),
        ValueError,
        ": input_positions of shape [7] was passed, and the layer has no rotary "
        "embedding. Make it with rotary=jax_cudnn.flax.Rotary().",
    ),
    "positions' shape": (
        ({"rotary": Rotary(fraction=0.8)}, None, {"input_positions": jnp.arange(4)}),
        ValueError,
        ": input_positions is i32[4], which does not broadcast to (batch axes, length)"
        " = [3, 7].",
    ),
    "positions of both": (
        ({"rotary": Rotary(fraction=0.8)}, [X, Y], {"input_positions": jnp.arange(S)}),
        ValueError,
        ": input_positions was passed with 7 queries and 11 keys. Positions are shared "
        "by queries and keys, whose numbers must be equal.",
    ),
    "lengths": (
        ({}, None, {"input_lengths": jnp.array([1, 2, 3])}),
        ValueError,
        ": input_lengths was passed without decode=True. It says which tokens are kept "
        "in the cache. Hide padding by mask=jax_cudnn.masks.Lengths(...).",
    ),
    "one query": (
        ({}, [ONE, X], {"is_causal": True}),
        ValueError,
        ": is_causal=True with one query and 7 keys. The causal mask is aligned at the "
        "top left, so the query would see the first key only. To add a token to those "
        "before it, pass decode=True.",
    ),
    "mask": (
        ({}, None, {"mask": jnp.ones((B, S, S), bool)}),
        ValueError,
        ": mask has shape [3, 7, 7], which does not broadcast to (batch axes, heads, "
        "query length, key length) = [3, 6, 7, 7].",
    ),
    "mask data": (
        ({}, None, {"mask": masks.Segments(jnp.zeros((B, 4), jnp.int32))}),
        ValueError,
        "Segments: query is i32[3,4].",
    ),
    "keys": (
        ({}, [X, Y, X], {}),
        ValueError,
        ": lengths of key and value differ, 11 and 7: ",
    ),
    "batch": (
        ({}, [X, Y[:2]], {}),
        ValueError,
        ": batch axes differ: ",
    ),
}


@pytest.mark.parametrize("api", ["nnx", "linen"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, api):
    (options, inputs, call), kind, message = REFUSED[case]
    run, name = {
        "nnx": (nnx_call, "MultiHeadAttention"),
        "linen": (linen_call, "MultiHeadDotProductAttention"),
    }[api]
    with pytest.raises(kind) as raised:
        run(options, inputs, **call)
    assert (f"{name}{message}" if message.startswith(":") else message) in str(
        raised.value
    )


def test_linen_refuses_its_inputs_with_reasons():
    with pytest.raises(ValueError, match=r"^MultiHeadDotProductAttention: 31 features"):
        linen_call({"qkv_features": 31})
    with pytest.raises(ValueError, match="inputs_v was passed without inputs_k"):
        linen_call({}, [X, None, X])
    with pytest.raises(ValueError, match="inputs_kv was passed with inputs_k or"):
        linen_call({}, [X, X], inputs_kv=X)


@pytest.mark.parametrize("run", [nnx_call, linen_call])
def test_flaxs_attention_has_no_sinks(run):
    told = (
        "precision='highest' is asked for float32 operands. Flax's own attention "
        "computes this, and has no sinks. Leave one of the two out."
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        run({"use_sinks": True, "precision": "highest"})


def test_cudnn_alone_says_what_only_flax_computes(messages):
    with pytest.raises(UnsupportedError) as raised:
        nnx_call({"implementation": "cudnn", "precision": "highest"})
    assert str(raised.value).startswith(
        "MultiHeadAttention: cuDNN cannot run this attention:"
    )
    assert "to MultiHeadAttention to let Flax's own attention" in str(raised.value)
    nnx_call({"precision": "highest"})
    assert "Flax's own attention runs: precision='highest'" in messages()[0]
