# SPDX-License-Identifier: Apache-2.0
"""Tests that every refusal names the function that was called and the argument.

A table has systematically wrong arguments for each public function and layer. The other
tests/test_errors_*.py check the rest of the messages.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import UnsupportedError, plans

_LAST = ("NHWC", "HWIO", "NHWC")


def _ones(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.ones(shape, dtype))


class _Function(NamedTuple):
    """A public function with arguments that are right.

    ``arrays`` are those that take arrays; of them, ``numbers`` take Python's numbers,
    too, and ``floats`` no other dtypes than floats.
    """

    call: Callable[..., Any]
    right: dict[str, Any]
    arrays: tuple[str, ...]
    floats: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


_Q = {name: _ones(2, 5, 4, 8) for name in ("query", "key", "value")}
_LENGTHS = _ones(2, dtype=jnp.int32)
_CACHED = {
    "query": _ones(2, 3, 4, 8),
    "key_cache": _ones(2, 5, 4, 8),
    "value_cache": _ones(2, 5, 4, 8),
    "key_value_seq_lengths": _LENGTHS,
}
_PAGED = {
    "query": _ones(2, 3, 4, 8),
    "key_pages": _ones(6, 5, 4, 8),
    "value_pages": _ones(6, 5, 4, 8),
    "page_table": _ones(2, 3, dtype=jnp.int32),
    "key_value_seq_lengths": _LENGTHS,
}
_A, _B = _ones(4, 6), _ones(6, 5)
_IMAGES = {
    "lhs": _ones(2, 8, 8, 3),
    "rhs": _ones(3, 3, 3, 16),
    "dimension_numbers": _LAST,
}
_GATED_IMAGES = {
    "lhs": _IMAGES["lhs"],
    "gate": _IMAGES["rhs"],
    "up": _IMAGES["rhs"],
    "dimension_numbers": _LAST,
}
_PRODUCT = (((1,), (0,)), ((), ()))
_FUNCTIONS = {
    "sdpa": _Function(
        jax_cudnn.sdpa,
        _Q,
        (*_Q, "bias", "mask", "query_seq_lengths", "key_value_seq_lengths"),
        floats=("query",),
    ),
    "qkv_sdpa": _Function(
        jax_cudnn.qkv_sdpa,
        {"qkv": _ones(2, 5, 3, 4, 8)},
        ("qkv", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths"),
        floats=("qkv",),
    ),
    "cached_sdpa": _Function(
        jax_cudnn.cached_sdpa,
        _CACHED,
        (*_CACHED, "query_seq_lengths", "sinks"),
        floats=("query", "sinks"),
    ),
    "paged_sdpa": _Function(
        jax_cudnn.paged_sdpa,
        _PAGED,
        (*_PAGED, "query_seq_lengths", "sinks"),
        floats=("query", "sinks"),
    ),
    "conv": _Function(
        jax_cudnn.conv,
        _IMAGES,
        ("lhs", "rhs", "bias", "residual", "scale"),
        floats=("bias", "residual", "scale"),
        numbers=("scale",),
    ),
    "matmul": _Function(
        jax_cudnn.matmul,
        {"a": _A, "b": _B},
        ("a", "b", "bias", "residual", "scale_a", "scale_b", "scale_out"),
        floats=("bias", "residual", "scale_a", "scale_b", "scale_out"),
        numbers=("scale_a", "scale_b", "scale_out"),
    ),
    "dot_general": _Function(
        jax_cudnn.dot_general,
        {"lhs": _A, "rhs": _B, "dimension_numbers": _PRODUCT},
        ("lhs", "rhs", "bias", "residual"),
        floats=("bias", "residual"),
    ),
    "gated_matmul": _Function(
        jax_cudnn.gated_matmul,
        {"a": _A, "gate": _B, "up": _B},
        ("a", "gate", "up", "gate_bias", "up_bias"),
        floats=("gate_bias", "up_bias"),
    ),
    "gated_conv": _Function(
        jax_cudnn.gated_conv,
        _GATED_IMAGES,
        ("lhs", "gate", "up", "gate_bias", "up_bias"),
        floats=("gate_bias", "up_bias"),
    ),
}


def _refused(
    name: str, argument: str, value: object, *, words: tuple[str, ...] = ()
) -> str:
    """Return the message for one wrong argument, which names function and argument."""
    function = _FUNCTIONS[name]
    with pytest.raises((TypeError, ValueError, UnsupportedError)) as caught:
        function.call(**{**function.right, argument: value})
    return _named(caught.value, name, argument, *words)


def _named(error: BaseException, name: str, *words: str) -> str:
    message = str(error)
    assert message.startswith(f"{name}: "), message
    for word in words:
        assert re.search(rf"(?<![\w.]){re.escape(word)}", message), message
    return message


def _each(field: str) -> list[Any]:
    return [
        pytest.param(name, argument, id=f"{name}-{argument}")
        for name, function in _FUNCTIONS.items()
        for argument in getattr(function, field)
    ]


def test_the_table_is_right_where_nothing_is_wrong() -> None:
    for function in _FUNCTIONS.values():
        assert isinstance(function.call(**function.right), jax.Array)


@pytest.mark.parametrize(("name", "argument"), _each("arrays"))
def test_what_is_no_array(name: str, argument: str) -> None:
    for value in ("q", [1.0, "one"], object(), [[1.0], [1.0, 2.0]]):
        message = _refused(name, argument, value, words=(repr(value)[:12],))
        assert type(value).__name__ in message
    if argument in _FUNCTIONS[name].right:
        assert f"{argument} is None." in _refused(name, argument, None)


@pytest.mark.parametrize(("name", "argument"), _each("arrays"))
def test_what_is_no_number_of_numpy(name: str, argument: str) -> None:
    right = _FUNCTIONS[name].right.get(argument, jnp.ones(()))
    keys = jax.random.split(jax.random.key(0), right.shape)
    for value, words in ((10**400, "1000000"), (keys, "key<fry>")):
        assert words in _refused(name, argument, value)


@pytest.mark.parametrize(("name", "argument"), _each("arrays"))
def test_ranks_and_sizes(name: str, argument: str) -> None:
    is_mask = argument in (
        *("mask", "query_seq_lengths", "key_value_seq_lengths", "page_table"),
    )
    dtype = {True: jnp.int32, argument == "mask": jnp.bool_}.get(True, jnp.int32)
    for shape in ((7, 7), (7, 7, 7, 7, 7, 7), (7, 11, 13)):
        x = _ones(*shape, dtype=dtype if is_mask else jnp.float32)
        shown = f"[{','.join(map(str, shape))}]"
        assert shown in _refused(name, argument, x), shape


@pytest.mark.parametrize(("name", "argument"), _each("floats"))
def test_dtypes(name: str, argument: str) -> None:
    for dtype, shown in (("bool", "bool["), ("complex64", "complex64[")):
        x = jnp.ones(_FUNCTIONS[name].right.get(argument, jnp.ones(())).shape, dtype)
        assert shown in _refused(name, argument, x)


@pytest.mark.parametrize(("name", "argument"), _each("numbers"))
def test_numbers_that_are_not_finite(name: str, argument: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        message = _refused(name, argument, value)
        assert f"{argument}={value} is not finite" in message
        # As an array it means what it says.
        function = _FUNCTIONS[name]
        result = function.call(**{**function.right, argument: jnp.float32(value)})
        assert not jnp.isfinite(result).any()
    large = 10**400
    assert f"{argument}={large} is not finite" in _refused(name, argument, large)


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_options(name: str) -> None:
    assert "'cuda'" in _refused(name, "implementation", "cuda")
    assert "'eng0'" in _refused(name, "plan", "eng0")
    if name in ("sdpa", "qkv_sdpa", "cached_sdpa", "paged_sdpa"):
        for value in (math.nan, "x", [1.0], True):
            _refused(name, "scale", value)
        for flag in ("is_causal", "return_residual"):
            for value in ("yes", 1, None):
                _refused(name, flag, value)
        return
    assert "'gleu'" in _refused(name, "activation", "gleu")
    assert "int" in _refused(name, "activation", 3)
    assert "'x'" in _refused(name, "preferred_element_type", "x")


@pytest.mark.parametrize(
    ("x", "w", "numbers"),
    [
        ((2, 9, 3), (3, 3, 16), "NWC"),
        ((2, 9, 8, 3), (3, 3, 3, 16), "NHWC"),
        ((2, 9, 8, 7, 3), (3, 3, 3, 3, 16), "NDHWC"),
    ],
)
def test_channels_last_without_dimension_numbers(x: Any, w: Any, numbers: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^conv: lhs is f32\[2,9,.* and rhs f32\[3"
    ) as got:
        jax_cudnn.conv(_ones(*x), _ones(*w))
    assert str(got.value).endswith(f"pass dimension_numbers={numbers!r}.")
    jax_cudnn.conv(_ones(*x), _ones(*w), dimension_numbers=numbers)
    # Where that would not help, it is not said.
    with pytest.raises(ValueError, match=r"^conv: lhs is") as got:
        jax_cudnn.conv(_ones(*x), _ones(*w[:-2], 5, 16))
    assert "dimension_numbers=" not in str(got.value)


@pytest.mark.parametrize(
    "numbers", [None, "ij,jk", ((1,), (0,)), (((7,), (0,)), ((), ())), 3]
)
def test_axes_of_dot_general(numbers: object) -> None:
    _refused("dot_general", "dimension_numbers", numbers)


@pytest.mark.parametrize("name", ["conv", "matmul", "dot_general", "gated_matmul"])
def test_calls_that_no_graph_has_are_refused_alike(name: str) -> None:
    function = _FUNCTIONS[name]
    right = {
        name: x.astype(jnp.int32) if isinstance(x, jax.Array) else x
        for name, x in function.right.items()
    }

    def refused(argument: str, value: object) -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            function.call(**{**right, argument: value})
        return _named(caught.value, name)

    assert isinstance(function.call(**right), jax.Array)
    for argument in function.arrays:
        assert f"{argument} is 'q' (str)" in refused(argument, "q")
        x = _ones(7, 7, 7, 7, 7, 7, dtype=jnp.int32)
        message = refused(argument, x)
        assert argument in message
        assert "[7,7,7,7,7,7]" in message
    for argument in function.numbers:
        assert f"{argument}=nan is not finite" in refused(argument, math.nan)
        assert isinstance(function.call(**{**right, argument: 2}), jax.Array)
    # What JAX refuses of the contraction itself.
    first, second, *_ = function.arrays
    message = refused(first, _ones(2, 7, 7, 11, dtype=jnp.int32))
    assert f"{first} is i32[2,7,7,11] and {second} " in message
    if name == "conv":
        message = refused("preferred_element_type", jnp.complex64)
        assert message.startswith("conv: lhs is i32[2,8,8,3] and rhs i32[3,3,3,16]: ")


def test_an_array_in_the_place_of_a_precision_is_called_one() -> None:
    for value in (_ones(5), 3, object(), (_ones(5), _ones(5))):
        with pytest.raises(ValueError, match=r"^dot_general: precision=.* is not one"):
            jax_cudnn.dot_general(_A, _B, _PRODUCT, value)  # type: ignore[arg-type]


def test_gates_that_do_not_fit_are_not_called_scale_out() -> None:
    for gate, up in (((2, 6, 5), (3, 6, 5)), ((3, 6, 5), (6, 5)), ((6, 5), (6, 7))):
        with pytest.raises(ValueError, match=r"gate is .* and up ") as caught:
            jax_cudnn.gated_matmul(_A, _ones(*gate), _ones(*up))
        message = _named(caught.value, "gated_matmul", "gate", "up", "with a")
        assert "scale_out" not in message
    # What fits is taken, as it was.
    result = jax_cudnn.gated_matmul(_A, _B, _ones(3, 6, 5))
    assert result.shape == (3, 4, 5)


def test_a_cache_that_cannot_be() -> None:
    for limit in ("1GB", 1.5, None, True, -1):
        with pytest.raises((TypeError, ValueError)) as caught:
            plans.set_cache("folder", limit_bytes=limit)  # type: ignore[arg-type]
        _named(caught.value, "set_cache", f"limit_bytes={limit!r}")
    for directory in (3, b"folder"):
        with pytest.raises(TypeError) as caught:
            plans.set_cache(directory)  # type: ignore[arg-type]
        _named(caught.value, "set_cache", f"directory={directory!r}")


# --- Flax's layers --------------------------------------------------------------------


def _layers() -> dict[str, Callable[..., Any]]:
    """Return each layer, as a function of its inputs and its options."""
    pytest.importorskip("flax", reason="Flax is not installed")
    from flax import linen, nnx

    from jax_cudnn import flax as ours

    def of_linen(made: linen.Module) -> Callable[..., Any]:
        return lambda *inputs, **options: made.init_with_output(
            jax.random.key(0), *inputs, **options
        )

    def by_linen(kind: Any, *sizes: Any) -> Callable[..., Any]:
        def call(*inputs: Any, activation: Any = None, **options: Any) -> Any:
            return of_linen(kind(*sizes, activation=activation))(*inputs, **options)

        return call

    def by_nnx(kind: Any, *sizes: Any) -> Callable[..., Any]:
        def call(*inputs: Any, activation: Any = None, **options: Any) -> Any:
            made = kind(*sizes, activation=activation, rngs=nnx.Rngs(0))
            return made(*inputs, **options)

        return call

    return {
        "Linear": by_nnx(ours.nnx.Linear, 6, 5),
        "Conv": by_nnx(ours.nnx.Conv, 6, 5, (3, 3)),
        "Dense": by_linen(ours.linen.Dense, 5),
        "linen Conv": by_linen(ours.linen.Conv, 5, (3, 3)),
    }


@pytest.mark.parametrize("layer", ["Linear", "Conv", "Dense", "linen Conv"])
def test_layers_name_themselves_and_what_they_were_called_with(layer: str) -> None:
    call, name = _layers()[layer], layer.removeprefix("linen ")
    right = _ones(2, 8, 8, 6)
    assert call(right)[0] is not None
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("inputs", (None,), {}),
        ("inputs", ("x",), {}),
        ("residual", (right,), {"residual": _ones(7, 7)}),
        ("residual", (right,), {"residual": "x"}),
        ("activation", (right,), {"activation": "gleu"}),
    ]
    if layer in ("Linear", "Conv"):  # linen makes its parameters to fit
        wrong.append(("inputs", (_ones(2, 8, 8, 7),), {}))
    for argument, inputs, options in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(*inputs, **options)
        _named(caught.value, name, argument)


def test_products_for_flax_name_their_own_arguments() -> None:
    pytest.importorskip("flax", reason="Flax is not installed")
    from jax_cudnn.flax import conv_general_dilated, dot_general

    images, filters = _ones(2, 8, 8, 3), _ones(3, 3, 3, 16)
    for lhs, rhs, argument in (
        (None, filters, "lhs"),
        (images, "w", "rhs"),
        (images, filters.astype(jnp.bfloat16), "rhs"),
    ):
        with pytest.raises(TypeError) as caught:
            conv_general_dilated(lhs, rhs, (1, 1), "SAME", dimension_numbers=_LAST)
        _named(caught.value, "conv_general_dilated", argument)
    with pytest.raises(TypeError) as caught:
        dot_general(_A, None, _PRODUCT)  # type: ignore[arg-type]
    _named(caught.value, "dot_general", "rhs")


@pytest.mark.parametrize("dropout_rate", [0.0, 0.5])
def test_attention_says_what_does_not_fit_whoever_computes_it(
    dropout_rate: float,
) -> None:
    pytest.importorskip("flax", reason="Flax is not installed")
    from jax_cudnn.flax import attention_fn

    q, scores = _ones(2, 5, 4, 8), "query length, key length) = [2, 4, 5, 5]"
    for changes, words in (
        ({"key": _ones(2, 7, 4, 8)}, ("lengths of key and value", "7", "5")),
        ({"key": _ones(2, 5, 4, 6)}, ("head sizes of query and key", "8", "6")),
        ({"value": _ones(2, 5, 2, 8)}, ("numbers of heads of key and value",)),
        ({"query": _ones(2, 5, 3, 8)}, ("3 query heads",)),
        ({"key": q[0]}, ("ranks do not fit: query is (2, 5, 4, 8), key (5, 4, 8)",)),
        ({"value": _ones(3, 5, 4, 8)}, ("batch axes differ", "value (3, 5, 4, 8)")),
        ({"query": None}, ("query is None",)),
        ({"value": "v"}, ("value is 'v'",)),
        ({"mask": _ones(2, 5) > 0}, ("mask", "Pass mask[:, None, None, :]")),
        ({"mask": _ones(7, 7) > 0}, ("mask has shape [7, 7], which does not", scores)),
        ({"bias": _ones(7, 7)}, ("bias has shape [7, 7], which does not", scores)),
        ({"bias": _ones(1, 2, 1, 5, 5)}, ("bias has shape [1, 2, 1, 5, 5]", scores)),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            attention_fn(
                **{"query": q, "key": q, "value": q, **changes},
                dropout_rate=dropout_rate,
                dropout_rng=jax.random.key(0),
            )
        _named(caught.value, "attention_fn", *words)
