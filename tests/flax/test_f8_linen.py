# SPDX-License-Identifier: Apache-2.0
"""Tests linen's layers in f8, and what layers in f8 of both kinds refuse."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
from jax_cudnn.flax.nnx import F8DotGeneral, F8Einsum, to_f8
from tests.common.devices import mesh_of, placed
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
    untyped,
    weighed,
)
from tests.flax.layers import flax_promotes, normal

pytestmark = [pytest.mark.once, pytest.mark.sampled]


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
    product = functools.partial(our_linen.F8DotGeneral, recipe=DELAYED)
    layer: Any = (
        our_linen.Dense(F, recipe=DELAYED)
        if ours
        else linen.Dense(F, dot_general_cls=product)
    )
    x = normal(0, S, W)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    state = f8.dense_state(DELAYED)
    assert state is not None

    @jax.jit
    def wanted(params: Any, state: Any) -> Any:
        def loss(params: Any, state: Any) -> Any:
            y = f8.dense(x, params["kernel"], recipe=DELAYED, state=state)
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


@by_recipe
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
def test_linen_layers_with_blocks_are_f8_dense(recipe: Any) -> None:
    x = normal(0, S, W)
    layer = our_linen.Dense(F, recipe=recipe)
    y, variables = jax.jit(layer.init_with_output)(jax.random.key(0), x)
    assert set(variables) == {"params"}
    product = jax.jit(functools.partial(f8.dense, recipe=recipe))
    close(y, product(x, untyped(variables)["params"]["kernel"]))


def test_linen_residual() -> None:
    layer = our_linen.Dense(F, activation="gelu", recipe=f8.Current())
    x, residual = normal(0, S, W), normal(1, S, F)
    make = jax.jit(layer.init_with_output)
    y, variables = make(jax.random.key(0), x, residual=residual)
    assert set(variables) == {"params"}
    product = f8.dense(x, untyped(variables)["params"]["kernel"])
    close(y, jax.jit(jax.nn.gelu)(product + residual))


@by_recipe
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
        turned = jax.jit(Linen(DELAYED).init)(jax.random.key(0), x)
        close(turned["params"], plain["params"])
        jax.eval_shape(Linen().apply, {"params": turned["params"]}, x)
        loaded = {**turned, "params": plain["params"]}
        report = plans.inspect(
            jax.grad(functools.partial(linen_loss, Linen(DELAYED).apply)), loaded, x
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
            return layers(our_linen.Dense(W, recipe=DELAYED), x, None)[0]

    x = normal(0, S, W)
    variables = jax.jit(Deep().init)(jax.random.key(0), x)
    grads = jax.jit(jax.grad(lambda v: weighed(untyped(Deep().apply(v, x)))))(variables)
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
        lambda x, w: untyped(F8DotGeneral)("f8"),
    ),
    "implementation": (
        ValueError,
        "implementation",
        lambda x, w: untyped(F8DotGeneral)(implementation="cuda"),
    ),
    "Linear's recipe": (
        TypeError,
        "is no recipe",
        lambda x, w: untyped(our_nnx.Linear)(W, F, recipe="f8", rngs=rngs()),
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
    "a linen model": (
        TypeError,
        "dot_general_cls",
        lambda x, w: untyped(to_f8)(Linen()),
    ),
    "a model's recipe": (
        TypeError,
        "to_f8: recipe=None",
        lambda x, w: untyped(to_f8)(nnx.LayerNorm(W, rngs=rngs()), None),
    ),
    "linen's recipe": (
        TypeError,
        "F8DotGeneral: recipe",
        lambda x, w: untyped(our_linen.Dense)(F, recipe="f8").init(
            jax.random.key(0), x
        ),
    ),
    "no state": (
        ValueError,
        "F8DotGeneral_0 has no x_state",
        lambda x, w: our_linen.Dense(F, recipe=DELAYED).apply(
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
        return untyped(y).astype(jnp.float32).sum()

    run = jax.jit(jax.grad(of_nnx if kind == "nnx" else of_linen))
    text = run.lower(*divided).compile().as_text()
    assert text is not None
    gathered = re.findall(r"= (\w+)\[128,256\]\S* all-gather\(", text)
    assert gathered
    assert set(gathered) <= {"u8", "f8e4m3fn", "f16"}
