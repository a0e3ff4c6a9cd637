# SPDX-License-Identifier: Apache-2.0
"""Tests what `jax.checkpoint` saves of calls, and what it computes again.

Compares with the same formula in plain JAX under the same policy: as many matmuls and
convolutions in the program for a GPU, as many numbers saved, equal gradients.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_cudnn
from jax_cudnn import checkpoint_policies as policies
from jax_cudnn import f8, parallel
from tests.attention.shared.small import count_kinds
from tests.common.devices import mesh_of, placed
from tests.lowering.remat.saving import (
    Function,
    assert_close,
    draw_arrays,
    gradient_of,
    products_in,
    saved_sizes,
    sines_of,
)

pytestmark = pytest.mark.sampled

_NUMBERS = ("NHWC", "HWIO", "NHWC")


# --- operations -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Case:
    ours: Function
    plain: Function
    shapes: tuple[tuple[int, ...], ...]


def _layer_norm(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, 1, keepdims=True)
    var = jnp.mean(jnp.square(centred), 1, keepdims=True)
    return centred * lax.rsqrt(var + 1e-6) * w[None] + b[None]


def _conv(function: Function, **options: Any) -> Function:
    return functools.partial(
        function,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=_NUMBERS,
        **options,
    )


_MATMUL = ((6, 16), (16, 24))
_IMAGES = ((2, 5, 7, 8), (3, 3, 8, 16))
_CASES = {
    "matmul": _Case(ours=jax_cudnn.matmul, plain=jnp.matmul, shapes=_MATMUL),
    "matmul+relu": _Case(
        ours=functools.partial(jax_cudnn.matmul, activation="relu"),
        plain=lambda x, w: jax.nn.relu(x @ w),
        shapes=_MATMUL,
    ),
    "matmul+bias+gelu": _Case(
        ours=lambda x, w, b: jax_cudnn.matmul(x, w, bias=b, activation="gelu"),
        plain=lambda x, w, b: jax.nn.gelu(x @ w + b[None]),
        shapes=(*_MATMUL, (24,)),
    ),
    "matmul+function": _Case(
        ours=lambda x, w: jax_cudnn.matmul(x, w, activation=lambda y: jnp.sin(y) * y),
        plain=lambda x, w: (lambda y: jnp.sin(y) * y)(x @ w),
        shapes=_MATMUL,
    ),
    "matmul of a batch": _Case(
        ours=jax_cudnn.matmul, plain=jnp.matmul, shapes=((3, 6, 16), (3, 16, 24))
    ),
    "matmul of rows": _Case(
        ours=jax_cudnn.matmul, plain=jnp.matmul, shapes=((3, 6, 16), (16, 24))
    ),
    "dot_general": _Case(
        ours=lambda x, w: jax_cudnn.dot_general(x, w, (((1,), (1,)), ((), ()))),
        plain=lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))),
        shapes=((6, 16), (24, 16)),
    ),
    "gated_matmul": _Case(
        ours=jax_cudnn.gated_matmul,
        plain=lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up),
        shapes=((6, 16), (16, 24), (16, 24)),
    ),
    "conv": _Case(
        ours=_conv(jax_cudnn.conv),
        plain=_conv(lax.conv_general_dilated),
        shapes=_IMAGES,
    ),
    "conv+silu": _Case(
        ours=_conv(jax_cudnn.conv, activation="silu"),
        plain=lambda x, w: jax.nn.silu(_conv(lax.conv_general_dilated)(x, w)),
        shapes=_IMAGES,
    ),
    "fuse": _Case(
        ours=jax_cudnn.fuse(lambda x, w, v: jnp.tanh(x @ w) @ v),
        plain=lambda x, w, v: jnp.tanh(x @ w) @ v,
        shapes=((6, 16), (16, 24), (24, 16)),
    ),
    "layer_norm": _Case(
        ours=jax_cudnn.layer_norm, plain=_layer_norm, shapes=((6, 16), (16,), (16,))
    ),
}
_WITHOUT_MATMULS = ("layer_norm",)
_POLICIES = {
    "default": None,
    "everything": policies.everything_saveable,
    "dots": policies.dots_saveable,
    "dots without batch": policies.dots_with_no_batch_dims_saveable,
    "dots or nothing": policies.save_from_both_policies(
        policies.dots_saveable, policies.nothing_saveable
    ),
    "dots elsewhere": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "names": policies.save_only_these_names("a name of nothing"),
    "attention": policies.attention_saveable,
}


def test_jax_s_policies_are_jax_s() -> None:
    names = set(vars(jax.checkpoint_policies))
    ours = {name for name in policies.__all__ if name in names}
    for name in ours:
        assert getattr(policies, name) is getattr(jax.checkpoint_policies, name)
    # Classes that JAX 0.11 has beside its functions are not policies.
    assert {name for name in names - ours if name[0].islower()} == set()


@pytest.mark.parametrize("policy", _POLICIES.values(), ids=_POLICIES)
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_policies_save_what_they_save_of_plain_jax(case: _Case, policy: Any) -> None:
    operands = draw_arrays(*case.shapes)
    ours, plain = (sines_of(f) for f in (case.ours, case.plain))
    saving, plainly = (jax.checkpoint(f, policy=policy) for f in (ours, plain))
    gradient = gradient_of(saving, len(operands))
    want = gradient_of(plainly, len(operands))
    assert_close(jax.jit(gradient)(*operands), want(*operands))
    assert products_in(gradient, *operands) == products_in(want, *operands)
    if policy is not policies.everything_saveable:
        # Of elementwise work, plain JAX saves more then.
        assert saved_sizes(saving, *operands) == saved_sizes(plainly, *operands)


@pytest.mark.parametrize("name", ["default", "dots", "dots without batch"])
def test_sums_of_shifted_products_are_saved_as_convolutions(name: str) -> None:
    options = {
        "window_strides": (1,),
        "padding": "SAME",
        "dimension_numbers": ("NWC", "WIO", "NWC"),
        "feature_group_count": 4,
    }
    operands = draw_arrays((2, 9, 4), (3, 1, 4))
    ours, plain = (
        jax.checkpoint(
            sines_of(functools.partial(function, **options)), policy=_POLICIES[name]
        )
        for function in (jax_cudnn.conv, lax.conv_general_dilated)
    )
    assert saved_sizes(ours, *operands) == saved_sizes(plain, *operands)
    gradients = (jax.jit(gradient_of(each, 2))(*operands) for each in (ours, plain))
    assert_close(*gradients)


@pytest.mark.parametrize("name", [name for name in _CASES if name != "layer_norm"])
def test_products_run_once_if_they_are_saved(name: str) -> None:
    case = _CASES[name]
    operands = draw_arrays(*case.shapes)
    loss = sines_of(case.ours)

    def count(policy: Any) -> int:
        saving = jax.checkpoint(loss, policy=policy)
        return products_in(gradient_of(saving, len(operands)), *operands)

    without = products_in(gradient_of(loss, len(operands)), *operands)
    assert count(policies.dots_saveable) == without
    assert count(policies.everything_saveable) == without
    assert count(policies.nothing_saveable) > without


@pytest.mark.parametrize(
    ("policy", "runs"),
    [
        # Of `jax.lax.ragged_dot`, JAX's policies save nothing.
        (policies.dots_saveable, 1),
        (policies.dots_with_no_batch_dims_saveable, 1),
        (policies.attention_saveable, 2),
        (policies.nothing_saveable, 2),
    ],
)
def test_grouped_products_are_saved_as_products(policy: Any, runs: int) -> None:
    operands = draw_arrays((13, 16), (3, 16, 24))
    sizes = jnp.array([4, 0, 9], jnp.int32)
    loss = sines_of(lambda x, w: jax_cudnn.ragged_dot(x, w, sizes, activation="gelu"))
    saving = jax.checkpoint(loss, policy=policy)
    found, want = (gradient_of(f, 2)(*operands) for f in (saving, loss))
    assert_close(found, want)
    kinds = count_kinds(gradient_of(saving, 2), *operands)
    assert kinds["grouped_matmul"] == runs
    assert saved_sizes(saving, *operands) == ([13 * 24] if runs == 1 else [])


def _f8_groups(x: jax.Array, w: jax.Array) -> jax.Array:
    sizes = jnp.array([12, 0, 20], jnp.int32)
    return f8.ragged_dot(x, jnp.stack([w] * 3), sizes)


_F8_LAYERS = {
    "current": f8.dense,
    "with what a layer adds": functools.partial(
        f8.dense, bias=jnp.ones(96), activation="silu"
    ),
    "blocks": functools.partial(f8.dense, recipe=f8.MXFP8()),
    "groups": _f8_groups,
}


@pytest.mark.parametrize(
    ("policy", "is_saved"),
    [
        (policies.dots_saveable, True),
        (policies.dots_with_no_batch_dims_saveable, True),
        (policies.offload_dots_and_attention("device", "pinned_host"), True),
        (policies.attention_saveable, False),
        (policies.f8_saveable, False),
        (policies.nothing_saveable, False),
    ],
)
@pytest.mark.parametrize("layer", _F8_LAYERS.values(), ids=_F8_LAYERS)
def test_products_of_f8_layers_are_saved_as_matmuls(
    layer: Function, policy: Any, is_saved: bool
) -> None:
    operands = draw_arrays((32, 64), (64, 96))
    loss = sines_of(layer)
    saving = jax.checkpoint(loss, policy=policy)
    gradient, want = (gradient_of(f, 2) for f in (saving, loss))
    # A number beside a border of f8 may be rounded the other way under jit.
    found = jax.jit(gradient)(*operands)
    assert_close(found, jax.jit(want)(*operands), tolerance=1e-3)
    kinds, once = (count_kinds(f, *operands) for f in (gradient, want))
    assert kinds.total() - once.total() == (0 if is_saved else 1)
    sizes = saved_sizes(saving, *operands)
    assert sizes.count(32 * 96) == int(is_saved)
    if policy is not policies.f8_saveable:
        assert len(sizes) == int(is_saved)


@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "softplus"])
def test_of_an_activation_only_its_argument_is_saved(activation: Any) -> None:
    """In 16 bits, too: twice the memory would be what JAX's policies never take."""

    def loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        hidden = jax_cudnn.matmul(x, w, activation=activation)
        return jnp.sum(jnp.sin(jax_cudnn.matmul(hidden, v).astype(jnp.float32)))

    def in_plain_jax(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        hidden = getattr(jax.nn, activation)(x @ w)
        return jnp.sum(jnp.sin((hidden @ v).astype(jnp.float32)))

    operands = draw_arrays((6, 16), (16, 40), (40, 8), dtype=jnp.bfloat16)
    saving = jax.checkpoint(loss, policy=policies.dots_saveable)
    assert saved_sizes(saving, *operands) == [6 * 8, 6 * 40]
    # The activation is that of a value rounded to bf16, as it is in plain JAX.
    wide = [x.astype(jnp.float32) for x in operands]
    truth = gradient_of(loss, 3)(*wide)[1]
    found, plain = (
        [
            float(jnp.max(jnp.abs(x.astype(jnp.float32) - y)))
            for x, y in zip(gradient_of(f, 3)(*operands)[1], truth, strict=True)
        ]
        for f in (saving, jax.checkpoint(in_plain_jax))
    )
    assert all(x <= 2 * y for x, y in zip(found, plain, strict=True)), (found, plain)


# --- attention and norms --------------------------------------------------------------


def _attend(x: jax.Array) -> jax.Array:
    return jax_cudnn.sdpa(x, x[:, :, :2], x[:, :, 2:4], is_causal=True)


def _attend_qkv(x: jax.Array) -> jax.Array:
    return jax_cudnn.qkv_sdpa(jnp.stack([x] * 3, axis=2))


def _attend_f8(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.bfloat16)
    return jax_cudnn.f8.quantized_sdpa(x, x, x)


@pytest.mark.parametrize("function", [_attend, _attend_qkv, _attend_f8])
@pytest.mark.parametrize(
    ("policy", "runs", "is_saved"),
    [
        (policies.attention_saveable, 1, True),
        (policies.dots_and_attention_saveable, 1, True),
        # Plain attention has two products in a batch, which this saves as well.
        (policies.dots_saveable, 1, True),
        (policies.everything_saveable, 1, True),
        (policies.offload_dots_and_attention("device", "pinned_host"), 1, True),
        (policies.dots_with_no_batch_dims_saveable, 2, False),
        (policies.norms_saveable, 2, False),
        (policies.nothing_saveable, 2, False),
    ],
)
def test_attention_is_saved_with_its_log_sum_exp(
    function: Function, policy: Any, runs: int, is_saved: bool
) -> None:
    (x,) = draw_arrays((2, 6, 4, 16))
    saving = jax.checkpoint(sines_of(function), policy=policy)
    found, want = (jax.jit(jax.grad(f))(x) for f in (saving, sines_of(function)))
    assert_close(found, want)
    forward = [
        kind
        for kind, count in count_kinds(jax.grad(saving), x).items()
        for _ in range(count)
        if kind.startswith("sdpa") and not kind.endswith("_backward")
    ]
    assert len(forward) == runs
    if policy is not policies.everything_saveable:
        results = [2 * 6 * 4, x.size]  # log-sum-exps and output
        assert saved_sizes(saving, x) == (results if is_saved else [])


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_attention_over_devices_saves_its_result_once(method: Any) -> None:
    """And not what each of the devices' keys contribute to it."""
    mesh = mesh_of(seq=4)
    (x,) = placed(mesh, draw_arrays((2, 16, 4, 8)), [(None, "seq")])

    def attend(x: jax.Array) -> jax.Array:
        return parallel.sharded_sdpa(
            x, x, x, mesh=mesh, axis="seq", method=method, is_causal=True
        )

    for policy, is_saved in (
        (policies.dots_saveable, True),
        (policies.attention_saveable, True),
        (policies.dots_with_no_batch_dims_saveable, False),
    ):
        saving = jax.checkpoint(sines_of(attend), policy=policy)
        results = [2 * 16 * 4, x.size]
        assert saved_sizes(saving, x) == (results if is_saved else [])
        want = jax.jit(jax.grad(sines_of(attend)))(x)
        assert_close(jax.jit(jax.grad(saving))(x), want)


def _batch_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax_cudnn.batch_norm(x, w, w)[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: jax_cudnn.layer_norm(x, w, w),
        lambda x, w: jax_cudnn.rms_norm(x, w),
        lambda x, w: jax_cudnn.group_norm(x, w, w, groups=4),
    ],
    ids=["layer", "rms", "group"],
)
def test_norms_are_saved_by_their_own_policy(function: Function) -> None:
    x, w = draw_arrays((2, 6, 5, 16), (16,))
    loss = sines_of(function)

    def count(policy: Any) -> int:
        gradient = gradient_of(jax.checkpoint(loss, policy=policy), 2)
        assert_close(gradient(x, w), gradient_of(loss, 2)(x, w))
        kinds = count_kinds(gradient, x, w)
        return sum(n for kind, n in kinds.items() if kind.endswith("_norm"))

    assert count(policies.norms_saveable) == 1
    # Saved matmuls do not save norms: plain JAX computes these again.
    assert count(policies.dots_saveable) == count(policies.attention_saveable) == 2
