# SPDX-License-Identifier: Apache-2.0
"""Tests what policies of `jax.checkpoint` are asked, and what is saved of a graph."""

from typing import Any

import jax
import pytest
from jax.ad_checkpoint import Offloadable, Recompute

import jax_cudnn
from jax_cudnn.graph import (
    DTypeName,
    Graph,
    MatmulAttributes,
    Node,
    Tensor,
    is_anchor,
    saved_results,
)
from jax_cudnn.graph.pointwise import PointwiseAttributes
from tests.lowering.remat.saving import draw_arrays, gradient_of, products_in, sines_of

pytestmark = pytest.mark.sampled


def test_a_policy_is_asked_about_the_graph_and_then_about_jax_s_products() -> None:
    asked: list[tuple[str, Any]] = []

    def policy(prim: Any, *types: Any, **params: Any) -> bool:
        shapes = tuple(x.shape for x in types)
        asked.append((prim.name, (shapes, params.get("dimension_numbers"))))
        return False

    x, w = draw_arrays((3, 6, 16), (3, 16, 24))
    jax.make_jaxpr(jax.grad(jax.checkpoint(sines_of(jax_cudnn.matmul), policy=policy)))(
        x, w
    )
    products = [each for each in asked if each[0] in ("cudnn_graph", "dot_general")]
    shapes = ((3, 6, 16), (3, 16, 24))
    numbers = (((2,), (1,)), ((0,), (0,)))
    assert [name for name, _ in products] == ["cudnn_graph", "dot_general"]
    assert products[1][1] == (shapes, numbers)


def test_the_first_answer_that_saves_counts() -> None:
    """Also where a policy knows the package's primitive and says where to put it."""

    def policy(prim: Any, *_: Any, **__: Any) -> Any:
        if prim.name == "cudnn_graph":
            return Offloadable(src="device", dst="pinned_host")
        return Recompute

    x, w = draw_arrays((6, 16), (16, 24))
    saving = jax.checkpoint(sines_of(jax_cudnn.matmul), policy=policy)
    text = str(jax.make_jaxpr(jax.grad(saving))(x, w))
    assert "f32<host>[1,6,24]" in text
    assert products_in(gradient_of(saving, 2), x, w) == 3


def test_answers_that_are_none_are_refused() -> None:
    def policy(prim: Any, *_: Any, **__: Any) -> Any:
        return None if prim.name == "cudnn_graph" else False

    x, w = draw_arrays((6, 16), (16, 24))
    saving = jax.checkpoint(sines_of(jax_cudnn.matmul), policy=policy)
    message = (
        r"a jax\.checkpoint policy returned None for cudnn_graph\. A policy returns a "
        r"bool, or Saveable, Recompute or Offloadable\(src, dst\) of jax\.ad_checkpoint"
    )
    with pytest.raises(TypeError, match=message):
        jax.grad(saving)(x, w)


def _graph(**results: DTypeName) -> Graph:
    """Return the graph of a matmul, its tanh, and copies of the matmul's result."""

    def tensor(name: str, dtype: DTypeName) -> Tensor:
        return Tensor(name=name, dtype=dtype, dims=(1, 8, 8), order=(0, 1, 2))

    matmul = Node.make(
        "matmul", {"a": "a", "b": "b"}, {"output": "sums"}, MatmulAttributes()
    )
    elementwise = [
        Node.make(
            "pointwise",
            {"a": "sums"},
            {"output": name},
            PointwiseAttributes(mode="tanh" if name == "tanh" else "identity"),
        )
        for name in results
    ]
    made = [tensor(name, dtype) for name, dtype in results.items()]
    return Graph(
        tensors=(
            tensor("a", "bf16"),
            tensor("b", "bf16"),
            tensor("sums", "f32"),
            *made,
        ),
        nodes=(matmul, *elementwise),
        inputs=("a", "b"),
        outputs=tuple(results),
    )


@pytest.mark.parametrize(
    ("results", "saved"),
    [
        ({"tanh": "bf16"}, ("tanh",)),
        ({"tanh": "bf16", "copy": "bf16"}, ("copy",)),
        ({"tanh": "f32", "copy": "f32"}, ("copy",)),
        ({"tanh": "f16", "copy": "f32"}, ("copy",)),
        # A narrow copy does not have the digits of a wide result.
        ({"tanh": "f32", "copy": "bf16"}, ("tanh", "copy")),
        ({"tanh": "f32", "copy": "bf16", "wide": "f32"}, ("copy", "wide")),
        ({"tanh": "bf16", "copy": "f8_e4m3fn"}, ("tanh", "copy")),
    ],
)
def test_the_fewest_results_are_saved(
    results: dict[str, DTypeName], saved: tuple[str, ...]
) -> None:
    names, rest = saved_results(_graph(**results))
    assert names == saved
    others = tuple(name for name in results if name not in saved)
    assert (rest.outputs if rest else ()) == others
    assert rest is None or not any(map(is_anchor, rest.nodes))
