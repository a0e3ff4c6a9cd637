# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans attention's layouts, and fused q, k and v, as they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import plans, qkv_sdpa, sdpa
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import subprograms
from tests.common.gpuless import harness

_SIZES = {"b": 2, "s": 77, "h": 6, "d": 64, "3": 3}
_QKV: dict[str, dict[str, Any]] = {
    **{x: {"layout": x} for x in ("bs3hd", "bsh3d", "sb3hd", "sbh3d", "b3hsd")},
    **{
        f"{x} grouped": {"layout": x, "key_value_heads": 1}
        for x in ("bshd", "sbhd", "bhsd")
    },
    "full": {"layout": "bs3hd", "is_causal": False},
    "window": {"layout": "bsh3d", "local_window_size": (20, 0)},
    "lengths": {"layout": "sb3hd", "key_value_seq_lengths": jnp.array([50, 77])},
    "bias": {"layout": "bs3hd", "bias": jnp.zeros((2, 6, 77, 77), jnp.bfloat16)},
    "dropout": {
        "layout": "bs3hd",
        "dropout_rate": 0.5,
        "dropout_key": jax.random.key(3),
    },
    "head_24": {"layout": "bsh3d", "sizes": {"d": 24}},
    "head_128": {"layout": "bsh3d", "sizes": {"d": 128}},
}


def _graphs(function: Callable[..., Any], *operands: Any) -> list[Graph]:
    """Return the forward and the gradient graph of a call."""

    def run(*operands: Any) -> Any:
        output, pull = jax.vjp(function, *operands)
        return pull(output)

    jaxpr = jax.make_jaxpr(run)(*operands).jaxpr
    return [graph for graph, _, _ in subprograms(jaxpr)]


def _zeros(layout: str, **changed: int) -> jax.Array:
    sizes = {**_SIZES, **changed}
    return jnp.zeros([sizes[letter] for letter in layout], jnp.bfloat16)


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_one_array_is_read_and_written_in_place_by_the_plans_for_three(
    gpu: str,
) -> None:
    target = harness.target(gpu)
    texts: dict[tuple[str, int, bool], str] = {}
    for name, given in _QKV.items():
        options = {"is_causal": True, **given}
        x = _zeros(options["layout"], **options.pop("sizes", {}))

        def call(x: jax.Array, options: dict[str, Any] = options) -> jax.Array:
            return qkv_sdpa(x, **options)

        for i, graph in enumerate(_graphs(call, x)):
            in_place, copied, *_ = legalize(graph, target).candidates
            assert "qkv" in in_place.graph.inputs
            assert ("grad_qkv" in in_place.graph.outputs) == (i == 1)
            assert "query" in copied.graph.inputs
            texts[name, i, True] = to_json(in_place.graph)
            texts[name, i, False] = to_json(copied.graph)
    answers = harness.plan_all([*texts.values()], gpu, build=False)
    found = dict(zip(texts, answers, strict=True))
    for (name, i, is_in_place), answer in found.items():
        if is_in_place:
            plans, others = (
                [each["name"] for each in one.get("candidates", [])]
                for one in (answer, found[name, i, False])
            )
            assert plans, (name, answer)
            assert plans == others, name


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_every_layout_has_plans_without_a_transpose(layout: Any, gpu: str) -> None:
    query, key = _zeros(layout), _zeros(layout, s=90, h=2)

    def call(*operands: jax.Array) -> jax.Array:
        return sdpa(*operands, layout=layout, is_causal=True)

    for graph in _graphs(call, query, key, key):
        rewrite, *_ = legalize(graph, harness.target(gpu)).candidates
        for tensor in rewrite.graph.tensors:
            own = graph.tensor(tensor.name)
            assert (tensor.dims, tensor.order) == (own.dims, own.order)
        (answer,) = harness.plan_all([to_json(rewrite.graph)], gpu, build=False)
        assert answer.get("candidates"), answer


def test_plans_of_one_array_are_built_and_travel_in_files() -> None:
    graphs = _graphs(lambda x: qkv_sdpa(x, is_causal=True), _zeros("bs3hd"))
    texts = [
        to_json(legalize(each, harness.target("h200")).candidates[0].graph)
        for each in graphs
    ]
    for text, answer in zip(texts, harness.ship_all(texts, "h200"), strict=True):
        assert answer["graph"] == text, answer


def test_inspect_says_what_is_copied() -> None:
    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(qkv_sdpa(x).astype(jnp.float32)))(x)

    def reasons(d: int) -> list[str]:
        with plans.using(device="H200"):
            report = plans.inspect(gradient, _zeros("bs3hd", d=d))
        assert [call.implementation for call in report.calls] == ["cudnn", "cudnn"]
        return [" ".join(call.reasons) for call in report.calls]

    assert not any("qkv" in each for each in reasons(64))
    assert all("are copied out of qkv" in each for each in reasons(20))


@pytest.mark.parametrize(
    ("dims", "heads", "text"),
    [
        ([2, 6, 1, 77, 64], 1, "6 parts are not 1 for queries and as many for keys"),
        ([2, 4, 3, 77, 64], 6, "4 parts of 3 heads; cuDNN takes 3 parts, or parts of"),
    ],
)
def test_other_parts_are_refused(dims: list[int], heads: int, text: str) -> None:
    """Also where a text comes from elsewhere than Python's checks."""
    graph, _ = _graphs(lambda x: qkv_sdpa(x), _zeros("bs3hd"))
    json = to_json(legalize(graph, harness.target("h200")).candidates[0].graph)
    json = json.replace("[2,3,6,77,64]", str(dims).replace(" ", ""))
    json = json.replace("[2,6,77,64]", f"[2,{heads},77,64]")
    json = json.replace("[2,6,77,1]", f"[2,{heads},77,1]")
    (answer,) = harness.plan_all([json], "h200", build=False)
    assert text in str(answer), answer
