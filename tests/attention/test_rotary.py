# SPDX-License-Identifier: Apache-2.0
"""Tests that `jax_cudnn.apply_rotary` turns pairs of features like complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn.ops.attention.rotary import Rotary
from tests.common import drawn

pytestmark = pytest.mark.once

# b batch, s length, h heads, d head size.
B, S, H, D = 3, 7, 5, 12


def draw(*shape, dtype=jnp.float32):
    return drawn.normal(len(shape), shape, dtype)


def turned(x, positions, *, base=10_000.0, fraction=1.0, interleaved=False, omega=None):
    """The formula, in NumPy's complex numbers."""
    x = np.asarray(x, np.float64)
    r = int(x.shape[-1] * fraction)
    if omega is None:
        omega = np.array([base ** (-2 * i / r) for i in range(r // 2)])
    pairs = [
        (2 * i, 2 * i + 1) if interleaved else (i, i + r // 2) for i in range(r // 2)
    ]
    first, second = (np.array(column) for column in zip(*pairs, strict=True))
    angles = np.asarray(positions, np.float64)[..., None, None] * np.asarray(omega)
    number = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    out = x.copy()
    out[..., first], out[..., second] = number.real, number.imag
    return out


POSITIONS = {
    "one row": np.arange(S),
    "of each entry": np.array([[0], [11], [4]]) + np.arange(S),
    "floats": np.arange(S) / 4.0,
    "out of order": np.array([[5, 0, 3, 3, 90, 1, 2]]),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("base", "fraction"), [(10_000.0, 1.0), (500.0, 0.5), (7, 0.4)]
)
def test_it_equals_the_formula(positions, interleaved, base, fraction):
    x = draw(B, S, H, D)
    options = {"base": base, "fraction": fraction, "interleaved": interleaved}
    given = jnp.asarray(positions, jnp.float32 if positions.dtype.kind == "f" else None)
    got = jax_cudnn.apply_rotary(x, given, **options)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got, turned(x, positions, **options), atol=2e-5)
    np.testing.assert_array_equal(Rotary(**options)(x, given), got)


def test_f64_angles_are_f64(x64):
    x = draw(S, H, D, dtype=jnp.float64)
    positions = 100_000 + np.arange(S)
    got = jax_cudnn.apply_rotary(x, jnp.asarray(positions))
    np.testing.assert_allclose(got, turned(x, positions), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_rounded_once(dtype):
    x = draw(B, S, H, D, dtype=dtype)
    got = jax_cudnn.apply_rotary(x, jnp.arange(S, dtype=jnp.int16))
    truth = jnp.asarray(turned(x.astype(jnp.float32), np.arange(S)), jnp.float32)
    assert got.dtype == dtype
    # f32 sums that lie between two numbers may be rounded to the other one.
    assert np.mean(np.asarray(got == truth.astype(dtype))) > 0.99
    np.testing.assert_allclose(
        got.astype(jnp.float32), truth, atol=float(jnp.finfo(dtype).eps) * 4
    )


def test_frequencies_may_be_given():
    x, omega = draw(S, H, D), [1.0, 0.3, 0.05]
    positions = jnp.arange(S)
    got = jax_cudnn.apply_rotary(x, positions, fraction=0.5, frequencies=omega)
    expected = turned(x, np.arange(S), fraction=0.5, omega=omega)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    rotary = Rotary(fraction=0.5, frequencies=omega)
    np.testing.assert_array_equal(rotary(x, positions), got)
    assert hash(rotary) == hash(Rotary(fraction=0.5, frequencies=np.array(omega)))


def test_products_depend_on_distances_only():
    q, k = draw(S, H, D), draw(B, S, H, D)[1]

    def scores(first):
        positions = first + jnp.arange(S)
        turn = [jax_cudnn.apply_rotary(x, positions) for x in (q, k)]
        return jnp.einsum("shd,thd->hst", *turn)

    np.testing.assert_allclose(scores(0), scores(40), atol=2e-4)


def test_the_conventions_differ_by_the_order_of_features():
    x = draw(B, S, H, D)
    order = np.concatenate([np.arange(0, D, 2), np.arange(1, D, 2)])
    positions = jnp.arange(S)
    halves = jax_cudnn.apply_rotary(x[..., order], positions)
    pairs = jax_cudnn.apply_rotary(x, positions, interleaved=True)
    np.testing.assert_allclose(halves, pairs[..., order], atol=1e-6)
    assert float(jnp.abs(jax_cudnn.apply_rotary(x, positions) - pairs).max()) > 0.1


def test_flaxs_rope_is_the_default():
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    if not hasattr(nnx, "RoPE"):
        pytest.skip("this Flax has no nnx.RoPE")
    x = draw(B, S, H, D)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        flax = jax.vmap(nnx.RoPE(theta=300.0), in_axes=-2, out_axes=-2)(x)
    ours = jax_cudnn.apply_rotary(x, jnp.arange(S), base=300.0)
    np.testing.assert_allclose(ours, flax, atol=1e-5)


def test_transformations():
    x, positions = draw(B, S, H, D), jnp.arange(B * S).reshape(B, S)
    whole = jax_cudnn.apply_rotary(x, positions, fraction=0.5)
    turn = jax.jit(lambda x, p: jax_cudnn.apply_rotary(x, p, fraction=0.5))
    np.testing.assert_allclose(jax.vmap(turn)(x, positions), whole, atol=1e-6)
    own = jax.vmap(turn, in_axes=(None, 0))(x[0], positions)
    np.testing.assert_allclose(own[0], whole[0], atol=1e-6)
    check_grads(lambda x: turn(x, positions), (x,), order=2, modes=["fwd", "rev"])
    # A rotation keeps lengths, so its transpose is its inverse.
    back = jax.vjp(lambda x: turn(x, positions), x)[1](whole)[0]
    np.testing.assert_allclose(back, x, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 4, 6), (2, 0, 4, 6), (2, 5, 0, 6)])
def test_empty_axes(shape):
    assert jax_cudnn.apply_rotary(jnp.ones(shape), jnp.arange(shape[1])).shape == shape


X = jnp.ones((B, S, H, D))
P = jnp.arange(S)
REFUSED = {
    "one head": (
        (X[0, :, 0], P, {}),
        ValueError,
        "apply_rotary: x is f32[7,12]. It must be (batch axes, length, heads, head "
        "size). For a single head insert its axis: x[:, None, :].",
    ),
    "integers": (
        (X.astype(jnp.int32), P, {}),
        TypeError,
        "apply_rotary: x is i32[3,7,5,12]. Supported dtypes are bf16, f16, f32, f64",
    ),
    "length": (
        (X, jnp.arange(8), {}),
        ValueError,
        "apply_rotary: positions is i32[8], which does not broadcast to (batch axes, "
        "length) = [3, 7]. Each of its axes must be 1 or the full size. Insert, expand "
        "or slice axes.",
    ),
    "one position": ((X, jnp.int32(3), {}), ValueError, "positions is i32[], which"),
    "too many axes": ((X[0], jnp.ones((2, S)), {}), ValueError, "f32[2,7], which"),
    "bools": (
        (X, P > 3, {}),
        TypeError,
        "apply_rotary: positions is bool[7]. They must be integers or floats. Convert "
        "them to int32.",
    ),
    "odd": (
        (X, P, {"fraction": 0.3}),
        ValueError,
        "apply_rotary: 3 of 12 features are to be rotated (fraction=0.3). They are "
        "rotated in pairs, so their number must be even and not 0. Change the head "
        "size or the fraction.",
    ),
    "none": ((X, P, {"fraction": 0.01}), ValueError, "0 of 12 features are to be"),
    "fraction": (
        (X, P, {"fraction": 1.5}),
        ValueError,
        "apply_rotary: fraction=1.5. It must be above 0 and at most 1: the part of the "
        "features that is rotated. Without rotation, leave the embedding out.",
    ),
    "base": (
        (X, P, {"base": -2}),
        ValueError,
        "apply_rotary: base=-2. It must be a finite number above 0.",
    ),
    "infinite": ((X, P, {"base": np.inf}), ValueError, "base=inf. It must be a finite"),
    "text": (
        (X, P, {"base": "10"}),
        TypeError,
        "apply_rotary: base is '10'. It must be a number known when the program is "
        "traced. Pass traced frequencies as `frequencies`.",
    ),
    "flag": ((X, P, {"interleaved": 1}), TypeError, "interleaved is int. It must be"),
    "frequencies": (
        (X, P, {"frequencies": [1.0, 0.5]}),
        ValueError,
        "apply_rotary: 2 frequencies were passed, and 12 features are to be rotated. "
        "Pass 6, one for each pair.",
    ),
    "matrix": (
        (X, P, {"frequencies": np.ones((6, 1))}),
        ValueError,
        "apply_rotary: frequencies have shape [6, 1]. Pass one number for each pair of "
        "rotated features.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(call, kind, message):
    x, positions, options = call
    with pytest.raises(kind) as raised:
        jax_cudnn.apply_rotary(x, positions, **options)
    assert message in str(raised.value)


def test_settings_are_checked_when_made():
    with pytest.raises(ValueError, match=r"^Rotary: base=0\. It must be a finite"):
        Rotary(base=0)
    with pytest.raises(ValueError, match=r"^Rotary: fraction=0\. It must be above 0"):
        Rotary(fraction=0)
    with pytest.raises(ValueError, match=r"^Rotary: frequencies have shape \[\]\. "):
        Rotary(frequencies=3.0)
