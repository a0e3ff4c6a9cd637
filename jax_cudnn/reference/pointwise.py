# SPDX-License-Identifier: Apache-2.0
"""Pointwise nodes, constants and reductions in jax.numpy; see graph/pointwise.py.

Nodes are computed in f32 (f64 where an operand is f64), whatever the operands' dtypes.
A conversion to a float is the exception: it goes directly from one dtype to the other,
which XLA fuses with a product.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph.pointwise import (
    ACTIVATIONS,
    ConstantAttributes,
    PointwiseAttributes,
    ReductionAttributes,
)
from jax_cudnn.graph.rules import FLOATS
from jax_cudnn.graph.spec import Attributes, Tensor

Operands = Mapping[str, jax.Array]


def pointwise(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Apply the mode to each element."""
    assert isinstance(attributes, PointwiseAttributes)
    if attributes.mode == "identity" and outputs["output"].dtype in FLOATS:
        return {"output": inputs["a"]}
    operands = [_widened(inputs[role], inputs) for role in sorted(inputs)]
    return {"output": apply_mode(attributes.mode, *operands, alpha=attributes.alpha)}


def apply_mode(mode: str, *operands: jax.Array, alpha: float = 0.0) -> jax.Array:
    """Return a mode of operands that are in the dtype in which it is computed."""
    if mode in ("elu", "relu"):
        return _ACTIVATIONS[mode](*operands, alpha)
    if mode in ACTIVATIONS:
        return _ACTIVATIONS[mode](*operands)
    if mode.endswith("_grad"):
        return _gradient(mode.removesuffix("_grad"), alpha, *operands)
    return _OTHERS[mode](*operands)


def constant(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    """Return the value with as many axes as the output has."""
    assert isinstance(attributes, ConstantAttributes)
    del inputs
    return {"output": np.full(outputs["output"].dims, attributes.value, np.float64)}


def reduction(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return the sum, max or min over the axes where the output has 1."""
    assert isinstance(attributes, ReductionAttributes)
    x = _widened(inputs["input"], inputs)
    dims = outputs["output"].dims
    axes = [
        axis
        for axis, (size, reduced) in enumerate(zip(x.shape, dims, strict=True))
        if size != reduced
    ]
    if attributes.mode == "add":
        return {"output": jnp.sum(x, axis=axes, keepdims=True)}
    # That of no elements is infinite, and not refused as jax.numpy does.
    reduce = jax.lax.reduce_max if attributes.mode == "max" else jax.lax.reduce_min
    return {"output": jnp.expand_dims(reduce(x, axes), axes)}


def _widened(x: jax.Array, inputs: Operands) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x
    is_double = any(each.dtype == jnp.float64 for each in inputs.values())
    return x.astype(jnp.float64 if is_double else jnp.float32)


def _relu(x: jax.Array, slope: float) -> jax.Array:
    return jax.nn.leaky_relu(x, slope) if slope else jax.nn.relu(x)


# For each mode, JAX's function, with its derivatives.
_ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "elu": jax.nn.elu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": _relu,
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
}
assert set(_ACTIVATIONS) == set(ACTIVATIONS)


def _sharded_alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return arrays whose types say that they are sharded as their sum would be."""
    if jax.typeof(x).sharding.spec == jax.typeof(y).sharding.spec:
        return x, y
    sharding = jax.typeof(x + y).sharding  # A compiled program drops the sum.
    return jax.sharding.reshard(x, sharding), jax.sharding.reshard(y, sharding)


def _gradient(mode: str, alpha: float, cotangent: jax.Array, x: jax.Array) -> jax.Array:
    options = (alpha,) if mode in ("elu", "relu") else ()
    # Under vmap, either operand may have size 1 where the other has examples.
    cotangent, x = _sharded_alike(*jnp.broadcast_arrays(cotangent, x))
    # A jvp along the cotangent would round and overflow in another order than the vjp.
    _, pull = jax.vjp(lambda x: _ACTIVATIONS[mode](x, *options), x)
    return pull(cotangent)[0]


_OTHERS: dict[str, Callable[..., jax.Array]] = {
    "abs": jnp.abs,
    "add": jnp.add,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "div": jnp.divide,
    "eq": jnp.equal,
    "erf": jax.lax.erf,
    "exp": jnp.exp,
    "floor": jnp.floor,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "identity": lambda x: x,
    "le": jnp.less_equal,
    "log": jnp.log,
    "lt": jnp.less,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": jnp.multiply,
    "ne": jnp.not_equal,
    "neg": jnp.negative,
    "pow": jnp.power,
    "reciprocal": jnp.reciprocal,
    "rsqrt": jax.lax.rsqrt,
    "select": lambda a, b, c: jnp.where(c, a, b),
    "sin": jnp.sin,
    "sqrt": jnp.sqrt,
    "sub": jnp.subtract,
    "tan": jnp.tan,
}
