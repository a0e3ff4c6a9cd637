# SPDX-License-Identifier: Apache-2.0
"""Tests what the mixture of experts refuses, and how it says it."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import moe
from tests.products.moe.truth import drawn

pytestmark = [pytest.mark.once, pytest.mark.sampled]


_SIZES = {"T": 13, "D": 6, "E": 5, "F": 7, "G": 3}

_X, _E = np.ones((4, 6), "f4"), np.ones((4, 2), "i4")

_LAYER = {name: x for name, x in drawn(0, **_SIZES).items() if name != "selection_bias"}

_layer = functools.partial(moe.layer, **_LAYER)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: moe.permutation(_E[0], 2),
            ValueError,
            "moe.permutation: experts is i32[2]. It must be (tokens, choices).",
        ),
        (
            lambda: moe.permutation(_X, 2),
            TypeError,
            "moe.permutation: experts is f32[4,6]. It must hold integers.",
        ),
        (
            lambda: moe.permutation(_E, 2, capacity=0),
            ValueError,
            "moe.permutation: capacity=0 must be at least 1.",
        ),
        (
            lambda: moe.permutation(_E, 0),
            ValueError,
            "moe.permutation: num_experts=0 must be at least 1.",
        ),
        (
            lambda: moe.permute(_X[:3], moe.permutation(_E, 2)),
            ValueError,
            "moe.permute: x is f32[3,6]. It must be (tokens, width) for the 4 tokens",
        ),
        (
            lambda: moe.unpermute(_X, moe.permutation(_E, 2)),
            ValueError,
            "moe.unpermute: rows is f32[4,6]. It must be (rows, width) for the 8 rows",
        ),
        (
            lambda: moe.unpermute(
                jnp.ones((8, 3)), moe.permutation(_E, 2), jnp.ones((2, 4))
            ),
            ValueError,
            "moe.unpermute: weights is f32[2,4]. It must be [4, 2], one for each",
        ),
        (
            lambda: moe.router(_X, jnp.ones((5, 6)), top_k=1),
            ValueError,
            "moe.router: x is f32[4,6] and router_w f32[5,6]. They must be (..., "
            "width) and (width, experts)",
        ),
        (
            lambda: moe.router(_X, jnp.ones((6, 5), int), top_k=1),
            TypeError,
            "moe.router: router_w is i32[6,5]. Supported dtypes are bf16, f16, f32",
        ),
        (
            lambda: _layer(top_k=6),
            ValueError,
            "moe.layer: top_k=6 experts are chosen of 5. It must be from 1 to 5.",
        ),
        (
            lambda: _layer(top_k=2, groups=(5, 1, 1)),
            ValueError,
            "moe.layer: groups=(5, 1, 1) for 5 experts. It must be (count, chosen)",
        ),
        (
            lambda: jax.jit(lambda scale: _layer(top_k=2, scale=scale))(2.0),
            TypeError,
            "moe.layer: scale is",
        ),
        (
            lambda: _layer(top_k=2, capacity_factor="all"),  # type: ignore[arg-type]
            TypeError,
            "moe.layer: capacity_factor is str. It must be a number",
        ),
        (
            lambda: _layer(top_k=2.0),
            TypeError,
            "moe.layer: top_k is float. It must be an int",
        ),
        (
            lambda: jax.jit(lambda k: _layer(top_k=k))(2),
            TypeError,
            "name it in static_argnames",
        ),
        (
            lambda: moe.permutation(jnp.ones((4, 1), int), 2, capacity=1.5),  # type: ignore[arg-type]
            TypeError,
            "moe.permutation: capacity is float. It must be an int",
        ),
        (
            lambda: _layer(top_k=2, scores="relu"),  # type: ignore[arg-type]
            ValueError,
            "moe.layer: scores='relu' is not one of 'softmax', 'sigmoid'.",
        ),
        (
            lambda: _layer(top_k=2, scale=np.inf),
            ValueError,
            "moe.layer: scale=inf is not finite.",
        ),
        (
            lambda: _layer(top_k=2, normalize=1),  # type: ignore[arg-type]
            TypeError,
            "moe.layer: normalize is int. It must be True or False",
        ),
        (
            lambda: _layer(top_k=2, groups=(2, 1)),
            ValueError,
            "moe.layer: groups=(2, 1) for 5 experts. It must be (count, chosen), a "
            "count that divides 5 and a number of them from 1 to the count.",
        ),
        (
            lambda: _layer(top_k=2, groups=(5, 1)),
            ValueError,
            "moe.layer: top_k=2 experts are chosen of the 1 in the groups that",
        ),
        (
            lambda: _layer(top_k=2, selection_bias=jnp.ones(4)),
            ValueError,
            "moe.layer: selection_bias is f32[4]. It must be [5], one number for each",
        ),
        (
            lambda: _layer(top_k=2, capacity_factor=0),
            ValueError,
            "moe.layer: capacity_factor=0.0 must be positive and finite.",
        ),
        (
            lambda: _layer(top_k=2, implementation="cuda"),  # type: ignore[arg-type]
            ValueError,
            "moe.layer: implementation='cuda' is not one of",
        ),
        (
            lambda: _layer(**{"down_w": _LAYER["up_w"]}, top_k=2),
            ValueError,
            "moe.layer: down_w is f32[5,6,7]. Its axes are (experts, hidden width, "
            "width), which must be [5, 7, 6] beside x f32[13,6] and router_w f32[6,5] "
            "and gate_w f32[5,6,7].",
        ),
        (
            lambda: _layer(**{"gate_w": None}, top_k=2),
            ValueError,
            "moe.layer: gate_bias needs gate_w. Pass both, or neither.",
        ),
        (
            lambda: _layer(**{"shared_down_w": None}, top_k=2),
            ValueError,
            "moe.layer: shared_up_w needs shared_down_w. Pass both, or neither.",
        ),
        (
            lambda: _layer(**{"up_w": None}, top_k=2),
            TypeError,
            "moe.layer: up_w is None. It must be an array of numbers.",
        ),
        (
            lambda: moe.layer(
                **(_LAYER | {"x": _LAYER["x"].astype("bfloat16")}), top_k=2
            ),
            TypeError,
            "moe.layer: x is bf16",
        ),
        (
            lambda: _layer(top_k=2, groups=4),  # type: ignore[arg-type]
            TypeError,
            "moe.layer: groups=4 is no pair. Pass (count, chosen): how many groups",
        ),
        *(
            (
                functools.partial(_layer, **{f"{name}_axis": 3}, top_k=2),
                TypeError,
                f"moe.layer: {name}_axis=3 is not the name of a mesh axis, nor a tuple",
            )
            for name in ("expert", "batch", "tensor")
        ),
        (
            lambda: moe.router(_X, jnp.ones((6, 5)), top_k=1, axis_name=("data", 1)),  # type: ignore[arg-type]
            TypeError,
            "moe.router: axis_name=('data', 1) is not the name of a mesh axis, nor a",
        ),
        (
            lambda: moe.router(_X, jnp.ones((6, 5)), top_k=1, axis_name="data"),
            ValueError,
            "moe.router: axis_name='data' is not an axis that is sharded here (there "
            "is none). Call it inside jax.shard_map over that axis.",
        ),
        (
            lambda: moe.router(_X, jnp.ones((6, 5)), top_k=1, precision="most"),
            ValueError,
            "moe.router: precision='most' is not one that JAX has.",
        ),
        (
            lambda: moe.permutation([[1, 0]], "2"),  # type: ignore[arg-type]
            TypeError,
            "moe.permutation: num_experts is str. It must be an int",
        ),
        *(
            (
                lambda call=call: call(_X, moe.router(_X, jnp.ones((6, 5)), top_k=1)),
                TypeError,
                f"moe.{name}: permutation is Routing. It must be a moe.Permutation. "
                "Pass moe.permutation(routing.experts, num_experts), with",
            )
            for name, call in (("permute", moe.permute), ("unpermute", moe.unpermute))
        ),
        (
            lambda: _layer(top_k=2, activation="silo"),  # type: ignore[arg-type]
            ValueError,
            "moe.layer: activation='silo' is not one of",
        ),
    ],
)
def test_messages(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()
