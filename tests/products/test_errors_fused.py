# SPDX-License-Identifier: Apache-2.0
"""Tests the messages for wrong arguments of conv and matmul."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jax_cudnn import UnsupportedError, avg_pool, conv, dot_general, matmul, max_pool
from tests.common import drawn

_FLOATS = "Supported dtypes are bf16, f16, f32, f64. Convert it to one of them."
_INSTEAD = "Apply the function to the result instead."


def _zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.zeros(shape, dtype))


def _matmul(**changes: Any) -> Any:
    return matmul(**{"a": _zeros(2, 3, 5), "b": _zeros(5, 7), **changes})


def _conv(**changes: Any) -> Any:
    return conv(**{"lhs": _zeros(2, 3, 5, 4), "rhs": _zeros(7, 3, 2, 3), **changes})


def _dot(**changes: Any) -> Any:
    operands = {"lhs": _zeros(3, 5), "rhs": _zeros(5, 7)}
    numbers = (((1,), (0,)), ((), ()))
    return dot_general(**{**operands, "dimension_numbers": numbers, **changes})


def _check(call: Any, changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(**changes)


_PRECISION = (
    "is not one that JAX has. Pass None, one of 'default', 'fastest', 'bfloat16', "
    "'high', 'bfloat16_3x', 'tensorfloat32', 'highest', 'float32', a "
    "jax.lax.Precision, a pair of these, or a jax.lax.DotAlgorithmPreset, its name, or "
    "a jax.lax.DotAlgorithm."
)
_SHAPES = (
    "Its shape must be [] or [7], one for each out channel, or broadcast to the "
    "result's shape, [2, 7, 4, 2]. Reshape it."
)
_RANK = (
    "It must have two axes that are not spatial: of images and channels, or of out "
    "channels and channels. Reshape it."
)


@pytest.mark.parametrize("name", ["window_strides", "lhs_dilation", "rhs_dilation"])
@pytest.mark.parametrize(
    "value", [(1,), (2, 1, 1), (0, 1), (1.5, 1), 2, ("2", 1), "ab"]
)
def test_steps_are_ints_above_0_for_each_spatial_axis(name: str, value: Any) -> None:
    example = (2, 2) if value == 2 else (1, 1)
    message = (
        f"conv: {name}={value!r} is not 2 ints above 0, one for each spatial axis of "
        f"lhs. Pass for example {example}."
    )
    _check(_conv, {name: value}, ValueError, message)


@pytest.mark.parametrize(
    ("padding", "example"),
    [
        *(
            (1, ((1, 1), (1, 1))),
            ((2, 1), ((2, 2), (1, 1))),
            ([0, 3], ((0, 0), (3, 3))),
        ),
        *((x, ((1, 1), (1, 1))) for x in (None, 1.5, ((0, 0),), (1,), True, ("a", 2))),
    ],
)
def test_a_padding_of_ints_is_told_its_pairs_by_convolution_and_pooling(
    padding: Any, example: Any
) -> None:
    told = (
        f"padding={padding!r} is not a (low, high) pair of ints for each of the 2 "
        f"spatial axes. Pass for example {example}."
    )
    _check(_conv, {"padding": padding}, ValueError, f"conv: {told}")
    image = _zeros(2, 9, 7, 3)
    for pool in (max_pool, avg_pool):
        window = functools.partial(pool, image, (2, 2))
        _check(window, {"padding": padding}, ValueError, f"{pool.__name__}: {told}")
        assert window(padding=example).ndim == 4  # type: ignore[arg-type]
    _conv(padding=example)


@pytest.mark.parametrize(
    ("numbers", "layouts"),
    [
        (("NHWC",), ("NHWC", "HWIO", "NHWC")),
        (("NCHW", "OIHW"), ("NCHW", "OIHW", "NCHW")),
        *((x, ("NHWC", "HWIO", "NHWC")) for x in ("channels_last", "HWIO", "")),
        *((x, ("NHWC", "HWIO", "NHWC")) for x in ("NHHC", "NIWC", "HWNC", "CHWN")),
        ("NC", ("NC", "IO", "NC")),
    ],
)
def test_what_is_no_layout_is_told_those_of_three(
    numbers: Any, layouts: tuple[str, ...]
) -> None:
    told = (
        f"conv: dimension_numbers={numbers!r} is neither a layout for each of lhs, rhs "
        "and the result, nor one of images with N first and C second or last. "
        f"Pass for example {layouts}."
    )
    _check(_conv, {"dimension_numbers": numbers}, TypeError, told)
    # The advice helps.
    sizes = {"N": 2, "C": 4, "I": 4, "O": 3, "W": 5, "H": 6, "D": 7}
    lhs, rhs = (_zeros(*map(sizes.__getitem__, layout)) for layout in layouts[:2])
    assert conv(lhs, rhs, dimension_numbers=layouts).ndim == len(layouts[0])


@pytest.mark.parametrize(
    "layouts",
    [
        ("NHWC", "HWIO", "NHWC"),
        ("NCHW", "OIHW", "NCHW"),
        ("NWC", "WIO", "NWC"),
        ("NCDHW", "OIDHW", "NCDHW"),
        ("NXYC", "XYIO", "NXYC"),
    ],
)
def test_the_layout_of_images_says_those_of_filters(layouts: tuple[str, ...]) -> None:
    sizes = {"N": 2, "C": 4, "I": 4, "O": 3, "W": 5, "H": 6, "D": 7, "X": 5, "Y": 4}
    lhs, rhs = (
        drawn.normal(i, [sizes[letter] for letter in layout])
        for i, layout in enumerate(layouts[:2])
    )
    long = conv(lhs, rhs, dimension_numbers=layouts, padding="SAME")
    short = conv(lhs, rhs, dimension_numbers=layouts[0], padding="SAME")
    np.testing.assert_array_equal(short, long)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rhs": _zeros(7, 4, 2, 3)},
            "f32[7,4,2,3]: lhs has 3 channels, on axis 1, and rhs is for 4, on axis 1. "
            "lhs must have 4 channels. Transpose one of them, or pass other filters.",
        ),
        (
            {"rhs": _zeros(9, 2, 2, 3), "feature_group_count": 3},
            "f32[9,2,2,3]: lhs has 3 channels, on axis 1, and rhs is for 2, on axis 1 "
            "in each group (feature_group_count=3). lhs must have 6 channels. "
            "Transpose one of them, or pass other filters.",
        ),
        (
            {"rhs": _zeros(2, 3, 3, 7), "dimension_numbers": "NHWC"},
            "f32[2,3,3,7]: lhs has 4 channels, on axis 3, and rhs is for 3, on axis 2. "
            "lhs must have 3 channels. Transpose one of them, or pass other filters.",
        ),
        (
            {"rhs": _zeros(3, 2, 4, 7)},
            "f32[3,2,4,7]: lhs has 3 channels, on axis 1, and rhs is for 2, on axis 1. "
            "lhs must have 2 channels. The default layout has channels first. For "
            "channels last, as these operands seem to have them, pass "
            "dimension_numbers='NHWC'.",
        ),
    ],
)
def test_channels_that_do_not_fit_are_counted_with_their_axes(
    changes: Any, message: str
) -> None:
    told = f"conv: lhs is f32[2,3,5,4] and rhs {message}"
    _check(_conv, changes, ValueError, told)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *(
            ({name: value}, (TypeError, ValueError), name)
            for name in ("feature_group_count", "batch_group_count")
            for value in (0, 2, 3.5, "2")
        ),
        ({"dimension_numbers": "NDHWC"}, (TypeError, ValueError), "dimension_numbers"),
        ({"padding": ((1, 1),) * 3}, ValueError, "pad"),
        ({"padding": "FULL"}, (ValueError, RuntimeError), "[Pp]adding"),
        (
            {"dimension_numbers": ("NCHW", "OIHW", "NC")},
            (ValueError, TypeError),
            "numbers",
        ),
        ({"padding": "SAME", "lhs_dilation": (2, 1)}, ValueError, "[Pp]adding"),
        ({"window_strides": (2**63, 1)}, ValueError, "too large"),
        ({"padding": "SAME", "rhs_dilation": (2**63, 1)}, ValueError, "too large"),
        ({"preferred_element_type": jnp.complex64}, TypeError, "preferred_element"),
        ({"preferred_element_type": jnp.int32}, TypeError, "preferred_element_type"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_geometry_and_results_are_refused_in_lax_s_words(
    changes: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=f"^conv: .*{message}"):
        _conv(**changes)


_DTYPES = (
    "They must have one dtype, unless one of them has 8 bits or JAX promotes them "
    "(jax_numpy_dtype_promotion is 'strict'). Convert one of them."
)


def _broadcast(name: str, shown: str, full: str, op: str = "matmul") -> str:
    return (
        f"{op}: {name} is {shown}, which does not broadcast to {full}. Each of its "
        "axes must be 1 or that size. Reshape it."
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lhs": _zeros(3)}, ValueError, f"conv: lhs is f32[3], of rank 1. {_RANK}"),
        ({"rhs": _zeros()}, ValueError, f"conv: rhs is f32[], of rank 0. {_RANK}"),
        (
            {"rhs": _zeros(1, 1, 1, 1, 1, 1)},
            ValueError,
            "conv: rhs is f32[1,1,1,1,1,1], of rank 6, but lhs is f32[2,3,5,4], of "
            "rank 4. Both must have as many axes. Reshape one of them.",
        ),
        (
            {"rhs": _zeros(7, 3, 2, 3, dtype=jnp.bfloat16)},
            TypeError,
            "conv: rhs is bf16[7,3,2,3] but lhs is f32[2,3,5,4]. Both must have one "
            "dtype. Convert one of them.",
        ),
        ({"bias": _zeros(5)}, ValueError, f"conv: bias is f32[5]. {_SHAPES}"),
        ({"bias": _zeros(4, 2)[0]}, ValueError, f"conv: bias is f32[2]. {_SHAPES}"),
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
            {"precision": ("highest", "HIGH")},
            ValueError,
            f"conv: precision=('highest', 'HIGH') {_PRECISION}",
        ),
        (
            {"implementation": "cuda"},
            ValueError,
            "conv: implementation='cuda' is not one of 'auto', 'cudnn', 'xla'.",
        ),
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
            f"matmul: a is i32[2,3,5] and b f32[5,7]. {_DTYPES}",
        ),
        (
            {"a": _zeros(3, 5, dtype=jnp.int8), "b": _zeros(5, 7, dtype=jnp.uint8)},
            TypeError,
            f"matmul: a is i8[3,5] and b u8[5,7]. {_DTYPES}",
        ),
        (
            {"a": _zeros(3, 5, dtype=jnp.bfloat16)},
            TypeError,
            f"matmul: a is bf16[3,5] and b f32[5,7]. {_DTYPES}",
        ),
        ({"bias": _zeros(3)}, ValueError, _broadcast("bias", "f32[3]", "[2, 3, 7]")),
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
        ({"precision": ()}, ValueError, f"matmul: precision=() {_PRECISION}"),
        (
            {"bias": _zeros(3)},
            ValueError,
            _broadcast("bias", "f32[3]", "[3, 7]", "dot_general"),
        ),
        ({"precision": 3}, ValueError, f"dot_general: precision=3 {_PRECISION}"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_wrong_arguments(changes: Any, error: type[Exception], message: str) -> None:
    call = {"conv": _conv, "matmul": _matmul, "dot_general": _dot}
    _check(call[message.partition(":")[0]], changes, error, message)


def test_axes_of_dot_general_are_refused_in_lax_s_words() -> None:
    with pytest.raises(TypeError, match="contracting dimensions"):
        _dot(dimension_numbers=(((1,), (1,)), ((), ())))


@pytest.mark.parametrize(
    ("op", "call"), [("matmul", _matmul), ("conv", _conv), ("dot_general", _dot)]
)
def test_symbolic_dimensions_are_refused_to_cudnn(op: str, call: Any) -> None:
    name = {"matmul": "a", "conv": "lhs", "dot_general": "lhs"}[op]
    rank = {"matmul": "n,3,5", "conv": "n,3,5,4", "dot_general": "n,5"}[op]
    shape = export.symbolic_shape(rank)
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    message = (
        f"{op}: {name} has symbolic dimensions, f32[{rank}]. A cuDNN plan is made for "
        'one shape. Pass implementation="auto" or "xla" to run XLA\'s code.'
    )
    run = jax.jit(lambda x: call(**{name: x}, implementation="cudnn"))
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}"):
        export.export(run)(like)


# --- activations ----------------------------------------------------------------------


_NAMES = (
    "'elu', 'gelu', 'gelu_erf', 'gelu_exact', 'gelu_tanh', 'leaky_relu', 'relu', "
    "'relu6', 'sigmoid', 'silu', "
    "'softplus', 'swish', 'tanh'"
)


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        (
            "gelu_new",
            ValueError,
            f"matmul: activation='gelu_new' is not one of {_NAMES}. A function of one "
            "array that returns one of the same shape works as well.",
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
            "matmul: activation returns f32[] for f32[2,3,7]. It must return "
            f"one array of floats of the same shape. {_INSTEAD}",
        ),
        (
            lambda x: (x, x),
            ValueError,
            "matmul: activation returns tuple (f32[2,3,7], f32[2,3,7]) for "
            "f32[2,3,7]. It must return one array of floats of the same shape. "
            f"{_INSTEAD}",
        ),
        (
            lambda x: x > 0,
            ValueError,
            "matmul: activation returns bool[2,3,7] for f32[2,3,7]. It must return "
            f"one array of floats of the same shape. {_INSTEAD}",
        ),
    ],
    ids=["unknown", "number", "sum", "pair", "bool"],
)
def test_wrong_activations(
    activation: Any, error: type[Exception], message: str
) -> None:
    _check(_matmul, {"activation": activation}, error, message)


def test_a_wrong_activation_that_cannot_be_traced_is_told_so_as_well() -> None:
    def peeks(x: jax.Array) -> jax.Array:
        return x.sum() if float(x[0, 0, 0]) >= 0 else x

    _check(
        _matmul,
        {"activation": peeks},
        ValueError,
        "matmul: activation returns f32[] for f32[2,3,7]. It must return one array of "
        f"floats of the same shape. {_INSTEAD}",
    )
