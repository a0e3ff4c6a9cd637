# SPDX-License-Identifier: Apache-2.0
"""Tests that random small programs mean the same when they are fused."""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jax_cudnn import fuse
from tests.common.examples import examples
from tests.fusing.functions import normal
from tests.fusing.programs import BINARY, UNARY, program

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 9)),
        st.tuples(
            st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)
        ),
        st.tuples(st.just("matmul"), st.integers(0, 9), st.integers(0, 1)),
    ),
    min_size=2,
    max_size=9,
)


# With it, norms are graphs, too.
_fused = functools.partial(fuse, implementation="cudnn")


@examples(25)
@hypothesis.given(_STEPS, st.lists(st.integers(0, 9), max_size=2), st.data())
def test_random_programs(steps: Any, results: list[int], data: st.DataObject) -> None:
    function = program(steps, results)
    operands = [normal(i, *s) for i, s in enumerate(((6, 7), (6, 7), (7, 7), (7, 7)))]
    found, wanted = (f(*operands) for f in (_fused(function), function))
    for x, y in zip(found, wanted, strict=True):
        # A cast to bf16 may round neighbouring numbers to different ones.
        _close(x, y, steps)
    numbers = tuple(sorted(data.draw(st.sets(st.integers(0, 3), min_size=1))))

    def loss(f: Any, *operands: jax.Array) -> jax.Array:
        terms = (jnp.vdot(x, normal(9, *x.shape)) for x in f(*operands))
        return functools.reduce(jnp.add, terms)

    if any(name in _KINKED for name, *_ in steps):
        return
    gradients = [
        jax.grad(lambda *a, f=f: loss(f, *a), numbers)(*operands)
        for f in (_fused(function), function)
    ]
    for x, y in zip(*gradients, strict=True):
        _close(x, y, steps)


# Where a difference in the last digit changes the gradient as a whole.
_KINKED = ("larger", "select")


def _close(x: jax.Array, y: jax.Array, steps: Any) -> None:
    is_rounded = any(name == "rounded" for name, *_ in steps)
    unit = 2.0**-7 if is_rounded else 2e-5
    size = float(jnp.max(jnp.abs(y), initial=1.0))
    np.testing.assert_allclose(x, y, rtol=unit, atol=unit * size)
