# SPDX-License-Identifier: Apache-2.0
"""Hints for keyword arguments by the names that other libraries give them.

The public namespaces pass their functions and classes through ``with_hints``. A call
with a keyword that a function does not have raises Python's TypeError, and the hint is
added to its message: ``sdpa(q, k, v, causal=True)`` is told of ``is_causal``. Functions
keep their signature, docstring and type.

Imports nothing but the standard library.
"""

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

_Object = TypeVar("_Object")

# An argument of ours, and what it is called in JAX, Flax, PyTorch, TensorFlow, Haiku,
# flash-attn, TransformerEngine, tokamax and xformers. The first that a function has is
# taken.
SAME = {
    # attention
    "is_causal": "causal causal_mask use_causal_mask",
    "query": "q",
    "key": "k",
    "value": "v",
    "key_cache": "k_cache key k",
    "value_cache": "v_cache value v",
    "key_pages": "k_pages k_cache key_cache key k",
    "value_pages": "v_pages v_cache value_cache value v",
    "page_table": "block_table block_tables page_indices page_tables",
    "mask": "attention_mask",
    "bias": "attn_bias attention_bias core_attention_bias",
    "scale": "softmax_scale sm_scale logits_scale scale_factor attn_scale",
    "dropout_rate": "dropout_p dropout attention_dropout attn_dropout p rate",
    "dropout_key": "dropout_rng dropout_seed rng prng_key rng_key seed",
    "local_window_size": "window_size window sliding_window sliding_window_size",
    "query_seq_lengths": "query_lengths q_seq_lengths q_seqlen seqlens_q seqused_q",
    "key_value_seq_lengths": "key_lengths kv_lengths kv_seq_lengths kv_seqlen lengths "
    "seqlens_k seqlens_kv seqused_k cache_seqlens cache_lengths context_lens",
    "sinks": "sink attention_sinks softmax_offset s_aux learnable_sink",
    "layout": "tensor_layout qkv_layout qkv_format input_layout",
    "key_value_heads": "num_key_value_heads num_kv_heads kv_heads num_gqa_groups",
    "num_kv_heads": "num_key_value_heads key_value_heads kv_heads num_gqa_groups",
    "return_residual": "return_residuals return_lse return_softmax_lse "
    "return_logsumexp return_attn_probs",
    # convolutions, products and pooling
    "lhs": "input inputs x a",
    "rhs": "weight weights kernel filter filters w b other",
    "a": "input x lhs x1",
    "b": "other y rhs x2 mat2 weight weights kernel",
    "inputs": "input x lhs operand",
    "window_strides": "strides stride",
    "strides": "stride window_strides",
    "window_shape": "kernel_size pool_size window_dimensions kernel_shape ksize window",
    "kernel_size": "kernel_shape window_shape",
    "lhs_dilation": "input_dilation base_dilation",
    "rhs_dilation": "dilation dilation_rate kernel_dilation window_dilation rate",
    "input_dilation": "lhs_dilation",
    "kernel_dilation": "dilation dilation_rate rhs_dilation rate",
    "feature_group_count": "groups num_groups feature_groups",
    "dimension_numbers": "data_format feature_layout layout",
    "preferred_element_type": "dtype out_dtype result_dtype output_dtype acc_dtype",
    "initial_state": "initial_states conv_state cache state",
    "return_state": "return_final_states return_final_state output_final_state",
    "segment_ids": "seq_idx segments document_ids segment_positions",
    "w": "weight weights kernel filter filters rhs",
    # norms
    "x": "input inputs lhs",
    "epsilon": "eps variance_epsilon layer_norm_eps rms_norm_eps",
    "reduction_axes": "axis axes dim dims",
    "axis": "axes dim dims reduction_axes feature_axes normalized_shape",
    "channel_axis": "axis feature_axis channel_dim axes dim",
    "groups": "num_groups group_count n_groups",
    "num_groups": "groups group_count n_groups",
    "running_mean": "mean moving_mean ra_mean",
    "running_var": "var running_variance variance moving_var moving_variance ra_var",
    "momentum": "decay decay_rate",
    # layers
    "in_features": "in_channels in_size input_size embed_dim",
    "features": "out_features out_channels units output_size",
    "out_features": "features out_channels units output_size out_size",
    "num_features": "features in_features channels normalized_shape hidden_size dim",
    "num_heads": "heads num_attention_heads n_heads",
    "qkv_features": "embed_dim",
    "use_bias": "bias with_bias has_bias",
    "use_scale": "scale with_scale affine elementwise_affine create_scale",
    "rngs": "rng key seed",
    # what several of them have
    "activation": "act activation_fn activation_function act_type nonlinearity",
    "residual": "skip shortcut add",
    "implementation": "impl backend",
}
# Names of norms' factors and terms, which are no names of attention's or of products'.
_OF_NORMS = {"scale": "weight gamma gain", "bias": "beta offset shift"}

_GRADIENTS = (
    "For gradients that are equal in each run, pass plan=plans.PlanOptions("
    "deterministic=True). Dropout is off where dropout_rate is 0."
)
_PACKED = "Pass mask=masks.Packed(offsets)."
_SEGMENTS = "Pass mask=masks.Segments(ids) or masks.Packed.from_segment_ids(ids)."
_LONGEST = "Leave it out, or pass mask=masks.Packed(offsets, max_length=...)."
_PADDING = "Pass mask=~padding[:, None, None, :], if True means padding."
_FEWER_HEADS = "Leave it out: key and value may have fewer heads than query."
_PAGES = "Pass it to jax_cudnn.paged_sdpa, as page_table."
_NO_WEIGHTS = "Leave it out: attention weights are not stored."
_SOFTCAP = "Pass score_mod=score_mods.softcap(cap)."
_STATISTICS = "Did you mean use_running_average? It is True for inference."
_MASK_OR_BIAS = (
    "Did you mean mask or bias? Booleans are a mask, and numbers that are added to the "
    "scores are a bias."
)
# What does more than carry another name, by an argument that the function has: there
# is a sentence for each of some names.
ADVICE = {
    "score_mod": {
        "block_table": _PAGES,
        "alibi_slopes": "Pass score_mod=score_mods.alibi(slopes).",
        **dict.fromkeys(("softcap", "soft_cap", "logits_soft_cap"), _SOFTCAP),
    },
    "mask": {
        "attn_mask": _MASK_OR_BIAS,
        **dict.fromkeys(
            ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"), _PACKED
        ),
        **dict.fromkeys(
            ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv"), _LONGEST
        ),
        "key_padding_mask": _PADDING,
        "attn_mask_type": "Pass is_causal=True, or a mask of jax_cudnn.masks.",
        "block_mask": "Pass a mask of jax_cudnn.masks, or an array of bools.",
        **dict.fromkeys(("segment_ids", "q_segment_ids", "kv_segment_ids"), _SEGMENTS),
    },
    "bias": {
        "attn_bias_type": "Pass bias, which is added to the scaled scores.",
    },
    "sinks": {
        "softmax_type": "Pass sinks: the offsets, or zeros for 'off-by-one'.",
    },
    "layout": {
        "transpose_batch_sequence": "Pass layout='sbhd' for tokens before batch.",
    },
    "key": dict.fromkeys(("enable_gqa", "num_gqa_groups"), _FEWER_HEADS),
    "return_residual": dict.fromkeys(
        ("need_weights", "output_attentions", "return_attention_scores"), _NO_WEIGHTS
    ),
    "dropout_key": {"deterministic": _GRADIENTS},
    "use_running_average": dict.fromkeys(
        ("training", "train", "is_training", "deterministic", "inference"), _STATISTICS
    ),
}
# Arguments of methods that nobody passes: those beside "self" are of linen's modules.
_NOT_PASSED = {"self", "parent", "name"}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PACKAGE = __name__.partition(".")[0]
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


def hint_on(namespace: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Give the functions and classes of a module, by their names in it, hints."""
    for name in names:
        if name in namespace:
            own, made = namespace[name], with_hints(namespace[name])
            if made is not own and (home := sys.modules.get(own.__module__)):
                # Where pickle looks for the function that it is given.
                setattr(home, own.__name__, made)
            namespace[name] = made


def with_hints(value: _Object) -> _Object:
    """Return a function that adds hints to its TypeErrors, or a class that does.

    A class is changed in place: how it is made, and how its objects are called. All
    else is returned as it is.
    """
    made: Any = value
    if inspect.isfunction(value):
        made = _hinting(value)
    elif inspect.isclass(value):
        for method in ("__init__", "__call__"):
            if _is_ours(value, method) and _parameters_of(value, method):
                setattr(value, method, _hinting(getattr(value, method), value))
    return made


def _is_ours(owner: type, method: str) -> bool:
    """Whether a method is the class's own, or of a base class in this package."""
    function = getattr(owner, method, None)
    is_here = getattr(function, "__module__", "").partition(".")[0] == _PACKAGE
    return inspect.isfunction(function) and (method in vars(owner) or is_here)


@functools.cache
def _hinting(function: Callable[..., Any], owner: type | None = None) -> Any:
    """Return a function whose TypeErrors have hints; with an owner, it is a method."""
    if hasattr(function, "_has_hints") or not (owner or _parameters(function)):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            _add_hint(error, function, owner, kwargs)
            raise

    call._has_hints = True  # type: ignore[attr-defined]
    return call


def _add_hint(
    error: TypeError,
    function: Callable[..., Any],
    owner: type | None,
    given: dict[str, Any],
) -> None:
    """Add a hint to the message, if the call has a keyword that there is not."""
    match = _UNEXPECTED.search(str(error))
    if match is None or match[1] not in given:
        return
    if owner is None:
        known = _parameters(function)
    else:
        known = _parameters_of(owner, function.__name__)
    if match[1] not in known:
        # Newer Pythons add a guess of their own.
        shown = str(error)[: match.end()]
        error.args = (f"{shown}. {suggestion(match[1], known)}",)


def _parameters(*functions: Callable[..., Any]) -> tuple[str, ...]:
    """Return the arguments of a function that passes others on to the next, in turn.

    There are none if the last passes some on as well: it may take any.
    """
    found: list[str] = []
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        found += [each.name for each in parameters if each.kind in _NAMED]
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            return tuple(dict.fromkeys(found))
    return ()


def _parameters_of(owner: type, method: str) -> tuple[str, ...]:
    """Return the arguments of a method, and those that it passes to base classes."""
    found = (vars(each).get(method) for each in inspect.getmro(owner))
    known = _parameters(*filter(inspect.isfunction, found))
    return tuple(name for name in known if name not in _NOT_PASSED)


def suggestion(name: str, known: tuple[str, ...]) -> str:
    """Return what may be meant by a name, for a function with some arguments."""
    for argument, sentences in ADVICE.items():
        if argument in known and name in sentences:
            return sentences[name]
    if guess := next(_guesses(name, known), ""):
        return f"Did you mean {guess}?"
    return f"Its arguments are {', '.join(known)}."


def _guesses(name: str, known: tuple[str, ...]) -> Iterator[str]:
    tables = (_OF_NORMS, SAME) if "epsilon" in known else (SAME,)
    for table in tables:
        for argument, others in table.items():
            if argument in known and name in others.split():
                yield argument
    yield from difflib.get_close_matches(name, known, n=1)
