# SPDX-License-Identifier: Apache-2.0
"""Tests that calls take explicitly sharded arrays wherever plain JAX's formulas do.

The same formula in JAX's own operations has to give equal numbers, and equal types
where a program may rely on them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_cudnn
from jax_cudnn import f8, moe
from tests.common.devices import Spec, collectives, mesh_of, placed

_NUMBERS = ("NHWC", "HWIO", "NHWC")
_Function = Callable[..., Any]


def _draw(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(3)
    return [
        jnp.asarray(np.asarray(rng.standard_normal(s), jnp.float32)) for s in shapes
    ]


def _explicit(**sizes: int) -> Mesh:
    return mesh_of(AxisType.Explicit, **sizes)


def _specs(found: Any) -> list[P]:
    return [jax.typeof(x).sharding.spec for x in jax.tree.leaves(found)]


def _sine_sum(function: _Function, *operands: Any) -> jax.Array:
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*operands)))


def _gradients(function: _Function, count: int) -> _Function:
    return jax.grad(functools.partial(_sine_sum, function), tuple(range(count)))


def _with_gradients(function: _Function, count: int) -> _Function:
    """Return a function of results and gradients: one program compiles both."""
    gradients = _gradients(function, count)
    return lambda *operands: (function(*operands), gradients(*operands))


def _run(mesh: Mesh, function: _Function, operands: Sequence[jax.Array]) -> Any:
    with jax.set_mesh(mesh):
        return jax.jit(function)(*operands)


def _check(
    mesh: Mesh,
    ours: _Function,
    plain: _Function,
    operands: Sequence[jax.Array],
    specs: Sequence[Spec],
    *,
    with_gradients: bool = True,
) -> None:
    """Compare numbers and types of results and of gradients."""
    sharded = placed(mesh, operands, specs)
    pair = [ours, plain]
    if with_gradients:
        pair = [_with_gradients(each, len(operands)) for each in pair]
    found, want = (_run(mesh, each, sharded) for each in pair)
    assert _specs(found) == _specs(want)
    _assert_close(found, want)


def _assert_close(found: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


# --- products -------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [8, 64])
@pytest.mark.parametrize("op", ["matmul", "dot_general", "fuse"])
def test_weights_may_be_sharded_along_the_axis_of_the_batch(
    op: str, columns: int
) -> None:
    """As in FSDP, whichever of both is larger: weights are gathered, not the batch."""
    rows = (((2,), (0,)), ((), ()))
    ours = {
        "matmul": jax_cudnn.matmul,
        "dot_general": lambda x, w: jax_cudnn.dot_general(x, w, rows),
        "fuse": jax_cudnn.fuse(lambda x, w: jnp.tanh(x @ w)),
    }[op]
    plain = (lambda x, w: jnp.tanh(x @ w)) if op == "fuse" else jnp.matmul
    operands = _draw((8, 4, 16), (16, columns))
    _check(_explicit(x=4), ours, plain, operands, [("x",), ("x",)])
    # Likewise if the columns are divided as what is contracted.
    specs = [(None, None, "x"), (None, "x")]
    _check(_explicit(x=4), ours, plain, operands, specs, with_gradients=False)


def test_a_constant_may_come_first() -> None:
    constant, w = _draw((4, 8, 16), (16, 8))
    (sharded,) = placed(_explicit(x=2, y=2), [w], [(None, "y")])
    for multiply in (jax_cudnn.matmul, jnp.matmul):
        kind = jax.eval_shape(lambda w, f=multiply: f(constant, w), sharded)
        assert kind.sharding.spec == P(None, None, "y")
        assert not kind.sharding.mesh.empty


def test_some_axes_of_the_mesh_may_be_xlas() -> None:
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto)
    )
    operands = _draw((4, 8, 16), (16, 8), (16, 8))

    def plain(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ gate) * (x @ up)

    specs = [(), (), (None, "x")]
    _check(mesh, jax_cudnn.gated_matmul, plain, operands, specs)


@pytest.mark.parametrize("wanted", ["jvp of grad", "jvp of fuse"])
def test_examples_of_derivatives_of_several_kernels_may_be_sharded(wanted: str) -> None:
    def chain(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ w) @ v

    def both(function: _Function) -> _Function:
        moved = function
        if wanted == "jvp of grad":
            moved = _gradients(function, 2)
        return jax.vmap(
            lambda x, *rest: jax.jvp(moved, (x, *rest), (x, *rest))[1],
            in_axes=(0, *(None,) * (len(operands) - 1)),
        )

    if wanted == "jvp of grad":
        operands, pair = _draw((2, 4, 16), (16, 8)), (jax_cudnn.matmul, jnp.matmul)
    else:
        operands, pair = (
            _draw((2, 4, 16), (16, 8), (8, 6)),
            (
                jax_cudnn.fuse(chain),
                chain,
            ),
        )
    specs = [("x",), *[()] * (len(operands) - 1)]
    ours, plain = map(both, pair)
    _check(_explicit(x=2), ours, plain, operands, specs, with_gradients=False)


@pytest.mark.parametrize("op", ["matmul", "avg_pool"])
def test_what_is_linear_is_transposed_with_its_type(op: str) -> None:
    def plain_pool(x: jax.Array) -> jax.Array:
        windows = (1, 2, 2, 1)
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, windows, windows, "VALID") / 4

    if op == "matmul":
        x, w = _draw((4, 8, 16), (16, 16))
        pair = [lambda x, f=f: f(x, w) for f in (jax_cudnn.matmul, jnp.matmul)]
    else:
        (x,) = _draw((4, 8, 8, 3))
        pair = [lambda x: jax_cudnn.avg_pool(x, (2, 2), (2, 2)), plain_pool]
    (cotangent,) = _draw(jax.eval_shape(pair[1], x).shape)

    def transposed(function: _Function) -> _Function:
        return lambda x, ct: jax.linear_transpose(function, x)(ct)

    ours, plain = map(transposed, pair)
    specs = [("x",), ("x",)]
    _check(_explicit(x=2), ours, plain, [x, cotangent], specs, with_gradients=False)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("manual", [("x",), ("x", "y")])
def test_what_is_linear_is_transposed_in_shard_map(
    manual: tuple[str, ...], kind: AxisType
) -> None:
    mesh = mesh_of(kind, x=2, y=2)
    operands = _draw((4, 8, 16), (4, 8, 16), (16, 16))

    def transposed(multiply: _Function) -> _Function:
        def run(x: jax.Array, ct: jax.Array, w: jax.Array) -> jax.Array:
            return jax.linear_transpose(lambda x: multiply(x, w), x)(ct)[0]

        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(P("x"), P("x"), P()),
            out_specs=P("x"),
            axis_names={*manual},
        )

    specs = [("x",), ("x",), ()]
    pair = map(transposed, (jax_cudnn.matmul, jnp.matmul))
    _check(mesh, *pair, operands, specs, with_gradients=False)


# --- norms and convolutions -----------------------------------------------------------


def _normed(x: jax.Array, axis: Any) -> jax.Array:
    x = x - jnp.mean(x, axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 1e-5)


def test_batch_norm_gathers_no_batch() -> None:
    def plain(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return _normed(x, (0, 1, 2)) * scale[None, None, None] + bias[None, None, None]

    ours = functools.partial(jax_cudnn.batch_norm, epsilon=1e-5)
    operands = _draw((8, 4, 4, 8), (8,), (8,))
    for sizes in ({"x": 4}, {"x": 1}):
        mesh = _explicit(**sizes)
        _check(mesh, ours, plain, operands, [("x",), (), ()])
        sharded = placed(mesh, operands, [("x",), (), ()])
        with jax.set_mesh(mesh):
            sent = collectives(_gradients(ours, 3), *sharded)
        assert sent.keys() == ({"all-reduce"} if sizes["x"] > 1 else set())


@pytest.mark.parametrize(
    "spec", [(None, "x"), ("y", "x"), (None, None, ("x", "y")), ("x", None, None, "y")]
)
def test_batch_norm_of_positions_on_several_devices(spec: Spec) -> None:
    operands = _draw((4, 8, 8, 8), (8,), (8,))
    mesh = _explicit(x=4, y=2)
    sharded = placed(mesh, operands, [spec, (), ()])
    both = _with_gradients(jax_cudnn.batch_norm, 3)
    _assert_close(_run(mesh, both, sharded), jax.jit(both)(*operands))


def test_examples_of_batch_norm_on_several_devices() -> None:
    def plain(x: jax.Array) -> jax.Array:
        return _normed(x, (0, 1, 2))

    ours = functools.partial(jax_cudnn.batch_norm, epsilon=1e-5)
    (x,) = _draw((4, 4, 4, 4, 8))
    for spec in (("x",), ("x", "y")):
        pair = [jax.vmap(each) for each in (ours, plain)]
        _check(_explicit(x=2, y=2), *pair, [x], [spec])


@pytest.mark.parametrize("axes", [(None, 0), (0, None)])
def test_either_term_of_a_norm_may_have_examples(axes: Any) -> None:
    def plain(x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _normed(x + residual, -1), x + residual

    def ours(x: jax.Array, residual: jax.Array) -> Any:
        return jax_cudnn.layer_norm(x, residual=residual, epsilon=1e-5)

    shapes = [(8, 16) if axis is None else (4, 8, 16) for axis in axes]
    specs = [() if axis is None else ("x",) for axis in axes]
    pair = [jax.vmap(each, in_axes=axes) for each in (ours, plain)]
    _check(_explicit(x=4), *pair, _draw(*shapes), specs)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_channels_of_a_group_may_be_on_several_devices(groups: int) -> None:
    (x,) = _draw((4, 4, 4, 8))
    call = functools.partial(jax_cudnn.group_norm, groups=groups)
    (sharded,) = placed(_explicit(x=4), [x], [(None, None, None, "x")])
    both = jax.jit(_with_gradients(call, 1))
    _assert_close(both(sharded), both(x))


def test_fused_convolutions_are_sharded_as_the_function_is() -> None:
    def layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=_NUMBERS
        )
        return jax.nn.relu(y + bias[None, None, None])

    operands = _draw((4, 4, 4, 8), (3, 3, 8, 4), (4,))
    specs = [(None, "x"), (), ()]
    _check(_explicit(x=2), jax_cudnn.fuse(layer), layer, operands, specs)


# --- sizes of one and none ------------------------------------------------------------


def _batches_of_one() -> dict[str, tuple[_Function, tuple[int, ...]]]:
    (w,), (filters,) = _draw((16, 16)), _draw((3, 3, 16, 16))
    conv = functools.partial(jax_cudnn.conv, dimension_numbers=_NUMBERS)
    return {
        "matmul": (lambda h: jax_cudnn.matmul(h, w, activation="tanh"), (1, 8, 16)),
        "gated_matmul": (lambda h: jax_cudnn.gated_matmul(h, w, w), (1, 8, 16)),
        "layer_norm": (jax_cudnn.layer_norm, (1, 8, 16)),
        "rms_norm": (jax_cudnn.rms_norm, (1, 8, 16)),
        "instance_norm": (jax_cudnn.instance_norm, (1, 8, 8, 16)),
        "sdpa": (lambda h: jax_cudnn.sdpa(h, h, h), (1, 8, 2, 16)),
        "conv": (lambda h: conv(h, filters, padding="SAME"), (1, 8, 8, 16)),
        "max_pool": (
            lambda h: jax_cudnn.max_pool(h, (3, 3), padding="SAME"),
            (1, 8, 8, 16),
        ),
    }


@pytest.mark.parametrize("name", _batches_of_one())
def test_a_batch_of_one_may_be_carried_on_one_device(name: str) -> None:
    """On the devices of another axis, or alone: its axis stays in the type."""
    function, shape = _batches_of_one()[name]
    (h,) = _draw(shape)

    def layers(h: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (function(h), None), h, None, 2)[0]

    both = _with_gradients(layers, 1)
    want = jax.jit(both)(h)
    for sizes, spec in (({"x": 1}, ("x",)), ({"x": 1, "y": 2}, ("x", "y"))):
        if name not in ("matmul", "gated_matmul", "layer_norm", "rms_norm"):
            spec = ("x",)  # the second axis is not the rows'
        mesh = _explicit(**sizes)
        (sharded,) = placed(mesh, [h], [spec])
        found = _run(mesh, both, [sharded])
        _assert_close(found, want)
        assert _specs(found) == [P(*spec, *[None] * (h.ndim - len(spec)))] * 2


_EMPTY: list[tuple[_Function, list[tuple[int, ...]]]] = [
    (jax_cudnn.layer_norm, [(0, 8, 8)]),
    (jax_cudnn.matmul, [(0, 8, 16), (16, 8)]),
    (jax_cudnn.matmul, [(4, 8, 16), (16, 0)]),
    (lambda q: jax_cudnn.sdpa(q, q, q), [(0, 8, 4, 8)]),
    (lambda x: jax_cudnn.max_pool(x, (2, 2)), [(0, 8, 8, 4)]),
    (functools.partial(jax_cudnn.group_norm, groups=2), [(0, 4, 4, 8)]),
    (jax_cudnn.gated_matmul, [(0, 8, 16), (16, 8), (16, 8)]),
]


@pytest.mark.parametrize(("function", "shapes"), _EMPTY)
def test_empty_arrays_may_be_sharded(function: _Function, shapes: Any) -> None:
    operands = _draw(*shapes)
    mesh = _explicit(x=2)
    sharded = placed(mesh, operands, [("x",), *[()] * (len(operands) - 1)])
    both = _with_gradients(function, len(operands))
    found, want = _run(mesh, both, sharded), jax.jit(both)(*operands)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


def _experts(x: jax.Array, router_w: jax.Array, up_w: jax.Array, *, axis: Any) -> Any:
    return moe.layer(
        *(x, router_w, None, up_w, jnp.swapaxes(up_w, 1, 2)),
        top_k=2,
        batch_axis=axis,
    )


def _with_scale(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return jax_cudnn.matmul(x, w, bias=bias, scale_out=bias)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (_with_scale, [(8, 4, 3), (4, 6, 3), (6, 3)]),
        (jax_cudnn.gated_matmul, [(8, 4, 3), (4, 6, 3), (4, 6, 3)]),
        (jax_cudnn.causal_conv1d, [(8, 5, 4, 3), (2, 4, 3)]),
        (jax_cudnn.sdpa, [(8, 5, 2, 4, 3)] * 3),
        (jax_cudnn.layer_norm, [(8, 6, 3)]),
        (lambda x: jax_cudnn.avg_pool(x, (2,)), [(8, 5, 4, 3)]),
    ],
)
def test_examples_may_follow_the_axis_that_a_type_divides(
    function: _Function, shapes: Any
) -> None:
    """The examples are the last axis: three, which two devices do not divide."""
    mesh, operands = _explicit(x=2), _draw(*shapes)
    specs: list[Spec] = [("x",), *[()] * (len(shapes) - 1)]
    run = jax.vmap(function, in_axes=-1)
    found = jax.eval_shape(run, *placed(mesh, operands, specs))
    assert found.shape == jax.eval_shape(run, *operands).shape
    assert _specs(found)[0][:2] == (None, "x")


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        *_EMPTY,
        (lambda x: jax_cudnn.avg_pool(x, (2, 2)), [(0, 8, 8, 4)]),
        (jax_cudnn.matmul, [(4, 8, 0), (0, 8)]),
        (functools.partial(_experts, axis="x"), [(0, 8), (8, 4), (4, 8, 6)]),
        (functools.partial(_experts, axis=None), [(0, 8), (8, 4), (4, 8, 6)]),
    ],
)
def test_empty_arrays_vary_over_devices(function: _Function, shapes: Any) -> None:
    """A device's part of an empty array has the type of any other part.

    JAX compares such types when it traces, so nothing is compiled.
    """
    operands = _draw(*shapes)
    gradients = _gradients(function, len(operands))

    def run(*operands: jax.Array) -> Any:
        return jax.jvp(gradients, operands, operands)

    specs = (P("x"), *[P()] * (len(operands) - 1))
    sharded = jax.shard_map(
        run, mesh=mesh_of(x=2), in_specs=specs, out_specs=(specs, specs)
    )
    found = jax.eval_shape(sharded, *operands)
    for each in found:
        assert [x.shape for x in each] == [x.shape for x in operands]


def test_states_of_f8_vary_over_all_axes_before_their_maximum() -> None:
    """JAX 0.12 takes a maximum over axes if an array varies over all of them."""
    recipe = f8.Delayed()
    x, router_w, up_w, down_w = _draw((8, 4), (4, 4), (4, 4, 6), (4, 6, 4))

    def following(state: moe.LayerState) -> moe.LayerState:
        *_, found = moe.layer(
            *(x, router_w, up_w, up_w, down_w),
            top_k=2,
            recipe=recipe,
            state=state,
            return_state=True,
            batch_axis="b",
            expert_axis="e",
            tensor_axis="t",
            mesh=mesh_of(b=2, e=2, t=2),
        )
        return found

    state = moe.layer_state(recipe)
    found = jax.eval_shape(following, state)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, state)
