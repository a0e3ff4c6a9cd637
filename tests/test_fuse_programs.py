# SPDX-License-Identifier: Apache-2.0
"""Do random small programs mean the same when they are fused?"""

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jax_cudnn import fuse
from tests.examples import examples
from tests.fused_functions import normal

# An operation of one array keeps values near 1, or what is compared would be rounding.
_UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "abs": jnp.abs,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "gelu exact": lambda x: jax.nn.gelu(x, approximate=False),
    "layer norm": lambda x: jax.nn.standardize(x, epsilon=0.1),
    "leaky": jax.nn.leaky_relu,
    "neg": jnp.negative,
    "relu": jax.nn.relu,
    "RMS norm": lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 0.1),
    "relu6": jax.nn.relu6,
    "scaled": lambda x: 0.5 * x,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "softplus": jax.nn.softplus,
    "clip": lambda x: jnp.clip(x, -1.0, 1.0),
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "flip": lambda x: x[::-1],
    "mean": lambda x: x - x.mean(-1, keepdims=True),
    "softmax": jax.nn.softmax,
    "transposed twice": lambda x: jnp.sin(x.T).T,
    "rounded": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "wider": lambda x: (x[:, :, None] * jnp.ones((1, 1, 2)))[:, :, 1],
    "split rows": lambda x: jnp.cos(x.reshape(2, 3, 7)).reshape(6, 7),
    "loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: jnp.sin(c), x),
}
_BINARY: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "add": jnp.add,
    "divide": lambda x, y: x / (2.0 + jnp.sin(y)),
    "larger": jnp.maximum,
    "mul": lambda x, y: jnp.tanh(x) * y,
    "select": lambda x, y: jnp.where(x > y, x, 0.5 * y),
    "sub": jnp.subtract,
    "row of": lambda x, y: x + y[:1],
    "column of": lambda x, y: x * jnp.tanh(y[:, 2:3]),
    "number of": lambda x, y: x - y[3, 4],
}
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(_UNARY)), st.integers(0, 9)),
        st.tuples(
            st.sampled_from(sorted(_BINARY)), st.integers(0, 9), st.integers(0, 9)
        ),
        st.tuples(st.just("matmul"), st.integers(0, 9), st.integers(0, 1)),
    ),
    min_size=2,
    max_size=9,
)


# With it, norms are graphs, too.
_fused = functools.partial(fuse, implementation="cudnn")


def _program(steps: Any, results: list[int]) -> Callable[..., Any]:
    """Return a function whose steps read any earlier values."""

    def run(x: jax.Array, y: jax.Array, u: jax.Array, v: jax.Array) -> Any:
        values = [x @ u, y]
        for name, *places in steps:
            first = values[places[0] % len(values)]
            if name == "matmul":
                values.append(first @ (u, v)[places[1]] / 3.0)
            elif name in _UNARY:
                values.append(_UNARY[name](first))
            else:
                values.append(_BINARY[name](first, values[places[1] % len(values)]))
        return [values[-1], *(values[i % len(values)] for i in results)]

    return run


@examples(25)
@hypothesis.given(_STEPS, st.lists(st.integers(0, 9), max_size=2), st.data())
def test_random_programs(steps: Any, results: list[int], data: st.DataObject) -> None:
    function = _program(steps, results)
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
