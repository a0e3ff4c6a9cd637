# SPDX-License-Identifier: Apache-2.0
"""Tests ragged_dot against NumPy in float64, group by group."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn import ragged_dot
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.decision import precision_refusal
from tests.products.shared.grouped import grouped

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# Axes of different sizes.
_M, _K, _N, _G = 13, 7, 5, 4
_SIZES = {
    "full": (3, 1, 7, 2),
    "empty groups": (0, 9, 0, 4),
    "all in one": (0, 0, 13, 0),
    "rows in none": (2, 0, 5, 1),
    "all rows in none": (0, 0, 0, 0),
    "too many": (6, 5, 100, 3),
}
_EACH = pytest.mark.parametrize("sizes", _SIZES.values(), ids=_SIZES)


def _draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(np.asarray(rng.standard_normal(shape), dtype))


def _problem(dtype: Any = np.float32) -> tuple[jax.Array, ...]:
    """Return rows, matrices and a bias."""
    shapes = ((_M, _K), (_G, _K, _N), (_G, _N))
    lhs, rhs, bias = (_draw(*shape, dtype=dtype) for shape in shapes)
    return lhs, rhs, bias


def _assert_close(got: Any, want: Any, eps: float) -> None:
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=eps * max(1, np.abs(y).max()))


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2), (jnp.float16, 1e-3)],
)
@_EACH
def test_result_and_gradients_are_numpys(
    sizes: tuple[int, ...], dtype: Any, eps: float
) -> None:
    lhs, rhs, bias = _problem(dtype)
    cotangent = _draw(_M, _N, seed=1, dtype=dtype)
    output, back = jax.vjp(
        lambda *xs: ragged_dot(*xs[:2], jnp.array(sizes), bias=xs[2]), lhs, rhs, bias
    )
    assert output.dtype == dtype
    got = (output, *back(cotangent))
    assert [x.dtype for x in got] == [dtype] * 4
    _assert_close(got, grouped(lhs, rhs, sizes, bias, cotangent), eps)


@_EACH
def test_it_is_jaxs_function_with_its_derivatives(sizes: tuple[int, ...]) -> None:
    lhs, rhs, _ = _problem()
    ours = functools.partial(ragged_dot, group_sizes=jnp.array(sizes))
    theirs = functools.partial(jax.lax.ragged_dot, group_sizes=jnp.array(sizes))
    tangents = (_draw(_M, _K, seed=2), _draw(_G, _K, _N, seed=2))
    for run in (
        lambda f: f(lhs, rhs),
        lambda f: jax.jvp(f, (lhs, rhs), tangents)[1],
        lambda f: jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1))(lhs, rhs),
    ):
        for x, y in zip(
            jax.tree.leaves(run(ours)), jax.tree.leaves(run(theirs)), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_both_modes_and_second_order_agree_with_finite_differences() -> None:
    lhs, rhs, bias = _problem()
    sizes = jnp.array(_SIZES["rows in none"])
    with jax.enable_x64(True):
        operands = [x.astype(jnp.float64) for x in (lhs, rhs, bias)]

        @jax.jit
        def run(lhs: jax.Array, rhs: jax.Array, bias: jax.Array) -> jax.Array:
            return ragged_dot(lhs, rhs, sizes, bias=bias, activation="silu")

        assert run(*operands).dtype == jnp.float64
        check_grads(run, operands, order=2, modes=("fwd", "rev"))


def test_epilogue_follows_the_sums_in_f32_and_rows_in_no_group_have_no_bias() -> None:
    lhs, rhs, bias = _problem(jnp.bfloat16)
    sizes = _SIZES["rows in none"]
    for activation, function in (
        ("sigmoid", jax.nn.sigmoid),
        ("relu", jax.nn.relu),
        (jnp.tanh, jnp.tanh),
        (lambda x: jnp.where(x > 0, x, x**3), lambda x: jnp.where(x > 0, x, x**3)),
    ):
        got = ragged_dot(lhs, rhs, jnp.array(sizes), bias=bias, activation=activation)
        sums = grouped(lhs, rhs, sizes, bias).output
        want = function(jnp.asarray(sums, jnp.float32)).astype(jnp.bfloat16)
        # One rounding of the same f32 value, up to how its sum is ordered.
        np.testing.assert_allclose(
            np.asarray(got, "f4"), np.asarray(want, "f4"), rtol=2**-7, atol=1e-6
        )
    wide = ragged_dot(lhs, rhs, jnp.array(sizes), preferred_element_type=jnp.float32)
    _assert_close([wide], [grouped(lhs, rhs, sizes).output], 2e-6)
    shared = ragged_dot(lhs, rhs, jnp.array(sizes), bias=bias[0])
    number = ragged_dot(lhs, rhs, jnp.array(sizes), bias=2)
    _assert_close(
        [shared, number],
        [
            grouped(lhs, rhs, sizes, x).output
            for x in ([*[bias[0]] * _G], np.full(_G, 2.0)[:, None] + np.zeros(_N))
        ],
        1e-2,
    )


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nothing_leaks_from_other_groups(poison: float) -> None:
    """Not from rows, cotangents or matrices of others, nor from rows in no group."""
    sizes = (4, 0, 5, 2)
    clean = _problem()
    cotangent = np.array(_draw(_M, _N, seed=3))
    lhs, rhs, bias = map(np.array, clean)
    # The third group is spoilt, and so is what is in no group.
    lhs[5, 2] = lhs[12, 1] = lhs[11] = poison
    rhs[2, 1, 0] = rhs[1] = poison
    bias[1] = bias[2] = poison
    cotangent[[6, 12]] = poison

    def run(*xs: jax.Array) -> jax.Array:
        return ragged_dot(xs[0], xs[1], jnp.array(sizes), bias=xs[2])

    output, back = jax.vjp(run, *map(jnp.asarray, (lhs, rhs, bias)))
    grads = back(jnp.asarray(cotangent))
    ct = np.where(np.isfinite(cotangent), cotangent, 0)
    want = grouped(*clean[:2], sizes, clean[2], ct)
    rows, groups = [0, 1, 2, 3, 9, 10, 11, 12], [0, 1, 3]
    kept = (rows, rows, groups, groups)
    got = [np.asarray(x)[i] for x, i in zip((output, *grads), kept, strict=True)]
    _assert_close(got, [y[i] for y, i in zip(want, kept, strict=True)], 2e-6)
    assert not np.isfinite(np.asarray(output)[4:9]).all()


@pytest.mark.parametrize(
    ("m", "k", "n", "g"),
    [
        (0, 3, 2, 4),
        (5, 0, 2, 3),
        (5, 3, 0, 2),
        (5, 3, 2, 0),
        (1, 1, 1, 1),
        (6, 3, 2, 1),
    ],
)
def test_sizes_of_zero_and_one(m: int, k: int, n: int, g: int) -> None:
    lhs, rhs, bias = _draw(m, k), _draw(g, k, n), _draw(g, n)
    sizes = tuple(m // 2 for _ in range(g))

    def run(*xs: jax.Array) -> jax.Array:
        return ragged_dot(*xs[:2], jnp.array(sizes, jnp.int32), bias=xs[2])

    cotangent = _draw(m, n, seed=1)
    output, back = jax.vjp(run, lhs, rhs, bias)
    want = grouped(lhs, rhs, sizes, bias, cotangent)
    for x, y in zip((output, *back(cotangent)), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_every_subset_of_operands_and_cotangents_may_have_examples() -> None:
    count = 2
    rng = np.random.default_rng(0)
    lhs, rhs, bias = _problem()
    sizes = jnp.array(_SIZES["rows in none"])
    cotangent = _draw(_M, _N, seed=5)
    one = (lhs, rhs, sizes, bias, cotangent)
    places = (1, 3, 0, 1, 2)

    @jax.jit
    def run(
        lhs: Any, rhs: Any, sizes: Any, bias: Any, cotangent: Any
    ) -> tuple[jax.Array, ...]:
        output, back = jax.vjp(
            lambda *xs: ragged_dot(*xs[:2], sizes, bias=xs[2], activation="tanh"),
            *(lhs, rhs, bias),
        )
        return output, *back(cotangent)

    subsets = [x for x in itertools.product((False, True), repeat=5) if any(x)]
    for number in rng.choice(len(subsets), 6, replace=False):
        chosen = subsets[number]
        batched = [
            jnp.stack([jnp.roll(x, i) for i in range(count)], place) if is_in else x
            for x, is_in, place in zip(one, chosen, places, strict=True)
        ]
        where = [p if is_in else None for p, is_in in zip(places, chosen, strict=True)]
        got = jax.jit(jax.vmap(run, where))(*batched)
        for i in range(count):
            example = [
                jnp.roll(x, i) if is_in else x
                for x, is_in in zip(one, chosen, strict=True)
            ]
            for x, y in zip(got, run(*example), strict=True):
                np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-5)


def test_examples_of_matrices_become_columns() -> None:
    """They are one product where all share the rows and their groups."""
    lhs, rhs, _ = _problem()
    sizes = jnp.array(_SIZES["full"])
    many = jnp.stack([rhs, rhs + 1, rhs * 2])
    text = str(jax.make_jaxpr(jax.vmap(lambda w: ragged_dot(lhs, w, sizes)))(many))
    assert text.count("cudnn_graph[") == 1
    got = jax.vmap(lambda w: ragged_dot(lhs, w, sizes))(many)
    _assert_close(got, [grouped(lhs, w, _SIZES["full"]).output for w in many], 1e-5)


@pytest.mark.parametrize(
    ("dtypes", "preferred", "result"),
    [
        ((jnp.int32, jnp.int32), None, jnp.int32),
        ((jnp.int8, jnp.int8), jnp.int32, jnp.int32),
        ((jnp.float8_e4m3fn, jnp.float8_e4m3fn), jnp.float32, jnp.float32),
        ((jnp.bfloat16, jnp.int8), None, jnp.bfloat16),
        ((jnp.complex64, jnp.complex64), None, jnp.complex64),
        ((jnp.float32, jnp.float32), jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_other_dtypes(dtypes: Any, preferred: Any, result: Any) -> None:
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(np.asarray(rng.integers(-2, 3, (_M, _K)), dtypes[0]))
    rhs = jnp.asarray(np.asarray(rng.integers(-2, 3, (_G, _K, _N)), dtypes[1]))
    sizes = _SIZES["rows in none"]
    output = ragged_dot(
        lhs, rhs, jnp.array(sizes, jnp.uint8), preferred_element_type=preferred
    )
    assert output.dtype == result
    want = grouped(jnp.real(lhs), jnp.real(rhs), sizes).output
    np.testing.assert_array_equal(np.real(np.asarray(output, "c8")), want)


def test_double_sums() -> None:
    with jax.enable_x64(True):
        lhs, rhs, _ = _problem()
        sizes = jnp.array(_SIZES["full"])
        wide = ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float64)
        _assert_close([wide], [grouped(lhs, rhs, sizes).output], 1e-14)


def test_sizes_may_be_symbolic() -> None:
    lhs, rhs, bias = _problem()
    sizes = jnp.array(_SIZES["rows in none"])
    run = functools.partial(ragged_dot, activation="silu")
    for names in (("m", _G), (_M, "g")):
        m, g = (export.symbolic_shape(x)[0] if isinstance(x, str) else x for x in names)
        shapes = (((m, _K), "f4"), ((g, _K, _N), "f4"), ((g,), "i4"), ((g, _N), "f4"))
        program = export.export(jax.jit(lambda *xs: run(*xs[:3], bias=xs[3])))(
            *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
        )
        got = program.call(lhs, rhs, sizes, bias)
        np.testing.assert_allclose(got, run(lhs, rhs, sizes, bias=bias), rtol=1e-5)


def test_sizes_that_go_too_far_or_are_negative_are_cut() -> None:
    lhs, rhs, _ = _problem()
    sizes = jnp.array([-3, 4, 2**31 - 1, 2**31 - 1], jnp.int32)
    got = ragged_dot(lhs, rhs, sizes)
    _assert_close([got], [grouped(lhs, rhs, (0, 4, 9, 0)).output], 2e-6)


# --- what is refused ------------------------------------------------------------------


def _call(**changes: Any) -> Callable[[], jax.Array]:
    given = {
        "lhs": jnp.ones((6, 3)),
        "rhs": jnp.ones((2, 3, 4)),
        "group_sizes": jnp.array([2, 4]),
        **changes,
    }
    return lambda: ragged_dot(**given)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"lhs": jnp.ones((5, 6, 3))},
            ValueError,
            r"lhs is f32\[5,6,3\]. It must have the axes \(m, k\)",
        ),
        (
            {"rhs": jnp.ones((3, 4))},
            ValueError,
            r"rhs is f32\[3,4\]. It must have the axes \(g, k, n\)",
        ),
        (
            {"group_sizes": jnp.ones((2, 1), "int32")},
            ValueError,
            r"group_sizes is i32\[2,1\]. It must have the axes \(g,\)",
        ),
        (
            {"lhs": jnp.ones((6, 4))},
            ValueError,
            r"lhs is f32\[6,4\] and rhs f32\[2,3,4\]. Axis 1 of both",
        ),
        (
            {"group_sizes": jnp.array([1, 2, 3])},
            ValueError,
            r"rhs is f32\[2,3,4\] and group_sizes i32\[3\]. Both",
        ),
        (
            {"group_sizes": jnp.ones(2)},
            TypeError,
            r"group_sizes is f32\[2\]. It must hold integers",
        ),
        ({"lhs": None}, TypeError, "lhs is None. It must be an array of numbers"),
        (
            {"bias": jnp.ones((3, 4))},
            ValueError,
            r"bias is f32\[3,4\], which does not broadcast to \[2, 4\]",
        ),
        (
            {"bias": jnp.ones((2, 4), "int32")},
            TypeError,
            r"bias is i32\[2,4\]. Supported dtypes are bf16, f16, f32, f64",
        ),
        ({"activation": "softplus2"}, ValueError, "activation='softplus2' is not one"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda'"),
        ({"precision": "most"}, ValueError, "precision='most' is not one that JAX has"),
        (
            {"preferred_element_type": "f99"},
            TypeError,
            "preferred_element_type='f99' is not a dtype",
        ),
        (
            {
                "lhs": jnp.ones((6, 3), "int32"),
                "rhs": jnp.ones((2, 3, 4), "int32"),
                "implementation": "cudnn",
            },
            jax_cudnn.UnsupportedError,
            r"lhs is i32\[6,3\]",
        ),
        (
            {
                "lhs": jnp.ones((6, 3), "float8_e4m3fn"),
                "rhs": jnp.ones((2, 3, 4), "float8_e4m3fn"),
                "implementation": "cudnn",
            },
            jax_cudnn.UnsupportedError,
            "and of f8 with results of bf16, f16, f32",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=r"^ragged_dot: .*" + message):
        _call(**changes)()


def test_dtypes_that_jax_does_not_promote_are_named() -> None:
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(TypeError, match=r"^ragged_dot: lhs is bf16\[6,3\] and rhs f32"),
    ):
        _call(lhs=jnp.ones((6, 3), jnp.bfloat16))()


@pytest.mark.parametrize(
    ("precision", "is_cudnns"),
    [
        ("BF16_BF16_F32", True),
        ("BF16_BF16_F32_X3", False),
        ("highest", True),
        (None, True),
    ],
)
def test_the_sizes_have_no_part_in_the_precision(
    precision: Any, is_cudnns: bool
) -> None:
    lhs, rhs, bias = (x.astype(jnp.bfloat16) for x in _problem())
    call = functools.partial(ragged_dot, bias=bias, precision=precision)
    ((graph, options, _),) = traced_graphs(call, lhs, rhs, jnp.asarray(_SIZES["full"]))
    assert (precision_refusal(graph, options) is None) == is_cudnns
