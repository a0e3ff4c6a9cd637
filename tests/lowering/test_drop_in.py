# SPDX-License-Identifier: Apache-2.0
"""Tests that conv, matmul, dot_general and sdpa take and return what JAX's do."""

import functools
import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_cudnn import conv, dot_general, matmul, sdpa
from tests.common import compiling
from tests.lowering.drop_in import OPS, ROWS_BY_COLUMNS, Function, type_of, weak
from tests.products.shared.fused import graphs

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_DTYPES = {
    name: jnp.dtype(name)
    for name in (
        *("bfloat16", "float16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e5m2"),
        *("int8", "uint8", "int16", "int32", "int64", "bool"),
        *("complex64", "complex128"),
    )
}
_F8 = ("float8_e4m3fn", "float8_e5m2")


def _drawn(dtype: Any, seed: int = 0) -> jax.Array:
    """Return small numbers that every dtype has; their sums are exact in most."""
    values = np.random.default_rng(seed).integers(0, 3, (3, 3))
    return jnp.asarray(values).astype(dtype)


def _outcome(call: Callable[[], jax.Array]) -> Any:
    """Return the type of what a call gives, or None where it raises."""
    try:
        found = jax.eval_shape(call)
    except (TypeError, ValueError):
        return None
    return found.shape, found.dtype, found.weak_type


# --- signatures -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (conv, lax.conv_general_dilated),
        (dot_general, lax.dot_general),
        (matmul, jnp.matmul),
        (sdpa, jax.nn.dot_product_attention),
    ],
    ids=lambda f: f.__name__,
)
def test_arguments_have_jax_s_names_order_and_defaults(
    ours: Function, theirs: Function
) -> None:
    mine = inspect.signature(ours).parameters
    others = inspect.signature(theirs).parameters
    missing = set(others) - set(mine)
    assert missing <= {"local_window_size"}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)
    order = [name for name, p in others.items() if p.kind not in positional]
    assert list(mine)[: len(order)] == order
    for name, parameter in others.items():
        if name in missing or name == "implementation":
            continue
        if parameter.default is inspect.Parameter.empty:
            # What lax asks for may have a default here.
            assert mine[name].default in (inspect.Parameter.empty, None, "VALID")
        else:
            assert mine[name].default == parameter.default, name
        assert mine[name].kind is not inspect.Parameter.POSITIONAL_ONLY


def test_every_argument_of_lax_may_be_positional() -> None:
    x = jnp.ones((1, 2, 4, 4))
    w = jnp.ones((3, 2, 2, 2))
    numbers = ("NCHW", "OIHW", "NCHW")
    args = (x, w, (1, 1), "SAME", (1, 1), (1, 1), numbers, 1, 1, "high", jnp.float32)
    np.testing.assert_allclose(
        conv(*args, None), lax.conv_general_dilated(*args, None), rtol=1e-6
    )
    named = conv(lhs=x, rhs=w, window_strides=(1, 1), padding="SAME")
    np.testing.assert_allclose(named, conv(*args), rtol=1e-6)
    a = jnp.ones((3, 3))
    assert dot_general(a, a, ROWS_BY_COLUMNS, None, jnp.float32, None).shape == (3, 3)


# --- dtypes ---------------------------------------------------------------------------


def _pairs(op: str) -> list[tuple[str, str]]:
    if op == "conv":
        return [(name, name) for name in _DTYPES]
    return list(itertools.product(_DTYPES, repeat=2))


def _is_ours_alone(op: str, first: str, second: str) -> bool:
    """JAX's matmul does not promote f8 to wider floats, nor one f8 to the other."""
    kinds = {first, second}
    return op == "matmul" and len(kinds) == 2 and bool(kinds & {*_F8})


def _compare(calls: dict[Any, Callable[[Function], jax.Array]], op: str) -> None:
    """Run all calls of ours and JAX's in one program, and compare types and values."""
    ours, theirs, _ = OPS[op]
    got, want = jax.jit(
        lambda: [[call(f) for call in calls.values()] for f in (ours, theirs)],
        compiler_options=compiling.BY_DEFAULT,
    )()
    for key, mine, other in zip(calls, got, want, strict=True):
        assert type_of(mine) == type_of(other), key
        kind = jnp.complex128 if jnp.iscomplexobj(other) else jnp.float64
        np.testing.assert_array_equal(
            np.asarray(mine).astype(kind), np.asarray(other).astype(kind), str(key)
        )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", OPS)
def test_results_have_jax_s_dtypes_and_values(op: str) -> None:
    call = OPS[op][2]
    operands = {name: (_drawn(d), _drawn(d, 1)) for name, d in _DTYPES.items()}
    with jax.numpy_dtype_promotion("standard"):
        pairs = [pair for pair in _pairs(op) if not _is_ours_alone(op, *pair)]
        _compare(
            {
                (m, n): lambda f, m=m, n=n: call(f, operands[m][0], operands[n][1])
                for m, n in pairs
            },
            op,
        )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", OPS)
def test_preferred_element_types_are_jax_s(op: str) -> None:
    ours, theirs, call = OPS[op]
    calls = {}
    more = 0
    for name, preferred in itertools.product(_DTYPES, repeat=2):
        a, b = _drawn(_DTYPES[name]), _drawn(_DTYPES[name], 1)

        def one(f: Any, a: Any = a, b: Any = b, p: Any = _DTYPES[preferred]) -> Any:
            return call(f, a, b, preferred_element_type=p)

        found = [_outcome(lambda f=f, one=one: one(f)) for f in (ours, theirs)]
        if found[1] is None:
            more += found[0] is not None
            continue
        assert found[0] == found[1], (name, preferred)
        calls[name, preferred] = one
    _compare(calls, op)
    assert len(calls) > 60
    # A narrower float than the operands: what it is to be rounded to.
    assert more <= 16


@pytest.mark.parametrize("name", _F8)
def test_f8_meets_wider_floats(name: str) -> None:
    a, b = _drawn(_DTYPES[name]), _drawn(jnp.bfloat16, 1)
    product = matmul(a, b)
    assert product.dtype == jnp.bfloat16
    truth = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_array_equal(np.asarray(product, np.float64), truth)


def test_operands_of_a_convolution_have_one_dtype() -> None:
    x, w = jnp.ones((1, 1, 3, 3)), jnp.ones((1, 1, 3, 3), jnp.bfloat16)
    for function in (conv, lax.conv_general_dilated):
        with pytest.raises(TypeError, match="dtype"):
            function(x, w, (1, 1), "VALID")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_sums_for_f64_are_kept_in_f64(op: str, dtype: str) -> None:
    ours, _, call = OPS[op]
    rng = np.random.default_rng(2)
    draw = (
        rng.integers(-99, 99, (2, 3, 3))
        if dtype == "int8"
        else rng.normal(size=(2, 3, 3))
    )
    a, b = jnp.asarray(draw).astype(dtype)

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return call(ours, a, b, preferred_element_type=jnp.float64, bias=1 / 3)

    first, second = (np.asarray(x, np.float64) for x in (a, b))
    truth = (first * second).sum() if op == "conv" else first @ second
    got = run(a, b)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, np.reshape(truth + 1 / 3, got.shape), rtol=1e-14)
    if dtype == "float32":
        cotangent = jnp.asarray(rng.normal(size=got.shape))
        (grad, _) = jax.vjp(run, a, b)[1](cotangent)
        whole = np.asarray(cotangent).sum() * second
        want = whole if op == "conv" else np.asarray(cotangent) @ second.T
        # Rounded once, to the operand's f32.
        np.testing.assert_array_equal(grad, want.astype(np.float32))


# --- weak types -----------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("is_weak", [(True, True), (True, False), (False, True)])
def test_weak_types_are_jax_s(op: str, is_weak: tuple[bool, bool]) -> None:
    ours, theirs, call = OPS[op]
    for dtype in (jnp.float64, jnp.int64, jnp.complex128):
        a, b = (
            weak(_drawn(dtype, i)) if each else _drawn(dtype, i)
            for i, each in enumerate(is_weak)
        )
        for options in ({}, {"preferred_element_type": dtype}):
            found = [
                jax.jit(functools.partial(call, f, **options))(a, b)
                for f in (ours, theirs)
            ]
            assert type_of(found[0]) == type_of(found[1]), (dtype, options)
        if dtype != jnp.float64:
            continue

        def loss(a: Any, b: Any, f: Any) -> Any:
            return jnp.sum(call(f, a, b))

        grads = [jax.grad(loss, (0, 1))(a, b, f) for f in (ours, theirs)]
        for mine, other in zip(*grads, strict=True):
            assert type_of(mine) == type_of(other)
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("op", ["matmul", "dot_general"])
def test_a_weak_carry_of_a_scan_stays_weak(op: str) -> None:
    ours, _, call = OPS[op]
    x = weak(jnp.ones((3, 3)))

    def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return call(ours, carry, x), None

    carry, _ = jax.jit(lambda x: lax.scan(step, x, length=2))(x)
    assert type_of(carry) == ((3, 3), jnp.float32, True)
    # It gives way to the dtype of what it meets.
    assert (carry + jnp.ones((3, 3), jnp.bfloat16)).dtype == jnp.bfloat16


# --- precision ------------------------------------------------------------------------

_LEVELS = (
    *("default", "fastest", "bfloat16", "high", "bfloat16_3x", "tensorfloat32"),
    *("highest", "float32"),
)
_PRECISIONS: tuple[Any, ...] = (
    None,
    *_LEVELS,
    *lax.Precision,
    *lax.DotAlgorithmPreset,
    *(preset.name for preset in lax.DotAlgorithmPreset),
    lax.DotAlgorithm(
        lhs_precision_type=np.float32,
        rhs_precision_type=np.float32,
        accumulation_type=np.float32,
    ),
    ("high", "high"),
    ("default", "highest"),
    (lax.Precision.HIGHEST, lax.Precision.HIGH),
    *("nonsense", "HIGHEST", 3, (), ("high",), ("high", "high", "high")),
    *((None, None), ("F32_F32_F32", "high"), (3, 3)),
)


@pytest.mark.parametrize("op", OPS)
def test_precisions_that_lax_takes_are_passed_on(op: str) -> None:
    ours, theirs, call = OPS[op]
    x = jnp.ones((3, 3))

    def jaxpr(f: Function, precision: Any) -> str:
        return str(jax.make_jaxpr(lambda x: call(f, x, x, precision=precision))(x))

    def text(f: Function, precision: Any) -> list[str]:
        """Return what the program says of the precision of each product."""
        run = jax.jit(lambda x: call(f, x, x, precision=precision))
        lowered = run.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r"precision(?:_config)? = \[[^\]]*\]|algorithm = <[^>]*>",
                          lowered)  # fmt: skip

    def xla(*args: Any, **options: Any) -> jax.Array:
        return ours(*args, **options, implementation="xla")

    taken = 0
    for precision in _PRECISIONS:
        try:
            jaxpr(theirs, precision)
        except (TypeError, ValueError):
            with pytest.raises(
                ValueError, match=rf"^{op}: precision=.*is not one that"
            ):
                jaxpr(ours, precision)
            continue
        taken += 1
        jaxpr(ours, precision)
        try:
            want = text(theirs, precision)
        except (TypeError, ValueError):
            continue  # an algorithm that XLA has not for these operands
        assert text(xla, precision) == want, precision
    assert taken > 40


@pytest.mark.parametrize("op", OPS)
def test_the_default_precision_may_be_an_algorithm(op: str) -> None:
    ours, theirs, call = OPS[op]
    x = jnp.ones((3, 3))
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        got, want = call(ours, x, x), call(theirs, x, x)
    np.testing.assert_array_equal(got, want)


def test_a_list_is_a_pair_of_precisions() -> None:
    x = jnp.ones((3, 3))
    np.testing.assert_array_equal(matmul(x, x, precision=["high", "highest"]), x @ x)


# --- f8 -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", _F8)
@pytest.mark.parametrize("preferred", ["bfloat16", "float16", "float32", None])
def test_gradients_of_f8_products_are_those_of_their_values(
    op: str, dtype: str, preferred: str | None
) -> None:
    ours, _, call = OPS[op]
    rng = np.random.default_rng(8)
    a, b = (
        jnp.asarray(np.asarray(48 * rng.normal(size=(3, 3)), dtype)) for _ in range(2)
    )
    # Far below what f8 has, but for a result in f8, whose cotangent JAX gives in f8.
    scale = 1.0 if preferred is None else 2.0**-13

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return call(ours, a, b, preferred_element_type=preferred)

    value, pullback = jax.vjp(run, a, b)
    cotangent = jnp.asarray(
        np.asarray(scale * rng.normal(size=value.shape), value.dtype)
    )
    first, second, outer = (np.asarray(x, np.float64) for x in (a, b, cotangent))
    if op == "conv":
        want = outer.sum() * second, outer.sum() * first
    else:
        want = outer @ second.T, first.T @ outer
    eps = float(jnp.finfo(dtype).eps)
    for got, truth in zip(pullback(cotangent), want, strict=True):
        # Rounded once to f8: half of its spacing, also where that is the smallest.
        least = float(jnp.finfo(dtype).smallest_subnormal)
        truth = np.clip(truth, *(float(jnp.finfo(dtype).max) * s for s in (-1, 1)))
        np.testing.assert_allclose(
            np.asarray(got, np.float64), truth, rtol=0.6 * eps, atol=0.6 * least
        )


# --- attention ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "bfloat16", "float16"])
def test_biases_of_attention_are_taken_as_jax_nn_takes_them(dtype: str) -> None:
    rng = np.random.default_rng(9)
    q, k, v = jnp.asarray(np.asarray(rng.normal(size=(3, 2, 5, 4, 8)), jnp.float32))
    bias = jnp.asarray(rng.integers(0, 4, (2, 4, 5, 5))).astype(dtype)
    with jax.numpy_dtype_promotion("standard"):
        want = jax.nn.dot_product_attention(q, k, v, bias)
    np.testing.assert_allclose(sdpa(q, k, v, bias), want, 1e-5, 1e-5)
    (graph, _), = graphs(sdpa, q, k, v, bias)  # fmt: skip
    assert graph.tensor("bias").dtype == {"bfloat16": "bf16", "float16": "f16"}.get(
        dtype, "f32"
    )
