# SPDX-License-Identifier: Apache-2.0
"""Flax's convolutions and dense layers and ours, as functions of parameters."""

import jax
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx

from jax_cudnn.flax import linen as our_linen
from jax_cudnn.flax import nnx as our_nnx
from tests.flax.layers import assert_trees_close, pure, value_and_grads
from tests.products.shared.fused import graphs

# n images, y and x space, c channels in, o out.
N, Y, X, C, O = 3, 7, 10, 6, 9  # noqa: E741

BIAS = {"bias_init": linen.initializers.normal(1.0)}


def nnx_conv(layer=nnx.Conv, size=(3, 2), c=C, **options):
    return layer(c, O, size, rngs=nnx.Rngs(0), **BIAS, **options)


def linen_conv(layer=linen.Conv, size=(3, 2), **options):
    return layer(O, size, **BIAS, **options)


def nnx_linear(layer=nnx.Linear, **options):
    return layer(C, O, rngs=nnx.Rngs(0), **BIAS, **options)


def linen_dense(layer=linen.Dense, **options):
    return layer(O, **BIAS, **options)


LAYERS = {
    ("conv", "nnx"): (nnx_conv, our_nnx.Conv),
    ("conv", "linen"): (linen_conv, our_linen.Conv),
    ("dense", "nnx"): (nnx_linear, our_nnx.Linear),
    ("dense", "linen"): (linen_dense, our_linen.Dense),
}


def build(make, x, *layer, **options):
    """Return a function of an nnx or linen layer's parameters, and the parameters."""
    layer = make(*layer, **options)
    if isinstance(layer, nnx.Module):
        return pure(layer)
    return layer.apply, layer.init(jax.random.key(0), x)


def results(kind, api, x, **options):
    """Return results and gradients of our layer and of Flax's, of equal parameters."""
    make, layer = LAYERS[kind, api]
    flax, params = build(make, x, **options)
    ours, own = build(make, x, layer, **options)
    assert_trees_close(own, params, rtol=0, atol=0)
    return [value_and_grads(run, params, x) for run in (ours, flax)]


def kinds(function, *args):
    """Return what each node of a function's one graph computes, in order."""
    ((graph, _),) = graphs(function, *args)
    return [getattr(node.attributes, "mode", node.kind) for node in graph.nodes]


def others(function, *args):
    """Return the names of the primitives of a function that are not cuDNN calls."""

    def names(jaxpr):
        for equation in jaxpr.eqns:
            if "jaxpr" in equation.params:
                yield from names(equation.params["jaxpr"].jaxpr)
            elif equation.primitive.name != "cudnn_graph":
                yield equation.primitive.name

    return set(names(jax.make_jaxpr(function)(*args).jaxpr))
