# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: NumPy's answer one at a time, transformations, messages."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn import masks
from tests.attention.shared.packed import (
    MIXED,
    ROWS,
    SAME,
    Rows,
    answer,
    any_rows,
)

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def _names(rows: Rows) -> list[str]:
    return ["query", "key", "value"]


def _call(rows: Rows, values: dict[str, Any], **options: Any) -> Any:
    arrays = [jnp.asarray(values[name]) for name in _names(rows)]
    return jax_cudnn.sdpa(
        *arrays, mask=rows.mask(), scale=rows.scale, return_residual=True, **options
    )


def _results(rows: Rows, values: dict[str, Any]) -> dict[str, Any]:
    arrays = [jnp.asarray(values[name]) for name in _names(rows)]
    pulls = (jnp.asarray(values["grad_output"]), jnp.asarray(values["grad_lse"]))

    @jax.jit
    def run(arrays: list[jax.Array], pulls: Any) -> Any:
        results, vjp = jax.vjp(
            lambda *xs: _call(rows, dict(zip(_names(rows), xs, strict=True))), *arrays
        )
        return results, vjp(pulls)

    (output, lse), gradients = run(arrays, pulls)
    return {
        "output": output,
        "lse": lse,
        **{f"grad_{n}": x for n, x in zip(_names(rows), gradients, strict=True)},
    }


def _assert_same(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    for name, want in expected.items():
        np.testing.assert_allclose(
            found[name], want, rtol=3e-5, atol=3e-5, err_msg=name
        )


@pytest.mark.parametrize("name", ROWS)
def test_results_and_gradients_are_those_of_each_sequence_alone(name: str) -> None:
    rows = ROWS[name]
    _assert_same(_results(rows, rows.draw()), answer(rows, rows.draw()))


@pytest.mark.parametrize("padding", [np.nan, np.inf])
def test_padding_is_not_read(padding: float) -> None:
    rows = ROWS["causal-more-queries"]
    found = _results(rows, rows.draw(padding=padding))
    _assert_same(found, answer(rows, rows.draw()))
    queries, keys = rows.is_inside()
    for role, inside in (("query", queries), ("key", keys), ("value", keys)):
        assert not np.any(np.asarray(found[f"grad_{role}"])[~inside])
    assert not np.any(np.asarray(found["output"])[~queries])
    assert np.all(np.asarray(found["lse"])[~queries] == -np.inf)


@settings(deadline=None)
@given(any_rows(), st.integers(0, 99))
def test_any_sequences_give_what_each_gives_alone(rows: Rows, seed: int) -> None:
    with jax.disable_jit():
        found = _results(rows, rows.draw(seed, padding=np.nan))
    _assert_same(found, answer(rows, rows.draw(seed)))


# --- how sequences are given ----------------------------------------------------------


def _self_attention(mask: masks.Mask, s: int = 11, **options: Any) -> jax.Array:
    rng = np.random.default_rng(2)
    q, k, v = (
        jnp.asarray(np.asarray(rng.standard_normal((2, s, heads, 4)), jnp.float32))
        for heads in (4, 2, 2)
    )
    return jax_cudnn.sdpa(q, k, v, mask=mask, **options)


def test_cumulative_lengths_are_shared_by_rows_or_given_for_each() -> None:
    ids = np.array([[0] * 3 + [1] * 5 + [3] * 2 + [-1]] * 2)
    expected = _self_attention(masks.Segments(ids), is_causal=True)[:, :10]
    for packed in (
        masks.Packed([0, 3, 8, 8, 10]),
        masks.Packed([[0, 3, 8, 8, 10]] * 2),
        masks.Packed(np.array([0, 3, 8, 8, 10], np.uint8)),
        masks.Packed([0, 3, 8, 8, 10], [0, 3, 8, 8, 10]),
        masks.Packed.from_lengths([3, 5, 0, 2]),
        masks.Packed.from_lengths([[3, 5, 0, 2]] * 2, [[3, 5, 0, 2]] * 2),
        masks.Packed([0, 3, 8, 8], query_lengths=[3, 5, 0, 2]),
        masks.Packed([0, 3, 8, 8, 99], query_lengths=[3, 5, -1, 2]),
        masks.Packed.from_segment_ids(ids[0], 5, padding=-1),
        masks.Packed.from_segment_ids(jnp.asarray(ids), 3, padding=-1, max_length=5),
        masks.Packed([0, 3, 8, 8, 11]) & masks.Lengths([10, 10], [10, 10]),
    ):
        found = np.asarray(_self_attention(packed, is_causal=True))
        np.testing.assert_allclose(found[:, :10], expected, rtol=1e-6, atol=1e-6)
        assert not np.any(found[:, 10:])


def test_segments_of_any_contiguous_ids_are_runs() -> None:
    ids = jnp.asarray(
        [[7, 7, 7, 2, 2, 5, 5, 5, 5, 5, 9], [0, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4]]
    )
    packed = masks.Packed.from_segment_ids(ids, 4)
    np.testing.assert_allclose(
        _self_attention(packed), _self_attention(masks.Segments(ids)), rtol=1e-6
    )


def test_runs_beyond_the_most_are_padding() -> None:
    """For ids that are traced; those that the host has are refused."""
    ids = jnp.asarray([4, 4, 4, 2, 2, 9, 9, 9, 9, 1, 1])
    found = jax.jit(lambda ids: _self_attention(masks.Packed.from_segment_ids(ids, 2)))(
        ids
    )
    expected = _self_attention(masks.Packed.from_lengths([3, 2]))
    np.testing.assert_array_equal(found, expected)
    assert np.any(found[:, 4])
    assert not np.any(found[:, 5:])
    told = "have 4 runs in a row, but max_segments is 2. Raise it, or sort the ids."
    for each in (ids, np.asarray(ids), ids.tolist(), jnp.stack([ids * 0, ids])):
        with pytest.raises(ValueError, match=told):
            masks.Packed.from_segment_ids(each, 2)
        # Padding is no run.
        masks.Packed.from_segment_ids(each, 3, padding=9)


def test_ids_of_the_host_are_taken_where_a_function_is_traced() -> None:
    ids = np.array([4, 4, 4, 2, 2, 9, 9, 9, 9, 1, 1])
    expected = _self_attention(masks.Segments(ids))
    for each in (ids, jnp.asarray(ids)):
        found = jax.jit(
            lambda x=each: _self_attention(masks.Packed.from_segment_ids(x, 4))
        )()
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def _are_right(offsets: list[int], size: int) -> bool:
    return offsets[0] == 0 and sorted(offsets) == offsets and offsets[-1] <= size


_MAKERS: dict[str, Any] = {
    "list": list,
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "rows": lambda x: jnp.asarray([[0] * len(x), x]),
    "bytes": lambda x: np.asarray(x, np.int8),
}


@given(
    offsets=st.lists(st.integers(-1, 13), min_size=1, max_size=6)
    | st.lists(st.integers(0, 11), min_size=1, max_size=6).map(
        lambda x: [0, *sorted(x)]
    ),
    maker=st.sampled_from([*_MAKERS]),
    role=st.sampled_from(["query", "key", "both"]),
    is_jitted=st.booleans(),
)
def test_offsets_that_the_host_has_are_refused_just_where_they_are_wrong(
    offsets: list[int], maker: str, role: str, is_jitted: bool
) -> None:
    """Closed over by a function that is traced, they are there, too."""
    given_, none = _MAKERS[maker](offsets), [0] * len(offsets)
    packed = {
        "query": lambda: masks.Packed(given_, none),
        "key": lambda: masks.Packed(none, given_),
        "both": lambda: masks.Packed(given_),
    }[role]()
    q = jnp.ones((2, 11, 2, 4))

    def call(q: jax.Array) -> jax.Array:
        return jax_cudnn.sdpa(q, q, q, mask=packed)

    def run() -> None:
        if is_jitted:
            jax.eval_shape(call, q)
        else:
            call(q)

    if _are_right(offsets, 11):
        run()
        return
    with pytest.raises(ValueError, match=r"Packed: \w+_offsets .* Packed.from_lengths"):
        run()


def test_what_is_traced_is_not_checked() -> None:
    """An offset below the largest before it counts as that; rows end with tokens."""
    attend = jax.jit(lambda x: _self_attention(masks.Packed(x)))
    for wrong, right in (
        ([0, 3, 8, 4, 10], [0, 3, 8, 8, 10]),
        ([0, 3, 50], [0, 3, 11]),
    ):
        found = attend(jnp.array(wrong))
        np.testing.assert_array_equal(found, _self_attention(masks.Packed(right)))
    late = attend(jnp.array([2, 5, 11]))
    assert not np.any(late[:, :2])
    expected = masks.Packed([2, 5], query_lengths=[3, 6])
    np.testing.assert_array_equal(late, _self_attention(expected))


def test_an_id_that_comes_again_begins_another_sequence() -> None:
    ids = jnp.asarray([1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1])
    found = _self_attention(masks.Packed.from_segment_ids(ids, 3))
    expected = _self_attention(masks.Packed.from_lengths([3, 4, 4]))
    np.testing.assert_array_equal(found, expected)


def test_what_is_longer_than_max_length_ends_there() -> None:
    found = _self_attention(masks.Packed.from_lengths([3, 6, 2], max_length=4))
    expected = _self_attention(masks.Packed([0, 3, 9], query_lengths=[3, 4, 2]))
    np.testing.assert_array_equal(found, expected)
    assert np.any(found[:, 6])
    assert not np.any(found[:, 7:9])


def test_lengths_of_rows_cut_sequences() -> None:
    packed = masks.Packed.from_lengths([3, 6, 2])
    found = _self_attention(
        packed, query_seq_lengths=[11, 5], key_value_seq_lengths=[4, 11]
    )
    expected = _self_attention(
        masks.Packed(
            [0, 3, 9],
            [0, 3, 9],
            [[3, 6, 2], [3, 2, 0]],
            [[3, 1, 0], [3, 6, 2]],
        )
    )
    np.testing.assert_array_equal(found, expected)


def test_without_a_batch_axis() -> None:
    rng = np.random.default_rng(3)
    q, k, v = jnp.asarray(np.asarray(rng.standard_normal((3, 7, 2, 4)), jnp.float32))
    packed = masks.Packed([0, 2, 7])
    found = jax_cudnn.sdpa(q, k, v, mask=packed, is_causal=True)
    parts = [
        jax_cudnn.sdpa(q[a:b], k[a:b], v[a:b], is_causal=True)
        for a, b in ((0, 2), (2, 7))
    ]
    np.testing.assert_allclose(found, jnp.concatenate(parts), rtol=1e-6, atol=1e-6)


def test_arguments_stand_for_the_mask() -> None:
    packed = masks.Packed([0, 3, 11])
    (name,) = packed.arguments(11, 11)
    assert name == "mask"
    both = packed & masks.Causal("bottom-right")
    assert [*both.arguments(11, 11)] == ["packed", "is_causal"] or set(
        both.arguments(11, 11)
    ) == {"mask", "is_causal"}
    for mask in (
        masks.Packed([0, 3, 11], [0, 5, 9]) & masks.Window(2, 0, "bottom-right"),
        packed & masks.Window(2, 0) & masks.Segments(np.arange(11) // 2),
        packed & masks.Lengths([5, 9]),
    ):
        np.testing.assert_array_equal(
            _self_attention(mask),
            _self_attention(None, **mask.arguments(11, 11))  # type: ignore[arg-type]
            if "mask" not in mask.arguments(11, 11)
            else _self_attention(**mask.arguments(11, 11)),
        )


def test_bias_mask_and_sinks_beside_packed_sequences() -> None:
    rows = dataclasses.replace(SAME, causal=True)
    values = rows.draw()
    rng = np.random.default_rng(5)
    bias = jnp.asarray(
        np.asarray(rng.standard_normal((1, rows.h, rows.s, rows.t)), jnp.float32)
    )
    sinks = jnp.asarray(np.asarray(rng.standard_normal(rows.h), jnp.float32))
    hidden = masks.Where(rng.random((rows.b, 1, rows.s, rows.t)) < 0.8)
    arrays = [jnp.asarray(values[n]) for n in _names(rows)]
    queries, _ = rows.is_inside()
    ids = np.full((rows.b, rows.s), -1)
    for i, row in enumerate(rows.queries):
        for j, (start, length) in enumerate(row):
            ids[i, start : start + length] = j
    segments = masks.Segments(ids)

    def both(mask: masks.Mask, *xs: jax.Array) -> Any:
        q, k, v, bias, sinks = xs
        output, lse = jax_cudnn.sdpa(
            q, k, v, bias, mask & hidden, sinks=sinks, is_causal=True,
            return_residual=True,
        )  # fmt: skip
        return (
            jnp.where(queries[..., None, None], output, 0),
            jnp.where(queries[..., None], lse, 0),
        )

    pulls = (values["grad_output"], values["grad_lse"])
    results = []
    for mask in (rows.mask(), segments):
        function = functools.partial(both, mask)
        found, vjp = jax.vjp(function, *arrays, bias, sinks)
        results.append([*found, *vjp(tuple(map(jnp.asarray, pulls)))])
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


# --- transformations ------------------------------------------------------------------


@pytest.mark.thorough
def test_derivatives_of_both_modes_and_second_order() -> None:
    rows = dataclasses.replace(
        MIXED, causal=True, from_end=True, queries=MIXED.queries[:1],
        keys=MIXED.keys[:1], h=2, k=1, d=3, e=2,
    )  # fmt: skip
    values = rows.draw()

    def loss(*xs: jax.Array) -> jax.Array:
        output, lse = _call(rows, dict(zip(_names(rows), xs, strict=True)))
        is_live = jnp.isfinite(lse)
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(is_live, lse, 0.0) ** 2)

    arrays = [jnp.asarray(values[name]) for name in _names(rows)]
    check_grads(loss, arrays, order=2, modes=["fwd", "rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("turn", range(6))
def test_vmap_over_some_operands_and_cotangents(turn: int) -> None:
    rng = np.random.default_rng(turn)
    rows = dataclasses.replace(SAME, causal=bool(turn % 2))
    examples = 3
    starts, lengths = (
        np.asarray([[pair[i] for pair in row] for row in rows.queries], np.int32)
        for i in (0, 1)
    )
    # Lengths that differ between examples and stay within their places.
    shorter = np.stack([np.maximum(lengths - i, 0) for i in range(examples)])
    moved = np.stack([starts, starts + (lengths == 0), starts])
    given = rows.draw(turn)
    names = ("query", "key", "value", "starts", "lengths", "grad_output")
    one: dict[str, Any] = {**given, "starts": starts, "lengths": lengths}
    many = {
        name: rng.standard_normal((examples, *np.shape(one[name]))).astype(np.float32)
        for name in ("query", "key", "value", "grad_output")
    } | {"starts": moved, "lengths": shorter}
    batched = [bool(rng.integers(2)) for _ in names]
    batched[turn % len(names)] = True
    arrays = [
        jnp.asarray(many[n] if is_batched else one[n])
        for n, is_batched in zip(names, batched, strict=True)
    ]
    axes = [0 if is_batched else None for is_batched in batched]

    def function(q: Any, k: Any, v: Any, starts: Any, lengths: Any, pull: Any) -> Any:
        packed = masks.Packed(starts, query_lengths=lengths, max_length=6)

        def call(q: Any, k: Any, v: Any) -> Any:
            return jax_cudnn.sdpa(q, k, v, mask=packed, is_causal=rows.causal)

        output, vjp = jax.vjp(call, q, k, v)
        return output, *vjp(pull)

    found, alone = jax.jit(jax.vmap(function, axes))(*arrays), jax.jit(function)
    for i in range(examples):
        picked = [
            x[i] if is_in else x for x, is_in in zip(arrays, batched, strict=True)
        ]
        for x, y in zip(found, alone(*picked), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-5)


def test_a_mask_is_a_pytree_and_offsets_are_traced() -> None:
    calls = []

    @jax.jit
    def function(mask: masks.Packed) -> jax.Array:
        calls.append(1)
        return _self_attention(mask)

    for offsets in ([0, 3, 11], [0, 5, 9]):
        packed = masks.Packed(jnp.asarray(offsets), max_length=8)
        np.testing.assert_array_equal(function(packed), _self_attention(packed))
    assert len(calls) == 1
    assert repr(packed) == "Packed(query_offsets=i32[3], max_length=(8, 8))"


# --- messages -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: masks.Packed([0.0, 3.0]), TypeError,
         r"query_offsets is f32\[2\]. They must be integers"),
        (lambda: masks.Packed(np.zeros((2, 2, 2), np.int32)), ValueError,
         r"query_offsets is i32\[2,2,2\]. Pass numbers for all rows"),
        (lambda: masks.Packed([[0, 3]] * 3), ValueError,
         "there are sequences for 3 rows, but query has 2"),
        (lambda: masks.Packed([0, 3], [0, 3, 5]), ValueError,
         "the queries have 1 sequences, but the keys 2. They must have as many"),
        (lambda: masks.Packed([0, 3, 5, 6], query_lengths=[3, 1]), ValueError,
         r"query_offsets is i32\[1,4\] with 2 lengths. Pass as many"),
        (lambda: masks.Packed([0, 3], query_lengths=[4, 1]), ValueError,
         "the query sequences overlap: one ends at token 4 and another begins at 3"),
        (lambda: masks.Packed(jnp.array([0, 3]), query_lengths=jnp.array([4, 1])),
         ValueError, "the query sequences overlap: one ends at token 4"),
        (lambda: masks.Packed([0, 3], query_lengths=[3, 9]), ValueError,
         "a query sequence has the tokens from 3 to 12, and a row has 11. Packed.from"),
        (lambda: masks.Packed([0, 3], [-1, 3], [3, 2], [3, 2]), ValueError,
         "a key sequence has the tokens from -1 to 2, and a row has 11. Packed.from"),
        (lambda: masks.Packed([5, 4, 2]), ValueError,
         r"query_offsets begins with 5. Offsets are cumulative lengths that begin with "
         r"0, as 0, 5, 9, 12 for lengths of 5, 4 and 3. Packed.from_lengths makes them "
         r"of lengths. For tokens of no sequence in front, pass lengths in addition"),
        (lambda: masks.Packed(jnp.array([0, 9, 5, 11])), ValueError,
         "query_offsets has 5 after 9, and must not decrease. Offsets are cumulative"),
        (lambda: masks.Packed([0, 5], np.array([0, 40])), ValueError,
         "key_offsets ends with 40, and a row has 11 tokens. Offsets are cumulative .*"
         "Packed.from_lengths makes them of lengths. Tokens after the last sequence"),
        (lambda: masks.Packed.from_lengths([7, 8]), ValueError,
         "query_offsets ends with 15, and a row has 11 tokens"),
        (lambda: masks.Packed([]), TypeError, "They must be integers"),
        (lambda: masks.Packed(np.zeros((0,), np.int32)), ValueError,
         r"Pass n \+ 1 cumulative lengths"),
        (lambda: masks.Packed([0, 3], max_length=0), ValueError,
         "max_length is 0. Pass an int above 0"),
        (lambda: masks.Packed([0, 3], max_length=cast("Any", 2.5)), TypeError,
         "max_length is 2.5. Pass an int that is known"),
        (lambda: masks.Packed([0, 3], max_length=cast("Any", (1, 2, 3))), ValueError,
         r"max_length is \(1, 2, 3\). Pass an int, or one for queries"),
        (lambda: masks.Packed.from_segment_ids(np.zeros((1, 1, 1), np.int32), 2),
         ValueError, r"the segment ids are i32\[1,1,1\]. Pass one number per token"),
        (lambda: masks.Packed.from_segment_ids([0, 1], True), TypeError,
         "max_segments is True"),
        (lambda: masks.Packed([0, 3]) & masks.Packed([0, 4]), ValueError,
         "two masks say which sequences a row contains"),
        (lambda: masks.Packed([0, 3], [0, 4]) & masks.Causal("bottom-right")
         & masks.Window(2, 0), ValueError, "have different alignments"),
    ],
)  # fmt: skip
def test_messages(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _self_attention(make())
