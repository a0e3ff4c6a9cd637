# SPDX-License-Identifier: Apache-2.0
"""Tests MXFP8 and NVFP4: rounding, layers, gradients, transformations, meshes."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jax_cudnn import UnsupportedError, checkpoint_policies, f8, plans
from jax_cudnn.errors import GraphError
from jax_cudnn.graph import Graph, Target, from_json, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.ops.products.f8_blocks import in_blocks
from jax_cudnn.reference.dtypes import jax_dtype
from tests.common.devices import collectives, mesh_of, placed
from tests.common.evaluating import evaluate
from tests.common.legal_ways import run_way
from tests.products.shared.block_scaled import FORMATS, block_graph, rounded, truth
from tests.products.shared.f8_dense import ULP, close, normal

pytestmark = pytest.mark.sampled

RECIPES = {"MXFP8": f8.MXFP8(), "NVFP4": f8.NVFP4()}
_by_recipe = pytest.mark.parametrize("name", list(RECIPES))
_B200 = Target(name="B200", sm_version=100, sm_count=148, cudnn_version=92700)


def _short(x: jax.Array) -> jax.Array:
    """Return numbers of bf16: rounding them to f16 on the way changes nothing."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


# --- rounding -------------------------------------------------------------------------


@pytest.mark.once
@_by_recipe
def test_blocks_are_rounded_as_the_formats_say(name: str) -> None:
    """All sizes of f32, ties, zeros, a short last block, and what is not finite."""
    x = np.array(_short(normal(0, 9, 70)))
    x[1] *= np.exp2(np.linspace(-60, 60, 70))
    x[2] = np.arange(70) % 13 / 2 - 3  # Ties.
    x[3], x[4, 32:64] = 0, 0
    x[5], x[6] = x[5] * 2.0**-110, 448 * np.abs(x[6]) / x[6] * 2.0**5
    x[7, 3], x[7, 40], x[8, 69] = np.nan, np.inf, -np.inf
    x = np.array(_short(jnp.asarray(x)))
    if name == "NVFP4":
        # A scale of the whole tensor would have all else vanish.
        x[1], x[5], x[6] = 1, 0.01 * np.sign(x[5]), x[6] / 2**10
    found = np.asarray(in_blocks(jnp.asarray(x), RECIPES[name]).dequantized())[:, :70]
    wanted = rounded(x, name)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    assert np.isnan(found).sum() == {"MXFP8": 32 + 32 + 6, "NVFP4": 16 + 16 + 6}[name]
    np.testing.assert_allclose(found, wanted, rtol=2e-7, atol=0)


@pytest.mark.once
def test_scales_of_mxfp8_are_the_smallest_powers_that_hold_a_block() -> None:
    """Of amaxes beside every power of two, from the smallest f32 to the largest."""
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64))
    amaxes = np.concatenate([powers * factor for factor in (1, 1.75, 1.75 + 2**-6)])
    x = amaxes[amaxes < 3.4e38].astype(np.float32)
    blocks = in_blocks(jnp.asarray(np.repeat(x, 32)), f8.MXFP8())
    scales = np.asarray(blocks.read()[1]).astype(np.float64)
    held = x.astype(np.float64) / scales
    assert (held <= 448).all()
    least = scales == 2.0**-126
    assert (held[~least] > 224).all()
    assert (x[least] <= 448 * 2.0**-126).all()


@pytest.mark.once
def test_codes_of_nvfp4_are_those_of_ml_dtypes() -> None:
    """Of numbers, ties and their neighbours, in blocks whose scales are all 1."""
    near = np.arange(-6, 6.01, 0.125).astype(np.float32)
    below, above = (np.nextafter(near, np.float32(end)) for end in (-9, 9))
    numbers = np.concatenate([near, below, above]).clip(-6, 6)
    blocks = np.full((len(numbers) + 1, 16), 6, np.float32)
    blocks[:-1, 1:] = numbers[:, None]
    blocks[-1] *= 448
    values, scales = in_blocks(jnp.asarray(blocks), f8.NVFP4()).read()
    assert (np.asarray(scales).astype(np.float32)[:-1] == 1).all()
    np.testing.assert_array_equal(
        np.asarray(values).astype(np.float32)[:-1],
        blocks[:-1].astype(ml_dtypes.float4_e2m1fn).astype(np.float32),
    )


# --- layers ---------------------------------------------------------------------------


@pytest.mark.once
@_by_recipe
@pytest.mark.parametrize("dtype", list(ULP))
def test_products_are_those_of_the_rounded(name: str, dtype: str) -> None:
    """Of sizes that blocks fill, and of others; of several rows, and of two axes."""
    x, w = normal(0, 3, 20, 70).astype(dtype), normal(1, 70, 3, 8).astype(dtype)
    grad = (normal(2, 3, 20, 3, 8) * 1e-3).astype(dtype)

    def both(x: Any, w: Any, grad: Any) -> Any:
        y, back = jax.vjp(lambda x, w: f8.dense(x, w, recipe=RECIPES[name]), x, w)
        return y, *back(grad)

    found = jax.jit(both)(x, w, grad)
    wanted = truth(x.reshape(60, 70), w.reshape(70, 24), grad.reshape(60, 24), name)
    for each, other in zip(found, wanted, strict=True):
        assert each.dtype == dtype
        close(each, other.reshape(each.shape), ulp=max(ULP[dtype], 2.0**-18))


@pytest.mark.once
@_by_recipe
def test_layers_have_biases_activations_and_axes(name: str) -> None:
    recipe = RECIPES[name]
    x, w, bias = normal(0, 6, 2, 32), normal(1, 2, 32, 8), normal(2, 8)

    def layer(x: Any, w: Any, bias: Any) -> Any:
        return f8.dense(x, w, recipe=recipe, bias=bias, axes=2, activation="relu")

    def both(*given: Any) -> Any:
        y, back = jax.vjp(layer, *given)
        return y, *back(y)

    y, *grads = jax.jit(both)(x, w, bias)
    flat = x.reshape(6, 64), w.reshape(64, 8)
    sums = truth(*flat, y, name)[0] + np.asarray(bias, np.float64)
    close(y, np.maximum(sums, 0), ulp=1e-5)
    grad = np.where(sums > 0, np.asarray(y, np.float64), 0)
    wanted = *truth(*flat, grad, name)[1:], grad.sum(0)
    for found, other in zip(grads, wanted, strict=True):
        close(found, other.reshape(found.shape), ulp=1e-5)


@_by_recipe
def test_a_gated_mlp_shares_its_copies(name: str) -> None:
    recipe = RECIPES[name]
    x, gate, up, down = (
        normal(i, *shape) / 6
        for i, shape in enumerate([(24, 32), (32, 48), (32, 48), (48, 32)])
    )

    def mlp(*given: Any) -> Any:
        return f8.gated_mlp(*given, recipe=recipe)

    y = jax.jit(mlp)(x, gate, up, down)
    zero = np.zeros((24, 48))
    hidden = [truth(x, w, zero, name)[0] for w in (gate, up)]
    hidden_in_f32 = np.asarray(jax.nn.silu(jnp.float32(hidden[0])) * hidden[1])
    close(y, truth(hidden_in_f32, down, np.zeros((24, 32)), name)[0], ulp=1e-2)
    text = str(jax.make_jaxpr(mlp)(x, gate, up, down))
    numbers = {"MXFP8": 32, "NVFP4": 16}[name]
    # That of x for the gradients, along its 24 rows, once for two products.
    assert len(re.findall(rf"u8\[32,{numbers}\] = name", text)) == 1
    calls = plans.inspect(jax.grad(lambda *given: mlp(*given).sum()), x, gate, up, down)
    assert {call.op for call in calls.calls} == {"block_scaled_matmul"}


@_by_recipe
def test_a_block_that_is_not_finite_stays_in_its_row(name: str) -> None:
    """Of inputs and of cotangents: loss scaling looks for what is not finite."""
    x, w, grad = normal(0, 64, 48), normal(1, 48, 8), normal(2, 64, 8)
    step = jax.jit(functools.partial(_step, recipe=RECIPES[name]))
    for value in (np.inf, np.nan):
        y, *_ = step(x.at[3, 4].set(value), w, grad)
        assert np.isnan(np.asarray(y[3])).all()
        assert np.isfinite(np.delete(np.asarray(y), 3, 0)).all()
        _, x_grad, w_grad = step(x, w, grad.at[3, 4].set(value))
        assert np.isnan(np.asarray(x_grad[3])).all()
        assert np.isfinite(np.delete(np.asarray(x_grad), 3, 0)).all()
        assert np.isnan(np.asarray(w_grad[:, 4])).all()
        assert np.isfinite(np.delete(np.asarray(w_grad), 4, 1)).all()


def _step(x: Any, w: Any, grad: Any, recipe: Any, where: Any = None) -> Any:
    """Return a layer's result and its gradients."""

    def layer(x: Any, w: Any) -> Any:
        return f8.dense(x, w, recipe=recipe, w_sharding=where)

    y, back = jax.vjp(layer, x, w)
    return y, *back(grad)


# --- transformations ------------------------------------------------------------------


@_by_recipe
def test_vmap_is_each_example_by_itself(name: str) -> None:
    step = jax.jit(functools.partial(_step, recipe=RECIPES[name]))
    x, w, grad = normal(0, 3, 20, 48), normal(1, 3, 48, 16), normal(2, 3, 20, 16)
    for axes in ((0, 0, 0), (0, None, 0), (None, 0, 0)):
        given = [
            array if axis == 0 else array[1]
            for array, axis in zip((x, w, grad), axes, strict=True)
        ]
        found = jax.jit(jax.vmap(step, axes))(*given)
        for i in range(3):
            one = [
                array[i] if axis == 0 else array
                for array, axis in zip(given, axes, strict=True)
            ]
            for each, other in zip(found, step(*one), strict=True):
                close(each[i], np.asarray(other, np.float64), ulp=1e-6)


@_by_recipe
def test_scan_and_remat(name: str) -> None:
    """Layers in a scan, with and without remat, equal layers one by one."""
    count, recipe = 2, RECIPES[name]
    w, x = normal(0, count, 32, 32) / 6, normal(1, 16, 32)

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(f8.dense(x, w, recipe=recipe))

    def by_scan(w: Any, run: Any) -> Any:
        return jax.lax.scan(lambda x, w: (run(x, w), None), x, w)[0].sum()

    def one_by_one(w: Any) -> Any:
        return functools.reduce(layer, w, x).sum()

    wanted = np.asarray(jax.jit(jax.grad(one_by_one))(w), np.float64)
    policy = checkpoint_policies.f8_saveable
    for run in (layer, jax.checkpoint(layer), jax.checkpoint(layer, policy=policy)):
        # A number beside a border of the format may be rounded the other way.
        close(jax.jit(jax.grad(by_scan), static_argnums=1)(w, run), wanted, ulp=0.02)


def test_copies_are_what_is_saved() -> None:
    x, w = normal(0, 64, 32).astype("bfloat16"), normal(1, 32, 96).astype("bfloat16")

    def layer(x: Any) -> Any:
        y = f8.dense(jnp.sin(x), w, recipe=f8.MXFP8())
        return y.astype(jnp.float32).sum()

    for policy, count in ((checkpoint_policies.f8_saveable, 1), (None, 2)):
        run = jax.checkpoint(layer, policy=policy)
        text = str(jax.make_jaxpr(jax.grad(run))(x))
        # The copy of x for the gradient, along its 64 rows.
        assert len(re.findall(r"u8\[32,64\] = name", text)) == count


@_by_recipe
def test_forward_mode_and_higher_orders_are_those_of_the_rounded(name: str) -> None:
    """Written out in float64: rounding counts as the identity."""
    recipe = RECIPES[name]
    x, w, along = normal(0, 32, 48), normal(1, 48, 16) / 7, normal(2, 48, 16)

    def loss(w: Any) -> Any:
        return jnp.sin(f8.dense(x, w, recipe=recipe)).sum()

    def all_of_it(w: Any) -> Any:
        return (
            jax.jvp(loss, (w,), (along,))[1],
            jax.jvp(jax.grad(loss), (w,), (along,))[1],
            jax.grad(lambda w: (jax.grad(loss)(w) * along).sum())(w),
            jax.grad(lambda w: jax.jvp(loss, (w,), (along,))[1])(w),
        )

    found = jax.jit(all_of_it)(w)
    # Inputs have a copy for the product, and one for the gradient of the weights. What
    # is differentiated again is the product, with cotangents as they are.
    inner, outer = rounded(x, name), rounded(x.T, name).T
    y = inner @ rounded(w.T, name).T
    by_inner, by_outer = (
        each @ np.asarray(along, np.float64) for each in (inner, outer)
    )
    wanted = (
        np.asarray(np.sum(np.cos(y) * by_inner)),
        outer.T @ (-np.sin(y) * by_inner),
        inner.T @ (-np.sin(y) * by_outer),
        inner.T @ (-np.sin(y) * by_inner),
    )
    for each, other in zip(found, wanted, strict=True):
        close(each, other, ulp=1e-5)


@_by_recipe
def test_symbolic_sizes_wide_types_and_strict_promotion(name: str) -> None:
    step = functools.partial(_step, recipe=RECIPES[name])
    w = normal(1, 48, 16)
    (rows,) = jax.export.symbolic_shape("rows")
    kinds = [jax.ShapeDtypeStruct((rows, n), jnp.float32) for n in (48, 16)]
    exported = jax.export.export(jax.jit(step))(kinds[0], w, kinds[1])
    x, grad = normal(0, 24, 48), normal(2, 24, 16)
    wanted = jax.jit(step)(x, w, grad)
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        wide = jax.jit(step)(x, w, grad)
    for each, *others in zip(wanted, exported.call(x, w, grad), wide, strict=True):
        for other in others:
            assert other.dtype == jnp.float32
            close(other, np.asarray(each, np.float64), ulp=2e-3)


@_by_recipe
@pytest.mark.parametrize("sizes", [(0, 32, 16), (3, 0, 16), (3, 32, 0)])
def test_arrays_without_elements(name: str, sizes: tuple[int, int, int]) -> None:
    rows, depth, columns = sizes
    x, w, grad = (
        jnp.ones(shape) for shape in ((rows, depth), (depth, columns), (rows, columns))
    )
    found = jax.jit(functools.partial(_step, recipe=RECIPES[name]))(x, w, grad)
    for each, like in zip(found, (grad, x, w), strict=True):
        assert each.shape == like.shape
        assert not each.any()


# --- meshes ---------------------------------------------------------------------------


@_by_recipe
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("split", ["rows", "columns", "sum", "weights"])
def test_meshes_change_nothing(name: str, kind: Any, split: str) -> None:
    x, w, grad = normal(0, 4, 32, 128), normal(1, 128, 64), normal(2, 4, 32, 64)
    specs, where = {
        "rows": ((("d", None, None), (None, None)), None),
        "columns": ((("d", None, None), (None, "t")), None),
        "sum": ((("d", None, "t"), ("t", None)), None),
        "weights": ((("d", None, None), ("d", None)), PartitionSpec(None, None)),
    }[split]
    step = functools.partial(_step, recipe=RECIPES[name], where=where)
    mesh = mesh_of(kind, d=4, t=2)
    with jax.set_mesh(mesh):
        last = "t" if split == "columns" else None
        given = placed(mesh, (x, w, grad), (*specs, ("d", None, last)))
        run = jax.jit(step)
        found = run(*given)
        sent = collectives(run, *given) if split == "rows" else {}
    wanted = jax.jit(functools.partial(_step, recipe=RECIPES[name]))(x, w, grad)
    for each, other in zip(found, wanted, strict=True):
        close(each, np.asarray(other, np.float64), ulp=2e-3)
    # Each device has whole blocks of rows: sums are added up, and nothing is gathered.
    assert {*sent} <= {"all-reduce"}


# --- graphs ---------------------------------------------------------------------------


def _drawn(graph: Graph) -> list[jax.Array]:
    """Return numbers and scales of every size that the formats have."""
    found = []
    for i, each in enumerate(graph.input_tensors):
        x = np.random.default_rng(i).standard_normal(each.stored_shape)
        x = np.exp2(np.round(x * 2)) if each.name.startswith("scale") else x * 3
        found.append(jnp.asarray(x.astype(jax_dtype(each.dtype))))
    return found


@pytest.mark.once
@_by_recipe
@pytest.mark.parametrize("sizes", [(128, 256, 8), (17, 150, 5)])
def test_what_cudnn_gets_means_the_same(name: str, sizes: tuple[int, ...]) -> None:
    graph = block_graph(name, *sizes, dtype="f32", batch=2, shared=("b",))
    (way,) = legalize(graph, _B200).candidates
    operands = _drawn(graph)
    (found,), (wanted,) = run_way(way, operands), evaluate(graph, operands)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
    is_padded = any("padded" in note for note in way.notes)
    assert is_padded == (sizes == (17, 150, 5))
    kernel = from_json(to_json(way.graph))
    (_, m, r), (*_, n) = (kernel.tensor(role).dims for role in "ab")
    assert (m % 128, n % 128, r % (4 * FORMATS[name][0])) == (0, 0, 0)
    assert all(kernel.tensor(role).order == (0, 1, 2) for role in ("a", "scale_a"))
    assert all(kernel.tensor(role).order == (0, 2, 1) for role in ("b", "scale_b"))


@pytest.mark.once
def test_scales_lie_in_tiles_as_nvidia_documents_them() -> None:
    """cuBLAS's guide: row i and block j of a tile at (i % 32) 16 + (i // 32) 4 + j."""
    graph = block_graph("MXFP8", 256, 128, 8)
    (way,) = legalize(graph, _B200).candidates
    operands = _drawn(graph)
    place = graph.inputs.index("scale_a")
    codes = (np.arange(256 * 8) % 251).astype(np.uint8).reshape(1, 256, 8)
    operands[place] = jnp.asarray(codes).view(jnp.float8_e8m0fnu)
    changed = way.before(operands)[way.graph.inputs.index("scale_a")]
    found = np.asarray(changed).view(np.uint8).ravel()
    for i, j in np.ndindex(256, 8):
        tile = (i // 128 * 2 + j // 4) * 512
        at = tile + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
        assert found[at] == codes[0, i, j]


def test_the_call_has_the_dtypes_of_the_formats() -> None:
    """A program for CUDA: two numbers of 4 bits in a byte are an array of f4."""
    x, w = normal(0, 256, 128), normal(1, 128, 384)
    for name, dtypes in {
        "MXFP8": ("256x128xf8E4M3FN", "384x128xf8E4M3FN", "256x4xf8E8M0FNU"),
        "NVFP4": ("256x128xf4E2M1FN", "384x128xf4E2M1FN", "256x8xf8E4M3FN"),
    }.items():
        layer = functools.partial(
            f8.dense, recipe=RECIPES[name], implementation="cudnn"
        )
        lowered = jax.jit(layer).trace(x, w).lower(lowering_platforms=("cuda",))
        calls = re.findall(r'op = "block_scaled_matmul".* : (.*)', lowered.as_text())
        assert len(calls) == 1
        assert all(f"tensor<1x{dtype}>" in calls[0] for dtype in dtypes)


def test_tiles_are_filled() -> None:
    (way,) = legalize(block_graph("NVFP4", 128, 128, 4), _B200).candidates
    text = to_json(way.graph).replace("128", "120")
    with pytest.raises(GraphError, match="120 rows, 120 columns and 4 blocks do not"):
        from_json(text)


# --- errors ---------------------------------------------------------------------------


def test_what_is_refused() -> None:
    x, w, mx = normal(0, 8, 32), normal(1, 32, 4), f8.MXFP8()
    state: Any = f8.dense_state(f8.Delayed())
    with pytest.raises(TypeError, match=re.escape("f8.MXFP8() has none. Leave it")):
        f8.dense(x, w, recipe=mx, state=state)
    gated: Any = f8.gated_mlp_state(f8.Delayed())
    with pytest.raises(TypeError, match=re.escape("f8.NVFP4() has none. Leave it")):
        f8.gated_mlp(x, w, w, w.T, recipe=f8.NVFP4(), state=gated)
    assert f8.dense_state(mx) is None
    assert f8.gated_mlp_state(f8.NVFP4()) is None
    with pytest.raises(ValueError, match="has batch axes"):
        f8.dot_general(x, w, (((), ()), ((0,), (0,))), recipe=mx)
    (rows,) = jax.export.symbolic_shape("rows")
    kind = jax.ShapeDtypeStruct((rows, 32), jnp.float32)
    with pytest.raises(UnsupportedError, match="symbolic dimensions"):
        jax.eval_shape(
            lambda x: f8.dense(x, w, recipe=mx, implementation="cudnn"), kind
        )
