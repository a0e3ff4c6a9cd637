# SPDX-License-Identifier: Apache-2.0
"""Tests nnx's layers in f8: values, gradients, states, whole models."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

import optax
from flax import nnx

from jax_cudnn import f8, plans
from jax_cudnn.flax import nnx as our_nnx
from jax_cudnn.flax.nnx import F8DotGeneral, F8Einsum, F8State, to_f8
from tests.flax.f8_layers import (
    DELAYED,
    LAYERS,
    B,
    F,
    H,
    S,
    W,
    by_recipe,
    close,
    is_f8,
    rngs,
    weighed,
)
from tests.flax.layers import flax_promotes, normal

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def forward_state(recipe: Any) -> Any:
    """Return a first state without the cotangent's, as nnx's layers have it."""
    state = f8.dense_state(recipe)
    return None if state is None else state._replace(grad=None)


# --- nnx: layers ----------------------------------------------------------------------

# A layer, the arguments of f8.dense that stand for its product, and the input's shape.
_LAYERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], tuple[int, ...]]] = {
    "Linear": (
        lambda r: nnx.Linear(W, F, dot_general=F8DotGeneral(r), rngs=rngs()),
        {},
        (B, S, W),
    ),
    "heads": (
        lambda r: nnx.LinearGeneral(
            W, (H, 16), dot_general=F8DotGeneral(r), rngs=rngs()
        ),
        {},
        (B, S, W),
    ),
    "out": (
        lambda r: nnx.LinearGeneral(
            (H, 16), W, axis=(-2, -1), dot_general=F8DotGeneral(r), rngs=rngs()
        ),
        {"axes": 2},
        (B, S, H, 16),
    ),
    "Einsum": (
        lambda r: nnx.Einsum(
            "...f,fhd->...hd",
            (W, H, 16),
            (H, 16),
            einsum_op=F8Einsum(r),
            rngs=rngs(),
        ),
        {},
        (B, S, W),
    ),
}


@by_recipe
@pytest.mark.parametrize("name", list(_LAYERS))
def test_nnx_layers_are_f8_dense(name: str, recipe: Any) -> None:
    make, options, shape = _LAYERS[name]
    layer, x = make(recipe), normal(1, *shape)
    state = forward_state(recipe)

    def wanted(kernel: Any, bias: Any, x: Any) -> Any:
        y = f8.dense(x, kernel, recipe=recipe, state=state, **options)
        return weighed(y + bias)

    def found(layer: Any, x: Any) -> Any:
        return weighed(layer(x))

    kernel, bias = layer.kernel[...], layer.bias[...]
    with flax_promotes():
        by_both = nnx.jit(nnx.value_and_grad(found, argnums=(0, 1)))
        value, (by_layer, by_x) = by_both(layer, x)
        other, grads = jax.jit(jax.value_and_grad(wanted, (0, 1, 2)))(kernel, bias, x)
    close((value, by_layer.kernel[...], by_layer.bias[...], by_x), (other, *grads))
    if state is None:
        assert not jax.tree.leaves(nnx.state(layer, F8State))
        return
    product = functools.partial(f8.dense, recipe=recipe, return_state=True, **options)
    _, following = jax.jit(product)(x, kernel, state=state)
    held = layer.einsum_op if name == "Einsum" else layer.dot_general
    close((held.x[...], held.w[...]), (following.x, following.w))


@by_recipe
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_linear_with_all_that_it_adds(recipe: Any, activation: Any) -> None:
    layer = our_nnx.Linear(W, F, activation=activation, recipe=recipe, rngs=rngs())
    assert layer.bias is not None
    layer.bias[...] = normal(2, F)
    x, residual = normal(1, B, S, W), normal(3, S, F)
    layer.dot_general.deterministic = True
    dense = functools.partial(
        f8.dense, x, layer.kernel[...], recipe=recipe, state=forward_state(recipe)
    )
    close(layer(x), dense(bias=layer.bias[...], activation=activation))
    act = jax.nn.gelu if activation else lambda y: y
    wanted = act(dense(bias=layer.bias[...]) + residual[None])
    close(layer(x, residual=residual), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes(dtype: str) -> None:
    """The result has the dtype that Flax asks for, from sums that are rounded once."""
    product = F8DotGeneral(f8.Current())
    x, w = normal(0, S, W).astype(dtype), normal(1, W, F).astype(dtype)
    numbers = ((1,), (0,)), ((), ())
    assert product(x, w, numbers).dtype == dtype
    y = product(x, w, numbers, preferred_element_type=jnp.float32)
    close(y, f8.dense(x.astype(jnp.float32), w))
    half = product(x, w, numbers, preferred_element_type=jnp.bfloat16)
    close(half.astype(jnp.float32), y.astype(jnp.bfloat16).astype(jnp.float32))


@by_recipe
def test_projections_of_attention(recipe: Any) -> None:
    """Each has a state of its own, and all products are in f8."""
    options: dict[str, Any] = {"decode": False, "rngs": rngs()}
    layer = our_nnx.MultiHeadAttention(H, W, recipe=recipe, **options)
    x = normal(0, B, S, W)
    rows = products_of(lambda layer, x: weighed(layer(x)), layer, x)
    assert sum(count for count, _, _ in rows) == 3 * 4
    assert all(is_f8(row) for row in rows)
    with flax_promotes():
        call = nnx.jit(lambda layer, x: layer(x))
        y = call(layer, x)
        plain = call(our_nnx.MultiHeadAttention(H, W, decode=False, rngs=rngs()), x)
    assert float(jnp.abs(y - plain).max()) < 0.1 * float(jnp.abs(plain).max())
    held = jax.tree.leaves(nnx.state(layer, F8State))
    assert len(held) == (0 if isinstance(recipe, f8.Current) else 8)
    assert all(float(each[0]) > 0 for each in held)


# --- nnx: states and transformations --------------------------------------------------


def states_of(model: Any) -> list[np.ndarray]:
    return [np.asarray(each) for each in jax.tree.leaves(nnx.state(model, F8State))]


def test_evaluation_leaves_states() -> None:
    layer = our_nnx.Linear(W, F, recipe=DELAYED, rngs=rngs())
    x = normal(0, S, W)
    layer(x)
    before = states_of(layer)
    layer.eval()
    y = layer(2 * x)
    close(states_of(layer), before)
    viewed = nnx.view(layer, deterministic=False)
    assert not viewed.dot_general.deterministic
    assert layer.dot_general.deterministic
    layer.train()
    # The scale was the same: it is of the steps before.
    close(layer(2 * x), y)
    assert all(
        (now != then).any() for now, then in zip(states_of(layer), before, strict=True)
    )


def test_a_layer_that_is_called_twice() -> None:
    """Each call is a step of the history, under a gradient too."""
    layer = our_nnx.Linear(W, W, recipe=DELAYED, rngs=rngs())
    x = normal(0, S, W)
    state = forward_state(DELAYED)

    def twice(layer: Any, x: Any) -> Any:
        return weighed(layer(3 * layer(x)))

    with flax_promotes():
        nnx.jit(nnx.grad(twice))(layer, x)
    y = x
    for factor in (3, 1):
        y, state = f8.dense(
            y, layer.kernel[...], recipe=DELAYED, state=state, return_state=True
        )
        y = factor * y
    for found, wanted in zip(states_of(layer), (state.w, state.x), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_vmap_over_examples() -> None:
    """Without states there is nothing that would differ between them."""
    layer = our_nnx.Linear(W, F, recipe=DELAYED, rngs=rngs())
    x = normal(0, B, S, W)
    layer(x)
    layer.eval()
    run = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))
    close(run(layer, x), layer(x))


def test_jit_is_the_same() -> None:
    one, other = (our_nnx.Linear(W, F, recipe=DELAYED, rngs=rngs()) for _ in range(2))
    run = nnx.jit(lambda layer, x: layer(x))
    for seed in range(3):
        x = normal(seed, S, W) * 2.0**seed
        close(run(one, x), other(x))
        close(states_of(one), states_of(other))
    assert all((each[:3] > 0).all() for each in states_of(one))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(W, F, dot_general=F8DotGeneral(DELAYED), rngs=rngs)
        self.down = our_nnx.Linear(F, W, recipe=DELAYED, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(jax.nn.gelu(self.up(x)))


def stacked(make: Any = Block) -> Any:
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: Any) -> Any:
        return make(rngs)

    return build(rngs())


@pytest.mark.parametrize("saves", [False, True])
def test_scan_over_layers_is_a_loop(saves: bool) -> None:
    """With `remat` too: each layer's state moves by one step, once."""
    x = normal(0, S, W)

    def run(block: Any, x: Any) -> Any:
        return block(x)

    call = nnx.remat(run) if saves else run

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def walk(x: Any, block: Any) -> Any:
        return call(block, x)

    blocks = stacked()
    definition, start = nnx.split(blocks)
    loop = [
        nnx.merge(definition, jax.tree.map(lambda leaf, i=i: leaf[i], start))
        for i in range(LAYERS)
    ]

    def in_turn(loop: Any, x: Any) -> Any:
        for block in loop:
            x = run(block, x)
        return weighed(x)

    with flax_promotes():
        value, grads = nnx.jit(
            nnx.value_and_grad(lambda blocks, x: weighed(walk(x, blocks)))
        )(blocks, x)
        wanted, each = nnx.jit(nnx.value_and_grad(in_turn))(loop, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    expected = [states_of(block) for block in loop]
    for i, found in enumerate(states_of(blocks)):
        np.testing.assert_allclose(found, [s[i] for s in expected], rtol=1e-4)
    for i in range(LAYERS):
        np.testing.assert_allclose(
            grads.up.kernel[i], each[i].up.kernel[...], rtol=1e-3, atol=1e-4
        )


# --- nnx: whole models ----------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(W, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, W, decode=False, rngs=rngs)
        self.up = our_nnx.Linear(W, F, activation="gelu", rngs=rngs)
        self.down = nnx.Einsum("...f,fw->...w", (F, W), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y: Any = self.norm(x)
        x = x + self.attention(y)
        return x + self.down(self.up(x))


class Model(nnx.Module):
    """`wide` is last by its name, and in the middle by its place."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(48, W, rngs=rngs)
        self.stem = nnx.Linear(W, W, rngs=rngs)
        self.wide = nnx.Linear(W, W + 1, rngs=rngs)
        self.blocks = nnx.List([Layer(rngs) for _ in range(2)])
        self.head = nnx.Linear(W, 48, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.wide(self.stem(self.embed(tokens)))[..., :W]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_loss(model: Any, tokens: Any) -> Any:
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model: Any, optimizer: Any, tokens: Any) -> Any:
    """As it was before there was f8."""
    loss, grads = nnx.value_and_grad(model_loss)(model, tokens)
    optimizer.update(model, grads)
    return loss


def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(0), (B, S), 0, 48, jnp.int32)


def products_of(loss: Any, *operands: Any) -> list[tuple[int, str, str]]:
    """Return the products of a gradient: how often, and the operands' dtypes."""
    with flax_promotes():
        report = plans.inspect(lambda *given: nnx.grad(loss)(*given), *operands)
    return [
        (call.count, *re.findall(r"(\w+)\[1,", call.shapes)[:2])
        for call in report.calls
        if call.op.startswith("matmul")
    ]


def test_a_model_in_f8() -> None:
    model = Model(rngs())
    report = to_f8(model, DELAYED)
    lines = str(report).splitlines()
    block = [
        *(f"attention.{n}" for n in ("query", "key", "value", "out")),
        *("up", "down"),
    ]
    assert [".".join(map(str, each.path)) for each in report.layers] == [
        *("stem", "wide"),
        *(f"blocks.{i}.{name}" for i in range(2) for name in block),
        "head",
    ]
    assert lines[0].split(maxsplit=1) == ["stem", "unchanged: the first layer"]
    assert "it has 33 features, no multiple of 16" in lines[1]
    assert lines[-1].split(maxsplit=1) == ["head", "unchanged: the last layer"]
    assert all(each.is_f8 and not each.reason for each in report.layers[2:-1])
    assert [each.is_f8 for each in to_f8(model).layers] == [
        each.is_f8 for each in report.layers
    ]


@by_recipe
def test_all_products_of_turned_layers_are_in_f8(recipe: Any) -> None:
    """A layer of whose three products one ran in 16 bits fails here."""
    model = Model(rngs())
    turned = sum(each.is_f8 for each in to_f8(model, recipe).layers)
    rows = products_of(model_loss, model, tokens())
    kinds = {"f8_e4m3fn": 0, "f8_e5m2": 0}
    for count, first, second in rows:
        assert is_f8((count, first, second))
        kinds["f8_e5m2" if "f8_e5m2" in (first, second) else "f8_e4m3fn"] += count
    assert kinds == {"f8_e4m3fn": turned, "f8_e5m2": 2 * turned}


@by_recipe
def test_training_is_about_that_without_f8(recipe: Any) -> None:
    losses = []
    for turn in (False, True):
        model = Model(rngs())
        if turn:
            to_f8(model, recipe)
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
        with flax_promotes():
            losses.append(
                [float(train_step(model, optimizer, tokens())) for _ in range(3)]
            )
        if states := states_of(model):
            assert turn
            # A step each, and no other call in between.
            assert all(np.count_nonzero(each[:4]) == 3 for each in states)
    np.testing.assert_allclose(*losses, rtol=0.05)
    assert losses[1][2] < losses[1][0]


def test_checkpoints_load_with_and_without() -> None:
    plain, turned = Model(rngs()), Model(nnx.Rngs(7))
    to_f8(turned, DELAYED)
    saved = nnx.to_pure_dict(nnx.state(turned, nnx.Param))
    assert jax.tree.structure(saved) == jax.tree.structure(
        nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    )
    state = nnx.state(plain, nnx.Param)
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(plain, state)
    close(plain.head.kernel[...], turned.head.kernel[...])
    nnx.update(turned, nnx.state(Model(rngs()), nnx.Param))
    close(turned.blocks[1].up.kernel[...], Model(rngs()).blocks[1].up.kernel[...])
    # And the state of f8 by itself.
    assert len(jax.tree.leaves(nnx.state(turned, F8State))) == 24


def test_what_to_f8_leaves() -> None:
    def other(*arguments: Any, **options: Any) -> Any:
        return jax.lax.dot_general(*arguments, **options)

    class Odd(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            one = functools.partial(nnx.LinearGeneral, rngs=rngs)
            self.own = nnx.Linear(W, F, dot_general=other, rngs=rngs)
            self.made = one(W, F, dot_general_cls=lambda: other)
            self.batch = one(W, F, batch_axis={0: B})
            self.axes = nnx.Einsum("bsf,bfd->bsd", (B, W, F), rngs=rngs)
            self.late = nnx.Einsum("bf,fd->bd", (W, F), rngs=rngs)
            setattr(self.late, "einsum_str", None)  # noqa: B010 (typed as a str)
            self.summed = nnx.Einsum("bf,fde->bd", (W, F, 16), rngs=rngs)
            self.narrow = nnx.Linear(24, F, rngs=rngs)
            self.kept = nnx.Linear(W, F, rngs=rngs)
            self.fine = nnx.Linear(W, F, rngs=rngs)
            self.once_more = self.fine

    seen: list[Any] = []

    def keep(path: Any, layer: Any) -> bool:
        seen.append((path, type(layer)))
        return path == ("kept",)

    report = to_f8(Odd(rngs()), f8.Current(), keep=keep)
    assert {each.path[0]: each.reason for each in report.layers} == {
        "own": "it has another dot_general",
        "made": "it has a dot_general_cls",
        "batch": "it has batch axes",
        "axes": "its equation has the batch axis b",
        "late": "its equation is given by the call",
        "summed": "its equation sums over e, which is in one operand alone",
        "narrow": "it sums over 24 features, no multiple of 16",
        "kept": "kept",
        "fine": "",
    }
    assert seen == [(("kept",), nnx.Linear), (("fine",), nnx.Linear)]
    assert not to_f8(nnx.LayerNorm(W, rngs=rngs())).layers


def test_stacked_layers() -> None:
    """A model that scans gets a state for each of a stack's layers."""

    class Stack(nnx.Module):
        def __init__(self) -> None:
            self.blocks = stacked(lambda rngs: nnx.Linear(W, W, rngs=rngs))
            self.head = nnx.Linear(W, 16, rngs=rngs())

        def __call__(self, x: Any) -> Any:
            walk = nnx.scan(
                lambda x, block: block(x),
                in_axes=(nnx.Carry, 0),
                out_axes=nnx.Carry,
            )
            return self.head(walk(x, self.blocks))

    model = Stack()
    assert [each.is_f8 for each in to_f8(model, DELAYED).layers] == [True, False]
    with flax_promotes():
        derivative = nnx.grad(lambda model, x: weighed(model(x)))
        nnx.jit(derivative)(model, normal(0, S, W))
    assert all(each.shape == (LAYERS, 6) for each in states_of(model))
    assert all((each[:, 0] > 0).all() for each in states_of(model))


@pytest.mark.parametrize("recipe", [f8.MXFP8(), f8.NVFP4()], ids=str)
def test_recipes_of_blocks_have_no_state(recipe: Any) -> None:
    """And all products of a model are products of blocks."""
    model = Model(rngs())
    turned = sum(each.is_f8 for each in to_f8(model, recipe).layers)
    with flax_promotes():
        calls = plans.inspect(nnx.grad(model_loss), model, tokens()).calls
    products = [call for call in calls if call.op == "block_scaled_matmul"]
    assert sum(call.count for call in products) == 3 * turned
    assert not nnx.state(model, F8State)
