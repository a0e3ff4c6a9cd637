# SPDX-License-Identifier: Apache-2.0
"""Tests that options of attention and of norms are the same in all their functions."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import jax_cudnn
from jax_cudnn import f8, parallel
from jax_cudnn.flax import linen as linen_layers
from jax_cudnn.flax import nnx as nnx_layers
from jax_cudnn.ops.attention import options
from jax_cudnn.ops.norms.options import NormCall, NormOptions, OneResultOptions

pytestmark = pytest.mark.once

_KEYWORDS = {
    jax_cudnn.sdpa: options.SdpaOptions,
    jax_cudnn.qkv_sdpa: options.SdpaOptions,
    parallel.sdpa: options.SdpaOptions,
    parallel.sharded_sdpa: options.SdpaOptions,
    jax_cudnn.cached_sdpa: options.CachedOptions,
    jax_cudnn.paged_sdpa: options.CachedOptions,
    f8.sdpa: options.F8Options,
    f8.quantized_sdpa: options.F8Options,
}
_ATTENTION = tuple(_KEYWORDS)
_KEYWORDS |= {
    jax_cudnn.layer_norm: NormOptions,
    jax_cudnn.rms_norm: NormOptions,
    jax_cudnn.group_norm: NormOptions,
    jax_cudnn.instance_norm: NormOptions,
    jax_cudnn.batch_norm: NormOptions,
    jax_cudnn.adaptive_layer_norm: NormOptions,
}
_FUNCTIONS = pytest.mark.parametrize(
    "function", _KEYWORDS, ids=lambda f: f"{f.__module__}.{f.__name__}"
)
_OTHER_DEFAULTS = {
    # A query over a cache is one of the last tokens.
    (jax_cudnn.cached_sdpa, "is_causal"): True,
    (jax_cudnn.paged_sdpa, "is_causal"): True,
    # As in Flax.
    (jax_cudnn.batch_norm, "epsilon"): 1e-5,
}
_FIELDS = {each.name: each for each in dataclasses.fields(options.AttentionCall)}
_NORM_FIELDS = {each.name: each for each in dataclasses.fields(NormCall)}


def _fields(function: Callable[..., Any]) -> dict[str, Any]:
    return _FIELDS if function in _ATTENTION else _NORM_FIELDS


@pytest.mark.parametrize(
    ("keywords", "fields"),
    [
        (options.LayerOptions, _FIELDS),
        (options.SdpaOptions, _FIELDS),
        (options.CachedOptions, _FIELDS),
        (options.F8Options, _FIELDS),
        (OneResultOptions, _NORM_FIELDS),
        (NormOptions, _NORM_FIELDS),
    ],
)
def test_keywords_have_the_types_of_the_fields(
    keywords: Any, fields: dict[str, Any]
) -> None:
    for name, annotation in keywords.__annotations__.items():
        assert annotation.__forward_arg__ == fields[name].type, name


@_FUNCTIONS
def test_signatures_have_the_options_with_their_defaults(
    function: Callable[..., Any],
) -> None:
    found = inspect.signature(function).parameters
    assert all(each.kind is not each.VAR_KEYWORD for each in found.values())
    if function in _ATTENTION:
        assert len({"bias", "mask"} & found.keys()) != 1
    for name in _KEYWORDS[function].__optional_keys__:
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY
        default = _fields(function)[name].default
        default = _OTHER_DEFAULTS.get((function, name), default)
        assert found[name].default == default
    text = str(inspect.signature(function))
    assert "plan: PlanOptions | None = None" in text
    assert "Union" not in text
    assert len(text) < 900


@_FUNCTIONS
def test_docstrings_describe_each_argument_once(function: Callable[..., Any]) -> None:
    doc = function.__doc__ or ""
    arguments = doc[doc.index("\nArgs:\n") : doc.index("\nReturns:\n")]
    found = re.findall(r"^  (\S+?): ", arguments, re.MULTILINE)
    assert sorted(found) == sorted(inspect.signature(function).parameters)
    assert "AttentionCall" not in doc
    assert "NormCall" not in doc
    assert max(map(len, doc.splitlines())) <= 84


@_FUNCTIONS
def test_an_unknown_keyword_is_refused_before_a_missing_argument(
    function: Callable[..., Any],
) -> None:
    told = re.escape(f"{function.__name__}() got an unexpected keyword argument 'q'. ")
    with pytest.raises(TypeError, match=told):
        function(q=1)
    name = next(iter(inspect.signature(function).parameters))
    with pytest.raises(TypeError, match=f"missing .*'{name}'"):
        function(implementation="xla")


@pytest.mark.parametrize(
    "layer",
    [nnx_layers.MultiHeadAttention, linen_layers.MultiHeadDotProductAttention],
    ids=lambda layer: layer.__module__,
)
def test_layers_have_the_options_that_are_part_of_the_program(layer: Any) -> None:
    found = inspect.signature(layer.__init__).parameters
    for name in options.LayerOptions.__optional_keys__:
        assert found[name].default == _FIELDS[name].default
        assert f"{name}: " in layer.__doc__
