# SPDX-License-Identifier: Apache-2.0
"""Tests that exported programs take and return what functions of the package do.

Symbolic sizes of `conv`, `matmul`, `dot_general` and `sdpa` are in test_drop_in.py.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_cudnn
from jax_cudnn import f8, masks, moe, sdpa

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def _drawn(*shape: int) -> jax.Array:
    numbers = np.cos(np.arange(np.prod(shape), dtype=np.float32))
    return jnp.asarray(numbers.reshape(shape))


_ROUTER, _UP, _DOWN = _drawn(5, 4), _drawn(4, 5, 6), _drawn(4, 6, 5)


def _experts(x: jax.Array) -> Any:
    """Return a result and losses, with a capacity that drops choices."""
    operands = (x, _ROUTER, None, _UP, _DOWN)
    return moe.layer(*operands, top_k=2, capacity_factor=0.6)


def _permuted(experts: jax.Array) -> Any:
    order = moe.permutation(jnp.round(2 + 2 * experts).astype(jnp.int32), 4, capacity=3)
    return order.group_sizes, moe.unpermute(moe.permute(experts, order), order)


def _causal(x: jax.Array) -> Any:
    return jax_cudnn.causal_conv1d(x, _drawn(4, 5), return_state=True)


def _filters(w: jax.Array) -> Any:
    return jax_cudnn.causal_conv1d(_drawn(2, 7, 5), w, return_state=True)


def _filters_and_documents(w: jax.Array) -> Any:
    ids = jnp.array([[0, 0, 0, 1, 1, 2, 2]] * 2)
    return jax_cudnn.causal_conv1d(_drawn(2, 7, 5), w, segment_ids=ids)


def _gated(x: jax.Array) -> Any:
    gate, up = _drawn(3, 5, 4), _drawn(3, 5, 4) + 1
    options: dict[str, Any] = {"padding": "SAME", "dimension_numbers": "NWC"}
    return jax_cudnn.gated_conv(x, gate, up, up_activation="tanh", **options)


def _branch(x: jax.Array) -> Any:
    return jax_cudnn.matmul(x, _drawn(5, 3), branch_scale=x[:, :1], residual=x[:, :3])


_CALLS: dict[str, tuple[Callable[[jax.Array], Any], str, tuple[int, ...]]] = {
    "experts": (_experts, "n, 5", (7, 5)),
    "batches of experts": (_experts, "n, m, 5", (2, 4, 5)),
    "permutation": (_permuted, "n, k", (5, 2)),
    "causal": (_causal, "n, m, 5", (2, 6, 5)),
    "taps": (_filters, "n, 5", (3, 5)),
    "taps of documents": (_filters_and_documents, "n, 5", (3, 5)),
    "gated": (_gated, "n, m, 5", (2, 6, 5)),
    "branch": (_branch, "n, 5", (6, 5)),
}


@pytest.mark.parametrize("name", _CALLS)
def test_programs_with_symbolic_sizes(name: str) -> None:
    call, sizes, shape = _CALLS[name]
    like = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    exported = export.export(jax.jit(call), platforms=("cpu", "cuda"))(like)
    read = export.deserialize(exported.serialize(vjp_order=1))
    x = _drawn(*shape)
    want, pull = jax.vjp(call, x)
    cotangents = jax.tree.map(_cotangent, want)
    got = [read.call(x), read.vjp().call(x, *jax.tree.leaves(cotangents))]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5),
        got,
        [want, pull(cotangents)],
    )


def _cotangent(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.sin(x)
    return np.zeros(x.shape, jax.dtypes.float0)


# --- containers -----------------------------------------------------------------------

_X = _drawn(2, 8, 2, 4)
_RECIPE = f8.Delayed(history=3)


def _segments() -> masks.Mask:
    return masks.Segments(jnp.arange(8) // 3)


def _routing() -> moe.Routing:
    return moe.router(_drawn(3, 5), _ROUTER, top_k=2)


_CONTAINERS: dict[str, Callable[[], Any]] = {
    "Causal": lambda: masks.Causal("bottom-right"),
    "Window": lambda: masks.Window(2, None),
    "Lengths": lambda: masks.Lengths(key=jnp.array([3, 4])),
    "Segments": _segments,
    "Prefix": lambda: masks.Prefix(jnp.array(3)),
    "Packed": lambda: masks.Packed(jnp.array([0, 3, 8])),
    "Blocks": lambda: masks.Blocks(jnp.eye(4, 2, dtype=bool), (2, 4)),
    "Where": lambda: masks.Where(jnp.tril(jnp.ones((8, 8), bool))),
    "Additive": lambda: masks.Additive(_drawn(8, 8)),
    "both": lambda: masks.Causal() & _segments(),
    "Routing": _routing,
    "Auxiliary": lambda: _routing().auxiliary,
    "permutation": lambda: moe.permutation(jnp.array([[1], [0]]), 2),
    "layer's state": lambda: moe.layer_state(_RECIPE),
    "dense's state": lambda: f8.dense_state(_RECIPE),
    "MLP's state": lambda: f8.gated_mlp_state(_RECIPE),
    "Quantized": lambda: f8.Quantized(_X.astype(jnp.float8_e4m3fn), jnp.ones(())),
}


def _changed(container: Any) -> Any:
    """Return attention with a mask, or another container with all arrays doubled."""
    if isinstance(container, masks.Mask):
        return sdpa(_X, _X, _X, mask=container)
    return jax.tree.map(lambda x: x + x, container)


@pytest.mark.parametrize("name", _CONTAINERS)
def test_exported_programs_take_and_return_containers(name: str) -> None:
    container = _CONTAINERS[name]()
    checks = jax_cudnn.EXPORT_SAFETY_CHECKS
    exported = export.export(jax.jit(_changed), disabled_checks=checks)(container)
    got = export.deserialize(exported.serialize()).call(container)
    want = _changed(container)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5), got, want)


def test_each_public_container_is_exported() -> None:
    made = {type(make()) for make in _CONTAINERS.values()}
    assert {*_public_containers(jax_cudnn)} == made


def _public_containers(module: ModuleType) -> Iterator[type]:
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from _public_containers(value)
        elif inspect.isclass(value) and _is_container(value):
            yield value


def _is_container(cls: type) -> bool:
    if not dataclasses.is_dataclass(cls):
        return hasattr(cls, "_fields")
    try:
        return not jax.tree_util.all_leaves([object.__new__(cls)])
    except AttributeError:  # A pytree is flattened, and this one lacks its fields.
        return True
