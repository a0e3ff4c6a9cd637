# SPDX-License-Identifier: Apache-2.0
"""Tests what `jax.checkpoint` saves of calls, and what it computes again.

Compares with the same formula in plain JAX under the same policy: as many matmuls and
convolutions in the program for a GPU, as many numbers saved, equal gradients.
"""

import contextlib
import functools
import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import Offloadable, Recompute, print_saved_residuals
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_cudnn
from jax_cudnn import checkpoint_policies as policies
from jax_cudnn import f8, parallel
from jax_cudnn.graph import (
    DTypeName,
    Graph,
    MatmulAttributes,
    Node,
    Tensor,
    is_anchor,
    saved_results,
)
from jax_cudnn.graph.pointwise import PointwiseAttributes
from tests.attention.shared.small import count_kinds
from tests.common.devices import mesh_of, placed
from tests.lowering.drawn_calls import OPERATIONS, Random, draw_call

pytestmark = pytest.mark.sampled

_Function = Callable[..., Any]
_NUMBERS = ("NHWC", "HWIO", "NHWC")


# --- what is counted ------------------------------------------------------------------


def _products(function: _Function, *operands: Any) -> int:
    """Count the matmuls and convolutions in a program for a GPU, whoever runs them."""
    traced = jax.jit(function).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kinds = r"stablehlo\.(dot_general|convolution)\b|custom_call @jax_cudnn\.graph"
    return len(re.findall(kinds, text))


def _saved(function: _Function, *operands: Any) -> list[int]:
    """Return the sizes of the arrays that the forward pass saves, arguments apart."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_saved_residuals(function, *operands)
    lines = out.getvalue().splitlines()
    kept = [line for line in lines if "argument" not in line and "constant" not in line]
    plain = (re.sub(r"@\w+", "", line) for line in kept)  # no axes of a mesh
    shapes = [re.match(r"\w+(?:<\w+>)?\[([\d,]*)\]", line) for line in plain]
    assert all(shapes), out.getvalue()
    return sorted(
        math.prod(int(size) for size in shape[1].split(",") if size)
        for shape in shapes
        if shape
    )


def _sines(function: _Function) -> _Function:
    """Return a loss that needs the function's result, and that of a tanh before it."""

    def loss(x: jax.Array, *others: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(jnp.tanh(x), *others).astype(jnp.float32)))

    return loss


def _gradient(loss: _Function, count: int) -> _Function:
    """Return the loss with its gradients: without it, the forward pass is left out."""
    return jax.value_and_grad(loss, tuple(range(count)))


def _assert_close(found: Any, want: Any, tolerance: float = 2e-5) -> None:
    def check(x: jax.Array, y: jax.Array) -> None:
        both = (np.asarray(each.astype(jnp.float32)) for each in (x, y))
        np.testing.assert_allclose(*both, rtol=tolerance, atol=tolerance)

    jax.tree.map(check, found, want)


def _draw(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(5)
    return [jnp.asarray(np.asarray(rng.standard_normal(s) / 2, dtype)) for s in shapes]


# --- operations -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Case:
    ours: _Function
    plain: _Function
    shapes: tuple[tuple[int, ...], ...]


def _layer_norm(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, 1, keepdims=True)
    var = jnp.mean(jnp.square(centred), 1, keepdims=True)
    return centred * lax.rsqrt(var + 1e-6) * w[None] + b[None]


def _conv(function: _Function, **options: Any) -> _Function:
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
        ours=jax_cudnn.layer_norm,
        plain=_layer_norm,
        shapes=((6, 16), (16,), (16,)),
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
    operands = _draw(*case.shapes)
    ours, plain = (_sines(f) for f in (case.ours, case.plain))
    saving, plainly = (jax.checkpoint(f, policy=policy) for f in (ours, plain))
    gradient = _gradient(saving, len(operands))
    want = _gradient(plainly, len(operands))
    _assert_close(jax.jit(gradient)(*operands), want(*operands))
    assert _products(gradient, *operands) == _products(want, *operands)
    if policy is not policies.everything_saveable:
        # Of elementwise work, plain JAX saves more then.
        assert _saved(saving, *operands) == _saved(plainly, *operands)


@pytest.mark.parametrize("name", ["default", "dots", "dots without batch"])
def test_sums_of_shifted_products_are_saved_as_convolutions(name: str) -> None:
    options = {
        "window_strides": (1,),
        "padding": "SAME",
        "dimension_numbers": ("NWC", "WIO", "NWC"),
        "feature_group_count": 4,
    }
    operands = _draw((2, 9, 4), (3, 1, 4))
    ours, plain = (
        jax.checkpoint(
            _sines(functools.partial(function, **options)), policy=_POLICIES[name]
        )
        for function in (jax_cudnn.conv, lax.conv_general_dilated)
    )
    assert _saved(ours, *operands) == _saved(plain, *operands)
    gradients = (jax.jit(_gradient(each, 2))(*operands) for each in (ours, plain))
    _assert_close(*gradients)


@pytest.mark.parametrize("name", [name for name in _CASES if name != "layer_norm"])
def test_products_run_once_if_they_are_saved(name: str) -> None:
    case = _CASES[name]
    operands = _draw(*case.shapes)
    loss = _sines(case.ours)

    def count(policy: Any) -> int:
        saving = jax.checkpoint(loss, policy=policy)
        return _products(_gradient(saving, len(operands)), *operands)

    without = _products(_gradient(loss, len(operands)), *operands)
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
    operands = _draw((13, 16), (3, 16, 24))
    sizes = jnp.array([4, 0, 9], jnp.int32)
    loss = _sines(lambda x, w: jax_cudnn.ragged_dot(x, w, sizes, activation="gelu"))
    saving = jax.checkpoint(loss, policy=policy)
    found, want = (_gradient(f, 2)(*operands) for f in (saving, loss))
    _assert_close(found, want)
    kinds = count_kinds(_gradient(saving, 2), *operands)
    assert kinds["grouped_matmul"] == runs
    assert _saved(saving, *operands) == ([13 * 24] if runs == 1 else [])


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
    layer: _Function, policy: Any, is_saved: bool
) -> None:
    operands = _draw((32, 64), (64, 96))
    loss = _sines(layer)
    saving = jax.checkpoint(loss, policy=policy)
    gradient, want = (_gradient(f, 2) for f in (saving, loss))
    # A number beside a border of f8 may be rounded the other way under jit.
    found = jax.jit(gradient)(*operands)
    _assert_close(found, jax.jit(want)(*operands), tolerance=1e-3)
    kinds, once = (count_kinds(f, *operands) for f in (gradient, want))
    assert kinds.total() - once.total() == (0 if is_saved else 1)
    sizes = _saved(saving, *operands)
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

    operands = _draw((6, 16), (16, 40), (40, 8), dtype=jnp.bfloat16)
    saving = jax.checkpoint(loss, policy=policies.dots_saveable)
    assert _saved(saving, *operands) == [6 * 8, 6 * 40]
    # The activation is that of a value rounded to bf16, as it is in plain JAX.
    wide = [x.astype(jnp.float32) for x in operands]
    truth = _gradient(loss, 3)(*wide)[1]
    found, plain = (
        [
            float(jnp.max(jnp.abs(x.astype(jnp.float32) - y)))
            for x, y in zip(_gradient(f, 3)(*operands)[1], truth, strict=True)
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
    function: _Function, policy: Any, runs: int, is_saved: bool
) -> None:
    (x,) = _draw((2, 6, 4, 16))
    saving = jax.checkpoint(_sines(function), policy=policy)
    found, want = (jax.jit(jax.grad(f))(x) for f in (saving, _sines(function)))
    _assert_close(found, want)
    forward = [
        kind
        for kind, count in count_kinds(jax.grad(saving), x).items()
        for _ in range(count)
        if kind.startswith("sdpa") and not kind.endswith("_backward")
    ]
    assert len(forward) == runs
    if policy is not policies.everything_saveable:
        results = [2 * 6 * 4, x.size]  # log-sum-exps and output
        assert _saved(saving, x) == (results if is_saved else [])


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_attention_over_devices_saves_its_result_once(method: Any) -> None:
    """And not what each of the devices' keys contribute to it."""
    mesh = mesh_of(seq=4)
    (x,) = placed(mesh, _draw((2, 16, 4, 8)), [(None, "seq")])

    def attend(x: jax.Array) -> jax.Array:
        return parallel.sharded_sdpa(
            x, x, x, mesh=mesh, axis="seq", method=method, is_causal=True
        )

    for policy, is_saved in (
        (policies.dots_saveable, True),
        (policies.attention_saveable, True),
        (policies.dots_with_no_batch_dims_saveable, False),
    ):
        saving = jax.checkpoint(_sines(attend), policy=policy)
        results = [2 * 16 * 4, x.size]
        assert _saved(saving, x) == (results if is_saved else [])
        want = jax.jit(jax.grad(_sines(attend)))(x)
        _assert_close(jax.jit(jax.grad(saving))(x), want)


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
def test_norms_are_saved_by_their_own_policy(function: _Function) -> None:
    x, w = _draw((2, 6, 5, 16), (16,))
    loss = _sines(function)

    def count(policy: Any) -> int:
        gradient = _gradient(jax.checkpoint(loss, policy=policy), 2)
        _assert_close(gradient(x, w), _gradient(loss, 2)(x, w))
        kinds = count_kinds(gradient, x, w)
        return sum(n for kind, n in kinds.items() if kind.endswith("_norm"))

    assert count(policies.norms_saveable) == 1
    # Saved matmuls do not save norms: plain JAX computes these again.
    assert count(policies.dots_saveable) == count(policies.attention_saveable) == 2


# --- what policies are asked ----------------------------------------------------------


def test_a_policy_is_asked_about_the_graph_and_then_about_jax_s_products() -> None:
    asked: list[tuple[str, Any]] = []

    def policy(prim: Any, *types: Any, **params: Any) -> bool:
        shapes = tuple(x.shape for x in types)
        asked.append((prim.name, (shapes, params.get("dimension_numbers"))))
        return False

    x, w = _draw((3, 6, 16), (3, 16, 24))
    jax.make_jaxpr(jax.grad(jax.checkpoint(_sines(jax_cudnn.matmul), policy=policy)))(
        x, w
    )
    products = [each for each in asked if each[0] in ("cudnn_graph", "dot_general")]
    shapes = ((3, 6, 16), (3, 16, 24))
    numbers = (((2,), (1,)), ((0,), (0,)))
    assert [name for name, _ in products] == ["cudnn_graph", "dot_general"]
    assert products[1][1] == (shapes, numbers)


def test_the_first_answer_that_saves_counts() -> None:
    """Also where a policy knows the package's primitive and says where to put it."""

    def policy(prim: Any, *_: Any, **__: Any) -> Any:
        if prim.name == "cudnn_graph":
            return Offloadable(src="device", dst="pinned_host")
        return Recompute

    x, w = _draw(*_MATMUL)
    saving = jax.checkpoint(_sines(jax_cudnn.matmul), policy=policy)
    text = str(jax.make_jaxpr(jax.grad(saving))(x, w))
    assert "f32<host>[1,6,24]" in text
    assert _products(_gradient(saving, 2), x, w) == 3


def test_answers_that_are_none_are_refused() -> None:
    def policy(prim: Any, *_: Any, **__: Any) -> Any:
        return None if prim.name == "cudnn_graph" else False

    x, w = _draw(*_MATMUL)
    saving = jax.checkpoint(_sines(jax_cudnn.matmul), policy=policy)
    message = (
        r"a jax\.checkpoint policy returned None for cudnn_graph\. A policy returns a "
        r"bool, or Saveable, Recompute or Offloadable\(src, dst\) of jax\.ad_checkpoint"
    )
    with pytest.raises(TypeError, match=message):
        jax.grad(saving)(x, w)


# --- under JAX's transformations ------------------------------------------------------


def _block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    y = jax_cudnn.matmul(jnp.tanh(x), w, activation="gelu")
    return x + jax_cudnn.matmul(y, v)


def _plain_block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(jnp.tanh(x) @ w) @ v


_WEIGHTS = ((16, 40), (40, 16))
_SAVING = {
    "dots": policies.dots_saveable,
    "elsewhere": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@pytest.mark.parametrize("policy", _SAVING.values(), ids=_SAVING)
def test_a_scan_over_layers_saves_a_result_a_layer(policy: Any) -> None:
    x, w, v = _draw((6, 16), (3, 16, 40), (3, 40, 16))

    def loss(block: _Function) -> _Function:
        body = jax.checkpoint(block, policy=policy, prevent_cse=False)

        def run(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(
                jnp.sin(lax.scan(lambda x, wv: (body(x, *wv), None), x, (w, v))[0])
            )

        return run

    ours, plain = (loss(block) for block in (_block, _plain_block))
    gradients = [_gradient(f, 3) for f in (ours, plain)]
    _assert_close(*(jax.jit(f)(x, w, v) for f in gradients))
    counts = [_products(f, x, w, v) for f in gradients]
    assert counts == [6, 6]  # two forward and four backward, in the loops' bodies
    assert _saved(ours, x, w, v) == _saved(plain, x, w, v)


# JAX transposes no copy between memories yet, so these save where they compute.
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x, w, v: jax.vmap(f, (0, None, None))(x, w[0], v),
        lambda f: jax.vmap(f, (0, 0, None)),
        lambda f: lambda *x: jax.jvp(f, x, x)[1],
        lambda f: lambda *x: jax.linearize(f, *x)[1](*x),
        lambda f: lambda *x: jnp.sin(jnp.concat([y.ravel() for y in _slopes(f)(*x)])),
        jax.jit,
        lambda f: jax.checkpoint(f, policy=policies.nothing_saveable),
        lambda f: jax.checkpoint(f, policy=policies.dots_saveable),
    ],
    ids=["vmap", "both", "jvp", "linearize", "grad", "jit", "remat", "saving remat"],
)
def test_derivatives_under_transformations(transform: Any) -> None:
    x, w, v = _draw((5, 6, 16), (5, 16, 40), (40, 16))

    def total(block: _Function) -> _Function:
        loss = jax.checkpoint(_sines(block), policy=policies.dots_saveable)
        return lambda *x: jnp.sum(transform(loss)(*x))

    found, want = (jax.jit(_gradient(total(f), 3)) for f in (_block, _plain_block))
    _assert_close(found(x, w, v), want(x, w, v), 1e-4)


def _slopes(loss: _Function) -> _Function:
    return jax.grad(loss, (0, 1, 2))


def test_tangents_are_saved_as_those_of_plain_jax() -> None:
    x, w = _draw(*_MATMUL)

    def loss(matmul: _Function) -> _Function:
        def sines(x: jax.Array, w: jax.Array) -> jax.Array:
            tangent = jax.jvp(matmul, (jnp.tanh(x), w), (x, w))[1]
            return jnp.sum(jnp.sin(tangent))

        return jax.checkpoint(sines, policy=policies.dots_saveable)

    ours, plain = loss(jax_cudnn.matmul), loss(jnp.matmul)
    assert _saved(ours, x, w) == _saved(plain, x, w)
    _assert_close(_gradient(ours, 2)(x, w), _gradient(plain, 2)(x, w))


# --- on several devices ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("policy", _SAVING.values(), ids=_SAVING)
def test_operands_on_several_devices(kind: AxisType, policy: Any) -> None:
    mesh = mesh_of(kind, data=4, model=2)
    operands = _draw((8, 6, 16), *_WEIGHTS)
    specs = [("data",), (None, "model"), ("model",)]
    if kind is AxisType.Explicit:
        specs = [("data",), (None, "model"), ()]
    sharded = placed(mesh, operands, specs)

    def block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        y = jax_cudnn.matmul(jnp.tanh(x), w, activation="gelu")
        if kind is AxisType.Explicit:
            y = jax.sharding.reshard(y, P("data"))
        return x + jax_cudnn.matmul(y, v)

    saving = jax.checkpoint(_sines(block), policy=policy)
    want = _gradient(_sines(_plain_block), 3)(*operands)
    with jax.set_mesh(mesh):
        gradient = _gradient(saving, 3)
        if policy is policies.dots_saveable:
            # XLA for the CPU divides no program with copies between memories.
            _assert_close(jax.jit(gradient)(*sharded), want, 1e-4)
        assert _saved(saving, *sharded) == [8 * 6 * 16, 8 * 6 * 40]
        runs, without = (
            sum(count_kinds(each, *sharded).values())
            for each in (gradient, _gradient(_sines(block), 3))
        )
    assert runs == without


@pytest.mark.parametrize("is_outside", [True, False])
@pytest.mark.parametrize("policy", _SAVING.values(), ids=_SAVING)
def test_within_shard_map(policy: Any, is_outside: bool) -> None:
    mesh = mesh_of(data=4)
    operands = _draw((8, 16), *_WEIGHTS)

    def mapped(block: _Function) -> _Function:
        return jax.shard_map(
            block, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data")
        )

    def saving(function: _Function) -> _Function:
        return jax.checkpoint(function, policy=policy)

    loss = _sines(saving(mapped(_block)) if is_outside else mapped(saving(_block)))
    found = jax.jit(_gradient(loss, 3))(*operands)
    _assert_close(found, _gradient(_sines(_plain_block), 3)(*operands), 1e-4)


# --- a property of every operation ----------------------------------------------------


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_gradients_do_not_depend_on_the_policy(op: str, activation: Any) -> None:
    with jax.enable_x64(True):
        random = Random(op, str(activation))
        call = draw_call(op, activation, random)
        operands = [random.normal(shape) for shape in call.shapes]

        def loss(*operands: jax.Array) -> jax.Array:
            results = jax.tree.leaves(call.ours(*map(jnp.tanh, operands)))
            return sum((jnp.sum(jnp.sin(x)) for x in results), jnp.zeros(()))

        want = _gradient(loss, len(operands))(*operands)
        for policy in (policies.dots_saveable, policies.attention_saveable):
            saving = jax.checkpoint(loss, policy=policy)
            found = _gradient(saving, len(operands))(*operands)
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


# --- which results of a graph are saved -----------------------------------------------


def _graph(**results: DTypeName) -> Graph:
    """Return the graph of a matmul, its tanh, and copies of the matmul's result."""

    def tensor(name: str, dtype: DTypeName) -> Tensor:
        return Tensor(name=name, dtype=dtype, dims=(1, 8, 8), order=(0, 1, 2))

    matmul = Node.make(
        "matmul", {"a": "a", "b": "b"}, {"output": "sums"}, MatmulAttributes()
    )
    elementwise = [
        Node.make(
            "pointwise",
            {"a": "sums"},
            {"output": name},
            PointwiseAttributes(mode="tanh" if name == "tanh" else "identity"),
        )
        for name in results
    ]
    made = [tensor(name, dtype) for name, dtype in results.items()]
    return Graph(
        tensors=(
            tensor("a", "bf16"),
            tensor("b", "bf16"),
            tensor("sums", "f32"),
            *made,
        ),
        nodes=(matmul, *elementwise),
        inputs=("a", "b"),
        outputs=tuple(results),
    )


@pytest.mark.parametrize(
    ("results", "saved"),
    [
        ({"tanh": "bf16"}, ("tanh",)),
        ({"tanh": "bf16", "copy": "bf16"}, ("copy",)),
        ({"tanh": "f32", "copy": "f32"}, ("copy",)),
        ({"tanh": "f16", "copy": "f32"}, ("copy",)),
        # A narrow copy does not have the digits of a wide result.
        ({"tanh": "f32", "copy": "bf16"}, ("tanh", "copy")),
        ({"tanh": "f32", "copy": "bf16", "wide": "f32"}, ("copy", "wide")),
        ({"tanh": "bf16", "copy": "f8_e4m3fn"}, ("tanh", "copy")),
    ],
)
def test_the_fewest_results_are_saved(
    results: dict[str, DTypeName], saved: tuple[str, ...]
) -> None:
    names, rest = saved_results(_graph(**results))
    assert names == saved
    others = tuple(name for name in results if name not in saved)
    assert (rest.outputs if rest else ()) == others
    assert rest is None or not any(map(is_anchor, rest.nodes))


@pytest.mark.parametrize("name", ["dots_saveable", "nothing_saveable"])
def test_without_jit(name: str) -> None:
    x, w = jnp.ones((8, 16)), jnp.ones((16, 32)) / 7

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.sin(jax_cudnn.matmul(x, w, activation="gelu")))

    policy = getattr(jax.checkpoint_policies, name)
    with jax.disable_jit():
        got = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1))(x, w)
    for mine, true in zip(got, jax.grad(loss, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(mine, true, rtol=1e-5, atol=1e-6)
