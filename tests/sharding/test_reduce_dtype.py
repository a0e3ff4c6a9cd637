# SPDX-License-Identifier: Apache-2.0
"""Tests of `plans.using(reduce_dtype=...)`: in which dtype partial sums are added.

The truth is NumPy's in float64, rounded where it is sent, and plain JAX on the same
shards. Operands are small integers, whose shares f32 holds exactly, so that all bits
are known. XLA on a CPU turns all-reduces of bf16 into those of f32, and then rounds no
shares in plain JAX. So plain JAX and texts are compared for f16.
"""

import re
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
from jax_cudnn import f8, plans
from jax_cudnn.config import ReduceDtype
from jax_cudnn.lowering import traced_graphs
from tests.common.devices import Function, collectives, mesh_of, placed

_RNG = np.random.default_rng(0)
# On a mesh of 2 x 2, the product has two shares along "y", and the gradient of its
# weights has two along "x".
_SPECS = [("x", "y"), ("y",), ("x",)]


def _integers(dtype: Any, *shape: int) -> jax.Array:
    return jnp.asarray(np.asarray(_RNG.integers(-40, 41, shape), dtype))


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax_cudnn.matmul(x, w)


def _with_gradients(product: Function) -> Callable[..., tuple[jax.Array, ...]]:
    def run(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        result, pullback = jax.vjp(product, x, w)
        return result, *pullback(cotangent)

    return run


def _compiled(
    function: Callable[..., Any], operands: list[jax.Array], reduce_dtype: ReduceDtype
) -> tuple[Any, set[str]]:
    """Return a function's results, and the dtypes of what devices add up."""
    with plans.using(reduce_dtype=reduce_dtype):
        program = jax.jit(lambda *xs: function(*xs)).lower(*operands).compile()
    text = program.as_text()
    assert text is not None
    sums = re.findall(r"= (.*) (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
    return program(*operands), {
        x for each in sums for x in re.findall(r"\w+(?=\[)", each)
    }


def _assert_same(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x, float), np.asarray(y, float))


def _halves(a: Any, b: Any) -> list[np.ndarray]:
    """Return the shares of a @ b that two devices have, in float64."""
    columns, rows = (
        np.split(np.asarray(a, float), 2, 1),
        np.split(np.asarray(b, float), 2),
    )
    return [x @ y for x, y in zip(columns, rows, strict=True)]


def _rounded(x: Any, dtype: Any) -> np.ndarray:
    return np.asarray(x.astype(np.float32), dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_are_those_of_plain_jax_or_rounded_once(
    kind: AxisType, dtype: Any
) -> None:
    operands = [_integers(dtype, *s) for s in ((6, 408), (408, 10), (6, 10))]
    sharded = placed(mesh_of(kind, x=2, y=2), operands, _SPECS)
    ours = _with_gradients(_product)

    x, w, cotangent = (np.asarray(each, np.float64) for each in operands)
    shares = [_halves(x, w), [cotangent @ w.T], _halves(x.T, cotangent)]

    wide, sent = _compiled(ours, sharded, "f32")
    _assert_same(wide, [_rounded(sum(each), dtype) for each in shares])
    assert sent == {"f32"}
    _assert_same(jax.jit(lambda *xs: ours(*xs))(*sharded), wide)

    narrow, sent = _compiled(ours, sharded, "operands")
    rounded = [[_rounded(x, dtype).astype(float) for x in each] for each in shares]
    _assert_same(narrow, [_rounded(sum(each), dtype) for each in rounded])
    for i in (0, 2):
        assert np.any(np.asarray(wide[i]) != np.asarray(narrow[i]))
    if dtype == jnp.float16:
        assert sent == {"f16"}
        plain = placed(mesh_of(x=2, y=2), operands, _SPECS)
        _assert_same(narrow, jax.jit(_with_gradients(jnp.matmul))(*plain))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_of_f8_products_are_those_of_a_layer_in_bf16(
    kind: AxisType, dtype: Any
) -> None:
    # Integers up to 7, and the power of two that is their scale, are exact in f8. So
    # the copies stand for the operands, and bits are those of products in 16 bits.
    operands = [
        jnp.asarray(np.asarray(_RNG.integers(-7, 8, s), dtype))
        for s in ((6, 2040), (2040, 10), (6, 10))
    ]
    operands = [x.at[0, 0].set(7) for x in operands]
    sharded = placed(mesh_of(kind, x=2, y=2), operands, _SPECS)
    ours = _with_gradients(f8.dense)

    x, w, cotangent = (np.asarray(each, np.float64) for each in operands)
    shares = [_halves(x, w), [cotangent @ w.T], _halves(x.T, cotangent)]
    whole = [_rounded(sum(each), dtype) for each in shares]
    wide, sent = _compiled(ours, sharded, "f32")
    _assert_same(wide, whole)
    assert sent == {"f32"}

    narrow, _ = _compiled(ours, sharded, "operands")
    if dtype == jnp.float16:
        # Before the scales are applied, sums are beyond f16.
        _assert_same(narrow, whole)
    else:
        rounded = [[_rounded(x, dtype).astype(float) for x in each] for each in shares]
        _assert_same(narrow, [_rounded(sum(each), dtype) for each in rounded])
        assert np.any(np.asarray(wide[0]) != np.asarray(narrow[0]))
    if kind == AxisType.Auto:
        with plans.using(reduce_dtype="operands"):
            calls = plans.inspect(lambda *xs: ours(*xs), *sharded).calls
        said = r"a partial sum of \S+, in (\w+)\."
        told = [re.findall(said, " ".join(call.reasons)) for call in calls]
        name = "f32" if dtype == jnp.float16 else "bf16"
        assert sorted(told) == [[], [name], [name]]


@pytest.mark.parametrize("reduce_dtype", ["f32", "operands"])
def test_f8_products_with_results_in_f32_are_added_up_in_f32(
    reduce_dtype: ReduceDtype,
) -> None:
    # The gradient of weights in f32 is f32, whatever the layer's dtype is.
    x, w, cotangent = (
        jnp.asarray(np.asarray(_RNG.integers(-7, 8, s), dtype)).at[0, 0].set(7)
        for s, dtype in (
            ((2040, 6), jnp.bfloat16),
            ((6, 10), jnp.float32),
            ((2040, 10), jnp.bfloat16),
        )
    )
    sharded = placed(mesh_of(x=8), [x, w, cotangent], [("x",), (), ("x",)])
    (_, _, got), sent = _compiled(_with_gradients(f8.dense), sharded, reduce_dtype)
    assert got.dtype == jnp.float32
    _assert_same(got, np.asarray(x, np.float64).T @ np.asarray(cotangent, np.float64))
    assert sent == {"f32"}


def test_examples_of_a_vmap_and_what_follows_a_sum() -> None:
    shapes = ((3, 4, 408), (3, 408, 10), (10,))
    operands = [_integers(jnp.float16, *shape) for shape in shapes]
    specs = [(None, "x", "y"), (None, "y"), ()]
    sharded = placed(mesh_of(x=2, y=2), operands, specs)

    def ours(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(x, w, bias=bias, activation="relu")

    def plain(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        # What follows the sum stays in f32, and is rounded once.
        wide = (x @ w).astype(jnp.float32) + bias.astype(jnp.float32)[None]
        return jax.nn.relu(wide).astype(x.dtype)

    got, sent = _compiled(jax.vmap(ours, (0, 0, None)), sharded, "operands")
    _assert_same(got, jax.jit(jax.vmap(plain, (0, 0, None)))(*sharded))
    assert sent == {"f16"}


def test_what_overflows_is_that_of_plain_jax() -> None:
    x = jnp.array([[300] * 4, [-300] * 4, [jnp.inf] * 4, [jnp.nan] * 4, [1] * 4]).T
    x = jnp.concatenate([x, -x]).T.astype(jnp.float16)
    w = jnp.full((8, 6), 60, jnp.float16)
    sharded = placed(mesh_of(y=2), [x, w], [(None, "y"), ("y",)])
    narrow, _ = _compiled(_product, sharded, "operands")
    _assert_same(narrow, jax.jit(jnp.matmul)(*sharded))
    wide, _ = _compiled(_product, sharded, "f32")
    # Shares of 72,000 are inf in f16, and cancel in f32.
    assert np.isnan(narrow[:4]).all()
    assert not wide[:2].any()
    assert np.isnan(wide[2:4]).all()
    _assert_same(narrow[4:], wide[4:])


def test_sums_that_a_program_wants_in_parts_are_scattered_in_that_dtype() -> None:
    # Weights that are split as the tokens are: each device keeps its part's gradient.
    x, cotangent = (_integers(jnp.float16, *shape) for shape in ((408, 6), (408, 10)))
    mesh = mesh_of(x=2)
    sharded = placed(mesh, [x, cotangent], [("x",), ("x",)])
    place = NamedSharding(mesh, P(None, "x"))

    def gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        w = jnp.zeros((6, 10), x.dtype)
        (found,) = jax.vjp(lambda w: _product(x, w), w)[1](cotangent)
        return jax.lax.with_sharding_constraint(found, place)

    shares = _halves(x.T, cotangent)
    wide, sent = _compiled(gradient, sharded, "f32")
    _assert_same(wide, _rounded(sum(shares), jnp.float16))
    assert sent == {"f32"}
    narrow, sent = _compiled(gradient, sharded, "operands")
    rounded = [_rounded(each, jnp.float16).astype(float) for each in shares]
    _assert_same(narrow, _rounded(sum(rounded), jnp.float16))
    assert sent == {"f16"}
    with plans.using(reduce_dtype="operands"):
        assert collectives(lambda *xs: gradient(*xs), *sharded) == {"reduce-scatter": 1}


def test_fused_functions_add_up_in_the_dtypes_that_they_say() -> None:
    operands = [_integers(jnp.float16, *s) for s in ((6, 408), (408, 10))]
    sharded = placed(mesh_of(y=2), operands, [(None, "y"), ("y",)])

    def relu(dtype: Any) -> Callable[..., jax.Array]:
        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            product = jnp.matmul(x, w, preferred_element_type=dtype)
            return jax.nn.relu(product * 0.5).astype(x.dtype)

        return jax_cudnn.fuse(run)

    shares = _halves(*operands)
    rounded = [_rounded(each, jnp.float16).astype(float) for each in shares]
    for dtype, name, total in (
        (jnp.float16, "f16", _rounded(sum(rounded), jnp.float16)),
        (jnp.float32, "f32", sum(shares)),
    ):
        got, sent = _compiled(relu(dtype), sharded, "operands")
        _assert_same(got, _rounded(np.maximum(total * 0.5, 0), jnp.float16))
        assert sent == {name}


@pytest.mark.parametrize("reduce_dtype", ["f32", "operands"])
def test_f32_results_are_added_up_in_f32(reduce_dtype: ReduceDtype) -> None:
    operands = [_integers(jnp.float16, *s) for s in ((6, 408), (408, 10))]
    sharded = placed(mesh_of(y=8), operands, [(None, "y"), ("y",)])

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(x, w, preferred_element_type=jnp.float32)

    got, sent = _compiled(product, sharded, reduce_dtype)
    x, w = (np.asarray(each, np.float64) for each in operands)
    _assert_same(got, x @ w)
    assert sent == {"f32"}


def test_errors_of_eight_shares_and_of_convolutions_are_bounded() -> None:
    # Each of the shares is rounded, and each sum of them.
    images, filters, cotangent = (
        jnp.asarray(np.asarray(_RNG.standard_normal(shape), jnp.float16))
        for shape in ((16, 5, 6, 8), (1, 1, 8, 12), (16, 5, 6, 12))
    )
    specs = [("x",), (), ("x",)]
    sharded = placed(mesh_of(x=8), [images, filters, cotangent], specs)

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        names = ("NHWC", "HWIO", "NHWC")
        return jax_cudnn.conv(x, w, padding="VALID", dimension_numbers=names)

    def gradient(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(lambda w: convolved(x, w), w)[1](cotangent)[0]

    x, g = (np.asarray(each, np.float64) for each in (images, cotangent))
    parts = np.einsum(
        "dnyxc,dnyxo->dco", *(a.reshape(8, 2, *a.shape[1:]) for a in (x, g))
    )
    bound = 8 * 2**-11 * np.abs(parts).sum(0)
    got, sent = _compiled(gradient, sharded, "operands")
    assert np.all(np.abs(np.asarray(got, np.float64)[0, 0] - parts.sum(0)) < bound)
    assert sent == {"f16"}
    with plans.using(reduce_dtype="operands"):
        assert collectives(lambda *xs: gradient(*xs), *sharded) == {"all-reduce": 1}


def test_exports_and_plans_inspect_say_the_dtype() -> None:
    operands = [_integers(jnp.float16, *s) for s in ((6, 408), (408, 10))]
    sharded = placed(mesh_of(y=2), operands, [(None, "y"), ("y",)])
    for reduce_dtype, dtype in (("f32", "f32"), ("operands", "f16")):
        with plans.using(reduce_dtype=cast(ReduceDtype, reduce_dtype)):
            (call,) = plans.inspect(_product, *sharded).calls
            exported = jax.export.export(
                jax.jit(lambda *xs: _product(*xs)),
                disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
            )(*sharded)
            want = jax.jit(lambda *xs: _product(*xs))(*sharded)
        assert call.part is not None
        assert [each.dtype for each in call.part.output_tensors] == [dtype]
        share = f"Each of 2 devices has a partial sum of output, in {dtype}."
        assert share in call.reasons
        # The program says it, wherever it is loaded; one of the default says nothing.
        text = exported.mlir_module()
        asks = re.search(r"reduce_dtype.{1,9}operands", text) is not None
        assert asks == (reduce_dtype == "operands")
        loaded = jax.export.deserialize(exported.serialize())
        _assert_same(jax.jit(loaded.call)(*sharded), want)


def test_unknown_dtypes_are_refused_and_scopes_nest() -> None:
    with pytest.raises(ValueError, match="reduce_dtype='bf16' is not one of") as error:
        plans.using(reduce_dtype=cast(Any, "bf16"))
    assert "'f32', 'operands'. Pass \"operands\"" in str(error.value)
    x = jnp.ones((4, 8), jnp.bfloat16)

    def chosen() -> tuple[str, str]:
        (traced,) = traced_graphs(_product, x, x.T)
        _, options, _ = traced
        return options.reduce_dtype, options.implementation

    assert chosen() == ("f32", "auto")
    with plans.using(reduce_dtype="operands"), plans.using(implementation="xla"):
        assert chosen() == ("operands", "xla")
        with plans.using(reduce_dtype="f32"):
            assert chosen() == ("f32", "xla")
