# SPDX-License-Identifier: Apache-2.0
"""Calls with operands, how those are sharded, and what devices then have to send."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_cudnn
from tests.common.devices import Function, Spec, gradient

_NUMBERS = np.random.default_rng(0)


def draw(*shape: int) -> jax.Array:
    """Return normal numbers."""
    return jnp.asarray(np.asarray(_NUMBERS.standard_normal(shape), jnp.float32))


def matmul(x: Any, w: Any, bias: Any) -> jax.Array:
    return jax_cudnn.matmul(x, w, bias=bias, activation="gelu")


def contraction(x: Any, w: Any) -> jax.Array:
    return jax_cudnn.matmul(x, w)


def transposed(x: Any, w: Any) -> jax.Array:
    return jax_cudnn.dot_general(x, w, (((2,), (1,)), ((), ())), activation="silu")


def experts(x: Any, w: Any, bias: Any) -> jax.Array:
    return jax_cudnn.matmul(x, w, bias=bias, activation=jnp.tanh)


def sdpa(q: Any, k: Any, v: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, is_causal=True)


def heads_first(q: Any, k: Any, v: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, layout="bhsd", is_causal=True)


def tokens_first(q: Any, k: Any, v: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, layout="sbhd", local_window_size=(4, 5))


def qkv(qkv: Any) -> jax.Array:
    return jax_cudnn.qkv_sdpa(qkv, is_causal=True)


def qkv_by_heads(qkv: Any, bias: Any) -> jax.Array:
    return jax_cudnn.qkv_sdpa(qkv, bias, layout="sbh3d")


def qkv_grouped(qkv: Any) -> jax.Array:
    return jax_cudnn.qkv_sdpa(qkv, layout="bshd", key_value_heads=2)


def packed(q: Any, k: Any, v: Any) -> jax.Array:
    lengths = 1 + jnp.arange(8, dtype=jnp.int32)[:, None] % jnp.array([[3, 2, 4]])
    mask = jax_cudnn.masks.Packed.from_lengths(lengths, lengths + 1)
    return jax_cudnn.sdpa(q, k, v, mask=mask, is_causal=True)


def dropped(q: Any, k: Any, v: Any) -> jax.Array:
    key = jax.random.key(5)
    return jax_cudnn.sdpa(q, k, v, dropout_rate=0.3, dropout_key=key)


def biased(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, bias)


def conv(x: Any, w: Any, bias: Any) -> jax.Array:
    return jax_cudnn.conv(
        x,
        w,
        padding="SAME",
        bias=bias,
        activation="silu",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def grouped(x: Any, w: Any) -> jax.Array:
    return jax_cudnn.conv(
        x,
        w,
        padding="VALID",
        feature_group_count=4,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def causal(x: Any, w: Any, bias: Any) -> jax.Array:
    return jax_cudnn.causal_conv1d(x, w, bias=bias)


def max_pool(x: Any) -> jax.Array:
    return jax_cudnn.max_pool(x, (3, 2), (2, 1), "SAME")


def avg_pool(x: Any) -> jax.Array:
    return jax_cudnn.avg_pool(x, (3, 2), (2, 1), "SAME", count_include_pad=False)


def ragged_dot(x: Any, w: Any, bias: Any) -> jax.Array:
    sizes = jnp.array([3, 0, 7, 4], jnp.int32)
    return jax_cudnn.ragged_dot(x, w, sizes, bias=bias, activation="silu")


def normed_rows(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.layer_norm(x, scale, bias, activation="silu")


def normed_sums(x: Any, residual: Any, scale: Any) -> jax.Array:
    output, total = jax_cudnn.rms_norm(x, scale, residual=residual)
    return output * total


def normed_groups(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.group_norm(x, scale, bias, groups=8)


def normed_instances(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.instance_norm(x, scale, bias)


def modulated(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.adaptive_layer_norm(x, scale, bias)


def normed_channels(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_cudnn.batch_norm(x, scale, bias)


SHAPES: dict[Function, tuple[tuple[int, ...], ...]] = {
    matmul: ((8, 6, 16), (16, 24), (24,)),
    contraction: ((8, 6, 16), (16, 24)),
    transposed: ((8, 6, 16), (24, 16)),
    experts: ((4, 10, 16), (4, 16, 12), (4, 1, 12)),
    sdpa: ((8, 10, 16, 4), (8, 12, 8, 4), (8, 12, 8, 6)),
    heads_first: ((8, 16, 10, 4), (8, 8, 12, 4), (8, 8, 12, 6)),
    tokens_first: ((10, 8, 16, 4), (12, 8, 8, 4), (12, 8, 8, 6)),
    qkv: ((8, 10, 3, 16, 4),),
    qkv_by_heads: ((10, 8, 16, 3, 4), (1, 16, 10, 10)),
    qkv_grouped: ((8, 10, 12, 4),),
    packed: ((8, 10, 16, 4), (8, 13, 8, 4), (8, 13, 8, 6)),
    dropped: ((8, 10, 16, 4), (8, 12, 8, 4), (8, 12, 8, 6)),
    biased: ((8, 10, 8, 4), (8, 12, 4, 4), (8, 12, 4, 6), (1, 8, 10, 12)),
    conv: ((8, 6, 4, 16), (3, 3, 16, 24), (24,)),
    grouped: ((8, 6, 4, 16), (3, 3, 4, 32)),
    causal: ((8, 10, 16), (4, 16), (16,)),
    max_pool: ((8, 2, 6, 5, 16),),
    avg_pool: ((8, 2, 6, 5, 16),),
    ragged_dot: ((16, 8), (4, 8, 24), (4, 24)),
    normed_rows: ((8, 6, 16), (16,), (16,)),
    normed_sums: ((8, 6, 16), (8, 6, 16), (16,)),
    normed_groups: ((8, 6, 4, 16), (16,), (16,)),
    normed_instances: ((8, 6, 4, 16), (16,), (16,)),
    modulated: ((8, 6, 16), (8, 16), (8, 16)),
    normed_channels: ((8, 6, 4, 16), (16,), (16,)),
}
OPERANDS = {f: [draw(*shape) for shape in shapes] for f, shapes in SHAPES.items()}


class Case(NamedTuple):
    """Shardings, and what is sent in the result and in the gradient."""

    function: Function
    specs: tuple[Spec, ...]
    forward: str = ""
    backward: str = ""


_NONE: Spec = ()
CASES = [
    # batch and rows: the gradient of what all share is a sum
    Case(matmul, (("x",), _NONE, _NONE), "", "all-reduce"),
    Case(matmul, (("x", "y"), _NONE, _NONE), "", "all-reduce"),
    Case(matmul, ((("y", "x"),), _NONE, _NONE), "", "all-reduce"),
    # columns
    Case(matmul, (_NONE, (None, "y"), ("y",)), "", "all-reduce"),
    Case(matmul, (("x",), (None, "y"), ("y",)), "", "all-reduce"),
    # contraction: complete before the epilogue
    Case(matmul, ((None, None, "y"), ("y",), _NONE), "all-reduce", "all-reduce"),
    Case(contraction, (("x", None, "y"), ("y",)), "all-reduce", "all-reduce"),
    Case(transposed, (("x", None, "y"), (None, "y")), "all-reduce", "all-reduce"),
    Case(transposed, (("x",), ("y",)), "", "all-reduce"),
    # a batch of matrices that are all different
    Case(experts, (("x",), ("x",), ("x",))),
    Case(experts, (("x", "y"), ("x",), ("x",)), "", "all-reduce"),
    # batch, heads, both; key heads with their query heads
    Case(sdpa, (("x",),) * 3),
    Case(sdpa, ((("x", "y"),),) * 3),
    Case(sdpa, (("x", None, "y"),) * 3),
    Case(sdpa, ((None, None, ("x", "y")),) * 3),
    # what a kernel needs whole is gathered: keys, values and queries, once
    Case(sdpa, ((None, "y"),) * 3, "all-gather", "all-gather"),
    # the same in other layouts, and of one array
    Case(heads_first, (("x", "y"),) * 3),
    Case(heads_first, ((None, ("x", "y")),) * 3),
    Case(tokens_first, ((None, "x", "y"),) * 3),
    Case(qkv, (("x", None, None, "y"),)),
    Case(qkv, ((None, None, None, ("x", "y")),)),
    Case(qkv_by_heads, ((None, "x", "y"), (None, "y")), "", "all-reduce"),
    Case(qkv_grouped, ((("x", "y"),),)),
    # heads side by side are queries, keys and values
    Case(qkv_grouped, (("x", None, "y"),), "all-gather", "all-gather"),
    # Rows of packed sequences, without collectives.
    Case(packed, (("x",),) * 3),
    Case(packed, (("x", None, "y"),) * 3),
    Case(packed, ((("x", "y"),),) * 3),
    # a part of the batch or of the heads drops what it drops in the whole
    Case(dropped, (("x",),) * 3),
    Case(dropped, (("x", None, "y"),) * 3),
    Case(dropped, ((None, None, ("x", "y")),) * 3),
    Case(biased, (("x",),) * 3 + (_NONE,), "", "all-reduce"),
    Case(biased, (("x", None, "y"),) * 3 + ((None, "y"),), "", "all-reduce"),
    Case(conv, (("x",), _NONE, _NONE), "", "all-reduce"),
    Case(conv, (("x",), (None, None, None, "y"), ("y",)), "", "all-reduce"),
    Case(
        conv,
        ((None, None, None, "y"), (None, None, "y"), _NONE),
        "all-reduce",
        "all-reduce",
    ),
    Case(grouped, (("x", None, None, "y"), (None, None, None, "y")), "", "all-reduce"),
    # neither the batch axes nor the channels of a causal convolution are sums
    Case(causal, (("x",), _NONE, _NONE), "", "all-reduce"),
    Case(causal, (("x", None, "y"), (None, "y"), ("y",)), "", "all-reduce"),
    Case(causal, ((None, None, "x"), (None, "x"), ("x",))),
    # neither the batch axes nor the channels meet in a window
    Case(max_pool, (("x",),)),
    Case(max_pool, (("y", None, None, None, "x"),)),
    Case(avg_pool, (("x", "y"),)),
    Case(avg_pool, (("y", None, None, None, "x"),)),
    # columns of all groups' matrices, and their contraction
    Case(ragged_dot, (_NONE, (None, None, "x"), (None, "x")), "", "all-reduce"),
    Case(ragged_dot, ((None, "x"), (None, "x"), _NONE), "all-reduce", "all-reduce"),
    # Rows are shared out; what they share has sums as gradients.
    Case(normed_rows, (("x",), _NONE, _NONE), "", "all-reduce"),
    Case(normed_rows, (("x", "y"), _NONE, _NONE), "", "all-reduce"),
    # Features are whole.
    Case(
        normed_rows,
        ((None, None, "x"), ("x",), ("x",)),
        "all-gather",
        "all-gather",
    ),
    Case(normed_sums, (("x", "y"), ("x", "y"), _NONE), "", "all-reduce"),
    Case(normed_sums, ((("x", "y"),), (("x", "y"),), _NONE), "", "all-reduce"),
    Case(normed_groups, (("x",), _NONE, _NONE), "", "all-reduce"),
    Case(normed_groups, (("x", None, None, "y"), ("y",), ("y",)), "", "all-reduce"),
    Case(normed_instances, (("x",), _NONE, _NONE), "", "all-reduce"),
    Case(modulated, (("x",), ("x",), ("x",))),
    Case(modulated, (("x", "y"), ("x",), ("x",)), "", "all-reduce"),
    # Channels are shared out, and statistics are summed over a sharded batch.
    Case(normed_channels, (("x",), _NONE, _NONE), "all-reduce", "all-reduce"),
    Case(
        normed_channels,
        (("x", None, None, "y"), ("y",), ("y",)),
        "all-reduce",
        "all-reduce",
    ),
    Case(normed_channels, ((None, None, None, "y"), ("y",), ("y",))),
]


def label(case: Case) -> str:
    """Return the name of a case among a test's parameters."""
    specs = ["".join(str(P(*spec))[13:]) or "()" for spec in case.specs]
    return f"{case.function.__name__} {' '.join(specs)}"


@functools.cache
def wanted(function: Function) -> tuple[Any, tuple[jax.Array, ...]]:
    """Return what one device gives for the function's operands, and gradients."""
    operands = OPERANDS[function]
    return jax.jit(lambda *xs: (function(*xs), gradient(function)(*xs)))(*operands)


def assert_equal(got: Any, want: Any) -> None:
    """Check f32 results, which are sums in another order."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(y)))
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * scale)


def assert_close(got: Any, want: Any) -> None:
    """Check 16-bit results, which are rounded sums in another order."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        wide = [each.astype(jnp.float32) for each in (x, y)]
        scale = float(jnp.max(jnp.abs(wide[1])))
        np.testing.assert_allclose(*wide, rtol=2**-7, atol=2**-8 * scale)


def check_same(
    function: Callable[..., Any],
    sharded: Sequence[jax.Array],
    operands: Sequence[jax.Array],
) -> None:
    """Check that a function of sharded operands gives what it gives on one device."""
    assert_equal(jax.jit(function)(*sharded), jax.jit(function)(*operands))


MESHES = [
    {"x": 8},
    {"x": 4, "y": 2},
    {"x": 2, "y": 2, "z": 2},
    {"x": 2, "w": 1, "y": 2, "z": 2},
]


def draw_spec(
    rng: np.random.Generator, mesh: dict[str, int], shape: tuple[int, ...]
) -> Spec:
    """Draw a sharding of an array: some axes of the mesh, where they divide."""
    names = [str(name) for name in rng.permutation([*mesh])]
    spec: list[Any] = [()] * len(shape)
    for name in names[: int(rng.integers(0, len(names) + 1))]:
        axis = int(rng.integers(len(shape)))
        own = (*spec[axis], name)
        if shape[axis] % math.prod(mesh[each] for each in own) == 0:
            spec[axis] = own
    return tuple(own[0] if len(own) == 1 else own or None for own in spec)
