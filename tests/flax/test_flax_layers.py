# SPDX-License-Identifier: Apache-2.0
"""Flax's layers with jax_cudnn's products, and jax_cudnn's layers, against Flax's."""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx, serialization

import jax_cudnn
from jax_cudnn.flax import (
    ConvGeneralDilated,
    DotGeneral,
    conv_general_dilated,
    dot_general,
    make_conv_general_dilated,
    make_dot_general,
)
from jax_cudnn.flax import linen as our_linen
from jax_cudnn.flax import nnx as our_nnx
from tests.flax.layers import (
    assert_trees_close,
    flax_promotes,
    normal,
    pure,
    value_and_grads,
)
from tests.flax.product_layers import (
    LAYERS,
    C,
    N,
    O,
    X,
    Y,
    build,
    kinds,
    linen_conv,
    nnx_conv,
    nnx_linear,
    others,
    results,
)

pytestmark = [pytest.mark.once, pytest.mark.sampled]


all_layers = pytest.mark.parametrize(
    ("kind", "api"), LAYERS, ids=["-".join(key) for key in LAYERS]
)


each_api = pytest.mark.parametrize("api", ["nnx", "linen"])


# --- convolutions: the same parameters, with Flax's convolution and with ours ---------

IMAGES = (N, Y, X, C)
MASK = np.tril(np.ones((3, 2, C, O), np.float32))
CONV = {
    "same": ({}, IMAGES),
    "no bias": ({"use_bias": False}, IMAGES),
    "valid, strides": ({"padding": "VALID", "strides": (2, 3)}, IMAGES),
    "one number": ({"padding": 1, "strides": 2, "kernel_dilation": 2}, IMAGES),
    "pairs": ({"padding": ((1, 2), 0), "strides": None}, IMAGES),
    "same lower": ({"padding": "SAME_LOWER", "strides": (1, 2)}, IMAGES),
    "circular": ({"padding": "CIRCULAR", "kernel_dilation": (1, 2)}, IMAGES),
    "reflect": ({"padding": "REFLECT", "strides": 2}, IMAGES),
    "causal": ({"padding": "CAUSAL", "size": 3, "kernel_dilation": 2}, (N, Y, C)),
    "volume": ({"size": (2, 1, 3)}, (2, 3, 4, 5, C)),
    "groups": ({"feature_group_count": 3}, IMAGES),
    "input dilation": ({"input_dilation": (2, 1), "padding": (1, (2, 0))}, IMAGES),
    "mask": ({"mask": MASK}, IMAGES),
    "two batch axes": ({"strides": 2}, (2, *IMAGES)),
    "no batch axis": ({"strides": 2}, (Y, X, C)),
}
conv_cases = pytest.mark.parametrize(("options", "shape"), CONV.values(), ids=CONV)


@each_api
@conv_cases
def test_conv_equals_flax(api, options, shape):
    x = normal(1, *shape)
    assert_trees_close(*results("conv", api, x, **options))


@pytest.mark.parametrize(
    "case", ["valid, strides", "causal", "groups", "no batch axis"]
)
def test_conv_general_dilated_in_flaxs_conv_equals_flax(case):
    options, shape = CONV[case]
    x = normal(1, *shape)
    flax = nnx_conv(**options)
    ours = nnx_conv(conv_general_dilated=conv_general_dilated, **options)
    assert_trees_close(*(value_and_grads(*pure(layer), x) for layer in (ours, flax)))
    flax = linen_conv(**options)
    variables = flax.init(jax.random.key(0), x)
    expected = flax.apply(variables, x)
    for replaced in (
        {"conv_general_dilated": conv_general_dilated},
        {"conv_general_dilated_cls": make_conv_general_dilated},
    ):
        layer = linen_conv(**replaced, **options)
        assert kinds(layer.apply, variables, x) == ["conv_fprop"]
        assert_trees_close(layer.apply(variables, x), expected)


def test_conv_general_dilated_takes_every_argument_of_lax():
    lhs, rhs = normal(1, 4, C, Y), normal(2, O * 2, C, 3)
    args = (lhs, rhs, (2,), [(1, 2)], (2,), (1,), ("NCH", "OIH", "NCH"), 1, 2)
    keywords = {"precision": "highest", "preferred_element_type": jnp.float32}
    pair = (conv_general_dilated, jax.lax.conv_general_dilated)
    assert_trees_close(*(function(*args, **keywords) for function in pair))
    for ours, lax in (pair, (dot_general, jax.lax.dot_general)):
        names = list(inspect.signature(lax).parameters)
        assert list(inspect.signature(ours).parameters) == names


# --- dense layers ---------------------------------------------------------------------

DENSE = {
    "one batch axis": ({}, (N, C)),
    "no bias": ({"use_bias": False}, (N, C)),
    "three batch axes": ({}, IMAGES),
    "no batch axis": ({}, (C,)),
}
dense_cases = pytest.mark.parametrize(("options", "shape"), DENSE.values(), ids=DENSE)


@each_api
@dense_cases
def test_dense_equals_flax(api, options, shape):
    x = normal(1, *shape)
    ours, flax = results("dense", api, x, **options)
    assert_trees_close(ours, flax)
    products = [{"dot_general": dot_general}]
    if api == "linen":
        products.append({"dot_general_cls": make_dot_general})
    for product in products:
        made, params = build(LAYERS["dense", api][0], x, **product, **options)
        assert_trees_close(value_and_grads(made, params, x), flax)


def test_dot_general_in_flaxs_general_layers_equals_flax():
    x = normal(1, 2, 3, 4, 5)
    with flax_promotes():
        for options in ({"axis": (1, -1)}, {"axis": (-2,), "batch_axis": {0: 2}}):
            sizes = [x.shape[axis] for axis in options["axis"]]
            layers = [
                nnx.LinearGeneral(sizes, (7, 6), rngs=nnx.Rngs(0), **options, **product)
                for product in ({"dot_general": dot_general}, {})
            ]
            ours, flax = (value_and_grads(*pure(layer), x) for layer in layers)
            assert_trees_close(ours, flax)
        flax = linen.DenseGeneral((7, 6), axis=(1, -1))
        variables = flax.init(jax.random.key(0), x)
        ours = flax.clone(dot_general_cls=make_dot_general)
        assert_trees_close(ours.apply(variables, x), flax.apply(variables, x))


# --- activation and residual in the same kernel ---------------------------------------

ACTIVATIONS = {
    "relu": ("relu", jax.nn.relu, ["relu"]),
    "gelu": (jax.nn.gelu, jax.nn.gelu, ["gelu_tanh"]),
    "own": (lambda x: x * jnp.tanh(x), lambda x: x * jnp.tanh(x), ["tanh", "mul"]),
}
RESIDUALS = {
    "none": (lambda shape: None, []),
    "whole": (lambda shape: normal(5, *shape), ["add"]),
    "one batch entry": (
        lambda shape: normal(5, *(1 for _ in shape[:-3]), *shape[-3:]),
        ["add"],
    ),
    "per channel": (lambda shape: normal(5, shape[-1]), ["add"]),
    "lower rank": (lambda shape: normal(5, *shape[-2:]), ["add"]),
}


@pytest.mark.parametrize("batch", [(N,), (2, N), ()], ids=["1", "2", "0"])
@pytest.mark.parametrize(("make", "adds"), RESIDUALS.values(), ids=RESIDUALS)
def test_residual_broadcasts_as_it_does_behind_flaxs_conv(batch, make, adds):
    x, residual = normal(1, *batch, Y, X, C), make((*batch, Y, X, O))
    layer = nnx_conv(our_nnx.Conv, activation="relu")
    run, params = pure(layer)
    flax, _ = pure(nnx_conv())

    def expected(params, x, residual):
        y = flax(params, x)
        return jax.nn.relu(y if residual is None else y + residual)

    def ours(params, x, residual):
        return run(params, x, residual=residual)

    with flax_promotes():
        truth = value_and_grads(expected, params, x, residual)
    operands = (params, x, residual)
    assert kinds(ours, *operands) == ["conv_fprop", "add", *adds, "relu"]
    assert others(ours, *operands) <= {"reshape", "broadcast_in_dim"}
    assert_trees_close(value_and_grads(ours, *operands), truth)


@pytest.mark.parametrize(
    ("activation", "function", "nodes"), ACTIVATIONS.values(), ids=ACTIVATIONS
)
@all_layers
def test_activation_and_residual_are_in_the_kernel(
    kind, api, activation, function, nodes
):
    x, residual = normal(1, 2, N, Y, X, C), normal(5, 2, N, Y, X, O)
    make, layer = LAYERS[kind, api]
    run, params = build(make, x, layer, activation=activation)
    flax, _ = build(make, x)

    def ours(params, x, residual):
        return run(params, x, residual=residual)

    def expected(params, x, residual):
        return function(flax(params, x) + residual)

    operands = (params, x, residual)
    product = {"conv": "conv_fprop", "dense": "matmul"}[kind]
    assert kinds(ours, *operands) == [product, "add", "add", *nodes]
    assert others(ours, *operands) <= {"reshape", "broadcast_in_dim"}
    assert_trees_close(*(value_and_grads(each, *operands) for each in (ours, expected)))


# --- dtypes ---------------------------------------------------------------------------


def error(x, truth):
    """Return |x - truth| / |truth|."""
    difference = np.asarray(x, np.float32) - truth
    return float(np.linalg.norm(difference) / np.linalg.norm(truth))


@all_layers
def test_bf16_is_as_near_to_f32_as_flax_is(kind, api):
    x = normal(1, N, Y, X, C)
    make, layer = LAYERS[kind, api]

    def in_flax(dtype):
        run, params = build(make, x, dtype=dtype)
        return value_and_grads(lambda p, x: jax.nn.gelu(run(p, x)), params, x)

    truth, flax = in_flax(jnp.float32), in_flax(jnp.bfloat16)
    run, params = build(make, x, layer, dtype=jnp.bfloat16, activation="gelu")
    ours = value_and_grads(run, params, x)
    assert ours[0].dtype == flax[0].dtype == jnp.bfloat16
    # ours rounds once where Flax rounds product, sum and activation each
    assert error(ours[0], truth[0]) <= error(flax[0], truth[0])
    for each, theirs, true in zip(
        *map(jax.tree.leaves, (ours[1], flax[1], truth[1])), strict=True
    ):
        assert each.dtype == theirs.dtype
        assert error(each, true) <= 1.5 * error(theirs, true)


@pytest.mark.parametrize("kind", ["conv", "dense"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"param_dtype": jnp.bfloat16},
        {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
        {"dtype": jnp.float16, "param_dtype": jnp.bfloat16},
    ],
    ids=str,
)
def test_result_has_the_dtype_of_flaxs(kind, options):
    make, layer = LAYERS[kind, "nnx"]
    x = normal(1, N, Y, X, C, dtype=jnp.bfloat16)
    with flax_promotes():
        for use_bias in (True, False):
            flax = make(use_bias=use_bias, **options)
            ours = make(layer, use_bias=use_bias, **options)
            assert ours(x).dtype == flax(x).dtype
            assert ours.kernel.dtype == flax.kernel.dtype


def test_precision_and_implementation_reach_the_kernel():
    x = normal(1, N, Y, X, C)
    for layer in (
        nnx_conv(our_nnx.Conv, precision="highest", implementation="xla"),
        nnx_linear(our_nnx.Linear, precision="highest", implementation="xla"),
        nnx_conv(
            precision="highest",
            conv_general_dilated=make_conv_general_dilated(implementation="xla"),
        ),
        nnx_linear(
            precision="highest", dot_general=make_dot_general(implementation="xla")
        ),
    ):
        text = str(jax.make_jaxpr(layer)(x))
        assert "Options(implementation='xla', matmul_precision='highest')" in text


def test_own_promote_dtype_is_used():
    def to_f16(arrays, dtype):
        assert dtype == jnp.bfloat16
        return tuple(None if x is None else x.astype(jnp.float16) for x in arrays)

    options = {"promote_dtype": to_f16, "dtype": jnp.bfloat16}
    x = normal(1, N, Y, X, C)
    assert nnx_conv(our_nnx.Conv, **options)(x).dtype == jnp.float16
    assert nnx_linear(our_nnx.Linear, use_bias=False, **options)(x).dtype == jnp.float16


# --- checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [True, False])
@all_layers
def test_parameters_are_those_of_flax(kind, api, use_bias):
    make, layer = LAYERS[kind, api]
    ours = make(layer, activation="relu", use_bias=use_bias)
    flax = make(use_bias=use_bias)
    if api == "nnx":
        assert isinstance(ours, type(flax))
        assert_trees_close(nnx.state(ours), nnx.state(flax))
        saved = jax.tree.map(lambda x: x + 1, nnx.state(flax))
        nnx.update(ours, saved)
        assert_trees_close(nnx.state(ours), saved)
        return
    x = normal(1, N, Y, X, C)
    ours, flax = (module.init(jax.random.key(0), x) for module in (ours, flax))
    assert_trees_close(ours, flax)
    changed = jax.tree.map(lambda leaf: leaf + 1, flax)
    loaded = serialization.from_bytes(ours, serialization.to_bytes(changed))
    assert_trees_close(jax.tree.map(jnp.asarray, loaded), changed)


class Twice(linen.Module):
    """Runs one convolution two times, and a dense layer."""

    layers: object

    @linen.compact
    def __call__(self, x):
        conv = self.layers.Conv(C, (3,))
        return self.layers.Dense(O, name="last")(conv(conv(x)))


def test_linen_layers_in_a_model_keep_its_paths_and_intermediates():
    x = normal(1, N, Y, C)
    ours, flax = Twice(our_linen), Twice(linen)
    variables = flax.init(jax.random.key(0), x)
    assert_trees_close(ours.init(jax.random.key(0), x), variables)
    run = {"capture_intermediates": True, "mutable": ["intermediates"]}
    assert_trees_close(ours.apply(variables, x, **run), flax.apply(variables, x, **run))


# --- transformations ------------------------------------------------------------------


def test_nnx_layers_work_under_nnx_transformations():
    x = normal(1, N, Y, X, C)
    ours = nnx_conv(our_nnx.Conv, activation=jax.nn.relu)
    flax = nnx_conv()
    count = 0

    @nnx.jit
    def run(layer, x):
        nonlocal count
        count += 1
        return layer(x)

    for _ in range(2):
        assert_trees_close(run(ours, x), jax.nn.relu(flax(x)))
        ours = nnx_conv(our_nnx.Conv, activation=jax.nn.relu)  # equal, built anew
    assert count == 1
    grads = nnx.grad(nnx.remat(lambda layer: jnp.sum(layer(x) ** 2)))(ours)
    expected = nnx.grad(lambda layer: jnp.sum(jax.nn.relu(layer(x)) ** 2))(flax)
    assert_trees_close(nnx.to_pure_dict(grads), nnx.to_pure_dict(expected), rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "layer"), [(nnx_conv, our_nnx.Conv), (nnx_linear, our_nnx.Linear)]
)
def test_nnx_layers_under_vmap_equal_flax(make, layer):
    run, params = pure(make(layer, activation="silu"))
    flax, _ = pure(make())
    x, residual = normal(1, 2, N, Y, X, C), normal(5, 2, N, Y, X, O)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    for axes, parameters in (((None, 0, 0), params), ((0, 0, 0), many)):
        ours = jax.vmap(lambda p, x, r: run(p, x, residual=r), axes)
        expected = jax.vmap(lambda p, x, r: jax.nn.silu(flax(p, x) + r), axes)
        operands = (parameters, x, residual)
        assert_trees_close(*(value_and_grads(f, *operands) for f in (ours, expected)))


def test_linen_layers_under_lifted_transformations_equal_flax():
    x = normal(1, 2, N, Y, X, C)
    lift = functools.partial(
        linen.vmap, variable_axes={"params": 0}, split_rngs={"params": True}
    )
    ours = linen_conv(lift(linen.remat(our_linen.Conv)), activation="relu")
    flax = linen_conv(lift(linen.Conv))
    variables = flax.init(jax.random.key(0), x)
    assert_trees_close(ours.init(jax.random.key(0), x), variables)
    assert_trees_close(
        value_and_grads(ours.apply, variables, x),
        value_and_grads(lambda v, x: jax.nn.relu(flax.apply(v, x)), variables, x),
    )


# --- messages and the objects themselves ----------------------------------------------


@pytest.mark.parametrize("make", [make_conv_general_dilated, make_dot_general])
def test_settings_are_checked_and_equal_ones_are_equal(make):
    with pytest.raises(ValueError, match="implementation='fast' is not one of 'auto'"):
        make(implementation="fast")
    default = {make_dot_general: dot_general}.get(make, conv_general_dilated)
    assert make() == default
    assert hash(make()) == hash(default)
    other = make(implementation="cudnn")
    assert other != default
    assert pickle.loads(pickle.dumps(other)) == other
    assert isinstance(other, ConvGeneralDilated | DotGeneral)


@all_layers
def test_layers_refuse_an_unknown_implementation(kind, api):
    make, layer = LAYERS[kind, api]
    with pytest.raises(ValueError, match="implementation='fast' is not one of 'auto'"):
        build(make, normal(1, *IMAGES), layer, implementation="fast")


REFUSED = [
    ("conv", "nnx", "Conv", "conv_general_dilated"),
    ("dense", "nnx", "Linear", "dot_general"),
    ("conv", "linen", "Conv", "conv_general_dilated"),
    ("conv", "linen", "Conv", "conv_general_dilated_cls"),
    ("dense", "linen", "Dense", "dot_general"),
    ("dense", "linen", "Dense", "dot_general_cls"),
]


@pytest.mark.parametrize(("kind", "api", "layer", "name"), REFUSED)
def test_layers_refuse_another_product(kind, api, layer, name):
    product = getattr(jax.lax, name.removesuffix("_cls"))
    refused = rf"{layer}: {name} was passed.*Leave it out, or pass it to Flax's layer"
    make, ours = LAYERS[kind, api]
    with pytest.raises(ValueError, match=refused):
        build(make, normal(1, *IMAGES), ours, **{name: product})


def test_conv_and_dot_general_themselves_stand_in_for_lax_s():
    x = normal(1, *IMAGES)
    for ours, theirs in (
        (nnx_conv(conv_general_dilated=jax_cudnn.conv), nnx_conv()),
        (nnx_linear(dot_general=jax_cudnn.dot_general), nnx_linear()),
    ):
        np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_out_sharding_is_how_the_result_is_sharded():
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("data",))
    x = normal(1, 4, Y, X, C)
    for layer in (
        nnx_conv(conv_general_dilated=conv_general_dilated),
        nnx_linear(dot_general=dot_general),
        nnx_conv(our_nnx.Conv),
        nnx_linear(our_nnx.Linear),
    ):
        spec = jax.sharding.PartitionSpec("data")
        wanted = jax.sharding.NamedSharding(mesh, spec)
        result = jax.jit(lambda x, layer=layer, to=wanted: layer(x, to))(x)
        np.testing.assert_allclose(result, layer(x), rtol=1e-4, atol=1e-5)
        assert result.sharding.spec == spec


@pytest.mark.parametrize(
    "shape", [(2, 1, Y, X, O), (N + 1, Y, X, O), (2, 3, N, Y, X, O)]
)
def test_residual_that_does_not_broadcast_is_refused(shape):
    x, residual = normal(1, 3, N, Y, X, C), jnp.ones(shape)
    if len(shape) == 4:
        expected = rf"residual has shape \[4, 7, 10, 9\], .* inputs, \[3, {N}\]"
    else:
        expected = r"Conv: residual has shape .* inputs, \[3, 3\]\. Each of them"
    with pytest.raises(ValueError, match=expected):
        nnx_conv(our_nnx.Conv)(x, residual=residual)


def test_residual_of_other_space_is_refused():
    x = normal(1, *IMAGES)
    expected = r"residual is f32\[3,7,9,9\].*\[3, 7, 10, 9\]"
    for make, layer in ((nnx_conv, our_nnx.Conv), (nnx_linear, our_nnx.Linear)):
        with pytest.raises(ValueError, match=expected):
            make(layer)(x, residual=jnp.ones((N, Y, X - 1, O)))
