# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.flax.attention_fn` against Flax's own attention.

Values and gradients of layers that call it are in test_flax_attention_layers.py.
"""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx

import jax_cudnn
from jax_cudnn.flax import AttentionFn, attention_fn, dot_general, make_attention_fn
from tests.flax.layers import (
    B,
    D,
    F,
    H,
    S,
    T,
    assert_trees_close,
    flax_linen,
    flax_nnx,
    flax_promotes,
    normal,
)
from tests.products.shared.fused import graphs

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def linen_variables():
    return flax_linen().init(jax.random.key(0), jnp.ones((B, S, F)))


def operands(*batch, s=S, t=T, h=H, k=H, d=D, e=D, dtype=jnp.float32):
    return (
        normal(1, *batch, s, h, d, dtype=dtype),
        normal(2, *batch, t, k, d, dtype=dtype),
        normal(3, *batch, t, k, e, dtype=dtype),
    )


# --- layers ---------------------------------------------------------------------------


def test_is_causal_of_make_attention_fn_equals_a_causal_mask():
    variables, x = linen_variables(), normal(4, B, S, F)
    fn, mask = make_attention_fn(is_causal=True), linen.make_causal_mask(x[..., 0])
    ours = flax_linen(attention_fn=fn).apply(variables, x)
    assert_trees_close(ours, flax_linen().apply(variables, x, mask=mask))
    # nnx passes is_causal=False in every call, which does not undo it.
    ours = flax_nnx(attention_fn=fn)(x)
    assert_trees_close(ours, flax_nnx()(x, is_causal=True))


def test_cross_attention_equals_flax():
    x, y = normal(4, B, S, F), normal(5, B, T, F)
    mask = linen.make_attention_mask(
        jnp.ones((B, S), bool), jnp.arange(T)[None] < jnp.array([[11], [5], [2]])
    )
    ours, flax = (
        flax_nnx(**fn)(x, y, mask=mask) for fn in ({"attention_fn": attention_fn}, {})
    )
    assert_trees_close(ours, flax)
    ours, flax = (
        flax_linen(**fn).apply(linen_variables(), x, y, mask=mask)
        for fn in ({"attention_fn": attention_fn}, {})
    )
    assert_trees_close(ours, flax)


def test_dot_general_in_flaxs_attention_equals_flax():
    x, flax = normal(4, B, S, F), flax_linen()
    ours = flax.clone(qkv_dot_general=dot_general, out_dot_general=dot_general)
    assert len(graphs(ours.apply, linen_variables(), x)) == 4
    got, want = (each.apply(linen_variables(), x) for each in (ours, flax))
    assert_trees_close(got, want)


# --- decoding -------------------------------------------------------------------------


def test_linen_decoding_step_by_step_equals_the_causal_forward():
    x = normal(4, B, S, F)
    layer = flax_linen(attention_fn=attention_fn, decode=True)
    variables = layer.init(jax.random.key(0), x)
    params, cache = variables["params"], variables["cache"]
    step = jax.jit(functools.partial(layer.apply, mutable=["cache"]))
    outputs = []
    for i in range(S):
        output, updated = step({"params": params, "cache": cache}, x[:, i : i + 1])
        cache = updated["cache"]
        outputs.append(output)
    full = flax_linen(attention_fn=attention_fn).apply(
        {"params": params}, x, mask=linen.make_causal_mask(jnp.ones((B, S)))
    )
    assert_trees_close(jnp.concatenate(outputs, axis=1), full)


def test_nnx_decoding_step_by_step_equals_the_causal_forward():
    x = normal(4, B, S, F)
    full = flax_nnx(attention_fn=attention_fn)(x, is_causal=True)
    layer = flax_nnx(attention_fn=attention_fn, decode=True)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x))
    outputs = [step(layer, x[:, i : i + 1]) for i in range(S)]
    assert_trees_close(jnp.concatenate(outputs, axis=1), full)


def test_causal_call_with_one_query_and_several_keys_is_refused():
    q, k, v = operands(B, s=1)
    with pytest.raises(
        ValueError, match=r"is_causal=True with one query and 11 keys.*decoding step"
    ):
        attention_fn(q, k, v, is_causal=True)
    q, k, v = operands(B, s=1, t=1)
    assert_trees_close(attention_fn(q, k, v, is_causal=True), v)


# --- shapes ---------------------------------------------------------------------------

SCORES = {
    (): [(H, S, T), (1, S, T), (T,)],
    (B,): [(B, 1, 1, T), (H, S, T), (S, 1)],
    (2, B): [(2, B, 1, S, T), (2, 1, 1, 1, T), (1, B, H, 1, T), (B, 1, S, T)],
}


@pytest.mark.parametrize(
    ("batch", "shape"), [(b, shape) for b, all_ in SCORES.items() for shape in all_]
)
def test_mask_and_bias_broadcast_as_in_flax(batch, shape):
    q, k, v = operands(*batch, e=4)
    bias = normal(6, *shape)
    mask = jax.random.bernoulli(jax.random.key(7), 0.7, shape)
    mask = mask.at[..., 0].set(True)  # every query sees a key

    def loss(fn, q, k, v, bias):
        output = fn(q, k, v, bias, mask)
        return jnp.sum(jnp.sin(output)), output

    def run(fn):
        function = jax.value_and_grad(
            functools.partial(loss, fn), argnums=(0, 1, 2, 3), has_aux=True
        )
        return jax.jit(function)(q, k, v, bias)

    ours = run(attention_fn)
    with flax_promotes():
        flax = run(linen.dot_product_attention)
    assert_trees_close(ours, flax)


@pytest.mark.parametrize("batch", [(), (B,), (2, B), (2, B, 5)])
def test_any_number_of_batch_axes(batch):
    q, k, v = operands(*batch, e=4)
    ours = attention_fn(q, k, v)
    assert ours.shape == (*batch, S, H, 4)
    assert_trees_close(ours, linen.dot_product_attention(q, k, v))


def test_numbers_as_mask_hide_where_they_are_zero():
    q, k, v = operands(B)
    mask = jnp.array([0.5, 0, -2, 1, 0, 1, 1, 0, 3, 1, 1])
    assert_trees_close(
        attention_fn(q, k, v, mask=mask), attention_fn(q, k, v, mask=mask.astype(bool))
    )
    assert_trees_close(
        attention_fn(q, k, v, mask=mask.astype(jnp.int32)),
        linen.dot_product_attention(q, k, v, mask=mask.astype(jnp.int32)),
    )


@pytest.mark.parametrize("hidden", [-1e9, -jnp.inf])
def test_a_mask_that_is_meant_to_be_added_is_refused(hidden):
    q, k, v = operands(B)
    visible = jnp.tril(jnp.ones((S, T), bool))
    added = jnp.where(visible, 0.0, hidden)
    with pytest.raises(ValueError, match=r"mask is f32\[.*to 0\.0\. .*Pass mask == 0"):
        attention_fn(q, k, v, mask=added)
    assert_trees_close(
        attention_fn(q, k, v, mask=added == 0), attention_fn(q, k, v, mask=visible)
    )
    # Zeros alone may be a mask that hides every key, as 0 does in Flax.
    np.testing.assert_array_equal(attention_fn(q, k, v, mask=jnp.zeros((S, T))), 0)


def test_query_that_sees_no_key_gives_zero_where_flax_gives_the_mean():
    q, k, v = operands(B)
    mask = jnp.ones((B, 1, S, T), bool).at[1, :, 4].set(False)
    ours = attention_fn(q, k, v, mask=mask)
    flax = linen.dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(ours[1, 4], 0)
    np.testing.assert_allclose(flax[1, 4], v[1].mean(0), rtol=1e-5, atol=1e-6)
    rest = jnp.ones((B, S), bool).at[1, 4].set(False)
    assert_trees_close(ours[rest], flax[rest])


def test_vmap_of_a_layer_equals_a_batch_axis():
    layer, x = flax_nnx(attention_fn=attention_fn), normal(4, 2, B, S, F)
    assert_trees_close(
        jax.vmap(lambda x: layer(x, is_causal=True))(x), layer(x, is_causal=True)
    )


# --- dtypes and precision -------------------------------------------------------------


def relative_error(x, truth):
    x, truth = np.asarray(x, np.float64), np.asarray(truth, np.float64)
    return np.linalg.norm(x - truth) / np.linalg.norm(truth)


def test_operands_of_different_dtypes_are_promoted():
    q, k, v = operands(B)
    half = (q.astype(jnp.bfloat16), k, v)
    with flax_promotes():
        ours, flax = (f(*half) for f in (attention_fn, linen.dot_product_attention))
    assert_trees_close(ours, flax)
    assert attention_fn(*half, dtype=jnp.float16).dtype == jnp.float16


def test_promote_dtype_is_called_as_nnx_calls_it():
    q, k, v = operands(B)
    seen = []

    def promote(arrays, *, dtype=None):
        seen.append((len(arrays), dtype))
        return tuple(x.astype(jnp.float16) for x in arrays)

    output = attention_fn(q, k, v, dtype=jnp.bfloat16, promote_dtype=promote)
    assert output.dtype == jnp.float16
    assert seen == [(3, jnp.bfloat16)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_force_fp32_for_softmax_gives_linens_dtype(dtype):
    q, k, v = operands(B, dtype=dtype)
    ours = attention_fn(q, k, v, force_fp32_for_softmax=True)
    with flax_promotes():
        flax = linen.dot_product_attention(q, k, v, force_fp32_for_softmax=True)
    assert ours.dtype == flax.dtype == jnp.float32
    truth = linen.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert relative_error(ours, truth) < (1e-6 if dtype == jnp.float32 else 8e-3)


@pytest.mark.parametrize(
    ("precision", "dtype", "is_delegated"),
    [
        (None, jnp.float32, False),
        ("default", jnp.float32, False),
        (jax.lax.Precision.HIGHEST, jnp.bfloat16, False),
        (("high", "highest"), jnp.float16, False),
        (jax.lax.Precision.HIGHEST, jnp.float32, True),
        (("default", "highest"), jnp.float32, True),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, jnp.float32, True),
    ],
)
def test_precision_beyond_the_default_of_f32_goes_to_flax(
    messages, precision, dtype, is_delegated
):
    q, k, v = operands(B, dtype=dtype)
    traced = jax.make_jaxpr(functools.partial(attention_fn, precision=precision))
    text = str(traced(q, k, v))
    assert ("sdpa" not in text) == is_delegated
    assert len(messages()) == is_delegated
    if is_delegated:
        assert "asked for float32 operands" in messages()[0]


def test_precision_reaches_the_products_that_flax_makes():
    q, k, v = operands(B, k=2)
    fn = functools.partial(attention_fn, precision="highest", is_causal=True)
    assert str(jax.make_jaxpr(fn)(q, k, v)).count("Precision.HIGHEST") >= 2
    assert_trees_close(fn(q, k, v), attention_fn(q, k, v, is_causal=True))


# --- what only Flax computes ----------------------------------------------------------


def test_dropout_that_differs_between_heads_runs_sdpa(messages):
    q, k, v = operands(2, 3, k=2)
    key = jax.random.key(9)
    fn = make_attention_fn(implementation="cudnn")
    options = {"dropout_rate": 0.4, "dropout_rng": key, "broadcast_dropout": False}
    got = fn(q, k, v, is_causal=True, **options)
    flat = [x.reshape(6, *x.shape[2:]) for x in (q, k, v)]
    want = jax_cudnn.sdpa(*flat, is_causal=True, dropout_rate=0.4, dropout_key=key)
    assert_trees_close(got, want.reshape(got.shape))
    assert (got != fn(q, k, v, is_causal=True)).any()
    assert_trees_close(fn(q, k, v, deterministic=True, **options), fn(q, k, v), atol=0)
    x = normal(4, B, S, F)
    layer = flax_nnx(attention_fn=fn, dropout_rate=0.4, broadcast_dropout=False)
    first, again = (layer(x, deterministic=False, rngs=nnx.Rngs(9)) for _ in range(2))
    assert_trees_close(first, again, atol=0)
    assert messages() == []


def test_dropout_without_a_key_is_refused():
    with pytest.raises(ValueError, match=r"dropout_rate is 0\.4 but dropout_rng is"):
        attention_fn(*operands(B), dropout_rate=0.4, broadcast_dropout=False)


def test_dropout_that_is_not_in_effect_runs_sdpa(messages):
    x = normal(4, B, S, F)
    layer = flax_nnx(
        attention_fn=make_attention_fn(implementation="cudnn"), dropout_rate=0.4
    )
    assert_trees_close(layer(x, deterministic=True), flax_nnx()(x))
    q, k, v = operands(B)
    attention_fn(q, k, v, dropout_rate=0.0, deterministic=False)
    assert messages() == []


def test_linen_einsum_classes_are_used(messages):
    calls = []

    def einsum(formula, *arrays):
        calls.append(formula)
        return jnp.einsum(formula, *arrays)

    options = {
        "qk_attn_weights_einsum_cls": lambda: einsum,
        "attn_weights_value_einsum_cls": lambda: einsum,
    }
    variables, x = linen_variables(), normal(4, B, S, F)
    ours = flax_linen(attention_fn=attention_fn, **options).apply(variables, x)
    assert len(calls) == 2
    assert_trees_close(ours, flax_linen().apply(variables, x))
    assert "qk_attn_weights_einsum replaces a product" in messages()[0]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"module": object()}, "the attention weights are asked for"),
        ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general replaces"),
        ({"precision": "highest"}, "precision='highest' is asked for float32 operands"),
    ],
    ids=["weights", "einsum", "precision"],
)
def test_implementation_cudnn_refuses_what_only_flax_computes(call, reason):
    with pytest.raises(jax_cudnn.UnsupportedError, match=reason) as caught:
        make_attention_fn(implementation="cudnn")(*operands(B), **call)
    assert str(caught.value).startswith("attention_fn: cuDNN cannot run this attention")
    assert 'Pass implementation="auto" or "xla"' in str(caught.value)


def test_implementation_xla_lets_flax_compute_it_without_a_message(messages):
    q, k, v = operands(B)
    fn = make_attention_fn(implementation="xla")
    assert_trees_close(
        fn(q, k, v, precision="highest"), linen.dot_product_attention(q, k, v)
    )
    assert messages() == []


def test_linen_options_with_an_nnx_module_are_refused():
    with pytest.raises(
        ValueError, match=r"force_fp32_for_softmax was passed .* nnx module MultiHead"
    ):
        attention_fn(*operands(B), module=flax_nnx(), force_fp32_for_softmax=True)


# --- messages and the objects themselves ----------------------------------------------


def test_input_positions_are_refused():
    with pytest.raises(ValueError, match=r"input_positions of shape \(3, 7\) was pass"):
        attention_fn(*operands(B), input_positions=jnp.zeros((B, S)))


def test_settings_are_checked():
    with pytest.raises(ValueError, match="implementation='fast' is not one of 'auto'"):
        make_attention_fn(implementation="fast")
    with pytest.raises(TypeError, match=r"is_causal is 1\. It must be True or False"):
        make_attention_fn(is_causal=1)


def test_equal_settings_are_equal_and_compile_once():
    assert make_attention_fn() == attention_fn == AttentionFn()
    assert make_attention_fn(implementation="xla") != attention_fn
    made = make_attention_fn(implementation="cudnn", is_causal=True)
    assert pickle.loads(pickle.dumps(made)) == made
    count = 0

    @functools.partial(jax.jit, static_argnums=0)
    def run(layer, variables, x):
        nonlocal count
        count += 1
        return layer.apply(variables, x)

    variables, x = linen_variables(), normal(4, B, S, F)
    for _ in range(2):
        run(
            flax_linen(attention_fn=make_attention_fn(implementation="xla")),
            variables,
            x,
        )
    assert count == 1


def test_every_option_of_flaxs_own_functions_is_taken():
    ours = inspect.signature(attention_fn).parameters
    for function in (linen.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(function).parameters) <= set(ours)
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for function in (linen.dot_product_attention, nnx.dot_product_attention):
        flax = list(inspect.signature(function).parameters)
        assert flax[: len(positional)] == positional
