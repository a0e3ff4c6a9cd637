# SPDX-License-Identifier: Apache-2.0
"""Tests the messages for wrong arguments of `sdpa`."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import UnsupportedError, sdpa
from tests.attention.shared.oracle import SIZES, shape_of


def _zeros(axes: str, dtype: Any = jnp.bfloat16, **sizes: int) -> jax.Array:
    return jnp.asarray(np.zeros(shape_of(axes, {**SIZES, **sizes}), dtype))


def _call(**changes: Any) -> Any:
    operands = {
        "query": _zeros("bshd"),
        "key": _zeros("btkd"),
        "value": _zeros("btke"),
    }
    return sdpa(**{**operands, **changes})


def _shapes(**changes: str) -> str:
    """Return how a message lists the three operands."""
    shown = {
        "query": "bf16[2,5,6,11]",
        "key": "bf16[2,7,3,11]",
        "value": "bf16[2,7,3,13]",
        **changes,
    }
    return f"query is {shown['query']}, key {shown['key']}, value {shown['value']}"


_RANKS = (
    "All three must be (batch, length, heads, head size) or all (length, heads, head "
    "size). "
)
_MORE_AXES = "Use jax.vmap or reshape for more batch axes."
_SCALE_ADVICE = (
    "It must be a number known when the program is traced, since it is part of it. "
    "Multiply query by a traced scale."
)
_FLAG_ADVICE = (
    "It must be True or False, since it is part of the compiled program. Under "
    "jax.jit, name it in static_argnames."
)
_DOES_NOT_BROADCAST = (
    "which does not broadcast to (batch, heads, query length, key length) = "
    "[2, 6, 5, 7]. Each of its axes must be 1 or the full size."
)
_ADVICE = " Insert, expand or slice axes."
_LAST_AXES = " Its axes are taken to be the last ones."


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        # dtypes
        (
            {"query": _zeros("bshd", jnp.int32)},
            TypeError,
            "sdpa: query is i32[2,5,6,11]. Supported dtypes are bf16, f16, f32, f64. "
            "Convert query, key and value to one of them.",
        ),
        (
            {"query": _zeros("bshd", jnp.complex64)},
            TypeError,
            "sdpa: query is complex64[2,5,6,11]. Supported dtypes are bf16, f16, f32, "
            "f64. Convert query, key and value to one of them.",
        ),
        (
            {"query": _zeros("bshd", jnp.float8_e4m3fn)},
            TypeError,
            "sdpa: query is f8_e4m3fn[2,5,6,11]. Supported dtypes are bf16, f16, f32, "
            "f64. Convert query, key and value to one of them.",
        ),
        (
            {"key": _zeros("btkd", jnp.float16)},
            TypeError,
            "sdpa: key is f16[2,7,3,11] but query is bf16[2,5,6,11]. All three must "
            "have one dtype. Convert key to bf16.",
        ),
        (
            {"value": _zeros("btke", jnp.float32)},
            TypeError,
            "sdpa: value is f32[2,7,3,13] but query is bf16[2,5,6,11]. All three must "
            "have one dtype. Convert value to bf16.",
        ),
        # ranks
        (
            {"query": _zeros("nbshd")},
            ValueError,
            f"sdpa: {_shapes(query='bf16[4,2,5,6,11]')}. {_RANKS}{_MORE_AXES}",
        ),
        (
            {"key": _zeros("tkd")},
            ValueError,
            f"sdpa: {_shapes(key='bf16[7,3,11]')}. {_RANKS}{_MORE_AXES}",
        ),
        (
            {"value": _zeros("te")},
            ValueError,
            f"sdpa: {_shapes(value='bf16[7,13]')}. {_RANKS}{_MORE_AXES}",
        ),
        (
            {"query": _zeros("sd"), "key": _zeros("td"), "value": _zeros("te")},
            ValueError,
            f"sdpa: {_shapes(query='bf16[5,11]', key='bf16[7,11]', value='bf16[7,13]')}"
            f". {_RANKS}For a single head insert its axis: query[:, None, :].",
        ),
        # shapes
        (
            {"key": _zeros("btkd", b=1)},
            ValueError,
            f"sdpa: batch sizes differ: {_shapes(key='bf16[1,7,3,11]')}. They must be "
            "equal. Broadcast, or use jax.vmap with in_axes=None for the shared "
            "operand.",
        ),
        (
            {"value": _zeros("btke", t=8)},
            ValueError,
            "sdpa: key has length 7 but value 8: "
            f"{_shapes(value='bf16[2,8,3,13]')}. They must be equal.",
        ),
        (
            {"query": _zeros("bshd", d=12)},
            ValueError,
            "sdpa: query has head size 12 but key 11: "
            f"{_shapes(query='bf16[2,5,6,12]')}. They must be equal; value's may "
            "differ.",
        ),
        (
            {"value": _zeros("btke", k=6)},
            ValueError,
            f"sdpa: key has 3 heads but value 6: {_shapes(value='bf16[2,7,6,13]')}. "
            "They must be equal.",
        ),
        (
            {"query": _zeros("bshd", h=7)},
            ValueError,
            "sdpa: 7 query heads are not a multiple of 3 key heads: "
            f"{_shapes(query='bf16[2,5,7,11]')}. Repeat the heads of key and value, or "
            "change the number of query heads.",
        ),
        (
            {"query": _zeros("bshd", h=0)},
            ValueError,
            "sdpa: 0 query heads are not a multiple of 3 key heads: "
            f"{_shapes(query='bf16[2,5,0,11]')}. Repeat the heads of key and value, or "
            "change the number of query heads.",
        ),
        # bias and mask
        (
            {"bias": _zeros("bhst", jnp.bool_)},
            TypeError,
            "sdpa: bias is bool[2,6,5,7]. Supported dtypes are bf16, f16, f32, f64 and "
            "integers. "
            "Pass a boolean array as mask instead.",
        ),
        (
            {"bias": _zeros("bhst", jnp.complex64)},
            TypeError,
            "sdpa: bias is complex64[2,6,5,7]. Supported dtypes are bf16, f16, f32, "
            "f64 and integers. "
            "Convert it to the dtype of query.",
        ),
        (
            {"bias": _zeros("bhs1", s=4)},
            ValueError,
            f"sdpa: bias is bf16[2,6,4,1], {_DOES_NOT_BROADCAST}{_ADVICE}",
        ),
        (
            {"bias": _zeros("nbhst")},
            ValueError,
            f"sdpa: bias is bf16[4,2,6,5,7], {_DOES_NOT_BROADCAST}{_ADVICE}",
        ),
        (
            {"mask": _zeros("b1st", jnp.int8)},
            TypeError,
            "sdpa: mask is i8[2,1,5,7]. It must be bool, True where a query may see a "
            "key. Pass an additive mask as bias, or convert with mask != 0.",
        ),
        (
            {"mask": _zeros("bst", jnp.bool_)},
            ValueError,
            f"sdpa: mask is bool[2,5,7], {_DOES_NOT_BROADCAST}{_LAST_AXES} Pass "
            "mask[:, None, :, :].",
        ),
        (
            {"mask": _zeros("bt", jnp.bool_)},
            ValueError,
            f"sdpa: mask is bool[2,7], {_DOES_NOT_BROADCAST}{_LAST_AXES} Pass "
            "mask[:, None, None, :].",
        ),
        (
            {"bias": _zeros("ht")},
            ValueError,
            f"sdpa: bias is bf16[6,7], {_DOES_NOT_BROADCAST}{_LAST_AXES} Pass "
            "bias[None, :, None, :].",
        ),
        # lengths
        (
            {"query_seq_lengths": _zeros("b", jnp.float32)},
            TypeError,
            "sdpa: query_seq_lengths is f32[2]. It must hold integers. Convert it "
            "to int32.",
        ),
        (
            {"key_value_seq_lengths": _zeros("b", jnp.bool_)},
            TypeError,
            "sdpa: key_value_seq_lengths is bool[2]. It must hold integers. Convert it "
            "to int32.",
        ),
        (
            {"query_seq_lengths": _zeros("b", jnp.int32, b=3)},
            ValueError,
            "sdpa: query_seq_lengths is i32[3]. It must have one length per batch "
            "entry, shape [2].",
        ),
        (
            {"key_value_seq_lengths": 7},
            ValueError,
            "sdpa: key_value_seq_lengths is i32[]. It must have one length per batch "
            "entry, shape [2].",
        ),
        # options
        (
            {"scale": float("inf")},
            ValueError,
            "sdpa: scale=inf is not finite. Pass a finite number.",
        ),
        (
            {"scale": np.float32("nan")},
            ValueError,
            "sdpa: scale=nan is not finite. Pass a finite number.",
        ),
        ({"scale": True}, TypeError, f"sdpa: scale is bool. {_SCALE_ADVICE}"),
        ({"scale": "1"}, TypeError, f"sdpa: scale is str. {_SCALE_ADVICE}"),
        ({"scale": b"1"}, TypeError, f"sdpa: scale is bytes. {_SCALE_ADVICE}"),
        (
            {"scale": np.array("a")},
            TypeError,
            f"sdpa: scale is ndarray. {_SCALE_ADVICE}",
        ),
        ({"scale": 1j}, TypeError, f"sdpa: scale is complex. {_SCALE_ADVICE}"),
        (
            {"scale": np.complex64(1)},
            TypeError,
            f"sdpa: scale is complex64. {_SCALE_ADVICE}",
        ),
        (
            {"scale": np.ones(1)},
            TypeError,
            f"sdpa: scale is ndarray. {_SCALE_ADVICE}",
        ),
        (
            {"scale": 1e39},
            ValueError,
            "sdpa: scale=1e+39 is not finite. Pass a finite number.",
        ),
        (
            {"scale": 10**400},
            ValueError,
            f"sdpa: scale={10**400} is not finite. Pass a finite number.",
        ),
        (
            {"is_causal": 1},
            TypeError,
            f"sdpa: is_causal is int. {_FLAG_ADVICE}",
        ),
        (
            {"return_residual": None},
            TypeError,
            f"sdpa: return_residual is NoneType. {_FLAG_ADVICE}",
        ),
        (
            {"implementation": "triton"},
            ValueError,
            "sdpa: implementation='triton' is not one of 'auto', 'cudnn', 'xla'.",
        ),
    ],
)
def test_a_wrong_argument_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        _call(**changes)


def test_concrete_arrays_and_none_are_taken_as_options() -> None:
    want = _call(scale=0.5)
    for scale in (np.float32(0.5), np.array(0.5), jnp.array(0.5)):
        np.testing.assert_array_equal(_call(scale=scale), want)
    np.testing.assert_array_equal(_call(implementation=None), _call())
    # Finite as a double, 0 in f32.
    np.testing.assert_array_equal(_call(scale=1e-50), _call(scale=0))


def test_symbolic_dimensions_are_refused_to_cudnn() -> None:
    from jax import export

    shape = export.symbolic_shape("b, 5, 6, 11")
    query = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    run = export.export(jax.jit(lambda x: sdpa(x, x, x, implementation="cudnn")))
    with pytest.raises(
        UnsupportedError,
        match=re.escape("query has symbolic dimensions, bf16[b,5,6,11]"),
    ):
        run(query)


def test_a_traced_option_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^sdpa: scale is .*Tracer. It must be a number"
    ):
        jax.jit(lambda scale: _call(scale=scale))(0.5)
    with pytest.raises(
        TypeError, match=r"^sdpa: is_causal is .*Tracer. It must be True"
    ):
        jax.jit(lambda is_causal: _call(is_causal=is_causal))(True)


def test_wrong_arguments_are_refused_while_tracing_too() -> None:
    with pytest.raises(ValueError, match=r"^sdpa: key has length 7 but value 8: "):
        jax.eval_shape(lambda x: _call(value=x), _zeros("btke", t=8))


def test_the_message_lists_operands_as_they_were_given() -> None:
    with pytest.raises(ValueError, match=re.escape("sdpa: 5 query heads are not")):
        sdpa(_zeros("shd", h=5), _zeros("tkd"), _zeros("tke"))


def test_unsupported_keeps_its_parts_and_prints_them() -> None:
    error = UnsupportedError("cannot", ["too wide", "too old"], "pad it")
    assert str(error) == "cannot\n  - too wide\n  - too old\npad it"
    assert (error.summary, error.reasons, error.advice) == (
        "cannot",
        ("too wide", "too old"),
        "pad it",
    )
    assert str(UnsupportedError("cannot")) == "cannot"
