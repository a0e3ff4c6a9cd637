# SPDX-License-Identifier: Apache-2.0
"""Tests attention over caches and pages on a GPU, with anything past the lengths."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import kv_cache, native, plans
from tests.attention.shared.cached import Drawn, Problem, draw

pytestmark = pytest.mark.gpu

_LENGTHS = (0, 1, 130, 257, 300, 64, 17)
_ONE = Problem(lengths=_LENGTHS, t=300, k=2, g=4, d=128, e=128, dtype="bfloat16")
_PROBLEMS = {
    "one": _ONE,
    "mha": replace(_ONE, g=1),
    "groups_of_16": replace(_ONE, k=1, g=16),
    "head_64": replace(_ONE, d=64, e=64),
    "head_256": replace(_ONE, d=256, e=256),
    "head_192_128": replace(_ONE, d=192),
    "head_8_40": replace(_ONE, d=8, e=40),
    "latent": replace(_ONE, d=576, e=512, k=1, g=16),
    "drafted_latent": replace(_ONE, d=576, e=512, k=1, g=16, s=4),
    "f16": replace(_ONE, dtype="float16"),
    "window": replace(_ONE, window=(20, 0)),
    "negative_scale": replace(_ONE, scale=-0.1),
    "sinks": replace(_ONE, sinks=True),
    "drafted_2": replace(_ONE, s=2),
    "drafted_4": replace(_ONE, s=4),
    "drafted_16": replace(_ONE, s=16),
    "drafted_ragged": replace(_ONE, s=4, query_lengths=(4, 1, 2, 3, 4, 0, 1)),
    "drafted_window": replace(_ONE, s=4, window=(20, 0)),
    "drafted_all_seen": replace(_ONE, s=4, is_causal=False),
    "long": replace(_ONE, t=3000, lengths=(0, 1, 1300, 2570, 3000, 640, 17)),
}
# Those that run in the kernel for prompts: no NaN past the lengths.
_PROMPTS = {
    "prompt": replace(_ONE, s=70),
    "prompt_ragged": replace(_ONE, s=70, query_lengths=(70, 1, 2, 63, 64, 0, 65)),
    "short_window": replace(_ONE, s=4, window=(2, 0)),
    "window_on_both_sides": replace(_ONE, s=4, window=(20, 2), is_causal=False),
}


def _check(drawn: Drawn, record_property: Any) -> None:
    def run(implementation: Any) -> Any:
        given = [drawn.query, drawn.key, drawn.value, drawn.lengths]
        names = ["query", "key", "value", "lengths"]
        if drawn.page_table is not None:
            given.append(drawn.page_table)
            names.append("page_table")
        call = jax.jit(
            lambda *x: drawn.call(
                **dict(zip(names, x, strict=True)), implementation=implementation
            )
        )
        return call(*given)

    found, beside = run("cudnn"), run("xla")
    epsilon = float(jnp.finfo(drawn.query.dtype).eps)
    for name, x, y, truth in zip(
        ("output", "lse"), found, beside, drawn.truth, strict=True
    ):
        x, y = (np.asarray(each, np.float64) for each in (x, y))
        is_dead = np.isneginf(drawn.truth[1])
        if name == "lse":
            assert (np.isneginf(x) == is_dead).all()
            x, y, truth = (np.where(is_dead, 0, each) for each in (x, y, truth))
        else:
            assert not x[is_dead].any()
        errors = [float(np.abs(each - truth).max()) for each in (x, y)]
        record_property(f"error of {name}, cudnn and xla", f"{errors}")
        # Rounded once more where queries are heads, or with sinks.
        unit = 1e-5 if name == "lse" else epsilon * float(np.abs(truth).max())
        assert errors[0] <= 2 * errors[1] + unit, (name, errors)


@pytest.mark.parametrize("page", [0, 1, 16, 64, 128])
@pytest.mark.parametrize("name", _PROBLEMS)
def test_results_match_float64_beside_nan_and_junk(
    name: str, page: int, record_property: Any
) -> None:
    _check(draw(replace(_PROBLEMS[name], page=page)), record_property)


@pytest.mark.parametrize("page", [0, 16, 128])
@pytest.mark.parametrize("name", _PROMPTS)
def test_prompts_match_float64(name: str, page: int, record_property: Any) -> None:
    _check(draw(replace(_PROMPTS[name], page=page), poison=False), record_property)


@pytest.mark.parametrize("page", [0, 64])
def test_every_candidate_of_few_queries_is_right(
    page: int, record_property: Any
) -> None:
    """Tuning checks each winner against the reference; both ways have to pass."""
    problem = replace(_ONE, s=4, page=page, lengths=(300,) * 7)
    drawn = draw(problem, poison=False)

    def call(*given: Any) -> Any:
        names = ("query", "key", "value", "lengths", "page_table")
        return drawn.call(**dict(zip(names, given, strict=False)))

    given = [drawn.query, drawn.key, drawn.value, drawn.lengths]
    given += [drawn.page_table] if page else []
    report = plans.autotune(call, *given)
    record_property("tuned", str(report))
    _check(drawn, record_property)


@pytest.mark.parametrize("is_paged", [False, True])
def test_a_step_writes_in_place_and_builds_no_plan_twice(is_paged: bool) -> None:
    b, k, d, page, each = 3, 2, 64, 16, 256
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    shape = (b * each, page, k, d) if is_paged else (b, each * page, k, d)
    table = jnp.asarray(rng.permutation(b * each).reshape(b, each), jnp.int32)

    def step(q: Any, new: Any, keys: Any, values: Any, lengths: Any) -> Any:
        if is_paged:
            keys, values = (
                kv_cache.update_pages(x, y, table, lengths)
                for x, y in ((keys, new[0]), (values, new[1]))
            )
            out = jax_cudnn.paged_sdpa(
                q, keys, values, table, lengths + 1, implementation="cudnn"
            )
        else:
            keys, values = (
                kv_cache.update(x, y, lengths)
                for x, y in ((keys, new[0]), (values, new[1]))
            )
            out = jax_cudnn.cached_sdpa(
                q, keys, values, lengths + 1, implementation="cudnn"
            )
        return out, keys, values

    caches = [jnp.full(shape, jnp.nan, jnp.bfloat16) for _ in "kv"]
    q, new = normal(b, 1, 4, d), normal(2, b, 1, k, d)
    jitted = jax.jit(step, donate_argnums=(2, 3))
    lengths = jnp.zeros(b, jnp.int32)
    compiled = jitted.lower(q, new, *caches, lengths).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * caches[0].nbytes
    assert memory.temp_size_in_bytes < caches[0].nbytes
    places = [x.unsafe_buffer_pointer() for x in caches]
    plain = [[], []]
    builds = None
    for i in range(20):
        q, new = normal(b, 1, 4, d), normal(2, b, 1, k, d)
        for old, x in zip(plain, new, strict=True):
            old.append(x[:, 0])
        out, *caches = compiled(q, new, *caches, lengths + i)
        builds = native.cache_stats().builds if builds is None else builds
        dense = [jnp.stack(x, 1) for x in plain]
        want = jax_cudnn.sdpa(q, *dense, implementation="xla")
        np.testing.assert_allclose(
            out.astype(jnp.float32), want.astype(jnp.float32), atol=2e-2, rtol=2e-2
        )
    assert [x.unsafe_buffer_pointer() for x in caches] == places
    assert native.cache_stats().builds == builds


@pytest.mark.parametrize("page", [0, 64])
def test_results_repeat_to_the_bit(page: int) -> None:
    for problem in (_PROBLEMS["long"], _PROBLEMS["drafted_4"]):
        drawn = draw(replace(problem, page=page))
        run = jax.jit(lambda q, drawn=drawn: drawn.call(query=q)[0])
        first = np.asarray(run(drawn.query).astype(jnp.float32))
        for _ in range(10):
            again = np.asarray(run(drawn.query).astype(jnp.float32))
            np.testing.assert_array_equal(first, again)


def test_examples_with_the_pages_in_common_are_one_call() -> None:
    drawn = draw(replace(_ONE, page=16))
    queries = jnp.stack([drawn.query, drawn.query[::-1]])
    lengths = jnp.stack([drawn.lengths, jnp.minimum(drawn.lengths, 100)])

    def one(q: Any, lengths: Any) -> jax.Array:
        return drawn.call(query=q, lengths=lengths, implementation="cudnn")[0]

    found = jax.jit(jax.vmap(one))(queries, lengths)
    for x, q, n in zip(found, queries, lengths, strict=True):
        want = drawn.call(query=q, lengths=n, implementation="xla")[0]
        np.testing.assert_allclose(
            x.astype(jnp.float32), want.astype(jnp.float32), atol=2e-2, rtol=2e-2
        )
