# SPDX-License-Identifier: Apache-2.0
"""`CausalConv1D` of nnx and linen against Flax's `Conv` with the same parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx

from jax_cudnn.flax import linen as our_linen
from jax_cudnn.flax import nnx as our_nnx
from tests.common import drawn

pytestmark = pytest.mark.once

_B, _S, _C, _K = 2, 9, 6, 4
_X = drawn.normal(0, (_B, _S, _C))
_BIAS: dict[str, Any] = {"bias_init": linen.initializers.normal(1.0)}
_CAUSAL: dict[str, Any] = {"padding": "CAUSAL", "feature_group_count": _C}


def _close(got: Any, want: Any) -> None:
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, want
    )


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_linens_layer_is_flaxs(use_bias: bool, activation: Any) -> None:
    ours = our_linen.CausalConv1D(_K, activation=activation, use_bias=use_bias, **_BIAS)
    theirs = linen.Conv(_C, (_K,), use_bias=use_bias, **_CAUSAL, **_BIAS)
    key = jax.random.key(1)
    parameters = ours.init(key, _X)
    _close(parameters, theirs.init(key, _X))

    def output_of(layer: Any, follows: Any) -> Any:
        def loss(parameters: Any, x: jax.Array) -> Any:
            output = follows(layer.apply(parameters, x))
            return jnp.sum(jnp.sin(output)), output

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters, _X)

    with jax.numpy_rank_promotion("allow"):
        want = output_of(theirs, jax.nn.silu if activation else lambda x: x)
    _close(output_of(ours, lambda x: x), want)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_nnxs_layer_is_flaxs(dtype: Any) -> None:
    ours = our_nnx.CausalConv1D(_C, _K, dtype=dtype, rngs=nnx.Rngs(3), **_BIAS)
    theirs = nnx.Conv(_C, _C, (_K,), rngs=nnx.Rngs(3), **_CAUSAL, **_BIAS)
    _close(
        nnx.to_pure_dict(nnx.state(ours, nnx.Param)),
        nnx.to_pure_dict(nnx.state(theirs, nnx.Param)),
    )
    with jax.numpy_rank_promotion("allow"):
        want = jax.nn.silu(theirs(_X))
    got = ours(_X)
    assert got.dtype == (dtype or jnp.float32)
    tolerance = 2e-5 if dtype is None else 4e-2
    np.testing.assert_allclose(
        got.astype(jnp.float32), want, rtol=tolerance, atol=tolerance
    )


def test_layers_pass_states_and_segments_on() -> None:
    layer = our_nnx.CausalConv1D(_C, _K, rngs=nnx.Rngs(3), **_BIAS)
    whole, end = layer(_X, return_state=True)
    first, state = layer(_X[:, :5], return_state=True)
    rest, last = layer(_X[:, 5:], initial_state=state, return_state=True)
    _close(jnp.concatenate([first, rest], 1), whole)
    np.testing.assert_array_equal(last, end)
    ids = jnp.array([[0] * 5 + [1] * 4] * _B, jnp.int32)
    _close(layer(_X, segment_ids=ids)[:, 5:], layer(_X[:, 5:]))
    other = our_linen.CausalConv1D(_K)
    parameters = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
    given = {"initial_state": state, "return_state": True}
    _close(other.apply(parameters, _X[:, 5:], **given), (rest, last))


def test_what_layers_refuse() -> None:
    layer = our_nnx.CausalConv1D(_C, _K, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^CausalConv1D: inputs is f32\[2,9,5\] and "):
        layer(_X[..., :5])
    with pytest.raises(ValueError, match="implementation"):
        our_nnx.CausalConv1D(_C, _K, implementation="gpu", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
