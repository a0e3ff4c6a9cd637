# SPDX-License-Identifier: Apache-2.0
"""Tests what norms refuse, and the words in which they do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn

pytestmark = pytest.mark.once

_X = jnp.ones((2, 5, 6))
_C = jnp.ones(6)
_Z = jnp.zeros(6)


def _layer(**options: Any) -> Any:
    return lambda: jax_cudnn.layer_norm(**{"x": _X, **options})


def _group(**options: Any) -> Any:
    return lambda: jax_cudnn.group_norm(**{"x": _X, "groups": 3, **options})


def _batch(**options: Any) -> Any:
    return lambda: jax_cudnn.batch_norm(**{"x": _X, **options})


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            _layer(x=jnp.ones((2, 3), jnp.int32)),
            TypeError,
            r"layer_norm: x is i32\[2,3\]. Supported dtypes are bf16, f16, f32, f64",
        ),
        (_layer(x="x"), TypeError, "layer_norm: x is 'x' .str.. It must be an array"),
        (_layer(x=1.0), ValueError, r"layer_norm: x is f32\[\]. It must have one axis"),
        (
            _layer(scale=jnp.ones(5)),
            ValueError,
            r"layer_norm: scale is f32\[5\]. Its shape must be \[6\], that of the "
            r"normalised axes of f32\[2,5,6\]",
        ),
        (
            _layer(bias=jnp.ones((1, 6))),
            ValueError,
            r"bias is f32\[1,6\]. Its shape must be \[6\]",
        ),
        (
            _layer(scale=jnp.ones(6, bool)),
            TypeError,
            r"layer_norm: scale is bool\[6\]. Supported dtypes",
        ),
        (_layer(axis=3), ValueError, "axis=3, but x has 3 axes. Pass numbers from -3"),
        (
            _layer(axis=True),
            TypeError,
            "axis=True. It must be an int or a sequence of ints",
        ),
        (_layer(axis=(1, -2)), ValueError, r"axis=\(1, -2\) names an axis twice"),
        (
            _layer(axis=()),
            TypeError,
            r"axis=\(\). It must be an int or a sequence of ints",
        ),
        (
            _layer(axis=1.5),
            TypeError,
            "axis=1.5. It must be an int or a sequence of ints",
        ),
        (_layer(epsilon=-1e-6), ValueError, "epsilon=-1e-06. It must be finite, and 0"),
        (_layer(epsilon=float("nan")), ValueError, "epsilon=nan. It must be finite"),
        (_layer(epsilon="small"), TypeError, "epsilon is str. It must be a number"),
        (
            _layer(residual=_X[0]),
            ValueError,
            r"residual is f32\[5,6\] and x f32\[2,5,6\]. They must have one shape",
        ),
        (
            _layer(preferred_element_type=jnp.int8),
            TypeError,
            "preferred_element_type=.* is not one of bf16, f16, f32, f64",
        ),
        (
            _layer(preferred_element_type="nope"),
            TypeError,
            "preferred_element_type='nope' is",
        ),
        (_layer(activation="gelo"), ValueError, "activation='gelo' is not one of"),
        (
            _layer(activation=lambda y: y[0]),
            ValueError,
            "layer_norm: activation returns",
        ),
        (_layer(return_statistics=1), TypeError, "return_statistics is int"),
        (_layer(implementation="gpu"), ValueError, "layer_norm: implementation='gpu'"),
        (_group(groups=4), ValueError, "groups=4 for 6 channels. It must divide them"),
        (_group(groups=0), ValueError, "groups=0 for 6 channels"),
        (_group(groups=2.0), TypeError, "groups is float. It must be an int"),
        (_group(channel_axis=5), ValueError, "channel_axis=5, but x has 3 axes"),
        (_group(channel_axis=True), TypeError, "channel_axis=True. It must be an int,"),
        (_group(channel_axis=(1,)), TypeError, r"channel_axis=\(1,\). It must be an"),
        (
            _group(channel_axis=0),
            ValueError,
            r"channel_axis=0 is among batch_axes=0 of f32\[2,5,6\]",
        ),
        (
            _group(batch_axes=()),
            TypeError,
            r"batch_axes=\(\). It must be an int or a sequence of ints, one or more, "
            r"which name axes of x. Pass for example 0, or \(-2, -1\).",
        ),
        (_group(scale=jnp.ones(3)), ValueError, "one for each channel of f32"),
        (
            lambda: jax_cudnn.adaptive_layer_norm(jnp.ones(4)),
            ValueError,
            r"x is f32\[4\]. It must have two axes or more",
        ),
        (
            lambda: jax_cudnn.adaptive_layer_norm(_X, _C),
            ValueError,
            r"scale is f32\[6\]. Its shape must be \[2, 6\], batch and features of",
        ),
        (_batch(running_mean=_Z), ValueError, "running_mean without running_var"),
        (_batch(running_var=_C), ValueError, "running_var without running_mean"),
        (
            _batch(use_running_average=True),
            ValueError,
            "use_running_average without running_mean and running_var",
        ),
        (_batch(momentum=1.5), ValueError, "momentum=1.5. It is the share of the old"),
        (_batch(momentum="0.9"), TypeError, "momentum is str"),
        (
            _batch(axis_index_groups=[[0, 1]]),
            ValueError,
            "axis_index_groups without axis_name",
        ),
        (_batch(use_running_average=2), TypeError, "use_running_average is int"),
        (
            _batch(
                running_mean=_Z,
                running_var=_C,
                use_running_average=True,
                implementation="cudnn",
            ),
            jax_cudnn.UnsupportedError,
            "use_running_average=True is elementwise work",
        ),
    ],
)
def test_a_wrong_argument_is_refused(
    call: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_epsilon_and_groups_are_not_traced() -> None:
    with pytest.raises(TypeError, match=r"epsilon is .*Tracer. It must be a number"):
        jax.jit(lambda e: jax_cudnn.layer_norm(_X, epsilon=e))(1e-6)
    with pytest.raises(TypeError, match=r"groups is .*Tracer. It must be an int"):
        jax.jit(lambda g: jax_cudnn.group_norm(_X, groups=g))(3)


def test_a_named_axis_is_not_cudnns() -> None:
    def run(x: jax.Array) -> Any:
        return jax_cudnn.batch_norm(x, axis_name="i", implementation="cudnn")

    with pytest.raises(jax_cudnn.UnsupportedError, match="summed between two kernels"):
        jax.vmap(run, axis_name="i")(_X)


def test_f64_is_not_cudnns() -> None:
    """On a GPU; what is compiled for it says so."""
    with jax.enable_x64(True):
        x = jnp.ones((2, 6), jnp.float64)
        run = jax.jit(lambda x: jax_cudnn.rms_norm(x, implementation="cudnn"))
        with pytest.raises(jax_cudnn.UnsupportedError, match="norms take bf16, f16"):
            run.trace(x).lower(lowering_platforms=("cuda",))
