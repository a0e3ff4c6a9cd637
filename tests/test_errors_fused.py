# SPDX-License-Identifier: Apache-2.0
"""Does a wrong argument of conv or matmul get a message that says what to do?"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jax_cudnn import UnsupportedError, conv, dot_general, matmul

_FLOATS = "Supported dtypes are bf16, f16, f32, f64. Convert it to one of them."
_OPERANDS = (
    "Supported dtypes are bf16, f16, f32, f64, f8_e4m3fn, f8_e5m2, i8, u8. Convert it "
    "to one of them."
)
_INSTEAD = "Apply the function to the result instead."


def _zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def _matmul(**changes: Any) -> Any:
    return matmul(**{"a": _zeros(2, 3, 5), "b": _zeros(5, 7), **changes})


def _conv(**changes: Any) -> Any:
    return conv(**{"x": _zeros(2, 3, 5, 4), "w": _zeros(7, 3, 2, 3), **changes})


def _dot(**changes: Any) -> Any:
    operands = {"lhs": _zeros(3, 5), "rhs": _zeros(5, 7)}
    numbers = (((1,), (0,)), ((), ()))
    return dot_general(**{**operands, "dimension_numbers": numbers, **changes})


def _check(call: Any, changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(**changes)


_SHAPES = (
    "Its shape must be [] or [7], one for each out channel, or broadcast to the "
    "result's shape, [2, 7, 4, 2]. Reshape it."
)
_RANK = "An image axis, a channel axis and one to three spatial axes are supported."


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"x": _zeros(3, 5)},
            ValueError,
            f"conv: x is f32[3,5], of rank 2. {_RANK}",
        ),
        (
            {"w": _zeros(1, 1, 1, 1, 1, 1)},
            ValueError,
            f"conv: w is f32[1,1,1,1,1,1], of rank 6. {_RANK}",
        ),
        (
            {"x": _zeros(2, 3, 5, 4, dtype=jnp.int32)},
            TypeError,
            f"conv: x is i32[2,3,5,4]. {_OPERANDS}",
        ),
        (
            {"w": _zeros(7, 3, 2, 3, dtype=jnp.bfloat16)},
            TypeError,
            "conv: w is bf16[7,3,2,3] but x is f32[2,3,5,4]. Both must have one dtype. "
            "Convert one of them.",
        ),
        (
            {"bias": _zeros(5)},
            ValueError,
            f"conv: bias is f32[5]. {_SHAPES}",
        ),
        (
            {"bias": _zeros(4, 2)[0]},
            ValueError,
            f"conv: bias is f32[2]. {_SHAPES}",
        ),
        (
            {"residual": _zeros(2, 7, 4, 3)},
            ValueError,
            f"conv: residual is f32[2,7,4,3]. {_SHAPES}",
        ),
        (
            {"scale": _zeros(2, 7, 4, 2)},
            ValueError,
            "conv: scale is f32[2,7,4,2]. Its shape must be [] or [7], one for each "
            "out channel. Reshape it.",
        ),
        (
            {"bias": _zeros(7, dtype=jnp.int32)},
            TypeError,
            f"conv: bias is i32[7]. {_FLOATS}",
        ),
        (
            {"scale": _zeros(7, dtype=jnp.bool_)},
            TypeError,
            f"conv: scale is bool[7]. {_FLOATS}",
        ),
        (
            {
                "x": _zeros(2, 3, 5, 4, dtype=jnp.int8),
                "w": _zeros(7, 3, 2, 3, dtype=jnp.int8),
            },
            TypeError,
            "conv: the result of i8[2,3,5,4] and i8[7,3,2,3] would be i8. Supported "
            "are bf16, f16, f32, f64, i32, f8_e4m3fn, f8_e5m2. 8-bit results would "
            "wrap around: pass preferred_element_type, for example jnp.int32, or "
            "jnp.bfloat16 with a scale.",
        ),
        (
            {"preferred_element_type": jnp.complex64},
            TypeError,
            "conv: the result of f32[2,3,5,4] and f32[7,3,2,3] would be complex64. "
            "Supported are bf16, f16, f32, f64, i32, f8_e4m3fn, f8_e5m2. Pass one of "
            "them as preferred_element_type.",
        ),
        (
            {"preferred_element_type": jnp.int32},
            TypeError,
            "conv: the result of f32[2,3,5,4] and f32[7,3,2,3] would be i32. That is "
            "the dtype of sums of 8-bit integers. Pass a float as "
            "preferred_element_type.",
        ),
        (
            {"precision": ("highest", "default")},
            ValueError,
            "conv: precision=('highest', 'default') differs between the operands. "
            "cuDNN has one for both. Pass one.",
        ),
        (
            {"implementation": "cuda"},
            ValueError,
            "conv: implementation='cuda' is not one of 'auto', 'cudnn', 'xla'.",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_wrong_arguments_of_conv(
    changes: Any, error: type[Exception], message: str
) -> None:
    _check(_conv, changes, error, message)


@pytest.mark.parametrize("name", ["window_strides", "lhs_dilation", "rhs_dilation"])
@pytest.mark.parametrize("value", [(1,), (2, 1, 1), (0, 1), (1.5, 1), 2, ("2", 1)])
def test_steps_are_ints_above_0_for_each_spatial_axis(name: str, value: Any) -> None:
    message = (
        f"conv: {name}={value!r} is not 2 ints above 0, one for each spatial axis of "
        "x. Pass for example (1, 1)."
    )
    _check(_conv, {name: value}, ValueError, message)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w": _zeros(7, 4, 2, 3)}, ValueError, "feature_group_count"),
        ({"padding": "FULL"}, (ValueError, RuntimeError), "[Pp]adding"),
        ({"padding": ((0, 0),)}, (ValueError, TypeError), "pad"),
        (
            {"dimension_numbers": ("NCHW", "OIHW", "NC")},
            (ValueError, TypeError),
            "numbers",
        ),
        ({"padding": "SAME", "lhs_dilation": (2, 1)}, ValueError, "[Pp]adding"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_geometry_is_refused_in_lax_s_words(
    changes: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        _conv(**changes)


def _broadcast(name: str, shown: str, full: str, op: str = "matmul") -> str:
    return (
        f"{op}: {name} is {shown}, which does not broadcast to {full}. Each of its "
        "axes must be 1 or that size. Reshape it."
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"a": _zeros()},
            ValueError,
            "matmul: a is f32[]. It must have one axis or more. Multiply by a scalar "
            "with `*`, or pass it as scale_a.",
        ),
        (
            {"b": _zeros()},
            ValueError,
            "matmul: b is f32[]. It must have one axis or more. Multiply by a scalar "
            "with `*`, or pass it as scale_b.",
        ),
        (
            {"b": _zeros(4, 7)},
            ValueError,
            "matmul: a is f32[2,3,5] and b f32[4,7]. The last axis of a must be as "
            "long as the last but one of b (the only one, of rank 1). Transpose or "
            "reshape one of them.",
        ),
        (
            {"b": _zeros(3, 5, 7)},
            ValueError,
            "matmul: a is f32[2,3,5] and b f32[3,5,7]. Their batch axes, all but the "
            "last two, must broadcast. Reshape one of them.",
        ),
        (
            {"a": _zeros(2, 3, 5, dtype=jnp.int32)},
            TypeError,
            f"matmul: a is i32[2,3,5]. {_OPERANDS}",
        ),
        (
            {
                "a": _zeros(3, 5, dtype=jnp.int8),
                "b": _zeros(5, 7, dtype=jnp.uint8),
            },
            TypeError,
            "matmul: a is i8[3,5] and b u8[5,7]. Two operands of 8 bits must both be "
            "i8, both u8, or both floats. Convert one of them.",
        ),
        (
            {
                "a": _zeros(3, 5, dtype=jnp.int8),
                "b": _zeros(5, 7, dtype=jnp.float8_e5m2),
            },
            TypeError,
            "matmul: a is i8[3,5] and b f8_e5m2[5,7]. Two operands of 8 bits must both "
            "be i8, both u8, or both floats. Convert one of them.",
        ),
        (
            {"a": _zeros(3, 5, dtype=jnp.bfloat16)},
            TypeError,
            "matmul: a is bf16[3,5] and b f32[5,7]. They must have one dtype, unless "
            "one of them has 8 bits or JAX promotes them (jax_numpy_dtype_promotion is "
            "'strict'). Convert one of them.",
        ),
        (
            {
                "a": _zeros(3, 5, dtype=jnp.int8),
                "b": _zeros(5, 7, dtype=jnp.int8),
            },
            TypeError,
            "matmul: the result of i8[3,5] and i8[5,7] would be i8. Supported are "
            "bf16, f16, f32, f64, i32, f8_e4m3fn, f8_e5m2. 8-bit results would wrap "
            "around: pass preferred_element_type, for example jnp.int32, or "
            "jnp.bfloat16 with a scale.",
        ),
        (
            {"bias": _zeros(3)},
            ValueError,
            _broadcast("bias", "f32[3]", "[2, 3, 7]"),
        ),
        (
            {"residual": _zeros(1, 2, 3, 7)},
            ValueError,
            _broadcast("residual", "f32[1,2,3,7]", "[2, 3, 7]"),
        ),
        (
            {"a": _zeros(5), "b": _zeros(2, 5, 7), "bias": _zeros(2)},
            ValueError,
            _broadcast("bias", "f32[2]", "[2, 7]"),
        ),
        (
            {"scale_a": _zeros(3)},
            ValueError,
            _broadcast("scale_a", "f32[3]", "[2, 3, 5]"),
        ),
        (
            {"scale_b": _zeros(5, 3)},
            ValueError,
            _broadcast("scale_b", "f32[5,3]", "[5, 7]"),
        ),
        (
            {"b": _zeros(5), "scale_b": _zeros(3)},
            ValueError,
            _broadcast("scale_b", "f32[3]", "[5]"),
        ),
        (
            {"scale_out": _zeros(6)},
            ValueError,
            _broadcast("scale_out", "f32[6]", "[2, 3, 7]"),
        ),
        (
            {"scale_a": _zeros(5, dtype=jnp.int32)},
            TypeError,
            f"matmul: scale_a is i32[5]. {_FLOATS}",
        ),
        (
            {"bias": _zeros(7, dtype=jnp.int32)},
            TypeError,
            f"matmul: bias is i32[7]. {_FLOATS}",
        ),
        (
            {"implementation": "cuda"},
            ValueError,
            "matmul: implementation='cuda' is not one of 'auto', 'cudnn', 'xla'.",
        ),
        (
            {"precision": ("highest", "default")},
            ValueError,
            "matmul: precision=('highest', 'default') differs between the operands. "
            "cuDNN has one for both. Pass one.",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_wrong_arguments_of_matmul(
    changes: Any, error: type[Exception], message: str
) -> None:
    _check(_matmul, changes, error, message)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"rhs": _zeros(5, 7, dtype=jnp.int32)},
            TypeError,
            f"dot_general: rhs is i32[5,7]. {_OPERANDS}",
        ),
        (
            {"bias": _zeros(3)},
            ValueError,
            _broadcast("bias", "f32[3]", "[3, 7]", "dot_general"),
        ),
        (
            {
                "lhs": _zeros(3, 5, dtype=jnp.uint8),
                "rhs": _zeros(5, 7, dtype=jnp.int8),
            },
            TypeError,
            "dot_general: lhs is u8[3,5] and rhs i8[5,7]. Two operands of 8 bits must "
            "both be i8, both u8, or both floats. Convert one of them.",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_wrong_arguments_of_dot_general(
    changes: Any, error: type[Exception], message: str
) -> None:
    _check(_dot, changes, error, message)


def test_axes_of_dot_general_are_refused_in_lax_s_words() -> None:
    with pytest.raises(TypeError, match="contracting dimensions"):
        _dot(dimension_numbers=(((1,), (1,)), ((), ())))


@pytest.mark.parametrize(
    ("op", "call"), [("matmul", _matmul), ("conv", _conv), ("dot_general", _dot)]
)
def test_symbolic_dimensions_are_refused(op: str, call: Any) -> None:
    name = {"matmul": "a", "conv": "x", "dot_general": "lhs"}[op]
    rank = {"matmul": "n,3,5", "conv": "n,3,5,4", "dot_general": "n,5"}[op]
    shape = export.symbolic_shape(rank)
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    message = (
        f"{op}: {name} has symbolic dimensions, f32[{rank}]. A cuDNN plan is made for "
        "one shape. Export the function for each shape it is to serve."
    )
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}"):
        export.export(jax.jit(lambda x: call(**{name: x})))(like)


# --- activations ----------------------------------------------------------------------


@jax.custom_jvp
def _straight_through(x: jax.Array) -> jax.Array:
    return jnp.floor(x)


_straight_through.defjvps(lambda g, _, x: g)


@jax.custom_vjp
def _reversed(x: jax.Array) -> jax.Array:
    return jnp.floor(x)


_reversed.defvjp(lambda x: (jnp.floor(x), None), lambda _, g: (-g,))

_OWN_RULE = (
    "matmul: activation uses a function with a derivative rule of its own "
    f"(jax.custom_jvp or jax.custom_vjp). A graph cannot keep the rule. {_INSTEAD}"
)
_CANNOT = (
    "which cuDNN's nodes cannot. They compute in floats and differentiate all that "
    f"they compute. {_INSTEAD}"
)
_NAMES = (
    "'elu', 'gelu', 'gelu_exact', 'leaky_relu', 'relu', 'relu6', 'sigmoid', 'silu', "
    "'softplus', 'swish', 'tanh'"
)


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        (
            "gelu_new",
            ValueError,
            f"matmul: activation='gelu_new' is not one of {_NAMES}. A function of one "
            "array made of pointwise operations works as well.",
        ),
        (
            3,
            TypeError,
            "matmul: activation is int. A name or a function is supported. Pass a name "
            "such as 'relu', or a function of one array.",
        ),
        (
            lambda x: x.sum(),
            ValueError,
            "matmul: activation returns float32[] for float32[1,6,7]. It must return "
            f"one array of floats of the same shape. {_INSTEAD}",
        ),
        (
            lambda x: (x, x),
            ValueError,
            "matmul: activation returns float32[1,6,7], float32[1,6,7] for "
            "float32[1,6,7]. It must return one array of floats of the same shape. "
            f"{_INSTEAD}",
        ),
        (
            lambda x: x > 0,
            ValueError,
            "matmul: activation returns bool[1,6,7] for float32[1,6,7]. It must return "
            f"one array of floats of the same shape. {_INSTEAD}",
        ),
        (
            lambda x: jnp.ones_like(x) * 3,
            ValueError,
            "matmul: activation is 3.0 everywhere. A function that depends on its "
            "argument is supported. Pass None for no activation.",
        ),
        (
            lambda x: x * np.arange(7, dtype=np.float32)[None, None],
            ValueError,
            "matmul: activation uses an array that it does not get as its argument, "
            "float32[1,1,7]. Only numbers that are known when the program is traced "
            "can be part of it. Pass it as scale, bias or residual, or apply the "
            "function to the result.",
        ),
        (
            lambda x: jnp.where(x > 0, x, -jnp.inf),
            ValueError,
            "matmul: activation uses the number -inf. cuDNN takes finite ones. Replace "
            "it, or apply the function to the result instead.",
        ),
        (
            lambda x: x * jax.lax.stop_gradient(x),
            ValueError,
            f"matmul: activation stops the gradient, {_CANNOT}",
        ),
        (
            lambda x: x * x.astype(jnp.int32).astype(x.dtype),
            ValueError,
            f"matmul: activation converts its argument to int32, {_CANNOT}",
        ),
        (_straight_through, ValueError, _OWN_RULE),
        (_reversed, ValueError, _OWN_RULE),
    ],
    ids=[
        *("unknown", "number", "sum", "pair", "bool", "constant", "array"),
        *("infinite", "stop-gradient", "integer", "custom-jvp", "custom-vjp"),
    ],
)
def test_wrong_activations(
    activation: Any, error: type[Exception], message: str
) -> None:
    _check(_matmul, {"activation": activation}, error, message)


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (lambda x: x - x.sum(axis=1, keepdims=True), "reduce_sum"),
        (jax.nn.softmax, "reduce_max"),
        (lambda x: x[:, ::-1], "rev"),
        (lambda x: jnp.where((x > 0) ^ (x < 1), x, 0.0), "xor"),
    ],
)
def test_an_activation_that_is_not_pointwise_is_named(
    activation: Any, name: str
) -> None:
    message = (
        rf"^conv: activation uses '{name}', which is not a pointwise operation that "
        r"graphs have\. They have abs, add, .*, tanh\. Apply the function to the "
        r"result instead\.$"
    )
    with pytest.raises(ValueError, match=message):
        _conv(activation=activation)


def test_a_traced_number_in_an_activation_is_refused() -> None:
    def run(slope: jax.Array) -> jax.Array:
        return _matmul(activation=lambda x: x * slope)

    with pytest.raises(
        ValueError, match=r"does not get as its argument, float32\[\]\."
    ):
        jax.jit(run)(jnp.float32(0.5))


def test_a_message_lists_no_operation_that_is_refused() -> None:
    with pytest.raises(ValueError, match="graphs have") as raised:
        _conv(activation=jax.nn.softmax)
    assert "stop_gradient" not in str(raised.value)


@pytest.mark.parametrize(("name", "call"), [("conv", _conv), ("dot_general", _dot)])
def test_a_sharding_of_the_result_is_refused(name: str, call: Any) -> None:
    assert call(out_sharding=None).size
    with pytest.raises(
        UnsupportedError,
        match=rf"^{name}: out_sharding=P.*'data'.* was passed\. .* jax.shard_map",
    ):
        call(out_sharding=jax.sharding.PartitionSpec("data"))
