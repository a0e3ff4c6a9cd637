# SPDX-License-Identifier: Apache-2.0
"""Tests nnx's and linen's layers in f8: values, gradients, states, whole models."""

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
from flax import linen, nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from jax_cudnn import f8, plans
from jax_cudnn.flax import linen as our_linen
from jax_cudnn.flax import nnx as our_nnx
from jax_cudnn.flax.nnx import F8DotGeneral, F8Einsum, F8State, to_f8
from tests.common.devices import mesh_of, placed
from tests.flax.layers import flax_promotes, normal

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# b batch, s length, w width, f features between the two linear layers, h heads.
B, S, W, F, H = 2, 8, 32, 64, 2
_DELAYED = f8.Delayed(history=4)
_by_recipe = pytest.mark.parametrize(
    "recipe", [f8.Current(), _DELAYED], ids=lambda recipe: type(recipe).__name__
)


def _any(x: Any) -> Any:
    """Return something of which types say no more."""
    return x


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


def forward_state(recipe: Any) -> Any:
    """Return a first state without the cotangent's, as nnx's layers have it."""
    state = f8.dense_state(recipe)
    return None if state is None else state._replace(grad=None)


def close(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6, atol=1e-6)


def weighed(y: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


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


@_by_recipe
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


@_by_recipe
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


@_by_recipe
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
    layer = our_nnx.Linear(W, F, recipe=_DELAYED, rngs=rngs())
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
    layer = our_nnx.Linear(W, W, recipe=_DELAYED, rngs=rngs())
    x = normal(0, S, W)
    state = forward_state(_DELAYED)

    def twice(layer: Any, x: Any) -> Any:
        return weighed(layer(3 * layer(x)))

    with flax_promotes():
        nnx.jit(nnx.grad(twice))(layer, x)
    y = x
    for factor in (3, 1):
        y, state = f8.dense(
            y, layer.kernel[...], recipe=_DELAYED, state=state, return_state=True
        )
        y = factor * y
    for found, wanted in zip(states_of(layer), (state.w, state.x), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_vmap_over_examples() -> None:
    """Without states there is nothing that would differ between them."""
    layer = our_nnx.Linear(W, F, recipe=_DELAYED, rngs=rngs())
    x = normal(0, B, S, W)
    layer(x)
    layer.eval()
    run = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))
    close(run(layer, x), layer(x))


def test_jit_is_the_same() -> None:
    one, other = (our_nnx.Linear(W, F, recipe=_DELAYED, rngs=rngs()) for _ in range(2))
    run = nnx.jit(lambda layer, x: layer(x))
    for seed in range(3):
        x = normal(seed, S, W) * 2.0**seed
        close(run(one, x), other(x))
        close(states_of(one), states_of(other))
    assert all((each[:3] > 0).all() for each in states_of(one))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(W, F, dot_general=F8DotGeneral(_DELAYED), rngs=rngs)
        self.down = our_nnx.Linear(F, W, recipe=_DELAYED, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(jax.nn.gelu(self.up(x)))


LAYERS = 3


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


def is_f8(row: Any) -> bool:
    return all(each.startswith("f8") for each in row[1:])


def test_a_model_in_f8() -> None:
    model = Model(rngs())
    report = to_f8(model, _DELAYED)
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


@_by_recipe
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


@_by_recipe
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
    to_f8(turned, _DELAYED)
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
    assert [each.is_f8 for each in to_f8(model, _DELAYED).layers] == [True, False]
    with flax_promotes():
        derivative = nnx.grad(lambda model, x: weighed(model(x)))
        nnx.jit(derivative)(model, normal(0, S, W))
    assert all(each.shape == (LAYERS, 6) for each in states_of(model))
    assert all((each[:, 0] > 0).all() for each in states_of(model))


# --- linen ----------------------------------------------------------------------------


class Linen(linen.Module):
    recipe: Any = None

    @linen.compact
    def __call__(self, x: Any) -> Any:
        product = None
        if self.recipe is not None:
            product = functools.partial(our_linen.F8DotGeneral, recipe=self.recipe)
        y = linen.Dense(F, dot_general_cls=product)(x)
        y = our_linen.Dense(W, activation="gelu", recipe=self.recipe)(y)
        y = our_linen.MultiHeadDotProductAttention(H, recipe=self.recipe)(x + y)
        return linen.DenseGeneral((H, 16), dot_general_cls=product)(y)


def linen_loss(apply: Any, variables: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(apply(variables, x)))


@pytest.mark.parametrize("ours", [False, True])
def test_linen_layers_are_f8_dense(ours: bool) -> None:
    """The gradient by the state is f8.dense's own: the next state."""
    product = functools.partial(our_linen.F8DotGeneral, recipe=_DELAYED)
    layer: Any = (
        our_linen.Dense(F, recipe=_DELAYED)
        if ours
        else linen.Dense(F, dot_general_cls=product)
    )
    x = normal(0, S, W)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    state = f8.dense_state(_DELAYED)
    assert state is not None

    @jax.jit
    def wanted(params: Any, state: Any) -> Any:
        def loss(params: Any, state: Any) -> Any:
            y = f8.dense(x, params["kernel"], recipe=_DELAYED, state=state)
            return weighed(y + params["bias"][None])

        return jax.value_and_grad(loss, (0, 1))(params, state)

    @jax.jit
    def found(variables: Any) -> Any:
        return jax.value_and_grad(lambda v: weighed(layer.apply(v, x)))(variables)

    for _ in range(3):
        params = variables["params"]
        with flax_promotes():
            value, grads = found(variables)
        other, (by_params, state) = wanted(params, state)
        close((value, grads["params"]), (other, by_params))
        held = grads[OVERWRITE_WITH_GRADIENT]["F8DotGeneral_0"]
        close([held[f"{name}_state"] for name in state._fields], list(state))
        variables = {**grads, "params": params}


@_by_recipe
def test_linen_projections_of_attention(recipe: Any) -> None:
    """They are those of F8DotGeneral, and the states lie where theirs do."""
    product = functools.partial(our_linen.F8DotGeneral, recipe=recipe)
    by_class = {"qkv_dot_general_cls": product, "out_dot_general_cls": product}
    x = normal(0, B, S, W)

    def of(**options: Any) -> Any:
        layer = our_linen.MultiHeadDotProductAttention(H, num_kv_heads=2, **options)
        variables = jax.jit(layer.init)(jax.random.key(0), x)
        run = functools.partial(linen_loss, layer.apply)
        return variables, jax.jit(jax.value_and_grad(run))(variables, x)

    with flax_promotes():
        (variables, ours), (others, theirs) = of(recipe=recipe), of(**by_class)
        plain, (value, _) = of()
    assert jax.tree.structure(variables) == jax.tree.structure(others)
    close(ours, theirs)
    close(variables["params"], plain["params"])
    assert abs(ours[0] - value) > 1e-6 * abs(value)
    count = len(jax.tree.leaves(variables.get(OVERWRITE_WITH_GRADIENT, {})))
    assert count == (0 if isinstance(recipe, f8.Current) else 4 * 3)


@pytest.mark.parametrize("recipe", [f8.MXFP8(), f8.NVFP4()], ids=str)
def test_recipes_of_blocks_have_no_state(recipe: Any) -> None:
    """A whole model's products are all of blocks; linen's layers are `f8.dense`."""
    model = Model(rngs())
    turned = sum(each.is_f8 for each in to_f8(model, recipe).layers)
    with flax_promotes():
        calls = plans.inspect(nnx.grad(model_loss), model, tokens()).calls
    products = [call for call in calls if call.op == "block_scaled_matmul"]
    assert sum(call.count for call in products) == 3 * turned
    assert not nnx.state(model, F8State)
    x = normal(0, S, W)
    layer = our_linen.Dense(F, recipe=recipe)
    y, variables = jax.jit(layer.init_with_output)(jax.random.key(0), x)
    assert set(variables) == {"params"}
    product = jax.jit(functools.partial(f8.dense, recipe=recipe))
    close(y, product(x, _any(variables)["params"]["kernel"]))


def test_linen_residual() -> None:
    layer = our_linen.Dense(F, activation="gelu", recipe=f8.Current())
    x, residual = normal(0, S, W), normal(1, S, F)
    make = jax.jit(layer.init_with_output)
    y, variables = make(jax.random.key(0), x, residual=residual)
    assert set(variables) == {"params"}
    product = f8.dense(x, _any(variables)["params"]["kernel"])
    close(y, jax.jit(jax.nn.gelu)(product + residual))


@_by_recipe
def test_linen_training_state(recipe: Any) -> None:
    """TrainState, and a plain loop beside it."""
    x = normal(0, B, S, W)
    with flax_promotes():
        model = Linen(recipe)
        variables = jax.jit(model.init)(jax.random.key(0), x)
        given = variables if len(variables) > 1 else variables["params"]
        wrap = (lambda v: v) if len(variables) > 1 else (lambda v: {"params": v})
        optimizer = optax.adam(1e-2)
        state: Any = TrainState.create(apply_fn=model.apply, params=given, tx=optimizer)

        @jax.jit
        def step(state: Any) -> Any:
            grads = jax.grad(lambda v: linen_loss(state.apply_fn, wrap(v), x))(
                state.params
            )
            return state.apply_gradients(grads=grads)

        own = optimizer.init(variables["params"])
        loss = jax.jit(functools.partial(linen_loss, model.apply))

        @jax.jit
        def plain(variables: Any, own: Any) -> Any:
            grads = jax.grad(lambda v: linen_loss(model.apply, v, x))(variables)
            params, states = grads.pop("params"), grads
            updates, own = optimizer.update(params, own, variables["params"])
            params = optax.apply_updates(variables["params"], updates)
            return {"params": params, **states}, own

        first = loss(variables, x)
        for _ in range(3):
            state, (variables, own) = step(state), plain(variables, own)
        assert loss(variables, x) < first
    close(wrap(state.params), variables)
    if isinstance(recipe, f8.Delayed):
        held = variables[OVERWRITE_WITH_GRADIENT]
        assert all(int((each[:4] > 0).sum()) == 3 for each in jax.tree.leaves(held))
        assert len(jax.tree.leaves(held)) == 3 * 7


def test_linen_products_and_checkpoints() -> None:
    x = normal(0, B, S, W)
    with flax_promotes():
        plain = jax.jit(Linen().init)(jax.random.key(0), x)
        turned = jax.jit(Linen(_DELAYED).init)(jax.random.key(0), x)
        close(turned["params"], plain["params"])
        jax.eval_shape(Linen().apply, {"params": turned["params"]}, x)
        loaded = {**turned, "params": plain["params"]}
        report = plans.inspect(
            jax.grad(functools.partial(linen_loss, Linen(_DELAYED).apply)), loaded, x
        )
    rows = [
        (call.count, *re.findall(r"(\w+)\[1,", call.shapes)[:2])
        for call in report.calls
        if call.op.startswith("matmul")
    ]
    assert sum(count for count, _, _ in rows) == 3 * 7
    assert all(is_f8(row) for row in rows)


def test_linen_scan() -> None:
    """The collection is stacked as the parameters are."""
    layers = linen.scan(
        lambda module, x, _: (module(x), None),
        variable_axes={"params": 0, OVERWRITE_WITH_GRADIENT: 0},
        split_rngs={"params": True},
        length=LAYERS,
    )

    class Deep(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return layers(our_linen.Dense(W, recipe=_DELAYED), x, None)[0]

    x = normal(0, S, W)
    variables = jax.jit(Deep().init)(jax.random.key(0), x)
    grads = jax.jit(jax.grad(lambda v: weighed(_any(Deep().apply(v, x)))))(variables)
    for each in jax.tree.leaves(grads[OVERWRITE_WITH_GRADIENT]):
        assert each.shape == (LAYERS, 6)
        assert (each[:, 0] > 0).all()


# --- errors ---------------------------------------------------------------------------

_NUMBERS = ((1,), (0,)), ((), ())
_BATCH = ((2,), (1,)), ((0,), (0,))
_BAD: dict[str, tuple[type[Exception], str, Callable[[Any, Any], Any]]] = {
    "no recipe": (
        TypeError,
        "F8DotGeneral: recipe",
        lambda x, w: _any(F8DotGeneral)("f8"),
    ),
    "implementation": (
        ValueError,
        "implementation",
        lambda x, w: _any(F8DotGeneral)(implementation="cuda"),
    ),
    "Linear's recipe": (
        TypeError,
        "is no recipe",
        lambda x, w: _any(our_nnx.Linear)(W, F, recipe="f8", rngs=rngs()),
    ),
    "dtype": (
        TypeError,
        "F8DotGeneral: lhs is i32",
        lambda x, w: F8DotGeneral()(x.astype(jnp.int32), w, _NUMBERS),
    ),
    "result dtype": (
        TypeError,
        "F8DotGeneral: preferred_element_type",
        lambda x, w: F8DotGeneral()(x, w, _NUMBERS, preferred_element_type=jnp.int8),
    ),
    "batch axes": (
        ValueError,
        "has batch axes",
        lambda x, w: F8DotGeneral()(x[None], w[None], _BATCH),
    ),
    "einsum with batch axes": (
        ValueError,
        "has the batch axis a",
        lambda x, w: F8Einsum()("ab,abc->ac", x, jnp.ones((8, W, 4))),
    ),
    "dots of weights": (
        ValueError,
        "'...' among the axes of the weights",
        lambda x, w: F8Einsum()("ab,b...->a...", x, w),
    ),
    "repeated": (
        ValueError,
        "repeats the axis a",
        lambda x, w: F8Einsum()("aa,ab->b", x, w),
    ),
    "other axes": (
        ValueError,
        "is not for an lhs of 2 axes",
        lambda x, w: F8Einsum()("abc,cd->abd", x, w),
    ),
    "residual": (
        ValueError,
        "Linear: residual has shape",
        lambda x, w: our_nnx.Linear(W, F, recipe=f8.Current(), rngs=rngs())(
            x, residual=jnp.ones((3, 8, F))
        ),
    ),
    "Linear's inputs": (
        TypeError,
        "Linear: inputs is",
        lambda x, w: our_nnx.Linear(
            W, F, recipe=f8.Current(), promote_dtype=lambda a, dtype: a, rngs=rngs()
        )(x.astype(jnp.int32)),
    ),
    "attention": (
        ValueError,
        "qkv_dot_general was passed with recipe",
        lambda x, w: our_nnx.MultiHeadAttention(
            H, W, recipe=f8.Current(), qkv_dot_general=F8DotGeneral(), rngs=rngs()
        ),
    ),
    "linen's attention": (
        ValueError,
        "out_dot_general was passed with recipe",
        lambda x, w: our_linen.MultiHeadDotProductAttention(
            H, recipe=f8.Current(), out_dot_general=jax.lax.dot_general
        ).init(jax.random.key(0), jnp.ones((B, S, W))),
    ),
    "no model": (TypeError, "to_f8: model is", lambda x, w: to_f8(x)),
    "a linen model": (TypeError, "dot_general_cls", lambda x, w: _any(to_f8)(Linen())),
    "a model's recipe": (
        TypeError,
        "to_f8: recipe=None",
        lambda x, w: _any(to_f8)(nnx.LayerNorm(W, rngs=rngs()), None),
    ),
    "linen's recipe": (
        TypeError,
        "F8DotGeneral: recipe",
        lambda x, w: _any(our_linen.Dense)(F, recipe="f8").init(jax.random.key(0), x),
    ),
    "no state": (
        ValueError,
        "F8DotGeneral_0 has no x_state",
        lambda x, w: our_linen.Dense(F, recipe=_DELAYED).apply(
            {"params": {"kernel": w, "bias": jnp.ones(F)}}, x
        ),
    ),
}


@pytest.mark.parametrize("name", list(_BAD))
def test_what_is_refused(name: str) -> None:
    error, message, call = _BAD[name]
    with flax_promotes(), pytest.raises(error, match=re.escape(message)):
        call(normal(0, 8, W), normal(1, W, F))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_weights_are_gathered_in_f8(kind: str) -> None:
    """FSDP: a byte for each number, in XLA's CPU backend two."""
    mesh = mesh_of(d=8)
    whole = NamedSharding(mesh, PartitionSpec())
    x = normal(0, 64, 128).astype("bfloat16")
    kernel = normal(1, 128, 256)
    divided = placed(mesh, (x, kernel), (("d", None), ("d", None)))

    def of_nnx(x: Any, kernel: Any) -> Any:
        layer = nnx.Linear(
            128,
            256,
            use_bias=False,
            dtype=jnp.bfloat16,
            dot_general=F8DotGeneral(f8.Current(), rhs_sharding=whole),
            rngs=rngs(),
        )
        layer.kernel[...] = kernel
        return layer(x).astype(jnp.float32).sum()

    def of_linen(x: Any, kernel: Any) -> Any:
        product = functools.partial(
            our_linen.F8DotGeneral, recipe=f8.Current(), rhs_sharding=whole
        )
        layer = linen.Dense(
            256, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=product
        )
        y = layer.apply({"params": {"kernel": kernel}}, x)
        return _any(y).astype(jnp.float32).sum()

    run = jax.jit(jax.grad(of_nnx if kind == "nnx" else of_linen))
    text = run.lower(*divided).compile().as_text()
    assert text is not None
    gathered = re.findall(r"= (\w+)\[128,256\]\S* all-gather\(", text)
    assert gathered
    assert set(gathered) <= {"u8", "f8e4m3fn", "f16"}
