# SPDX-License-Identifier: Apache-2.0
"""Results are weakly typed where those of JAX's and Flax's own functions are."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jax_cudnn

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_Function = Callable[..., Any]
_NUMBERS = ("NHWC", "HWIO", "NHWC")
_ROWS = (((1,), (0,)), ((), ()))
_ACTIVATIONS: dict[Any, _Function] = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
}


def _layer(layer: nn.Module, *names: str) -> _Function:
    """Return a layer of Flax as a function of its input and its parameters."""

    def call(x: jax.Array, *values: jax.Array) -> Any:
        variables = {"params": dict(zip(names, values, strict=True))}
        return layer.apply(variables, x, mutable=["batch_stats"])[0]

    return call


def _batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return jax_cudnn.batch_norm(x, scale, bias)[0]


def _conv(function: _Function, **options: Any) -> _Function:
    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        return function(x, w, (1, 1), "SAME", dimension_numbers=_NUMBERS, **options)

    return call


def _gated(x: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(x) * x


def _twice(x: jax.Array, w: jax.Array, *rest: Any, **more: Any) -> jax.Array:
    return jax_cudnn.gated_conv(x, w, w, *rest, **more)


def _ragged(function: _Function) -> _Function:
    return lambda x, w: function(x, w, jnp.array([1, 3]))


def _cases() -> dict[str, tuple[_Function, _Function, list[tuple[int, ...]]]]:
    """Return ours, the other function, and the shapes of the operands."""
    c = jax_cudnn
    matrices, image = [(4, 3), (3, 2)], (1, 3, 3, 1)
    images = [(1, 4, 4, 2), (2, 2, 2, 3)]
    wide: dict[str, Any] = {"preferred_element_type": jnp.float32}
    norms = [(2, 4, 8), (8,), (8,)]
    found = {
        "matmul": (c.matmul, jnp.matmul, matrices),
        "matmul of a dtype": (
            functools.partial(c.matmul, **wide),
            functools.partial(jnp.matmul, **wide),
            matrices,
        ),
        "matmul and bias": (
            lambda a, b, bias: c.matmul(a, b, bias=bias),
            lambda a, b, bias: a @ b + bias[None],
            [*matrices, (2,)],
        ),
        "matmul of numbers": (
            lambda a, b: c.matmul(a, b, bias=1.0, scale_out=2.0),
            lambda a, b: (a @ b + 1.0) * 2.0,
            matrices,
        ),
        "dot_general": (
            lambda a, b: c.dot_general(a, b, _ROWS),
            lambda a, b: jax.lax.dot_general(a, b, _ROWS),
            matrices,
        ),
        "conv": (_conv(c.conv), _conv(jax.lax.conv_general_dilated), images),
        "conv and gelu": (
            _conv(c.conv, activation="gelu"),
            lambda x, w: jax.nn.gelu(_conv(jax.lax.conv_general_dilated)(x, w)),
            images,
        ),
        "gated_conv": (
            _conv(_twice),
            lambda x, w: _gated(_conv(jax.lax.conv_general_dilated)(x, w)),
            images,
        ),
        "gated_matmul": (
            c.gated_matmul,
            lambda a, gate, up: jax.nn.silu(a @ gate) * (a @ up),
            [*matrices, (3, 2)],
        ),
        "ragged_dot": (
            _ragged(c.ragged_dot),
            _ragged(jax.lax.ragged_dot),
            [(4, 3), (2, 3, 2)],
        ),
        "fuse": (
            c.fuse(lambda a, b: jax.nn.gelu(a @ b)),
            lambda a, b: jax.nn.gelu(a @ b),
            matrices,
        ),
        "sdpa": (c.sdpa, jax.nn.dot_product_attention, [(1, 4, 2, 8)] * 3),
        "layer_norm": (
            c.layer_norm,
            _layer(nn.LayerNorm(), "scale", "bias"),
            norms,
        ),
        "rms_norm": (c.rms_norm, _layer(nn.RMSNorm(), "scale"), norms[:2]),
        "group_norm": (
            functools.partial(c.group_norm, groups=2),
            _layer(nn.GroupNorm(2), "scale", "bias"),
            norms,
        ),
        "instance_norm": (
            c.instance_norm,
            _layer(nn.InstanceNorm(), "scale", "bias"),
            norms,
        ),
        "batch_norm": (
            _batch_norm,
            _layer(nn.BatchNorm(use_running_average=False), "scale", "bias"),
            norms,
        ),
    }
    for name, function in _ACTIVATIONS.items():
        found[f"matmul and {name}"] = (
            functools.partial(c.matmul, activation=name),
            lambda a, b, f=function: f(a @ b),
            matrices,
        )
    for pool in ("avg_pool", "max_pool"):
        options = [{"padding": "SAME"}, {"strides": (2, 2)}]
        if pool == "avg_pool":
            counts = ({"padding": p} for p in ("SAME", "VALID"))
            options += [{"count_include_pad": False, **each} for each in counts]
        for each in options:
            ours, theirs = (
                functools.partial(getattr(module, pool), window_shape=(2, 2), **each)
                for module in (c, nn)
            )
            found[f"{pool} {each}"] = (ours, theirs, [image])
    return found


_INTEGERS = [
    *("matmul", "dot_general"),
    *(name for name in _cases() if "pool" in name),
]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, jnp.float32) for name in _cases()),
        *((name, jnp.int32) for name in _INTEGERS),
    ],
)
def test_results_are_as_weakly_typed(name: str, dtype: Any) -> None:
    """For all ways in which some operands are weakly typed, and others not."""
    ours, theirs, shapes = _cases()[name]
    for kinds in itertools.product((True, False), repeat=len(shapes)):
        operands = [
            jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak)
            for shape, is_weak in zip(shapes, kinds, strict=True)
        ]
        with jax.numpy_dtype_promotion("standard"):
            found, want = (jax.eval_shape(f, *operands) for f in (ours, theirs))
        assert (found.dtype, found.weak_type) == (want.dtype, want.weak_type), kinds
