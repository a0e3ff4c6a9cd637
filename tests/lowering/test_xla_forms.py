# SPDX-License-Identifier: Apache-2.0
"""Tests that the code for XLA has the forms that XLA for a GPU recognises.

benchmarks/xla/xla_code.py counts what becomes of them on a GPU. These tests look at the
programs that XLA is given, which are the same on a machine without one.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import plans

pytestmark = pytest.mark.once

_NCHW = ("NCHW", "OIHW", "NCHW")


def _program(function: Callable[..., Any], *operands: Any) -> str:
    """Return the program that XLA is given on a GPU, for XLA's implementation."""
    with plans.using(implementation="xla"):
        traced = jax.jit(function).trace(*operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _convolutions(text: str) -> list[str]:
    """Return all that is said of convolutions, but for the names of their operands.

    An operand that was flipped says so.
    """
    flipped = set(re.findall(r"(%\w+) = stablehlo\.reverse", text))
    found = re.findall(r"stablehlo\.convolution\((%\w+), (%\w+)\) (.*)", text)
    return sorted(f"{'rev ' * (w in flipped)}{rest}" for _, w, rest in found)


@pytest.mark.parametrize(
    ("channels", "out", "options"),
    [
        (3, 8, {"window_strides": (1, 1), "padding": "SAME"}),
        (3, 8, {"window_strides": (2, 2), "padding": ((1, 2), (0, 1))}),
        (4, 6, {"window_strides": (2, 2), "padding": "SAME", "feature_group_count": 2}),
        (4, 8, {"window_strides": (1, 2), "padding": "SAME", "feature_group_count": 4}),
    ],
    ids=["plain", "strides", "groups", "depthwise"],
)
def test_gradients_of_convolutions_are_jax_s(
    channels: int, out: int, options: dict[str, Any]
) -> None:
    """Others are better than JAX's: tests/products/convs/test_conv_forms.py."""
    x = jnp.ones((2, channels, 9, 11))
    w = jnp.ones((out, channels // options.get("feature_group_count", 1), 3, 2))

    def gradients(conv: Callable[..., jax.Array]) -> Callable[..., Any]:
        def run(x: jax.Array, w: jax.Array) -> Any:
            y, pull = jax.vjp(conv, x, w)
            return pull(y)

        return run

    ours = _program(
        gradients(
            lambda x, w: jax_cudnn.conv(x, w, dimension_numbers=_NCHW, **options)
        ),
        x,
        w,
    )
    plain = _program(
        gradients(
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, dimension_numbers=_NCHW, **options
            )
        ),
        x,
        w,
    )
    assert _convolutions(ours) == _convolutions(plain)
    assert len(_convolutions(ours)) == 3
    assert ours.count("stablehlo.transpose") == plain.count("stablehlo.transpose")


def test_a_gradient_is_written_in_the_layout_of_its_array() -> None:
    """XLA adds another array to it in its kernel if no transpose is in between."""
    layout = ("NHWC", "HWIO", "NHWC")
    x, w = jnp.ones((2, 5, 7, 8)), jnp.ones((1, 1, 8, 4))

    def gradient(conv: Callable[..., jax.Array]) -> str:
        def run(x: jax.Array, y: jax.Array) -> Any:
            call = functools.partial(
                conv, window_strides=(1, 1), padding="VALID", dimension_numbers=layout
            )
            return jax.vjp(lambda x: call(x, w), x)[1](y)[0] + x

        (found,) = _convolutions(_program(run, x, x[..., :4]))
        return re.findall(r"->(\[.*?\])", found)[0]

    assert gradient(jax_cudnn.conv) == gradient(jax.lax.conv_general_dilated)


@pytest.mark.parametrize("heads", [4, 2], ids=["as many heads", "grouped heads"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_between_the_maximum_and_the_softmax_is_no_condition(
    heads: int, is_causal: bool
) -> None:
    """A `select` of what a row has would end XLA's kernel of the row."""
    q, k = jnp.ones((2, 8, 4, 16), jnp.bfloat16), jnp.ones((2, 8, heads, 16))
    k = k.astype(jnp.bfloat16)
    text = _program(lambda q, k: jax_cudnn.sdpa(q, k, k, is_causal=is_causal), q, k)
    # From the reduction on, until the weights are divided by their sum.
    _, found, after = text.partition("stablehlo.reduce")
    assert found
    softmax, found, _ = after.partition("stablehlo.divide")
    assert found
    assert softmax.count("stablehlo.exponential") == 1
    assert "stablehlo.select" not in softmax
    assert ("optimization_barrier" in text) == (heads == 2)


def test_running_values_make_the_host_wait_for_nothing() -> None:
    """The variance is what the norm computes, not one by a condition."""
    x, v = jnp.ones((8, 16, 16, 4), jnp.bfloat16), jnp.ones(4)

    def run(x: jax.Array, *values: jax.Array) -> Any:
        scale, bias, mean, var = values
        y, pull, stats = jax.vjp(
            lambda x: _split(
                jax_cudnn.batch_norm(x, scale, bias, running_mean=mean, running_var=var)
            ),
            x,
            has_aux=True,
        )
        return y, pull(y), stats

    text = _program(run, x, v, v, v, v)
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text
    assert "stablehlo.while" not in text


def _split(results: Any) -> Any:
    y, *stats = results
    return y, stats
