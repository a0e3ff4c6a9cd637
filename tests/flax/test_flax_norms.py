# SPDX-License-Identifier: Apache-2.0
"""Tests the norms of jax_cudnn.flax against Flax's, with equal parameters and state."""

import logging
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_cudnn
import jax_cudnn.flax.linen as own_linen
import jax_cudnn.flax.nnx as own_nnx
from tests.common import drawn

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_SHAPE = (3, 5, 4, 6)
# A layer's name, its arguments to nnx, and its attributes for linen.
_LAYERS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("LayerNorm", (6,), {}),
    ("LayerNorm", (6,), {"use_bias": False, "epsilon": 1e-3}),
    ("LayerNorm", (4,), {"reduction_axes": 2, "feature_axes": -2}),
    ("LayerNorm", (6,), {"reduction_axes": (1, 2), "feature_axes": -1}),
    ("LayerNorm", (6,), {"use_fast_variance": False}),
    ("RMSNorm", (6,), {}),
    ("RMSNorm", (6,), {"use_scale": False}),
    ("GroupNorm", (6, 3), {"num_groups": 3}),
    ("GroupNorm", (6, None, 2), {"num_groups": None, "group_size": 2}),
    ("InstanceNorm", (6,), {}),
    ("InstanceNorm", (4,), {"feature_axes": 2}),
    ("BatchNorm", (6,), {"use_running_average": False, "momentum": 0.7}),
    ("BatchNorm", (5,), {"use_running_average": False, "axis": 1}),
    ("BatchNorm", (6,), {"use_running_average": True}),
]
_EACH = pytest.mark.parametrize(
    ("name", "sizes", "options"),
    _LAYERS,
    ids=[f"{name}{i}" for i, (name, _, _) in enumerate(_LAYERS)],
)
_DTYPES = pytest.mark.parametrize(
    ("inputs", "dtype", "params"),
    [
        ("float32", None, "float32"),
        ("bfloat16", None, "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", None, "bfloat16"),
        ("float32", "float16", "float32"),
    ],
)


@pytest.fixture(autouse=True)
def _standard_promotion() -> Any:
    """Flax's own norms promote."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _x(dtype: str = "float32", seed: int = 0) -> jax.Array:
    x = drawn.normal(seed, _SHAPE) * 2 + 1
    return x.astype(dtype)


def _of_nnx(options: dict[str, Any]) -> dict[str, Any]:
    names = ("num_groups", "group_size")
    return {k: v for k, v in options.items() if k not in names}


def _randomised(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(3)
    # Positive, as variances are.
    return structure.unflatten(
        jnp.asarray(np.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype)) for x in leaves
    )


def _pair(name: str, sizes: Any, options: dict[str, Any], **more: Any) -> list[Any]:
    """Return Flax's layer and ours, nnx's, with the same random parameters."""
    layers = [
        getattr(library, name)(*sizes, rngs=nnx.Rngs(0), **_of_nnx(options), **more)
        for library in (nnx, own_nnx)
    ]
    state = _randomised(nnx.state(layers[0]))
    for layer in layers:
        nnx.update(layer, state)
    return layers


def _assert_close(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    # A few roundings of the result's own type: each layer takes its steps in its order.
    roundings = 4 if want.dtype.itemsize == 2 else 128
    tolerance = roundings * float(jnp.finfo(want.dtype).eps)
    np.testing.assert_allclose(
        np.asarray(got, np.float32),
        np.asarray(want, np.float32),
        atol=tolerance,
        rtol=tolerance,
    )


@_EACH
@_DTYPES
def test_nnx(
    name: str, sizes: Any, options: Any, inputs: str, dtype: Any, params: str
) -> None:
    theirs, ours = _pair(name, sizes, options, dtype=dtype, param_dtype=params)
    assert isinstance(ours, type(theirs))
    x = _x(inputs)
    _assert_close(ours(x), theirs(x))
    for a, b in zip(
        jax.tree.leaves(nnx.state(ours)),
        jax.tree.leaves(nnx.state(theirs)),
        strict=True,
    ):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-5
        )


@_EACH
@_DTYPES
def test_linen(
    name: str, sizes: Any, options: Any, inputs: str, dtype: Any, params: str
) -> None:
    del sizes
    theirs, ours = (
        getattr(library, name)(**options, dtype=dtype, param_dtype=params)
        for library in (flax.linen, own_linen)
    )
    x = _x(inputs)
    variables = theirs.init(jax.random.key(1), x)
    same = ours.init(jax.random.key(1), x)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, variables, same))
    variables = _randomised(variables)
    want, changed = theirs.apply(variables, x, mutable=["batch_stats"])
    got, new = ours.apply(variables, x, mutable=["batch_stats"])
    _assert_close(got, want)
    assert jax.tree.structure(new) == jax.tree.structure(changed)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(changed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5)


@_EACH
def test_gradients(name: str, sizes: Any, options: Any) -> None:
    theirs, ours = _pair(name, sizes, options)
    x = _x()

    def loss(layer: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(layer(x)))

    pairs = [nnx.grad(loss, argnums=(0, 1))(layer, x) for layer in (ours, theirs)]
    for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@_EACH
def test_residual_and_activation(name: str, sizes: Any, options: Any) -> None:
    theirs, _ = _pair(name, sizes, options)
    _, ours = _pair(name, sizes, options)
    ours.activation = "silu"
    x, other = _x(), _x(seed=1)
    got, total = ours(x, residual=other)
    _assert_close(total, x + other)
    _assert_close(got, jax.nn.silu(theirs(x + other)))
    layer = getattr(own_linen, name)(**options, activation=jnp.tanh)
    (got, total), variables = layer.init_with_output(
        jax.random.key(0), x, residual=other
    )
    plain = getattr(flax.linen, name)(**options).apply(
        variables, x + other, mutable=["batch_stats"]
    )[0]
    _assert_close(got, jnp.tanh(plain))
    _assert_close(total, x + other)


def test_what_only_flax_has_is_flaxs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jax_cudnn")
    mask = jnp.arange(6) < 4
    x = _x()
    for name, sizes, options in (
        ("LayerNorm", (6,), {}),
        ("RMSNorm", (6,), {}),
        ("GroupNorm", (6, 3), {"num_groups": 3}),
        ("InstanceNorm", (6,), {}),
        ("BatchNorm", (6,), {"use_running_average": False}),
    ):
        full = jnp.broadcast_to(mask, x.shape) if name != "BatchNorm" else x > -1
        theirs, ours = _pair(name, sizes, options)
        _assert_close(ours(x, mask=full), theirs(x, mask=full))
        assert f"{name}: Flax's own code runs: a mask is given" in caplog.text
        ours.implementation = "cudnn"
        with pytest.raises(jax_cudnn.UnsupportedError, match="a mask is given"):
            ours(x, mask=full)
        layers = [getattr(each, name)(**options) for each in (flax.linen, own_linen)]
        variables = layers[0].init(jax.random.key(0), x)
        got, want = (
            each.apply(variables, x, mask=full, mutable=["batch_stats"])[0]
            for each in layers[::-1]
        )
        _assert_close(got, want)


def test_other_axes_and_dtypes_are_flaxs() -> None:
    x = _x()
    layer = own_nnx.LayerNorm(
        6, reduction_axes=(1, 2), feature_axes=-1, rngs=nnx.Rngs(0)
    )
    layer.implementation = "cudnn"
    with pytest.raises(jax_cudnn.UnsupportedError, match="not the same axes in order"):
        layer(x)
    integers = jnp.arange(12).reshape(2, 6)
    theirs, ours = _pair("LayerNorm", (6,), {})
    _assert_close(ours(integers), theirs(integers))


def test_axes_that_are_not_there_are_refused_as_by_flax() -> None:
    for module in (nnx, own_nnx):
        axes = {"reduction_axes": (5,), "feature_axes": (5,)}
        layer = module.LayerNorm(6, **axes, rngs=nnx.Rngs(0))
        with pytest.raises((IndexError, ValueError)):
            layer(_x())


def test_groups_of_one_example_without_a_batch_axis() -> None:
    x = jnp.arange(6.0)
    theirs, ours = flax.linen.GroupNorm(3), own_linen.GroupNorm(3)
    variables = theirs.init(jax.random.key(0), x)
    _assert_close(ours.apply(variables, x), theirs.apply(variables, x))


@pytest.mark.parametrize("axes", [(), (1, 3)])
def test_instance_norms_without_one_axis_of_channels_are_flaxs(
    axes: tuple[int, ...],
) -> None:
    x = _x()
    theirs = flax.linen.InstanceNorm(feature_axes=axes)
    ours = own_linen.InstanceNorm(feature_axes=axes)
    variables = theirs.init(jax.random.key(0), x)
    _assert_close(ours.apply(variables, x), theirs.apply(variables, x))
    with pytest.raises(jax_cudnn.UnsupportedError, match="feature_axes="):
        ours.clone(implementation="cudnn").apply(variables, x)


def test_unknown_implementations_are_refused() -> None:
    with pytest.raises(ValueError, match="implementation"):
        own_nnx.RMSNorm(6, implementation="tpu", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="implementation"):
        own_linen.RMSNorm(implementation="tpu").init(jax.random.key(0), _x())  # type: ignore[arg-type]


def test_batch_norm_needs_to_know_whether_it_trains() -> None:
    layer = own_nnx.BatchNorm(6, use_running_average=None, rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use_running_average"):
        layer(_x())
    layer.train()
    assert layer(_x()).shape == _SHAPE
    with pytest.raises(ValueError, match="use_running_average"):
        own_linen.BatchNorm().init(jax.random.key(0), _x())


def test_batch_norm_over_a_named_axis() -> None:
    x = _x()
    results: list[Any] = []
    for library in (flax.linen, own_linen):
        layer = library.BatchNorm(use_running_average=False, axis_name="i")
        variables = layer.init(jax.random.key(0), x)

        def one(x: jax.Array, layer: Any = layer, variables: Any = variables) -> Any:
            return layer.apply(variables, x, mutable=["batch_stats"])

        results.append(jax.vmap(one, axis_name="i")(x))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
