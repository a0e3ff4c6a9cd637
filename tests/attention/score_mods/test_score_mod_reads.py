# SPDX-License-Identifier: Apache-2.0
"""Tests that a score_mod is refused exactly where it reads past an array's end.

The truth computes the indices of all scores in Python.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx import Rngs
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jax_cudnn import masks, parallel, qkv_sdpa, score_mods, sdpa
from jax_cudnn.flax import nnx
from tests.common import drawn

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_BEYOND = r"score_mod reads .* That is beyond its end"


def _operands(
    b: int = 2, s: int = 4, t: int = 6, h: int = 6, k: int = 3
) -> list[jax.Array]:
    shapes = ((b, s, h, 8), (b, t, k, 8), (b, t, k, 8))
    return [drawn.normal(i, shape) for i, shape in enumerate(shapes)]


# Of batch entry, head, query and key. What depends on a query and a key depends on
# their distance only: of other functions not all values are looked at.
_INDICES: dict[str, Callable[..., Any]] = {
    "batch": lambda b, h, q, k: b,
    "head": lambda b, h, q, k: h,
    "query": lambda b, h, q, k: q,
    "key": lambda b, h, q, k: k,
    "pairs of heads": lambda b, h, q, k: h // 2,
    "heads in turn": lambda b, h, q, k: (h + 1) % 4,
    "distance": lambda b, h, q, k: k - q,
    "distance from 5": lambda b, h, q, k: q - k + 5,
    "blocks of keys": lambda b, h, q, k: k >> 1,
    "heads backwards": lambda b, h, q, k: 5 - h,
    "twice": lambda b, h, q, k: 2 * h - 3,
    "head and distance": lambda b, h, q, k: h + abs(q - k),
}


@given(
    name=st.sampled_from([*_INDICES]),
    count=st.integers(1, 12),
    sizes=st.tuples(*[st.integers(1, 6)] * 4),
    is_causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)),
    guard=st.sampled_from(["", "where", "times", "index"]),
    bound=st.integers(0, 6),
)
def test_a_score_mod_is_refused_just_where_a_score_reads_beyond_an_end(
    name: str,
    count: int,
    sizes: tuple[int, int, int, int],
    is_causal: bool,
    window: tuple[int, int] | None,
    guard: str,
    bound: int,
) -> None:
    b, h, s, t = sizes
    index, array = _INDICES[name], jnp.ones(count)

    def modified(score: Any, *places: Any) -> Any:
        """Read the array where the index is below a bound, or always."""
        i = index(*places)
        if guard == "where":
            return score + jnp.where(i < bound, array[i], 0)
        if guard == "times":
            return score + jnp.where(i < bound, 1.0, 0.0) * array[i]
        if guard == "index":
            return score + array[jnp.where(i < bound, i, 0)]
        return score + array[i]

    def is_wrong(*places: int) -> bool:
        _, _, q, k = places
        if is_causal and k > q:
            return False
        if window is not None and not -window[0] <= k - q <= window[1]:
            return False
        i = index(*places)
        return not -count <= i < count and (not guard or i < bound)

    want = any(is_wrong(*each) for each in itertools.product(*map(range, (b, h, s, t))))
    operands = _operands(b, s, t, h, h)
    call = functools.partial(
        sdpa, score_mod=modified, is_causal=is_causal, local_window_size=window
    )
    if not want:
        jax.eval_shape(call, *operands)
        return
    with pytest.raises(ValueError, match=_BEYOND):
        jax.eval_shape(call, *operands)


_FOUR = jnp.ones(4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, b, h, q, k: x + jnp.take(_FOUR, h, mode="clip"),
        lambda x, b, h, q, k: x + _FOUR[jnp.clip(h, 0, 3)],
        lambda x, b, h, q, k: jnp.where((h < 4) & (_FOUR[h] > 0), x, -jnp.inf),
        lambda x, b, h, q, k: jnp.where((h > 3) | (_FOUR[h] > 0), x, -jnp.inf),
        lambda x, b, h, q, k: x + jax.lax.cond(h < 4, lambda: _FOUR[h], lambda: 0.0),
        # Whether it is selected is not known.
        lambda x, b, h, q, k: x + jnp.where(x > 0, _FOUR[h], 0),
        # What is not computed in whole numbers is not known.
        lambda x, b, h, q, k: x + _FOUR[(h.astype(jnp.float32) * 0.5).astype(int)],
        # Of several elements some are there.
        lambda x, b, h, q, k: x + jnp.ones(4)[h + jnp.arange(-5, 1)].sum(),
    ],
)
def test_what_may_be_meant_is_taken(function: Any) -> None:
    jax.eval_shape(functools.partial(sdpa, score_mod=function), *_operands())


@pytest.mark.parametrize(
    "function",
    [
        lambda x, b, h, q, k: x + jax.jit(lambda h: _FOUR[h])(h),
        lambda x, b, h, q, k: x * jnp.where(h < 5, _FOUR[h], 1),
        lambda x, b, h, q, k: x + jnp.where(x > 0, _FOUR[h], _FOUR[h] - 1),
        lambda x, b, h, q, k: x + jnp.ones((6, 4, 6))[h, h, k],
        lambda x, b, h, q, k: x + jnp.ones((4, 6))[h][k],
        lambda x, b, h, q, k: x + jnp.ones((4, 7))[h].sum(),
        lambda x, b, h, q, k: x + jax.nn.relu(_FOUR[7]),
        lambda x, b, h, q, k: jnp.where(_FOUR[h] > 0, x, -jnp.inf),
        lambda x, b, h, q, k: x + jnp.ones(9)[jnp.array([0, 1, 0, 1])[h]],
        lambda x, b, h, q, k: x + jnp.ones((4, 3))[h, jnp.arange(2)].sum(),
        # With steps that no graph can hold, for XLA.
        lambda x, b, h, q, k: jnp.cumsum(x[None])[0] + _FOUR[h],
    ],
)
def test_what_is_read_inside_and_among_other_operations_is_refused(
    function: Any,
) -> None:
    with pytest.raises(ValueError, match=_BEYOND):
        jax.eval_shape(functools.partial(sdpa, score_mod=function), *_operands())


def test_the_message_says_what_is_read_where() -> None:
    def per_entry(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score + jnp.ones((1, 6))[batch, key]

    with pytest.raises(
        ValueError,
        match=r"sdpa: score_mod reads f32\[1,6\] at index 1 of axis 0, for batch entry "
        r"1 of 2 \(.*test_score_mod_reads\.py.*per_entry.*\)\. That is beyond its end, "
        r"where JAX reads the nearest element\. Pass an array with an element for each "
        r"index\. If the nearest one is meant, clip the index \(jnp\.clip\), or use "
        r"jnp\.take\(\.\.\., mode=\"clip\"\): x\.at\[i\]\.get\(mode=\"clip\"\) cannot",
    ):
        sdpa(*_operands(), score_mod=per_entry)
    with pytest.raises(
        ValueError, match=r"at index 3 of axis 0, for query \d of 4, key 3 of 6 \("
    ):
        sdpa(*_operands(), score_mod=lambda x, b, h, q, k: x + jnp.ones(3)[k])


def test_keys_that_arrays_may_hide_are_not_judged() -> None:
    """Tables for the longest sequence are read at padding, too."""
    bias = jnp.zeros((1, 1, 4, 6))
    for options in (
        {"key_value_seq_lengths": jnp.array([3, 2])},
        {"mask": bias == 0},
        {"bias": bias},
        {"mask": masks.Packed([0, 3])},
        {"mask": masks.Prefix(2)},
    ):
        call = functools.partial(sdpa, **options)  # type: ignore[arg-type]
        call(*_operands(), score_mod=lambda x, b, h, q, k: x + jnp.ones(3)[k])
        # A head is not hidden.
        with pytest.raises(ValueError, match=_BEYOND):
            call(*_operands(), score_mod=lambda x, b, h, q, k: x + _FOUR[h])


# --- every way to a score_mod ---------------------------------------------------------


def _mesh(**axes: int) -> jax.sharding.Mesh:
    sizes = tuple(axes.values())
    return jax.make_mesh(
        sizes,
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: int(np.prod(sizes))],
    )


def _in_shard_map(method: str, score_mod: Any, *operands: Any, heads: Any) -> Any:
    spec = PartitionSpec(None, "s", heads)

    def local(*given: Any) -> Any:
        return parallel.sdpa(*given, axis_name="s", method=method, score_mod=score_mod)  # type: ignore[arg-type]

    mesh = _mesh(s=2) if heads is None else _mesh(s=2, heads=2)
    shared = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    return jax.eval_shape(shared, *operands)


def _by_layer(score_mod: Any, *_: Any, **options: Any) -> Any:
    layer = nnx.MultiHeadAttention(
        num_heads=6, in_features=12, rngs=Rngs(0), score_mod=score_mod, **options
    )
    if options["decode"]:
        layer.init_cache((2, 6, 12))
        return layer(jnp.ones((2, 1, 12)))
    return layer(jnp.ones((2, 6, 12)))


def _sharded(score_mod: Any, *operands: Any, **options: Any) -> Any:
    mesh = _mesh(s=2, h=3)
    call = functools.partial(
        parallel.sharded_sdpa, mesh=mesh, axis="s", score_mod=score_mod, **options
    )
    return jax.eval_shape(call, *operands)


# Of operands with 6 query heads and 6 keys.
_WAYS: dict[str, Any] = {
    "sdpa": lambda f, *x: sdpa(*x, score_mod=f),
    "jit": lambda f, *x: jax.jit(functools.partial(sdpa, score_mod=f))(*x),
    "grad": lambda f, *x: jax.grad(lambda q: sdpa(q, *x[1:], score_mod=f).sum())(x[0]),
    "vmap": lambda f, *x: jax.vmap(functools.partial(sdpa, score_mod=f))(*x),
    "without a batch": lambda f, *x: sdpa(*(each[0] for each in x), score_mod=f),
    "bhsd": lambda f, *x: sdpa(
        *(jnp.swapaxes(each, 1, 2) for each in x), score_mod=f, layout="bhsd"
    ),
    "xla": lambda f, *x: sdpa(*x, score_mod=f, implementation="xla"),
    "qkv_sdpa": lambda f, *x: qkv_sdpa(
        jnp.ones((2, 6, 12, 8)), layout="bshd", key_value_heads=3, score_mod=f
    ),
    "ring": lambda f, *x: _in_shard_map("ring", f, *x, heads=None),
    "all_gather": lambda f, *x: _in_shard_map("all_gather", f, *x, heads=None),
    "sharded": lambda f, *x: _sharded(f, *x),
    "zigzag": lambda f, *x: _sharded(
        f, x[0], *(jnp.ones((2, 8, 3, 8)),) * 2, order="zigzag"
    ),
    "sharded heads": lambda f, *x: _sharded(f, *x, head_axis="h"),
    "layer": functools.partial(_by_layer, decode=False),
    "layer that adds to a cache": functools.partial(_by_layer, decode=True),
}


@pytest.mark.parametrize("way", _WAYS)
def test_another_number_of_heads_is_refused_on_every_way(way: str) -> None:
    run, operands = _WAYS[way], _operands()
    slopes = jnp.arange(8.0)
    right = lambda x, b, h, q, k: x + slopes[:6][h]  # noqa: E731
    run(right, *operands)
    run(score_mods.alibi(slopes[:6]), *operands)
    with pytest.raises(ValueError, match=_BEYOND):
        run(lambda x, b, h, q, k: x + slopes[:5][h], *operands)
    for count in (1, 5, 8):
        alibi = score_mods.compose(score_mods.alibi(slopes[:count]))
        with pytest.raises(ValueError, match=rf"f32\[{count}\], and there are 6 query"):
            run(alibi, *operands)
        table = score_mods.relative_bias(jnp.ones((5, count)))
        with pytest.raises(ValueError, match="and there are 6 query heads"):
            run(table, *operands)


def test_heads_are_those_of_a_device_where_operands_are() -> None:
    """In a shard_map of one's own, 6 heads over 2 devices are 3 on each."""
    operands = _operands(k=6)
    _in_shard_map("ring", score_mods.alibi(jnp.ones(3)), *operands, heads="heads")
    with pytest.raises(ValueError, match=r"f32\[6\], and there are 3 query heads"):
        _in_shard_map("ring", score_mods.alibi(jnp.ones(6)), *operands, heads="heads")


def test_positions_of_all_devices_are_judged() -> None:
    operands = _operands()
    for name, run in _WAYS.items():
        if name not in ("ring", "all_gather", "sharded", "sharded heads"):
            continue
        run(lambda x, b, h, q, k: x + jnp.ones(6)[k], *operands)
        for few in (
            lambda x, b, h, q, k: x + jnp.ones(3)[q],
            lambda x, b, h, q, k: x + jnp.ones(5)[k],
        ):
            with pytest.raises(ValueError, match=_BEYOND):
                run(few, *operands)


def test_symbolic_sizes_are_not_judged() -> None:
    b, s = jax.export.symbolic_shape("b, s")
    x = jax.ShapeDtypeStruct((b, s, 6, 8), jnp.float32)
    few = lambda x, b, h, q, k: x + jnp.ones(5)[q] + jnp.ones(1)[b]  # noqa: E731
    export = jax.export.export
    export(jax.jit(lambda x: sdpa(x, x, x, score_mod=few)))(x)
    wrong = lambda x, b, h, q, k: x + _FOUR[h]  # noqa: E731
    with pytest.raises(ValueError, match=_BEYOND):
        export(jax.jit(lambda x: sdpa(x, x, x, score_mod=wrong)))(x)


# --- tables ---------------------------------------------------------------------------


def test_a_table_of_other_heads_or_buckets_is_refused() -> None:
    operands = _operands()
    with pytest.raises(
        ValueError,
        match=re.escape(
            "alibi: slopes is f32[8], and there are 6 query heads. Pass one slope for "
            "each, such as alibi_slopes(6)."
        ),
    ):
        sdpa(*operands, score_mod=score_mods.alibi(score_mods.alibi_slopes(8)))
    with pytest.raises(
        ValueError,
        match=re.escape(
            "relative_bias: table is f32[6,33], and there are 6 query heads. It must "
            "be (positions, heads), with 6 columns."
        ),
    ):
        sdpa(*operands, score_mod=score_mods.relative_bias(jnp.ones((6, 33))))
    for rows in (6, 31, 33):
        with pytest.raises(
            ValueError,
            match=re.escape(
                f"relative_bias: table is f32[{rows},32], and there are 32 buckets. It "
                "must be (buckets, heads), with 32 rows. Transpose it, or pass its "
                "number of rows to t5_buckets."
            ),
        ):
            score_mods.relative_bias(jnp.ones((rows, 32)), score_mods.t5_buckets())
    short = score_mods.relative_bias(jnp.ones((5, 6)), lambda distance: distance + 5)
    with pytest.raises(ValueError, match=_BEYOND):
        sdpa(*operands, score_mod=short)


@pytest.mark.parametrize(
    ("count", "farthest", "is_both", "told"),
    [
        (3, 128, True, "count=3 and farthest=128. There must be at least 4 buckets"),
        (1, 128, False, "There must be at least 2 buckets, and farthest must be more"),
        (32, 8, True, "farthest must be more than 8, the distances with a bucket of"),
    ],
)
def test_buckets_that_are_none_are_refused(
    count: int, farthest: int, is_both: bool, told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        score_mods.t5_buckets(count, farthest, bidirectional=is_both)


@pytest.mark.parametrize("is_both", [False, True])
def test_t5_buckets_are_rows_of_the_table(is_both: bool) -> None:
    for count in range(4 if is_both else 2, 34):
        bucket = score_mods.t5_buckets(count, 64, bidirectional=is_both)
        found = np.asarray(bucket(jnp.arange(-999, 1000, dtype=jnp.int32)))
        assert found.min() == 0
        assert count - 2 <= found.max() < count
