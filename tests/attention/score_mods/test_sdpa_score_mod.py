# SPDX-License-Identifier: Apache-2.0
"""Tests attention with a score_mod against its function, derivatives included.

The truth is a dense softmax in float64 (dense.py).
"""

import functools
import inspect
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from jax_cudnn import UnsupportedError, masks, score_mods, sdpa
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.ops.common import plain
from tests.attention.shared.dense import at_places, dense_attention
from tests.attention.shared.oracle import SIZES, shape_of
from tests.common import drawn
from tests.common.examples import examples

pytestmark = [pytest.mark.once, pytest.mark.sampled]


@pytest.fixture(autouse=True)
def _promotion_as_users_have_it() -> Iterator[None]:
    """Let functions mix dtypes and ranks: scores, indices and captured arrays."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


_H, _S, _T = (SIZES[x] for x in "hst")


def _operands(seed: int = 0, dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    axes = ("bshd", "btkd", "btke")
    return [
        jnp.asarray(np.asarray(rng.standard_normal(shape_of(x)), dtype)) for x in axes
    ]


_RNG = np.random.default_rng(9)
_SLOPES = _RNG.standard_normal(_H).astype(np.float32)
_TABLE = _RNG.standard_normal((7, _H)).astype(np.float32)
_SEGMENTS = np.array([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 4, 4]])
_NUMBERS = _RNG.standard_normal((SIZES["b"], _T)).astype(np.float32)


# Functions of scalars that read `c`, an array (h,), which are functions of arrays, too.
_FUNCTIONS: dict[str, Any] = {
    "softcap": lambda c: lambda x, *_: 2.5 * jnp.tanh(x / 2.5),
    "traced_cap": lambda c: lambda x, *_: (1 + c[0] ** 2) * jnp.tanh(x),
    "slopes": lambda c: lambda x, b, h, q, k: x - jnp.abs(c)[h] * jnp.abs(q - k),
    "temperatures": lambda c: lambda x, b, h, q, k: x * c[h] + c[(q + h) % _H],
    "documents": lambda c: (
        lambda x, b, h, q, k: jnp.where(
            jnp.asarray(_SEGMENTS)[b, q] == jnp.asarray(_SEGMENTS)[b, k], x, -jnp.inf
        )
    ),
    "weakened": lambda c: (
        lambda x, b, h, q, k: jnp.where(
            jnp.asarray(_SEGMENTS)[b, q] == jnp.asarray(_SEGMENTS)[b, k], x, x * c[h]
        )
    ),
    "table_capped_hidden": lambda c: (
        lambda x, b, h, q, k: (
            jnp.where(
                k != 3, 2 * jnp.tanh(x + jnp.asarray(_NUMBERS)[b, k] * c[h]), -jnp.inf
            )
            + jnp.asarray(_TABLE)[jnp.clip(q - k + 3, 0, 6), h]
        )
    ),
    "squares": lambda c: lambda x, *_: jnp.minimum(x, 1) ** 2 - x * jax.nn.sigmoid(x),
    "clipped": lambda c: lambda x, b, h, q, k: jnp.clip(x, -1, jnp.abs(c)[h]),
    # By XLA: no node for it, and an array of scores inside.
    "softplus_of_sorted": lambda c: lambda x, b, h, q, k: jnp.logaddexp(x, c[h]),
    "bf16": lambda c: lambda x, *_: x.astype(jnp.bfloat16).astype(jnp.float32) * 2,
}
_BY_XLA = ("softplus_of_sorted", "bf16")


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_results_and_gradients_are_those_of_the_dense_softmax(name: str) -> None:
    function = _FUNCTIONS[name]
    weights = _RNG.standard_normal(shape_of("bshe"))
    operands = [*_operands(), jnp.asarray(_SLOPES)]

    def loss(results: Any) -> jax.Array:
        output, lse = results
        lse = jnp.where(lse == -jnp.inf, 0, lse)
        return (output * weights).sum() + (lse * weights[..., 0]).sum()

    def ours(q: Any, k: Any, v: Any, c: Any) -> Any:
        return sdpa(q, k, v, score_mod=function(c), return_residual=True)

    def truth(q: Any, k: Any, v: Any, c: Any) -> Any:
        return dense_attention(q, k, v, seen=True, score_mod=at_places(function(c)))

    got = jax.jit(ours)(*operands)
    grads = jax.jit(jax.grad(lambda *x: loss(ours(*x)), argnums=range(4)))(*operands)
    # bf16 in the function rounds alike only from the same scores.
    with jax.enable_x64(name != "bf16"):
        wide = [x if name == "bf16" else x.astype(jnp.float64) for x in operands]
        want = jax.jit(truth)(*wide)
        slopes = jax.jit(jax.grad(lambda *x: loss(truth(*x)), argnums=range(4)))(*wide)
    tolerance = 2e-2 if name == "bf16" else 2e-5
    for x, y in zip((*got, *grads), (*want, *slopes), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.thorough
@pytest.mark.once
@examples(15)
@given(
    number=st.integers(0, 2**32),
    name=st.sampled_from(sorted(_FUNCTIONS.keys() - {"bf16"})),
    bias=st.sampled_from([None, "1hst", "b11t", "b1s1"]),
    is_causal=st.booleans(),
    has_lengths=st.booleans(),
    has_mask=st.booleans(),
    has_sinks=st.booleans(),
)
def test_all_other_arguments_combine_with_it(
    number: int,
    name: str,
    bias: str | None,
    is_causal: bool,
    has_lengths: bool,
    has_mask: bool,
    has_sinks: bool,
) -> None:
    rng = np.random.default_rng(number)
    q, k, v = _operands(number)
    function = _FUNCTIONS[name](jnp.asarray(_SLOPES))
    rows, columns = np.arange(_S)[:, None], np.arange(_T)
    lengths = rng.integers(0, _T + 1, size=SIZES["b"])
    mask = rng.random(shape_of("b1st")) < 0.6
    seen = np.ones((1, 1, _S, _T), bool)
    seen = seen & (columns <= rows) if is_causal else seen
    seen = seen & (columns < lengths[:, None, None, None]) if has_lengths else seen
    seen = seen & mask if has_mask else seen
    given_bias = None
    if bias is not None:
        given_bias = rng.standard_normal(shape_of(bias)).astype(np.float32)
    sinks = rng.standard_normal(_H).astype(np.float32) if has_sinks else None

    def ours(q: Any, k: Any, v: Any) -> Any:
        return sdpa(
            q,
            k,
            v,
            given_bias,
            mask if has_mask else None,
            is_causal=is_causal,
            key_value_seq_lengths=lengths if has_lengths else None,
            sinks=sinks,
            score_mod=function,
        )

    def truth(q: Any, k: Any, v: Any) -> Any:
        return dense_attention(
            q,
            k,
            v,
            seen=seen,
            bias=given_bias,
            sinks=sinks,
            score_mod=at_places(function),
        )[0]

    weights = rng.standard_normal(shape_of("bshe")).astype(np.float32)
    got = (
        ours(q, k, v),
        jax.grad(lambda *x: (ours(*x) * weights).sum(), (0, 1, 2))(q, k, v),
    )
    want = (
        truth(q, k, v),
        jax.grad(lambda *x: (truth(*x) * weights).sum(), (0, 1, 2))(q, k, v),
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # A row without keys is NaN in the dense gradient only where a where() leaks.
        np.testing.assert_allclose(x, np.nan_to_num(y), rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["temperatures", "weakened", "softplus_of_sorted"])
def test_derivatives_of_every_order_and_mode(name: str) -> None:
    def function(q: Any, c: Any) -> jax.Array:
        _, k, v = _operands()
        made = _FUNCTIONS[name](jnp.asarray(c))
        return sdpa(q, k, v, score_mod=made, is_causal=True)

    q = _operands()[0]
    check_grads(function, (q, jnp.asarray(_SLOPES)), 1, rtol=3e-2, atol=3e-2)
    scalar = lambda c: jnp.sin(function(q, c)).sum()  # noqa: E731
    check_grads(scalar, (jnp.asarray(_SLOPES),), 2, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["temperatures", "slopes", "table_capped_hidden"])
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, 0, 0)])
def test_vmap_over_captured_arrays_and_operands(name: str, axes: Any) -> None:
    q, k, v = _operands()
    n = SIZES["n"]
    qs = jnp.stack([q * (i + 1) for i in range(n)]) if axes[0] == 0 else q
    cs = jnp.stack([jnp.asarray(_SLOPES) + i for i in range(n)])
    cs = cs if axes[1] == 0 else cs[0]
    ws = _RNG.standard_normal((n, *shape_of("bshe"))).astype(np.float32)
    ws = jnp.asarray(ws) if axes[2] == 0 else jnp.asarray(ws[0])

    def gradients(q: Any, c: Any, w: Any) -> Any:
        def loss(q: Any, c: Any) -> jax.Array:
            return (sdpa(q, k, v, score_mod=_FUNCTIONS[name](c)) * w).sum()

        return jax.grad(loss, (0, 1))(q, c)

    got = jax.jit(jax.vmap(gradients, in_axes=axes))(qs, cs, ws)
    for i in range(n):
        each = (
            x[i] if axis == 0 else x for x, axis in zip((qs, cs, ws), axes, strict=True)
        )
        want = gradients(*each)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-4)


def test_remat_and_scan_see_captured_arrays() -> None:
    q, k, v = _operands()
    c = jnp.asarray(_SLOPES)

    def layer(q: Any, c: Any) -> jax.Array:
        function = _FUNCTIONS["temperatures"](c)
        return sdpa(q, k, v[..., : q.shape[-1]], score_mod=function)

    def loss(layer: Any, c: Any) -> jax.Array:
        return jax.lax.scan(lambda x, c: (layer(x, c), None), q, c)[0].sum()

    cs = jnp.stack([c, 2 * c])
    want = jax.grad(functools.partial(loss, layer))(cs)
    got = jax.jit(jax.grad(functools.partial(loss, jax.checkpoint(layer))))(cs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# --- what becomes of a function -------------------------------------------------------


def _graph(function: Any, dtype: Any = jnp.bfloat16, **options: Any) -> Any:
    operands = _operands(dtype=dtype)
    (found,) = traced_graphs(
        lambda *x: sdpa(*x, score_mod=function, **options), *operands
    )
    return found.graph


def _roles(function: Any, **options: Any) -> dict[str, Any]:
    graph = _graph(function, **options)
    return {x.name: (x.dims, x.dtype) for x in graph.input_tensors[3:]}


def test_additions_are_a_bias_with_the_axes_that_they_depend_on() -> None:
    table = jnp.asarray(_TABLE, jnp.bfloat16)
    assert _roles(score_mods.relative_bias(table)) == {
        "bias": ((1, _H, _S, _T), "bf16")
    }
    assert _roles(lambda x, b, h, q, k: x + _NUMBERS.mean() * b) == {
        "bias": ((2, 1, 1, 1), "f32")
    }
    two = score_mods.compose(
        score_mods.alibi(_SLOPES), lambda x, b, h, q, k: x + k.astype(x.dtype)
    )
    assert _graph(two).nodes[0].attributes.score_mod == ()
    assert _roles(lambda x, *_: x) == {}


def test_selections_of_indices_are_a_mask() -> None:
    hidden = lambda x, b, h, q, k: jnp.where(q < k, -jnp.inf, x)  # noqa: E731
    assert _roles(hidden) == {"mask": ((1, 1, _S, _T), "bool")}
    both = _roles(_FUNCTIONS["table_capped_hidden"](jnp.asarray(_SLOPES)))
    assert set(both) == {"bias", "mask", "mod_a"}
    assert both["mod_a"] == ((2, _H, 1, _T), "f32")


def test_what_is_hidden_needs_no_finite_slope() -> None:
    q, k = drawn.normal(0, (2, 1, 3, 1, 4))
    w = jnp.array([1.0, 2.0, 0.0])

    def loss(q: jax.Array, k: jax.Array, lengths: Any, mod: Any) -> jax.Array:
        return jnp.sum(sdpa(q, k, k, score_mod=mod, **lengths))

    padding = {"query_seq_lengths": jnp.array([2])}
    poisoned = q.at[:, 2].set(jnp.nan)
    got = jax.grad(loss)(poisoned, k, padding, score_mods.softcap(2.0))
    assert jnp.isfinite(got).all()
    np.testing.assert_array_equal(got[:, 2], 0)

    def divided(x: Any, b: Any, h: Any, i: Any, j: Any) -> jax.Array:
        return jnp.tanh(x / w[j])

    hidden = {"key_value_seq_lengths": jnp.array([2])}
    got = jax.grad(loss, (0, 1))(q, k, hidden, divided)
    want = jax.grad(loss, (0, 1))(q, k[:, :2], {}, divided)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1][:, :2], want[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1][:, 2], 0)


def test_a_row_that_a_score_mod_hides_gives_nothing() -> None:
    q, k, v = _operands()
    hide = lambda x, b, h, q, k: jnp.where(q == 2, -jnp.inf, jnp.tanh(x))  # noqa: E731
    function = lambda *x: sdpa(*x, score_mod=hide, return_residual=True)  # noqa: E731
    output, lse = function(q, k, v)
    assert not np.asarray(output)[:, 2].any()
    assert (np.asarray(lse)[:, 2] == -np.inf).all()
    grads = jax.grad(lambda *x: function(*x)[0].sum(), (0, 1, 2))(q, k, v)
    assert all(np.isfinite(x).all() for x in grads)
    assert not np.asarray(grads[0])[:, 2].any()


def test_steps_are_part_of_the_graph_and_functions_never_share_one() -> None:
    caps = [_graph(score_mods.softcap(cap)) for cap in (30.0, 20.0, 30.0)]
    assert caps[0] == caps[2] != caps[1]
    assert caps[0].nodes[0].attributes.score_mod == (
        *("div score 30", "tanh %0", "mul %1 30"),
    )

    class Scaled:
        factor = 2.0

        def __call__(self, x: Any, *_: Any) -> Any:
            return x * self.factor * jnp.tanh(x)

    function = Scaled()
    first = sdpa(*_operands(), score_mod=function)
    function.factor = -3.0
    second = sdpa(*_operands(), score_mod=function)
    assert not np.allclose(first, second)


def test_huge_scores_stay_finite() -> None:
    q, k, v = _operands()
    capped = score_mods.softcap(5.0)
    # Up to 1e37: no partial sum overflows, in whichever order a CPU adds.
    output, lse = sdpa(1e18 * q, 1e18 * k, v, score_mod=capped, return_residual=True)
    assert np.isfinite(output).all()
    assert np.abs(lse).max() < 5 + np.log(_T) + 1e-3


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3.0, "score_mod is float. It must be a function of (score, batch"),
        (lambda x, *_: x[None], "returns f32[1] for one score. It must return one"),
        (lambda x, *_: (x, x), "returns f32[], f32[] in a tuple for one score"),
        (lambda x, *_: (x,), "returns f32[] in a tuple for one score"),
        (lambda x, b, h, i: x, "takes other arguments (too many positional arguments"),
        (lambda x, *_: None, "returns nothing for one score"),
        (lambda x, *_: x > 0, "returns bool[] for one score"),
    ],
)
def test_what_is_no_score_mod_is_refused(function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        sdpa(*_operands(), score_mod=function)


_CHOICE = (
    "In place of `if`, `and`, `or`, `not`, `min` and `max`, write "
    "jnp.where(condition, a, b), &, |, ~, jnp.minimum and jnp.maximum."
)
_INDEX = "To look a number up by an index, write jnp.asarray(numbers)[index]."
_NUMPY = "In place of float(), int(), math and NumPy, write jax.numpy, and"


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda x, b, h, i, j: x if i >= j else -jnp.inf, _CHOICE),
        (lambda x, b, h, i, j: jnp.where(i >= j and j > 0, x, 0.0), _CHOICE),
        (lambda x, b, h, i, j: jnp.where(i >= j or j > 0, x, 0.0), _CHOICE),
        (lambda x, b, h, i, j: jnp.where(not i > j, x, 0.0), _CHOICE),
        (lambda x, b, h, i, j: x * min(i, j), _CHOICE),
        (lambda x, b, h, i, j: max(x, 0.0), _CHOICE),
        (lambda x, b, h, i, j: x * [1.0, 2.0][h], _INDEX),
        (lambda x, b, h, i, j: x + sum(range(i)), _INDEX),
        (lambda x, b, h, i, j: x * np.ones(2, np.float32)[h], _NUMPY),
        (lambda x, b, h, i, j: np.tanh(x), _NUMPY),
        (lambda x, b, h, i, j: math.tanh(x), _NUMPY),
        (lambda x, b, h, i, j: float(x), _NUMPY),
    ],
)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_python_that_asks_for_values_is_told_its_remedy(
    function: Any, remedy: str, is_jitted: bool
) -> None:
    call = functools.partial(sdpa, score_mod=function)
    with pytest.raises(TypeError) as raised:
        (jax.jit(call) if is_jitted else call)(*_operands())
    told = str(raised.value)
    assert told.startswith(
        "sdpa: score_mod uses the value of an argument, or of an array that it "
        "captures, which is not known while it is traced: it is called once, for all "
        f"scores. {remedy}"
    )


def test_what_kernels_lack_is_said_and_runs_by_xla(
    caplog: pytest.LogCaptureFixture,
) -> None:
    operands = _operands()
    cases = {
        "uses 'log1p'": lambda x, *_: jnp.log1p(jnp.abs(x)),
        "computes in bfloat16": _FUNCTIONS["bf16"](_SLOPES),
        "goes on after -inf": lambda x, b, h, q, k: (
            jnp.where(k > q, -jnp.inf, jnp.tanh(x)) * 2
        ),
        "may mask all keys of a row": lambda x, *_: jnp.log(jnp.abs(x)),
        "does not depend on the score": lambda x, b, h, q, k: k.astype(x.dtype),
        "more than 4 arrays": lambda x, b, h, q, k: functools.reduce(
            lambda y, i: jnp.tanh(y * jnp.asarray(_SLOPES)[h] + i), range(5), x
        ),
    }
    for reason, function in cases.items():
        with pytest.raises(UnsupportedError, match=re.escape(reason)):
            sdpa(*operands, score_mod=function, implementation="cudnn")
        caplog.clear()
        plain._say_once.cache_clear()
        with caplog.at_level(logging.INFO, logger="jax_cudnn"):
            got = sdpa(*operands, score_mod=function)
        assert reason in caplog.text
        modify = at_places(_mapped(function))
        truth = functools.partial(dense_attention, seen=True, score_mod=modify)
        want, _ = jax.jit(truth)(*operands)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_a_refused_score_mod_is_named_with_its_primitive_and_line() -> None:
    def crooked(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        y = x * 2
        return jnp.log1p(jnp.abs(y))

    line = inspect.getsourcelines(crooked)[1] + 2
    where = rf"{re.escape(__file__)}:{line}(:\d+)? "
    with pytest.raises(
        UnsupportedError,
        match=r"^sdpa: score_mod crooked cannot be part of a kernel: it uses 'log1p', "
        rf"which graphs have no node for \({where}\(.*crooked\)\)\. Pass impl",
    ):
        sdpa(*_operands(), score_mod=crooked, implementation="cudnn")


def _mapped(function: Any) -> Any:
    def modified(scores: Any, *places: Any) -> Any:
        full = [jnp.broadcast_to(x, scores.shape) for x in places]
        return jnp.vectorize(function)(scores, *full)

    return modified


def test_documents_are_those_of_masks() -> None:
    q, k, v = _operands()
    q = jnp.concatenate([q, q[:, :2]], axis=1)
    got = sdpa(q, k, v, score_mod=_FUNCTIONS["documents"](None))
    want = sdpa(q, k, v, mask=masks.Segments(_SEGMENTS))
    np.testing.assert_array_equal(got, want)
