# SPDX-License-Identifier: Apache-2.0
"""Tests that calls with other libraries' keywords are told what is meant."""

import functools
import importlib
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_cudnn
from jax_cudnn import keywords, masks, plans, score_mods
from jax_cudnn.flax import linen as linen_layers
from jax_cudnn.flax import nnx as nnx_layers

pytestmark = pytest.mark.once

_NAMESPACES = (
    *("", ".f8", ".flax", ".flax.linen", ".flax.nnx", ".kv_cache", ".masks"),
    *(".moe", ".parallel", ".plans", ".score_mods"),
)
# Results, which nobody makes.
_RESULTS = {
    *("Attempt", "CacheInfo", "CacheStats", "Calibrated", "Calibration", "Call"),
    *("Candidate", "Choice", "Diagnosis"),
    *("ExplainedCall", "Explanation", "Finding", "FuseExplanation", "Key"),
    *("ProgramTimes", "Quantized", "Report", "Shipment", "Tuning", "Warmup"),
}
# What the constructors of layers ask for.
_REQUIRED: dict[str, Any] = {
    **dict.fromkeys(("in_features", "out_features", "num_features", "features"), 4),
    **{"num_heads": 2, "num_groups": 2, "kernel_size": (3, 3), "qkv_features": 4},
}


def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    if inspect.isclass(function):
        return keywords._parameters_of(function, "__init__")
    return keywords._parameters(inspect.unwrap(function))


def _public() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for space in _NAMESPACES:
        module = importlib.import_module(f"jax_cudnn{space}")
        for name in module.__all__:
            value = getattr(module, name)
            is_made = inspect.isclass(value) and not issubclass(value, Exception)
            if name not in _RESULTS and (inspect.isfunction(value) or is_made):
                found[f"jax_cudnn{space}.{name}"] = value
    return found


_PUBLIC = _public()
# All else takes no arguments, or any keywords of a function that is given.
_TOLD = {name: value for name, value in _PUBLIC.items() if _arguments(value)}


def _message(function: Callable[..., Any], **given: Any) -> str:
    with pytest.raises(TypeError) as raised:
        function(**given)
    return str(raised.value)


def _required(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a layer of nnx asks for before it looks at other keywords."""
    if not (inspect.isclass(function) and issubclass(function, nnx.Module)):
        return {}
    given = {
        name: _REQUIRED[name] for name in _arguments(function) if name in _REQUIRED
    }
    if "rngs" in inspect.signature(function.__init__).parameters:
        given["rngs"] = nnx.Rngs(0)
    return given


# --- the class: every public name, every name of another library ----------------------


def test_all_public_functions_and_layers_are_looked_at() -> None:
    assert len(_TOLD) > 80
    assert {name.rpartition(".")[2] for name in _PUBLIC.keys() - _TOLD.keys()} == {
        *("Mask", "add_tokamax", "autotune", "cache_info", "calibrated", "compose"),
        *("doctor", "explain", "inspect", "save", "warmup", "F8State"),
        "SelectionBias",
        *("DenseState", "GatedMlpState", "LayerState", "MXFP8", "NVFP4"),
    }


@pytest.mark.parametrize("name", _TOLD)
def test_every_public_name_knows_other_libraries_keywords(name: str) -> None:
    function = _TOLD[name]
    known = _arguments(function)
    foreign = {
        other: keywords.suggestion(other, known)
        for argument, others in keywords.SAME.items()
        for other in others.split()
        if argument in known and other not in known
    }
    foreign |= {
        other: sentence
        for argument, sentences in keywords.ADVICE.items()
        for other, sentence in sentences.items()
        if argument in known and other not in known
    }
    required = _required(function)
    for other, sentence in foreign.items():
        assert sentence.startswith(("Did you mean ", "Pass ", "For ", "Leave ")), other
        told = _message(function, **{**required, other: None})
        assert told.endswith(
            f"got an unexpected keyword argument '{other}'. {sentence}"
        )
    told = _message(function, **required, qqqq=None)
    assert told.endswith(f" 'qqqq'. Its arguments are {', '.join(known)}.")
    nearly = f"{known[-1]}_"
    assert _message(function, **required, **{nearly: 1}).endswith(
        f"'{nearly}'. Did you mean {known[-1]}?"
    )


def test_every_argument_of_the_tables_is_one_of_ours() -> None:
    ours = {
        argument for function in _TOLD.values() for argument in _arguments(function)
    }
    ours |= {
        argument
        for layer in (nnx_layers.BatchNorm, linen_layers.BatchNorm)
        for argument in inspect.signature(layer.__call__).parameters
    }
    tables = (keywords.SAME, keywords.ADVICE, keywords._OF_NORMS)
    assert {argument for table in tables for argument in table} <= ours


# --- cases ----------------------------------------------------------------------------

_Q = jnp.ones((1, 4, 2, 8))
_X = jnp.ones((2, 6, 6, 8))


@pytest.mark.parametrize(
    ("function", "given", "told"),
    [
        (jax_cudnn.sdpa, "causal", "Did you mean is_causal?"),
        (
            *(jax_cudnn.sdpa, "attn_mask"),
            "Did you mean mask or bias? Booleans are a mask, and numbers that are "
            "added to the scores are a bias.",
        ),
        (jax_cudnn.sdpa, "dropout_p", "Did you mean dropout_rate?"),
        (jax_cudnn.sdpa, "softmax_scale", "Did you mean scale?"),
        (jax_cudnn.sdpa, "window_size", "Did you mean local_window_size?"),
        (
            *(jax_cudnn.sdpa, "enable_gqa"),
            "Leave it out: key and value may have fewer heads than query.",
        ),
        (
            *(jax_cudnn.sdpa, "softcap"),
            "Pass score_mod=score_mods.softcap(cap).",
        ),
        (jax_cudnn.sdpa, "cu_seqlens_q", "Pass mask=masks.Packed(offsets)."),
        (
            *(jax_cudnn.sdpa, "max_seqlen_q"),
            "Leave it out, or pass mask=masks.Packed(offsets, max_length=...).",
        ),
        (
            *(jax_cudnn.sdpa, "key_padding_mask"),
            "Pass mask=~padding[:, None, None, :], if True means padding.",
        ),
        (
            *(jax_cudnn.sdpa, "attn_mask_type"),
            "Pass is_causal=True, or a mask of jax_cudnn.masks.",
        ),
        (
            *(jax_cudnn.qkv_sdpa, "block_mask"),
            "Pass a mask of jax_cudnn.masks, or an array of bools.",
        ),
        (
            *(jax_cudnn.sdpa, "need_weights"),
            "Leave it out: attention weights are not stored.",
        ),
        (
            *(jax_cudnn.sdpa, "num_gqa_groups"),
            "Leave it out: key and value may have fewer heads than query.",
        ),
        (
            *(jax_cudnn.sdpa, "block_table"),
            "Pass it to jax_cudnn.paged_sdpa, as page_table.",
        ),
        (
            *(jax_cudnn.sdpa, "softmax_type"),
            "Pass sinks: the offsets, or zeros for 'off-by-one'.",
        ),
        (
            *(jax_cudnn.sdpa, "attn_bias_type"),
            "Pass bias, which is added to the scaled scores.",
        ),
        (
            *(jax_cudnn.sdpa, "transpose_batch_sequence"),
            "Pass layout='sbhd' for tokens before batch.",
        ),
        (jax_cudnn.sdpa, "core_attention_bias", "Did you mean bias?"),
        (jax_cudnn.cached_sdpa, "cache_seqlens", "Did you mean key_value_seq_lengths?"),
        (jax_cudnn.paged_sdpa, "block_table", "Did you mean page_table?"),
        (jax_cudnn.layer_norm, "eps", "Did you mean epsilon?"),
        (jax_cudnn.layer_norm, "weight", "Did you mean scale?"),
        (jax_cudnn.layer_norm, "normalized_shape", "Did you mean axis?"),
        (jax_cudnn.rms_norm, "gamma", "Did you mean scale?"),
        (jax_cudnn.group_norm, "num_groups", "Did you mean groups?"),
        (jax_cudnn.group_norm, "axis", "Did you mean channel_axis?"),
        (
            *(jax_cudnn.batch_norm, "training"),
            "Did you mean use_running_average? It is True for inference.",
        ),
        (jax_cudnn.conv, "strides", "Did you mean window_strides?"),
        (jax_cudnn.conv, "groups", "Did you mean feature_group_count?"),
        (jax_cudnn.conv, "weight", "Did you mean rhs?"),
        (jax_cudnn.matmul, "weight", "Did you mean b?"),
        (jax_cudnn.max_pool, "kernel_size", "Did you mean window_shape?"),
        (jax_cudnn.avg_pool, "stride", "Did you mean strides?"),
        (plans.PlanOptions, "engine", "Did you mean engines?"),
        (nnx_layers.GroupNorm, "groups", "Did you mean num_groups?"),
        (nnx_layers.Linear, "bias", "Did you mean use_bias?"),
        (linen_layers.Conv, "stride", "Did you mean strides?"),
        (linen_layers.MultiHeadAttention, "window_size", "Did you mean local_window"),
        (masks.Window, "align", "Did you mean alignment?"),
        (score_mods.alibi_slopes, "num_heads", "Did you mean heads?"),
    ],
)
def test_a_keyword_of_another_library_says_ours(
    function: Callable[..., Any], given: str, told: str
) -> None:
    assert told in _message(function, **_required(function), **{given: 1})


def test_calls_of_layers_say_so_too() -> None:
    layer = nnx_layers.BatchNorm(8, rngs=nnx.Rngs(0))
    told = "BatchNorm.__call__() got an unexpected keyword argument 'train'. Did you"
    with pytest.raises(
        TypeError, match=r"Did you mean use_running_average\?"
    ) as raised:
        layer(_X, train=True)  # type: ignore[call-arg]
    assert str(raised.value).startswith(told)
    with pytest.raises(TypeError, match=r"Did you mean residual\?"):
        linen_layers.Dense(3).init(jax.random.key(0), _X, skip=_X)
    with pytest.raises(TypeError, match=r"Did you mean is_causal\?"):
        jax_cudnn.flax.attention_fn(_Q, _Q, _Q, causal=True)  # type: ignore[call-arg]


def test_the_error_is_a_type_error_under_every_transformation() -> None:
    def f(q: Any) -> Any:
        return jax_cudnn.sdpa(q, q, q, causal=True).sum()  # type: ignore[call-overload]

    for call in (jax.jit(f), jax.grad(f), jax.vmap(f), jax.checkpoint(f)):
        with pytest.raises(TypeError, match=r"'causal'\. Did you mean is_causal\?"):
            call(_Q)


# --- what is not touched --------------------------------------------------------------


@pytest.mark.parametrize("name", [x for x in _TOLD if inspect.isfunction(_TOLD[x])])
def test_functions_keep_what_is_said_of_them(name: str) -> None:
    function = _TOLD[name]
    own = inspect.unwrap(function)
    assert own is not function
    assert inspect.signature(function) == inspect.signature(own)
    for attribute in ("__doc__", "__module__", "__name__", "__qualname__"):
        assert getattr(function, attribute) == getattr(own, attribute)


def test_other_errors_pass_unchanged() -> None:
    def wrong() -> None:
        raise TypeError("wrong() got an unexpected keyword argument 'scale'")

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        del b, h, i, j
        wrong()
        return score

    for raised_inside in (
        lambda: jax_cudnn.sdpa(_Q, _Q, _Q, score_mod=score_mod),
        lambda: jax_cudnn.sdpa(_Q, _Q, _Q, score_mod=score_mod, scale=0.5),
    ):
        with pytest.raises(TypeError) as raised:
            raised_inside()
        told = "wrong() got an unexpected keyword argument 'scale'"
        assert str(raised.value) == told
    with pytest.raises(TypeError, match=r"^sdpa\(\) missing 3 required positional"):
        jax_cudnn.sdpa()  # type: ignore[call-overload]
    fused = jax_cudnn.fuse(lambda x: x + 1)
    assert "Did you mean" not in _message(fused, x=_Q, axis=1)


def test_a_subclass_of_a_layer_has_the_hints_of_its_base() -> None:
    class Mine(nnx_layers.Linear):
        def __init__(self, size: int, **options: Any) -> None:
            super().__init__(size, size, **options)

    with pytest.raises(TypeError, match=r"'bias'\. Did you mean use_bias\?"):
        Mine(4, bias=True, rngs=nnx.Rngs(0))
    assert Mine(4, rngs=nnx.Rngs(0))(jnp.ones((2, 4))).shape == (2, 4)


@pytest.mark.parametrize(
    "module", [jax_cudnn, jax_cudnn.parallel, jax_cudnn.score_mods]
)
def test_functions_are_found_by_pickle(module: Any) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert pickle.loads(pickle.dumps(value)) is value, name
            assert pickle.loads(pickle.dumps(functools.partial(value))).func is value
